//! Fetched versions, until the thread that receives takes them.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use tokio::sync::{mpsc, watch};
use weightsync_engine::transport::{Deadline, Image};
use weightsync_engine::{Error, Member, Result, SetSnapshot, Snapshot, Version};
use weightsync_mem::passed;
use weightsync_mem::threads::LockExt as _;

use super::fetch::Partial;
use super::joining::JoinedSender;
use crate::rpc::wait_on;
use crate::rpc::wire::{Applied, Digits, Notified};

/// How the sender has ended for this worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum SenderEnd {
    /// The sender has shut down.
    Closed,
    /// The sender is gone.
    Died { pid: u32 },
    /// The sender is there and refuses this worker: another worker has its number.
    Denied { reason: String },
}

impl From<SenderEnd> for Error {
    fn from(end: SenderEnd) -> Self {
        match end {
            SenderEnd::Closed => Self::SenderClosed,
            SenderEnd::Died { pid } => Self::SenderDied { pid: Some(pid) },
            SenderEnd::Denied { reason } => Error::Denied { reason },
        }
    }
}

/// A whole set that was fetched and checked: the snapshots by the models' places at
/// the sender, in the order that the worker named them.
#[derive(Clone, Debug)]
pub(super) struct FetchedSet {
    pub(super) sequence: u64,
    pub(super) members: Vec<(usize, Snapshot)>,
}

/// The state that the serving thread and the worker's own thread share.
#[derive(Debug)]
pub(super) struct Inbox {
    state: Mutex<InboxState>,
    changed: Condvar,
    /// How many bytes of versions have arrived.
    travelled: AtomicU64,
    /// The session with the joined sender.
    session: watch::Sender<Option<Arc<JoinedSender>>>,
    /// The nonce of this worker's newest registration.
    registration: Mutex<Option<Digits>>,
}

#[derive(Debug, Default)]
struct InboxState {
    /// The newest set, handed over or not.
    newest: Option<FetchedSet>,
    /// The sequence of the newest that was handed over.
    handed: u64,
    /// The versions that were handed over last, by model.
    had: BTreeMap<usize, Version>,
    /// The sequence of the newest that the worker has run.
    applied: u64,
    /// The versions that the worker runs.
    runs: Option<Applied>,
    /// The number of calls for which versions are being fetched.
    fetching: usize,
    /// Calls that wait for their last line. There are two or three: for the set that is
    /// loading, for the set that waits, and for a new one.
    open: Vec<(u64, mpsc::UnboundedSender<Notified>)>,
    end: Option<SenderEnd>,
    interrupted: bool,
    /// Memory of versions that nobody holds any more, by model.
    spare: BTreeMap<usize, Image>,
    /// The bytes of versions whose fetch broke off, by model.
    partial: BTreeMap<usize, Partial>,
}

impl Default for Inbox {
    fn default() -> Self {
        Self {
            state: Mutex::default(),
            changed: Condvar::new(),
            travelled: AtomicU64::new(0),
            session: watch::Sender::new(None),
            registration: Mutex::default(),
        }
    }
}

/// For the worker.
impl Inbox {
    /// How many bytes of versions have arrived.
    pub(super) fn travelled(&self) -> u64 {
        self.travelled.load(Ordering::Relaxed)
    }

    /// The next set that was not handed over yet. All sets that were sent come before the end.
    pub(super) fn next(&self, deadline: Deadline) -> Result<Option<SetSnapshot>> {
        // The worker's thread waits here. The serving thread changes the state and wakes it.
        let mut state = self.state();
        loop {
            if let Some(set) = state.take_newer() {
                return Ok(Some(set));
            }
            // A fetch in progress may still bring a set that was sent before the end.
            if let Some(end) = state.end.clone()
                && state.fetching == 0
            {
                return Err(end.into());
            }
            // The flag is taken: one interrupt ends one wait, also if it came before the wait.
            if std::mem::take(&mut state.interrupted) || passed(deadline) {
                return Ok(None);
            }
            state = wait_on(&self.changed, &self.state, state, deadline)?;
        }
    }

    /// The newest, handed over before or not.
    pub(super) fn latest(&self) -> Option<SetSnapshot> {
        let mut state = self.state();
        let newer = state.take_newer();
        // The set was handed over before, so it is lent again. Its snapshots are shared and cost no
        // copy.
        newer.or_else(|| {
            let newest = state.newest.clone()?;
            Some(state.hand(newest))
        })
    }

