//! The protocol under loom: every interleaving and every allowed reordering of
//! a sender and its readers, with one of them stopping at any of its steps.
//!
//! A slot is a loom cell, so a read that could meet a write is reported as a
//! race, and a torn version as a wrong value. A stopped thread simply returns:
//! like a killed process it leaves its words as they are. The sender takes a
//! stopped reader's word out of its scan only after the thread is over, as it
//! does in truth on the pidfd's word.

use loom::cell::UnsafeCell;
use loom::sync::{Arc, Notify};
use loom::thread;

use super::*;

/// One slot: two halves, so that a torn version can be told.
struct Slot([UnsafeCell<u64>; 2]);

// SAFETY: loom itself reports any access to a cell that races with another;
// that is what these tests are for.
unsafe impl Sync for Slot {}

struct World {
    live: LiveWord,
    pins: Vec<PinWord>,
    slots: Vec<Slot>,
}

impl World {
    fn new(slots: usize, readers: usize) -> Arc<Self> {
        let slot = |_| Slot([UnsafeCell::new(0), UnsafeCell::new(0)]);
        Arc::new(Self {
            live: LiveWord::new(),
            pins: (0..readers).map(|_| PinWord::new()).collect(),
            slots: (0..slots).map(slot).collect(),
        })
    }

    fn write(&self, slot: u8, half: usize, value: u64) {
        // SAFETY: loom checks that nobody else is in the cell.
        self.slots[usize::from(slot)].0[half].with_mut(|cell| unsafe { *cell = value });
    }

    fn read(&self, slot: u8, half: usize) -> u64 {
        // SAFETY: loom checks that nobody writes the cell meanwhile.
        self.slots[usize::from(slot)].0[half].with(|cell| unsafe { *cell })
    }

    fn free_slot(&self, live: Option<Live>) -> Option<u8> {
        let held = self
            .pins
            .iter()
            .map(PinWord::held)
            .fold(SlotSet::default(), SlotSet::union);
        let held = live.map_or(held, |live| held.with(live.slot));
        held.first_free(self.slots.len() as u8)
    }

    /// Publishes versions 1 to `last`, each if a slot is free; stops after
    /// `steps`.
    fn send(&self, last: u64, steps: u32) {
        let mut steps = Steps(steps);
        let mut live = None;
        for version in 1..=last {
            // A sender that finds every slot pinned waits; here it gives up,
            // which covers what is visible until then.
            let Some(slot) = self.free_slot(live) else {
                return;
            };
            for half in 0..2 {
                if steps.over() {
                    return;
                }
                self.write(slot, half, version);
            }
            if steps.over() {
                return;
            }
            let next = Live {
                sequence: version,
                slot,
            };
            self.live.swap_in(next);
            live = Some(next);
        }
    }

    /// Pins, reads both halves, unpins; stops after `steps`.
    fn receive(&self, reader: usize, steps: u32) -> Option<u64> {
        let mut steps = Steps(steps);
        let pins = &self.pins[reader];
        // One retry is enough to meet every state; more only cost time.
        for _ in 0..2 {
            let live = self.live.load()?;
            if steps.over() {
                return None;
            }
            pins.announce(live);
            if steps.over() {
                return None;
            }
            if self.live.load() != Some(live) {
                if steps.over() {
                    return None;
                }
                pins.unpin(live.slot);
                continue;
            }
            if steps.over() {
                return None;
            }
            let first = self.read(live.slot, 0);
            if steps.over() {
                return None;
            }
            let second = self.read(live.slot, 1);
            assert_eq!(first, second, "torn");
            assert_eq!(first, live.sequence, "another version than the one pinned");
            if steps.over() {
                return None;
            }
            pins.unpin(live.slot);
            return Some(first);
        }
        None
    }
}

struct Steps(u32);

impl Steps {
    fn over(&mut self) -> bool {
        self.0 = self.0.saturating_sub(1);
        self.0 == 0
    }
}

/// More steps than any thread here takes: it is not stopped.
const WHOLE: u32 = 100;

