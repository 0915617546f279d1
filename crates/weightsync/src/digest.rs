//! The thread that makes digests off the critical path.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use weightsync_mem::Snapshot;

use crate::error::{Error, Result};

/// Makes the digest of the newest version it was given. One that is replaced
/// before it is done is given up, so that its slot comes free.
#[derive(Debug)]
pub(crate) struct DigestThread {
    inbox: Arc<Inbox>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Inbox {
    order: Mutex<Order>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Order {
    next: Option<Snapshot>,
    stop: bool,
}

impl DigestThread {
    pub(crate) fn start() -> Result<Self> {
        let inbox = Arc::new(Inbox::default());
        let thread = std::thread::Builder::new()
            .name("weightsync-digest".into())
            .spawn({
                let inbox = inbox.clone();
                move || inbox.serve()
            })
            .map_err(|source| Error::Os {
                action: "starting the digest thread",
                source,
            })?;
        Ok(Self {
            inbox,
            thread: Some(thread),
        })
    }

    pub(crate) fn digest_next(&self, snapshot: Snapshot) {
        self.inbox.order().next = Some(snapshot);
        self.inbox.changed.notify_one();
    }
}

impl Drop for DigestThread {
    fn drop(&mut self) {
        let mut order = self.inbox.order();
        order.stop = true;
        order.next = None;
        drop(order);
        self.inbox.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            // A panic there was reported by the panic hook.
            let _ = thread.join();
        }
    }
}

impl Inbox {
    fn serve(&self) {
        loop {
            let mut order = self.order();
            let snapshot = loop {
                if order.stop {
                    return;
                }
                match order.next.take() {
                    Some(snapshot) => break snapshot,
                    None => {
                        order = self
                            .changed
                            .wait(order)
                            .unwrap_or_else(PoisonError::into_inner)
                    }
                }
            };
            drop(order);
            let replaced = || {
                let order = self.order();
                order.stop || order.next.is_some()
            };
            if let Some(digest) = snapshot.digest_unless(replaced) {
                snapshot.publish_digest(digest);
            }
        }
    }

    fn order(&self) -> MutexGuard<'_, Order> {
        // Single assignments: they hold after a panic.
        self.order.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
