//! The project's own benchmarks: `cargo xtask bench GROUP`.
//!
//! What a user measures with `weightsync bench` is measured here too, by the same code of
//! [`weightsync_cli::bench`], with the project's own cases, their targets, and the same job done by
//! what people use today. A group prints a table, or with `--json` one object a line.
#![forbid(unsafe_code)]

mod bars;
mod collect;
mod delta;
mod group;
mod iperf;
mod net;
mod overhead;
mod peer;
mod peers;
mod running;
mod set;
mod soak;
mod store;
mod sync;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use weightsync_cli::Program;
use weightsync_cli::bench::{local, numbers, reader};

/// The project's own benchmarks.
#[derive(Parser)]
#[command(version, about)]
struct Command {
    #[command(subcommand)]
    group: Group,
}

#[derive(Subcommand)]
enum Group {
    /// Shared memory, compared with memcpy (`cargo xtask bench mem`)
    Mem(group::Args),
    /// TorchRL's schemes compared with ours, in the same run (`cargo xtask bench mem`)
    Peers(peers::Args),
    /// Deltas of bf16 weights: compare, code, apply, fold (`cargo xtask bench delta`)
    Delta(delta::Args),
    /// Over loopback, compared with what others bring weights with (`cargo xtask bench net`)
    Net(net::Args),
    /// Stores on disk, compared with dd (`cargo xtask bench store`)
    Store(store::Args),
    /// A synchronizer with its parties (`cargo xtask bench sync`)
    Sync(sync::Args),
    /// Sends of one process, for the group net
    #[command(hide = true)]
    Sends(net::SendsArgs),
    /// A week of training in an hour (`cargo xtask soak --hours N`)
    Soak(soak::Args),
    /// A process of the soak
    #[command(hide = true)]
    SoakPart(soak::PartArgs),
    /// Frames by the Rust policy, as often as asked for (`cargo xtask bench collect`)
    #[command(hide = true)]
    Collect(collect::Args),
    /// An explorer of the group sync
    #[command(hide = true)]
    Explorer(sync::ExplorerArgs),
}

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1).peekable();
    let first = arguments.peek().and_then(|first| first.to_str());
    // The processes that a group starts are the command's: a worker, a relay, a synchronizer.
    if matches!(first, Some("bench" | "relay" | "serve")) {
        return ExitCode::from(weightsync_cli::run(&Program::default(), arguments));
    }
    let done = match Command::parse().group {
        Group::Mem(args) => group::run(&args),
        Group::Peers(args) => peers::run(&args),
        Group::Delta(args) => delta::run(&args),
        Group::Net(args) => net::run(&args),
        Group::Store(args) => store::run(&args),
        Group::Sync(args) => sync::run(&args),
        Group::Sends(args) => net::sends(&args),
        Group::Soak(args) => soak::run(&args),
        Group::SoakPart(args) => soak::part(&args),
        Group::Collect(args) => collect::run(&args),
        Group::Explorer(args) => sync::explore(&args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("weightsync-bench: {error}");
            ExitCode::FAILURE
        }
    }
}
