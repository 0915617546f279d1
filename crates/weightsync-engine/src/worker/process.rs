//! A worker's side: finding the pipe, and ending with it.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::process;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, Mode, OFlags, fstat};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, getpgrp, getpid, getppid, kill_process, kill_process_group};
use serde::de::DeserializeOwned;
use weightsync_mem::interrupt;
use weightsync_mem::threads::{self, LockExt as _};

use super::error::{PipeFault, WorkerError};
use super::frame::{FrameAssembler, Greeting, PipeFrameKind, header};
use super::pipe::{self, PipeRead};
use super::wait::{Owner, WaitEnd, Waker, deadline, wait, wait_or_interrupt};
use super::{MARK, spawn, system};

/// The running program, also when its file has been replaced or removed.
pub(super) const THIS_PROGRAM: &str = "/proc/self/exe";

/// What a queued frame is counted as beyond its payload, so that empty frames are bounded too.
pub(super) const FRAME_COST: usize = 64;

/// This process's end of the pipe, if it was started as a worker, else `None`.
///
/// Call it first in `main`: from here on the process ends with its trainer. It waits for the init
/// bytes, which the trainer sends at once. Standard input is an empty file afterwards.
///
/// # Errors
/// * [`WorkerError::Closed`] when the trainer is gone already;
/// * [`WorkerError::NotAttached`] when standard input is not the pipe;
/// * [`WorkerError::AlreadyTaken`] when called a second time;
/// * [`WorkerError::Peer`] when the trainer speaks another version of the pipe.
pub fn current() -> Result<Option<WorkerProcess>, WorkerError> {
    let Some(mark) = WorkerMark::of_this_process() else {
        return Ok(None);
    };
    // Before the look at standard input, which is an empty file once the pipe is taken: a second
    // call would say that it is not attached.
    if TAKEN.load(Ordering::Acquire) {
        return Err(WorkerError::AlreadyTaken);
    }
    if !mark.is_on_stdin() {
        let parent = getppid().map_or(0, |pid| pid.as_raw_pid().unsigned_abs());
        // The mark came down with the environment: a worker started this process for itself.
        if parent != mark.trainer {
            return Ok(None);
        }
        return Err(WorkerError::NotAttached {
            trainer: mark.trainer,
        });
    }
    // Of two threads that come here at once, one takes the pipe.
    if TAKEN.swap(true, Ordering::AcqRel) {
        return Err(WorkerError::AlreadyTaken);
    }
    WorkerProcess::attach(mark.trainer).map(Some)
}

/// A worker's end of the pipe to its trainer.
///
/// It can be shared between threads. The process ends with the trainer also after this is dropped.
#[derive(Debug)]
pub struct WorkerProcess {
    shared: Arc<SharedPipe>,
    greeting: Greeting,
    init: Vec<u8>,
    /// Held for the length of a send: frames never mix.
    /// What an interrupted send left of its frame, for the next one to send first.
    sending: Mutex<Vec<u8>>,
    owner: Owner,
}

impl WorkerProcess {
    /// Which worker of the group this is, counted from 0.
    pub fn index(&self) -> usize {
        self.greeting.index as usize
    }

    /// How many workers the group has.
    pub fn count(&self) -> usize {
        self.greeting.count as usize
    }

    /// The longest frame either side may send, in bytes.
    pub fn max_frame(&self) -> usize {
        self.greeting.max_frame as usize
    }

    /// The bytes given to [`Spawn::init`](super::Spawn::init), or to the last
    /// [`Workers::restart`](super::Workers::restart).
    pub fn init(&self) -> &[u8] {
        &self.init
    }

    /// The value given to [`Spawn::init_value`](super::Spawn::init_value).
    ///
    /// # Errors
    /// [`WorkerError::Init`] or [`WorkerError::InitTooLong`] when the init bytes are not one `T`.
    pub fn init_value<T: DeserializeOwned>(&self) -> Result<T, WorkerError> {
        match postcard::take_from_bytes(&self.init)? {
            (value, []) => Ok(value),
            (_, rest) => Err(WorkerError::InitTooLong { extra: rest.len() }),
        }
    }

