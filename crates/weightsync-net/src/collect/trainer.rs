//! The trainer's end: a port at which workers join.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use tokio::runtime::Runtime;
use weightsync_engine::{Origin, Result, log_limiter};
use weightsync_link::access::Key;
use weightsync_link::address::listen_error;
use weightsync_link::admission::{Admitted, ConnectionLimits, Doing};
use weightsync_link::frame::{FrameError, FrameKind};
use weightsync_link::hello::LinkRole;
use weightsync_link::listen::accept_all;
use weightsync_link::message::Message;
use weightsync_link::stream::{AsyncStream, Stream};
use weightsync_link::{Credentials, HANDSHAKE};
use weightsync_mem::threads::{self, LockExt as _};

use super::incoming::PartError;
use super::place::{NoticeKind, Seat, Stage, WorkerLink, WorkerSeat};
use super::{ASKS, FrameReader, LinkError, SILENT, prepare, write_message};
use crate::error::{os, transport};
use crate::scheme::Distributed;
use crate::wire::message::{ToTrainer, ToWorker};

/// A worker that has sent nothing for longer than this may have gone without a word: another that
/// wants its place is to ask again.
const QUIET: Duration = Duration::from_secs(3);

/// The most connections in addition to one for each place: of workers that are refused.
const MORE_CONNECTIONS: usize = 64;

/// The port of a collector's trainer.
///
/// **Guarantee.** Once it is dropped the port is closed, and no more worker joins.
#[derive(Debug)]
pub struct CollectorPort {
    address: String,
    secret: [u8; 16],
    has_token: bool,
    places: Arc<WorkerSeats>,
    runtime: Option<Runtime>,
    owner: Origin,
}

#[derive(Debug, Default)]
struct WorkerSeats {
    /// How many there will be.
    workers: u32,
    by_worker: Mutex<BTreeMap<u32, Arc<Seat>>>,
    connections: Mutex<Admitted<Arc<Stream>>>,
}

