//! The trainer's end of models in shared memory.

use std::sync::Arc;

use weightsync_core::{ModelId, SenderStatus, Version, WorkerId, WorkerReport, WorkerStatus};
use weightsync_mem::{
    CopyOptions, Deadline, Listener, Publication, RemoteReaders, SegmentOptions, SegmentWriter,
    Source, Waiter,
};

use crate::attributes::Attributes;
use crate::digest::DigestThread;
use crate::error::{Error, Result};
use crate::log_limiter;
use crate::setup::DigestPolicy;
use crate::snapshot::Snapshot;
use crate::transport::{
    Attendance, Level, ModelSpec, Opening, Outstanding, SenderTransport, Staging, Targets,
};
/// The trainer's end of models in shared memory.
///
/// It is what the local schemes have, and what a transport has that carries
/// versions on to other hosts: their workers join as [remote readers](Self::remote_readers), and
/// are then told, held, waited for and reported like those of this host.
#[derive(Debug)]
pub struct Segment {
    writer: SegmentWriter,
    digest: Option<DigestThread>,
    models: Vec<(ModelId, Arc<Attributes>)>,
    checksums: bool,
}

impl Segment {
    /// Makes it, for the workers of this host that come to `listener` with the
    /// endpoint's secret. In the queue of a worker that takes every version at most
    /// `max_queue` of them wait; one that wants to let more wait is refused.
    ///
    /// # Errors
    ///
    /// If memory, sockets or threads are refused.
    pub fn open(opening: &Opening<'_>, listener: Listener, max_queue: u8) -> Result<Self> {
        let specs = Self::specs(opening.models)?;
        let options = SegmentOptions {
            slots: opening.options.slots,
            max_slots: opening.options.max_slots,
            history: opening.options.history,
            max_queue,
            wait: opening.options.wait,
            refused: log_limiter::refused,
        };
        let secret = *opening.at.secret();
        let writer = SegmentWriter::create_on(listener, secret, opening.run, &specs, options)?;
        let models = opening
            .models
            .iter()
            .map(|model| (model.id.clone(), Arc::new(model.attributes.clone())));
        let history = opening.history.clone();
        // Answered on the segment's own thread, while the trainer computes.
        writer.answer_status(Box::new(move |workers| {
            let status = history.status(|status| status.workers = workers);
            serde_json::to_vec(&status).unwrap_or_default()
        }));
        let digest = match opening.options.digest {
            DigestPolicy::OnRequest => None,
            DigestPolicy::Background => Some(DigestThread::start()?),
        };
        Ok(Self {
            writer,
            digest,
            models: models.collect(),
            checksums: false,
        })
    }

    /// Makes checksums of what is staged from here on in the copy pass, whether or not
    /// a send asks for them: for who passes versions on with checksums.
    pub fn set_checksums(&mut self, on: bool) {
        self.checksums = on;
    }

    /// The models as segments know them: attributes are notes there.
    ///
    /// # Errors
    ///
    /// [`Error::Attributes`] if attributes cannot be encoded.
    pub fn specs(models: &[ModelSpec]) -> Result<Vec<weightsync_mem::ModelDescription>> {
        let specs = models.iter().map(|model| {
            Ok(weightsync_mem::ModelDescription {
                layout: model.layout.clone(),
                note: model.attributes.encode()?,
            })
        });
        specs.collect()
    }

    /// Where workers of other hosts join.
    pub fn remote_readers(&self) -> RemoteReaders {
        RemoteReaders::of(&self.writer)
    }

    fn lent(&self, model: usize, held: weightsync_mem::Snapshot) -> Snapshot {
        let (id, attributes) = &self.models[model];
        Snapshot::of_slot(id.clone(), attributes.clone(), held)
    }
}

