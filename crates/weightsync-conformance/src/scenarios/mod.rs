//! What is always true, one scenario each.

pub(crate) mod asynchronous;
pub(crate) mod background;
pub(crate) mod death;
pub(crate) mod hold;
pub(crate) mod hostile;
pub(crate) mod leaks;
pub(crate) mod lifecycle;
pub(crate) mod payload;
pub(crate) mod receive;
pub(crate) mod refusals;
pub(crate) mod restart;
pub(crate) mod send;
pub(crate) mod sets;
pub(crate) mod snapshots;
pub(crate) mod targets;

use crate::Subject;
use Need::{
    Corrupt, Death, EveryVersion, Hold, Interrupter, Loan, Newest, NoWeights, Pull, Push, Restarts,
    Sets, Subsets, Weights,
};

/// What a scenario needs of a scheme.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    Weights,
    /// A scheme that carries nothing.
    NoWeights,
    Push,
    Sets,
    Subsets,
    Hold,
    Pull,
    EveryVersion,
    /// Versions that were not taken in time are passed over.
    Newest,
    Loan,
    Restarts,
    Death,
    /// A wait can be ended from another thread. No capability states it: each
    /// scheme is asked.
    Interrupter,
    /// A hook that damages commit records.
    Corrupt,
}

impl Need {
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Weights => "weights",
            Self::NoWeights => "no weights",
            Self::Push => "push",
            Self::Sets => "sets",
            Self::Subsets => "subsets",
            Self::Hold => "hold",
            Self::Pull => "pull",
            Self::EveryVersion => "every version",
            Self::Newest => "newest only",
            Self::Loan => "loan",
            Self::Restarts => "restarts",
            Self::Death => "death",
            Self::Interrupter => "interrupter",
            Self::Corrupt => "a hook that damages records",
        }
    }

    fn met(self, subject: &Subject) -> bool {
        let can = &subject.can;
        match self {
            Self::Weights => can.weights,
            Self::NoWeights => !can.weights,
            Self::Push => can.push,
            Self::Sets => can.sets,
            Self::Subsets => can.subsets,
            Self::Hold => can.hold,
            Self::Pull => can.pull,
            Self::EveryVersion => can.every_version,
            Self::Newest => !can.every_version,
            Self::Loan => can.loan,
            Self::Restarts => can.restarts,
            Self::Death => can.death,
            Self::Interrupter => subject.interrupts,
            Self::Corrupt => subject.corrupts,
        }
    }
}

/// One scenario.
#[derive(Clone, Copy)]
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    needs: &'static [Need],
    pub(crate) run: fn(&Subject),
}

impl Scenario {
    /// What of its needs a scheme does not offer.
    pub(crate) fn lacks(&self, subject: &Subject) -> Vec<Need> {
        let unmet = self.needs.iter().filter(|need| !need.met(subject));
        unmet.copied().collect()
    }
}

macro_rules! scenarios {
    ($($module:ident :: $name:ident [$($need:ident)*],)*) => {
        vec![$(Scenario {
            name: concat!(stringify!($module), "::", stringify!($name)),
            needs: &[$($need),*],
            run: $module::$name,
        },)*]
    };
}

