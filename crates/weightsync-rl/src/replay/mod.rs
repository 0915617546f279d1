//! Frames kept for learning from them again.
//!
//! **What is guaranteed.** A [`ReplayBuffer`] keeps the newest frames up to its
//! capacity; a new frame overwrites the oldest one. Any number of threads may
//! write and sample at the same time, and a sample never has a part of an
//! [`extend`](ReplayBuffer::extend) only. A buffer in a directory survives its
//! process: what a killed process had written is there when the directory is
//! opened again, and after a power cut what was there at the last
//! [`flush`](ReplayBuffer::flush), except for frames that newer ones were about
//! to overwrite. Damaged frames are found by their checksums and cut off.
//!
//! **How.** Frames are rows of a flat ring, each column on its own: one
//! allocation or one file per column. A lock of many readers and one writer
//! guards the rows; samples draw one after the other and copy side by side.
//!
//! ```
//! use weightsync_engine::Dtype;
//! use weightsync_rl::replay::{Column, Prioritised, ReplayBuffer, Schema};
//!
//! let schema = Schema::new([
//!     Column::new("observation", Dtype::U8, [2]),
//!     Column::new("done", Dtype::BOOL, []),
//! ])?;
//! let buffer = ReplayBuffer::builder(schema)
//!     .capacity(1000)
//!     .ndim(2)
//!     .sampler(Prioritised::new(0.6, 0.4))
//!     .seed(1)
//!     .in_memory()?;
//! // Two environments, three steps: [P, T].
//! let ids = buffer.extend(&[2, 3], &[&[7; 12], &[0, 0, 1, 0, 0, 1]])?;
//! assert_eq!(ids, 0..6);
//!
//! let sample = buffer.sample(4)?;
//! assert_eq!(sample.columns[0], [7; 8]);
//! let errors = [0.5, 0.1, 2.0, 0.3];
//! buffer.update_priorities(&sample.drawn.ids, &errors)?;
//! # Ok::<(), weightsync_rl::Error>(())
//! ```

use std::{
    fmt,
    io::ErrorKind,
    ops::Range,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard},
};

mod disk;
mod ring;
mod sampler;
mod schema;
#[cfg(test)]
mod tests;

use disk::{Disk, Files};
use ring::MemoryRing;
use sampler::Draws;
pub use sampler::{Drawn, Prioritised, Sampler, Slices};
pub use schema::{Column, Schema};
use weightsync_engine::transport::threads::{LockExt as _, RwLockExt as _};

use crate::Error;

/// A ring of frames that threads write to and sample from.
///
/// Locks are taken and released inside each call, so no call waits for longer
/// than others copy or, in a directory, sync the header.
pub struct ReplayBuffer {
    schema: Schema,
    capacity: usize,
    ndim: usize,
    /// Taken before `draws`.
    ring: RwLock<Ring>,
    draws: Mutex<Draws>,
    /// The files of a buffer in a directory.
    files: Option<Arc<Files>>,
    /// Held by a flush, and what the first one that failed failed with.
    flushing: Mutex<Option<ErrorKind>>,
}

/// The frames. Whatever happens in an extend, the ones in `live` are whole: it
/// first takes out those that it overwrites, and puts in the new ones last.
struct Ring {
    live: Range<u64>,
    storage: RingStorage,
}

enum RingStorage {
    Memory(MemoryRing),
    Disk(Disk),
}

/// Frames that were drawn and copied out.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Sample {
    /// Which frames these are.
    pub drawn: Drawn,
    /// The bytes of each column: one frame behind the other, in the order of
    /// [`Drawn::ids`].
    pub columns: Vec<Vec<u8>>,
}

/// The settings of a [`ReplayBuffer`].
#[derive(Clone, Debug)]
pub struct ReplayBufferBuilder {
    schema: Schema,
    capacity: usize,
    ndim: usize,
    sampler: Sampler,
    seed: u64,
}