    /// Sends a frame to the trainer; waits while the pipe is full. Frames of several threads are
    /// sent one after the other, each whole.
    ///
    /// # Errors
    /// * [`WorkerError::FrameTooLong`], before anything is sent;
    /// * [`WorkerError::Closed`] when the trainer closed the pipe or is dead;
    /// * [`WorkerError::Interrupted`]: what was begun is finished by the next send;
    /// * [`WorkerError::Os`] when a full pipe cannot be waited for. Part of the frame may be in it
    ///   then: the pipe is of no more use.
    pub fn send(&self, frame: &[u8]) -> Result<(), WorkerError> {
        self.owner.check()?;
        spawn::check_len(frame.len(), self.greeting.max_frame)?;
        let header = header(PipeFrameKind::User, frame.len() as u32);
        let total = header.len() + frame.len();
        let socket = &self.shared.socket;
        let mut rest = self.sending.locked();
        let write = |first: &[u8], second: &[u8], done| {
            pipe::write(socket, first, second, done).map_err(|_| WorkerError::Closed)
        };
        // An interrupted send may have left the end of its frame. It goes first, or the trainer
        // would take this frame for a part of that one.
        while !rest.is_empty() {
            let done = write(&rest, &[], 0)?;
            rest.drain(..done);
            if !rest.is_empty() {
                self.until_room(false)?;
            }
        }
        let mut done = 0;
        loop {
            done = write(&header, frame, done)?;
            if done == total {
                return Ok(());
            }
            let waited = self.until_room(done > 0);
            // The trainer waits for the rest of a frame that was begun: the next send brings it.
            if let Err(WorkerError::Interrupted { begun: true }) = waited {
                rest.extend_from_slice(&header[done.min(header.len())..]);
                rest.extend_from_slice(&frame[done.saturating_sub(header.len())..]);
            }
            waited?;
        }
    }

    /// Waits until the pipe has room, or is closed, which the next write tells.
    fn until_room(&self, begun: bool) -> Result<(), WorkerError> {
        let interrupted = |_| WorkerError::Interrupted { begun };
        // Until a slice ends, so that a thread with a check asks it.
        let slice = interrupt::at_most(None).map_err(interrupted)?;
        let slice = slice.and_then(|slice| Timespec::try_from(slice).ok());
        let socket = PollFd::new(&self.shared.socket, PollFlags::OUT);
        match poll(&mut [socket], slice.as_ref()) {
            Ok(_) => Ok(()),
            Err(Errno::INTR) => interrupt::ask().map_err(interrupted),
            Err(error) => Err(WorkerError::os("waiting for room in the pipe")(error)),
        }
    }

    /// The next frame from the trainer; `None` when `timeout` has passed, or when the trainer
    /// closed the pipe or died ([`is_closed`](Self::is_closed) tells which) and nothing it sent is
    /// left: then the process is to end within the group's grace. Without a timeout it waits
    /// until then.
    ///
    /// # Errors
    /// [`WorkerError::Peer`] when the trainer sent something else than frames. The process is
    /// about to end then, as if the pipe were closed. [`WorkerError::Interrupted`].
    pub fn recv(&self, timeout: Option<Duration>) -> Result<Option<Vec<u8>>, WorkerError> {
        self.owner.check()?;
        let deadline = deadline(timeout);
        let mut state = self.shared.state.locked();
        loop {
            // Frames come before the fault and the end: they were sent before.
            if let Some(frame) = state.queue.pop_front() {
                state.queued -= frame.len() + FRAME_COST;
                // The lifeline thread reads no more until there is room.
                if std::mem::take(&mut state.paused) {
                    self.shared.waker.wake();
                }
                return Ok(Some(frame));
            }
            if let Some(fault) = state.fault {
                return Err(fault.into());
            }
            if state.closed {
                return Ok(None);
            }
            let place = (&self.shared.state, &self.shared.changed);
            state = match wait_or_interrupt(place, state, deadline) {
                Ok(state) => state,
                Err((_, WaitEnd::Deadline)) => return Ok(None),
                Err((_, WaitEnd::Interrupted)) => {
                    return Err(WorkerError::Interrupted { begun: false });
                }
            };
        }
    }

