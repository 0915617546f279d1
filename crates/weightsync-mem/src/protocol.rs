//! The pin and swap protocol: the atomics-only state machine that makes a
//! torn read impossible.
//!
//! **Guarantee.** A slot that a reader has pinned successfully is not written
//! until the reader unpins it or dies, and everything the sender wrote into
//! the slot before publishing it is visible to that reader.
//!
//! **Mechanism.** There is one [`LiveWord`] (written by the sender alone) and
//! one [`PinWord`] per reader (written by that reader alone).
//!
//! * A reader *announces* a pin for the slot it believes live, then issues a
//!   sequentially consistent fence, then *re-checks* that the live word has not
//!   moved. Only if it has not, the pin counts.
//! * The sender swaps the live word, issues the same fence, and only then reads
//!   the pins to find a slot it may write.
//!
//! The two fences are totally ordered. If the reader's comes first, the sender
//! sees the pin and leaves the slot alone; if the sender's comes first, the
//! reader sees the new live word and withdraws. The live word carries a sequence
//! number that never repeats, so a slot that was recycled and published again
//! between the two looks is not mistaken for the old one.
//!
//! A reader that stops anywhere in this leaves at worst a pin behind, which its
//! death removes (the sender stops scanning its word); a sender that stops
//! anywhere leaves the live word on a whole version. `protocol/loom_tests.rs` checks
//! both at every step.

use crate::sync::{AtomicU64, Ordering, fence};

/// The most slots a segment can have: one bit each in a [`PinWord`].
pub const MAX_SLOTS: usize = 64;

/// Which slot is live, and the how-manieth publication that was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Live {
    /// Counts publications in this segment from 1; never repeats.
    pub sequence: u64,
    /// The slot that holds the version, below [`MAX_SLOTS`].
    pub slot: u8,
}

impl Live {
    const SLOT_BITS: u32 = 8;

    fn pack(self) -> u64 {
        (self.sequence << Self::SLOT_BITS) | u64::from(self.slot)
    }

    fn unpack(word: u64) -> Option<Self> {
        // 0 is the state before the first publication. A slot number out of
        // range can only come from a sender that is broken or hostile; treating
        // it as "nothing published" keeps the reader safe.
        let slot = (word & 0xff) as u8;
        let sequence = word >> Self::SLOT_BITS;
        (sequence != 0 && usize::from(slot) < MAX_SLOTS).then_some(Self { sequence, slot })
    }
}

/// The word that says which slot is live. The sender writes it, readers read it.
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

    /// The live slot, or `None` before the first publication. What the sender
    /// wrote into that slot is visible once a pin on it has succeeded.
    pub fn load(&self) -> Option<Live> {
        Live::unpack(self.0.load(Ordering::Acquire))
    }

    /// The word as it is, to tell whether it has changed.
    #[cfg(not(loom))]
    pub(crate) fn raw(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    /// Makes `live` the live slot. Everything written before is visible to
    /// readers that pin it; the fence makes every pin announced before the swap
    /// visible to the scan that follows.
    pub fn swap_in(&self, live: Live) {
        self.0.store(live.pack(), Ordering::Release);
        fence(Ordering::SeqCst);
    }
}

/// The slots one reader holds, a bit each. The reader writes it, the sender
/// reads it.
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

    /// Announces a pin on `live`, then re-checks. True if the pin holds; false
    /// if the sender has moved on, and then the caller withdraws the
    /// announcement with [`PinWord::unpin`] (unless it held the slot before)
    /// and starts over from the new live word.
    pub fn pin(&self, live: Live, word: &LiveWord) -> bool {
        self.announce(live);
        word.load() == Some(live)
    }

    /// The first half of [`PinWord::pin`], on its own so that a reader can be
    /// stopped between the two.
    pub(crate) fn announce(&self, live: Live) {
        self.0.fetch_or(1 << live.slot, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Gives `slot` back. Every read made through the pin happens before the
    /// sender's next write to the slot.
    pub fn unpin(&self, slot: u8) {
        self.0.fetch_and(!(1 << slot), Ordering::Release);
    }

    /// The slots that are pinned or announced.
    pub fn held(&self) -> SlotSet {
        SlotSet(self.0.load(Ordering::Acquire))
    }
}

/// A set of slots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SlotSet(u64);

impl SlotSet {
    /// The set with one more slot.
    pub fn with(self, slot: u8) -> Self {
        Self(self.0 | (1 << slot))
    }

    /// All slots of either set.
    pub fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether `slot` is in the set.
    pub fn contains(self, slot: u8) -> bool {
        usize::from(slot) < MAX_SLOTS && self.0 & (1 << slot) != 0
    }

    /// The lowest slot below `slots` that is not in the set.
    pub fn first_free(self, slots: u8) -> Option<u8> {
        (0..slots).find(|&slot| !self.contains(slot))
    }
}

/// The sleep protocol, for either direction: the sleeper says that it sleeps,
/// then looks once more; the waker changes what is looked at, then asks whether
/// anybody sleeps. The same pair of fences as above makes a lost wake-up
/// impossible.
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

    /// Announces sleep. The caller must look once more at what it waits for
    /// before it really sleeps.
    pub fn announce(&self) {
        self.0.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Withdraws the announcement.
    pub fn awake(&self) {
        self.0.store(0, Ordering::Relaxed);
    }

    /// Whether the other side sleeps. To be called after the change it waits
    /// for, with a fence between (a [`LiveWord::swap_in`] brings one, else
    /// [`order`]).
    pub fn sleeping(&self) -> bool {
        self.0.load(Ordering::Relaxed) != 0
    }
}

/// Orders a change before the question whether anybody sleeps.
pub fn order() {
    fence(Ordering::SeqCst);
}

#[cfg(all(test, loom))]
mod loom_tests;
