//! The worker's end: set up, connect, receive.

use std::time::{Duration, Instant};

use weightsync_core::{Epoch, Layout, LayoutMismatch, ModelId, Run, Version, WorkerId};
use weightsync_mem::{AttachOptions, Deadline, Reader, WaitStyle};

use crate::error::{Error, Result};
use crate::init_info::InitInfo;
use crate::load::{TensorView, WeightLoader};
use crate::snapshot::Snapshot;

/// How long a receive without a timeout looks for a restarted trainer before it
/// says that there is none.
const REJOIN: Duration = Duration::from_secs(60);

/// The first phase at a worker: everything is decided, nothing has been
/// communicated.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use weightsync::{InitInfo, ReceiverSetup};
///
/// let info: InitInfo = serde_json::from_str(&std::env::var("POLICY_INFO")?)?;
/// let mut receiver = ReceiverSetup::new(info, 0).connect(Duration::from_secs(30))?;
/// while let Some(weights) = receiver.receive(None)? {
///     println!("{} has {}", receiver.worker(), weights.version());
/// }
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct ReceiverSetup {
    info: InitInfo,
    worker: WorkerId,
    layout: Option<Layout>,
    wait: WaitStyle,
}

impl ReceiverSetup {
    /// Sets worker number `worker` up to join. Numbers tell the workers of one
    /// sender apart.
    pub fn new(info: InitInfo, worker: u32) -> Self {
        Self {
            info,
            worker: WorkerId(worker),
            layout: None,
            wait: WaitStyle::default(),
        }
    }

    /// Insists on the names, dtypes and shapes of this model; without it the
    /// worker takes the sender's.
    ///
    /// # Errors
    ///
    /// If the model cannot be asked.
    pub fn model(mut self, model: &impl WeightLoader) -> Result<Self> {
        self.layout = Some(model.layout()?);
        Ok(self)
    }

    /// How the worker waits for new versions.
    pub fn wait_style(mut self, wait: WaitStyle) -> Self {
        self.wait = wait;
        self
    }

    /// The rendez-vous: joins the sender, waiting for it if it is not there
    /// yet, and takes the initial weights; the first receive hands them out at
    /// once (or newer ones, if there are by then). The sender's `connect` counts
    /// this worker from here on.
    ///
    /// A worker that loads into a model of its own uses
    /// [`connect_into`](Self::connect_into) instead.
    ///
    /// # Errors
    ///
    /// [`Error::WrongModel`] if the sender's model is not the one insisted on
    /// (the sender is told), [`Error::NoInitialWeights`], and those of the
    /// memory, at the latest by the deadline.
    pub fn connect(self, deadline: Duration) -> Result<Receiver> {
        let mut receiver = self.take_first(deadline)?;
        if let Some(version) = receiver.initial.as_ref().map(Snapshot::version) {
            receiver.report_applied(version)?;
        }
        Ok(receiver)
    }

    /// As [`connect`](Self::connect), but loads the initial weights into the
    /// worker's own model; the sender counts this worker once they are loaded.
    ///
    /// # Errors
    ///
    /// As [`connect`](Self::connect), and the loader's error (the sender is
    /// told).
    pub fn connect_into(
        self,
        model: &mut impl WeightLoader,
        deadline: Duration,
    ) -> Result<Receiver> {
        let mut receiver = self.model(model)?.take_first(deadline)?;
        if let Some(initial) = receiver.initial.take() {
            receiver.load_and_report(&initial, model)?;
        }
        Ok(receiver)
    }

    fn take_first(self, deadline: Duration) -> Result<Receiver> {
        let since = Instant::now();
        let until = since.checked_add(deadline);
        let mut reader = self.join(Epoch(0), until)?;
        let Some(held) = reader.next(until)? else {
            let (model, waited) = (self.info.model, since.elapsed());
            return Err(Error::NoInitialWeights { model, waited });
        };
        Ok(Receiver {
            run: reader.run(),
            reader,
            initial: Some(Snapshot::new(self.info.model.clone(), held)),
            setup: self,
            applied: Version::NONE,
            sender_lost: false,
        })
    }

    fn join(&self, seen: Epoch, deadline: Deadline) -> Result<Reader> {
        let options = AttachOptions {
            address: self.info.address.clone(),
            secret: self.info.secret,
            worker: self.worker,
            seen,
            // Compared here, so that the error can name the tensors.
            layout: None,
            wait: self.wait,
        };
        let reader = Reader::attach(&options, deadline)?;
        if let Some(own) = &self.layout
            && let Err(mismatch) = fits(own, reader.layout())
        {
            reader.refuse(Version::NONE, &mismatch.to_string())?;
            let model = self.info.model.clone();
            return Err(Error::WrongModel {
                model,
                mismatch: Box::new(mismatch),
            });
        }
        Ok(reader)
    }
}

/// A worker's end of a connected model.
///
/// Dropping it tells the sender that this worker has left; snapshots taken from
/// it stay valid.
#[derive(Debug)]
pub struct Receiver {
    reader: Reader,
    setup: ReceiverSetup,
    /// The weights that came with `connect`, until the first receive.
    initial: Option<Snapshot>,
    /// What the worker runs: its version, and the run that version is of.
    applied: Version,
    run: Run,
    /// The sender died, and that has been said.
    sender_lost: bool,
}

