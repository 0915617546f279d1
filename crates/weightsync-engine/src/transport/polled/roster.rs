//! The workers of a sender, as their entries show them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use weightsync_core::{Outcome, Run, WorkerId, WorkerRoute, WorkerStatus};
use weightsync_mem::threads::LockExt as _;

use super::{AboutWorker, Life, PolledPlace, WorkerEntry, WorkerWords};
use crate::transport::{Attendance, GoneWorker, Lateness};

/// Who is there, who went and how, and what each said.
#[derive(Debug)]
pub struct Roster {
    pub(super) place: Arc<dyn PolledPlace>,
    run: Run,
    /// How many models the sender has.
    models: usize,
    /// Whether it removes what workers left that are gone: only a sender does.
    removes: bool,
    known: Mutex<KnownWorkers>,
}

#[derive(Debug, Default)]
struct KnownWorkers {
    /// By the names of their entries.
    there: BTreeMap<String, Arc<PolledWorker>>,
    /// How many have joined so far.
    joined: u64,
    /// The last of each number that went.
    gone: BTreeMap<WorkerId, GoneWorker>,
    /// The gone ones that did not leave in order and are not back: each has a line of every send.
    missing: BTreeMap<WorkerId, Arc<PolledWorker>>,
    rejected: Vec<(WorkerId, String)>,
}

/// A worker that has joined.
#[derive(Debug)]
pub(super) struct PolledWorker {
    entry: Box<dyn WorkerEntry>,
    name: String,
    /// Its position among all that joined.
    joined: u64,
    /// What it said last.
    words: Mutex<WorkerWords>,
    /// What it had said when it was late for a publication.
    pub(super) late: Mutex<Lateness<WorkerWords>>,
}

impl Roster {
    /// The roster of a sender of this run with so many models. It knows no worker yet.
    pub fn new(place: Arc<dyn PolledPlace>, run: Run, models: usize) -> Self {
        Self {
            place,
            run,
            models,
            removes: true,
            known: Mutex::default(),
        }
    }

    /// The roster of another process's sender, for a program that only looks.
    pub fn of_another(place: Arc<dyn PolledPlace>, run: Run, models: usize) -> Self {
        Self {
            removes: false,
            ..Self::new(place, run, models)
        }
    }

    /// The connected workers, and those that failed, died or were lost and are neither back nor
    /// forgotten, by number.
    pub fn status(&self) -> Vec<WorkerStatus> {
        let mut all = self.present();
        let known = self.known();
        for (number, worker) in &known.missing {
            let mut status = worker.status(self.models);
            let gone = known.gone.get(number).map(|gone| gone.how.clone());
            status.gone = Some(gone.unwrap_or_else(|| self.place.lost()));
            all.push(status);
        }
        all.sort_by_key(|status| status.worker);
        all
    }

    /// Looks for workers that came and went. Afterwards the sender removes what the gone ones left;
    /// a send that waits for one of them still has its last words.
    pub fn tidy(&self) {
        self.look();
    }

    /// The workers that are there and can use something.
    pub(super) fn present(&self) -> Vec<WorkerStatus> {
        self.look();
        let known = self.known();
        let usable = known.there.values().filter(|worker| {
            let (_, words) = worker.look();
            words.rejected.is_none()
        });
        usable.map(|worker| worker.status(self.models)).collect()
    }

    pub(super) fn attendance(&self) -> Attendance {
        let workers = self.present();
        let known = self.known();
        let rejected = known.rejected.iter();
        let mut gone: Vec<_> = known.gone.values().cloned().collect();
        gone.sort_by_key(|gone| gone.joined);
        Attendance {
            workers,
            rejected: rejected.map(|(worker, _)| *worker).collect(),
            gone,
            joined: known.joined,
        }
    }

    pub(super) fn take_rejected(&self) -> Vec<(WorkerId, String)> {
        std::mem::take(&mut self.known().rejected)
    }

    pub(super) fn forget(&self, workers: &[WorkerId]) {
        let mut known = self.known();
        known.missing.retain(|worker, _| !workers.contains(worker));
    }

