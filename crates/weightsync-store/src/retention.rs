//! Which versions a store keeps.

use std::collections::BTreeSet;
use std::fmt;
use std::num::NonZero;
use std::str::FromStr;

use crate::error::{Result, StoreError};
use crate::format::VersionKey;

/// Which versions a store keeps, in addition to the newest one and to those that have a name or are
/// being read.
///
/// ```
/// use weightsync_store::Keep;
///
/// assert_eq!("all".parse::<Keep>()?, Keep::All);
/// assert_eq!("8".parse::<Keep>()?.to_string(), "8");
/// // The newest 8, and of the older ones every 100th.
/// assert_eq!("8+every:100".parse::<Keep>()?.to_string(), "8+every:100");
/// # Ok::<(), weightsync_store::StoreError>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Keep {
    /// All of them.
    #[default]
    All,
    /// The newest ones.
    Newest {
        /// How many.
        count: NonZero<u64>,
        /// Of the older ones, those whose number in the store is a multiple of this.
        every: Option<NonZero<u64>>,
    },
}

impl Keep {
    /// The same, and at least so many versions before the newest.
    pub(crate) fn at_least(self, history: u8) -> Self {
        match self {
            Self::All => Self::All,
            Self::Newest { count, every } => {
                let least = NonZero::<u64>::MIN.saturating_add(history.into());
                let count = count.max(least);
                Self::Newest { count, every }
            }
        }
    }

    /// The versions that are to be removed, of those that are published, oldest first.
    pub(crate) fn dropped(
        self,
        published: &[VersionKey],
        used: &BTreeSet<VersionKey>,
    ) -> Vec<VersionKey> {
        let Self::Newest { count, every } = self else {
            return Vec::new();
        };
        let count = usize::try_from(count.get()).unwrap_or(usize::MAX);
        // They are in order, so the newest are at the end.
        let old = &published[..published.len().saturating_sub(count)];
        // A version that somebody reads or has named stays, whatever its age.
        let kept = |place: &VersionKey| {
            every.is_some_and(|every| place.sequence.is_multiple_of(every.get()))
                || used.contains(place)
        };
        old.iter().copied().filter(|place| !kept(place)).collect()
    }
}

impl FromStr for Keep {
    type Err = StoreError;

    fn from_str(text: &str) -> Result<Self> {
        let parse = || {
            if text == "all" {
                return Some(Self::All);
            }
            let (count, every) = match text.split_once("+every:") {
                Some((count, every)) => (count, Some(every.parse().ok()?)),
                None => (text, None),
            };
            let count = count.parse().ok()?;
            Some(Self::Newest { count, every })
        };
        parse().ok_or_else(|| StoreError::Keep { text: text.into() })
    }
}

impl fmt::Display for Keep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("all"),
            Self::Newest { count, every: None } => write!(f, "{count}"),
            Self::Newest {
                count,
                every: Some(every),
            } => write!(f, "{count}+every:{every}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use weightsync_core::Epoch;

    use super::*;

    fn places(sequences: impl IntoIterator<Item = u64>) -> Vec<VersionKey> {
        let place = |sequence| VersionKey {
            epoch: Epoch(1),
            sequence,
        };
        sequences.into_iter().map(place).collect()
    }

    #[test]
    fn keep_drops_what_nothing_holds() {
        let published = places(1..=10);
        let used = places([2]).into_iter().collect();
        let dropped = |keep: &str| keep.parse::<Keep>().unwrap().dropped(&published, &used);
        assert_eq!(dropped("all"), []);
        assert_eq!(dropped("3"), places([1, 3, 4, 5, 6, 7]));
        assert_eq!(dropped("3+every:4"), places([1, 3, 5, 6, 7]));
        assert_eq!(dropped("10"), []);
        assert_eq!(dropped("1000"), []);
        assert_eq!(dropped("1"), places([1, 3, 4, 5, 6, 7, 8, 9]));
    }

    #[test]
    fn keep_refuses_what_keeps_nothing() {
        for bad in [
            "",
            "0",
            "-1",
            "every:3",
            "3+every:0",
            "3+every:",
            "some",
            "3 ",
        ] {
            let error = bad.parse::<Keep>().unwrap_err();
            assert!(error.to_string().contains("keep=8"), "{error}");
        }
    }
}
