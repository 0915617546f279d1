//! The trainer's end: send, report, lend a slot.

use std::time::{Duration, Instant};

use weightsync_core::{Digest, Dtype, Layout, Run, TensorSpec, Version};
use weightsync_mem::{ReaderStatus, Source, Writer};

use crate::digest::DigestThread;
use crate::error::{Error, Result};
use crate::extract::{Asked, Extracted, TensorData, WeightExtractor};
use crate::init_info::InitInfo;
use crate::report::Report;
use crate::setup::SenderSetup;

/// How far a send waits. Each level includes the one before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum WaitFor {
    /// The version is live: a worker that looks finds it.
    Sent,
    /// Every worker has loaded it, or has a line in the report that says why
    /// not.
    #[default]
    Applied,
}

/// The trainer's end of a connected model.
///
/// Dropping it shuts it down: workers are told, keep what they hold, and
/// nothing of it is left in the system.
#[derive(Debug)]
pub struct Sender {
    setup: SenderSetup,
    writer: Writer,
    run: Run,
    digest: Option<DigestThread>,
}

impl Sender {
    pub(crate) fn new(
        setup: SenderSetup,
        writer: Writer,
        run: Run,
        digest: Option<DigestThread>,
    ) -> Self {
        Self {
            setup,
            writer,
            run,
            digest,
        }
    }

    pub(crate) fn writer(&mut self) -> &mut Writer {
        &mut self.writer
    }

    /// Publishes `weights` as the next version and waits until every worker
    /// has loaded it, or has a line in the report that says why not.
    ///
    /// The source is read during the call and at no other time.
    ///
    /// # Errors
    ///
    /// [`Error::WrongWeights`] names every tensor that is not as it was set up,
    /// before a slot is waited for. [`weightsync_mem::Error::AllSlotsPinned`]
    /// names the workers that hold every slot. After these, and whatever the
    /// source objects, nothing was published and the old version serves on.
    ///
    /// One failure can come later: the operating system may refuse the wait for
    /// the workers. Then the new version is live, as [`version`](Self::version)
    /// says, and only what became of it is unknown.
    pub fn send(&mut self, weights: &impl WeightExtractor) -> Result<Report> {
        self.send_and(weights, WaitFor::Applied, self.setup.deadline)
    }

    /// As [`send`](Self::send), waiting as far and as long as is said here.
    ///
    /// # Errors
    ///
    /// As [`send`](Self::send).
    pub fn send_and(
        &mut self,
        weights: &impl WeightExtractor,
        wait: WaitFor,
        deadline: Duration,
    ) -> Result<Report> {
        let since = Instant::now();
        self.publish(weights, since.checked_add(deadline))?;
        report(&mut self.writer, &self.setup, since, wait, deadline)
    }

    /// Lends a free slot to write the next version into: the model's own
    /// extraction is then the only pass over memory.
    ///
    /// # Errors
    ///
    /// As [`send`](Self::send).
    pub fn loan(&mut self) -> Result<Loan<'_>> {
        let since = Instant::now();
        let version = self.writer.version().next();
        let slot = self.writer.loan(since.checked_add(self.setup.deadline))?;
        Ok(Loan {
            slot,
            setup: &self.setup,
            digest: self.digest.as_ref(),
            version,
            since,
        })
    }

    /// The version published last.
    pub fn version(&self) -> Version {
        self.writer.version()
    }

    /// The run this sender belongs to.
    pub fn run(&self) -> Run {
        self.run
    }

    /// The tensors as workers see them.
    pub fn layout(&self) -> &Layout {
        &self.setup.layout
    }

    /// What further workers need to join.
    pub fn init_info(&self) -> InitInfo {
        self.setup.init_info()
    }

    /// Every connected worker with the version it has loaded.
    pub fn workers(&self) -> Vec<ReaderStatus> {
        self.writer.readers()
    }

    /// The sender's own view of the version published last, to save or compare.
    ///
    /// # Errors
    ///
    /// In a forked child.
    pub fn snapshot(&self) -> Result<crate::Snapshot> {
        let held = self.writer.snapshot()?;
        // `connect` publishes before it returns a sender.
        let held = held.unwrap_or_else(|| unreachable!("a connected sender has published"));
        Ok(crate::Snapshot::new(self.setup.model.clone(), held))
    }

    /// Makes the digest of the version published last, and stores it where
    /// workers find it.
    ///
    /// # Errors
    ///
    /// In a forked child.
    pub fn digest(&self) -> Result<Digest> {
        let snapshot = self.writer.snapshot()?;
        let snapshot = snapshot.unwrap_or_else(|| unreachable!("a connected sender has published"));
        let digest = snapshot.digest();
        snapshot.publish_digest(digest);
        Ok(digest)
    }

    pub(crate) fn publish(
        &mut self,
        weights: &impl WeightExtractor,
        deadline: weightsync_mem::Deadline,
    ) -> Result<()> {
        let Self {
            setup,
            writer,
            digest,
            ..
        } = self;
        let version = writer.version().next();
        if let Some(sources) = known_bytes(setup, weights) {
            let mut loan = writer.loan(deadline)?;
            loan.write(&sources, setup.copy)?;
            order_digest(loan.publish(version)?, digest.as_ref());
            return Ok(());
        }
        let mut writer = Some(writer);
        let mut written = None;
        weights.extract(&mut |tensors| {
            let writer = writer.take().ok_or_else(|| lent(setup, "more than once"))?;
            // Wrong weights are refused before a slot is waited for, or made.
            let loan = match as_they_lie(setup, tensors) {
                Some(sources) => {
                    let mut loan = writer.loan(deadline)?;
                    loan.write(&sources, setup.copy)?;
                    loan
                }
                None => {
                    let ordered = in_order(setup, tensors)?;
                    let mut loan = writer.loan(deadline)?;
                    write_converted(&mut loan, setup, &ordered)?;
                    loan
                }
            };
            written = Some(loan);
            Ok(())
        })?;
        // Only now is it known that the source has nothing to object.
        let loan = written.ok_or_else(|| lent(setup, "not at all"))?;
        order_digest(loan.publish(version)?, digest.as_ref());
        Ok(())
    }
}

