//! Tasks of Gymnasium, stepped by Python, compared with the built-in ones.

use std::{env, fs, io};

use rand::SeedableRng;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open},
};
use weightsync_engine::{Tensors, WorkerId};
use weightsync_rl::{
    collector::{Async, MultiSync, Sync, Task},
    env::{Acrobot, CartPole, Env, EnvRng, Gym},
    frames::Frames,
};

use weightsync_conformance::scale::patience;

use crate::{Outcome, discrete, pid, trials, weights};

trials! {
    self::gym_cartpole_moves_as_the_built_in_does,
    self::gym_acrobot_moves_as_the_built_in_does,
    self::gym_pendulum_takes_continuous_actions,
    self::gym_workers_collect_and_are_replaced,
    self::gym_python_ends_with_its_killed_worker,
    self::gym_says_what_is_missing,
    self::gym_refuses_observations_of_another_size,
}

/// The variable that names a Python with Gymnasium; `cargo xtask test` sets it.
const PYTHON: &str = "WEIGHTSYNC_GYM_PYTHON";

fn python() -> String {
    env::var(PYTHON).unwrap_or_else(|_| "python3".into())
}

fn found(id: &str) -> Result<Task, Box<dyn std::error::Error>> {
    let found = Gym::find(id, &python());
    let told = |error| format!("{error}; or set {PYTHON}, as `cargo xtask test` does");
    Ok(Task::Gym(found.map_err(told)?))
}

/// 1200 frames of two environments, by actions drawn evenly.
fn random_frames(task: &Task, weights: &Tensors) -> Result<Frames, weightsync_rl::Error> {
    let mut collector = Sync::builder(task.clone())
        .envs_per_worker(2)
        .frames_per_batch(1200)
        .init_random_frames(1)
        .seed(3)
        .start(weights)?;
    Ok(collector.next_batch()?.frames)
}

/// Checks that each step leads where `step` leads, which begins with what was seen.
fn assert_moves(frames: &Frames, step: impl Fn(&[f32], u32) -> (Vec<f32>, bool), error: f32) {
    let len = frames.observation_len;
    let mut ends = 0;
    for (i, action) in discrete(frames).iter().enumerate() {
        let row = i * len..(i + 1) * len;
        let (next, ended) = step(&frames.observations[row.clone()], *action);
        for (ours, theirs) in next.iter().zip(&frames.next_observations[row]) {
            assert!(
                (ours - theirs).abs() <= error,
                "step {i}: {ours} for {theirs}"
            );
        }
        assert_eq!(ended, frames.terminated[i], "step {i}");
        ends += usize::from(frames.done(i));
    }
    assert_eq!(frames.episodes.len(), ends);
}

fn gym_cartpole_moves_as_the_built_in_does() -> Outcome {
    let task = found("CartPole-v1")?;
    assert_eq!(
        (task.name(), task.observation_len(), task.actions()),
        ("CartPole-v1", 4, 2)
    );
    let frames = random_frames(&task, &weights()?)?;
    assert!(frames.episodes.len() > 10);
    let step = |seen: &[f32], action| {
        let mut env = CartPole::new(&mut EnvRng::seed_from_u64(0));
        env.set_state(std::array::from_fn(|i| f64::from(seen[i])));
        let ended = env.step(action).terminated;
        let mut next = vec![0.0; 4];
        env.observe(&mut next);
        (next, ended)
    };
    assert_moves(&frames, step, 1e-5);
    Ok(())
}

fn gym_acrobot_moves_as_the_built_in_does() -> Outcome {
    let task = found("Acrobot-v1")?;
    let mut weights = Tensors::new();
    weights.insert("actor.0.weight", [3, 6], vec![0.0_f32; 18])?;
    weights.insert("actor.0.bias", [3], vec![0.0_f32; 3])?;
    let frames = random_frames(&task, &weights)?;
    let step = |seen: &[f32], action| {
        let [cos1, sin1, cos2, sin2, speed1, speed2] = std::array::from_fn(|i| f64::from(seen[i]));
        let mut env = Acrobot::new(&mut EnvRng::seed_from_u64(0));
        env.set_state([sin1.atan2(cos1), sin2.atan2(cos2), speed1, speed2]);
        let ended = env.step(action).terminated;
        let mut next = vec![0.0; 6];
        env.observe(&mut next);
        (next, ended)
    };
    assert_moves(&frames, step, 1e-4);
    assert!(frames.truncated[499], "the first episode is cut");
    Ok(())
}