    /// Whether the trainer closed the pipe or died: then this process is to end.
    pub fn is_closed(&self) -> bool {
        self.shared.state.locked().closed
    }

    fn attach(trainer: u32) -> Result<Self, WorkerError> {
        // The second net. It fires when the trainer's spawning thread dies, which lives as long as
        // the workers do.
        system::die_with_parent().map_err(WorkerError::os("asking for a death signal"))?;
        let socket = take_stdin()?;
        system::restore_process_name();

        let shared = Arc::new(SharedPipe {
            state: Mutex::default(),
            changed: Condvar::new(),
            waker: Waker::new()?,
            socket,
        });
        let lifeline = Lifeline {
            shared: Arc::clone(&shared),
            trainer: watch_parent(trainer),
            grace: Duration::ZERO,
            queue_bytes: 0,
        };
        threads::spawn("lifeline", move || lifeline.run())
            .map_err(WorkerError::os("starting the lifeline thread"))?;

        // The lifeline thread ends this wait in any case: with the init bytes, a fault, or the end
        // of the pipe.
        let mut state = shared.state.locked();
        let (greeting, init) = loop {
            if let Some(welcome) = state.welcome.take() {
                break welcome;
            }
            if let Some(fault) = state.fault {
                return Err(fault.into());
            }
            if state.closed {
                return Err(WorkerError::Closed);
            }
            state = wait(&shared.changed, state, None).unwrap_or_else(|state| state);
        };
        drop(state);
        Ok(Self {
            shared,
            greeting,
            init,
            sending: Mutex::default(),
            owner: Owner::this_process(),
        })
    }
}

/// Refuses to go on in a worker that has not taken its pipe: it would do what its trainer does,
/// and start workers that do the same.
pub(super) fn refuse_if_not_taken() -> Result<(), WorkerError> {
    match WorkerMark::of_this_process() {
        Some(mark) if !TAKEN.load(Ordering::Acquire) && mark.is_on_stdin() => {
            Err(WorkerError::NotTaken)
        }
        _ => Ok(()),
    }
}

/// Whether [`current`] has taken this process's pipe.
static TAKEN: AtomicBool = AtomicBool::new(false);

/// The [`MARK`] a trainer puts on its workers. It goes down to their children as well, whose
/// standard input is another file: the inode tells them apart.
#[derive(Debug, PartialEq, Eq)]
struct WorkerMark {
    inode: u64,
    trainer: u32,
}

impl WorkerMark {
    fn of_this_process() -> Option<Self> {
        Self::parse(&std::env::var(MARK).ok()?)
    }

    fn parse(mark: &str) -> Option<Self> {
        let (inode, trainer) = mark.split_once(':')?;
        Some(Self {
            inode: inode.parse().ok()?,
            trainer: trainer.parse().ok()?,
        })
    }

    fn is_on_stdin(&self) -> bool {
        fstat(std::io::stdin()).is_ok_and(|stat| {
            stat.st_ino == self.inode && FileType::from_raw_mode(stat.st_mode) == FileType::Socket
        })
    }
}

/// What the lifeline thread and the callers share.
#[derive(Debug)]
struct SharedPipe {
    state: Mutex<PipeState>,
    changed: Condvar,
    waker: Waker,
    socket: OwnedFd,
}

#[derive(Debug, Default)]
struct PipeState {
    /// The greeting and the init bytes, until taken.
    welcome: Option<(Greeting, Vec<u8>)>,
    queue: VecDeque<Vec<u8>>,
    /// The cost of what is in `queue`.
    queued: usize,
    /// The lifeline thread waits for room in `queue`.
    paused: bool,
    closed: bool,
    fault: Option<PipeFault>,
}

