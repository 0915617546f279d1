//! The transport of the local schemes: slots and lanes in shared memory.

use std::path::Path;
use std::sync::Arc;

use weightsync_core::{ModelId, Run, Version, WorkerId};
use weightsync_mem::{
    AttachOptions, CopyOptions, Deadline, Delivery, Guests, Listener, Publication, Reader, Resume,
    SegmentOptions, Source, Taken, Waiter, Want, Writer,
};

use crate::attributes::Attributes;
use crate::digest::DigestThread;
use crate::error::{Error, Result};
use crate::report::{WorkerReport, WorkerStatus};
use crate::run_dir;
use crate::set::{Member, SetSnapshot};
use crate::setup::DigestPolicy;
use crate::snapshot::Snapshot;
use crate::transport::copies::Copies;
use crate::transport::{
    Capabilities, Endpoint, Interrupter, Joining, Level, ModelSpec, Opening, Outstanding, Pull,
    ReceiverTransport, SenderTransport, Staging, Targets,
};

/// What the local schemes have in common.
pub(crate) struct Memory;

impl Memory {
    pub(crate) const CAPABILITIES: Capabilities = Capabilities {
        weights: true,
        push: true,
        sets: true,
        subsets: true,
        hold: true,
        pull: true,
        every_version: true,
        loan: true,
        restarts: true,
        death: true,
        outlives: true,
    };

    pub(crate) fn place(models: &[ModelId], run_dir: Option<&Path>) -> Result<Endpoint> {
        Endpoint::fresh(models, run_dir)
    }

    pub(crate) fn open(opening: &Opening<'_>) -> Result<Box<dyn SenderTransport>> {
        let at = opening.at;
        let listener = match at.lookup() {
            None => Listener::at(at.address())?,
            Some(file) => {
                let ids = opening.models.iter().map(|model| model.id.clone());
                run_dir::listen(file, &ids.collect::<Vec<_>>())?
            }
        };
        Ok(Box::new(Segment::open(opening, listener)?))
    }

    pub(crate) fn join(
        at: &Endpoint,
        joining: &Joining,
        (delivery, own_copy): (Delivery, bool),
        deadline: Deadline,
    ) -> Result<Box<dyn ReceiverTransport>> {
        let options = AttachOptions {
            address: match at.lookup() {
                None => at.address().into(),
                Some(file) => format!("the address in {}", file.display()),
            },
            secret: *at.secret(),
            worker: joining.worker,
            seen: joining.seen,
            models: Some(joining.wanted.clone()),
            delivery,
            device: joining.device.clone(),
            wait: joining.wait,
            instance: 0,
            resume: Resume::default(),
        };
        let reader = match at.lookup() {
            None => Reader::attach(&options, deadline)?,
            Some(file) => Reader::attach_by(&options, deadline, || run_dir::look_up(file))?,
        };
        Ok(Box::new(Attached::new(reader, joining, own_copy)?))
    }
}

/// The trainer's end of models in shared memory.
///
/// It is what the local schemes have, and what a transport has that carries
/// versions on to other hosts: their workers join as [guests](Self::guests), and
/// are then told, held, waited for and reported like those of this host.
#[derive(Debug)]
pub struct Segment {
    writer: Writer,
    digest: Option<DigestThread>,
    models: Vec<(ModelId, Arc<Attributes>)>,
}

impl Segment {
    /// Makes it, for the workers of this host that come to `listener` with the
    /// endpoint's secret.
    ///
    /// # Errors
    ///
    /// If memory, sockets or threads are refused.
    pub fn open(opening: &Opening<'_>, listener: Listener) -> Result<Self> {
        let specs = Self::specs(opening.models)?;
        let options = SegmentOptions {
            slots: opening.options.slots,
            max_slots: opening.options.max_slots,
            history: opening.options.history,
            wait: opening.options.wait,
        };
        let secret = *opening.at.secret();
        let writer = Writer::create_on(listener, secret, opening.run, &specs, options)?;
        let models = opening
            .models
            .iter()
            .map(|model| (model.id.clone(), Arc::new(model.attributes.clone())));
        let digest = match opening.options.digest {
            DigestPolicy::OnRequest => None,
            DigestPolicy::Background => Some(DigestThread::start()?),
        };
        Ok(Self {
            writer,
            digest,
            models: models.collect(),
        })
    }

