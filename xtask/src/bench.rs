//! `cargo xtask bench GROUP`: one group of benchmarks, built for release.
//!
//! A group is one or more subcommands of the crate `weightsync-bench`, which measures through the
//! code of `weightsync bench`, or a Python program that uses the installed package, or both. It
//! prints tables, or with `--json` one object a line (`case`, `value`, `unit`, `baseline`, `ratio`,
//! `target`, `met`), of which [`rows`](crate::rows) makes the tables of the documents; with `--plot`
//! it also draws.

use std::path::Path;
use std::process::Command;

use crate::data;
use crate::error::Error;
use crate::frameworks;
use crate::places::Places;
use crate::pytest;
use crate::python;
use crate::step;
use crate::tools::{self, Package};
use crate::wheel::Profile;

/// How every part of a group is run.
const COMMAND: &str = "run --release --package weightsync-bench --";

/// What a group in Python starts for its figures in Rust.
const COMMAND_LINE: Binary = Binary {
    package: "weightsync-cli",
    name: "weightsync",
};
const BENCHMARKS: Binary = Binary {
    package: "weightsync-bench",
    name: "weightsync-bench",
};

/// Every group; a new one is a line here.
const GROUPS: &[Group] = &[
    Group {
        name: "mem",
        about: "publish to applied over shared memory, compared with the same run's memcpy, then \
                with TorchRL's",
        measured: Measured::InRust {
            own: "mem",
            peers: "peers",
        },
    },
    Group {
        name: "python",
        about: "Python to Python, compared with memcpy, TorchRL's schemes, Ray and the same send \
                in Rust",
        measured: Measured::InPython {
            program: "bench/python",
            binary: COMMAND_LINE,
            peers: &[],
        },
    },
    Group {
        name: "ray",
        about: "Ray's actors and process groups of torch.distributed, compared with Ray's object \
                store and gloo's own calls",
        measured: Measured::InPython {
            program: "bench/ray",
            binary: COMMAND_LINE,
            peers: &[],
        },
    },
    Group {
        name: "collect",
        about: "collectors in Rust and of Gymnasium environments, compared with TorchRL's and \
                with vector environments",
        measured: Measured::InPython {
            program: "bench/collect",
            binary: BENCHMARKS,
            peers: &[tools::IPERF],
        },
    },
    Group {
        name: "engines",
        about: "updates of a vLLM engine, compared with vLLM's own load; extraction from sharded \
                trainers, compared with full_tensor()",
        measured: Measured::WithEngine {
            program: "bench/engines",
            framework: "vllm",
        },
    },
    Group {
        name: "sglang",
        about: "updates of a server of SGLang (11 GB), compared with its own from disk and over gloo",
        measured: Measured::WithEngine {
            program: "bench/engines/sglang_peers.py",
            framework: "sglang",
        },
    },
    Group {
        name: "net",
        about: "over loopback, compared with iperf3 and other ways to move weights; then over \
                hosts",
        measured: Measured::OverNetwork {
            own: "net",
            hosts: "bench --package weightsync-net --bench hosts",
        },
    },
    Group {
        name: "delta",
        about: "deltas of synthetic steps and of real models, compared with memcpy and other \
                codecs",
        measured: Measured::OfVersions { own: "delta" },
    },
    Group {
        name: "store",
        about: "saves and loads on the disk of this folder, compared with dd and safetensors' \
                load_file",
        measured: Measured::OnDisk { own: "store" },
    },
    Group {
        name: "sync",
        about: "a synchronizer with its parties, compared with memcpy and iperf3",
        measured: Measured::OverLoopback { own: "sync" },
    },
];

/// A group of benchmarks.
struct Group {
    name: &'static str,
    about: &'static str,
    measured: Measured,
}

/// By what a group is measured.
enum Measured {
    InRust {
        /// The subcommand with the project's own cases. It takes every flag.
        own: &'static str,
        /// The subcommand that compares with other implementations. It takes `--json`, and the
        /// Python of their environment.
        peers: &'static str,
    },
    InPython {
        /// What Python runs, in the environment of the tests with the package installed. It takes
        /// `--json`, and the binary for the figures in Rust.
        program: &'static str,
        binary: Binary,
        /// What it measures next to ours, of the system.
        peers: &'static [Package],
    },
    WithEngine {
        /// What Python runs. It takes `--json`.
        program: &'static str,
        /// The framework that has the engine, whose environment it runs in.
        framework: &'static str,
    },
    OverNetwork {
        /// The subcommand with the cases over loopback. It takes `--json`, and the Python of the
        /// peers' own environment.
        own: &'static str,
        /// What cargo runs for the cases over hosts. It takes `--json`.
        hosts: &'static str,
    },
    OverLoopback {
        /// The subcommand. It takes every flag, and needs `iperf3`.
        own: &'static str,
    },
    OnDisk {
        /// The subcommand. It takes `--json`, and the Python of an environment with safetensors.
        own: &'static str,
    },
    OfVersions {
        /// The subcommand. It takes `--json`, a folder of real versions, and the Python that
        /// measures the peers.
        own: &'static str,
    },
}

