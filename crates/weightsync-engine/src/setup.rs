//! The trainer's first phase: everything is decided, nothing is communicated.

mod model;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use weightsync_core::{Dtype, Layout, ModelId, Version, WaitFor, WorkerId};
use weightsync_mem::{CopyOptions, WaitStyle};

pub(crate) use self::model::SetupModel;
use crate::error::{Error, Result, place_of};
use crate::extract::WeightExtractor;
use crate::init_info::InitInfo;
use crate::options::SendOptions;
use crate::publish::{self, compare};
use crate::run_dir;
use crate::scheme::AnyScheme;
use crate::send_history::SendHistory;
use crate::send_source::{Members, Resolved, SendSource, resolve};
use crate::sender::Sender;
use crate::transport::{Endpoint, FirstWeights, ModelSpec, Opening, TransferOptions, deadline};

/// Which workers [`SenderSetup::connect`] waits for. Others may join later.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Expect {
    /// This many workers, with any numbers.
    Count(usize),
    /// The workers with these numbers.
    Workers(Vec<WorkerId>),
}

impl Expect {
    /// The workers with these numbers.
    pub fn workers(workers: impl IntoIterator<Item = impl Into<WorkerId>>) -> Self {
        Self::Workers(workers.into_iter().map(Into::into).collect())
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Count(count) => *count,
            Self::Workers(workers) => workers.len(),
        }
    }

    pub(crate) fn missing(&self, joined: &[WorkerId]) -> Vec<WorkerId> {
        match self {
            Self::Count(_) => Vec::new(),
            Self::Workers(workers) => workers
                .iter()
                .filter(|worker| !joined.contains(worker))
                .copied()
                .collect(),
        }
    }

    pub(crate) fn includes(&self, worker: WorkerId) -> bool {
        match self {
            Self::Count(_) => true,
            Self::Workers(workers) => workers.contains(&worker),
        }
    }

    pub(crate) fn met_by(&self, joined: &[WorkerId]) -> bool {
        match self {
            Self::Count(count) => joined.len() >= *count,
            Self::Workers(_) => self.missing(joined).is_empty(),
        }
    }
}

/// When a version's digest is made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum DigestPolicy {
    /// When [`Sender::digest`] asks for it.
    #[default]
    OnRequest,
    /// After every send, in a thread of the sender. A version that is replaced before its turn gets
    /// no digest.
    Background,
}

/// What happens to an asynchronous send while an earlier one is not settled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum AsyncSendLimit {
    /// The send fails with [`Error::SendPending`].
    #[default]
    Refuse,
    /// Up to this many sends (at least 1) may be unsettled. A further send waits for the oldest,
    /// until its own deadline.
    Queue(u8),
}

/// A source of weights that the sender keeps.
type Source = Arc<dyn WeightExtractor + Send + Sync>;

/// A sender that is set up: its settings are known, and nothing was communicated yet.
///
/// ```no_run
/// use std::time::Duration;
/// use weightsync::{Expect, SenderSetup, Tensors};
///
/// let mut weights = Tensors::new();
/// weights.insert("layer.weight", [2, 3], vec![0.0_f32; 6])?;
/// let setup = SenderSetup::new("policy", &weights)?;
/// let info = setup.init_info(); // hand this to the workers
/// let mut sender = setup.connect(&weights, Expect::Count(4), Some(Duration::from_secs(30)))?;
/// weights.slice_mut::<f32>("layer.weight")?[0] = 1.0;
/// println!("{}", sender.send(&weights)?);
/// # Ok::<(), weightsync::Error>(())
/// ```
#[derive(Clone)]
pub struct SenderSetup {
    pub(crate) models: Vec<SetupModel>,
    pub(crate) scheme: AnyScheme,
    at: Endpoint,
    run_dir: Option<PathBuf>,
    cast: Option<Dtype>,
    transfer: TransferOptions,
    pub(crate) copy: CopyOptions,
    pub(crate) async_send_limit: AsyncSendLimit,
    pub(crate) send_timeout: Option<Duration>,
}

