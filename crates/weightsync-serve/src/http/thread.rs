//! The one thread of an end, which runs its runtime.

use std::io;
use std::thread::JoinHandle;

use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::watch;
use weightsync_engine::Origin;
use weightsync_mem::threads;

/// A thread with a runtime of its own: it serves and calls, and nothing else.
///
/// **Guarantee.** Dropping it tells its tasks to stop, and joins the thread. A blocking call of a task,
/// such as a read of a store, ends later and alone. In a forked child,
/// which has no such thread, it does nothing.
#[derive(Debug)]
pub(crate) struct HttpThread {
    owner: Origin,
    runtime: Handle,
    stop: watch::Sender<bool>,
    thread: Option<JoinHandle<()>>,
}

/// A signal to stop.
#[derive(Clone, Debug)]
pub(crate) struct Stopping(watch::Receiver<bool>);

impl Stopping {
    /// Waits for the signal.
    pub(crate) async fn wait(&mut self) {
        // The owner sends the signal before it is dropped.
        let _ = self.0.wait_for(|stop| *stop).await;
    }
}

impl HttpThread {
    /// Starts a thread of this name, which runs `main` to its end. Tasks that `main` spawned end
    /// with it.
    ///
    /// # Errors
    ///
    /// Those of the operating system.
    pub(crate) fn start<F>(
        name: &str,
        main: impl FnOnce(Stopping) -> F + Send + 'static,
    ) -> io::Result<Self>
    where
        F: Future<Output = ()>,
    {
        let runtime = Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()?;
        // A value, and not a notification: a task that looks late still sees that it must stop.
        let (stop, stopping) = watch::channel(false);
        let handle = runtime.handle().clone();
        let body = move || {
            run(&runtime, main(Stopping(stopping)));
            // A call that reads a store may take long, and nobody waits for it any more.
            runtime.shutdown_background();
        };
        let thread = threads::spawn(name, body)?;
        Ok(Self {
            owner: Origin::here(),
            runtime: handle,
            stop,
            thread: Some(thread),
        })
    }

    /// The process that has the thread.
    pub(crate) fn owner(&self) -> &Origin {
        &self.owner
    }

    /// A handle with which any thread can spawn futures.
    pub(crate) fn runtime(&self) -> &Handle {
        &self.runtime
    }
}

fn run(runtime: &Runtime, main: impl Future<Output = ()>) {
    runtime.block_on(main);
}

impl Drop for HttpThread {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else {
            return;
        };
        // A join would wait for a thread that this process does not have.
        if !self.owner.is_here() {
            std::mem::forget(thread);
            return;
        }
        // Without a receiver `main` has ended already.
        let _ = self.stop.send(true);
        // It panics only if one of its tasks does, and the panic hook has reported that.
        let _ = thread.join();
    }
}