/// A program of the workspace, built for release.
struct Binary {
    package: &'static str,
    name: &'static str,
}

/// Builds and runs the group named by the first argument, passing the flags on.
pub fn run(places: &Places, args: &[&str]) -> Result<(), Error> {
    let (group, flags) = parse(args)?;
    match group.measured {
        Measured::InRust { own, peers } => in_rust(places, own, peers, &flags),
        Measured::InPython {
            program,
            ref binary,
            peers,
        } => {
            peers.iter().try_for_each(Package::provide)?;
            in_python(places, group.name, program, binary, &flags)
        }
        Measured::WithEngine { program, framework } => {
            no_picture(group.name, &flags)?;
            let framework = frameworks::named(framework)?;
            let python = pytest::installed_for(places, framework, Profile::Release)?;
            let mut command = program_of(places, &python, program, &flags);
            step::run_last(&format!("bench {}", group.name), &mut command)
        }
        Measured::OverNetwork { own, hosts } => {
            no_picture(group.name, &flags)?;
            over_network(places, own, hosts, &flags)
        }
        Measured::OverLoopback { own } => {
            no_picture(group.name, &flags)?;
            tools::IPERF.provide()?;
            let mut command = places.cargo();
            command.args(COMMAND.split(' ')).arg(own).args(&flags);
            step::run_last(&format!("bench {own}"), &mut command)
        }
        Measured::OnDisk { own } => {
            no_picture(group.name, &flags)?;
            on_disk(places, own, &flags)
        }
        Measured::OfVersions { own } => {
            no_picture(group.name, &flags)?;
            of_versions(places, own, &flags)
        }
    }
}

/// `cargo xtask soak`: [`COMMAND`]'s `soak`, with these arguments.
pub fn soak(places: &Places, args: &[&str]) -> Result<(), Error> {
    let mut command = places.cargo();
    command.args(COMMAND.split(' ')).arg("soak").args(args);
    step::run_last("soak", &mut command)
}

/// The environment of the peers is made before anything is measured, as that keeps the machine
/// busy. If it cannot be had, the project's own cases run all the same, and the run fails at its
/// end with the reason and the fix.
fn in_rust(places: &Places, own: &str, peers: &str, flags: &[&str]) -> Result<(), Error> {
    let environment = python::TESTS.provide(places);
    let mut command = places.cargo();
    command.args(COMMAND.split(' ')).arg(own).args(flags);
    let outcome = step::run(&format!("bench {own}"), &mut command).map(drop);

    let compared = environment.and_then(|python| {
        let mut command = places.cargo();
        command.args(COMMAND.split(' ')).arg(peers);
        command.arg("--python").arg(python);
        command.args(flags.iter().filter(|flag| **flag == "--json"));
        step::run_last(&format!("bench {peers}"), &mut command)
    });
    // Of two failures the first is the one to look at.
    outcome.and(compared)
}

fn in_python(
    places: &Places,
    name: &str,
    program: &str,
    binary: &Binary,
    flags: &[&str],
) -> Result<(), Error> {
    no_picture(name, flags)?;
    let python = pytest::installed(places, Profile::Release)?;
    let mut build = places.cargo();
    build.args(["build", "--release", "--package", binary.package]);
    build.args(["--bin", binary.name]);
    step::run("build", &mut build)?;

    let mut command = program_of(places, &python, program, flags);
    command.arg("--weightsync");
    command.arg(places.target().join("release").join(binary.name));
    step::run_last(&format!("bench {name}"), &mut command)
}

/// A group's program. It finds the modules that the groups in Python share.
fn program_of(places: &Places, python: &Path, program: &str, flags: &[&str]) -> Command {
    let mut command = python::command(places, python);
    command.arg(program);
    command.args(flags.iter().filter(|flag| **flag == "--json"));
    let shared = ["bench/common", "bench/python"].map(|folder| places.root().join(folder));
    command.env(
        "PYTHONPATH",
        std::env::join_paths(shared).unwrap_or_default(),
    );
    command.env("PYTHONDONTWRITEBYTECODE", "1");
    command
}

