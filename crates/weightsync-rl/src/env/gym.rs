//! Environments of Gymnasium, stepped by a Python process.
//!
//! A process of [`SOURCE`] has the environments of one rollout. Its standard output
//! is a socket, which both ends write to: numbers are little-endian, and lengths
//! follow from what it says at first.
//!
//! | message | bytes |
//! |---|---|
//! | at first | quantities of an observation (u32), kind of actions (u8), their number (u32), least and greatest value (f32), threshold or NaN (f32) |
//! | reset | 0 (u8), environment (u32), seed or −1 (i64) |
//! | step | 1 (u8), environment (u32), action (u32, or f32s) |
//! | answer to a reset | observation (f32s) |
//! | answer to a step | reward (f32), terminated (u8), truncated (u8), observation (f32s) |
//!
//! A byte 0 comes before what the process says. A byte 1, a length (u32) and a text
//! say instead why it fails.

use std::{
    fmt,
    io::{self, Read, Write},
    marker::PhantomData,
    os::{fd::OwnedFd, unix::net::UnixStream},
    process::{Child, Command, ExitStatus, Stdio},
    time::Duration,
};

use rand::{RngExt, SeedableRng};
use serde::{Deserialize, Serialize};

use super::{Action, EnvRng, Envs, Transition};
use crate::{Error, frames::ActionKind};

/// What Python runs.
const SOURCE: &str = include_str!("gym.py");
/// Bytes of what a process says at first.
const HEAD: usize = 21;
/// The most quantities in an observation.
const MAX_OBSERVATION: u32 = 1 << 16;
/// The longest reason that is read.
const MAX_REASON: u32 = 4096;

/// A task of Gymnasium, as a worker is told which one to run.
///
/// Its environments run in a Python process of each worker. Observations are a
/// `Box` of any shape, flattened; actions are `Discrete`, or a `Box` of up to
/// eight quantities with the same bounds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Gym {
    id: String,
    python: String,
    observation_len: u32,
    actions: GymAction,
    threshold: Option<f32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
enum GymAction {
    Discrete(u32),
    Continuous { len: u32, range: [f32; 2] },
}

impl Gym {
    /// How long its Python may take to make the environments, or for a step.
    pub const PATIENCE: Duration = Duration::from_secs(60);
    /// The most quantities in a continuous action.
    pub(crate) const MAX_QUANTITIES: usize = 8;

    /// Asks Gymnasium, run by the program `python`, about the environment `id`.
    ///
    /// # Errors
    /// [`Error::Gym`] says what is missing, or which space is not supported.
    pub fn find(id: &str, python: &str) -> Result<Self, Error> {
        let mut process = GymProcess::start(id, python, 1)?;
        let mut head = [0; HEAD];
        // Python describes the environment before the first request.
        process.answer(&mut head)?;
        let word =
            |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let (observation_len, count) = (word(0), word(5));
        let [low, high, threshold] = [word(9), word(13), word(17)].map(f32::from_bits);
        let refuse = |reason: String| Err(process.failure(reason));
        if !(1..=MAX_OBSERVATION).contains(&observation_len) {
            return refuse(format!(
                "an observation has {observation_len} quantities: expected 1 to {MAX_OBSERVATION}"
            ));
        }
        // Only what a policy here can produce is accepted.
        let actions = match head[4] {
            0 if count > 0 => GymAction::Discrete(count),
            1 if (1..=Self::MAX_QUANTITIES).contains(&(count as usize)) => {
                let range = [low, high];
                GymAction::Continuous { len: count, range }
            }
            _ => {
                return refuse(format!(
                    "an action has {count} quantities: expected 1 to {}",
                    Self::MAX_QUANTITIES
                ));
            }
        };
        Ok(Self {
            id: id.to_owned(),
            python: python.to_owned(),
            observation_len,
            actions,
            // NaN stands for no threshold, because the message has a fixed length.
            threshold: (!threshold.is_nan()).then_some(threshold),
        })
    }

    /// The name the task is registered under.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Number of `f32`s in one observation.
    pub fn observation_len(&self) -> usize {
        self.observation_len as usize
    }

    /// Number of discrete actions, or of quantities in a continuous one.
    pub fn actions(&self) -> usize {
        match self.actions {
            GymAction::Discrete(count) => count as usize,
            GymAction::Continuous { len, .. } => len as usize,
        }
    }

    /// The mean return at which Gymnasium calls the task solved, if it says so.
    pub fn reward_threshold(&self) -> Option<f32> {
        self.threshold
    }

