use rand::SeedableRng;
use serde::{Deserialize, de::DeserializeOwned};

use super::*;

#[derive(Deserialize)]
struct Golden<A> {
    trajectories: Vec<Trajectory<A>>,
}

#[derive(Deserialize)]
struct Trajectory<A> {
    states: Vec<Vec<f64>>,
    steps: Vec<Step<A>>,
}

#[derive(Deserialize)]
struct Step<A> {
    action: A,
    observation: Vec<f32>,
    reward: f32,
    terminated: bool,
    truncated: bool,
}

fn golden<A: DeserializeOwned>(json: &str) -> Vec<Trajectory<A>> {
    serde_json::from_str::<Golden<A>>(json)
        .unwrap()
        .trajectories
}

/// Replays every recorded step from its recorded state: an open loop would
/// amplify the last bit of a `sin` by e⁴⁰ over the ten seconds of an episode.
fn replay<E: Env, const N: usize>(json: &str, set: fn(&mut E, [f64; N]), state: fn(&E) -> [f64; N])
where
    E::Action: DeserializeOwned,
{
    let mut rng = EnvRng::seed_from_u64(0);
    for (run, trajectory) in golden::<E::Action>(json).iter().enumerate() {
        let mut env = E::new(&mut rng);
        for (t, step) in trajectory.steps.iter().enumerate() {
            let at = format!("{} trajectory {run} step {t}", E::NAME);
            set(
                &mut env,
                trajectory.states[t].as_slice().try_into().unwrap(),
            );
            let transition = env.step(step.action);
            for (ours, theirs) in state(&env).iter().zip(&trajectory.states[t + 1]) {
                assert!((ours - theirs).abs() <= 1e-12, "{at}: {ours} ≠ {theirs}");
            }
            let mut observation = vec![0.0; E::OBSERVATION_LEN];
            env.observe(&mut observation);
            for (ours, theirs) in observation.iter().zip(&step.observation) {
                assert!((ours - theirs).abs() <= 1e-6, "{at}: {ours} ≠ {theirs}");
            }
            // One unit in the last place of the largest.
            let error = (transition.reward - step.reward).abs();
            assert!(error <= 1e-6, "{at}: {}", step.reward);
            let expected = Transition {
                reward: transition.reward,
                terminated: step.terminated,
                truncated: step.truncated,
            };
            assert_eq!(transition, expected, "{at}");
        }
    }
}

#[test]
fn cartpole_moves_as_gymnasium_does() {
    let json = include_str!("../../tests/data/cartpole.json");
    replay::<CartPole, 4>(json, CartPole::set_state, CartPole::state);
}

#[test]
fn mountain_car_moves_as_gymnasium_does() {
    let json = include_str!("../../tests/data/mountain_car.json");
    replay::<MountainCar, 2>(json, MountainCar::set_state, MountainCar::state);
}

#[test]
fn acrobot_moves_as_gymnasium_does() {
    let json = include_str!("../../tests/data/acrobot.json");
    replay::<Acrobot, 4>(json, Acrobot::set_state, Acrobot::state);
}

#[test]
fn pendulum_moves_as_gymnasium_does() {
    let json = include_str!("../../tests/data/pendulum.json");
    replay::<Pendulum, 2>(json, Pendulum::set_state, Pendulum::state);
}

#[test]
fn whole_short_episodes_agree_without_correction() {
    let mut rng = EnvRng::seed_from_u64(0);
    for trajectory in golden::<u32>(include_str!("../../tests/data/cartpole.json")) {
        let mut env = CartPole::new(&mut rng);
        env.set_state(trajectory.states[0].as_slice().try_into().unwrap());
        for (step, next) in trajectory
            .steps
            .iter()
            .zip(&trajectory.states[1..])
            .take(60)
        {
            env.step(step.action);
            for (ours, theirs) in env.state().iter().zip(next) {
                assert!((ours - theirs).abs() <= 1e-6);
            }
        }
    }
}

#[test]
fn episodes_start_in_range_and_repeat_with_the_seed() {
    let starts = |seed| {
        let mut rng = EnvRng::seed_from_u64(seed);
        let mut env = CartPole::new(&mut rng);
        let states: Vec<_> = (0..1000)
            .map(|_| {
                env.reset(&mut rng);
                env.state()
            })
            .collect();
        states
    };
    let states = starts(7);
    assert_eq!(states, starts(7));
    assert_ne!(states, starts(8));
    let flat: Vec<f64> = states.into_iter().flatten().collect();
    assert!(flat.iter().all(|s| s.abs() <= 0.05));
    let mean = flat.iter().sum::<f64>() / flat.len() as f64;
    assert!(mean.abs() < 0.003, "{mean}");
    assert!(flat.iter().any(|&s| s < -0.045) && flat.iter().any(|&s| s > 0.045));
}

#[test]
fn environments_of_a_batch_are_independent() {
    let mut batch = BatchedEnv::<CartPole>::new(2, 3);
    let mut alone = BatchedEnv::<CartPole>::new(2, 3);
    for _ in 0..200 {
        if batch.step(0, 0).done() {
            batch.reset(0);
        }
        let together = batch.step(1, 1);
        assert_eq!(together, alone.step(1, 1));
        if together.done() {
            batch.reset(1);
            alone.reset(1);
        }
        let (mut a, mut b) = ([0.0; 4], [0.0; 4]);
        batch.observe_one(1, &mut a);
        alone.observe_one(1, &mut b);
        assert_eq!(a, b);
    }
}
