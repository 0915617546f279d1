//! Workers that hang, collect nonsense, or die again and again.

use std::time::Duration;

use rustix::process::{Signal, kill_process};
use weightsync_engine::{Tensors, WorkerId, worker::Spawn};
use weightsync_rl::{
    Error,
    collector::{Batch, MultiAsync, MultiSync, Restarted, Sync, Task, WorkerEnding},
};

use weightsync_conformance::scale::{patience, slowness};

use crate::{MISCHIEF, Outcome, pid, trials, weights};

trials! {
    self::frames_that_are_no_numbers_are_refused,
    self::a_worker_of_no_numbers_fails_and_says_so,
    self::a_worker_that_hangs_is_replaced,
    self::first_come_goes_on_while_one_hangs,
    self::a_thread_that_takes_too_long_is_left_alone,
    self::first_come_goes_on_without_one_that_dies,
    self::retries_collect_what_the_first_try_would_have,
}

/// A policy for Pendulum whose mean torque is this one.
fn torque(mean: f32) -> Result<Tensors, weightsync_engine::Error> {
    let mut weights = Tensors::new();
    weights.insert("actor.0.weight", [1, 3], vec![0.0_f32; 3])?;
    weights.insert("actor.0.bias", [1], vec![mean])?;
    weights.insert("actor.log_std", [1], vec![-1.0_f32])?;
    Ok(weights)
}

fn frames_that_are_no_numbers_are_refused() -> Outcome {
    let mut collector = Sync::builder(Task::Pendulum)
        .envs_per_worker(2)
        .frames_per_batch(20)
        .start(&torque(0.0)?)?;
    collector.next_batch()?;
    for mean in [f32::NAN, f32::INFINITY] {
        collector.update_policy_weights(&torque(mean)?)?;
        match collector.next_batch() {
            Err(Error::NotFinite {
                column, env, step, ..
            }) => assert_eq!((column, env, step), ("action", 0, 0)),
            other => panic!("{other:?}"),
        }
    }
    // Its episodes are new ones, without anything infinite.
    collector.update_policy_weights(&torque(0.0)?)?;
    assert_eq!(collector.next_batch()?.frames.len(), 20);
    // A discrete action is a number, whatever the weights; its probability is none.
    let mut weights = weights()?;
    let mut collector = Sync::builder(Task::CartPole).start(&weights)?;
    weights.slice_mut::<f32>("actor.0.bias")?[1] = f32::NAN;
    collector.update_policy_weights(&weights)?;
    let refused = collector.next_batch().expect_err("it is NaN").to_string();
    assert!(refused.contains("log_prob is NaN in environment 0 at step 0"));
    Ok(())
}

fn a_worker_of_no_numbers_fails_and_says_so() -> Outcome {
    for threads in [false, true] {
        let builder = MultiSync::builder(Task::Pendulum)
            .workers(2)
            .frames_per_batch(40);
        let builder = if threads { builder.threads() } else { builder };
        let mut collector = builder.start(&torque(0.0)?)?;
        collector.update_policy_weights(&torque(f32::NAN)?)?;
        match collector.next_batch() {
            Err(Error::KeepsDying { exit, .. }) => {
                let words = "action is NaN in environment 0 at step 0";
                assert!(exit.to_string().contains(words), "{exit}");
            }
            other => panic!("{other:?}"),
        }
        collector.update_policy_weights(&torque(0.0)?)?;
        let batch = loop {
            match collector.next_batch() {
                // Those that failed before the update have no better ones in their places yet.
                Err(Error::KeepsDying { .. }) => {}
                other => break other?,
            }
        };
        let newest = collector.version().0;
        assert_eq!(batch.frames.policy_versions, vec![newest; 40]);
    }
    Ok(())
}

/// After this time for one part a worker counts as hung, which no other worker may.
fn limit() -> Duration {
    Duration::from_secs(2).mul_f64(slowness())
}

/// Checks how a worker ended that was stopped.
fn assert_hung(restarted: &Restarted, worker: u32, stopped: u32, limit: Duration) {
    assert_eq!(restarted.worker, WorkerId(worker));
    match &restarted.exit {
        WorkerEnding::GivenUp { reason, exit } => {
            assert_eq!(*reason, format!("it took more than {limit:?} for one part"));
            let exit = exit.as_ref().expect("a process");
            assert_eq!((exit.signal, exit.pid), (Some(9), stopped));
        }
        other => panic!("{other}"),
    }
}

fn a_worker_that_hangs_is_replaced() -> Outcome {
    let limit = limit();
    let mut collector = MultiSync::builder(Task::CartPole)
        .workers(3)
        .frames_per_batch(60)
        .timeout(limit)
        .deadline(patience(30))
        .start(&weights()?)?;
    collector.next_batch()?;
    let stopped = collector.pid(WorkerId(1)).ok_or("no worker 1")?;
    kill_process(pid(stopped)?, Signal::STOP)?;
    let batch = collector.next_batch()?;
    assert_eq!(batch.frames.shape, [3, 20]);
    let of_it = |restarted: &&Restarted| restarted.worker == WorkerId(1);
    let restarted = batch.restarts.iter().find(of_it);
    assert_hung(restarted.ok_or("it was not replaced")?, 1, stopped, limit);
    assert_ne!(collector.pid(WorkerId(1)), Some(stopped));
    assert_eq!(collector.next_batch()?.frames.len(), 60);
    Ok(())
}

