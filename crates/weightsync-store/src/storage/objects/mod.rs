//! A store in an object store.
//!
//! A small file is replaced by a request with a condition: that there is no object yet, or that it is
//! still the one that was read. A large file is uploaded in parts and appears when the last request
//! for it succeeds. There are no locks, so a process that is alive says so every [`Beats::every`]
//! ([`presence`]).
//!
//! The answer to a request may get lost, and the client repeats a request whose answer it did not
//! get. So a request that failed may have succeeded, and one that was refused because an object had
//! changed may have been refused because of its own first try. Either way the object is read again.

mod error;
mod large;
mod place;
mod presence;
mod runtime;

use std::fmt;
use std::io::{self, ErrorKind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use object_store::path::Path;
use object_store::{
    Error, GetOptions, ObjectStore, ObjectStoreExt, PutMode, PutOptions, UpdateVersion,
};
use weightsync_engine::Origin;
use weightsync_engine::files::unique;

pub(crate) use self::place::{BucketPrefix, EXPECTED};
use super::{
    Blob, Life, MAX_SMALL, NO_NAME, OF_VERSIONS, Peer, Presence, Storage, Upload, is_of_a_store,
    is_temporary, no_file_of_a_store,
};
use crate::format::LEASES;
use crate::lease;
use error::{found, io_error, is_refused};
use presence::{Beats, PeerTable};
use runtime::Runtime;

/// How often a replacement is tried again that was refused though nothing had changed.
const TRIES: usize = 5;

/// The presence of a process that removes everything.
const VACATING: &str = "vacating";

#[cfg(feature = "fuzz")]
pub(crate) use self::presence::is_presence;

/// A store in an object store.
#[derive(Clone)]
pub(crate) struct Objects {
    place: BucketPrefix,
    beats: Beats,
    /// The client of this process, and after a fork those of the children.
    clients: Arc<OnceLock<ProcessClient>>,
    /// What was seen of others.
    seen: Arc<PeerTable>,
    /// Whether the service was seen to refuse writes whose conditions were not met.
    has_conditions: Arc<AtomicBool>,
}

struct ProcessClient {
    /// Never dropped in another process: its connections and its thread are not that one's.
    client: Option<ObjectClient>,
    owner: Origin,
    next: OnceLock<Box<ProcessClient>>,
}

/// A way to make requests.
#[derive(Clone)]
struct ObjectClient {
    store: Arc<dyn ObjectStore>,
    runtime: Arc<Runtime>,
}

impl Objects {
    /// A store at this place. No request is made yet, and no thread started.
    pub(crate) fn new(place: BucketPrefix) -> Self {
        Self::with_beats(place, Beats::default())
    }

    fn with_beats(place: BucketPrefix, beats: Beats) -> Self {
        Self {
            place,
            beats,
            clients: Arc::default(),
            seen: PeerTable::shared(),
            has_conditions: Arc::default(),
        }
    }

    /// The client of this process: a connection that a fork copied would mix answers up.
    fn client(&self) -> io::Result<ObjectClient> {
        let mut link = match self.clients.get() {
            Some(link) => link,
            None => {
                let first = ProcessClient::new(&self.place)?;
                self.clients.get_or_init(|| first)
            }
        };
        // A forked child has no thread that makes requests. It gets a client of its own, behind
        // those of its parents.
        while !link.owner.is_here() {
            link = match link.next.get() {
                Some(next) => next,
                None => {
                    let next = Box::new(ProcessClient::new(&self.place)?);
                    link.next.get_or_init(|| next)
                }
            };
        }
        let client = link.client.clone();
        client.ok_or_else(|| io::Error::other("the store's client is gone"))
    }

    /// The key of an object, which names no other.
    fn key(&self, path: &str) -> io::Result<Path> {
        let key = self.place.key(path);
        let parsed = Path::parse(&key).ok();
        // A path that the client would spell in another way would be another object.
        let parsed = parsed.filter(|parsed| parsed.as_ref() == key);
        parsed.ok_or_else(|| {
            io::Error::new(
                ErrorKind::InvalidInput,
                format!("{key:?} is not the name of an object"),
            )
        })
    }

    fn peer_at(&self, path: &str) -> io::Result<Option<presence::ObjectPeer>> {
        presence::ObjectPeer::look(self, path)
    }

    /// Removes an object and what is below it, but for one.
    fn remove_but(&self, path: &str, kept: Option<Path>) -> io::Result<()> {
        let key = self.key(path)?;
        // What was seen of the old objects says nothing about new ones of their names.
        self.seen.forget(&self.name(path));
        self.client()?.ask(move |store| async move {
            let below = store.list(Some(&key)).map(|found| Ok(found?.location));
            let own = (!key.is_root()).then_some(Ok(key));
            let all = stream::iter(own).chain(below);
            let all = all.filter(move |found| {
                let is_kept = matches!((found, &kept), (Ok(found), Some(kept)) if found == kept);
                std::future::ready(!is_kept)
            });
            let mut removed = store.delete_stream(all.boxed());
            while let Some(removed) = removed.next().await {
                found(removed)?;
            }
            Ok(())
        })
    }
}

impl ProcessClient {
    fn new(place: &BucketPrefix) -> io::Result<Self> {
        let runtime = Runtime::shared()?;
        let store = {
            let _entered = runtime.handle().enter();
            place.client()?
        };
        Ok(Self {
            client: Some(ObjectClient { store, runtime }),
            owner: Origin::here(),
            next: OnceLock::new(),
        })
    }
}

impl Drop for ProcessClient {
    fn drop(&mut self) {
        if !self.owner.is_here() {
            std::mem::forget(self.client.take());
        }
    }
}

impl ObjectClient {
    /// Makes requests and waits for them.
    fn ask<T, F>(&self, request: impl FnOnce(Arc<dyn ObjectStore>) -> F) -> io::Result<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, Error>> + Send + 'static,
    {
        let answer = self.runtime.run(request(self.store.clone()))?;
        answer.map_err(io_error)
    }
}

impl fmt::Debug for Objects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Objects")
            .field(&self.place.to_string())
            .finish()
    }
}

