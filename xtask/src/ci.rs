//! `cargo xtask ci`: every check, then every test.

use std::time::Duration;

use crate::arrows;
use crate::error::Error;
use crate::places::Places;
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

    let mut took: Vec<(&str, Duration)> = Vec::new();

    let name = "fmt";
    took.push((
        name,
        step::run(name, places.cargo().args(["fmt", "--all", "--check"]))?,
    ));

    // `--locked`: a lock file that was not committed fails here rather than being made up anew.
    let name = "clippy";
    let mut clippy = places.cargo();
    clippy
        .args([
            "clippy",
            "--locked",
            "--workspace",
            "--all-targets",
            "--quiet",
        ])
        .args(["--", "-D", "warnings"]);
    took.push((name, step::run(name, &mut clippy)?));

    // Libraries only: the command is called `weightsync` like the library, and their pages would
    // overwrite each other.
    let name = "docs";
    let mut docs = places.cargo();
    docs.args(["doc", "--workspace", "--lib", "--no-deps", "--quiet"])
        .env(
            "RUSTDOCFLAGS",
            "-D warnings -D rustdoc::broken_intra_doc_links",
        );
    took.push((name, step::run(name, &mut docs)?));

    // Advisories are left out: their database is not in the registry.
    let name = "deny";
    let mut check = places.command(&deny);
    check.args([
        "--workspace",
        "--all-features",
        "check",
        "bans",
        "licenses",
        "sources",
    ]);
    took.push((name, step::run(name, &mut check)?));

    took.push(("arrows", arrows::run(places)?));

    let list: Vec<String> = took
        .iter()
        .map(|(name, took)| format!("{name} {}", step::seconds(*took)))
        .collect();
    eprintln!("── checks passed: {}", list.join(", "));
    test::run(places)
}
