//! The sender's end of a segment.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use weightsync_core::record::CommitRecord;
use weightsync_core::{Layout, Run, Version, WorkerId};

use crate::error::{Error, Holder};
use crate::loan::Loan;
use crate::map::OwnedFile;
use crate::pins::{Home, PinBook};
use crate::protocol::{Live, MAX_SLOTS, PinWord, SlotSet};
use crate::roster::Shared;
use crate::service;
use crate::snapshot::Snapshot;
use crate::socket::Socket;
use crate::spans::{CHECKSUM_BLOCK, Spans};
use crate::wait::{Deadline, Doorbell, WaitStyle, passed, poll};

/// How a segment is made.
#[derive(Clone, Copy, Debug)]
pub struct SegmentOptions {
    /// Slots made at the beginning: at least 2, one live and one to write.
    pub slots: u8,
    /// Slots it may grow to when all are pinned; equal to `slots` it waits
    /// instead. At most [`MAX_SLOTS`].
    pub max_slots: u8,
    /// How the sender waits for its readers.
    pub wait: WaitStyle,
}

impl Default for SegmentOptions {
    fn default() -> Self {
        Self {
            slots: 2,
            max_slots: 2,
            wait: WaitStyle::default(),
        }
    }
}

/// What became of a version at one reader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The worker has loaded it (or a newer one).
    Applied,
    /// The worker cannot use it and goes on with the version it had.
    Refused {
        /// The worker's reason.
        reason: String,
    },
    /// The worker's process died.
    Died,
    /// The worker closed its end in order.
    Left,
    /// The deadline came first.
    Late,
}

/// One line of a send's result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReaderOutcome {
    /// Which worker.
    pub worker: WorkerId,
    /// Its process.
    pub pid: u32,
    /// What became of the version there.
    pub outcome: Outcome,
    /// The version it reports as loaded; `Version::NONE` before the first.
    pub applied: Version,
    /// How long after the publication the sender learned of it.
    pub after: Duration,
}

/// A reader as the sender sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReaderStatus {
    /// Which worker.
    pub worker: WorkerId,
    /// Its process.
    pub pid: u32,
    /// The newest version it has loaded; `Version::NONE` before the first.
    pub applied: Version,
}

/// The sender's end: it alone writes the segment.
///
/// **Guarantee.** A version becomes visible whole or not at all, also if this
/// process is killed at any moment; a slot that anybody holds is not written.
///
/// A thread of its own accepts readers and notices their deaths. Dropping the
/// writer tells the readers that it closed, ends the thread and frees the
/// memory; snapshots that readers hold stay valid.
#[derive(Debug)]
pub struct Writer {
    shared: Arc<Shared>,
    service: Option<JoinHandle<()>>,
    layout: Layout,
    spans: Spans,
    slots: Vec<OwnedFile>,
    options: SegmentOptions,
    sequence: u64,
    live: Option<(Live, Version)>,
    published_at: Instant,
}

impl Writer {
    /// Makes the segment, faults its slots in and begins to accept readers at
    /// the abstract socket name `address`.
    ///
    /// # Errors
    ///
    /// [`Error::AddressInUse`] if another sender lives there, [`Error::Os`] if
    /// memory or descriptors run out, [`Error::BadOption`].
    pub fn create(
        address: &str,
        secret: [u8; 16],
        run: Run,
        layout: &Layout,
        options: SegmentOptions,
    ) -> Result<Self, Error> {
        check(&options)?;
        let listener = Socket::listen(address)?;
        let spans = Spans::new(layout);
        let slots = make_slots(options.slots, spans.slot_bytes())?;
        let doorbell = Arc::new(Doorbell::new()?);
        let shared = Shared::new(run, layout, secret, &slots, doorbell)?;
        let service = service::start(shared.clone(), listener)?;
        Ok(Self {
            shared,
            service: Some(service),
            layout: layout.clone(),
            spans,
            slots,
            options,
            sequence: 0,
            live: None,
            published_at: Instant::now(),
        })
    }

    /// The layout every version follows.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The version published last; `Version::NONE` before the first.
    pub fn version(&self) -> Version {
        self.live.map_or(Version::NONE, |(_, version)| version)
    }

    /// How many slots there are at present.
    pub fn slots(&self) -> usize {
        self.slots.len()
    }

