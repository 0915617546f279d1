//! Decisions, one by one; `walk` then takes thousands of random ways through
//! them next to a second, simpler bookkeeping.

mod walk;

use weightsync_core::Targets;

use super::*;
use crate::protocol::MAX_RECORDS;
use crate::set::ModelMask;
use crate::wire::Want;

const ALL: ModelMask = ModelMask::ALL;

/// Joins a reader; gives its key and the steps.
fn join(
    plan: &mut Plan,
    worker: u32,
    models: ModelMask,
    delivery: Delivery,
) -> (Key, Vec<PageChange>) {
    let mut steps = Vec::new();
    let key = (WorkerId(worker), 1);
    plan.join((key, 0), models, delivery, SlotSet::default(), &mut steps);
    (key, steps)
}

/// Lends a slot, of a model that grows as far as it may.
fn lend(plan: &mut Plan, model: usize, max_slots: u8) -> u8 {
    match plan.lend(model, SlotSet::default(), max_slots) {
        Lend::Slot(slot) => slot,
        Lend::Grow { .. } => {
            plan.grown(model);
            lend(plan, model, max_slots)
        }
        Lend::Wait => panic!("no slot of model {model} is free"),
    }
}

/// Publishes one version of each of these models.
fn send(
    plan: &mut Plan,
    models: &[usize],
    targets: &Targets,
) -> (PublicationPlan, Vec<PageChange>) {
    let slot = |&model: &usize| (model, lend(plan, model, 2));
    let written: Vec<_> = models.iter().map(slot).collect();
    let mut steps = Vec::new();
    let published = plan.publish(&written, targets, SlotSet::default(), &mut steps);
    (published.unwrap(), steps)
}

fn to(workers: &[u32]) -> Targets {
    Targets::Workers(workers.iter().copied().map(WorkerId).collect())
}

fn ask(plan: &mut Plan, key: Key, want: Want) -> (Answer, Vec<PageChange>) {
    let mut steps = Vec::new();
    let answer = plan.ask(key, 1, want, SlotSet::default(), &mut steps);
    (answer, steps)
}

/// The versions (0: none) of models 0 and 1 that the last step for this reader
/// puts it on.
fn shown(plan: &Plan, key: Key, steps: &[PageChange]) -> Option<[u64; 2]> {
    let record = steps.iter().rev().find_map(|step| match step {
        PageChange::Flip { key: one, live }
        | PageChange::Push { key: one, live }
        | PageChange::Answer { key: one, live, .. }
            if *one == key =>
        {
            Some(live.record)
        }
        _ => None,
    })?;
    Some(versions(&plan.record(record).set))
}

fn versions(set: &ModelSet) -> [u64; 2] {
    [0, 1].map(|model| set.entry(model).map_or(0, |entry| entry.version.0))
}

#[test]
fn record_serves_every_mailbox_of_the_same_set() {
    let mut plan = Plan::new([2; 2], 0);
    let keys: Vec<_> = (0..9)
        .map(|worker| join(&mut plan, worker, ALL, Delivery::Newest).0)
        .collect();
    let (published, steps) = send(&mut plan, &[0, 1], &Targets::All);
    let writes = steps
        .iter()
        .filter(|step| matches!(step, PageChange::Write { .. }));
    assert_eq!(writes.count(), 1);
    assert!(
        matches!(steps[0], PageChange::Write { .. }),
        "written before it is named"
    );
    for key in &keys {
        assert_eq!(shown(&plan, *key, &steps), Some([1, 1]));
        assert!(
            published
                .dispositions
                .contains(&(*key, Disposition::Notified))
        );
    }
    // A reader that joins now is put on the existing record.
    let (late, steps) = join(&mut plan, 9, ALL, Delivery::Newest);
    assert_eq!(steps.len(), 1);
    assert_eq!(shown(&plan, late, &steps), Some([1, 1]));
}

#[test]
fn publication_reaches_readers_of_its_models() {
    let mut plan = Plan::new([2; 2], 0);
    let (first, _) = join(&mut plan, 0, ModelMask(1), Delivery::Newest);
    let (second, _) = join(&mut plan, 1, ModelMask(2), Delivery::Newest);
    let (published, steps) = send(&mut plan, &[1], &Targets::All);
    assert_eq!(published.dispositions, [(second, Disposition::Notified)]);
    assert_eq!(shown(&plan, first, &steps), None);
    let (published, _) = send(&mut plan, &[0], &to(&[1, 7, 7]));
    assert_eq!(published.dispositions, []);
    assert_eq!(published.absent, [WorkerId(7)]);
}

