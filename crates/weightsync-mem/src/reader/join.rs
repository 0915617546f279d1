//! How a reader joins: it sends a hello, and the sender hands over the segment.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use weightsync_core::{Run, Version};

use super::{ANSWER_TIME, AttachOptions, RELAY_TIME, SegmentReader};
use crate::backoff::Backoff;
use crate::error::{Error, bad, unexpected};
use crate::interrupt;
use crate::map::{MemoryMap, OwnedFile};
use crate::model::{DescriptionFile, ModelDescription, SegmentModel};
use crate::pins::{PinBook, PinOwner};
use crate::protocol::{MAX_BOUND, MAX_MODELS};
use crate::set::ModelMask;
use crate::shared::{
    CONTROL_BYTES, Control, HEADER_BYTES, MAILBOX_BYTES, MODEL_PAGE_BYTES, ReaderExit,
};
use crate::slot::Slot;
use crate::socket::Socket;
use crate::spans::SlotShape;
use crate::wait::{Deadline, Doorbell, left, passed, poll};
use crate::watch::{Mapped, Watch};
use crate::wire::{Delivery, MAX_DEVICE, Packet, ReaderMessage, SenderMessage};

/// The longest status, in bytes.
const MAX_STATUS: u64 = 64 << 20;

impl SegmentReader {
    /// Joins a segment, and waits for its sender until the deadline. A sender that is there has a
    /// moment more to answer. Maps and faults in every slot of the wanted models, so that the first
    /// snapshot costs no page faults.
    ///
    /// # Errors
    ///
    /// [`Error::NoSender`] at the deadline, [`Error::Denied`] with the sender's reason,
    /// [`Error::Fenced`], [`Error::BadOption`], and [`Error::Protocol`] if the other end is not a
    /// weightsync sender.
    pub fn attach(options: &AttachOptions, deadline: Deadline) -> Result<Self, Error> {
        Self::attach_by(options, deadline, || Ok(Some(options.address.clone())))
    }

    /// Like [`attach`](Self::attach), for a sender whose address may change while it is looked for:
    /// `find` returns the address before each attempt. [`Error::NoSender`] names the address of the
    /// options.
    ///
    /// # Errors
    ///
    /// As [`attach`](Self::attach), and those of `find`.
    pub fn attach_by<E: From<Error>>(
        options: &AttachOptions,
        deadline: Deadline,
        mut find: impl FnMut() -> Result<Option<String>, E>,
    ) -> Result<Self, E> {
        check(options)?;
        let since = Instant::now();
        let mut backoff = Backoff::new(Duration::from_millis(2), Duration::from_millis(50));
        loop {
            // Asked before each attempt: a restarted sender of a run directory has another address.
            if let Some(address) = find()?
                && let Some(reader) = Self::join(&address, options, deadline)?
            {
                return Ok(reader);
            }
            // There is no listener yet, or a sender that is shutting down hung up.
            if passed(deadline) {
                let nobody = Error::NoSender {
                    address: options.address.clone(),
                    waited: since.elapsed(),
                };
                return Err(nobody.into());
            }
            // Short at first, for a worker that was started together with its sender.
            let pause = backoff.pause();
            interrupt::sleep(left(deadline).map_or(pause, |left| left.min(pause)))?;
        }
    }