/// A slot lent to the trainer's own extraction; see [`Sender::loan`].
///
/// Dropped without [`publish`](Self::publish), nothing has happened.
#[derive(Debug)]
pub struct Loan<'a> {
    slot: weightsync_mem::Loan<'a>,
    setup: &'a SenderSetup,
    digest: Option<&'a DigestThread>,
    version: Version,
    since: Instant,
}

impl Loan<'_> {
    /// The tensors to write.
    pub fn layout(&self) -> &Layout {
        &self.setup.layout
    }

    /// One tensor's place: contiguous, row-major, little-endian. It holds bytes
    /// of some older version at first: write all of it.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchTensor`].
    pub fn tensor_mut(&mut self, name: &str) -> Result<&mut [u8]> {
        let layout = &self.setup.layout;
        let index = layout.index_of(name).ok_or_else(|| Error::NoSuchTensor {
            name: name.into(),
            known: layout
                .tensors()
                .iter()
                .map(|tensor| tensor.name.clone())
                .collect(),
        })?;
        Ok(self.slot.tensor_mut(index))
    }

    /// Every tensor's place in layout order, to be written in any order and
    /// from any number of threads.
    pub fn tensors_mut(&mut self) -> Vec<&mut [u8]> {
        self.slot.tensors_mut()
    }

    /// Makes what was written the next version and waits until every worker has
    /// loaded it, or has a line in the report that says why not.
    ///
    /// # Errors
    ///
    /// Those of the memory. As after a [`send`](Sender::send), the version is
    /// live all the same if it was the wait for the workers that failed.
    pub fn publish(self) -> Result<Report> {
        let deadline = self.setup.deadline;
        self.publish_and(WaitFor::Applied, deadline)
    }

    /// As [`publish`](Self::publish), waiting as far and as long as is said
    /// here; the time since the slot was lent counts.
    ///
    /// # Errors
    ///
    /// As [`publish`](Self::publish).
    pub fn publish_and(self, wait: WaitFor, deadline: Duration) -> Result<Report> {
        let Self {
            slot,
            setup,
            digest,
            version,
            since,
        } = self;
        let writer = slot.publish(version)?;
        order_digest(writer, digest);
        report(writer, setup, since, wait, deadline)
    }
}

/// An extractor that breaks its guarantee.
fn lent(setup: &SenderSetup, how_often: &str) -> Error {
    Error::Extract {
        name: format!("every tensor of {}", setup.model),
        source: format!(
            "its extractor lent the tensors {how_often}: it must call `take` once, and pass on what that returns"
        )
        .into(),
    }
}

/// Has the digest of what was just published made, where that is wanted. The
/// version is live: it may have to do without a digest, but nothing has failed.
fn order_digest(writer: &Writer, thread: Option<&DigestThread>) {
    let Some(thread) = thread else { return };
    match writer.snapshot() {
        Ok(Some(snapshot)) => thread.digest_next(snapshot),
        Ok(None) => {}
        Err(error) => {
            tracing::warn!(version = %writer.version(), %error, "no digest is made of this version");
        }
    }
}

