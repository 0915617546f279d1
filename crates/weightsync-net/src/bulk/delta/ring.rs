//! The deltas that a host keeps.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use weightsync_core::Version;
use weightsync_engine::Changes;
use weightsync_mem::Snapshot;
use weightsync_mem::threads::LockExt as _;

use super::{Delta, RING, Rate, UNKNOWN, seconds};
use crate::agent::Item;

/// Bytes of small deltas that one core folds in a second. Up to one changed element in a hundred,
/// deltas are merged as lists.
const FOLDED_FEW: u64 = 80 << 20;

/// The same for large deltas; bytes of the image count too. Measured with a hundredth to nine
/// tenths of all elements changed.
const FOLDED: u64 = 600 << 20;
const FOLDED_OF: u64 = 12 << 30;

/// The deltas of one process, within a bound for each model.
#[derive(Debug, Default)]
pub(crate) struct DeltaRing {
    models: Mutex<BTreeMap<usize, OfModel>>,
    /// A version is being published.
    announced: AtomicBool,
    /// The speed of the slowest link that anything is sent over, in bytes a second; 0 if it is not
    /// known yet.
    rate: AtomicU64,
}

/// The deltas of one model, in the order in which they were made.
#[derive(Debug, Default)]
struct OfModel {
    deltas: VecDeque<Arc<Delta>>,
    /// Deltas that had to go while they were being sent.
    going: Vec<Weak<Delta>>,
    /// The most bytes of memory they may take.
    bound: u64,
    /// A version that differs from the published one: nothing is made from it.
    spoiled: Option<Version>,
}

impl DeltaRing {
    /// Says whether a delta is about to be put here; threads that look for it then wait.
    pub(crate) fn announce(&self, announced: bool) {
        self.announced.store(announced, Ordering::Release);
    }

    pub(crate) fn is_announced(&self) -> bool {
        self.announced.load(Ordering::Acquire)
    }

    /// Marks a version as different from the published one. Nothing is made from it any more, and
    /// deltas that were made from it are not sent.
    pub(crate) fn spoil(&self, item: Item) {
        let mut models = self.models();
        let of = models.entry(item.model).or_default();
        for delta in &of.deltas {
            // A thread that makes it ends at its next span.
            delta.stop();
            // It was made from the wrong bytes, or from a version that was.
            if delta.version > item.version {
                delta.spoil();
            }
        }
        of.clear();
        of.spoiled = Some(item.version);
    }

    pub(crate) fn is_spoiled(&self, item: Item) -> bool {
        let models = self.models();
        models
            .get(&item.model)
            .is_some_and(|of| of.spoiled == Some(item.version))
    }

    /// Drops a model's deltas, because its next version does not follow them.
    pub(crate) fn forget(&self, model: usize) {
        self.stop(model);
        if let Some(of) = self.models().get_mut(&model) {
            of.clear();
            of.spoiled = None;
        }
    }

    /// Stops making a model's deltas; spans that are not known are sent as blocks.
    pub(crate) fn stop(&self, model: usize) {
        if let Some(of) = self.models().get(&model) {
            of.steps().for_each(|delta| delta.stop());
        }
    }

    /// Whether versions are kept for a delta of a model that is being made here.
    pub(crate) fn is_making(&self, model: usize) -> bool {
        let models = self.models();
        let mut newest = models
            .get(&model)
            .into_iter()
            .filter_map(|of| of.steps().next_back());
        newest.any(|delta| !delta.released.load(Ordering::Acquire))
    }

    /// Keeps a delta of a model. The oldest ones go when all take more bytes than `bound`, but the
    /// newest always stays. If its base is [spoiled](Self::spoil) by now, the delta is spoiled too.
    pub(crate) fn put(&self, model: usize, delta: Arc<Delta>, bound: u64) {
        let mut models = self.models();
        let of = models.entry(model).or_default();
        if of.spoiled == Some(delta.base) {
            return delta.spoil();
        }
        of.bound = bound;
        of.deltas.push_back(delta);
        of.trim();
    }

    /// Makes a delta that was put here. Older ones go while it grows, so that all stay within their
    /// bound. Otherwise as [`Delta::make`].
    pub(crate) fn make(
        &self,
        model: usize,
        delta: &Delta,
        versions: (&Snapshot, &Snapshot),
        rate: Rate,
        changed: impl Fn() + Sync,
        is_stopped: impl Fn() -> bool + Sync,
    ) {
        let changed = || {
            self.trim(model);
            changed();
        };
        delta.make(versions, rate, changed, is_stopped);
    }

    /// Drops old deltas of a model that exceed its bound, now that more spans are known.
    pub(crate) fn trim(&self, model: usize) {
        if let Some(of) = self.models().get_mut(&model) {
            of.trim();
        }
    }

    /// Whether a delta that had to go is not to be sent any further: it and others like it, which are
    /// in memory until they are sent, take as many bytes as may be kept, in addition to those.
    pub(crate) fn is_too_much(&self, model: usize, delta: &Arc<Delta>) -> bool {
        let mut models = self.models();
        let Some(of) = models.get_mut(&model) else {
            return false;
        };
        let is_kept = of.deltas.iter().any(|kept| Arc::ptr_eq(kept, delta));
        !is_kept && of.held_in_all() > 2 * of.bound
    }

    /// The single delta from `base` to a version.
    pub(crate) fn step(&self, item: Item, base: Version) -> Option<Arc<Delta>> {
        self.models().get(&item.model)?.direct(item.version, base)
    }

