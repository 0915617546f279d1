//! The mailbox protocol: the atomics-only state machine that makes a torn read
//! impossible.
//!
//! **Guarantee.** A data slot that a reader has pinned is not written until the
//! reader unpins it or dies, and everything the sender wrote into it before
//! publishing is visible to that reader. A reader sees all models of a set
//! record or none.
//!
//! **Mechanism.** Two things are recycled: *set records*, which say for each model which data
//! slot to use, and the *data slots* themselves. For each reader, the sender alone writes a
//! mailbox with one [`LiveWord`] and one [`RecordQueue`]. The reader alone writes one [`PinWord`]
//! for records, one for the data slots of each model, and a [`QueueHead`]. A mailbox uses its live
//! word or its queue, never both. The answer to a reader's question comes by a second live word.
//!
//! By live word (the newest, or what the worker asks for):
//!
//! * A reader *announces* a pin for the record it believes live, then issues a
//!   sequentially consistent fence, then *re-checks* that the live word has not
//!   moved. Only if it has not, the pin counts.
//! * The sender swaps the live words of all mailboxes, issues the same fence once, and
//!   only then reads the pins to find what it may write.
//!
//! The two fences are totally ordered. If the reader's fence comes first, the sender sees the
//! pin and leaves the record alone. If the sender's fence comes first, the reader sees the new
//! live word and withdraws. The live word carries a sequence number that only grows in a
//! mailbox. So the reader does not mistake a record that was recycled between its two looks for
//! the old one.
//!
//! By queue (a worker that wants every version): the entries between the reader's head and the
//! sender's tail are held without any announcement. The reader gives an entry back by moving
//! its head past it. A sender that takes all entries back [shuts](RecordQueue::shut) the queue,
//! issues the fence, and only then reads the pins. The reader issues the fence after its data
//! pins and then asks whether the queue is still [open](RecordQueue::is_open), as it does with a
//! live word.
//!
//! In both cases the *hand-over* to data pins follows. A held record also holds its data slots.
//! The reader [holds](PinWord::hold) them in its data pins and only then gives the record back,
//! with a release store. The sender reads heads and record pins *before* data pins, with
//! acquire loads: if it finds the record given back, it finds the data pins.
//!
//! A reader that stops at any step leaves at worst pins behind. Its death removes them, because
//! the sender stops scanning its words. A sender that stops at any step leaves each mailbox on
//! a whole set. `protocol/loom_tests.rs` checks both at every step.

use crate::sync::{AtomicU64, Ordering, fence, load_acquire};

/// The most data slots of a model: one bit each in a [`PinWord`]. Loom's threads have small stacks,
/// which must hold the sender's plan.
pub const MAX_SLOTS: usize = if cfg!(loom) { 8 } else { 64 };

/// How many set records a segment has: one bit each in a [`PinWord`].
pub const MAX_RECORDS: usize = if cfg!(loom) { 8 } else { 64 };

/// The most models of a segment.
pub const MAX_MODELS: usize = if cfg!(loom) { 8 } else { 64 };

/// How many entries a [`RecordQueue`] holds.
pub const QUEUE: usize = if cfg!(loom) { 4 } else { 64 };

/// The most entries that may wait in a reader's queue. Half of its room, so that the sender never
/// writes the entry that the reader reads.
pub const MAX_BOUND: u8 = (QUEUE / 2) as u8;

/// The set record of a mailbox, and the step that put the mailbox on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Live {
    /// Counts the sender's steps from 1; only grows in a mailbox.
    pub sequence: u64,
    /// The set record, below [`MAX_RECORDS`].
    pub record: u8,
}

impl Live {
    const RECORD_BITS: u32 = 8;

    fn pack(self) -> u64 {
        // The record and 24 bits of the sequence are the low half of the word, which a sleeping
        // reader's futex compares. So each step changes what the futex sees.
        (self.sequence << Self::RECORD_BITS) | u64::from(self.record)
    }

    fn unpack(word: u64) -> Option<Self> {
        // 0 is the state before the first publication. Only a broken or hostile sender names a
        // record out of range; treating that as "nothing published" keeps the reader safe.
        let record = (word & 0xff) as u8;
        let sequence = word >> Self::RECORD_BITS;
        (sequence != 0 && usize::from(record) < MAX_RECORDS).then_some(Self { sequence, record })
    }
}