impl SenderSetup {
    /// Sets a sender up for the tensors that `source` has now. Later sends must
    /// have the same names, dtypes and shapes.
    ///
    /// # Errors
    ///
    /// If the model's name is empty or longer than 255 bytes, or the source has
    /// tensors that no layout can have.
    pub fn new(model: &str, source: &dyn WeightExtractor) -> Result<Self> {
        Self::of(vec![SetupModel::new(model, source)?])
    }

    /// Sets a sender up for models that a worker receives, to pass them on.
    ///
    /// # Errors
    ///
    /// [`Error::EmptySet`] if there is none.
    pub(crate) fn passing_on(models: &[ModelSpec]) -> Result<Self> {
        match models {
            [] => Err(Error::EmptySet),
            _ => Self::of(models.iter().cloned().map(SetupModel::passed_on).collect()),
        }
    }

    fn of(models: Vec<SetupModel>) -> Result<Self> {
        let scheme = AnyScheme::default();
        let ids: Vec<_> = models
            .iter()
            .map(|model| model.prepared.id.clone())
            .collect();
        Ok(Self {
            at: scheme.scheme().allocate_endpoint(&ids, None)?,
            models,
            scheme,
            run_dir: None,
            cast: None,
            transfer: TransferOptions::default(),
            copy: CopyOptions::default(),
            async_send_limit: AsyncSendLimit::default(),
            send_timeout: Some(Duration::from_secs(60)),
        })
    }

    /// Adds a model that the same workers run. The models of one sender belong to one run. They can
    /// be sent one by one; models that are sent together change together on each worker.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new), and [`Error::SameModelTwice`].
    pub fn add_model(mut self, model: &str, source: &dyn WeightExtractor) -> Result<Self> {
        let model = SetupModel::new(model, source)?.cast(self.cast)?;
        let id = &model.prepared.id;
        if self.models.iter().any(|other| other.prepared.id == *id) {
            return Err(Error::SameModelTwice { model: id.clone() });
        }
        self.models.push(model);
        self.placed()
    }

    /// Keeps a source of a model's weights, for sends of what is
    /// [`Registered`](crate::Registered): a model the trainer shares, such as an
    /// `Arc<RwLock<Tensors>>`. It is read during such sends only.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchModel`] if it was not set up before,
    /// [`Error::WrongWeights`] if it is another model.
    pub fn register(
        mut self,
        model: &str,
        source: impl WeightExtractor + Send + Sync + 'static,
    ) -> Result<Self> {
        let place = place_of(model, self.models.iter().map(|one| &one.prepared.id))?;
        let found = &mut self.models[place];
        let sent = source.attributes()?.sent_layout(&source.layout()?)?;
        // A registered source of another model would only fail at the first send.
        compare(&found.prepared, &sent)?;
        found.source = Some(Arc::new(source));
        Ok(self)
    }

    /// How the weights travel; by default through shared memory.
    ///
    /// ```
    /// use weightsync::scheme::{AnyScheme, MultiProcess};
    /// use weightsync::{SenderSetup, Tensors};
    ///
    /// let mut weights = Tensors::new();
    /// weights.insert("bias", [1], [0.5_f32])?;
    /// SenderSetup::new("policy", &weights)?.scheme(MultiProcess::default())?;
    /// SenderSetup::new("policy", &weights)?.scheme("none".parse::<AnyScheme>()?)?;
    /// # Ok::<(), weightsync::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// If the scheme cannot allocate an address for the models; [`Error::BadSetting`] if a worker
    /// could not read the scheme's settings back from the init info; [`Error::Unsupported`] if a
    /// run directory is set and the scheme cannot find a restarted trainer.
    pub fn scheme(mut self, scheme: impl Into<AnyScheme>) -> Result<Self> {
        let scheme = scheme.into();
        // Refused here if a worker could not read it back from the init info.
        scheme.text()?;
        self.scheme = scheme;
        self.placed()
    }

