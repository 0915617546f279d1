//! Environments that Rust steps, bound to Python. Their states stay here; what is seen of them goes
//! into arrays of the caller, by address.

use std::sync::{Mutex, MutexGuard};

use pyo3::prelude::*;
use weightsync_rl::Error;
use weightsync_rl::collector::Task;
use weightsync_rl::env::Transition;
use weightsync_rl::frames::{Actions, Frames};
use weightsync_rl::rollout::{Exploration, RolloutOptions, TaskRollout, UnderWay};
use zerocopy::FromBytes;

use crate::errors::{LifecycleError, SettingError, WrongTypeError, rl_exception};
use crate::options::{wants, whole};
use crate::raw::{self, ByteSpan, RawAddress};

/// The most environments of one batch.
const MOST: usize = 1 << 20;

/// Fewer environments than this are stepped in less time than it takes to get the interpreter's
/// lock back.
const FEW: usize = 64;

/// Environments of one built-in task.
#[pyclass(frozen, module = "weightsync._native")]
pub struct BuiltinEnvs {
    held: Mutex<TaskRollout>,
    task: Task,
    envs: usize,
}

/// What stays the same while a part of a batch is collected.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct CollectSettings {
    is_greedy: bool,
    /// The most steps of a trajectory; 0 sets no limit.
    longest: u32,
    /// In the order of [`widths`], the address of each column's first frame and the bytes from one
    /// environment to the next; None for a column that there is not.
    columns: Vec<Option<(RawAddress, usize)>>,
    /// Where the observations go that the environments show in the end.
    observations: RawAddress,
}

/// The lengths of the episodes under way, their trajectories, and the next trajectory's number.
type Episodes = (Vec<u32>, Vec<u64>, u64);

#[pymethods]
impl BuiltinEnvs {
    #[new]
    fn new(
        py: Python<'_>,
        task: &Bound<'_, PyAny>,
        num_envs: &Bound<'_, PyAny>,
        seed: u64,
    ) -> PyResult<Self> {
        // Errors name the setting as the user knows it.
        let name: String = whole("id", "the name of a task, such as 'CartPole-v1'", task)?;
        let task = Task::named(&name).map_err(|error| rl_exception(py, error))?;
        let possible = format!("a whole number from 1 to {MOST}");
        let count: usize = whole("num_envs", &possible, num_envs)?;
        if !(1..=MOST).contains(&count) {
            return Err(wants("num_envs", &possible, num_envs));
        }
        let rollout = TaskRollout::new(task.clone(), count, seed);
        let rollout = rollout.map_err(|error| rl_exception(py, error))?;
        Ok(Self {
            held: Mutex::new(rollout),
            task,
            envs: count,
        })
    }

    /// The number of quantities in an observation, that of actions or of quantities in a continuous
    /// one, and the range of these quantities, None where actions are discrete.
    #[getter]
    fn sizes(&self) -> (usize, usize, Option<[f32; 2]>) {
        let task = &self.task;
        let range = task.is_continuous().then(|| task.action_range());
        (task.observation_len(), task.actions(), range)
    }

    /// Begins new episodes in these environments, with a seed or without, and writes what they show
    /// into their rows of an array `[P, quantities]`.
    fn reset(
        &self,
        py: Python<'_>,
        envs: Vec<(usize, Option<u64>)>,
        observations: RawAddress,
    ) -> PyResult<()> {
        let held = &mut *self.held()?;
        // Before anything is reset: a wrong number changes no environment.
        if let Some((env, _)) = envs.iter().find(|(env, _)| *env >= self.envs) {
            let text = format!("environment {env}: expected 0 to {}", self.envs - 1);
            return Err(SettingError::new_err(text));
        }
        let len = self.task.observation_len();
        self.fill(py, [(observations, len * 4)], |[observations]| {
            let mut seen = vec![0.0_f32; len];
            for (env, seed) in envs {
                held.reset(env, seed);
                held.observe(env, &mut seen);
                put(&mut observations[env * len * 4..], seen.iter().map(bytes));
            }
            Ok(())
        })
    }

