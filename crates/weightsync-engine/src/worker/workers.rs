//! The trainer's side: a group of workers, what it sends them and what it hears from them.

use std::collections::VecDeque;
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::error::WorkerError;
use super::exit::Exit;
use super::frame::{PipeFrameKind, header};
use super::pipe;
use super::process::FRAME_COST;
use super::spawn::{Spawn, check_len};
use super::system;
use super::wait::{Owner, WaitEnd, Waker, deadline, wait, wait_or_interrupt};
use super::watch::Watcher;
use weightsync_mem::threads::{self, LockExt as _};

/// How long a process may take to die of SIGKILL. Only an uninterruptible wait in the kernel
/// takes longer.
const DEATH: Duration = Duration::from_secs(5);

/// Something heard from a worker.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// A frame it sent.
    Frame(Vec<u8>),
    /// Its process has ended. Everything it sent has been delivered before; whatever comes after
    /// is from the process that was started in its place.
    Exited(Exit),
}

/// A running group of worker processes; made with [`Spawn::start`].
///
/// It can be shared between threads. Dropping it shuts the group down with the group's grace as
/// timeout. A forked copy of the trainer cannot use it: calls fail with
/// [`WorkerError::Forked`] or find no worker, and dropping it there does nothing.
pub struct Workers {
    shared: Arc<WorkerGroup>,
    watcher: Mutex<Option<JoinHandle<()>>>,
    count: usize,
    max_frame: u32,
    grace: Duration,
    owner: Owner,
}

impl Workers {
    /// How many workers the group has, running or not.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether the group was started with a count of 0.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// How many workers have a running process.
    pub fn running(&self) -> usize {
        // In a forked copy the lock may be held forever, by a thread that is not there.
        match self.owner.check() {
            Ok(()) => self.shared.state.locked().running(),
            Err(_) => 0,
        }
    }

    /// The process id of a worker; `None` while it has no process, or when there is no such worker.
    pub fn pid(&self, worker: usize) -> Option<u32> {
        self.check(worker).ok()?;
        let state = self.shared.state.locked();
        Some(state.slots.get(worker)?.link.as_ref()?.pid)
    }