    /// The delta from `base` to a version. If several consecutive deltas lead there, they are
    /// folded and kept as one from here on. That is done only if it pays over the slower of this
    /// link and the slowest known one.
    pub(crate) fn find(&self, item: Item, base: Version, link: Option<u64>) -> Option<Arc<Delta>> {
        let rate = self.rate().into_iter().chain(link).min();
        let mut models = self.models();
        let of = models.get_mut(&item.model)?;
        if let Some(direct) = of.direct(item.version, base) {
            return Some(direct);
        }
        let mut parts = Vec::new();
        let mut at = item.version;
        let mut held = 0;
        while at > base {
            // Backwards from the wanted version, each time by the longest step that does not pass
            // the base.
            let before = of
                .steps()
                .filter(|delta| delta.version == at && delta.base >= base);
            let step = before.min_by_key(|delta| delta.base)?;
            parts.push(step.clone());
            held += step.held();
            // After each step: a search that cannot pay ends early.
            if step.is_given_up() || !pays_to_fold((parts.len(), held), step.whole, rate) {
                return None;
            }
            at = step.base;
        }
        parts.reverse();
        let folded = Arc::new(Delta::folded(parts)?);
        of.deltas.push_back(folded.clone());
        of.trim();
        Some(folded)
    }

    /// Notes the speed of the slowest link that anything is sent over, in bytes a second.
    pub(crate) fn note_rate(&self, rate: u64) {
        self.rate.store(rate, Ordering::Relaxed);
    }

    /// That speed, if it is known.
    pub(crate) fn rate(&self) -> Option<u64> {
        Some(self.rate.load(Ordering::Relaxed)).filter(|rate| *rate > 0)
    }

    /// Whether the newest delta of a model is worth sending.
    pub(crate) fn pays(&self, model: usize) -> bool {
        let models = self.models();
        let newest = models.get(&model).and_then(|of| of.steps().next_back());
        // Dense spans count in full, so a delta that is mostly dense does not pay.
        newest.is_some_and(|delta| !delta.is_given_up() && delta.bytes() < delta.whole / RING)
    }

    /// What changed in a version since the one before it; `None` if that is not known.
    pub(crate) fn changes(&self, item: Item) -> Option<Changes> {
        let models = self.models();
        let mut steps = models.get(&item.model)?.steps();
        let delta = steps.rfind(|delta| delta.version == item.version)?;
        delta.changes()
    }

    /// Bytes of memory that a model's deltas take.
    #[cfg(test)]
    pub(super) fn held(&self, model: usize) -> u64 {
        self.models().get(&model).map_or(0, OfModel::held)
    }

    fn models(&self) -> MutexGuard<'_, BTreeMap<usize, OfModel>> {
        self.models.locked()
    }
}

/// Whether folding and sending `steps` deltas of `bytes` is faster than sending an image of `whole`
/// bytes, at `rate` bytes a second. Each step is folded with the result of all earlier ones.
pub(super) fn pays_to_fold((steps, bytes): (usize, u64), whole: u64, rate: Option<u64>) -> bool {
    let rate = rate.unwrap_or(UNKNOWN);
    let read = if steps > 1 {
        steps as u64 * bytes / 2
    } else {
        0
    };
    let folds = (steps as u64).saturating_sub(1);
    let many = seconds(folds * whole, FOLDED_OF) + seconds(read, FOLDED);
    let folded = many.min(seconds(read, FOLDED_FEW));
    folded + seconds(bytes, rate) < seconds(whole, rate)
}

impl OfModel {
    /// Deltas that were made from two versions, not folded from others.
    fn steps(&self) -> impl DoubleEndedIterator<Item = &Arc<Delta>> {
        self.deltas.iter().filter(|delta| delta.parts.is_empty())
    }

    fn direct(&self, version: Version, base: Version) -> Option<Arc<Delta>> {
        let mut deltas = self.deltas.iter();
        let found = deltas.find(|delta| delta.version == version && delta.base == base);
        found.cloned()
    }

    /// Bytes of memory in use for all of them.
    fn held(&self) -> u64 {
        self.deltas.iter().map(|delta| delta.held()).sum()
    }

    /// The same, and for those that had to go and are still being sent.
    fn held_in_all(&mut self) -> u64 {
        let mut held = self.held();
        self.going.retain(|going| match going.upgrade() {
            Some(delta) => {
                held += delta.held();
                true
            }
            None => false,
        });
        held
    }

    /// Drops all. Those that are being sent still count.
    fn clear(&mut self) {
        let gone = self.deltas.drain(..).map(|delta| Arc::downgrade(&delta));
        self.going.extend(gone);
        self.going.retain(|delta| delta.strong_count() > 0);
    }

    fn trim(&mut self) {
        let mut held = self.held();
        while held > self.bound {
            // The newest step always stays. Alone it is within the bound: `most` keeps no delta of
            // a span that is larger than half of the span.
            let newest = self.deltas.iter().rposition(|delta| delta.parts.is_empty());
            let oldest = (0..self.deltas.len()).find(|at| Some(*at) != newest);
            let Some(gone) = oldest.and_then(|oldest| self.deltas.remove(oldest)) else {
                return;
            };
            held = held.saturating_sub(gone.held());
            // Deltas folded from it would keep it in memory.
            let going = &mut self.going;
            self.deltas.retain(|delta| {
                let made_from = delta.parts.iter().any(|part| Arc::ptr_eq(part, &gone));
                if made_from {
                    held = held.saturating_sub(delta.held());
                    going.push(Arc::downgrade(delta));
                }
                !made_from
            });
            going.push(Arc::downgrade(&gone));
            drop(gone);
            self.going.retain(|delta| delta.strong_count() > 0);
        }
    }
}
