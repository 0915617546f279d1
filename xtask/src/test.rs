//! `cargo xtask test`: every test, with what the tests need set up first.
//!
//! Doc tests, then the loom models of the shared-memory protocol, then the Python package, as a
//! wheel that was just built, then everything else under nextest: unit and integration tests and
//! the fuzz targets, each in its own process with its own time limit. nextest comes last, and its
//! summary ends the run, but for how long the run took.

use std::ffi::OsString;
use std::fmt;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use crate::error::Error;
use crate::places::Places;
use crate::platforms;
use crate::pytest;
use crate::python;
use crate::step;
use crate::tools;

/// The variable that says how long the long tests run. The tests read it themselves.
const SOAK: &str = "WEIGHTSYNC_SOAK";

/// The variable that says which Python has what [`python::OBJECTS`] has.
pub const OBJECTS_PYTHON: &str = "WEIGHTSYNC_OBJECTS_PYTHON";

/// The variable that says which Python has Gymnasium.
const GYM_PYTHON: &str = "WEIGHTSYNC_GYM_PYTHON";

/// The crate whose protocol is modelled in loom.
const LOOM_PACKAGE: &str = "weightsync-mem";

/// The tests are built with the development profile's assertions and overflow checks, but optimised
/// a little: the fuzz targets try sixty times as many inputs, and training in tests ends in seconds.
pub const OPT_LEVEL: (&str, &str) = ("CARGO_PROFILE_DEV_OPT_LEVEL", "1");

/// What a change is tested with while it is being made: unit tests, the tests of the library's
/// interface, of the shared memory and of the frames, and the conformance suite by shared memory.
const QUICK: &str = "kind(lib) | kind(bin) | binary(api) | binary(segment) | binary(wire) \
                     | binary(worker) | (package(weightsync-conformance) & test(/^shared-mem::/))";

/// The targets that [`QUICK`] needs: the others are not built.
const QUICK_TARGETS: &str = "--lib --bins --test api --test segment --test wire --test worker \
                             --test conformance";

/// Runs every test.
pub fn run(places: &Places) -> Result<(), Error> {
    let begun = Instant::now();
    let soak = Soak::parse(std::env::var_os(SOAK))?;
    eprintln!("rustc {}, {SOAK}: {soak}", places.rustc().release);
    eprintln!("build output: {}", places.target().display());
    eprintln!(
        "this runs the doc tests, loom, the Python tests (with the newest and the oldest torch, \
         and with vLLM), then every other Rust test: some 15 minutes on 2 quiet cores. The first \
         run also builds everything and installs some 10 GB of Python packages, which may take \
         longer than the tests. `cargo xtask test quick` takes a minute once it is built"
    );
    let nextest = tools::NEXTEST.provide(places)?;
    if cfg!(target_os = "linux") {
        tools::IPROUTE.provide()?;
        tools::CHROMIUM.provide()?;
    }
    let python = python::TESTS.provide(places)?;
    let oldest = python::OLDEST.provide(places)?;
    let vllm = python::VLLM.provide(places)?;
    let objects = python::OBJECTS.provide(places)?;

    let (level, value) = OPT_LEVEL;
    let mut doc = places.cargo();
    doc.args("test --workspace --all-features --doc --quiet".split(' '))
        .env(level, value);
    step::run("doc tests", &mut doc)?;

    platforms::changed(places)?;

    step::run("loom", &mut loom(places, &nextest))?;

    pytest::run(places, &python, &oldest, &vllm, soak.pytest_timeout())?;

    let mut tests = places.command(&nextest);
    tests
        .args("nextest run --workspace --all-features --no-tests=fail".split(' '))
        .args(["--profile", soak.nextest_profile()])
        .env(OBJECTS_PYTHON, objects)
        .env(GYM_PYTHON, python)
        .env(level, value);
    step::run_reported("tests", &mut tests)?;
    step::end("everything", begun.elapsed());
    Ok(())
}

