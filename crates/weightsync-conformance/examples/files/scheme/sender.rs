//! The trainer's end.

use std::collections::{BTreeMap, VecDeque};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use weightsync_engine::transport::{
    Attendance, CopyOptions, Deadline, GoneWorker, Image, Lateness, Level, ModelSpec, Opening,
    Outstanding, SenderTransport, Source, Staging, Targets, interrupt,
};
use weightsync_engine::{
    Digest, Error, Outcome, Result, Snapshot, Version, WorkerId, WorkerReport, WorkerStatus,
};

use super::storage::{self, Life, PAUSE, Peer, Presence, Stay, failed};
use super::{AboutSender, AboutWorker, Live, LiveVersion, Status, passed};

#[derive(Debug)]
pub struct FileSender {
    models: Vec<ModelSpec>,
    /// What the file `live` says.
    live: Live,
    /// The newest version of each model and those kept before it, oldest first.
    kept: Vec<VecDeque<Snapshot>>,
    history: usize,
    registry: Mutex<Registry>,
    stay: Stay,
}

impl FileSender {
    pub fn open(root: &Path, opening: &Opening<'_>) -> Result<Self> {
        fs::create_dir_all(root).map_err(failed("making", root))?;
        storage::sweep_all(root);
        let mut stay = Stay::settle(Path::new(opening.at.address()))?;
        let workers = stay.dir.join("workers");
        storage::make_dir(&workers)?;
        let models = opening.models.to_vec();
        let about = AboutSender {
            pid: std::process::id(),
            run: opening.run,
            secret: *opening.at.secret(),
            models: models.clone(),
        };
        stay.presence = Some(Presence::announce(&stay.dir.join("sender"), &about)?);
        let none_yet = LiveVersion {
            version: Version::NONE,
            digest: Digest([0; 16]),
        };
        Ok(Self {
            live: Live {
                run: opening.run,
                sequence: 0,
                versions: vec![none_yet; models.len()],
            },
            kept: vec![VecDeque::new(); models.len()],
            models,
            history: usize::from(opening.options.history),
            registry: Mutex::new(Registry {
                dir: workers,
                known: BTreeMap::new(),
                joined: 0,
                gone: BTreeMap::new(),
                missing: BTreeMap::new(),
                rejected: Vec::new(),
            }),
            stay,
        })
    }

    fn registry(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SenderTransport for FileSender {
    fn stage(&mut self, models: &[usize], _: Deadline) -> Result<Box<dyn Staging + '_>> {
        let workers = self.registry().look_for_all();
        let members = models.iter().map(|model| StagedModel {
            model: *model,
            version: self.version(*model).next(),
            image: Image::zeros(&self.models[*model].layout),
        });
        Ok(Box::new(StagedSet {
            members: members.collect(),
            workers,
            sender: self,
            waits_for_late: false,
        }))
    }

    fn version(&self, model: usize) -> Version {
        self.live.versions[model].version
    }

    fn workers(&self) -> Vec<WorkerStatus> {
        let workers = self.registry().look();
        let each = workers.iter().map(|one| one.status(self.models.len()));
        each.collect()
    }

    fn wait_workers(
        &mut self,
        deadline: Deadline,
        enough: &mut dyn FnMut(&Attendance) -> bool,
    ) -> Result<bool> {
        loop {
            let workers = self.workers();
            let there = {
                let registry = self.registry();
                let rejected = registry.rejected.iter();
                let mut gone: Vec<_> = registry.gone.values().cloned().collect();
                gone.sort_by_key(|gone| gone.joined);
                Attendance {
                    workers,
                    rejected: rejected.map(|(worker, _)| *worker).collect(),
                    gone,
                    joined: registry.joined,
                }
            };
            if enough(&there) {
                return Ok(true);
            }
            if passed(deadline) {
                return Ok(false);
            }
            interrupt::sleep(PAUSE)?;
        }
    }

    fn take_rejected(&mut self) -> Vec<(WorkerId, String)> {
        std::mem::take(&mut self.registry().rejected)
    }

    fn forget(&mut self, workers: &[WorkerId]) -> Result<()> {
        let mut registry = self.registry();
        registry
            .missing
            .retain(|worker, _| !workers.contains(worker));
        Ok(())
    }

    fn snapshot(&self, model: usize) -> Result<Option<Snapshot>> {
        Ok(self.kept[model].back().cloned())
    }

    fn old_snapshot(&self, model: usize, version: Version) -> Result<Option<Snapshot>> {
        let mut kept = self.kept[model].iter();
        Ok(kept.find(|one| one.version() == version).cloned())
    }
}

/// Room for the next version of some models, in this process's own memory.
#[derive(Debug)]
struct StagedSet<'a> {
    sender: &'a mut FileSender,
    /// Those that were there when the send began: one that dies before it is
    /// live has a line all the same.
    workers: Vec<Arc<Worker>>,
    members: Vec<StagedModel>,
    waits_for_late: bool,
}

