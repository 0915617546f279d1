//! The trainer's end.

use std::collections::VecDeque;
use std::io::ErrorKind;
use std::num::NonZero;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use weightsync_core::{ModelId, Run, Version, WorkerId};
use weightsync_engine::transport::{
    Attendance, CopyOptions, Deadline, Image, Level, ModelSpec, Opening, Outstanding,
    SenderTransport, Source, Staging, Targets,
};
use weightsync_engine::{Error, Origin, Outcome, Result, Snapshot, WorkerReport, WorkerStatus};

use super::registry::{Registry, Worker, lost};
use super::{
    AboutSender, SENDER, SENDER_LOCK, Status, StoreScheme, encoded, in_use, is_here, store_at,
    vacate,
};
use crate::error::StoreError;
use crate::pause::Pause;
use crate::retention::Keep;
use crate::storage::{Life, Presence, Storage};
use crate::store::{ModelVersion, Which};
use crate::writer::{SaveOptions, Writer, host};

/// What a store keeps by default.
const KEPT: Keep = Keep::Newest {
    count: NonZero::new(8).expect("8 is not 0"),
    every: None,
};

#[derive(Debug)]
pub(super) struct StoreSender {
    models: Vec<ModelSpec>,
    writer: Writer,
    /// The newest version of each model and those kept before it, oldest first.
    kept: Vec<VecDeque<Snapshot>>,
    /// Memory of an older version of each model, to be written again.
    spare: Vec<Option<Image>>,
    history: usize,
    registry: Mutex<Registry>,
    /// The newest publication that a worker refused.
    refused: u64,
    temporary: bool,
    /// The process that opened it.
    owner: Origin,
    /// What workers join.
    presence: Option<Box<dyn Presence>>,
    /// What keeps other senders out.
    lock: Option<Box<dyn Presence>>,
}

impl StoreSender {
    pub(super) fn open(scheme: &StoreScheme, opening: &Opening<'_>) -> Result<Self> {
        let store = store_at(opening.at)?;
        let storage = store.shared_storage();
        if scheme.settings.temporary {
            let why = storage.why_not_temporary();
            if let Some(why) = why.map_err(StoreError::file("reading", storage.name("")))? {
                let path = storage.name("");
                return Err(StoreError::NotTemporary { path, why }.into());
            }
        }
        let mut about = AboutSender {
            pid: std::process::id(),
            host: host(),
            run: opening.run,
            secret: *opening.at.secret(),
            models: opening.models.to_vec(),
        };
        // Seen now, so that a sender which died counts as dead in both places at once.
        let _ = is_here(&*storage, SENDER);
        // Before the store is claimed: a second sender takes nothing over from one that lives.
        let lock = announce(&*storage, SENDER_LOCK, &about)?;
        let run = scheme.settings.temporary.then_some(opening.run);
        if scheme.settings.temporary {
            // It is a store of this sender alone, so what a dead one left goes.
            let cleared = storage.clear_temporary();
            cleared.map_err(StoreError::file("removing", storage.name("")))?;
        }
        let options = SaveOptions {
            keep: scheme
                .settings
                .keep
                .unwrap_or(KEPT)
                .at_least(opening.options.history),
            ..SaveOptions::default()
        };
        let writer = Writer::claim_as(&store, options, run)?;
        about.run = writer.run();
        let presence = announce(&*storage, SENDER, &about)?;
        Ok(Self {
            kept: vec![VecDeque::new(); about.models.len()],
            spare: vec![None; about.models.len()],
            registry: Mutex::new(Registry::new(storage, writer.run(), about.models.len())),
            models: about.models,
            history: usize::from(opening.options.history),
            refused: 0,
            owner: Origin::here(),
            temporary: scheme.settings.temporary,
            writer,
            presence: Some(presence),
            lock: Some(lock),
        })
    }

    fn registry(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for StoreSender {
    fn drop(&mut self) {
        if !self.owner.is_here() {
            return; // the parent's end goes on
        }
        // Workers see that it left, and the last to leave tidies up.
        self.presence = None;
        self.registry().look_for_all();
        self.lock = None;
        if self.temporary {
            let _ = vacate(self.writer.store().storage());
        }
    }
}

/// Announces a sender, unless another one lives there.
fn announce(
    storage: &dyn Storage,
    path: &str,
    about: &AboutSender,
) -> Result<Box<dyn Presence>, StoreError> {
    match storage.announce(path, &encoded(about)) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Err(in_use(storage, path)),
        announced => announced.map_err(StoreError::file("writing", storage.name(path))),
    }
}

impl SenderTransport for StoreSender {
    fn stage(&mut self, models: &[usize], _: Deadline) -> Result<Box<dyn Staging + '_>> {
        self.owner.check()?;
        let workers = self.registry().look_for_all();
        let mut members = Vec::new();
        for &model in models {
            let spare = self.spare[model].take();
            members.push(StagedModel {
                model,
                version: self.version(model).next(),
                image: spare.unwrap_or_else(|| Image::zeros(&self.models[model].layout)),
            });
        }
        Ok(Box::new(StagedSet {
            members,
            workers,
            sender: self,
            waits_for_late: false,
        }))
    }

