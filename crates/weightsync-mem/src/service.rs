//! The sender's service thread: it accepts readers and notices their deaths,
//! so that a send never waits for either.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use weightsync_core::{Layout, LayoutId, Run, Version, WorkerId};

use crate::error::{Error, Holder};
use crate::map::{Mapping, OwnedFile};
use crate::pins::PinBook;
use crate::protocol::{MAX_SLOTS, SlotSet};
use crate::shared::{CONTROL_BYTES, Control, HEADER_BYTES, Header};
use crate::socket::{Packet, Socket};
use crate::wait::{Doorbell, poll, poll_slice};
use crate::wire::{FromReader, FromSender};
use crate::writer::{Outcome, ReaderOutcome, ReaderStatus, own_pins};

/// The most readers of one segment. Each costs the sender two descriptors.
const MAX_READERS: usize = 4096;
/// Connections that have not said who they are: how many, and for how long.
const MAX_STRANGERS: usize = 64;
const STRANGER_TIME: Duration = Duration::from_secs(2);

/// What the sender and its service thread share.
pub(crate) struct Shared {
    pub(crate) run: Run,
    pub(crate) header: OwnedFile,
    pub(crate) doorbell: Arc<Doorbell>,
    pub(crate) own: Arc<PinBook>,
    layout: LayoutId,
    layout_file: OwnedFile,
    layout_bytes: usize,
    slot_bytes: usize,
    secret: [u8; 16],
    stop: Doorbell,
    state: Mutex<State>,
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
struct State {
    readers: BTreeMap<Key, Reader>,
    /// How many readers have joined so far.
    joined: u64,
    /// Readers that went since the last report.
    gone: Vec<Gone>,
    rejected: Vec<Rejected>,
    slots: Vec<OwnedFd>,
    versions: [Version; MAX_SLOTS],
}

/// Which reader: the worker, and the how-manieth to join. A worker that closed
/// its end but still holds snapshots stays in the table beside its successor,
/// because its pins count until its last snapshot goes.
pub(crate) type Key = (WorkerId, u64);

#[derive(Debug)]
struct Reader {
    socket: Arc<Socket>,
    control: Mapping,
    refused: Option<(Version, String)>,
    /// Its going, or that it cannot use the model at all, has been told: there
    /// is no second line about it.
    told: bool,
}

#[derive(Debug)]
struct Gone {
    key: Key,
    pid: u32,
    applied: Version,
    outcome: Outcome,
}

/// A reader that cannot use the model, whatever the version.
#[derive(Debug)]
struct Rejected {
    worker: WorkerId,
    pid: u32,
    reason: String,
}

impl Reader {
    fn control(&self) -> &Control {
        self.control.table()
    }

    fn applied(&self) -> Version {
        Version(self.control().applied.0.load(Ordering::Acquire))
    }

    fn has_left(&self) -> bool {
        self.control().left.0.load(Ordering::Acquire) != 0
    }