/// One that cannot be measured is named, with the reason, and fails the run at its end. So does an
/// environment of the peers that cannot be had: the project's own cases run all the same.
fn over_network(places: &Places, own: &str, hosts: &str, flags: &[&str]) -> Result<(), Error> {
    tools::IPERF.provide()?;
    for library in tools::MOONCAKE {
        if let Err(error) = library.provide() {
            eprintln!("for Mooncake's engine: {error}");
        }
    }
    let json = || flags.iter().filter(|flag| **flag == "--json");
    let environment = python::NET.provide(places);
    let mut command = places.cargo();
    command.args(COMMAND.split(' ')).arg(own).args(json());
    if let Ok(python) = &environment {
        command.arg("--python").arg(python);
    }
    command.env("PYTHONDONTWRITEBYTECODE", "1");
    let over_loopback = step::run(&format!("bench {own}"), &mut command).map(drop);

    let mut command = places.cargo();
    command.args(hosts.split(' ')).arg("--").args(json());
    let over_hosts = step::run_last("bench over hosts", &mut command);
    // Of several failures the first is the one to look at.
    environment.map(drop).and(over_loopback).and(over_hosts)
}

/// An environment that cannot be had fails the run at its end: all else is measured.
fn on_disk(places: &Places, own: &str, flags: &[&str]) -> Result<(), Error> {
    let environment = python::TESTS.provide(places);
    let mut command = places.cargo();
    command.args(COMMAND.split(' ')).arg(own).args(flags);
    if let Ok(python) = &environment {
        command.arg("--python").arg(python);
    }
    let measured = step::run(&format!("bench {own}"), &mut command).map(drop);
    environment.map(drop).and(measured)
}

/// Real versions and peers that cannot be had fail the run at its end: all else is measured.
fn of_versions(places: &Places, own: &str, flags: &[&str]) -> Result<(), Error> {
    let environment = python::TESTS.provide(places);
    let mut command = places.cargo();
    command.args(COMMAND.split(' ')).arg(own).args(flags);
    let mut made = Ok(());
    if let Ok(python) = &environment {
        command.arg("--python").arg(python);
        match data::VERSIONS.provide(places, python) {
            Ok(folder) => drop(command.arg("--real").arg(folder)),
            Err(error) => made = Err(error),
        }
    }
    command.env("PYTHONDONTWRITEBYTECODE", "1");
    let measured = step::run(&format!("bench {own}"), &mut command).map(drop);
    // Of several failures the first is the one to look at.
    environment.map(drop).and(made).and(measured)
}

fn no_picture(name: &str, flags: &[&str]) -> Result<(), Error> {
    match flags.contains(&"--plot") {
        true => Err(usage(&format!("the group `{name}` has no picture"))),
        false => Ok(()),
    }
}

/// The groups, one a line.
pub fn listing() -> String {
    let lines: Vec<String> = GROUPS
        .iter()
        .map(|group| format!("  {:<8}{}", group.name, group.about))
        .collect();
    lines.join("\n")
}

/// What the groups are called.
#[cfg(test)]
pub fn names() -> impl Iterator<Item = &'static str> {
    GROUPS.iter().map(|group| group.name)
}

fn parse<'a>(args: &[&'a str]) -> Result<(&'static Group, Vec<&'a str>), Error> {
    let (flags, names): (Vec<&str>, Vec<&str>) = args.iter().partition(|arg| arg.starts_with('-'));
    if let Some(flag) = flags
        .iter()
        .find(|flag| !matches!(**flag, "--json" | "--plot"))
    {
        return Err(usage(&format!("bench does not know `{flag}`")));
    }
    let [name] = names[..] else {
        return Err(usage("bench takes one group"));
    };
    let group = GROUPS
        .iter()
        .find(|group| group.name == name)
        .ok_or_else(|| usage(&format!("there is no group `{name}`")))?;
    Ok((group, flags))
}

fn usage(what: &str) -> Error {
    Error::Usage(format!(
        "{what}\nusage: cargo xtask bench GROUP [--json] [--plot]\ngroups:\n{}",
        listing()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_passed_on_wherever_they_stand() {
        for args in [["mem", "--json", "--plot"], ["--json", "mem", "--plot"]] {
            let (group, flags) = parse(&args).expect("a known group");
            assert_eq!((group.name, flags), ("mem", vec!["--json", "--plot"]));
        }
        for name in ["python", "ray", "collect", "delta", "engines", "sglang"] {
            let (group, flags) = parse(&["--json", name]).expect("a known group");
            assert_eq!((group.name, flags), (name, vec!["--json"]));
        }
    }

    #[test]
    fn bench_refuses_unknown_groups_and_lists_them() {
        let cases: [&[&str]; 4] = [&[], &["disk"], &["mem", "mem"], &["mem", "--fast"]];
        for args in cases {
            let error = parse(args).err().expect("refused");
            assert!(error.to_string().contains("  mem "), "{args:?}: {error}");
            assert_eq!(error.exit_code(), 2, "{args:?}");
        }
    }
}
