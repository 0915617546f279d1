//! The protocol under loom: every interleaving and every allowed reordering of
//! a sender and its readers, with one of them stopping at any of its steps.
//!
//! A data slot and a set record are loom cells, so a read that could meet a
//! write is reported as a race, and a torn version or set as a wrong value. A
//! stopped thread simply returns: like a killed process it leaves its words as
//! they are. The sender takes a stopped reader's words out of its scan only
//! after the thread is over, as it really does on the pidfd's word.
//!
//! Each reader has a mailbox of its own. Version `n` is written into a free data
//! slot, a free record is made to name that slot, and the record is swapped into
//! (or pushed on) every mailbox.

mod queue;
mod waking;

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

use super::*;
use crate::plan::{Key, Lend, PageChange, Plan};
use crate::scan::{self, Claims, Words};
use crate::set::ModelMask;
use crate::wire::Delivery;
use weightsync_core::{Targets, WorkerId};

/// Two halves, so that what is torn can be told.
struct Pair([UnsafeCell<u64>; 2]);

impl Pair {
    fn new() -> Self {
        Self([UnsafeCell::new(0), UnsafeCell::new(0)])
    }

    fn write(&self, half: usize, value: u64) {
        // SAFETY: loom checks that nobody else is in the cell.
        self.0[half].with_mut(|cell| unsafe { *cell = value });
    }

    fn read(&self, half: usize) -> u64 {
        // SAFETY: loom checks that nobody writes the cell meanwhile.
        self.0[half].with(|cell| unsafe { *cell })
    }
}

// SAFETY: loom itself reports any access to a cell that races with another;
// that is what these tests are for.
unsafe impl Sync for Pair {}

/// One reader's mailbox, and the words of its control page.
struct LoomMailbox {
    live: LiveWord,
    queue: RecordQueue,
    record_pins: PinWord,
    pins: PinWord,
    head: QueueHead,
}

struct World {
    mailboxes: Vec<LoomMailbox>,
    /// Each names a data slot, and its version.
    records: Vec<Pair>,
    slots: Vec<Pair>,
}

impl World {
    fn new(slots: usize, records: usize, readers: usize) -> Arc<Self> {
        let mailbox = |_| LoomMailbox {
            live: LiveWord::new(),
            queue: RecordQueue::new(),
            record_pins: PinWord::new(),
            pins: PinWord::new(),
            head: QueueHead::new(),
        };
        Arc::new(Self {
            mailboxes: (0..readers).map(mailbox).collect(),
            records: (0..records).map(|_| Pair::new()).collect(),
            slots: (0..slots).map(|_| Pair::new()).collect(),
        })
    }
}

/// How a mailbox is told.
#[derive(Clone, Copy)]
enum Channel {
    /// By the live word.
    Live,
    /// By the queue, in which this many entries may wait.
    Queue(u8),
}

/// The sender: its [`Plan`], and what it lets count of what readers hold, as in the product. Only
/// the steps that the plan decides are taken here, with the loom cells in the place of the
/// pages.
struct LoomSender {
    plan: Plan,
    readers: Vec<KnownReader>,
    version: u64,
}

/// A reader as the sender has it.
struct KnownReader {
    key: Key,
    claims: Claims,
    /// Whether its head and its last question are read.
    moves: bool,
    /// The mailbox is removed, or its reader is dead.
    gone: bool,
}

impl LoomSender {
    fn new(world: &World, channel: Channel) -> Self {
        let (slots, records) = (world.slots.len(), world.records.len() as u8);
        let mut plan = Plan::new([slots], 0).with_records(records);
        let delivery = match channel {
            Channel::Live => Delivery::Newest,
            Channel::Queue(bound) => Delivery::Every { bound },
        };
        let models = ModelMask::first(1);
        let mut join = |at| {
            let key = (WorkerId(at as u32), 1);
            let pins = SlotSet::default();
            plan.join((key, 0), models, delivery, pins, &mut Vec::new());
            KnownReader {
                key,
                claims: Claims::new(models),
                moves: delivery != Delivery::Newest,
                gone: false,
            }
        };
        let readers = (0..world.mailboxes.len()).map(&mut join).collect();
        Self {
            plan,
            readers,
            version: 0,
        }
    }

    /// The records that some reader pins.
    fn observe(&mut self, world: &World) -> SlotSet {
        let mut records = SlotSet::default();
        for (reader, mailbox) in self.readers.iter_mut().zip(&world.mailboxes) {
            let through = reader.moves.then_some(0);
            let (plan, claims) = (&mut self.plan, &mut reader.claims);
            let pinned = scan::observe(plan, reader.key, mailbox.words(), through, claims);
            records = records.union(pinned);
            reader.check();
        }
        records
    }