    /// Hands over the answer to a question. A set that came as an answer is not handed over
    /// again while it is the newest.
    pub(super) fn take_answer(&self, fetched: FetchedSet) -> SetSnapshot {
        let mut state = self.state();
        state.keep(&fetched);
        // The answer to a question may be newer than the set that waits. The older set is then not
        // handed over any more.
        state.handed = state.handed.max(fetched.sequence);
        state.hand(fetched)
    }

    /// The worker runs this from here on.
    pub(super) fn applied(&self, applied: &Applied) {
        let mut state = self.state();
        state.applied = state.applied.max(applied.sequence);
        state.runs = Some(applied.clone());
        // Sets up to the one that runs get their last line. Later ones still wait for theirs.
        state.answer(|sequence| match sequence {
            _ if sequence > applied.sequence => None,
            _ if sequence == applied.sequence => Some(Notified::Applied(applied.clone())),
            sequence => Some(Notified::PassedOver { sequence }),
        });
    }

    /// The worker cannot use this.
    pub(super) fn refused(&self, refused: u64, reason: &str) {
        // The sets before a refused one are over too: the worker has passed them.
        self.state().answer(|sequence| {
            let reason = reason.to_owned();
            (sequence <= refused).then_some(Notified::Refused { sequence, reason })
        });
    }

    /// Ends the wait that the worker is in, or the next one.
    pub(super) fn interrupt(&self) {
        self.state().interrupted = true;
        self.changed.notify_all();
    }

    /// Waits until something with this sequence is there; false at the deadline, or if
    /// the sender ended.
    pub(super) fn wait_for(&self, sequence: u64, deadline: Deadline) -> Result<bool> {
        let mut state = self.state();
        loop {
            // Compared by number: a newer set than the awaited one does as well.
            if state.newest_sequence() >= sequence {
                return Ok(true);
            }
            if state.end.is_some() || passed(deadline) {
                return Ok(false);
            }
            state = wait_on(&self.changed, &self.state, state, deadline)?;
        }
    }

    /// How the sender has ended; `None` if it has not by the deadline.
    pub(super) fn end_by(&self, deadline: Deadline) -> Result<Option<Error>> {
        let mut state = self.state();
        loop {
            if let Some(end) = state.end.clone() {
                return Ok(Some(end.into()));
            }
            if passed(deadline) {
                return Ok(None);
            }
            state = wait_on(&self.changed, &self.state, state, deadline)?;
        }
    }
}

/// For the thread that serves.
impl Inbox {
    /// So many bytes of a version have arrived.
    pub(super) fn note_received(&self, bytes: usize) {
        // Relaxed: a counter for reports, which orders nothing.
        self.travelled.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// This worker is about to register with this nonce.
    pub(super) fn registers(&self, nonce: Digits) {
        *self.registration() = Some(nonce);
    }

    /// Whether the newest registration of this worker has this nonce. Another process that has the
    /// secret can register in its name, and does not know the nonce.
    pub(super) fn has_registered(&self, nonce: Digits) -> bool {
        *self.registration() == Some(nonce)
    }

    fn registration(&self) -> MutexGuard<'_, Option<Digits>> {
        self.registration.locked()
    }

    pub(super) fn welcome(&self, session: Arc<JoinedSender>) {
        self.session.send_replace(Some(session));
    }

    /// The sender that was joined; waits until one was.
    pub(super) async fn session(&self) -> Option<Arc<JoinedSender>> {
        // A call can arrive before `enter` has stored the session, because the sender calls as soon
        // as it has admitted the worker.
        let mut session = self.session.subscribe();
        let joined = session.wait_for(Option::is_some).await.ok()?;
        joined.clone()
    }

    /// Marks that a fetch is under way, until the result is dropped. The sender's end is
    /// reported after it.
    pub(super) fn fetching(self: &Arc<Self>) -> FetchingGuard {
        self.state().fetching += 1;
        FetchingGuard(self.clone())
    }

    /// A version that is here already.
    pub(super) fn held(&self, model: usize, version: Version) -> Option<Snapshot> {
        let state = self.state();
        let held = state.newest.iter().flat_map(|newest| &newest.members);
        let mut held = held.filter(|(of, snapshot)| *of == model && snapshot.version() == version);
        held.next().map(|(_, snapshot)| snapshot.clone())
    }

