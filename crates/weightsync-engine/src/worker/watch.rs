//! The thread that starts the workers, watches them and reaps them. It is one thread because the
//! kernel's death signal follows the thread that started a process: it lives as long as they do.
//!
//! Each turn: see what is wanted, sleep until a descriptor is ready, do what it calls for.

use std::os::fd::{AsFd, OwnedFd};
use std::process::Child;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::Shutdown;
use rustix::process::{Pid, Signal, kill_process_group};

use super::error::{PipeFault, WorkerError};
use super::exit::{Exit, StderrTail};
use super::frame::{FrameAssembler, Greeting, PIPE_VERSION, PipeFrameKind};
use super::pipe::{self, PipeRead};
use super::process::FRAME_COST;
use super::spawn::{Launched, Restart, Spawn, StderrLine};
use super::system;
use super::workers::{ProcessLink, RestartRequest, WorkerGroup};
use weightsync_mem::threads::LockExt as _;

/// Frames read from one worker before the others get their turn.
const FRAMES_PER_TURN: usize = 32;

/// Bytes read of a dead worker's pipes at most. The sockets and pipes of Linux hold far less; the
/// bound is against a descendant that left the process group and goes on writing.
const LAST_BYTES: usize = 16 << 20;

/// Bytes read of a worker's standard error in one go.
const STDERR_CHUNK: usize = 16 * 1024;

/// How long the end of killed processes is waited for when the thread itself ends.
const LAST_WAIT: Duration = Duration::from_secs(1);

pub(super) struct Watcher {
    shared: Arc<WorkerGroup>,
    spawn: Spawn,
    on_stderr_line: Option<StderrLine>,
    inits: Vec<Arc<[u8]>>,
    running: Vec<Option<RunningProcess>>,
    /// Restarts that wait for the death of the process before.
    awaited: Vec<Option<RestartRequest>>,
    /// How often the restart policy has acted, by worker.
    restarts: Vec<u32>,
    closed: bool,
}

/// One process and what is being read from it.
struct RunningProcess {
    child: Child,
    link: ProcessLink,
    assembler: FrameAssembler,
    /// Its socket is still read: neither at its end nor given up.
    reading: bool,
    stderr: Option<OwnedFd>,
    tail: StderrTail,
    fault: Option<PipeFault>,
}

/// What became ready.
#[derive(Clone, Copy)]
enum Ready {
    Wake,
    Socket(usize, PollFlags),
    Stderr(usize),
    Exit(usize),
}

impl Watcher {
    pub(super) fn new(shared: Arc<WorkerGroup>, mut spawn: Spawn, inits: Vec<Arc<[u8]>>) -> Self {
        let count = inits.len();
        Self {
            shared,
            on_stderr_line: spawn.on_stderr_line.take(),
            spawn,
            inits,
            running: (0..count).map(|_| None).collect(),
            awaited: (0..count).map(|_| None).collect(),
            restarts: vec![0; count],
            closed: false,
        }
    }

    /// Starts the workers, says so, and watches them until the group is shut down.
    pub(super) fn run(mut self, started: &SyncSender<Result<(), WorkerError>>) {
        let launched = (0..self.inits.len()).try_for_each(|worker| self.begin(worker));
        // The first failure ends the loop. The drop of this value then ends the workers that have
        // started.
        let failed = launched.is_err();
        // The caller waits for this answer.
        let _ = started.send(launched);
        while !failed && self.prepare() {
            // Without a poll no death is noticed: the drop of this value ends the workers.
            let Some(ready) = self.sleep() else { return };
            for ready in ready {
                match ready {
                    Ready::Wake => self.shared.waker.clear(),
                    Ready::Socket(worker, flags) => self.serve_socket(worker, flags),
                    Ready::Stderr(worker) => self.read_stderr(worker, 1),
                    Ready::Exit(worker) => self.reap(worker),
                }
            }
        }
    }

    fn begin(&mut self, worker: usize) -> Result<(), WorkerError> {
        let running = self.launch(worker, None)?;
        self.enrol(worker, running);
        Ok(())
    }

