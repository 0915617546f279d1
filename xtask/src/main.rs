//! `cargo xtask test | ci | pytest | nextest | wheel | arrows | soak | bench`: what a contributor and the
//! CI run.
//!
//! The module order is the order in which a run uses them: [`places`] says where build output and
//! tools live, [`tools`] provides the tools, [`python`] the environment of the Python tests and
//! [`data`] what benchmarks measure, [`step`] runs one command, [`orphans`] ends what tests leave
//! behind, [`report`] says what a run did, [`wheel`] builds and installs the Python package, and the commands themselves are [`mod@test`], [`ci`], [`pytest`],
//! [`frameworks`], [`platforms`], [`arrows`] and [`bench`], whose figures [`rows`] writes down.

#![forbid(unsafe_code)]

mod arrows;
mod bench;
mod ci;
mod data;
mod error;
mod frameworks;
mod marks;
mod orphans;
mod places;
mod platforms;
mod pytest;
mod python;
mod report;
mod rows;
mod step;
mod test;
mod tools;
mod wheel;

use std::io::Write as _;
use std::process::ExitCode;

use error::Error;
use places::Places;

const USAGE: &str = "\
usage: cargo xtask <command>

  test [PARTS]                    every test, with what the tests need set up first, or some parts:
                                  doc, loom, python, rust
  test quick                      the tests for daily work, in a minute once they are built
  test frameworks [NAMES]         the package with other frameworks: oldest-torch, torchrl, ray,
                                  vllm, trl, verl, sglang (some 18 GB of disk in all)
  test platforms [NAMES]          what can be shown of other machines here: aarch64, macos
  ci [--all]                      every check, then every test; the frameworks and platforms that
                                  something has changed for, or all of them and the soaks
  ci CHECKS                       some checks: fmt, arrows, deny, clippy, docs
  pytest [--with FRAMEWORK] [ARGS]  every test of the Python package, or those that ARGS ask for
  nextest [ARGS]                  the Rust tests that ARGS ask for
  wheel                           the Python package, built as its users get it
  arrows                          the crate graph, held against the design's table
  soak [--hours N]                trainer, relay and workers for N hours: nothing they have may grow
  bench GROUP [--json] [--plot]   one group of benchmarks
  bench rows --on MACHINE FILE... what `bench GROUP --json` printed into GROUP.json, as the tables of
                                  docs/performance-rows.md

environment:
  WEIGHTSYNC_SOAK    how long the long tests run: a factor such as 0.1 or 3, or `full`. Above 1,
                     tests run too that are left to soaks
  CARGO_TARGET_DIR   build output; unset, a cache outside the clone is used";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            match &error {
                Error::Usage(text) => eprintln!("{text}"),
                // nextest has already said what failed, and its summary is the run's last word.
                error if error.is_reported() => {}
                error => eprintln!("error: {error}"),
            }
            ExitCode::from(error.exit_code())
        }
    }
}

fn help() -> Result<(), Error> {
    // Where nobody reads it to its end, as in `… --help | head`, the rest is left out.
    let _ = writeln!(
        std::io::stdout(),
        "{USAGE}\n\nbench groups:\n{}",
        bench::listing()
    );
    Ok(())
}

fn run(args: &[&str]) -> Result<(), Error> {
    let own = !matches!(args, ["nextest" | "pytest", ..]);
    if own && args.iter().any(|arg| matches!(*arg, "--help" | "-h")) {
        return help();
    }
    match args {
        ["test", "quick"] => test::quick(&Places::open()?),
        ["test", "frameworks", names @ ..] => frameworks::run(&Places::open()?, names),
        ["test", "platforms", names @ ..] => platforms::run(&Places::open()?, names),
        ["test", names @ ..] => test::run(&Places::open()?, names),
        ["ci", args @ ..] => ci::run(&Places::open()?, args),
        ["nextest", rest @ ..] => test::some(&Places::open()?, rest),
        ["arrows"] => arrows::run(&Places::open()?).map(drop),
        ["pytest", rest @ ..] => pytest::some(&Places::open()?, rest),
        ["wheel"] => wheel::run(&Places::open()?),
        ["soak", rest @ ..] => bench::soak(&Places::open()?, rest),
        ["bench", "rows", rest @ ..] => rows::run(&Places::open()?, rest),
        ["bench", rest @ ..] => bench::run(&Places::open()?, rest),
        ["help"] => help(),
        [] => Err(Error::Usage(USAGE.into())),
        [other, ..] => Err(Error::Usage(format!("cannot run `{other}`\n\n{USAGE}"))),
    }
}