#[test]
fn a_worker_comes_back_to_what_was_last_meant_for_it() {
    let mut plan = Plan::new([2; 2], 0);
    send(&mut plan, &[0, 1], &Targets::All);
    send(&mut plan, &[0], &to(&[3]));
    let (key, steps) = join(&mut plan, 3, ALL, Delivery::Newest);
    assert_eq!(shown(&plan, key, &steps), Some([2, 1]));
    let (other, steps) = join(&mut plan, 4, ALL, Delivery::Newest);
    assert_eq!(shown(&plan, other, &steps), Some([1, 1]));
    // A set for all workers replaces the worker's own.
    assert!(plan.leave(key).is_some());
    send(&mut plan, &[0], &Targets::All);
    let (key, steps) = join(&mut plan, 3, ALL, Delivery::Newest);
    assert_eq!(shown(&plan, key, &steps), Some([3, 1]));
}

#[test]
fn held_worker_keeps_its_version_until_released() {
    let mut plan = Plan::new([2; 2], 0);
    let (key, _) = join(&mut plan, 0, ALL, Delivery::Newest);
    send(&mut plan, &[0, 1], &Targets::All);
    plan.hold(&[WorkerId(0)]);
    for targets in [Targets::All, to(&[0])] {
        let (published, steps) = send(&mut plan, &[0], &targets);
        assert_eq!(published.dispositions, [(key, Disposition::Held)]);
        assert_eq!(shown(&plan, key, &steps), None);
    }
    plan.hold(&[WorkerId(0)]);
    assert!(plan.leave(key).is_some());
    let (key, steps) = join(&mut plan, 0, ALL, Delivery::Newest);
    assert_eq!(
        shown(&plan, key, &steps),
        Some([1, 1]),
        "also when it comes back"
    );
    let mut steps = Vec::new();
    plan.release(&[WorkerId(0)], SlotSet::default(), &mut steps);
    assert_eq!(shown(&plan, key, &steps), Some([3, 1]));
    assert!(!plan.is_held(WorkerId(0)));
    // Released with nothing new: nothing happens.
    plan.hold(&[WorkerId(0)]);
    steps.clear();
    plan.release(&[WorkerId(0), WorkerId(9)], SlotSet::default(), &mut steps);
    assert_eq!(steps, []);
}

#[test]
fn record_taken_off_a_mailbox_is_not_written_at_once() {
    // A reader may have pinned the record after the sender had looked for pins.
    let mut plan = Plan::new([2; 1], 0);
    let workers = [0, 1, 2].map(WorkerId);
    let keys = [0, 1, 2].map(|worker| join(&mut plan, worker, ALL, Delivery::Newest).0);
    let mut on = SlotSet::default();
    for round in 0..2 {
        plan.hold(&workers);
        for worker in 0..3 {
            send(&mut plan, &[0], &to(&[worker]));
        }
        let mut steps = Vec::new();
        plan.release(&workers, SlotSet::default(), &mut steps);
        let mut written = SlotSet::default();
        for step in &steps {
            if let PageChange::Write { record } = step {
                assert!(!on.contains(*record), "record {record}, in {steps:?}");
                written = written.with(*record);
            }
        }
        assert_eq!(written.len(), 3);
        on = written;
        for (worker, key) in (1..).zip(keys) {
            assert_eq!(shown(&plan, key, &steps), Some([3 * round + worker, 0]));
        }
    }
}

