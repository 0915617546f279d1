//! The shapes of batches: the document's table, every cell.

use weightsync_rl::{
    Error,
    collector::{Async, Batch, MultiAsync, MultiSync, Sync, Task},
    frames::{CatResults, Frames},
};

use crate::{Outcome, discrete, trials, weights};

trials! {
    self::every_cell_of_the_table_has_its_shape,
    self::frames_are_where_the_shape_says,
}

const WORKERS: usize = 3;
const ENVS: usize = 2;
const STEPS: usize = 10;

#[derive(Clone, Copy, Debug)]
enum Kind {
    Sync,
    MultiSync(CatResults),
    MultiAsync,
    Async,
}

fn every_cell_of_the_table_has_its_shape() -> Outcome {
    use CatResults::{First, Last, Stack};
    let (b, p, t) = (WORKERS, ENVS, STEPS);
    let table: [(Kind, &[usize], &[usize]); 6] = [
        (Kind::Sync, &[t], &[p, t]),
        (Kind::MultiSync(Stack), &[b, t], &[b, p, t]),
        (Kind::MultiSync(First), &[b * t], &[b * p, t]),
        (Kind::MultiSync(Last), &[b * t], &[p, b * t]),
        (Kind::MultiAsync, &[t], &[p, t]),
        (Kind::Async, &[t], &[p, t]),
    ];
    for (kind, single, batched) in table {
        for (envs, shape) in [(None, single), (Some(ENVS), batched)] {
            let frames = collect(kind, envs, shape.iter().product())?.frames;
            assert_eq!(frames.shape, shape, "{kind:?}, {envs:?}");
            assert_eq!(frames.len(), shape.iter().product::<usize>());
            assert_eq!(frames.steps(), shape[shape.len() - 1]);
            let observations = frames.len() * frames.observation_len;
            assert_eq!(frames.observations.len(), observations);
        }
    }
    Ok(())
}

fn frames_are_where_the_shape_says() -> Outcome {
    let (b, p, t) = (WORKERS, ENVS, STEPS);
    let batch = |how| collect(Kind::MultiSync(how), Some(p), b * p * t);
    let stack = batch(CatResults::Stack)?.frames;
    let first = batch(CatResults::First)?.frames;
    let last = batch(CatResults::Last)?.frames;
    let frame = |frames: &Frames, i: usize| {
        let len = frames.observation_len;
        let seen = frames.observations[i * len..(i + 1) * len].to_vec();
        (seen, frames.traj_ids[i], discrete(frames)[i])
    };
    for worker in 0..b {
        for env in 0..p {
            for step in 0..t {
                let expected = frame(&stack, (worker * p + env) * t + step);
                assert_eq!(frame(&first, (worker * p + env) * t + step), expected);
                assert_eq!(frame(&last, (env * b + worker) * t + step), expected);
            }
        }
    }
    assert_eq!(stack.episodes, last.episodes);
    Ok(())
}

fn collect(kind: Kind, envs: Option<usize>, frames: usize) -> Result<Batch, Error> {
    let weights = weights()?;
    /// The settings that all kinds have.
    macro_rules! builder {
        ($kind:ident) => {{
            let builder = $kind::builder(Task::CartPole).frames_per_batch(frames);
            match envs {
                Some(envs) => builder.envs_per_worker(envs),
                None => builder,
            }
        }};
    }
    match kind {
        Kind::Sync => builder!(Sync).start(&weights)?.next_batch(),
        Kind::MultiSync(how) => builder!(MultiSync)
            .workers(WORKERS)
            .cat_results(how)
            .threads()
            .start(&weights)?
            .next_batch(),
        Kind::MultiAsync => builder!(MultiAsync)
            .workers(WORKERS)
            .threads()
            .start(&weights)?
            .next_batch(),
        Kind::Async => builder!(Async).threads().start(&weights)?.next_batch(),
    }
}
