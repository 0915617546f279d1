//! What the trainer's thread and the one that serves share.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use bytes::Bytes;
use tokio::sync::Notify;
use weightsync::transport::{Deadline, ModelSpec, Opening};
use weightsync::{ModelId, Result, Run, Snapshot, Version, WorkerId};
use weightsync_net::Access;
use weightsync_simd::crc64;

use crate::http::{Bearer, ProofKey};
use crate::rpc::plan::{MailboxId, Numbered, Plan};
use crate::rpc::wait_on;
use crate::rpc::wire::{CHUNK, Crc, Part, url};

/// One version with what travels in addition to its bytes.
#[derive(Debug)]
pub(super) struct Retained {
    pub(super) model: usize,
    pub(super) snapshot: Snapshot,
    crc64: Vec<Crc>,
}

impl Retained {
    /// Makes the checksums: one pass over the version, in this thread.
    pub(super) fn new(model: usize, snapshot: Snapshot) -> Self {
        let chunks = snapshot.bytes().chunks(CHUNK as usize);
        Self {
            model,
            crc64: chunks.map(|chunk| Crc(crc64(chunk))).collect(),
            snapshot,
        }
    }

    /// How a worker is told of it.
    pub(super) fn part(&self) -> Part {
        Part {
            model: self.model,
            version: self.snapshot.version(),
            bytes: self.snapshot.bytes().len() as u64,
            chunk_bytes: CHUNK,
            crc64: self.crc64.clone(),
            digest: self.snapshot.published_digest(),
        }
    }
}

impl Numbered for Arc<Retained> {
    fn number(&self) -> Version {
        self.snapshot.version()
    }
}

/// What workers were called with and do not have yet.
#[derive(Debug, Default)]
struct Fetching {
    versions: BTreeMap<(MailboxId, usize), Version>,
    /// Those that have begun.
    begun: BTreeSet<MailboxId>,
    /// Versions whose bytes are on their way to somebody, with how many answers.
    served: BTreeMap<(MailboxId, usize, Version), usize>,
}

/// A version whose bytes are on their way to a worker, until this is dropped.
#[derive(Debug)]
pub(super) struct Serving {
    shared: Arc<Shared>,
    mailbox: MailboxId,
    /// `None` while this is dropped.
    kept: Option<Arc<Retained>>,
}

impl Serving {
    pub(super) fn bytes(&self) -> &[u8] {
        let kept = self.kept.as_ref();
        kept.map_or(&[], |kept| kept.snapshot.bytes())
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let Some(kept) = self.kept.take() else {
            return;
        };
        let what = (self.mailbox, kept.model, kept.number());
        drop(kept);
        let mut fetching = self.shared.fetching_now();
        if let Some(answers) = fetching.served.get_mut(&what) {
            *answers -= 1;
            if *answers == 0 {
                fetching.served.remove(&what);
            }
        }
        drop(fetching);
        // A send may wait for the room.
        self.shared.note(|_| ());
    }
}

/// The plan of versions as they are kept here.
pub(super) type RetainedPlan = Plan<Arc<Retained>>;

#[derive(Debug)]
pub(super) struct Shared {
    plan: Mutex<RetainedPlan>,
    /// Something that the trainer's threads may wait for has changed.
    changed: Condvar,
    /// Something was published, for questions that wait.
    published: Notify,
    /// What wakes the caller of each connection.
    callers: Mutex<BTreeMap<MailboxId, Arc<Notify>>>,
    /// Every version that somebody holds, by model.
    alive: Mutex<Vec<Vec<Weak<Retained>>>>,
    fetching: Mutex<Fetching>,
    /// The version of each model whose digest is to be made next.
    digests: Mutex<BTreeMap<usize, Weak<Retained>>>,
    digest: Notify,
    closed: AtomicBool,
    pub(super) models: Vec<ModelSpec>,
    /// Each as JSON, made when it is asked for first.
    described: Vec<OnceLock<Bytes>>,
    pub(super) run: Run,
    pub(super) url: String,
    pub(super) access: Access,
    /// For calls to workers.
    pub(super) bearer: Bearer,
    /// For workers that ask who this is.
    pub(super) proof: ProofKey,
}

