//! The tests of the Python package: as a wheel on its own, its stubs, and what it does.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::Error;
use crate::frameworks::{self, Framework};
use crate::places::Places;
use crate::python;
use crate::report::{Report, Runner};
use crate::step;
use crate::test::{self, OBJECTS_PYTHON};
use crate::tools;
use crate::wheel::{self, Profile};

/// The module in Rust, whose stubs are written by hand.
const MODULE: &str = "weightsync._native";

/// Four processes run the tests: most of them wait for processes that they start. A process takes
/// tests that no other has begun, and tests that share a fixture of their file stay together.
const SIDE_BY_SIDE: &[&str] = &["--numprocesses=4", "--dist=loadscope"];

/// Everything but TorchRL's own schemes.
const WITH_SOAKS: [&str; 2] = ["-m", "not peers"];

/// Builds and installs the package, and tests it with the environment of the tests.
///
/// `timeout` is the limit of each test in seconds where it is not that of pyproject.toml. `is_whole`:
/// with what is else left to soaks.
pub fn all(places: &Places, report: &mut Report, timeout: Option<u32>, is_whole: bool) {
    let alone = "cargo xtask test python";
    let built = report.step("wheel", alone, || {
        let python = python::TESTS.provide(places)?;
        let wheel = wheel::build(places, &python, Profile::Tests)?;
        let own = wheel::install_over(places, &python, "tests", &wheel)?;
        Ok((python, wheel, own))
    });
    let Some((python, wheel, own)) = built else {
        report.not_run("python", alone, "there is no wheel");
        return;
    };
    report.step("wheel alone", alone, || {
        wheel::test_alone(places, &python, &wheel)
    });
    report.step("stubs", alone, || {
        step::run("stubs", &mut stubtest(places, &own))
    });
    match command(places, &own) {
        Ok(tests) => {
            let mut tests = timed(tests, timeout);
            tests.args(SIDE_BY_SIDE);
            if is_whole {
                tests.args(WITH_SOAKS);
            }
            let runner = Runner::Pytest { with: None };
            report.tests(places, "python", alone, runner, &mut tests);
        }
        Err(error) => report.not_run("python", alone, &error.to_string()),
    }
}

fn timed(mut tests: Command, timeout: Option<u32>) -> Command {
    if let Some(seconds) = timeout {
        // The one ends a test, the other the run, where a test cannot be ended.
        tests.arg(format!("--timeout={seconds}"));
        tests.arg(format!(
            "--override-ini=faulthandler_timeout={}",
            seconds + 60
        ));
    }
    tests
}

/// `cargo xtask pytest [--with FRAMEWORK] [ARGS]`: all of the above, or only the tests that the
/// arguments ask for, with the environment of the tests or with that of a framework.
pub fn some(places: &Places, args: &[&str]) -> Result<(), Error> {
    match args {
        [] => test::run(places, &["python"]),
        ["--with", name, rest @ ..] => {
            let one = frameworks::named(name)?;
            let own = installed_for(places, one, Profile::Tests)?;
            let mut tests = command(places, &own)?;
            let chosen: Vec<String> = match rest.is_empty() {
                true => one.arguments(),
                false => rest.iter().map(|arg| (*arg).to_owned()).collect(),
            };
            step::run_tests(one.name, tests.args(chosen)).0.map(drop)
        }
        chosen => {
            // Most tests do without. The others say so themselves.
            for package in [tools::IPROUTE, tools::CHROMIUM] {
                if let Err(error) = package.provide() {
                    eprintln!("warning: {error}");
                }
            }
            let own = installed(places, Profile::Tests)?;
            let mut tests = command(places, &own)?;
            if test::is_soak()? && !chosen.contains(&"-m") {
                tests.args(WITH_SOAKS);
            }
            step::run_tests("python", tests.args(chosen)).0.map(drop)
        }
    }
}

/// The Python that sees the package, just built, and the packages ours is tested and compared with.
pub fn installed(places: &Places, profile: Profile) -> Result<PathBuf, Error> {
    let python = python::TESTS.provide(places)?;
    let wheel = wheel::build(places, &python, profile)?;
    wheel::install_over(places, &python, "tests", &wheel)
}

/// The Python that sees the package, just built, and a framework.
pub fn installed_for(
    places: &Places,
    framework: &Framework,
    profile: Profile,
) -> Result<PathBuf, Error> {
    let wheel = wheel::build(places, &python::TESTS.provide(places)?, profile)?;
    framework.installed(places, &wheel)
}

/// Holds the stubs against the module. What it reads is configured in pyproject.toml.
fn stubtest(places: &Places, python: &Path) -> Command {
    let mut command = python::command(places, python);
    command
        .args(["-P", "-m", "mypy.stubtest", MODULE])
        .args(["--mypy-config-file", "pyproject.toml"])
        .env("MYPY_CACHE_DIR", places.target().join("mypy"));
    command
}

/// pytest, with what the tests find by variables.
pub fn command(places: &Places, python: &Path) -> Result<Command, Error> {
    let mut command = python::command(places, python);
    command
        // `-P`: what is tested is the wheel, not the sources next to the tests. Nothing is written
        // into the clone.
        .args(["-P", "-m", "pytest"])
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env(OBJECTS_PYTHON, python::OBJECTS.provide(places)?);
    Ok(command)
}
