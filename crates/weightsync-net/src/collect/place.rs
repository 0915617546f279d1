//! A worker's place at its trainer: what the threads of its link and the collector share.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use weightsync_engine::{Origin, Result};
use weightsync_link::address::bad;
use weightsync_link::frame::FrameKind;
use weightsync_link::message::Message;
use weightsync_link::stream::Stream;
use weightsync_mem::threads::{CondvarExt as _, LockExt as _};
use weightsync_mem::{left, passed};

use super::incoming::{Incoming, WantedPart};
use super::{FrameReader, HEARTBEAT, LinkError, Rows, write_message, write_pieces};
use crate::error::os;
use crate::wire::message::{ToTrainer, ToWorker};

/// The most orders that may wait for a worker.
const MOST_ORDERS: usize = 1024;

/// The most messages of a worker that may wait for the trainer, of at most 64 KiB each. A worker
/// that keeps to its orders says three: that it is ready, that it has joined, and its last words.
const MOST_HEARD: usize = 16;

const OVERRUN: &str = "more orders wait for it than it may have: 1,024";

/// A worker's place. It is for one life of the worker.
///
/// **Guarantee.** Once [`cut`](Self::cut) has returned, nothing that the worker sent is written any
/// more. Dropping it does the same.
#[derive(Debug)]
pub struct WorkerSeat {
    pub(super) seat: Arc<Seat>,
    hears: PipeReader,
    owner: Origin,
}

/// Something that a worker has said or done.
#[derive(Debug, PartialEq)]
pub struct WorkerNotice {
    /// What it is.
    pub what: NoticeKind,
    /// When it came: seconds on the system's monotonic clock.
    pub at: f64,
}

/// What a worker has said or done.
#[derive(Debug, PartialEq)]
pub enum NoticeKind {
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
    },
    /// The link has ended: nothing follows.
    Gone {
        /// Why.
        reason: String,
    },
}

impl WorkerSeat {
    pub(super) fn new(worker: u32, ticket: Option<u64>, settings: Vec<u8>) -> Result<Self> {
        let (hears, rings) = io::pipe().map_err(os("opening a pipe"))?;
        let seat = Arc::new(Seat {
            worker,
            ticket,
            rings,
            state: Mutex::new(SeatState {
                stage: Stage::Open,
                settings,
                orders: VecDeque::new(),
                wanted: VecDeque::new(),
                heard: VecDeque::new(),
                last: Instant::now(),
                overrun: false,
            }),
            changed: Condvar::new(),
        });
        Ok(Self {
            seat,
            hears,
            owner: Origin::here(),
        })
    }

    /// A descriptor that is readable while there is something to hear.
    pub fn fd(&self) -> RawFd {
        self.hears.as_raw_fd()
    }

    #[cfg(test)]
    pub(super) fn hears(&self) -> &PipeReader {
        &self.hears
    }

    /// Sends an order, once the worker is there. If too many wait already the link ends.
    pub fn order(&self, json: String) {
        self.seat.send(ToWorker::Order { json });
    }

    /// Says where the bytes of a part belong, before the order for it: columns in the order in which
    /// the worker sends them. The worker has to send exactly as many.
    ///
    /// # Errors
    ///
    /// [`Error::BadSetting`](weightsync_engine::Error::BadSetting) for rows beyond 64 bits.
    pub fn expect(&self, part: u64, file: File, rows: Vec<Rows>) -> Result<()> {
        let wanted = WantedPart::new(part, file, rows)
            .ok_or_else(|| bad("rows", "places within 64 bits", "more"))?;
        self.seat.lock().wanted.push_back(wanted);
        Ok(())
    }

