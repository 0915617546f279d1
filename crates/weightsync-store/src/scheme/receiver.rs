//! A worker's end.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use weightsync_core::{Run, Version};
use weightsync_engine::transport::polled::{AboutWorker, Interruption, Life, Pause, WorkerWords};
use weightsync_engine::transport::{
    Deadline, Endpoint, Image, Interrupter, Joining, ModelSpec, ReceiverTransport, VersionRequest,
    waits_for_a_restart,
};
use weightsync_engine::{Error, Member, Origin, Result, SetSnapshot, Snapshot};

use super::{ALIVE, AboutSender, SENDER, encoded, is_here, store_at, vacate, worker_dir};
use crate::anchor::StoredBase;
use crate::catalog::{self, Catalog};
use crate::error::{Damage, StoreError};
use crate::format::{HEAD, Head, StoreManifest, Stored, VersionKey, unseal};
use crate::lease::Lease;
use crate::storage::{Peer, Presence};
use crate::store::{ModelVersion, Store};

/// The longest reason for a refusal, in bytes.
const MAX_REASON: usize = 4096;

/// The models of a version, and how they are stored.
type Found = (Vec<Member>, Vec<StoredBase>);

#[derive(Debug)]
pub(super) struct StoreReceiver {
    store: Store,
    sender: AboutSender,
    peer: Box<dyn Peer>,
    models: Vec<ModelSpec>,
    /// The head looked at last: the same bytes publish nothing new.
    head: Vec<u8>,
    /// The publication looked at last.
    seen: u64,
    /// The newest that was read.
    held: Option<SetSnapshot>,
    /// Its models, and how they are stored: only what changed since is read of the next.
    bases: Vec<StoredBase>,
    /// How many bytes of weights were read.
    travelled: AtomicU64,
    /// The one before, in whose memory the next is read if the worker has dropped it.
    before: Option<SetSnapshot>,
    /// The newest, if a question came across it and it is still to be handed over.
    unasked: Option<SetSnapshot>,
    status: WorkerWords,
    /// What was wrong with the head when that was said last.
    damage: Option<Damage>,
    /// Ends the next wait.
    interruption: Interruption,
    /// This worker's own directory.
    own: String,
    presence: Option<Box<dyn Presence>>,
    /// The process that joined.
    owner: Origin,
}

impl StoreReceiver {
    pub(super) fn join(at: &Endpoint, joining: &Joining, deadline: Deadline) -> Result<Self> {
        let since = Instant::now();
        let store = store_at(at)?;
        let mut pause = Pause::new(store.storage().pauses());
        // What ended before, for as long as no sender is there.
        let (mut last, mut has_told) = (left_behind(&store), false);
        loop {
            let peer = store.storage().peer(SENDER);
            let peer = peer.map_err(StoreError::file("reading", store.storage().name(SENDER)))?;
            if let Some(peer) = &peer {
                last = match ended(&**peer, at) {
                    Some((error, _)) if !at.restarts() => return Err(error),
                    ended => ended.map(|(_, words)| words),
                };
            }
            if let Some(ended) = &last
                && !has_told
                && !joining.single_attempt
                && deadline.is_none_or(|at| Instant::now() < at)
            {
                waits_for_a_restart(at.address(), ended);
                has_told = true;
            }
            // A sender of another init info, or of an earlier epoch, is passed over: the right one
            // may come.
            if let Some((sender, peer)) = peer.and_then(|peer| right(peer, at, joining))
                && let Some(joined) = Self::announce(&store, sender, peer, joining)?
            {
                return Ok(joined);
            }
            if !pause.until(deadline)? {
                return Err(Error::NoSender {
                    address: at.address().into(),
                    waited: since.elapsed(),
                    last,
                });
            }
        }
    }

    /// Announces this worker to a sender; `None` if the sender has gone meanwhile.
    fn announce(
        store: &Store,
        sender: AboutSender,
        peer: Box<dyn Peer>,
        joining: &Joining,
    ) -> Result<Option<Self>> {
        let about = AboutWorker {
            worker: joining.worker,
            pid: std::process::id(),
            device: joining.device.clone(),
            run: sender.run,
            wanted: joining.wanted.clone(),
        };
        // A new directory each time: a worker that comes back is not taken for the one before.
        let own = worker_dir(about.worker)?;
        let path = format!("{own}/{ALIVE}");
        let announced = store.storage().announce(&path, &encoded(&about));
        let presence =
            announced.map_err(StoreError::file("writing", store.storage().name(&path)))?;
        let models = joining.wanted.iter().map(|one| sender.models[*one].clone());
        let joined = Self {
            store: store.clone(),
            models: models.collect(),
            head: Vec::new(),
            seen: 0,
            held: None,
            bases: Vec::new(),
            travelled: AtomicU64::new(0),
            before: None,
            unasked: None,
            status: WorkerWords::default(),
            damage: None,
            interruption: Interruption::default(),
            own,
            presence: Some(presence),
            owner: Origin::here(),
            sender,
            peer,
        };
        // Dropped, it takes back what it has announced.
        // After the announcement: the sender has seen this worker, or is seen to be gone here.
        Ok((joined.peer.life() == Life::Here).then_some(joined))
    }

