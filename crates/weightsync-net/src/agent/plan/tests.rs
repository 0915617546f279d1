//! What a relay decides, case by case: each line is what happens, and after the `>`
//! everything that is to be done.
//!
//! A version is written as its model and its number (`a3`), a set by its versions
//! (`a3+b1`), a sequence number as `#3`. Workers are numbers; `1'` is the next life
//! of worker 1.

mod notation;
mod walk;

use super::*;

use self::notation::play;

#[test]
fn worker_is_notified_of_whole_versions() {
    play(
        "join 1 newest      >
         tell 1 #1 a1       >
         parent             > fetch a1
         whole a1           > tell 1 #1 a1
         tell 1 #2 a2       > fetch a2
         whole a2           > tell 1 #2 a2, release a1",
    );
}

#[test]
fn several_workers_wait_for_one_fetch() {
    play(
        "join 1 newest, join 2 newest, parent  >
         tell 1 #1 a1, tell 2 #1 a1            > fetch a1
         join 3 newest                         >
         tell 3 #1 a1                          >
         whole a1 > tell 1 #1 a1, tell 2 #1 a1, tell 3 #1 a1
         join 4 newest                         >
         tell 4 #1 a1                          > tell 4 #1 a1",
    );
}

#[test]
fn newest_skips_replaced_sets_but_never_two_in_a_row() {
    play(
        "join 1 newest, parent     >
         tell 1 #1 a1              > fetch a1
         whole a1                  > tell 1 #1 a1
         tell 1 #2 a2              > fetch a2
         tell 1 #3 a3              > stop a2, release a2, fetch a3
         tell 1 #4 a4              >
         tell 1 #5 a5              >
         whole a3                  > tell 1 #3 a3, release a1, fetch a5
         tell 1 #6 a6              > stop a5, release a5, fetch a6
         tell 1 #7 a7              >
         whole a6                  > tell 1 #6 a6, release a3, fetch a7
         whole a7                  > tell 1 #7 a7, release a6",
    );
    // A set that has not begun to arrive is replaced, however often.
    play(
        "join 1 newest             >
         tell 1 #1 a1              >
         tell 1 #2 a2              >
         tell 1 #3 a3              >
         parent                    > fetch a3",
    );
}

#[test]
fn first_set_is_finished_after_any_departure() {
    play(
        "join 1 newest, parent     >
         tell 1 #1 a1+b1           > fetch a1, fetch b1
         tell 1 #2 a2+b1           >
         join 2 newest             >
         tell 2 #2 a2+b1           >
         left 1                    >
         whole b1                  >
         tell 2 #3 a3+b1           >
         no-parent                 >
         parent                    > fetch a1
         left 2                    >
         join 1' newest            >
         tell 1' #4 a4+b4          >
         whole a1                  > fetch a4, fetch b4
         tell 1' #1 a1+b1          > tell 1' #1 a1+b1
         whole a4                  >
         whole b4                  > tell 1' #4 a4+b4, release a1, release b1",
    );
    // Two models each have a first set.
    play(
        "join 1 newest, parent     >
         tell 1 #1 a1              > fetch a1
         join 2 newest             >
         tell 2 #2 b2              > fetch b2
         left 1, left 2            >
         whole a1, whole b2        >",
    );
    // Nobody has the version any more.
    play(
        "join 1 newest, parent     >
         tell 1 #1 a1              > fetch a1
         tell 1 #2 a2              >
         not-there a1              > fetch a1 sender
         gone a1                   > release a1, fetch a2
         left 1                    >
         spoiled a                 > stop a2, release a2",
    );
}

#[test]
fn a_worker_begins_with_an_older_set_that_is_here() {
    play(
        "join 1 newest, parent     >
         tell 1 #1 a1              > fetch a1
         whole a1                  > tell 1 #1 a1
         tell 1 #2 a2              > fetch a2
         join 2 newest, join 3 every, join 4 newest >
         tell 2 #3 a3, tell 3 #3 a3, tell 4 #3 a3   > fetch a3
         tell 2 #1 a1              > tell 2 #1 a1
         tell 2 #1 a1, tell 3 #1 a1 >
         tell 4 #2 a2              >
         whole a3                  > tell 2 #3 a3, tell 3 #3 a3, tell 4 #3 a3
         tell 4 #1 a1              >
         whole a2                  > tell 1 #2 a2, release a1",
    );
}

