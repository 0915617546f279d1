//! `cargo xtask test platforms`: what this machine can show of other ones.
//!
//! The daily run leaves out what nothing has changed for: [`PASSED`] has a line for each.

use std::path::Path;

use crate::error::Error;
use crate::marks::{self, Passed};
use crate::places::Places;
use crate::python;
use crate::report::Report;
use crate::step;
use crate::tools;

/// What each passed with last. A run of them writes it.
const PASSED: Passed = Passed("xtask/platforms-passed.txt");

/// A machine of another kind.
struct Platform {
    name: &'static str,
    /// Files and folders of the clone that it depends on.
    sources: &'static [&'static str],
    run: fn(&Places) -> Result<(), Error>,
}

const PLATFORMS: &[Platform] = &[
    Platform {
        name: "aarch64",
        sources: &["crates/weightsync-simd", "crates/weightsync-core"],
        run: aarch64,
    },
    Platform {
        name: "macos",
        // What calls the system. A change elsewhere that macOS cannot compile is found by the next run.
        sources: &[
            "Cargo.lock",
            "crates/weightsync-cli/src",
            "crates/weightsync-engine/src",
            "crates/weightsync-link/src",
            "crates/weightsync-mem/src",
            "crates/weightsync-net/src",
            "crates/weightsync-rl/src",
            "crates/weightsync-serve/src",
            "crates/weightsync-store/src",
            "python/requirements-zig.txt",
        ],
        run: macos,
    },
];

const AARCH64: &str = "aarch64-unknown-linux-gnu";

/// Builds the command for aarch64, and runs the tests of the crates whose code depends on the
/// processor, in an emulator. It emulates a process and not a machine: a process of aarch64 that
/// starts another one, as the demo does, needs a kernel that knows the emulator.
fn aarch64(places: &Places) -> Result<(), Error> {
    tools::target(places, AARCH64)?;
    tools::QEMU.provide()?;
    tools::AARCH64_GCC.provide()?;
    tools::AARCH64_LIBC.provide()?;
    let cargo = |words: &str| {
        let mut cargo = places.cargo();
        cargo
            .args(words.split(' '))
            .args(["--locked", "--quiet", "--target", AARCH64])
            .env("CC_aarch64_unknown_linux_gnu", "aarch64-linux-gnu-gcc")
            .env(
                "CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER",
                "aarch64-linux-gnu-gcc",
            )
            .env(
                "CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER",
                "qemu-aarch64 -L /usr/aarch64-linux-gnu",
            );
        cargo
    };
    step::run(
        "aarch64: the command, built",
        &mut cargo("build --package weightsync-cli --all-features"),
    )?;
    step::run(
        "aarch64: tests of simd and core, emulated",
        &mut cargo("test --package weightsync-simd --package weightsync-core --lib --tests"),
    )?;
    Ok(())
}

const MACOS: &str = "aarch64-apple-darwin";

/// A relay serves other processes, through memory that only Linux shares.
const WITHOUT_RELAYS: &str = "not test(/^relayed/)";

/// Compiles everything for macOS but the benchmarks, which measure what only Linux has. Nothing of it
/// runs there. What takes the place of Linux's calls runs on Linux: a sender and its workers, which
/// fetch over TCP, in every scenario of the conformance suite.
fn macos(places: &Places) -> Result<(), Error> {
    tools::target(places, MACOS)?;
    let nextest = tools::NEXTEST.provide(places)?;
    let python = python::ZIG.provide(places)?;
    let programs = python.parent().unwrap_or(places.root());
    let mut path = programs.as_os_str().to_owned();
    if let Some(others) = std::env::var_os("PATH") {
        path.push(":");
        path.push(others);
    }
    let cache = places.target().join("zig");
    let mut clippy = places.command(programs.join("cargo-zigbuild"));
    clippy
        .args("clippy --locked --quiet --workspace --exclude weightsync-bench".split(' '))
        .args(["--all-features", "--target", MACOS])
        .args(["--", "--deny", "warnings"])
        // It finds zig by the Python that is found first.
        .env("PATH", path)
        .env("CARGO_ZIGBUILD_CACHE_DIR", &cache)
        .env("ZIG_GLOBAL_CACHE_DIR", &cache)
        // The package's library is checked without a Python of macOS.
        .env("PYO3_NO_PYTHON", "1");
    step::run("macos: everything, compiled", &mut clippy)?;

    let mut portable = places.command(nextest);
    portable
        .args("nextest run --locked --no-tests=fail --package weightsync-net".split(' '))
        .args(["--test", "conformance", "--filterset", WITHOUT_RELAYS]);
    step::run(
        "macos: the code for it, run on Linux",
        places.with_cfg(&mut portable, "portable"),
    )
    .map(drop)
}

impl Platform {
    fn mark(&self, root: &Path) -> Result<String, Error> {
        marks::of(root, self.sources.iter().map(|one| (*one).to_owned()))
    }

    fn note_if_it_passes(&self, places: &Places, report: &mut Report) -> Result<(), Error> {
        // Before it runs: what is edited from here on was not tested.
        let mark = self.mark(places.root())?;
        let alone = format!("cargo xtask test platforms {}", self.name);
        match report.step(self.name, &alone, || (self.run)(places)) {
            Some(()) => PASSED.note(places.root(), self.name, &mark),
            None => Ok(()),
        }
    }
}

/// Runs all of them, or those with these names, and notes what passed.
pub fn run(places: &Places, names: &[&str]) -> Result<(), Error> {
    let known: Vec<&str> = PLATFORMS.iter().map(|one| one.name).collect();
    if let Some(unknown) = names.iter().find(|name| !known.contains(name)) {
        return Err(Error::Usage(format!(
            "there is no platform `{unknown}`: expected some of {}",
            known.join(", ")
        )));
    }
    let mut report = Report::begin();
    let chosen = |one: &Platform| names.is_empty() || names.contains(&one.name);
    for one in PLATFORMS.iter().filter(|one| chosen(one)) {
        one.note_if_it_passes(places, &mut report)?;
    }
    report.end()
}

/// Runs all of them, as steps of a longer run.
pub fn all(places: &Places, report: &mut Report) -> Result<(), Error> {
    let mut platforms = PLATFORMS.iter();
    platforms.try_for_each(|one| one.note_if_it_passes(places, report))
}

/// Runs those that something has changed for since they passed.
pub fn changed(places: &Places, report: &mut Report) -> Result<(), Error> {
    for one in PLATFORMS {
        if PASSED.has(places.root(), one.name, &one.mark(places.root())?)? {
            eprintln!(
                "── {}: nothing has changed since it passed (`cargo xtask test platforms {}` runs it)",
                one.name, one.name
            );
        } else {
            one.note_if_it_passes(places, report)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn platforms_name_what_is_there() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        for one in PLATFORMS {
            one.mark(&root).expect(one.name);
        }
    }
}
