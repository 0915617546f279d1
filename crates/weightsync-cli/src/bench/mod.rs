//! `weightsync bench`: what a scheme does on this machine.
//!
//! Everything is timed from the publication's call to the moment the sender
//! knows that the version is live on every worker, and compared with one `memcpy` of the
//! same bytes in the same round. The project's own benchmarks measure through the same code;
//! nobody else is to depend on it.

pub mod local;
pub mod numbers;
pub mod reader;

use std::error::Error;

use clap::Subcommand;
use weightsync_engine::SharedMem;

use crate::{Program, SUCCESS};

/// What `bench` is asked for.
#[derive(clap::Args)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    scheme: BenchScheme,
}

#[derive(Subcommand)]
enum BenchScheme {
    /// Shared memory: worker processes that take snapshots without a copy
    SharedMem(local::LocalArgs),
    /// A queue to each worker process: the newest version, or every one in order
    MultiProcess(local::QueueArgs),
    /// Many hosts: workers that dial in, here on this one
    #[cfg(feature = "net")]
    Distributed(local::DistributedArgs),
    /// A worker process of a benchmark
    #[command(hide = true)]
    Reader,
}

/// Runs a benchmark, whose workers are processes of the program.
pub(crate) fn run(args: BenchArgs, program: &Program) -> Result<u8, Box<dyn Error>> {
    let (scheme, mut case) = match args.scheme {
        BenchScheme::SharedMem(case) => (SharedMem::default().into(), case),
        BenchScheme::MultiProcess(args) => (args.scheme()?, args.case),
        #[cfg(feature = "net")]
        BenchScheme::Distributed(args) => (args.scheme()?, args.case()),
        BenchScheme::Reader => {
            reader::run()?;
            return Ok(SUCCESS);
        }
    };
    // The worker processes are started as this command was.
    case.program.clone_from(&program.itself);
    local::run(&scheme, &case)?;
    Ok(SUCCESS)
}
