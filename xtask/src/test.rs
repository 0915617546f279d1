//! `cargo xtask test`: every test of what the README promises, with what the tests need set up first.
//!
//! Doc tests, then the loom models of the shared-memory protocol, then the Python package, as a
//! wheel that was just built, then everything else under nextest: unit and integration tests and
//! the fuzz targets, each in its own process with its own time limit. Every part runs, also where
//! one before it failed. The tests with other frameworks and for other platforms have commands of
//! their own ([`frameworks`](crate::frameworks), [`platforms`](crate::platforms)).

use std::ffi::OsString;
use std::fmt;
use std::process::Command;

use crate::error::Error;
use crate::places::Places;
use crate::pytest;
use crate::python;
use crate::report::{Report, Runner};
use crate::step;
use crate::tools;

/// The variable that says how long the long tests run. The tests read it themselves.
const SOAK: &str = "WEIGHTSYNC_SOAK";

/// The variable that has a test try all that it can, where it tries a part every day.
const WHOLE: &str = "WEIGHTSYNC_WHOLE";

/// The variable that says which Python has what [`python::OBJECTS`] has.
pub const OBJECTS_PYTHON: &str = "WEIGHTSYNC_OBJECTS_PYTHON";

/// The variable that says which Python has Gymnasium.
const GYM_PYTHON: &str = "WEIGHTSYNC_GYM_PYTHON";

/// The crate whose protocol is modelled in loom.
const LOOM_PACKAGE: &str = "weightsync-mem";

/// What a change is tested with while it is being made: unit tests, the tests of the library's
/// interface, of the shared memory and of the frames, and the conformance suite by shared memory. What
/// takes ten seconds is left out.
const QUICK: &str = "(kind(lib) | kind(bin) | binary(api) | binary(segment) | binary(wire) \
                     | binary(worker) | (package(weightsync-conformance) & test(/^shared-mem::/))) \
                     - test(/::(every_order_of_events|every_schedule)_ends_|stopped_worker/) \
                     - (package(weightsync-rl) & test(/training_repeats|cut_episode|values_become/)) \
                     - test(/writer_survives|out_of_files|folded_deltas|makes_the_new_of|was_damaged/)";

/// The targets that [`QUICK`] needs: the others are not built.
const QUICK_TARGETS: &str = "--lib --bins --test api --test segment --test wire --test worker \
                             --test conformance";

/// A part of the tests, which runs alone by its name.
struct Part {
    name: &'static str,
    run: fn(&Places, &mut Report, Extent) -> Result<(), Error>,
}

const PARTS: &[Part] = &[
    Part {
        name: "doc",
        run: doc,
    },
    Part {
        name: "loom",
        run: loom,
    },
    Part {
        name: "python",
        run: python_package,
    },
    Part {
        name: "rust",
        run: rust,
    },
];

/// Runs every part, or those with these names.
pub fn run(places: &Places, names: &[&str]) -> Result<(), Error> {
    if names.is_empty() {
        provide(places)?;
    }
    let mut report = Report::begin();
    parts(places, &mut report, names, false)?;
    report.end()
}

/// The same, as steps of a longer run; with `all`, also what is else left to soaks.
///
/// # Errors
///
/// What the machine lacks ([`provide`] looks before anything runs), or a name that no part has. A part
/// that fails is noted in the report.
pub fn parts(places: &Places, report: &mut Report, names: &[&str], all: bool) -> Result<(), Error> {
    let known: Vec<&str> = PARTS.iter().map(|part| part.name).collect();
    if let Some(unknown) = names.iter().find(|name| !known.contains(name)) {
        return Err(Error::Usage(format!(
            "there is no part `{unknown}` of the tests: expected `quick`, `frameworks`, \
             `platforms`, or some of {}",
            known.join(", ")
        )));
    }
    let soak = Soak::parse(std::env::var_os(SOAK))?;
    eprintln!("rustc {}, {SOAK}: {soak}", places.rustc().release);
    eprintln!("build output: {}", places.target().display());
    if names.is_empty() {
        eprintln!(
            "this runs the doc tests, loom, the Python tests, then every other Rust test. README.md \
             says how long that takes. `cargo xtask test quick` takes a minute once it is built"
        );
    }
    for part in PARTS {
        if names.is_empty() || names.contains(&part.name) {
            (part.run)(places, report, Extent { soak, all })?;
        }
    }
    Ok(())
}

/// Installs what the tests need, so that what is missing costs seconds and not the tests before it.
pub fn provide(places: &Places) -> Result<(), Error> {
    tools::NEXTEST.provide(places)?;
    if cfg!(target_os = "linux") {
        tools::IPROUTE.provide()?;
        tools::CHROMIUM.provide()?;
    }
    python::TESTS.provide(places)?;
    python::OBJECTS.provide(places).map(drop)
}