/// The word that names a mailbox's set record. The sender writes it, the reader reads it.
#[repr(transparent)]
#[derive(Debug)]
pub struct LiveWord(AtomicU64);

impl Default for LiveWord {
    fn default() -> Self {
        Self::new()
    }
}

impl LiveWord {
    /// A live word before the first publication.
    pub fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// The live record, or `None` while there is none. Everything that the sender wrote before is
    /// visible once a pin on it has succeeded.
    pub fn load(&self) -> Option<Live> {
        Live::unpack(load_acquire(&self.0))
    }

    /// The word that changes with every step, for a reader to sleep on.
    #[cfg(not(loom))]
    pub(crate) fn word(&self) -> &AtomicU64 {
        &self.0
    }

    /// Puts the mailbox on `live`. Everything written before is visible to the
    /// reader once it has pinned it. The sender calls [`order`] after the last of its
    /// mailboxes, before it looks at pins or asks who sleeps.
    pub fn swap_in(&self, live: Live) {
        // Release: a reader that finds this word finds the record and the bytes of its slots, too.
        self.0.store(live.pack(), Ordering::Release);
    }

    /// Takes the mailbox off its record, until the next [`swap_in`](Self::swap_in). The fence makes
    /// every pin announced before visible to the scan that follows.
    pub fn clear(&self) {
        self.0.store(0, Ordering::Release);
        fence(Ordering::SeqCst);
    }
}

/// The pins of one reader, a bit each: its set records, or the data slots of one model. The reader
/// writes the word, the sender reads it.
#[repr(transparent)]
#[derive(Debug)]
pub struct PinWord(AtomicU64);

impl Default for PinWord {
    fn default() -> Self {
        Self::new()
    }
}

impl PinWord {
    /// A word that pins nothing.
    pub fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Announces a pin on the record of `live`, then re-checks. True if the pin
    /// holds; false if the sender has moved on, and then the caller withdraws
    /// the announcement with [`PinWord::unpin`] and starts over from the new
    /// live word.
    pub fn pin(&self, live: Live, word: &LiveWord) -> bool {
        self.announce(live);
        word.load() == Some(live)
    }

