//! One end's pins: the protocol's word, and how many snapshots stand behind
//! each bit of it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::error::Error;
use crate::map::{Mapping, OwnedFile};
use crate::protocol::{Live, MAX_SLOTS, PinWord, order};
use crate::shared::{Control, Header};
use crate::socket::Socket;
use crate::wait::Doorbell;

/// Where the pin word lives.
#[derive(Debug)]
pub(crate) enum Home {
    /// A reader's: in its control page. The socket is kept with it, because the
    /// sender takes the socket's hang-up for the end of all its pins.
    Reader {
        /// The control page.
        control: OwnedFile,
        /// The connection to the sender.
        socket: Socket,
    },
    /// The sender's own, for snapshots it takes of what it published.
    Sender(PinWord),
}

/// The pins of one end.
#[derive(Debug)]
pub(crate) struct PinBook {
    pub(crate) home: Home,
    pub(crate) header: Arc<Mapping>,
    pub(crate) doorbell: Arc<Doorbell>,
    counts: Mutex<[u32; MAX_SLOTS]>,
}

impl PinBook {
    pub(crate) fn new(home: Home, header: Arc<Mapping>, doorbell: Arc<Doorbell>) -> Self {
        Self {
            home,
            header,
            doorbell,
            counts: Mutex::new([0; MAX_SLOTS]),
        }
    }

    pub(crate) fn header(&self) -> &Header {
        self.header.table()
    }

    pub(crate) fn word(&self) -> &PinWord {
        match &self.home {
            Home::Reader { control, .. } => &control.map.table::<Control>().pins.0,
            Home::Sender(word) => word,
        }
    }

    /// A reader's control page.
    pub(crate) fn control(&self) -> Result<&Control, Error> {
        match &self.home {
            Home::Reader { control, .. } => Ok(control.map.table()),
            Home::Sender(_) => Err(not_a_reader()),
        }
    }

    /// A reader's connection to its sender.
    pub(crate) fn socket(&self) -> Result<&Socket, Error> {
        match &self.home {
            Home::Reader { socket, .. } => Ok(socket),
            Home::Sender(_) => Err(not_a_reader()),
        }
    }

    /// Pins the live slot, whichever that is by then. `None` before the first
    /// publication.
    ///
    /// Lock-free: it starts over only when the sender has published in between.
    /// With two slots that cannot go on, because the announcement itself keeps
    /// the sender from the slot; with more it takes a sender that publishes
    /// faster than two loads, every time.
    pub(crate) fn pin_live(self: &Arc<Self>) -> Result<Option<Pin>, Error> {
        self.header.usable()?;
        let live_word = &self.header().live.0;
        while let Some(live) = live_word.load() {
            let mut counts = self.counts();
            let count = &mut counts[usize::from(live.slot)];
            if self.word().pin(live, live_word) {
                *count += 1;
                return Ok(Some(Pin {
                    book: self.clone(),
                    live,
                }));
            }
            if *count == 0 {
                self.word().unpin(live.slot);
                drop(counts);
                self.tell_sender();
            }
        }
        Ok(None)
    }

    /// Rings the sender's doorbell if it sleeps.
    pub(crate) fn tell_sender(&self) {
        order();
        if self.header().sender.0.sleeping() {
            self.doorbell.ring();
        }
    }

    fn counts(&self) -> MutexGuard<'_, [u32; MAX_SLOTS]> {
        // The counts are changed in single steps, so they hold after a panic.
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for PinBook {
    fn drop(&mut self) {
        // The last snapshot is gone. A forked child may keep a copy of the
        // connection open, so it is ended and not only closed.
        if let Home::Reader { socket, .. } = &self.home
            && self.header.usable().is_ok()
        {
            socket.shut_down();
        }
    }
}

/// One hold on one slot, given back when dropped.
#[derive(Debug)]
pub(crate) struct Pin {
    pub(crate) book: Arc<PinBook>,
    pub(crate) live: Live,
}

impl Drop for Pin {
    fn drop(&mut self) {
        // In a forked child the pages are not mapped; the parent still holds
        // the pin.
        if self.book.header.usable().is_err() {
            return;
        }
        let mut counts = self.book.counts();
        let count = &mut counts[usize::from(self.live.slot)];
        *count -= 1;
        if *count == 0 {
            self.book.word().unpin(self.live.slot);
            drop(counts);
            self.book.tell_sender();
        }
    }
}

fn not_a_reader() -> Error {
    Error::Protocol {
        expected: "a reader's end",
        got: "the sender's own pins".into(),
    }
}
