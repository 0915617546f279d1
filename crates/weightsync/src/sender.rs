//! The trainer's end: send, report, lend a slot.

use std::sync::{Mutex, Weak};
use std::time::{Duration, Instant};

use weightsync_core::{Digest, Layout, ModelId, Run, Version, WorkerId};

use crate::error::{Error, Result};
use crate::extract::WeightExtractor;
use crate::init_info::InitInfo;
use crate::options::SendOptions;
use crate::pending::{Flight, Handle, PendingSend};
use crate::publish::{self, Prepared};
use crate::report::{Report, WorkerStatus};
use crate::scheme::AnyScheme;
use crate::send_source::{Members, Resolved, SendSource, resolve};
use crate::setup::{Expect, Pending, SenderSetup};
use crate::snapshot::Snapshot;
use crate::transport::{
    Capabilities, Deadline, FirstWeights, Outstanding, SenderTransport, Staging, Targets,
};

/// The trainer's end of connected models.
///
/// Dropping it shuts it down: workers are told, keep what they hold, and
/// nothing of it is left in the system.
#[derive(Debug)]
pub struct Sender {
    setup: SenderSetup,
    transport: Box<dyn SenderTransport>,
    run: Run,
    /// Asynchronous sends that may not be settled yet, oldest first.
    flying: Vec<PendingSend>,
    /// All that somebody may still ask about, oldest first.
    handed: Vec<Weak<Handle>>,
    owner: u32,
}

/// How long one of several asynchronous sends is waited for before the others are
/// looked at.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// The tensors a partial update carried.
type Carried = Option<Vec<String>>;

impl Sender {
    pub(crate) fn new(setup: SenderSetup, transport: Box<dyn SenderTransport>, run: Run) -> Self {
        Self {
            setup,
            transport,
            run,
            flying: Vec::new(),
            handed: Vec::new(),
            owner: std::process::id(),
        }
    }

    /// Publishes the weights as the next version and waits until every worker
    /// has loaded it, or has a line in the report that says why not.
    ///
    /// What is sent is one model's weights, a [`Set`](crate::Set) of several, or
    /// those [`Registered`](crate::Registered) before. The sources are read
    /// during the call and at no other time.
    ///
    /// # Errors
    ///
    /// [`Error::WrongWeights`] names every tensor that is not as it was set up,
    /// before room is waited for. [`Error::AllSlotsPinned`]
    /// names the workers that hold every slot. After these, and whatever a
    /// source objects, nothing was published and the old versions serve on.
    ///
    /// One failure can come later: the operating system may refuse the wait for
    /// the workers. Then the new version is live, as [`version`](Self::version)
    /// says, and only what became of it is unknown.
    pub fn send(&mut self, weights: &(impl SendSource + ?Sized)) -> Result<Report> {
        self.send_with(weights, &SendOptions::new())
    }

    /// As [`send`](Self::send), to the workers, as far and as long as the
    /// options say.
    ///
    /// # Errors
    ///
    /// As [`send`](Self::send), and [`Error::Unsupported`] for what the scheme
    /// cannot do.
    pub fn send_with(
        &mut self,
        weights: &(impl SendSource + ?Sized),
        options: &SendOptions,
    ) -> Result<Report> {
        let (since, until) = self.times(options);
        let flight = self.publish(weights.members(), options, since, until)?;
        flight.finish(options.wait, until)
    }

    /// Publishes the weights and returns as soon as they have been read: the
    /// trainer may change them, and wait for the workers later. The options'
    /// deadline is for what has to make way for this send, for room, and for room
    /// in the queues of workers that are to get every version.
    ///
    /// # Errors
    ///
    /// As [`send_with`](Self::send_with); [`Error::SendPending`] while as many
    /// sends are on their way as [`SenderSetup::pending`] allows.
    pub fn send_async(
        &mut self,
        weights: &(impl SendSource + ?Sized),
        options: &SendOptions,
    ) -> Result<PendingSend> {
        let (since, until) = self.times(options);
        self.make_way(until)?;
        let flight = self.publish(weights.members(), options, since, until)?;
        let pending = PendingSend::new(flight, options.wait);
        self.flying.push(pending.clone());
        self.handed.push(pending.downgrade());
        Ok(pending)
    }

