//! A worker's own copies of what lies in slots, in memory that is used again.

use crate::snapshot::Snapshot;

/// The last copies of one model's versions. Memory is fresh once: what costs
/// several times the copy is that the system has to find and clear new pages.
#[derive(Debug, Default)]
pub(super) struct KeptCopies {
    /// The last one made at the end.
    kept: Vec<Snapshot>,
}

impl KeptCopies {
    /// One for the worker to read, one for the version that comes meanwhile.
    const KEPT: usize = 2;

    /// A copy of what lies in a slot: the one there is already, else one in the
    /// memory of a copy that nobody holds any more, else a new one.
    pub(super) fn of(&mut self, lent: &Snapshot) -> Snapshot {
        let known = self.kept.iter().position(|copy| copy.is_same(lent));
        let free = || self.kept.iter().position(Snapshot::is_alone);
        let copy = match known.or_else(free) {
            Some(place) => {
                let old = self.kept.remove(place);
                match known {
                    Some(_) => old.with_digest_of(lent),
                    None => old.replaced_by(lent),
                }
            }
            None => lent.to_owned_copy(),
        };
        if self.kept.len() == Self::KEPT {
            self.kept.remove(0);
        }
        self.kept.push(copy.clone());
        copy
    }
}
