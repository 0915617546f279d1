//! Killed processes: each is named within a second, everybody else is up to date, and
//! who is started again catches up by itself.
pub(crate) const TESTS: &[(&str, fn())] = &[];