#[derive(Debug)]
struct StagedModel {
    model: usize,
    version: Version,
    image: Image,
}

impl StagedSet<'_> {
    fn member(&mut self, model: usize) -> &mut StagedModel {
        let mut members = self.members.iter_mut();
        let found = members.find(|member| member.model == model);
        found.unwrap_or_else(|| panic!("model {model} was not staged"))
    }
}

impl Staging for StagedSet<'_> {
    fn tensors_mut(&mut self, model: usize) -> Vec<&mut [u8]> {
        self.member(model).image.tensors_mut()
    }

    fn tensor_mut(&mut self, model: usize, index: usize) -> &mut [u8] {
        self.tensors_mut(model).swap_remove(index)
    }

    fn write(&mut self, model: usize, sources: &[Source<'_>], _: CopyOptions) -> Result<()> {
        self.member(model).image.write(sources)
    }

    fn number(&mut self, model: usize, version: Version) -> Result<()> {
        let newest = self.sender.version(model);
        if version <= newest {
            return Err(Error::VersionNotNewer {
                newest,
                got: version,
            });
        }
        self.member(model).version = version;
        Ok(())
    }

    fn wait_for_late(&mut self) {
        self.waits_for_late = true;
    }

    fn publish(self: Box<Self>, targets: &Targets) -> Result<Box<dyn Outstanding>> {
        let Self {
            sender,
            members,
            mut workers,
            waits_for_late,
        } = *self;
        if *targets != Targets::All {
            return Err(Error::Unsupported {
                what: "a send to some workers",
                scheme: "files".into(),
            });
        }
        let mut live = sender.live.clone();
        live.sequence += 1;
        for StagedModel {
            model,
            version,
            image,
        } in &members
        {
            let digest = Digest::of(image.layout(), image.bytes());
            let digest = digest.unwrap_or_else(|_| unreachable!("an image has its layout's bytes"));
            let version = *version;
            let path = sender.stay.dir.join(live.file_name(*model, version));
            storage::put(&path, image.bytes(), true)?;
            live.versions[*model] = LiveVersion { version, digest };
        }
        // Before the swap: nobody who gets it has no line.
        let mut joined = sender.registry().look_for_all();
        joined.retain(|one| !workers.iter().any(|known| Arc::ptr_eq(known, one)));
        workers.append(&mut joined);
        let path = sender.stay.dir.join("live");
        storage::put(&path, &storage::sealed(&live)?, true)?;

        let before = std::mem::replace(&mut sender.live, live);
        sender.remove_but(&before);
        let mut versions = Vec::new();
        for member in members {
            versions.push((member.model, member.version));
            sender.keep(member)?;
        }
        let concerned = workers.into_iter().filter(|worker| {
            let mut wanted = worker.peer.about.wanted.iter();
            wanted.any(|model| versions.iter().any(|(sent, _)| sent == model))
        });
        Ok(Box::new(Published {
            sequence: sender.live.sequence,
            workers: concerned.collect(),
            versions,
            at: Instant::now(),
            waits_for_late,
        }))
    }
}

