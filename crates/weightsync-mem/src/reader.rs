//! A worker's end of a segment.

mod asking;
mod join;
mod taking;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use weightsync_core::{Epoch, Run, Version, WorkerId};

use crate::error::{Error, bad, unexpected};
use crate::model::ModelDescription;
use crate::pins::{PinBook, PinnedSet};
use crate::protocol::MAX_MODELS;
use crate::shared::{Ending, ReaderExit};
use crate::snapshot::Snapshot;
use crate::socket::Socket;
use crate::sync::load_acquire;
use crate::wait::{Deadline, WaitStyle, passed};
use crate::watch::{EndNotice, ReaderInterrupter, Watch};
use crate::wire::Delivery;

pub use self::join::{ask_status, is_answered};

/// How long a sender that listens may take to answer: far more than it needs on a busy machine, but
/// little for a worker whose sender is stopped.
const ANSWER_TIME: Duration = Duration::from_millis(100);

/// The least time that a relay has for its sender's answer.
const RELAY_TIME: Duration = Duration::from_secs(1);

/// How a worker joins.
#[derive(Clone)]
pub struct AttachOptions {
    /// The segment's abstract socket name.
    pub address: String,
    /// The secret of the init info.
    pub secret: [u8; 16],
    /// This worker's number, unique among the sender's readers.
    pub worker: WorkerId,
    /// The highest epoch that this worker has seen; a sender below it is refused.
    pub seen: Epoch,
    /// How the reader waits for new versions.
    pub wait: WaitStyle,
    /// The wanted models, by index; `None` for all.
    pub models: Option<Vec<usize>>,
    /// Which versions the reader gets.
    pub delivery: Delivery,
    /// Where the worker's weights live, for people to read; at most [`MAX_DEVICE`](crate::wire::MAX_DEVICE) bytes.
    pub device: String,
    /// A number that the worker chooses when it first joins.
    pub instance: u64,
    /// Where the reader resumes, if it was at another segment of the same run before.
    pub resume: Resume,
}

/// What a reader has of a run when it moves from one segment to another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resume {
    /// The newest sequence number handed out: no set up to it comes again.
    pub sequence: u64,
    /// The number of its last question.
    pub question: u64,
}

impl fmt::Debug for AttachOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The secret stays out of logs.
        f.debug_struct("AttachOptions")
            .field("address", &self.address)
            .field("worker", &self.worker)
            .field("seen", &self.seen)
            .field("wait", &self.wait)
            .field("models", &self.models)
            .field("delivery", &self.delivery)
            .field("device", &self.device)
            .field("instance", &self.instance)
            .field("resume", &self.resume)
            .finish_non_exhaustive()
    }
}

/// A set that a reader has taken: one whole version of each wanted model that was published.
#[derive(Clone, Debug)]
pub struct Taken {
    /// Grows from one set to the next. Each publication up to this number is in the set, or was
    /// replaced. 0 for an answer other than the newest set: such a set says nothing about
    /// publications.
    pub sequence: u64,
    /// By model.
    pub members: Vec<TakenModel>,
}

/// One model of a set.
#[derive(Clone, Debug)]
pub struct TakenModel {
    /// The model's index in the segment.
    pub model: usize,
    /// Whether the version differs from the one in the set handed out before.
    pub changed: bool,
    /// The version.
    pub snapshot: Snapshot,
}

/// A worker's end of a segment: takes snapshots without a copy.
///
/// **Guarantee.** Each result is one whole set. Each version of it is checked against its commit
/// record, and stays valid until dropped. Every wait ends by its deadline, by the sender's death,
/// or by the sender's shutdown. A thread watches for both, and ends with the reader.
#[derive(Debug)]
pub struct SegmentReader {
    book: Arc<PinBook>,
    models: Vec<(usize, ModelDescription)>,
    run: Run,
    watch: Watch,
    wait: WaitStyle,
    delivery: Delivery,
    /// The newest sequence number handed out.
    sequence: u64,
    /// For a reader that takes every version: how many entries it has taken.
    head: u64,
    /// For each model, the version handed out last.
    versions: [Version; MAX_MODELS],
    /// The number of the last question, and whether its answer is awaited.
    question: u64,
    asks: bool,
    /// The next set of the queue, taken before its slots have arrived.
    unmapped: Option<PinnedSet>,
    /// The sender's process, if the segment is a relay's.
    relayed: u32,
    /// The worker has said that it can use nothing at all, and why.
    unusable: AtomicBool,
}

impl SegmentReader {
    /// The models that this reader wants, with their indices in the segment.
    pub fn models(&self) -> &[(usize, ModelDescription)] {
        &self.models
    }

    /// The run the sender belongs to.
    pub fn run(&self) -> Run {
        self.run
    }

    /// Which versions this reader gets.
    pub fn delivery(&self) -> Delivery {
        self.delivery
    }

    /// A handle that ends a wait in [`next`](Self::next) from another thread.
    pub fn interrupter(&self) -> ReaderInterrupter {
        self.watch.interrupter()
    }

