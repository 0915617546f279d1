//! What every scheme of `weightsync` is held to, as a program to run.
//!
//! The suite starts processes, has them send, receive and hold weights, kills
//! some of them by SIGKILL at every stage, and looks at what the others see and
//! at what is left. It uses the public API of `weightsync` alone, so it runs on
//! any [`Scheme`](weightsync_engine::transport::Scheme), also on one of your own.
//!
//! # Running it on a scheme of your own
//!
//! In `Cargo.toml`, a test with a `main` of its own, because the trainers and
//! workers are this very binary, run again:
//!
//! ```toml
//! [dev-dependencies]
//! weightsync-conformance = "0.1"
//!
//! [[test]]
//! name = "conformance"
//! harness = false
//! ```
//!
//! And `tests/conformance.rs`:
//!
//! ```no_run
//! use std::process::ExitCode;
//!
//! use weightsync::scheme::{AnyScheme, MultiProcess};
//! use weightsync::transport::{Registration, register};
//! use weightsync_conformance::Subjects;
//!
//! // Yours, in place of this one.
//! register! {
//!     Registration::new("mine", |_settings| Ok(AnyScheme::new(MultiProcess::default())))
//! }
//!
//! fn main() -> ExitCode {
//!     weightsync_conformance::main(&Subjects::new().with("mine"))
//! }
//! ```
//!
//! `cargo test --test conformance` then runs `mine::send::…`, `mine::death::…`
//! and so on; `cargo nextest` finds them too. Arguments are those of `cargo test`:
//! a filter, `--exact`, `--list`.
//!
//! # What is asked of it
//!
//! What its [`Capabilities`] state has to work. What they do not state has to be
//! refused with [`Error::Unsupported`], which the scenario
//! `not_offered` of each scheme tries; the scenarios that fall away are named in
//! its output, so that none passes silently. Two things no capability states: a
//! worker's end is asked whether its waits can be ended from another thread, which
//! a background receiver needs; and whether a worker notices a damaged commit
//! record is tried if you say how to damage one ([`Subjects::corrupt`]).
//!
//! # How much, and how random
//!
//! `WEIGHTSYNC_SOAK` scales the loops (`full`, or a factor of what is done every
//! day), `WEIGHTSYNC_SOAK_SEED` repeats the random choices of an earlier run; each
//! scenario that makes some prints its seed and its counts. A wait without end in
//! any process fails the scenario with what hung. Tests next to the suite have the
//! same by [`scale`].
//!
//! # Several machines on one
//!
//! [`hosts`] makes network namespaces with links between them that can be slow, cut
//! or silent, for whatever goes over a network.
//!
//! Absent here: anything that looks inside a scheme (what is damaged in it is
//! damaged by a hook of yours), and timings, but for waits that nothing ended.
#![forbid(unsafe_code)]

mod harness;
#[cfg(target_os = "linux")]
pub mod hosts;
mod scenarios;

use std::any::Any;
use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use libtest_mimic::{Arguments, Failed, Trial};
use weightsync_engine::transport::Interrupter;
use weightsync_engine::{
    AnyScheme, Capabilities, Error, Expect, InitInfo, ModelId, ReceiverSetup, Result, SenderSetup,
    Version, worker,
};

pub use crate::harness::scale;
use crate::harness::scale::longest;
use crate::harness::shape::Shape;
use crate::scenarios::{Need, Scenario};

/// The schemes to be put through the suite.
#[derive(Clone)]
pub struct Subjects {
    texts: Vec<String>,
    residue: Residue,
    companion: Companion,
    corrupt: Option<Corrupt>,
    slow: bool,
}

/// What runs next to a sender, until it is dropped.
pub(crate) type Companion = Arc<dyn Fn(&InitInfo) -> Box<dyn Any> + Send + Sync>;

/// Names what a scheme has left in the system.
type Residue = Arc<dyn Fn() -> Vec<String> + Send + Sync>;

/// Damages a commit record.
pub(crate) type Corrupt = Arc<dyn Fn(&Record) -> io::Result<String> + Send + Sync>;

/// The commit record of a version: whatever a scheme keeps that makes bytes a
/// version for its workers. See [`Subjects::corrupt`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Record {
    /// The scheme, by its word and settings.
    pub scheme: String,
    /// The address of the sender's [`Endpoint`](weightsync_engine::transport::Endpoint).
    pub address: String,
    /// The model; the sender has no other.
    pub model: ModelId,
    /// The version, which is the newest.
    pub version: Version,
}

impl Default for Subjects {
    fn default() -> Self {
        Self {
            texts: Vec::new(),
            residue: Arc::new(Vec::new),
            companion: Arc::new(|_| Box::new(())),
            corrupt: None,
            slow: false,
        }
    }
}

impl Subjects {
    /// No scheme yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// One more scheme: its word and settings.
    #[must_use]
    pub fn with(mut self, scheme: &str) -> Self {
        self.texts.push(scheme.into());
        self
    }

    /// Says that a send takes hundreds of times longer than through memory, as where
    /// it is many requests to a server. Loops then do fewer rounds, and short deadlines
    /// are longer.
    #[must_use]
    pub fn slow(mut self) -> Self {
        self.slow = true;
        self
    }

    /// Looks, after each scenario, for what a scheme has left where the suite does
    /// not look: files, say. Everything it names is a failure. Processes, threads,
    /// descriptors, mappings, `/dev/shm` and Unix sockets are looked at anyhow.
    #[must_use]
    pub fn residue(mut self, left: impl Fn() -> Vec<String> + Send + Sync + 'static) -> Self {
        self.residue = Arc::new(left);
        self
    }