    /// The slots that some reader holds, given the records.
    fn pinned(&mut self, world: &World, records: SlotSet) -> SlotSet {
        let mut held = self.plan.slots_of(records, 0);
        for (reader, mailbox) in self.readers.iter_mut().zip(&world.mailboxes) {
            let claims = &mut reader.claims;
            held = held.union(scan::pinned(
                &self.plan,
                reader.key,
                mailbox.words(),
                0,
                claims,
            ));
            reader.check();
        }
        held
    }

    /// A slot for the next version, if there is one, and a record to tell it by.
    fn lend(&mut self, world: &World) -> Option<u8> {
        let records = self.observe(world);
        let pinned = self.pinned(world, records);
        if !self.plan.has_record(records) {
            return None;
        }
        // As many slots as it has are as many as it may have.
        match self.plan.lend(0, pinned, world.slots.len() as u8) {
            Lend::Slot(slot) => Some(slot),
            Lend::Grow { .. } | Lend::Wait => None,
        }
    }

    /// Takes a reader's mailbox off everything.
    fn take_down(&mut self, world: &World, reader: usize) {
        let known = &mut self.readers[reader];
        assert!(self.plan.shut(known.key).is_some());
        known.gone = true;
        match known.moves {
            true => world.mailboxes[reader].queue.shut(),
            false => world.mailboxes[reader].live.clear(),
        }
    }

    /// Publishes versions up to `last`, each if a slot and a record are free;
    /// stops after `steps`.
    fn send(&mut self, world: &World, last: u64, steps: u32) {
        self.send_some(world, last, &mut Steps(steps));
    }

    fn send_some(&mut self, world: &World, last: u64, steps: &mut Steps) -> Option<()> {
        while self.version < last {
            // A sender that finds everything pinned waits; here it gives up,
            // which covers what is visible until then.
            let slot = self.lend(world)?;
            let version = self.version + 1;
            for half in 0..2 {
                steps.next()?;
                world.slots[usize::from(slot)].write(half, version);
            }
            let mut decided = Vec::new();
            if self.plan.anything_waits() {
                let records = self.observe(world);
                self.plan.deliver(records, &mut decided);
                self.take(world, &decided, steps)?;
                decided.clear();
            }
            let records = self.observe(world);
            let published = self
                .plan
                .publish(&[(0, slot)], &Targets::All, records, &mut decided);
            published.unwrap();
            self.version = version;
            self.take(world, &decided, steps)?;
        }
        Some(())
    }

    fn take(&mut self, world: &World, decided: &[PageChange], steps: &mut Steps) -> Option<()> {
        for step in decided {
            match *step {
                PageChange::Write { record } => {
                    let placed = self.plan.set(record).entry(0).unwrap();
                    let values = [u64::from(placed.slot), placed.version.0];
                    for (half, value) in values.into_iter().enumerate() {
                        steps.next()?;
                        world.records[usize::from(record)].write(half, value);
                    }
                }
                PageChange::Flip { key, live } => {
                    steps.next()?;
                    self.notify(key, live);
                    world.mailboxes[key.0.0 as usize].live.swap_in(live);
                }
                PageChange::Push { key, live } => {
                    steps.next()?;
                    self.notify(key, live);
                    let mailbox = &world.mailboxes[key.0.0 as usize];
                    assert!(
                        mailbox.queue.push(mailbox.head.load(), MAX_BOUND, live),
                        "no room"
                    );
                }
                PageChange::Answer { .. } | PageChange::Clear { .. } => unreachable!("nobody asks"),
            }
        }
        order();
        Some(())
    }

    fn notify(&mut self, key: Key, live: Live) {
        let reader = &mut self.readers[key.0.0 as usize];
        reader
            .claims
            .note_named(live.record, self.plan.set(live.record));
    }
}

impl KnownReader {
    /// Whatever a reader does in whatever order, it is in breach of nothing.
    fn check(&self) {
        assert!(
            self.gone || self.claims.breach().is_none(),
            "{:?}",
            self.claims
        );
    }
}

impl LoomMailbox {
    fn words(&self) -> Words<'_> {
        Words {
            head: &self.head,
            records: &self.record_pins,
            pins: std::slice::from_ref(&self.pins),
        }
    }
}

