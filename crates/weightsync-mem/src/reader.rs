//! A worker's end of a segment.

mod asking;
mod join;
mod taking;
#[cfg(test)]
mod tests;

use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use weightsync_core::{Epoch, Run, Version, WorkerId};

use crate::error::{Error, unexpected};
use crate::interrupt;
use crate::map::{Mapping, OwnedFile};
use crate::model::{Description, Model, ModelSpec};
use crate::pins::{Hold, Home, PinBook};
use crate::protocol::{MAX_BOUND, MAX_MODELS};
use crate::set::Models;
use crate::shared::{
    CONTROL_BYTES, Control, Ending, Exit, HEADER_BYTES, MAILBOX_BYTES, MODEL_PAGE_BYTES,
};
use crate::slot::Slot;
use crate::snapshot::Snapshot;
use crate::socket::{Packet, Socket};
use crate::spans::SlotShape;
use crate::sync::load_acquire;
use crate::wait::{Deadline, Doorbell, WaitStyle, passed, poll};
use crate::watch::{End, Interrupter, Mapped, Watch};
use crate::wire::{Delivery, FromReader, FromSender, MAX_DEVICE};

/// How long a sender that listens has to answer: far more than it needs on a
/// busy machine, and little for a worker whose sender stands still.
const ANSWER_TIME: Duration = Duration::from_millis(100);

/// How long a relay has for its sender's answer, at the least.
const RELAY_TIME: Duration = Duration::from_secs(1);

/// Who joins, and on what terms.
#[derive(Clone)]
pub struct AttachOptions {
    /// The segment's abstract socket name.
    pub address: String,
    /// The secret of the init info.
    pub secret: [u8; 16],
    /// This worker's number, unique among the sender's readers.
    pub worker: WorkerId,
    /// The highest epoch this worker has seen; a sender below it is refused.
    pub seen: Epoch,
    /// How it waits for new versions.
    pub wait: WaitStyle,
    /// The models it wants, by index; `None` for all.
    pub models: Option<Vec<usize>>,
    /// Which versions it is given.
    pub delivery: Delivery,
    /// Where its weights live, for people to read; at most [`MAX_DEVICE`] bytes.
    pub device: String,
    /// Chosen by the worker when it first joined.
    pub instance: u64,
    /// Where it goes on, if it was at another segment of the same run before.
    pub resume: Resume,
}

/// What a reader had of a run when it leaves one segment for another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resume {
    /// The newest sequence number it was handed: nothing up to it comes again.
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

/// A set as a reader takes it: for each model it wants that has been published,
/// one whole version.
#[derive(Clone, Debug)]
pub struct Taken {
    /// Grows from one to the next at a reader; a publication of this or a lower
    /// number is in it, or was replaced. 0 for what was asked for in addition to what is
    /// meant for the reader: it says nothing about publications.
    pub sequence: u64,
    /// By model.
    pub members: Vec<Member>,
}

/// One model of a set.
#[derive(Clone, Debug)]
pub struct Member {
    /// Its index in the segment.
    pub model: usize,
    /// Whether it is another version than in the set handed out before.
    pub changed: bool,
    /// The version.
    pub snapshot: Snapshot,
}

/// A worker's end of a segment: takes snapshots without a copy.
///
/// **Guarantee.** What it hands out is one whole set, each version of it checked
/// against its commit record, and stays so until dropped. Every wait ends by its
/// deadline, by the sender's death, or by the sender's shutdown: a thread of its
/// own, which ends with it, watches for both.
#[derive(Debug)]
pub struct Reader {
    book: Arc<PinBook>,
    models: Vec<(usize, ModelSpec)>,
    run: Run,
    watch: Watch,
    wait: WaitStyle,
    delivery: Delivery,
    /// The newest sequence number handed out.
    sequence: u64,
    /// Of a reader that takes every version: how many it has taken.
    head: u64,
    /// By model, what was handed out last.
    versions: [Version; MAX_MODELS],
    /// The number of its last question, and whether it waits for the answer.
    question: u64,
    asks: bool,
    /// The next of its queue, taken from it before its slots had come.
    unmapped: Option<Hold>,
    /// The sender's process, if the segment is a relay's.
    relayed: u32,
    /// It has said that it can use nothing at all, and why.
    unusable: AtomicBool,
}

impl Reader {
    /// The models this reader wants, with their indices in the segment.
    pub fn models(&self) -> &[(usize, ModelSpec)] {
        &self.models
    }

    /// The run the sender belongs to.
    pub fn run(&self) -> Run {
        self.run
    }

    /// Which versions this reader is given.
    pub fn delivery(&self) -> Delivery {
        self.delivery
    }

    /// What ends a wait in [`next`](Self::next) from another thread.
    pub fn interrupter(&self) -> Interrupter {
        self.watch.interrupter()
    }

    /// What has something done once nothing more will come from this segment.
    pub fn end(&self) -> End {
        self.watch.end()
    }

    /// Whether nothing more will come from this segment because its relay is gone.
    pub fn is_gone(&self) -> bool {
        let over = self.watch.is_over() || self.is_closed();
        over && matches!(self.why_over(), Error::RelayGone)
    }

    /// The sender's process; of a segment of a relay, that whose versions it
    /// carries.
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