#[test]
fn workers_wait_for_one_version_of_a_model_at_a_time() {
    play(
        "join 1 newest, parent     >
         tell 1 #1 a1              > fetch a1
         whole a1                  > tell 1 #1 a1
         tell 1 #5 a5              > fetch a5
         join 2 newest             >
         tell 2 #3 a3              >
         join 3 asked              >
         answer 3 ?1 #2 a2         >
         whole a5                  > tell 1 #5 a5, release a1, fetch a2
         whole a2                  > answer 3 ?1 #2 a2, fetch a3",
    );
}

#[test]
fn a_set_that_was_cut_off_waits_for_the_first_set() {
    // Worker 2 waits for a2+b3, which has begun to come, and then for a4+b4. When the
    // parent changes, b1 is finished before b3 goes on. Meanwhile nothing comes of what
    // worker 2 waits for.
    play(
        "join 1 every, parent       >
         tell 1 #1 a1+b1            > fetch a1, fetch b1
         whole a1                   >
         join 2 newest              >
         tell 2 #2 a1+b2            >
         no-room b1                 >
         tell 2 #3 a2+b3            >
         join 3 every               >
         room                       > fetch b1, fetch a2, fetch b3
         tell 3 #4 a3+b4            > fetch a3, fetch b4
         whole a3                   >
         tell 2 #5 a4+b4            >
         no-parent, parent          > fetch b1, fetch b4
         whole b4                   > tell 3 #4 a3+b4
         whole b1                   > tell 1 #1 a1+b1, fetch a2, fetch b3
         whole a2                   >
         whole b3                   > tell 2 #3 a2+b3, fetch a4
         whole a4                   > tell 2 #5 a4+b4, release a2, release b3",
    );
}

#[test]
fn newer_whole_version_replaces_older_ones() {
    // The version came for a relay below, which asked for it earlier.
    play(
        "join 1 newest, parent     >
         tell 1 #1 a1              > fetch a1
         whole a1                  > tell 1 #1 a1
         tell 1 #2 a2              > fetch a2
         tell 1 #3 a3              > stop a2, release a2, fetch a3
         tell 1 #4 a4              >
         join 2 every, tell 2 #4 a4 > fetch a4
         want a5                   >
         whole a4  > tell 1 #4 a4, tell 2 #4 a4, stop a3, release a1, release a3, fetch a5",
    );
}

#[test]
fn every_version_comes_in_order() {
    play(
        "join 1 every, parent      >
         tell 1 #1 a1              > fetch a1
         tell 1 #2 a2, tell 1 #3 a3 >
         whole a1                  > tell 1 #1 a1, fetch a2
         whole a2                  > tell 1 #2 a2, release a1, fetch a3
         whole a3                  > tell 1 #3 a3, release a2",
    );
    // A set that is whole early waits for its turn.
    play(
        "join 1 newest, join 2 every, parent >
         tell 1 #1 a1                > fetch a1
         whole a1                    > tell 1 #1 a1
         tell 2 #2 a2, tell 2 #3 a3  > fetch a2
         no-room a2                  >
         tell 1 #3 a3                >
         room                        > fetch a2, fetch a3
         whole a3                    > tell 1 #3 a3, release a1
         whole a2                    > tell 2 #2 a2, tell 2 #3 a3, release a2",
    );
}

