//! What can go wrong between a trainer and its worker processes.

use std::io;
use std::time::Duration;

use super::Exit;

/// Errors of worker processes, on either end of the pipe.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WorkerError {
    /// A worker process could not be started. Nothing of it is left behind.
    #[error("worker {worker} could not be started from `{program}`: {source}")]
    Spawn {
        /// The worker that was to be started.
        worker: usize,
        /// The program that was asked for.
        program: String,
        /// What the operating system answered.
        source: io::Error,
    },

    /// The index names no worker of this group.
    #[error("there is no worker {worker}: the group has {count}, counted from 0")]
    NoSuchWorker {
        /// The index asked for.
        worker: usize,
        /// How many workers the group has.
        count: usize,
    },

    /// The worker's process has ended, or has closed its end of the pipe and is about to end.
    /// Restart it, or go on without it.
    #[error("worker {worker} is gone{}", exit.as_ref().map(|exit| format!(": {exit}")).unwrap_or_default())]
    Gone {
        /// The worker that is gone.
        worker: usize,
        /// How it ended; `None` while only its pipe is known to be closed.
        exit: Option<Box<Exit>>,
    },

    /// The worker did not read its pipe in time. With `begun`, part of the frame is in the pipe:
    /// it will arrive whole once the worker reads, so it must not be sent again.
    #[error(
        "worker {worker} did not read its pipe within {waited:.1?}; {}",
        if *begun { "the frame has been begun and will arrive whole once it reads" } else { "nothing was sent" }
    )]
    SendTimeout {
        /// The worker that does not read.
        worker: usize,
        /// The timeout of the send.
        waited: Duration,
        /// Whether part of the frame is already in the pipe.
        begun: bool,
    },

    /// The [check](crate::interruptible) of the calling thread ended its wait. With `begun`, part
    /// of the frame that was to be sent is in the pipe: it will arrive whole once the other end
    /// reads, so it must not be sent again.
    #[error(
        "the call was interrupted while it waited{}",
        if *begun { "; its frame has been begun and will arrive whole" } else { "" }
    )]
    Interrupted {
        /// Whether part of the frame is already in the pipe.
        begun: bool,
    },

    /// A worker did not die of SIGKILL in time: the kernel holds it in an uninterruptible wait.
    #[error(
        "worker {worker} still runs {waited:.1?} after SIGKILL: the kernel holds it, for example in \
         a device driver or a network file system; see `dmesg`"
    )]
    Unkillable {
        /// The worker that does not die.
        worker: usize,
        /// How long its end was waited for.
        waited: Duration,
    },

    /// A frame to be sent is longer than the pipe allows. Send it in parts, or raise
    /// [`Spawn::max_frame`](super::Spawn::max_frame).
    #[error(
        "a frame of {len} bytes is longer than the {max} bytes the pipe allows: send it in parts, or \
         raise `Spawn::max_frame`"
    )]
    FrameTooLong {
        /// The frame's length in bytes.
        len: usize,
        /// The longest frame allowed, in bytes.
        max: usize,
    },

    /// The other end of the pipe sent something that no peer of this version sends.
    #[error(
        "the other end of the worker pipe broke the protocol: {0}; do both programs have the same \
         weightsync, and does nothing else write to that pipe?"
    )]
    Peer(#[from] PipeFault),

    /// The trainer closed the pipe, or is dead: this worker should end now.
    #[error("the trainer closed the pipe: this worker must end")]
    Closed,

    /// The group has been shut down.
    #[error("the workers have been shut down")]
    ShutDown,

    /// This process was started as a worker, but its standard input is no longer the trainer's
    /// pipe. A program between the two (a shell, a launcher) must leave standard input alone.
    #[error(
        "process {trainer} started this worker, but standard input is not its pipe: the program \
         between the two (a shell, a launcher) must leave standard input alone"
    )]
    NotAttached {
        /// The trainer's process id.
        trainer: u32,
    },

    /// [`current`](super::current) was called before in this process; the pipe has one owner.
    #[error(
        "this process has already taken its worker pipe: call `worker::current()` once, and keep \
         what it returns"
    )]
    AlreadyTaken,

    /// This process is a worker that never called [`current`](super::current), and is about to
    /// start workers of its own, as its trainer did: without an end, if it were allowed.
    #[error("this process is a worker: call `worker::current()` before starting workers")]
    NotTaken,

    /// The call was made in a forked copy of the process that owns this end of the pipe.
    #[error("this end belongs to process {owner}; its forked copy {here} cannot use it")]
    Forked {
        /// The process that owns this end.
        owner: u32,
        /// The process that made the call.
        here: u32,
    },

    /// The init bytes are not a value of the type asked for, or cannot be made from it.
    #[error("the init value cannot be converted: {0}; do trainer and worker use the same type?")]
    Init(#[from] postcard::Error),

    /// The init bytes go on after the value of the type asked for.
    #[error(
        "{extra} bytes follow the init value: use the same type in the trainer and in the worker"
    )]
    InitTooLong {
        /// How many bytes were left over.
        extra: usize,
    },

    /// Only Linux ends a worker whose trainer has died.
    #[error(
        "worker processes need Linux, which ends them with their trainer: start the workers as \
         programs of their own"
    )]
    NeedsLinux,

    /// The operating system refused something.
    #[error("{doing}: {source}")]
    Os {
        /// What was being done.
        doing: &'static str,
        /// What the operating system answered.
        source: io::Error,
    },
}

impl WorkerError {
    /// An operating-system error met while `doing` something; made to fit `map_err`.
    pub(super) fn os<E: Into<io::Error>>(doing: &'static str) -> impl FnOnce(E) -> Self {
        move |source| Self::Os {
            doing,
            source: source.into(),
        }
    }
}

/// How a peer broke the rules of the pipe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PipeFault {
    /// It announced a frame longer than agreed; nothing was allocated for it.
    #[error("a frame of {len} bytes was announced, {max} are allowed")]
    FrameTooLong {
        /// The announced length in bytes.
        len: usize,
        /// The longest frame allowed, in bytes.
        max: usize,
    },
    /// It sent a kind of frame that does not exist.
    #[error("frame kind {kind} does not exist")]
    UnknownKind {
        /// The kind received.
        kind: u8,
    },
    /// It sent a known kind of frame at the wrong moment.
    #[error("frame kind {kind} came out of turn")]
    OutOfTurn {
        /// The kind received.
        kind: u8,
    },
    /// Its greeting could not be read, or is of another version of this library.
    #[error("the greeting is not one of pipe version {expected}")]
    Greeting {
        /// The version this end speaks.
        expected: u8,
    },
}
