//! The one thread on which requests are made, and waits for them that can be interrupted.

use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;
use tokio::task::AbortHandle;
use weightsync_engine::Origin;
use weightsync_engine::transport::interrupt;
use weightsync_engine::transport::threads::{self, LockExt as _};

use crate::storage::interrupted;

/// How long the end of the thread waits for a name that the system is still looking up.
const LOOK_UP: Duration = Duration::from_secs(1);

/// A thread that makes requests, for all stores of this process.
///
/// **Guarantee.** It starts with the first request and ends, joined, with the last store, presence or
/// open file. In a forked child, which has no such thread, dropping it does nothing.
#[derive(Debug)]
pub(super) struct Runtime {
    owner: Origin,
    handle: Handle,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Runtime {
    /// The runtime of this process, started if nobody uses it yet.
    pub(super) fn shared() -> io::Result<Arc<Self>> {
        static SHARED: Mutex<Weak<Runtime>> = Mutex::new(Weak::new());
        let mut shared = SHARED.locked();
        if let Some(runtime) = shared.upgrade() {
            // A forked child has the value and not the thread.
            match runtime.owner.is_here() {
                true => return Ok(runtime),
                // The parent's, which this process has a copy of.
                false => std::mem::forget(runtime),
            }
        }
        let runtime = Arc::new(Self::start()?);
        *shared = Arc::downgrade(&runtime);
        Ok(runtime)
    }

    fn start() -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel();
        let body = move || {
            // It is sent or dropped: both say stop.
            let _ = runtime.block_on(stopped);
            runtime.shutdown_timeout(LOOK_UP);
        };
        let thread = threads::spawn("objects", body)?;
        Ok(Self {
            owner: Origin::here(),
            handle,
            stop: Some(stop),
            thread: Some(thread),
        })
    }

    pub(super) fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Begins a request.
    pub(super) fn start_request<T: Send + 'static>(
        &self,
        request: impl Future<Output = T> + Send + 'static,
    ) -> Pending<T> {
        let (answered, answer) = channel();
        let task = self.handle.spawn(async move {
            // Nobody waits any more, if that fails.
            let _ = answered.send(request.await);
        });
        Pending {
            answer,
            task: task.abort_handle(),
        }
    }

    /// Makes a request and waits for its end.
    pub(super) fn run<T: Send + 'static>(
        &self,
        request: impl Future<Output = T> + Send + 'static,
    ) -> io::Result<T> {
        self.start_request(request).wait()
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        let (stop, thread) = (self.stop.take(), self.thread.take());
        if !self.owner.is_here() {
            // Neither is this process's to end.
            std::mem::forget((stop, thread));
            return;
        }
        drop(stop);
        if let Some(thread) = thread {
            // It panics only if one of its tasks does, and the panic hook has reported that.
            let _ = thread.join();
        }
    }
}

/// A request on its way. Dropped, it is given up.
#[derive(Debug)]
pub(super) struct Pending<T> {
    answer: Receiver<T>,
    task: AbortHandle,
}

impl<T> Pending<T> {
    /// Waits for its end. It ends: the client has time limits of its own.
    pub(super) fn wait(self) -> io::Result<T> {
        next(&self.answer)?.ok_or_else(|| io::Error::other("the request ended without an answer"))
    }

    /// The same, for a while, and also if this thread was interrupted.
    pub(super) fn wait_at_most(self, time: Duration) -> Option<T> {
        self.answer.recv_timeout(time).ok()
    }
}

impl<T> Drop for Pending<T> {
    fn drop(&mut self) {
        // A request that nobody waits for is given up.
        self.task.abort();
    }
}

/// What comes next; `None` at the end.
pub(super) fn next<T>(answers: &Receiver<T>) -> io::Result<Option<T>> {
    loop {
        // In slices where the caller has a check for interruptions.
        let slice = interrupt::at_most(None).map_err(interrupted)?;
        let got = match slice {
            None => answers.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(slice) => answers.recv_timeout(slice),
        };
        match got {
            Ok(got) => return Ok(Some(got)),
            Err(RecvTimeoutError::Disconnected) => return Ok(None),
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
}
