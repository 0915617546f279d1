//! Free slots of one or more models, lent to be written and then published as one set.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use weightsync_core::record::CommitRecord;
use weightsync_core::{Layout, Targets, Version};

use crate::copy::{CopyOptions, Source, write_image};
use crate::error::Error;
use crate::registry::{RegistryState, SharedRegistry};
use crate::report::Publication;
use crate::slot::Slot;
use crate::spans::CHECKSUM_BLOCK;
use crate::writer::SegmentWriter;

/// Slots that nobody reads, one for each model staged, to be filled and then
/// published together.
///
/// **Guarantee.** Until [`StagingSlots::publish`] no reader can see any of it; dropped
/// without publishing, it leaves everything as it was. The bytes in a slot at the
/// beginning are those of some older version (or zeros): write every tensor.
///
/// Methods that take a model take its index in the segment.
///
/// # Panics
///
/// They panic if the model is not one of those staged, or has no such tensor;
/// those that give tensors' places also in a forked child.
#[derive(Debug)]
pub struct StagingSlots<'a> {
    writer: &'a mut SegmentWriter,
    parts: Vec<StagedSlot>,
    waits_for_late: bool,
}

/// One model's part.
#[derive(Debug)]
pub(crate) struct StagedSlot {
    model: usize,
    slot: u8,
    file: Arc<Slot>,
    checksums: bool,
    /// The checksum of the table of checksums, computed once all is written.
    table: Option<u64>,
    number: Option<Version>,
}

impl StagedSlot {
    pub(crate) fn new(model: usize, slot: u8, file: Arc<Slot>) -> Self {
        Self {
            model,
            slot,
            file,
            checksums: false,
            table: None,
            number: None,
        }
    }

    /// The slot, which stays lent.
    pub(crate) fn into_slot(self) -> (u8, Arc<Slot>) {
        (self.slot, self.file)
    }
}

impl<'a> StagingSlots<'a> {
    /// A staging with room for this many models; the parts are added one by one.
    pub(crate) fn new(writer: &'a mut SegmentWriter, models: usize) -> Self {
        Self {
            writer,
            parts: Vec::with_capacity(models),
            waits_for_late: false,
        }
    }

    pub(crate) fn parts(&mut self) -> (&SharedRegistry, &mut Vec<StagedSlot>) {
        (&self.writer.shared, &mut self.parts)
    }

    /// The layout to write a model by.
    pub fn layout(&self, model: usize) -> &Layout {
        &self.writer.models()[model].layout
    }

    /// One tensor's bytes, by its index in the layout.
    pub fn tensor_mut(&mut self, model: usize, index: usize) -> &mut [u8] {
        let range = self.layout(model).tensors()[index].range;
        let start = range.offset as usize;
        self.part(model, start..start + range.len as usize)
    }

    /// Every tensor's bytes, in layout order, to be written in any order and from any number of
    /// threads.
    pub fn tensors_mut(&mut self, model: usize) -> Vec<&mut [u8]> {
        let layout = self.layout(model).clone();
        let mut rest = self.part(model, 0..layout.bytes() as usize);
        let mut at = 0;
        let mut places = Vec::with_capacity(layout.len());
        for tensor in layout.tensors() {
            let start = tensor.range.offset as usize;
            // Padding is in no slice, so it keeps its zeros.
            let (_, tail) = rest.split_at_mut(start - at);
            let (place, tail) = tail.split_at_mut(tensor.range.len as usize);
            places.push(place);
            at = start + tensor.range.len as usize;
            rest = tail;
        }
        places
    }