impl World {
    /// Takes the set its live word names, hands over to a data pin, reads both
    /// halves, unpins; stops after `steps`.
    fn receive(&self, reader: usize, steps: u32) -> Option<u64> {
        let steps = &mut Steps(steps);
        let mailbox = &self.mailboxes[reader];
        // One retry is enough to meet every state; more only cost time.
        for _ in 0..2 {
            let live = mailbox.live.load()?;
            steps.next()?;
            mailbox.record_pins.announce(live);
            steps.next()?;
            if mailbox.live.load() != Some(live) {
                steps.next()?;
                mailbox.record_pins.unpin(live.record);
                continue;
            }
            steps.next()?;
            let slot = self.hand_over(mailbox, live, steps)?;
            mailbox.record_pins.unpin(live.record);
            steps.next()?;
            return self.read(mailbox, slot, live, steps);
        }
        None
    }

    /// Takes the entry at `position` of its queue, hands over to a data pin,
    /// reads both halves, unpins; stops after `steps`.
    fn receive_next(&self, reader: usize, position: u64, steps: u32) -> Option<u64> {
        let steps = &mut Steps(steps);
        let mailbox = &self.mailboxes[reader];
        let live = mailbox.queue.get(position)?;
        steps.next()?;
        let slot = self.hand_over(mailbox, live, steps)?;
        if !mailbox.queue.is_open() {
            mailbox.pins.unpin(slot);
            return None;
        }
        steps.next()?;
        mailbox.head.advance(position + 1);
        steps.next()?;
        self.read(mailbox, slot, live, steps)
    }

    /// From a record that is held to a pin on the data slot it names.
    fn hand_over(&self, mailbox: &LoomMailbox, live: Live, steps: &mut Steps) -> Option<u8> {
        let record = &self.records[usize::from(live.record)];
        let slot = record.read(0) as u8;
        let version = record.read(1);
        assert_eq!(version, live.sequence, "another record than the one held");
        steps.next()?;
        mailbox.pins.hold(slot);
        steps.next()?;
        Some(slot)
    }

    fn read(&self, mailbox: &LoomMailbox, slot: u8, live: Live, steps: &mut Steps) -> Option<u64> {
        let data = &self.slots[usize::from(slot)];
        let first = data.read(0);
        steps.next()?;
        let second = data.read(1);
        assert_eq!(first, second, "torn");
        assert_eq!(first, live.sequence, "another version than the one pinned");
        steps.next()?;
        mailbox.pins.unpin(slot);
        Some(first)
    }
}

/// A sender, to be run.
fn sending(
    world: &Arc<World>,
    channel: Channel,
    last: u64,
    steps: u32,
) -> impl FnOnce() -> LoomSender + use<> {
    let world = world.clone();
    move || {
        let mut sender = LoomSender::new(&world, channel);
        sender.send(&world, last, steps);
        sender
    }
}

/// A reader of a live word, to be run once.
fn receiving(
    world: &Arc<World>,
    reader: usize,
    steps: u32,
) -> impl FnOnce() -> Option<u64> + use<> {
    let world = world.clone();
    move || world.receive(reader, steps)
}

struct Steps(u32);

impl Steps {
    fn over(&mut self) -> bool {
        self.0 = self.0.saturating_sub(1);
        self.0 == 0
    }

