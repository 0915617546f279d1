//! Who is alive, without locks.
//!
//! A process writes its object again and again, with a number that grows. Another one that has not
//! seen the number grow for [`Beats::silence`], by its own clock which nobody sets, takes it for dead.
//! One that leaves in order says so in its object. So wrong clocks do no harm, and neither does a store
//! that is slow to list.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use object_store::path::Path;
use object_store::{ObjectStore, PutMode, UpdateVersion};
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;
use weightsync_engine::Origin;
use weightsync_engine::transport::threads::LockExt as _;
use weightsync_engine::transport::{interrupt, random};

use super::error::io_error;
use super::runtime::Pending;
use super::{Life, ObjectClient, Objects, Peer, Presence, Put, Storage, fetch, put_if};
use crate::storage::interrupted;

/// How often a process says that it is alive, and when silence counts as death.
#[derive(Clone, Copy, Debug)]
pub(super) struct Beats {
    pub(super) every: Duration,
    pub(super) silence: Duration,
}

impl Default for Beats {
    fn default() -> Self {
        Self {
            // Each is a request that costs money: some 20 cents a day.
            every: Duration::from_secs(2),
            // Four beats may fail or be late, as they are when a store throttles its users.
            silence: Duration::from_secs(10),
        }
    }
}

/// How long a process that leaves waits for its last word to be written. Without it, others notice
/// by its silence.
const FAREWELL: Duration = Duration::from_secs(5);

/// Presences that nobody looked at for so long are forgotten; the next look begins again.
const FORGET: Duration = Duration::from_secs(600);

/// The first line of a presence; what the process is about follows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Beat {
    /// The presence: another process at the same place has another one.
    id: String,
    /// Grows with each time it is written.
    count: u64,
    left: bool,
    /// The presence that this one replaced, and whether that had left.
    before: Option<(String, bool)>,
}

impl Beat {
    fn new(before: Option<(String, bool)>) -> io::Result<Self> {
        let id: [u8; 16] = random().map_err(io::Error::other)?;
        Ok(Self {
            id: format!("{:032x}", u128::from_le_bytes(id)),
            count: 0,
            left: false,
            before,
        })
    }

    fn encode(&self, about: &[u8]) -> Bytes {
        let head = serde_json::to_vec(self);
        let mut all =
            head.unwrap_or_else(|error| unreachable!("plain values become JSON: {error}"));
        all.push(b'\n');
        all.extend_from_slice(about);
        all.into()
    }

    /// `None` for what is not a presence.
    fn decode(bytes: &Bytes) -> Option<(Self, Bytes)> {
        let end = bytes.iter().position(|byte| *byte == b'\n')?;
        let beat = serde_json::from_slice(&bytes[..end]).ok()?;
        Some((beat, bytes.slice(end + 1..)))
    }
}

/// Whether bytes are a presence.
#[cfg(feature = "fuzz")]
pub(crate) fn is_presence(bytes: &[u8]) -> bool {
    Beat::decode(&Bytes::copy_from_slice(bytes)).is_some()
}

/// What a process that is alive writes.
pub(super) fn beat() -> io::Result<Bytes> {
    Ok(Beat::new(None)?.encode(b""))
}

/// What was seen of others, and since when. Shared by all stores of this process: who looks twice, by
/// whatever store, need not watch twice.
#[derive(Debug, Default)]
pub(super) struct PeerTable(Mutex<BTreeMap<String, SeenPeer>>);

#[derive(Clone, Debug)]
struct SeenPeer {
    id: String,
    count: u64,
    /// When it was seen to change, or first seen.
    since: Instant,
    /// Whether it was seen to change.
    changed: bool,
    looked: Instant,
}