    /// Sends floating-point tensors of every model as `dtype` (F64, F32, F16 or
    /// BF16), cast in the one pass over the source. The scales of what a mapping quantises are such
    /// tensors: with such a mapping, give it a rule that casts.
    ///
    /// # Errors
    ///
    /// [`Error::Extract`] for any other dtype.
    pub fn cast(mut self, dtype: Dtype) -> Result<Self> {
        self.cast = Some(dtype);
        let models = self.models.into_iter();
        let cast = models.map(|model| model.cast(Some(dtype)));
        self.models = cast.collect::<Result<_>>()?;
        Ok(self)
    }

    /// Keeps the run's epoch and address in a directory, so that a restarted trainer takes over.
    /// The sender makes the directory if its parent exists. Workers find the new trainer
    /// automatically, and never go back to a trainer of an earlier epoch.
    ///
    /// A new trainer takes over once the old one is dead or has shut down, even if a forked child
    /// of the old one lives. While the old trainer lives, [`connect`](Self::connect) of the new one
    /// fails with [`Error::AddressInUse`], and the workers notice nothing. Workers
    /// look the address up, so they must see the directory at the same path.
    ///
    /// # Errors
    ///
    /// [`Error::File`] if the directory or a file in it cannot be used, belongs
    /// to another user, or is open to others; [`Error::FileLocked`] if another
    /// process keeps the key locked for 10 s; [`Error::Unsupported`] if the
    /// scheme does not find a restarted trainer again.
    pub fn run_dir(mut self, dir: impl Into<PathBuf>) -> Result<Self> {
        self.run_dir = Some(dir.into());
        self.placed()
    }

    /// Sets how many versions of each model fit: `slots` (at least 2), which grow to `max_slots`
    /// when workers hold that many. For a large model the sender makes one slot before the first
    /// send and the others after it. If both are equal, a send waits for a free slot, and fails at
    /// its deadline.
    ///
    /// Versions that the sender itself keeps apart (for some workers, held ones,
    /// queues, the history) get their room in addition to that.
    pub fn slots(mut self, slots: u8, max_slots: u8) -> Self {
        self.transfer.slots = slots;
        self.transfer.max_slots = max_slots;
        self
    }

    /// Sets how many older versions of each model the sender keeps, for workers that ask for one
    /// and for going back (none by default). Each version takes a slot. The sender keeps whole
    /// sets: models that are sent one by one may need as many slots again.
    pub fn history(mut self, versions: u8) -> Self {
        self.transfer.history = versions;
        self
    }

    /// How the sender waits for its workers.
    pub fn wait_style(mut self, wait: WaitStyle) -> Self {
        self.transfer.wait = wait;
        self
    }

    /// How many threads copy. By default (0), one for each 64 MiB, and at most four or one per
    /// core. A model with a tensor that is cast or gathered has one.
    pub fn copy_threads(mut self, threads: usize) -> Self {
        self.copy.threads = threads;
        self
    }

    /// Makes a checksum of every chunk in the copy pass, for workers that want
    /// to [verify](crate::Snapshot::verify_checksums) (off by default). Versions
    /// written through [`Sender::loan`] have none: no copy pass is made there.
    pub fn checksums(mut self, on: bool) -> Self {
        self.copy.checksums = on;
        self
    }

    /// When the digest of a version is made.
    pub fn digest(mut self, policy: DigestPolicy) -> Self {
        self.transfer.digest = policy;
        self
    }

    /// What happens to an asynchronous send while an earlier one is not settled.
    pub fn async_send_limit(mut self, limit: AsyncSendLimit) -> Self {
        self.async_send_limit = limit;
        self
    }

    /// Sets how long a send waits at most: for a free slot, and for its workers (60 s by default).
    /// Without a timeout, only the event itself or the death of the delaying worker ends the wait.
    pub fn send_timeout(mut self, timeout: Option<Duration>) -> Self {
        self.send_timeout = timeout;
        self
    }

