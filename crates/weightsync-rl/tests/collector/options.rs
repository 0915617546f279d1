//! The options that all kinds of collectors have.

use weightsync_rl::{
    Error,
    collector::{
        Async, Batch, CollectorBuilder, MultiAsync, MultiSync, Sync, Task, kind::CollectorKind,
    },
    frames::Frames,
    rollout::Exploration,
};

use crate::{Outcome, discrete, trials, weights};

trials! {
    self::iteration_ends_with_the_total_frames,
    self::long_trajectories_are_truncated,
    self::every_batch_begins_with_new_episodes,
    self::the_first_frames_are_random,
    self::the_mode_is_the_same_for_every_seed,
}

/// Batches of 40 frames by each kind, with the options that `set` sets.
macro_rules! each_kind {
    ($set:expr) => {{
        let weights = weights()?;
        let mut sync = set(Sync::builder(Task::CartPole), $set).start(&weights)?;
        let multi = set(MultiSync::builder(Task::CartPole), $set).workers(2);
        let mut multi = multi.threads().start(&weights)?;
        let first = set(MultiAsync::builder(Task::CartPole), $set).workers(2);
        let mut first = first.threads().start(&weights)?;
        let one = set(Async::builder(Task::CartPole), $set);
        let mut one = one.threads().start(&weights)?;
        [
            batches(&mut sync)?,
            batches(&mut multi)?,
            batches(&mut first)?,
            batches(&mut one)?,
        ]
    }};
}

/// The options a test sets.
#[derive(Clone, Copy, Default)]
struct Options {
    max_frames_per_traj: u32,
    reset_at_each_iter: bool,
    init_random_frames: usize,
}

fn set<K: CollectorKind>(builder: CollectorBuilder<K>, options: Options) -> CollectorBuilder<K> {
    builder
        .frames_per_batch(40)
        .total_frames(150)
        .max_frames_per_traj(options.max_frames_per_traj)
        .reset_at_each_iter(options.reset_at_each_iter)
        .init_random_frames(options.init_random_frames)
}

fn batches(
    collector: &mut impl Iterator<Item = Result<Batch, Error>>,
) -> Result<Vec<Frames>, Error> {
    let frames = |batch: Result<Batch, Error>| Ok(batch?.frames);
    let batches = collector.map(frames).collect::<Result<Vec<_>, Error>>()?;
    assert_eq!(batches.len(), 4, "150 frames are in four batches of 40");
    Ok(batches)
}

fn iteration_ends_with_the_total_frames() -> Outcome {
    for batches in each_kind!(Options::default()) {
        assert!(batches.iter().all(|frames| frames.len() == 40));
    }
    let mut collector = set(Sync::builder(Task::CartPole), Options::default()).start(&weights()?)?;
    assert_eq!(collector.by_ref().count(), 4);
    assert!(collector.next().is_none());
    // More is to be had for who asks for it.
    assert_eq!(collector.next_batch()?.frames.len(), 40);
    Ok(())
}

fn long_trajectories_are_truncated() -> Outcome {
    let options = Options {
        max_frames_per_traj: 3,
        ..Options::default()
    };
    for batches in each_kind!(options) {
        for frames in batches {
            assert!(frames.episodes.iter().all(|episode| episode.steps == 3));
            assert!(frames.truncated.contains(&true) && !frames.terminated.contains(&true));
        }
    }
    Ok(())
}

fn every_batch_begins_with_new_episodes() -> Outcome {
    let options = Options {
        reset_at_each_iter: true,
        ..Options::default()
    };
    for batches in each_kind!(options) {
        let mut last = None;
        for frames in batches {
            for row in (0..frames.len()).step_by(frames.steps()) {
                let first = &frames.observations[row * 4..row * 4 + 4];
                assert!(first.iter().all(|s| s.abs() <= 0.05), "{first:?}");
            }
            let ids = &frames.traj_ids;
            assert!(last < ids.iter().min().copied(), "{last:?}: {ids:?}");
            last = ids.iter().max().copied();
        }
    }
    Ok(())
}

fn the_first_frames_are_random() -> Outcome {
    let options = Options {
        init_random_frames: 50,
        ..Options::default()
    };
    let [sync, multi, first, one] = each_kind!(options);
    let version = |frames: &Frames| {
        let version = frames.policy_versions[0];
        assert_eq!(frames.policy_versions, vec![version; 40]);
        version
    };
    for batches in [sync, multi, one] {
        let versions: Vec<u64> = batches.iter().map(version).collect();
        assert_eq!(versions, [0, 0, 1, 1]);
    }
    // Every worker begins with random frames.
    assert_eq!(version(&first[0]), 0);
    Ok(())
}

fn the_mode_is_the_same_for_every_seed() -> Outcome {
    let mut weights = weights()?;
    weights.slice_mut::<f32>("actor.0.bias")?[1] = 0.1;
    for seed in 0..3 {
        let mut collector = MultiSync::builder(Task::CartPole)
            .frames_per_batch(40)
            .seed(seed)
            .exploration(Exploration::Mode)
            .threads()
            .start(&weights)?;
        assert_eq!(discrete(&collector.next_batch()?.frames), vec![1; 40]);
    }
    Ok(())
}
