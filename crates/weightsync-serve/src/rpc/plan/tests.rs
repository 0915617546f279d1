use super::*;

impl Numbered for Version {
    fn number(&self) -> Version {
        *self
    }
}

type Of = Plan<Version>;

fn about(worker: u32, wanted: &[usize]) -> About {
    About {
        worker: WorkerId(worker),
        pid: worker,
        addr: ([127, 0, 0, 1], 1000).into(),
        device: "cpu".into(),
        wanted: wanted.to_vec(),
        announces: false,
    }
}

fn set(versions: &[(usize, u64)]) -> Set<Version> {
    let mut set = Set::empty();
    for (model, version) in versions {
        set.put(*model, Version(*version));
    }
    set
}

fn workers(numbers: &[u32]) -> Targets {
    Targets::Workers(numbers.iter().copied().map(WorkerId).collect())
}

fn call(plan: &mut Of, id: MailboxId) -> Option<(u64, Set<Version>)> {
    let order = plan.next_call(id)?;
    Some((order.sequence, order.set))
}

#[test]
fn the_newest_takes_the_place_of_what_was_not_begun() {
    let mut plan = Of::new(1, 0);
    let id = plan.join(about(0, &[0]));
    assert_eq!(call(&mut plan, id), None, "nothing was sent");
    for version in 1..4 {
        plan.publish(&set(&[(0, version)]), &Targets::All, &[]);
    }
    assert_eq!(call(&mut plan, id), Some((3, set(&[(0, 3)]))));
    assert_eq!(call(&mut plan, id), None, "once is enough");
    // One that did not come through is made again, with the newest.
    plan.publish(&set(&[(0, 4)]), &Targets::All, &[]);
    plan.call_failed(id);
    assert_eq!(call(&mut plan, id), Some((4, set(&[(0, 4)]))));
    plan.staged(id, 4);
    plan.call_failed(id);
    assert_eq!(call(&mut plan, id), None, "it has it");
}

#[test]
fn words_count_for_what_they_name() {
    let mut plan = Of::new(1, 0);
    let id = plan.join(about(0, &[0]));
    let first = plan.publish(&set(&[(0, 1)]), &Targets::All, &[]);
    let second = plan.publish(&set(&[(0, 2)]), &Targets::All, &[]);
    let outcome =
        |plan: &Of, of: &Publication, level| plan.outcome(of, (id, Disposition::Notified), level);
    plan.staged(id, 1);
    assert_eq!(outcome(&plan, &first, Level::Staged), Some(Outcome::Staged));
    assert_eq!(outcome(&plan, &first, Level::Applied), None);
    assert_eq!(plan.so_far(&first, id), Outcome::Late);
    plan.taken(id, 1);
    assert_eq!(plan.so_far(&first, id), Outcome::Staged);
    assert_eq!(plan.so_far(&second, id), Outcome::Late);
    assert_eq!(outcome(&plan, &second, Level::Staged), None);
    plan.applied(id, 1, &[(0, Version(1))]);
    assert_eq!(
        outcome(&plan, &first, Level::Applied),
        Some(Outcome::Applied)
    );
    assert_eq!(outcome(&plan, &second, Level::Applied), None);
    let reason = || "no room".to_owned();
    plan.refused(id, 2, reason());
    assert_eq!(
        outcome(&plan, &second, Level::Applied),
        Some(Outcome::Refused { reason: reason() })
    );
    // It has it by now, and an old word changes nothing.
    plan.applied(id, 2, &[(0, Version(2))]);
    plan.applied(id, 1, &[(0, Version(1))]);
    plan.refused(id, 1, "late".into());
    for of in [&first, &second] {
        assert_eq!(outcome(&plan, of, Level::Applied), Some(Outcome::Applied));
    }
    assert_eq!(plan.workers()[0].versions, [Version(2)]);
    // Nobody runs what was not sent, nor has taken what was not told.
    plan.applied(id, 99, &[(0, Version(99))]);
    assert_eq!(plan.workers()[0].versions, [Version(2)]);
    let third = plan.publish(&set(&[(0, 3)]), &Targets::All, &[]);
    assert_eq!(outcome(&plan, &third, Level::Staged), None);
}

