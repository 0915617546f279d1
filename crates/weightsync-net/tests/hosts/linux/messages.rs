//! The messages between the tests and their processes: lines of JSON.

use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use weightsync_core::SenderStatus;
use weightsync_engine::{InitInfo, Report};
use weightsync_net::scrub::Scrub;

use super::attacks::Attack;

/// The variable that makes this binary play a role.
pub(crate) const ROLE: &str = "WEIGHTSYNC_TEST_ROLE";

/// The token of every process here.
pub(crate) const TOKEN: &str = "a token for tests, of nobody else";

/// The role of a process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Role {
    Trainer(Lead),
    /// A relay for the sender at this address.
    /// With its certificates.
    Relay(String, Option<PathBuf>),
    Worker(Join),
    /// Many workers.
    Crowd(Crowd),
    /// Many workers that are only said to be there.
    Simulated(Simulated),
    /// A relay of the sender at this address that sends other bytes than it was to pass on.
    Liar(String),
    /// Against the sender at this address, by these random choices.
    Attacker(String, Attack, u64),
}

/// How a trainer begins.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Lead {
    pub(crate) listen: String,
    pub(crate) run_dir: PathBuf,
    /// Where the certificates are; without them links are plain.
    pub(crate) tls: Option<PathBuf>,
    /// Bytes of a version.
    pub(crate) bytes: usize,
    /// Whether workers ask, and nothing is pushed.
    pub(crate) pull: bool,
    /// How many hosts fetch from each.
    pub(crate) arity: usize,
    /// Whether hosts compare what relays send with its digests.
    pub(crate) verify: bool,
    /// The word of its first version.
    pub(crate) word: u64,
    /// The content of its versions.
    pub(crate) content: Content,
}

/// The content of a trainer's versions.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Content {
    /// Elements that say which word they are of; from one word to the next one in so many
    /// changes, 1 for all.
    Words { every: u64 },
    /// Weights of a normal distribution in bfloat16, of which about so many percent change
    /// from one version to the next as in training: by little, and small ones more often.
    /// At 100 all change, as they do in single precision. Sent as what changed where that is
    /// quicker, or always whole.
    Weights {
        percent: f64,
        single: bool,
        deltas: bool,
    },
}

/// How a worker begins.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Join {
    pub(crate) worker: u32,
    pub(crate) info: InitInfo,
    /// How long each of its `connect` calls may take; it calls again after each that fails.
    pub(crate) patience: Duration,
}

/// How many workers begin.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Crowd {
    pub(crate) first: u32,
    pub(crate) count: u32,
    pub(crate) info: InitInfo,
}

/// How workers are simulated.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Simulated {
    /// The sender's address.
    pub(crate) root: String,
    pub(crate) agents: u32,
    /// Workers of each agent.
    pub(crate) workers: u32,
}

/// A command to a trainer.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) enum Order {
    /// Sends a version full of this word, and waits until it is loaded everywhere.
    Send { word: u64, deadline: Duration },
    /// Sends it, and waits for nobody.
    Publish { word: u64 },
    /// Forgets a worker that is gone.
    Forget { worker: u32 },
    /// Asks itself how things are, at its listening address.
    Status,
    /// Asks itself there whether hosts hold what was published.
    Scrub,
}

/// A message of a process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Notice {
    /// A trainer: by this one joins.
    Info(InitInfo),
    /// A trainer: it has published its first version.
    Ready { epoch: u64 },
    /// A trainer: the pass over its memory begins.
    Sending { word: u64 },
    /// A trainer: what came of it.
    Sent(Sent),
    /// A trainer.
    Status(Box<SenderStatus>),
    /// A trainer.
    Scrubbed(Box<Scrub>),
    /// A relay: it is in.
    Joined,
    /// A relay, or a worker: its sender is gone, in order or not.
    SenderGone { died: bool },
    /// A worker has received this, and found the word everywhere in it.
    Seen(Seen),
    /// A crowd, real or not: so many of it are in.
    Together(u32),
    /// An attacker has done what it could.
    Attacked,
    /// A warning of the crate under test.
    Log(String),
    /// The process cannot go on; also after a version that was not whole.
    Failed(String),
}

/// A version as a worker found it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Seen {
    pub(crate) epoch: u64,
    pub(crate) version: u64,
    pub(crate) word: u64,
    /// The bytes that its process has fetched so far, if it fetches for itself.
    pub(crate) travelled: Option<u64>,
}

/// A send's report.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Sent {
    pub(crate) word: u64,
    pub(crate) version: u64,
    pub(crate) took: Duration,
    /// The processor time of the trainer's process, over all of its threads.
    pub(crate) cpu: Duration,
    pub(crate) workers: Vec<Line>,
}

/// A worker's line of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Line {
    pub(crate) worker: u32,
    /// The variant's name.
    pub(crate) outcome: String,
    pub(crate) after: Duration,
    /// For how long it has been late, if it was not waited for.
    pub(crate) late: Option<Duration>,
}

impl Sent {
    pub(crate) fn of(word: u64, report: &Report, cpu: Duration) -> Self {
        let lines = report.workers.iter().map(|line| {
            let outcome = format!("{:?}", line.outcome);
            Line {
                worker: line.worker.0,
                outcome,
                after: line.after,
                late: line.late,
            }
        });
        Self {
            word,
            version: report.version().expect("one model").0,
            took: report.took,
            cpu,
            workers: lines.collect(),
        }
    }

    /// The outcome at a worker: at the process that has the number now, if another had it before.
    pub(crate) fn outcome(&self, worker: u32) -> &str {
        let lines = self.workers.iter().filter(|line| line.worker == worker);
        let line = lines.min_by_key(|line| line.outcome != "Applied");
        line.map_or("no line", |line| &line.outcome)
    }

    /// Workers that have not loaded the version.
    pub(crate) fn failed(&self) -> Vec<u32> {
        let failed = self.workers.iter().filter(|line| line.outcome != "Applied");
        failed.map(|line| line.worker).collect()
    }
}

/// Says something to who started this process. Where nobody is there any more, it
/// ends.
pub(crate) fn emit(message: &Notice) {
    let line = serde_json::to_string(message).expect("plain data");
    let mut out = std::io::stdout().lock();
    if writeln!(out, "{line}").and_then(|()| out.flush()).is_err() {
        std::process::exit(4);
    }
}
