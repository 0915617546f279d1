//! What processes are told, and what they answer: plain data over a pipe.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
pub(crate) use weightsync_engine::OutcomeKind;
use weightsync_engine::{InitInfo, WorkerStatus};

use super::fault::Fault;
use super::scale::longest;
use super::shape::{Seen, Shape};

/// What a process is told. Every command is received, and then has one answer, but for
/// [`WorkerCommand::Load`] with [`LoadFault::Pause`], which has two.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Command {
    /// To the trainer in it.
    Trainer(TrainerCommand),
    /// To the worker of that number in it.
    Worker(u32, WorkerCommand),
    /// Goes on with a load that is paused, or ends a scribble.
    GoOn,
    /// Counts what this process has.
    ResourceCensus,
}

/// How a process sets itself up as a trainer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct TrainerSetup {
    pub(crate) models: Vec<(String, Shape)>,
    pub(crate) run_dir: Option<PathBuf>,
    pub(crate) slots: (u8, u8),
    pub(crate) history: u8,
    pub(crate) checksums: bool,
    /// How many asynchronous sends may be on their way; 0 refuses a second.
    pub(crate) pending: u8,
    /// The name of the dtype that floats are cast to.
    pub(crate) cast: Option<String>,
    /// Registers the models as sources.
    pub(crate) register: bool,
}

impl TrainerSetup {
    /// One model of words.
    pub(crate) fn words(total: u64) -> Self {
        Self::of(&[("policy", Shape::Words(total))])
    }

    /// Two models of words.
    pub(crate) fn pair(total: u64) -> Self {
        Self::of(&[
            ("actor", Shape::Words(total)),
            ("critic", Shape::Words(total / 2)),
        ])
    }

    pub(crate) fn of(models: &[(&str, Shape)]) -> Self {
        Self {
            models: models
                .iter()
                .map(|(id, shape)| ((*id).to_owned(), *shape))
                .collect(),
            run_dir: None,
            slots: (2, 4),
            history: 0,
            checksums: false,
            pending: 0,
            cast: None,
            register: false,
        }
    }
}

/// What a trainer does. Its weights are number 1 at first.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum TrainerCommand {
    /// Decides everything; answers with the init info.
    Prepare(TrainerSetup),
    /// Connects, and expects these workers.
    Connect {
        expect: Vec<u32>,
        deadline: Duration,
    },
    /// Connects with these weights, and expects nobody.
    ConnectWith(Payload),
    /// Sends.
    Send(Payload, SendSettings),
    /// Begins to send.
    SendAsync(Payload, SendSettings),
    /// Waits for the asynchronous send of that place, counted from 0.
    Await(usize, Option<Duration>),
    /// Makes the weights this number in place, without a send.
    Change(u64),
    /// Counts all words up in place, without a send, until the next command.
    Scribble,
    /// Sends so many versions at full speed; every one is its own number, all
    /// models at once.
    Publish(Publish),
    /// Holds workers at what they have, or lets them go on.
    Hold(Vec<u32>, bool),
    /// Forgets workers that are gone.
    Forget(Vec<u32>),
    /// Tells of its workers.
    Status,
    /// Looks at its own view of a model: what was sent to all, or an older
    /// version.
    Look {
        model: Option<String>,
        version: Option<u64>,
    },
    /// The numbers of its own tensors.
    Source,
    /// Makes the digest of what was sent last.
    Digest,
    /// Damages the commit record of this version of the first model; answers
    /// with the words of the error to come.
    Corrupt(u64),
    /// Shuts down; nothing if it has.
    Close,
}