    /// A handle that runs a function once nothing more will come from this segment.
    pub fn end(&self) -> EndNotice {
        self.watch.end()
    }

    /// Whether nothing more will come from this segment because its relay is gone.
    pub fn is_gone(&self) -> bool {
        let over = self.watch.is_over() || self.is_closed();
        over && matches!(self.why_over(), Error::RelayGone)
    }

    /// The sender's process; for a relay's segment, the process whose versions it carries.
    pub fn sender_pid(&self) -> u32 {
        match self.relayed {
            0 => self.book.socket().map_or(0, Socket::peer_pid),
            sender => sender,
        }
    }

    /// Whether the segment is a relay's.
    pub fn is_relayed(&self) -> bool {
        self.relayed != 0
    }

    /// Whether its mailbox was ever put on a set, taken or not.
    pub fn has_news(&self) -> bool {
        self.sequence > 0
            || self.book.mailbox().is_ok_and(|mailbox| {
                mailbox.live.0.load().is_some() || mailbox.queue.0.get(self.head).is_some()
            })
    }

    /// Where this reader would resume at another segment of the same run.
    pub fn resume(&self) -> Resume {
        Resume {
            sequence: self.sequence,
            question: self.question,
        }
    }

    /// The reader's newest set, without waiting; `None` before the first, or while one of its slots
    /// is still on its way. A reader that asks gets its last answer, unless the sender needed the
    /// room. A reader that takes every version gets none: its caller keeps or releases the sets
    /// itself.
    ///
    /// # Errors
    ///
    /// [`Error::CorruptSet`] or [`Error::CorruptCommit`] for an invalid record.
    pub fn latest(&mut self) -> Result<Option<Taken>, Error> {
        self.book.header.usable()?;
        if let Delivery::Every { .. } = self.delivery {
            return Ok(None);
        }
        // An answer is what a reader that asks was given last; it has no live set.
        let hold = match self.delivery {
            Delivery::Asked => self.book.pin_answer()?,
            Delivery::Newest | Delivery::Every { .. } => self.book.take_live()?,
        };
        match hold {
            // A new slot may still be on its way over the socket, and the caller does not want to
            // wait.
            Some(hold) => self.hand_out(hold, Some(Instant::now() + ANSWER_TIME)),
            None => Ok(None),
        }
    }

    /// Waits for a set that this reader has not handed out yet; `None` if the
    /// deadline comes first. By [`Delivery::Newest`] what was replaced meanwhile
    /// is passed over, by [`Delivery::Every`] the next in order comes. What is
    /// [asked](Self::ask) for comes by [`answer`](Self::answer).
    ///
    /// # Errors
    ///
    /// [`Error::SenderDied`] or [`Error::SenderClosed`], once everything the
    /// sender published has been handed out; [`Error::BadOption`] by
    /// [`Delivery::Asked`], as nothing would ever come; as
    /// [`latest`](Self::latest), and then what comes after the corrupt set is
    /// next. [`Error::Protocol`] or [`Error::Os`] once this reader cannot go on
    /// listening to a sender that lives: the sender has been told, and every call
    /// says so.
    pub fn next(&mut self, deadline: Deadline) -> Result<Option<Taken>, Error> {
        self.book.header.usable()?;
        // It was taken from the queue before, so it comes before all that is there now.
        if self.unmapped.is_some() {
            return self.take_unmapped(deadline);
        }
        let book = self.book.clone();
        let mailbox = book.mailbox()?;
        // Copied, because the look runs while the whole reader is borrowed.
        let (last, head) = (self.sequence, self.head);
        let found = match self.delivery {
            Delivery::Every { .. } => self.wait_for(0, deadline, || {
                mailbox.queue.0.get(head).map(|live| live.sequence)
            }),
            Delivery::Newest => self.wait_for(0, deadline, || {
                let live = mailbox.live.0.load()?;
                (live.sequence > last).then_some(live.sequence)
            }),
            Delivery::Asked => Err(bad(
                "the delivery of a reader that is told",
                "newest or every",
                "asked",
            )),
        };
        match found? {
            Some(sequence) => self.take(sequence, deadline),
            None => Ok(None),
        }
    }

    /// Tells the sender that the worker has loaded a set.
    ///
    /// # Errors
    ///
    /// [`Error::Forked`] in a forked child.
    pub fn applied(&self, taken: &Taken) -> Result<(), Error> {
        let members = taken.members.iter();
        self.applied_versions(
            taken.sequence,
            members.map(|member| (member.model, member.snapshot.version())),
        )
    }