    /// Whether its mailbox has ever been told of a set, taken or not.
    pub fn has_news(&self) -> bool {
        self.sequence > 0
            || self.book.mailbox().is_ok_and(|mailbox| {
                mailbox.live.0.load().is_some() || mailbox.queue.0.get(self.head).is_some()
            })
    }

    /// Where it goes on at another segment of the same run.
    pub fn resume(&self) -> Resume {
        Resume {
            sequence: self.sequence,
            question: self.question,
        }
    }

    /// The newest set meant for this reader, without waiting; `None` before the
    /// first, or while a slot of it is still on its way here. A reader that asks gets what it asked for last, unless the sender
    /// needed the room; one that takes every version gets none: what it has taken
    /// is its caller's to keep, or to release.
    ///
    /// # Errors
    ///
    /// [`Error::CorruptSet`] or [`Error::CorruptCommit`] if a record does not
    /// hold together.
    pub fn latest(&mut self) -> Result<Option<Taken>, Error> {
        self.book.header.usable()?;
        if let Delivery::Every { .. } = self.delivery {
            return Ok(None);
        }
        let hold = match self.delivery {
            Delivery::Asked => self.book.pin_answer()?,
            Delivery::Newest | Delivery::Every { .. } => self.book.take_live()?,
        };
        match hold {
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
        if self.unmapped.is_some() {
            return self.take_unmapped(deadline);
        }
        let book = self.book.clone();
        let mailbox = book.mailbox()?;
        let (last, head) = (self.sequence, self.head);
        let found = match self.delivery {
            Delivery::Every { .. } => self.wait_for(0, deadline, || {
                mailbox.queue.0.get(head).map(|live| live.sequence)
            }),
            Delivery::Newest => self.wait_for(0, deadline, || {
                let live = mailbox.live.0.load()?;
                (live.sequence > last).then_some(live.sequence)
            }),
            Delivery::Asked => Err(Error::BadOption {
                option: "the delivery of a reader that is told",
                expected: "newest or every",
                got: "asked".into(),
            }),
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

    /// As [`applied`](Self::applied), by the set's sequence number and the
    /// versions in it.
    ///
    /// # Errors
    ///
    /// As [`applied`](Self::applied), and [`Error::BadOption`] for a model that
    /// is not one of this reader's; then nothing is told.
    pub fn applied_versions(
        &self,
        sequence: u64,
        versions: impl IntoIterator<Item = (usize, Version), IntoIter: Clone>,
    ) -> Result<(), Error> {
        self.book.header.usable()?;
        let versions = versions.into_iter();
        if let Some((model, _)) = versions.clone().find(|(model, _)| !self.has(*model)) {
            return Err(Error::BadOption {
                option: "the model applied",
                expected: "one of this reader's",
                got: model.to_string(),
            });
        }
        self.book.control()?.set_loaded(sequence, versions);
        self.book.wake_sender();
        Ok(())
    }

    /// Tells the sender that the worker cannot use a set, by its sequence
    /// number, and why. `None` refuses whatever comes (a wrong layout, say).
    /// What was asked for in addition to what is meant for the reader (0) nobody waits
    /// for, so there is nobody to tell.
    ///
    /// # Errors
    ///
    /// Of the operating system, and [`Error::Protocol`] if the sender does not
    /// listen; one that is gone needs no telling.
    pub fn refuse(&self, sequence: Option<u64>, reason: &str) -> Result<(), Error> {
        self.book.header.usable()?;
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
            false => self.unheard().map_or(Ok(()), Err),
        }
    }

    /// Waits until a look finds something; `None` if the deadline or an interrupt
    /// comes first. It is woken for the answer to this question, or (0) for what
    /// the reader is told.
    fn wait_for<T>(
        &self,
        question: u64,
        deadline: Deadline,
        look: impl Fn() -> Option<T>,
    ) -> Result<Option<T>, Error> {
        let glance = || match look() {
            None if self.watch.is_interrupted() => Some(None),
            found => found.map(Some),
        };
        if let Some(Some(found)) = self.wait.brief(deadline, glance) {
            return Ok(Some(found));
        }
        loop {
            // Asked before the last look: what was published before the end is
            // still handed out.
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

    /// Why something could not be said to a sender that is there.
    fn unheard(&self) -> Option<Error> {
        let gone = self.is_closed() || self.is_hung_up().unwrap_or(true);
        (!gone).then(|| unexpected("a sender that reads", "a socket that is full".into()))
    }

    fn why_over(&self) -> Error {
        let pid = self.sender_pid();
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
            // Whatever was wrong before, there is no sender now.
            Some(_) if self.is_hung_up().unwrap_or(false) => died,
            fault => fault.unwrap_or(died),
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        // Snapshots may live on, and with them the socket and the pins; the
        // sender only stops waiting for this worker.
        if self.book.header.usable().is_ok()
            && let Ok(control) = self.book.control()
        {
            let parting = match self.unusable.load(Ordering::Relaxed) {
                true => Exit::Failed,
                false => Exit::InOrder,
            };
            control.left.store(parting.word(), Ordering::Release);
            self.book.wake_sender();
            if let Ok(mailbox) = self.book.mailbox() {
                self.book.notify_room(mailbox);
            }
        }
    }
}