    /// The models as segments know them: attributes are notes there.
    ///
    /// # Errors
    ///
    /// [`Error::Attributes`] if attributes cannot be encoded.
    pub fn specs(models: &[ModelSpec]) -> Result<Vec<weightsync_mem::ModelSpec>> {
        let specs = models.iter().map(|model| {
            Ok(weightsync_mem::ModelSpec {
                layout: model.layout.clone(),
                note: model.attributes.encode()?,
            })
        });
        specs.collect()
    }

    /// Where workers of other hosts join.
    pub fn guests(&self) -> Guests {
        Guests::of(&self.writer)
    }

    fn lent(&self, model: usize, held: weightsync_mem::Snapshot) -> Snapshot {
        let (id, attributes) = &self.models[model];
        Snapshot::of_slot(id.clone(), attributes.clone(), held)
    }
}

impl SenderTransport for Segment {
    fn stage(&mut self, models: &[usize], deadline: Deadline) -> Result<Box<dyn Staging + '_>> {
        let waiter = self.writer.waiter();
        let (writer, named) = (&mut self.writer, &self.models);
        let slots = writer.stage(models, deadline);
        Ok(Box::new(Slots {
            slots: slots.map_err(|error| by_name(named, error))?,
            models: named,
            waiter,
            digest: self.digest.as_ref(),
        }))
    }

    fn version(&self, model: usize) -> Version {
        self.writer.version(model)
    }

    fn workers(&self) -> Vec<WorkerStatus> {
        status(self.writer.readers())
    }

    fn wait_workers(
        &mut self,
        deadline: Deadline,
        enough: &mut dyn FnMut(&[WorkerStatus], &[WorkerId]) -> bool,
    ) -> Result<bool> {
        Ok(self.writer.wait_readers(deadline, |readers, rejected| {
            enough(&status(readers.to_vec()), rejected)
        })?)
    }

    fn take_rejected(&mut self) -> Vec<(WorkerId, String)> {
        self.writer.take_rejected()
    }

    fn snapshot(&self, model: usize) -> Result<Option<Snapshot>> {
        let held = self.writer.snapshot(model)?;
        Ok(held.map(|held| self.lent(model, held)))
    }

    fn snapshot_for(&self, model: usize, targets: &Targets) -> Result<Option<Snapshot>> {
        let held = self.writer.snapshot_for(model, &targets.into());
        let held = held.map_err(|error| by_name(&self.models, error))?;
        Ok(held.map(|held| self.lent(model, held)))
    }

    fn old_snapshot(&self, model: usize, version: Version) -> Result<Option<Snapshot>> {
        let Some(held) = self.writer.old_snapshot(model, version)? else {
            return Err(Error::NoSuchVersion {
                model: self.models[model].0.clone(),
                asked: version,
                known: self.writer.kept(model)?,
            });
        };
        Ok(Some(self.lent(model, held)))
    }

    fn hold(&mut self, workers: &[WorkerId], hold: bool) -> Result<()> {
        match hold {
            true => self.writer.hold(workers)?,
            false => self.writer.release(workers)?,
        }
        Ok(())
    }
}

#[derive(Debug)]
struct Slots<'a> {
    slots: weightsync_mem::Staging<'a>,
    models: &'a [(ModelId, Arc<Attributes>)],
    waiter: Waiter,
    digest: Option<&'a DigestThread>,
}

impl Staging for Slots<'_> {
    fn tensor_mut(&mut self, model: usize, index: usize) -> &mut [u8] {
        self.slots.tensor_mut(model, index)
    }

    fn tensors_mut(&mut self, model: usize) -> Vec<&mut [u8]> {
        self.slots.tensors_mut(model)
    }

    fn write(&mut self, model: usize, sources: &[Source<'_>], options: CopyOptions) -> Result<()> {
        Ok(self.slots.write(model, sources, options)?)
    }

    fn number(&mut self, model: usize, version: Version) -> Result<()> {
        Ok(self.slots.number(model, version)?)
    }

    fn publish(self: Box<Self>, targets: &Targets) -> Result<Box<dyn Outstanding>> {
        let Self {
            slots,
            models,
            waiter,
            digest,
        } = *self;
        let publication = slots.publish(&targets.into());
        let publication = publication.map_err(|error| by_name(models, error))?;
        if let Some(thread) = digest {
            order_digests(&waiter, &publication, thread);
        }
        Ok(Box::new(Published {
            publication,
            waiter,
        }))
    }
}