    /// Lends a free slot to write the next version into.
    ///
    /// If every slot is pinned, the segment grows if its options allow, else
    /// this waits until one comes free.
    ///
    /// # Errors
    ///
    /// [`Error::AllSlotsPinned`] at the deadline, naming the holders.
    pub fn loan(&mut self, deadline: Deadline) -> Result<Loan<'_>, Error> {
        self.shared.header.map.usable()?;
        let slot = match self.free_slot() {
            Some(slot) => slot,
            None if self.slots.len() < usize::from(self.options.max_slots) => self.grow()?,
            None => self.wait_for_slot(deadline)?,
        };
        Ok(Loan::new(self, slot))
    }

    /// Waits until every reader has applied `version` (or a newer one), has
    /// refused it, has gone, or the deadline comes; one line for each reader
    /// that was there at the call or has gone since the last one.
    ///
    /// # Errors
    ///
    /// Only of the operating system: what goes wrong at a reader is its line.
    pub fn wait_applied(
        &mut self,
        version: Version,
        deadline: Deadline,
    ) -> Result<Vec<ReaderOutcome>, Error> {
        self.shared.header.map.usable()?;
        let mut pending = self.shared.present();
        let mut lines = Vec::with_capacity(pending.len());
        let since = self.published_at;
        let shared = self.shared.clone();
        let done = self.wait_until(deadline, || {
            lines.extend(shared.settle(version, &mut pending, since.elapsed()));
            pending.is_empty().then_some(())
        })?;
        if done.is_none() {
            lines.extend(shared.late(&pending, since.elapsed()));
        }
        lines.sort_by_key(|line| line.worker);
        Ok(lines)
    }

    /// The readers connected at present, by worker.
    pub fn readers(&self) -> Vec<ReaderStatus> {
        self.shared.readers()
    }

    /// Waits until `enough`, given the readers present and those that cannot use
    /// the model, is content. False if the deadline came first.
    ///
    /// # Errors
    ///
    /// Only of the operating system.
    pub fn wait_readers(
        &mut self,
        deadline: Deadline,
        mut enough: impl FnMut(&[ReaderStatus], &[WorkerId]) -> bool,
    ) -> Result<bool, Error> {
        self.shared.header.map.usable()?;
        let shared = self.shared.clone();
        let met = self.wait_until(deadline, || {
            enough(&shared.readers(), &shared.rejected()).then_some(())
        })?;
        Ok(met.is_some())
    }

    /// Takes the readers that cannot use the model, with the reason; those not
    /// taken are lines of the next [`wait_applied`](Self::wait_applied).
    pub fn take_rejected(&self) -> Vec<(WorkerId, String)> {
        self.shared.take_rejected()
    }

    /// The sender's own hold on what it published last.
    ///
    /// # Errors
    ///
    /// [`Error::Forked`] in a forked child.
    pub fn snapshot(&self) -> Result<Option<Snapshot>, Error> {
        let Some(pin) = self.shared.own.pin_live()? else {
            return Ok(None);
        };
        let slot = self.slots[usize::from(pin.live.slot)].map.clone();
        Snapshot::new(pin, slot, &self.layout, self.shared.run).map(Some)
    }

    #[cfg(test)]
    pub(crate) fn header(&self) -> &crate::shared::Header {
        self.shared.header()
    }

    pub(crate) fn spans(&self) -> &Spans {
        &self.spans
    }

    pub(crate) fn slot(&self, slot: u8) -> &OwnedFile {
        &self.slots[usize::from(slot)]
    }

    /// Makes a written slot the live version.
    pub(crate) fn publish(
        &mut self,
        slot: u8,
        version: Version,
        checksum_table: Option<u64>,
    ) -> Result<(), Error> {
        if version <= self.version() {
            return Err(Error::VersionNotNewer {
                live: self.version(),
                got: version,
            });
        }
        let header = self.shared.header();
        header.write_record(
            slot,
            &CommitRecord {
                run: self.shared.run,
                version,
                layout: self.layout.id(),
                bytes: self.layout.bytes(),
                checksum_block: checksum_table.map_or(0, |_| CHECKSUM_BLOCK as u64),
                checksum_table: checksum_table.unwrap_or(0),
            },
        );
        self.sequence += 1;
        let live = Live {
            sequence: self.sequence,
            slot,
        };
        self.published_at = Instant::now();
        self.shared.note_slot(slot, version);
        header.live.0.swap_in(live);
        self.live = Some((live, version));
        self.shared.wake_sleepers();
        Ok(())
    }

    fn held(&self) -> SlotSet {
        let held = self.shared.held().union(self.shared.own.word().held());
        self.live.map_or(held, |(live, _)| held.with(live.slot))
    }

    fn free_slot(&self) -> Option<u8> {
        self.held().first_free(self.slots.len() as u8)
    }

    fn grow(&mut self) -> Result<u8, Error> {
        let file = OwnedFile::new("weightsync-slot", self.spans.slot_bytes())?;
        let index = self.slots.len() as u8;
        self.shared.add_slot(index, &file)?;
        self.slots.push(file);
        Ok(index)
    }

    fn wait_for_slot(&mut self, deadline: Deadline) -> Result<u8, Error> {
        let since = Instant::now();
        let (shared, live, slots) = (self.shared.clone(), self.live, self.slots.len() as u8);
        let free = self.wait_until(deadline, || {
            let held = shared.held().union(shared.own.word().held());
            live.map_or(held, |(live, _)| held.with(live.slot))
                .first_free(slots)
        })?;
        free.ok_or_else(|| Error::AllSlotsPinned {
            slots,
            waited: since.elapsed(),
            holders: self.holders(),
        })
    }

    /// Who holds slots, with the versions in them.
    fn holders(&self) -> Vec<Holder> {
        let mut holders = self.shared.holders();
        let versions = self.shared.versions(self.shared.own.word().held());
        if !versions.is_empty() {
            holders.push(Holder {
                worker: None,
                pid: std::process::id(),
                versions,
            });
        }
        holders
    }

    /// Looks again and again until something is found or the deadline comes.
    /// Readers ring the doorbell only while the sender sleeps.
    fn wait_until<T>(
        &self,
        deadline: Deadline,
        mut look: impl FnMut() -> Option<T>,
    ) -> Result<Option<T>, Error> {
        if let Some(found) = self.options.wait.brief(deadline, &mut look) {
            return Ok(Some(found));
        }
        let sleep = &self.shared.header().sender.0;
        loop {
            sleep.announce();
            let found = look();
            if found.is_some() || passed(deadline) {
                sleep.awake();
                return Ok(found);
            }
            let woken = poll([std::os::fd::AsFd::as_fd(&*self.shared.doorbell)], deadline);
            sleep.awake();
            self.shared.doorbell.silence();
            woken?;
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        if self.shared.header.map.usable().is_err() {
            // A forked child's copy: the thread and the memory are the parent's.
            if let Some(service) = self.service.take() {
                std::mem::forget(service);
            }
            return;
        }
        self.shared.close();
        if let Some(service) = self.service.take() {
            // A panic there has been reported by the panic hook already.
            let _ = service.join();
        }
    }
}

