//! Compares the bytes that every host holds with the published ones, for `weightsync scrub`.
//!
//! A version that arrives as a delta is made from the version before it. The deltas' own
//! checksums detect damage on the way. Damage in memory, before or after, would continue from
//! one version to the next. So the sender makes the digest of every 64th version when it
//! publishes it. An agent that comes to hold that version makes the digest of its own bytes,
//! and the sender compares the two. [`Scrub::ask`] does the same at once for all versions that
//! are held anywhere. For the other versions no digest was noted, so they are compared with the
//! sender's copy.
//!
//! If the two digests differ, the host's versions of that model are neither passed on nor used
//! as a base: the next version comes whole. The workers there run the damaged version until
//! then.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use weightsync_engine::Result;
use weightsync_link::hello::LinkRole;
use weightsync_link::tls::Tls;

use crate::status::{MAX_LISTED, ask_as};

/// The most workers named in one entry.
const MAX_WORKERS: usize = 32;

/// The result of a scrub.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Scrub {
    /// The sender's run.
    pub run: String,
    /// The names of the sender's models, in the order of the set.
    pub models: Vec<String>,
    /// How many copies match the published versions.
    pub same: usize,
    /// The copies that differ or could not be compared; at most about 500.
    pub others: Vec<ScrubCheck>,
    /// How many more there are.
    #[serde(default)]
    pub left_out: usize,
}

/// A version that one host holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScrubCheck {
    /// The number of the relay, or of the worker without one; 0 is the sender.
    pub agent: u64,
    /// The host's name.
    pub name: String,
    /// The address it is connected from.
    pub address: String,
    /// The process.
    pub pid: u32,
    /// The model's index.
    pub model: u8,
    /// The version.
    pub version: u64,
    /// Workers that read this copy; at most 32.
    pub workers: Vec<u32>,
    /// The result.
    pub verdict: Verdict,
}

/// Why a copy does not count as matching.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Verdict {
    /// The copy differs from the published version.
    Differs {
        /// The published digest, as hexadecimal digits.
        expected: String,
        /// The digest of the copy.
        got: String,
    },
    /// A newer version replaced this one before it was compared.
    Replaced,
    /// The host left before it answered.
    Gone,
}

impl Scrub {
    /// Compares every version that agents hold with what the sender at `address` (`host:port`) has
    /// published. See [`status::ask`](crate::status::ask) for `secret`. The sender reports
    /// every second that it is working, so `timeout` bounds only its silence;
    /// with `None` the wait ends when the connection does.
    ///
    /// # Errors
    ///
    /// [`NetError`](crate::NetError), as an
    /// [`Error::Transport`](weightsync_engine::Error::Transport).
    pub fn ask(
        address: &str,
        secret: &[u8; 16],
        tls: Option<&Tls>,
        timeout: Option<Duration>,
    ) -> Result<Self> {
        ask_as(LinkRole::Scrub, address, secret, tls, timeout)
    }

    /// The copies that differ from the published versions.
    pub fn differing(&self) -> impl Iterator<Item = &ScrubCheck> {
        let differs = |check: &&ScrubCheck| matches!(check.verdict, Verdict::Differs { .. });
        self.others.iter().filter(differs)
    }

    /// Shortens the list to what fits in an answer; copies that differ come first.
    pub(crate) fn shortened(mut self) -> Self {
        let differs = |check: &ScrubCheck| matches!(check.verdict, Verdict::Differs { .. });
        self.others.sort_by_key(|check| !differs(check));
        self.left_out = self.others.len().saturating_sub(MAX_LISTED);
        self.others.truncate(MAX_LISTED);
        for check in &mut self.others {
            check.workers.truncate(MAX_WORKERS);
        }
        self
    }
}