impl FileSender {
    /// Removes the versions that are not live, nor were before: a worker may be
    /// about to open those it has just read of.
    fn remove_but(&self, before: &Live) {
        let named = |live: &Live, path: &PathBuf| {
            let mut versions = live.versions.iter().enumerate();
            versions.any(|(model, one)| path.ends_with(live.file_name(model, one.version)))
        };
        let epoch = format!("{}-", self.live.run.epoch.0);
        for path in storage::entries(&self.stay.dir) {
            let name = path.file_name().and_then(|name| name.to_str());
            let is_version = name.is_some_and(|name| name.starts_with(&epoch));
            if is_version && !named(before, &path) && !named(&self.live, &path) {
                let _ = fs::remove_file(path);
            }
        }
    }

    fn keep(&mut self, member: StagedModel) -> Result<()> {
        let LiveVersion { version, digest } = self.live.versions[member.model];
        let spec = &self.models[member.model];
        let snapshot = Snapshot::received(spec, self.live.run, version, member.image)?;
        let kept = &mut self.kept[member.model];
        kept.push_back(snapshot.with_digest(digest));
        while kept.len() > self.history + 1 {
            kept.pop_front();
        }
        Ok(())
    }
}

#[derive(Debug)]
struct Published {
    sequence: u64,
    versions: Vec<(usize, Version)>,
    /// Those that were there, and want one of the models.
    workers: Vec<Arc<Worker>>,
    at: Instant,
    waits_for_late: bool,
}

impl Outstanding for Published {
    fn versions(&self) -> &[(usize, Version)] {
        &self.versions
    }

    fn settle(&self, level: Level, deadline: Deadline) -> Result<Vec<WorkerReport>> {
        let lines = self.workers.iter().map(|worker| self.line(worker, level));
        let mut lines: Vec<_> = lines.collect();
        let awaited = |line: &WorkerReport| !line.outcome.is_final(level) && line.late.is_none();
        while lines.iter().any(awaited) && !passed(deadline) {
            interrupt::sleep(PAUSE)?;
            for (line, worker) in lines.iter_mut().zip(&self.workers) {
                if !line.outcome.is_final(level) {
                    *line = self.line(worker, level);
                }
            }
        }
        Ok(lines)
    }

    fn decided(&self) -> Result<Vec<WorkerReport>> {
        let gone = self.workers.iter();
        let gone = gone.filter(|worker| worker.look().0 != Life::Here);
        Ok(gone
            .map(|worker| self.line(worker, Level::Staged))
            .collect())
    }

    fn late(&self, level: Level) -> Result<()> {
        let lines = self.workers.iter().map(|worker| self.line(worker, level));
        for (line, worker) in lines.zip(&self.workers) {
            if !line.outcome.is_final(level) {
                let (_, status) = worker.look();
                let mut late = worker.late.lock().unwrap_or_else(PoisonError::into_inner);
                late.note(self.sequence, self.at, status);
            }
        }
        Ok(())
    }
}

impl Published {
    fn line(&self, worker: &Worker, level: Level) -> WorkerReport {
        let (life, status) = worker.look();
        let refused = status.refused.as_ref();
        let refused = refused.filter(|(sequence, _)| *sequence >= self.sequence);
        let outcome = if status.applied >= self.sequence {
            Outcome::Applied
        } else if let Some(reason) = status.rejected.as_ref().or(refused.map(|(_, why)| why)) {
            let reason = reason.clone();
            match life {
                Life::Left | Life::Dead if status.rejected.is_some() => Outcome::Failed { reason },
                _ => Outcome::Refused { reason },
            }
        } else if level == Level::Staged && status.staged >= self.sequence {
            Outcome::Staged
        } else {
            match life {
                Life::Left => Outcome::Left,
                Life::Dead => Outcome::Died,
                Life::Here if status.staged >= self.sequence => Outcome::Staged,
                Life::Here => Outcome::Late,
            }
        };
        let late = match outcome {
            Outcome::Late if !self.waits_for_late => {
                let late = worker.late.lock().unwrap_or_else(PoisonError::into_inner);
                late.since(self.sequence, || status.clone())
            }
            _ => None,
        };
        let about = &worker.peer.about;
        let mut sent = self.versions.iter();
        let runs = |model: &usize| about.version(&status, *model);
        WorkerReport {
            worker: about.worker,
            pid: about.pid,
            outcome,
            versions: sent.clone().map(|(model, _)| runs(model)).collect(),
            current: sent
                .all(|(model, version)| !about.wanted.contains(model) || runs(model) >= *version),
            after: self.at.elapsed(),
            late,
        }
    }
}

