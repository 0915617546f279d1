//! The trainer's end: versions lie in a segment, and workers fetch them from there.

mod caller;
mod lifeline;
mod server;
mod workers;

use std::sync::Arc;
use std::time::{Duration, Instant};

use weightsync_engine::transport::{
    Attendance, Deadline, Endpoint, Opening, Segment, SenderTransport, Staging, Targets,
};
use weightsync_engine::{Origin, Result, SenderStatus, Snapshot, Version, WorkerId, WorkerStatus};
use weightsync_link::access::Access;
use weightsync_link::address::listen_error;
use weightsync_link::tls::ClientAuth;
use weightsync_mem::Listener;

use self::workers::SharedSender;
use super::error::RpcError;
use super::{Addresses, address};
use crate::http::{Bearer, HttpThread, Limits, Server};

/// How long a sender that ends waits for its workers to take what was published.
const HANDOVER: Duration = Duration::from_secs(1);

/// The sender. Its segment decides what workers should run; its thread serves and calls them.
#[derive(Debug)]
pub(super) struct RpcSender {
    shared: Arc<SharedSender>,
    owner: Origin,
    /// Dropped before the segment: it tells the workers and joins the thread.
    _thread: HttpThread,
    segment: Segment,
}

impl RpcSender {
    pub(super) fn open(opening: &Opening<'_>, access: &Access) -> Result<Self> {
        let at = Addresses::of(opening.at)?;
        access.may_listen(at.listens).map_err(RpcError::from)?;
        // The listener binds before the segment opens: a second trainer of one run directory fails
        // here, and disturbs nothing of the first.
        let listener = address::listen(at.listens)?;
        let secret = opening.at.secret();
        let tls = access.tls.clone().map(|tls| (tls, ClientAuth::Certificate));
        let server = Server::new(listener, Bearer::to_sender(secret), tls, Limits::default());
        let server = server.map_err(|source| listen_error(at.listens, source))?;
        let mut segment = Segment::open(opening, nobody_comes(opening)?, 0)?;
        // A worker checks each block that it fetches against its checksum.
        segment.set_checksums(true);
        let remote_readers = segment.remote_readers();
        let shared = Arc::new(SharedSender::new(
            opening.models.to_vec(),
            remote_readers,
            (at.found, secret),
            access.clone(),
            opening.history.clone(),
        ));
        // The serving thread owns this clone. It meets the trainer's thread only in `SharedSender`
        // and in the segment's registry.
        let theirs = shared.clone();
        let thread = HttpThread::start("rpc", move |stopping| {
            let router = server::router(theirs.clone(), stopping.clone());
            server.serve(router, stopping, move |error| {
                theirs.note_failed_accept(error)
            })
        });
        Ok(Self {
            shared,
            owner: Origin::here(),
            _thread: thread.map_err(RpcError::Thread)?,
            segment,
        })
    }
}

/// A listener at which no worker attaches: nobody learns this name.
fn nobody_comes(opening: &Opening<'_>) -> Result<Listener> {
    let models: Vec<_> = opening.models.iter().map(|spec| spec.id.clone()).collect();
    Ok(Listener::at_least_here(
        Endpoint::fresh(&models, None)?.address(),
    )?)
}

impl SenderTransport for RpcSender {
    fn stage(&mut self, models: &[usize], deadline: Deadline) -> Result<Box<dyn Staging + '_>> {
        let staged = self.segment.stage(models, deadline);
        // A slot that the sender itself holds for a worker would look like the trainer's own pin.
        // The error names the worker instead.
        staged.map_err(|error| self.shared.with_holders(error))
    }

    fn version(&self, model: usize) -> Version {
        self.segment.version(model)
    }

    fn workers(&self) -> Vec<WorkerStatus> {
        self.segment.workers()
    }

    fn fill_status(&self, status: &mut SenderStatus) {
        self.segment.fill_status(status);
    }

    fn wait_workers(
        &mut self,
        deadline: Deadline,
        enough: &mut dyn FnMut(&Attendance) -> bool,
    ) -> Result<bool> {
        // The segment counts a worker from its registration on. A worker that still reads
        // descriptions may fail, so the trainer does not count it yet.
        let shared = &self.shared;
        let mut enough = |there: &Attendance| enough(&shared.joined_only(there));
        self.segment.wait_workers(deadline, &mut enough)
    }

    fn take_rejected(&mut self) -> Vec<(WorkerId, String)> {
        self.segment.take_rejected()
    }

    fn snapshot(&self, model: usize) -> Result<Option<Snapshot>> {
        self.segment.snapshot(model)
    }

    fn snapshot_for(&self, model: usize, targets: &Targets) -> Result<Option<Snapshot>> {
        self.segment.snapshot_for(model, targets)
    }

    fn old_snapshot(&self, model: usize, version: Version) -> Result<Option<Snapshot>> {
        self.segment.old_snapshot(model, version)
    }

    fn hold(&mut self, workers: &[WorkerId], hold: bool) -> Result<()> {
        self.segment.hold(workers, hold)
    }

    fn forget(&mut self, workers: &[WorkerId]) -> Result<()> {
        self.segment.forget(workers)
    }
}

impl Drop for RpcSender {
    fn drop(&mut self) {
        // A forked child drops a copy. The workers belong to the parent, so the child waits for
        // none of them.
        if self.owner.is_here() {
            let until = Instant::now().checked_add(HANDOVER);
            self.shared.wait_until_handed_over(until);
        }
    }
}
