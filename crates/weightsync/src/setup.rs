//! The trainer's first phase: everything is decided, nothing is communicated.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use weightsync_core::{Dtype, Layout, ModelId, WorkerId};
use weightsync_mem::{CopyOptions, ReaderStatus, SegmentOptions, WaitStyle, Writer};

use crate::digest::DigestThread;
use crate::error::{Error, Result};
use crate::extract::{WeightExtractor, cast_layout};
use crate::init_info::InitInfo;
use crate::run_dir::{self, Place};
use crate::sender::Sender;

/// Which workers [`SenderSetup::connect`] waits for. Others may join later.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Expect {
    /// Any so many workers.
    Count(usize),
    /// These workers.
    Workers(Vec<WorkerId>),
}

impl Expect {
    fn len(&self) -> usize {
        match self {
            Self::Count(count) => *count,
            Self::Workers(workers) => workers.len(),
        }
    }

    fn missing(&self, joined: &[WorkerId]) -> Vec<WorkerId> {
        match self {
            Self::Count(_) => Vec::new(),
            Self::Workers(workers) => workers
                .iter()
                .filter(|worker| !joined.contains(worker))
                .copied()
                .collect(),
        }
    }

    fn includes(&self, worker: WorkerId) -> bool {
        match self {
            Self::Count(_) => true,
            Self::Workers(workers) => workers.contains(&worker),
        }
    }

    fn met_by(&self, joined: &[WorkerId]) -> bool {
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
    /// After every send, by a thread beside the sender. A version that is
    /// replaced before its turn gets none.
    Background,
}

/// The first phase at the trainer: everything is decided, nothing has been
/// communicated.
///
/// ```no_run
/// use std::time::Duration;
/// use weightsync::{Expect, SenderSetup, Tensors};
///
/// let mut weights = Tensors::new();
/// weights.insert("layer.weight", [2, 3], vec![0.0_f32; 6])?;
/// let setup = SenderSetup::new("policy", &weights)?;
/// let info = setup.init_info(); // hand this to the workers
/// let mut sender = setup.connect(&weights, Expect::Count(4), Duration::from_secs(30))?;
/// weights.slice_mut::<f32>("layer.weight")?[0] = 1.0;
/// println!("{}", sender.send(&weights)?);
/// # Ok::<(), weightsync::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct SenderSetup {
    pub(crate) model: ModelId,
    pub(crate) source: Layout,
    pub(crate) layout: Layout,
    place: Place,
    run_dir: Option<PathBuf>,
    segment: SegmentOptions,
    pub(crate) copy: CopyOptions,
    digest: DigestPolicy,
    pub(crate) deadline: Duration,
}

impl SenderSetup {
    /// Sets a sender up for the tensors that `source` has now. Later sends must
    /// have the same names, dtypes and shapes.
    ///
    /// # Errors
    ///
    /// If the model's name is empty or longer than 255 bytes, or the source has
    /// tensors that no layout can have.
    pub fn new(model: &str, source: &impl WeightExtractor) -> Result<Self> {
        let model = ModelId::new(model)?;
        let layout = source.layout()?;
        Ok(Self {
            place: run_dir::anonymous(&model)?,
            model,
            source: layout.clone(),
            layout,
            run_dir: None,
            segment: SegmentOptions::default(),
            copy: CopyOptions::default(),
            digest: DigestPolicy::default(),
            deadline: Duration::from_secs(60),
        })
    }

    /// Sends floating-point tensors as `dtype` (F64, F32, F16 or BF16), cast in
    /// the one pass over the source.
    ///
    /// # Errors
    ///
    /// [`Error::Extract`] for any other dtype.
    pub fn cast(mut self, dtype: Dtype) -> Result<Self> {
        self.layout = cast_layout(&self.source, Some(dtype))?;
        Ok(self)
    }

