//! Worker processes, tested with real ones: workers and trainers are this binary, run again.

mod act;
mod death;
mod group;
mod leaks;
#[path = "../../../weightsync-conformance/src/harness/patience.rs"]
mod patience;
mod stage;

use libtest_mimic::{Arguments, Failed, Trial};

fn main() {
    if act::perform() {
        return;
    }
    let arguments = Arguments::from_args();
    libtest_mimic::run(&arguments, trials()).exit();
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
        group::frames_go_both_ways_whole_and_in_order,
        group::every_worker_gets_its_own_init,
        group::worker_has_its_own_process_group_and_stdin,
        group::a_frame_too_long_is_refused_on_both_ends,
        group::worker_that_breaks_the_protocol_is_killed,
        group::a_worker_that_sends_too_fast_waits,
        group::send_to_a_stalled_worker_ends_at_its_deadline,
        group::an_interrupted_call_ends_and_the_pipe_stays_whole,
        group::an_interrupted_worker_sends_whole_frames,
        group::a_restart_follows_the_end_of_the_process_before,
        group::the_restart_policy_counts,
        group::worker_that_keeps_dying_waits_for_its_end_event,
        group::last_send_arrives_after_a_full_queue,
        group::lines_of_standard_error_come_as_they_are_written,
        group::shutdown_is_idempotent,
        group::sends_before_shutdown_can_still_be_received,
        group::a_worker_that_ignores_the_end_is_killed,
        group::a_program_that_cannot_be_started_is_an_error,
        group::worker_cannot_start_workers_before_it_is_set_up,
        group::the_pipe_is_taken_once_and_not_by_children,
        group::launcher_works_if_it_leaves_stdin_alone,
        group::a_call_for_no_worker_is_an_error,
        death::killed_worker_event_has_its_signal_and_last_output,
        death::a_panic_is_an_exit_with_its_text,
        death::everything_sent_comes_before_the_exit,
        death::a_send_ends_when_the_worker_dies,
        death::what_a_worker_started_dies_with_it,
        death::workers_survive_the_thread_that_started_them,
        death::no_worker_survives_a_killed_trainer,
        death::worker_ends_with_its_lifeline_held_elsewhere,
        death::no_worker_survives_an_aborted_trainer,
        death::worker_ends_with_a_trainer_killed_before_attach,
        leaks::two_hundred_rounds_leave_nothing,
    ]
}

fn trial(name: &str, test: fn()) -> Trial {
    Trial::test(name, move || {
        test();
        Ok::<(), Failed>(())
    })
}