impl ReplayBufferBuilder {
    /// The number of frames that fit. There is no default.
    pub fn capacity(mut self, frames: usize) -> Self {
        self.capacity = frames;
        self
    }

    /// The number of dimensions of a batch: 1 for `[T]`, 2 for `[P, T]`, 3 for
    /// `[B, P, T]`; 1 by default.
    pub fn ndim(mut self, ndim: usize) -> Self {
        self.ndim = ndim;
        self
    }

    /// How frames are drawn; [`Sampler::Uniform`] by default.
    pub fn sampler(mut self, sampler: impl Into<Sampler>) -> Self {
        self.sampler = sampler.into();
        self
    }

    /// What all randomness is derived from; 0 by default.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// An empty buffer in this process's memory.
    ///
    /// # Errors
    /// [`Error::ReplaySettings`] if a setting cannot be.
    pub fn in_memory(self) -> Result<ReplayBuffer, Error> {
        let draws = self.check()?;
        let memory = MemoryRing::new(self.schema.all_frame_bytes(), self.capacity)?;
        Ok(self.build(draws, 0..0, RingStorage::Memory(memory), None))
    }

    /// The buffer in a directory, with the frames that are in it; an empty one
    /// if the directory has none. The directory is made if it does not exist,
    /// and locked as long as the buffer lives.
    ///
    /// Frames that were written since the last flush are read and checked.
    /// Ids go on where the frames end. Priorities are not kept: each frame has
    /// that of a new one. Trajectories are not gone on with: a number that comes
    /// again is another trajectory's.
    ///
    /// ```
    /// use weightsync_engine::Dtype;
    /// use weightsync_rl::replay::{Column, ReplayBuffer, Schema};
    ///
    /// let dir = tempfile::tempdir()?;
    /// let schema = Schema::new([Column::new("reward", Dtype::U8, [])])?;
    /// let builder = ReplayBuffer::builder(schema).capacity(100);
    /// let buffer = builder.clone().directory(dir.path())?;
    /// buffer.extend(&[3], &[&[1, 2, 3]])?;
    /// drop(buffer);
    ///
    /// let buffer = builder.directory(dir.path())?;
    /// let mut rewards = [0; 2];
    /// buffer.read_into(&[0, 2], &mut [&mut rewards])?;
    /// assert_eq!(rewards, [1, 3]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::OtherReplayBuffer`] if the directory has another schema or
    /// capacity, [`Error::ReplayBufferInUse`] if it is open elsewhere,
    /// [`Error::ReplayBufferDamaged`] and [`Error::ReplayBufferFile`] if it
    /// cannot be read, [`Error::ReplaySettings`] if a setting cannot be.
    pub fn directory(self, path: impl AsRef<Path>) -> Result<ReplayBuffer, Error> {
        let mut draws = self.check()?;
        let disk = Disk::open(path.as_ref(), &self.schema, self.capacity)?;
        let live = disk.live();
        let column = match draws.reads_column() {
            None => None,
            // The sampler reads one column of each frame, also of frames of an earlier life.
            Some(column) => {
                let frames = (live.end - live.start) as usize;
                let mut bytes = vec![0; frames * self.schema.frame_bytes(column)];
                disk.read(column, live.clone(), &mut bytes)?;
                Some(bytes)
            }
        };
        draws.append(live.clone(), column.as_deref());
        // What comes is of another program, which numbers its trajectories from 0 again.
        draws.end_trajectories();
        let files = disk.files().clone();
        Ok(self.build(draws, live, RingStorage::Disk(disk), Some(files)))
    }

    /// Checks all settings, and makes what draws.
    fn check(&self) -> Result<Draws, Error> {
        let refuse = |reason| Err(Error::ReplaySettings { reason });
        if !(1..=3).contains(&self.ndim) {
            return refuse(format!("`ndim` is {}: expected 1, 2 or 3", self.ndim));
        }
        // With the 8 bytes per frame of a checksum or a priority.
        let sizes = self.schema.all_frame_bytes().iter().chain([&16]);
        let frame = sizes.fold(0_usize, |sum, bytes| sum.saturating_add(*bytes));
        let most = isize::MAX.unsigned_abs() / frame;
        if !(1..=most).contains(&self.capacity) {
            return refuse(format!(
                "its capacity is {} frames: expected 1 to {most}",
                self.capacity
            ));
        }
        Draws::new(&self.sampler, self.seed, &self.schema, self.capacity)
    }

