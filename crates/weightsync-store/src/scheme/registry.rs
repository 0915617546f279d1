//! The workers of a sender, as their files show them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use serde::Deserialize;
use weightsync_core::{Run, Version, WorkerId};
use weightsync_engine::transport::{GoneWorker, Lateness};
use weightsync_engine::{Outcome, WorkerStatus};

use super::{ALIVE, AboutWorker, MAX_WORKER_FILE, STATUS, Status, WORKERS, is_worker_dir};
use crate::storage::{Life, Peer, Storage};

/// The workers that are known.
#[derive(Debug)]
pub(super) struct Registry {
    storage: Arc<dyn Storage>,
    run: Run,
    /// How many models the sender has.
    models: usize,
    /// By the names of their directories.
    known: BTreeMap<String, Arc<Worker>>,
    /// How many have joined so far.
    pub(super) joined: u64,
    /// The last of each number that went.
    pub(super) gone: BTreeMap<WorkerId, GoneWorker>,
    /// Of these the ones that did not leave in order and are not back: each has a line
    /// of every send.
    pub(super) missing: BTreeMap<WorkerId, Arc<Worker>>,
    pub(super) rejected: Vec<(WorkerId, String)>,
}

impl Registry {
    /// Knows no worker yet.
    pub(super) fn new(storage: Arc<dyn Storage>, run: Run, models: usize) -> Self {
        Self {
            storage,
            run,
            models,
            known: BTreeMap::new(),
            joined: 0,
            gone: BTreeMap::new(),
            missing: BTreeMap::new(),
            rejected: Vec::new(),
        }
    }

    /// Looks who is there. Those that are not any more are forgotten, and what they left is removed.
    pub(super) fn look(&mut self) -> Vec<Arc<Worker>> {
        self.look_for_all();
        let there = self.known.values().filter(|worker| {
            let (_, status) = worker.look();
            status.rejected.is_none()
        });
        there.cloned().collect()
    }

    /// The same, with those that can use nothing, and those that are missing.
    pub(super) fn look_for_all(&mut self) -> Vec<Arc<Worker>> {
        for name in self.storage.list(WORKERS).unwrap_or_default() {
            if is_worker_dir(&name) && !self.known.contains_key(&name) {
                self.meet(&name);
            }
        }
        let mut went = Vec::new();
        self.known.retain(|_, worker| {
            let (life, status) = worker.look();
            let number = worker.about.worker;
            if let Some(reason) = status.rejected.clone() {
                let rejected = (number, reason);
                if !self.rejected.contains(&rejected) {
                    self.rejected.push(rejected);
                }
            }
            if life != Life::Here {
                let _ = self.storage.remove(&worker.dir);
                went.push((worker.clone(), life, status));
            }
            life == Life::Here
        });
        for (worker, life, status) in went {
            self.note_gone(&worker, life, status);
        }
        let there = self.known.values().chain(self.missing.values());
        there.cloned().collect()
    }

    /// Looks at a directory of a worker that is not known yet.
    fn meet(&mut self, name: &str) {
        let dir = format!("{WORKERS}/{name}");
        let alive = format!("{dir}/{ALIVE}");
        let peer = match self.storage.peer(&alive) {
            Ok(Some(peer)) => peer,
            // One that is still making its files comes next time, and one that left removes them.
            _ => return,
        };
        let about: Option<AboutWorker> = small(peer.about());
        // A model that this sender does not have would be a place far behind the last one.
        let fits = |about: &AboutWorker| {
            about.wanted.len() <= self.models && about.wanted.iter().all(|one| *one < self.models)
        };
        let about = about.filter(|about| about.run == self.run && fits(about));
        let Some(about) = about else {
            // It joined an earlier sender. While it lives, it removes its files itself.
            if peer.life() != Life::Here {
                let _ = self.storage.remove(&dir);
            }
            return;
        };
        self.joined += 1;
        self.missing.remove(&about.worker);
        let worker = Worker {
            storage: self.storage.clone(),
            status: Mutex::default(),
            late: Mutex::default(),
            dir,
            joined: self.joined,
            about,
            peer,
        };
        self.known.insert(name.into(), Arc::new(worker));
    }

    fn note_gone(&mut self, worker: &Arc<Worker>, life: Life, status: Status) {
        let number = worker.about.worker;
        let how = match (status.rejected, life) {
            (Some(reason), _) => Outcome::Failed { reason },
            (None, Life::Left) => Outcome::Left,
            (None, _) => lost(&*self.storage),
        };
        let mut others = self.known.values().map(|other| other.about.worker);
        let had_something = status.versions.iter().any(|version| !version.is_none());
        if how != Outcome::Left && had_something && !others.any(|other| other == number) {
            self.missing.insert(number, worker.clone());
        }
        let last = worker.about.wanted.iter().max();
        let gone = GoneWorker {
            status: worker.status(last.map_or(0, |last| last + 1)),
            how,
            joined: worker.joined,
        };
        self.gone.insert(number, gone);
    }
}

/// What a worker's file says, unless it is longer than one is.
fn small<T: for<'a> Deserialize<'a>>(bytes: &[u8]) -> Option<T> {
    let bytes = bytes.trim_ascii_end();
    let bytes = (bytes.len() <= MAX_WORKER_FILE).then_some(bytes)?;
    serde_json::from_slice(bytes).ok()
}

/// What became of a worker that did not leave in order.
pub(super) fn lost(storage: &dyn Storage) -> Outcome {
    match storage.notices_death() {
        true => Outcome::Died,
        false => Outcome::Lost,
    }
}

#[derive(Debug)]
pub(super) struct Worker {
    storage: Arc<dyn Storage>,
    dir: String,
    /// Of all that joined it was this one.
    joined: u64,
    pub(super) about: AboutWorker,
    peer: Box<dyn Peer>,
    /// What it said last.
    status: Mutex<Status>,
    /// What it had said when it was late for a publication.
    pub(super) late: Mutex<Lateness<Status>>,
}

impl Worker {
    pub(super) fn look(&self) -> (Life, Status) {
        // Before its words: its last ones are then not missed.
        let life = self.peer.life();
        let mut last = self.status.lock().unwrap_or_else(PoisonError::into_inner);
        let said = self.storage.read(&format!("{}/{STATUS}", self.dir));
        if let Some(status) = said.ok().flatten().and_then(|said| small(&said)) {
            *last = status;
        }
        (life, last.clone())
    }

    pub(super) fn status(&self, models: usize) -> WorkerStatus {
        let about = &self.about;
        let (_, reported) = self.look();
        let mut status = WorkerStatus::new(about.worker, about.pid, models);
        status.device = about.device.clone();
        let all = 0..models;
        status.versions = all.map(|model| about.version(&reported, model)).collect();
        status
    }
}

impl AboutWorker {
    /// The version it has loaded of one of the sender's models.
    pub(super) fn version(&self, status: &Status, model: usize) -> Version {
        let at = self.wanted.iter().position(|wanted| *wanted == model);
        let found = at.and_then(|at| status.versions.get(at));
        found.copied().unwrap_or(Version::NONE)
    }
}
