//! The trainer's end.

use std::io::ErrorKind;
use std::num::NonZero;
use std::sync::Arc;
use std::time::Duration;

use weightsync_core::{ModelId, Run, Version};
use weightsync_engine::transport::polled::{
    AboutWorker, Life, PolledPlace, PolledSender, Publisher, Roster, WorkerEntry, WorkerWords,
};
use weightsync_engine::transport::{Opening, SenderTransport};
use weightsync_engine::{Error, Origin, Outcome, Result, Snapshot};

use super::{
    ALIVE, AboutSender, MAX_WORKER_FILE, SENDER, SENDER_LOCK, STATUS, StoreScheme, WORKERS,
    encoded, in_use, is_here, is_worker_dir, store_at, vacate,
};
use crate::error::StoreError;
use crate::retention::Keep;
use crate::storage::{Peer, Presence, Storage};
use crate::store::{ModelVersion, Which};
use crate::writer::{SaveOptions, Writer, host};

/// What a store keeps by default.
const KEPT: Keep = Keep::Newest {
    count: NonZero::new(8).expect("8 is not 0"),
    every: None,
};

/// Saves each publication as a version of the store.
#[derive(Debug)]
struct StorePublisher {
    models: Vec<ModelId>,
    writer: Writer,
    roster: Arc<Roster>,
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

/// Opens the trainer's end.
pub(super) fn open(
    scheme: &StoreScheme,
    opening: &Opening<'_>,
) -> Result<Box<dyn SenderTransport>> {
    let store = store_at(opening.at)?;
    let storage = store.shared_storage();
    if scheme.settings.temporary {
        refuse_lasting(&*storage)?;
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
    let options = save_options(scheme, opening);
    // From here on the sender before is fenced off.
    let writer = Writer::claim_as(&store, options, run)?;
    // The store counts the runs: workers join the one that the writer has got.
    about.run = writer.run();
    // Workers join from here on.
    let presence = announce(&*storage, SENDER, &about)?;
    let place = Arc::new(WorkerDirectories(storage));
    let roster = Arc::new(Roster::new(place, writer.run(), about.models.len()));
    let publisher = StorePublisher {
        models: about.models.iter().map(|model| model.id.clone()).collect(),
        roster: roster.clone(),
        refused: 0,
        owner: Origin::here(),
        temporary: scheme.settings.temporary,
        writer,
        presence: Some(presence),
        lock: Some(lock),
    };
    let history = opening.options.history;
    Ok(Box::new(PolledSender::new(
        publisher,
        about.models,
        roster,
        history,
    )))
}

/// Refuses a place that has something else than a temporary store.
///
/// # Errors
///
/// [`StoreError::NotTemporary`], and those of reading.
fn refuse_lasting(storage: &dyn Storage) -> Result<(), StoreError> {
    let why = storage.why_not_temporary();
    if let Some(why) = why.map_err(StoreError::file("reading", storage.name("")))? {
        let path = storage.name("");
        return Err(StoreError::NotTemporary { path, why });
    }
    Ok(())
}

/// How a sender saves its versions.
fn save_options(scheme: &StoreScheme, opening: &Opening<'_>) -> SaveOptions {
    SaveOptions {
        keep: scheme
            .settings
            .keep
            .unwrap_or(KEPT)
            .at_least(opening.options.history),
        ..SaveOptions::default()
    }
}

impl Drop for StorePublisher {
    fn drop(&mut self) {
        if !self.owner.is_here() {
            return; // the parent's end goes on
        }
        // Workers see that it left, and the last to leave tidies up.
        self.presence = None;
        self.roster.tidy();
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

impl Publisher for StorePublisher {
    fn scheme(&self) -> &str {
        super::WORD
    }

    fn check(&self) -> Result<()> {
        Ok(self.owner.check()?)
    }

    fn run(&self) -> Run {
        self.writer.run()
    }

    fn version(&self, model: usize) -> Version {
        self.writer.version(&self.models[model])
    }

    fn publish(
        &mut self,
        versions: &[(usize, Snapshot)],
        before: &mut dyn FnMut() -> u64,
    ) -> Result<u64> {
        // The refusals decide how the version is saved, so they are asked for first.
        let refused = before();
        if refused > self.refused {
            // Its files may be damaged, so no version is folded onto them.
            self.refused = refused;
            self.writer.save_whole_next();
        }
        // All models of the publication become one version of the store.
        let snapshots = versions.iter().map(|(_, snapshot)| snapshot.clone());
        let snapshots: Vec<_> = snapshots.collect();
        Ok(self.writer.save(&snapshots)?.sequence)
    }

    fn older(&self, model: usize, version: Version) -> Result<Option<Snapshot>> {
        let id = &self.models[model];
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

/// The directories of the workers of a store.
#[derive(Debug)]
pub(super) struct WorkerDirectories(pub(super) Arc<dyn Storage>);

impl PolledPlace for WorkerDirectories {
    fn entries(&self) -> Vec<String> {
        let mut names = self.0.list(WORKERS).unwrap_or_default();
        names.retain(|name| is_worker_dir(name));
        names
    }

    fn open(&self, name: &str) -> Option<Box<dyn WorkerEntry>> {
        let dir = format!("{WORKERS}/{name}");
        // A worker that left removes its files.
        let peer = self.0.peer(&format!("{dir}/{ALIVE}")).ok().flatten()?;
        let about = small(peer.about())?;
        Some(Box::new(WorkerDirectory {
            storage: self.0.clone(),
            status: format!("{dir}/{STATUS}"),
            about,
            peer,
        }))
    }

    fn remove(&self, name: &str) {
        let _ = self.0.remove(&format!("{WORKERS}/{name}"));
    }

    fn lost(&self) -> Outcome {
        match self.0.notices_death() {
            true => Outcome::Died,
            false => Outcome::Lost,
        }
    }

    fn pauses(&self) -> (Duration, Duration) {
        self.0.pauses()
    }
}

#[derive(Debug)]
struct WorkerDirectory {
    storage: Arc<dyn Storage>,
    /// The path of its status.
    status: String,
    about: AboutWorker,
    peer: Box<dyn Peer>,
}

impl WorkerEntry for WorkerDirectory {
    fn about(&self) -> &AboutWorker {
        &self.about
    }

    fn life(&self) -> Life {
        self.peer.life()
    }

    fn words(&self) -> Option<WorkerWords> {
        small(&self.storage.read(&self.status).ok()??)
    }
}

/// What a worker's file says, unless it is longer than one is.
fn small<T: for<'a> serde::Deserialize<'a>>(bytes: &[u8]) -> Option<T> {
    let bytes = bytes.trim_ascii_end();
    let bytes = (bytes.len() <= MAX_WORKER_FILE).then_some(bytes)?;
    serde_json::from_slice(bytes).ok()
}
