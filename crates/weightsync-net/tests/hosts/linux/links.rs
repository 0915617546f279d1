//! Links that are cut, silent or slow.
pub(crate) const TESTS: &[(&str, fn())] = &[];
