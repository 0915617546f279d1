//! `weightsync bench`: what a scheme does on this machine.
//!
//! Everything is timed from the publication's call to the moment the sender
//! knows that the version is live on every worker, and compared with one `memcpy` of the
//! same bytes in the same round.

mod delta;
mod group;
#[cfg(feature = "net")]
mod iperf;
mod local;
#[cfg(feature = "net")]
mod net;
mod numbers;
mod overhead;
mod peer;
mod peers;
mod reader;
mod set;

use std::error::Error;
use std::process::ExitCode;

use clap::Subcommand;
use weightsync_engine::SharedMem;

/// What `bench` is asked for.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    scheme: Scheme,
}

#[derive(Subcommand)]
enum Scheme {
    /// Shared memory: worker processes that take snapshots without a copy
    SharedMem(local::Args),
    /// A queue to each worker process: the newest version, or every one in order
    MultiProcess(local::QueueArgs),
    /// Many hosts: workers that dial in, here on this one
    #[cfg(feature = "net")]
    Distributed(local::DistributedArgs),
    /// The project's own group of cases, with their targets (`cargo xtask bench mem`)
    #[command(hide = true)]
    Mem(group::Args),
    /// TorchRL's schemes compared with ours, in the same run (`cargo xtask bench mem`)
    #[command(hide = true)]
    Peers(peers::Args),
    /// Deltas of bf16 weights: compare, code, apply, fold (`cargo xtask bench delta`)
    #[command(hide = true)]
    Delta(delta::Args),
    /// Over loopback, compared with what others bring weights with (`cargo xtask bench net`)
    #[cfg(feature = "net")]
    #[command(hide = true)]
    Net(net::Args),
    /// A worker process of a benchmark
    #[command(hide = true)]
    Reader,
}

/// Runs a benchmark.
pub fn run(args: Args) -> Result<ExitCode, Box<dyn Error>> {
    match args.scheme {
        Scheme::SharedMem(args) => local::run(&SharedMem::default().into(), &args)?,
        Scheme::MultiProcess(args) => local::run(&args.scheme()?, &args.case)?,
        #[cfg(feature = "net")]
        Scheme::Distributed(args) => local::run(&args.scheme()?, &args.case())?,
        Scheme::Mem(args) => group::run(&args)?,
        Scheme::Peers(args) => peers::run(&args)?,
        Scheme::Delta(args) => delta::run(&args)?,
        #[cfg(feature = "net")]
        Scheme::Net(args) => net::run(&args)?,
        Scheme::Reader => reader::run()?,
    }
    Ok(ExitCode::SUCCESS)
}
