//! A reader as the sender has it: its pages, and how it is spoken to.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use weightsync_core::Version;

use crate::futex;
use crate::map::Mapping;
use crate::plan::Key;
use crate::set::Models;
use crate::shared::{Control, Lane, Seat};
use crate::socket::Socket;
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
    pub(crate) told: bool,
    /// It broke the protocol and is not listened to any more.
    pub(crate) deaf: bool,
    /// It has closed its end and its lane is taken down.
    pub(crate) retired: bool,
    /// New slots it has not been handed, each a model and its slot's number: they
    /// go to it in order, as soon as they can.
    pub(crate) owed: VecDeque<(u8, u8)>,
    /// It has asked for something.
    pub(crate) asks: bool,
}

/// Where a reader's pages are, and how it is spoken to.
#[derive(Debug)]
pub(crate) enum End {
    /// It is a process of this host, which maps its pages.
    Process {
        socket: Arc<Socket>,
        control: Mapping,
        lane: Arc<Mapping>,
    },
    /// It is elsewhere, and somebody in this process acts for it.
    Guest {
        seat: Box<Seat>,
        pid: u32,
        call: Call,
    },
}

/// Tells whoever acts for a guest that its lane has moved. Called under the lock:
/// it neither waits nor calls back.
#[derive(Clone)]
pub(crate) struct Call(pub(crate) Arc<dyn Fn(Key) + Send + Sync>);

impl fmt::Debug for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Call")
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
        Self {
            end,
            instance,
            models,
            delivery,
            device,
            refused: None,
            unusable: None,
            told: false,
            deaf: false,
            retired: false,
            owed: VecDeque::new(),
            asks: false,
        }
    }

    pub(crate) fn control(&self) -> &Control {
        match &self.end {
            End::Process { control, .. } => control.table(),
            End::Guest { seat, .. } => &seat.control,
        }
    }

    pub(crate) fn lane(&self) -> &Lane {
        match &self.end {
            End::Process { lane, .. } => lane.table(),
            End::Guest { seat, .. } => &seat.lane,
        }
    }

    /// Its process, wherever that is.
    pub(crate) fn pid(&self) -> u32 {
        match &self.end {
            End::Process { socket, .. } => socket.peer_pid(),
            End::Guest { pid, .. } => *pid,
        }
    }

    /// Its connection, if it is a process of this host.
    pub(crate) fn socket(&self) -> Option<&Arc<Socket>> {
        match &self.end {
            End::Process { socket, .. } => Some(socket),
            End::Guest { .. } => None,
        }
    }

    pub(crate) fn applied(&self) -> u64 {
        self.control().loaded.0.sequence.load(Ordering::Acquire)
    }

    pub(crate) fn taken(&self) -> u64 {
        self.control().holds.0.taken.load(Ordering::Acquire)
    }

    /// The last question whose answer it needs no more.
    pub(crate) fn through(&self) -> u64 {
        self.control().through.0.load(Ordering::Acquire)
    }

    pub(crate) fn has_left(&self) -> bool {
        self.control().left.0.load(Ordering::Acquire) != 0
    }

    /// The version it has loaded of a model.
    pub(crate) fn version(&self, model: usize) -> Version {
        let word = &self.control().loaded.0.versions[model];
        match self.models.contains(model) {
            true => Version(word.load(Ordering::Relaxed)),
            false => Version::NONE,
        }
    }

    /// The versions it has loaded, of the first `models` models.
    pub(crate) fn versions(&self, models: usize) -> Vec<Version> {
        (0..models).map(|model| self.version(model)).collect()
    }

    /// Takes its lane off everything.
    pub(super) fn shut(&self) {
        match self.delivery {
            Delivery::Every { .. } => self.lane().queue.0.shut(),
            Delivery::Newest | Delivery::Asked => self.lane().live.0.clear(),
        }
        self.lane().answer.0.live.clear();
    }

    /// Wakes this reader, if it sleeps until it is answered.
    pub(crate) fn wake_for_answer(&self, key: Key) {
        if let End::Guest { call, .. } = &self.end {
            (call.0)(key);
        } else if self.control().sleep.0.sleeping() {
            futex::wake(&self.lane().answer.0.question);
        }
    }

    /// Wakes this reader, if it sleeps until it is told something.
    pub(crate) fn wake(&self, key: Key) {
        if let End::Guest { call, .. } = &self.end {
            (call.0)(key);
        } else if self.control().sleep.0.sleeping() {
            futex::wake(match self.delivery {
                Delivery::Every { .. } => self.lane().queue.0.tail_word(),
                Delivery::Newest | Delivery::Asked => self.lane().live.0.word(),
            });
        }
    }
}