#[derive(Debug)]
struct Published {
    publication: Publication,
    waiter: Waiter,
}

impl Outstanding for Published {
    fn versions(&self) -> &[(usize, Version)] {
        &self.publication.versions
    }

    fn settle(&self, level: Level, deadline: Deadline) -> Result<Vec<WorkerReport>> {
        let lines = self
            .waiter
            .settle(&self.publication, level.into(), deadline)?;
        Ok(self.reports(lines))
    }

    fn is_settled(&self, level: Level) -> Result<bool> {
        Ok(self.waiter.is_settled(&self.publication, level.into())?)
    }

    fn decided(&self) -> Result<Vec<WorkerReport>> {
        Ok(self.reports(self.waiter.decided(&self.publication)?))
    }

    fn give_up(&self) -> Result<()> {
        Ok(self.waiter.give_up(&self.publication)?)
    }
}

impl Published {
    fn reports(&self, lines: Vec<weightsync_mem::ReaderOutcome>) -> Vec<WorkerReport> {
        let lines = lines.into_iter().map(|line| WorkerReport {
            worker: line.worker,
            pid: line.pid,
            outcome: line.outcome.into(),
            versions: of_published(line.versions, &self.publication.versions),
            current: line.current,
            after: line.after,
        });
        lines.collect()
    }
}

impl From<Level> for weightsync_mem::Level {
    fn from(level: Level) -> Self {
        match level {
            Level::Staged => Self::Staged,
            Level::Applied => Self::Applied,
        }
    }
}

/// A worker's end of models in shared memory.
#[derive(Debug)]
pub struct Attached {
    reader: Reader,
    specs: Vec<ModelSpec>,
    attributes: Vec<Arc<Attributes>>,
    /// The index of each in the sender's set.
    indices: Vec<usize>,
    /// Of each model, if what is taken is copied and its slot given back.
    copies: Option<Vec<Copies>>,
    /// What came last by a queue, which gives nothing twice. It costs a slot,
    /// unless it is a copy.
    last: Option<SetSnapshot>,
    /// What the worker said it runs, as the sender was told.
    applied: Option<Applied>,
}

/// A sequence number, and the versions by the sender's numbers of models.
type Applied = (u64, Vec<(usize, Version)>);

/// What a worker takes from one segment to another of the same run.
#[derive(Clone, Debug, Default)]
pub struct Handoff {
    resume: Resume,
    applied: Option<Applied>,
    last: Option<SetSnapshot>,
}

impl Handoff {
    /// Where its next reader goes on.
    pub fn resume(&self) -> Resume {
        self.resume
    }
}

impl Attached {
    /// A worker's end over a reader that has joined. A model that it cannot make
    /// anything of is refused there.
    ///
    /// # Errors
    ///
    /// [`Error::BadInitInfo`] if the sender has other models than the init info,
    /// [`Error::Attributes`].
    pub fn new(reader: Reader, joining: &Joining, own_copy: bool) -> Result<Self> {
        // The reader has them in the sender's order.
        let mut models: Vec<_> = reader.models().iter().collect();
        models.sort_by_key(|(index, _)| joining.wanted.iter().position(|wanted| wanted == index));
        let indices = models.iter().map(|(index, _)| *index).collect();
        let specs = models.into_iter().map(|(index, model)| {
            let id = joining.models.get(*index).ok_or_else(|| {
                Error::BadInitInfo(format!(
                    "it names {} models, and the sender has more",
                    joining.models.len()
                ))
            })?;
            Ok(ModelSpec {
                id: id.clone(),
                layout: model.layout.clone(),
                attributes: Attributes::decode(&model.note)?,
            })
        });
        let specs = specs.collect::<Result<Vec<_>>>();
        let specs = match specs {
            Ok(specs) => specs,
            Err(error) => {
                reader.refuse(None, &error.to_string())?;
                return Err(error);
            }
        };
        let attributes = specs.iter().map(|spec| Arc::new(spec.attributes.clone()));
        let copies = || specs.iter().map(|_| Copies::default()).collect();
        Ok(Self {
            attributes: attributes.collect(),
            indices,
            copies: own_copy.then(copies),
            specs,
            reader,
            last: None,
            applied: None,
        })
    }

