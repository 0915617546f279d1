//! The `weightsync` command.
#![forbid(unsafe_code)]

mod bench;
mod demo;
#[cfg(feature = "net")]
mod net;
mod plot;
mod signals;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Moves a model's weights from the trainer to every worker that runs it.
#[derive(Parser)]
#[command(version, about)]
struct Command {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Train a policy in worker processes that get every update through shared memory
    Demo(demo::Args),
    /// Measure a scheme on this machine, beside a plain memcpy of the same run
    Bench(bench::Args),
    /// Carry a sender's versions to the workers of this host, and on to the next host
    #[cfg(feature = "net")]
    Relay(net::RelayArgs),
    /// Show a sender, every relay and every worker, with their versions
    ///
    /// Bytes are those that were fetched over the network. Workers of a relay, and of the
    /// sender's own host, read the memory that is there, and have none of their own; one
    /// without a relay fetches for itself, and is below an agent of its own with what it
    /// has fetched. How far one is behind is shown in versions of each model; with --json
    /// it is the difference between the version of a model and the worker's.
    #[cfg(feature = "net")]
    Status(net::StatusArgs),
}

fn main() -> ExitCode {
    let done = match Command::parse().what {
        What::Demo(args) => demo::run(&args),
        What::Bench(args) => bench::run(args),
        #[cfg(feature = "net")]
        What::Relay(args) => net::relay(&args),
        #[cfg(feature = "net")]
        What::Status(args) => net::status(&args),
    };
    match done {
        Ok(code) => code,
        Err(error) => {
            eprintln!("weightsync: {error}");
            ExitCode::FAILURE
        }
    }
}