/// Runs the tests for daily work; see [`QUICK`].
pub fn quick(places: &Places) -> Result<(), Error> {
    eprintln!(
        "this runs unit tests, the library's interface, shared memory and the conformance suite \
         by shared memory: a minute on 2 quiet cores, and some 10 more where all is built \
         first. It leaves out Python, loom, doc tests, hosts, soaks, fuzzing and every other \
         scheme: `cargo xtask test` runs them"
    );
    let nextest = tools::NEXTEST.provide(places)?;
    let (level, value) = OPT_LEVEL;
    let mut tests = places.command(&nextest);
    tests
        .args("nextest run --workspace --all-features --no-tests=fail".split(' '))
        .args(QUICK_TARGETS.split_whitespace())
        .args(["--filterset", QUICK])
        .env(level, value);
    step::run_reported("quick tests", &mut tests).map(drop)
}

/// The models of the shared-memory protocol.
///
/// Integration tests use what loom does not model, hence the library's own tests only. Models that
/// went missing would pass silently, so nextest is told to fail where it finds none.
fn loom(places: &Places, nextest: &Path) -> Command {
    let mut command = places.command(nextest);
    command
        .args("nextest run --lib --profile loom --cargo-profile release --no-tests=fail".split(' '))
        .args(["--package", LOOM_PACKAGE, "--filterset", "test(loom)"]);
    places.with_cfg(&mut command, "loom");
    command
}

/// How long the long tests run.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Soak {
    /// Not set: the length the tests choose for every day.
    Daily,
    /// A multiple of the daily length.
    Factor(f64),
    /// The full counts the issues name.
    Full,
}

impl Soak {
    fn parse(value: Option<OsString>) -> Result<Self, Error> {
        let Some(value) = value.filter(|value| !value.is_empty()) else {
            return Ok(Soak::Daily);
        };
        match value.to_str() {
            Some("full") => Ok(Soak::Full),
            text => text
                .and_then(|text| text.parse().ok())
                .filter(|factor: &f64| factor.is_finite() && *factor > 0.0)
                .map(Soak::Factor)
                .ok_or_else(|| Error::Soak {
                    got: value.display().to_string(),
                }),
        }
    }

    /// Longer runs get longer time limits; a hang is still found.
    fn nextest_profile(self) -> &'static str {
        match self {
            Soak::Daily => "default",
            Soak::Factor(factor) if factor <= 1.0 => "default",
            Soak::Factor(_) | Soak::Full => "soak",
        }
    }

    /// The same, in seconds for each Python test; none where it is that of pyproject.toml.
    fn pytest_timeout(self) -> Option<u32> {
        (self.nextest_profile() == "soak").then_some(60 * 60)
    }
}

impl fmt::Display for Soak {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Soak::Daily => f.write_str("not set (every-day lengths)"),
            Soak::Factor(factor) => write!(f, "{factor}"),
            Soak::Full => f.write_str("full"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn soak_is_a_factor_or_full() {
        let cases = [
            (None, Ok((Soak::Daily, "default"))),
            (Some(""), Ok((Soak::Daily, "default"))),
            (Some("0.1"), Ok((Soak::Factor(0.1), "default"))),
            (Some("1"), Ok((Soak::Factor(1.0), "default"))),
            (Some("2.5"), Ok((Soak::Factor(2.5), "soak"))),
            (Some("full"), Ok((Soak::Full, "soak"))),
            (Some("0"), Err(())),
            (Some("-1"), Err(())),
            (Some("inf"), Err(())),
            (Some("NaN"), Err(())),
            (Some("Full"), Err(())),
            (Some("long"), Err(())),
        ];
        for (value, expected) in cases {
            let got = Soak::parse(value.map(OsString::from))
                .map(|soak| (soak, soak.nextest_profile()))
                .map_err(drop);
            assert_eq!(got, expected, "{value:?}");
        }
    }

    #[test]
    fn a_wrong_soak_says_what_is_expected() {
        let error = Soak::parse(Some("long".into())).expect_err("not a factor");
        assert!(error.to_string().contains("`long`"), "{error}");
    }
}
