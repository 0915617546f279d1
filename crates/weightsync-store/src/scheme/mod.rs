//! The scheme `store:PATH`: weights go through a store, with no process between trainer and workers.
//!
//! ```text
//! ends/sender                     the living sender: its run and models
//! ends/workers/<number>.<id>/
//!   alive                         a living worker
//!   status                        what it has staged, applied and refused
//! ```
//!
//! A send saves a version. Workers look at the head until it names a version that they do not have,
//! and load that as [`Store::load`] does. What they say about it is in their status.

mod receiver;
mod sender;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use weightsync_core::{ModelId, ModelStatus, Run, WorkerId};
use weightsync_engine::settings::{self, Setting, Wrong};
#[cfg(feature = "fuzz")]
use weightsync_engine::transport::polled::{AboutWorker, WorkerWords};
use weightsync_engine::transport::polled::{Life, Pause, Roster};
use weightsync_engine::transport::{
    Capabilities, Deadline, Endpoint, Joining, ModelSpec, Opening, ReceiverTransport, Registration,
    Scheme, SenderTransport, register,
};
use weightsync_engine::{AnyScheme, Error, InitInfo, SenderStatus};

use crate::address::Address;
use crate::error::{Result, StoreError};
use crate::lease;
use crate::retention::Keep;
use crate::storage::{Storage, TEMPORARY, is_temporary};
use crate::store::Store;

/// Weights go through a store: the scheme `store:PATH`.
///
/// A sender saves each version and continues the numbers of the store. Workers load what is published,
/// and nothing else runs between the two. Versions outlive their sender: the store keeps the newest 8,
/// or what `keep` says (`store:/srv/policy,keep=all`). A sender that starts later takes over, and workers
/// find it without a run directory. `store:PATH,temporary` is a store of one sender below the path: it is
/// removed when the sender and all its workers have left.
///
/// ```
/// use weightsync_engine::AnyScheme;
/// use weightsync_store::StoreScheme;
///
/// let scheme: AnyScheme = "store:/srv/policy,keep=4".parse()?;
/// assert_eq!(scheme, AnyScheme::new(StoreScheme::new("/srv/policy")?.keep("4".parse()?)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct StoreScheme {
    address: Address,
    settings: StoreSettings,
}

/// What a scheme's text says after the path.
#[derive(Clone, Copy, Debug, Default)]
struct StoreSettings {
    /// The newest 8, if it is not set.
    keep: Option<Keep>,
    temporary: bool,
}

const SETTINGS: &[Setting<StoreSettings>] = &[
    Setting {
        key: "keep",
        takes: "N, all or N+every:M",
        about: "which versions stay; the newest 8 without it",
        set: |settings, value| {
            let keep: Result<Keep> = value.parse();
            settings.keep = Some(keep.map_err(|_| Wrong::Value)?);
            Ok(())
        },
        get: |settings| settings.keep.map(|keep| keep.to_string()),
    },
    Setting {
        key: "temporary",
        takes: "",
        about: "a store of this sender alone below the path, which is removed when the sender and its \
                workers have left",
        set: |settings, value| {
            settings.temporary = settings::flag(value)?;
            Ok(())
        },
        get: |settings| settings::set_flag(settings.temporary),
    },
];

const WORD: &str = "store";

register! {
    Registration::new(WORD, |given| Ok(AnyScheme::new(StoreScheme::parse(given)?)))
        .settings(|| settings::declared(SETTINGS))
}

impl StoreScheme {
    /// The address of the store that the versions of a sender lie in, if they go by this scheme.
    pub fn address_of(info: &InitInfo) -> Option<&str> {
        let is_stored = info.scheme().split(':').next() == Some(WORD);
        is_stored.then(|| info.endpoint().address())
    }

    /// A scheme over the store at an address.
    ///
    /// # Errors
    ///
    /// [`StoreError::Address`]; [`Error::BadSetting`] for a path with a comma or an equals sign, which
    /// the text of a scheme cannot hold.
    pub fn new(address: &str) -> Result<Self> {
        let address: Address = address.parse()?;
        let text = address.to_string();
        // The path is a part of the scheme's text, which has these as signs.
        if text.contains([',', '=']) || text.trim() != text {
            return Err(Error::BadSetting {
                setting: WORD.into(),
                expected: "a path without commas, equals signs, and spaces around it".into(),
                got: text,
            }
            .into());
        }
        Ok(Self {
            address,
            settings: StoreSettings::default(),
        })
    }

    /// Sets which versions the store keeps.
    #[must_use]
    pub fn keep(mut self, keep: Keep) -> Self {
        self.settings.keep = Some(keep);
        self
    }

    /// Makes a store of one sender below the path, which is removed with it.
    #[must_use]
    pub fn temporary(mut self) -> Self {
        self.settings.temporary = true;
        self
    }

