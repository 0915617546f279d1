//! No wake-up is lost.

use loom::sync::Notify;
use loom::sync::atomic::{AtomicU64, Ordering};

use super::*;

#[test]
fn no_wake_up_is_lost() {
    explore(4, || {
        let live = Arc::new(LiveWord::new());
        let sleep = Arc::new(SleepWord::new());
        let bell = Arc::new(Notify::new());
        let sleeper = {
            let (live, sleep, bell) = (live.clone(), sleep.clone(), bell.clone());
            thread::spawn(move || sleep_until(&sleep, &bell, || live.load().is_some()))
        };
        live.swap_in(Live {
            sequence: 1,
            record: 0,
        });
        order();
        if sleep.sleeping() {
            bell.notify();
        }
        sleeper.join().unwrap();
    });
}

#[test]
fn no_wake_up_is_lost_on_a_queue() {
    explore(4, || {
        let queue = Arc::new(RecordQueue::new());
        let sleep = Arc::new(SleepWord::new());
        let bell = Arc::new(Notify::new());
        let sleeper = {
            let (queue, sleep, bell) = (queue.clone(), sleep.clone(), bell.clone());
            thread::spawn(move || sleep_until(&sleep, &bell, || queue.get(0).is_some()))
        };
        let live = Live {
            sequence: 1,
            record: 0,
        };
        assert!(queue.push(0, 1, live));
        order();
        if sleep.sleeping() {
            bell.notify();
        }
        sleeper.join().unwrap();
    });
}

/// The other direction: a reader gives something back, and the sender waits for
/// that. `give` is all that the reader does before [`order`].
fn no_wake_up_is_lost_by_the_sender(
    give: impl Fn(&LoomMailbox) + Copy + Send + Sync + 'static,
    given: impl Fn(&LoomMailbox) -> bool + Copy + Send + Sync + 'static,
) {
    explore_turned(4, move |turned| {
        let world = World::new(1, 1, 1);
        let mailbox = &world.mailboxes[0];
        mailbox.record_pins.hold(0);
        mailbox.pins.hold(0);
        let sleep = Arc::new(SleepWord::new());
        let bell = Arc::new(Notify::new());
        let sender = {
            let (world, sleep, bell) = (world.clone(), sleep.clone(), bell.clone());
            move || sleep_until(&sleep, &bell, || given(&world.mailboxes[0]))
        };
        let reader = move || {
            give(&world.mailboxes[0]);
            order();
            if sleep.sleeping() {
                bell.notify();
            }
        };
        beside(turned, sender, reader);
    });
}

#[test]
fn no_wake_up_is_lost_when_a_slot_is_given_back() {
    no_wake_up_is_lost_by_the_sender(
        |mailbox| mailbox.pins.unpin(0),
        |mailbox| mailbox.pins.held().is_empty(),
    );
}

#[test]
fn no_wake_up_is_lost_when_a_record_is_given_back() {
    no_wake_up_is_lost_by_the_sender(
        |mailbox| mailbox.record_pins.unpin(0),
        |mailbox| mailbox.record_pins.held().is_empty(),
    );
}

#[test]
fn no_wake_up_is_lost_when_an_entry_is_given_back() {
    no_wake_up_is_lost_by_the_sender(
        |mailbox| mailbox.head.advance(1),
        |mailbox| mailbox.head.load() == 1,
    );
}

/// One fence serves both questions: whether the sender sleeps, and whether it
/// wants to be told of room.
#[test]
fn sender_that_asks_for_room_is_woken_or_finds_it() {
    for listens in 0..2 {
        explore_turned(4, move |turned| {
            let world = World::new(1, 1, 1);
            let words = Arc::new([SleepWord::new(), SleepWord::new()]);
            let bells = Arc::new([Notify::new(), Notify::new()]);
            let reader = {
                let (world, words, bells) = (world.clone(), words.clone(), bells.clone());
                move || {
                    world.mailboxes[0].head.advance(1);
                    order();
                    for (word, bell) in words.iter().zip(bells.iter()) {
                        if word.sleeping() {
                            bell.notify();
                        }
                    }
                }
            };
            let sender = move || {
                for word in words.iter() {
                    word.announce();
                }
                // The reader looks once more, and either bell wakes it.
                if world.mailboxes[0].head.load() == 0 {
                    bells[listens].wait();
                }
            };
            beside(turned, sender, reader);
        });
    }
}

/// The place of an answer: the live word first, then the number of the question,
/// on which the reader sleeps. It stays until the reader needs it no more, and
/// what it named may be written once it is cleared and nothing is pinned.
#[test]
fn an_answer_is_found_whole_and_its_place_comes_free() {
    explore_turned(3, |turned| {
        let world = World::new(1, 1, 1);
        world.slots[0].write(0, 1);
        world.slots[0].write(1, 1);
        world.records[0].write(0, 0);
        let answer = Arc::new((LiveWord::new(), AtomicU64::new(0), AtomicU64::new(0)));
        let sleep = Arc::new(SleepWord::new());
        let bell = Arc::new(Notify::new());
        let answering = {
            let (world, answer) = (world.clone(), answer.clone());
            let (sleep, bell) = (sleep.clone(), bell.clone());
            move || {
                let (live, question, through) = &*answer;
                live.swap_in(Live {
                    sequence: 1,
                    record: 0,
                });
                question.store(1, Ordering::Release);
                order();
                if sleep.sleeping() {
                    bell.notify();
                }
                if through.load(Ordering::Acquire) < 1 {
                    return;
                }
                live.clear();
                let mailbox = &world.mailboxes[0];
                // Records before data pins.
                if mailbox.record_pins.held().is_empty() && mailbox.pins.held().is_empty() {
                    world.slots[0].write(0, 2);
                    world.slots[0].write(1, 2);
                }
            }
        };
        let asking = move || {
            let (live, question, through) = &*answer;
            sleep_until(&sleep, &bell, || question.load(Ordering::Acquire) == 1);
            let answer = live.load().expect("it is there before its number is");
            let mailbox = &world.mailboxes[0];
            assert!(mailbox.record_pins.pin(answer, live), "it is needed still");
            let slot = world.records[0].read(0) as u8;
            mailbox.pins.hold(slot);
            mailbox.record_pins.unpin(answer.record);
            order();
            through.store(1, Ordering::Release);
            order();
            let found = [0, 1].map(|half| world.slots[0].read(half));
            assert_eq!(found, [1, 1]);
            mailbox.pins.unpin(slot);
        };
        beside(turned, answering, asking);
    });
}

fn sleep_until(sleep: &SleepWord, bell: &Notify, there: impl Fn() -> bool) {
    while !there() {
        sleep.announce();
        if !there() {
            // Loom reports a deadlock if the bell never rings.
            bell.wait();
        }
        sleep.awake();
    }
}