fn doc(places: &Places, report: &mut Report, _: Extent) -> Result<(), Error> {
    report.step("doc tests", "cargo xtask test doc", || {
        let mut doc = places.cargo();
        doc.args("test --workspace --all-features --doc --quiet".split(' '));
        step::run("doc tests", &mut doc)
    });
    Ok(())
}

/// The models of the shared-memory protocol.
///
/// Integration tests use what loom does not model, hence the library's own tests only. Models that
/// went missing would pass silently, so nextest is told to fail where it finds none.
fn loom(places: &Places, report: &mut Report, _: Extent) -> Result<(), Error> {
    let nextest = tools::NEXTEST.provide(places)?;
    report.step("loom", "cargo xtask test loom", || {
        let mut command = places.command(&nextest);
        command
            .args("nextest run --lib --profile loom --cargo-profile release".split(' '))
            .args(["--no-tests=fail", "--package", LOOM_PACKAGE])
            .args(["--filterset", "test(loom)"]);
        step::run("loom", places.with_cfg(&mut command, "loom"))
    });
    Ok(())
}

fn python_package(places: &Places, report: &mut Report, extent: Extent) -> Result<(), Error> {
    provide(places)?;
    pytest::all(
        places,
        report,
        extent.soak.pytest_timeout(),
        extent.is_whole(),
    );
    Ok(())
}

fn rust(places: &Places, report: &mut Report, extent: Extent) -> Result<(), Error> {
    provide(places)?;
    let profile = extent.soak.nextest_profile();
    let mut tests = nextest(places, profile)?;
    tests.args(["--workspace", "--exclude", "weightsync-python"]);
    if extent.is_whole() {
        tests.arg("--ignore-default-filter").env(WHOLE, "1");
    }
    let runner = Runner::Nextest { profile };
    report.tests(places, "rust", "cargo xtask test rust", runner, &mut tests);
    Ok(())
}

/// nextest, with what the tests find by variables.
fn nextest(places: &Places, profile: &str) -> Result<Command, Error> {
    let nextest = tools::NEXTEST.provide(places)?;
    let mut tests = places.command(&nextest);
    tests
        .args("nextest run --all-features --no-tests=fail --profile".split(' '))
        .arg(profile)
        .env(OBJECTS_PYTHON, python::OBJECTS.provide(places)?)
        .env(GYM_PYTHON, python::TESTS.provide(places)?);
    Ok(tests)
}

/// `cargo xtask nextest ARGS`: the Rust tests that the arguments ask for.
pub fn some(places: &Places, args: &[&str]) -> Result<(), Error> {
    let soak = Soak::parse(std::env::var_os(SOAK))?;
    let mut tests = nextest(places, soak.nextest_profile())?;
    if name_tests(args) {
        // A test that is named runs, also where it is left to soaks.
        tests.arg("--ignore-default-filter");
    }
    if !args.iter().any(|arg| ["-p", "--package"].contains(arg)) {
        tests.args(["--workspace", "--exclude", "weightsync-python"]);
    }
    step::run_tests("rust", tests.args(args)).0.map(drop)
}

/// Whether the arguments have a filter, or begin with the name of a test.
fn name_tests(args: &[&str]) -> bool {
    args.first().is_some_and(|arg| !arg.starts_with('-'))
        || args
            .iter()
            .any(|arg| arg.starts_with("-E") || arg.starts_with("--filterset"))
}

/// Runs the tests for daily work; see [`QUICK`].
pub fn quick(places: &Places) -> Result<(), Error> {
    eprintln!(
        "this runs unit tests, the library's interface, shared memory and the conformance suite \
         by shared memory: a minute on 2 quiet cores, and some more where all is built first. It \
         leaves out Python, loom, doc tests, hosts, soaks, fuzzing and every other scheme: `cargo \
         xtask test` runs them"
    );
    let nextest = tools::NEXTEST.provide(places)?;
    let mut tests = places.command(&nextest);
    tests
        .args("nextest run --workspace --all-features --no-tests=fail".split(' '))
        .args(QUICK_TARGETS.split_whitespace())
        .args(["--filterset", QUICK]);
    step::run_tests("quick tests", &mut tests).0.map(drop)
}

/// How much is tested.
#[derive(Debug, Clone, Copy)]
struct Extent {
    soak: Soak,
    all: bool,
}

/// Whether the environment asks for what is else left to soaks.
pub fn is_soak() -> Result<bool, Error> {
    let soak = Soak::parse(std::env::var_os(SOAK))?;
    Ok(Extent { soak, all: false }.is_whole())
}

impl Extent {
    /// Whether nothing is left to soaks.
    fn is_whole(self) -> bool {
        self.all || self.soak.nextest_profile() == "soak"
    }
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