    /// Memory for a version of a model, if there is some of an earlier one.
    pub(super) fn spare(&self, model: usize) -> Option<Image> {
        // Taken out of the inbox, so two fetches of one model never write to one image.
        self.state().spare.remove(&model)
    }

    /// The bytes of a version whose fetch broke off.
    pub(super) fn partial(&self, model: usize) -> Option<Partial> {
        self.state().partial.remove(&model)
    }

    pub(super) fn keep_partial(&self, model: usize, partial: Partial) {
        self.state().partial.insert(model, partial);
    }

    /// Stages a whole set. The channel delivers its outcome.
    pub(super) fn stage(&self, fetched: FetchedSet) -> mpsc::UnboundedReceiver<Notified> {
        let (outcome, answer) = mpsc::unbounded_channel();
        let mut state = self.state();
        let sequence = fetched.sequence;
        if state.applied >= sequence {
            // The sender called again after a connection broke: it may not know what runs here.
            let runs = state.runs.clone();
            let again = runs.map(|runs| Applied { sequence, ..runs });
            let repeated = again.map_or(Notified::PassedOver { sequence }, Notified::Applied);
            let _ = outcome.send(repeated);
            return answer;
        }
        state.keep(&fetched);
        // A set that was not handed over by now never will be.
        let handed = state.handed;
        state.answer(|older| {
            let passed_over = older < sequence && older > handed;
            passed_over.then_some(Notified::PassedOver { sequence: older })
        });
        state.open.push((sequence, outcome));
        drop(state);
        self.changed.notify_all();
        answer
    }

    /// The sender has ended.
    pub(super) fn ended(&self, end: SenderEnd) {
        self.state().end.get_or_insert(end);
        self.changed.notify_all();
    }

    fn state(&self) -> MutexGuard<'_, InboxState> {
        self.state.locked()
    }
}

/// Something is being fetched.
pub(super) struct FetchingGuard(Arc<Inbox>);

impl Drop for FetchingGuard {
    fn drop(&mut self) {
        self.0.state().fetching -= 1;
        self.0.changed.notify_all();
    }
}

impl InboxState {
    fn newest_sequence(&self) -> u64 {
        self.newest.as_ref().map_or(0, |newest| newest.sequence)
    }

    /// Keeps a set as the newest, if it is. The memory of the set before it is reused.
    fn keep(&mut self, fetched: &FetchedSet) {
        // An answer other than the newest set has sequence 0 and never becomes the newest.
        if fetched.sequence <= self.newest_sequence() {
            return;
        }
        let before = self.newest.replace(fetched.clone());
        for (model, snapshot) in before.into_iter().flat_map(|before| before.members) {
            // The memory is reused only if no snapshot of it is lent. Otherwise it is freed with
            // the last one.
            if let Some(image) = snapshot.into_image() {
                self.spare.insert(model, image);
            }
        }
    }

    fn take_newer(&mut self) -> Option<SetSnapshot> {
        let newest = self.newest.as_ref()?;
        if newest.sequence <= self.handed {
            return None;
        }
        let newest = newest.clone();
        self.handed = newest.sequence;
        for (sequence, call) in &self.open {
            if *sequence == newest.sequence {
                let sequence = *sequence;
                let _ = call.send(Notified::Taken { sequence });
            }
        }
        Some(self.hand(newest))
    }

    fn hand(&mut self, fetched: FetchedSet) -> SetSnapshot {
        let members = fetched.members.into_iter().map(|(model, snapshot)| {
            // Compared with what was handed over last, and not with the newest: sets in between may
            // have been skipped.
            let had = self.had.insert(model, snapshot.version());
            let changed = had != Some(snapshot.version());
            Member { snapshot, changed }
        });
        SetSnapshot::new(fetched.sequence, members.collect())
    }

    /// Sends calls their last line, where one is known.
    fn answer(&mut self, outcome: impl Fn(u64) -> Option<Notified>) {
        let open = std::mem::take(&mut self.open);
        for (sequence, call) in open {
            match outcome(sequence) {
                // The caller may have disconnected.
                Some(outcome) => drop(call.send(outcome)),
                None => self.open.push((sequence, call)),
            }
        }
    }
}
