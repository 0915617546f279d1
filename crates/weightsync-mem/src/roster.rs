//! What the sender knows of its readers: who they are, what they hold, and what
//! is to be told of them.

use std::collections::BTreeMap;
use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use weightsync_core::{Layout, LayoutId, Run, Version, WorkerId};

use crate::error::{Error, Holder};
use crate::map::{Mapping, OwnedFile};
use crate::pins::PinBook;
use crate::protocol::{MAX_SLOTS, SlotSet};
use crate::service::is_gone;
use crate::shared::{Control, HEADER_BYTES, Header};
use crate::socket::Socket;
use crate::wait::Doorbell;
use crate::wire::FromSender;
use crate::writer::{Outcome, ReaderOutcome, ReaderStatus, own_pins};

/// The most readers of one segment. Each costs the sender two descriptors.
pub(crate) const MAX_READERS: usize = 4096;

/// What the sender and its service thread share.
pub(crate) struct Shared {
    pub(crate) run: Run,
    pub(crate) header: OwnedFile,
    pub(crate) doorbell: Arc<Doorbell>,
    pub(crate) own: Arc<PinBook>,
    pub(crate) layout: LayoutId,
    pub(crate) layout_file: OwnedFile,
    pub(crate) layout_bytes: usize,
    pub(crate) slot_bytes: usize,
    pub(crate) secret: [u8; 16],
    pub(crate) stop: Doorbell,
    pub(crate) state: Mutex<State>,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The secret stays out of logs.
        f.debug_struct("Shared")
            .field("run", &self.run)
            .field("layout", &self.layout)
            .field("readers", &self.readers())
            .finish_non_exhaustive()
    }
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) readers: BTreeMap<Key, Reader>,
    /// How many readers have joined so far.
    pub(crate) joined: u64,
    /// Readers that went since the last report.
    pub(crate) gone: Vec<Gone>,
    pub(crate) rejected: Vec<Rejected>,
    pub(crate) slots: Vec<OwnedFd>,
    pub(crate) versions: [Version; MAX_SLOTS],
}

/// Which reader: the worker, and the how-manieth to join. A worker that closed
/// its end but still holds snapshots stays in the table beside its successor,
/// because its pins count until its last snapshot goes.
pub(crate) type Key = (WorkerId, u64);

#[derive(Debug)]
pub(crate) struct Reader {
    pub(crate) socket: Arc<Socket>,
    pub(crate) control: Mapping,
    pub(crate) refused: Option<(Version, String)>,
    /// Its going, or that it cannot use the model at all, has been told: there
    /// is no second line about it.
    pub(crate) told: bool,
    /// It broke the protocol and is not listened to any more.
    pub(crate) deaf: bool,
}

#[derive(Debug)]
pub(crate) struct Gone {
    pub(crate) key: Key,
    pub(crate) pid: u32,
    pub(crate) applied: Version,
    pub(crate) outcome: Outcome,
}

/// A reader that cannot use the model, whatever the version.
#[derive(Debug)]
pub(crate) struct Rejected {
    pub(crate) worker: WorkerId,
    pub(crate) pid: u32,
    pub(crate) reason: String,
}

impl Reader {
    pub(crate) fn control(&self) -> &Control {
        self.control.table()
    }

    pub(crate) fn applied(&self) -> Version {
        Version(self.control().applied.0.load(Ordering::Acquire))
    }

    pub(crate) fn has_left(&self) -> bool {
        self.control().left.0.load(Ordering::Acquire) != 0
    }

    /// What became of `version` here, if that is known yet.
    pub(crate) fn outcome(&self, version: Version) -> Option<Outcome> {
        if self.applied() >= version {
            return Some(Outcome::Applied);
        }
        if self.has_left() {
            return Some(Outcome::Left);
        }
        let (refused, reason) = self.refused.as_ref()?;
        (*refused >= version).then(|| Outcome::Refused {
            reason: reason.clone(),
        })
    }
}

impl Shared {
    pub(crate) fn new(
        run: Run,
        layout: &Layout,
        secret: [u8; 16],
        slots: &[OwnedFile],
        doorbell: Arc<Doorbell>,
    ) -> Result<Arc<Self>, Error> {
        let header = OwnedFile::new("weightsync-header", HEADER_BYTES)?;
        let encoded = layout.encode();
        let layout_file = OwnedFile::new("weightsync-layout", encoded.len().max(1))?;
        layout_file.fill(&encoded);
        let state = State {
            readers: BTreeMap::new(),
            joined: 0,
            gone: Vec::new(),
            rejected: Vec::new(),
            slots: slots.iter().map(share).collect::<Result<_, _>>()?,
            versions: [Version::NONE; MAX_SLOTS],
        };
        Ok(Arc::new(Self {
            run,
            own: own_pins(&header, &doorbell),
            header,
            doorbell,
            layout: layout.id(),
            layout_file,
            layout_bytes: encoded.len(),
            slot_bytes: slots.first().map_or(0, |slot| slot.map.len()),
            secret,
            stop: Doorbell::new()?,
            state: Mutex::new(state),
        }))
    }