    /// Sends a frame to a worker, and returns once it is in the worker's pipe: at once unless the
    /// worker lags behind. Without a timeout it waits until the worker reads, dies, or the group
    /// is shut down.
    ///
    /// # Errors
    /// * [`WorkerError::Gone`] when the worker is dead or dies meanwhile;
    /// * [`WorkerError::SendTimeout`] when it does not read in time;
    /// * [`WorkerError::Interrupted`], which says whether the frame was begun, as the timeout does;
    /// * [`WorkerError::FrameTooLong`] before anything is sent;
    /// * [`WorkerError::NoSuchWorker`], [`WorkerError::ShutDown`], [`WorkerError::Forked`].
    // Longer than a screen: the way of one frame under one lock, which only the waits give up. What
    // each wait may end with follows from how much of the frame is in the pipe by then.
    pub fn send(
        &self,
        worker: usize,
        frame: &[u8],
        timeout: Option<Duration>,
    ) -> Result<(), WorkerError> {
        self.check(worker)?;
        check_len(frame.len(), self.max_frame)?;
        let deadline = deadline(timeout);
        let too_late = |ended, begun| match ended {
            WaitEnd::Deadline => WorkerError::SendTimeout {
                worker,
                waited: timeout.unwrap_or_default(),
                begun,
            },
            WaitEnd::Interrupted => WorkerError::Interrupted { begun },
        };
        let place = (&self.shared.state, &self.shared.changed);

        // Our turn comes when the frame before ours is in the pipe.
        let mut state = self.shared.state.locked();
        // Each turn looks at the worker again: it may have died, or have a new process.
        let link = loop {
            let link = state.link(worker)?;
            if state.slots[worker].outbox.is_empty() {
                break link;
            }
            state = wait_or_interrupt(place, state, deadline)
                .map_err(|(_, ended)| too_late(ended, false))?;
        };

        let header = header(PipeFrameKind::User, frame.len() as u32);
        // Under the lock: no other thread's frame gets between the parts of this one.
        let done = pipe::write(&*link.socket, &header, frame, 0)
            .map_err(|_| state.slots[worker].gone(worker))?;
        if done == header.len() + frame.len() {
            return Ok(());
        }

        // The rest is for the watching thread to write, as the worker makes room.
        let pid = link.pid;
        let turn = state.slots[worker].outbox.fill(&header, frame, done);
        self.shared.waker.wake();
        loop {
            state = match wait_or_interrupt(place, state, deadline) {
                Ok(state) => state,
                Err((mut state, ended)) => {
                    // The worker may have died while the interrupt check ran, without the lock. Its
                    // end clears the outbox too, and the rest of the frame is lost then.
                    if state.link(worker)?.pid != pid {
                        return Err(state.slots[worker].gone(worker));
                    }
                    let outbox = &mut state.slots[worker].outbox;
                    if !outbox.is_waiting(turn) {
                        return Ok(());
                    }
                    // Part of the frame is in the pipe. The watching thread writes the rest in any
                    // case.
                    if outbox.begun() {
                        return Err(too_late(ended, true));
                    }
                    // Not a byte has left: the frame is withdrawn, and the next sender has its
                    // turn.
                    outbox.clear();
                    self.shared.changed.notify_all();
                    return Err(too_late(ended, false));
                }
            };
            // A new process has the worker's place. The rest of this frame went with the old one.
            if state.link(worker)?.pid != pid {
                return Err(state.slots[worker].gone(worker));
            }
            if !state.slots[worker].outbox.is_waiting(turn) {
                return Ok(());
            }
        }
    }

    /// The next event of any worker, in the order in which they were read. `None` when `timeout`
    /// has passed, or when no worker is running and everything has been delivered: then nothing
    /// can come. Without a timeout it waits until then. `None` also if it is
    /// [interrupted](crate::interruptible).
    pub fn recv_any(&self, timeout: Option<Duration>) -> Option<(usize, Event)> {
        self.owner.check().ok()?;
        let deadline = deadline(timeout);
        let mut state = self.shared.state.locked();
        loop {
            if let Some((worker, event)) = state.events.pop_front() {
                let slot = &mut state.slots[worker];
                match &event {
                    Event::Frame(frame) => slot.queued -= frame.len() + FRAME_COST,
                    Event::Exited(_) => slot.untold -= 1,
                }
                // The watching thread stopped at this worker's full queue: it looks again.
                if std::mem::take(&mut slot.paused) {
                    self.shared.waker.wake();
                }
                return Some((worker, event));
            }
            // Without a process, and without a restart under way, no event can come.
            if state.finished || (state.running() == 0 && state.restarting == 0) {
                return None;
            }
            let place = (&self.shared.state, &self.shared.changed);
            state = wait_or_interrupt(place, state, deadline).ok()?;
        }
    }

