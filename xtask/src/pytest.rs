//! The tests of the Python package: as a wheel on its own, its stubs, and what it does.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::Error;
use crate::frameworks;
use crate::places::Places;
use crate::python;
use crate::step;
use crate::test::OBJECTS_PYTHON;
use crate::tools;
use crate::wheel;

/// The module in Rust, whose stubs are written by hand.
const MODULE: &str = "weightsync._native";

/// What runs with the oldest torch as well: sending from and loading into modules, tensors of every
/// dtype, threads that share a module, and the guard, without torch's own compiler of code.
const WITH_OLDEST: &[&str] = &[
    "python/tests/core/test_background.py",
    "python/tests/core/test_compile.py",
    "python/tests/core/test_dtypes.py",
    "python/tests/core/test_modules.py",
    "python/tests/core/test_readers.py",
    "-k",
    "not inductor",
];

/// Four processes run the tests: most of them wait for processes that they start. A process takes
/// tests that no other has begun, and tests that share a fixture of their file stay together.
const SIDE_BY_SIDE: &[&str] = &["--numprocesses=4", "--dist=loadscope"];

/// An engine takes a core and some gigabytes of memory.
const ENGINES_SIDE_BY_SIDE: &[&str] = &["--numprocesses=2", "--dist=loadscope"];

/// The tests with vLLM's engines, which run in an environment of their own.
const WITH_VLLM: &str = "python/tests/vllm_engines";

/// Builds and installs the package, and tests it with the environment in `python`, a part of it
/// with the one in `oldest`, and its engines with the one in `vllm`.
///
/// `timeout` is the limit of each test in seconds where it is not that of pyproject.toml. When a
/// test fails, pytest's summary is the last thing printed.
pub fn run(
    places: &Places,
    python: &Path,
    oldest: &Path,
    vllm: &Path,
    timeout: Option<u32>,
) -> Result<(), Error> {
    let wheel = wheel::build(places, python)?;
    wheel::test_alone(places, python, &wheel)?;
    let own = wheel::install_over(places, python, "tests", &wheel)?;
    step::run("stubs", &mut stubtest(places, &own))?;
    let oldest = wheel::install_over(places, oldest, "oldest", &wheel)?;
    let mut with_oldest = timed(command(places, &oldest)?, timeout);
    step::run_reported("the oldest torch", with_oldest.args(WITH_OLDEST))?;
    let vllm = wheel::install_over(places, vllm, "vllm", &wheel)?;
    let mut with_vllm = timed(command(places, &vllm)?, timeout);
    step::run_reported("vLLM", with_vllm.args(ENGINES_SIDE_BY_SIDE).arg(WITH_VLLM))?;
    frameworks::changed(places, &wheel)?;
    let mut tests = timed(command(places, &own)?, timeout);
    step::run_reported("python tests", tests.args(SIDE_BY_SIDE)).map(drop)
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

/// `cargo xtask pytest [ARGS]`: all of the above, or only the tests that the arguments ask for; after
/// `--oldest` with the oldest torch, after `--vllm` with vLLM.
pub fn some(places: &Places, args: &[&str]) -> Result<(), Error> {
    match args {
        [] => {
            tools::IPROUTE.provide()?;
            tools::CHROMIUM.provide()?;
            let python = python::TESTS.provide(places)?;
            let oldest = python::OLDEST.provide(places)?;
            run(
                places,
                &python,
                &oldest,
                &python::VLLM.provide(places)?,
                None,
            )
        }
        ["--oldest", rest @ ..] => {
            let wheel = wheel::build(places, &python::TESTS.provide(places)?)?;
            let oldest = python::OLDEST.provide(places)?;
            let own = wheel::install_over(places, &oldest, "oldest", &wheel)?;
            let chosen = if rest.is_empty() { WITH_OLDEST } else { rest };
            step::run_last("the oldest torch", command(places, &own)?.args(chosen))
        }
        ["--vllm", rest @ ..] => {
            let own = installed_for_vllm(places)?;
            let chosen = if rest.is_empty() { &[WITH_VLLM] } else { rest };
            step::run_last("vLLM", command(places, &own)?.args(chosen))
        }
        chosen => {
            // Most tests do without. The others say so themselves.
            for package in [tools::IPROUTE, tools::CHROMIUM] {
                if let Err(error) = package.provide() {
                    eprintln!("warning: {error}");
                }
            }
            let own = installed(places)?;
            step::run_last("python tests", command(places, &own)?.args(chosen))
        }
    }
}

/// The Python that sees the package, just built, and the packages ours is tested and compared with.
pub fn installed(places: &Places) -> Result<PathBuf, Error> {
    let python = python::TESTS.provide(places)?;
    let wheel = wheel::build(places, &python)?;
    wheel::install_over(places, &python, "tests", &wheel)
}

/// The Python that sees the package, just built, and vLLM.
pub fn installed_for_vllm(places: &Places) -> Result<PathBuf, Error> {
    let wheel = wheel::build(places, &python::TESTS.provide(places)?)?;
    wheel::install_over(places, &python::VLLM.provide(places)?, "vllm", &wheel)
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