    fn parse(given: &BTreeMap<String, String>) -> Result<Self, Error> {
        let mut given = given.clone();
        let is_setting = |key: &str| SETTINGS.iter().any(|setting| setting.key == key);
        // The path has no key, so it is a key without a value.
        let path = given
            .iter()
            .find(|(key, value)| value.is_empty() && !is_setting(key));
        let path = path.map(|(path, _)| path.clone());
        let path = path.ok_or_else(|| Error::BadSetting {
            setting: WORD.into(),
            expected: "the path of a store: store:PATH".into(),
            got: String::new(),
        })?;
        given.remove(&path);
        let settings = settings::read(WORD, SETTINGS, &given)?;
        Ok(Self {
            settings,
            ..Self::new(&path)?
        })
    }

    /// Removes temporary stores of this user below the path whose sender and workers were killed. Returns
    /// those that could not be removed.
    ///
    /// # Errors
    ///
    /// [`StoreError::File`].
    pub fn sweep(&self) -> Result<Vec<String>> {
        let root = self.address.storage();
        let names = root.list("");
        let names = names.map_err(StoreError::file("listing", root.name("")))?;
        let mut left = Vec::new();
        for name in names.iter().filter(|name| is_temporary(name)) {
            let storage = self.address.below(name).storage();
            // Those of others, and what only has the name, are no failures.
            if vacate(&*storage).is_err() {
                left.push(storage.name(""));
            }
        }
        Ok(left)
    }
}

impl Scheme for StoreScheme {
    fn name(&self) -> &str {
        WORD
    }

    fn settings(&self) -> Vec<(String, String)> {
        let mut settings = vec![(self.address.to_string(), String::new())];
        settings.extend(settings::given(&self.settings, SETTINGS));
        settings
    }

    fn capabilities(&self) -> Capabilities {
        let mut can = Capabilities::NONE;
        can.weights = true;
        can.push = true;
        can.sets = true;
        can.pull = true;
        can.loan = true;
        can.restarts = true;
        can.death = self.address.storage().notices_death();
        // A version in the store needs no process.
        can.outlives = true;
        can
    }

    fn allocate_endpoint(
        &self,
        models: &[ModelId],
        run_dir: Option<&Path>,
    ) -> Result<Endpoint, Error> {
        if self.settings.temporary {
            let fresh = Endpoint::fresh(models, run_dir)?;
            // A name of 32 digits, made of an address that no other sender has.
            let hash = blake3::hash(fresh.address().as_bytes()).to_hex();
            let address = self.address.below(&format!("{TEMPORARY}{}", &hash[..32]));
            return Endpoint::new(address.to_string(), *fresh.secret(), fresh.restarts());
        }
        // Every sender of a store is found at the same place by the same init info. Access to the
        // store is what lets a worker in.
        let address = self.address.to_string();
        let hash = blake3::hash(address.as_bytes());
        let mut secret = [0; 16];
        secret.copy_from_slice(&hash.as_bytes()[..16]);
        Endpoint::new(address, secret, true)
    }

    fn open(&self, opening: &Opening<'_>) -> Result<Box<dyn SenderTransport>, Error> {
        if self.settings.temporary {
            // Stores of senders that died without removing them.
            self.sweep()?;
        }
        sender::open(self, opening)
    }

    /// As the files of the store tell it. The outcome of each send is known to the sender alone.
    fn ask_status(&self, at: &Endpoint, _: Duration) -> Result<SenderStatus, Error> {
        Ok(status_of_store(&store_at(at)?)?)
    }

    fn join(
        &self,
        at: &Endpoint,
        joining: &Joining,
        deadline: Deadline,
    ) -> Result<Box<dyn ReceiverTransport>, Error> {
        let receiver = receiver::StoreReceiver::join(at, joining, deadline)?;
        Ok(Box::new(receiver))
    }
}

/// What the files of a store tell of its sender, its versions and its workers. Nothing is changed.
///
/// # Errors
///
/// Those of [`Store::versions`].
pub fn status_of_store(store: &Store) -> Result<SenderStatus> {
    let mut status = SenderStatus::default();
    status.scheme = format!("{WORD}:{}", store.address());
    status.address = store.address();
    // From the store itself: it has versions also without a sender.
    for stored in store.newest_versions(1)?.versions {
        status.run = stored.run.to_string();
        let models = stored.models.into_iter().map(|model| ModelStatus {
            name: model.model,
            version: model.version,
            bytes: 0,
            changed: model.changes,
            delta_bytes: (model.deltas > 0).then_some(model.stored_bytes),
        });
        status.models = models.collect();
    }
    let storage = store.shared_storage();
    let peer = storage.peer(SENDER);
    let peer = peer.map_err(StoreError::file("reading", storage.name(SENDER)))?;
    // No sender was ever there, so there are no workers either.
    let Some(peer) = peer else {
        return Ok(status);
    };
    let about: Option<AboutSender> = serde_json::from_slice(peer.about()).ok();
    if let Some(about) = about {
        if peer.life() == Life::Here {
            status.pid = about.pid;
        }
        for model in &mut status.models {
            let mut specs = about.models.iter();
            let spec = specs.find(|spec| spec.id == model.name);
            model.bytes = spec.map_or(0, |spec| spec.layout.bytes());
        }
        // Looked at only: a program that asks for the status removes nobody's files.
        let models = about.models.len();
        let place = Arc::new(sender::WorkerDirectories(storage));
        status.workers = Roster::of_another(place, about.run, models).status();
    }
    Ok(status)
}

