//! The collector that gathers from all workers, in processes that die.

use std::time::{Duration, Instant};

use rustix::process::{Signal, kill_process, test_kill_process};
use weightsync_engine::{
    Tensors, WorkerId,
    worker::{self, Restart, Spawn},
};
use weightsync_rl::{
    Error,
    collector::{Batch, CollectorBuilder, MultiSync, Task},
};

use weightsync_conformance::scale::patience;

use crate::{MISCHIEF, Outcome, discrete, pid, trials, weights};

trials! {
    self::the_same_seed_gives_the_same_frames,
    self::frames_carry_the_version_sent,
    self::workers_act_on_the_weights_sent,
    self::an_idle_worker_that_dies_is_replaced,
    self::a_worker_that_dies_in_a_batch_is_replaced,
    self::a_worker_that_talks_nonsense_is_replaced,
    self::workers_that_cannot_start_are_given_up,
    self::a_restart_policy_of_the_caller_does_not_count,
    self::a_worker_given_up_is_tried_again_by_the_next_batch,
    self::a_stopped_worker_costs_the_deadline_and_is_named,
    self::a_deadline_beyond_the_clock_is_none,
    self::no_worker_outlives_the_collector,
    self::foreign_weights_are_refused_before_workers_start,
    self::impossible_batches_are_refused,
}

fn the_same_seed_gives_the_same_frames() -> Outcome {
    let run = |seed| -> Result<_, Box<dyn std::error::Error>> {
        let mut weights = weights()?;
        let mut collector = builder().seed(seed).start(&weights)?;
        let mut batches = Vec::new();
        for _ in 0..5 {
            batches.push(collector.next_batch()?.frames);
            weights.slice_mut::<f32>("actor.0.weight")?[2] += 0.5;
            collector.update_policy_weights(&weights)?;
        }
        Ok(batches)
    };
    let batches = run(1)?;
    assert_eq!(batches[0].shape, [3, 2, 50]);
    assert_eq!(batches, run(1)?);
    assert_ne!(batches, run(2)?);
    let first = &batches[0].observations;
    let part = first.len() / 3;
    assert_ne!(first[..part], first[part..2 * part], "workers differ");
    Ok(())
}

fn frames_carry_the_version_sent() -> Outcome {
    let weights = weights()?;
    let mut collector = builder().start(&weights)?;
    let first = collector.version().0;
    for update in 0..20 {
        let batch = collector.next_batch()?;
        assert_eq!(batch.frames.policy_versions, vec![first + update; 300]);
        assert!(batch.restarts.is_empty());
        let report = collector.update_policy_weights(&weights)?;
        assert!(report.all_applied(), "{report}");
        assert_eq!(report.workers.len(), 3);
        let versions = collector.worker_versions();
        assert!(
            versions
                .iter()
                .all(|v| v.versions[0] == report.version().unwrap())
        );
    }
    Ok(())
}

fn workers_act_on_the_weights_sent() -> Outcome {
    let mut weights = weights()?;
    let mut collector = builder().start(&weights)?;
    for action in [0_u32, 1, 0] {
        let bias = weights.slice_mut::<f32>("actor.0.bias")?;
        bias.fill(-100.0);
        bias[action as usize] = 100.0;
        collector.update_policy_weights(&weights)?;
        assert_eq!(discrete(&collector.next_batch()?.frames), vec![action; 300]);
    }
    // An in-place change that was not sent is not acted on.
    weights.slice_mut::<f32>("actor.0.bias")?.reverse();
    assert_eq!(discrete(&collector.next_batch()?.frames), vec![0; 300]);
    Ok(())
}

fn an_idle_worker_that_dies_is_replaced() -> Outcome {
    let mut weights = weights()?;
    let mut collector = builder().start(&weights)?;
    collector.next_batch()?;
    let victim = collector.pid(WorkerId(1)).ok_or("no worker 1")?;
    kill_process(pid(victim)?, Signal::KILL)?;
    // Sent whether or not its death has been noticed; it concerns nobody else.
    weights.slice_mut::<f32>("actor.0.bias")?[0] = 100.0;
    let report = collector.update_policy_weights(&weights)?;
    assert!(report.workers.iter().filter(|w| w.worker.0 != 1).count() == 2);
    assert!(report.failed().all(|line| line.pid == victim), "{report}");

    let mut restarts = Vec::new();
    let mut batch = collector.next_batch()?;
    restarts.append(&mut batch.restarts);
    if restarts.is_empty() {
        // It was asked before the kernel had ended it.
        restarts.append(&mut collector.next_batch()?.restarts);
    }
    assert_eq!(restarts.len(), 1);
    assert_eq!(restarts[0].worker, WorkerId(1));
    let exit = restarts[0].exit.process().ok_or("a process")?;
    assert_eq!((exit.signal, exit.pid), (Some(9), victim));
    assert_eq!(collector.pid(WorkerId(1)), Some(restarts[0].pid));
    assert_eq!(batch.frames.shape, [3, 2, 50]);
    assert_eq!(
        discrete(&batch.frames),
        vec![0; 300],
        "with the current weights"
    );
    assert_eq!(
        batch.frames.policy_versions,
        vec![collector.version().0; 300]
    );

    let report = collector.update_policy_weights(&weights)?;
    assert!(
        report.all_applied() && report.workers.len() == 3,
        "{report}"
    );
    Ok(())
}