fn first_come_goes_on_while_one_hangs() -> Outcome {
    let limit = limit();
    let mut collector = MultiAsync::builder(Task::CartPole)
        .workers(2)
        .frames_per_batch(20)
        .timeout(limit)
        .deadline(patience(30))
        .start(&weights()?)?;
    collector.next_batch()?;
    let stopped = collector.pid(WorkerId(0)).ok_or("no worker 0")?;
    kill_process(pid(stopped)?, Signal::STOP)?;
    let of_it = |restarted: &&Restarted| restarted.worker == WorkerId(0);
    let mut from_the_other = 0;
    loop {
        // Worker 1 has always delivered something, so no batch waits for the limit.
        let batch = collector.next_batch()?;
        if let Some(restarted) = batch.restarts.iter().find(of_it) {
            assert_hung(restarted, 0, stopped, limit);
            break;
        }
        from_the_other += usize::from(batch.workers == [WorkerId(1)]);
    }
    assert!(from_the_other > 0);
    while collector.next_batch()?.workers != [WorkerId(0)] {}
    Ok(())
}

fn a_thread_that_takes_too_long_is_left_alone() -> Outcome {
    let mut collector = MultiSync::builder(Task::CartPole)
        .workers(2)
        .frames_per_batch(100_000)
        .threads()
        .timeout(Duration::from_nanos(1))
        .start(&weights()?)?;
    // Until a part takes longer than the trainer takes to look at the clock. The threads that
    // take their places have the time that starting takes.
    let restarts = loop {
        let batch = collector.next_batch()?;
        assert_eq!(batch.frames.shape, [2, 50_000]);
        if !batch.restarts.is_empty() {
            break batch.restarts;
        }
    };
    for restarted in restarts {
        let told = restarted.exit.to_string();
        let expected = "it took more than 1ns for one part; its thread was left alone";
        assert_eq!(told, expected);
    }
    assert_eq!(collector.pid(WorkerId(1)), Some(std::process::id()));
    Ok(())
}

fn first_come_goes_on_without_one_that_dies() -> Outcome {
    let dir = tempfile::tempdir()?;
    let broken = dir.path().join("broken");
    let spawn = Spawn::this_program()?.env(MISCHIEF, format!("one:{}", broken.display()));
    let weights = weights()?;
    let mut collector = MultiAsync::builder(Task::CartPole)
        .workers(3)
        .frames_per_batch(20)
        .spawn(spawn)
        .start(&weights)?;
    std::fs::write(&broken, "")?;
    let victim = collector.pid(WorkerId(1)).ok_or("no worker 1")?;
    kill_process(pid(victim)?, Signal::KILL)?;
    let mut restarts = Vec::new();
    let abandoned = loop {
        let mut batch = collector.next_batch()?;
        restarts.append(&mut batch.restarts);
        if let Some(abandoned) = batch.abandoned.pop() {
            break abandoned;
        }
    };
    assert_eq!(abandoned.worker, WorkerId(1));
    assert_eq!(abandoned.deaths as usize, restarts.len() + 1);
    let exit = abandoned.exit.process().ok_or("a process")?;
    assert!(exit.stderr_text().contains("out of order"), "{exit}");
    assert_eq!(collector.pid(WorkerId(1)), None);
    // Another one that dies is replaced as before, and reports are of those that are left.
    let victim = collector.pid(WorkerId(0)).ok_or("no worker 0")?;
    kill_process(pid(victim)?, Signal::KILL)?;
    let of_it = |batch: &Batch| batch.restarts.iter().any(|one| one.worker == WorkerId(0));
    while !of_it(&collector.next_batch()?) {}
    while collector.next_batch()?.workers != [WorkerId(0)] {}
    // The first report tells who has died since the one before.
    collector.update_policy_weights(&weights)?;
    let report = collector.update_policy_weights(&weights)?;
    assert!(report.all_applied(), "{report}");
    let told = report.workers.iter().map(|line| line.worker);
    assert!(told.eq([WorkerId(0), WorkerId(2)]), "{report}");
    for _ in 0..5 {
        let batch = collector.next_batch()?;
        assert!(batch.abandoned.is_empty() && batch.workers != [WorkerId(1)]);
    }
    Ok(())
}

fn retries_collect_what_the_first_try_would_have() -> Outcome {
    let weights = weights()?;
    let builder = || {
        MultiSync::builder(Task::CartPole)
            .workers(3)
            .frames_per_batch(60)
            .seed(3)
    };
    let mut expected = builder().start(&weights)?;
    let mut collector = builder().start(&weights)?;
    for _ in 0..3 {
        let stopped = pid(collector.pid(WorkerId(2)).ok_or("no worker 2")?)?;
        kill_process(stopped, Signal::STOP)?;
        collector.set_deadline(Duration::from_millis(10));
        for _ in 0..20 {
            match collector.next_batch() {
                Err(Error::CollectTimeout { missing, .. }) => {
                    assert!(missing.contains(&WorkerId(2)));
                }
                other => panic!("{other:?}"),
            }
        }
        kill_process(stopped, Signal::CONT)?;
        collector.set_deadline(patience(10));
        // No worker has collected a part that nobody takes.
        let batch = collector.next_batch()?;
        assert_eq!(batch.frames, expected.next_batch()?.frames);
        assert!(batch.restarts.is_empty());
    }
    Ok(())
}