#[test]
fn a_full_queue_keeps_nobody_else_waiting() {
    let mut plan = Plan::new([2; 1], 0);
    let (slow, _) = join(&mut plan, 0, ALL, Delivery::Every { bound: 2 });
    let (newest, _) = join(&mut plan, 1, ALL, Delivery::Newest);
    let mut sequences = Vec::new();
    for (at, disposition) in [
        Disposition::Notified,
        Disposition::Notified,
        Disposition::Waiting,
        Disposition::Waiting,
        Disposition::Full,
    ]
    .into_iter()
    .enumerate()
    {
        // Lent with all the slots there can be: what waits does not make it grow.
        let slot = lend(&mut plan, 0, 8);
        let mut steps = Vec::new();
        let published = plan.publish(&[(0, slot)], &Targets::All, SlotSet::default(), &mut steps);
        let published = published.unwrap();
        assert_eq!(
            published.dispositions,
            [(slow, disposition), (newest, Disposition::Notified)]
        );
        assert_eq!(shown(&plan, newest, &steps), Some([at as u64 + 1, 0]));
        sequences.push(published.sequence);
    }
    assert!(plan.waits(slow, sequences[2]) && plan.waits(slow, sequences[3]));
    assert!(!plan.waits(slow, sequences[1]) && !plan.waits(slow, sequences[4]));
    plan.give_up(slow, sequences[2]);
    let mut steps = Vec::new();
    plan.deliver(SlotSet::default(), &mut steps);
    assert_eq!(steps, [], "there is no room yet");
    plan.observe(slow, 1, 0);
    plan.deliver(SlotSet::default(), &mut steps);
    assert_eq!(shown(&plan, slow, &steps), Some([4, 0]), "3 was given up");
    assert!(!plan.waits(slow, sequences[3]));
    // A reader that lies about its head only frees what is its own.
    plan.observe(slow, u64::MAX, 0);
    plan.observe(slow, 0, 0);
    steps.clear();
    plan.deliver(SlotSet::default(), &mut steps);
    assert_eq!(steps, []);
}

#[test]
fn released_worker_gets_the_newest_with_a_full_queue() {
    let mut plan = Plan::new([2; 1], 0);
    let (key, _) = join(&mut plan, 0, ALL, Delivery::Every { bound: 1 });
    send(&mut plan, &[0], &Targets::All); // in the queue
    let (waits, _) = send(&mut plan, &[0], &Targets::All);
    assert_eq!(waits.dispositions, [(key, Disposition::Waiting)]);
    plan.hold(&[WorkerId(0)]);
    send(&mut plan, &[0], &Targets::All);
    let mut steps = Vec::new();
    plan.release(&[WorkerId(0)], SlotSet::default(), &mut steps);
    assert!(!plan.waits(key, waits.sequence), "the newest has its place");
    plan.observe(key, 1, 0);
    plan.deliver(SlotSet::default(), &mut steps);
    assert_eq!(shown(&plan, key, &steps), Some([3, 0]));
    assert!(!plan.anything_waits());
    // A waiting set comes first if there is room by then.
    let (waits, _) = send(&mut plan, &[0], &Targets::All);
    plan.hold(&[WorkerId(0)]);
    send(&mut plan, &[0], &Targets::All);
    plan.observe(key, 2, 0);
    plan.release(&[WorkerId(0)], SlotSet::default(), &mut steps);
    assert_eq!(shown(&plan, key, &steps), Some([4, 0]));
    assert!(!plan.waits(key, waits.sequence) && plan.anything_waits());
}

#[test]
fn waiting_sets_keep_slots_but_do_not_grow() {
    let mut plan = Plan::new([2; 1], 0);
    join(&mut plan, 0, ALL, Delivery::Every { bound: 1 });
    send(&mut plan, &[0], &Targets::All); // in the queue
    send(&mut plan, &[0], &Targets::All); // waits, and meant for all
    // Two slots are needed, and one to write.
    let decided = plan.lend(0, SlotSet::default(), 2);
    assert_eq!(decided, Lend::Grow { needed: true });
    let written = [(0, lend(&mut plan, 0, 2))];
    let mut steps = Vec::new();
    plan.publish(&written, &Targets::All, SlotSet::default(), &mut steps)
        .unwrap();
    // Now the second only waits: the third is meant for all.
    assert_eq!(plan.lend(0, SlotSet::default(), 2), Lend::Wait);
    let decided = plan.lend(0, SlotSet::default(), 4);
    assert_eq!(decided, Lend::Grow { needed: false });
}