impl Shared {
    pub(super) fn new(opening: &Opening<'_>, found: SocketAddr, access: Access) -> Self {
        let models = opening.models.to_vec();
        Self {
            plan: Mutex::new(Plan::new(models.len(), opening.options.history)),
            changed: Condvar::new(),
            published: Notify::new(),
            callers: Mutex::default(),
            alive: Mutex::new(models.iter().map(|_| Vec::new()).collect()),
            fetching: Mutex::default(),
            digests: Mutex::default(),
            digest: Notify::new(),
            closed: AtomicBool::new(false),
            described: models.iter().map(|_| OnceLock::new()).collect(),
            models,
            run: opening.run,
            url: url(found),
            access,
            bearer: Bearer::to_worker(opening.at.secret()),
            proof: ProofKey::new(opening.at.secret()),
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, RetainedPlan> {
        self.plan.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Releases the plan until something may have changed.
    pub(super) fn wait<'a>(
        &'a self,
        guard: MutexGuard<'a, RetainedPlan>,
        deadline: Deadline,
    ) -> Result<MutexGuard<'a, RetainedPlan>> {
        wait_on(&self.changed, &self.plan, guard, deadline)
    }

    /// Changes the plan, and tells those who wait in the trainer's threads.
    pub(super) fn note<T>(&self, change: impl FnOnce(&mut RetainedPlan) -> T) -> T {
        let result = change(&mut self.lock());
        self.changed.notify_all();
        result
    }

    /// Something new may be desired for workers.
    pub(super) fn ring(&self) {
        for caller in self.callers().values() {
            caller.notify_one();
        }
        self.published.notify_waiters();
        self.changed.notify_all();
    }

    /// What tells of the next publication; to be made before the plan is looked at.
    pub(super) fn next_publication(&self) -> tokio::sync::futures::Notified<'_> {
        self.published.notified()
    }

    pub(super) fn enter(&self, mailbox: MailboxId) -> Arc<Notify> {
        let bell = Arc::new(Notify::new());
        self.callers().insert(mailbox, bell.clone());
        bell
    }

    pub(super) fn leave(&self, mailbox: MailboxId) {
        self.callers().remove(&mailbox);
        self.fetches(mailbox, &[]);
    }

    fn fetching_now(&self) -> MutexGuard<'_, Fetching> {
        self.fetching.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn callers(&self) -> MutexGuard<'_, BTreeMap<MailboxId, Arc<Notify>>> {
        self.callers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that a version exists.
    pub(super) fn born(&self, kept: &Arc<Retained>) {
        let mut alive = self.alive.lock().unwrap_or_else(PoisonError::into_inner);
        let of_model = &mut alive[kept.model];
        of_model.retain(|one| one.strong_count() > 0);
        of_model.push(Arc::downgrade(kept));
    }

    /// The versions of a model that somebody holds.
    pub(super) fn alive(&self, model: usize) -> Vec<Version> {
        let mut alive = self.alive.lock().unwrap_or_else(PoisonError::into_inner);
        alive[model].retain(|one| one.strong_count() > 0);
        let alive = alive[model].iter().filter_map(Weak::upgrade);
        alive.map(|kept| kept.number()).collect()
    }

    /// A version, as long as anybody holds it.
    pub(super) fn find(&self, model: usize, version: Version) -> Option<Arc<Retained>> {
        let alive = self.alive.lock().unwrap_or_else(PoisonError::into_inner);
        let mut alive = alive.get(model)?.iter().filter_map(Weak::upgrade);
        alive.find(|kept| kept.number() == version)
    }

    /// Notes what a worker was called with, until it has it.
    pub(super) fn fetches(&self, mailbox: MailboxId, kepts: &[Arc<Retained>]) {
        let mut fetching = self.fetching_now();
        fetching.begun.remove(&mailbox);
        fetching.versions.retain(|(of, _), _| *of != mailbox);
        let new = kepts.iter();
        let new = new.map(|kept| ((mailbox, kept.model), kept.number()));
        fetching.versions.extend(new);
    }

