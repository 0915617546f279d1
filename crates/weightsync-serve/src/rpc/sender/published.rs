//! A publication on its way to the workers.

use std::sync::Arc;
use std::time::Instant;

use weightsync::transport::{Deadline, Level, Outstanding};
use weightsync::{Error, Origin, Outcome, Result, Version, WorkerId, WorkerReport};

use super::state::{RetainedPlan, Shared};
use crate::rpc::passed;
use crate::rpc::plan::{Disposition, MailboxId, Publication};

#[derive(Debug)]
pub(super) struct Published {
    shared: Arc<Shared>,
    publication: Publication,
    at: Instant,
    owner: Origin,
}

impl Published {
    pub(super) fn new(shared: Arc<Shared>, publication: Publication, at: Instant) -> Self {
        Self {
            shared,
            publication,
            at,
            owner: Origin::here(),
        }
    }

    fn check(&self) -> Result<()> {
        self.owner.check()?;
        match self.shared.is_closed() {
            true => Err(Error::SenderClosed),
            false => Ok(()),
        }
    }

    fn line(
        &self,
        plan: &RetainedPlan,
        (id, disposition): (MailboxId, Disposition),
        level: Level,
    ) -> WorkerReport {
        let outcome = plan.outcome(&self.publication, (id, disposition), level);
        let (versions, current) = plan.versions(id, &self.publication);
        let about = plan.about(id);
        let open = outcome.is_none();
        WorkerReport {
            worker: about.map_or(WorkerId(0), |about| about.worker),
            pid: about.map_or(0, |about| about.pid),
            outcome: outcome.unwrap_or_else(|| plan.so_far(&self.publication, id)),
            versions,
            current,
            after: self.at.elapsed(),
            late: match open {
                true => plan.late(&self.publication, id),
                false => None,
            },
        }
    }

    fn absent(&self) -> impl Iterator<Item = WorkerReport> {
        let absent = self.publication.absent.iter();
        absent.map(|worker| WorkerReport {
            worker: *worker,
            pid: 0,
            outcome: Outcome::Absent,
            versions: vec![Version::NONE; self.publication.versions.len()],
            current: false,
            after: self.at.elapsed(),
            late: None,
        })
    }
}

impl Outstanding for Published {
    fn versions(&self) -> &[(usize, Version)] {
        &self.publication.versions
    }

    fn settle(&self, level: Level, deadline: Deadline) -> Result<Vec<WorkerReport>> {
        self.check()?;
        let mut open = self.publication.dispositions.clone();
        let mut state = self.shared.lock();
        loop {
            self.check()?;
            open.retain(|disposition| {
                let outcome = state.outcome(&self.publication, *disposition, level);
                outcome.is_none()
            });
            let is_late = |(id, _): &_| state.late(&self.publication, *id).is_some();
            if open.iter().all(is_late) || passed(deadline) {
                break;
            }
            state = self.shared.wait(state, deadline)?;
        }
        let dispositions = self.publication.dispositions.iter();
        let lines = dispositions.map(|disposition| self.line(&state, *disposition, level));
        let mut lines: Vec<_> = lines.chain(self.absent()).collect();
        lines.sort_by_key(|line| line.worker);
        Ok(lines)
    }

    fn is_settled(&self, level: Level) -> Result<bool> {
        self.check()?;
        let state = self.shared.lock();
        let mut dispositions = self.publication.dispositions.iter();
        Ok(dispositions.all(|disposition| {
            let outcome = state.outcome(&self.publication, *disposition, level);
            outcome.is_some() || state.late(&self.publication, disposition.0).is_some()
        }))
    }

    fn late(&self, level: Level) -> Result<()> {
        self.check()?;
        let mut state = self.shared.lock();
        state.note_late(&self.publication, level, self.at);
        Ok(())
    }

    fn decided(&self) -> Result<Vec<WorkerReport>> {
        self.check()?;
        let state = self.shared.lock();
        let dispositions = self.publication.dispositions.iter();
        let decided = dispositions
            .filter(|(id, disposition)| *disposition == Disposition::Held || !state.is_here(*id));
        let lines = decided.map(|disposition| self.line(&state, *disposition, Level::Staged));
        let mut lines: Vec<_> = lines.chain(self.absent()).collect();
        lines.sort_by_key(|line| line.worker);
        Ok(lines)
    }
}

impl Drop for Published {
    fn drop(&mut self) {
        if self.owner.is_here() {
            let dispositions = self.publication.dispositions.iter();
            let mailboxes: Vec<_> = dispositions.map(|(id, _)| *id).collect();
            self.shared.note(|plan| plan.unwatch(mailboxes));
        }
    }
}