#[test]
fn asking_finds_what_is_kept_and_names_it_otherwise() {
    let mut plan = Plan::new([2; 2], 2);
    let (key, steps) = join(&mut plan, 0, ALL, Delivery::Asked);
    assert_eq!(
        (steps.len(), ask(&mut plan, key, Want::Newest).0),
        (0, Answer::Later)
    );
    // The first publication answers it; those after it are not asked for.
    let (published, steps) = send(&mut plan, &[0, 1], &Targets::All);
    assert_eq!(published.dispositions, [(key, Disposition::Asks)]);
    assert_eq!(shown(&plan, key, &steps), Some([1, 1]));
    for version in 2..=4 {
        let (published, steps) = send(&mut plan, &[0, 1], &Targets::All);
        assert_eq!(published.dispositions, [(key, Disposition::Asks)]);
        assert_eq!((shown(&plan, key, &steps), version), (None, version));
    }
    let (model, version) = (1, Version);
    for (want, notified) in [
        (Want::Newest, [4, 4]),
        (Want::Newest, [4, 4]),
        (
            Want::AtLeast {
                model,
                version: version(2),
            },
            [4, 4],
        ),
        (
            Want::Exactly {
                model,
                version: version(2),
            },
            [2, 2],
        ),
        (
            Want::Exactly {
                model,
                version: version(3),
            },
            [3, 3],
        ),
    ] {
        let (answer, steps) = ask(&mut plan, key, want);
        assert_eq!(answer, Answer::Notified, "{want:?}");
        assert_eq!(shown(&plan, key, &steps), Some(notified), "{want:?}");
    }
    for gone in [1, 5] {
        let want = Want::Exactly {
            model,
            version: version(gone),
        };
        let known = [4, 3, 2].map(Version).to_vec();
        assert_eq!(ask(&mut plan, key, want).0, Answer::Unknown { known });
    }
    let want = Want::AtLeast {
        model,
        version: version(6),
    };
    assert_eq!(ask(&mut plan, key, want).0, Answer::Later);
    assert_eq!(
        send(&mut plan, &[1], &Targets::All).0.dispositions,
        [(key, Disposition::Asks)]
    );
    let (published, steps) = send(&mut plan, &[1], &Targets::All);
    assert_eq!(published.dispositions, [(key, Disposition::Asks)]);
    assert_eq!(shown(&plan, key, &steps), Some([4, 6]));
}

#[test]
fn not_everybody_may_ask_for_everything() {
    let mut plan = Plan::new([2; 2], 0);
    send(&mut plan, &[0, 1], &Targets::All);
    let (model, version) = (1, Version(1));
    let want = Want::Exactly { model, version };
    let (key, _) = join(&mut plan, 0, ModelMask(1), Delivery::Newest);
    assert_eq!(ask(&mut plan, key, want).0, Answer::NotAllowed);
    let (key, _) = join(&mut plan, 1, ALL, Delivery::Every { bound: 2 });
    assert_eq!(ask(&mut plan, key, Want::Newest).0, Answer::NotAllowed);
    // A version that was sent to one worker is not there for another.
    send(&mut plan, &[1], &to(&[2]));
    let version = Version(2);
    let want = Want::Exactly { model, version };
    let (key, _) = join(&mut plan, 3, ALL, Delivery::Newest);
    let known = vec![Version(1)];
    assert_eq!(ask(&mut plan, key, want).0, Answer::Unknown { known });
    let (key, _) = join(&mut plan, 2, ALL, Delivery::Asked);
    assert_eq!(ask(&mut plan, key, want).0, Answer::Notified);
    assert!(plan.leave(key).is_some());
    assert_eq!(ask(&mut plan, key, want).0, Answer::Gone);
}

#[test]
fn answered_set_frees_its_slots_once_taken() {
    let mut plan = Plan::new([2; 1], 0);
    let (key, _) = join(&mut plan, 0, ALL, Delivery::Asked);
    send(&mut plan, &[0], &Targets::All);
    ask(&mut plan, key, Want::Newest);
    send(&mut plan, &[0], &Targets::All);
    let mut steps = Vec::new();
    plan.observe(key, 0, 0);
    assert!(!plan.clear_taken(&mut steps), "it has not taken it");
    let decided = plan.lend(0, SlotSet::default(), 2);
    assert_eq!(decided, Lend::Grow { needed: true });
    plan.observe(key, 0, 1);
    assert!(plan.clear_taken(&mut steps));
    assert_eq!(steps, [PageChange::Clear { key }]);
    assert_eq!(plan.lend(0, SlotSet::default(), 2), Lend::Slot(0));
}

#[test]
fn versions_are_found_while_anything_refers_to_them() {
    let mut plan = Plan::new([2; 1], 1);
    for _ in 0..3 {
        send(&mut plan, &[0], &Targets::All);
    }
    send(&mut plan, &[0], &to(&[5]));
    let found = |plan: &Plan| {
        let found = (1..=5).filter(|&version| {
            let slot = plan.find(0, Version(version));
            slot.inspect(|&slot| assert_eq!(plan.version_in(0, slot), Version(version)));
            slot.is_some()
        });
        found.collect::<Vec<_>>()
    };
    assert_eq!(found(&plan), [2, 3, 4]);
    assert_eq!(plan.version(0), Version(4));
    assert_eq!(versions(plan.default_set())[0], 3);
    assert_eq!(versions(&plan.if_released(WorkerId(5)))[0], 4);
    let (key, _) = join(&mut plan, 0, ALL, Delivery::Every { bound: 4 });
    send(&mut plan, &[0], &Targets::All);
    send(&mut plan, &[0], &Targets::All);
    assert_eq!(found(&plan), [3, 5], "3 is still in the queue");
    let held = plan.mailbox_slots(key, 0);
    assert_eq!(held.len(), 3);
    plan.observe(key, 1, 0);
    assert_eq!(found(&plan), [5]);
    assert_eq!(
        plan.find(0, Version(6))
            .map(|slot| plan.version_in(0, slot)),
        Some(Version(6))
    );
}

