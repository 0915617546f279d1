use std::fmt;

use super::{Rollout, RolloutOptions, Stepping, actions_rng};
use crate::{
    Error,
    collector::Task,
    env::{Action, Env, Envs, StoredAction, Transition, check_policy},
    frames::{Actions, Frames},
};

/// The tensors of a policy, by name.
type Tensors<'a, 'w> = &'a dyn Fn(&str) -> Option<&'w [f32]>;

/// A rollout of a task that is chosen at run time, for a caller with rules of its own about
/// episodes: it steps the environments one by one, or has a policy run for a number of steps.
///
/// ```
/// use weightsync_rl::{
///     collector::Task,
///     rollout::{RolloutOptions, TaskRollout, UnderWay},
/// };
///
/// let mut rollout = TaskRollout::new(Task::named("CartPole-v1")?, 2, 1)?;
/// let mut under_way = UnderWay { lengths: vec![0; 2], traj_ids: vec![0, 1], next_id: 2 };
/// let (weight, bias) = ([0.0; 8], [0.0; 2]);
/// let tensor = |name: &str| match name {
///     "actor.0.weight" => Some(&weight[..]),
///     "actor.0.bias" => Some(&bias[..]),
///     _ => None,
/// };
/// let options = RolloutOptions::default();
/// let frames = rollout.run(&tensor, 7, 100, options, &mut under_way)?;
/// assert_eq!(frames.shape, [2, 100]);
/// assert!(under_way.next_id > 2, "poles fell");
/// # Ok::<(), weightsync_rl::Error>(())
/// ```
#[derive(Debug)]
pub struct TaskRollout {
    task: Task,
    envs: usize,
    roll: Box<dyn Driven>,
}

impl TaskRollout {
    /// `envs` environments at the start of their episodes, all randomness derived from `seed`.
    ///
    /// # Errors
    /// [`Error::NoSuchTask`] for a task that is not built in.
    pub fn new(task: Task, envs: usize, seed: u64) -> Result<Self, Error> {
        let Some(roll) = task.driven(envs, seed) else {
            let name = task.name().into();
            return Err(Error::NoSuchTask { name });
        };
        Ok(Self { task, envs, roll })
    }

    /// The task.
    pub fn task(&self) -> &Task {
        &self.task
    }

    /// How many environments there are, `P`.
    pub fn envs(&self) -> usize {
        self.envs
    }

    /// Begins a new episode in one environment. With a seed all that is drawn for it from here on
    /// is derived from the seed, whatever other environments there are.
    pub fn reset(&mut self, env: usize, seed: Option<u64>) {
        self.roll.reset(env, seed);
    }

    /// Writes the observation of one environment into `out`, which has
    /// [`Task::observation_len`] elements.
    pub fn observe(&self, env: usize, out: &mut [f32]) {
        self.roll.observe(env, out);
    }

    /// Takes one step in one environment, with its action among those of all. After the end of an
    /// episode the final state stays observable until [`reset`](Self::reset).
    ///
    /// # Errors
    /// [`Error::FrameShape`] without an action of the task's kind for it.
    pub fn step(&mut self, env: usize, actions: &Actions) -> Result<Transition, Error> {
        let done = self.roll.step(env, actions);
        done.ok_or_else(|| Error::FrameShape {
            expected: vec![self.envs],
            got: vec![env],
        })
    }