    /// Does what callers have asked for; `false` when the thread is to end.
    fn prepare(&mut self) -> bool {
        // What the callers want, taken in one step. The lock is released before a process is
        // started, which may take long.
        let mut state = self.shared.state.locked();
        let (closing, abandoned) = (state.closing, state.abandoned);
        let requests = std::mem::take(&mut state.requests);
        if closing {
            // A frame that waits for room never leaves any more: its caller sees the closing group.
            state.slots.iter_mut().for_each(|slot| slot.outbox.clear());
        }
        drop(state);

        for request in requests {
            let worker = request.worker;
            if closing {
                answer(request, Err(WorkerError::ShutDown));
            } else if let Some(running) = &self.running[worker] {
                // The process is only killed here. `reap` reports its end, and then starts the next
                // one.
                running.link.kill();
                // The later of two requests for one worker wins.
                if let Some(earlier) = self.awaited[worker].replace(request) {
                    answer(earlier, Err(WorkerError::Gone { worker, exit: None }));
                }
            } else {
                self.restart(request);
            }
        }
        // The group is shutting down: every pipe is closed once, which asks the workers to end.
        if closing && !self.closed {
            self.closed = true;
            for running in self.running.iter_mut().flatten() {
                // A drop would close nothing: a caller in `send` may hold the socket, too.
                // Fails when the worker closed its end first.
                let _ = rustix::net::shutdown(&*running.link.socket, Shutdown::Both);
                // From here on each poll would find the socket ready. `reap` reads what is left in
                // it.
                running.reading = false;
            }
            self.shared.changed.notify_all();
        }
        // The thread ends once every process is reaped, or once the shutdown has given the rest up.
        let over = closing && self.running.iter().all(Option::is_none);
        !(abandoned || over)
    }

    /// Sleeps until something is ready, and returns it; deaths last, so that what a worker said
    /// comes before its end. `None` when polling is impossible, which ends the group.
    fn sleep(&self) -> Option<Vec<Ready>> {
        let mut fds = vec![PollFd::new(&self.shared.waker, PollFlags::IN)];
        let mut tags = vec![Ready::Wake];
        let mut watch = |fd, flags, tag| {
            fds.push(PollFd::from_borrowed_fd(fd, flags));
            tags.push(tag);
        };
        // Room and `paused` belong together under this lock: a caller that takes an event then sees
        // `paused`, and wakes this thread.
        let mut state = self.shared.state.locked();
        let closing = state.closing;
        let mut reapable = Vec::with_capacity(self.running.len());
        for (worker, running) in self.running.iter().enumerate() {
            let Some(running) = running else { continue };
            let slot = &mut state.slots[worker];
            let room = slot.queued < self.spawn.queue_bytes.max(1);
            // One that keeps dying is started again only as fast as its ends are received: the
            // events stay bounded, and a broken program is not run in a tight loop.
            let held = slot.untold > 0 && !closing && self.may_restart(worker, slot.killed);
            slot.paused = held || (running.reading && !room);
            if !held {
                reapable.push((worker, running));
            }
            let mut wanted = PollFlags::empty();
            wanted.set(PollFlags::IN, running.reading && room);
            wanted.set(PollFlags::OUT, !slot.outbox.is_empty());
            // A socket nothing is wanted of is left out: its hang-up would be ready forever.
            if !wanted.is_empty() {
                watch(
                    running.link.socket.as_fd(),
                    wanted,
                    Ready::Socket(worker, wanted),
                );
            }
            if let Some(stderr) = &running.stderr {
                watch(stderr.as_fd(), PollFlags::IN, Ready::Stderr(worker));
            }
        }
        drop(state);
        // Last in the list, because `run` serves it in order.
        for (worker, running) in reapable {
            watch(
                running.link.pidfd.as_fd(),
                PollFlags::IN,
                Ready::Exit(worker),
            );
        }
        poll_all(&mut fds, tags)
    }