impl CollectorPort {
    /// Listens where the scheme's settings say, for links of so many workers. The token is the scheme's or
    /// the environment's; without one, which only loopback allows, the secret is random.
    ///
    /// Workers run what the trainer sends them: without certificates a program that can change the
    /// network's traffic can run programs on them. So an address that is not loopback takes certificates,
    /// or `insecure_plaintext_code`; the scheme's own permission is for weights.
    ///
    /// # Errors
    ///
    /// Those of the scheme's own listener.
    pub fn listen(
        scheme: &Distributed,
        workers: u32,
        insecure_plaintext_code: bool,
    ) -> Result<Self> {
        let access = scheme.access()?.carrying_code(insecure_plaintext_code);
        let access = access.map_err(transport)?;
        let at = scheme.listens()?;
        access.may_listen(at).map_err(transport)?;
        let (token, tls) = (access.token, access.tls);
        let has_token = token.is_some();
        let secret = match token {
            Some(token) => token.secret(),
            None => weightsync_engine::transport::random()?,
        };
        let listener = TcpListener::bind(at).map_err(|source| listen_error(at, source))?;
        let bound = listener.local_addr().map_err(os("asking for the port"))?;
        let address = scheme.reached_at(bound)?;
        let listens = listener.set_nonblocking(true);
        listens.map_err(os("preparing the listening socket"))?;
        let runtime = crate::agent::runtime("weightsync-link");
        let runtime = runtime.map_err(os("starting the collector's network threads"))?;
        let places = Arc::new(WorkerSeats {
            workers,
            ..WorkerSeats::default()
        });
        let (key, shared) = (Key::new(&secret), places.clone());
        let credentials = Credentials { key, tls };
        let take = move |socket: AsyncStream, from: SocketAddr, role| {
            if role == LinkRole::Collector
                && let Err(error) = shared.clone().begin(socket, from)
            {
                tracing::warn!("a worker from {from} was turned away: {error}");
            }
        };
        runtime.spawn(async move {
            match tokio::net::TcpListener::from_std(listener) {
                Ok(listener) => accept_all(listener, credentials, || false, |_| {}, take).await,
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

    /// Opens the place of a worker, once the one before is cut. A worker with the ticket may join;
    /// without a ticket, one that names this number or none. It is started with the settings.
    ///
    /// # Errors
    ///
    /// That of the system, if it has no descriptor left.
    pub fn open(&self, worker: u32, ticket: Option<u64>, settings: Vec<u8>) -> Result<WorkerSeat> {
        let place = WorkerSeat::new(worker, ticket, settings)?;
        // Out of the lock, because `cut` waits for a thread.
        let before = self.places.lock().get(&worker).cloned();
        if let Some(before) = before {
            before.cut();
        }
        let other = self.places.lock().insert(worker, place.seat.clone());
        if let Some(other) = other {
            // Of two calls at once the last one has the place.
            other.cut();
        }
        Ok(place)
    }
}

impl Drop for CollectorPort {
    fn drop(&mut self) {
        let Some(runtime) = self.runtime.take() else {
            return;
        };
        if self.owner.is_here() {
            // Its tasks do not wait for anything but connections.
            let end = |runtime: Runtime| runtime.shutdown_timeout(HANDSHAKE);
            if let Some(runtime) = threads::run_apart("end", runtime, end) {
                runtime.shutdown_background();
            }
        } else {
            // In a forked child its threads do not exist.
            std::mem::forget(runtime);
        }
    }
}

impl WorkerSeats {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u32, Arc<Seat>>> {
        self.by_worker.locked()
    }

    fn connections(&self) -> MutexGuard<'_, Admitted<Arc<Stream>>> {
        self.connections.locked()
    }

    /// Gives an authenticated connection a thread. One without a place may be closed for it.
    fn begin(self: Arc<Self>, socket: AsyncStream, from: SocketAddr) -> io::Result<()> {
        let socket = Arc::new(socket.into_blocking()?);
        prepare(&socket)?;
        // All workers may be on one host.
        let most = self.workers as usize + MORE_CONNECTIONS;
        let room = ConnectionLimits {
            all: most,
            of_one: most,
            ..ConnectionLimits::STRANGERS
        };
        let entered = self
            .connections()
            .enter(from.ip(), Doing::Idle, &room, socket.clone());
        let Ok((number, idle)) = entered else {
            return Err(io::Error::other("there are too many connections"));
        };
        // It leaves the count when the thread ends, and also if none can start.
        let counted = Counted(self, number);
        if let Some(idle) = idle {
            // Its thread finds it closed.
            let _ = idle.shutdown(Shutdown::Both);
        }
        let serve = move || {
            if let Err(gone) = counted.0.serve(&socket, from, number) {
                // Without its port: it comes from another one each time that it tries again.
                let from = from.ip();
                log_limiter::warn_rarely(&format!("a worker from {from} did not join: {gone}"));
            }
        };
        threads::spawn("worker-link", serve).map(drop)
    }

    /// Serves a connection until it ends; an error is one of a worker without a place.
    fn serve(&self, socket: &Arc<Stream>, from: SocketAddr, number: u64) -> Result<(), LinkError> {
        let mut frames = FrameReader::new(socket.clone(), ASKS);
        let (worker, ticket) = joining(&mut frames)?;
        frames.wait_for(SILENT);
        // One with a place is not closed for another, and one that was gets no place.
        if !self.connections().is_now(number, Doing::Busy) {
            return Err(LinkError::ForAnother);
        }
        let seat = match self.admit(worker, ticket, socket.socket(), from)? {
            Ok(seat) => seat,
            Err(answer) => return self.turn_away(socket, from, number, &answer),
        };
        std::thread::scope(|scope| {
            // Dropped before the scope joins the writing thread: it ends the stage, which ends that
            // thread.
            let mut link = WorkerLink {
                seat: &seat,
                socket,
                from,
                ended: None,
            };
            let writer = threads::spawn_scoped(scope, "worker-link", || {
                if seat.write(socket).is_err() {
                    // The reading end says why.
                    let _ = socket.shutdown(Shutdown::Both);
                }
            });
            link.ended = Some(match writer {
                Ok(_) => seat.read(&mut frames),
                Err(error) => LinkError::Failed(error),
            });
        });
        Ok(())
    }

    /// Tells a worker without a place why, and waits until it has read that.
    fn turn_away(
        &self,
        socket: &Arc<Stream>,
        from: SocketAddr,
        number: u64,
        answer: &ToWorker,
    ) -> Result<(), LinkError> {
        // While this one reads its answer, it may be closed for another.
        self.connections().is_now(number, Doing::Idle);
        match answer {
            ToWorker::End { reason } => {
                tracing::warn!("a worker from {from} was refused: {reason}");
            }
            ToWorker::Later { reason } => {
                tracing::debug!("a worker from {from} is to ask again: {reason}");
            }
            ToWorker::Welcome { .. } | ToWorker::Order { .. } | ToWorker::Ping => {}
        }
        write_message(socket, answer)?;
        // One that has read its answer may be gone by now, which is no failure.
        let _ = socket.shutdown(Shutdown::Write);
        // To close with bytes unread would take the answer back.
        let until = Instant::now() + HANDSHAKE;
        let (mut reads, mut unread) = (&**socket, [0; 1024]);
        loop {
            let left = until.saturating_duration_since(Instant::now());
            // Nothing to read for so long is its end, and a timeout of zero is refused.
            if left.is_zero()
                || socket.socket().set_read_timeout(Some(left)).is_err()
                || !matches!(reads.read(&mut unread), Ok(1..))
            {
                return Ok(());
            }
        }
    }

    /// The place of a worker that wants to join, which it has from now on, or the answer that it
    /// has none.
    fn admit(
        &self,
        worker: Option<u32>,
        ticket: Option<u64>,
        socket: &TcpStream,
        from: SocketAddr,
    ) -> io::Result<Result<Arc<Seat>, ToWorker>> {
        // Held throughout, so that two workers cannot take one place.
        let places = self.lock();
        let mut answer = self.refusal(places.len(), worker, ticket);
        for (number, seat) in places.iter() {
            if seat.ticket != ticket || worker.is_some_and(|worker| worker != *number) {
                continue;
            }
            let mut state = seat.lock();
            let is_quiet = state.last.elapsed() > QUIET;
            match state.stage {
                Stage::Open => {
                    state.stage = Stage::Taken(socket.try_clone()?);
                    state.last = Instant::now();
                    let from = from.to_string();
                    seat.note(&mut state, NoticeKind::Joined { from });
                    return Ok(Ok(seat.clone()));
                }
                // A launch has one worker.
                Stage::Taken(_) | Stage::Gone if ticket.is_some() => {}
                Stage::Taken(_) if is_quiet => {
                    let reason = format!("worker {number} is there, but silent");
                    answer = ToWorker::Later { reason };
                }
                Stage::Taken(_) if worker.is_some() => {
                    let reason = format!(
                        "worker {number} is there already: give this one another number, or none"
                    );
                    answer = ToWorker::End { reason };
                }
                Stage::Taken(_) => {}
                Stage::Gone => {
                    let reason = format!(
                        "worker {number} has ended, and its collector has not asked for another"
                    );
                    answer = ToWorker::Later { reason };
                }
            }
        }
        Ok(Err(answer))
    }

    /// Why a worker has no place, where no place says more. So many are open or were.
    fn refusal(&self, opened: usize, worker: Option<u32>, ticket: Option<u64>) -> ToWorker {
        let count = self.workers;
        let reason = match (worker, ticket) {
            (Some(worker), _) if worker >= count => {
                format!("there is no worker {worker}: the collector has {count} workers, from 0 on")
            }
            (_, Some(_)) => {
                "its launch was given up: another was started in its place, or the collector ends"
                    .into()
            }
            (_, None) if opened < count as usize => {
                let reason = "the collector is starting, and has no place for it yet".into();
                return ToWorker::Later { reason };
            }
            (_, None) => "the collector waits for no other worker now: all are there, or its \
                          launcher starts them"
                .into(),
        };
        ToWorker::End { reason }
    }
}

/// A connection that is counted.
struct Counted(Arc<WorkerSeats>, u64);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.connections().leave(self.1);
    }
}

/// The number and the ticket of a worker, which are the first that it says.
fn joining(frames: &mut FrameReader) -> Result<(Option<u32>, Option<u64>), LinkError> {
    let (kind, payload) = frames.next()?;
    if kind != FrameKind::Control {
        return Err(FrameError::Kind { got: kind.code() }.into());
    }
    match ToTrainer::decode(payload)? {
        ToTrainer::Join { worker, ticket } => Ok((worker, ticket)),
        _ => Err(PartError::NotJoined.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connection_that_was_closed_for_another_gets_no_place() {
        let places = WorkerSeats {
            workers: 1,
            ..WorkerSeats::default()
        };
        let place = WorkerSeat::new(0, None, Vec::new()).unwrap();
        places.lock().insert(0, place.seat.clone());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let worker = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (socket, from) = listener.accept().unwrap();
        let joins = ToTrainer::Join {
            worker: Some(0),
            ticket: None,
        };
        write_message(&Stream::plain(worker), &joins).unwrap();
        let socket = Arc::new(Stream::plain(socket));
        // No connection has this number any more.
        let gone = places.serve(&socket, from, 7).unwrap_err();
        assert!(matches!(gone, LinkError::ForAnother), "{gone}");
        assert!(matches!(place.seat.lock().stage, Stage::Open));
        assert_eq!(place.hear(), None);
    }
}