    /// Starts a new process for a worker, with new init bytes or, with `None`, those of before. A
    /// process that still runs is killed first, and its [`Event::Exited`] comes before anything of
    /// the new one. Returns the new process id.
    ///
    /// # Errors
    /// * [`WorkerError::Spawn`] and [`WorkerError::Os`] when the process cannot be started: the
    ///   worker then has none;
    /// * [`WorkerError::FrameTooLong`] when the init bytes are longer than a frame may be;
    /// * [`WorkerError::Unkillable`], [`WorkerError::NoSuchWorker`], [`WorkerError::ShutDown`],
    ///   [`WorkerError::Forked`].
    pub fn restart(&self, worker: usize, init: Option<Vec<u8>>) -> Result<u32, WorkerError> {
        self.check(worker)?;
        check_len(init.as_ref().map_or(0, Vec::len), self.max_frame)?;
        let (reply, answer) = sync_channel(1);
        let mut state = self.shared.state.locked();
        if state.closing || state.finished {
            return Err(WorkerError::ShutDown);
        }
        // Counted before the old process is killed: `recv_any` must not take the time without a
        // process for the end.
        state.restarting += 1;
        state.requests.push(RestartRequest {
            worker,
            init: init.map(Arc::from),
            reply,
        });
        drop(state);
        self.shared.waker.wake();

        // The old process has to die first. After a timeout the request stands: the process is
        // started as soon as the old one has died.
        let answer = answer.recv_timeout(DEATH);
        self.shared.state.locked().restarting -= 1;
        self.shared.changed.notify_all();
        match answer {
            Ok(answer) => answer,
            Err(RecvTimeoutError::Timeout) => Err(WorkerError::Unkillable {
                worker,
                waited: DEATH,
            }),
            // The watching thread is gone, and the request with it.
            Err(RecvTimeoutError::Disconnected) => Err(WorkerError::ShutDown),
        }
    }

    /// Kills a worker's process, if it has one. Its [`Event::Exited`] follows, and the restart
    /// policy lets it rest.
    ///
    /// # Errors
    /// [`WorkerError::NoSuchWorker`], [`WorkerError::Forked`].
    pub fn kill(&self, worker: usize) -> Result<(), WorkerError> {
        self.check(worker)?;
        let mut state = self.shared.state.locked();
        let slot = &mut state.slots[worker];
        if let Some(link) = &slot.link {
            // Before the signal: the watching thread must not take this end for a crash, and
            // restart it.
            slot.killed = true;
            link.kill();
            // The watching thread may have put off the end of this worker: wake it to look again.
            self.shared.waker.wake();
        }
        Ok(())
    }

    /// Ends the group, and returns how each worker last ended, by index. Closing every pipe asks
    /// the workers to end. Workers that have not ended within `timeout` are killed; so are workers
    /// whose grace is over, and all of them when this is [interrupted](crate::interruptible).
    /// What workers sent before can still be received. Shutting down again changes nothing and
    /// returns the same.
    ///
    /// Every process, thread and descriptor of the group is gone when it returns, except for a
    /// process the kernel holds in an uninterruptible wait: its exit has neither status nor signal.
    pub fn shutdown(&self, timeout: Option<Duration>) -> Vec<Exit> {
        if self.owner.check().is_err() {
            return Vec::new();
        }
        let mut state = self.shared.state.locked();
        // The watching thread closes the pipes, which asks the workers to end.
        state.closing = true;
        self.shared.waker.wake();
        let until = deadline(timeout);
        let place = (&self.shared.state, &self.shared.changed);
        while state.running() > 0 && !state.finished {
            // An interrupt has them killed now.
            state = match wait_or_interrupt(place, state, until) {
                Ok(state) => state,
                Err((late, _)) => {
                    state = late;
                    break;
                }
            };
        }
        // The time is over, or the caller does not want to wait: SIGKILL.
        if state.running() > 0 {
            state
                .slots
                .iter()
                .filter_map(|slot| slot.link.as_ref())
                .for_each(ProcessLink::kill);
            state = self.until_none_runs(state, deadline(Some(DEATH)));
        }
        // What still runs now is held by the kernel. The watching thread does not wait for it.
        state.abandoned = true;
        drop(state);
        self.shared.waker.wake();

        // A second caller waits here for the first.
        let mut watcher = self.watcher.locked();
        if let Some(watcher) = watcher.take()
            && watcher.join().is_err()
        {
            tracing::error!("the thread that watches the workers panicked; the workers are ended");
        }
        let state = self.shared.state.locked();
        state
            .slots
            .iter()
            .filter_map(|slot| slot.exit.clone())
            .collect()
    }