    /// Tries to join once. `None` if there is no answer, or the sender hangs up.
    fn join(
        address: &str,
        options: &AttachOptions,
        deadline: Deadline,
    ) -> Result<Option<Self>, Error> {
        let Some(socket) = Socket::connect(address)? else {
            return Ok(None);
        };
        // The worker makes the page, so that it alone can map it writable: the sender gets a sealed
        // file.
        let control = OwnedFile::new("weightsync-control", CONTROL_BYTES)?;
        let mut giving_up = LeaveUnlessJoined {
            control: control.map.clone(),
            has_joined: false,
        };
        if !say_hello(&socket, options, &control)? {
            return Ok(None);
        }
        let Some(welcome) = SegmentWelcome::receive(&socket, options, deadline)? else {
            return Ok(None);
        };
        let SegmentWelcome {
            run,
            count,
            models,
            relayed,
            pages: [header, mailbox, bell],
        } = welcome;
        // Each page is checked for its seals and its size before it is used.
        let header = Arc::new(MemoryMap::of_peer(header.as_fd(), HEADER_BYTES)?);
        let mailbox = MemoryMap::of_peer(mailbox.as_fd(), MAILBOX_BYTES)?;
        let doorbell = Arc::new(Doorbell::from_fd(bell));
        let Some((specs, mapped)) = receive_models(&socket, models, count, deadline)? else {
            return Ok(None);
        };
        let owner = PinOwner::Reader {
            control,
            mailbox,
            socket,
        };
        let book = Arc::new(PinBook::new(owner, header, doorbell, models));
        let queued = matches!(options.delivery, Delivery::Every { .. });
        // From here on the watch alone reads the socket.
        let watch = match Watch::start(book.clone(), mapped, (queued, relayed != 0)) {
            Ok(watch) => watch,
            Err(error) => {
                // Dropped before the book, which ends the connection.
                drop(giving_up);
                return Err(error);
            }
        };
        // From here on the reader's own drop says how the worker left.
        giving_up.has_joined = true;
        Ok(Some(Self::new(watch, book, specs, (run, relayed), options)))
    }

    /// A reader that has joined, and goes on where its options say.
    fn new(
        watch: Watch,
        book: Arc<PinBook>,
        models: Vec<(usize, ModelDescription)>,
        (run, relayed): (Run, u32),
        options: &AttachOptions,
    ) -> Self {
        Self {
            watch,
            book,
            models,
            run,
            wait: options.wait,
            delivery: options.delivery,
            relayed,
            sequence: options.resume.sequence,
            head: 0,
            versions: [Version::NONE; MAX_MODELS],
            question: options.resume.question,
            asks: false,
            unmapped: None,
            unusable: AtomicBool::new(false),
        }
    }
}

/// The sender's welcome, which fits what the reader asked for.
struct SegmentWelcome {
    run: Run,
    /// How many models the segment has.
    count: u8,
    /// The reader's models.
    models: ModelMask,
    /// The process whose versions a relay's segment carries; else 0.
    relayed: u32,
    /// The header, the mailbox and the doorbell.
    pages: [OwnedFd; 3],
}

impl SegmentWelcome {
    /// Waits for it. `None` if there is no answer, or the sender hangs up.
    fn receive(
        socket: &Socket,
        options: &AttachOptions,
        deadline: Deadline,
    ) -> Result<Option<Self>, Error> {
        let Some((packet, fds)) = answer(socket, deadline)? else {
            return Ok(None);
        };
        let SenderMessage::Welcome {
            run,
            count,
            models,
            relayed,
        } = packet
        else {
            return Err(unexpected("a welcome", format!("{packet:?}")));
        };
        // The sender compares as well, but a worker's safety must not depend on that.
        if run.epoch < options.seen {
            return Err(Error::Fenced {
                seen: options.seen,
                got: run.epoch,
            });
        }
        let pages = <[OwnedFd; 3]>::try_from(fds).map_err(|fds| {
            let got = format!("{} descriptors", fds.len());
            unexpected("header, mailbox and bell", got)
        })?;
        let wanted = match &options.models {
            None => ModelMask::first(count.into()),
            Some(wanted) => ModelMask::of(wanted),
        };
        if models != wanted {
            let got = format!("{models:?} where {wanted:?} were asked for");
            return Err(unexpected("the models asked for", got));
        }
        Ok(Some(Self {
            run,
            count,
            models,
            relayed,
            pages,
        }))
    }
}

