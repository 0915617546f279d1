//! A worker's end.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use weightsync_engine::transport::polled::{AboutWorker, Interruption, Life, Pause, WorkerWords};
use weightsync_engine::transport::{
    Deadline, Endpoint, Image, Interrupter, Joining, ModelSpec, ReceiverTransport,
};
use weightsync_engine::{Digest, Error, Member, Result, Run, SetSnapshot, Snapshot};

use super::storage::{self, PAUSE, Peer, Presence, Stay, failed};
use super::{AboutSender, FilesError, Live, LiveVersion};

/// The longest reason for a refusal, in bytes.
const MAX_REASON: usize = 4096;

#[derive(Debug)]
pub struct FileReceiver {
    sender: Peer<AboutSender>,
    models: Vec<ModelSpec>,
    /// The place of each in the sender's set.
    wanted: Vec<usize>,
    /// The publication looked at last.
    seen: u64,
    /// What was handed over last.
    held: Option<SetSnapshot>,
    status: WorkerWords,
    /// What was wrong with `live` when that was said last.
    damage: Option<String>,
    /// Ends the next wait.
    interruption: Interruption,
    /// This worker's own directory.
    own: PathBuf,
    stay: Stay,
}

impl FileReceiver {
    pub fn join(at: &Endpoint, joining: &Joining, deadline: Deadline) -> Result<Self> {
        let since = Instant::now();
        let dir = Path::new(at.address());
        let mut pause = Pause::new((PAUSE, PAUSE));
        loop {
            let sender = Peer::<AboutSender>::at(&dir.join("sender"))?;
            if let Some(sender) = sender.filter(|sender| is_right(sender, at, joining)) {
                match announce(dir, sender.about.run, joining) {
                    Ok((own, presence)) => {
                        let all = &sender.about.models;
                        let models = joining.wanted.iter().map(|one| all[*one].clone());
                        return Ok(Self {
                            models: models.collect(),
                            wanted: joining.wanted.clone(),
                            seen: 0,
                            held: None,
                            status: WorkerWords::default(),
                            damage: None,
                            interruption: Interruption::default(),
                            own,
                            stay: Stay {
                                dir: dir.into(),
                                lock: None,
                                presence: Some(presence),
                            },
                            sender,
                        });
                    }
                    Err(_) if sender.life() != Life::Here => {} // and its place went with it
                    Err(error) => return Err(error),
                }
            }
            if !pause.until(deadline)? {
                return Err(Error::NoSender {
                    address: at.address().into(),
                    waited: since.elapsed(),
                    last: None,
                });
            }
        }
    }

    /// What is live, if this worker has not been handed it yet.
    fn newer(&mut self) -> Result<Option<SetSnapshot>> {
        let live = storage::sealed_value::<Live>(&self.stay.dir.join("live"));
        let live = match live {
            // It stays damaged until the next version: once is enough.
            Err(error @ Error::Transport { .. }) => return self.say_once(error),
            live => live?,
        };
        let live = live.filter(|live| {
            // A successor of this sender may have the place by now.
            live.run == self.run()
                && live.sequence > self.seen
                && live.versions.len() == self.sender.about.models.len()
        });
        let Some(live) = live else {
            return Ok(None);
        };
        let mut members = Vec::new();
        for (index, model) in self.wanted.iter().enumerate() {
            let LiveVersion { version, .. } = live.versions[*model];
            let held = self
                .held
                .as_ref()
                .map(|held| &held.members()[index].snapshot);
            let held = held.filter(|held| held.version() == version);
            let snapshot = match held {
                Some(held) => held.clone(),
                None => match self.read(&live, index) {
                    Ok(Some(snapshot)) => snapshot,
                    // Not published yet, or replaced meanwhile: looked for again.
                    Ok(None) => return Ok(None),
                    Err(error) => return self.give_up(live.sequence, error),
                },
            };
            members.push(Member {
                changed: held.is_none(),
                snapshot,
            });
        }
        self.seen = live.sequence;
        if !members.iter().any(|member| member.changed) {
            return Ok(None); // it was about models that this worker does not want
        }
        let set = SetSnapshot::new(live.sequence, members);
        self.held = Some(set.clone());
        self.status.staged = live.sequence;
        self.say()?;
        Ok(Some(set))
    }