    /// Like [`applied`](Self::applied), with the set's sequence number and the versions in it.
    ///
    /// # Errors
    ///
    /// As [`applied`](Self::applied), and [`Error::BadOption`] for a model that this reader does
    /// not have; then nothing is reported.
    pub fn applied_versions(
        &self,
        sequence: u64,
        versions: impl IntoIterator<Item = (usize, Version), IntoIter: Clone>,
    ) -> Result<(), Error> {
        self.book.header.usable()?;
        let versions = versions.into_iter();
        if let Some((model, _)) = versions.clone().find(|(model, _)| !self.has(*model)) {
            return Err(bad("the applied model", "a model of this reader", model));
        }
        // The words first, then the wake-up: the sender reads them at once.
        self.book.control()?.set_loaded(sequence, versions);
        self.book.wake_sender();
        Ok(())
    }

    /// Tells the sender that the worker cannot use a set, named by its sequence number, and why.
    /// `None` refuses every set, for example because of a wrong layout. For sequence 0, an answer
    /// other than the newest set, no send waits, so nothing is reported.
    ///
    /// # Errors
    ///
    /// Those of the operating system, and [`Error::Protocol`] if the sender ignores this reader. A
    /// sender that is gone need not know.
    pub fn refuse(&self, sequence: Option<u64>, reason: &str) -> Result<(), Error> {
        self.book.header.usable()?;
        // No publication has this number, so no line of a report could say it.
        if sequence == Some(0) {
            return Ok(());
        }
        match self.book.refuse(sequence.unwrap_or(0), reason)? {
            true => {
                if sequence.is_none() {
                    self.unusable.store(true, Ordering::Relaxed);
                }
                Ok(())
            }
            // A full socket at a live sender: it does not listen to this reader.
            false => self.unheard().map_or(Ok(()), Err),
        }
    }

    /// Waits until a look finds something; `None` if the deadline or an interrupt comes first. The
    /// sender wakes it for the answer to this question, or, for 0, for notifications.
    fn wait_for<T>(
        &self,
        question: u64,
        deadline: Deadline,
        look: impl Fn() -> Option<T>,
    ) -> Result<Option<T>, Error> {
        let glance = || match look() {
            // An interrupt ends the yields. The loop below takes it, so that it ends one wait only.
            None if self.watch.is_interrupted() => Some(None),
            found => found.map(Some),
        };
        if let Some(Some(found)) = self.wait.brief(deadline, glance) {
            return Ok(Some(found));
        }
        loop {
            // Checked before the last look, so that sets published before the end are still handed
            // out.
            let over = self.watch.is_over() || self.is_closed();
            if let Some(found) = look() {
                return Ok(Some(found));
            }
            if over {
                return Err(self.why_over());
            }
            if self.watch.take_interrupt() || passed(deadline) {
                return Ok(None);
            }
            // May wake without a reason, so the loop looks at everything again.
            self.watch.sleep(question, || look().is_none(), deadline)?;
        }
    }

    fn has(&self, model: usize) -> bool {
        self.models.iter().any(|(mine, _)| *mine == model)
    }

    fn is_closed(&self) -> bool {
        self.ending().is_some()
    }

    fn ending(&self) -> Option<Ending> {
        Ending::of(load_acquire(&self.book.header().closed.0))
    }

    fn is_hung_up(&self) -> Result<bool, Error> {
        Ok(crate::service::is_gone(self.book.socket()?))
    }

    /// Why a live sender cannot be told something.
    fn unheard(&self) -> Option<Error> {
        // A sender that is gone is noticed elsewhere, by a better error.
        let gone = self.is_closed() || self.is_hung_up().unwrap_or(true);
        (!gone).then(|| unexpected("a sender that reads", "a socket that is full".into()))
    }

    fn why_over(&self) -> Error {
        let pid = self.sender_pid();
        // What the sender or the relay wrote in the header counts first: the hang-up looks the same
        // in each case.
        match self.ending() {
            Some(Ending::Closed) => return Error::SenderClosed,
            Some(Ending::Died) => return Error::SenderDied { pid },
            Some(Ending::Moved) => return Error::RelayGone,
            None => {}
        }
        let died = match self.is_relayed() {
            true => Error::RelayGone,
            false => Error::SenderDied { pid },
        };
        match self.watch.fault() {
            // Whatever was wrong before, the sender is gone now.
            Some(_) if self.is_hung_up().unwrap_or(false) => died,
            fault => fault.unwrap_or(died),
        }
    }
}

impl Drop for SegmentReader {
    fn drop(&mut self) {
        // Snapshots may live on, and with them the socket and the pins. The sender only stops
        // waiting for this worker.
        if self.book.header.usable().is_ok()
            && let Ok(control) = self.book.control()
        {
            // Relaxed: the caller of `refuse` and this drop are ordered by the ownership of the
            // reader.
            let parting = match self.unusable.load(Ordering::Relaxed) {
                true => ReaderExit::Failed,
                false => ReaderExit::InOrder,
            };
            control.left.store(parting.word(), Ordering::Release);
            // A send may wait for this worker.
            self.book.wake_sender();
            if let Ok(mailbox) = self.book.mailbox() {
                // Others may wait for a record that this mailbox keeps.
                self.book.notify_room(mailbox);
            }
        }
    }
}
