//! Stops threads that block in sockets.

use std::collections::HashMap;
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;

use weightsync_mem::threads::{self, LockExt as _};

/// Threads that serve or fetch, and their connections: stopped and joined together.
#[derive(Debug, Default)]
pub(crate) struct Threads {
    sockets: Mutex<HashMap<u64, TcpStream>>,
    handles: Mutex<Vec<JoinHandle<()>>>,
    last: AtomicU64,
    stopped: std::sync::atomic::AtomicBool,
}

/// A connection that [`Threads::stop`] shuts down.
#[derive(Debug)]
pub(crate) struct Watched {
    threads: Arc<Threads>,
    number: u64,
}

impl Threads {
    /// Registers a connection to be shut down by [`stop`](Threads::stop); `None` if that has
    /// already happened.
    pub(crate) fn watch(self: &Arc<Self>, socket: &TcpStream) -> std::io::Result<Option<Watched>> {
        // A second descriptor of the one connection: a shutdown of it reaches the thread that
        // blocks.
        let socket = socket.try_clone()?;
        let number = self.last.fetch_add(1, Ordering::Relaxed);
        let mut sockets = self.sockets();
        // Under the lock: either this sees the stop, or the stop finds the socket.
        if self.stopped.load(Ordering::Acquire) {
            return Ok(None);
        }
        sockets.insert(number, socket);
        let threads = self.clone();
        Ok(Some(Watched { threads, number }))
    }

    /// Starts a thread that [`join`](Threads::join) waits for.
    pub(crate) fn spawn(
        &self,
        name: &str,
        work: impl FnOnce() + Send + 'static,
    ) -> std::io::Result<()> {
        let thread = threads::spawn(name, work)?;
        let mut handles = self.handles();
        // Handles of threads that have ended would pile up.
        handles.retain(|handle| !handle.is_finished());
        handles.push(thread);
        Ok(())
    }

    /// Whether [`stop`](Threads::stop) was called.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// Shuts down every connection, without waiting for the threads.
    pub(crate) fn stop(&self) {
        // The lock orders this and `watch`.
        let sockets = self.sockets();
        self.stopped.store(true, Ordering::Release);
        for socket in sockets.values() {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }

    /// Waits for the threads, except the calling one.
    pub(crate) fn join(&self) {
        // Taken out, because a thread that has not ended yet may start another one.
        let handles = std::mem::take(&mut *self.handles());
        let own = std::thread::current().id();
        for handle in handles {
            if handle.thread().id() != own {
                // The panic hook has already reported a panic there.
                let _ = handle.join();
            }
        }
    }

    fn sockets(&self) -> MutexGuard<'_, HashMap<u64, TcpStream>> {
        self.sockets.locked()
    }

    fn handles(&self) -> MutexGuard<'_, Vec<JoinHandle<()>>> {
        self.handles.locked()
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.threads.sockets().remove(&self.number);
    }
}
