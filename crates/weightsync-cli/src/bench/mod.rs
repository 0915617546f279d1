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
pub(crate) struct Args {
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
    /// A worker process of a benchmark
    #[command(hide = true)]
    Reader,
}

/// Runs a benchmark, whose workers are processes of the program.
pub(crate) fn run(args: Args, program: &Program) -> Result<u8, Box<dyn Error>> {
    let (scheme, mut case) = match args.scheme {
        Scheme::SharedMem(case) => (SharedMem::default().into(), case),
        Scheme::MultiProcess(args) => (args.scheme()?, args.case),
        #[cfg(feature = "net")]
        Scheme::Distributed(args) => (args.scheme()?, args.case()),
        Scheme::Reader => {
            reader::run()?;
            return Ok(SUCCESS);
        }
    };
    case.program.clone_from(&program.itself);
    local::run(&scheme, &case)?;
    Ok(SUCCESS)
}