    fn serve_socket(&mut self, worker: usize, wanted: PollFlags) {
        // What was asked for is tried, whatever the poll said: neither call blocks, and each finds
        // a hang-up.
        if wanted.contains(PollFlags::OUT) {
            self.flush(worker);
        }
        if wanted.contains(PollFlags::IN) {
            // The lock is not held for the read: callers take events meanwhile.
            let room = {
                let state = self.shared.state.locked();
                self.spawn
                    .queue_bytes
                    .max(1)
                    .saturating_sub(state.slots[worker].queued)
            };
            // A few frames at a time, so that one busy worker does not hold up the others.
            let frames = self.read_frames(worker, FRAMES_PER_TURN, room);
            let disconnected = self.running[worker]
                .as_ref()
                .is_some_and(|running| !running.reading);
            let mut state = self.shared.state.locked();
            state.slots[worker].disconnected |= disconnected;
            state.deliver(worker, frames);
            drop(state);
            self.shared.changed.notify_all();
        }
    }

    fn flush(&mut self, worker: usize) {
        let Some(running) = &self.running[worker] else {
            return;
        };
        // Held for the write: a caller sees the outbox before it or after it.
        let mut state = self.shared.state.locked();
        let slot = &mut state.slots[worker];
        match slot.outbox.flush(&running.link.socket) {
            // The rest still waits for room, so no caller has anything to see.
            Ok(false) => return,
            Ok(true) => {}
            Err(pipe::Disconnected) => {
                // The caller in `send` gets `Gone`.
                slot.outbox.clear();
                slot.disconnected = true;
            }
        }
        drop(state);
        self.shared.changed.notify_all();
    }

    /// Reads up to `max` frames, stopping once they cost `room` or more.
    fn read_frames(&mut self, worker: usize, max: usize, room: usize) -> Vec<Vec<u8>> {
        let mut frames = Vec::new();
        let Some(running) = &mut self.running[worker] else {
            return frames;
        };
        // One frame may go beyond the room. Otherwise a frame longer than the queue would never
        // come.
        let mut cost = 0;
        while running.reading && frames.len() < max && cost < room {
            match pipe::read(&*running.link.socket, &mut running.assembler) {
                Ok(PipeRead::Frame(PipeFrameKind::User, frame)) => {
                    cost += frame.len() + FRAME_COST;
                    frames.push(frame);
                }
                // Only a trainer sends greetings and init bytes.
                Ok(PipeRead::Frame(kind, _)) => {
                    running.condemn(PipeFault::OutOfTurn { kind: kind as u8 });
                }
                Ok(PipeRead::Pending) => break,
                Ok(PipeRead::Disconnected) => running.reading = false,
                Err(fault) => running.condemn(fault),
            }
        }
        frames
    }

    /// Reads a worker's standard error, `turns` times at most.
    fn read_stderr(&mut self, worker: usize, turns: usize) {
        let mut chunk = [0; STDERR_CHUNK];
        let Some(running) = &mut self.running[worker] else {
            return;
        };
        let mut on_line = self
            .on_stderr_line
            .as_mut()
            .map(|on_line| move |line: &str| on_line(worker, line));
        for _ in 0..turns {
            let Some(stderr) = &running.stderr else {
                return;
            };
            match rustix::io::read(stderr, &mut chunk) {
                // The end of the stream, or an error, stops the reading. The process is still
                // watched.
                Ok(0) => running.stderr = None,
                Ok(read) => running.tail.push(
                    &chunk[..read],
                    on_line
                        .as_mut()
                        .map(|on_line| on_line as &mut dyn FnMut(&str)),
                ),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                Err(_) => running.stderr = None,
            }
        }
    }

    /// Starts the process that comes after one which has ended, if one is wanted.
    fn start_next(
        &mut self,
        worker: usize,
        request: Option<&RestartRequest>,
        exit: &Exit,
    ) -> Option<Result<RunningProcess, WorkerError>> {
        let closing = self.shared.state.locked().closing;
        match request {
            _ if closing => None,
            Some(request) => Some(self.launch(worker, request.init.clone())),
            // A restart that a caller asked for comes before that of the policy.
            None if self.policy_restarts(worker, exit) => Some(self.launch(worker, None)),
            None => None,
        }
    }

