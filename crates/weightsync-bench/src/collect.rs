//! Frames of CartPole by the Rust policy, for `bench/collect`, which times them next to the same
//! job of TorchRL: for each line of its input, a number of batches, it collects so many, and says
//! how many frames they had.

use std::error::Error;
use std::io::{self, BufRead, Write};

use rand::{RngExt, SeedableRng, rngs::Xoshiro256PlusPlus};
use weightsync_engine::worker::Spawn;
use weightsync_engine::{Tensors, worker};
use weightsync_rl::collector::{self, MultiSync, Task};

/// How frames are collected.
#[derive(clap::Args)]
pub struct Args {
    #[arg(long, default_value_t = 2)]
    workers: usize,
    /// Environments of each worker
    #[arg(long, default_value_t = 8)]
    envs: usize,
    /// Frames in a batch
    #[arg(long, default_value_t = 2048)]
    frames: usize,
}

/// Collects as it is asked to, or, in a process that it started, is one of its workers.
pub fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    if let Some(process) = worker::current()? {
        return Ok(collector::serve(&process)?);
    }
    let mut collector = MultiSync::builder(Task::CartPole)
        .workers(args.workers)
        .envs_per_worker(args.envs)
        .frames_per_batch(args.frames)
        .spawn(Spawn::this_program()?.args(["collect"]))
        .start(&policy()?)?;
    for line in io::stdin().lock().lines() {
        let batches: usize = line?.trim().parse()?;
        let mut frames = 0;
        for _ in 0..batches {
            frames += collector.next_batch()?.frames.len();
        }
        println!("{frames}");
        io::stdout().flush()?;
    }
    Ok(())
}

/// An MLP with two layers of 64, untrained.
fn policy() -> Result<Tensors, Box<dyn Error>> {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(1);
    let mut weights = Tensors::new();
    for (layer, (inputs, outputs)) in [(4, 64), (64, 64), (64, 2)].into_iter().enumerate() {
        let bound = 1.0 / f32::sqrt(inputs as f32);
        let weight = (0..inputs * outputs).map(|_| rng.random_range(-bound..bound));
        let weight: Vec<f32> = weight.collect();
        let shape = [outputs as u64, inputs as u64];
        weights.insert(&format!("actor.{layer}.weight"), shape, weight)?;
        weights.insert(
            &format!("actor.{layer}.bias"),
            [outputs as u64],
            vec![0.0_f32; outputs],
        )?;
    }
    Ok(weights)
}