    fn build(
        self,
        draws: Draws,
        live: Range<u64>,
        storage: RingStorage,
        files: Option<Arc<Files>>,
    ) -> ReplayBuffer {
        ReplayBuffer {
            schema: self.schema,
            capacity: self.capacity,
            ndim: self.ndim,
            ring: RwLock::new(Ring { live, storage }),
            draws: Mutex::new(draws),
            files,
            flushing: Mutex::new(None),
        }
    }
}

impl ReplayBuffer {
    /// Settings to begin with.
    pub fn builder(schema: Schema) -> ReplayBufferBuilder {
        ReplayBufferBuilder {
            schema,
            capacity: 0,
            ndim: 1,
            sampler: Sampler::default(),
            seed: 0,
        }
    }

    /// The columns and the capacity of the buffer in a directory, to open it with;
    /// `None` if there is none.
    ///
    /// # Errors
    /// [`Error::ReplayBufferDamaged`] and [`Error::ReplayBufferFile`] if it cannot
    /// be read.
    pub fn describe(path: impl AsRef<Path>) -> Result<Option<(Schema, usize)>, Error> {
        disk::schema_of(path.as_ref())
    }

    /// What a frame consists of.
    pub fn schema(&self) -> &Schema {
        &self.schema
    }

    /// The number of frames that fit.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// The number of frames that are there.
    pub fn len(&self) -> usize {
        let ids = self.ids();
        (ids.end - ids.start) as usize
    }

    /// Whether no frame is there.
    pub fn is_empty(&self) -> bool {
        self.ids().is_empty()
    }

    /// The ids of the frames that are there, the oldest first. A frame's id is
    /// its number in the order of writing, and never changes.
    pub fn ids(&self) -> Range<u64> {
        self.read().live.clone()
    }

    /// The number of frames of a batch of this shape.
    ///
    /// # Errors
    /// [`Error::BatchShape`] or [`Error::BatchTooLong`] if it does not fit.
    pub fn frames_of(&self, shape: &[usize]) -> Result<usize, Error> {
        if shape.len() != self.ndim {
            return Err(Error::BatchShape {
                expected: self.ndim,
                got: shape.to_vec(),
            });
        }
        // A dimension of 0 first: the product of the others may saturate.
        let frames = match shape.contains(&0) {
            true => 0,
            false => shape.iter().fold(1, |a: usize, b| a.saturating_mul(*b)),
        };
        // A longer batch would overwrite its own first frames.
        if frames > self.capacity {
            return Err(Error::BatchTooLong {
                frames,
                capacity: self.capacity,
            });
        }
        Ok(frames)
    }