    /// Takes a step in each environment that `which` names, and writes into its rows what it led
    /// to: observations (`F32`), rewards (`F64`), and whether it is terminated and truncated.
    /// Actions are `I64`, or `F32` where they are continuous.
    #[expect(unsafe_code, reason = "it vouches for the addresses")]
    fn step(
        &self,
        py: Python<'_>,
        which: Vec<bool>,
        actions: RawAddress,
        room: (RawAddress, RawAddress, RawAddress, RawAddress),
    ) -> PyResult<()> {
        let held = &mut *self.held()?;
        if which.len() != self.envs {
            return Err(self.miscounted(which.len()));
        }
        let span = ByteSpan {
            address: actions,
            before: 0,
            len: self.envs * action_width(&self.task),
        };
        // Copied out first, so no array is lent for reading while the others are lent for writing.
        let read = |given: &[&[u8]]| self.actions(given[0], &which);
        // SAFETY: the Python files make the promise of an address for the actions.
        let actions = unsafe { raw::lend(&[span], read) };
        let actions = actions.map_err(|_| hollow())?;
        let actions = actions.map_err(|error| rl_exception(py, error))?;
        let len = self.task.observation_len();
        let (following, rewards, terminated, truncated) = room;
        let room = [
            (following, len * 4),
            (rewards, 8),
            (terminated, 1),
            (truncated, 1),
        ];
        self.fill(py, room, |[following, rewards, terminated, truncated]| {
            let mut seen = vec![0.0_f32; len];
            for env in (0..which.len()).filter(|env| which[*env]) {
                let done: Transition = held.step(env, &actions)?;
                held.observe(env, &mut seen);
                put(&mut following[env * len * 4..], seen.iter().map(bytes));
                let reward = f64::from(done.reward).to_ne_bytes();
                put(&mut rewards[env * 8..], [reward].into_iter());
                terminated[env] = done.terminated.into();
                truncated[env] = done.truncated.into();
            }
            Ok(())
        })
    }

    /// Has a policy take so many steps in all environments, and writes their frames from the first
    /// number's place in time on. Its tensors are a name, an address and a count of elements (`F32`)
    /// each. Returns the episodes under way afterwards.
    #[expect(unsafe_code, reason = "it vouches for the addresses")]
    fn run(
        &self,
        py: Python<'_>,
        part: CollectSettings,
        tensors: Vec<(String, RawAddress, usize)>,
        steps: (usize, usize),
        version: u64,
        episodes: Episodes,
    ) -> PyResult<Episodes> {
        let (at, steps) = steps;
        let (lengths, traj_ids, next_id) = episodes;
        let held = &mut *self.held()?;
        let weights = tensors.iter().map(|(_, address, count)| ByteSpan {
            address: *address,
            before: 0,
            len: count * 4,
        });
        let weights: Vec<ByteSpan> = weights.collect();
        let rows = self.rows(&part, at, steps)?;
        let options = RolloutOptions {
            max_frames_per_traj: part.longest,
            exploration: match part.is_greedy {
                true => Exploration::Mode,
                false => Exploration::Random,
            },
            ..RolloutOptions::default()
        };
        let mut under_way = UnderWay {
            lengths,
            traj_ids,
            next_id,
        };
        let run = |given: &[&[u8]]| {
            let tensor = |wanted: &str| {
                let index = tensors.iter().position(|(name, ..)| name == wanted)?;
                <[f32]>::ref_from_bytes(given[index]).ok()
            };
            held.run(&tensor, version, steps, options, &mut under_way)
        };
        // One release of the lock for all steps.
        let done = py.detach(|| {
            // SAFETY: the Python files make the promise of an address for each tensor.
            let frames = unsafe { raw::lend(&weights, run) }.map_err(|_| None)?;
            let frames = frames.map_err(Some)?;
            let write = |rows: &mut [&mut [u8]]| write(&frames, self.envs, steps, rows);
            // SAFETY: the same for each column, of whose frames no other worker writes these.
            unsafe { raw::lend_mut(&rows, write) }.map_err(|_| None)
        });
        done.map_err(|error| error.map_or_else(hollow, |error| rl_exception(py, error)))?;
        // What the environments show after the last step, for the next call.
        self.observe(py, held, part.observations)?;
        Ok((under_way.lengths, under_way.traj_ids, under_way.next_id))
    }

