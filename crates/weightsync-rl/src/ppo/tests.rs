use candle_core::D;
use candle_nn::ops::log_softmax;

use super::*;
use crate::{
    env::{CartPole, Env, Pendulum, Transition},
    frames::ActionKind,
    policy::Policy,
    rollout::Rollout,
};

#[test]
fn the_borrowed_policy_computes_what_candle_computes() {
    let model = ActorCritic::new(4, &[64, 64], 2, 3).unwrap();
    // The last layer starts small; larger weights test more of the range.
    for (_, var) in model.vars() {
        var.set(&(var.as_tensor() * 3.0).unwrap()).unwrap();
    }
    let weights = model.weights().unwrap();
    let policy = weights.policy().unwrap();
    let frames = Rollout::<CartPole>::new(4, 1).collect(&policy, 0, 64);
    let shape = (frames.len(), 4);
    let observations = Tensor::from_slice(&frames.observations, shape, &Device::Cpu).unwrap();
    let logits = model.logits(&observations).unwrap();
    let log_probs = log_softmax(&logits, D::Minus1).unwrap();
    let (logits, log_probs) = (
        logits.to_vec2::<f32>().unwrap(),
        log_probs.to_vec2::<f32>().unwrap(),
    );
    let mut scratch = policy.scratch();
    let actions = frames.actions.discrete().unwrap();
    for (i, observation) in frames.observations.chunks(4).enumerate() {
        for (ours, theirs) in policy
            .logits(observation, &mut scratch)
            .iter()
            .zip(&logits[i])
        {
            assert!((ours - theirs).abs() <= 1e-5, "{ours} ≠ {theirs}");
        }
        let theirs = log_probs[i][actions[i] as usize];
        assert!((frames.log_probs[i] - theirs).abs() <= 1e-5);
    }
}

#[test]
fn advantages_of_a_worked_example() {
    let mut frames = Frames::zeroed(1, 4, 1, ActionKind::Discrete);
    frames.rewards = vec![1.0, 2.0, 3.0, 4.0];
    frames.terminated[1] = true;
    frames.truncated[2] = true;
    let values = [10.0, 20.0, 30.0, 40.0];
    let next = [20.0, 99.0, 50.0, 60.0];
    let got = advantages(&frames, &values, &next, 0.5, 0.5);
    // Backwards: 4 + 30 − 40; truncated: 3 + 25 − 30, cut from what follows;
    // terminated: 2 − 20; 1 + 10 − 10 + ¼ × −18.
    assert_eq!(got, [-3.5, -18.0, -2.0, -6.0]);
    // The same where no episode ends, but the last frame is another's.
    let mut frames = Frames::zeroed(1, 2, 1, ActionKind::Discrete);
    frames.rewards = vec![1.0, 2.0];
    frames.traj_ids = vec![0, 1];
    let got = advantages(&frames, &[10.0, 20.0], &[20.0, 40.0], 0.5, 0.5);
    assert_eq!(got, [1.0, 2.0]);
}

#[test]
fn training_repeats_with_the_seed_and_improves() {
    let train = |seed| {
        let model = ActorCritic::new(4, &[64, 64], 2, seed).unwrap();
        let mut ppo = Ppo::new(model, PpoConfig::default(), seed).unwrap();
        let mut rollout = Rollout::<CartPole>::new(4, seed);
        let mut means = Vec::new();
        for version in 0..14 {
            let weights = ppo.model().weights().unwrap();
            let frames = rollout.collect(&weights.policy().unwrap(), version, 128);
            let total: f32 = frames.episodes.iter().map(|e| e.reward).sum();
            means.push(total / frames.episodes.len().max(1) as f32);
            ppo.update(&frames).unwrap();
        }
        (means, ppo.model().weights().unwrap())
    };
    let (means, weights) = train(1);
    let (again, same) = train(1);
    assert_eq!(means, again);
    assert_eq!(format!("{weights:?}"), format!("{same:?}"));
    assert!(
        means[13] > 2.0 * means[0],
        "fourteen updates should help: {means:?}"
    );
}

#[test]
fn the_gaussian_policy_computes_what_candle_computes() {
    let model = ActorCritic::gaussian(3, &[16], 1, 3).unwrap();
    for (_, var) in model.vars() {
        var.set(&(var.as_tensor() * 3.0).unwrap().affine(1.0, 0.1).unwrap())
            .unwrap();
    }
    let weights = model.weights().unwrap();
    let frames = Rollout::<Pendulum>::new(4, 1).collect(&weights.gaussian().unwrap(), 0, 64);
    let observations = Tensor::from_slice(&frames.observations, (256, 3), &Device::Cpu).unwrap();
    let (actions, 1) = frames.actions.continuous().unwrap() else {
        panic!("one quantity");
    };
    let actions = Tensor::from_slice(actions, (256, 1), &Device::Cpu).unwrap();
    let (densities, entropy) = model.evaluate(&observations, &actions).unwrap();
    for (ours, theirs) in frames
        .log_probs
        .iter()
        .zip(densities.to_vec1::<f32>().unwrap())
    {
        assert!((ours - theirs).abs() <= 1e-4, "{ours} ≠ {theirs}");
    }
    // ½ ln(2πe) + ln σ, with ln σ = 0.1.
    assert!((scalar(&entropy).unwrap() - 1.518_938_5).abs() < 1e-5);
}

/// One step: the nearer the action is to 0.7, the better.
struct Aim;

impl Env for Aim {
    type Action = [f32; 1];
    const NAME: &'static str = "Aim";
    const OBSERVATION_LEN: usize = 1;
    const ACTIONS: usize = 1;

    fn new(_: &mut EnvRng) -> Self {
        Self
    }

    fn reset(&mut self, _: &mut EnvRng) {}

    fn observe(&self, out: &mut [f32]) {
        out.fill(1.0);
    }

    fn step(&mut self, [action]: [f32; 1]) -> Transition {
        Transition {
            reward: -(action - 0.7).powi(2),
            terminated: true,
            truncated: false,
        }
    }
}

#[test]
fn training_on_continuous_actions_improves() {
    let model = ActorCritic::gaussian(1, &[8], 1, 1).unwrap();
    let mut ppo = Ppo::new(model, PpoConfig::default(), 1).unwrap();
    let mut rollout = Rollout::<Aim>::new(4, 1);
    let mut means = Vec::new();
    for version in 0..30 {
        let weights = ppo.model().weights().unwrap();
        let frames = rollout.collect(&weights.gaussian::<1>().unwrap(), version, 128);
        means.push(frames.rewards.iter().sum::<f32>() / 512.0);
        ppo.update(&frames).unwrap();
    }
    assert!(means[29] > 0.25 * means[0], "nearer to 0: {means:?}");
}

#[test]
fn frames_of_other_actions_are_refused() {
    let model = ActorCritic::gaussian(4, &[8], 1, 1).unwrap();
    let mut ppo = Ppo::new(model, PpoConfig::default(), 1).unwrap();
    let discrete = Frames::zeroed(1, 8, 4, ActionKind::Discrete);
    assert!(matches!(ppo.update(&discrete), Err(Error::Candle(_))));
}
