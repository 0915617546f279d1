//! `cargo xtask ci`: every check, then every test.

use std::time::Duration;

use crate::arrows;
use crate::error::Error;
use crate::places::Places;
use crate::python;
use crate::step;
use crate::test;
use crate::tools;

/// Runs the checks in the order in which they fail fastest, then the tests.
///
/// Everything a check needs is looked for before the first check runs, so a missing component
/// costs seconds and not the time of the checks before it.
pub fn run(places: &Places) -> Result<(), Error> {
    tools::component(places, "fmt", "rustfmt")?;
    tools::component(places, "clippy", "clippy")?;
    let deny = tools::DENY.provide(places)?;
    tools::NEXTEST.provide(places)?;
    python::TESTS.provide(places)?;
    python::OLDEST.provide(places)?;
    python::VLLM.provide(places)?;
    python::OBJECTS.provide(places)?;

    let mut passed: Vec<String> = Vec::new();
    let mut pass = |name: &str, took: Duration| {
        passed.push(format!("{name} {}", step::seconds(took)));
    };

    let mut fmt = places.cargo();
    fmt.args(["fmt", "--all", "--check"]);
    pass("fmt", step::run("fmt", &mut fmt)?);

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
        pass("clippy", step::run("clippy", &mut clippy)?);
    }

    // Libraries only: the command is called `weightsync` like the library, and their pages would
    // overwrite each other. Broken links are among the warnings.
    let mut docs = places.cargo();
    docs.args("doc --workspace --all-features --lib --no-deps --quiet".split(' '))
        .env("RUSTDOCFLAGS", "-D warnings");
    pass("docs", step::run("docs", &mut docs)?);

    // Advisories are left out: their database is not in the registry.
    let mut check = places.command(&deny);
    check
        .args("--workspace --all-features check --hide-inclusion-graph".split(' '))
        .args(["bans", "licenses", "sources"]);
    pass("deny", step::run("deny", &mut check)?);

    pass("arrows", arrows::run(places)?);

    eprintln!("── checks passed: {}", passed.join(", "));
    test::run(places)
}
