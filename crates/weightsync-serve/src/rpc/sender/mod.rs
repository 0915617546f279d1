//! The trainer's end.

mod caller;
mod lifeline;
mod published;
mod server;
mod staging;
mod state;

use std::sync::Arc;
use std::time::{Duration, Instant};

use weightsync::transport::{
    Attendance, Deadline, Image, Opening, SenderTransport, Staging, Targets,
};
use weightsync::{
    DigestPolicy, Error, Holder, Origin, Result, Snapshot, Version, WorkerId, WorkerStatus,
};
use weightsync_net::Access;

use self::staging::Rooms;
use self::state::{Retained, Shared};
use super::error::RpcError;
use super::{Places, passed, place};
use crate::http::{Bearer, HttpThread, Limits, Server};

/// How long a sender that ends waits for its workers to take what was published.
const HANDOVER: Duration = Duration::from_secs(1);

/// The sender. Its thread serves workers and calls them; all it decides is in the
/// [plan](super::plan::Plan).
#[derive(Debug)]
pub(super) struct RpcSender {
    shared: Arc<Shared>,
    /// Memory of versions that nobody holds any more, by model.
    spare: Vec<Option<Image>>,
    max_alive: usize,
    digests: DigestPolicy,
    owner: Origin,
    /// Ends last: dropped, it tells the workers and joins the thread.
    _thread: HttpThread,
}

impl RpcSender {
    pub(super) fn open(opening: &Opening<'_>, access: &Access) -> Result<Self> {
        let at = Places::of(opening.at)?;
        access.may_listen(at.listens).map_err(RpcError::from)?;
        let listener = place::listen(at.listens)?;
        let secret = opening.at.secret();
        let server = Server::new(listener, Bearer::to_sender(secret), Limits::default());
        let server = server.map_err(|source| RpcError::Listen {
            addr: at.listens,
            source,
        })?;
        let shared = Arc::new(Shared::new(opening, at.found, access.clone()));
        let theirs = shared.clone();
        let thread = HttpThread::start("weightsync-rpc", move |stopping| {
            let router = server::router(theirs, stopping.clone());
            server.serve(router, stopping)
        });
        let thread = thread.map_err(RpcError::Thread)?;
        if opening.options.digest == DigestPolicy::Background {
            let task = shared.clone().make_digests();
            // It ends with the thread.
            thread.runtime().spawn(task);
        }
        Ok(Self {
            spare: opening.models.iter().map(|_| None).collect(),
            max_alive: usize::from(opening.options.max_slots.max(2)),
            digests: opening.options.digest,
            owner: Origin::here(),
            shared,
            _thread: thread,
        })
    }

    /// Waits until no more versions of a model are alive in addition to those that are meant
    /// for somebody than there may be: a worker that fetches slowly keeps one.
    fn wait_for_room(&self, model: usize, deadline: Deadline) -> Result<()> {
        let since = Instant::now();
        let mut state = self.shared.lock();
        loop {
            let kept = state.kept(model);
            let mut stray = self.shared.alive(model);
            stray.retain(|version| !kept.contains(version));
            if stray.len() < self.max_alive {
                return Ok(());
            }
            if passed(deadline) {
                let slots = u8::try_from(stray.len() + kept.len()).unwrap_or(u8::MAX);
                return Err(Error::AllSlotsPinned {
                    model: self.shared.models[model].id.clone(),
                    slots,
                    waited: since.elapsed(),
                    holders: self.holders(&state, model, &stray),
                });
            }
            state = self.shared.wait(state, deadline)?;
        }
    }

    /// Who fetches these versions.
    fn holders(
        &self,
        plan: &state::RetainedPlan,
        model: usize,
        versions: &[Version],
    ) -> Vec<Holder> {
        let fetching = self.shared.fetching(plan, model);
        let these = fetching.into_iter();
        let these = these.filter(|(_, _, version)| versions.contains(version));
        let holders = these.map(|(worker, pid, version)| Holder {
            worker: Some(worker),
            pid,
            versions: vec![version],
        });
        holders.collect()
    }