    /// Starts the watching thread, which starts the workers.
    pub(super) fn start(spawn: Spawn, inits: Vec<Arc<[u8]>>) -> Result<Self, WorkerError> {
        let count = spawn.worker_count();
        let (max_frame, grace) = (spawn.max_frame, spawn.grace);
        let shared = Arc::new(WorkerGroup {
            state: Mutex::new(GroupState {
                slots: (0..count).map(|_| WorkerSlot::default()).collect(),
                ..GroupState::default()
            }),
            changed: Condvar::new(),
            waker: Waker::new()?,
        });
        let (started, answer) = sync_channel(1);
        let theirs = Arc::clone(&shared);
        // This thread starts all processes, also at a restart: each is killed when it ends.
        let watcher = threads::spawn("workers", move || {
            Watcher::new(theirs, spawn, inits).run(&started)
        })
        .map_err(WorkerError::os("starting the thread that watches workers"))?;
        match answer.recv() {
            Ok(Ok(())) => Ok(Self {
                shared,
                watcher: Mutex::new(Some(watcher)),
                count,
                max_frame,
                grace,
                owner: Owner::this_process(),
            }),
            Ok(Err(error)) => {
                // The answer is its last act but for cleaning up; nothing is left once it is joined.
                let _ = watcher.join();
                Err(error)
            }
            Err(_) => {
                let _ = watcher.join();
                Err(WorkerError::ShutDown)
            }
        }
    }

    fn until_none_runs<'a>(
        &'a self,
        mut state: MutexGuard<'a, GroupState>,
        deadline: Option<Instant>,
    ) -> MutexGuard<'a, GroupState> {
        while state.running() > 0 && !state.finished {
            state = match wait(&self.shared.changed, state, deadline) {
                Ok(state) => state,
                Err(state) => return state,
            };
        }
        state
    }

    fn check(&self, worker: usize) -> Result<(), WorkerError> {
        self.owner.check()?;
        if worker >= self.count {
            return Err(WorkerError::NoSuchWorker {
                worker,
                count: self.count,
            });
        }
        Ok(())
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.shutdown(Some(self.grace));
    }
}

impl fmt::Debug for Workers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Workers")
            .field("len", &self.count)
            .field("running", &self.running())
            .finish_non_exhaustive()
    }
}

/// What the callers and the watching thread share.
pub(super) struct WorkerGroup {
    pub(super) state: Mutex<GroupState>,
    pub(super) changed: Condvar,
    pub(super) waker: Waker,
}

#[derive(Default)]
pub(super) struct GroupState {
    pub(super) slots: Vec<WorkerSlot>,
    pub(super) events: VecDeque<(usize, Event)>,
    pub(super) requests: Vec<RestartRequest>,
    /// How many callers wait for a restart.
    restarting: usize,
    /// How many processes have started in place of others that have ended, and are in no slot yet.
    pub(super) starting: usize,
    /// The group is being shut down.
    pub(super) closing: bool,
    /// The watching thread is to end whatever still runs.
    pub(super) abandoned: bool,
    /// The watching thread is gone.
    pub(super) finished: bool,
}

impl GroupState {
    fn running(&self) -> usize {
        let in_slots = self.slots.iter().filter(|slot| slot.link.is_some());
        in_slots.count() + self.starting
    }

    /// Queues frames of a worker for the callers.
    pub(super) fn deliver(&mut self, worker: usize, frames: Vec<Vec<u8>>) {
        let cost: usize = frames.iter().map(|frame| frame.len() + FRAME_COST).sum();
        self.slots[worker].queued += cost;
        let events = frames
            .into_iter()
            .map(|frame| (worker, Event::Frame(frame)));
        self.events.extend(events);
    }

    /// Queues the end of a worker's process for the callers, after everything it sent.
    pub(super) fn record_exit(&mut self, worker: usize, exit: Exit) {
        let event = Event::Exited(exit.clone());
        self.events.push_back((worker, event));
        let slot = &mut self.slots[worker];
        slot.untold += 1;
        slot.exit = Some(exit);
        slot.link = None;
        slot.outbox.clear();
    }