    /// The reader below.
    pub fn reader(&self) -> &Reader {
        &self.reader
    }

    /// What has something done once nothing more will come from this segment.
    pub fn end(&self) -> weightsync_mem::End {
        self.reader.end()
    }

    /// What the worker takes with it to another segment of the same run.
    pub fn handoff(&self) -> Handoff {
        Handoff {
            resume: self.reader.resume(),
            applied: self.applied.clone(),
            last: self.last.clone(),
        }
    }

    /// Goes on where the worker was at another segment, whose reader was given
    /// the [resume](Handoff::resume): says again what it runs.
    ///
    /// # Errors
    ///
    /// Only of the operating system.
    pub fn take_over(&mut self, handoff: Handoff) -> Result<()> {
        if let Some((sequence, versions)) = &handoff.applied {
            let versions = versions.iter().copied();
            self.reader.applied_versions(*sequence, versions)?;
        }
        self.applied = handoff.applied;
        self.last = handoff.last;
        Ok(())
    }

    /// An error with the model's name instead of its number.
    fn named(&self, error: weightsync_mem::Error) -> Error {
        Error::of_memory(error, |model| {
            let place = self.indices.iter().position(|index| *index == model);
            place.map(|place| self.specs[place].id.clone())
        })
    }

    fn lent(&mut self, taken: Taken) -> SetSnapshot {
        let members = taken.members.into_iter().filter_map(|member| {
            let place = self
                .indices
                .iter()
                .position(|index| *index == member.model)?;
            let snapshot = Snapshot::of_slot(
                self.specs[place].id.clone(),
                self.attributes[place].clone(),
                member.snapshot,
            );
            let snapshot = match &mut self.copies {
                Some(copies) => copies[place].of(&snapshot),
                None => snapshot,
            };
            let changed = member.changed;
            Some((place, Member { snapshot, changed }))
        });
        let mut members: Vec<_> = members.collect();
        members.sort_by_key(|(place, _)| *place);
        let members = members.into_iter().map(|(_, member)| member);
        SetSnapshot::new(taken.sequence, members.collect())
    }
}

impl ReceiverTransport for Attached {
    fn models(&self) -> &[ModelSpec] {
        &self.specs
    }

    fn run(&self) -> Run {
        self.reader.run()
    }

    fn next(&mut self, deadline: Deadline) -> Result<Option<SetSnapshot>> {
        let taken = self
            .reader
            .next(deadline)
            .map_err(|error| self.named(error))?;
        let set = taken.map(|taken| self.lent(taken));
        if let (Delivery::Every { .. }, Some(set)) = (self.reader.delivery(), &set) {
            self.last = Some(set.clone().had_before());
        }
        Ok(set)
    }

    fn latest(&mut self) -> Result<Option<SetSnapshot>> {
        let taken = self.reader.latest()?;
        Ok(match self.reader.delivery() {
            Delivery::Every { .. } => self.last.clone(),
            Delivery::Newest | Delivery::Asked => taken.map(|taken| self.lent(taken)),
        })
    }

    fn pull(
        &mut self,
        model: usize,
        pull: Pull,
        deadline: Deadline,
    ) -> Result<Option<SetSnapshot>> {
        let model = self.indices[model];
        let want = match pull {
            Pull::Newest => Want::Newest,
            Pull::AtLeast(version) => Want::AtLeast { model, version },
            Pull::Exactly(version) => Want::Exactly { model, version },
        };
        self.reader.ask(want)?;
        let answer = self.reader.answer(deadline);
        if let Ok(None) | Err(weightsync_mem::Error::Interrupted) = answer {
            self.reader.withdraw()?;
        }
        let taken = answer.map_err(|error| self.named(error))?;
        Ok(taken.map(|taken| self.lent(taken)))
    }

    fn interrupter(&self) -> Result<Interrupter> {
        let wait = self.reader.interrupter();
        Ok(Interrupter::new(move || wait.interrupt()))
    }

