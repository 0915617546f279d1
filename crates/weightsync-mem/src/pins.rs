//! One end's pins: the words of the protocol, and the number of snapshots behind each of their
//! bits.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use weightsync_core::Version;

use crate::error::Error;
use crate::map::{MemoryMap, OwnedFile};
use crate::private::SweepsOf;
use crate::protocol::{Live, LiveWord, MAX_MODELS, MAX_SLOTS, PinWord, SlotSet, order};
use crate::set::{ModelMask, ModelSet};
use crate::shared::{Control, HeaderPage, MailboxPage};
use crate::socket::Socket;
use crate::threads::LockExt as _;
use crate::wait::Doorbell;
use crate::wire::ReaderMessage;

/// The place of the pin words.
#[derive(Debug)]
pub(crate) enum PinOwner {
    /// A reader's control page. The socket is kept with it, because the sender takes the socket's
    /// hang-up for the end of all its pins.
    Reader {
        /// The control page.
        control: OwnedFile,
        /// The sender's notifications for this reader.
        mailbox: MemoryMap,
        /// The connection to the sender.
        socket: Socket,
    },
    /// The sender's own pins, for snapshots of what it published.
    Sender(Box<[PinWord; MAX_MODELS]>),
}

/// The pins of one end.
#[derive(Debug)]
pub(crate) struct PinBook {
    pub(crate) owner: PinOwner,
    pub(crate) header: Arc<MemoryMap>,
    pub(crate) doorbell: Arc<Doorbell>,
    /// Cleans slots that were written privately, if that is needed.
    pub(crate) sweeps: OnceLock<SweepsOf>,
    /// The models of this end.
    models: ModelMask,
    /// For each model, up to the last one, how many pins each slot has.
    counts: Mutex<Vec<[u32; MAX_SLOTS]>>,
}

/// A set that was just taken: all its data slots are pinned.
#[derive(Debug)]
pub(crate) struct PinnedSet {
    pub(crate) sequence: u64,
    /// One pin for each model, in order.
    pub(crate) pins: Vec<Pin>,
}

impl PinnedSet {
    /// Whether both hold the same versions, of the same models, in the same
    /// slots.
    pub(crate) fn is_of_the_set(&self, other: &Self) -> bool {
        let entry = |pin: &Pin| (pin.model, pin.slot, pin.version);
        self.pins.iter().map(entry).eq(other.pins.iter().map(entry))
    }
}

impl PinBook {
    pub(crate) fn new(
        owner: PinOwner,
        header: Arc<MemoryMap>,
        doorbell: Arc<Doorbell>,
        models: ModelMask,
    ) -> Self {
        let rows = models.iter().last().map_or(0, |last| last + 1);
        Self {
            owner,
            header,
            doorbell,
            sweeps: OnceLock::new(),
            models,
            counts: Mutex::new(vec![[0; MAX_SLOTS]; rows]),
        }
    }

    pub(crate) fn header(&self) -> &HeaderPage {
        self.header.table()
    }

    /// A reader's control page.
    pub(crate) fn control(&self) -> Result<&Control, Error> {
        match &self.owner {
            PinOwner::Reader { control, .. } => Ok(control.map.table()),
            PinOwner::Sender(_) => Err(not_a_reader()),
        }
    }

    /// A reader's mailbox.
    pub(crate) fn mailbox(&self) -> Result<&MailboxPage, Error> {
        match &self.owner {
            PinOwner::Reader { mailbox, .. } => Ok(mailbox.table()),
            PinOwner::Sender(_) => Err(not_a_reader()),
        }
    }

    /// A reader's connection to its sender.
    pub(crate) fn socket(&self) -> Result<&Socket, Error> {
        match &self.owner {
            PinOwner::Reader { socket, .. } => Ok(socket),
            PinOwner::Sender(_) => Err(not_a_reader()),
        }
    }

    /// The data slots of one model that this end holds.
    pub(crate) fn held(&self, model: usize) -> SlotSet {
        self.word(model).held()
    }