    /// Takes leave of a dead worker: reads what it left, reports it, and starts the next process
    /// where one is wanted.
    fn reap(&mut self, worker: usize) {
        let Some(running) = &mut self.running[worker] else {
            return;
        };
        // Before the process is reaped: until then no other group can have its number.
        running.kill_group();
        let status = match running.child.try_wait() {
            Ok(Some(status)) => Some(status),
            Ok(None) => return,
            // SIGCHLD is ignored in this program: the kernel has reaped it for us.
            Err(_) => None,
        };
        // Frames that the worker sent before its end count, also while shutting down.
        running.reading = running.fault.is_none();
        let frames = self.read_frames(worker, usize::MAX, LAST_BYTES);
        self.read_stderr(worker, LAST_BYTES / STDERR_CHUNK);
        let Some(running) = self.running[worker].take() else {
            return;
        };
        let tail = match &mut self.on_stderr_line {
            Some(on_line) => running.tail.finish(Some(&mut |line| on_line(worker, line))),
            None => running.tail.finish(None),
        };
        let mut exit = Exit::new(running.link.pid, status, tail);
        exit.fault = running.fault;

        // The next process is started before the end of this one is told, so that a reader never
        // sees a group in which nothing is left to happen. Its frames are read later, by this
        // same thread.
        let request = self.awaited[worker].take();
        let next = self.start_next(worker, request.as_ref(), &exit);
        exit.restarted = matches!(next, Some(Ok(_)));
        tracing::debug!(worker, %exit, "a worker has ended");

        // Frames first: a reader gets everything that the process sent before its end.
        let mut state = self.shared.state.locked();
        state.deliver(worker, frames);
        state.record_exit(worker, exit);
        // Until it has the slot, which `record_exit` has cleared.
        let starting = usize::from(matches!(next, Some(Ok(_))));
        state.starting += starting;
        drop(state);
        let next = next.map(|next| next.map(|next| self.enrol(worker, next)));
        self.shared.state.locked().starting -= starting;
        self.shared.changed.notify_all();
        match (request, next) {
            (Some(request), Some(next)) => answer(request, next),
            (Some(request), None) => answer(request, Err(WorkerError::ShutDown)),
            (_, Some(Err(error))) => {
                tracing::error!(worker, %error, "a worker could not be started again");
            }
            _ => {}
        }
    }

    /// Whether the restart policy wants a process in place of one that ended; counts it if so.
    fn policy_restarts(&mut self, worker: usize, exit: &Exit) -> bool {
        let killed = self.shared.state.locked().slots[worker].killed;
        let wanted = !exit.is_success() && self.may_restart(worker, killed);
        self.restarts[worker] += u32::from(wanted);
        wanted
    }

    /// Whether the restart policy may still act on a worker, and nobody else will.
    fn may_restart(&self, worker: usize, killed: bool) -> bool {
        let Restart::UpTo(times) = self.spawn.restart else {
            return false;
        };
        !killed && self.awaited[worker].is_none() && self.restarts[worker] < times
    }

    /// Starts a process for a worker that has none.
    fn restart(&mut self, request: RestartRequest) {
        let worker = request.worker;
        let next = self
            .launch(worker, request.init.clone())
            .map(|next| self.enrol(worker, next));
        self.shared.changed.notify_all();
        answer(request, next);
    }

    /// Starts a worker's process. Nobody sees it before [`enrol`](Self::enrol).
    fn launch(
        &mut self,
        worker: usize,
        init: Option<Arc<[u8]>>,
    ) -> Result<RunningProcess, WorkerError> {
        if let Some(init) = init {
            self.inits[worker] = init;
        }
        let Launched {
            child,
            pidfd,
            socket,
            stderr,
        } = self.spawn.launch(worker)?;
        Ok(RunningProcess {
            link: ProcessLink {
                pid: child.id(),
                pidfd: Arc::new(pidfd),
                socket: Arc::new(socket),
            },
            child,
            assembler: FrameAssembler::new(self.spawn.max_frame as usize),
            reading: true,
            stderr,
            tail: StderrTail::default(),
            fault: None,
        })
    }