#[test]
fn an_end_is_a_line_of_those_it_was_for() {
    let mut plan = Of::new(1, 0);
    let (left, died) = (plan.join(about(0, &[0])), plan.join(about(1, &[0])));
    let sent = plan.publish(&set(&[(0, 1)]), &Targets::All, &[]);
    plan.end(left, Life::Left);
    plan.end(died, Life::Died);
    let outcome = |plan: &Of, id| plan.outcome(&sent, (id, Disposition::Notified), Level::Applied);
    assert_eq!(outcome(&plan, left), Some(Outcome::Left));
    assert_eq!(outcome(&plan, died), Some(Outcome::Died));
    assert!(plan.workers().is_empty());
    plan.unwatch([left, died]);
    assert!(!plan.mailboxes.contains_key(&left), "nobody asks for it");
    plan.forget_missing(&[WorkerId(1)]);
    assert!(plan.mailboxes.is_empty(), "nobody asks for them any more");

    // One that goes between the beginning of a send and its end has a line, too.
    let id = plan.join(about(0, &[0]));
    let before = plan.watch_all();
    plan.end(id, Life::Died);
    let sent = plan.publish(&set(&[(0, 2)]), &Targets::All, &before);
    assert_eq!(sent.dispositions, [(id, Disposition::Notified)]);
    plan.unwatch(before);
    assert!(plan.is_known(id), "its line is still to be made");
    plan.unwatch([id]);
    plan.forget_missing(&[WorkerId(0)]);
    assert!(!plan.is_known(id));
}

#[test]
fn departed_worker_has_a_line_until_back_or_forgotten() {
    let dispositions = |plan: &mut Of, version| {
        let sent = plan.publish(&set(&[(0, version)]), &Targets::All, &[]);
        let ids: Vec<_> = sent.dispositions.iter().map(|(id, _)| *id).collect();
        let outcomes = sent.dispositions.iter();
        let outcomes =
            outcomes.map(|disposition| plan.outcome(&sent, *disposition, Level::Applied));
        let outcomes: Vec<_> = outcomes.collect();
        plan.unwatch(ids);
        outcomes
    };
    let mut plan = Of::new(1, 0);
    let [left, died, fails] = [0, 1, 2].map(|worker| plan.join(about(worker, &[0])));
    dispositions(&mut plan, 1);
    for id in [left, died, fails] {
        plan.applied(id, 1, &[(0, Version(1))]);
    }
    plan.end(left, Life::Left);
    plan.end(died, Life::Died);
    plan.rejected(fails, "CUDA error".into());
    plan.end(fails, Life::Left);
    let failed = || {
        let reason = "CUDA error".into();
        Some(Outcome::Failed { reason })
    };
    for version in 2..4 {
        assert_eq!(
            dispositions(&mut plan, version),
            [Some(Outcome::Died), failed()]
        );
    }
    let there = plan.attendance();
    let gone: Vec<_> = there
        .gone
        .iter()
        .map(|gone| (gone.joined, &gone.how))
        .collect();
    assert_eq!(gone[..2], [(left, &Outcome::Left), (died, &Outcome::Died)]);
    // It has another line with its next connection, and none of the one before.
    plan.join(about(1, &[0]));
    assert_eq!(dispositions(&mut plan, 4), [failed(), None]);
    plan.forget_missing(&[WorkerId(2)]);
    assert_eq!(dispositions(&mut plan, 5), [None]);
    assert_eq!(plan.mailboxes.len(), 1);
}

#[test]
fn number_holder_is_told_by_process_and_address() {
    let mut plan = Of::new(1, 0);
    let id = plan.join(about(0, &[0]));
    assert_eq!(plan.holder(&about(0, &[0])), None, "it registers again");
    assert_eq!(plan.holder(&about(1, &[0])), None, "nobody has that number");
    let other = |port, pid| About {
        pid,
        addr: ([127, 0, 0, 1], port).into(),
        ..about(0, &[0])
    };
    assert_eq!(plan.holder(&other(1001, 0)), Some(id));
    assert_eq!(plan.holder(&other(1000, 9)), Some(id));
    assert_eq!(plan.signs(id), Some(0));
    plan.silent(id, false);
    assert_eq!(plan.signs(id), Some(1));
    plan.silent(id, true);
    assert_eq!(plan.signs(id), None, "nothing is heard of it");
}

/// One that says when it has joined counts from then on.
#[test]
fn one_that_announces_itself_counts_once_it_has() {
    let mut plan = Of::new(1, 0);
    let announces = About {
        announces: true,
        ..about(0, &[0])
    };
    let id = plan.join(announces);
    assert_eq!(plan.workers().len(), 1);
    assert!(plan.attendance().workers.is_empty());
    plan.joined(id);
    assert_eq!(plan.attendance().workers.len(), 1);
}

