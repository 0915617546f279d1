//! What a sender notes of its sends, so that its status can be told at any time and from any thread.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use weightsync_core::{
    LastOutcome, LastSend, ModelId, ModelStatus, Outcome, SenderStatus, Version, WorkerId,
};
use weightsync_mem::threads::LockExt as _;

use crate::report::Report;
use crate::transport::ModelSpec;

/// What a sender notes of its sends: the newest versions, the last send, and each worker's outcome.
/// A transport that answers programs which ask for the status makes the answer with it.
#[derive(Debug)]
pub struct SendHistory {
    since: Instant,
    noted: Mutex<Noted>,
}

#[derive(Debug)]
struct Noted {
    /// What does not change from one answer to the next, and the models' newest versions.
    status: SenderStatus,
    last_send: Option<(LastSend, Instant)>,
    /// The last outcome at each worker of a process, and when its report was made.
    outcomes: BTreeMap<WorkerId, Noticed>,
}

#[derive(Debug)]
struct Noticed {
    pid: u32,
    outcome: Outcome,
    after: Duration,
    at: Instant,
}

impl SendHistory {
    /// For a sender of this scheme at this address.
    pub fn new(scheme: &str, address: &str, models: &[ModelSpec]) -> Self {
        let models = models.iter().map(|model| ModelStatus {
            name: model.id.clone(),
            version: Version::NONE,
            bytes: model.layout.bytes(),
            changed: None,
            delta_bytes: None,
        });
        let mut status = SenderStatus::default();
        status.scheme = scheme.into();
        status.address = address.into();
        status.pid = std::process::id();
        status.models = models.collect();
        Self {
            since: Instant::now(),
            noted: Mutex::new(Noted {
                status,
                last_send: None,
                outcomes: BTreeMap::new(),
            }),
        }
    }

    /// The run is known once the transport is open, and so are versions that an earlier sender left.
    pub(crate) fn opened(&self, run: String, newest: impl Iterator<Item = Version>) {
        let mut noted = self.noted();
        noted.status.run = run;
        for (model, version) in noted.status.models.iter_mut().zip(newest) {
            model.version = version;
        }
    }

    /// Versions went live.
    pub(crate) fn published(&self, versions: &[(ModelId, Version)], bytes: u64, copied: Duration) {
        // Noted as the version goes live, so that a status shows a send whose workers still load.
        let mut noted = self.noted();
        noted.status.sends += 1;
        for (name, version) in versions {
            let mut models = noted.status.models.iter_mut();
            if let Some(model) = models.find(|model| model.name == *name) {
                model.version = model.version.max(*version);
            }
        }
        let last = LastSend {
            versions: versions.to_vec(),
            bytes,
            copied,
            took: None,
            ago: Duration::ZERO,
        };
        noted.last_send = Some((last, Instant::now()));
    }

    /// A send has a report, perhaps not its last one.
    pub(crate) fn reported(&self, report: &Report) {
        let at = Instant::now();
        let mut noted = self.noted();
        // A send in groups is published in parts: its report names all of them, the last part
        // last.
        if let Some((last, _)) = &mut noted.last_send
            && report.versions.ends_with(&last.versions)
        {
            last.versions.clone_from(&report.versions);
            (last.bytes, last.took) = (report.bytes, Some(report.took));
        }
        // A number may have two lines: that of a process that went, and that of its successor.
        for gone in [true, false] {
            let lines = report.workers.iter();
            for line in lines.filter(|line| line.outcome.is_gone() == gone) {
                let noticed = Noticed {
                    pid: line.pid,
                    outcome: line.outcome.clone(),
                    after: line.after,
                    at,
                };
                noted.outcomes.insert(line.worker, noticed);
            }
        }
    }

    /// The status now. `fill` puts in what the transport knows: the workers, and what lies between
    /// them and the sender.
    pub fn status(&self, fill: impl FnOnce(&mut SenderStatus)) -> SenderStatus {
        let mut status = {
            let noted = self.noted();
            let mut status = noted.status.clone();
            status.last_send = noted.last_send.as_ref().map(|(last, at)| LastSend {
                ago: at.elapsed(),
                ..last.clone()
            });
            status
        };
        status.up_seconds = self.since.elapsed().as_secs_f64();
        // Not under the lock, because a transport may have locks of its own.
        fill(&mut status);
        let noted = self.noted();
        // The report may be that of an earlier process with this number.
        for worker in &mut status.workers {
            let noticed = noted.outcomes.get(&worker.worker);
            let noticed = noticed.filter(|noticed| noticed.pid == worker.pid);
            worker.last = noticed.map(|noticed| LastOutcome {
                outcome: noticed.outcome.clone(),
                after: noticed.after,
                ago: noticed.at.elapsed(),
            });
        }
        drop(noted);
        status
    }

    fn noted(&self) -> MutexGuard<'_, Noted> {
        self.noted.locked()
    }
}