    fn __len__(&self) -> usize {
        self.envs
    }

    fn __repr__(&self) -> String {
        format!("<BuiltinEnvs: {} × {}>", self.envs, self.task.name())
    }
}

impl BuiltinEnvs {
    fn held(&self) -> PyResult<MutexGuard<'_, TaskRollout>> {
        // Not a wait: in a forked child the thread that would unlock it may not be there.
        self.held.try_lock().map_err(|_| {
            LifecycleError::new_err(
                "these environments are stepped by another thread: give each thread its own",
            )
        })
    }

    /// Calls with the bytes of arrays that have so many for each environment.
    #[expect(unsafe_code, reason = "it vouches for the addresses")]
    fn fill<const N: usize>(
        &self,
        py: Python<'_>,
        arrays: [(RawAddress, usize); N],
        call: impl FnOnce([&mut [u8]; N]) -> Result<(), Error> + Send,
    ) -> PyResult<()> {
        let spans = arrays.map(|(address, width)| ByteSpan {
            address,
            before: 0,
            len: self.envs * width,
        });
        let call = |lent: &mut [&mut [u8]]| {
            let mut lent = lent.iter_mut();
            call(std::array::from_fn(|_| {
                &mut **lent.next().expect("as many as spans")
            }))
        };
        // SAFETY: the Python files make the promise of an address for each array, which has room
        // for all environments and which nothing else uses until this returns.
        let filled = || unsafe { raw::lend_mut(&spans, call) };
        let filled = match self.envs < FEW {
            true => filled(),
            false => py.detach(filled),
        };
        let filled = filled.map_err(|_| hollow())?;
        filled.map_err(|error| rl_exception(py, error))
    }

    /// Writes what each environment shows now into its row.
    fn observe(&self, py: Python<'_>, held: &mut TaskRollout, rows: RawAddress) -> PyResult<()> {
        let len = self.task.observation_len();
        self.fill(py, [(rows, len * 4)], |[observations]| {
            let mut seen = vec![0.0_f32; len];
            for (env, row) in observations.chunks_exact_mut(len * 4).enumerate() {
                held.observe(env, &mut seen);
                put(row, seen.iter().map(bytes));
            }
            Ok(())
        })
    }

    /// The actions in an array of them.
    fn actions(&self, given: &[u8], which: &[bool]) -> Result<Actions, Error> {
        let width = action_width(&self.task);
        // Native order: the array is numpy's or torch's own.
        if self.task.is_continuous() {
            let values = given.as_chunks::<4>().0.iter();
            return Ok(Actions::Continuous {
                values: values.map(|value| f32::from_ne_bytes(*value)).collect(),
                len: width / 4,
            });
        }
        let numbers: Vec<i64> = given
            .as_chunks::<8>()
            .0
            .iter()
            .map(|action| i64::from_ne_bytes(*action))
            .collect();
        let taken = numbers.iter().zip(which).filter(|(_, taken)| **taken);
        self.task.check_actions(taken.map(|(action, _)| *action))?;
        // Those that are not taken may be anything.
        let numbers = numbers
            .iter()
            .map(|action| u32::try_from(*action).unwrap_or(0));
        Ok(Actions::Discrete(numbers.collect()))
    }

    /// The places of so many frames: of each column each environment's.
    fn rows(&self, part: &CollectSettings, at: usize, steps: usize) -> PyResult<Vec<ByteSpan>> {
        let widths = widths(&self.task);
        if part.columns.len() != widths.len() {
            return Err(SettingError::new_err(format!(
                "expected {} columns, got {}",
                widths.len(),
                part.columns.len()
            )));
        }
        let mut rows = Vec::with_capacity(widths.len() * self.envs);
        for (column, width) in part.columns.iter().zip(widths) {
            for env in 0..self.envs {
                rows.push(match column {
                    // Bytes: `stride` leads to the next environment, and `width` to the next step.
                    Some((first, stride)) => ByteSpan {
                        address: first.plus(env * stride + at * width),
                        before: 0,
                        len: steps * width,
                    },
                    // Nothing of it is written.
                    None => ByteSpan {
                        address: part.observations,
                        before: 0,
                        len: 0,
                    },
                });
            }
        }
        Ok(rows)
    }

    fn miscounted(&self, got: usize) -> PyErr {
        let text = format!("expected {} environments, got {got}", self.envs);
        SettingError::new_err(text)
    }
}