    /// Writes a batch of shape `[T]`, `[P, T]` or `[B, P, T]`, as the buffer's
    /// `ndim` says, and returns the ids of its frames. `columns` has the bytes
    /// of each column in the schema's order, row-major. All frames appear at
    /// once, and frames of one environment get ids that follow each other.
    ///
    /// # Errors
    /// [`Error::BatchShape`], [`Error::BatchTooLong`], [`Error::ColumnCount`] or
    /// [`Error::ColumnLen`] if the batch does not fit; then nothing has
    /// changed. [`Error::ReplayBufferFile`] if a file cannot be written; then
    /// the frames that the batch was to overwrite are gone.
    pub fn extend(&self, shape: &[usize], columns: &[&[u8]]) -> Result<Range<u64>, Error> {
        let frames = self.frames_of(shape)?;
        // Everything that can be refused is refused before the lock, and changes nothing.
        self.check_columns(frames, columns.iter().map(|column| column.len()))?;
        // Checksums are made before the lock: they read the whole batch.
        let sums = match &self.files {
            Some(_) => disk::sums(columns, self.schema.all_frame_bytes(), frames),
            None => Vec::new(),
        };
        let mut ring = self.write();
        let ids = ring.live.end..ring.live.end + frames as u64;
        if ids.is_empty() {
            return Ok(ids);
        }
        // The ring's lock is held, so this keeps to the order of the two.
        let mut draws = self.draws();
        // The frames whose rows the batch takes. Nobody can draw them from here on.
        let oldest = ids.end.saturating_sub(self.capacity as u64);
        let oldest = oldest.max(ring.live.start);
        // Both the sampler and `live` leave them out before a row is touched: if the write fails,
        // what is left is whole.
        draws.evict(ring.live.start..oldest);
        ring.live.start = oldest;
        match &mut ring.storage {
            RingStorage::Memory(memory) => memory.write(ids.clone(), columns),
            RingStorage::Disk(disk) => disk.write(ids.clone(), columns, &sums)?,
        }
        let column = draws.reads_column().map(|column| columns[column]);
        draws.append(ids.clone(), column);
        // Last: a panic before this leaves the new frames unseen.
        ring.live.end = ids.end;
        Ok(ids)
    }

    /// Draws `n` frames and copies them out.
    ///
    /// # Errors
    /// As [`sample_into`](Self::sample_into).
    ///
    /// # Panics
    /// If memory cannot have so many frames.
    pub fn sample(&self, n: usize) -> Result<Sample, Error> {
        let sizes = self.schema.all_frame_bytes().iter();
        let columns = sizes.map(|bytes| vec![0; n.saturating_mul(*bytes)]);
        let mut columns: Vec<Vec<u8>> = columns.collect();
        let mut out: Vec<&mut [u8]> = columns.iter_mut().map(Vec::as_mut_slice).collect();
        let drawn = self.sample_into(n, &mut out)?;
        Ok(Sample { drawn, columns })
    }

    /// Draws `n` frames and copies them into a buffer per column, in the
    /// schema's order, one frame behind the other. Makes no allocation per
    /// frame.
    ///
    /// # Errors
    /// [`Error::ColumnCount`] or [`Error::ColumnLen`] if the buffers do not have
    /// room for exactly `n` frames, [`Error::NothingToSample`] if there is no
    /// frame to draw, [`Error::SliceCount`] if `n` frames are not slices, and
    /// [`Error::ReplayBufferFile`] if a file cannot be read.
    pub fn sample_into(&self, n: usize, columns: &mut [&mut [u8]]) -> Result<Drawn, Error> {
        self.check_columns(n, columns.iter().map(|column| column.len()))?;
        // The read lock holds from the drawing to the copy, so no drawn frame is overwritten in
        // between.
        let ring = self.read();
        // Only the drawing is one at a time. The copies of several threads overlap.
        let drawn = self.draws().draw(n, &ring.live)?;
        ring.copy_out(&drawn.ids, columns)?;
        Ok(drawn)
    }

    /// Copies the frames of these ids, in any order, as
    /// [`sample_into`](Self::sample_into) does.
    ///
    /// # Errors
    /// [`Error::FrameGone`] if one is not in the buffer, else as `sample_into`.
    pub fn read_into(&self, ids: &[u64], columns: &mut [&mut [u8]]) -> Result<(), Error> {
        self.check_columns(ids.len(), columns.iter().map(|column| column.len()))?;
        // The check and the copy see one state of the ring.
        let ring = self.read();
        match ids.iter().find(|id| !ring.live.contains(id)) {
            Some(&id) => Err(Error::FrameGone {
                id,
                oldest: ring.live.start,
                next: ring.live.end,
            }),
            None => ring.copy_out(ids, columns),
        }
    }