/// What is sent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Payload {
    /// The model's weights are made this number, and sent.
    Word(u64),
    /// The same, by a source that dies on the way.
    Dying(u64, Stage),
    /// The same, by a source that fails once some of it was read.
    Failing(u64),
    /// Other weights of the same shape; the trainer's stay as they are.
    Other(u64),
    /// Some models at once.
    Set(Vec<(String, u64)>),
    /// All models at once; the last one has another shape than it was set up with.
    Mixed(u64),
    /// Some models at once; the last one's source dies on the way.
    DyingSet(Vec<(String, u64)>, Stage),
    /// Some tensors of the model.
    Part(Vec<(String, u64)>),
    /// What is registered, made this number.
    Registered(u64),
    /// A model of another shape.
    Wrong(Shape),
    /// The same tensors as views that do not lie in order.
    Strided(u64),
    /// Written into a place that is lent.
    Loan(u64),
    /// Other weights for each of these workers.
    Each(Vec<(u32, u64)>),
    /// Other weights for each of these devices.
    Devices(Vec<(String, u64)>),
    /// An older version again.
    Old(u64),
}

/// The stages of a send at which its sender can die.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Stage {
    /// Before a byte was read.
    Begun,
    /// In the middle of writing a tensor.
    Midway,
    /// Everything is written and nothing published.
    Written,
    /// As soon as it is live.
    Live,
}

/// How it is sent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct SendSettings {
    pub(crate) model: Option<String>,
    pub(crate) workers: Option<Vec<u32>>,
    pub(crate) wait: Wait,
    pub(crate) deadline: Duration,
    pub(crate) partial: bool,
    pub(crate) version: Option<u64>,
    /// Whether workers that are late already are waited for: they are here, so that one
    /// that begins to receive just now is.
    pub(crate) wait_late: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Wait {
    Sent,
    Staged,
    Applied,
}

impl Default for SendSettings {
    fn default() -> Self {
        Self {
            model: None,
            workers: None,
            wait: Wait::Applied,
            deadline: longest(),
            partial: false,
            version: None,
            wait_late: true,
        }
    }
}

impl SendSettings {
    pub(crate) fn to(workers: &[u32]) -> Self {
        Self {
            workers: Some(workers.to_vec()),
            ..Self::default()
        }
    }

    pub(crate) fn wait(wait: Wait) -> Self {
        Self {
            wait,
            ..Self::default()
        }
    }

    pub(crate) fn within(deadline: Duration) -> Self {
        Self {
            deadline,
            ..Self::default()
        }
    }
}

/// Versions at full speed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Publish {
    /// The first number.
    pub(crate) from: u64,
    pub(crate) count: u64,
    /// Only ever wait until it is live, but for one in sixteen.
    pub(crate) fast: bool,
    /// Dies so many microseconds after the version of that place.
    pub(crate) fuse: Option<(u64, u64)>,
}

/// How a process joins.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Join {
    pub(crate) info: InitInfo,
    /// Only these models.
    pub(crate) models: Option<Vec<String>>,
    pub(crate) device: Option<String>,
    /// Insists on a model of this shape.
    pub(crate) insists: Option<Shape>,
    /// Loads into models of its own, which have these shapes; `None` for one
    /// that takes its shape from the sender.
    pub(crate) own: Vec<(String, Option<Shape>)>,
    /// Sleeps at once while it waits.
    pub(crate) sleeps: bool,
    pub(crate) deadline: Duration,
}

impl Join {
    pub(crate) fn new(info: &InitInfo) -> Self {
        Self {
            info: info.clone(),
            models: None,
            device: None,
            insists: None,
            own: Vec::new(),
            sleeps: false,
            deadline: longest(),
        }
    }
}

