//! The worker's end.

mod fetch;
mod inbox;
mod joining;
mod server;

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::JoinHandle;
use weightsync_engine::transport::{
    Deadline, Endpoint, Interrupter, Joining, ModelSpec, ReceiverTransport, VersionRequest,
    interrupt,
};
use weightsync_engine::{Error, Origin, Result, Run, SetSnapshot, Version};
use weightsync_link::access::Access;

use self::inbox::Inbox;
use self::joining::JoinedSender;
use super::wire::{Applied, Runs, WorkerMessage, cut};
use crate::http::HttpThread;

/// How long a worker waits until its report has reached the sender. The answer to the sender's
/// call repeats the report.
const HEARD: Duration = Duration::from_secs(1);

/// How late an answer may be that ends its own wait.
const LATE: Duration = Duration::from_millis(100);

/// A worker's end. Its one thread serves the sender's calls. Fetched versions wait in the
/// [inbox](Inbox) until the program takes them.
#[derive(Debug)]
pub(super) struct RpcReceiver {
    inbox: Arc<Inbox>,
    session: Arc<JoinedSender>,
    owner: Origin,
    thread: HttpThread,
}

impl RpcReceiver {
    pub(super) fn join(
        at: &Endpoint,
        joining: &Joining,
        access: &Access,
        deadline: Deadline,
    ) -> Result<Self> {
        let inbox = Arc::new(Inbox::default());
        let (thread, session) = joining::join(&inbox, at, joining, access, deadline)?;
        Ok(Self {
            inbox,
            session,
            owner: Origin::here(),
            thread,
        })
    }

    /// Sends a report to the sender, and waits a moment until the sender has it.
    fn send(&self, message: &WorkerMessage) -> Result<()> {
        // The thread that serves exists only in the process that joined. In a forked child nothing
        // would run the request.
        self.owner.check()?;
        let ask = self.session.message(message);
        let client = self.session.client.clone();
        let sent = async move {
            let reply = client.ask(ask, HEARD).await?;
            reply.bytes(super::wire::MAX_BODY, HEARD).await
        };
        // A sender that is gone needs no report.
        let until = Instant::now().checked_add(HEARD);
        if let Some(Err(fault)) = self.wait_for(sent, until)? {
            tracing::debug!(%fault, "the sender did not get this worker's message");
        }
        Ok(())
    }

    /// Runs a future on the thread and returns its result; at the deadline, returns `None` and
    /// aborts it.
    fn wait_for<T: Send + 'static>(
        &self,
        what: impl Future<Output = T> + Send + 'static,
        deadline: Deadline,
    ) -> Result<Option<T>> {
        let (done, wait) = std::sync::mpsc::sync_channel(1);
        // This thread must not run the future itself: it may belong to an async runtime, which must
        // not block.
        let task = self.thread.runtime().spawn(async move {
            let _ = done.send(what.await);
        });
        let _task = Aborted(task);
        wait_for(&wait, deadline)
    }
}

/// A task that ends with the caller that waits for it.
struct Aborted(JoinHandle<()>);

impl Drop for Aborted {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The next value of a channel; `None` at the deadline, or if none can come.
fn wait_for<T>(wait: &std::sync::mpsc::Receiver<T>, deadline: Deadline) -> Result<Option<T>> {
    use std::sync::mpsc::RecvTimeoutError;
    loop {
        // The wait goes in slices where the caller has an interrupt check, such as Python's
        // signals.
        let left = weightsync_mem::left(deadline);
        let pause = interrupt::at_most(left)?;
        let Some(pause) = pause else {
            return Ok(wait.recv().ok());
        };
        match wait.recv_timeout(pause) {
            Ok(value) => return Ok(Some(value)),
            Err(RecvTimeoutError::Disconnected) => return Ok(None),
            Err(RecvTimeoutError::Timeout) if weightsync_mem::passed(deadline) => return Ok(None),
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
}

impl ReceiverTransport for RpcReceiver {
    fn models(&self) -> &[ModelSpec] {
        &self.session.models
    }

    fn run(&self) -> Run {
        self.session.run
    }

    fn travelled(&self) -> Option<u64> {
        Some(self.inbox.travelled())
    }

    fn next(&mut self, deadline: Deadline) -> Result<Option<SetSnapshot>> {
        self.owner.check()?;
        self.inbox.next(deadline)
    }

    fn latest(&mut self) -> Result<Option<SetSnapshot>> {
        self.owner.check()?;
        Ok(self.inbox.latest())
    }

    fn pull(
        &mut self,
        model: usize,
        pull: VersionRequest,
        deadline: Deadline,
    ) -> Result<Option<SetSnapshot>> {
        self.owner.check()?;
        // The sender gets the deadline with the question and answers shortly after it with an empty
        // 204. That answer has a little time to arrive.
        let until = deadline.and_then(|at| at.checked_add(LATE));
        let asked = fetch::ask(
            self.session.clone(),
            self.inbox.clone(),
            model,
            pull,
            deadline,
        );
        // At the deadline the task is aborted, which closes its connection. The sender then
        // withdraws the question.
        let answer = match self.wait_for(asked, until)? {
            Some(answer) => answer,
            None => Ok(None),
        };
        match answer {
            Ok(Some(set)) => Ok(Some(self.inbox.take_answer(set))),
            Ok(None) => Ok(None),
            Err(fetch::NoAnswer::Unknown { known }) => Err(Error::NoSuchVersion {
                model: self.session.models[model].id.clone(),
                asked: match pull {
                    VersionRequest::Exactly(version) | VersionRequest::AtLeast(version) => version,
                    _ => Version::NONE,
                },
                known,
            }),
            Err(fetch::NoAnswer::Failed(failure)) => Err(failure.into()),
            // The other connection shows the sender's end in a moment.
            Err(fetch::NoAnswer::Gone) => {
                // Whether the sender has shut down or died decides between two errors.
                let by = Instant::now().checked_add(HEARD);
                Err(self.inbox.end_by(by)?.unwrap_or(Error::SenderDied {
                    pid: Some(self.session.pid),
                }))
            }
        }
    }

    fn interrupter(&self) -> Result<Interrupter> {
        // A weak reference: an interrupter that outlives the receiver keeps no versions alive.
        let inbox = Arc::downgrade(&self.inbox);
        Ok(Interrupter::new(move || {
            if let Some(inbox) = inbox.upgrade() {
                inbox.interrupt();
            }
        }))
    }

    fn joined(&mut self) -> Result<()> {
        self.send(&WorkerMessage::Joined {})
    }

    fn applied(&mut self, set: &SetSnapshot) -> Result<()> {
        self.owner.check()?;
        let members = set.members().iter();
        let versions = members.filter_map(|member| {
            let model = self.session.index_of(member.snapshot.model())?;
            let version = member.snapshot.version();
            Some(Runs { model, version })
        });
        let applied = Applied {
            sequence: set.sequence(),
            versions: versions.collect(),
        };
        // The inbox first: the sender's open call gets its last line also if the report below is
        // lost.
        self.inbox.applied(&applied);
        self.send(&WorkerMessage::Applied(applied))
    }

    fn refuse(&mut self, set: Option<&SetSnapshot>, reason: &str) -> Result<()> {
        self.owner.check()?;
        let reason = cut(reason);
        let message = match set {
            Some(set) => {
                let sequence = set.sequence();
                self.inbox.refused(sequence, &reason);
                WorkerMessage::Refused { sequence, reason }
            }
            None => WorkerMessage::Rejected { reason },
        };
        self.send(&message)
    }
}