#[test]
fn process_registering_again_in_a_send_has_one_line() {
    let mut plan = Of::new(1, 0);
    let old = plan.join(about(0, &[0]));
    let before = plan.watch_all();
    // It has joined again, and listens elsewhere.
    let mut new = about(0, &[0]);
    new.addr.set_port(1001);
    let new = plan.join(new);
    let sent = plan.publish(&set(&[(0, 1)]), &Targets::All, &before);
    assert_eq!(sent.dispositions, [(new, Disposition::Notified)]);
    plan.end(old, Life::Lost);
    plan.unwatch(before);
    plan.unwatch([new]);
    // A process of another host is not the one that was here.
    let before = plan.watch_all();
    let mut other = about(0, &[0]);
    other.addr.set_ip([10, 0, 0, 2].into());
    let other = plan.join(other);
    plan.end(new, Life::Died);
    let sent = plan.publish(&set(&[(0, 2)]), &Targets::All, &before);
    assert_eq!(
        sent.dispositions,
        [(new, Disposition::Notified), (other, Disposition::Notified)]
    );
    let outcome = |id| plan.outcome(&sent, (id, Disposition::Notified), Level::Applied);
    assert_eq!(outcome(new), Some(Outcome::Died));
}

#[test]
fn one_that_cannot_be_reached_is_lost_and_not_dead() {
    let mut plan = Of::new(1, 0);
    let id = plan.join(about(0, &[0]));
    let sent = plan.publish(&set(&[(0, 1)]), &Targets::All, &[]);
    plan.staged(id, 1);
    plan.end(id, Life::Lost);
    plan.end(id, Life::Died);
    let outcome = |level| plan.outcome(&sent, (id, Disposition::Notified), level);
    assert_eq!(outcome(Level::Applied), Some(Outcome::Lost));
    assert_eq!(outcome(Level::Staged), Some(Outcome::Staged));
}

#[test]
fn one_that_is_late_is_passed_over_until_it_moves() {
    let mut plan = Of::new(1, 0);
    let id = plan.join(about(0, &[0]));
    let send = |plan: &mut Of, version| plan.publish(&set(&[(0, version)]), &Targets::All, &[]);
    let first = send(&mut plan, 1);
    plan.note_late(&first, Level::Applied, Instant::now());
    let mut next = send(&mut plan, 2);
    assert!(plan.late(&first, id).is_none());
    assert!(plan.late(&next, id).is_some());
    next.waits_for_late = true;
    assert!(plan.late(&next, id).is_none());
    let moves: [fn(&mut Of, MailboxId); 4] = [
        |plan, id| plan.staged(id, 1),
        |plan, id| plan.taken(id, 1),
        |plan, id| plan.applied(id, 1, &[(0, Version(1))]),
        |plan, id| drop(plan.ask(id, Want::AtLeast(0, Version(9)))),
    ];
    for moves in moves {
        let next = send(&mut plan, 2);
        assert!(plan.late(&next, id).is_some());
        moves(&mut plan, id);
        assert!(plan.late(&next, id).is_none());
        plan.note_late(&first, Level::Applied, Instant::now());
        plan.note_late(&next, Level::Applied, Instant::now());
    }
}

impl Of {
    fn is_known(&self, id: MailboxId) -> bool {
        self.mailboxes.contains_key(&id)
    }
}

#[test]
fn partial_sends_and_holds_give_each_worker_its_own() {
    let mut plan = Of::new(2, 2);
    let (one, two) = (plan.join(about(1, &[0, 1])), plan.join(about(2, &[1])));
    plan.publish(&set(&[(0, 1), (1, 1)]), &Targets::All, &[]);
    assert_eq!(call(&mut plan, one), Some((1, set(&[(0, 1), (1, 1)]))));
    assert_eq!(call(&mut plan, two), Some((1, set(&[(1, 1)]))));
    // What two does not take is nothing to it.
    let sent = plan.publish(&set(&[(0, 2)]), &Targets::All, &[]);
    assert_eq!(sent.dispositions, [(one, Disposition::Notified)]);
    assert_eq!(call(&mut plan, two), None);
    let sent = plan.publish(&set(&[(1, 2)]), &workers(&[2, 7, 7]), &[]);
    assert_eq!(sent.absent, [WorkerId(7)]);
    assert_eq!(call(&mut plan, one), Some((2, set(&[(0, 2), (1, 1)]))));
    assert_eq!(call(&mut plan, two), Some((3, set(&[(1, 2)]))));
    assert_eq!(
        plan.common(1, &Targets::All),
        Err(vec![Version(1), Version(2)])
    );
    assert_eq!(plan.common(1, &workers(&[2])), Ok(Some(Version(2))));
    // A worker that was not there gets its own.
    let seven = plan.join(about(7, &[0, 1]));
    assert_eq!(call(&mut plan, seven), Some((3, set(&[(0, 2), (1, 2)]))));

    plan.hold(&[WorkerId(2), WorkerId(9)]);
    let sent = plan.publish(&set(&[(1, 3)]), &Targets::All, &[]);
    assert!(sent.dispositions.contains(&(two, Disposition::Held)));
    assert_eq!(call(&mut plan, two), None);
    let nine = plan.join(about(9, &[0, 1]));
    assert_eq!(
        call(&mut plan, nine),
        Some((4, set(&[(0, 2), (1, 1)]))),
        "the number is held, also of one that was not there"
    );
    plan.release(&[WorkerId(2), WorkerId(5)]);
    assert_eq!(call(&mut plan, two), Some((5, set(&[(1, 3)]))));
    plan.release(&[WorkerId(2)]);
    assert_eq!(call(&mut plan, two), None, "it was not held");
    plan.hold(&[WorkerId(2)]);
    plan.release(&[WorkerId(2)]);
    assert_eq!(call(&mut plan, two), None, "nothing was sent meanwhile");
}