/// What a worker does.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum WorkerCommand {
    Join(Box<Join>),
    /// Receives the next version and holds it, in place of the one before.
    Receive(Option<Duration>),
    /// Asks for one and holds it.
    Pull(Want, Option<Duration>),
    /// Holds the newest, whether or not it was held before.
    Latest,
    /// Receives the next version into its own models.
    Load {
        timeout: Option<Duration>,
        load_fault: Option<LoadFault>,
    },
    /// Asks for one into its own models.
    PullInto {
        want: Want,
        load_fault: Option<LoadFault>,
    },
    /// Receives until a version of this number has come, and checks every one.
    ReadUntil {
        word: u64,
        pulls: bool,
    },
    /// Reads everything held so many times.
    Reread(u32),
    /// Releases everything held but the last so many.
    Keep(usize),
    /// Holds so many from here on; without it, the last one alone.
    Hoard(usize),
    /// The digests of everything held: made here, and found published.
    Digests,
    /// Verifies the checksums of everything held.
    Checksums,
    /// What it runs.
    Runs,
    /// Interrupts its next wait, so many times.
    Interrupt(u32),
    /// Receives without end; another thread interrupts it once it waits.
    ReceiveInterrupted,
    /// Hands the receiving, and models of its own, to a thread.
    Follow(SafePoints),
    /// What a thread has loaded.
    Following,
    /// Waits until a thread runs this version of its first model, or has it
    /// staged.
    FollowTo {
        version: u64,
        staged: bool,
    },
    /// Reads what a thread loads until it is of this number, and checks it.
    FollowUntil(u64),
    /// Waits until nothing more will come.
    FollowToTheEnd,
    SafePoint,
    /// Ends the thread; the worker receives in its own calls again.
    Unfollow,
    /// Joins to pass on what it receives; answers with the init info for workers
    /// of its own.
    Head(Box<Join>),
    /// Connects with these workers of its own.
    Feed(Vec<u32>),
    /// Passes on what comes next.
    PassOn,
    /// Passes on what comes by a thread, until [`WorkerCommand::PassOnByHand`].
    PassOnByThread,
    PassOnByHand,
    /// Leaves in order.
    Leave,
    /// Leaves with these words: it has failed.
    Fail(String),
    /// Forgets workers of its own that are gone.
    Forget(Vec<u32>),
}

/// When a model changes that a thread loads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum SafePoints {
    Implied,
    Declared,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Want {
    Newest,
    AtLeast(u64),
    Exactly(u64),
}

/// What goes wrong in a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum LoadFault {
    /// The last model fails once, half written.
    Once,
    /// The last model fails, half written, and so does the way back.
    Always,
    /// The process dies with the first model loaded and the last half written.
    Death,
    /// The first model waits, half written, for [`Command::GoOn`].
    Pause,
}

/// What a process answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Answer {
    /// A command has been read; what it leads to follows.
    Received,
    Done,
    Info(InitInfo),
    Sent(Sent),
    /// An asynchronous send was begun.
    Began(Vec<(String, u64)>),
    Seen(Seen),
    /// Nothing came in time.
    Nothing,
    Held(Vec<Seen>),
    Loaded(Loaded),
    /// A load is paused.
    Loading,
    Followed(Followed),
    Workers(Vec<Status>),
    /// The numbers of a trainer's own tensors, by model.
    Source(Vec<Vec<Option<u64>>>),
    /// The tensors' print, of a model that is not of words.
    Print(u64),
    Count(u64),
    /// Digests as text: made here, and found published.
    Digests(Vec<(String, Option<String>)>),
    Checked(Vec<bool>),
    Damaged(String),
    Runs {
        versions: Vec<(String, u64)>,
        epoch: u64,
        whole: bool,
    },
    ResourceCensus(ResourceCensus),
    Fault(Fault),
    /// A mix of versions was seen, or another promise was broken.
    Broken(String),
}

/// A report.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Sent {
    pub(crate) versions: Vec<(String, u64)>,
    pub(crate) lines: Vec<Line>,
    pub(crate) partial: Option<Vec<String>>,
    pub(crate) all_applied: bool,
    pub(crate) text: String,
    pub(crate) bytes: u64,
    /// How long the call took.
    pub(crate) took: Duration,
}

/// A worker's line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Line {
    pub(crate) worker: u32,
    pub(crate) pid: u32,
    pub(crate) outcome: OutcomeKind,
    /// Whether it was late before and has not been waited for.
    pub(crate) passed: bool,
    pub(crate) versions: Vec<u64>,
    pub(crate) reason: String,
}

impl Sent {
    pub(crate) fn outcomes(&self) -> Vec<(u32, OutcomeKind)> {
        self.lines
            .iter()
            .map(|line| (line.worker, line.outcome))
            .collect()
    }