    /// What became of `version` here, if that is known yet.
    fn outcome(&self, version: Version) -> Option<Outcome> {
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
        let packet = FromSender::Slot { index }.encode();
        for reader in state.readers.values() {
            // A reader that is gone is noticed by its hang-up; one whose socket
            // is full can only be broken (at most 64 slots ever
            // wait there), and asks for a slot it does not have.
            reader.socket.send(&packet, &[file.fd.as_fd()])?;
        }
        state.slots.push(share(file)?);
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
    pub(crate) fn close(&self) {
        self.header().closed.0.store(1, Ordering::Release);
        self.stop.ring();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Every change of the state is complete before anything can panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn versions_in(&self, held: SlotSet) -> Vec<Version> {
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

/// Starts the thread. It ends when [`Shared::close`] is called.
pub(crate) fn start(shared: Arc<Shared>, listener: OwnedFd) -> Result<JoinHandle<()>, Error> {
    let service = Service {
        shared,
        listener,
        strangers: Vec::new(),
    };
    std::thread::Builder::new()
        .name("weightsync-mem".into())
        .spawn(move || service.run())
        .map_err(|source| Error::Os {
            action: "starting the segment's service thread",
            source,
        })
}

struct Service {
    shared: Arc<Shared>,
    listener: OwnedFd,
    strangers: Vec<Stranger>,
}

/// A connection that has not said who it is.
struct Stranger {
    socket: Socket,
    until: Instant,
}

impl Service {
    fn run(mut self) {
        loop {
            match self.select() {
                Ok(false) => return,
                Ok(true) => {}
                // Out of descriptors or memory: what is connected goes on being
                // served; the pause keeps a lasting condition from spinning.
                Err(_) => {
                    let pause = Some(Instant::now() + Duration::from_millis(50));
                    if let Ok([true]) = poll([self.shared.stop.as_fd()], pause) {
                        return;
                    }
                }
            }
        }
    }

    /// Waits for the next events and handles them. False: the sender closes.
    fn select(&mut self) -> Result<bool, Error> {
        let readers: Vec<_> = {
            let state = self.shared.state();
            state
                .readers
                .iter()
                .map(|(key, reader)| (*key, reader.socket.clone()))
                .collect()
        };
        let mut watched: Vec<BorrowedFd<'_>> =
            vec![self.shared.stop.as_fd(), self.listener.as_fd()];
        watched.extend(
            self.strangers
                .iter()
                .map(|stranger| stranger.socket.as_fd()),
        );
        for (_, socket) in &readers {
            watched.push(socket.as_fd());
            watched.extend(socket.peer_death());
        }
        let mut polled: Vec<_> = watched
            .into_iter()
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
            .collect();
        let deadline = self.strangers.iter().map(|stranger| stranger.until).min();
        poll_slice(&mut polled, deadline)?;
        let mut ready = polled.iter().map(|fd| !fd.revents().is_empty());
        let mut next = || ready.next().unwrap_or(false);
        if next() {
            return Ok(false);
        }
        let knocked = next();
        let spoke: Vec<bool> = self.strangers.iter().map(|_| next()).collect();
        // Deaths before arrivals: a worker that was restarted finds its place
        // empty.
        for (key, socket) in &readers {
            let spoke = next();
            let died = socket.peer_death().is_some() && next();
            if spoke || died {
                self.shared.listen_to(*key, died);
            }
        }
        let now = Instant::now();
        let strangers = std::mem::take(&mut self.strangers);
        for (stranger, spoke) in strangers.into_iter().zip(spoke) {
            if spoke {
                self.shared.meet(stranger.socket);
            } else if stranger.until > now {
                self.strangers.push(stranger);
            }
        }
        if knocked {
            self.let_in(now)?;
        }
        Ok(true)
    }

    fn let_in(&mut self, now: Instant) -> Result<(), Error> {
        loop {
            match Socket::accept(&self.listener) {
                Ok(None) => return Ok(()),
                Ok(Some(socket)) => {
                    // The oldest makes room: silent connections must not keep
                    // honest ones out.
                    if self.strangers.len() == MAX_STRANGERS {
                        self.strangers.remove(0);
                    }
                    self.strangers.push(Stranger {
                        socket,
                        until: now + STRANGER_TIME,
                    });
                }
                // Another user's connection is dropped and costs nothing more.
                Err(error) if error.is_peer_fault() => {}
                Err(error) => return Err(error),
            }
        }
    }
}

impl Shared {
    /// Reads what a reader has said, or buries it.
    fn listen_to(&self, key: Key, died: bool) {
        let mut state = self.state();
        let Some(socket) = state.readers.get(&key).map(|reader| reader.socket.clone()) else {
            return;
        };
        // What a reader said before it died is heard too: why it refused, say.
        let mut over = died;
        loop {
            match socket.receive() {
                Ok(Packet::Empty) => break,
                Ok(Packet::Data(bytes, _)) => match FromReader::decode(&bytes) {
                    Ok(FromReader::Refused { version, reason }) => {
                        let Some(reader) = state.readers.get_mut(&key) else {
                            return;
                        };
                        if version.is_none() {
                            reader.told = true;
                            let (worker, pid) = (key.0, socket.peer_pid());
                            keep(
                                &mut state.rejected,
                                Rejected {
                                    worker,
                                    pid,
                                    reason,
                                },
                            );
                        } else {
                            reader.refused = Some((version, reason));
                        }
                    }
                    // One that breaks the protocol is cut off.
                    Ok(FromReader::Hello { .. }) | Err(_) => {
                        over = true;
                        break;
                    }
                },
                Ok(Packet::HungUp) => {
                    over = true;
                    break;
                }
                // Short of memory: the reader lives and its pins count.
                Err(_) => break,
            }
        }
        if over {
            state.bury(key);
        }
        drop(state);
        self.doorbell.ring();
    }

    /// Handles the first words of a connection.
    fn meet(&self, socket: Socket) {
        let Ok(Packet::Data(bytes, fds)) = socket.receive() else {
            return;
        };
        let hello = FromReader::decode(&bytes);
        let denied = match hello {
            Ok(FromReader::Hello {
                secret,
                worker,
                seen,
                layout,
            }) => {
                if !same_secret(&secret, &self.secret) {
                    // Nothing is told to one without the init info.
                    return;
                }
                match self.admit(worker, (seen, layout), fds) {
                    Ok(reader) => return self.welcome(worker, Arc::new(socket), reader),
                    Err(reason) => reason,
                }
            }
            Ok(FromReader::Refused { .. }) => "a hello was expected first".into(),
            Err(error) => error.to_string(),
        };
        let _ = socket.send(&FromSender::Denied { reason: denied }.encode(), &[]);
    }

    /// Decides whether a reader may join; its control page if so.
    fn admit(
        &self,
        worker: WorkerId,
        (seen, layout): (weightsync_core::Epoch, Option<LayoutId>),
        fds: Vec<OwnedFd>,
    ) -> Result<Mapping, String> {
        if seen > self.run.epoch {
            return Err(format!(
                "this run has epoch {}, but the worker has seen epoch {seen}: a newer trainer has taken over",
                self.run.epoch
            ));
        }
        if let Some(layout) = layout.filter(|layout| *layout != self.layout) {
            return Err(format!(
                "the worker insists on layout {layout}, this model has {}",
                self.layout
            ));
        }
        let mut state = self.state();
        let before: Vec<Key> = state
            .readers
            .range((worker, 0)..=(worker, u64::MAX))
            .map(|(key, _)| *key)
            .collect();
        for key in before {
            let Some(old) = state.readers.get(&key) else {
                continue;
            };
            if is_gone(&old.socket) {
                state.bury(key);
            } else if !old.has_left() {
                let pid = old.socket.peer_pid();
                return Err(format!(
                    "{worker} is already connected (pid {pid}); give this one another number"
                ));
            }
        }
        if state.readers.len() >= MAX_READERS {
            return Err(format!(
                "{MAX_READERS} workers are connected, which is the most"
            ));
        }
        drop(state);
        let [control] = <[OwnedFd; 1]>::try_from(fds)
            .map_err(|fds| format!("one control page was expected, {} came", fds.len()))?;
        Mapping::of_peer(control.as_fd(), CONTROL_BYTES).map_err(|error| error.to_string())
    }

    /// Lets a reader in: from here on its pins are looked at.
    fn welcome(&self, worker: WorkerId, socket: Arc<Socket>, control: Mapping) {
        let mut state = self.state();
        let packet = FromSender::Welcome {
            run: self.run,
            slots: state.slots.len() as u8,
            slot_bytes: self.slot_bytes as u64,
            layout_bytes: self.layout_bytes as u64,
        };
        let mut fds = vec![
            self.header.fd.as_fd(),
            self.layout_file.fd.as_fd(),
            self.doorbell.as_fd(),
        ];
        fds.extend(state.slots.iter().map(AsFd::as_fd));
        // Sent and entered under one lock: the reader may pin as soon as it has
        // the packet, and the scan for pins takes the same lock.
        if socket.send(&packet.encode(), &fds).is_ok_and(|sent| sent) {
            let reader = Reader {
                socket,
                control,
                refused: None,
                told: false,
            };
            state.joined += 1;
            let key = (worker, state.joined);
            state.readers.insert(key, reader);
        }
        drop(state);
        self.doorbell.ring();
    }
}

impl State {
    /// Removes a reader, and with it its pins. Called only once its process is
    /// dead, or once it has closed its end with every snapshot gone.
    fn bury(&mut self, key: Key) {
        let Some(reader) = self.readers.remove(&key) else {
            return;
        };
        if reader.told {
            return;
        }
        let outcome = if reader.has_left() {
            Outcome::Left
        } else {
            Outcome::Died
        };
        let (pid, applied) = (reader.socket.peer_pid(), reader.applied());
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

/// Whether the process or the end behind a socket is gone.
fn is_gone(socket: &Socket) -> bool {
    let now = Some(Instant::now());
    let dead = socket
        .peer_death()
        .is_some_and(|fd| matches!(poll([fd], now), Ok([true])));
    let mut end = [PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::empty())];
    let hung_up = poll_slice(&mut end, now).is_ok() && !end[0].revents().is_empty();
    dead || hung_up
}

/// Compares without telling by its time where the first difference is.
fn same_secret(a: &[u8; 16], b: &[u8; 16]) -> bool {
    a.iter().zip(b).fold(0, |seen, (a, b)| seen | (a ^ b)) == 0
}
