//! The worker's end.

use std::collections::VecDeque;
use std::io::ErrorKind;
use std::net::Shutdown;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use weightsync_core::Remedy;
use weightsync_engine::{Error, Origin, Result, log_limiter};
use weightsync_link::access::{Access, Key};
use weightsync_link::address::{host_of, resolve_all};
use weightsync_link::frame::{FrameError, FrameKind};
use weightsync_link::hello::{HelloError, LinkRole};
use weightsync_link::message::Message;
use weightsync_link::stream::Stream;
use weightsync_link::tls::{CertificateRole, TlsPeer};
use weightsync_link::{Credentials, HANDSHAKE, blocking, refusal};
use weightsync_mem::left;
use weightsync_mem::threads::{self, CondvarExt as _, LockExt as _};

use super::{
    ASKS, FrameReader, HEARTBEAT, LEAVE, LinkError, SILENT, prepare, write_message, write_pieces,
};
use crate::error::{NetError, os, transport};
use crate::wire::message::{ToTrainer, ToWorker};

/// How long connections to a trainer are refused until it counts as gone.
const REFUSED: Duration = Duration::from_secs(2);

/// How long a worker waits before it tries again to connect.
const AGAIN: Duration = Duration::from_millis(200);

/// How long a worker that leaves waits before it looks again whether a thread still sends.
const TURN: Duration = Duration::from_millis(5);

/// The most orders that may wait. A trainer orders two parts ahead.
const MOST_ORDERS: usize = 1024;

/// The memory that is taken for settings before they come.
const AT_ONCE: u64 = 1 << 20;

/// How a worker joins its trainer.
#[derive(Clone, Debug)]
pub struct JoinOptions {
    /// The trainer's `host:port`.
    pub address: String,
    /// The secret, which is that of the token if there is one.
    pub secret: [u8; 16],
    /// Whether unencrypted connections to other machines are allowed. The worker runs what comes over
    /// them, so a program that can change the network's traffic can then run programs here.
    pub insecure_plaintext_code: bool,
    /// Where the certificates are, if the environment does not say.
    pub tls: Option<PathBuf>,
    /// The worker's number; none: the trainer gives it one.
    pub worker: Option<u32>,
    /// Which launch it comes from; none: it comes on its own.
    pub ticket: Option<u64>,
    /// How long to try, while nothing answers or the place is not open yet. With a ticket, a host
    /// that refuses connections for 2 s ends the waiting: its trainer is gone.
    pub patience: Duration,
}

/// A worker that was let in.
#[derive(Debug)]
pub struct JoinedWorker {
    /// Its end of the link.
    pub link: CollectorLink,
    /// Its number.
    pub worker: u32,
    /// What the trainer starts it with.
    pub settings: Vec<u8>,
}

/// A worker's end of its link.
///
/// **Guarantee.** If the trainer goes without ending in order, or its host does, `gone` is called from
/// a thread of the link, whatever the worker does meanwhile: it is meant to end the process. It is
/// also called if the worker does not leave within 5 s after the trainer has ended. It is not called
/// once the worker has left: by [`leave`](Self::leave), or by being dropped.
#[derive(Debug)]
pub struct CollectorLink {
    shared: Arc<SharedLink>,
    threads: Vec<JoinHandle<()>>,
    owner: Origin,
}

