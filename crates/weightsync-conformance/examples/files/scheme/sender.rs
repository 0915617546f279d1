//! The trainer's end.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use weightsync_engine::transport::polled::{
    AboutWorker, Life, PolledPlace, PolledSender, Publisher, Roster, WorkerEntry, WorkerWords,
};
use weightsync_engine::transport::{Opening, SenderTransport};
use weightsync_engine::{Digest, Result, Run, Snapshot, Version};

use super::storage::{self, PAUSE, Peer, Presence, Stay, failed};
use super::{AboutSender, Live, LiveVersion};

/// Writes each version into a file of its own, and says in the file `live` which are live.
#[derive(Debug)]
struct FilePublisher {
    /// What the file `live` says.
    live: Live,
    stay: Stay,
}

/// Opens the trainer's end.
pub fn open(root: &Path, opening: &Opening<'_>) -> Result<Box<dyn SenderTransport>> {
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
    let live = Live {
        run: opening.run,
        sequence: 0,
        versions: vec![none_yet; models.len()],
    };
    let place = Arc::new(WorkerDirectories(workers));
    let roster = Arc::new(Roster::new(place, opening.run, models.len()));
    let publisher = FilePublisher { live, stay };
    let history = opening.options.history;
    Ok(Box::new(PolledSender::new(
        publisher, models, roster, history,
    )))
}

impl Publisher for FilePublisher {
    fn scheme(&self) -> &str {
        "files"
    }

    fn run(&self) -> Run {
        self.live.run
    }

    fn version(&self, model: usize) -> Version {
        self.live.versions[model].version
    }

    fn publish(
        &mut self,
        versions: &[(usize, Snapshot)],
        before: &mut dyn FnMut() -> u64,
    ) -> Result<u64> {
        let mut live = self.live.clone();
        live.sequence += 1;
        for (model, snapshot) in versions {
            let version = snapshot.version();
            let path = self.stay.dir.join(live.file_name(*model, version));
            storage::put(&path, snapshot.bytes(), true)?;
            let digest = snapshot.published_digest();
            let digest = digest.unwrap_or_else(|| snapshot.digest());
            live.versions[*model] = LiveVersion { version, digest };
        }
        before();
        let path = self.stay.dir.join("live");
        storage::put(&path, &storage::sealed(&live)?, true)?;
        let old = std::mem::replace(&mut self.live, live);
        self.remove_but(&old);
        Ok(self.live.sequence)
    }
}

impl FilePublisher {
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
}

/// The directory with a directory for each worker.
#[derive(Debug)]
struct WorkerDirectories(PathBuf);

impl PolledPlace for WorkerDirectories {
    fn entries(&self) -> Vec<String> {
        let entries = storage::entries(&self.0);
        let names = entries.iter().filter_map(|dir| dir.file_name()?.to_str());
        names.map(str::to_owned).collect()
    }

    fn open(&self, name: &str) -> Option<Box<dyn WorkerEntry>> {
        let dir = self.0.join(name);
        let peer = Peer::at(&dir.join("alive")).ok()??;
        Some(Box::new(WorkerDirectory { dir, peer }))
    }

    fn remove(&self, name: &str) {
        let _ = fs::remove_dir_all(self.0.join(name));
    }

    fn pauses(&self) -> (Duration, Duration) {
        (PAUSE, PAUSE)
    }
}

#[derive(Debug)]
struct WorkerDirectory {
    dir: PathBuf,
    peer: Peer<AboutWorker>,
}

impl WorkerEntry for WorkerDirectory {
    fn about(&self) -> &AboutWorker {
        &self.peer.about
    }

    fn life(&self) -> Life {
        self.peer.life()
    }

    fn words(&self) -> Option<WorkerWords> {
        storage::value(&self.dir.join("status")).ok()?
    }
}
