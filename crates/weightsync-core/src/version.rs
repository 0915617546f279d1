//! Versions, and the runs within which they grow.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::hex;

/// Which state of a model's weights: a number that only grows within one [`Run`].
///
/// Its serde form is also its form in messages of weightsync-net: golden files hold the bytes.
///
/// ```
/// use weightsync_core::Version;
///
/// let first = Version::NONE.next();
/// assert_eq!(first, Version::FIRST);
/// assert!(first.next() > first);
/// assert_eq!(first.to_string(), "v1");
/// ```
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Version(pub u64);

impl Version {
    /// Nothing has been published yet.
    pub const NONE: Version = Version(0);
    /// The first version that a run publishes.
    pub const FIRST: Version = Version(1);

    /// The version after this one.
    ///
    /// Stays at the largest number, which no run reaches by counting; a peer that claims it can
    /// therefore not make the number wrap and look old.
    #[must_use]
    pub const fn next(self) -> Version {
        Version(self.0.saturating_add(1))
    }

    /// Whether this stands for "nothing published yet".
    pub const fn is_none(self) -> bool {
        self.0 == Self::NONE.0
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "v{}", self.0)
    }
}

/// How many times a model's sender has been started again; the higher epoch wins.
///
/// Its serde form is also its form in messages of weightsync-net: golden files hold the bytes.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Epoch(pub u64);

impl Epoch {
    /// The epoch after this one; `None` after the largest number. Two senders of one epoch could not
    /// be told apart.
    pub fn next(self) -> Option<Epoch> {
        self.0.checked_add(1).map(Epoch)
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "epoch {}", self.0)
    }
}

/// One life of a sender: an epoch and a random id.
///
/// Versions are compared only within a run. A run with a higher epoch fences off every run with a
/// lower one: receivers that have seen it refuse the lower one from then on.
///
/// Its serde form is also its form in messages of weightsync-net: golden files hold the bytes.
///
/// ```
/// use weightsync_core::{Epoch, Run};
///
/// let before = Run { epoch: Epoch(1), id: [7; 16] };
/// let after = Run { epoch: Epoch(2), id: [9; 16] };
/// assert!(after.fences(&before));
/// assert!(!before.fences(&after));
/// assert!(!after.fences(&after));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Run {
    /// The higher epoch wins.
    pub epoch: Epoch,
    /// Random; tells apart two senders that were given the same epoch by mistake.
    #[serde(with = "hex")]
    pub id: [u8; 16],
}

impl Run {
    /// Whether this run fences off the other run: its epoch is higher.
    pub fn fences(&self, other: &Run) -> bool {
        // The id plays no part: of two runs of one epoch neither is newer.
        self.epoch > other.epoch
    }

    /// Whether the two claim the same epoch without being the same run.
    ///
    /// Neither fences the other; a receiver keeps the one it knew first and refuses the other.
    pub fn conflicts_with(&self, other: &Run) -> bool {
        self.epoch == other.epoch && self.id != other.id
    }
}

impl fmt::Display for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Eight digits tell runs apart in a log; the serialised form has them all.
        write!(f, "run {}-{}", self.epoch.0, hex::encode(&self.id[..4]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_never_wrap() {
        assert!(Version::NONE.is_none());
        assert_eq!(Version(u64::MAX).next(), Version(u64::MAX));
        assert_eq!(Epoch(u64::MAX).next(), None);
    }

    #[test]
    fn fencing_is_by_epoch_alone() {
        let a = Run {
            epoch: Epoch(3),
            id: [1; 16],
        };
        let b = Run {
            epoch: Epoch(3),
            id: [2; 16],
        };
        let c = Run {
            epoch: Epoch(4),
            id: [0; 16],
        };
        assert!(!a.fences(&b) && !b.fences(&a) && a.conflicts_with(&b));
        assert!(c.fences(&a) && !a.fences(&c) && !c.conflicts_with(&a));
        assert!(!a.conflicts_with(&a));
    }

    #[test]
    fn runs_are_readable_in_json_and_compact_elsewhere() {
        let run = Run {
            epoch: Epoch(3),
            id: [0xab; 16],
        };
        let json = serde_json::to_string(&run).unwrap();
        assert_eq!(
            json,
            format!("{{\"epoch\":3,\"id\":\"{}\"}}", "ab".repeat(16))
        );
        assert_eq!(serde_json::from_str::<Run>(&json).unwrap(), run);
        let binary = postcard::to_stdvec(&run).unwrap();
        assert_eq!(binary.len(), 17);
        assert_eq!(postcard::from_bytes::<Run>(&binary).unwrap(), run);
        assert_eq!(run.to_string(), "run 3-abababab");
    }
}