/// An object as it was read.
type Read = (Bytes, UpdateVersion);

/// Reads a small object; `None` if there is none.
async fn fetch(store: &dyn ObjectStore, key: &Path) -> Result<Option<Read>, Error> {
    let Some(got) = found(store.get_opts(key, GetOptions::default()).await)? else {
        return Ok(None);
    };
    // Before its bytes are taken.
    if got.meta.size > MAX_SMALL {
        return Err(Error::Generic {
            store: "object store",
            source: format!("it is longer than {MAX_SMALL} bytes").into(),
        });
    }
    let version = UpdateVersion {
        e_tag: got.meta.e_tag.clone(),
        version: got.meta.version.clone(),
    };
    Ok(Some((got.bytes().await?, version)))
}

/// How a write with a condition ended.
enum Put {
    Done(UpdateVersion),
    /// The condition was not met. What is there instead.
    Refused(Option<Read>),
}

/// Writes an object under a condition. `new` has to be unlike all that others write there.
async fn put_if(
    store: &dyn ObjectStore,
    key: &Path,
    mode: PutMode,
    new: Bytes,
) -> Result<Put, Error> {
    // A condition makes it one step: of several writers one succeeds.
    let put = store.put_opts(key, new.clone().into(), PutOptions::from(mode));
    let failed = match put.await {
        Ok(result) => return Ok(Put::Done(result.into())),
        Err(error) => error,
    };
    match fetch(store, key).await {
        // The answer got lost, and perhaps the client asked again.
        Ok(Some((there, version))) if there == new => Ok(Put::Done(version)),
        Ok(there) if is_refused(&failed) => Ok(Put::Refused(there)),
        _ => Err(failed),
    }
}