    /// What is published, if this worker has not been handed it yet.
    fn newer(&mut self) -> Result<Option<SetSnapshot>> {
        self.owner.check()?;
        let storage = self.store.storage();
        let bytes = storage.read(HEAD);
        let bytes = bytes.map_err(StoreError::file("reading", storage.name(HEAD)))?;
        // Nothing is published without a new head.
        let Some(bytes) = bytes.filter(|bytes| *bytes != self.head) else {
            return Ok(None);
        };
        let head = match unseal::<Head>(&storage.name(HEAD), &bytes) {
            // It stays damaged until the next version: once is enough.
            Err(StoreError::Damaged(damage)) => return self.say_once(damage),
            head => head?,
        };
        // Only after it was read: a head that could not be read is read again.
        self.head = bytes;
        let newest = head.newest().filter(|newest| {
            // A successor of this sender may have the store by now.
            head.run == self.run()
                && newest.epoch == self.run().epoch
                && newest.sequence > self.seen
        });
        let Some(newest) = newest else {
            return Ok(None);
        };
        match self.read(newest) {
            Ok(Some((members, bases))) => {
                self.bases = bases;
                self.hand_over(newest, members)
            }
            // Removed meanwhile, so that there is a newer one: the head is read again.
            Ok(None) => {
                self.head.clear();
                Ok(None)
            }
            Err(error @ StoreError::Damaged(_)) => self.give_up(newest, error.into()),
            // It may be read the next time.
            Err(error) => {
                self.head.clear();
                Err(error.into())
            }
        }
    }

    fn hand_over(
        &mut self,
        place: VersionKey,
        members: Vec<Member>,
    ) -> Result<Option<SetSnapshot>> {
        // Also if this worker wants none of it: the next look begins behind it.
        self.seen = place.sequence;
        if !members.iter().any(|member| member.changed) {
            return Ok(None); // it was about models that this worker does not want
        }
        let set = SetSnapshot::new(place.sequence, members);
        self.before = self.held.replace(set.clone());
        self.status.staged = place.sequence;
        // It is handed over, also if it cannot be said now.
        self.unasked = Some(set);
        self.say()?;
        Ok(self.unasked.take())
    }

    /// A version of every wanted model, checked; `None` if it is not there any more, or a model has
    /// none yet.
    fn read(&mut self, place: VersionKey) -> Result<Option<Found>, StoreError> {
        // Before the manifest is read: what is there then stays until the lease ends.
        let _lease = Lease::take(&self.store.shared_storage(), place)?;
        let manifest = catalog::manifest(self.store.storage(), place)?;
        let Some(manifest) = manifest else {
            return Ok(None);
        };
        let before = self.before.take();
        let spares = before.iter().flat_map(SetSnapshot::members);
        let spares: Vec<_> = spares.map(|member| member.snapshot.clone()).collect();
        // It would keep its memory from being written again.
        drop(before);
        self.read_models(&manifest, spares)
    }

    /// Reads every wanted model, in the memory of `spares` that nobody else holds.
    fn read_models(
        &self,
        manifest: &StoreManifest,
        spares: Vec<Snapshot>,
    ) -> Result<Option<Found>, StoreError> {
        let (mut members, mut bases) = (Vec::new(), Vec::new());
        let mut spares = spares.into_iter();
        for (index, spec) in self.models.iter().enumerate() {
            let spare = spares.next();
            let Some(stored) = manifest.model(&spec.id) else {
                return Ok(None);
            };
            let held = self
                .held
                .as_ref()
                .map(|held| &held.members()[index].snapshot);
            // A model whose version did not change is not read again.
            let held = held.filter(|held| held.version() == stored.version);
            let snapshot = match held {
                Some(held) => held.clone(),
                None => {
                    let spare = spare.and_then(Snapshot::into_image);
                    let base = self.bases.get(index);
                    self.load(manifest, stored, spare, base)?
                }
            };
            if snapshot.layout() != &spec.layout {
                // A version of an earlier sender of another model.
                return Ok(None);
            }
            bases.push(StoredBase {
                snapshot: snapshot.clone(),
                stored: stored.clone(),
            });
            members.push(Member {
                changed: held.is_none(),
                snapshot,
            });
        }
        Ok(Some((members, bases)))
    }