    /// All workers: those that are there, those of them that can use nothing, and those that are
    /// missing.
    pub(super) fn look(&self) -> Vec<Arc<PolledWorker>> {
        let mut known = self.known();
        // New entries first: a worker that came and went between two looks is still counted.
        for name in self.place.entries() {
            if !known.there.contains_key(&name) {
                self.meet(&mut known, name);
            }
        }
        let KnownWorkers {
            there, rejected, ..
        } = &mut *known;
        // Those that went are taken out first, and noted below: both change the table.
        let mut went = Vec::new();
        there.retain(|_, worker| {
            let (life, words) = worker.look();
            if let Some(reason) = words.rejected.clone() {
                let one = (worker.about().worker, reason);
                if !rejected.contains(&one) {
                    rejected.push(one);
                }
            }
            if life != Life::Here {
                went.push((worker.clone(), life, words));
            }
            life == Life::Here
        });
        for (worker, life, words) in went {
            // What it said stays in memory, for sends that still wait for it.
            self.remove(&worker.name);
            self.note_gone(&mut known, &worker, life, words);
        }
        let there = known.there.values().chain(known.missing.values());
        there.cloned().collect()
    }

    /// Looks at an entry that is not known yet.
    fn meet(&self, known: &mut KnownWorkers, name: String) {
        // One that is still being made comes next time.
        let Some(entry) = self.place.open(&name) else {
            return;
        };
        let about = entry.about();
        // A model that this sender does not have would be a place far behind the last one.
        let fits =
            about.wanted.len() <= self.models && about.wanted.iter().all(|one| *one < self.models);
        if about.run != self.run || !fits {
            // It joined an earlier sender. While it lives, it removes its entry itself.
            if entry.life() != Life::Here {
                self.remove(&name);
            }
            return;
        }
        known.joined += 1;
        // A worker of this number is back.
        known.missing.remove(&about.worker);
        let worker = PolledWorker {
            entry,
            name: name.clone(),
            // Joined workers are counted, so that a wait can tell those that came since the last
            // one.
            joined: known.joined,
            words: Mutex::default(),
            late: Mutex::default(),
        };
        known.there.insert(name, Arc::new(worker));
    }

    fn note_gone(
        &self,
        known: &mut KnownWorkers,
        worker: &Arc<PolledWorker>,
        life: Life,
        words: WorkerWords,
    ) {
        let number = worker.about().worker;
        let had_something = words.versions.iter().any(|version| !version.is_none());
        // What the worker said of itself tells more than how its process ended.
        let how = match (words.rejected, life) {
            (Some(reason), _) => Outcome::Failed { reason },
            (None, Life::Left) => Outcome::Left,
            (None, _) => self.place.lost(),
        };
        // A process of this number that is there stands for the one that went.
        let mut others = known.there.values().map(|other| other.about().worker);
        if how != Outcome::Left && had_something && !others.any(|other| other == number) {
            known.missing.insert(number, worker.clone());
        }
        // Its status covers the models that it wanted.
        let last = worker.about().wanted.iter().max();
        let gone = GoneWorker {
            status: worker.status(last.map_or(0, |last| last + 1)),
            how,
            joined: worker.joined,
        };
        known.gone.insert(number, gone);
    }

    fn remove(&self, name: &str) {
        if self.removes {
            self.place.remove(name);
        }
    }

    fn known(&self) -> MutexGuard<'_, KnownWorkers> {
        self.known.locked()
    }
}

impl PolledWorker {
    pub(super) fn about(&self) -> &AboutWorker {
        self.entry.about()
    }

    /// Whether it lives, and what it said last.
    pub(super) fn look(&self) -> (Life, WorkerWords) {
        // Before its words: its last ones are then not missed.
        let life = self.entry.life();
        let mut last = self.words.locked();
        // Words that cannot be read just now leave those of the last look.
        if let Some(words) = self.entry.words() {
            *last = words;
        }
        (life, last.clone())
    }

    fn status(&self, models: usize) -> WorkerStatus {
        let about = self.about();
        let (_, words) = self.look();
        let mut status = WorkerStatus::new(about.worker, about.pid, models);
        status.device = about.device.clone();
        status.route = WorkerRoute::Store;
        let all = 0..models;
        status.versions = all.map(|model| about.version(&words, model)).collect();
        status
    }
}
