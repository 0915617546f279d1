//! Fuzzing of every decoder, as ordinary tests on stable Rust.
//!
//! Each target is a test in `tests/decoders/`. It feeds a decoder, for a few seconds,
//!
//! 1. the files of `fuzz/corpus/<target>/`, as they are: inputs that once broke something;
//! 2. valid encodings, changed in a few places ([`Mutation`]): random bytes alone would never get
//!    past the first magic number or length;
//! 3. random bytes.
//!
//! A decoder passes when it never panics, when what it allocates is bounded by the length of its
//! input and not by a length it read ([`Target::check`]), and when what it accepts satisfies the
//! target's own assertions.
//!
//! A failure prints the input in hex, shrunk, and the seed that leads to it. Put the bytes into
//! the corpus (`xxd -r -p`) together with the fix.
//!
//! Time per target: `WEIGHTSYNC_FUZZ_SECONDS`, else 1 s, times `WEIGHTSYNC_SOAK`, or a minute where
//! that is `full`. The targets are bolero's, so `cargo bolero test --package weightsync-fuzz <target>`
//! runs the same ones guided by coverage, where that is installed.

#![forbid(unsafe_code)]

mod mutation;
mod target;
mod time_box;

pub use mutation::{Mutation, Plan};
pub use target::{Input, Target};
pub use time_box::time_box;

#[doc(hidden)]
pub use bolero;

/// Runs a fuzz target: a name, valid encodings to start from, and what must hold of any bytes.
///
/// ```no_run
/// use weightsync_fuzz::fuzz;
///
/// // A length, then as many bytes.
/// let valid = [vec![0], vec![2, 7, 7]];
/// fuzz!("lengths", valid, |bytes: &[u8]| {
///     if let Some((len, rest)) = bytes.split_first() {
///         let _ = rest.get(..usize::from(*len));
///     }
/// });
/// ```
///
/// # Panics
/// If the target fails: that is how a test says so.
#[macro_export]
macro_rules! fuzz {
    ($name:expr, $seeds:expr, $check:expr) => {{
        let target = $crate::Target::new(
            concat!(env!("CARGO_MANIFEST_DIR"), "/corpus"),
            $name,
            $seeds,
        );
        let check = $check;
        target.replay(&check);
        // In the test's own body, so that bolero finds the target by the test's name.
        $crate::bolero::check!()
            .with_test_time($crate::time_box())
            .with_generator($crate::bolero::produce::<$crate::Plan>())
            .map(|plan| target.input(&plan))
            .for_each(|input: &$crate::Input| $crate::Target::check(input, &check));
    }};
}