fn a_worker_that_dies_in_a_batch_is_replaced() -> Outcome {
    replaced_once("die", |exit| exit.signal == Some(6))
}

fn a_worker_that_talks_nonsense_is_replaced() -> Outcome {
    replaced_once("babble", |exit| exit.signal == Some(9))
}

fn replaced_once(mischief: &str, ended: fn(&worker::Exit) -> bool) -> Outcome {
    let dir = tempfile::tempdir()?;
    let once = dir.path().join("done");
    let spawn = Spawn::this_program()?
        .env(MISCHIEF, format!("{mischief}:{}", once.display()))
        // Of no effect: the collector decides.
        .restart(Restart::UpTo(9));
    let mut collector = builder().spawn(spawn).start(&weights()?)?;
    let batch = collector.next_batch()?;
    assert_eq!(batch.restarts.len(), 1);
    assert_eq!(batch.restarts[0].worker, WorkerId(1));
    let exit = batch.restarts[0].exit.process().ok_or("a process")?;
    assert!(ended(exit), "{exit}");
    assert_eq!(batch.frames.shape, [3, 2, 50]);
    assert!(collector.next_batch()?.restarts.is_empty());
    Ok(())
}

fn workers_that_cannot_start_are_given_up() -> Outcome {
    let spawn = Spawn::this_program()?.env(MISCHIEF, "fail:now");
    let begun = Instant::now();
    match builder().spawn(spawn).start(&weights()?) {
        Err(Error::KeepsDying { exit, .. }) => {
            let exit = exit.process().ok_or("a process")?;
            assert_eq!(exit.status, Some(1));
            assert!(exit.stderr_text().contains("out of order"), "{exit}");
        }
        other => panic!("{other:?}"),
    }
    assert!(begun.elapsed() < patience(10), "an event, not a deadline");
    Ok(())
}

/// Counted by the file that every start of worker 0 adds a byte to.
fn a_restart_policy_of_the_caller_does_not_count() -> Outcome {
    let dir = tempfile::tempdir()?;
    let starts = dir.path().join("starts");
    let spawn = Spawn::this_program()?
        .env(MISCHIEF, format!("count:{}", starts.display()))
        .restart(Restart::UpTo(5));
    match builder().workers(1).spawn(spawn).start(&weights()?) {
        Err(Error::KeepsDying { deaths, exit, .. }) => {
            let exit = exit.process().ok_or("a process")?;
            assert!(!exit.restarted, "{exit}");
            assert_eq!(std::fs::metadata(&starts)?.len(), u64::from(deaths));
        }
        other => panic!("{other:?}"),
    }
    Ok(())
}

fn a_worker_given_up_is_tried_again_by_the_next_batch() -> Outcome {
    let dir = tempfile::tempdir()?;
    let broken = dir.path().join("broken");
    let spawn = Spawn::this_program()?.env(MISCHIEF, format!("while:{}", broken.display()));
    let mut collector = builder().spawn(spawn).start(&weights()?)?;
    std::fs::write(&broken, "")?;
    for worker in (0..3).map(WorkerId) {
        let victim = collector.pid(worker).ok_or("no such worker")?;
        kill_process(pid(victim)?, Signal::KILL)?;
    }
    // The second has to start the process that the first gave up.
    for _ in 0..2 {
        let begun = Instant::now();
        match collector.next_batch() {
            Err(Error::KeepsDying { exit, .. }) => {
                assert_eq!(exit.process().and_then(|exit| exit.status), Some(1));
            }
            other => panic!("{other:?}"),
        }
        assert!(begun.elapsed() < patience(10), "no deadline");
    }
    std::fs::remove_file(&broken)?;
    let batch = collect_after_deaths(&mut collector)?;
    assert_eq!(batch.frames.shape, [3, 2, 50]);
    let replaced = |worker| batch.restarts.iter().any(|r| r.worker == WorkerId(worker));
    assert!((0..3).all(replaced), "{:?}", batch.restarts);
    let report = collector.update_policy_weights(&weights()?)?;
    // The processes that were killed have a line each, and are no failure of it.
    assert!(report.all_applied(), "{report}");
    assert!((0..3).all(|worker| report.worker(worker).is_some()));
    Ok(())
}