impl Receiver {
    /// Waits for a version this worker has not had yet; `None` if `timeout`
    /// comes first. Without a timeout only a version, the sender's death or its
    /// shutdown ends it. Versions replaced meanwhile are passed over.
    ///
    /// The snapshot counts as loaded: the sender is told that this worker runs
    /// it from here on.
    ///
    /// # Errors
    ///
    /// [`weightsync_mem::Error::SenderDied`] or
    /// [`SenderClosed`](weightsync_mem::Error::SenderClosed), after everything
    /// that was sent. If the trainer has a run directory, the next call waits
    /// for its successor.
    pub fn receive(&mut self, timeout: Option<Duration>) -> Result<Option<Snapshot>> {
        let Some(snapshot) = self.next(timeout)? else {
            return Ok(None);
        };
        self.report_applied(snapshot.version())?;
        Ok(Some(snapshot))
    }

    /// As [`receive`](Self::receive), but loads the version into the worker's
    /// own model and lets go of the slot. The sender is told that the version
    /// is applied only once it is loaded.
    ///
    /// # Errors
    ///
    /// [`Error::WrongModel`] or the loader's error; then the sender's report
    /// carries the words, and this worker still has the version it had.
    pub fn receive_into(
        &mut self,
        model: &mut impl WeightLoader,
        timeout: Option<Duration>,
    ) -> Result<Option<Version>> {
        let Some(snapshot) = self.next(timeout)? else {
            return Ok(None);
        };
        self.load_and_report(&snapshot, model)?;
        Ok(Some(snapshot.version()))
    }

    /// The newest version at once, also if this worker has had it; `None` before
    /// a restarted sender's first.
    ///
    /// # Errors
    ///
    /// Those of the memory.
    pub fn latest(&mut self) -> Result<Option<Snapshot>> {
        self.initial = None;
        let Some(held) = self.reader.latest()? else {
            return Ok(None);
        };
        self.report_applied(held.version())?;
        Ok(Some(Snapshot::new(self.setup.info.model.clone(), held)))
    }

    /// The version this worker runs; `Version::NONE` before the first.
    pub fn version(&self) -> Version {
        self.applied
    }

    /// The run of that version; before the first, the run of the sender. A
    /// restarted trainer's run shows here once a version of it is loaded.
    pub fn run(&self) -> Run {
        self.run
    }

    /// This worker's number.
    pub fn worker(&self) -> WorkerId {
        self.setup.worker
    }

    /// The model that is received.
    pub fn model(&self) -> &ModelId {
        &self.setup.info.model
    }

    /// Names, dtypes and shapes of the model.
    pub fn layout(&self) -> &Layout {
        self.reader.layout()
    }

    fn next(&mut self, timeout: Option<Duration>) -> Result<Option<Snapshot>> {
        let now = Instant::now();
        if let Some(initial) = self.initial.take() {
            // Whatever is wrong with the sender is the next call's to say.
            let newer = self.reader.next(Some(now)).ok().flatten();
            let model = self.setup.info.model.clone();
            return Ok(Some(
                newer.map_or(initial, |held| Snapshot::new(model, held)),
            ));
        }
        // A timeout too long for the clock is no timeout.
        let deadline = timeout.and_then(|timeout| now.checked_add(timeout));
        if self.sender_lost && self.setup.info.restarts {
            match self.rejoin(deadline.or(Some(now + REJOIN))) {
                Ok(()) => {}
                Err(Error::Memory(weightsync_mem::Error::NoSender { .. })) if timeout.is_some() => {
                    return Ok(None);
                }
                Err(error) => return Err(error),
            }
        }
        match self.reader.next(deadline) {
            Ok(held) => Ok(held.map(|held| Snapshot::new(self.setup.info.model.clone(), held))),
            Err(error) => {
                use weightsync_mem::Error::{SenderClosed, SenderDied};
                self.sender_lost |= matches!(error, SenderClosed | SenderDied { .. });
                Err(error.into())
            }
        }
    }

    /// Joins the successor of a sender that is gone. Its run has a higher
    /// epoch, and its versions count anew.
    fn rejoin(&mut self, deadline: Deadline) -> Result<()> {
        let seen = self.reader.run().epoch;
        let reader = self.setup.join(seen, deadline)?;
        if let Err(mismatch) = fits(self.reader.layout(), reader.layout()) {
            reader.refuse(Version::NONE, &mismatch.to_string())?;
            let model = self.setup.info.model.clone();
            return Err(Error::WrongModel {
                model,
                mismatch: Box::new(mismatch),
            });
        }
        self.reader = reader;
        self.sender_lost = false;
        Ok(())
    }

    /// Loads a version and says so, or says why not.
    fn load_and_report(
        &mut self,
        snapshot: &Snapshot,
        model: &mut impl WeightLoader,
    ) -> Result<()> {
        match self.load(snapshot, model) {
            Ok(()) => self.report_applied(snapshot.version()),
            Err(error) => {
                self.reader.refuse(snapshot.version(), &error.to_string())?;
                Err(error)
            }
        }
    }

    fn load(&self, snapshot: &Snapshot, model: &mut impl WeightLoader) -> Result<()> {
        if let Err(mismatch) = fits(&model.layout()?, snapshot.layout()) {
            let model = self.setup.info.model.clone();
            return Err(Error::WrongModel {
                model,
                mismatch: Box::new(mismatch),
            });
        }
        let views: Vec<TensorView<'_>> = snapshot.tensors().collect();
        model.load(&views)
    }

    fn report_applied(&mut self, version: Version) -> Result<()> {
        self.reader.applied(version)?;
        self.applied = version;
        self.run = self.reader.run();
        Ok(())
    }
}

/// Whether the sender's tensors are the worker's, in any order.
fn fits(own: &Layout, senders: &Layout) -> Result<(), LayoutMismatch> {
    match Layout::compare(own, senders) {
        Err(mismatch) if !mismatch.is_order_alone() => Err(mismatch),
        _ => Ok(()),
    }
}