/// Waits as far as wanted, and says what became of the version published last.
fn report(
    writer: &mut Writer,
    setup: &SenderSetup,
    since: Instant,
    wait: WaitFor,
    deadline: Duration,
) -> Result<Report> {
    let copied = since.elapsed();
    let version = writer.version();
    let workers = match wait {
        WaitFor::Sent => Vec::new(),
        WaitFor::Applied => writer.wait_applied(version, since.checked_add(deadline))?,
    };
    Ok(Report {
        model: setup.model.clone(),
        version,
        bytes: setup.layout.payload_bytes(),
        copied,
        took: since.elapsed(),
        workers: workers.into_iter().map(Into::into).collect(),
    })
}

/// The bytes of every tensor of a source that knows it has the setup's layout,
/// where nothing is to be cast.
fn known_bytes<'a>(
    setup: &SenderSetup,
    weights: &'a impl WeightExtractor,
) -> Option<Vec<Source<'a>>> {
    if setup.source != setup.layout {
        return None;
    }
    let bytes = weights.plain_bytes(&setup.source, Asked(()))?;
    let specs = setup.layout.tensors();
    // The copy relies on it.
    let fits = |(bytes, spec): (&&[u8], &TensorSpec)| bytes.len() as u64 == spec.range.len;
    let all = bytes.len() == specs.len() && bytes.iter().zip(specs).all(fits);
    all.then(|| bytes.into_iter().map(Source::Bytes).collect())
}

/// The bytes of every tensor, if they are those of the setup, in its order, and
/// need no more than a copy.
fn as_they_lie<'a>(setup: &SenderSetup, tensors: &[Extracted<'a>]) -> Option<Vec<Source<'a>>> {
    let expected = setup.source.tensors();
    if tensors.len() != expected.len() {
        return None;
    }
    let mut sources = Vec::with_capacity(tensors.len());
    for ((got, expected), spec) in tensors.iter().zip(expected).zip(setup.layout.tensors()) {
        if !is_as_expected(got, expected) {
            return None;
        }
        let bytes = as_it_lies(&got.data, spec.dtype)?;
        // The copy relies on it.
        if bytes.len() as u64 != spec.range.len {
            return None;
        }
        sources.push(Source::Bytes(bytes));
    }
    Some(sources)
}

/// Writes tensors that come in another order, are to be cast, or do not lie
/// side by side in memory.
fn write_converted(
    loan: &mut weightsync_mem::Loan<'_>,
    setup: &SenderSetup,
    ordered: &[&TensorData<'_>],
) -> Result<()> {
    let specs = setup.layout.tensors();
    let fills: Vec<_> = ordered
        .iter()
        .zip(specs)
        .map(|(data, spec)| |place: &mut [u8]| data.write_into(place, spec.dtype))
        .collect();
    let sources: Vec<_> = ordered
        .iter()
        .zip(&fills)
        .zip(specs)
        .map(|((data, fill), spec)| match as_it_lies(data, spec.dtype) {
            Some(bytes) => Source::Bytes(bytes),
            None => Source::Fill(fill),
        })
        .collect();
    Ok(loan.write(&sources, setup.copy)?)
}

fn is_as_expected(got: &Extracted<'_>, expected: &TensorSpec) -> bool {
    got.name == expected.name
        && got.data.dtype() == expected.dtype
        && got.data.shape() == expected.shape
}

/// The tensors in the order of the layout, if they are those of the setup.
fn in_order<'a, 'b>(
    setup: &SenderSetup,
    tensors: &'a [Extracted<'b>],
) -> Result<Vec<&'a TensorData<'b>>> {
    let expected = setup.source.tensors();
    let same = tensors.len() == expected.len()
        && tensors
            .iter()
            .zip(expected)
            .all(|(got, expected)| is_as_expected(got, expected));
    if same {
        return Ok(tensors.iter().map(|tensor| &tensor.data).collect());
    }
    // Another order is fine; anything else is named in full.
    let specs = tensors.iter().map(|tensor| {
        (
            tensor.name.to_owned(),
            tensor.data.dtype(),
            tensor.data.shape().to_vec(),
        )
    });
    let got = Layout::new(specs)?;
    if let Err(mismatch) = Layout::compare(&setup.source, &got)
        && !mismatch.is_order_alone()
    {
        let model = setup.model.clone();
        return Err(Error::WrongWeights {
            model,
            mismatch: Box::new(mismatch),
        });
    }
    let place = |name: &str| got.index_of(name).map(|index| &tensors[index].data);
    Ok(expected
        .iter()
        .filter_map(|spec| place(&spec.name))
        .collect())
}

/// The bytes, if they need no more than a copy.
fn as_it_lies<'a>(data: &TensorData<'a>, dtype: Dtype) -> Option<&'a [u8]> {
    match data {
        TensorData::InMemory(tensor) if tensor.dtype() == dtype => tensor.contiguous_bytes(),
        _ => None,
    }
}