/// Makes the first slots. Large ones side by side: the kernel clears their pages
/// one by one, which takes ten times as long as a copy.
fn make_slots(count: u8, bytes: usize) -> Result<Vec<OwnedFile>, Error> {
    const LARGE: usize = 16 << 20;
    let make = || OwnedFile::new("weightsync-slot", bytes);
    if bytes < LARGE {
        return (0..count).map(|_| make()).collect();
    }
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..count).map(|_| scope.spawn(make)).collect();
        let made = threads.into_iter().map(|thread| {
            thread
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
        made.collect()
    })
}

fn check(options: &SegmentOptions) -> Result<(), Error> {
    let bad = |option, expected, got: u8| {
        Err(Error::BadOption {
            option,
            expected,
            got: got.to_string(),
        })
    };
    if !(2..=MAX_SLOTS as u8).contains(&options.slots) {
        return bad("slots", "between 2 and 64", options.slots);
    }
    if !(options.slots..=MAX_SLOTS as u8).contains(&options.max_slots) {
        return bad("max_slots", "between slots and 64", options.max_slots);
    }
    Ok(())
}

/// The sender's own pins: in its private memory, by the same protocol.
pub(crate) fn own_pins(header: &OwnedFile, doorbell: &Arc<Doorbell>) -> Arc<PinBook> {
    let home = Home::Sender(PinWord::new());
    Arc::new(PinBook::new(home, header.map.clone(), doorbell.clone()))
}