    /// The first half of [`PinWord::pin`], on its own so that a reader can be
    /// stopped between the two.
    pub(crate) fn announce(&self, live: Live) {
        // Without the fence, the second look at the live word could come before this store is
        // visible to the sender: acquire and release do not order a store before a later load.
        self.0.fetch_or(1 << live.record, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Pins a data slot. The pin counts only from the moment at which the current holder, the
    /// pinned record or the queue's entry, is released.
    pub fn hold(&self, slot: u8) {
        // Relaxed is enough. The release store that gives the record back (`unpin`, `advance`) also
        // makes this bit visible.
        self.0.fetch_or(1 << slot, Ordering::Relaxed);
    }

    /// Removes a pin. Every read made through the pin happens before the sender's next write there,
    /// and every [`hold`](Self::hold) before is visible to a sender that finds the bit cleared.
    pub fn unpin(&self, bit: u8) {
        self.0.fetch_and(!(1 << bit), Ordering::Release);
    }

    /// The bits that are pinned or announced.
    pub fn held(&self) -> SlotSet {
        SlotSet(load_acquire(&self.0))
    }
}

/// The records that a reader takes one after the other. The sender writes the queue, the reader
/// reads it.
#[repr(C)]
#[derive(Debug)]
pub struct RecordQueue {
    /// How many entries were ever pushed, and [`SHUT`](Self::SHUT).
    tail: AtomicU64,
    entries: [AtomicU64; QUEUE],
}

impl Default for RecordQueue {
    fn default() -> Self {
        Self::new()
    }
}

impl RecordQueue {
    /// Set in the tail: the queue is empty for good.
    const SHUT: u64 = 1 << 63;

    /// A queue before the first entry.
    pub fn new() -> Self {
        Self {
            tail: AtomicU64::new(0),
            entries: std::array::from_fn(|_| AtomicU64::new(0)),
        }
    }

    /// Adds an entry, unless `bound` of them wait beyond the reader's `head`. Not
    /// to be called once it is [shut](Self::shut).
    /// Everything written before is visible to the reader that gets it. The sender
    /// calls [`order`] before it asks whether the reader sleeps.
    ///
    /// A head beyond the tail is a reader's lie and harms only that reader.
    pub fn push(&self, head: u64, bound: u8, live: Live) -> bool {
        // The sender alone writes the tail, so it needs no order to read its own value. The head
        // comes from the reader's page and may be any number; the subtraction must not wrap.
        let tail = self.tail.load(Ordering::Relaxed);
        if tail.saturating_sub(head) >= u64::from(bound.min(MAX_BOUND)) {
            return false;
        }
        // The entry first: the release of the tail is what hands it to the reader.
        self.entry(tail).store(live.pack(), Ordering::Relaxed);
        self.tail.store(tail + 1, Ordering::Release);
        true
    }

    /// The entry at `position`, the reader's head, if it exists yet.
    pub fn get(&self, position: u64) -> Option<Live> {
        let tail = load_acquire(&self.tail);
        // In a shut queue the entries name records that the sender may write again.
        if tail & Self::SHUT != 0 || position >= tail {
            return None;
        }
        Live::unpack(self.entry(position).load(Ordering::Relaxed))
    }

    /// Takes every entry back, for good. The fence makes every data pin held before visible to the
    /// scan that follows.
    pub fn shut(&self) {
        let tail = self.tail.load(Ordering::Relaxed);
        // The bit stays in the tail, so every later look of the reader finds it.
        self.tail.store(tail | Self::SHUT, Ordering::Release);
        // The reader's data pins come before this fence, and the sender's shut comes before its
        // own. Whichever fence is first, one end sees what the other did.
        fence(Ordering::SeqCst);
    }

    /// Whether the entry returned by [`get`](Self::get) was held until now. Ask after
    /// [`PinWord::hold`], whose pin counts only if this holds.
    pub fn is_open(&self) -> bool {
        fence(Ordering::SeqCst);
        self.tail.load(Ordering::Relaxed) & Self::SHUT == 0
    }

    /// The word that changes with every entry, for a reader to sleep on.
    #[cfg(not(loom))]
    pub(crate) fn tail_word(&self) -> &AtomicU64 {
        &self.tail
    }

    fn entry(&self, position: u64) -> &AtomicU64 {
        &self.entries[(position % QUEUE as u64) as usize]
    }
}

/// How many entries of its queue a reader has taken. The reader writes it, the
/// sender reads it.
#[repr(transparent)]
#[derive(Debug)]
pub struct QueueHead(AtomicU64);

impl Default for QueueHead {
    fn default() -> Self {
        Self::new()
    }
}

impl QueueHead {
    /// A head before the first entry.
    pub fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Releases every entry before `position`. Every [`PinWord::hold`] before is visible to a
    /// sender that finds the head there.
    pub fn advance(&self, position: u64) {
        self.0.store(position, Ordering::Release);
    }

    /// How many entries were taken.
    pub fn load(&self) -> u64 {
        load_acquire(&self.0)
    }
}

/// A set of data slots, or of set records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SlotSet(u64);

impl SlotSet {
    /// The set with one more slot.
    #[must_use]
    pub fn with(self, slot: u8) -> Self {
        Self(self.0 | (1 << slot))
    }

    /// The set without one slot.
    #[must_use]
    pub fn without(self, slot: u8) -> Self {
        Self(self.0 & !(1 << slot))
    }

    /// All slots of either set.
    #[must_use]
    pub fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// The slots in both sets.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Whether `slot` is in the set.
    pub fn contains(self, slot: u8) -> bool {
        // The bound is checked first, because a shift by 64 or more overflows.
        usize::from(slot) < MAX_SLOTS && self.0 & (1 << slot) != 0
    }

    /// Whether the set is empty.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// How many slots the set has.
    pub fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    /// The slots of the set, lowest first.
    pub fn iter(self) -> impl Iterator<Item = u8> {
        let mut rest = self.0;
        std::iter::from_fn(move || {
            let slot = rest.trailing_zeros() as u8;
            (rest != 0).then(|| {
                rest &= rest - 1;
                slot
            })
        })
    }

    /// The lowest slot below `slots` that is not in the set.
    pub fn first_free(self, slots: u8) -> Option<u8> {
        // A full set gives 64, which is below no model's number of slots.
        let slot = self.0.trailing_ones() as u8;
        (slot < slots).then_some(slot)
    }
}

/// The sleep protocol, for either direction. The sleeper announces sleep, then looks once more. The
/// waker changes the value, then asks whether anybody sleeps. The same pair of fences as above
/// makes a lost wake-up impossible.
#[repr(transparent)]
#[derive(Debug)]
pub struct SleepWord(AtomicU64);

impl Default for SleepWord {
    fn default() -> Self {
        Self::new()
    }
}

impl SleepWord {
    /// Awake.
    pub fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Announces sleep. Before it really sleeps, the caller must look once more.
    pub fn announce(&self) {
        self.0.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Withdraws the announcement.
    pub fn awake(&self) {
        // Relaxed: a waker that still finds the old value makes one needless call.
        self.0.store(0, Ordering::Relaxed);
    }

    /// Whether the other side sleeps. Call this after the change that it waits for, with [`order`]
    /// between.
    pub fn sleeping(&self) -> bool {
        self.0.load(Ordering::Relaxed) != 0
    }
}

/// Orders changes before the question whether anybody sleeps, and new records in mailboxes before
/// the next look at pins: every pin announced before is visible to it. One call serves any number
/// of mailboxes.
pub fn order() {
    fence(Ordering::SeqCst);
}

#[cfg(all(test, loom))]
mod loom_tests;

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn live(sequence: u64) -> Live {
        Live {
            sequence,
            record: (sequence % 64) as u8,
        }
    }

    #[test]
    fn a_queue_holds_its_bound_and_goes_round() {
        for bound in [1, 2, MAX_BOUND] {
            let queue = RecordQueue::new();
            let mut pushed = 0;
            for head in 0..3 * QUEUE as u64 {
                while queue.push(head, bound, live(pushed + 1)) {
                    pushed += 1;
                }
                assert_eq!(pushed - head, u64::from(bound));
                for position in head..pushed {
                    assert_eq!(queue.get(position), Some(live(position + 1)));
                }
                assert_eq!(queue.get(pushed), None);
            }
        }
        // No bound is larger than half of the room, for any reader.
        let queue = RecordQueue::new();
        let pushed = (1..=100).filter(|&sequence| queue.push(0, u8::MAX, live(sequence)));
        assert_eq!(pushed.count(), QUEUE / 2);
    }

    #[test]
    fn a_head_beyond_the_tail_is_no_room_without_end() {
        let queue = RecordQueue::new();
        assert!(queue.push(u64::MAX, 1, live(1)));
        assert!(!queue.push(0, 1, live(2)));
        assert_eq!(queue.get(u64::MAX), None);
    }

    #[test]
    fn words_of_a_broken_sender_are_nothing_published() {
        for word in [0, 5, (1 << 8) | 64, (7 << 8) | 255] {
            assert_eq!(Live::unpack(word), None, "{word:#x}");
        }
        let last = Live {
            sequence: (1 << 56) - 1,
            record: 63,
        };
        assert_eq!(Live::unpack(last.pack()), Some(last));
    }

    #[test]
    fn slots_are_counted_and_listed() {
        let set = [0, 1, 5, 63]
            .into_iter()
            .fold(SlotSet::default(), SlotSet::with);
        assert_eq!(set.iter().collect::<Vec<_>>(), [0, 1, 5, 63]);
        assert_eq!((set.len(), set.is_empty()), (4, false));
        assert_eq!(set.first_free(64), Some(2));
        assert_eq!(
            (set.first_free(2), set.without(1).first_free(2)),
            (None, Some(1))
        );
        assert!(!set.without(63).contains(63) && !set.contains(64));
        let full = (0..64).fold(SlotSet::default(), SlotSet::with);
        assert_eq!(full.first_free(64), None);
    }
}