    /// Waits until what was published is with those it is for, who are told of the end
    /// after it.
    fn hand_over(&self) {
        let until = Instant::now().checked_add(HANDOVER);
        let mut state = self.shared.lock();
        while !state.is_handed_over() && !passed(until) {
            let Ok(locked) = self.shared.wait(state, until) else {
                return;
            };
            state = locked;
        }
    }

    /// Takes the memory of what nobody holds any more.
    fn recycle(&mut self, gone: Vec<Arc<Retained>>) {
        for kept in gone {
            let model = kept.model;
            if let Some(kept) = Arc::into_inner(kept)
                && let Some(image) = kept.snapshot.into_image()
            {
                self.spare[model] = Some(image);
            }
        }
    }
}

impl SenderTransport for RpcSender {
    fn stage(&mut self, models: &[usize], deadline: Deadline) -> Result<Box<dyn Staging + '_>> {
        self.owner.check()?;
        for model in models {
            self.wait_for_room(*model, deadline)?;
        }
        Ok(Box::new(Rooms::new(self, models)))
    }

    fn version(&self, model: usize) -> Version {
        // In a forked child no thread releases a lock that was held.
        match self.owner.is_here() {
            true => self.shared.lock().newest(model),
            false => Version::NONE,
        }
    }

    fn workers(&self) -> Vec<WorkerStatus> {
        match self.owner.is_here() {
            true => self.shared.lock().workers(),
            false => Vec::new(),
        }
    }

    fn wait_workers(
        &mut self,
        deadline: Deadline,
        enough: &mut dyn FnMut(&Attendance) -> bool,
    ) -> Result<bool> {
        self.owner.check()?;
        let mut state = self.shared.lock();
        loop {
            if enough(&state.attendance()) {
                return Ok(true);
            }
            if passed(deadline) {
                return Ok(false);
            }
            state = self.shared.wait(state, deadline)?;
        }
    }

    fn take_rejected(&mut self) -> Vec<(WorkerId, String)> {
        match self.owner.is_here() {
            true => self.shared.lock().take_rejections(),
            false => Vec::new(),
        }
    }

    fn snapshot(&self, model: usize) -> Result<Option<Snapshot>> {
        self.owner.check()?;
        let state = self.shared.lock();
        let kept = state.default_version(model);
        Ok(kept.map(|kept| kept.snapshot.clone()))
    }

    fn snapshot_for(&self, model: usize, targets: &Targets) -> Result<Option<Snapshot>> {
        self.owner.check()?;
        match self.shared.lock().common(model, targets) {
            Ok(kept) => Ok(kept.map(|kept| kept.snapshot.clone())),
            Err(versions) => Err(Error::Diverged {
                model: self.shared.models[model].id.clone(),
                versions,
            }),
        }
    }

    fn old_snapshot(&self, model: usize, version: Version) -> Result<Option<Snapshot>> {
        self.owner.check()?;
        let state = self.shared.lock();
        if let Some(kept) = state.find(model, version) {
            return Ok(Some(kept.snapshot.clone()));
        }
        Err(Error::NoSuchVersion {
            model: self.shared.models[model].id.clone(),
            asked: version,
            known: state.kept(model),
        })
    }

    fn hold(&mut self, workers: &[WorkerId], hold: bool) -> Result<()> {
        self.owner.check()?;
        match hold {
            true => self.shared.lock().hold(workers),
            false => self.shared.lock().release(workers),
        }
        self.shared.ring();
        Ok(())
    }

    fn forget(&mut self, workers: &[WorkerId]) -> Result<()> {
        self.owner.check()?;
        self.shared.lock().forget_missing(workers);
        Ok(())
    }
}

impl Drop for RpcSender {
    fn drop(&mut self) {
        if self.owner.is_here() {
            self.hand_over();
            self.shared.close();
        }
    }
}