    /// Writes every tensor of a model from `sources`, in layout order, in one
    /// pass over the source.
    ///
    /// # Errors
    ///
    /// [`Error::Fill`] with the first failure of a [`Source::Fill`]; the model
    /// can be written again. [`Error::Forked`] in a forked child.
    ///
    /// # Panics
    ///
    /// If there is not one source per tensor, or one has another length than
    /// its tensor: the caller compares layouts first.
    pub fn write(
        &mut self,
        model: usize,
        sources: &[Source<'_>],
        options: CopyOptions,
    ) -> Result<(), Error> {
        let served = self.writer.shared.models[model].model.clone();
        let at = self.at(model);
        // A write that fails midway leaves bytes that the old checksums do not fit.
        self.parts[at].checksums = false;
        let map = &self.parts[at].file.map;
        map.usable()?;
        // SAFETY: the sender's mapping is writable and a slot of this model; the
        // slot is lent, so no reader reads it, and `&mut self` is the only way
        // to it here.
        let sums = unsafe { write_image(map, &served.layout, served.spans(), sources, options) }?;
        if options.checksums {
            let table: Vec<u8> = sums.iter().flat_map(|sum| u64::to_le_bytes(*sum)).collect();
            let start = served.shape().table_offset();
            // `part` takes every change for one of the image, so the checksums are marked valid
            // after it.
            self.part(model, start..start + table.len())
                .copy_from_slice(&table);
        }
        self.parts[at].checksums = options.checksums;
        Ok(())
    }

    /// Sets the number of a model's next version, which must be above every earlier one.
    ///
    /// # Errors
    ///
    /// [`Error::VersionNotNewer`].
    pub fn number(&mut self, model: usize, version: Version) -> Result<(), Error> {
        let at = self.at(model);
        let newest = self.writer.version(model);
        if version <= newest {
            return Err(Error::VersionNotNewer {
                newest,
                got: version,
            });
        }
        self.parts[at].number = Some(version);
        Ok(())
    }

    /// The publication waits also for readers that were late for an earlier one. Otherwise it
    /// passes them over until they move: see [`WorkerReport::late`](crate::WorkerReport::late).
    pub fn wait_for_late(&mut self) {
        self.waits_for_late = true;
    }

    /// Makes what was written the newest versions of these models for
    /// `targets`: each worker of them sees all of it or nothing. Their numbers
    /// are one above the highest ever given out, unless they were numbered.
    ///
    /// # Errors
    ///
    /// [`Error::SlotsExhausted`] if no slot would be left for what comes next; nothing
    /// has happened then. [`Error::Forked`] in a forked child.
    pub fn publish(mut self, targets: &Targets) -> Result<Publication, Error> {
        let shared = self.writer.shared.clone();
        shared.header.map.usable()?;
        // Before the lock is taken, for which workers that join have to wait.
        for at in 0..self.parts.len() {
            self.parts[at].table = self.sums(at);
        }
        let written: Vec<_> = self
            .parts
            .iter()
            .map(|part| (part.model, part.slot))
            .collect();
        let mut state = shared.state();
        for part in &self.parts {
            // No other thread publishes, because `self` borrows the writer.
            let numbered = state.plan.number(part.model, part.number);
            debug_assert!(numbered.is_ok(), "{numbered:?}");
        }
        self.write_commits(&state);
        // The pins first: the decision gives out records that no reader holds.
        let records = shared.observe(&mut state);
        // Before the first mailbox moves, so that no worker seems to have the version earlier.
        let at = Instant::now();
        let published = shared.decide(&mut state, |plan, steps| {
            plan.publish(&written, targets, records, steps)
        });
        match published {
            Ok(published) => {
                // The slots are no longer lent.
                self.parts.clear();
                for (model, _) in &published.versions {
                    self.writer.versions[*model] = state.plan.version(*model);
                }
                Ok(Publication::new(
                    published,
                    targets,
                    at,
                    self.waits_for_late,
                ))
            }
            Err(crowded) => {
                // The parts are still lent. Dropping `self` gives their slots back.
                let slots = state.plan.slots(crowded.model);
                drop(state);
                Err(Error::SlotsExhausted {
                    model: crowded.model,
                    slots,
                })
            }
        }
    }

    /// Writes the commit record of each part into its model's page.
    fn write_commits(&self, state: &RegistryState) {
        for part in &self.parts {
            let model = &self.writer.shared.models[part.model].model;
            let record = CommitRecord {
                run: self.writer.shared.run,
                version: state.plan.next_version(part.model),
                layout: model.layout.id(),
                bytes: model.layout.bytes(),
                checksum_block: part.table.map_or(0, |_| CHECKSUM_BLOCK as u64),
                checksum_table: part.table.unwrap_or(0),
            };
            // The record is in the page before any mailbox names the slot: a reader checks it as
            // soon as it has its pin.
            model.page().write_commit(part.slot, &record);
        }
    }

    /// The checksum of a part's table of checksums, if it has one.
    fn sums(&mut self, at: usize) -> Option<u64> {
        let StagedSlot {
            model, checksums, ..
        } = self.parts[at];
        checksums.then(|| {
            let shape = self.writer.shared.models[model].model.shape();
            let start = shape.table_offset();
            let end = start + shape.table_bytes();
            weightsync_simd::crc64(self.stretch(at, start..end))
        })
    }

    fn at(&self, model: usize) -> usize {
        let mut parts = self.parts.iter();
        parts
            .position(|part| part.model == model)
            .unwrap_or_else(|| panic!("model {model} is not staged"))
    }

    /// A range of a model's slot that is about to be changed.
    fn part(&mut self, model: usize, range: Range<usize>) -> &mut [u8] {
        let at = self.at(model);
        self.parts[at].checksums = false;
        self.stretch(at, range)
    }

    fn stretch(&mut self, at: usize, range: Range<usize>) -> &mut [u8] {
        let map = &self.parts[at].file.map;
        // A panic with the reason is better than a fault without one.
        if let Err(error) = map.usable() {
            panic!("{error}");
        }
        assert!(range.start <= range.end && range.end <= map.len());
        // SAFETY: the range lies in the mapping (asserted).
        let start = unsafe { map.as_ptr().add(range.start) };
        // SAFETY: the sender's mapping is writable and lives as long as the
        // part; the slot is lent (`SegmentWriter::stage`), so no reader reads it, and
        // `&mut self` is the only way to it here.
        unsafe { std::slice::from_raw_parts_mut(start, range.len()) }
    }
}

impl Drop for StagingSlots<'_> {
    fn drop(&mut self) {
        // In a forked child, a thread that does not exist may hold the lock.
        let shared = &self.writer.shared;
        if self.parts.is_empty() || shared.header.map.usable().is_err() {
            return;
        }
        let mut state = shared.state();
        for part in &self.parts {
            state.plan.give_back(part.model, part.slot);
        }
    }
}