    pub(crate) fn header(&self) -> &Header {
        self.header.map.table()
    }

    /// Every slot that some reader pins.
    pub(crate) fn held(&self) -> SlotSet {
        let state = self.state();
        let words = state
            .readers
            .values()
            .map(|reader| reader.control().pins.0.held());
        words.fold(SlotSet::default(), SlotSet::union)
    }

    /// The readers that pin slots, with the versions in them.
    pub(crate) fn holders(&self) -> Vec<Holder> {
        let state = self.state();
        let holders = state.readers.iter().filter_map(|((worker, _), reader)| {
            let versions = state.versions_in(reader.control().pins.0.held());
            (!versions.is_empty()).then(|| Holder {
                worker: Some(*worker),
                pid: reader.socket.peer_pid(),
                versions,
            })
        });
        holders.collect()
    }

    /// The versions in a set of slots, oldest first.
    pub(crate) fn versions(&self, held: SlotSet) -> Vec<Version> {
        self.state().versions_in(held)
    }

    pub(crate) fn note_slot(&self, slot: u8, version: Version) {
        self.state().versions[usize::from(slot)] = version;
    }

    /// Hands a new slot to every reader, before it can become live.
    pub(crate) fn add_slot(&self, index: u8, file: &OwnedFile) -> Result<(), Error> {
        let mut state = self.state();
        // First of all for readers to come, so that nothing is half done.
        state.slots.push(share(file)?);
        let packet = FromSender::Slot { index }.encode();
        let handed = |reader: &Reader| reader.socket.send(&packet, &[file.fd.as_fd()]);
        let mut without = Vec::new();
        for (key, reader) in &state.readers {
            // One that is gone is buried when its hang-up is heard. One whose
            // socket is full can only be broken: at most 64 slots wait there.
            match handed(reader) {
                Ok(true) => {}
                Ok(false) if is_gone(&reader.socket) => {}
                Ok(false) => without.push((*key, "its socket is full".to_owned())),
                Err(error) => without.push((*key, error.to_string())),
            }
        }
        for (key, why) in without {
            state.reject(key, format!("it could not be handed slot {index}: {why}"));
        }
        Ok(())
    }

    /// Wakes the readers that sleep, all with one call. To be made after the
    /// live word was swapped.
    pub(crate) fn wake_sleepers(&self) {
        let state = self.state();
        if state
            .readers
            .values()
            .any(|reader| reader.control().sleep.0.sleeping())
        {
            self.header().live.0.futex_wake();
        }
    }

    pub(crate) fn readers(&self) -> Vec<ReaderStatus> {
        // In a forked child the control pages are not mapped, and the lock may
        // be held by a thread that does not exist there.
        if self.header.map.usable().is_err() {
            return Vec::new();
        }
        let state = self.state();
        let present = state
            .readers
            .iter()
            .filter(|(_, reader)| !reader.has_left());
        let lines = present.map(|((worker, _), reader)| ReaderStatus {
            worker: *worker,
            pid: reader.socket.peer_pid(),
            applied: reader.applied(),
        });
        lines.collect()
    }

    /// The readers a send waits for.
    pub(crate) fn present(&self) -> Vec<Key> {
        let state = self.state();
        let present = state
            .readers
            .iter()
            .filter(|(_, reader)| !reader.has_left());
        present.map(|(key, _)| *key).collect()
    }

    /// Takes the readers whose outcome is known out of `pending`, and those
    /// that have gone.
    pub(crate) fn settle(
        &self,
        version: Version,
        pending: &mut Vec<Key>,
        after: Duration,
    ) -> Vec<ReaderOutcome> {
        let mut state = self.state();
        let gone = std::mem::take(&mut state.gone);
        // Allocates only once there is a line: this is looked at in a loop.
        let mut lines = Vec::new();
        for Rejected {
            worker,
            pid,
            reason,
        } in std::mem::take(&mut state.rejected)
        {
            let (outcome, applied) = (Outcome::Refused { reason }, Version::NONE);
            lines.push(ReaderOutcome {
                worker,
                pid,
                outcome,
                applied,
                after,
            });
        }
        for one in gone {
            pending.retain(|key| *key != one.key);
            let outcome = match one.outcome {
                // It did its part before it went.
                Outcome::Left if one.applied >= version => Outcome::Applied,
                outcome => outcome,
            };
            lines.push(ReaderOutcome {
                worker: one.key.0,
                pid: one.pid,
                outcome,
                applied: one.applied,
                after,
            });
        }
        pending.retain(|key| {
            // Whoever is removed from the table is put among the gone in the
            // same step, so a pending reader is in one of the two.
            let Some(reader) = state.readers.get_mut(key) else {
                return false;
            };
            if reader.told {
                return false;
            }
            let Some(outcome) = reader.outcome(version) else {
                return true;
            };
            reader.told = outcome == Outcome::Left;
            let (pid, applied) = (reader.socket.peer_pid(), reader.applied());
            lines.push(ReaderOutcome {
                worker: key.0,
                pid,
                outcome,
                applied,
                after,
            });
            false
        });
        lines
    }

