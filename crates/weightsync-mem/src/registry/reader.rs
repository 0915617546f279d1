//! A reader as the sender sees it: its pages, and the way to reach it.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use weightsync_core::{Version, WorkerId, WorkerRoute, WorkerStatus};

use crate::futex;
use crate::late::Lateness;
use crate::map::MemoryMap;
use crate::plan::{Key, Plan, Removed};
use crate::scan::{Breach, Claims, Words};
use crate::set::ModelMask;
use crate::shared::{Control, MailboxPage, PrivatePages, ReaderExit};
use crate::socket::Socket;
use crate::sync::load_acquire;
use crate::wire::Delivery;

#[derive(Debug)]
pub(crate) struct RegisteredReader {
    pub(crate) end: ReaderEnd,
    /// A number that the worker chose when it first joined.
    pub(crate) instance: u64,
    pub(crate) models: ModelMask,
    pub(crate) delivery: Delivery,
    pub(crate) device: String,
    /// The name of its host, and how versions reach it.
    pub(crate) location: (String, WorkerRoute),
    /// The set that the reader refused, and why.
    pub(crate) refused: Option<(u64, String)>,
    /// Why the reader cannot use anything.
    pub(crate) unusable: Option<String>,
    /// Its departure or rejection has been reported; there is no second line about it.
    pub(crate) reported: bool,
    /// The reader broke the protocol, so its messages are ignored.
    pub(crate) deaf: bool,
    /// The reader has closed its end, and the plan no longer knows it. What its page says later
    /// changes nothing.
    pub(crate) retired: bool,
    /// New slots that it was not handed yet, each a model and a slot number. They are sent in
    /// order, as soon as possible.
    pub(crate) owed: VecDeque<(u8, u8)>,
    /// The reader has asked a question.
    pub(crate) asks: bool,
    /// The slots and records that its page may claim.
    pub(crate) claims: Claims,
    /// The publication for which the reader was late, and its progress then.
    pub(crate) late: Lateness<ReaderProgress>,
}

/// The progress that a reader has reported; any change means that it moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReaderProgress {
    taken: u64,
    loaded: u64,
    head: u64,
    through: u64,
    refused: u64,
}

/// Where a reader's pages are, and how it is reached.
#[derive(Debug)]
pub(crate) enum ReaderEnd {
    /// A process of this host, which maps the pages.
    Process {
        socket: Arc<Socket>,
        control: MemoryMap,
        mailbox: Arc<MemoryMap>,
    },
    /// A worker elsewhere; a thread of this process acts for it.
    RemoteReader {
        pages: Box<PrivatePages>,
        pid: u32,
        call: MailboxCall,
    },
}

/// Notifies the relay that acts for a remote reader that its mailbox has moved. Called under the
/// lock, so it must neither wait nor call back.
#[derive(Clone)]
pub(crate) struct MailboxCall(pub(crate) Arc<dyn Fn(Key) + Send + Sync>);

impl fmt::Debug for MailboxCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MailboxCall")
    }
}

impl ReaderEnd {
    fn control(&self) -> &Control {
        match self {
            Self::Process { control, .. } => control.table(),
            Self::RemoteReader { pages, .. } => &pages.control,
        }
    }
}

impl RegisteredReader {
    pub(crate) fn new(
        end: ReaderEnd,
        instance: u64,
        models: ModelMask,
        delivery: Delivery,
        device: String,
    ) -> Self {
        // This process itself writes the page of a remote reader, so its claims are true.
        let claims = match &end {
            ReaderEnd::Process { .. } => Claims::new(models),
            ReaderEnd::RemoteReader { .. } => Claims::new(ModelMask(0)),
        };
        Self {
            claims,
            end,
            instance,
            models,
            delivery,
            device,
            // A process of this host. A remote reader's location is set after this.
            location: Default::default(),
            refused: None,
            unusable: None,
            reported: false,
            deaf: false,
            retired: false,
            owed: VecDeque::new(),
            asks: false,
            late: Lateness::default(),
        }
    }

    pub(crate) fn progress(&self) -> ReaderProgress {
        ReaderProgress {
            taken: self.taken(),
            loaded: self.applied(),
            head: self.control().head.load(),
            through: self.through(),
            refused: self.refused.as_ref().map_or(0, |(sequence, _)| *sequence),
        }
    }

    pub(crate) fn control(&self) -> &Control {
        self.end.control()
    }

    /// The words of its page, and the claims that they may make.
    pub(crate) fn scanned(&mut self) -> (Words<'_>, &mut Claims) {
        let control = self.end.control();
        let words = Words {
            head: &control.head,
            records: &control.records,
            pins: &control.pins,
        };
        (words, &mut self.claims)
    }