    /// Sends different weights of one model to different workers, and changes
    /// only them. Workers that are given the same source share one version and
    /// one pass over it; every source becomes a version with a number of its
    /// own. The report has a line for each worker.
    ///
    /// A worker that joins later under another number runs what was sent to all
    /// last.
    ///
    /// # Errors
    ///
    /// As [`send_with`](Self::send_with), [`Error::SameWorkerTwice`], and
    /// [`Error::EmptySet`] if no worker is named. All sources are compared, and
    /// a number that several of them would have is refused, before the first is
    /// published. A source that fails while it is read, and missing room, can
    /// come later: what was published before such an error stays.
    pub fn send_each<'a>(
        &mut self,
        weights: impl IntoIterator<Item = (u32, &'a dyn WeightExtractor)>,
        options: &SendOptions,
    ) -> Result<Report> {
        let mut groups: Vec<(&'a dyn WeightExtractor, Vec<u32>)> = Vec::new();
        for (worker, source) in weights {
            if groups.iter().any(|(_, known)| known.contains(&worker)) {
                return Err(Error::SameWorkerTwice {
                    worker: WorkerId(worker),
                });
            }
            match groups
                .iter_mut()
                .find(|(one, _)| std::ptr::addr_eq(*one, source))
            {
                Some((_, workers)) => workers.push(worker),
                None => groups.push((source, vec![worker])),
            }
        }
        if groups.is_empty() {
            return Err(Error::EmptySet);
        }
        let (since, until) = self.times(options);
        self.check_each(&groups, options)?;
        let mut all: Option<Flight> = None;
        for (source, workers) in groups {
            let options = options.clone().workers(workers);
            let one = self.publish(Members::One(source), &options, since, until)?;
            match &mut all {
                None => all = Some(one),
                Some(all) => {
                    all.outstanding.extend(one.outstanding);
                    all.versions.extend(one.versions);
                    all.bytes += one.bytes;
                    all.copied = one.copied;
                    if let (Some(all), Some(one)) = (&mut all.partial, one.partial) {
                        let new: Vec<_> =
                            one.into_iter().filter(|one| !all.contains(one)).collect();
                        all.extend(new);
                    }
                }
            }
        }
        let all = all.unwrap_or_else(|| unreachable!("there is a group"));
        all.finish(options.wait, until)
    }

    /// Finds whatever can be wrong with sources for several workers before
    /// anything is published.
    fn check_each(
        &self,
        groups: &[(&dyn WeightExtractor, Vec<u32>)],
        options: &SendOptions,
    ) -> Result<()> {
        self.need("a send to some workers", |can| can.subsets)?;
        if let Some(version) = options.version
            && groups.len() > 1
        {
            return Err(Error::VersionNotNewer {
                newest: version,
                got: version,
            });
        }
        for (source, workers) in groups {
            let members = Members::One(*source);
            let models = &self.setup.models;
            for (index, source) in resolve(members, options.model.as_deref(), models)? {
                let prepared = &self.setup.models[index].prepared;
                publish::check(prepared, source, options.partial)?;
                if options.partial {
                    let workers = workers.iter().copied().map(WorkerId);
                    let targets = Targets::Workers(workers.collect());
                    base(&self.setup, &*self.transport, index, &targets)?;
                }
            }
        }
        Ok(())
    }

    /// Sends to the workers of each device the weights that are meant for it:
    /// one pass and one version for each distinct device. Without a worker
    /// nothing is sent, and the report is empty.
    ///
    /// A worker that joins later runs what was sent to all last, whatever its
    /// device.
    ///
    /// # Errors
    ///
    /// As [`send_each`](Self::send_each).
    pub fn send_by_device<'a>(
        &mut self,
        mut weights: impl FnMut(&str) -> &'a dyn WeightExtractor,
        options: &SendOptions,
    ) -> Result<Report> {
        self.need("a send to some workers", |can| can.subsets)?;
        let workers = self.workers();
        if workers.is_empty() {
            return Ok(Report {
                versions: Vec::new(),
                bytes: 0,
                partial: None,
                copied: Duration::ZERO,
                took: Duration::ZERO,
                level: options.wait,
                workers: Vec::new(),
            });
        }
        let mut devices: Vec<(&str, &'a dyn WeightExtractor)> = Vec::new();
        let each = workers.iter().map(|status| {
            let device = status.device.as_str();
            let known = devices.iter().find(|(one, _)| *one == device);
            let source = known.map(|(_, source)| *source).unwrap_or_else(|| {
                let source = weights(device);
                devices.push((device, source));
                source
            });
            (status.worker.0, source)
        });
        let each: Vec<_> = each.collect();
        self.send_each(each, options)
    }

    /// Lends room to write the next version into: the model's own extraction is
    /// then the only pass over memory. For a sender of several models, the
    /// first.
    ///
    /// # Errors
    ///
    /// As [`send`](Self::send), and [`Error::Unsupported`].
    pub fn loan(&mut self) -> Result<Loan<'_>> {
        self.loan_of(0)
    }