impl SenderTransport for Segment {
    fn stage(&mut self, models: &[usize], deadline: Deadline) -> Result<Box<dyn Staging + '_>> {
        // Taken first: the staging borrows the writer, and any thread may wait for the publication.
        let waiter = self.writer.waiter();
        let (writer, named) = (&mut self.writer, &self.models);
        let slots = writer.stage(models, deadline);
        Ok(Box::new(SegmentStaging {
            checksums: self.checksums,
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
        self.writer.readers()
    }

    fn fill_status(&self, status: &mut SenderStatus) {
        status.workers = self.remote_readers().roster();
    }

    fn wait_workers(
        &mut self,
        deadline: Deadline,
        enough: &mut dyn FnMut(&Attendance) -> bool,
    ) -> Result<bool> {
        Ok(self.writer.wait_readers(deadline, enough)?)
    }

    fn forget(&mut self, workers: &[WorkerId]) -> Result<()> {
        Ok(self.writer.forget(workers)?)
    }

    fn take_rejected(&mut self) -> Vec<(WorkerId, String)> {
        self.writer.take_rejected()
    }

    fn snapshot(&self, model: usize) -> Result<Option<Snapshot>> {
        let held = self.writer.snapshot(model)?;
        Ok(held.map(|held| self.lent(model, held)))
    }

    fn snapshot_for(&self, model: usize, targets: &Targets) -> Result<Option<Snapshot>> {
        let held = self.writer.snapshot_for(model, targets);
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
struct SegmentStaging<'a> {
    slots: weightsync_mem::StagingSlots<'a>,
    models: &'a [(ModelId, Arc<Attributes>)],
    waiter: Waiter,
    digest: Option<&'a DigestThread>,
    checksums: bool,
}

impl Staging for SegmentStaging<'_> {
    fn tensor_mut(&mut self, model: usize, index: usize) -> &mut [u8] {
        self.slots.tensor_mut(model, index)
    }

    fn tensors_mut(&mut self, model: usize) -> Vec<&mut [u8]> {
        self.slots.tensors_mut(model)
    }

    fn write(
        &mut self,
        model: usize,
        sources: &[Source<'_>],
        mut options: CopyOptions,
    ) -> Result<()> {
        // A transport that passes versions on needs checksums whatever this send asks for.
        options.checksums |= self.checksums;
        Ok(self.slots.write(model, sources, options)?)
    }

    fn number(&mut self, model: usize, version: Version) -> Result<()> {
        Ok(self.slots.number(model, version)?)
    }

    fn wait_for_late(&mut self) {
        self.slots.wait_for_late();
    }

    fn publish(self: Box<Self>, targets: &Targets) -> Result<Box<dyn Outstanding>> {
        let Self {
            slots,
            models,
            waiter,
            digest,
            checksums: _,
        } = *self;
        let publication = slots.publish(targets);
        let publication = publication.map_err(|error| by_name(models, error))?;
        // After the publication: no send waits for a digest.
        if let Some(thread) = digest {
            order_digests(&waiter, &publication, thread);
        }
        Ok(Box::new(PublishedSet {
            publication,
            waiter,
        }))
    }
}

#[derive(Debug)]
struct PublishedSet {
    publication: Publication,
    waiter: Waiter,
}

impl Outstanding for PublishedSet {
    fn versions(&self) -> &[(usize, Version)] {
        &self.publication.versions
    }

    fn settle(&self, level: Level, deadline: Deadline) -> Result<Vec<WorkerReport>> {
        let lines = self.waiter.settle(&self.publication, level, deadline)?;
        Ok(self.reports(lines))
    }

    fn is_settled(&self, level: Level) -> Result<bool> {
        Ok(self.waiter.is_settled(&self.publication, level)?)
    }

    fn decided(&self) -> Result<Vec<WorkerReport>> {
        Ok(self.reports(self.waiter.decided(&self.publication)?))
    }

    fn late(&self, level: Level) -> Result<()> {
        Ok(self.waiter.late(&self.publication, level)?)
    }

    fn give_up(&self) -> Result<()> {
        Ok(self.waiter.give_up(&self.publication)?)
    }
}

impl PublishedSet {
    /// The lines with the versions of the published models alone.
    fn reports(&self, mut lines: Vec<WorkerReport>) -> Vec<WorkerReport> {
        for line in &mut lines {
            keep_published(&mut line.versions, &self.publication.versions);
        }
        lines
    }
}

/// An error of the trainer's end with the model's name instead of its number.
fn by_name(models: &[(ModelId, Arc<Attributes>)], error: weightsync_mem::Error) -> Error {
    Error::of_memory(error, |model| models.get(model).map(|(id, _)| id.clone()))
}

/// Keeps, of the versions of all models, those of the published ones, which are in the models'
/// order.
fn keep_published(versions: &mut Vec<Version>, published: &[(usize, Version)]) {
    // In place: none is looked for before where the last was put.
    for (place, (model, _)) in published.iter().enumerate() {
        versions[place] = versions[*model];
    }
    versions.truncate(published.len());
}

/// Has the digests of what was just published made. The versions are live:
/// they may have to do without, but nothing has failed.
fn order_digests(waiter: &Waiter, publication: &Publication, thread: &DigestThread) {
    for (model, version) in &publication.versions {
        match waiter.snapshot(*model) {
            // Versions that were sent to some workers only do not count.
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
