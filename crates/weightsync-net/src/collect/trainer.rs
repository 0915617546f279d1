//! The trainer's end: a port at which workers join, and a place for each of them.

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use tokio::runtime::Runtime;
use weightsync_engine::{Origin, Result};

use super::incoming::{Incoming, PartError, Wanted};
use super::{Frames, Gone, HEARTBEAT, Rows, prepare, write_message, write_pieces};
use crate::access::Key;
use crate::address::bad;
use crate::error::os;
use crate::link::{HANDSHAKE, listen::accept_all};
use crate::scheme::Distributed;
use crate::wire::frame::{FrameError, Kind};
use crate::wire::hello::Role;
use crate::wire::message::{Message, ToTrainer, ToWorker};

/// The most messages that may wait on either side of a place.
const MOST_WAITING: usize = 1024;

/// The most connections in addition to one for each place: of workers that are refused.
const MORE_CONNECTIONS: usize = 64;

/// The port of a collector's trainer.
///
/// **Guarantee.** Once it is dropped the port is closed, and no more worker joins.
#[derive(Debug)]
pub struct Trainer {
    address: String,
    secret: [u8; 16],
    has_token: bool,
    places: Arc<Places>,
    runtime: Option<Runtime>,
    owner: Origin,
}

#[derive(Debug, Default)]
struct Places {
    by_worker: Mutex<BTreeMap<u32, Arc<Seat>>>,
    connections: AtomicUsize,
}

impl Trainer {
    /// Listens where the scheme's settings say, for links of its own. The token is the scheme's or
    /// the environment's; without one, which only loopback allows, the secret is random.
    ///
    /// # Errors
    ///
    /// Those of the scheme's own listener.
    pub fn listen(scheme: &Distributed) -> Result<Self> {
        let token = scheme.access()?.token;
        let has_token = token.is_some();
        let secret = match token {
            Some(token) => token.secret(),
            None => weightsync_engine::transport::random()?,
        };
        let listener = scheme.bind(scheme.listens()?)?;
        let bound = listener.local_addr().map_err(os("asking for the port"))?;
        let address = scheme.reached_at(bound)?;
        let listens = listener.set_nonblocking(true);
        listens.map_err(os("preparing the listening socket"))?;
        let runtime = crate::relay::runtime("weightsync-link");
        let runtime = runtime.map_err(os("starting the collector's network threads"))?;
        let places = Arc::<Places>::default();
        let (key, shared) = (Key::new(&secret), places.clone());
        let take = move |socket: tokio::net::TcpStream, from: SocketAddr, role| {
            if role == Role::Collector
                && let Err(error) = shared.clone().begin(socket, from)
            {
                tracing::warn!("a worker from {from} was turned away: {error}");
            }
        };
        runtime.spawn(async move {
            match tokio::net::TcpListener::from_std(listener) {
                Ok(listener) => accept_all(listener, key, || false, |_| {}, take).await,
                Err(error) => tracing::error!("no worker can join: {error}"),
            }
        });
        Ok(Self {
            address,
            secret,
            has_token,
            places,
            runtime: Some(runtime),
            owner: Origin::here(),
        })
    }

    /// Where workers reach it.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// What workers need to join. It is as good as the token.
    pub fn secret(&self) -> [u8; 16] {
        self.secret
    }

    /// Whether the secret comes from a token, so that workers can have it too.
    pub fn has_token(&self) -> bool {
        self.has_token
    }

    /// Opens the place of a worker, in place of the one before. A worker with the ticket may join;
    /// without a ticket, one that names this number or none. It is started with the settings.
    ///
    /// # Errors
    ///
    /// That of the system, if it has no descriptor left.
    pub fn open(&self, worker: u32, ticket: Option<u64>, settings: Vec<u8>) -> Result<Place> {
        let (hears, rings) = io::pipe().map_err(os("opening a pipe"))?;
        let seat = Arc::new(Seat {
            worker,
            ticket,
            rings,
            state: Mutex::new(State {
                stage: Stage::Open,
                settings,
                orders: VecDeque::new(),
                wanted: VecDeque::new(),
                heard: VecDeque::new(),
            }),
            changed: Condvar::new(),
        });
        let before = self.places.lock().insert(worker, seat.clone());
        if let Some(before) = before {
            before.cut();
        }
        Ok(Place {
            seat,
            hears,
            owner: Origin::here(),
        })
    }
}

