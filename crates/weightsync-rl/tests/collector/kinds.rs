//! The kinds of collectors, and workers that are threads.

use std::{collections::BTreeSet, time::Duration};

use rustix::process::{Signal, kill_process};
use weightsync_engine::{Tensors, Version, WorkerId};
use weightsync_rl::{
    Error,
    collector::{Async, Batch, MultiAsync, MultiSync, Sync, Task, WorkerEnding},
    frames::{CatResults, Frames},
};

use weightsync_conformance::scale::patience;

use crate::{Outcome, discrete, pid, trials, weights};

trials! {
    self::threads_collect_the_frames_of_processes,
    self::every_kind_collects_the_same_first_frames,
    self::sync_acts_on_the_weights_given,
    self::sync_refuses_foreign_weights,
    self::threads_get_updates_and_end_with_the_collector,
    self::multi_async_gives_the_parts_of_all_workers,
    self::multi_async_begins_parts_with_the_newest_weights,
    self::multi_async_drops_frames_that_are_too_old,
    self::first_come_survives_the_death_of_a_worker,
    self::first_come_gives_up_at_the_deadline,
    self::continuous_actions_come_from_every_kind,
    self::trajectory_ids_are_unique_over_workers_and_batches,
    self::trajectory_ids_are_not_used_again_after_a_death,
}

fn threads_collect_the_frames_of_processes() -> Outcome {
    let weights = weights()?;
    let builder = || {
        MultiSync::builder(Task::CartPole)
            .workers(3)
            .envs_per_worker(2)
            .frames_per_batch(300)
            .seed(5)
    };
    let mut processes = builder().start(&weights)?;
    let mut threads = builder().threads().start(&weights)?;
    for _ in 0..3 {
        assert_eq!(processes.next_batch()?.frames, threads.next_batch()?.frames);
    }
    Ok(())
}

fn every_kind_collects_the_same_first_frames() -> Outcome {
    let weights = weights()?;
    let mut sync = Sync::builder(Task::Acrobot)
        .frames_per_batch(64)
        .seed(9)
        .start(&acrobot()?)?;
    let expected = sync.next_batch()?.frames;
    let collected = [
        MultiSync::builder(Task::Acrobot)
            .frames_per_batch(64)
            .seed(9)
            .cat_results(CatResults::First)
            .threads()
            .start(&acrobot()?)?
            .next_batch()?,
        MultiAsync::builder(Task::Acrobot)
            .frames_per_batch(64)
            .seed(9)
            .threads()
            .start(&acrobot()?)?
            .next_batch()?,
        Async::builder(Task::Acrobot)
            .frames_per_batch(64)
            .seed(9)
            .start(&acrobot()?)?
            .next_batch()?,
    ];
    for batch in collected {
        assert_eq!(batch.frames, expected);
        assert_eq!(batch.workers, [WorkerId(0)]);
    }
    assert!(Sync::builder(Task::Acrobot).start(&weights).is_err());
    Ok(())
}

fn sync_acts_on_the_weights_given() -> Outcome {
    let mut weights = weights()?;
    let mut collector = Sync::builder(Task::CartPole)
        .frames_per_batch(50)
        .start(&weights)?;
    assert_eq!(collector.version(), Version::FIRST);
    for (action, version) in [(0_u32, 2), (1, 3)] {
        let bias = weights.slice_mut::<f32>("actor.0.bias")?;
        bias.fill(-100.0);
        bias[action as usize] = 100.0;
        assert_eq!(collector.update_policy_weights(&weights)?, Version(version));
        let frames = collector.next_batch()?.frames;
        assert_eq!(discrete(&frames), vec![action; 50]);
        assert_eq!(frames.policy_versions, vec![version; 50]);
    }
    Ok(())
}

fn sync_refuses_foreign_weights() -> Outcome {
    let mut collector = Sync::builder(Task::CartPole).start(&weights()?)?;
    assert!(collector.update_policy_weights(&acrobot()?).is_err());
    assert_eq!(collector.version(), Version::FIRST);
    assert_eq!(collector.next_batch()?.frames.len(), 1000);
    Ok(())
}

fn threads_get_updates_and_end_with_the_collector() -> Outcome {
    let weights = weights()?;
    let mut collector = MultiSync::builder(Task::CartPole)
        .workers(2)
        .frames_per_batch(100)
        .threads()
        .start(&weights)?;
    for version in 1..20 {
        let batch = collector.next_batch()?;
        assert_eq!(batch.frames.policy_versions, vec![version; 100]);
        assert!(batch.restarts.is_empty());
        let report = collector.update_policy_weights(&weights)?;
        assert!(report.all_applied(), "{report}");
        assert_eq!(report.workers.len(), 2);
    }
    assert_eq!(collector.pid(WorkerId(1)), Some(std::process::id()));
    assert_eq!(collector.pid(WorkerId(2)), None);
    collector.shutdown();
    Ok(())
}

