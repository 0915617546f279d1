//! Stores that are damaged, full, fought over and killed. Writers and readers that are killed are this
//! binary, run again.
//!
//! `WEIGHTSYNC_SOAK` scales the counts (`full`: 500 kills), `WEIGHTSYNC_SOAK_SEED` repeats the random
//! choices of an earlier run.

mod damage;
mod follow;
mod hostile;
mod kills;
mod room;
mod saver;
mod weights;
mod writers;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Failed, Trial};
use serde::{Deserialize, Serialize};
use weightsync_engine::worker::{self, WorkerProcess};

/// What a process does that was started by the tests.
#[derive(Clone, Debug, Serialize, Deserialize)]
enum Role {
    /// Saves versions until it dies or is fenced off.
    Writer(kills::Plan),
    /// Loads versions until it is told to end.
    Reader(String),
    /// Fills a small file system.
    Full,
    /// Reads a store that nobody can write.
    ReadOnly,
}

fn main() -> ExitCode {
    let played = match worker::current() {
        Ok(None) => return run_tests(),
        Ok(Some(worker)) => play(&worker),
        // The test was killed while this process started.
        Err(error) => Err(error.into()),
    };
    match played {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(3)
        }
    }
}

fn play(worker: &WorkerProcess) -> Result<(), Box<dyn std::error::Error>> {
    match worker.init_value()? {
        Role::Writer(plan) => kills::write(worker, &plan),
        Role::Reader(dir) => kills::read(worker, &dir),
        Role::Full => room::fill(),
        Role::ReadOnly => room::only_read(),
    }
}

fn run_tests() -> ExitCode {
    macro_rules! trials {
        ($($module:ident :: $name:ident,)*) => {
            vec![$(Trial::test(
                concat!(stringify!($module), "::", stringify!($name)),
                || {
                    $module::$name();
                    Ok::<(), Failed>(())
                },
            ),)*]
        };
    }
    let trials = trials![
        damage::loads_give_no_damaged_weights,
        damage::writers_go_on_after_damage,
        damage::clocks_decide_nothing,
        follow::worker_reads_what_changed,
        follow::follower_needs_no_file_that_it_has_read,
        hostile::models_stay_inside_the_store,
        hostile::addresses_are_refused_or_used_as_they_are,
        hostile::version_names_stay_names,
        hostile::saves_are_of_each_model_once,
        hostile::temporary_stores_are_known_by_more_than_their_names,
        hostile::sweep_calls_nothing_left_that_another_removes,
        hostile::worker_removes_no_store_because_its_init_info_says_so,
        hostile::leases_of_others_are_left,
        hostile::fifo_in_place_of_any_file_hangs_nobody,
        kills::two_that_push_at_once_lose_nothing,
        kills::four_that_push_at_once_lose_nothing,
        kills::killed_writers_lose_nothing,
        kills::killed_writers_lose_nothing_that_is_kept,
        room::full_disk_refuses_one_save,
        room::read_only_store_is_read,
        saver::saves_end_as_they_do,
        saver::saves_fail_with_the_reason,
        saver::drop_saves_what_waits,
        saver::two_threads_see_the_same_end,
        writers::newest_claim_alone_saves,
        writers::names_hold_versions_while_others_go,
        writers::readers_see_no_half_removed_version,
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}