impl Drop for Trainer {
    fn drop(&mut self) {
        let Some(runtime) = self.runtime.take() else {
            return;
        };
        if self.owner.is_here() {
            // Its tasks do not wait for anything but connections.
            runtime.shutdown_timeout(HANDSHAKE);
        } else {
            // In a forked child its threads do not exist.
            std::mem::forget(runtime);
        }
    }
}

/// A worker's place. It is for one life of the worker.
///
/// **Guarantee.** Once [`cut`](Self::cut) has returned, nothing that the worker sent is written any
/// more. Dropping it does the same.
#[derive(Debug)]
pub struct Place {
    seat: Arc<Seat>,
    hears: PipeReader,
    owner: Origin,
}

/// Something that a worker has said or done.
#[derive(Debug, PartialEq)]
pub struct Heard {
    /// What it is.
    pub what: What,
    /// When it came: seconds on the system's monotonic clock.
    pub at: f64,
}

/// What a worker has said or done.
#[derive(Debug, PartialEq)]
pub enum What {
    /// A worker has taken the place.
    Joined {
        /// Where it connects from.
        from: String,
    },
    /// An answer.
    Said {
        /// What it says.
        json: String,
    },
    /// A part is whole and in its place.
    Part {
        /// Its number.
        part: u64,
        /// What the worker says of it.
        json: String,
    },
    /// The link has ended: nothing follows.
    Gone {
        /// Why.
        reason: String,
    },
}

impl Place {
    /// A descriptor that is readable while there is something to hear.
    pub fn fd(&self) -> RawFd {
        self.hears.as_raw_fd()
    }

    #[cfg(test)]
    pub(super) fn hears(&self) -> &PipeReader {
        &self.hears
    }

    /// Sends an order, once the worker is there. False if too many wait already: the link ends then.
    pub fn order(&self, json: String) -> bool {
        self.seat.send(ToWorker::Order { json })
    }

    /// Says where the bytes of a part belong, before the order for it: columns in the order in which
    /// the worker sends them. The worker has to send exactly as many.
    ///
    /// # Errors
    ///
    /// [`Error::BadSetting`](weightsync_engine::Error::BadSetting) for rows beyond 64 bits.
    pub fn expect(&self, part: u64, file: File, rows: Vec<Rows>) -> Result<()> {
        let wanted = Wanted::new(part, file, rows)
            .ok_or_else(|| bad("rows", "places within 64 bits", "more"))?;
        self.seat.lock().wanted.push_back(wanted);
        Ok(())
    }

    /// The next thing that the worker has said or done, if there is any.
    pub fn hear(&self) -> Option<Heard> {
        let mut state = self.seat.lock();
        let heard = state.heard.pop_front()?;
        if state.heard.is_empty() {
            // It was written under the same lock, so this does not wait.
            let _ = (&self.hears).read(&mut [0]);
        }
        Some(heard)
    }

    /// Asks the worker to end, after the orders before.
    pub fn leave(&self) {
        self.seat.leave();
    }

    /// Waits until no worker is here any more; false at the timeout.
    pub fn wait(&self, timeout: Duration) -> bool {
        let until = Instant::now().checked_add(timeout);
        self.seat.wait(until)
    }

    /// Ends the link at once.
    pub fn cut(&self) {
        self.seat.cut();
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // In a forked child the connection is the parent's.
        if self.owner.is_here() {
            self.cut();
        }
    }
}

/// What the threads of a link and the trainer share.
#[derive(Debug)]
struct Seat {
    worker: u32,
    ticket: Option<u64>,
    /// Has a byte in it while something was heard.
    rings: PipeWriter,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    stage: Stage,
    /// Until they are sent: a policy may be large.
    settings: Vec<u8>,
    orders: VecDeque<ToWorker>,
    wanted: VecDeque<Wanted>,
    heard: VecDeque<Heard>,
}

#[derive(Debug)]
enum Stage {
    /// A worker may join.
    Open,
    /// A worker has this link.
    Taken(TcpStream),
    Gone,
}