    /// Pins the set of the mailbox's live word, whatever it is by then. Tells the sender if the
    /// record is damaged. `None` if there is no set.
    pub(crate) fn take_live(self: &Arc<Self>) -> Result<Option<PinnedSet>, Error> {
        self.pin_word(&self.mailbox()?.live.0, true)
    }

    /// Pins the set of the mailbox's live word, only to look at it.
    pub(crate) fn look_live(self: &Arc<Self>) -> Result<Option<PinnedSet>, Error> {
        self.pin_word(&self.mailbox()?.live.0, false)
    }

    /// Pins the set that answers the last question. `None` if there is none.
    pub(crate) fn pin_answer(self: &Arc<Self>) -> Result<Option<PinnedSet>, Error> {
        self.pin_word(&self.mailbox()?.answer.0.live, false)
    }

    /// Pins the set of one of the mailbox's words. If the word is a notification (`notified`), the
    /// sender learns of damage; for a look or an answer it does not.
    ///
    /// Lock-free: starts over only if the sender has moved the word in between.
    fn pin_word(
        self: &Arc<Self>,
        word: &LiveWord,
        notified: bool,
    ) -> Result<Option<PinnedSet>, Error> {
        self.header.usable()?;
        let mailbox = self.mailbox()?;
        let records = &self.control()?.records;
        // Ends soon: each further round means that the sender has made a step in between.
        while let Some(live) = word.load() {
            // The record pin holds the slots until the data pins do, so no moment is left in which
            // nothing holds them.
            let hold = records.pin(live, word).then(|| self.hand_over(live));
            // In either case: the data pins hold the set now, or the announcement did not count.
            records.unpin(live.record);
            // A failed pin looked like a held record to the sender, which may be waiting for one.
            if matches!(hold, Some(Ok(_))) {
                // The sender learns of it together with the outcome of the set.
                order();
            } else {
                self.wake_sender();
            }
            self.notify_room(mailbox);
            if let Some(hold) = hold {
                if let (true, Err(error)) = (notified, &hold) {
                    self.refuse_damage(live.sequence, error);
                }
                return hold.map(Some);
            }
        }
        Ok(None)
    }

    /// Pins the set at `position` of the mailbox's queue, which is this reader's head: only this
    /// reader moves it. `None` if the sender has not got that far, or has shut the queue.
    pub(crate) fn take_queued(self: &Arc<Self>, position: u64) -> Result<Option<PinnedSet>, Error> {
        self.header.usable()?;
        let (mailbox, control) = (self.mailbox()?, self.control()?);
        let Some(live) = mailbox.queue.0.get(position) else {
            return Ok(None);
        };
        // The place in the queue holds the record and its slots until the head moves past it.
        let hold = self.hand_over(live);
        if !mailbox.queue.0.is_open() {
            // The sender took the entry back, so its record may be rewritten. Dropping `hold`
            // removes the data pins.
            return Ok(None);
        }
        if let Err(error) = &hold {
            self.refuse_damage(live.sequence, error);
        }
        // Also past a corrupt entry: the next one may be valid.
        control.head.advance(position + 1);
        // The sender learns of it together with the outcome of the set.
        order();
        self.notify_room(mailbox);
        hold.map(Some)
    }

    /// Pins the data slots of a record. A record pin or its place in the queue holds the record
    /// meanwhile.
    fn hand_over(self: &Arc<Self>, live: Live) -> Result<PinnedSet, Error> {
        let set = self.set_of(live)?;
        Ok(PinnedSet {
            sequence: live.sequence,
            pins: self.pin(&set),
        })
    }

    fn set_of(&self, live: Live) -> Result<ModelSet, Error> {
        let mut set = self.header().read_set(live)?.set;
        // The record may be shared with workers that take other models.
        // This end has no slots of those.
        set.keep(self.models);
        match set.is_empty() {
            false => Ok(set),
            true => Err(Error::CorruptSet {
                record: live.record,
                what: "it names none of this worker's models",
            }),
        }
    }

    /// Reports that a set was taken; all its records were checked.
    pub(crate) fn set_taken(&self, sequence: u64) -> Result<(), Error> {
        let taken = &self.control()?.taken;
        taken.store(sequence, Ordering::Release);
        self.wake_sender();
        Ok(())
    }