    fn next(&mut self) -> Option<()> {
        (!self.over()).then_some(())
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

/// Runs both side by side, one of them in a thread of its own. Of several looks
/// at a word that follow each other loom remembers only the last when it asks
/// where to switch, so what is not tried one way round may be the other.
fn beside<A: 'static, B: 'static>(
    turned: bool,
    a: impl FnOnce() -> A + 'static,
    b: impl FnOnce() -> B + 'static,
) -> (A, B) {
    if turned {
        let a = thread::spawn(a);
        let b = b();
        (a.join().unwrap(), b)
    } else {
        let b = thread::spawn(b);
        (a(), b.join().unwrap())
    }
}

/// Explores an arrangement both ways round.
fn explore_turned(preemptions: usize, arrangement: impl Fn(bool) + Copy + Send + Sync + 'static) {
    for turned in [false, true] {
        explore(preemptions, move || arrangement(turned));
    }
}

#[test]
fn reader_next_to_a_sender_sees_whole_versions() {
    explore_turned(4, |turned| {
        let world = World::new(2, 2, 1);
        let sending = sending(&world, Channel::Live, 3, WHOLE);
        let receiving = {
            let world = world.clone();
            move || [world.receive(0, WHOLE), world.receive(0, WHOLE)]
        };
        let (_, [first, second]) = beside(turned, sending, receiving);
        // The reader may give up because the sender was faster twice.
        assert!(
            second.is_none() || second >= first,
            "{second:?} after {first:?}"
        );
    });
}

#[test]
fn two_readers_next_to_a_sender_see_whole_versions() {
    explore(2, || {
        let world = World::new(2, 2, 2);
        let others: Vec<_> = (0..2)
            .map(|reader| thread::spawn(receiving(&world, reader, WHOLE)))
            .collect();
        LoomSender::new(&world, Channel::Live).send(&world, 3, WHOLE);
        for other in others {
            other.join().unwrap();
        }
    });
}

#[test]
fn reader_stopped_at_any_step_blocks_only_its_pins() {
    for steps in 1..=10 {
        for turned in [false, true] {
            explore(4, move || {
                let world = World::new(2, 2, 1);
                let sending = sending(&world, Channel::Live, 2, WHOLE);
                let (mut sender, _) = beside(turned, sending, receiving(&world, 0, steps));
                may_write_when_dead(&world, &mut sender);
            });
        }
    }
}

/// The reader's death was noticed: its words no longer count, so every record and slot that no
/// mailbox names is free.
fn may_write_when_dead(world: &World, sender: &mut LoomSender) {
    for reader in sender.readers.drain(..) {
        assert!(sender.plan.leave(reader.key).is_some());
    }
    let slot = sender
        .lend(world)
        .expect("a dead reader's pins do not count");
    for half in 0..2 {
        world.slots[usize::from(slot)].write(half, 9);
        // No mailbox is left that names one.
        world
            .records
            .iter()
            .for_each(|record| record.write(half, 9));
    }
}

#[test]
fn sender_stopped_at_any_step_leaves_a_whole_version() {
    for steps in 1..=11 {
        for turned in [false, true] {
            explore(4, move || {
                let world = World::new(2, 2, 1);
                let sending = sending(&world, Channel::Live, 3, steps);
                let (_, during) = beside(turned, sending, receiving(&world, 0, WHOLE));
                let after = world.receive(0, WHOLE);
                assert!(after >= during, "{after:?} after {during:?}");
                let finished = u64::from((steps - 1) / 5);
                assert!(
                    after.unwrap_or(0) >= finished.min(1),
                    "{after:?} of {finished}"
                );
            });
        }
    }
}

#[test]
fn sender_stopped_between_mailboxes_leaves_whole_ones() {
    explore_turned(4, |turned| {
        let world = World::new(2, 2, 2);
        // Six steps are one version: four writes and two mailboxes. It stops before
        // the second version's second mailbox.
        let sending = sending(&world, Channel::Live, 3, 12);
        let (_, during) = beside(turned, sending, receiving(&world, 1, WHOLE));
        let seen = [0, 1].map(|reader| world.receive(reader, WHOLE));
        assert!(seen[1] >= during);
        // The second slot and record are free whatever the reader pins.
        assert_eq!(seen, [Some(2), Some(1)]);
    });
}

#[test]
fn held_slot_is_not_written_by_any_number_of_sends() {
    explore_turned(4, |turned| {
        let world = World::new(3, 2, 1);
        let mut sender = LoomSender::new(&world, Channel::Live);
        sender.send(&world, 1, WHOLE);
        let live = world.mailboxes[0].live.load().unwrap();
        assert!(
            world.mailboxes[0]
                .record_pins
                .pin(live, &world.mailboxes[0].live)
        );
        let sending = {
            let world = world.clone();
            move || {
                sender.send(&world, 4, WHOLE);
                sender.version
            }
        };
        let holding = {
            let world = world.clone();
            move || {
                let mailbox = &world.mailboxes[0];
                let slot = world.hand_over(mailbox, live, &mut Steps(WHOLE)).unwrap();
                mailbox.record_pins.unpin(live.record);
                let data = &world.slots[usize::from(slot)];
                assert_eq!((data.read(0), data.read(1)), (1, 1));
                slot
            }
        };
        let (sent, slot) = beside(turned, sending, holding);
        // With two records it may have waited for the first; never for the slot.
        assert!(sent >= 2, "{sent}");
        let data = &world.slots[usize::from(slot)];
        assert_eq!((data.read(0), data.read(1)), (1, 1));
    });
}

#[test]
fn mailbox_taken_off_its_record_gives_it_back() {
    explore_turned(3, |turned| {
        // The other mailbox is told the versions that come after.
        let world = World::new(2, 2, 2);
        let mut sender = LoomSender::new(&world, Channel::Live);
        sender.send(&world, 1, WHOLE);
        let clearing = {
            let world = world.clone();
            move || {
                sender.take_down(&world, 0);
                // The first slot and record again, unless the reader was there.
                sender.send(&world, 3, WHOLE);
            }
        };
        let (_, found) = beside(turned, clearing, receiving(&world, 0, WHOLE));
        assert!(matches!(found, None | Some(1)), "{found:?}");
    });
}
