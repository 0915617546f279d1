use super::*;
use crate::{
    env::{Env, EnvRng, Transition},
    frames::ActionKind,
    policy::Policy as _,
    replay::Prioritised,
    rollout::Rollout,
};

/// Three places in a row, from the first of which it begins. Action 1 goes on and
/// any other stays; the step past the last place earns 1 and ends the task. After
/// 20 steps a limit cuts the episode.
struct Row {
    place: usize,
    steps: u32,
}

impl Env for Row {
    type Action = u32;
    const NAME: &'static str = "Row";
    const OBSERVATION_LEN: usize = 3;
    const ACTIONS: usize = 2;

    fn new(_: &mut EnvRng) -> Self {
        Self { place: 0, steps: 0 }
    }

    fn reset(&mut self, rng: &mut EnvRng) {
        *self = Self::new(rng);
    }

    fn observe(&self, out: &mut [f32]) {
        out.fill(0.0);
        if let Some(here) = out.get_mut(self.place) {
            *here = 1.0;
        }
    }

    fn step(&mut self, action: u32) -> Transition {
        self.steps += 1;
        self.place += usize::from(action == 1);
        let terminated = self.place == 3;
        Transition {
            reward: if terminated { 1.0 } else { 0.0 },
            terminated,
            truncated: self.steps >= 20,
        }
    }
}

fn config() -> DqnConfig {
    DqnConfig {
        discount: 0.5,
        learning_rate: 5e-3,
        capacity: 1000,
        warm_up: 100,
        frames_per_step: 1,
        minibatch: 32,
        target_every: 20,
        epsilon: Epsilon {
            first: 1.0,
            last: 0.3,
            frames: 500,
        },
        ..DqnConfig::default()
    }
}

/// A network that was trained on 1500 frames of [`Row`].
fn trained(config: DqnConfig, seed: u64) -> Dqn {
    let mut dqn = Dqn::new(QNetwork::new(3, &[16], 2, seed).unwrap(), config, seed).unwrap();
    let mut rollout = Rollout::<Row>::new(2, seed);
    for version in 0..30 {
        let weights = dqn.model().weights().unwrap();
        let frames = rollout.collect(&weights.policy().unwrap(), version, 25);
        dqn.update(&frames).unwrap();
    }
    dqn
}

fn values(dqn: &Dqn) -> Vec<Vec<f32>> {
    let places = Tensor::eye(3, candle_core::DType::F32, &Device::Cpu).unwrap();
    dqn.model().values(&places).unwrap().to_vec2().unwrap()
}

#[test]
fn values_become_those_of_a_known_task() {
    let prioritised = Sampler::Prioritised(Prioritised::new(0.6, 0.4).eps(1e-3));
    for sampler in [Sampler::Uniform, prioritised] {
        let dqn = trained(
            DqnConfig {
                sampler,
                ..config()
            },
            1,
        );
        // Of staying and of going on, discounted by half a step.
        let expected = [[0.125, 0.25], [0.25, 0.5], [0.5, 1.0]];
        let got = values(&dqn);
        for (got, expected) in got.iter().flatten().zip(expected.iter().flatten()) {
            assert!((got - expected).abs() < 0.1, "{:?}", values(&dqn));
        }
    }
}

#[test]
fn less_room_than_the_warm_up_takes_is_refused() {
    let made = |capacity| {
        let config = DqnConfig {
            capacity,
            warm_up: 64,
            ..DqnConfig::default()
        };
        Dqn::new(QNetwork::new(3, &[4], 2, 1).unwrap(), config, 1)
    };
    let words = made(63).err().unwrap().to_string();
    for part in ["capacity = 63", "warm_up = 64", "to at least 64"] {
        assert!(words.contains(part), "{words}");
    }
    let frames = Rollout::<Row>::new(1, 1).collect_random(64);
    let stats = made(64).unwrap().update(&frames).unwrap();
    assert!(stats.steps > 0);
}

#[test]
fn training_repeats_with_the_seed() {
    let weights = |seed| format!("{:?}", trained(config(), seed).model().weights().unwrap());
    assert_eq!(weights(1), weights(1));
    assert_ne!(weights(1), weights(2));
}

#[test]
fn a_cut_episode_has_a_future_and_an_ended_one_none() {
    let mut frames = Frames::zeroed(1, 64, 1, ActionKind::Discrete);
    frames.rewards.fill(1.0);
    frames.observations.fill(1.0);
    frames.next_observations.fill(1.0);
    let value = |terminated: bool| {
        let mut frames = frames.clone();
        frames.terminated.fill(terminated);
        frames.truncated.fill(!terminated);
        let mut dqn = Dqn::new(QNetwork::new(1, &[8], 2, 1).unwrap(), config(), 1).unwrap();
        for _ in 0..40 {
            dqn.update(&frames).unwrap();
        }
        let one = Tensor::ones((1, 1), candle_core::DType::F32, &Device::Cpu).unwrap();
        dqn.model().values(&one).unwrap().to_vec2::<f32>().unwrap()[0][0]
    };
    // 1 + ½ × 2 = 2, where the other action is worth less.
    let (ended, cut) = (value(true), value(false));
    assert!((ended - 1.0).abs() < 0.05, "{ended}");
    assert!((cut - 2.0).abs() < 0.1, "{cut}");
}

#[test]
fn workers_explore_as_the_weights_say() {
    let dqn = trained(config(), 1);
    let weights = dqn.model().weights().unwrap();
    let policy = weights.policy().unwrap();
    let certain = policy.greedy(&[0.0, 0.0, 1.0], &mut policy.scratch());
    assert_eq!(certain.action, 1);
    assert!((certain.log_prob.exp() - 0.85).abs() < 1e-6, "ε is 0.3");
}

#[test]
fn nothing_is_learned_before_there_are_frames() {
    let mut dqn = Dqn::new(QNetwork::new(3, &[8], 2, 1).unwrap(), config(), 1).unwrap();
    let mut rollout = Rollout::<Row>::new(1, 1);
    let steps = (0..4).map(|_| {
        let frames = rollout.collect_random(40);
        dqn.update(&frames).unwrap().steps
    });
    assert_eq!(steps.collect::<Vec<_>>(), [0, 0, 40, 40]);
}

#[test]
fn frames_of_other_tasks_are_refused() {
    let mut dqn = Dqn::new(QNetwork::new(3, &[8], 2, 1).unwrap(), config(), 1).unwrap();
    let continuous = Frames::zeroed(1, 8, 3, ActionKind::Continuous(1));
    let error = dqn.update(&continuous).unwrap_err().to_string();
    assert!(error.contains("use PPO"), "{error}");
    let longer = Frames::zeroed(1, 8, 4, ActionKind::Discrete);
    let error = dqn.update(&longer).unwrap_err().to_string();
    assert!(error.contains("`observation`"), "{error}");
}
