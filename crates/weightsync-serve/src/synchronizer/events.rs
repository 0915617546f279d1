//! Everything that happens, for people and programs.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;
use tokio::sync::{broadcast, watch};
use weightsync_engine::Version;
use weightsync_mem::threads::LockExt as _;

use super::wire::{Ended, Role};

/// How many events a late reader gets, and how many a slow one may be behind.
const KEPT: usize = 512;

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct EventRecord {
    /// Counts up from 1.
    pub(super) number: u64,
    /// When, in milliseconds since 1970.
    pub(super) at_ms: u64,
    #[serde(flatten)]
    pub(super) what: EventKind,
    pub(super) role: Role,
    pub(super) name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) version: Option<Version>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) step: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) style: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) reason: Option<String>,
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "event", content = "ended")]
pub(super) enum EventKind {
    /// A party has joined.
    Joined,
    /// It stopped in order.
    Stopped,
    /// It died, or failed.
    Died,
    /// An explorer asks for a version.
    Asked,
    /// A version can be had.
    Published,
    /// An explorer's sync has ended.
    Ended(Ended),
    /// A version could not be published.
    Failed,
    /// The store does not have a version: a newer one took its place, or it could not be saved.
    NotSaved,
}

impl fmt::Display for EventRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?} {}", self.role, self.name, self.what.in_words())?;
        if let Some(version) = self.version {
            write!(f, " {version}")?;
        }
        match &self.reason {
            Some(reason) => write!(f, ": {reason}"),
            None => Ok(()),
        }
    }
}

impl EventKind {
    fn in_words(self) -> &'static str {
        match self {
            Self::Joined => "has joined",
            Self::Stopped => "has stopped",
            Self::Died => "died, or failed",
            Self::Asked => "asks for a version",
            Self::Published => "has published",
            Self::Failed => "could not publish",
            Self::NotSaved => "published what the store does not have:",
            Self::Ended(ended) => match ended {
                Ended::Synced => "has loaded",
                Ended::NothingNewer => "has the newest, and the trainer has stopped",
                Ended::OutOfReach => "cannot have the newest, as the trainer has stopped",
                Ended::Failed => "did not get a version",
                Ended::Cancelled => "waits no longer",
                Ended::TimedOut => "has waited in vain",
                Ended::Left => "left during its sync",
                Ended::TrainerLeft => "lost its trainer during its sync",
            },
        }
    }
}

/// The events of a service.
#[derive(Clone, Debug)]
pub(super) struct Events(Arc<EventLog>);

#[derive(Debug)]
struct EventLog {
    last: Mutex<(u64, VecDeque<Arc<EventRecord>>)>,
    live: broadcast::Sender<Arc<EventRecord>>,
    /// Counts changes of the status, which are more than the events: a step is none.
    changes: watch::Sender<u64>,
}

impl Default for Events {
    fn default() -> Self {
        let (live, _) = broadcast::channel(KEPT);
        Self(Arc::new(EventLog {
            last: Mutex::default(),
            live,
            changes: watch::Sender::new(0),
        }))
    }
}

impl Events {
    pub(super) fn note(
        &self,
        what: EventKind,
        role: Role,
        name: &str,
        more: impl FnOnce(&mut EventRecord),
    ) {
        let mut record = EventRecord {
            number: 0,
            at_ms: since_1970(),
            what,
            role,
            name: name.to_owned(),
            version: None,
            step: None,
            style: None,
            reason: None,
        };
        more(&mut record);
        // Before the lock: writing a log line may block.
        tracing::info!("{record}");
        let mut last = self.last();
        let (number, kept) = &mut *last;
        *number += 1;
        record.number = *number;
        let record = Arc::new(record);
        kept.push_back(record.clone());
        if kept.len() > KEPT {
            kept.pop_front();
        }
        // Under the lock, so that a new reader misses none and has none twice. Nobody may read.
        let _ = self.0.live.send(record);
    }

    /// Notes that the status may have changed.
    pub(super) fn changed(&self) {
        // A count, so a reader that was slow sees one change for many.
        self.0.changes.send_modify(|count| *count += 1);
    }

    /// Sees each change of the status from now on.
    pub(super) fn changes(&self) -> watch::Receiver<u64> {
        self.0.changes.subscribe()
    }

    /// The events after a number that are still kept, and those to come. A number that no event has yet is
    /// that of an earlier service: all are new then.
    pub(super) fn after(
        &self,
        number: u64,
    ) -> (Vec<Arc<EventRecord>>, broadcast::Receiver<Arc<EventRecord>>) {
        let last = self.last();
        let number = if number > last.0 { 0 } else { number };
        let kept = last.1.iter().filter(|record| record.number > number);
        // Subscribed under the lock: an event is either among the kept ones or comes to the
        // subscriber.
        (kept.cloned().collect(), self.0.live.subscribe())
    }

    fn last(&self) -> MutexGuard<'_, (u64, VecDeque<Arc<EventRecord>>)> {
        self.0.last.locked()
    }
}

/// The wall clock, in milliseconds. It decides nothing.
pub(super) fn since_1970() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    // A clock before 1970 is shown as 0.
    now.map_or(0, |now| now.as_millis() as u64)
}