    /// Keeps the run's epoch and its address in a directory (made if absent),
    /// so that a restarted trainer takes over: workers find it again by
    /// themselves, and do not go back to a trainer of an earlier epoch.
    ///
    /// It takes over once its predecessor is dead or has shut down. While that
    /// lives it keeps the address, and [`connect`](Self::connect) fails with
    /// [`weightsync_mem::Error::AddressInUse`]; its workers notice nothing.
    ///
    /// # Errors
    ///
    /// [`Error::File`] if the directory or a file in it cannot be used, belongs
    /// to another user, or is open to others; [`Error::FileLocked`] if another
    /// process keeps the key locked for 10 s.
    pub fn run_dir(mut self, dir: impl Into<PathBuf>) -> Result<Self> {
        let dir = dir.into();
        self.place = run_dir::at(&dir, &self.model)?;
        self.run_dir = Some(dir);
        Ok(self)
    }

    /// How many versions there is room for: `slots` from the beginning (at
    /// least 2), growing to `max_slots` when workers hold so many. With both
    /// equal, a send waits instead, and fails by its deadline.
    pub fn slots(mut self, slots: u8, max_slots: u8) -> Self {
        self.segment.slots = slots;
        self.segment.max_slots = max_slots;
        self
    }

    /// How the sender waits for its workers.
    pub fn wait_style(mut self, wait: WaitStyle) -> Self {
        self.segment.wait = wait;
        self
    }

    /// How many threads copy (1 by default).
    pub fn copy_threads(mut self, threads: usize) -> Self {
        self.copy.threads = threads.max(1);
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
        self.digest = policy;
        self
    }

    /// How long a send waits at most: for a free slot, and for its workers
    /// (60 s by default). One too long for the clock is none: then only what is
    /// waited for, or the death of who holds it up, ends the wait.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// What workers need to join.
    pub fn init_info(&self) -> InitInfo {
        let Place {
            address,
            secret,
            restarts,
        } = self.place.clone();
        InitInfo {
            model: self.model.clone(),
            address,
            secret,
            restarts,
        }
    }

    /// The tensors as workers will see them.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The rendez-vous: makes the shared memory, publishes `weights` as the
    /// first version, and waits until the expected workers have loaded it. One
    /// that has left again by then is not there and does not count.
    ///
    /// # Errors
    ///
    /// [`Error::MissingWorkers`] at the deadline, [`Error::Refused`] as soon as
    /// a worker says that the model does not fit its own,
    /// [`Error::WrongWeights`], [`Error::File`] and [`Error::FileLocked`] of the
    /// run directory, and those of the memory.
    pub fn connect(
        self,
        weights: &impl WeightExtractor,
        expect: Expect,
        deadline: Duration,
    ) -> Result<Sender> {
        let since = Instant::now();
        let until = since.checked_add(deadline);
        let run = match &self.run_dir {
            Some(dir) => run_dir::next_run(dir, until)?,
            None => run_dir::anonymous_run()?,
        };
        let Place {
            address, secret, ..
        } = &self.place;
        let writer = Writer::create(address, *secret, run, &self.layout, self.segment)?;
        let digest = match self.digest {
            DigestPolicy::OnRequest => None,
            DigestPolicy::Background => Some(DigestThread::start()?),
        };
        let model = self.model.clone();
        let mut sender = Sender::new(self, writer, run, digest);
        sender.publish(weights, until)?;
        let joined = |readers: &[ReaderStatus]| -> Vec<WorkerId> {
            let ready = readers.iter().filter(|reader| !reader.applied.is_none());
            ready.map(|reader| reader.worker).collect()
        };
        sender.writer().wait_readers(until, |readers, rejected| {
            let hopeless = rejected.iter().any(|worker| expect.includes(*worker));
            hopeless || expect.met_by(&joined(readers))
        })?;
        let joined = joined(&sender.writer().readers());
        let met = expect.met_by(&joined);
        // A worker that was not asked for and does not fit costs nobody else.
        if !met {
            let mut refusals = sender.writer().take_rejected();
            refusals.retain(|(worker, _)| expect.includes(*worker));
            if !refusals.is_empty() {
                return Err(Error::Refused { model, refusals });
            }
            return Err(Error::MissingWorkers {
                model,
                expected: expect.len(),
                missing: expect.missing(&joined),
                joined,
                waited: since.elapsed(),
            });
        }
        tracing::debug!(model = %model, %run, workers = expect.len(), "connected");
        Ok(sender)
    }
}