    /// As [`loan`](Self::loan), for one of several models.
    ///
    /// # Errors
    ///
    /// As [`loan`](Self::loan), and [`Error::NoSuchModel`].
    pub fn loan_model(&mut self, model: &str) -> Result<Loan<'_>> {
        let index = self.index_of(model)?;
        self.loan_of(index)
    }

    fn loan_of(&mut self, model: usize) -> Result<Loan<'_>> {
        self.need("lending slots", |can| can.loan)?;
        let since = Instant::now();
        let deadline = self.setup.deadline;
        let staging = self
            .transport
            .stage(&[model], since.checked_add(deadline))?;
        Ok(Loan {
            staging,
            model,
            prepared: &self.setup.models[model].prepared,
            scheme: &self.setup.scheme,
            deadline,
            since,
        })
    }

    /// The version published last: of the first model, if there are several.
    pub fn version(&self) -> Version {
        self.transport.version(0)
    }

    /// The version of a model that was published last.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchModel`].
    pub fn version_of(&self, model: &str) -> Result<Version> {
        Ok(self.transport.version(self.index_of(model)?))
    }

    /// Every model with the version published last.
    pub(crate) fn newest(&self) -> impl Iterator<Item = (ModelId, Version)> {
        let models = self.setup.models.iter().enumerate();
        models.map(|(index, model)| (model.prepared.id.clone(), self.transport.version(index)))
    }

    /// The run this sender belongs to.
    pub fn run(&self) -> Run {
        self.run
    }

    /// The models, in the set's order.
    pub fn models(&self) -> impl ExactSizeIterator<Item = &ModelId> {
        self.setup.models.iter().map(|model| &model.prepared.id)
    }

    /// The tensors as workers see them: of the first model, if there are
    /// several.
    pub fn layout(&self) -> &Layout {
        self.setup.layout()
    }

    /// What further workers need to join.
    pub fn init_info(&self) -> InitInfo {
        self.setup.init_info()
    }

    /// Every connected worker with the versions it has loaded.
    pub fn workers(&self) -> Vec<WorkerStatus> {
        self.transport.workers()
    }

    /// Waits until these workers are there and have loaded something, as
    /// [`connect`](SenderSetup::connect) does: for those that join later. Where the
    /// [first weights](crate::transport::FirstWeights) come with the first send, they
    /// only have to be there.
    ///
    /// # Errors
    ///
    /// [`Error::MissingWorkers`] at the deadline, [`Error::Refused`] as soon as one
    /// of them says that a model does not fit its own.
    pub fn wait_for(&mut self, expect: &Expect, deadline: Duration) -> Result<()> {
        let since = Instant::now();
        self.wait_until(expect, since, since.checked_add(deadline))
    }

    pub(crate) fn wait_until(
        &mut self,
        expect: &Expect,
        since: Instant,
        until: Deadline,
    ) -> Result<()> {
        let first = self.setup.scheme.scheme().first_weights();
        let ready = |workers: &[WorkerStatus]| -> Vec<WorkerId> {
            let counts =
                |worker: &&WorkerStatus| worker.is_ready() || first == FirstWeights::AtFirstSend;
            let ready = workers.iter().filter(counts);
            ready.map(|worker| worker.worker).collect()
        };
        // As they were when it was enough: one that leaves right after has been
        // there.
        let mut joined = Vec::new();
        let there = self
            .transport
            .wait_workers(until, &mut |workers, rejected| {
                joined = ready(workers);
                let hopeless = rejected.iter().any(|worker| expect.includes(*worker));
                hopeless || expect.met_by(&joined)
            })?;
        // A scheme without workers has them all.
        if expect.met_by(&joined) || (there && !self.has_workers()) {
            return Ok(());
        }
        let model = self.setup.name();
        // A worker that was not asked for and does not fit costs nobody else.
        let mut refusals = self.transport.take_rejected();
        refusals.retain(|(worker, _)| expect.includes(*worker));
        if !refusals.is_empty() {
            return Err(Error::Refused { model, refusals });
        }
        Err(Error::MissingWorkers {
            model,
            expected: expect.len(),
            missing: expect.missing(&joined),
            joined,
            waited: since.elapsed(),
        })
    }

    /// Holds workers at the versions they have: sends pass them over, with a
    /// line that says so, until they are [released](Self::release). It is the
    /// number that is held: a worker that comes back under it gets what it had.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`].
    pub fn hold(&mut self, workers: impl IntoIterator<Item = u32>) -> Result<()> {
        self.set_held(workers, true)
    }

    /// Lets held workers go on; they get the newest version meant for them at
    /// once.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`].
    pub fn release(&mut self, workers: impl IntoIterator<Item = u32>) -> Result<()> {
        self.set_held(workers, false)
    }

    fn set_held(&mut self, workers: impl IntoIterator<Item = u32>, held: bool) -> Result<()> {
        self.need("holding workers at a version", |can| can.hold)?;
        let workers: Vec<_> = workers.into_iter().map(WorkerId).collect();
        self.transport.hold(&workers, held)
    }

    /// The sender's own view of what was sent to all last, to save, compare or
    /// send again later: of the first model, if there are several.
    ///
    /// # Errors
    ///
    /// In a forked child; [`Error::Unsupported`].
    pub fn snapshot(&self) -> Result<Snapshot> {
        self.own_view(0)
    }

    /// As [`snapshot`](Self::snapshot), for one of several models.
    ///
    /// # Errors
    ///
    /// As [`snapshot`](Self::snapshot), and [`Error::NoSuchModel`].
    pub fn snapshot_of(&self, model: &str) -> Result<Snapshot> {
        self.own_view(self.index_of(model)?)
    }

    /// An older version of a model, if it is still kept (see
    /// [`SenderSetup::history`]). To go back to it, send it: it becomes a new
    /// version of the same digest.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchVersion`], [`Error::NoSuchModel`],
    /// [`Error::Unsupported`].
    pub fn old_snapshot(&self, model: &str, version: Version) -> Result<Snapshot> {
        let index = self.index_of(model)?;
        let found = self.transport.old_snapshot(index, version);
        let found = found.map_err(|error| error.by(&self.setup.scheme))?;
        found.ok_or_else(|| Error::NoSuchVersion {
            model: self.setup.models[index].prepared.id.clone(),
            asked: version,
            known: vec![self.transport.version(index)],
        })
    }

    /// Makes the digest of the version that was sent to all last, and stores it
    /// where workers find it: of the first model, if there are several.
    ///
    /// # Errors
    ///
    /// As [`snapshot`](Self::snapshot).
    pub fn digest(&self) -> Result<Digest> {
        self.digest_at(0)
    }

    /// As [`digest`](Self::digest), of one of several models.
    ///
    /// # Errors
    ///
    /// As [`snapshot_of`](Self::snapshot_of).
    pub fn digest_of(&self, model: &str) -> Result<Digest> {
        self.digest_at(self.index_of(model)?)
    }

    fn digest_at(&self, model: usize) -> Result<Digest> {
        let snapshot = self.own_view(model)?;
        let digest = snapshot.digest();
        snapshot.publish_digest(digest);
        Ok(digest)
    }

    /// Shuts down: what dropping it does, by name.
    pub fn shutdown(self) {}

    /// Whether the scheme has workers to wait for.
    fn has_workers(&self) -> bool {
        self.setup.scheme.capabilities().weights
    }

    fn own_view(&self, model: usize) -> Result<Snapshot> {
        let held = self.transport.snapshot(model);
        let held = held.map_err(|error| error.by(&self.setup.scheme))?;
        held.ok_or_else(|| match self.setup.scheme.scheme().first_weights() {
            // Nothing was sent yet.
            FirstWeights::AtFirstSend => Error::NothingToKeep {
                model: self.setup.models[model].prepared.id.clone(),
            },
            // `connect` publishes before it returns a sender.
            FirstWeights::AtConnect => Error::Unsupported {
                what: "reading back what was sent",
                scheme: self.setup.scheme.to_string(),
            },
        })
    }

    fn index_of(&self, model: &str) -> Result<usize> {
        let found = self.models().position(|id| id.as_str() == model);
        found.ok_or_else(|| Error::NoSuchModel {
            model: model.into(),
            known: self.models().cloned().collect(),
        })
    }

    fn times(&self, options: &SendOptions) -> (Instant, Deadline) {
        let since = Instant::now();
        let deadline = options.deadline.unwrap_or(self.setup.deadline);
        (since, since.checked_add(deadline))
    }

    fn need(&self, what: &'static str, can: impl FnOnce(&Capabilities) -> bool) -> Result<()> {
        need(&self.setup.scheme, what, can)
    }

    /// Makes way for one more asynchronous send, or says that one is pending.
    fn make_way(&mut self, until: Deadline) -> Result<()> {
        let (allowed, wait) = match self.setup.pending {
            Pending::Refuse => (1, false),
            Pending::Queue(bound) => (usize::from(bound.max(1)), true),
        };
        loop {
            self.forget_settled()?;
            let Some(oldest) = self.flying.first() else {
                return Ok(());
            };
            if self.flying.len() < allowed {
                return Ok(());
            }
            let left = until.map(|at| at.saturating_duration_since(Instant::now()));
            if !wait || left.is_some_and(|left| left.is_zero()) {
                let version = oldest.version();
                return Err(Error::SendPending { version, allowed });
            }
            // Any of them makes way, and one at a time can be waited for.
            let slice = match self.flying.len() {
                1 => left,
                _ => Some(left.map_or(LOOK_AGAIN, |left| left.min(LOOK_AGAIN))),
            };
            oldest.wait(slice)?;
        }
    }

    /// Keeps the asynchronous sends that are still on their way.
    fn forget_settled(&mut self) -> Result<()> {
        let mut failed = None;
        self.flying.retain(|one| match one.is_settled() {
            Ok(settled) => !settled,
            Err(error) => {
                failed = Some(error);
                true
            }
        });
        self.handed.retain(|one| one.strong_count() > 0);
        failed.map_or(Ok(()), Err)
    }

    /// Publishes in one step what is to be sent.
    fn publish(
        &mut self,
        members: Members<'_>,
        options: &SendOptions,
        since: Instant,
        until: Deadline,
    ) -> Result<Flight> {
        if options.targets != Targets::All {
            self.need("a send to some workers", |can| can.subsets)?;
        }
        let models = &self.setup.models;
        let resolved = resolve(members, options.model.as_deref(), models)?;
        if resolved.len() > 1 {
            self.need("several models at once", |can| can.sets)?;
        }
        let bytes = resolved.iter().map(|(index, _)| {
            let layout = &models[*index].prepared.layout;
            layout.payload_bytes()
        });
        let bytes = bytes.sum();
        let transport = &mut *self.transport;
        let (outstanding, partial) =
            stage_and_publish(&self.setup, transport, &resolved, options, until)?;
        let versions = outstanding.versions().iter();
        Ok(Flight {
            versions: versions
                .map(|(index, version)| (models[*index].prepared.id.clone(), *version))
                .collect(),
            outstanding: vec![outstanding],
            bytes,
            partial,
            since,
            copied: since.elapsed(),
            deadline: until,
            settled: Mutex::new(Vec::new()),
        })
    }
}