#[derive(Debug)]
struct SharedLink {
    /// For its end.
    socket: Arc<Stream>,
    /// The same, which one thread at a time sends on.
    sends: Mutex<Arc<Stream>>,
    state: Mutex<LinkState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct LinkState {
    orders: VecDeque<String>,
    /// The trainer has ended in order.
    has_ended: bool,
    has_left: bool,
    /// The thread that reads is there.
    listens: bool,
}

impl CollectorLink {
    /// Connects, and waits until the trainer lets this worker in. While nothing answers, or the
    /// place is not open yet, it tries again, until the patience is over.
    ///
    /// `gone` is told why the trainer counts as gone.
    ///
    /// # Errors
    ///
    /// [`NetError::Unreachable`] when the patience is over, or the trainer is gone, [`NetError::Hello`] for a wrong secret,
    /// [`NetError::NotAdmitted`] with the trainer's reason, and those of an address that may not be
    /// connected to.
    pub fn join(
        joining: &JoinOptions,
        gone: impl FnOnce(String) + Send + 'static,
    ) -> Result<JoinedWorker> {
        let until = Instant::now() + joining.patience;
        let mut waiting = String::new();
        let (mut link, mut frames, worker, bytes) = loop {
            let (link, mut frames) = Self::connect(joining, until)?;
            let answer = link.ask(joining, &mut frames);
            let (address, over) = (joining.address.clone(), Instant::now() >= until);
            let why = match answer {
                Ok(ToWorker::Welcome { worker, bytes }) => break (link, frames, worker, bytes),
                Ok(ToWorker::Later { reason }) if !over => reason,
                Ok(ToWorker::Later { reason } | ToWorker::End { reason }) => {
                    return Err(NetError::NotAdmitted { address, reason }.into());
                }
                Ok(ToWorker::Order { .. } | ToWorker::Ping) => {
                    return Err(ended(joining, LinkError::Closed));
                }
                // The trainer may be ending, or have too many connections.
                Err(
                    gone @ (LinkError::Closed
                    | LinkError::HostSilent
                    | LinkError::Silent(_)
                    | LinkError::Failed(_)),
                ) if !over => gone.to_string(),
                Err(gone) => return Err(ended(joining, gone)),
            };
            if why != waiting {
                tracing::warn!("{address} does not let this worker in yet: {why}");
                waiting = why;
            }
            // The trainer need not keep this connection during the pause.
            drop((link, frames));
            std::thread::sleep(AGAIN);
        };
        frames.wait_for(SILENT);
        let settings = read_settings(&mut frames, bytes).map_err(|gone| ended(joining, gone))?;
        link.start_listening(frames, gone)?;
        Ok(JoinedWorker {
            link,
            worker,
            settings,
        })
    }

    fn connect(joining: &JoinOptions, until: Instant) -> Result<(Self, FrameReader)> {
        let socket = Arc::new(connect(joining, until)?);
        // A trainer that does not get to run lets in a worker that it has heard, also if that has closed
        // its connection meanwhile. So this one waits for its answer as long as it may.
        let left = until.saturating_duration_since(Instant::now());
        let frames = FrameReader::new(socket.clone(), left.max(ASKS));
        let shared = Arc::new(SharedLink {
            socket: socket.clone(),
            sends: Mutex::new(socket.clone()),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let mut link = Self {
            shared: shared.clone(),
            threads: Vec::new(),
            owner: Origin::here(),
        };
        prepare(&socket).map_err(os("preparing the link"))?;
        // Before the request: the answer may take long, and the trainer hears from this end
        // meanwhile.
        link.spawn(move || shared.give_signs())?;
        Ok((link, frames))
    }

    /// Starts the thread that takes what the trainer sends. `gone` is told why the trainer counts
    /// as gone.
    fn start_listening(
        &mut self,
        mut frames: FrameReader,
        gone: impl FnOnce(String) + Send + 'static,
    ) -> Result<()> {
        let shared = self.shared.clone();
        // Before the thread starts: from here on `leave` waits for its end.
        shared.lock().listens = true;
        let spawned = self.spawn(move || {
            let reason = shared.listen(&mut frames);
            // Before `gone`, which may end this process, or wait for a thread that leaves.
            shared.lock().listens = false;
            shared.changed.notify_all();
            if let Some(reason) = reason {
                gone(reason);
            }
        });
        if spawned.is_err() {
            // The drop of the link does not wait for a thread that does not exist.
            self.shared.lock().listens = false;
        }
        spawned
    }

    /// Asks to be let in.
    fn ask(&self, joining: &JoinOptions, frames: &mut FrameReader) -> Result<ToWorker, LinkError> {
        let (worker, ticket) = (joining.worker, joining.ticket);
        write_message(&self.shared.sends(), &ToTrainer::Join { worker, ticket })?;
        next_message(frames)
    }

    /// The next order; waits for it. `None` once the trainer has ended in order.
    pub fn next(&self) -> Option<String> {
        let mut state = self.shared.lock();
        loop {
            if let Some(order) = state.orders.pop_front() {
                return Some(order);
            }
            if state.has_ended || state.has_left {
                return None;
            }
            state = self.shared.changed.wait_at_most(state, None);
        }
    }

    /// Sends an answer.
    ///
    /// # Errors
    ///
    /// [`Error::Transport`] if the link has ended, or for more than 65,536 bytes.
    pub fn say(&self, json: String) -> Result<()> {
        let sends = self.shared.sends();
        write_message(&sends, &ToTrainer::Say { json }).map_err(transport)
    }

    /// Sends a part: the bytes of its columns, in this order.
    ///
    /// # Errors
    ///
    /// [`Error::Transport`] if the link has ended.
    pub fn send_part(&self, part: u64, columns: &[&[u8]]) -> Result<()> {
        let bytes = columns.iter().map(|column| column.len() as u64).sum();
        // Held for the whole part: no other message may come between its pieces.
        let sends = self.shared.sends();
        let send = || -> Result<(), LinkError> {
            write_message(&sends, &ToTrainer::Part { part, bytes })?;
            let mut columns = columns.iter();
            Ok(columns.try_for_each(|column| write_pieces(&sends, column))?)
        };
        send().map_err(transport)
    }

    /// Ends the link in order, and waits until the trainer has read what was sent before: the
    /// system takes it back where a process ends with bytes unread. It waits for 5 s at most.
    pub fn leave(&self) {
        self.shared.leave();
    }

    fn spawn(&mut self, work: impl FnOnce() + Send + 'static) -> Result<()> {
        let thread = threads::spawn("trainer-link", work);
        let thread = thread.map_err(os("starting a thread of the link"))?;
        self.threads.push(thread);
        Ok(())
    }
}

impl Drop for CollectorLink {
    fn drop(&mut self) {
        if !self.owner.is_here() {
            // In a forked child the link is the parent's, and its threads do not exist.
            std::mem::forget(std::mem::take(&mut self.threads));
            return;
        }
        self.leave();
        for thread in self.threads.drain(..) {
            // The panic hook has reported a panic there.
            let _ = thread.join();
        }
    }
}

impl SharedLink {
    fn lock(&self) -> MutexGuard<'_, LinkState> {
        self.state.locked()
    }

    fn sends(&self) -> MutexGuard<'_, Arc<Stream>> {
        self.sends.locked()
    }