    /// One version, verified; `None` if its file is not there.
    fn read(&self, live: &Live, index: usize) -> Result<Option<Snapshot>> {
        let (model, spec) = (self.wanted[index], &self.models[index]);
        let LiveVersion { version, digest } = live.versions[model];
        let path = self.stay.dir.join(live.file_name(model, version));
        let damaged = |expected: String, got: String| FilesError::Damaged {
            file: path.display().to_string(),
            expected,
            got,
        };
        let opened = File::open(&path).and_then(|file| Ok((file.metadata()?.len(), file)));
        let (bytes, mut file) = match opened {
            Ok(opened) => opened,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed("reading", &path)(error)),
        };
        // Before there is room for them.
        if bytes != spec.layout.bytes() {
            let of = |bytes| format!("{bytes} bytes");
            return Err(damaged(of(spec.layout.bytes()), of(bytes)).into());
        }
        let image = Image::read_from(&spec.layout, &mut file).map_err(failed("reading", &path))?;
        let got = Digest::of(&spec.layout, image.bytes()).map_err(io::Error::other);
        let got = got.map_err(failed("reading", &path))?;
        if got != digest {
            let of = |digest| format!("digest {digest}");
            return Err(damaged(of(digest), of(got)).into());
        }
        let snapshot = Snapshot::received(spec, self.run(), version, image)?;
        Ok(Some(snapshot.with_digest(digest)))
    }

    /// The error, unless it was the last one already.
    fn say_once<T>(&mut self, error: Error) -> Result<Option<T>> {
        let text = error.to_string();
        if self.damage.as_ref() == Some(&text) {
            return Ok(None);
        }
        self.damage = Some(text);
        Err(error)
    }

    /// Passes a publication over that cannot be read, and says so.
    fn give_up<T>(&mut self, sequence: u64, error: Error) -> Result<T> {
        self.seen = sequence;
        self.status.refused = Some((sequence, error.to_string()));
        self.say()?;
        Err(error)
    }

    fn say(&self) -> Result<()> {
        let status = storage::encoded(&self.status)?;
        match storage::put(&self.own.join("status"), &status, false) {
            // It needs no telling any more.
            Err(_) if self.sender.life() != Life::Here => Ok(()),
            told => told,
        }
    }
}

/// Makes this worker's directory, and its file in there.
fn announce(dir: &Path, run: Run, joining: &Joining) -> Result<(PathBuf, Presence)> {
    /// Tells apart the receivers of one process.
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let about = AboutWorker {
        worker: joining.worker,
        pid: std::process::id(),
        device: joining.device.clone(),
        run,
        wanted: joining.wanted.clone(),
    };
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let own = format!("workers/{}.{}.{count}", about.worker.0, about.pid);
    let own = dir.join(own);
    storage::make_dir(&own)?;
    let presence = Presence::announce(&own.join("alive"), &about)?;
    Ok((own, presence))
}

/// Whether the sender lives, is the one of the init info, and has not been
/// replaced by one that this worker has seen already.
fn is_right(sender: &Peer<AboutSender>, at: &Endpoint, joining: &Joining) -> bool {
    let about = &sender.about;
    let ids = about.models.iter().map(|model| &model.id);
    about.secret == *at.secret()
        && about.run.epoch >= joining.seen
        && ids.eq(&joining.models)
        && joining.wanted.iter().all(|one| *one < about.models.len())
        && sender.life() == Life::Here
}

impl ReceiverTransport for FileReceiver {
    fn models(&self) -> &[ModelSpec] {
        &self.models
    }

    fn run(&self) -> Run {
        self.sender.about.run
    }

    fn next(&mut self, deadline: Deadline) -> Result<Option<SetSnapshot>> {
        let mut pause = Pause::new((PAUSE, PAUSE));
        loop {
            // Asked before the versions: what was sent last is not missed then.
            let life = self.sender.life();
            if let Some(set) = self.newer()? {
                return Ok(Some(set));
            }
            match life {
                Life::Here if !pause.until_interrupted(deadline, &self.interruption)? => {
                    return Ok(None);
                }
                Life::Here => {}
                Life::Left => return Err(Error::SenderClosed),
                Life::Dead => {
                    let pid = Some(self.sender.about.pid);
                    return Err(Error::SenderDied { pid });
                }
            }
        }
    }

    fn latest(&mut self) -> Result<Option<SetSnapshot>> {
        Ok(self.newer()?.or_else(|| self.held.clone()))
    }

    fn interrupter(&self) -> Result<Interrupter> {
        Ok(self.interruption.interrupter())
    }

    fn applied(&mut self, set: &SetSnapshot) -> Result<()> {
        let versions = set.members().iter();
        self.status.versions = versions.map(|one| one.snapshot.version()).collect();
        self.status.applied = set.sequence();
        self.say()
    }

    fn refuse(&mut self, set: Option<&SetSnapshot>, reason: &str) -> Result<()> {
        let reason = reason[..reason.floor_char_boundary(MAX_REASON)].to_owned();
        match set {
            Some(set) => self.status.refused = Some((set.sequence(), reason)),
            None => self.status.rejected = Some(reason),
        }
        self.say()
    }
}