#[test]
fn pull_is_answered_in_addition_to_notifications() {
    play(
        "join 1 newest, join 2 asked, parent >
         tell 1 #3 a3           > fetch a3
         answer 2 ?1 #2 a2      >
         whole a3               > tell 1 #3 a3, fetch a2
         whole a2               > answer 2 ?1 #2 a2
         answer 2 ?2 #3 a3      > answer 2 ?2 #3 a3, release a2
         tell 1 #4 a4           > fetch a4
         whole a4               > tell 1 #4 a4
         left 2                 > release a3",
    );
    // The next question takes the place of one that is open.
    play(
        "join 1 asked, parent   >
         answer 1 ?1 #1 a1      > fetch a1
         answer 1 ?2 #2 a2      >
         whole a1               > fetch a2
         answer 1 ?3 #3 a3      > stop a2, release a2, fetch a3
         whole a3               > answer 1 ?3 #3 a3, release a1",
    );
    // And may be answered by the same, while it is on its way or there already.
    play(
        "join 1 asked, parent   >
         answer 1 ?1 #1 a1      > fetch a1
         answer 1 ?2 #1 a1      >
         whole a1               > answer 1 ?2 #1 a1
         answer 1 ?2 #1 a1      > answer 1 ?2 #1 a1",
    );
}

#[test]
fn cancelled_pull_is_not_fetched() {
    play(
        "join 1 asked, parent   >
         answer 1 ?1 #1 a1+b1   > fetch a1, fetch b1
         whole b1               >
         whole a1               > answer 1 ?1 #1 a1+b1
         answer 1 ?2 #2 a2+b1   > fetch a2
         withdraw 1 ?2          > stop a2, release a2
         answer 1 ?3 #3 a3+b1   > fetch a3
         whole a3               > answer 1 ?3 #3 a3+b1, release a1",
    );
    // The answer was on its way.
    play(
        "join 1 newest, parent  >
         tell 1 #3 a3           > fetch a3
         withdraw 1 ?1          >
         answer 1 ?1 #2 a2      >
         whole a3               > tell 1 #3 a3
         answer 1 ?2 #2 a2      > fetch a2
         withdraw 1 ?1          >
         left 1                 > stop a2, release a2",
    );
    // A worker keeps the answer that it has.
    play(
        "join 1 asked, parent   >
         answer 1 ?1 #1 a1      > fetch a1
         whole a1               > answer 1 ?1 #1 a1
         withdraw 1 ?1          >
         want a2                > fetch a2
         whole a2               >
         left 1                 > release a1",
    );
}

#[test]
fn set_is_announced_when_all_of_it_is_whole() {
    play(
        "join 1 newest, parent      >
         tell 1 #1 a1+b1+c1         > fetch a1, fetch b1, fetch c1
         whole c1                   >
         whole a1                   >
         whole b1                   > tell 1 #1 a1+b1+c1
         tell 1 #2 a1+b2+c1         > fetch b2
         tell 1 #3 a1+b2+c2         > fetch c2
         tell 1 #4 a2+b3+c2         >
         whole b2                   >
         whole c2  > tell 1 #3 a1+b2+c2, release b1, release c1, fetch a2, fetch b3",
    );
    // A version of a passed-over set that is also in the next one is not fetched again.
    play(
        "join 1 newest, parent      >
         tell 1 #1 a1+b1            > fetch a1, fetch b1
         whole a1, whole b1         > tell 1 #1 a1+b1
         tell 1 #2 a2+b2            > fetch a2, fetch b2
         tell 1 #3 a2+b3            > stop b2, release b2, fetch b3
         whole a2                   >
         whole b3                   > tell 1 #3 a2+b3, release a1, release b1",
    );
}

#[test]
fn next_version_is_requested_at_once_and_kept_above() {
    // A relay below that takes a set asks here for all of it, and so does this one
    // above; else what is asked for late would have been replaced by then.
    play(
        "join 1 newest, parent      >
         tell 1 #4 a4+b4            > fetch a4, fetch b4
         want a3, want b3           > fetch a3, fetch b3
         whole a4, whole b4         > tell 1 #4 a4+b4
         tell 1 #5 a5+b5            > fetch a5, fetch b5
         whole a3                   >
         unwant a3                  > release a3
         whole b3                   >
         unwant b3                  > release b3",
    );
    // No worker waits until others have all earlier versions.
    play(
        "join 1 every, join 2 newest, parent  >
         tell 2 #1 a1               > fetch a1
         whole a1                   > tell 2 #1 a1
         tell 1 #2 a2, tell 1 #3 a3, tell 1 #4 a4   > fetch a2
         tell 2 #4 a4               > fetch a4
         whole a2                   > tell 1 #2 a2, fetch a3
         whole a4                   > tell 2 #4 a4, release a1
         whole a3  > tell 1 #3 a3, tell 1 #4 a4, release a2, release a3",
    );
}