/// What is known of asynchronous sends by now is what their handles say from here
/// on; they keep nothing else of it.
impl Drop for Sender {
    fn drop(&mut self) {
        // In a forked child a thread that is not there may hold their locks.
        if self.owner != std::process::id() {
            return;
        }
        for one in self.handed.iter().filter_map(Weak::upgrade) {
            one.close();
        }
    }
}

/// Writes each model into its room and makes all of them live in one step.
fn stage_and_publish(
    setup: &SenderSetup,
    transport: &mut dyn SenderTransport,
    resolved: &Resolved<'_>,
    options: &SendOptions,
    until: Deadline,
) -> Result<(Box<dyn Outstanding>, Carried)> {
    let indices: Vec<usize> = resolved.iter().map(|(index, _)| *index).collect();
    let mut bases = Vec::new();
    if options.partial {
        for index in &indices {
            bases.push(base(setup, transport, *index, &options.targets)?);
        }
    }
    // The first is compared when it is read; no other may be found wrong
    // only once there is room.
    for (index, weights) in &resolved[1..] {
        let prepared = &setup.models[*index].prepared;
        publish::check(prepared, *weights, options.partial)?;
    }
    let mut carried: Carried = None;
    let mut transport = Some(transport);
    let mut staging: Option<Box<dyn Staging + '_>> = None;
    for (place, (index, weights)) in resolved.iter().enumerate() {
        let prepared = &setup.models[*index].prepared;
        let copy = setup.copy;
        let mut take = |sources: &[crate::transport::Source<'_>]| {
            // The room for all models, once the first is found to be right.
            if let Some(transport) = transport.take() {
                staging = Some(transport.stage(&indices, until)?);
            }
            match &mut staging {
                Some(staging) => staging.write(*index, sources, copy),
                None => Ok(()),
            }
        };
        match bases.get(place) {
            None => publish::whole(prepared, *weights, &mut take)?,
            Some(base) => {
                let names = publish::partial(prepared, *weights, base, &mut take)?;
                carried.get_or_insert_default().extend(names);
            }
        }
    }
    drop(bases);
    let Some(mut staging) = staging else {
        return Err(Error::EmptySet);
    };
    if let Some(version) = options.version {
        for index in &indices {
            staging.number(*index, version)?;
        }
    }
    for index in &indices {
        let id = &setup.models[*index].prepared.id;
        let mut numbers = options.numbers.iter();
        if let Some((_, version)) = numbers.find(|(model, _)| model == id) {
            staging.number(*index, *version)?;
        }
    }
    Ok((staging.publish(&options.targets)?, carried))
}