    pub(crate) fn line(&self, worker: u32) -> &Line {
        let mut lines = self.lines.iter();
        lines
            .find(|line| line.worker == worker)
            .unwrap_or_else(|| panic!("worker {worker}: {self:?}"))
    }

    /// The version of the only model.
    pub(crate) fn version(&self) -> u64 {
        let [(_, version)] = &self.versions[..] else {
            panic!("one version: {self:?}")
        };
        *version
    }
}

/// What became of a load.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Loaded {
    /// What came, if it was loaded.
    pub(crate) versions: Option<Vec<u64>>,
    pub(crate) fault: Option<Fault>,
    /// The numbers in the worker's own models afterwards; `None` for tensors
    /// that have several.
    pub(crate) words: Vec<Vec<Option<u64>>>,
    /// What the worker says it runs.
    pub(crate) runs: Vec<u64>,
    pub(crate) whole: bool,
    /// How often its models were loaded by this one call.
    pub(crate) loads: u64,
}

impl Loaded {
    /// The number that everything in the worker's models is.
    pub(crate) fn word(&self) -> Option<u64> {
        same(&self.words)
    }
}

/// What a thread has loaded.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Followed {
    /// The numbers in the models.
    pub(crate) words: Vec<Vec<Option<u64>>>,
    pub(crate) runs: Vec<u64>,
    /// What waits for a safe point.
    pub(crate) staged: Vec<u64>,
    pub(crate) state: FollowerState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum FollowerState {
    Follows,
    Searches,
    SenderClosed,
    SenderDied,
    Failed,
}

impl Followed {
    /// The version of its only model, and the number that it is.
    pub(crate) fn one(&self) -> (u64, u64) {
        let word = same(&self.words);
        let (&[version], Some(word)) = (&self.runs[..], word) else {
            panic!("one version of one model: {self:?}")
        };
        (version, word)
    }
}

/// The number that everything is.
fn same(words: &[Vec<Option<u64>>]) -> Option<u64> {
    let mut all = words.iter().flatten();
    let first = *all.next()?;
    all.all(|word| *word == first).then_some(first).flatten()
}

/// A worker as its sender sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Status {
    pub(crate) worker: u32,
    pub(crate) pid: u32,
    pub(crate) device: String,
    pub(crate) held: bool,
    pub(crate) versions: Vec<u64>,
    /// What became of the last send there.
    pub(crate) last: Option<OutcomeKind>,
    /// How it went, if it did not leave in order.
    pub(crate) gone: Option<OutcomeKind>,
}

impl Status {
    pub(crate) fn of(status: &WorkerStatus) -> Self {
        Self {
            worker: status.worker.0,
            pid: status.pid,
            device: status.device.clone(),
            held: status.held,
            versions: status.versions.iter().map(|version| version.0).collect(),
            last: status.last.as_ref().map(|last| last.outcome.kind()),
            gone: status.gone.as_ref().map(|gone| gone.kind()),
        }
    }
}

/// What a process has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ResourceCensus {
    pub(crate) descriptors: usize,
    pub(crate) threads: usize,
    pub(crate) shared_maps: usize,
}

macro_rules! expects {
    ($($(#[$doc:meta])* $name:ident: $variant:ident => $type:ty,)*) => {
        impl Answer {
            $($(#[$doc])*
            pub(crate) fn $name(self) -> $type {
                match self {
                    Self::$variant(value) => value,
                    other => panic!("{} was expected, not {other:?}", stringify!($variant)),
                }
            })*
        }
    };
}

expects! {
    info: Info => InitInfo,
    sent: Sent => Sent,
    began: Began => Vec<(String, u64)>,
    seen: Seen => Seen,
    held: Held => Vec<Seen>,
    loaded: Loaded => Loaded,
    followed: Followed => Followed,
    workers: Workers => Vec<Status>,
    source: Source => Vec<Vec<Option<u64>>>,
    print: Print => u64,
    count: Count => u64,
    digests: Digests => Vec<(String, Option<String>)>,
    damaged: Damaged => String,
    resource_census: ResourceCensus => ResourceCensus,
    fault: Fault => Fault,
}