    fn leave(&self) {
        let until = Instant::now() + LEAVE;
        let mut state = self.lock();
        if !std::mem::replace(&mut state.has_left, true) {
            drop(state);
            self.changed.notify_all();
            // The trainer closes its end once it has read everything, which ends the reading thread.
            self.end_sending(until);
            state = self.lock();
        }
        while state.listens && Instant::now() < until {
            state = self.changed.wait_at_most(state, left(Some(until)));
        }
        drop(state);
        // Ends what a thread still reads or sends.
        let _ = self.socket.shutdown(Shutdown::Both);
    }

    /// Ends the sending side, once a thread that sends is done, or at this time.
    fn end_sending(&self, until: Instant) {
        while Instant::now() < until {
            // A thread that sends to a host that is gone would keep the lock until its write fails.
            match self.sends.try_lock() {
                Err(TryLockError::WouldBlock) => std::thread::sleep(TURN),
                Err(TryLockError::Poisoned(_)) | Ok(_) => {
                    let _ = self.socket.shutdown(Shutdown::Write);
                    return;
                }
            }
        }
    }

    /// Sends signs of life until the worker leaves.
    fn give_signs(&self) {
        let mut state = self.lock();
        while !state.has_left {
            let waited = self.changed.wait_timeout(state, HEARTBEAT);
            let (after, how) = waited.unwrap_or_else(PoisonError::into_inner);
            state = after;
            if !how.timed_out() || state.has_left {
                continue;
            }
            drop(state);
            // A thread that sends something has the socket, and that is a sign of life.
            if let Ok(socket) = self.sends.try_lock() {
                // If the link has ended the other thread notices.
                let _ = write_message(&socket, &ToTrainer::Ping);
            }
            state = self.lock();
        }
    }

    /// Takes the trainer's orders until the link ends; returns why it counts as gone.
    fn listen(&self, frames: &mut FrameReader) -> Option<String> {
        let why = loop {
            match next_message(frames) {
                Ok(ToWorker::Order { json }) => {
                    let mut state = self.lock();
                    if state.orders.len() >= MOST_ORDERS {
                        break LinkError::Flood;
                    }
                    state.orders.push_back(json);
                    drop(state);
                    self.changed.notify_all();
                }
                Ok(ToWorker::Ping | ToWorker::Welcome { .. }) => {}
                Ok(ToWorker::End { .. } | ToWorker::Later { .. }) => return self.wait_to_leave(),
                Err(gone) => break gone,
            }
        };
        // A thread that sends would wait for a host that is gone.
        let _ = self.socket.shutdown(Shutdown::Both);
        match self.lock().has_left {
            true => None,
            false => Some(why.to_string()),
        }
    }

