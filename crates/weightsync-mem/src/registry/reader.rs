//! A reader as the sender has it: its pages, and the way to reach it.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use weightsync_core::Version;

use crate::futex;
use crate::late::Lateness;
use crate::map::Mapping;
use crate::plan::{Key, Plan, Removed};
use crate::scan::{Breach, Claims, Words};
use crate::set::Models;
use crate::shared::{Control, Exit, Mailbox, PrivatePages};
use crate::socket::Socket;
use crate::sync::load_acquire;
use crate::wire::Delivery;

#[derive(Debug)]
pub(crate) struct Reader {
    pub(crate) end: End,
    /// Chosen by the worker when it first joined.
    pub(crate) instance: u64,
    pub(crate) models: Models,
    pub(crate) delivery: Delivery,
    pub(crate) device: String,
    /// The set it cannot use, and why.
    pub(crate) refused: Option<(u64, String)>,
    /// Why it cannot use anything.
    pub(crate) unusable: Option<String>,
    /// Its going, or that it cannot use the models at all, has been told: there
    /// is no second line about it.
    pub(crate) reported: bool,
    /// It broke the protocol and is not listened to any more.
    pub(crate) deaf: bool,
    /// It has closed its end, and the plan knows it no more; what its page says
    /// later takes nothing of that back.
    pub(crate) retired: bool,
    /// New slots it has not been handed, each a model and its slot's number: they
    /// go to it in order, as soon as they can.
    pub(crate) owed: VecDeque<(u8, u8)>,
    /// It has asked for something.
    pub(crate) asks: bool,
    /// What its page may hold back.
    pub(crate) claims: Claims,
    /// Whether it was late for a publication, and where it stood then.
    pub(crate) late: Lateness<Progress>,
}

/// How far a reader is, as far as it has said: what changes once it moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Progress {
    taken: u64,
    loaded: u64,
    head: u64,
    through: u64,
    refused: u64,
}

/// Where a reader's pages are, and how it is spoken to.
#[derive(Debug)]
pub(crate) enum End {
    /// It is a process of this host, which maps its pages.
    Process {
        socket: Arc<Socket>,
        control: Mapping,
        mailbox: Arc<Mapping>,
    },
    /// It is elsewhere, and somebody in this process acts for it.
    RemoteReader {
        pages: Box<PrivatePages>,
        pid: u32,
        call: Call,
    },
}

/// Notifies the relay that acts for a remote reader that its mailbox has moved. Called under the
/// lock: it neither waits nor calls back.
#[derive(Clone)]
pub(crate) struct Call(pub(crate) Arc<dyn Fn(Key) + Send + Sync>);

impl fmt::Debug for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Call")
    }
}

impl End {
    fn control(&self) -> &Control {
        match self {
            Self::Process { control, .. } => control.table(),
            Self::RemoteReader { pages, .. } => &pages.control,
        }
    }
}

impl Reader {
    pub(crate) fn new(
        end: End,
        instance: u64,
        models: Models,
        delivery: Delivery,
        device: String,
    ) -> Self {
        // What a remote reader's page says is written in this process.
        let claims = match &end {
            End::Process { .. } => Claims::new(models),
            End::RemoteReader { .. } => Claims::new(Models(0)),
        };
        Self {
            claims,
            end,
            instance,
            models,
            delivery,
            device,
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

    pub(crate) fn progress(&self) -> Progress {
        Progress {
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

    /// What its page says it holds, and what of that may count.
    pub(crate) fn scanned(&mut self) -> (Words<'_>, &mut Claims) {
        let control = self.end.control();
        let words = Words {
            head: &control.head,
            records: &control.records,
            pins: &control.pins,
        };
        (words, &mut self.claims)
    }

    /// What its page said that it cannot, unless it can use nothing anyway: there is
    /// nothing left to take from it then.
    pub(crate) fn take_breach(&self) -> Option<Breach> {
        self.claims
            .breach()
            .filter(|_| self.unusable.is_none() && !self.has_left())
    }

    pub(crate) fn mailbox(&self) -> &Mailbox {
        match &self.end {
            End::Process { mailbox, .. } => mailbox.table(),
            End::RemoteReader { pages, .. } => &pages.mailbox,
        }
    }

    /// Its process, wherever that is.
    pub(crate) fn pid(&self) -> u32 {
        match &self.end {
            End::Process { socket, .. } => socket.peer_pid(),
            End::RemoteReader { pid, .. } => *pid,
        }
    }

    /// Its connection, if it is a process of this host.
    pub(crate) fn socket(&self) -> Option<&Arc<Socket>> {
        match &self.end {
            End::Process { socket, .. } => Some(socket),
            End::RemoteReader { .. } => None,
        }
    }

    pub(crate) fn applied(&self) -> u64 {
        load_acquire(&self.control().loaded)
    }

    pub(crate) fn taken(&self) -> u64 {
        load_acquire(&self.control().taken)
    }

    /// The last question whose answer it needs no more.
    pub(crate) fn through(&self) -> u64 {
        load_acquire(&self.control().through)
    }

    /// Whether it has closed its end. One that says that it failed has done so once
    /// its words are here, as they come by another way.
    pub(crate) fn has_left(&self) -> bool {
        self.retired
            || match Exit::of(load_acquire(&self.control().left)) {
                None => false,
                Some(Exit::InOrder) => true,
                Some(Exit::Failed) => self.unusable.is_some(),
            }
    }

    /// Takes it out of the plan once it has closed its end. Its pins go on
    /// counting, but nothing more comes to it. Whether it has left.
    pub(crate) fn retire(&mut self, plan: &mut Plan, key: Key) -> bool {
        if !self.retired && self.has_left() {
            self.retired = true;
            if let Some(mailbox) = plan.leave(key) {
                self.take_down(mailbox);
            }
        }
        self.retired
    }

    /// The version it has loaded of a model.
    pub(crate) fn version(&self, model: usize) -> Version {
        let word = &self.control().versions[model];
        match self.models.contains(model) {
            true => Version(word.load(Ordering::Relaxed)),
            false => Version::NONE,
        }
    }

    /// The versions it has loaded, of the first `models` models.
    pub(crate) fn versions(&self, models: usize) -> Vec<Version> {
        (0..models).map(|model| self.version(model)).collect()
    }

    /// Clears what its mailbox's page says, after the plan has removed the mailbox: nothing
    /// that is written from now on is named there.
    pub(super) fn take_down(&self, _: Removed) {
        match self.delivery {
            Delivery::Every { .. } => self.mailbox().queue.0.shut(),
            Delivery::Newest | Delivery::Asked => self.mailbox().live.0.clear(),
        }
        self.mailbox().answer.0.live.clear();
    }

    /// Wakes this reader, if it sleeps until it is answered.
    pub(crate) fn wake_for_answer(&self, key: Key) {
        if let End::RemoteReader { call, .. } = &self.end {
            (call.0)(key);
        } else if self.control().sleep.sleeping() {
            futex::wake(&self.mailbox().answer.0.question);
        }
    }

    /// Wakes this reader, if it sleeps until it is told something.
    pub(crate) fn wake(&self, key: Key) {
        if let End::RemoteReader { call, .. } = &self.end {
            (call.0)(key);
        } else if self.control().sleep.sleeping() {
            futex::wake(match self.delivery {
                Delivery::Every { .. } => self.mailbox().queue.0.tail_word(),
                Delivery::Newest | Delivery::Asked => self.mailbox().live.0.word(),
            });
        }
    }
}