    /// Makes a new process the worker's, with its greeting and init bytes as the first thing to be
    /// sent, and returns its id.
    fn enrol(&mut self, worker: usize, running: RunningProcess) -> u32 {
        let greeting = Greeting {
            version: PIPE_VERSION,
            index: worker as u32,
            count: self.inits.len() as u32,
            max_frame: self.spawn.max_frame,
            queue_bytes: self.spawn.queue_bytes as u64,
            grace_ms: u64::try_from(self.spawn.grace.as_millis()).unwrap_or(u64::MAX),
        };
        let init = Arc::clone(&self.inits[worker]);
        let first = greeting.frame_before_init(init.len() as u32);
        let pid = running.link.pid;
        let mut state = self.shared.state.locked();
        // In one step: a caller's frame never comes before the greeting.
        let slot = &mut state.slots[worker];
        slot.link = Some(running.link.clone());
        slot.disconnected = false;
        slot.killed = false;
        slot.outbox.fill(&first, &init, 0);
        // Usually all of it fits, and the pipe is free for the first send. If the process is dead
        // already, the next turn finds that.
        let _ = slot.outbox.flush(&running.link.socket);
        self.running[worker] = Some(running);
        pid
    }
}

impl Drop for Watcher {
    /// Ends what still runs: after a failed start, a panic, or a shutdown that gave a process up.
    fn drop(&mut self) {
        let running: Vec<_> = self.running.iter_mut().map(Option::take).collect();
        // All are killed before the first is waited for, so that the waits overlap.
        running
            .iter()
            .flatten()
            .for_each(|running| running.link.kill());
        let mut state = self.shared.state.locked();
        // Callers that wait for a restart see their channel close.
        state.requests.clear();
        for (slot, running) in state.slots.iter_mut().zip(running) {
            let Some(mut running) = running else { continue };
            let wait = Timespec::try_from(LAST_WAIT).ok();
            let pidfd = PollFd::new(&running.link.pidfd, PollFlags::IN);
            // An interrupted or failed wait costs only the exit's cause.
            let _ = poll(&mut [pidfd], wait.as_ref());
            running.kill_group();
            let status = running.child.try_wait().ok().flatten();
            slot.link = None;
            slot.exit = Some(Exit::new(
                running.link.pid,
                status,
                running.tail.finish(None),
            ));
        }
        state.finished = true;
        drop(state);
        self.shared.changed.notify_all();
    }
}

impl RunningProcess {
    /// Gives up a worker that broke the rules of the pipe.
    fn condemn(&mut self, fault: PipeFault) {
        self.fault = Some(fault);
        self.reading = false;
        self.link.kill();
    }

    /// Kills what a dead worker left of its process group. The group's id cannot have been given
    /// to another group: the worker has not been reaped, which is checked.
    fn kill_group(&self) {
        if system::is_unreaped(&self.link.pidfd) {
            // Fails when no process is left in the group.
            let _ = kill_process_group(Pid::from_child(&self.child), Signal::KILL);
        }
    }
}

/// Sleeps until something is ready, and returns what it stands for; nothing after an interruption.
/// `None` when polling is impossible.
fn poll_all(fds: &mut [PollFd<'_>], tags: Vec<Ready>) -> Option<Vec<Ready>> {
    match poll(fds, None) {
        Ok(_) => {}
        // Nothing is ready; the next turn looks again.
        Err(Errno::INTR) => return Some(Vec::new()),
        Err(error) => {
            tracing::error!(%error, "the workers cannot be watched any more and are ended");
            return None;
        }
    }
    let ready = fds
        .iter()
        .zip(tags)
        .filter(|(fd, _)| !fd.revents().is_empty());
    Some(ready.map(|(_, tag)| tag).collect())
}

/// Tells the caller that asked for a restart how it went. It may have stopped waiting.
fn answer(request: RestartRequest, answer: Result<u32, WorkerError>) {
    let _ = request.reply.send(answer);
}