/// The thread that reads the pipe, and ends the process with it.
struct Lifeline {
    shared: Arc<SharedPipe>,
    /// A pidfd of the trainer, where it is our parent and alive. It covers the case that another
    /// process has inherited the trainer's end of the pipe through a fork, and holds it open.
    trainer: Option<OwnedFd>,
    grace: Duration,
    queue_bytes: usize,
}

/// Why the lifeline thread stopped reading.
enum PipeEnd {
    /// The pipe was closed: the process may take its grace.
    Disconnected,
    /// The trainer broke the rules of the pipe.
    Fault(PipeFault),
    /// The trainer is dead: nobody is left to end for.
    Orphaned,
    /// The pipe cannot be watched any more. A process that would not notice its trainer's death
    /// ends, as if the pipe were closed.
    Blind,
}

impl Lifeline {
    fn run(mut self) {
        let end = self.read_to_the_end();
        let mut state = self.shared.state.locked();
        state.closed = true;
        if let PipeEnd::Fault(fault) = end {
            state.fault = Some(fault);
        }
        drop(state);
        self.shared.changed.notify_all();
        if !matches!(end, PipeEnd::Orphaned) {
            // The process normally ends while this sleeps.
            thread::sleep(self.grace);
        }
        end_this_process();
    }

    fn read_to_the_end(&mut self) -> PipeEnd {
        // Until the greeting has come, no other frame may have a payload.
        let mut assembler = FrameAssembler::new(0);
        let mut greeting = None;
        let mut disconnected = false;
        loop {
            // What is left after a hang-up is read whatever the queue holds: a socket's buffer
            // bounds it, and nobody could wait for room, as the process is about to end.
            let room = disconnected || {
                let mut state = self.shared.state.locked();
                let room = state.queued < self.queue_bytes.max(1);
                state.paused = !room;
                room
            };
            if !room {
                // The socket has data that has no room, and would be ready at once. So only its end
                // is waited for.
                match self.sleep(system::HANG_UP) {
                    Some(PipeEnd::Disconnected) => disconnected = true,
                    Some(end) => return end,
                    None => {}
                }
                continue;
            }
            let (kind, payload) = match pipe::read(&self.shared.socket, &mut assembler) {
                Ok(PipeRead::Frame(kind, payload)) => (kind, payload),
                Ok(PipeRead::Disconnected) => return PipeEnd::Disconnected,
                Ok(PipeRead::Pending) => match self.sleep(PollFlags::IN | system::HANG_UP) {
                    // Frames that the worker sent before it disconnected are still to be read.
                    Some(PipeEnd::Disconnected) => {
                        disconnected = true;
                        continue;
                    }
                    None => continue,
                    Some(end) => return end,
                },
                Err(fault) => return PipeEnd::Fault(fault),
            };
            let frame = (kind, payload);
            if let Err(fault) = self.take(frame, &mut assembler, &mut greeting) {
                return PipeEnd::Fault(fault);
            }
        }
    }

    /// Takes a frame. `greeting` has the greeting once it has come, and whether the init bytes have
    /// come too.
    ///
    /// # Errors
    ///
    /// A frame that is not valid, or is not in its turn.
    fn take(
        &mut self,
        (kind, payload): (PipeFrameKind, Vec<u8>),
        assembler: &mut FrameAssembler,
        greeting: &mut Option<(Greeting, bool)>,
    ) -> Result<(), PipeFault> {
        match (kind, *greeting) {
            (PipeFrameKind::Greeting, None) => {
                let parsed = Greeting::parse(&payload)?;
                self.grace = Duration::from_millis(parsed.grace_ms);
                self.queue_bytes = usize::try_from(parsed.queue_bytes).unwrap_or(usize::MAX);
                assembler.set_max_frame(parsed.max_frame as usize);
                *greeting = Some((parsed, false));
            }
            // The init bytes follow the greeting at once, and come once.
            (PipeFrameKind::Init, Some((parsed, false))) => {
                *greeting = Some((parsed, true));
                self.shared.state.locked().welcome = Some((parsed, payload));
                self.shared.changed.notify_all();
            }
            (PipeFrameKind::User, Some((_, true))) => {
                let mut state = self.shared.state.locked();
                state.queued += payload.len() + FRAME_COST;
                state.queue.push_back(payload);
                drop(state);
                self.shared.changed.notify_all();
            }
            (kind, _) => return Err(PipeFault::OutOfTurn { kind: kind as u8 }),
        }
        Ok(())
    }