impl Seat {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&self, message: ToWorker) -> bool {
        let mut state = self.lock();
        if state.orders.len() >= MOST_WAITING {
            if let Stage::Taken(socket) = &state.stage {
                let _ = socket.shutdown(Shutdown::Both);
            }
            return false;
        }
        state.orders.push_back(message);
        drop(state);
        self.changed.notify_all();
        true
    }

    fn leave(&self) {
        let mut state = self.lock();
        match state.stage {
            Stage::Open => state.stage = Stage::Gone,
            Stage::Gone => {}
            Stage::Taken(_) => {
                drop(state);
                let reason = String::new();
                self.send(ToWorker::End { reason });
            }
        }
        self.changed.notify_all();
    }

    fn cut(&self) {
        let mut state = self.lock();
        match &state.stage {
            Stage::Open => state.stage = Stage::Gone,
            Stage::Gone => {}
            Stage::Taken(socket) => drop(socket.shutdown(Shutdown::Both)),
        }
        drop(state);
        // The reading thread waits for nothing but the socket.
        self.wait(None);
    }

    fn wait(&self, until: Option<Instant>) -> bool {
        let mut state = self.lock();
        while matches!(state.stage, Stage::Taken(_)) {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return false;
            }
            let left = left.unwrap_or(HEARTBEAT);
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// False if so much waits already that the worker is not to be heard any more.
    fn say(&self, what: What) -> bool {
        let mut state = self.lock();
        self.note(&mut state, what)
    }

    fn note(&self, state: &mut State, what: What) -> bool {
        // The end is always noted, and is the last.
        if state.heard.len() >= MOST_WAITING && !matches!(what, What::Gone { .. }) {
            return false;
        }
        if state.heard.is_empty() {
            let _ = (&self.rings).write(&[1]);
        }
        let now = clock_gettime(ClockId::Monotonic);
        let at = now.tv_sec as f64 + now.tv_nsec as f64 / 1e9;
        state.heard.push_back(Heard { what, at });
        true
    }

    /// Sends what the trainer has to say, and signs of life, until the link ends.
    fn write(&self, socket: &TcpStream) -> Result<(), Gone> {
        let settings = std::mem::take(&mut self.lock().settings);
        let (worker, bytes) = (self.worker, settings.len() as u64);
        write_message(socket, &ToWorker::Welcome { worker, bytes })?;
        write_pieces(socket, &settings)?;
        drop(settings);
        loop {
            let mut state = self.lock();
            let mut message = state.orders.pop_front();
            if message.is_none() && matches!(state.stage, Stage::Taken(_)) {
                let waited = self.changed.wait_timeout(state, HEARTBEAT);
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
                message = state.orders.pop_front();
            }
            if !matches!(state.stage, Stage::Taken(_)) {
                return Ok(());
            }
            drop(state);
            let message = message.unwrap_or(ToWorker::Ping);
            write_message(socket, &message)?;
            if matches!(message, ToWorker::End { .. }) {
                socket.shutdown(Shutdown::Write)?;
                return Ok(());
            }
        }
    }

    /// Reads what the worker sends, until the link ends.
    fn read(&self, frames: &mut Frames) -> Gone {
        let mut incoming = Incoming::default();
        loop {
            let heard = match frames.next() {
                Ok((Kind::Piece, piece)) => incoming.piece(piece).map_err(Gone::Part),
                Ok((_, payload)) => match ToTrainer::decode(payload) {
                    Ok(message) => {
                        let wanted = &mut self.lock().wanted;
                        incoming.message(message, wanted).map_err(Gone::Part)
                    }
                    Err(error) => Err(error.into()),
                },
                Err(gone) => Err(gone),
            };
            match heard {
                Ok(None) => {}
                Ok(Some(what)) => {
                    if !self.say(what) {
                        return Gone::Flood;
                    }
                }
                Err(gone) => return gone,
            }
        }
    }
}

impl Places {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u32, Arc<Seat>>> {
        self.by_worker
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives an authenticated connection a thread.
    fn begin(self: Arc<Self>, socket: tokio::net::TcpStream, from: SocketAddr) -> io::Result<()> {
        let socket = socket.into_std()?;
        socket.set_nonblocking(false)?;
        prepare(&socket)?;
        let most = self.lock().len() + MORE_CONNECTIONS;
        if self.connections.fetch_add(1, Ordering::Relaxed) >= most {
            self.connections.fetch_sub(1, Ordering::Relaxed);
            return Err(io::Error::other("there are too many connections"));
        }
        let shared = self.clone();
        let serve = move || {
            if let Err(gone) = shared.serve(&socket, from) {
                tracing::warn!("a worker from {from} did not join: {gone}");
            }
            shared.connections.fetch_sub(1, Ordering::Relaxed);
        };
        let thread = std::thread::Builder::new().name("weightsync-worker-link".into());
        thread.spawn(serve).map(drop).inspect_err(|_| {
            self.connections.fetch_sub(1, Ordering::Relaxed);
        })
    }