    /// The lines of readers that have not answered in time.
    pub(crate) fn late(&self, pending: &[Key], after: Duration) -> Vec<ReaderOutcome> {
        let state = self.state();
        let lines = pending.iter().filter_map(|key| {
            let reader = state.readers.get(key)?;
            let (pid, applied) = (reader.socket.peer_pid(), reader.applied());
            Some(ReaderOutcome {
                worker: key.0,
                pid,
                outcome: Outcome::Late,
                applied,
                after,
            })
        });
        lines.collect()
    }

    pub(crate) fn take_rejected(&self) -> Vec<(WorkerId, String)> {
        let rejected = std::mem::take(&mut self.state().rejected);
        rejected
            .into_iter()
            .map(|one| (one.worker, one.reason))
            .collect()
    }

    pub(crate) fn rejected(&self) -> Vec<WorkerId> {
        self.state().rejected.iter().map(|one| one.worker).collect()
    }

    /// Tells everybody that this sender closes, and ends the service thread.
    ///
    /// The connections are shut down rather than left to be closed: a forked
    /// child of this process may keep its copies of them open.
    pub(crate) fn close(&self) {
        self.header().closed.0.store(1, Ordering::Release);
        for reader in self.state().readers.values() {
            reader.socket.shut_down();
        }
        self.stop.ring();
    }

    /// The connections to watch; of deaf ones only the end.
    pub(crate) fn watched(&self) -> Vec<(Key, Arc<Socket>, bool)> {
        let state = self.state();
        let readers = state.readers.iter();
        readers
            .map(|(key, reader)| (*key, reader.socket.clone(), reader.deaf))
            .collect()
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        // Every change of the state is complete before anything can panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    pub(crate) fn versions_in(&self, held: SlotSet) -> Vec<Version> {
        let slots = (0..MAX_SLOTS as u8).filter(|&slot| held.contains(slot));
        let versions = slots.map(|slot| self.versions[usize::from(slot)]);
        let mut versions: Vec<_> = versions.filter(|version| !version.is_none()).collect();
        versions.sort();
        versions
    }
}

/// A second descriptor of a slot, for readers that join.
fn share(file: &OwnedFile) -> Result<OwnedFd, Error> {
    let copy = file.fd.try_clone();
    copy.map_err(|source| Error::Os {
        action: "duplicating a slot's descriptor",
        source,
    })
}

impl State {
    /// Notes that a reader cannot use the model, once.
    pub(crate) fn reject(&mut self, key: Key, reason: String) {
        let Some(reader) = self.readers.get_mut(&key) else {
            return;
        };
        if !std::mem::replace(&mut reader.told, true) {
            let (worker, pid) = (key.0, reader.socket.peer_pid());
            keep(
                &mut self.rejected,
                Rejected {
                    worker,
                    pid,
                    reason,
                },
            );
        }
    }

    /// Removes a reader, and with it its pins. Called only once its process is
    /// dead (`died`), or once it has closed its end with every snapshot gone.
    pub(crate) fn bury(&mut self, key: Key, died: bool) {
        let Some(reader) = self.readers.remove(&key) else {
            return;
        };
        let (pid, applied) = (reader.socket.peer_pid(), reader.applied());
        // One that hung up before it had anything did not get as far as joining.
        let never_joined = !died && applied.is_none();
        if reader.told || never_joined {
            return;
        }
        let outcome = if reader.has_left() {
            Outcome::Left
        } else {
            Outcome::Died
        };
        keep(
            &mut self.gone,
            Gone {
                key,
                pid,
                applied,
                outcome,
            },
        );
    }
}

/// Keeps a line for the next report. A sender that never asks for one forgets
/// the oldest.
fn keep<T>(lines: &mut Vec<T>, line: T) {
    if lines.len() >= MAX_READERS {
        lines.remove(0);
    }
    lines.push(line);
}
