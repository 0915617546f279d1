//! The tests of the Python package: as a wheel on its own, its stubs, and what it does.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::Error;
use crate::places::Places;
use crate::python;
use crate::step;
use crate::wheel;

/// The module in Rust, whose stubs are written by hand.
const MODULE: &str = "weightsync._native";

/// Builds and installs the package, and tests it with the environment in `python`.
///
/// `timeout` is the limit of each test in seconds where it is not that of pyproject.toml. When a
/// test fails, pytest's summary is the last thing printed.
pub fn run(places: &Places, python: &Path, timeout: Option<u32>) -> Result<(), Error> {
    let wheel = wheel::build(places, python)?;
    wheel::test_alone(places, python, &wheel)?;
    let own = wheel::install_over(places, python, &wheel)?;
    step::run("stubs", &mut stubtest(places, &own))?;
    let mut tests = pytest(places, &own);
    if let Some(seconds) = timeout {
        // The one ends a test, the other the run, where a test cannot be ended.
        tests.arg(format!("--timeout={seconds}"));
        tests.arg(format!(
            "--override-ini=faulthandler_timeout={}",
            seconds + 60
        ));
    }
    step::run_reported("python tests", &mut tests).map(drop)
}

/// `cargo xtask pytest [ARGS]`: all of the above, or only the tests that the arguments ask for.
pub fn some(places: &Places, args: &[&str]) -> Result<(), Error> {
    if args.is_empty() {
        return run(places, &python::TESTS.provide(places)?, None);
    }
    let own = installed(places)?;
    step::run_last("python tests", pytest(places, &own).args(args))
}

/// The Python that sees the package, just built, and the packages ours is tested and compared with.
pub fn installed(places: &Places) -> Result<PathBuf, Error> {
    let python = python::TESTS.provide(places)?;
    let wheel = wheel::build(places, &python)?;
    wheel::install_over(places, &python, &wheel)
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

fn pytest(places: &Places, python: &Path) -> Command {
    let mut command = python::command(places, python);
    command
        // `-P`: what is tested is the wheel, not the sources beside the tests. Nothing is written
        // into the clone.
        .args(["-P", "-m", "pytest"])
        .env("PYTHONDONTWRITEBYTECODE", "1");
    command
}