    /// Gives frames other priorities: of a prioritised sampler alone. Frames
    /// that were overwritten since they were sampled are ignored; of an id that
    /// comes twice, the last priority counts.
    ///
    /// # Errors
    /// [`Error::NoPriorities`], [`Error::PriorityCount`] or [`Error::Priority`];
    /// then nothing has changed.
    pub fn update_priorities(&self, ids: &[u64], values: &[f32]) -> Result<(), Error> {
        // Frames are compared with `live`, and those that are gone are skipped.
        let ring = self.read();
        self.draws().priorities()?.update(&ring.live, ids, values)
    }

    /// Sets the `beta` of a prioritised sampler, which schedules raise to 1.
    ///
    /// # Errors
    /// [`Error::NoPriorities`], or [`Error::ReplaySettings`] if it is negative
    /// or not a number.
    pub fn set_beta(&self, beta: f64) -> Result<(), Error> {
        self.draws().priorities()?.set_beta(beta)
    }

    /// Waits until all frames written so far are on the disk. Others write and
    /// sample meanwhile. Does nothing for a buffer in memory.
    ///
    /// # Errors
    /// [`Error::ReplayBufferFile`]. The kernel may then have dropped what it
    /// could not write, so every later flush fails, too; what is in the
    /// directory is checked when it is opened again.
    pub fn flush(&self) -> Result<(), Error> {
        let Some(files) = &self.files else {
            return Ok(());
        };
        // One flush at a time. Others write and sample meanwhile.
        let mut failed = self.flushing.locked();
        // After a failed sync the kernel may have dropped dirty pages and report the next sync as
        // good.
        if let Some(kind) = *failed {
            return Err(files.flush_failed_before(kind));
        }
        // Before the sync: frames that are written during it may not be on the disk afterwards.
        let end = self.read().live.end;
        // Without the ring's lock, because this takes as long as the disk does.
        let mut done = files.sync_frames();
        if done.is_ok()
            // Only the header is written under the lock.
            && let RingStorage::Disk(disk) = &mut self.write().storage
        {
            done = disk.flushed(end);
        }
        // Noted for all later flushes.
        if let Err(Error::ReplayBufferFile { source, .. }) = &done {
            *failed = Some(source.kind());
        }
        done
    }

    /// Checks that columns have the bytes of so many frames.
    fn check_columns(
        &self,
        frames: usize,
        lens: impl ExactSizeIterator<Item = usize>,
    ) -> Result<(), Error> {
        let columns = self.schema.columns();
        if lens.len() != columns.len() {
            return Err(Error::ColumnCount {
                expected: columns.len(),
                got: lens.len(),
            });
        }
        for ((got, column), bytes) in lens.zip(columns).zip(self.schema.all_frame_bytes()) {
            let expected = frames.saturating_mul(*bytes);
            if got != expected {
                return Err(Error::ColumnLen {
                    column: column.name().to_owned(),
                    frames,
                    expected,
                    got,
                });
            }
        }
        Ok(())
    }

    // What a thread leaves that panics is in order, so a poisoned lock is, too.

    fn read(&self) -> RwLockReadGuard<'_, Ring> {
        self.ring.reading()
    }

    fn write(&self) -> RwLockWriteGuard<'_, Ring> {
        self.ring.writing()
    }

    fn draws(&self) -> MutexGuard<'_, Draws> {
        self.draws.locked()
    }
}

impl fmt::Debug for ReplayBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReplayBuffer")
            .field("schema", &self.schema)
            .field("capacity", &self.capacity)
            .field("ndim", &self.ndim)
            .finish_non_exhaustive()
    }
}

impl Ring {
    fn copy_out(&self, ids: &[u64], columns: &mut [&mut [u8]]) -> Result<(), Error> {
        for (column, out) in columns.iter_mut().enumerate() {
            let ids = ids.iter().copied();
            match &self.storage {
                RingStorage::Memory(memory) => memory.read(column, ids, out),
                RingStorage::Disk(disk) => disk.read(column, ids, out)?,
            }
        }
        Ok(())
    }
}
