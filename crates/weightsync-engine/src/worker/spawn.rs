//! What a group of workers is made of, and how one process of it is started.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{self, Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl, fstat};
use rustix::process::Pid;
use serde::Serialize;

use super::error::WorkerError;
use super::workers::Workers;
use super::{MARK, pipe, process as worker_process, system};

/// When a worker that ended is started again without being asked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Restart {
    /// Never; [`Workers::restart`] does it on request.
    #[default]
    Never,
    /// When it ended otherwise than with status 0 and not through [`Workers::kill`], up to this
    /// many times for each worker. It gets the same init bytes as before. One that keeps dying
    /// waits for its trainer: it is started again for the second time once the first
    /// [`Event::Exited`](super::Event::Exited) has been received, and so on.
    UpTo(u32),
}

/// A group of workers to be started: the program, how many, and their limits.
///
/// ```no_run
/// # fn main() -> Result<(), weightsync::worker::WorkerError> {
/// use weightsync::worker::{Restart, Spawn};
///
/// let workers = Spawn::this_program()?
///     .args(["collect"])
///     .count(4)
///     .init_value(&("CartPole-v1", 500_u32))?
///     .restart(Restart::UpTo(3))
///     .on_stderr_line(|worker, line| eprintln!("[worker {worker}] {line}"))
///     .start()?;
/// # Ok(())
/// # }
/// ```
#[must_use = "nothing is started before `start`"]
pub struct Spawn {
    program: PathBuf,
    arg0: Option<OsString>,
    args: Vec<OsString>,
    envs: Vec<(OsString, OsString)>,
    count: usize,
    init: Init,
    pub(super) restart: Restart,
    pub(super) max_frame: u32,
    pub(super) queue_bytes: usize,
    pub(super) grace: Duration,
    pub(super) on_stderr_line: Option<StderrLine>,
}

/// Called with a worker's index and a line of its standard error.
pub(super) type StderrLine = Box<dyn FnMut(usize, &str) + Send>;

enum Init {
    Same(Arc<[u8]>),
    Each(Box<dyn FnMut(usize) -> Vec<u8> + Send>),
}

impl Spawn {
    /// Workers that run this very program: the running one, even if its file has been replaced
    /// meanwhile. They get no arguments unless [`args`](Self::args) are given.
    ///
    /// # Errors
    /// [`WorkerError::Os`] when the program's own path cannot be found out.
    pub fn this_program() -> Result<Self, WorkerError> {
        // For process lists and errors: the program itself is run through `/proc`.
        let path = std::env::current_exe().map_err(WorkerError::os("finding this program"))?;
        let mut spawn = Self::program(worker_process::THIS_PROGRAM);
        spawn.arg0 = Some(path.into());
        Ok(spawn)
    }

    /// Workers that run another program, found like [`Command::new`] does. It calls
    /// [`current`](super::current) before anything else.
    pub fn program(program: impl AsRef<Path>) -> Self {
        Self {
            program: program.as_ref().to_owned(),
            arg0: None,
            args: Vec::new(),
            envs: Vec::new(),
            count: 1,
            init: Init::Same(Arc::default()),
            restart: Restart::default(),
            max_frame: 64 << 20,
            queue_bytes: 1 << 20,
            grace: Duration::from_millis(500),
            on_stderr_line: None,
        }
    }

    /// Adds arguments, the same for every worker.
    pub fn args(mut self, args: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Self {
        self.args
            .extend(args.into_iter().map(|arg| arg.as_ref().to_owned()));
        self
    }

    /// Sets an environment variable for every worker; the others are inherited.
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.envs
            .push((name.as_ref().to_owned(), value.as_ref().to_owned()));
        self
    }

    /// How many workers there are; 1 by default. They are numbered from 0.
    pub fn count(mut self, count: usize) -> Self {
        self.count = count;
        self
    }

    /// What every worker reads with [`WorkerProcess::init`](super::WorkerProcess::init); no
    /// longer than [`max_frame`](Self::max_frame).
    pub fn init(mut self, bytes: Vec<u8>) -> Self {
        self.init = Init::Same(bytes.into());
        self
    }

    /// Init bytes of their own for every worker, made from its index when the group starts.
    pub fn init_each(mut self, init: impl FnMut(usize) -> Vec<u8> + Send + 'static) -> Self {
        self.init = Init::Each(Box::new(init));
        self
    }

    /// A value every worker reads with
    /// [`WorkerProcess::init_value`](super::WorkerProcess::init_value).
    ///
    /// # Errors
    /// [`WorkerError::Init`] when the value has no postcard form.
    pub fn init_value<T: Serialize + ?Sized>(self, value: &T) -> Result<Self, WorkerError> {
        Ok(self.init(postcard::to_stdvec(value)?))
    }

    /// When a worker that ended is started again without being asked; never by default.
    pub fn restart(mut self, restart: Restart) -> Self {
        self.restart = restart;
        self
    }

    /// The longest frame either side may send, in bytes; 64 MiB by default.
    pub fn max_frame(mut self, bytes: u32) -> Self {
        self.max_frame = bytes;
        self
    }

    /// How many bytes may wait to be received from one worker, and in one worker, before its pipe
    /// is no longer read; 1 MiB by default. One frame may go beyond it, whatever its length.
    pub fn queue_bytes(mut self, bytes: usize) -> Self {
        self.queue_bytes = bytes;
        self
    }