    /// The first impossible claim of its page; none for a rejected reader, which has nothing left
    /// to lose.
    pub(crate) fn take_breach(&self) -> Option<Breach> {
        // A reader that was rejected once is not rejected again at each scan.
        self.claims
            .breach()
            .filter(|_| self.unusable.is_none() && !self.has_left())
    }

    pub(crate) fn mailbox(&self) -> &MailboxPage {
        match &self.end {
            ReaderEnd::Process { mailbox, .. } => mailbox.table(),
            ReaderEnd::RemoteReader { pages, .. } => &pages.mailbox,
        }
    }

    /// The reader's process, on whichever host.
    pub(crate) fn pid(&self) -> u32 {
        match &self.end {
            ReaderEnd::Process { socket, .. } => socket.peer_pid(),
            ReaderEnd::RemoteReader { pid, .. } => *pid,
        }
    }

    /// The reader's connection, if it is a process of this host.
    pub(crate) fn socket(&self) -> Option<&Arc<Socket>> {
        match &self.end {
            ReaderEnd::Process { socket, .. } => Some(socket),
            ReaderEnd::RemoteReader { .. } => None,
        }
    }

    pub(crate) fn applied(&self) -> u64 {
        // Acquire: a reader stores its versions before this number, so whichever number is found
        // here, its versions are found too.
        load_acquire(&self.control().loaded)
    }

    pub(crate) fn taken(&self) -> u64 {
        load_acquire(&self.control().taken)
    }

    /// The last question whose answer the reader no longer needs.
    pub(crate) fn through(&self) -> u64 {
        load_acquire(&self.control().through)
    }

    /// Whether the reader has closed its end. If it says that it failed, this waits for its reason,
    /// which comes over the socket.
    pub(crate) fn has_left(&self) -> bool {
        // Kept here as well, because the page is the reader's and may change back.
        self.retired
            || match ReaderExit::of(load_acquire(&self.control().left)) {
                None => false,
                Some(ReaderExit::InOrder) => true,
                // The word may be seen before the packet with the reason. Without the reason the
                // worker would count as left in order.
                Some(ReaderExit::Failed) => self.unusable.is_some(),
            }
    }

    /// Removes the reader from the plan if it has closed its end; returns whether it has. Its pins
    /// still count, but it gets nothing more.
    pub(crate) fn retire(&mut self, plan: &mut Plan, key: Key) -> bool {
        if !self.retired && self.has_left() {
            // From here on the plan has no mailbox for this reader, so its successor can have one.
            self.retired = true;
            if let Some(mailbox) = plan.leave(key) {
                self.take_down(mailbox);
            }
        }
        self.retired
    }

    /// The version of a model that the reader has loaded.
    pub(crate) fn version(&self, model: usize) -> Version {
        // Relaxed: callers that also need the set's number read that first, with acquire.
        let word = &self.control().versions[model];
        match self.models.contains(model) {
            true => Version(word.load(Ordering::Relaxed)),
            false => Version::NONE,
        }
    }

    /// The reader as a report or a page shows it, with its versions of the first `models` models.
    pub(crate) fn status(&self, worker: WorkerId, models: usize) -> WorkerStatus {
        let mut status = WorkerStatus::new(worker, self.pid(), 0);
        status.device.clone_from(&self.device);
        (status.host, status.route) = self.location.clone();
        status.versions = self.versions(models);
        status
    }

    /// The versions that the reader has loaded, of the first `models` models.
    pub(crate) fn versions(&self, models: usize) -> Vec<Version> {
        (0..models).map(|model| self.version(model)).collect()
    }

    /// Clears the mailbox's page after the plan has removed the mailbox. So the page names no slot
    /// or record that is written from now on.
    pub(super) fn take_down(&self, _: Removed) {
        match self.delivery {
            Delivery::Every { .. } => self.mailbox().queue.0.shut(),
            Delivery::Newest | Delivery::Asked => self.mailbox().live.0.clear(),
        }
        self.mailbox().answer.0.live.clear();
    }

    /// Wakes this reader if it sleeps until it gets an answer.
    pub(crate) fn wake_for_answer(&self, key: Key) {
        if let ReaderEnd::RemoteReader { call, .. } = &self.end {
            (call.0)(key);
        } else if self.control().sleep.sleeping() {
            // The caller has issued the fence since it changed the mailbox. A reader that announces
            // its sleep later finds the change in its last look.
            futex::wake(&self.mailbox().answer.0.question);
        }
    }

    /// Wakes this reader if it sleeps until it is notified.
    pub(crate) fn wake(&self, key: Key) {
        if let ReaderEnd::RemoteReader { call, .. } = &self.end {
            (call.0)(key);
        } else if self.control().sleep.sleeping() {
            futex::wake(match self.delivery {
                Delivery::Every { .. } => self.mailbox().queue.0.tail_word(),
                Delivery::Newest | Delivery::Asked => self.mailbox().live.0.word(),
            });
        }
    }
}