    /// Reads one model: what changed since `base`, if the version is above it, and else all of it.
    fn load(
        &self,
        manifest: &StoreManifest,
        stored: &Stored,
        spare: Option<Image>,
        base: Option<&StoredBase>,
    ) -> Result<Snapshot, StoreError> {
        let load = |spare, base| {
            let bytes = stored.read_bytes(base);
            self.travelled.fetch_add(bytes, Ordering::Relaxed);
            self.store.load_model(manifest, stored, spare, base)
        };
        // Only the changes since then are read.
        let base = base.filter(|base| base.is_below(stored));
        match load(spare, base) {
            // The program may have written into the base, which is its own memory, too.
            Err(StoreError::Damaged(damage)) if base.is_some() => {
                tracing::info!("{damage}; the version is read whole");
                load(None, None)
            }
            loaded => loaded,
        }
    }

    /// Looks for the version that was asked for, and waits for it if it may still come.
    fn answer(
        &mut self,
        model: usize,
        which: VersionRequest,
        deadline: Deadline,
    ) -> Result<Option<SetSnapshot>> {
        let is_it = |set: &SetSnapshot| {
            let got = set.members()[model].snapshot.version();
            match which {
                VersionRequest::AtLeast(version) => got >= version,
                VersionRequest::Exactly(version) => got == version,
                _ => true,
            }
        };
        let mut pause = Pause::new(self.store.storage().pauses());
        loop {
            // Asked before the versions: what the sender sent last is not missed.
            let life = self.peer.life();
            if let Some(set) = self.newer()? {
                if is_it(&set) {
                    self.unasked = None;
                    return Ok(Some(set));
                }
                self.unasked = Some(set);
            }
            // After the versions: everything that was sent comes before the sender's end.
            self.check(life)?;
            if let Some(held) = self.held.clone().filter(is_it) {
                self.unasked = None;
                return Ok(Some(held));
            }
            match which {
                VersionRequest::Exactly(version) => return self.older(model, version).map(Some),
                VersionRequest::AtLeast(version) if self.status.asks.is_none() => {
                    // Sends need not wait for this worker until then.
                    self.status.asks = Some((self.models[model].id.clone(), version));
                    self.say()?;
                }
                _ => {}
            }
            if !pause.until_interrupted(deadline, &self.interruption)? {
                return Ok(None);
            }
        }
    }

    /// A version that the store still has.
    fn older(&self, model: usize, version: Version) -> Result<SetSnapshot> {
        let id = &self.models[model].id;
        let asked = ModelVersion {
            model: Some(id.clone()),
            version,
        };
        let none = |known| Error::NoSuchVersion {
            model: id.clone(),
            asked: version,
            known,
        };
        loop {
            let catalog = Catalog::read(self.store.storage())?;
            let place = match self.store.find(&catalog, &asked) {
                Err(StoreError::NoSuchVersion { known, .. }) => return Err(none(known)),
                found => found?,
            };
            let _lease = Lease::take(&self.store.shared_storage(), place)?;
            match catalog::manifest(self.store.storage(), place)? {
                // It was removed meanwhile, and the next catalog says so.
                None => {}
                Some(manifest) => match self.read_models(&manifest, Vec::new())? {
                    Some((members, _)) => return Ok(SetSnapshot::new(0, members)),
                    None => return Err(none(Vec::new())),
                },
            }
        }
    }

    /// Whether the sender is there.
    fn check(&self, life: Life) -> Result<()> {
        match life {
            Life::Here => Ok(()),
            Life::Left => Err(Error::SenderClosed),
            Life::Dead => Err(Error::SenderDied {
                pid: Some(self.sender.pid),
            }),
        }
    }

    /// The error, unless it was the last one already.
    fn say_once<T>(&mut self, damage: Damage) -> Result<Option<T>> {
        if self.damage.as_ref() == Some(&damage) {
            return Ok(None);
        }
        self.damage = Some(damage.clone());
        Err(StoreError::from(damage).into())
    }

    /// Passes a publication over that cannot be read, and says so.
    fn give_up<T>(&mut self, place: VersionKey, error: Error) -> Result<T> {
        // It is not tried again: the sender saves the next version whole.
        self.seen = place.sequence;
        let reason = error.to_string();
        self.status.refused = Some((place.sequence, cut(&reason)));
        self.say()?;
        Err(error)
    }