/// The store of an endpoint.
fn store_at(at: &Endpoint) -> Result<Store> {
    Store::open(at.address())
}

/// The living sender, as workers find it.
pub(crate) const SENDER: &str = "ends/sender";
/// The directory of the sender and the workers.
pub(crate) const ENDS: &str = "ends";
/// The living sender, as other senders find it, also while it starts.
pub(crate) const SENDER_LOCK: &str = "ends/sender.lock";
/// The directory of the workers.
pub(crate) const WORKERS: &str = "ends/workers";
/// The file by which a worker's directory shows that it lives.
pub(crate) const ALIVE: &str = "alive";
/// The file of a worker's directory that says what it has.
pub(crate) const STATUS: &str = "status";

/// The longest file of a worker, in bytes: it names its models and versions.
const MAX_WORKER_FILE: usize = 1 << 20;

/// What a sender announces.
#[derive(Debug, Serialize, Deserialize)]
struct AboutSender {
    pid: u32,
    host: String,
    run: Run,
    secret: [u8; 16],
    models: Vec<ModelSpec>,
}

/// How many of what processes announce and say these bytes are.
#[cfg(feature = "fuzz")]
pub(crate) fn reads(bytes: &[u8]) -> usize {
    let reads = [
        serde_json::from_slice::<AboutSender>(bytes).is_ok(),
        serde_json::from_slice::<AboutWorker>(bytes).is_ok(),
        serde_json::from_slice::<WorkerWords>(bytes).is_ok(),
    ];
    reads.iter().filter(|reads| **reads).count()
}

fn encoded(value: &impl Serialize) -> Vec<u8> {
    let bytes = serde_json::to_vec(value);
    bytes.unwrap_or_else(|error| unreachable!("plain values become JSON: {error}"))
}

/// Whether a process is alive there. A store that cannot be read says nothing about it, so it may be.
fn is_here(storage: &dyn Storage, path: &str) -> bool {
    match storage.peer(path) {
        Ok(peer) => peer.is_some_and(|peer| peer.life() == Life::Here),
        // What cannot be read may be alive.
        Err(_) => true,
    }
}

impl Store {
    /// An error if a sender uses the store: another writer would end it.
    pub(crate) fn refuse_living_sender(&self) -> Result<()> {
        let storage = self.storage();
        let read = || {
            let read = storage.read(SENDER_LOCK);
            read.map_err(StoreError::file("reading", storage.name(SENDER_LOCK)))
        };
        let seen = read()?;
        let mut pause = Pause::new(storage.pauses());
        while is_here(storage, SENDER_LOCK) {
            // Where death shows by silence alone, one that was killed seems to be there for a while. One
            // that lives writes its file again.
            if storage.notices_death() || read()? != seen {
                return Err(in_use(storage, SENDER_LOCK));
            }
            pause.until(None)?;
        }
        Ok(())
    }
}

/// The error that says which sender is alive there.
fn in_use(storage: &dyn Storage, path: &str) -> StoreError {
    let peer = match storage.peer(path) {
        Ok(peer) => peer,
        Err(error) => return StoreError::file("reading", storage.name(path))(error),
    };
    let sender = peer.and_then(|peer| serde_json::from_slice(peer.about()).ok());
    let sender: Option<AboutSender> = sender;
    let (pid, host) = sender.map_or((0, "an unknown host".into()), |sender| {
        (sender.pid, sender.host)
    });
    let store = storage.name("");
    StoreError::InUse { store, pid, host }
}

/// Removes a store, unless its sender or a worker is there.
fn vacate(storage: &dyn Storage) -> std::io::Result<bool> {
    storage.vacate(&|| {
        let Ok(workers) = storage.list(WORKERS) else {
            // What cannot be listed may have workers.
            return false;
        };
        // Everybody counts: a store with a living worker stays.
        let lived_in = |worker: &String| is_here(storage, &format!("{WORKERS}/{worker}/{ALIVE}"));
        ![SENDER, SENDER_LOCK]
            .iter()
            .any(|path| is_here(storage, path))
            && !workers.iter().any(lived_in)
    })
}

/// The name of a worker's directory.
fn worker_dir(worker: WorkerId) -> Result<String> {
    let random: [u8; 8] = weightsync_engine::transport::random()?;
    Ok(format!(
        "{WORKERS}/{}.{:016x}",
        worker.0,
        u64::from_le_bytes(random)
    ))
}

/// Whether a worker's directory can have this name.
pub(crate) fn is_worker_dir(name: &str) -> bool {
    name.split_once('.')
        .is_some_and(|(number, random)| number.parse::<u32>().is_ok() && lease::is_random(random))
}
