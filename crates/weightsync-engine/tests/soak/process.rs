//! A trainer or worker process that runs one command at a time.
//!
//! The conformance crate has such a process too. This one stays apart, because its commands
//! depend on shared memory: every word of a version is the same number, so that a torn version
//! shows, and a command writes the trainer's memory between sends. The other runs the scenarios
//! of every scheme, and its commands are private to that crate.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use weightsync_engine::worker::WorkerProcess;
use weightsync_engine::{
    Cascade, CascadeInBackground, Expect, InitInfo, Outcome, Receiver, ReceiverSetup, SendOptions,
    Sender, SenderSetup, Snapshot, Tensors, WaitFor, WaitStyle,
};

use crate::scale::longest;

const TENSOR: &str = "words";

type Failure = Box<dyn std::error::Error>;

/// What a process is told. Every command has one answer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Command {
    /// Become a trainer of so many words, with so many slots; its first version
    /// is all ones. Answered once the workers are there.
    Lead { setup: Lead, workers: u32 },
    /// Make every word this number, and send.
    Send { word: u64, deadline: Duration },
    /// Count all words up in place, again and again, without a send, until the
    /// next order comes.
    Scribble,
    /// Become this worker.
    Join {
        info: InitInfo,
        worker: u32,
        sleeps: bool,
    },
    /// Become this worker, and pass everything on to so many workers of its own,
    /// in the background. Answered once those are there.
    Pass {
        info: InitInfo,
        worker: u32,
        sub: Lead,
        workers: u32,
    },
    /// Receive the next version and hold it; wait so long, or without end.
    Receive(Option<Duration>),
    /// Hold the newest version, whether or not it was held before.
    Latest,
    /// Read everything held so many times.
    Reread { times: u32 },
    /// Release everything held but the last so many.
    Keep(usize),
}

/// How a process sets itself up as a trainer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Lead {
    pub model: String,
    pub run_dir: std::path::PathBuf,
    pub words: u64,
    pub slots: u8,
}

/// What it answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    Done,
    /// A version was sent: how each worker fared, and how long it took.
    Sent {
        lines: Vec<(u32, Fared)>,
        took: Duration,
    },
    /// The words of the version that came, and its number.
    Version {
        number: u64,
        word: u64,
    },
    /// The words of every version held, the last one last.
    Held(Vec<u64>),
    /// No version came in time.
    Nothing,
    /// The trainer died; this was its process.
    TrainerDied(u32),
    /// How often all words were counted up.
    Scribbled(u64),
}

/// A worker's outcome.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Fared {
    Applied,
    Refused(String),
    Died,
    Late,
    Other,
}

impl Lead {
    /// The first phase.
    pub fn setup(&self, weights: &Tensors) -> weightsync_engine::Result<SenderSetup> {
        self.configure(SenderSetup::new(&self.model, weights)?)
    }

    fn configure(&self, setup: SenderSetup) -> weightsync_engine::Result<SenderSetup> {
        Ok(setup
            .slots(self.slots, self.slots)
            .run_dir(&self.run_dir)?
            .send_timeout(Some(longest())))
    }
}

/// Obeys until the pipe is closed.
pub fn obey(worker: WorkerProcess) -> Result<(), Failure> {
    let mut process = Process::default();
    while let Some(frame) = worker.recv(None)? {
        let command: Command = postcard::from_bytes(&frame)?;
        let answer = match command {
            Command::Scribble => process.scribble(&worker)?,
            command => process.act(command)?,
        };
        worker.send(&postcard::to_stdvec(&answer)?)?;
    }
    Ok(())
}

#[derive(Default)]
struct Process {
    weights: Tensors,
    sender: Option<Sender>,
    receiver: Option<Receiver>,
    /// What passes on, for as long as it lives.
    cascade: Option<CascadeInBackground>,
    held: Vec<Snapshot>,
}