/// The bytes of a frame in each column: observation, action, log-probability, next observation,
/// reward, terminated, truncated, done, trajectory, policy version.
fn widths(task: &Task) -> [usize; 10] {
    let seen = task.observation_len() * 4;
    [seen, action_width(task), 4, seen, 4, 1, 1, 1, 8, 8]
}

/// Discrete actions are 64 bits wide, as torch's and numpy's are.
fn action_width(task: &Task) -> usize {
    match task.is_continuous() {
        true => task.actions() * 4,
        false => 8,
    }
}

/// Writes frames into their rows, which are in the order of [`widths`] and then of environments.
fn write(frames: &Frames, envs: usize, steps: usize, rows: &mut [&mut [u8]]) {
    let len = frames.observation_len;
    for env in 0..envs {
        let range = env * steps..(env + 1) * steps;
        let seen = range.start * len..range.end * len;
        let of = |column: usize| column * envs + env;
        put(
            rows[of(0)],
            frames.observations[seen.clone()].iter().map(bytes),
        );
        match &frames.actions {
            Actions::Discrete(actions) => {
                let actions = actions[range.clone()].iter();
                put(
                    rows[of(1)],
                    actions.map(|action| i64::from(*action).to_ne_bytes()),
                );
            }
            Actions::Continuous { values, len } => {
                let values = &values[range.start * len..range.end * len];
                put(rows[of(1)], values.iter().map(bytes));
            }
        }
        put(
            rows[of(2)],
            frames.log_probs[range.clone()].iter().map(bytes),
        );
        put(
            rows[of(3)],
            frames.next_observations[seen].iter().map(bytes),
        );
        put(rows[of(4)], frames.rewards[range.clone()].iter().map(bytes));
        let flag = |is: bool| [u8::from(is)];
        let terminated = frames.terminated[range.clone()].iter();
        put(rows[of(5)], terminated.map(|is| flag(*is)));
        let truncated = frames.truncated[range.clone()].iter();
        put(rows[of(6)], truncated.map(|is| flag(*is)));
        put(
            rows[of(7)],
            range.clone().map(|index| flag(frames.done(index))),
        );
        let number = |number: &u64| number.to_ne_bytes();
        put(
            rows[of(8)],
            frames.traj_ids[range.clone()].iter().map(number),
        );
        put(
            rows[of(9)],
            frames.policy_versions[range].iter().map(number),
        );
    }
}

fn bytes(value: &f32) -> [u8; 4] {
    value.to_ne_bytes()
}

/// Writes values one after the other, as far as there is room.
fn put<const N: usize>(to: &mut [u8], values: impl Iterator<Item = [u8; N]>) {
    for (to, value) in to.as_chunks_mut::<N>().0.iter_mut().zip(values) {
        *to = value;
    }
}

fn hollow() -> PyErr {
    WrongTypeError::new_err("there is no memory at address 0: give contiguous arrays and tensors")
}