#[test]
fn questions_are_answered_with_what_is_kept_or_wait() {
    let mut plan = Of::new(2, 2);
    let id = plan.join(about(0, &[1, 0]));
    let Answer::Later(first) = plan.ask(id, Want::Newest) else {
        panic!("there is nothing yet");
    };
    let least = Want::AtLeast(0, Version(2));
    let Answer::Later(second) = plan.ask(id, least) else {
        panic!("there is none yet");
    };
    let sent = plan.publish(&set(&[(0, 1), (1, 1)]), &Targets::All, &[]);
    let outcome = |plan: &Of, of| plan.outcome(of, (id, Disposition::Notified), Level::Applied);
    assert_eq!(
        outcome(&plan, &sent),
        Some(Outcome::Asks),
        "it waits for the second"
    );
    plan.asks_no_more(id, first);
    let sent = plan.publish(&set(&[(0, 2)]), &Targets::All, &[]);
    assert_eq!(outcome(&plan, &sent), None, "this answers it");
    plan.asks_no_more(id, second);
    let newest = Order {
        sequence: 2,
        set: set(&[(0, 2), (1, 1)]),
    };
    assert_eq!(plan.answer(id, least), Answer::Set(newest.clone()));
    assert_eq!(plan.answer(id, Want::Newest), Answer::Set(newest));
    let older = Order {
        sequence: 0,
        set: set(&[(0, 1), (1, 1)]),
    };
    let exactly = |version| Want::Exactly(0, Version(version));
    assert_eq!(plan.answer(id, exactly(1)), Answer::Set(older));
    let known = vec![Version(2), Version(1)];
    assert_eq!(plan.answer(id, exactly(7)), Answer::Unknown { known });
    // A worker that goes back to an older version asks for what it runs.
    plan.applied(id, 2, &[(0, Version(2)), (1, Version(1))]);
    assert_eq!(outcome(&plan, &sent), Some(Outcome::Applied));
    plan.applied(id, 0, &[(0, Version(1))]);
    assert_eq!(outcome(&plan, &sent), Some(Outcome::Asks));
    plan.end(id, Life::Left);
    assert_eq!(plan.answer(id, Want::Newest), Answer::Gone);
}

#[test]
fn successor_takes_the_number_with_its_own_line() {
    let mut plan = Of::new(1, 0);
    let old = plan.join(about(0, &[0]));
    let sent = plan.publish(&set(&[(0, 1)]), &Targets::All, &[]);
    let new = plan.join(about(0, &[0]));
    assert_eq!(plan.workers().len(), 1);
    assert_eq!(call(&mut plan, new), Some((1, set(&[(0, 1)]))));
    plan.applied(new, 1, &[(0, Version(1))]);
    let outcome = |plan: &Of| plan.outcome(&sent, (old, Disposition::Notified), Level::Applied);
    assert_eq!(outcome(&plan), None, "it may still be there");
    plan.end(old, Life::Died);
    assert_eq!(outcome(&plan), Some(Outcome::Died));
    assert_eq!(plan.workers()[0].versions, [Version(1)]);
    assert!(plan.is_here(new));
    // Of two attempts of one process the other goes on where one ends.
    let twice = plan.join(about(0, &[0]));
    plan.publish(&set(&[(0, 2)]), &Targets::All, &[]);
    plan.end(twice, Life::Died);
    assert_eq!(plan.workers().len(), 1);
    assert_eq!(call(&mut plan, new), Some((2, set(&[(0, 2)]))));
    // A final refusal is reported for the worker that has the number.
    plan.rejected(new, "another model".into());
    assert_eq!(plan.attendance().rejected, [WorkerId(0)]);
    assert!(plan.workers().is_empty());
    plan.publish(&set(&[(0, 3)]), &Targets::All, &[]);
    assert_eq!(call(&mut plan, new), None);
    plan.join(about(0, &[0]));
    assert!(plan.take_rejections().is_empty());
}