/// Whether the process that serves an address answers by the deadline, or a moment later. One that
/// is stopped does not, although the address [is served](crate::is_served).
///
/// # Errors
///
/// As [`is_served`](crate::is_served).
pub fn is_answered(address: &str, deadline: Deadline) -> Result<bool, Error> {
    let Some(socket) = Socket::connect(address)? else {
        return Ok(false);
    };
    // No reader begins with this, so it is refused. The refusal is the answer.
    if !socket.send(&ReaderMessage::Withdraw.encode(), &[])? {
        return Ok(false);
    }
    match answer(&socket, deadline) {
        Ok(None) => Ok(false),
        Ok(Some(_)) | Err(Error::Denied { .. } | Error::Protocol { .. }) => Ok(true),
        Err(error) => Err(error),
    }
}

/// The text with which the sender at an address answers programs that ask for its status; `None` if
/// no sender is there, or none answers by the deadline.
///
/// # Errors
///
/// [`Error::Denied`] if the sender tells no status, [`Error::Protocol`] for another version of the
/// protocol, and as [`is_served`](crate::is_served).
pub fn ask_status(address: &str, deadline: Deadline) -> Result<Option<Vec<u8>>, Error> {
    let Some(socket) = Socket::connect(address)? else {
        return Ok(None);
    };
    if !socket.send(&ReaderMessage::Status.encode(), &[])? {
        return Ok(None);
    }
    let Some((packet, fds)) = answer(&socket, deadline)? else {
        return Ok(None);
    };
    let SenderMessage::Status { bytes } = packet else {
        return Err(unexpected("a status", format!("{packet:?}")));
    };
    let [file] = <[OwnedFd; 1]>::try_from(fds)
        .map_err(|fds| unexpected("the status's file", format!("{} descriptors", fds.len())))?;
    // The length comes from outside, and so much would be allocated.
    if bytes > MAX_STATUS {
        return Err(unexpected(
            "a status of at most 64 MiB",
            format!("{bytes} bytes"),
        ));
    }
    let len = bytes as usize;
    Ok(Some(
        MemoryMap::of_peer(file.as_fd(), len.max(1))?.copy_out(len),
    ))
}

/// Marks the control page as left in order, unless the reader has joined. A reader that ends
/// without a mark counts as dead.
struct LeaveUnlessJoined {
    control: Arc<MemoryMap>,
    has_joined: bool,
}

impl Drop for LeaveUnlessJoined {
    fn drop(&mut self) {
        if !self.has_joined {
            let control: &Control = self.control.table();
            let left = &control.left;
            left.store(ReaderExit::InOrder.word(), Ordering::Release);
        }
    }
}

fn check(options: &AttachOptions) -> Result<(), Error> {
    if let Some(models) = &options.models
        && (models.is_empty() || models.iter().any(|model| *model >= MAX_MODELS))
    {
        let got = format!("{models:?}");
        return Err(bad("models", "at least one index below 64", got));
    }
    if let Delivery::Every { bound } = options.delivery
        && !(1..=MAX_BOUND).contains(&bound)
    {
        return Err(bad("the bound of a queue", "between 1 and 32", bound));
    }
    if options.device.len() > MAX_DEVICE {
        let got = format!("{} bytes", options.device.len());
        return Err(bad("the device's label", "at most 64 bytes", got));
    }
    Ok(())
}