#[test]
fn fetches_are_bounded_by_the_largest_set() {
    let who = |worker| WorkerInstance {
        worker: weightsync_core::WorkerId(worker),
        instance: 0,
    };
    let set = |version| {
        let items = (0..40).map(|model| Item {
            model,
            version: Version(version),
        });
        items.collect::<Vec<_>>()
    };
    let mut plan = RelayPlan::new();
    let joins = (1..=2).map(|worker| PlanInput::Joined {
        who: who(worker),
        delivery: Delivery::Every { bound: 4 },
    });
    let tells = (1..=2).map(|worker| PlanInput::Notified {
        who: who(worker),
        sequence: worker.into(),
        set: set(worker.into()),
    });
    let inputs: Vec<PlanInput> = joins.chain(tells).chain([PlanInput::Parent]).collect();
    assert_eq!(plan.step(inputs).len(), SIDE_BY_SIDE);
    // The rest comes as others have come.
    let item = set(1)[0];
    let expected = PlanEffect::Fetch {
        item: set(2)[24],
        sender: false,
    };
    assert_eq!(plan.step([PlanInput::Whole { item }]), [expected]);
}

#[test]
fn version_the_parent_lacks_comes_from_the_sender() {
    play(
        "join 1 newest, parent      >
         tell 1 #1 a1               > fetch a1
         not-there a1               > fetch a1 sender
         whole a1                   > tell 1 #1 a1
         tell 1 #2 a2               > fetch a2
         not-there a2               > fetch a2 sender
         gone a2                    > release a2
         tell 1 #3 a3               > fetch a3
         whole a3                   > tell 1 #3 a3, release a1",
    );
    // A relay below that waits for several versions gets the next of them.
    play(
        "join 1 every, join 2 asked, parent  >
         tell 1 #1 a1, tell 1 #2 a2, answer 2 ?1 #1 a1 > fetch a1
         not-there a1               > fetch a1 sender
         want a1                    >
         gone a1                    > refuse a1, release a1, fetch a2
         unwant a1                  >
         whole a2                   > tell 1 #2 a2",
    );
}

#[test]
fn transfer_from_the_sender_survives_the_parent() {
    play(
        "join 1 newest, parent      >
         tell 1 #1 a1               > fetch a1
         not-there a1               > fetch a1 sender
         no-parent, parent          >
         no-parent                  >
         whole a1                   > tell 1 #1 a1",
    );
    // The sender was the parent.
    play(
        "join 1 newest, parent      >
         tell 1 #1 a1+b1            > fetch a1, fetch b1
         from-sender a1, no-parent, parent > fetch b1
         broken a1, no-parent       >
         parent                     > fetch a1, fetch b1
         from-sender a2             >
         whole a1, whole b1         > tell 1 #1 a1+b1",
    );
}

#[test]
fn fetch_broken_at_the_sender_waits_for_a_parent() {
    // The fetch is not repeated without end while no parent is reached.
    play(
        "join 1 newest, parent      >
         tell 1 #1 a1               > fetch a1
         not-there a1               > fetch a1 sender
         broken a1, no-parent       >
         tell 1 #2 a2               >
         parent                     > fetch a1
         not-there a1               > fetch a1 sender
         whole a1                   > tell 1 #1 a1, fetch a2",
    );
}

#[test]
fn rest_of_a_version_is_fetched_where_it_was() {
    play(
        "join 1 newest, parent      >
         tell 1 #1 a1               > fetch a1
         rest a1                    > fetch a1
         not-there a1               > fetch a1 sender
         rest a1                    > fetch a1 sender
         whole a1                   > tell 1 #1 a1",
    );
}