impl PeerTable {
    pub(super) fn shared() -> Arc<Self> {
        static SHARED: LazyLock<Arc<PeerTable>> = LazyLock::new(Arc::default);
        SHARED.clone()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, SeenPeer>> {
        self.0.locked()
    }

    /// Notes a look, and returns what is known.
    fn note(&self, name: &str, beat: &Beat) -> SeenPeer {
        let now = Instant::now();
        let mut all = self.lock();
        // Names come and go, and the table stays small.
        all.retain(|_, seen| now.duration_since(seen.looked) < FORGET);
        let before = all.get(name).filter(|seen| seen.id == beat.id);
        let same = before.filter(|seen| seen.count == beat.count);
        let seen = SeenPeer {
            id: beat.id.clone(),
            count: beat.count,
            // The silence began when this number was first seen, by the clock of this process.
            since: same.map_or(now, |seen| seen.since),
            // Only a number that was seen to grow proves life. The first look proves nothing.
            changed: match same {
                Some(same) => same.changed,
                None => before.is_some(),
            },
            looked: now,
        };
        all.insert(name.into(), seen.clone());
        seen
    }

    /// Forgets what is or was at a name and below it.
    pub(super) fn forget(&self, name: &str) {
        let below = format!("{name}/");
        self.lock()
            .retain(|seen, _| seen != name && !seen.starts_with(&below));
    }
}

/// Another process.
pub(super) struct ObjectPeer {
    client: ObjectClient,
    key: Path,
    name: String,
    beats: Beats,
    table: Arc<PeerTable>,
    beat: Beat,
    about: Bytes,
    /// As it was read.
    version: UpdateVersion,
    /// What was known last.
    life: Mutex<Life>,
}

impl ObjectPeer {
    /// Looks at a presence; `None` if there is none.
    pub(super) fn look(objects: &Objects, path: &str) -> io::Result<Option<Self>> {
        let (client, key) = (objects.client()?, objects.key(path)?);
        let asked = key.clone();
        let read = client.ask(move |store| async move { fetch(&*store, &asked).await })?;
        let Some((bytes, version)) = read else {
            return Ok(None);
        };
        // What is no presence counts as that of a process that died: its place can be taken.
        let (beat, about) = Beat::decode(&bytes).unwrap_or_else(|| {
            let nobody = Beat {
                id: String::new(),
                count: 0,
                left: false,
                before: None,
            };
            (nobody, bytes)
        });
        let other = Self {
            client,
            key,
            name: objects.name(path),
            beats: objects.beats,
            table: objects.seen.clone(),
            beat,
            about,
            version,
            life: Mutex::new(Life::Here),
        };
        let life = other.judge(&other.beat);
        *other.last() = life;
        Ok(Some(other))
    }

    fn last(&self) -> MutexGuard<'_, Life> {
        self.life.locked()
    }

    /// What a look says about it, if it was there.
    fn judge(&self, beat: &Beat) -> Life {
        if beat.id.is_empty() {
            return Life::Dead;
        }
        if beat.left {
            return Life::Left;
        }
        let seen = self.table.note(&self.name, beat);
        match seen.since.elapsed() < self.beats.silence {
            true => Life::Here,
            false => Life::Dead,
        }
    }

    /// Whether it is known to live: it changed lately.
    fn is_alive(&self, beat: &Beat) -> bool {
        let seen = self.table.note(&self.name, beat);
        seen.changed && seen.since.elapsed() < self.beats.silence
    }
}

impl std::fmt::Debug for ObjectPeer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("ObjectPeer").field(&self.name).finish()
    }
}

impl Peer for ObjectPeer {
    fn about(&self) -> &[u8] {
        &self.about
    }

    fn life(&self) -> Life {
        let before = *self.last();
        // A process that left does not come back.
        if before == Life::Left {
            return before;
        }
        let key = self.key.clone();
        let read = self
            .client
            .ask(move |store| async move { fetch(&*store, &key).await });
        let life = match read {
            // A store that cannot be reached says nothing about the others.
            Err(_) => return before,
            // Removed, as a presence is that has left.
            Ok(None) => Life::Left,
            Ok(Some((bytes, _))) => match Beat::decode(&bytes) {
                Some((beat, _)) if beat.id == self.beat.id => self.judge(&beat),
                // Another process has the place now. It has noted how the one before went.
                Some((Beat { before, .. }, _)) => match before {
                    Some((id, left)) if id == self.beat.id && !left => Life::Dead,
                    _ => Life::Left,
                },
                None => Life::Dead,
            },
        };
        *self.last() = life;
        life
    }
}

/// This process, as others see it.
#[derive(Debug)]
pub(super) struct ObjectPresence {
    client: Option<ObjectClient>,
    owner: Origin,
    stop: Option<oneshot::Sender<()>>,
    /// Ends when the last word is written.
    heart: Mutex<Option<Pending<()>>>,
}

impl std::fmt::Debug for ObjectClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Client({})", self.store)
    }
}

impl Presence for ObjectPresence {}

impl Drop for ObjectPresence {
    fn drop(&mut self) {
        let (client, stop) = (self.client.take(), self.stop.take());
        if !self.owner.is_here() {
            // It is the parent that is present.
            std::mem::forget((client, stop, std::mem::take(&mut self.heart)));
            return;
        }
        // Dropped, it ends the wait between two beats, and the last beat says that this process
        // left.
        drop(stop);
        let heart = self.heart.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(heart) = heart.take() {
            // For a bounded time: a store that cannot be reached must not hold up the end of this
            // process.
            let _ = heart.wait_at_most(FAREWELL);
        }
    }
}

/// Sleeps while a presence is watched.
pub(super) fn pause(beats: &Beats) -> io::Result<()> {
    interrupt::sleep(beats.every / 4).map_err(interrupted)
}