/// The sender's next message during the join, with its descriptors. `None` if there is none by the
/// deadline, or the sender has hung up.
///
/// A sender that is there gets time to answer even if the deadline is over: otherwise a worker that
/// polls could never join.
fn answer(
    socket: &Socket,
    deadline: Deadline,
) -> Result<Option<(SenderMessage, Vec<OwnedFd>)>, Error> {
    let mut deadline = deadline.map(|at| at.max(Instant::now() + ANSWER_TIME));
    loop {
        match socket.receive()? {
            Packet::Data(bytes, fds) => match SenderMessage::decode(&bytes)? {
                // At any point of the join: the sender may find out late that it cannot admit this
                // worker.
                SenderMessage::Denied { reason } => return Err(Error::Denied { reason }),
                // A relay first asks its sender, and has a limit of its own for that.
                SenderMessage::Wait => {
                    deadline = deadline.map(|at| at.max(Instant::now() + RELAY_TIME));
                }
                packet => return Ok(Some((packet, fds))),
            },
            Packet::HungUp => return Ok(None),
            Packet::Empty if passed(deadline) => return Ok(None),
            Packet::Empty => match socket.peer_death() {
                // If a dead sender's child has inherited the listener, it never answers.
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

/// Sends the hello with the worker's page. False if the sender hangs up, or cannot take it yet.
fn say_hello(socket: &Socket, options: &AttachOptions, control: &OwnedFile) -> Result<bool, Error> {
    let hello = ReaderMessage::Hello {
        secret: options.secret,
        worker: options.worker,
        seen: options.seen,
        models: options
            .models
            .as_deref()
            .map_or(ModelMask::ALL, ModelMask::of),
        delivery: options.delivery,
        device: options.device.clone(),
        instance: options.instance,
    };
    match socket.send(&hello.encode(), &[control.fd.as_fd()]) {
        // Too many descriptors of this user are in flight. The sender takes them soon.
        Err(error) if error.is_crowded_out() => Ok(false),
        sent => sent,
    }
}

/// The descriptions of a reader's models, and the pages of all `count` models of the segment.
type ReceivedModels = (Vec<(usize, ModelDescription)>, Vec<Option<Mapped>>);

/// Receives and maps the reader's models. `None` if there is no answer, or the sender hangs up.
fn receive_models(
    socket: &Socket,
    models: ModelMask,
    count: u8,
    deadline: Deadline,
) -> Result<Option<ReceivedModels>, Error> {
    let mut specs = Vec::with_capacity(models.len());
    let mut mapped: Vec<Option<Mapped>> = Vec::new();
    mapped.resize_with(count.into(), || None);
    // A packet for each model follows, lowest first. It maps all slots, so that the first
    // snapshot costs no page faults.
    for model in models.iter() {
        let Some((packet, fds)) = answer(socket, deadline)? else {
            return Ok(None);
        };
        let (spec, pages) = take_model(model, packet, fds)?;
        specs.push((model, spec));
        mapped[model] = Some(pages);
    }
    Ok(Some((specs, mapped)))
}

/// Maps one model's pages, and checks them against the model's layout.
fn take_model(
    model: usize,
    packet: SenderMessage,
    fds: Vec<OwnedFd>,
) -> Result<(ModelDescription, Mapped), Error> {
    let SenderMessage::Model {
        index,
        slots,
        slot_bytes,
        layout_bytes,
        note_bytes,
    } = packet
    else {
        return Err(unexpected("a model", format!("{packet:?}")));
    };
    // The sender sends the models in the order of the welcome's set.
    if usize::from(index) != model {
        return Err(unexpected(
            "the models in order",
            format!("{index} for {model}"),
        ));
    }
    if fds.len() != usize::from(slots) + 2 {
        let got = format!("{} descriptors for {slots} slots", fds.len());
        return Err(unexpected("description, page and every slot", got));
    }
    let spec = DescriptionFile::read(fds[0].as_fd(), layout_bytes, note_bytes)?;
    let needed = SlotShape::of(&spec.layout).slot_bytes();
    // Both ends compute the size from the layout. With another size they do not mean the same
    // bytes.
    if slot_bytes != needed as u64 {
        let got = format!("{slot_bytes} bytes for {needed}");
        return Err(unexpected("slots of the layout's size", got));
    }
    let page = MemoryMap::of_peer(fds[1].as_fd(), MODEL_PAGE_BYTES)?;
    let pages = SegmentModel::new(model, &spec.layout, Arc::new(page));
    // Each slot's file must be sealed and at least this long, or a read could end this process.
    let slots = fds
        .into_iter()
        .skip(2)
        .map(|slot| Slot::of_peer(slot, needed).map(Arc::new))
        .collect::<Result<_, _>>()?;
    let model = Arc::new(pages);
    Ok((spec, Mapped { model, slots }))
}