    fn run(&self) -> Option<Run> {
        Some(self.writer.run())
    }

    fn version(&self, model: usize) -> Version {
        self.writer.version(&self.models[model].id)
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
        let mut pause = Pause::new(self.writer.store().storage());
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
            if !pause.until(deadline)? {
                return Ok(false);
            }
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
        if let Some(kept) = kept.find(|one| one.version() == version) {
            return Ok(Some(kept.clone()));
        }
        let id = &self.models[model].id;
        let asked = ModelVersion {
            model: Some(id.clone()),
            version,
        };
        match self.writer.store().load(&Which::Exactly(asked)) {
            Ok(loaded) => loaded.set.model(id.as_str()).map(|one| Some(one.clone())),
            Err(StoreError::NoSuchVersion { known, .. }) => Err(Error::NoSuchVersion {
                model: id.clone(),
                asked: version,
                known,
            }),
            Err(error) => Err(error.into()),
        }
    }
}

/// Room for the next version of some models, in this process's own memory.
#[derive(Debug)]
struct StagedSet<'a> {
    sender: &'a mut StoreSender,
    /// Those that were there when the send began: one that dies before it is live has a line all the
    /// same.
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
                scheme: super::WORD.into(),
            });
        }
        let (mut versions, mut snapshots) = (Vec::new(), Vec::new());
        for StagedModel {
            model,
            version,
            image,
        } in members
        {
            let spec = &sender.models[model];
            let snapshot = Snapshot::received(spec, sender.writer.run(), version, image)?;
            let digest = snapshot.digest();
            snapshots.push(snapshot.with_digest(digest));
            versions.push((model, version));
        }
        // Before the swap: nobody who gets it has no line.
        let mut joined = sender.registry().look_for_all();
        joined.retain(|one| !workers.iter().any(|known| Arc::ptr_eq(known, one)));
        workers.append(&mut joined);
        let refused = workers.iter().filter_map(|worker| worker.look().1.refused);
        if let Some(newest) = refused.map(|(sequence, _)| sequence).max()
            && newest > sender.refused
        {
            // Its files may be damaged, so no version is folded onto them.
            sender.refused = newest;
            sender.writer.save_whole_next();
        }
        let saved = sender.writer.save(&snapshots)?;
        for ((model, _), snapshot) in versions.iter().zip(snapshots) {
            let kept = &mut sender.kept[*model];
            kept.push_back(snapshot);
            while kept.len() > sender.history + 1 {
                let old = kept.pop_front();
                // If nobody else has it.
                sender.spare[*model] = old.and_then(Snapshot::into_image);
            }
        }
        let concerned = workers.into_iter().filter(|worker| {
            let mut wanted = worker.about.wanted.iter();
            wanted.any(|model| versions.iter().any(|(sent, _)| sent == model))
        });
        let models = versions
            .iter()
            .map(|(model, _)| sender.models[*model].id.clone());
        Ok(Box::new(Published {
            models: models.collect(),
            storage: sender.writer.store().shared_storage(),
            sequence: saved.sequence,
            workers: concerned.collect(),
            versions,
            at: Instant::now(),
            waits_for_late,
        }))
    }
}

#[derive(Debug)]
struct Published {
    storage: Arc<dyn Storage>,
    sequence: u64,
    versions: Vec<(usize, Version)>,
    /// The models of these versions.
    models: Vec<ModelId>,
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
        let mut pause = Pause::new(&*self.storage);
        while lines.iter().any(awaited) && pause.until(deadline)? {
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
    /// Whether the worker waits for a later version than this one.
    fn is_below(&self, status: &Status) -> bool {
        status.asks.as_ref().is_some_and(|(model, version)| {
            let mut sent = self.versions.iter().zip(&self.models);
            sent.any(|((_, sent), id)| id == model && sent < version)
        })
    }

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
                Life::Dead => lost(&*self.storage),
                // It may have staged this version before it began to ask for a later one.
                Life::Here if self.is_below(&status) => Outcome::Asks,
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
        let about = &worker.about;
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