    /// A worker has begun to fetch.
    pub(super) fn begins(&self, mailbox: MailboxId) {
        self.fetching_now().begun.insert(mailbox);
    }

    /// A worker is sent the bytes of a version, which stays as long as they are on their way.
    pub(super) fn serves(
        self: &Arc<Self>,
        mailbox: MailboxId,
        kept: Arc<Retained>,
    ) -> Arc<Serving> {
        let what = (mailbox, kept.model, kept.number());
        *self.fetching_now().served.entry(what).or_default() += 1;
        Arc::new(Serving {
            shared: self.clone(),
            mailbox,
            kept: Some(kept),
        })
    }

    /// Has the digests of these made, unless newer ones come before their turn.
    pub(super) fn digest_next(&self, kept: &[Arc<Retained>]) {
        let mut digests = self.digests.lock().unwrap_or_else(PoisonError::into_inner);
        for one in kept {
            digests.insert(one.model, Arc::downgrade(one));
        }
        drop(digests);
        self.digest.notify_one();
    }

    /// Makes digests one after the other, next to whatever else is done.
    pub(super) async fn make_digests(self: Arc<Self>) {
        loop {
            let next = {
                let mut digests = self.digests.lock().unwrap_or_else(PoisonError::into_inner);
                digests.pop_first()
            };
            let Some((_, next)) = next else {
                self.digest.notified().await;
                continue;
            };
            let made = tokio::task::spawn_blocking(move || {
                if let Some(kept) = next.upgrade() {
                    let _ = kept.snapshot.clone().with_digest(kept.snapshot.digest());
                }
            });
            // A panic there was reported by the panic hook.
            let _ = made.await;
            // A send may wait for the room.
            self.note(|_| ());
        }
    }

    /// Whether a worker has begun to fetch what it was called with.
    pub(super) fn has_begun(&self, mailbox: MailboxId) -> bool {
        self.fetching_now().begun.contains(&mailbox)
    }

    /// Who was called with which version of a model, or asked for it, and has not got it
    /// yet.
    pub(super) fn fetching(
        &self,
        plan: &RetainedPlan,
        model: usize,
    ) -> Vec<(WorkerId, u32, Version)> {
        let fetching = self.fetching_now();
        let called = fetching.versions.iter();
        let called = called.map(|((mailbox, of), version)| (*mailbox, *of, *version));
        let versions: BTreeSet<_> = called
            .chain(fetching.served.keys().copied())
            .filter(|(_, of, _)| *of == model)
            .map(|(mailbox, _, version)| (mailbox, version))
            .collect();
        drop(fetching);
        let who = versions.into_iter().filter_map(|(mailbox, version)| {
            let about = plan.about(mailbox)?;
            Some((about.worker, about.pid, version))
        });
        who.collect()
    }

    /// A model as workers are told of it.
    pub(super) fn described(&self, model: usize) -> Option<Bytes> {
        let spec = self.models.get(model)?;
        let described = self.described[model].get_or_init(|| {
            let text = serde_json::to_vec(spec);
            text.unwrap_or_else(|_| unreachable!("a model's description has text keys"))
                .into()
        });
        Some(described.clone())
    }

    pub(super) fn ids(&self) -> impl Iterator<Item = &ModelId> {
        self.models.iter().map(|model| &model.id)
    }

    /// The name of a connection, which no other of any sender has.
    pub(super) fn name(&self, mailbox: MailboxId) -> String {
        let id = u64::from_be_bytes(*self.run.id.first_chunk().unwrap_or(&[0; 8]));
        format!("{id:016x}-{mailbox}")
    }

    /// The connection of a name.
    pub(super) fn named(&self, name: &str) -> Option<MailboxId> {
        let (_, mailbox) = name.rsplit_once('-')?;
        let mailbox = mailbox.parse().ok()?;
        (self.name(mailbox) == name).then_some(mailbox)
    }

    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        self.ring();
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }
}