/// An error unless the service refuses writes whose conditions are not met. One that ignores them would
/// let two writers publish at once. `key` is nobody else's.
async fn check_conditions(store: &dyn ObjectStore, key: &Path, own: Bytes) -> Result<(), Error> {
    let put = |mode| store.put_opts(key, own.clone().into(), PutOptions::from(mode));
    put(PutMode::Overwrite).await?;
    // No object has this.
    let other = UpdateVersion {
        e_tag: Some("\"weightsync\"".into()),
        version: Some("1".into()),
    };
    for (condition, mode) in [
        ("If-None-Match", PutMode::Create),
        ("If-Match", PutMode::Update(other)),
    ] {
        let mut ended = put(mode.clone()).await;
        if matches!(ended, Ok(_) | Err(Error::NotFound { .. })) {
            // Another writer removes it if this takes long. With none there, nothing is refused.
            put(PutMode::Overwrite).await?;
            ended = put(mode).await;
        }
        match ended {
            Err(error) if is_refused(&error) => {}
            Err(error) => return Err(error),
            Ok(_) => {
                let what = format!(
                    "this service ignores {condition}, without which two writers would overwrite \
                     each other: use one that has conditional writes"
                );
                return Err(Error::NotSupported {
                    source: what.into(),
                });
            }
        }
    }
    Ok(())
}

impl Storage for Objects {
    fn name(&self, path: &str) -> String {
        self.place.below(path).to_string()
    }

    fn read(&self, path: &str) -> io::Result<Option<Vec<u8>>> {
        let key = self.key(path)?;
        let read = self
            .client()?
            .ask(move |store| async move { fetch(&*store, &key).await })?;
        Ok(read.map(|(bytes, _)| bytes.into()))
    }

    fn swap(&self, path: &str, old: Option<&[u8]>, new: &[u8]) -> io::Result<bool> {
        let key = self.key(path)?;
        let (old, new) = (old.map(Bytes::copy_from_slice), Bytes::copy_from_slice(new));
        // Asked once: a service without conditions would let two writers overwrite each other.
        if !self.has_conditions.load(Ordering::Relaxed) {
            // A lease of nothing: others leave it alone for a while, and remove it if it stays.
            let key = self.key(&format!("{LEASES}/{}{}", lease::NOTHING, unique()))?;
            let own = presence::beat()?;
            let check = |store: Arc<dyn ObjectStore>| async move {
                let checked = check_conditions(&*store, &key, own).await;
                // A user who may not remove anything can save all the same.
                let _ = store.delete(&key).await;
                checked
            };
            self.client()?.ask(check)?;
            self.has_conditions.store(true, Ordering::Relaxed);
        }
        let swapped = self.client()?.ask(move |store| async move {
            for _ in 0..TRIES {
                let mode = match &old {
                    None => PutMode::Create,
                    // Read again for its tag: the condition of the request is that the object is
                    // still this one.
                    Some(old) => match fetch(&*store, &key).await? {
                        Some((there, version)) if there == *old => PutMode::Update(version),
                        _ => return Ok(Some(false)),
                    },
                };
                match put_if(&*store, &key, mode, new.clone()).await? {
                    Put::Done(_) => return Ok(Some(true)),
                    // It holds what was expected, so it changed back, or the store was busy.
                    Put::Refused(there)
                        if there.as_ref().map(|(there, _)| there) == old.as_ref() => {}
                    Put::Refused(_) => return Ok(Some(false)),
                }
            }
            Ok(None)
        })?;
        swapped.ok_or_else(|| {
            io::Error::new(
                ErrorKind::ResourceBusy,
                format!("it was refused {TRIES} times though nobody had changed it"),
            )
        })
    }

    fn put(&self, path: &str, bytes: &[u8]) -> io::Result<()> {
        let key = self.key(path)?;
        let bytes = Bytes::copy_from_slice(bytes);
        self.client()?
            .ask(move |store| async move { store.put(&key, bytes.into()).await.map(drop) })
    }

    fn settle(&self, _: &str) -> io::Result<()> {
        // What is there is durable.
        Ok(())
    }

    fn upload(&self, path: &str) -> io::Result<Box<dyn Upload>> {
        let upload = large::Large::new(self.client()?, self.key(path)?);
        Ok(Box::new(upload))
    }

    fn open(&self, path: &str) -> io::Result<Option<Box<dyn Blob>>> {
        let opened = large::Opened::new(self.client()?, self.key(path)?)?;
        Ok(opened.map(|blob| Box::new(blob) as Box<dyn Blob>))
    }