#[test]
fn ending_sender_waits_for_workers_that_can_finish() {
    let mut plan = Of::new(1, 0);
    let ids = [0, 1, 2, 3].map(|worker| plan.join(about(worker, &[0])));
    let [takes, refuses, stops, goes] = ids;
    assert!(plan.is_handed_over(), "nothing was sent");
    let later = plan.join(about(4, &[0]));
    plan.hold(&[WorkerId(4)]);
    plan.publish(&set(&[(0, 1)]), &Targets::All, &[]);
    let all = [takes, refuses, stops, goes];
    for (place, one) in all.into_iter().enumerate() {
        assert!(!plan.is_handed_over(), "{place}");
        match place {
            0 => plan.staged(one, 1),
            1 => plan.refused(one, 1, "no room".into()),
            2 => assert!(plan.silent(one, true) && !plan.silent(one, true)),
            _ => plan.end(one, Life::Died),
        }
    }
    assert!(plan.is_handed_over(), "who is held has nothing to take");
    plan.release(&[WorkerId(4)]);
    assert!(!plan.is_handed_over());
    plan.staged(later, 2);
    assert!(plan.is_handed_over());
    plan.silent(stops, false);
    assert!(!plan.is_handed_over(), "it goes on");
}

/// Whatever happens in whatever order, what is desired and told is one whole
/// publication's, and nothing is left of who has gone.
#[test]
fn any_order_of_events_keeps_sets_whole() {
    let seed: u64 = std::env::var("WEIGHTSYNC_SOAK_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or(20261121);
    println!("seed {seed}");
    let mut state = seed | 1;
    let mut roll = |below: u64| {
        // xorshift
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 8) % below
    };
    for _ in 0..200 {
        let mut plan = Of::new(2, 2);
        // What both models have to each other, by the version of the first.
        let mut pairs = BTreeMap::new();
        let mut mailboxes: Vec<(MailboxId, u64)> = Vec::new();
        let mut open: Vec<Publication> = Vec::new();
        let mut version = 0;
        for _ in 0..200 {
            match roll(8) {
                0 => mailboxes.push((plan.join(about(roll(4) as u32, &[0, 1])), 0)),
                1 if !mailboxes.is_empty() => {
                    let place = roll(mailboxes.len() as u64) as usize;
                    plan.end(mailboxes.swap_remove(place).0, Life::Died);
                }
                2 | 3 => {
                    version += 1;
                    let other = version * 1000 + roll(10);
                    pairs.insert(version, other);
                    let targets = match roll(3) {
                        0 => workers(&[roll(4) as u32, roll(4) as u32]),
                        _ => Targets::All,
                    };
                    let both = set(&[(0, version), (1, other)]);
                    open.push(plan.publish(&both, &targets, &[]));
                }
                4 => plan.hold(&[WorkerId(roll(4) as u32)]),
                5 => plan.release(&[WorkerId(roll(4) as u32)]),
                6 if !open.is_empty() => {
                    let place = roll(open.len() as u64) as usize;
                    let of = open.swap_remove(place);
                    plan.unwatch(of.dispositions.into_iter().map(|(id, _)| id));
                }
                _ => {
                    for (id, told) in &mut mailboxes {
                        let Some(order) = plan.next_call(*id) else {
                            continue;
                        };
                        assert!(order.sequence > *told, "calls go on");
                        *told = order.sequence;
                        let first = order.set.version(0).0;
                        assert_eq!(order.set.version(1).0, pairs[&first], "one publication");
                    }
                }
            }
        }
        for (id, _) in mailboxes {
            plan.end(id, Life::Left);
        }
        for of in open {
            plan.unwatch(of.dispositions.into_iter().map(|(id, _)| id));
        }
        // Those that died are missed until they are forgotten.
        plan.forget_missing(&(0..4).map(WorkerId).collect::<Vec<_>>());
        assert!(plan.mailboxes.is_empty() && plan.current.is_empty());
    }
}