    fn wait_to_leave(&self) -> Option<String> {
        let until = Instant::now() + LEAVE;
        let mut state = self.lock();
        state.has_ended = true;
        self.changed.notify_all();
        while !state.has_left {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Some(format!(
                    "it has ended, and this worker did not leave within {LEAVE:?}"
                ));
            }
            state = self.changed.wait_at_most(state, left);
        }
        None
    }
}

/// Why a worker did not join, if its link ended before.
fn ended(joining: &JoinOptions, gone: LinkError) -> Error {
    let address = joining.address.clone();
    match gone {
        LinkError::Closed => NetError::NoAnswer { address },
        gone => NetError::Unreachable {
            address,
            reason: gone.to_string(),
        },
    }
    .into()
}

/// Connects, and tries again while nothing answers.
fn connect(joining: &JoinOptions, until: Instant) -> Result<Stream> {
    let (access, credentials) = access_of(joining)?;
    let peer = TlsPeer::Trainer(host_of(&joining.address));
    let mut refused_since = None;
    loop {
        let mut reason = String::new();
        // The name of a host may be known only later.
        let all = resolve_all(&joining.address);
        if let Err(error) = &all {
            reason = error.to_string();
        }
        let all = all.unwrap_or_default();
        let mut is_refused = !all.is_empty();
        for address in all {
            access.may_dial_with_secret(address).map_err(transport)?;
            match blocking::dial(
                address,
                &credentials,
                peer,
                LinkRole::Collector,
                Some(HANDSHAKE),
            ) {
                Ok(socket) => return Ok(socket),
                Err(error) => {
                    if let Some(lasting) = lasting(joining, &error) {
                        return Err(lasting);
                    }
                    reason = error.to_string();
                    if refusal(&error).is_some_and(|(_, lasts)| lasts) {
                        log_limiter::warn_rarely(&format!(
                            "no encrypted connection to {address}: {reason}; this worker tries again"
                        ));
                    }
                    is_refused &= error.kind() == ErrorKind::ConnectionRefused;
                }
            }
        }
        let now = Instant::now();
        let since = *refused_since.get_or_insert(now);
        if !is_refused {
            refused_since = None;
        }
        // The trainer listened before it launched this worker. A tunnel may open a little later.
        let is_gone = is_refused && joining.ticket.is_some() && now - since >= REFUSED;
        if is_gone || now >= until {
            return Err(NetError::Unreachable {
                address: joining.address.clone(),
                reason,
            }
            .into());
        }
        std::thread::sleep(AGAIN);
    }
}

/// What a worker may connect to, and how it shows who it is.
fn access_of(joining: &JoinOptions) -> Result<(Access, Credentials)> {
    let access = Access::with_token(None)
        .and_then(|access| access.carrying_code(joining.insecure_plaintext_code))
        .and_then(|access| access.with_told_tls(CertificateRole::Worker, joining.tls.as_deref()))
        .map_err(transport)?;
    let credentials = Credentials {
        key: Key::new(&joining.secret),
        tls: access.tls.clone(),
    };
    Ok((access, credentials))
}

/// Why the trainer refused a connection, if another attempt would end like this one.
fn lasting(joining: &JoinOptions, error: &std::io::Error) -> Option<Error> {
    let hello = error.get_ref().and_then(|inner| inner.downcast_ref());
    let source = hello.filter(|one: &&HelloError| one.remedy() != Remedy::Retry)?;
    let address = joining.address.clone();
    let source = source.clone();
    Some(NetError::Hello { address, source }.into())
}

fn next_message(frames: &mut FrameReader) -> Result<ToWorker, LinkError> {
    match frames.next()? {
        (FrameKind::Control, payload) => Ok(ToWorker::decode(payload)?),
        // Only settings come in pieces.
        (kind, _) => Err(FrameError::Kind { got: kind.code() }.into()),
    }
}

/// Reads what the trainer starts this worker with. It is trusted, as far as memory goes.
fn read_settings(frames: &mut FrameReader, bytes: u64) -> Result<Vec<u8>, LinkError> {
    let mut settings = Vec::with_capacity(bytes.min(AT_ONCE) as usize);
    while (settings.len() as u64) < bytes {
        match frames.next()? {
            (FrameKind::Piece, piece) => settings.extend_from_slice(piece),
            (kind, _) => return Err(FrameError::Kind { got: kind.code() }.into()),
        }
    }
    Ok(settings)
}