    fn say(&self) -> Result<()> {
        let path = format!("{}/status", self.own);
        let storage = self.store.storage();
        match storage.put(&path, &encoded(&self.status)) {
            // It needs no telling any more.
            Err(_) if self.peer.life() != Life::Here => Ok(()),
            Err(error) => Err(StoreError::file("writing", storage.name(&path))(error).into()),
            Ok(()) => Ok(()),
        }
    }
}

impl Drop for StoreReceiver {
    fn drop(&mut self) {
        if !self.owner.is_here() {
            return; // the parent's end goes on
        }
        self.presence = None;
        // A sender that is there reads the last words of this worker, and removes them.
        let storage = self.store.storage();
        if self.peer.life() != Life::Here && !is_here(storage, SENDER) {
            let _ = storage.remove(&self.own);
        }
        // The last to leave a temporary store removes it. For any other store this does nothing.
        let _ = vacate(storage);
    }
}

/// The sender, if it is the one of the init info, and has not been replaced by one that this worker has
/// seen already.
fn right(
    peer: Box<dyn Peer>,
    at: &Endpoint,
    joining: &Joining,
) -> Option<(AboutSender, Box<dyn Peer>)> {
    let about: AboutSender = serde_json::from_slice(peer.about()).ok()?;
    let ids = about.models.iter().map(|model| &model.id);
    let is_right = about.secret == *at.secret()
        && about.run.epoch >= joining.seen
        && ids.eq(&joining.models)
        && joining.wanted.iter().all(|one| *one < about.models.len())
        && peer.life() == Life::Here;
    is_right.then_some((about, peer))
}

/// What a store says that has versions and no sender.
fn left_behind(store: &Store) -> Option<String> {
    let head = catalog::head(store.storage()).ok().flatten()?;
    head.newest()?;
    Some("no sender uses the store now, which has versions of earlier ones".into())
}

/// How the sender of the init info has ended, if it has: as an error, and in words.
fn ended(peer: &dyn Peer, at: &Endpoint) -> Option<(Error, String)> {
    let AboutSender {
        pid, host, secret, ..
    } = serde_json::from_slice(peer.about()).ok()?;
    if secret != *at.secret() {
        return None;
    }
    let (error, how) = match peer.life() {
        Life::Here => return None,
        Life::Left => (Error::SenderClosed, "has shut down"),
        Life::Dead => (Error::SenderDied { pid: Some(pid) }, "has died"),
    };
    Some((error, format!("its sender, process {pid} on {host}, {how}")))
}

fn cut(reason: &str) -> String {
    reason[..reason.floor_char_boundary(MAX_REASON)].to_owned()
}

impl ReceiverTransport for StoreReceiver {
    fn models(&self) -> &[ModelSpec] {
        &self.models
    }

    fn run(&self) -> Run {
        self.sender.run
    }

    fn travelled(&self) -> Option<u64> {
        Some(self.travelled.load(Ordering::Relaxed))
    }

    fn next(&mut self, deadline: Deadline) -> Result<Option<SetSnapshot>> {
        let mut pause = Pause::new(self.store.storage().pauses());
        loop {
            // Asked before the versions: what was sent last is not missed then.
            let life = self.peer.life();
            let unasked = self.unasked.take();
            match self.newer() {
                Ok(None) if unasked.is_none() => {}
                Ok(newer) => return Ok(newer.or(unasked)),
                Err(error) => {
                    self.unasked = self.unasked.take().or(unasked);
                    return Err(error);
                }
            }
            self.check(life)?;
            if !pause.until_interrupted(deadline, &self.interruption)? {
                return Ok(None);
            }
        }
    }

    fn latest(&mut self) -> Result<Option<SetSnapshot>> {
        let newer = self.newer()?;
        self.unasked = None;
        Ok(newer.or_else(|| self.held.clone()))
    }

    fn pull(
        &mut self,
        model: usize,
        which: VersionRequest,
        deadline: Deadline,
    ) -> Result<Option<SetSnapshot>> {
        let answer = self.answer(model, which, deadline);
        if self.status.asks.take().is_some() {
            self.say()?;
        }
        answer
    }

    fn interrupter(&self) -> Result<Interrupter> {
        Ok(self.interruption.interrupter())
    }

    fn applied(&mut self, set: &SetSnapshot) -> Result<()> {
        let versions = set.members().iter();
        self.status.versions = versions.map(|one| one.snapshot.version()).collect();
        // A version that was asked for in addition to the newest has no sequence.
        self.status.applied = self.status.applied.max(set.sequence());
        self.say()
    }

    fn refuse(&mut self, set: Option<&SetSnapshot>, reason: &str) -> Result<()> {
        let reason = cut(reason);
        match set {
            Some(set) => self.status.refused = Some((set.sequence(), reason)),
            None => self.status.rejected = Some(reason),
        }
        self.say()
    }
}