    /// Serves a connection until it ends; an error is one of a worker without a place.
    fn serve(&self, socket: &TcpStream, from: SocketAddr) -> Result<(), Gone> {
        let mut frames = Frames::new(socket.try_clone()?);
        let (worker, ticket) = joining(&mut frames)?;
        let seat = match self.admit(worker, ticket, socket, from)? {
            Ok(seat) => seat,
            Err(reason) => {
                tracing::warn!("a worker from {from} was refused: {reason}");
                write_message(socket, &ToWorker::End { reason })?;
                socket.shutdown(Shutdown::Write)?;
                socket.set_read_timeout(Some(HANDSHAKE))?;
                // To close with bytes unread would take the answer back.
                while frames.next().is_ok() {}
                return Ok(());
            }
        };
        let reason = std::thread::scope(|scope| {
            let writing = std::thread::Builder::new().name("weightsync-worker-link".into());
            let writer = writing.spawn_scoped(scope, || {
                if seat.write(socket).is_err() {
                    // The reading end says why.
                    let _ = socket.shutdown(Shutdown::Both);
                }
            });
            let gone = match writer {
                Ok(_) => seat.read(&mut frames),
                Err(error) => Gone::Failed(error),
            };
            let _ = socket.shutdown(Shutdown::Both);
            let mut state = seat.lock();
            state.stage = Stage::Gone;
            // Descriptors of the collector's memory.
            state.wanted.clear();
            drop(state);
            seat.changed.notify_all();
            gone
        });
        let reason = format!("the link to it, from {from}, has ended: {reason}");
        seat.say(What::Gone { reason });
        Ok(())
    }

    /// The place of a worker that wants to join, which it has from now on, or why it has none.
    fn admit(
        &self,
        worker: Option<u32>,
        ticket: Option<u64>,
        socket: &TcpStream,
        from: SocketAddr,
    ) -> io::Result<Result<Arc<Seat>, String>> {
        let places = self.lock();
        let mut reason = refusal(&places, worker, ticket);
        for (number, seat) in places.iter() {
            if seat.ticket != ticket || worker.is_some_and(|worker| worker != *number) {
                continue;
            }
            let mut state = seat.lock();
            match state.stage {
                Stage::Open => {
                    state.stage = Stage::Taken(socket.try_clone()?);
                    let from = from.to_string();
                    seat.note(&mut state, What::Joined { from });
                    return Ok(Ok(seat.clone()));
                }
                Stage::Taken(_) if worker.is_some() => {
                    reason = format!(
                        "worker {number} is there already: give this one another number, or none"
                    );
                }
                Stage::Taken(_) | Stage::Gone => {}
            }
        }
        Ok(Err(reason))
    }
}

/// Why a worker has no place, where no place says more.
fn refusal(places: &BTreeMap<u32, Arc<Seat>>, worker: Option<u32>, ticket: Option<u64>) -> String {
    let known = worker.is_none_or(|worker| places.contains_key(&worker));
    match (worker, ticket) {
        (Some(worker), _) if !known => {
            let count = places.len();
            format!("there is no worker {worker}: the collector has {count} workers, from 0 on")
        }
        (_, Some(_)) => {
            "its launch was given up: another was started in its place, or the collector ends"
                .into()
        }
        (_, None) => "the collector waits for no other worker now: all are there, or its launcher \
                      starts them"
            .into(),
    }
}

/// The number and the ticket of a worker, which are the first that it says.
fn joining(frames: &mut Frames) -> Result<(Option<u32>, Option<u64>), Gone> {
    let (kind, payload) = frames.next()?;
    if kind != Kind::Control {
        return Err(FrameError::Kind { got: kind.code() }.into());
    }
    match ToTrainer::decode(payload)? {
        ToTrainer::Join { worker, ticket } => Ok((worker, ticket)),
        _ => Err(PartError::NotJoined.into()),
    }
}