    /// What workers need to join.
    pub fn init_info(&self) -> InitInfo {
        InitInfo {
            scheme: self.scheme.to_string(),
            models: self.ids(),
            at: self.at.clone(),
        }
    }

    /// The tensors as workers will see them.
    ///
    /// # Errors
    ///
    /// [`Error::SeveralModels`].
    pub fn layout(&self) -> Result<&Layout> {
        Ok(&self.only_model()?.prepared.layout)
    }

    /// Connects: makes slots, publishes `weights` as the first version, and waits until the
    /// expected workers have loaded it. A worker that has loaded it and left in order counts.
    ///
    /// After an error nothing is left behind, and workers that had joined see that the sender has
    /// shut down. To keep them, call [`open`](Self::open) and then [`wait_for`](Sender::wait_for),
    /// which can be called again.
    ///
    /// Every model of the set needs its first weights here. With a scheme whose
    /// [first weights](crate::transport::FirstWeights) come with the first send they
    /// are compared and not sent, and the workers only have to be there.
    ///
    /// # Errors
    ///
    /// [`Error::MissingWorkers`] at the timeout, [`Error::Refused`] as soon as
    /// a worker says that a model does not fit its own,
    /// [`Error::WrongWeights`], [`Error::MissingModels`], [`Error::File`] and
    /// [`Error::FileLocked`] of the run directory, and those of the transport.
    pub fn connect(
        self,
        weights: &(impl SendSource + ?Sized),
        expect: Expect,
        timeout: Option<Duration>,
    ) -> Result<Sender> {
        let since = Instant::now();
        let until = deadline(timeout);
        let mut sender = self.open(weights, timeout)?;
        sender.wait_until(&expect, since, until)?;
        Ok(sender)
    }

    /// The first half of [`connect`](Self::connect): makes slots and publishes `weights` as the
    /// first version. Workers can join from here on. The timeout limits the wait for memory and
    /// for the address.
    ///
    /// # Errors
    ///
    /// As [`connect`](Self::connect), but those of workers.
    pub fn open(
        self,
        weights: &(impl SendSource + ?Sized),
        timeout: Option<Duration>,
    ) -> Result<Sender> {
        self.open_first(weights, SendOptions::new(), timeout)
    }

    /// As [`open`](Self::open), and the first version has this number.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open).
    pub fn open_at(
        self,
        weights: &(impl SendSource + ?Sized),
        first: Version,
        timeout: Option<Duration>,
    ) -> Result<Sender> {
        self.open_first(weights, SendOptions::new().version(first), timeout)
    }

    fn open_first(
        self,
        weights: &(impl SendSource + ?Sized),
        first: SendOptions,
        timeout: Option<Duration>,
    ) -> Result<Sender> {
        let first = match self.scheme.scheme().first_weights() {
            FirstWeights::AtConnect => Some(first),
            FirstWeights::AtFirstSend => None,
        };
        self.open_with(weights, first, timeout)
    }

    /// As [`connect`](Self::connect), with the first versions numbered.
    pub(crate) fn connect_with(
        self,
        weights: &(impl SendSource + ?Sized),
        first: SendOptions,
        expect: Expect,
        timeout: Option<Duration>,
    ) -> Result<Sender> {
        let since = Instant::now();
        let until = deadline(timeout);
        let mut sender = self.open_with(weights, Some(first), timeout)?;
        sender.wait_until(&expect, since, until)?;
        Ok(sender)
    }