    /// The way to a worker's process, if it can be sent to.
    fn link(&self, worker: usize) -> Result<ProcessLink, WorkerError> {
        if self.closing || self.finished {
            return Err(WorkerError::ShutDown);
        }
        let slot = &self.slots[worker];
        match &slot.link {
            Some(link) if !slot.disconnected => Ok(link.clone()),
            _ => Err(slot.gone(worker)),
        }
    }
}

/// One worker, as the callers see it.
#[derive(Default)]
pub(super) struct WorkerSlot {
    /// Its process, from the start until it has been reaped.
    pub(super) link: Option<ProcessLink>,
    /// It has closed its end of the pipe.
    pub(super) disconnected: bool,
    /// It was killed on request.
    pub(super) killed: bool,
    pub(super) outbox: Outbox,
    /// The cost of its frames among the events.
    pub(super) queued: usize,
    /// How many of its ends are among the events.
    pub(super) untold: usize,
    /// The watching thread has stopped reading its pipe, or taking note of its end, until events
    /// are taken.
    pub(super) paused: bool,
    /// How its last process ended.
    pub(super) exit: Option<Exit>,
}

impl WorkerSlot {
    fn gone(&self, worker: usize) -> WorkerError {
        // While a process is there, `exit` is that of the one before.
        let exit = self.exit.as_ref().filter(|_| self.link.is_none());
        WorkerError::Gone {
            worker,
            exit: exit.cloned().map(Box::new),
        }
    }
}

/// The way to a running process.
#[derive(Clone)]
pub(super) struct ProcessLink {
    pub(super) pid: u32,
    pub(super) pidfd: Arc<OwnedFd>,
    pub(super) socket: Arc<OwnedFd>,
}

impl ProcessLink {
    pub(super) fn kill(&self) {
        // Fails when the process has ended already, which is what the caller wants.
        let _ = system::kill(&self.pidfd);
    }
}

/// The rest of a frame that did not fit into the pipe at once.
#[derive(Default)]
pub(super) struct Outbox {
    rest: Vec<u8>,
    written: usize,
    /// Part of the frame went into the pipe before the rest came here.
    begun: bool,
    turn: u64,
}

impl Outbox {
    pub(super) fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    /// Takes in what follows the first `done` bytes of a frame, and returns its turn.
    pub(super) fn fill(&mut self, first: &[u8], second: &[u8], done: usize) -> u64 {
        // The caller's frame is copied: it may return at its deadline while the rest still waits.
        self.rest.reserve_exact(first.len() + second.len() - done);
        self.rest.extend_from_slice(&first[done.min(first.len())..]);
        self.rest
            .extend_from_slice(&second[done.saturating_sub(first.len())..]);
        self.written = 0;
        self.begun = done > 0;
        self.turn += 1;
        self.turn
    }

    /// Writes what fits; `Ok(true)` when nothing is left.
    pub(super) fn flush(&mut self, socket: &OwnedFd) -> Result<bool, pipe::Disconnected> {
        self.written = pipe::write(socket, &self.rest, &[], self.written)?;
        let done = self.written == self.rest.len();
        if done {
            self.clear();
        }
        Ok(done)
    }

    pub(super) fn clear(&mut self) {
        self.rest = Vec::new();
        self.written = 0;
    }

    fn is_waiting(&self, turn: u64) -> bool {
        self.turn == turn && !self.rest.is_empty()
    }

    fn begun(&self) -> bool {
        self.begun || self.written > 0
    }
}

/// A worker to be started again, and who wants to know.
pub(super) struct RestartRequest {
    pub(super) worker: usize,
    pub(super) init: Option<Arc<[u8]>>,
    pub(super) reply: SyncSender<Result<u32, WorkerError>>,
}