/// A batch, after the deaths that were under way have been counted.
fn collect_after_deaths(collector: &mut MultiSync) -> Result<Batch, Error> {
    loop {
        match collector.next_batch() {
            Err(Error::KeepsDying { .. }) => {}
            other => return other,
        }
    }
}

fn a_stopped_worker_costs_the_deadline_and_is_named() -> Outcome {
    let deadline = Duration::from_millis(300);
    let mut collector = builder().start(&weights()?)?;
    collector.set_deadline(deadline);
    let stopped = pid(collector.pid(WorkerId(2)).ok_or("no worker 2")?)?;
    kill_process(stopped, Signal::STOP)?;
    match collector.next_batch() {
        Err(Error::CollectTimeout { missing, waited }) => {
            assert!(missing.contains(&WorkerId(2)), "{missing:?}");
            assert!(waited >= deadline && waited < patience(10));
        }
        other => panic!("{other:?}"),
    }
    let report = collector.update_policy_weights(&weights()?)?;
    let late: Vec<_> = report.failed().map(|line| line.worker).collect();
    assert!(late.contains(&WorkerId(2)), "{report}");
    assert!(report.took < patience(10), "{report}");

    kill_process(stopped, Signal::CONT)?;
    collector.set_deadline(patience(10));
    let batch = collector.next_batch()?;
    assert_eq!(batch.frames.policy_versions, vec![2; 300]);
    assert!(batch.restarts.is_empty());
    Ok(())
}

fn a_deadline_beyond_the_clock_is_none() -> Outcome {
    let builder = builder().deadline(Duration::MAX);
    let mut collector = builder.start(&weights()?)?;
    assert_eq!(collector.next_batch()?.frames.len(), 300);
    assert!(collector.update_policy_weights(&weights()?)?.all_applied());
    Ok(())
}

fn no_worker_outlives_the_collector() -> Outcome {
    let collector = builder().start(&weights()?)?;
    let pids: Vec<u32> = (0..3)
        .filter_map(|worker| collector.pid(WorkerId(worker)))
        .collect();
    assert_eq!(pids.len(), 3);
    collector.shutdown();
    for worker in pids {
        assert!(test_kill_process(pid(worker)?).is_err(), "{worker} lives");
    }
    Ok(())
}

fn foreign_weights_are_refused_before_workers_start() -> Outcome {
    let dir = tempfile::tempdir()?;
    let starts = dir.path().join("starts");
    let start = |weights: &Tensors| -> Result<_, Box<dyn std::error::Error>> {
        let spawn = Spawn::this_program()?.env(MISCHIEF, format!("count:{}", starts.display()));
        Ok(builder().spawn(spawn).start(weights))
    };
    let mut named = Tensors::new();
    named.insert("critic.0.weight", [2, 4], vec![0.0_f32; 8])?;
    assert!(matches!(start(&named)?, Err(Error::MissingTensor { .. })));
    let mut typed = Tensors::new();
    typed.insert("actor.0.weight", [2, 4], vec![0_i32; 8])?;
    typed.insert("actor.0.bias", [2], vec![0.0_f32; 2])?;
    assert!(matches!(start(&typed)?, Err(Error::MissingTensor { .. })));
    let mut shaped = Tensors::new();
    shaped.insert("actor.0.weight", [3, 4], vec![0.0_f32; 12])?;
    shaped.insert("actor.0.bias", [3], vec![0.0_f32; 3])?;
    match start(&shaped)? {
        Err(Error::TensorLen { expected, got, .. }) => assert_eq!((expected, got), (2, 3)),
        other => panic!("{other:?}"),
    }
    assert!(!starts.exists());
    Ok(())
}

fn impossible_batches_are_refused() -> Outcome {
    let uneven = builder().frames_per_batch(301).start(&weights()?);
    assert!(matches!(uneven, Err(Error::UnevenBatch { .. })));
    let none = builder().frames_per_batch(0).start(&weights()?);
    assert!(matches!(none, Err(Error::BatchSize { .. })));
    let idle = builder().workers(0).start(&weights()?);
    assert!(matches!(idle, Err(Error::UnevenBatch { .. })));
    Ok(())
}

fn builder() -> CollectorBuilder {
    MultiSync::builder(Task::CartPole)
        .workers(3)
        .envs_per_worker(2)
        .frames_per_batch(300)
}
