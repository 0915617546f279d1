//! A worker's end of a segment.

use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use weightsync_core::{Epoch, Layout, LayoutId, Run, Version, WorkerId};

use crate::error::{Error, unexpected};
use crate::map::{Mapping, OwnedFile};
use crate::pins::{Home, PinBook};
use crate::shared::{CONTROL_BYTES, HEADER_BYTES};
use crate::snapshot::Snapshot;
use crate::socket::{Packet, Socket};
use crate::spans::Spans;
use crate::wait::{Deadline, Doorbell, WaitStyle, passed, poll};
use crate::watch::Watch;
use crate::wire::{FromReader, FromSender};

/// The longest encoded layout a reader accepts, in bytes.
const MAX_LAYOUT_BYTES: u64 = 1 << 30;

/// How long a sender that listens has to answer: far more than it needs on a
/// busy machine, and little for a worker whose sender stands still.
const ANSWER_TIME: Duration = Duration::from_millis(100);

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
    /// The layout it insists on; `None` takes the sender's.
    pub layout: Option<LayoutId>,
    /// How it waits for new versions.
    pub wait: WaitStyle,
}

impl fmt::Debug for AttachOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The secret stays out of logs.
        f.debug_struct("AttachOptions")
            .field("address", &self.address)
            .field("worker", &self.worker)
            .field("seen", &self.seen)
            .field("layout", &self.layout)
            .field("wait", &self.wait)
            .finish_non_exhaustive()
    }
}

/// A worker's end of a segment: takes snapshots without a copy.
///
/// **Guarantee.** What it hands out is one whole version, checked against its
/// commit record, and stays so until dropped. Every wait ends by its deadline,
/// by the sender's death, or by the sender's shutdown: a thread of its own, which
/// ends with it, watches for both.
#[derive(Debug)]
pub struct Reader {
    book: Arc<PinBook>,
    layout: Layout,
    run: Run,
    watch: Watch,
    wait: WaitStyle,
    /// The newest publication handed out.
    sequence: u64,
}

impl Reader {
    /// Joins a segment, waiting until the deadline for its sender to appear; one
    /// that is there has a moment more to answer. Maps and faults in every slot,
    /// so that the first snapshot costs no page faults.
    ///
    /// # Errors
    ///
    /// [`Error::NoSender`] at the deadline, [`Error::Denied`] with the sender's
    /// reason, [`Error::Fenced`], [`Error::LayoutMismatch`], and
    /// [`Error::Protocol`] if the other end is not a weightsync sender.
    pub fn attach(options: &AttachOptions, deadline: Deadline) -> Result<Self, Error> {
        let since = Instant::now();
        let control = OwnedFile::new("weightsync-control", CONTROL_BYTES)?;
        let hello = FromReader::Hello {
            secret: options.secret,
            worker: options.worker,
            seen: options.seen,
            layout: options.layout,
        };
        let nobody = |waited| Error::NoSender {
            address: options.address.clone(),
            waited,
        };
        let mut pause = Duration::from_millis(2);
        let (socket, bytes, fds) = loop {
            if let Some(socket) = Socket::connect(&options.address)?
                && socket.send(&hello.encode(), &[control.fd.as_fd()])?
                && let Some((bytes, fds)) = first_packet(&socket, answer_by(deadline))?
            {
                break (socket, bytes, fds);
            }
            // Nobody listens yet, or a sender that is going down hung up.
            if passed(deadline) {
                return Err(nobody(since.elapsed()));
            }
            let left = deadline.map_or(pause, |at| at.saturating_duration_since(Instant::now()));
            std::thread::sleep(pause.min(left));
            pause = (pause * 2).min(Duration::from_millis(50));
        };
        let (run, slots, slot_bytes, layout_bytes) = match FromSender::decode(&bytes)? {
            FromSender::Welcome {
                run,
                slots,
                slot_bytes,
                layout_bytes,
            } => (run, slots, slot_bytes, layout_bytes),
            FromSender::Denied { reason } => return Err(Error::Denied { reason }),
            other => return Err(unexpected("a welcome", format!("{other:?}"))),
        };
        if run.epoch < options.seen {
            return Err(Error::Fenced {
                seen: options.seen,
                got: run.epoch,
            });
        }
        if fds.len() != usize::from(slots) + 3 {
            return Err(unexpected(
                "header, layout, doorbell and every slot",
                format!("{} descriptors", fds.len()),
            ));
        }
        let mut fds = fds.into_iter();
        let mut next = || {
            fds.next()
                .ok_or_else(|| unexpected("another descriptor", "none".into()))
        };
        let header = Arc::new(Mapping::of_peer(next()?.as_fd(), HEADER_BYTES)?);
        let layout = read_layout(&next()?, layout_bytes)?;
        if let Some(expected) = options.layout.filter(|id| *id != layout.id()) {
            return Err(Error::LayoutMismatch {
                expected,
                got: layout.id(),
            });
        }
        let doorbell = Arc::new(Doorbell::from_fd(next()?));
        let needed = Spans::new(&layout).slot_bytes();
        if slot_bytes != needed as u64 {
            return Err(unexpected(
                "slots of the layout's size",
                format!("{slot_bytes} bytes for {needed}"),
            ));
        }
        let slots = (0..slots)
            .map(|_| Mapping::of_peer(next()?.as_fd(), needed).map(Arc::new))
            .collect::<Result<Vec<_>, _>>()?;
        let book = PinBook::new(Home::Reader { control, socket }, header, doorbell);
        let book = Arc::new(book);
        Ok(Self {
            watch: Watch::start(book.clone(), slots, needed)?,
            book,
            layout,
            run,
            wait: options.wait,
            sequence: 0,
        })
    }

