//! Collectors with real workers: worker processes are this binary, run again.

mod faults;
mod gym;
mod kinds;
#[cfg(feature = "candle")]
mod learning;
mod multi_sync;
mod options;
mod shapes;

use std::{
    fs::OpenOptions,
    io::{self, Write},
    path::Path,
    process::ExitCode,
};

use libtest_mimic::Arguments;
use rustix::process::Pid;
use weightsync_engine::{
    Tensors,
    worker::{self, WorkerProcess},
};
use weightsync_rl::{collector, frames::Frames};

/// What a test comes to.
pub type Outcome = Result<(), Box<dyn std::error::Error>>;

/// Tells a worker of this binary how to misbehave; see [`misbehave`].
pub const MISCHIEF: &str = "COLLECTOR_TEST_MISCHIEF";

fn main() -> ExitCode {
    match worker::current() {
        Ok(None) => {}
        Ok(Some(process)) => {
            let served = misbehave(&process).and_then(|()| Ok(collector::serve(&process)?));
            return match served {
                Ok(()) => ExitCode::SUCCESS,
                Err(error) => {
                    eprintln!("{error}");
                    ExitCode::FAILURE
                }
            };
        }
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    }
    let trials = [
        faults::trials(),
        gym::trials(),
        kinds::trials(),
        #[cfg(feature = "candle")]
        learning::trials(),
        multi_sync::trials(),
        options::trials(),
        shapes::trials(),
    ];
    let trials = trials.into_iter().flatten().collect();
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// The tests of a module, by their paths: xtask/tests/features.rs finds them by these.
#[macro_export]
macro_rules! trials {
    ($(self::$test:ident),* $(,)?) => {
        pub fn trials() -> Vec<libtest_mimic::Trial> {
            vec![$(libtest_mimic::Trial::test(stringify!($test), || {
                $test().map_err(|error| error.to_string().into())
            })),*]
        }
    };
}

/// A policy for CartPole that tosses a coin.
pub fn weights() -> Result<Tensors, weightsync_engine::Error> {
    let mut weights = Tensors::new();
    weights.insert("actor.0.weight", [2, 4], vec![0.0_f32; 8])?;
    weights.insert("actor.0.bias", [2], vec![0.0_f32; 2])?;
    Ok(weights)
}

/// The actions of a task that has discrete ones.
pub fn discrete(frames: &Frames) -> &[u32] {
    frames.actions.discrete().expect("discrete actions")
}

/// A process id, as signals take it.
pub fn pid(id: u32) -> Result<Pid, io::Error> {
    Pid::from_raw(id as i32).ok_or_else(|| io::Error::other("no process has id 0"))
}

/// In a worker: `fail:` ends it at once, `while:FILE` while that file exists,
/// `one:FILE` the same if it is worker 1, and `count:FILE` with a byte added to that file; `die:FILE` and `babble:FILE` have
/// worker 1 abort on its first real request, or answer it with bytes that mean
/// nothing, once, with FILE as the memory of it.
fn misbehave(process: &WorkerProcess) -> Outcome {
    let Ok(mischief) = std::env::var(MISCHIEF) else {
        return Ok(());
    };
    let (what, file) = mischief.split_once(':').ok_or("no colon")?;
    if what == "fail" {
        return Err("out of order".into());
    }
    let file = Path::new(file);
    match what {
        "count" => {
            let mut starts = OpenOptions::new().create(true).append(true).open(file)?;
            starts.write_all(b"+")?;
            return Err("out of order".into());
        }
        "while" if file.exists() => return Err("out of order".into()),
        "one" if process.index() == 1 && file.exists() => return Err("out of order".into()),
        "while" | "one" => return Ok(()),
        _ => {}
    }
    if process.index() != 1 || file.exists() {
        return Ok(());
    }
    std::fs::write(file, what)?;
    // It has heard the request and will never answer it as asked.
    process.recv(None)?;
    if what == "die" {
        std::process::abort();
    }
    process.send(b"\x02nonsense")?;
    process.recv(None)?;
    Ok(())
}