    pub(crate) fn action_kind(&self) -> ActionKind {
        match self.actions {
            GymAction::Discrete(_) => ActionKind::Discrete,
            GymAction::Continuous { len, .. } => ActionKind::Continuous(len as usize),
        }
    }

    pub(crate) fn action_range(&self) -> [f32; 2] {
        match self.actions {
            GymAction::Discrete(_) => [0.0; 2],
            GymAction::Continuous { range, .. } => range,
        }
    }
}

/// Environments in a Python process, which ends with them.
#[derive(Debug)]
pub(crate) struct GymEnvs<A> {
    gym: Gym,
    process: GymProcess,
    /// `[P, observation_len]`.
    observations: Vec<f32>,
    action: PhantomData<fn(A)>,
}

impl<A: Action> GymEnvs<A> {
    /// `count` environments, each at the start of an episode; `A` is the kind of
    /// its actions.
    pub fn start(gym: Gym, count: usize, seed: u64) -> Result<Self, Error> {
        let mut process = GymProcess::start(&gym.id, &gym.python, count)?;
        // What it says of the spaces is what it said when it was found.
        process.answer(&mut [0; HEAD])?;
        let mut envs = Self {
            observations: vec![0.0; count * gym.observation_len()],
            gym,
            process,
            action: PhantomData,
        };
        let mut seeds = EnvRng::seed_from_u64(seed);
        for index in 0..count {
            envs.begin(index, i64::from(seeds.random::<u32>()))?;
        }
        Ok(envs)
    }

    /// Begins an episode; without a seed, −1, the environment's own generator goes on.
    fn begin(&mut self, index: usize, seed: i64) -> Result<(), Error> {
        let mut request = vec![0];
        request.extend((index as u32).to_le_bytes());
        request.extend(seed.to_le_bytes());
        self.ask(&request, index, &mut [])
    }

    /// Sends a request, and reads the answer: `head`, then the observation.
    fn ask(&mut self, request: &[u8], index: usize, head: &mut [u8]) -> Result<(), Error> {
        self.process.say(request)?;
        let len = self.gym.observation_len();
        let mut answer = vec![0; head.len() + 4 * len];
        self.process.answer(&mut answer)?;
        let (first, observation) = answer.split_at(head.len());
        head.copy_from_slice(first);
        let (quantities, _) = observation.as_chunks::<4>();
        let row = &mut self.observations[index * len..(index + 1) * len];
        for (to, from) in row.iter_mut().zip(quantities) {
            *to = f32::from_le_bytes(*from);
        }
        Ok(())
    }
}

impl<A: Action> Envs for GymEnvs<A> {
    type Action = A;
    type Error = Error;

    fn len(&self) -> usize {
        self.observations.len() / self.gym.observation_len()
    }

    fn observation_len(&self) -> usize {
        self.gym.observation_len()
    }

    fn actions(&self) -> usize {
        self.gym.actions()
    }

    fn action_range(&self) -> [f32; 2] {
        self.gym.action_range()
    }

    fn observe_one(&self, index: usize, out: &mut [f32]) {
        let len = self.gym.observation_len();
        out.copy_from_slice(&self.observations[index * len..(index + 1) * len]);
    }

    fn step(&mut self, index: usize, action: A) -> Result<Transition, Error> {
        let mut request = vec![1];
        request.extend((index as u32).to_le_bytes());
        action.write(&mut request);
        let mut head = [0; 6];
        self.ask(&request, index, &mut head)?;
        let [r0, r1, r2, r3, terminated, truncated] = head;
        Ok(Transition {
            reward: f32::from_le_bytes([r0, r1, r2, r3]),
            terminated: terminated != 0,
            truncated: truncated != 0,
        })
    }

    fn reset(&mut self, index: usize) -> Result<(), Error> {
        self.begin(index, -1)
    }
}

/// A Python process, killed when it fails or is dropped. Its standard input is the
/// pipe by whose end the kernel kills it where this process dies.
struct GymProcess {
    id: String,
    link: UnixStream,
    child: Child,
    /// Why it failed. An answer that comes later would be taken for another's.
    failed: Option<String>,
}

impl GymProcess {
    fn start(id: &str, python: &str, count: usize) -> Result<Self, Error> {
        let mut command = Command::new(python);
        command.args(["-c", SOURCE, id, &count.to_string()]);
        Self::spawn(id, command)
    }