/// Explores one arrangement, completely up to the given number of forced
/// switches between threads.
fn explore(preemptions: usize, arrangement: impl Fn() + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.check(arrangement);
}

#[test]
fn a_reader_beside_a_sender_sees_whole_versions() {
    explore(4, || {
        let world = World::new(2, 1);
        let sender = {
            let world = world.clone();
            thread::spawn(move || world.send(3, WHOLE))
        };
        let first = world.receive(0, WHOLE);
        let second = world.receive(0, WHOLE);
        assert!(second >= first, "{second:?} after {first:?}");
        sender.join().unwrap();
    });
}

#[test]
fn two_readers_beside_a_sender_see_whole_versions() {
    explore(2, || {
        let world = World::new(2, 2);
        let others: Vec<_> = (0..2)
            .map(|reader| {
                let world = world.clone();
                thread::spawn(move || world.receive(reader, WHOLE))
            })
            .collect();
        world.send(3, WHOLE);
        for other in others {
            other.join().unwrap();
        }
    });
}

#[test]
fn a_reader_stopped_at_any_step_blocks_no_more_than_its_slot() {
    for steps in 1..=7 {
        explore(3, move || {
            let world = World::new(2, 1);
            let reader = {
                let world = world.clone();
                thread::spawn(move || world.receive(0, steps))
            };
            world.send(2, WHOLE);
            reader.join().unwrap();
            // Its death is noticed: its word leaves the scan, and the slot that
            // is not live is free whatever the word says.
            let live = world.live.load();
            let held = live.map_or(SlotSet::default(), |live| {
                SlotSet::default().with(live.slot)
            });
            let slot = held
                .first_free(2)
                .expect("a dead reader's pins do not count");
            world.write(slot, 0, 9);
            world.write(slot, 1, 9);
        });
    }
}

#[test]
fn a_sender_stopped_at_any_step_leaves_a_whole_version() {
    for steps in 1..=9 {
        explore(3, move || {
            let world = World::new(2, 1);
            let sender = {
                let world = world.clone();
                thread::spawn(move || world.send(3, steps))
            };
            let during = world.receive(0, WHOLE);
            sender.join().unwrap();
            let after = world.receive(0, WHOLE);
            assert!(after >= during, "{after:?} after {during:?}");
            let finished = u64::from((steps - 1) / 3);
            assert!(
                after.unwrap_or(0) >= finished.min(1),
                "{after:?} of {finished}"
            );
        });
    }
}

#[test]
fn a_held_slot_is_not_written_however_often_the_sender_sends() {
    explore(3, || {
        let world = World::new(3, 1);
        world.send(1, WHOLE);
        let live = world.live.load().unwrap();
        assert!(world.pins[0].pin(live, &world.live));
        let sender = {
            let world = world.clone();
            thread::spawn(move || {
                let mut live = world.live.load();
                for version in 2..=4 {
                    let slot = world.free_slot(live).expect("two slots are left");
                    world.write(slot, 0, version);
                    let next = Live {
                        sequence: version,
                        slot,
                    };
                    world.live.swap_in(next);
                    live = Some(next);
                }
            })
        };
        assert_eq!(world.read(live.slot, 0), 1);
        assert_eq!(world.read(live.slot, 1), 1);
        sender.join().unwrap();
    });
}

#[test]
fn no_wake_up_is_lost() {
    explore(4, || {
        let live = Arc::new(LiveWord::new());
        let sleep = Arc::new(SleepWord::new());
        let bell = Arc::new(Notify::new());
        let sleeper = {
            let (live, sleep, bell) = (live.clone(), sleep.clone(), bell.clone());
            thread::spawn(move || {
                while live.load().is_none() {
                    sleep.announce();
                    if live.load().is_none() {
                        // Loom reports a deadlock if the bell never rings.
                        bell.wait();
                    }
                    sleep.awake();
                }
            })
        };
        live.swap_in(Live {
            sequence: 1,
            slot: 0,
        });
        if sleep.sleeping() {
            bell.notify();
        }
        sleeper.join().unwrap();
    });
}