    /// Sleeps until the socket has one of `events`, the callers made room, or the end has come.
    fn sleep(&self, events: PollFlags) -> Option<PipeEnd> {
        let SharedPipe { socket, waker, .. } = &*self.shared;
        let mut fds = vec![
            PollFd::new(socket, events),
            PollFd::new(waker, PollFlags::IN),
        ];
        if let Some(trainer) = &self.trainer {
            fds.push(PollFd::new(trainer, PollFlags::IN));
        }
        match poll(&mut fds, None) {
            Ok(_) => {}
            // Look again.
            Err(Errno::INTR) => return None,
            Err(error) => {
                tracing::error!(%error, "the trainer cannot be watched any more: this worker ends");
                return Some(PipeEnd::Blind);
            }
        }
        let ready = |index: usize| fds.get(index).map_or(PollFlags::empty(), PollFd::revents);
        // Before the hang-up: the death of the trainer gives this process no grace.
        if !ready(2).is_empty() {
            return Some(PipeEnd::Orphaned);
        }
        waker.clear();
        ready(0)
            .intersects(PollFlags::HUP | system::HANG_UP | PollFlags::ERR)
            .then_some(PipeEnd::Disconnected)
    }
}

/// Moves the pipe from standard input to a descriptor that closes on exec, and leaves an empty
/// file in its place, so that no child of this process inherits the lifeline.
fn take_stdin() -> Result<OwnedFd, WorkerError> {
    let socket = rustix::io::fcntl_dupfd_cloexec(std::io::stdin(), 3)
        .map_err(WorkerError::os("duplicating standard input"))?;
    let null = rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
        .map_err(WorkerError::os("opening /dev/null"))?;
    rustix::stdio::dup2_stdin(null.as_fd()).map_err(WorkerError::os("replacing standard input"))?;
    Ok(socket)
}

/// A pidfd of the trainer, if it is our parent. If it is not, either it is dead already, which the
/// pipe tells, or a launcher stands between us, which the death signal then follows.
fn watch_parent(trainer: u32) -> Option<OwnedFd> {
    let parent = getppid().filter(|pid| pid.as_raw_pid().unsigned_abs() == trainer)?;
    let pidfd = system::open_process(parent).ok()?;
    // Still our parent after opening: the pidfd is of no later process with the same number.
    (getppid() == Some(parent)).then_some(pidfd)
}

/// Ends this process at once, with its process group where it leads one. SIGKILL rather than an
/// orderly exit, which runs handlers that may wait for the very thread that hangs.
fn end_this_process() -> ! {
    let this: Pid = getpid();
    // The processes that this worker has started go with it.
    if getpgrp() == this {
        let _ = kill_process_group(this, Signal::KILL);
    }
    let _ = kill_process(this, Signal::KILL);
    // Not reached: the signal is delivered before the call returns.
    process::abort()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_read_exactly() {
        let mark = WorkerMark {
            inode: 12,
            trainer: 7,
        };
        assert_eq!(WorkerMark::parse("12:7"), Some(mark));
        for wrong in [
            "",
            ":",
            "12",
            "12:",
            ":7",
            "12:7:",
            "-1:7",
            "12:99999999999",
            "a:b",
        ] {
            assert_eq!(WorkerMark::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_process_nobody_started_as_a_worker_is_none() {
        assert!(matches!(current(), Ok(None)));
    }
}