/// Announces this process.
///
/// # Errors
///
/// [`AlreadyExists`](ErrorKind::AlreadyExists) if another process is alive there. If one is there
/// that died, that takes [`Beats::silence`] to find out.
pub(super) fn announce(objects: &Objects, path: &str, about: &[u8]) -> io::Result<ObjectPresence> {
    let key = objects.key(path)?;
    let client = objects.client()?;
    let about = Bytes::copy_from_slice(about);
    let mut before: Option<ObjectPeer> = None;
    loop {
        let (mode, replaced) = match &before {
            None => (PutMode::Create, None),
            // The new beat says how the one before went, for those who knew only that one.
            Some(other) => {
                let left = *other.last() == Life::Left;
                (
                    PutMode::Update(other.version.clone()),
                    Some((other.beat.id.clone(), left)),
                )
            }
        };
        let beat = Beat::new(replaced)?;
        let (asked, bytes) = (key.clone(), beat.encode(&about));
        let put =
            client.ask(move |store| async move { put_if(&*store, &asked, mode, bytes).await })?;
        match put {
            Put::Done(version) => {
                return Ok(start(&client, key, beat, version, about, objects.beats));
            }
            // A process is or was there. If it lives, this announcement is refused.
            Put::Refused(_) => before = wait_for_death(objects, path)?,
        }
    }
}

/// Watches the process that is there until it has left or counts as dead. `None` if it is gone.
fn wait_for_death(objects: &Objects, path: &str) -> io::Result<Option<ObjectPeer>> {
    loop {
        let Some(other) = objects.peer_at(path)? else {
            return Ok(None);
        };
        // Its place can be taken.
        if *other.last() != Life::Here {
            return Ok(Some(other));
        }
        // Neither seen to live nor silent for long enough: look again.
        if other.is_alive(&other.beat) {
            return Err(ErrorKind::AlreadyExists.into());
        }
        pause(&objects.beats)?;
    }
}

fn start(
    client: &ObjectClient,
    key: Path,
    beat: Beat,
    version: UpdateVersion,
    about: Bytes,
    beats: Beats,
) -> ObjectPresence {
    let (stop, stopped) = oneshot::channel();
    let store = client.store.clone();
    let heart = Heart {
        store,
        key,
        beat,
        version,
        about,
    };
    let heart = client
        .runtime
        .start_request(heart.run(beats.every, stopped));
    ObjectPresence {
        client: Some(client.clone()),
        owner: Origin::here(),
        stop: Some(stop),
        heart: Mutex::new(Some(heart)),
    }
}

/// What writes a presence again.
struct Heart {
    store: Arc<dyn ObjectStore>,
    key: Path,
    beat: Beat,
    /// As it was written last: a write that is late cannot replace a later one, and none replaces
    /// the presence of another process.
    version: UpdateVersion,
    about: Bytes,
}

impl Heart {
    async fn run(mut self, every: Duration, mut stopped: oneshot::Receiver<()>) {
        loop {
            // A beat is due, or the presence was dropped.
            let leaves = tokio::time::timeout(every, &mut stopped).await.is_ok();
            self.beat.count += 1;
            self.beat.left = leaves;
            if leaves {
                let _ = self.write().await;
                return;
            }
            // The client tries for longer than others wait, so a beat that takes too long is given up
            // and written again.
            match tokio::time::timeout(every, self.write()).await {
                Ok(Ok(true)) => {}
                // Its place was taken.
                Ok(Ok(false)) => return,
                Ok(Err(error)) => {
                    let error = io_error(error);
                    tracing::debug!("{} is not written, and is tried again: {error}", self.key);
                }
                Err(_) => tracing::debug!("{} is not written in time", self.key),
            }
        }
    }

    /// False if the place was taken.
    async fn write(&mut self) -> Result<bool, object_store::Error> {
        let mut mode = PutMode::Update(self.version.clone());
        for _ in 0..super::TRIES {
            let new = self.beat.encode(&self.about);
            mode = match put_if(&*self.store, &self.key, mode, new).await? {
                Put::Done(version) => {
                    self.version = version;
                    return Ok(true);
                }
                Put::Refused(None) if self.beat.left => return Ok(false),
                // Removed by another process that took this one for dead. It is not.
                Put::Refused(None) => PutMode::Create,
                Put::Refused(Some((bytes, version))) => match Beat::decode(&bytes) {
                    // An earlier write whose answer got lost.
                    Some((beat, _)) if beat.id == self.beat.id => PutMode::Update(version),
                    _ => return Ok(false),
                },
            };
        }
        // Refused each time. The next beat tries again.
        Ok(true)
    }
}
