//! The `weightsync` command, as a library.
//!
//! Two programs run it: the binary `weightsync`, and the Python package's module. `demo` is the
//! binary's alone, by the feature of that name.
#![forbid(unsafe_code)]

pub mod bench;
#[cfg(feature = "demo")]
mod demo;
mod diff;
mod log;
#[cfg(feature = "net")]
mod net;
pub mod output;
mod plot;
#[cfg(feature = "net")]
mod serve;
mod signals;
mod store;
mod words;

use std::ffi::OsString;

use clap::error::ErrorKind;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

pub use self::log::Logger;

/// The program that runs the command.
#[derive(Clone, Debug, Default)]
pub struct Program {
    /// How the command is started as a process of its own, for the workers of `bench`: a program
    /// and its first arguments. If it is empty, the running executable is the command.
    pub itself: Vec<OsString>,
    /// Subcommands that the program runs without this library, which help lists as well: their
    /// names, and what each does.
    pub others: &'static [(&'static str, &'static str)],
    /// Takes what the library's messages go to. If there is none, it becomes the process's.
    pub log: Option<fn(Logger)>,
}

/// Runs the command with the arguments after its name, and returns the exit code.
///
/// What it has to say goes to the process's standard output and standard error. A pipe that its
/// reader has closed is no failure. `relay`, `serve`, `demo` and the commands of stores watch SIGINT, SIGTERM and
/// SIGHUP, but for those that are ignored, and end in order; the others leave signals as the process has
/// them.
pub fn run(program: &Program, arguments: impl IntoIterator<Item = OsString>) -> u8 {
    // Kept whole: an argument that is not UTF-8 is named below.
    let arguments: Vec<OsString> = arguments.into_iter().collect();
    let words = std::iter::once("weightsync".into()).chain(arguments.clone());
    let parsed = program
        .command()
        .try_get_matches_from(words)
        .and_then(|matches| Command::from_arg_matches(&matches));
    // The log is set up only for a command that will run, and before it does.
    match parsed {
        Ok(command) => match log::logger(command.action.prints_damage()) {
            Ok(logger) => {
                match program.log {
                    Some(log) => log(logger),
                    // A process that has one keeps it.
                    None => drop(tracing::subscriber::set_global_default(logger)),
                }
                command.action.run(program)
            }
            Err(error) => {
                eprintln!("weightsync: {error}");
                FAILURE
            }
        },
        // clap says only that something is not UTF-8, and not what.
        Err(said) if said.kind() == ErrorKind::InvalidUtf8 => {
            let other = arguments.iter().filter(|one| one.to_str().is_none());
            let other: Vec<_> = other.map(|one| format!("{one:?}")).collect();
            eprintln!(
                "weightsync: expected arguments in UTF-8, got {}: files and directories may have other \
                 names, but not stores, models, versions and hosts",
                other.join(", ")
            );
            said.exit_code() as u8
        }
        // Help and the version are of this kind, too.
        Err(said) => {
            let _ = said.print();
            said.exit_code() as u8
        }
    }
}

impl Program {
    fn command(&self) -> clap::Command {
        let others = self.others.iter();
        Command::command()
            .subcommands(others.map(|(name, about)| clap::Command::new(*name).about(*about)))
    }
}

/// Moves a model's weights from the trainer to every worker that runs it.
#[derive(Parser)]
#[command(name = "weightsync", version, about)]
#[command(
    after_help = "Warnings and errors are lines of standard error. WEIGHTSYNC_LOG takes another \
                        level: off, error, warn, info, debug or trace."
)]
struct Command {
    #[command(subcommand)]
    action: CliCommand,
}