/// The workers that are known.
#[derive(Debug)]
struct Registry {
    dir: PathBuf,
    known: BTreeMap<PathBuf, Arc<Worker>>,
    /// How many have joined so far.
    joined: u64,
    /// The last of each number that went.
    gone: BTreeMap<WorkerId, GoneWorker>,
    /// Of these the ones that did not leave in order and are not back: each has a line
    /// of every send.
    missing: BTreeMap<WorkerId, Arc<Worker>>,
    rejected: Vec<(WorkerId, String)>,
}

impl Registry {
    /// Looks who is there. Those that are not any more are forgotten, and what
    /// they left is removed; who waits for one of them has its last words.
    fn look(&mut self) -> Vec<Arc<Worker>> {
        self.look_for_all();
        let there = self.known.values().filter(|worker| {
            let (_, status) = worker.look();
            status.rejected.is_none()
        });
        there.cloned().collect()
    }

    /// The same, with those that can use nothing, and those that are missing.
    fn look_for_all(&mut self) -> Vec<Arc<Worker>> {
        for dir in storage::entries(&self.dir) {
            // One that is still making its files comes next time.
            if !self.known.contains_key(&dir)
                && let Ok(Some(peer)) = Peer::at(&dir.join("alive"))
            {
                self.joined += 1;
                let worker = Worker {
                    status: Mutex::default(),
                    late: Mutex::default(),
                    dir: dir.clone(),
                    joined: self.joined,
                    peer,
                };
                self.missing.remove(&worker.peer.about.worker);
                self.known.insert(dir, Arc::new(worker));
            }
        }
        let mut went = Vec::new();
        self.known.retain(|dir, worker| {
            let (life, status) = worker.look();
            let number = worker.peer.about.worker;
            if let Some(reason) = status.rejected.clone() {
                let rejected = (number, reason);
                if !self.rejected.contains(&rejected) {
                    self.rejected.push(rejected);
                }
            }
            if life != Life::Here {
                let _ = fs::remove_dir_all(dir);
                went.push((worker.clone(), life, status));
            }
            life == Life::Here
        });
        for (worker, life, status) in went {
            let number = worker.peer.about.worker;
            let how = match (status.rejected, life) {
                (Some(reason), _) => Outcome::Failed { reason },
                (None, Life::Left) => Outcome::Left,
                (None, _) => Outcome::Died,
            };
            let others = self.known.values().map(|other| other.peer.about.worker);
            let had_something = status.versions.iter().any(|version| !version.is_none());
            if how != Outcome::Left && had_something && !others.clone().any(|other| other == number)
            {
                self.missing.insert(number, worker.clone());
            }
            let models = worker
                .peer
                .about
                .wanted
                .iter()
                .max()
                .map_or(0, |last| last + 1);
            let (status, joined) = (worker.status(models), worker.joined);
            self.gone.insert(
                number,
                GoneWorker {
                    status,
                    how,
                    joined,
                },
            );
        }
        self.known
            .values()
            .chain(self.missing.values())
            .cloned()
            .collect()
    }
}

#[derive(Debug)]
struct Worker {
    dir: PathBuf,
    /// Of all that joined it was this one.
    joined: u64,
    peer: Peer<AboutWorker>,
    /// What it said last.
    status: Mutex<Status>,
    /// What it had said when it was late for a publication.
    late: Mutex<Lateness<Status>>,
}

impl Worker {
    fn look(&self) -> (Life, Status) {
        // Before its words: its last ones are then not missed.
        let life = self.peer.life();
        let mut last = self.status.lock().unwrap_or_else(PoisonError::into_inner);
        if let Ok(Some(status)) = storage::value::<Status>(&self.dir.join("status")) {
            *last = status;
        }
        (life, last.clone())
    }

    fn status(&self, models: usize) -> WorkerStatus {
        let about = &self.peer.about;
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
    fn version(&self, status: &Status, model: usize) -> Version {
        let at = self.wanted.iter().position(|wanted| *wanted == model);
        let found = at.and_then(|at| status.versions.get(at));
        found.copied().unwrap_or(Version::NONE)
    }
}
