//! `cargo xtask ci`: every check, then every test.

use crate::arrows;
use crate::error::Error;
use crate::frameworks;
use crate::places::Places;
use crate::platforms;
use crate::report::Report;
use crate::step;
use crate::test;
use crate::tools;

/// A check, which runs alone by its name.
struct Check {
    name: &'static str,
    run: fn(&Places) -> Result<(), Error>,
}

/// In the order in which they fail fastest.
const CHECKS: &[Check] = &[
    Check {
        name: "fmt",
        run: fmt,
    },
    Check {
        name: "arrows",
        run: |places| arrows::run(places).map(drop),
    },
    Check {
        name: "deny",
        run: deny,
    },
    Check {
        name: "clippy",
        run: clippy,
    },
    Check {
        name: "docs",
        run: docs,
    },
];

/// Runs the checks, then the tests; those with other frameworks and for other platforms where
/// something has changed for them. With `--all`: all of them, and what is else left to soaks. With
/// names: these checks alone.
///
/// Everything that is needed is looked for before the first check runs, so a missing component
/// costs seconds and not the time of the checks before it.
pub fn run(places: &Places, args: &[&str]) -> Result<(), Error> {
    let known: Vec<&str> = CHECKS.iter().map(|check| check.name).collect();
    let names: Vec<&str> = args.iter().copied().filter(|arg| *arg != "--all").collect();
    if let Some(unknown) = names.iter().find(|name| !known.contains(name)) {
        return Err(Error::Usage(format!(
            "there is no check `{unknown}`: expected `--all`, or some of {}",
            known.join(", ")
        )));
    }
    tools::component(places, "fmt", "rustfmt")?;
    tools::component(places, "clippy", "clippy")?;
    tools::DENY.provide(places)?;
    if names.is_empty() {
        test::provide(places)?;
    }
    let mut report = Report::begin();
    for check in CHECKS {
        if names.is_empty() || names.contains(&check.name) {
            let alone = format!("cargo xtask ci {}", check.name);
            report.step(check.name, &alone, || (check.run)(places));
        }
    }
    if names.is_empty() {
        let all = args.contains(&"--all");
        let (frameworks, platforms) = match all {
            true => (frameworks::all as Steps, platforms::all as Steps),
            false => (frameworks::changed as Steps, platforms::changed as Steps),
        };
        platforms(places, &mut report)?;
        frameworks(places, &mut report)?;
        test::parts(places, &mut report, &[], all)?;
    }
    report.end()
}

type Steps = fn(&Places, &mut Report) -> Result<(), Error>;

fn fmt(places: &Places) -> Result<(), Error> {
    let mut fmt = places.cargo();
    fmt.args(["fmt", "--all", "--check"]);
    step::run("fmt", &mut fmt).map(drop)
}

fn clippy(places: &Places) -> Result<(), Error> {
    // `--locked`: a lock file that was not committed fails here rather than being generated again.
    // `cargo run -- demo` builds the command with its default features only.
    for what in [
        "--workspace --all-features --all-targets",
        "--package weightsync-cli",
    ] {
        let mut clippy = places.cargo();
        clippy
            .args("clippy --locked --quiet".split(' '))
            .args(what.split(' '))
            .args(["--", "-D", "warnings"]);
        step::run("clippy", &mut clippy)?;
    }
    Ok(())
}

/// Libraries only: the command is called `weightsync` like the library, and their pages would
/// overwrite each other. Broken links are among the warnings.
fn docs(places: &Places) -> Result<(), Error> {
    let mut docs = places.cargo();
    docs.args("doc --workspace --all-features --lib --no-deps --quiet".split(' '))
        .env("RUSTDOCFLAGS", "-D warnings");
    step::run("docs", &mut docs).map(drop)
}

/// Advisories are left out: their database is not in the registry.
fn deny(places: &Places) -> Result<(), Error> {
    let deny = tools::DENY.provide(places)?;
    let mut check = places.command(&deny);
    check
        .args("--workspace --all-features check --hide-inclusion-graph".split(' '))
        .args(["bans", "licenses", "sources"]);
    step::run("deny", &mut check).map(drop)
}