fn gym_pendulum_takes_continuous_actions() -> Outcome {
    let task = found("Pendulum-v1")?;
    assert!(task.is_continuous());
    let mut weights = Tensors::new();
    weights.insert("actor.0.weight", [1, 3], vec![0.0_f32; 3])?;
    weights.insert("actor.0.bias", [1], vec![0.0_f32])?;
    weights.insert("actor.log_std", [1], vec![0.0_f32])?;
    let frames = random_frames(&task, &weights)?;
    let (torques, 1) = frames.actions.continuous().ok_or("continuous")? else {
        return Err("one quantity".into());
    };
    assert!(torques.iter().any(|torque| torque.abs() > 1.9));
    assert!(torques.iter().all(|torque| torque.abs() <= 2.0));
    for (i, torque) in torques.iter().enumerate() {
        // Gymnasium's equation of motion, as far as the speed shows it.
        let [_, sin, speed] = std::array::from_fn(|k| frames.observations[i * 3 + k]);
        let expected = (speed + (15.0 * sin + 3.0 * torque) * 0.05).clamp(-8.0, 8.0);
        let got = frames.next_observations[i * 3 + 2];
        assert!(
            (got - expected).abs() < 1e-3,
            "step {i}: {got} for {expected}"
        );
    }
    Ok(())
}

fn gym_workers_collect_and_are_replaced() -> Outcome {
    let weights = weights()?;
    let mut collector = MultiSync::builder(found("CartPole-v1")?)
        .workers(2)
        .envs_per_worker(2)
        .frames_per_batch(80)
        .deadline(patience(30))
        .start(&weights)?;
    assert_eq!(collector.next_batch()?.frames.shape, [2, 2, 20]);
    let victim = collector.pid(WorkerId(1)).ok_or("no worker 1")?;
    kill_process(pid(victim)?, Signal::KILL)?;
    let mut replaced = false;
    while !replaced {
        replaced = !collector.next_batch()?.restarts.is_empty();
    }
    collector.update_policy_weights(&weights)?;
    assert_eq!(collector.next_batch()?.frames.policy_versions, vec![2; 80]);
    Ok(())
}

fn gym_python_ends_with_its_killed_worker() -> Outcome {
    let mut collector = Async::builder(found("CartPole-v1")?)
        .frames_per_batch(20)
        .deadline(patience(30))
        .start(&weights()?)?;
    collector.next_batch()?;
    let worker = collector.pid(WorkerId(0)).ok_or("no worker")?;
    let python = children(worker)?;
    assert_eq!(python.len(), 1, "one for all environments of a worker");
    // A Python that is stopped reads nothing: the kernel alone can end it.
    kill_process(python[0], Signal::STOP)?;
    let handle = pidfd_open(python[0], PidfdFlags::empty())?;
    kill_process(pid(worker)?, Signal::KILL)?;
    let patience = Timespec {
        tv_sec: 40,
        tv_nsec: 0,
    };
    let mut ended = [PollFd::new(&handle, PollFlags::IN)];
    assert_eq!(poll(&mut ended, Some(&patience))?, 1, "it lives");
    Ok(())
}

/// The processes that a process started.
fn children(parent: u32) -> io::Result<Vec<Pid>> {
    let mut found = Vec::new();
    for task in fs::read_dir(format!("/proc/{parent}/task"))? {
        let children = fs::read_to_string(task?.path().join("children"))?;
        let ids = children.split_whitespace().filter_map(|id| id.parse().ok());
        found.extend(ids.filter_map(Pid::from_raw));
    }
    Ok(found)
}

fn gym_says_what_is_missing() -> Outcome {
    let refused = |id: &str, python: &str| match Gym::find(id, python) {
        Ok(found) => panic!("{found:?}"),
        Err(error) => error.to_string(),
    };
    let python = python();
    let words = refused("CartPole-v1", "/no/such/python");
    assert!(words.contains("`/no/such/python` cannot be run") && words.contains("install"));
    let words = refused("NoSuchTask-v0", &python);
    assert!(
        words.contains("NoSuchTask") && !words.contains('\n'),
        "{words}"
    );
    let words = refused("FrozenLake-v1", &python);
    assert!(words.contains("expected a Box"), "{words}");
    // A Python without packages: isolated, and with no site.
    let dir = tempfile::tempdir()?;
    let bare = dir.path().join("bare-python");
    fs::write(&bare, format!("#!/bin/sh\nexec {python} -I -S \"$@\"\n"))?;
    let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs::set_permissions(&bare, executable)?;
    let words = refused("CartPole-v1", &bare.display().to_string());
    assert!(words.contains("-m pip install gymnasium"), "{words}");
    Ok(())
}

fn gym_refuses_observations_of_another_size() -> Outcome {
    let mut collector = Sync::builder(faulty("Short-v0")?)
        .frames_per_batch(10)
        .start(&weights()?)?;
    assert_eq!(collector.next_batch()?.frames.len(), 10);
    let words = collector.next_batch().expect_err("it is short").to_string();
    assert!(
        words.contains("has the shape (3,): expected (4,)"),
        "{words}"
    );
    // Its Python has ended.
    let words = collector.next_batch().expect_err("it failed").to_string();
    assert!(words.contains("it failed before (an obs"), "{words}");
    assert!(words.ends_with("build the collector again"), "{words}");
    Ok(())
}

/// A task of `tests/data/faulty.py`.
fn faulty(name: &str) -> Result<Task, Box<dyn std::error::Error>> {
    let python = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/python-with-faulty");
    Ok(Task::Gym(Gym::find(&format!("faulty:{name}"), python)?))
}