    fn applied(&mut self, set: &SetSnapshot) -> Result<()> {
        // By name: a set has only the models that have been sent.
        let versions = set.members().iter().filter_map(|member| {
            let of = |spec: &ModelSpec| spec.id == *member.snapshot.model();
            let place = self.specs.iter().position(of)?;
            Some((self.indices[place], member.snapshot.version()))
        });
        let versions: Vec<_> = versions.collect();
        self.reader
            .applied_versions(set.sequence(), versions.iter().copied())?;
        let before = self.applied.as_ref().map_or(0, |(sequence, _)| *sequence);
        self.applied = Some((set.sequence().max(before), versions));
        Ok(())
    }

    fn refuse(&mut self, set: Option<&SetSnapshot>, reason: &str) -> Result<()> {
        Ok(self.reader.refuse(set.map(SetSnapshot::sequence), reason)?)
    }
}

impl From<&Targets> for weightsync_mem::Targets {
    fn from(targets: &Targets) -> Self {
        match targets {
            Targets::All => Self::All,
            Targets::Workers(workers) => Self::Workers(workers.clone()),
        }
    }
}

/// An error of the trainer's end with the model's name instead of its number.
fn by_name(models: &[(ModelId, Arc<Attributes>)], error: weightsync_mem::Error) -> Error {
    Error::of_memory(error, |model| models.get(model).map(|(id, _)| id.clone()))
}

/// Of the versions of all models those of the published ones, which are in the
/// models' order.
fn of_published(mut versions: Vec<Version>, published: &[(usize, Version)]) -> Vec<Version> {
    // In place: none is looked for before where the last was put.
    for (place, (model, _)) in published.iter().enumerate() {
        versions[place] = versions[*model];
    }
    versions.truncate(published.len());
    versions
}

/// Has the digests of what was just published made. The versions are live:
/// they may have to do without, but nothing has failed.
fn order_digests(waiter: &Waiter, publication: &Publication, thread: &DigestThread) {
    for (model, version) in &publication.versions {
        match waiter.snapshot(*model) {
            // Not what was sent to some workers only.
            Ok(Some(snapshot)) if snapshot.version() == *version => {
                thread.digest_next(*model, snapshot);
            }
            Ok(_) => {}
            Err(error) => {
                tracing::warn!(%version, %error, "no digest is made of this version");
            }
        }
    }
}

fn status(readers: Vec<weightsync_mem::ReaderStatus>) -> Vec<WorkerStatus> {
    let lines = readers.into_iter().map(|reader| WorkerStatus {
        worker: reader.worker,
        pid: reader.pid,
        device: reader.device,
        held: reader.held,
        versions: reader.applied,
    });
    lines.collect()
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use weightsync_core::{Dtype, Epoch, Layout};
    use weightsync_mem::WaitStyle;

    use super::*;
    use crate::transport::TransferOptions;

    fn soon() -> Deadline {
        Some(Instant::now() + Duration::from_secs(20))
    }

    #[test]
    fn what_is_applied_is_told_by_model_also_while_some_are_missing() {
        let models = ["actor", "critic"].map(|id| ModelSpec {
            id: ModelId::new(id).unwrap(),
            layout: Layout::new([(id.to_owned(), Dtype::U8, vec![9])]).unwrap(),
            attributes: Attributes::default(),
        });
        let ids = models.clone().map(|model| model.id);
        let at = Memory::place(&ids, None).unwrap();
        let opening = Opening {
            at: &at,
            run: Run {
                epoch: Epoch(1),
                id: [1; 16],
            },
            models: &models,
            options: TransferOptions {
                slots: 2,
                max_slots: 2,
                history: 0,
                wait: WaitStyle::default(),
                digest: DigestPolicy::OnRequest,
            },
        };
        let mut sender = Memory::open(&opening).unwrap();
        // In another order than the sender has them.
        let joining = Joining {
            worker: WorkerId(0),
            seen: Epoch(0),
            models: ids.to_vec(),
            wanted: vec![1, 0],
            device: String::new(),
            wait: WaitStyle::default(),
        };
        let mut worker = Memory::join(&at, &joining, (Delivery::Newest, false), soon()).unwrap();
        for (sent, applied) in [(0, [1, 0]), (1, [1, 1]), (1, [1, 2])] {
            let staging = sender.stage(&[sent], soon()).unwrap();
            staging.publish(&Targets::All).unwrap();
            let set = worker.next(soon()).unwrap().unwrap();
            worker.applied(&set).unwrap();
            assert_eq!(sender.workers()[0].versions, applied.map(Version));
        }
    }
}
