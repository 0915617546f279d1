//! Whole versions while everybody dies: trainers and workers are this binary,
//! run again, and are killed by SIGKILL at random moments.
//!
//! `WEIGHTSYNC_SOAK` scales the counts (`full`: a million checks at 64 KiB, ten
//! thousand at 16 MiB, a hundred at 1 GiB), `WEIGHTSYNC_SOAK_SEED` repeats the
//! random choices of an earlier run. A wait without end in any process fails the
//! test with what hung.

mod cascade;
mod death;
mod fuse;
mod isolation;
mod leaks;
#[path = "../../../weightsync-conformance/src/harness/patience.rs"]
mod patience;
mod pattern;
mod process;
mod reader;
mod scale;
mod script;
mod soak;
mod trainer;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Failed, Trial};
use serde::{Deserialize, Serialize};
use weightsync_engine::worker::{self, WorkerProcess};

/// What a process does that was started by the tests.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Role {
    /// Publishes versions at full speed until it dies.
    Trainer(trainer::Plan),
    /// Takes versions and checks every byte until it dies.
    Reader(reader::Plan),
    /// Does what a test tells it, step by step.
    Process,
}

fn main() -> ExitCode {
    match worker::current() {
        Ok(None) => run_tests(),
        Ok(Some(worker)) => match play(worker) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("{error}");
                ExitCode::from(3)
            }
        },
        Err(error) => {
            // Its trainer was killed while this worker started.
            eprintln!("{error}");
            ExitCode::from(4)
        }
    }
}

fn play(worker: WorkerProcess) -> Result<(), Box<dyn std::error::Error>> {
    match worker.init_value()? {
        Role::Trainer(plan) => trainer::train(worker, plan),
        Role::Reader(plan) => reader::read(&worker, plan),
        Role::Process => process::obey(worker),
    }
}

fn run_tests() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // Each counts this process's threads and descriptors, and some take gigabytes.
    arguments.test_threads = Some(1);
    libtest_mimic::run(&arguments, trials()).exit_code()
}

fn trials() -> Vec<Trial> {
    macro_rules! trials {
        ($($module:ident :: $name:ident,)*) => {
            vec![$(trial(
                concat!(stringify!($module), "::", stringify!($name)),
                $module::$name,
            ),)*]
        };
    }
    trials![
        soak::workers_of_a_killed_trainer_stay_whole_at_64_kib,
        soak::workers_of_a_killed_trainer_stay_whole_at_16_mib,
        soak::workers_of_a_killed_trainer_stay_whole_at_1_gib,
        soak::readers_outlive_trainers_whole_at_64_kib,
        soak::readers_outlive_trainers_whole_at_16_mib,
        soak::readers_outlive_trainers_whole_at_1_gib,
        isolation::what_the_trainer_changes_in_place_is_never_seen,
        death::forked_child_of_a_dead_worker_blocks_nobody,
        death::polling_readers_find_the_next_trainer,
        cascade::leaf_death_is_a_line_of_the_trainer_report,
        cascade::leaves_find_the_next_one_in_the_middle,
        cascade::a_restarted_trainer_is_followed_by_all,
    ]
}

fn trial(name: &str, test: fn()) -> Trial {
    Trial::test(name, move || {
        test();
        Ok::<(), Failed>(())
    })
}