    fn spawn(id: &str, mut command: Command) -> Result<Self, Error> {
        let failed = |reason| Error::Gym {
            id: id.to_owned(),
            reason,
        };
        let unlinked = |error: io::Error| failed(format!("a socket cannot be made: {error}"));
        let (link, theirs) = UnixStream::pair().map_err(unlinked)?;
        // An environment that hangs must not hold the worker for ever. The timeout is for each
        // read.
        link.set_read_timeout(Some(Gym::PATIENCE))
            .map_err(unlinked)?;
        link.set_write_timeout(Some(Gym::PATIENCE))
            .map_err(unlinked)?;
        let child = command
            // The end of this pipe is what kills the child when this process dies: nothing is ever
            // written to it.
            .stdin(Stdio::piped())
            .stdout(OwnedFd::from(theirs))
            .spawn()
            .map_err(|error| {
                let python = command.get_program().display();
                failed(format!(
                    "`{python}` cannot be run ({error}): install Python with Gymnasium, or name \
                     one that is there"
                ))
            })?;
        Ok(Self {
            id: id.to_owned(),
            link,
            child,
            failed: None,
        })
    }

    fn say(&mut self, message: &[u8]) -> Result<(), Error> {
        // An answer that came late would be taken for that of the next request.
        if let Some(reason) = &self.failed {
            return Err(self.failure(format!(
                "it failed before ({reason}): build the collector again"
            )));
        }
        let said = self.link.write_all(message);
        said.map_err(|error| self.broken(&error))
    }

    /// Reads what it says next, as long as `out`.
    fn answer(&mut self, out: &mut [u8]) -> Result<(), Error> {
        let mut status = [0];
        let read = self
            .link
            .read_exact(&mut status)
            .and_then(|()| match status {
                [0] => self.link.read_exact(out),
                _ => Ok(()),
            });
        read.map_err(|error| self.broken(&error))?;
        // A failure comes instead of the answer, so its length is not known yet.
        if status == [0] {
            return Ok(());
        }
        let mut reason = Vec::new();
        let mut len = [0; 4];
        let said = self.link.read_exact(&mut len).and_then(|()| {
            // Bounded: what Python raises may be of any length.
            let len = u32::from_le_bytes(len).min(MAX_REASON);
            (&self.link).take(u64::from(len)).read_to_end(&mut reason)
        });
        said.map_err(|error| self.broken(&error))?;
        Err(self.fail(String::from_utf8_lossy(&reason).into_owned()))
    }

    fn broken(&mut self, error: &io::Error) -> Error {
        let late = [io::ErrorKind::WouldBlock, io::ErrorKind::TimedOut];
        if late.contains(&error.kind()) {
            return self.fail(format!("no answer within {:?}", Gym::PATIENCE));
        }
        // It has closed its end, so it is about to leave, if it has not left.
        let reason = match self.end() {
            Ok(status) => format!("its Python ended ({status})"),
            Err(error) => error.to_string(),
        };
        self.fail(reason)
    }

    fn fail(&mut self, reason: String) -> Error {
        // A child that failed is ended: what it would still say fits no request.
        let _ = self.end();
        self.failed = Some(reason.clone());
        self.failure(reason)
    }

    /// Kills it, unless it has ended already.
    fn end(&mut self) -> io::Result<ExitStatus> {
        // An error means that it has ended already.
        let _ = self.child.kill();
        self.child.wait()
    }

    fn failure(&self, reason: String) -> Error {
        let id = self.id.clone();
        Error::Gym { id, reason }
    }
}

impl fmt::Debug for GymProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("GymProcess").field(&self.child.id()).finish()
    }
}

impl Drop for GymProcess {
    fn drop(&mut self) {
        let _ = self.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_is_late_is_ended() {
        let mut command = Command::new("sleep");
        command.arg("100000");
        let mut process = GymProcess::spawn("Late-v0", command).unwrap();
        let wait = Some(Duration::from_millis(1));
        process.link.set_read_timeout(wait).unwrap();
        process.say(&[0; 13]).unwrap();
        let error = process.answer(&mut [0]).unwrap_err().to_string();
        assert!(error.contains("no answer within 60s"), "{error}");
        let ended = process.child.try_wait().unwrap();
        assert!(ended.is_some(), "it may answer yet");
        let error = process.say(&[0; 13]).unwrap_err().to_string();
        let told = "it failed before (no answer within 60s): build the collector again";
        assert!(error.ends_with(told), "{error}");
    }
}