#[test]
fn late_request_for_a_refused_version_is_answered() {
    play(
        "want a1, want a1, parent   > fetch a1
         not-there a1               > fetch a1 sender
         gone a1                    > refuse a1, release a1
         want a1                    > fetch a1
         unwant a1, unwant a1       >
         not-there a1               > fetch a1 sender
         gone a1                    > refuse a1, release a1
         unwant a1                  >
         want a1                    > fetch a1
         unwant a1                  > stop a1, release a1",
    );
}

#[test]
fn broken_fetch_goes_on_with_the_next_parent() {
    play(
        "join 1 newest, parent      >
         tell 1 #1 a1               > fetch a1
         whole a1                   > tell 1 #1 a1
         tell 1 #2 a2               > fetch a2
         broken a2, no-parent       >
         tell 1 #3 a3               > release a2
         parent                     > fetch a3
         no-parent, parent          > fetch a3
         whole a3                   > tell 1 #3 a3, release a1",
    );
}

#[test]
fn version_wanted_below_is_fetched_and_kept() {
    play(
        "parent                     >
         want a1                    > fetch a1
         want a1                    >
         whole a1                   >
         unwant a1                  >
         want a2                    > fetch a2
         whole a2                   >
         unwant a1                  > release a1
         unwant a2                  >
         want a3                    > fetch a3
         unwant a3                  > stop a3, release a3",
    );
    // The newest version stays for workers that join later.
    play(
        "join 1 newest, parent      >
         tell 1 #1 a1               > fetch a1
         whole a1                   > tell 1 #1 a1
         left 1                     >
         join 1' newest             >
         tell 1' #1 a1              > tell 1' #1 a1",
    );
    // Workers here come first, then the oldest.
    play(
        "join 1 newest, parent      >
         want a4                    > fetch a4
         tell 1 #3 a3, want a2, want a5 > fetch a3, fetch a2
         whole a3                   > tell 1 #3 a3
         whole a2                   >
         whole a4                   > fetch a5",
    );
}

#[test]
fn without_room_it_waits_until_there_may_be_some() {
    play(
        "join 1 newest, parent      >
         tell 1 #1 a1               > fetch a1
         no-room a1                 >
         tell 1 #2 a2               >
         room                       > fetch a2
         whole a2                   > tell 1 #2 a2",
    );
}

#[test]
fn damaged_version_is_dropped_and_fetched_again() {
    play(
        "join 1 newest, join 2 newest, parent >
         tell 1 #1 a1+b1             > fetch a1, fetch b1
         whole a1, whole b1          > tell 1 #1 a1+b1
         tell 1 #2 a2+b1             > fetch a2
         spoiled a                   > release a1, stop a2, release a2, fetch a2
         tell 2 #1 a1+b1             >
         whole a2                    > tell 1 #2 a2+b1, fetch a1
         whole a1                    > tell 2 #1 a1+b1
         want a1                     >
         spoiled a                   > release a1, release a2, fetch a1
         whole a1                    >
         unwant a1                   >
         spoiled b                   > release b1",
    );
}

#[test]
fn repeated_message_after_a_broken_link_counts_once() {
    play(
        "join 1 newest, join 2 every, parent >
         tell 1 #1 a1, tell 2 #1 a1  > fetch a1
         tell 1 #1 a1, tell 2 #1 a1  >
         whole a1                    > tell 1 #1 a1, tell 2 #1 a1
         tell 1 #1 a1, tell 2 #1 a1  >
         tell 2 #1 a1, tell 2 #2 a2  > fetch a2
         whole a2                    > tell 2 #2 a2",
    );
}

#[test]
fn workers_that_leave_are_waited_for_no_more() {
    play(
        "join 1 newest, join 2 newest, parent >
         tell 1 #1 a1               > fetch a1
         whole a1                   > tell 1 #1 a1
         tell 1 #2 a2               > fetch a2
         left 1                     > stop a2, release a2
         tell 1 #3 a3               >
         join 1' newest             >
         tell 1' #3 a3, tell 2 #3 a3 > fetch a3
         left 1'                    >
         whole a3                   > tell 2 #3 a3, release a1
         left 2                     >",
    );
}