    fn list(&self, dir: &str) -> io::Result<Vec<String>> {
        let key = self.key(dir)?;
        let listed = self.client()?.ask(move |store| async move {
            let listed = found(store.list_with_delimiter(Some(&key)).await)?;
            Ok((key, listed))
        })?;
        let (dir, Some(listed)) = listed else {
            return Ok(Vec::new());
        };
        let objects = listed.objects.into_iter().map(|object| object.location);
        let all = objects.chain(listed.common_prefixes);
        // Some programs make an empty object for a directory.
        let inside = all.filter(|path| *path != dir);
        Ok(inside
            .filter_map(|path| path.filename().map(str::to_owned))
            .collect())
    }

    fn remove(&self, path: &str) -> io::Result<()> {
        self.remove_but(path, None)
    }

    fn announce(&self, path: &str, about: &[u8]) -> io::Result<Box<dyn Presence>> {
        let presence = presence::announce(self, path, about)?;
        // After the announcement: a process that removes everything has seen it, or is seen here.
        while let Some(vacating) = self.peer_at(VACATING)?
            && vacating.life() == Life::Here
        {
            presence::pause(&self.beats)?;
        }
        Ok(Box::new(presence))
    }

    fn peer(&self, path: &str) -> io::Result<Option<Box<dyn Peer>>> {
        let peer = self.peer_at(path)?;
        Ok(peer.map(|peer| Box::new(peer) as Box<dyn Peer>))
    }

    fn tidy(&self) -> io::Result<()> {
        // Parts of an upload are not listed as objects. What processes that died have uploaded is
        // removed by a rule of the bucket: docs/store.md has it.
        Ok(())
    }

    fn why_not_temporary(&self) -> io::Result<Option<String>> {
        let name = self.name("");
        let name = name.trim_end_matches('/').rsplit('/').next();
        if !name.is_some_and(is_temporary) {
            return Ok(Some(NO_NAME.into()));
        }
        let key = self.key("")?;
        let stranger = self.client()?.ask(move |store| async move {
            let mut below = store.list(Some(&key));
            while let Some(object) = below.next().await {
                let location = object?.location;
                let names = location.prefix_match(&key).into_iter().flatten();
                let names: Vec<_> = names.map(|name| name.as_ref().to_owned()).collect();
                let path = names.join("/");
                if path != VACATING && !is_of_a_store(&path, false) {
                    return Ok(Some(path));
                }
            }
            Ok(None)
        })?;
        Ok(stranger.map(no_file_of_a_store))
    }

    fn clear_temporary(&self) -> io::Result<()> {
        if let Some(why) = self.why_not_temporary()? {
            return Err(io::Error::new(ErrorKind::InvalidInput, why));
        }
        OF_VERSIONS.iter().try_for_each(|left| self.remove(left))
    }

    fn vacate(&self, empty: &dyn Fn() -> bool) -> io::Result<bool> {
        if let Some(why) = self.why_not_temporary()? {
            tracing::warn!("{} is not removed: {why}", self.name(""));
            return Ok(false);
        }
        // Nothing is written where somebody is.
        if !empty() {
            return Ok(false);
        }
        // The mark keeps others from coming in while everything is removed.
        let mark = match presence::announce(self, VACATING, b"vacating") {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => return Ok(false),
            mark => mark?,
        };
        // Asked again: a process that came before the mark is seen now, and one that comes later
        // waits for the mark to go.
        let is_empty = empty();
        if is_empty {
            // The mark itself goes last, so that nobody comes in between.
            self.remove_but("", Some(self.key(VACATING)?))?;
        }
        drop(mark);
        self.remove(VACATING)?;
        Ok(is_empty)
    }

    fn notices_death(&self) -> bool {
        false
    }

    fn codec(&self) -> weightsync_core::delta::Codec {
        weightsync_core::delta::Codec::Thin
    }

    fn pauses(&self) -> (Duration, Duration) {
        // A request takes some 30 ms and costs money: a worker that waits for hours asks once a second.
        (Duration::from_millis(100), Duration::from_secs(1))
    }
}

#[cfg(test)]
mod tests;