/// Every scenario, in the order of the journey.
pub(crate) fn all() -> Vec<Scenario> {
    scenarios![
        lifecycle::setting_up_communicates_nothing[],
        lifecycle::a_program_runs_unchanged_without_synchronisation[NoWeights],
        lifecycle::connect_is_a_rendezvous_in_either_order[Weights],
        lifecycle::missing_workers_are_named[Weights],
        lifecycle::a_worker_that_joins_and_leaves_at_once_counts[Weights],
        lifecycle::a_worker_that_joined_and_died_is_named[Weights Death],
        lifecycle::a_late_joiner_gets_the_newest_version[Weights],
        lifecycle::connecting_to_nobody_ends_by_its_deadline[Weights],
        lifecycle::a_worker_of_another_model_is_refused_by_name[Weights],
        lifecycle::late_worker_of_another_model_delays_no_other[Weights],
        lifecycle::shutdown_is_announced_and_happens_once[Weights],
        lifecycle::a_worker_that_leaves_is_no_failure[Weights],
        lifecycle::init_info_crosses_text_and_bytes[Weights],
        lifecycle::a_session_is_a_value_before_and_after_init[Weights],
        lifecycle::a_call_out_of_order_says_what_to_do[Weights],
        hostile::damaged_init_info_is_an_error[],
        hostile::worker_without_the_secret_is_refused[Weights],
        hostile::absurd_init_info_is_refused_in_words[],
        hostile::a_damaged_commit_record_costs_its_version_alone[Weights Corrupt],
        send::whole_versions_only_at_full_speed[Weights],
        send::whole_versions_only_of_megabytes[Weights],
        send::unsent_changes_are_not_seen[Weights],
        send::the_report_is_a_sentence_for_each_worker[Weights Push],
        send::send_waits_for_the_level_asked_for[Weights Push],
        send::labels_are_true_while_a_load_is_under_way[Weights Push],
        send::version_numbers_may_be_given_and_only_grow[Weights],
        send::wrong_weights_are_named_and_the_old_version_serves[Weights],
        send::a_source_that_fails_midway_changes_nothing[Weights],
        send::partial_send_leaves_other_tensors_unchanged[Weights],
        send::registered_models_are_sent_by_name[Weights],
        send::the_trainer_writes_into_the_place_the_workers_read[Weights Loan],
        send::worker_that_keeps_pins_delays_until_the_deadline[Weights],
        targets::send_to_one_worker_changes_only_that_worker[Weights Subsets],
        targets::each_worker_can_have_weights_of_its_own[Weights Subsets],
        targets::each_device_can_have_weights_of_its_own[Weights Subsets],
        targets::a_send_to_all_ends_what_was_sent_to_some[Weights Subsets],
        targets::absent_worker_gets_its_own_weights_on_join[Weights Subsets],
        targets::a_part_is_of_what_the_targets_have[Weights Subsets],
        asynchronous::a_send_returns_once_its_source_was_read[Weights Push],
        asynchronous::a_second_send_is_refused_while_one_is_pending[Weights Push],
        asynchronous::pending_sends_queue_up_to_their_bound[Weights Push],
        asynchronous::an_acknowledgement_is_of_its_version[Weights Push],
        asynchronous::pending_send_ends_only_at_its_own_deadline[Weights EveryVersion],
        payload::every_dtype_arrives_bit_by_bit[Weights],
        payload::a_hundred_thousand_tensors_arrive[Weights],
        payload::tensors_that_do_not_lie_in_order_arrive_in_order[Weights],
        payload::floats_are_cast_on_their_way[Weights],
        payload::a_model_without_elements_arrives[Weights],
        payload::ties_buffers_and_extra_state_arrive[Weights],
        receive::a_timeout_is_nothing_and_no_error[Weights Push],
        receive::a_wait_without_end_ends_with_a_shutdown[Weights Push],
        receive::the_newest_is_there_at_once_and_again[Weights Push],
        receive::newest_wins_and_older_ones_are_passed_over[Weights Newest],
        receive::every_version_comes_in_order[Weights EveryVersion],
        receive::full_queue_is_a_report_line_and_delays_no_other[Weights EveryVersion],
        receive::full_queue_is_reported_without_a_wait[Weights EveryVersion],
        receive::a_worker_asks_for_the_newest_or_one_it_names[Weights Pull],
        receive::a_version_that_is_not_kept_is_said_to_be_so[Weights Pull],
        receive::a_worker_waits_for_a_version_to_come[Weights Pull],
        receive::a_worker_that_passed_over_a_version_is_not_waited_for[Weights Pull],
        receive::an_answer_takes_nothing_from_what_is_sent[Weights Push Pull Newest],
        receive::a_model_without_shapes_takes_the_senders[Weights Push],
        receive::a_version_is_loaded_once[Weights Push],
        receive::several_workers_live_in_one_process[Weights],
        background::an_interrupt_ends_a_wait_and_loses_nothing[Weights Push Interrupter],
        background::a_thread_follows_what_is_sent[Weights Push Interrupter],
        background::a_declared_safe_point_is_the_only_moment_of_change[Weights Push Interrupter],
        background::waiting_thread_ends_at_once_and_leaves_nothing[Weights Push Interrupter],
        background::a_thread_knows_of_the_end_of_its_sender[Weights Push Interrupter Death],
        background::background_thread_sees_shutdown_and_finds_the_next[Weights Push Restarts Interrupter Death],
        background::a_cascade_of_two_levels_passes_on_and_acknowledges[Weights Push],
        background::a_cascade_tells_of_a_death_below_it[Weights Push Death],
        background::a_cascade_passes_on_by_threads[Weights Push Interrupter],
        sets::a_set_flips_as_one_on_every_worker[Weights Sets],
        sets::sender_killed_at_any_stage_leaves_one_whole_set[Weights Sets Push Restarts Death],
        sets::a_sender_killed_at_random_moments_leaves_one_set[Weights Sets Push Restarts Death],
        sets::a_load_that_fails_midway_goes_back[Weights Sets Push],
        sets::a_load_that_cannot_go_back_does_not_serve[Weights Sets Push],
        sets::worker_killed_midway_loads_one_set_on_return[Weights Sets Push Death],
        sets::a_bad_member_is_refused_before_anything_is_sent[Sets],
        sets::members_can_be_sent_alone_between_sets[Weights Sets],
        sets::a_worker_can_take_some_of_the_models[Weights Sets],
        sets::a_worker_asks_for_a_set[Weights Sets Pull],
        death::a_worker_killed_while_it_joins_is_replaced[Weights Death],
        death::trainer_killed_in_connect_leaves_workers_usable[Weights Death],
        death::a_worker_killed_while_a_send_waits_is_a_line[Weights Push Death],
        death::a_worker_that_fails_is_a_line_until_it_is_back[Weights],
        death::a_dead_worker_is_a_line_until_it_is_forgotten[Weights Death],
        death::status_has_last_outcomes_and_the_dead[Weights Death],
        death::a_worker_killed_while_idle_is_gone[Weights Death],
        death::a_worker_killed_while_it_holds_everything_frees_it[Weights Push Death],
        death::a_worker_that_cannot_load_is_a_line[Weights Push],
        death::stopped_worker_is_late_and_others_are_up_to_date[Weights Push Newest],
        death::a_stopped_worker_costs_one_send_its_deadline[Weights Push],
        death::a_sender_killed_at_any_stage_leaves_whole_versions[Weights Push Death],
        death::killed_sender_is_noticed_by_all_at_once[Weights Push Death],
        restart::workers_find_the_next_sender_automatically[Weights Push Restarts Death],
        restart::a_trainer_killed_while_it_connects_is_replaced[Weights Restarts Death],
        restart::a_worker_that_asks_finds_the_next_sender[Weights Pull Restarts Death],
        restart::a_look_at_the_newest_finds_the_next_sender[Weights Push Newest Restarts],
        restart::a_living_sender_keeps_its_place[Weights Restarts],
        restart::a_worker_does_not_go_back_to_an_earlier_epoch[Weights Restarts Death],
        restart::a_worker_that_comes_back_has_the_newest[Weights Death],
        restart::both_ends_can_start_again_in_either_order[Weights Restarts Death],
        hold::a_held_worker_stays_and_is_released_to_the_newest[Weights Push Hold],
        hold::a_part_passes_a_held_worker_over[Weights Push Hold],
        hold::a_held_worker_that_comes_back_is_still_held[Weights Push Hold Death],
        hold::rollback_is_a_new_version_with_the_old_digest[Weights],
        snapshots::a_snapshot_outlives_both_ends[Weights Death],
        snapshots::a_digest_is_the_same_at_both_ends[Weights],
        snapshots::checksums_hold_where_they_were_made[Weights],
        leaks::many_connections_leave_nothing[Weights],
        leaks::workers_that_come_and_go_leave_nothing[Weights Death],
        leaks::failed_connections_leave_nothing[Weights],
    ]
}