#[test]
fn a_slot_stays_to_write_the_next_version_into() {
    let mut plan = Plan::new([2; 1], 10);
    for _ in 0..20 {
        send(&mut plan, &[0], &Targets::All);
    }
    assert_eq!(plan.slots(0), 12);
    // One version each, for more and more workers: history makes way first.
    let mut sent = 0;
    let refused = loop {
        let slot = lend(&mut plan, 0, 2);
        let mut steps = Vec::new();
        match plan.publish(&[(0, slot)], &to(&[sent]), SlotSet::default(), &mut steps) {
            Ok(_) => sent += 1,
            Err(refused) => break (refused, slot),
        }
    };
    assert_eq!(refused.0, SlotsExhausted { model: 0 });
    assert_eq!((sent, plan.slots(0)), (62, 64));
    plan.give_back(0, refused.1);
    // A set for all workers makes room again.
    send(&mut plan, &[0], &Targets::All);
    send(&mut plan, &[0], &to(&[100]));
}

#[test]
fn repeated_pulls_of_one_set_take_one_record() {
    let mut plan = Plan::new([2; 1], 0);
    send(&mut plan, &[0], &Targets::All);
    let asking: Vec<_> = (0..MAX_RECORDS as u32 + 6)
        .map(|worker| join(&mut plan, worker, ALL, Delivery::Asked).0)
        .collect();
    for key in asking {
        let mut last = 0;
        for _ in 0..3 {
            let (answer, steps) = ask(&mut plan, key, Want::Newest);
            assert_eq!(answer, Answer::Notified);
            let Some(PageChange::Answer { live, .. }) = steps.last() else {
                panic!("{steps:?}")
            };
            assert_eq!(live.record, 0);
            assert!(live.sequence > last, "it is new to it each time");
            last = live.sequence;
        }
    }
    assert!(!plan.anything_waits());
}

#[test]
fn mailboxes_wait_where_records_run_out() {
    // 72 workers, no two with the same set: 8 versions of one model, 9 of the
    // other.
    let mut plan = Plan::new([2; 2], 0);
    let workers = || (0..8).flat_map(|a| (0..9).map(move |b| (a, b, a * 9 + b)));
    for group in 0..8 {
        let named: Vec<_> = workers()
            .filter(|one| one.0 == group)
            .map(|one| one.2)
            .collect();
        send(&mut plan, &[0], &to(&named));
    }
    for group in 0..9 {
        let named: Vec<_> = workers()
            .filter(|one| one.1 == group)
            .map(|one| one.2)
            .collect();
        send(&mut plan, &[1], &to(&named));
    }
    let expected = |(a, b, _)| [u64::from(a) + 1, u64::from(b) + 1];
    let mut notified = 0;
    let mut last = Vec::new();
    for one in workers() {
        let (key, steps) = join(&mut plan, one.2, ALL, Delivery::Newest);
        match shown(&plan, key, &steps) {
            Some(set) => {
                assert_eq!(set, expected(one));
                notified += 1;
            }
            None => last.push((key, expected(one))),
        }
    }
    assert_eq!((notified, last.len()), (MAX_RECORDS, 72 - MAX_RECORDS));
    assert!(last.iter().all(|(key, _)| plan.waits(*key, 0)));
    for worker in 0..last.len() as u32 {
        assert!(plan.leave((WorkerId(worker), 1)).is_some());
    }
    let mut steps = Vec::new();
    // Pins of readers still count: one record is not free.
    plan.deliver(SlotSet::default().with(0), &mut steps);
    let late = last.pop().unwrap();
    assert_eq!(shown(&plan, late.0, &steps), None);
    for (key, set) in last {
        assert_eq!(shown(&plan, key, &steps), Some(set));
    }
    steps.clear();
    plan.deliver(SlotSet::default(), &mut steps);
    assert_eq!(shown(&plan, late.0, &steps), Some(late.1));
}