    /// The layout every version of this segment follows.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The run the sender belongs to.
    pub fn run(&self) -> Run {
        self.run
    }

    /// The sender's process.
    pub fn sender_pid(&self) -> u32 {
        self.book.socket().map_or(0, Socket::peer_pid)
    }

    /// The newest version, without waiting; `None` before the first.
    ///
    /// # Errors
    ///
    /// [`Error::CorruptCommit`] if its record does not hold together.
    pub fn latest(&mut self) -> Result<Option<Snapshot>, Error> {
        let Some(pin) = self.book.pin_live()? else {
            return Ok(None);
        };
        let Some(slot) = self.watch.slot(pin.live.slot)? else {
            return Err(self.why_over());
        };
        self.sequence = pin.live.sequence;
        Snapshot::new(pin, slot, &self.layout, self.run).map(Some)
    }

    /// Waits for a version that this reader has not handed out yet; `None` if
    /// the deadline comes first. Versions that were replaced meanwhile are
    /// passed over: the newest is what comes.
    ///
    /// # Errors
    ///
    /// [`Error::SenderDied`] or [`Error::SenderClosed`], once everything the
    /// sender published has been handed out.
    pub fn next(&mut self, deadline: Deadline) -> Result<Option<Snapshot>, Error> {
        self.book.header.usable()?;
        let book = self.book.clone();
        let last = self.sequence;
        let look = || {
            let live = book.header().live.0.load()?;
            (live.sequence > last).then_some(())
        };
        if self.wait.brief(deadline, look).is_some() {
            return self.latest();
        }
        loop {
            // Asked before the last look: what was published before the end is
            // still handed out.
            let over = self.watch.is_over() || self.is_closed();
            if look().is_some() {
                return self.latest();
            }
            if over {
                return Err(self.why_over());
            }
            if passed(deadline) {
                return Ok(None);
            }
            self.watch.sleep(|| look().is_none(), deadline)?;
        }
    }

    /// Tells the sender that the worker has loaded `version`.
    ///
    /// # Errors
    ///
    /// [`Error::Forked`] in a forked child.
    pub fn applied(&self, version: Version) -> Result<(), Error> {
        self.book.header.usable()?;
        self.book
            .control()?
            .applied
            .0
            .fetch_max(version.0, Ordering::Release);
        self.book.tell_sender();
        Ok(())
    }

    /// Tells the sender that the worker cannot use `version` and why.
    /// `Version::NONE` refuses whatever comes (a wrong layout, say).
    ///
    /// # Errors
    ///
    /// Only of the operating system; a sender that is gone needs no telling.
    pub fn refuse(&self, version: Version, reason: &str) -> Result<(), Error> {
        self.book.header.usable()?;
        let packet = FromReader::Refused {
            version,
            reason: reason.into(),
        }
        .encode();
        self.book.socket()?.send(&packet, &[]).map(|_| ())
    }

    fn is_closed(&self) -> bool {
        self.book.header().closed.0.load(Ordering::Acquire) != 0
    }

    fn why_over(&self) -> Error {
        if self.is_closed() {
            return Error::SenderClosed;
        }
        self.watch.take_fault().unwrap_or(Error::SenderDied {
            pid: self.sender_pid(),
        })
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        // Snapshots may live on, and with them the socket and the pins; the
        // sender only stops waiting for this worker.
        if self.book.header.usable().is_ok()
            && let Ok(control) = self.book.control()
        {
            control.left.0.store(1, Ordering::Release);
            self.book.tell_sender();
        }
    }
}

/// A sender that is there gets the time to answer, also when the deadline only
/// allowed a look: else a worker that polls would never join.
fn answer_by(deadline: Deadline) -> Deadline {
    deadline.map(|at| at.max(Instant::now() + ANSWER_TIME))
}

/// The sender's answer to the hello, with the descriptors beside it.
type First = (Vec<u8>, Vec<OwnedFd>);

fn first_packet(socket: &Socket, deadline: Deadline) -> Result<Option<First>, Error> {
    loop {
        match socket.receive()? {
            Packet::Data(bytes, fds) => return Ok(Some((bytes, fds))),
            Packet::HungUp => return Ok(None),
            Packet::Empty if passed(deadline) => return Ok(None),
            Packet::Empty => match socket.peer_death() {
                // A listener that a dead sender's child inherited never answers.
                Some(death) => {
                    let [_, died] = poll([socket.as_fd(), death], deadline)?;
                    if died {
                        return Ok(None);
                    }
                }
                None => poll([socket.as_fd()], deadline).map(|_| ())?,
            },
        }
    }
}

fn read_layout(fd: &OwnedFd, bytes: u64) -> Result<Layout, Error> {
    if bytes > MAX_LAYOUT_BYTES {
        return Err(unexpected(
            "a layout of at most 1 GiB",
            format!("{bytes} bytes"),
        ));
    }
    let map = Mapping::of_peer(fd.as_fd(), (bytes as usize).max(1))?;
    Ok(Layout::decode(&map.copy_out(bytes as usize))?)
}