/// The version that a partial update keeps the rest of.
fn base(
    setup: &SenderSetup,
    transport: &dyn SenderTransport,
    model: usize,
    targets: &Targets,
) -> Result<Snapshot> {
    let base = transport.snapshot_for(model, targets);
    let base = base.map_err(|error| error.by(&setup.scheme))?;
    base.ok_or_else(|| Error::NothingToKeep {
        model: setup.models[model].prepared.id.clone(),
    })
}

/// Room lent to the trainer's own extraction; see [`Sender::loan`].
///
/// Dropped without [`publish`](Self::publish), nothing has happened.
#[derive(Debug)]
pub struct Loan<'a> {
    staging: Box<dyn Staging + 'a>,
    model: usize,
    prepared: &'a Prepared,
    scheme: &'a AnyScheme,
    deadline: Duration,
    since: Instant,
}

impl Loan<'_> {
    /// The tensors to write.
    pub fn layout(&self) -> &Layout {
        &self.prepared.layout
    }

    /// One tensor's place: contiguous, row-major, little-endian. It holds bytes
    /// of some older version at first: write all of it.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchTensor`].
    pub fn tensor_mut(&mut self, name: &str) -> Result<&mut [u8]> {
        let layout = &self.prepared.layout;
        let index = layout.index_of(name).ok_or_else(|| Error::NoSuchTensor {
            name: name.into(),
            known: layout
                .tensors()
                .iter()
                .map(|tensor| tensor.name.clone())
                .collect(),
        })?;
        Ok(self.staging.tensor_mut(self.model, index))
    }

    /// Every tensor's place in layout order, to be written in any order and
    /// from any number of threads.
    pub fn tensors_mut(&mut self) -> Vec<&mut [u8]> {
        self.staging.tensors_mut(self.model)
    }

    /// Makes what was written the next version and waits until every worker has
    /// loaded it, or has a line in the report that says why not.
    ///
    /// # Errors
    ///
    /// Those of the memory. As after a [`send`](Sender::send), the version is
    /// live all the same if it was the wait for the workers that failed.
    pub fn publish(self) -> Result<Report> {
        self.publish_with(&SendOptions::new())
    }

    /// As [`publish`](Self::publish), to the workers, as far and as long as the
    /// options say; the time since the room was lent counts.
    ///
    /// # Errors
    ///
    /// As [`publish`](Self::publish), and, before anything is published,
    /// [`Error::Unsupported`] for what the scheme cannot do,
    /// [`Error::OtherModel`] if the options name another model, and
    /// [`Error::WholeLoan`] if they say that it is a part.
    pub fn publish_with(mut self, options: &SendOptions) -> Result<Report> {
        let until = self
            .since
            .checked_add(options.deadline.unwrap_or(self.deadline));
        self.check(options)?;
        if let Some(version) = options.version {
            self.staging.number(self.model, version)?;
        }
        let outstanding = self.staging.publish(&options.targets)?;
        let version = outstanding
            .versions()
            .first()
            .map_or(Version::NONE, |(_, version)| *version);
        let flight = Flight {
            versions: vec![(self.prepared.id.clone(), version)],
            outstanding: vec![outstanding],
            bytes: self.prepared.layout.payload_bytes(),
            partial: None,
            since: self.since,
            copied: self.since.elapsed(),
            deadline: until,
            settled: Mutex::new(Vec::new()),
        };
        flight.finish(options.wait, until)
    }

    fn check(&self, options: &SendOptions) -> Result<()> {
        if options.targets != Targets::All {
            need(self.scheme, "a send to some workers", |can| can.subsets)?;
        }
        let id = &self.prepared.id;
        if let Some(named) = &options.model
            && named != id.as_str()
        {
            return Err(Error::OtherModel {
                named: named.clone(),
                got: vec![id.as_str().into()],
            });
        }
        match options.partial {
            true => Err(Error::WholeLoan { model: id.clone() }),
            false => Ok(()),
        }
    }
}

/// Refuses what the scheme cannot do.
fn need(
    scheme: &AnyScheme,
    what: &'static str,
    can: impl FnOnce(&Capabilities) -> bool,
) -> Result<()> {
    if can(&scheme.capabilities()) {
        return Ok(());
    }
    Err(Error::Unsupported {
        what,
        scheme: scheme.to_string(),
    })
}