fn multi_async_gives_the_parts_of_all_workers() -> Outcome {
    let mut collector = MultiAsync::builder(Task::CartPole)
        .workers(3)
        .envs_per_worker(2)
        .frames_per_batch(100)
        .start(&weights()?)?;
    // A worker has two parts ahead at most, so nobody is left out for long.
    let mut whose = BTreeSet::new();
    while whose.len() < 3 {
        let batch = collector.next_batch()?;
        assert_eq!((batch.frames.len(), batch.workers.len()), (100, 1));
        whose.extend(batch.workers);
    }
    Ok(())
}

fn multi_async_begins_parts_with_the_newest_weights() -> Outcome {
    let weights = weights()?;
    let mut collector = Async::builder(Task::CartPole)
        .frames_per_batch(20)
        .threads()
        .start(&weights)?;
    let mut last = 0;
    for _ in 0..30 {
        let newest = collector.version().0;
        let frames = collector.next_batch()?.frames;
        let version = frames.policy_versions[0];
        assert_eq!(frames.policy_versions, vec![version; 20]);
        assert!(version >= last && version <= newest);
        // Two parts at most were begun before the last two updates.
        assert!(version + 2 >= newest, "{version} of {newest}");
        last = version;
        collector.update_policy_weights(&weights)?;
    }
    Ok(())
}

fn multi_async_drops_frames_that_are_too_old() -> Outcome {
    let weights = weights()?;
    let mut collector = MultiAsync::builder(Task::CartPole)
        .workers(2)
        .frames_per_batch(40)
        .max_staleness(0)
        .start(&weights)?;
    let (mut dropped, mut seen) = (0, Vec::new());
    // Until an update has come between the beginning of a part and its end.
    while dropped == 0 {
        let batch = collector.next_batch()?;
        let newest = collector.version().0;
        assert_eq!(batch.frames.policy_versions, vec![newest; 40]);
        assert_eq!(batch.dropped % 40, 0, "frames of whole parts");
        dropped += batch.dropped;
        seen.push(batch);
        collector.update_policy_weights(&weights)?;
    }
    seen.push(collector.next_batch()?);
    assert_chained(&seen);
    Ok(())
}

fn first_come_survives_the_death_of_a_worker() -> Outcome {
    let weights = weights()?;
    let mut collector = MultiAsync::builder(Task::CartPole)
        .workers(2)
        .frames_per_batch(40)
        .start(&weights)?;
    let (mut batches, mut killed) = (Vec::new(), BTreeSet::new());
    for worker in [0, 1, 0].map(WorkerId) {
        let victim = collector.pid(worker).ok_or("no such worker")?;
        kill_process(pid(victim)?, Signal::KILL)?;
        killed.insert(victim);
        let mut replaced = false;
        while !replaced {
            let batch = collector.next_batch()?;
            replaced = batch.restarts.iter().any(|r| r.worker == worker);
            batches.push(batch);
        }
        // Its successor may not have joined yet.
        let report = collector.update_policy_weights(&weights)?;
        let dead = |pid| killed.contains(&pid);
        assert!(report.failed().all(|line| dead(line.pid)), "{report}");
    }
    // The replaced ones go on.
    for worker in [0, 1].map(WorkerId) {
        while batches.last().is_none_or(|last| last.workers != [worker]) {
            batches.push(collector.next_batch()?);
        }
    }
    assert_chained(&batches);
    Ok(())
}

fn first_come_gives_up_at_the_deadline() -> Outcome {
    let mut collector = Async::builder(Task::CartPole)
        .frames_per_batch(40)
        .start(&weights()?)?;
    let first = collector.next_batch()?;
    let worker = pid(collector.pid(WorkerId(0)).ok_or("no worker")?)?;
    kill_process(worker, Signal::STOP)?;
    collector.set_deadline(Duration::from_millis(50));
    // Parts that were finished before come all the same.
    let mut batches = vec![first];
    let missing = loop {
        match collector.next_batch() {
            Ok(batch) => batches.push(batch),
            Err(Error::CollectTimeout { missing, .. }) => break missing,
            Err(other) => return Err(other.into()),
        }
    };
    assert_eq!(missing, [WorkerId(0)]);
    kill_process(worker, Signal::CONT)?;
    collector.set_deadline(patience(10));
    for _ in 0..5 {
        batches.push(collector.next_batch()?);
    }
    // Nothing was lost: one trajectory after the other.
    assert_chained(&batches);
    let ids = batches.iter().flat_map(|batch| &batch.frames.traj_ids);
    let mut next = 0;
    for id in ids.copied() {
        assert!(id == next || id + 1 == next, "{id} after {next}");
        next = next.max(id + 1);
    }
    Ok(())
}

