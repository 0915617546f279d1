//! The thread that makes digests off the critical path.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;

use weightsync_mem::threads::{self, CondvarExt as _, LockExt as _};
use weightsync_mem::{Origin, Snapshot};

use crate::error::{Error, Result};

/// Makes the digest of the newest version of each model. A version that is replaced before its
/// digest is done gets none, so that its slot comes free.
///
/// A forked child has no such thread, and the lock may be held there for ever. So the child neither
/// takes the lock nor joins the thread.
#[derive(Debug)]
pub(crate) struct DigestThread {
    inbox: Arc<DigestInbox>,
    thread: Option<JoinHandle<()>>,
    /// The process that has the thread.
    owner: Origin,
}

#[derive(Debug, Default)]
struct DigestInbox {
    order: Mutex<DigestState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct DigestState {
    next: BTreeMap<usize, Snapshot>,
    stop: bool,
}

impl DigestThread {
    pub(crate) fn start() -> Result<Self> {
        let inbox = Arc::new(DigestInbox::default());
        let thread = threads::spawn("digest", {
            let inbox = inbox.clone();
            move || inbox.serve()
        })
        .map_err(Error::os("starting the digest thread"))?;
        Ok(Self {
            inbox,
            thread: Some(thread),
            owner: Origin::here(),
        })
    }

    /// Of a model, by its index.
    pub(crate) fn digest_next(&self, model: usize, snapshot: Snapshot) {
        if self.is_in_a_child() {
            return;
        }
        // A version that waits for its digest is replaced, and its slot comes free.
        self.inbox.order().next.insert(model, snapshot);
        self.inbox.changed.notify_one();
    }

    fn is_in_a_child(&self) -> bool {
        !self.owner.is_here()
    }
}

impl Drop for DigestThread {
    fn drop(&mut self) {
        if self.is_in_a_child() {
            // To detach it would be to use a stack that may be another thread's by now.
            std::mem::forget(self.thread.take());
            return;
        }
        let mut order = self.inbox.order();
        order.stop = true;
        order.next.clear();
        drop(order);
        self.inbox.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            // A panic there was reported by the panic hook.
            let _ = thread.join();
        }
    }
}

impl DigestInbox {
    fn serve(&self) {
        loop {
            let mut order = self.order();
            let (model, snapshot) = loop {
                if order.stop {
                    return;
                }
                match order.next.pop_first() {
                    Some(next) => break next,
                    None => order = self.changed.wait_at_most(order, None),
                }
            };
            // The lock is not held for the digest: a send hands over the next version meanwhile.
            drop(order);
            let replaced = || {
                let order = self.order();
                order.stop || order.next.contains_key(&model)
            };
            if let Some(digest) = snapshot.digest_unless(replaced) {
                snapshot.publish_digest(digest);
            }
        }
    }

    fn order(&self) -> MutexGuard<'_, DigestState> {
        // Single assignments: they hold after a panic.
        self.order.locked()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forked_child_drops_the_digest_without_its_thread() {
        let mut copy = DigestThread::start().unwrap();
        let inbox = copy.inbox.clone();
        // As a child has it: of another process, the lock taken by nobody who is there.
        copy.owner = Origin::NOWHERE;
        let mut order = inbox.order();
        drop(copy);
        order.stop = true;
        drop(order);
        inbox.changed.notify_one();
    }

    #[test]
    fn a_drop_ends_the_thread() {
        let thread = DigestThread::start().unwrap();
        let inbox = Arc::downgrade(&thread.inbox);
        drop(thread);
        assert_eq!(inbox.strong_count(), 0);
    }
}