    /// Takes `steps` steps in every environment, `[P, steps]`, with actions that a policy chooses,
    /// stamped with `version`; begins a new episode where one ends. The tensors of the policy are
    /// named as [`MlpPolicy::from_tensors`] reads them with the prefix `actor`.
    ///
    /// # Errors
    /// [`Error::MissingTensor`] and [`Error::TensorLen`] if they are no policy for the task,
    /// [`Error::FrameShape`] if `under_way` is of another number of environments.
    ///
    /// [`MlpPolicy::from_tensors`]: crate::policy::MlpPolicy::from_tensors
    pub fn run<'w>(
        &mut self,
        tensor: Tensors<'_, 'w>,
        version: u64,
        steps: usize,
        options: RolloutOptions,
        under_way: &mut UnderWay,
    ) -> Result<Frames, Error> {
        // The caller's numbers index what is here.
        for got in [under_way.lengths.len(), under_way.traj_ids.len()] {
            if got != self.envs {
                return Err(Error::FrameShape {
                    expected: vec![self.envs],
                    got: vec![got],
                });
            }
        }
        self.roll.go_on(options, under_way);
        // On an error the caller's episodes stay as they were.
        let frames = self.roll.run(tensor, version, steps)?;
        *under_way = self.roll.under_way();
        Ok(frames)
    }
}

/// The episodes that environments are in, as a caller counts them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnderWay {
    /// Steps taken in each environment's episode.
    pub lengths: Vec<u32>,
    /// The trajectory of each environment.
    pub traj_ids: Vec<u64>,
    /// The id of the trajectory that begins next.
    pub next_id: u64,
}

/// A rollout of any task, as [`TaskRollout`] uses it.
pub(crate) trait Driven: fmt::Debug + Send + Sync {
    fn reset(&mut self, env: usize, seed: Option<u64>);

    /// None without an action of the task's kind.
    fn step(&mut self, env: usize, actions: &Actions) -> Option<Transition>;

    fn observe(&self, env: usize, out: &mut [f32]);

    /// Goes on with these options in these episodes, whose rewards count from here on.
    fn go_on(&mut self, options: RolloutOptions, under_way: &UnderWay);

    fn under_way(&self) -> UnderWay;

    fn run<'w>(
        &mut self,
        tensor: Tensors<'_, 'w>,
        version: u64,
        steps: usize,
    ) -> Result<Frames, Error>;
}

impl<E: Env + fmt::Debug + Send + Sync> Driven for Rollout<E> {
    fn reset(&mut self, env: usize, seed: Option<u64>) {
        match seed {
            None => self.0.envs.reset(env),
            Some(seed) => {
                self.0.envs.reset_with(env, seed);
                // The generator of actions too, so one seed fixes the whole episode.
                self.0.rngs[env] = actions_rng(seed);
            }
        }
    }

    fn step(&mut self, env: usize, actions: &Actions) -> Option<Transition> {
        let action = E::Action::load(env, actions)?;
        Some(self.0.envs.step(env, action))
    }

    fn observe(&self, env: usize, out: &mut [f32]) {
        self.0.envs.observe_one(env, out);
    }

    fn go_on(&mut self, options: RolloutOptions, under_way: &UnderWay) {
        self.0.options = options;
        for (episode, steps) in self.0.episodes.iter_mut().zip(&under_way.lengths) {
            // Rewards before this call are the caller's.
            (episode.reward, episode.steps) = (0.0, *steps);
        }
        self.0.trajectories.current.clone_from(&under_way.traj_ids);
        self.0.trajectories.next = under_way.next_id;
    }

    fn under_way(&self) -> UnderWay {
        UnderWay {
            lengths: self
                .0
                .episodes
                .iter()
                .map(|episode| episode.steps)
                .collect(),
            traj_ids: self.0.trajectories.current.clone(),
            next_id: self.0.trajectories.next,
        }
    }

    fn run<'w>(
        &mut self,
        tensor: Tensors<'_, 'w>,
        version: u64,
        steps: usize,
    ) -> Result<Frames, Error> {
        self.0.collect_with(tensor, version, steps)
    }
}