    fn open_with(
        self,
        weights: &(impl SendSource + ?Sized),
        first: Option<SendOptions>,
        timeout: Option<Duration>,
    ) -> Result<Sender> {
        let until = deadline(timeout);
        match &first {
            // Compared when they are read.
            Some(_) => drop(self.are_all_there(weights.members())?),
            None => self.check(weights.members())?,
        }
        // After the comparison: wrong weights use up no epoch.
        let run = match &self.run_dir {
            Some(dir) => run_dir::next_run(dir, until)?,
            None => run_dir::anonymous_run()?,
        };
        let specs: Vec<_> = self.models.iter().map(SetupModel::spec).collect();
        let scheme = self.scheme.to_string();
        // Made first: a transport may answer for the status from its first moment on.
        let history = Arc::new(SendHistory::new(&scheme, self.at.address(), &specs));
        let transport = self.scheme.scheme().open(&Opening {
            at: &self.at,
            run,
            models: &specs,
            options: self.transfer,
            history: &history,
        })?;
        // A place that counts the runs has the last word.
        let run = transport.run().unwrap_or(run);
        // An earlier sender may have left versions, as in a store: the numbers go on from there.
        let newest = (0..specs.len()).map(|model| transport.version(model));
        history.opened(run.to_string(), newest);
        let mut sender = Sender::new(self, transport, run, history);
        if let Some(first) = first {
            // Workers join after this. The caller waits for them.
            let first = first.wait(WaitFor::Sent).timeout(timeout);
            sender.send_with(weights, &first)?;
        }
        Ok(sender)
    }

    /// Finds models without first weights before anything is opened.
    fn are_all_there<'a>(&'a self, weights: Members<'a>) -> Result<Resolved<'a>> {
        let ids = self.ids();
        let sent = resolve(weights, None, &self.models)?;
        let is_there = |index: &usize| sent.iter().any(|(one, _)| one == index);
        let missing = (0..ids.len()).filter(|index| !is_there(index));
        let missing: Vec<_> = missing.map(|index| ids[index].clone()).collect();
        match missing.is_empty() {
            true => Ok(sent),
            false => Err(Error::MissingModels { missing }),
        }
    }

    /// Compares the first weights of every model with what was set up.
    pub(crate) fn check(&self, weights: Members<'_>) -> Result<()> {
        let sent = self.are_all_there(weights)?;
        sent.iter().try_for_each(|(index, source)| {
            publish::check(&self.models[*index].prepared, *source, false)
        })
    }

    /// Replaces a model's source. All other settings stay.
    pub(crate) fn replacing(mut self, model: &str, source: &dyn WeightExtractor) -> Result<Self> {
        // The cast belongs to the setup, and so to the new source as well.
        let mut new = SetupModel::new(model, source)?.cast(self.cast)?;
        for old in &mut self.models {
            if old.prepared.id == new.prepared.id {
                new.source = old.source.take();
                *old = new;
                break;
            }
        }
        Ok(self)
    }

    /// Releases the endpoint of this setup, such as a port, even if its scheme lives on.
    pub(crate) fn give_up(self) {
        self.scheme.scheme().release_endpoint(&self.at);
    }

    /// Whether a model of that name was set up.
    pub(crate) fn has(&self, model: &str) -> bool {
        self.models
            .iter()
            .any(|one| one.prepared.id.as_str() == model)
    }

    pub(crate) fn only_model(&self) -> Result<&SetupModel> {
        match &self.models[..] {
            [one] => Ok(one),
            _ => Err(Error::SeveralModels { known: self.ids() }),
        }
    }

    /// The first model's name, for errors about the set.
    pub(crate) fn name(&self) -> ModelId {
        self.models[0].prepared.id.clone()
    }

    fn ids(&self) -> Vec<ModelId> {
        self.models
            .iter()
            .map(|model| model.prepared.id.clone())
            .collect()
    }

    /// Allocates the endpoint again, after a setting that it depends on has changed.
    fn placed(mut self) -> Result<Self> {
        if self.run_dir.is_some() && !self.scheme.capabilities().restarts {
            return Err(Error::unsupported(
                "finding a restarted trainer by its run directory",
                &self.scheme,
            ));
        }
        self.at = self
            .scheme
            .scheme()
            .allocate_endpoint(&self.ids(), self.run_dir.as_deref())?;
        Ok(self)
    }
}

impl std::fmt::Debug for SenderSetup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SenderSetup")
            .field("models", &self.ids())
            .field("scheme", &self.scheme)
            .field("at", &self.at)
            .field("run_dir", &self.run_dir)
            .finish_non_exhaustive()
    }
}