impl Process {
    fn act(&mut self, command: Command) -> Result<Answer, Failure> {
        match command {
            Command::Lead { setup, workers } => {
                let ones = vec![1_u64; setup.words as usize];
                self.weights.insert(TENSOR, [setup.words], ones)?;
                let setup = setup.setup(&self.weights)?;
                let expected = Expect::Count(workers as usize);
                self.sender = Some(setup.connect(&self.weights, expected, Some(longest()))?);
                Ok(Answer::Done)
            }
            Command::Send { word, deadline } => {
                self.weights.slice_mut::<u64>(TENSOR)?.fill(word);
                let sender = self.sender.as_mut().ok_or("no trainer")?;
                let begun = Instant::now();
                let report = sender.send_with(
                    &self.weights,
                    &SendOptions::new()
                        .wait(WaitFor::Applied)
                        .timeout(Some(deadline)),
                )?;
                let lines = report.workers.iter();
                let lines = lines.map(|line| (line.worker.0, fared(&line.outcome)));
                Ok(Answer::Sent {
                    lines: lines.collect(),
                    took: begun.elapsed(),
                })
            }
            Command::Join {
                info,
                worker,
                sleeps,
            } => {
                let mut setup = ReceiverSetup::new(info, worker);
                if sleeps {
                    setup = setup.wait_style(WaitStyle::Sleep);
                }
                self.receiver = Some(setup.connect(Some(longest()))?);
                Ok(Answer::Done)
            }
            Command::Pass {
                info,
                worker,
                sub,
                workers,
            } => {
                let cascade = Cascade::join(ReceiverSetup::new(info, worker), Some(longest()))?;
                let cascade = cascade.configure(|setup| sub.configure(setup))?;
                let cascade = cascade.connect(Expect::Count(workers as usize), Some(longest()))?;
                self.cascade = Some(cascade.in_background()?);
                Ok(Answer::Done)
            }
            Command::Receive(timeout) => {
                let receiver = self.receiver.as_mut().ok_or("no worker")?;
                let received = match timeout {
                    None => receiver.recv().map(Some),
                    Some(timeout) => receiver.recv_timeout(timeout),
                };
                match received {
                    Ok(Some(snapshot)) => self.hold(snapshot),
                    Ok(None) => Ok(Answer::Nothing),
                    Err(weightsync_engine::Error::SenderDied { pid }) => {
                        Ok(Answer::TrainerDied(pid.ok_or("no pid of the trainer")?))
                    }
                    Err(error) => Err(error.into()),
                }
            }
            Command::Latest => {
                let receiver = self.receiver.as_mut().ok_or("no worker")?;
                match receiver.latest()? {
                    Some(snapshot) => self.hold(snapshot),
                    None => Ok(Answer::Nothing),
                }
            }
            Command::Reread { times } => {
                let first = self.words()?;
                for _ in 1..times {
                    let again = self.words()?;
                    if again != first {
                        return Err(format!("what is held changed: {first:?}, {again:?}").into());
                    }
                }
                Ok(Answer::Held(first))
            }
            Command::Keep(count) => {
                let gone = self.held.len().saturating_sub(count);
                self.held.drain(..gone);
                Ok(Answer::Done)
            }
            Command::Scribble => Err("a loop of its own".into()),
        }
    }

    fn scribble(&mut self, worker: &WorkerProcess) -> Result<Answer, Failure> {
        let mut times = 0;
        loop {
            for word in self.weights.slice_mut::<u64>(TENSOR)? {
                *word = word.wrapping_add(1);
            }
            times += 1;
            // Any frame is the end, and has no answer of its own.
            if worker.is_closed() || worker.recv(Some(Duration::ZERO))?.is_some() {
                return Ok(Answer::Scribbled(times));
            }
        }
    }

    fn hold(&mut self, snapshot: Snapshot) -> Result<Answer, Failure> {
        let (number, word) = (snapshot.version().0, word(&snapshot)?);
        self.held.push(snapshot);
        Ok(Answer::Version { number, word })
    }

    fn words(&self) -> Result<Vec<u64>, Failure> {
        self.held.iter().map(word).collect()
    }
}

/// The number that every word of a version is.
fn word(snapshot: &Snapshot) -> Result<u64, Failure> {
    let words = snapshot.slice::<u64>(TENSOR)?;
    let first = words[0];
    match words.iter().position(|word| *word != first) {
        None => Ok(first),
        Some(at) => Err(format!("TORN: word 0 is {first}, word {at} is {}", words[at]).into()),
    }
}

fn fared(outcome: &Outcome) -> Fared {
    match outcome {
        Outcome::Applied => Fared::Applied,
        Outcome::Refused { reason } => Fared::Refused(reason.clone()),
        Outcome::Died => Fared::Died,
        Outcome::Late => Fared::Late,
        _ => Fared::Other,
    }
}