#[derive(Subcommand)]
enum CliCommand {
    /// Train a policy in worker processes that get every update through shared memory
    #[cfg(feature = "demo")]
    Demo(demo::DemoArgs),
    /// Measure a scheme on this machine, compared with a plain memcpy of the same run
    Bench(bench::BenchArgs),
    /// Show what changed between two safetensors files, tensor by tensor
    ///
    /// How much of each tensor changed, and by how many units in the last place (ULPs): the places
    /// between the two on the line of all numbers of the dtype. Numbers are told apart by their
    /// bits, so from 0.0 to -0.0 it is 1 ULP. Of integers a step is their difference. A change to
    /// or from NaN has no step and is counted apart, and so are the bytes of dtypes below eight
    /// bits. A median of 2,048 and more is rounded down, by a thousandth at most.
    ///
    /// The exit code is 0 if all tensors are the same, 1 if any differs or is in one file only, and
    /// 2 if the files cannot be compared. Metadata is reported, but does not count.
    Diff(diff::DiffArgs),
    /// Save a checkpoint as the next version of a store
    ///
    /// The checkpoint is a safetensors file, or a directory of Hugging Face's layout with its
    /// configuration and tokenizer, which are saved with it. Of a directory with `global_step_N`
    /// directories the newest is taken. A pickled checkpoint is refused.
    ///
    /// The weights are compared with those of the newest version, and where little changed, only the
    /// changes are saved. If nothing changed, nothing is saved. The store is taken over from a trainer
    /// that writes there; while a sender uses it, it is left alone.
    Push(store::PushArgs),
    /// Write a version of a store to a directory, as a checkpoint that transformers and vLLM load
    ///
    /// The directory has its name only when it is whole. If it has one already from an earlier pull, the
    /// two are exchanged in one step, as far as the file system can do that.
    Pull(store::PullArgs),
    /// Show the versions of a store, and who wrote them
    ///
    /// The newest is first. The table says for each what was stored for it, what loading it reads, which
    /// share of its elements changed, and its names. `whole` are those that need no other version. What
    /// is damaged is listed at the end; weights are not read for that, but by `scrub --store`.
    Log(store::LogArgs),
    /// Run a command for each new version of a store
    ///
    /// The version is written to a directory of its own, and the command is run by the shell. If
    /// several came meanwhile, the newest is taken. A command that fails is reported, and watching goes
    /// on. When a command has succeeded, older directories are removed, but for one. Ctrl-C ends
    /// watching and the command; a second one does not wait for it.
    Watch(store::WatchArgs),
    /// Serve a synchronizer: it decides when a trainer and its explorers synchronise
    ///
    /// It holds the newest versions in memory, or watches over those of a store, and answers trainers,
    /// explorers and plain HTTP clients: `/` is a page for people, `/metrics` is for Prometheus, `/events`
    /// streams everything that happens, and `/v1/versions/latest/MODEL.safetensors` is a version.
    ///
    /// On loopback, without a token, every user of this machine may connect. Ctrl-C ends it.
    #[cfg(feature = "net")]
    Serve(Box<serve::ServeArgs>),
    /// Check the settings of `serve`, or translate those of Trinity-RFT
    #[cfg(feature = "net")]
    Config(serve::ConfigArgs),
    /// Make certificates for encrypted links between hosts
    ///
    /// `certs new` makes a private authority and a certificate for each part: trainer.pem, relay.pem
    /// and worker.pem. Each file has the certificate, its private key, and the authority's
    /// certificate. Copy to each host the file of its part alone. The authority's own key is thrown
    /// away, so to renew is to make all of them again. Ends read new files without a restart.
    #[cfg(feature = "net")]
    #[command(subcommand)]
    Certs(net::CertsArgs),
    /// Carry a sender's versions to the workers of this host, and on to the next host
    #[cfg(feature = "net")]
    Relay(net::RelayArgs),
    /// Show a sender of any scheme, every relay and every worker, with their versions
    ///
    /// SENDER is HOST:PORT, a run directory, a file with an init info as JSON, or a store. Each worker
    /// has what it runs and the outcome of the last send there. A worker that failed, died or was
    /// lost is listed until it is back or forgotten.
    ///
    /// Bytes are those that were fetched over the network. Workers of a relay, and of the
    /// sender's own host, read the memory that is there, and fetch no bytes. A worker
    /// without a relay fetches directly, and is listed below an agent of its own with the bytes
    /// that it fetched. How far a worker is behind is shown in versions of each model; with --json
    /// it is the difference between the version of a model and the worker's.
    #[cfg(feature = "net")]
    Status(net::SenderArgs),
    /// Compare what every host holds, or a store, with what was published
    ///
    /// Every relay, and every worker without one, makes the digest of all bytes of the versions it
    /// holds. The sender compares these digests with its own and names the versions that differ.
    /// Nothing more is made from such a version or passed on. The next version goes to that host
    /// whole; its workers run what they have until then. The same happens automatically at every
    /// 64th version. This needs the commands for many hosts.
    ///
    /// With --store, every file of a store is read and compared with its checksum, and every version
    /// is loaded and compared with its digest. Nothing is changed.
    ///
    /// The exit code is 0 if all is the same, 1 if any is not, and 2 if no answer came, or some
    /// could not be compared: it was replaced by a newer version meanwhile, or its host was gone.
    Scrub(store::ScrubArgs),
}

impl CliCommand {
    /// Whether it prints what of a store is damaged.
    fn prints_damage(&self) -> bool {
        matches!(self, Self::Push(_) | Self::Pull(_) | Self::Watch(_))
    }

    fn run(self, program: &Program) -> u8 {
        // `diff` and `scrub` use 1 for files or versions that differ, so their own failures have
        // another code.
        let failure = match self {
            CliCommand::Diff(_) => diff::TROUBLE,
            CliCommand::Scrub(_) => store::TROUBLE,
            _ => FAILURE,
        };
        let done = match self {
            #[cfg(feature = "demo")]
            CliCommand::Demo(args) => demo::run(&args),
            CliCommand::Bench(args) => bench::run(args, program),
            CliCommand::Diff(args) => diff::run(&args),
            #[cfg(feature = "net")]
            CliCommand::Serve(args) => serve::run(*args),
            #[cfg(feature = "net")]
            CliCommand::Config(args) => serve::config(&args),
            #[cfg(feature = "net")]
            CliCommand::Certs(args) => net::certs(&args),
            #[cfg(feature = "net")]
            CliCommand::Relay(args) => net::relay(&args),
            #[cfg(feature = "net")]
            CliCommand::Status(args) => net::status(&args),
            CliCommand::Push(args) => store::push(&args),
            CliCommand::Pull(args) => store::pull(&args),
            CliCommand::Log(args) => store::log(&args),
            CliCommand::Watch(args) => store::watch(&args),
            CliCommand::Scrub(args) => store::scrub(&args),
        };
        // Every command ends here: one place says what went wrong.
        done.unwrap_or_else(|error| {
            let error = error.to_string();
            eprintln!("weightsync: {error}");
            // An error about a file that is not there does not say that the whole directory has
            // gone.
            if let Some(lost) = weightsync_engine::files::lost_directory()
                && !error.contains(lost)
            {
                eprintln!("weightsync: {lost}");
            }
            failure
        })
    }
}

/// The exit code if all went well, and if it did not.
const SUCCESS: u8 = 0;
const FAILURE: u8 = 1;