fn continuous_actions_come_from_every_kind() -> Outcome {
    let mut weights = Tensors::new();
    weights.insert("actor.0.weight", [1, 3], vec![0.0_f32; 3])?;
    weights.insert("actor.0.bias", [1], vec![0.5_f32])?;
    assert!(Sync::builder(Task::Pendulum).start(&weights).is_err());
    weights.insert("actor.log_std", [1], vec![-1.0_f32])?;
    let mut here = Sync::builder(Task::Pendulum)
        .envs_per_worker(2)
        .start(&weights)?;
    let expected = here.next_batch()?.frames;
    let (torques, len) = expected.actions.continuous().ok_or("continuous")?;
    assert_eq!((torques.len(), len), (1000, 1));
    let mut all = MultiSync::builder(Task::Pendulum)
        .envs_per_worker(2)
        .cat_results(CatResults::First)
        .start(&weights)?;
    assert_eq!(all.next_batch()?.frames, expected);
    let mut first = Async::builder(Task::Pendulum)
        .envs_per_worker(2)
        .threads()
        .start(&weights)?;
    assert_eq!(first.next_batch()?.frames, expected);
    Ok(())
}

fn trajectory_ids_are_unique_over_workers_and_batches() -> Outcome {
    let weights = weights()?;
    let mut all = MultiSync::builder(Task::CartPole)
        .workers(3)
        .envs_per_worker(2)
        .frames_per_batch(300)
        .start(&weights)?;
    let batches = (0..4)
        .map(|_| all.next_batch())
        .collect::<Result<Vec<_>, _>>()?;
    assert_chained(&batches);
    // One growing count, in order of worker, then of the first frames.
    let ids = &batches[0].frames.traj_ids;
    let mut next = 0;
    for worker in ids.chunks(100) {
        for t in 0..50 {
            for env in 0..2 {
                let id = worker[env * 50 + t];
                assert!(id <= next);
                next += u64::from(id == next);
            }
        }
    }
    let mut first = MultiAsync::builder(Task::CartPole)
        .workers(3)
        .envs_per_worker(2)
        .frames_per_batch(100)
        .threads()
        .start(&weights)?;
    let batches = (0..9)
        .map(|_| first.next_batch())
        .collect::<Result<Vec<_>, _>>()?;
    assert_chained(&batches);
    Ok(())
}

fn trajectory_ids_are_not_used_again_after_a_death() -> Outcome {
    let mut collector = MultiSync::builder(Task::CartPole)
        .workers(2)
        .frames_per_batch(20)
        .start(&weights()?)?;
    let mut batches = vec![collector.next_batch()?];
    for _ in 0..3 {
        let victim = collector.pid(WorkerId(1)).ok_or("no worker 1")?;
        kill_process(pid(victim)?, Signal::KILL)?;
        let mut restarted = false;
        while !restarted {
            let batch = collector.next_batch()?;
            let exit = batch.restarts.first().map(|restart| &restart.exit);
            restarted = matches!(exit, Some(WorkerEnding::Process(_)));
            batches.push(batch);
        }
    }
    assert_chained(&batches);
    Ok(())
}

/// Frames of one trajectory follow each other, in batches of one worker's rows.
fn assert_chained(batches: &[Batch]) {
    let mut last: std::collections::BTreeMap<u64, Vec<f32>> = Default::default();
    for Batch { frames, .. } in batches {
        let len = frames.observation_len;
        let row = |of: &[f32], i: usize| of[i * len..(i + 1) * len].to_vec();
        for i in 0..frames.len() {
            let id = frames.traj_ids[i];
            if let Some(next) = last.remove(&id) {
                assert_eq!(next, row(&frames.observations, i), "trajectory {id}");
            }
            let next = match frames.done(i) {
                // Nothing follows: no observation is this long.
                true => Vec::new(),
                false => row(&frames.next_observations, i),
            };
            last.insert(id, next);
        }
        assert_labelled(frames);
    }
}

/// A trajectory changes in a row of time where an episode ends, and only there.
fn assert_labelled(frames: &Frames) {
    for row in (0..frames.len()).collect::<Vec<_>>().chunks(frames.steps()) {
        for pair in row.windows(2) {
            let same = frames.traj_ids[pair[0]] == frames.traj_ids[pair[1]];
            assert_eq!(same, !frames.done(pair[0]));
        }
    }
}

fn acrobot() -> Result<Tensors, weightsync_engine::Error> {
    let mut weights = Tensors::new();
    weights.insert("actor.0.weight", [3, 6], vec![0.0_f32; 18])?;
    weights.insert("actor.0.bias", [3], vec![0.0_f32; 3])?;
    Ok(weights)
}