    /// The next thing that the worker has said or done, if there is any.
    pub fn hear(&self) -> Option<WorkerNotice> {
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

impl Drop for WorkerSeat {
    fn drop(&mut self) {
        // In a forked child the connection is the parent's.
        if self.owner.is_here() {
            self.cut();
        }
    }
}

/// What the threads of a link and the trainer share.
#[derive(Debug)]
pub(super) struct Seat {
    worker: u32,
    pub(super) ticket: Option<u64>,
    /// Has a byte in it while something was heard.
    rings: PipeWriter,
    state: Mutex<SeatState>,
    changed: Condvar,
}

#[derive(Debug)]
pub(super) struct SeatState {
    pub(super) stage: Stage,
    /// Until they are sent: a policy may be large.
    settings: Vec<u8>,
    orders: VecDeque<ToWorker>,
    wanted: VecDeque<WantedPart>,
    heard: VecDeque<WorkerNotice>,
    /// When something came from the worker.
    pub(super) last: Instant,
    /// Too many orders waited.
    overrun: bool,
}

#[derive(Debug)]
pub(super) enum Stage {
    /// A worker may join.
    Open,
    /// A worker has this link.
    Taken(TcpStream),
    Gone,
}

impl SeatState {
    /// Nothing is kept of what the worker was to get, nor are descriptors of the collector's memory.
    fn end(&mut self) {
        self.stage = Stage::Gone;
        self.settings = Vec::new();
        self.orders.clear();
        self.wanted.clear();
    }
}

impl Seat {
    pub(super) fn lock(&self) -> MutexGuard<'_, SeatState> {
        self.state.locked()
    }

    fn send(&self, message: ToWorker) {
        let mut state = self.lock();
        if state.orders.len() < MOST_ORDERS {
            state.orders.push_back(message);
            drop(state);
            self.changed.notify_all();
            return;
        }
        // To drop an order would leave the worker waiting, so the link ends.
        state.overrun = true;
        match &state.stage {
            Stage::Open => {
                state.end();
                let reason = OVERRUN.into();
                self.note(&mut state, NoticeKind::Gone { reason });
            }
            // The threads of the link find it closed, and end the stage.
            Stage::Taken(socket) => drop(socket.shutdown(Shutdown::Both)),
            Stage::Gone => {}
        }
    }

    fn leave(&self) {
        let mut state = self.lock();
        match state.stage {
            Stage::Open => state.end(),
            Stage::Gone => {}
            Stage::Taken(_) => {
                drop(state);
                let reason = String::new();
                self.send(ToWorker::End { reason });
            }
        }
        self.changed.notify_all();
    }

    pub(super) fn cut(&self) {
        let mut state = self.lock();
        match &state.stage {
            Stage::Open => state.end(),
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
            if passed(until) {
                return false;
            }
            state = self
                .changed
                .wait_at_most(state, left(until).unwrap_or(HEARTBEAT));
        }
        true
    }

    /// False if so much waits already that the worker is not to be heard any more.
    fn say(&self, what: NoticeKind) -> bool {
        let mut state = self.lock();
        self.note(&mut state, what)
    }

    pub(super) fn note(&self, state: &mut SeatState, what: NoticeKind) -> bool {
        let is_said = |what: &NoticeKind| matches!(what, NoticeKind::Said { .. });
        let said = state.heard.iter().filter(|one| is_said(&one.what));
        // Parts are as many as were asked for.
        if is_said(&what) && said.count() >= MOST_HEARD {
            return false;
        }
        // The pipe holds one byte at the most, so this write never waits.
        if state.heard.is_empty() {
            let _ = (&self.rings).write(&[1]);
        }
        let now = clock_gettime(ClockId::Monotonic);
        let at = now.tv_sec as f64 + now.tv_nsec as f64 / 1e9;
        state.heard.push_back(WorkerNotice { what, at });
        true
    }

    /// Sends what the trainer has to say, and signs of life, until the link ends.
    pub(super) fn write(&self, socket: &Stream) -> Result<(), LinkError> {
        // Taken out: they may be large, and are sent once.
        let settings = std::mem::take(&mut self.lock().settings);
        let (worker, bytes) = (self.worker, settings.len() as u64);
        write_message(socket, &ToWorker::Welcome { worker, bytes })?;
        write_pieces(socket, &settings)?;
        drop(settings);
        loop {
            let mut state = self.lock();
            let mut message = state.orders.pop_front();
            if message.is_none() && matches!(state.stage, Stage::Taken(_)) {
                state = self.changed.wait_at_most(state, HEARTBEAT);
                message = state.orders.pop_front();
            }
            // An order that was taken is lost then, with all others.
            if !matches!(state.stage, Stage::Taken(_)) {
                return Ok(());
            }
            // The write may wait for a slow worker. The trainer must not wait with it.
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
    pub(super) fn read(&self, frames: &mut FrameReader) -> LinkError {
        let mut incoming = Incoming::default();
        loop {
            let next = frames.next();
            self.lock().last = Instant::now();
            let heard = match next {
                Ok((FrameKind::Piece, piece)) => incoming.piece(piece).map_err(LinkError::Part),
                Ok((_, payload)) => match ToTrainer::decode(payload) {
                    Ok(message) => {
                        let wanted = &mut self.lock().wanted;
                        incoming.message(message, wanted).map_err(LinkError::Part)
                    }
                    Err(error) => Err(error.into()),
                },
                Err(gone) => Err(gone),
            };
            match heard {
                Ok(None) => {}
                Ok(Some(what)) => {
                    if !self.say(what) {
                        return LinkError::Flood;
                    }
                }
                Err(gone) => return gone,
            }
        }
    }
}

/// A worker's link. It ends in order also where its thread panics.
pub(super) struct WorkerLink<'a> {
    pub(super) seat: &'a Seat,
    pub(super) socket: &'a Stream,
    pub(super) from: SocketAddr,
    /// None: its thread panics.
    pub(super) ended: Option<LinkError>,
}

impl Drop for WorkerLink<'_> {
    fn drop(&mut self) {
        let mut state = self.seat.lock();
        state.end();
        let why = match &self.ended {
            // The overrun shut the connection down, so the error of the read says nothing new.
            _ if state.overrun => OVERRUN.into(),
            Some(gone) => gone.to_string(),
            None => "its thread has panicked".into(),
        };
        let reason = format!("the link to it, from {}, has ended: {why}", self.from);
        self.seat.note(&mut state, NoticeKind::Gone { reason });
        drop(state);
        // A worker that sees the end knows that all was noted.
        let _ = self.socket.shutdown(Shutdown::Both);
        self.seat.changed.notify_all();
    }
}