    /// Tells the sender that a damaged set was not taken.
    pub(crate) fn refuse_damage(&self, sequence: u64, error: &Error) {
        if error.is_peer_fault() {
            // A failure of the socket here is reported elsewhere.
            let _ = self.refuse(sequence, &error.to_string());
        }
    }

    /// Tells the sender why a set is refused; 0 refuses every set. False if the sender ignores this
    /// reader.
    pub(crate) fn refuse(&self, sequence: u64, reason: &str) -> Result<bool, Error> {
        let packet = ReaderMessage::Refused {
            sequence,
            reason: reason.into(),
        };
        self.socket()?.send(&packet.encode(), &[])
    }

    /// Pins every data slot of a set. The caller knows that something else holds them meanwhile.
    pub(crate) fn pin(self: &Arc<Self>, set: &ModelSet) -> Vec<Pin> {
        // Count and bit change under one lock. Otherwise a snapshot that is dropped at this moment
        // could clear the bit of the new one.
        let mut counts = self.counts();
        let pins = set.iter().map(|(model, entry)| {
            counts[model][usize::from(entry.slot)] += 1;
            self.word(model).hold(entry.slot);
            Pin {
                book: self.clone(),
                model,
                slot: entry.slot,
                version: entry.version,
            }
        });
        pins.collect()
    }

    /// Rings the sender's doorbell if it sleeps.
    pub(crate) fn wake_sender(&self) {
        // The fence between what was changed before and the question whether the sender sleeps.
        order();
        if self.header().sender.0.sleeping() {
            self.doorbell.ring();
        }
    }

    /// Tells the sender that a record came free, if it wants to know. Called after a fence (that of
    /// [`wake_sender`](Self::wake_sender)): a sender looks again after it has asked for this.
    pub(crate) fn notify_room(&self, mailbox: &MailboxPage) {
        if mailbox.wants_room.0.sleeping()
            && let Ok(socket) = self.socket()
        {
            // A sender that is gone need not know.
            let _ = socket.send(&ReaderMessage::Room.encode(), &[]);
        }
    }

    fn word(&self, model: usize) -> &PinWord {
        match &self.owner {
            PinOwner::Reader { control, .. } => &control.map.table::<Control>().pins[model],
            PinOwner::Sender(words) => &words[model],
        }
    }

    fn counts(&self) -> MutexGuard<'_, Vec<[u32; MAX_SLOTS]>> {
        // Each change of the counts is one step, so they are valid after a panic.
        self.counts.locked()
    }
}

impl Drop for PinBook {
    fn drop(&mut self) {
        // The last snapshot is gone. A forked child may hold a copy of the connection, so it is
        // shut down and not only closed.
        if let PinOwner::Reader { socket, .. } = &self.owner
            && self.header.usable().is_ok()
        {
            // The sender takes the hang-up for the end of all pins of this end.
            socket.shut_down();
        }
    }
}

/// A pin on one data slot, removed when dropped.
#[derive(Debug)]
pub(crate) struct Pin {
    pub(crate) book: Arc<PinBook>,
    pub(crate) model: usize,
    pub(crate) slot: u8,
    /// The version that is pinned.
    pub(crate) version: Version,
}

impl Drop for Pin {
    fn drop(&mut self) {
        // In a forked child the pages are not mapped; the parent still holds
        // the pin.
        if self.book.header.usable().is_err() {
            return;
        }
        let mut counts = self.book.counts();
        let count = &mut counts[self.model][usize::from(self.slot)];
        *count -= 1;
        if *count == 0 {
            // Under the lock of the counts: a new pin of the slot sets the bit after this, not
            // before.
            self.book.word(self.model).unpin(self.slot);
            // The bell is a system call, for which no other snapshot has to wait.
            drop(counts);
            self.book.wake_sender();
        }
    }
}

fn not_a_reader() -> Error {
    Error::Protocol {
        expected: "a reader's end",
        got: "the sender's own pins".into(),
    }
}
