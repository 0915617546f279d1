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

use crate::status::{MAX_LISTED, ask};
use crate::wire::hello::Role;

/// The most workers that are named for each.
const MAX_WORKERS: usize = 32;

/// What was compared, and what differs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Scrub {
    /// The sender's run.
    pub run: String,
    /// The names of its models, in the order of the set.
    pub models: Vec<String>,
    /// How many versions are what was published, those of each host counted.
    pub same: usize,
    /// Those that are not, and those of which it could not be found out; of more than 500 some.
    pub others: Vec<Check>,
    /// How many there are that are not listed.
    #[serde(default)]
    pub left_out: usize,
}

/// A version that one host holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Check {
    /// Its relay, or the worker that has none, by its number; 0 is the sender.
    pub agent: u64,
    /// The host's name.
    pub name: String,
    /// From where it is connected.
    pub address: String,
    /// Its process.
    pub pid: u32,
    /// The model's index.
    pub model: u8,
    /// The version.
    pub version: u64,
    /// The workers that read it there; of more than 32 some.
    pub workers: Vec<u32>,
    /// What it came to.
    pub verdict: Verdict,
}

/// What a comparison came to that did not find the same.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Verdict {
    /// It is not what was published.
    Differs {
        /// The digest of what was published, as hexadecimal digits.
        expected: String,
        /// The digest of what is there.
        got: String,
    },
    /// It was replaced by a newer one before it could be compared.
    Replaced,
    /// The host was gone before it answered.
    Gone,
}

impl Scrub {
    /// Has all that is held compared with what the sender at `address` (`host:port`) has
    /// published, for who has its secret; see [`Status::ask`](crate::status::Status::ask).
    /// The sender says that it is at it every second, so `patience` is for its silence.
    ///
    /// # Errors
    ///
    /// [`NetError`](crate::NetError), as an
    /// [`Error::Transport`](weightsync_engine::Error::Transport).
    pub fn ask(address: &str, secret: &[u8; 16], patience: Duration) -> Result<Self> {
        ask(address, secret, Role::Scrub, patience)
    }

    /// Those that are not what was published.
    pub fn differing(&self) -> impl Iterator<Item = &Check> {
        let differs = |check: &&Check| matches!(check.verdict, Verdict::Differs { .. });
        self.others.iter().filter(differs)
    }

    /// With no more in the list than an answer has room for: first those that differ.
    pub(crate) fn shortened(mut self) -> Self {
        let differs = |check: &Check| matches!(check.verdict, Verdict::Differs { .. });
        self.others.sort_by_key(|check| !differs(check));
        self.left_out = self.others.len().saturating_sub(MAX_LISTED);
        self.others.truncate(MAX_LISTED);
        for check in &mut self.others {
            check.workers.truncate(MAX_WORKERS);
        }
        self
    }
}