    /// How long a worker may take to end once its pipe is closed; 500 ms by default. After that
    /// it kills itself, whatever its main thread is doing.
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// Calls `on_line` with a worker's index and every line of its standard error as it comes;
    /// without it only the end is kept. It runs on the thread that watches the workers: it must
    /// not block, and a panic in it ends the group.
    pub fn on_stderr_line(mut self, on_line: impl FnMut(usize, &str) + Send + 'static) -> Self {
        self.on_stderr_line = Some(Box::new(on_line));
        self
    }

    /// Starts the workers, all or none. It does not wait for them to reach
    /// [`current`](super::current).
    ///
    /// # Errors
    /// * [`WorkerError::Spawn`] when a process cannot be started;
    /// * [`WorkerError::FrameTooLong`] when init bytes are longer than a frame may be;
    /// * [`WorkerError::NotTaken`] in a worker that never called [`current`](super::current);
    /// * [`WorkerError::Os`] when the system is out of threads or descriptors;
    /// * [`WorkerError::NeedsLinux`] on other systems.
    pub fn start(mut self) -> Result<Workers, WorkerError> {
        system::check()?;
        worker_process::refuse_if_not_taken()?;
        let inits: Vec<Arc<[u8]>> = match &mut self.init {
            Init::Same(init) => vec![Arc::clone(init); self.count],
            Init::Each(init) => (0..self.count).map(|index| init(index).into()).collect(),
        };
        inits
            .iter()
            .try_for_each(|init| self.check_len(init.len()))?;
        Workers::start(self, inits)
    }

    /// How many workers there are to be.
    pub(super) fn worker_count(&self) -> usize {
        self.count
    }

    /// Refuses a payload longer than a frame may be.
    pub(super) fn check_len(&self, len: usize) -> Result<(), WorkerError> {
        check_len(len, self.max_frame)
    }

    /// Starts the process of worker `index`. Must be called on a thread that lives as long as the
    /// worker may: the kernel's death signal follows the thread, not the process.
    pub(super) fn launch(&self, index: usize) -> Result<Launched, WorkerError> {
        // The worker's end becomes its standard input. A launcher between the two passes that on.
        let (ours, theirs) = pipe::pair()?;
        let inode = fstat(&theirs)
            .map_err(WorkerError::os("asking for a socket's inode"))?
            .st_ino;

        let mut command = Command::new(&self.program);
        if let Some(arg0) = &self.arg0 {
            command.arg0(arg0);
        }
        let mut child = command
            .args(&self.args)
            .envs(self.envs.iter().map(|(name, value)| (name, value)))
            // The worker compares the inode with that of its standard input.
            .env(MARK, format!("{inode}:{}", process::id()))
            .stdin(Stdio::from(theirs))
            .stderr(Stdio::piped())
            // A terminal's Ctrl-C reaches the trainer alone, and the rest of a dead worker's group
            // can be killed.
            .process_group(0)
            .spawn()
            .map_err(|source| WorkerError::Spawn {
                worker: index,
                program: self.arg0.as_ref().map_or_else(
                    || self.program.display().to_string(),
                    |arg0| arg0.display().to_string(),
                ),
                source,
            })?;
        // It holds our copy of the worker's end: while that is open, the worker cannot hang up.
        drop(command);

        let stderr = child.stderr.take().map(OwnedFd::from);
        match watchable(&child, stderr.as_ref()) {
            Ok(pidfd) => Ok(Launched {
                child,
                pidfd,
                socket: ours,
                stderr,
            }),
            Err(error) => {
                // Errors here mean that it has died already; it is reaped either way.
                let _ = child.kill();
                let _ = child.wait();
                Err(error)
            }
        }
    }
}

impl fmt::Debug for Spawn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Spawn")
            .field("program", &self.program)
            .field("args", &self.args)
            .field("count", &self.count)
            .field("restart", &self.restart)
            .field("max_frame", &self.max_frame)
            .field("queue_bytes", &self.queue_bytes)
            .field("grace", &self.grace)
            .finish_non_exhaustive()
    }
}

/// A process that has just been started, and all there is to watch of it.
pub(super) struct Launched {
    pub(super) child: Child,
    pub(super) pidfd: OwnedFd,
    pub(super) socket: OwnedFd,
    pub(super) stderr: Option<OwnedFd>,
}

/// Refuses a payload longer than `max_frame` bytes, and returns its length as it is sent.
pub(super) fn check_len(len: usize, max_frame: u32) -> Result<(), WorkerError> {
    if len > max_frame as usize {
        return Err(WorkerError::FrameTooLong {
            len,
            max: max_frame as usize,
        });
    }
    Ok(())
}

/// Makes ready what the watching thread polls. The child has not been waited for, so its process
/// id still names it.
fn watchable(child: &Child, stderr: Option<&OwnedFd>) -> Result<OwnedFd, WorkerError> {
    if let Some(stderr) = stderr {
        // The worker's end is a file description of its own and keeps blocking.
        let flags = fcntl_getfl(stderr).map_err(WorkerError::os("reading a pipe's flags"))?;
        fcntl_setfl(stderr, flags | OFlags::NONBLOCK)
            .map_err(WorkerError::os("making a pipe non-blocking"))?;
    }
    system::open_process(Pid::from_child(child))
        .map_err(WorkerError::os("opening a worker's pidfd"))
}