impl<B: Envs> Stepping<B>
where
    Error: From<B::Error>,
{
    /// [`collect`](Self::collect) with the policy that tensors with the prefix `actor` hold.
    pub(crate) fn collect_with<'w>(
        &mut self,
        tensor: Tensors<'_, 'w>,
        version: u64,
        steps: usize,
    ) -> Result<Frames, Error> {
        let len = |name: &str| tensor(name).map(<[f32]>::len);
        // The names and lengths are checked first, so that the policy is built from tensors that
        // fit.
        let (inputs, outputs) = (self.envs.observation_len(), self.envs.actions());
        check_policy(B::Action::KIND, inputs, outputs, "actor", len)?;
        let policy = B::Action::policy(inputs, "actor", tensor)?;
        Ok(self.collect(&policy, version, steps)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn coin<'w>(name: &str) -> Option<&'w [f32]> {
        match name {
            "actor.0.weight" => Some(&[0.0; 8]),
            "actor.0.bias" => Some(&[0.0; 2]),
            _ => None,
        }
    }

    fn first(envs: usize) -> UnderWay {
        UnderWay {
            lengths: vec![0; envs],
            traj_ids: (0..envs as u64).collect(),
            next_id: envs as u64,
        }
    }

    fn seeded(envs: usize, seed: u64) -> TaskRollout {
        let mut rollout = TaskRollout::new(Task::CartPole, envs, 0).unwrap();
        (0..envs).for_each(|env| rollout.reset(env, Some(seed + env as u64)));
        rollout
    }

    #[test]
    fn runs_go_on_where_the_one_before_ended() {
        let options = RolloutOptions {
            max_frames_per_traj: 7,
            ..RolloutOptions::default()
        };
        let (mut whole, mut pieces) = (seeded(2, 3), seeded(2, 3));
        let (mut a, mut b) = (first(2), first(2));
        let all = whole.run(&coin, 1, 50, options, &mut a).unwrap();
        let mut begun = 0;
        for steps in [1, 20, 29] {
            let part = pieces.run(&coin, 1, steps, options, &mut b).unwrap();
            for env in 0..2 {
                let (mine, other) = (env * steps, env * 50 + begun);
                assert_eq!(
                    part.traj_ids[mine..mine + steps],
                    all.traj_ids[other..other + steps]
                );
                assert_eq!(
                    part.observations[mine * 4..(mine + steps) * 4],
                    all.observations[other * 4..(other + steps) * 4]
                );
            }
            begun += steps;
        }
        assert_eq!(a, b);
        // Fifty steps are seven episodes and a step.
        assert_eq!((a.lengths, a.next_id), (vec![1, 1], 16));
    }

    #[test]
    fn environments_repeat_with_their_own_seeds() {
        let options = RolloutOptions::default();
        let two = seeded(2, 3)
            .run(&coin, 1, 40, options, &mut first(2))
            .unwrap();
        let one = seeded(1, 4)
            .run(&coin, 1, 40, options, &mut first(1))
            .unwrap();
        assert_eq!(two.observations[160..], one.observations);
        assert_ne!(two.observations[..160], one.observations);
    }

    #[test]
    fn callers_step_environments_themselves() {
        let mut rollout = seeded(2, 3);
        let (mut before, mut after) = ([0.0; 4], [0.0; 4]);
        rollout.observe(0, &mut before);
        let actions = Actions::Discrete(vec![0, 1]);
        assert_eq!(rollout.step(1, &actions).unwrap().reward, 1.0);
        rollout.observe(0, &mut after);
        assert_eq!(before, after, "the other one moved");
        let torques = Actions::Continuous {
            values: vec![0.0; 2],
            len: 1,
        };
        assert!(rollout.step(1, &torques).is_err());
        let refused = rollout.run(&coin, 1, 1, RolloutOptions::default(), &mut first(3));
        assert!(refused.unwrap_err().to_string().contains("[2]"));
    }

    #[test]
    fn tasks_are_found_by_their_names() {
        for task in Task::BUILT_IN {
            assert_eq!(Task::named(task.name()).unwrap(), task);
        }
        let text = Task::named("CartPole").unwrap_err().to_string();
        assert!(text.contains("CartPole-v1, MountainCar-v0"), "{text}");
    }
}