    /// Starts something next to each sender: the relay of its workers' host, say. Called
    /// in the process of the test, once the sender has said where it will be and before
    /// anybody joins it. What this returns is dropped when the scenario's processes have
    /// ended, and has to end all of it.
    #[must_use]
    pub fn beside(
        mut self,
        start: impl Fn(&InitInfo) -> Box<dyn Any> + Send + Sync + 'static,
    ) -> Self {
        self.companion = Arc::new(start);
        self
    }

    /// Damages the record of a version that was sent and that no worker has taken
    /// yet, and returns words that the error of a worker which looks at it has to
    /// have. Called in the sender's process, between two of its calls; an error of
    /// it fails the scenario.
    ///
    /// Only you know where the record lies. Without this, what a worker makes of a
    /// damaged one is not looked at, and listed as not offered.
    #[must_use]
    pub fn corrupt(
        mut self,
        damage: impl Fn(&Record) -> io::Result<String> + Send + Sync + 'static,
    ) -> Self {
        self.corrupt = Some(Arc::new(damage));
        self
    }
}

impl fmt::Debug for Subjects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Subjects")
            .field("texts", &self.texts)
            .finish_non_exhaustive()
    }
}

/// Runs the suite as `cargo test` runs a test binary; the `main` of one. In the
/// processes that the suite starts, it is what they do.
pub fn main(subjects: &Subjects) -> ExitCode {
    scale::set_slow(subjects.slow);
    match worker::current() {
        Ok(None) => run(subjects),
        Ok(Some(process)) => match harness::process::obey(&process, subjects) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("{error}");
                ExitCode::from(3)
            }
        },
        Err(error) => {
            // The process that started it was killed meanwhile.
            eprintln!("{error}");
            ExitCode::from(4)
        }
    }
}

/// One scheme on trial.
pub(crate) struct Subject {
    pub(crate) scheme: String,
    pub(crate) can: Capabilities,
    /// Whether a wait of its workers can be ended from another thread.
    pub(crate) interrupts: bool,
    /// Whether records of it can be damaged.
    pub(crate) corrupts: bool,
    pub(crate) residue: Residue,
    pub(crate) companion: Companion,
    scripts: AtomicU64,
}

impl Subject {
    /// Whether workers get versions only when they ask.
    pub(crate) fn pulls(&self) -> bool {
        self.can.weights && !self.can.push
    }

    /// A number of its own for each script.
    pub(crate) fn next(&self) -> u64 {
        self.scripts.fetch_add(1, Ordering::Relaxed)
    }
}

fn run(subjects: &Subjects) -> ExitCode {
    let mut arguments = Arguments::from_args();
    // Each counts this process's threads and descriptors.
    arguments.test_threads = Some(1);
    let mut trials = Vec::new();
    for text in &subjects.texts {
        let scheme = match text.parse::<AnyScheme>() {
            Ok(scheme) => scheme,
            Err(error) => {
                eprintln!("{text}: {error}");
                return ExitCode::from(2);
            }
        };
        let subject = Arc::new(Subject {
            scheme: text.clone(),
            can: scheme.capabilities(),
            interrupts: interrupts(scheme),
            corrupts: subjects.corrupt.is_some(),
            residue: subjects.residue.clone(),
            companion: subjects.companion.clone(),
            scripts: AtomicU64::new(0),
        });
        trials.extend(trials_of(&subject));
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// Asks a worker's end of the scheme, as nothing states it. Whatever else goes
/// wrong is for the scenarios to find.
fn interrupts(scheme: AnyScheme) -> bool {
    let can = scheme.capabilities();
    let ask = || -> Result<Interrupter> {
        let weights = Shape::Words(8).make(1);
        let setup = SenderSetup::new("policy", &weights)?.scheme(scheme)?;
        let _sender = setup
            .clone()
            .connect(&weights, Expect::Count(0), Some(longest()))?;
        let worker = ReceiverSetup::new(setup.init_info(), 0);
        worker.connect(Some(longest()))?.interrupter()
    };
    can.weights && can.push && !matches!(ask(), Err(Error::Unsupported { .. }))
}

fn trials_of(subject: &Arc<Subject>) -> Vec<Trial> {
    let (offered, missing): (Vec<_>, Vec<_>) = scenarios::all()
        .into_iter()
        .partition(|scenario| scenario.lacks(subject).is_empty());
    let mut trials: Vec<_> = offered
        .into_iter()
        .map(|scenario| trial(subject, scenario))
        .collect();
    let theirs = subject.clone();
    let name = format!("{}::not_offered", subject.scheme);
    trials.push(Trial::test(name, move || {
        for scenario in &missing {
            let lacks: BTreeSet<&str> = scenario
                .lacks(&theirs)
                .into_iter()
                .map(Need::word)
                .collect();
            let lacks: Vec<_> = lacks.into_iter().collect();
            println!(
                "not offered: {}::{} ({})",
                theirs.scheme,
                scenario.name,
                lacks.join(", ")
            );
        }
        scenarios::refusals::unstated_capabilities_are_refused(&theirs);
        Ok::<(), Failed>(())
    }));
    trials
}

fn trial(subject: &Arc<Subject>, scenario: Scenario) -> Trial {
    let subject = subject.clone();
    Trial::test(
        format!("{}::{}", subject.scheme, scenario.name),
        move || {
            (scenario.run)(&subject);
            Ok::<(), Failed>(())
        },
    )
}
