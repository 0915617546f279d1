//! A set of models compared with one model of the same bytes, sent in turns.

use std::error::Error;

use weightsync_engine::SharedMem;

use super::local::{LocalArgs, RunningBench};
use super::numbers::Times;

/// Times of the same bytes: as a set of several models, and as one model.
pub struct Pair {
    pub set: Times,
    pub one: Times,
}

/// Sends to two groups of workers in turns, several times in a row at each, so
/// that a turn is not about how long a core takes to wake up.
pub fn compare_with_one(
    args: &LocalArgs,
    models: u64,
    turns: u32,
    in_a_row: u32,
) -> Result<Pair, Box<dyn Error>> {
    let scheme = SharedMem::default().into();
    let mut one = RunningBench::start(&scheme, args)?;
    let args = LocalArgs {
        models,
        ..args.clone()
    };
    let mut set = RunningBench::start(&scheme, &args)?;
    let mut pair = Pair {
        set: Times::default(),
        one: Times::default(),
    };
    for turn in 0..turns + 2 {
        for (running, times) in [(&mut set, &mut pair.set), (&mut one, &mut pair.one)] {
            for _ in 0..in_a_row {
                let (took, _) = running.send()?;
                // The first turns fault in what is lazy.
                if turn >= 2 {
                    times.push(took);
                }
            }
        }
    }
    set.end();
    one.end();
    Ok(pair)
}
