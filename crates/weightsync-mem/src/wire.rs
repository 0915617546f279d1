//! The messages that the two ends exchange over their Unix socket.
//!
//! One message is one packet. Everything in a message is bounded and checked here, once. File
//! descriptors travel with the packet.

use std::ops::RangeInclusive;
#[cfg(not(loom))]
use std::os::fd::OwnedFd;

use weightsync_core::{Epoch, Run, Version, WorkerId};

use crate::error::{Error, unexpected};
use crate::protocol::{MAX_BOUND, MAX_MODELS, MAX_SLOTS};
pub use crate::set::ModelMask;

/// What a read of the socket gives.
#[cfg(not(loom))]
#[derive(Debug)]
pub(crate) enum Packet {
    /// One packet.
    Data(Vec<u8>, Vec<OwnedFd>),
    /// No packet yet.
    Empty,
    /// The peer hung up.
    HungUp,
}

/// The longest packet, in bytes.
pub const MAX_PACKET: usize = 1024;

/// The longest text in a packet, in bytes of UTF-8; longer ones are cut.
pub const MAX_TEXT: usize = 900;

/// The longest device label, in bytes of UTF-8; longer ones are cut.
pub const MAX_DEVICE: usize = 64;

/// The most versions a [`SenderMessage::NoSuchVersion`] names.
pub const MAX_KNOWN: usize = 16;

/// Grows with every change of a message or of a shared page.
pub const PROTOCOL: u16 = 6;

const MAGIC: [u8; 4] = *b"wsMM";

/// Which of the sender's versions a reader gets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Delivery {
    /// The newest. A version is skipped if a newer one replaces it before the reader takes it.
    #[default]
    Newest,
    /// Every one, in order. While `bound` versions wait to be taken, sends wait for this reader; at
    /// most [`MAX_BOUND`].
    Every {
        /// How many may wait.
        bound: u8,
    },
    /// Only the versions that the reader asks for.
    Asked,
}

/// The set that a reader asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// The newest set that the reader should run.
    Newest,
    /// The newest set that the reader should run, once it has at least this version of this model.
    AtLeast {
        /// The model's index.
        model: usize,
        /// The oldest accepted version.
        version: Version,
    },
    /// The set with exactly this version of this model.
    Exactly {
        /// The model's index.
        model: usize,
        /// The version.
        version: Version,
    },
}

/// A message of a reader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReaderMessage {
    /// The first message; the control page's descriptor travels with it.
    Hello {
        /// Proof that the reader holds the init info.
        secret: [u8; 16],
        /// The worker's number.
        worker: WorkerId,
        /// The highest epoch that the worker has seen.
        seen: Epoch,
        /// The wanted models; [`ModelMask::ALL`] for all.
        models: ModelMask,
        /// Which versions the reader gets.
        delivery: Delivery,
        /// Where the worker's weights live, for people to read.
        device: String,
        /// A number that the worker chose when it first joined. A relay's segment recognises the
        /// worker by it.
        instance: u64,
    },
    /// The reader cannot use a set, or any set for 0, and says why.
    Refused {
        /// The set's sequence number.
        sequence: u64,
        /// The reason, for the report.
        reason: String,
    },
    /// The reader has freed something that the sender waits for: a queue entry, a record, or the
    /// place of an answer.
    Room,
    /// The reader asks for a set.
    Ask {
        /// The number of the question, which the answer repeats.
        question: u64,
        /// The wanted set.
        want: Want,
    },
    /// The reader no longer waits for an answer.
    Withdraw,
    /// A program of the same user asks for the sender's status, and is no reader. Any process of
    /// this user could read the sender's memory, so this needs no secret.
    Status,
}

/// A message of a sender.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SenderMessage {
    /// The reader has joined. The descriptors of the header, the mailbox and the reader's doorbell
    /// travel with it, in this order.
    Welcome {
        /// The run the segment belongs to.
        run: Run,
        /// How many models the segment has.
        count: u8,
        /// The reader's models: a [`SenderMessage::Model`] follows for each, lowest first.
        models: ModelMask,
        /// For a relay's segment, the process of the sender whose versions it carries; else 0.
        relayed: u32,
    },
    /// Another process decides whether the reader may join: the answer comes later.
    Wait,
    /// One model. The descriptors of its description (layout, then note), its page and its slots
    /// travel with it, in this order.
    Model {
        /// The model's index.
        index: u8,
        /// How many slots there are now.
        slots: u8,
        /// Bytes of one slot's mapping.
        slot_bytes: u64,
        /// Bytes of the encoded layout.
        layout_bytes: u64,
        /// Bytes of the note, which follows the layout.
        note_bytes: u64,
    },
    /// The sender refuses the reader.
    Denied {
        /// The reason.
        reason: String,
    },
    /// A model has grown; the new slot's descriptor travels with it.
    Slot {
        /// The model's index.
        model: u8,
        /// The slot's number, which is the next one.
        index: u8,
    },
    /// The answer to [`ReaderMessage::Status`]. The descriptor of a memory file with the answer's
    /// text travels with it.
    Status {
        /// Bytes of the text.
        bytes: u64,
    },
    /// There is no version that answers an [`ReaderMessage::Ask`].
    NoSuchVersion {
        /// The question's number.
        question: u64,
        /// The model that was asked about.
        model: u8,
        /// The version that was asked for.
        asked: Version,
        /// The newest versions that exist for this reader, newest first; at most [`MAX_KNOWN`].
        known: Vec<Version>,
    },
}

impl ReaderMessage {
    /// The message as one packet.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Hello {
                secret,
                worker,
                seen,
                models,
                delivery,
                device,
                instance,
            } => {
                // A reader's messages begin at 1, a sender's at 65. A packet that goes the wrong
                // way is then of no known kind.
                let mut packet = begin(1);
                packet.extend_from_slice(secret);
                packet.extend_from_slice(&worker.0.to_le_bytes());
                packet.extend_from_slice(&seen.0.to_le_bytes());
                packet.extend_from_slice(&models.0.to_le_bytes());
                packet.extend_from_slice(&match delivery {
                    Delivery::Newest => [0, 0],
                    Delivery::Every { bound } => [1, *bound],
                    Delivery::Asked => [2, 0],
                });
                packet.extend_from_slice(&instance.to_le_bytes());
                push_text(&mut packet, cut(device, MAX_DEVICE));
                packet
            }
            Self::Refused { sequence, reason } => {
                let mut packet = begin(2);
                packet.extend_from_slice(&sequence.to_le_bytes());
                push_text(&mut packet, reason);
                packet
            }
            Self::Room => begin(4),
            Self::Withdraw => begin(5),
            Self::Status => begin(6),
            Self::Ask { question, want } => {
                let mut packet = begin(3);
                packet.extend_from_slice(&question.to_le_bytes());
                let (kind, model, version) = match *want {
                    Want::Newest => (0, 0, Version::NONE),
                    Want::AtLeast { model, version } => (1, model, version),
                    Want::Exactly { model, version } => (2, model, version),
                };
                // The sender refuses an impossible model; this must not turn it into another one.
                let model = u8::try_from(model).unwrap_or(u8::MAX);
                packet.extend_from_slice(&[kind, model]);
                packet.extend_from_slice(&version.0.to_le_bytes());
                packet
            }
        }
    }

    /// Reads one packet.
    ///
    /// # Errors
    ///
    /// [`Error::Protocol`] for another protocol version, an unknown kind, a wrong length, or a
    /// number out of range. Text that is not UTF-8 is repaired, not refused.
    pub fn decode(packet: &[u8]) -> Result<Self, Error> {
        let (kind, mut rest) = open(packet)?;
        let message = match kind {
            // The fields are read in the order in which they are written here, which is that of the
            // packet.
            1 => Self::Hello {
                secret: rest.take()?,
                worker: WorkerId(u32::from_le_bytes(rest.take()?)),
                seen: Epoch(u64::from_le_bytes(rest.take()?)),
                models: rest.models()?,
                delivery: rest.delivery()?,
                instance: u64::from_le_bytes(rest.take()?),
                device: rest.device()?,
            },
            2 => Self::Refused {
                sequence: u64::from_le_bytes(rest.take()?),
                reason: rest.text()?,
            },
            3 => Self::Ask {
                question: u64::from_le_bytes(rest.take()?),
                want: rest.want()?,
            },
            4 => Self::Room,
            5 => Self::Withdraw,
            6 => Self::Status,
            other => return Err(unexpected("a reader's message", format!("kind {other}"))),
        };
        rest.end()?;
        Ok(message)
    }
}

impl SenderMessage {
    /// The message as one packet.
    // Longer than a screen: a table with one short arm for each message, in the order of its fields
    // on the wire.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Welcome {
                run,
                count,
                models,
                relayed,
            } => {
                let mut packet = begin(65);
                packet.extend_from_slice(&run.epoch.0.to_le_bytes());
                packet.extend_from_slice(&run.id);
                packet.push(*count);
                packet.extend_from_slice(&models.0.to_le_bytes());
                packet.extend_from_slice(&relayed.to_le_bytes());
                packet
            }
            Self::Wait => begin(70),
            Self::Status { bytes } => {
                let mut packet = begin(71);
                packet.extend_from_slice(&bytes.to_le_bytes());
                packet
            }
            Self::Denied { reason } => {
                let mut packet = begin(66);
                push_text(&mut packet, reason);
                packet
            }
            Self::Slot { model, index } => {
                let mut packet = begin(67);
                packet.extend_from_slice(&[*model, *index]);
                packet
            }
            Self::Model {
                index,
                slots,
                slot_bytes,
                layout_bytes,
                note_bytes,
            } => {
                let mut packet = begin(68);
                packet.extend_from_slice(&[*index, *slots]);
                packet.extend_from_slice(&slot_bytes.to_le_bytes());
                packet.extend_from_slice(&layout_bytes.to_le_bytes());
                packet.extend_from_slice(&note_bytes.to_le_bytes());
                packet
            }
            Self::NoSuchVersion {
                question,
                model,
                asked,
                known,
            } => {
                let mut packet = begin(69);
                // The other end refuses a longer list.
                let known = &known[..known.len().min(MAX_KNOWN)];
                packet.extend_from_slice(&question.to_le_bytes());
                packet.push(*model);
                packet.extend_from_slice(&asked.0.to_le_bytes());
                packet.push(known.len() as u8);
                for version in known {
                    packet.extend_from_slice(&version.0.to_le_bytes());
                }
                packet
            }
        }
    }

    /// Reads one packet.
    ///
    /// # Errors
    ///
    /// [`Error::Protocol`] for another protocol version, an unknown kind, a wrong length, or a
    /// number out of range. Text that is not UTF-8 is repaired, not refused.
    pub fn decode(packet: &[u8]) -> Result<Self, Error> {
        let (kind, mut rest) = open(packet)?;
        let message = match kind {
            65 => {
                let epoch = Epoch(u64::from_le_bytes(rest.take()?));
                let id = rest.take()?;
                let count = rest.number("1 to 64 models", 1..=MAX_MODELS as u8)?;
                let models = rest.models()?;
                // A reader makes tables of `count` rows and indexes them by these models.
                if !models.without(ModelMask::first(count.into())).is_empty() {
                    let got = format!("{models:?} of {count}");
                    return Err(unexpected("models that the segment has", got));
                }
                Self::Welcome {
                    run: Run { epoch, id },
                    count,
                    models,
                    relayed: u32::from_le_bytes(rest.take()?),
                }
            }
            70 => Self::Wait,
            71 => Self::Status {
                bytes: u64::from_le_bytes(rest.take()?),
            },
            66 => Self::Denied {
                reason: rest.text()?,
            },
            67 => Self::Slot {
                model: rest.model()?,
                index: rest.number("a slot below 64", 0..=MAX_SLOTS as u8 - 1)?,
            },
            68 => Self::Model {
                index: rest.model()?,
                slots: rest.number("1 to 64 slots", 1..=MAX_SLOTS as u8)?,
                slot_bytes: u64::from_le_bytes(rest.take()?),
                layout_bytes: u64::from_le_bytes(rest.take()?),
                note_bytes: u64::from_le_bytes(rest.take()?),
            },
            69 => {
                let question = u64::from_le_bytes(rest.take()?);
                let model = rest.model()?;
                let asked = Version(u64::from_le_bytes(rest.take()?));
                let count = rest.number("at most 16 versions", 0..=MAX_KNOWN as u8)?;
                let known = (0..count).map(|_| Ok(Version(u64::from_le_bytes(rest.take()?))));
                let known = known.collect::<Result<_, Error>>()?;
                Self::NoSuchVersion {
                    question,
                    model,
                    asked,
                    known,
                }
            }
            other => return Err(unexpected("a sender's message", format!("kind {other}"))),
        };
        rest.end()?;
        Ok(message)
    }
}

fn begin(kind: u8) -> Vec<u8> {
    let mut packet = Vec::with_capacity(64);
    packet.extend_from_slice(&MAGIC);
    packet.extend_from_slice(&PROTOCOL.to_le_bytes());
    packet.push(kind);
    packet
}

/// Checks the beginning that all packets share.
fn open(packet: &[u8]) -> Result<(u8, Rest<'_>), Error> {
    let mut rest = Rest(packet);
    // Before the version, so that another program's bytes do not pass for a weightsync of another
    // version.
    let magic: [u8; 4] = rest.take()?;
    if magic != MAGIC {
        return Err(unexpected(
            "a weightsync shared-memory packet",
            format!("bytes {magic:02x?}"),
        ));
    }
    let protocol = u16::from_le_bytes(rest.take()?);
    if protocol != PROTOCOL {
        return Err(Error::Protocol {
            expected: "this end's protocol version (install the same weightsync on both ends)",
            got: format!("version {protocol}, not {PROTOCOL}"),
        });
    }
    let [kind] = rest.take()?;
    Ok((kind, rest))
}

fn push_text(packet: &mut Vec<u8>, text: &str) {
    let text = cut(text, MAX_TEXT);
    packet.extend_from_slice(&(text.len() as u16).to_le_bytes());
    packet.extend_from_slice(text.as_bytes());
}

/// At most `len` bytes of a text, cut between characters.
fn cut(text: &str, len: usize) -> &str {
    &text[..text.floor_char_boundary(len)]
}

struct Rest<'a>(&'a [u8]);

impl Rest<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], Error> {
        let (head, tail) = self.0.split_first_chunk().ok_or_else(|| {
            unexpected(
                "a whole packet",
                format!("only {} bytes more where {N} belong", self.0.len()),
            )
        })?;
        self.0 = tail;
        Ok(*head)
    }

    fn text(&mut self) -> Result<String, Error> {
        let len = usize::from(u16::from_le_bytes(self.take()?));
        // The length comes from outside; a slice that is not there is an error and no panic.
        let text = self
            .0
            .split_off(..len)
            .filter(|_| len <= MAX_TEXT)
            .ok_or_else(|| {
                unexpected("a text of at most 900 bytes", format!("a length of {len}"))
            })?;
        // Text for people: a broken character must not cost the message.
        Ok(String::from_utf8_lossy(text).into_owned())
    }

    fn number(&mut self, expected: &'static str, range: RangeInclusive<u8>) -> Result<u8, Error> {
        let [number] = self.take()?;
        if range.contains(&number) {
            return Ok(number);
        }
        Err(unexpected(expected, number.to_string()))
    }

    fn model(&mut self) -> Result<u8, Error> {
        self.number("a model below 64", 0..=MAX_MODELS as u8 - 1)
    }

    fn models(&mut self) -> Result<ModelMask, Error> {
        let models = ModelMask(u64::from_le_bytes(self.take()?));
        if models.is_empty() {
            return Err(unexpected("at least one model", "none".into()));
        }
        Ok(models)
    }

    fn delivery(&mut self) -> Result<Delivery, Error> {
        match self.take()? {
            [0, 0] => Ok(Delivery::Newest),
            [1, bound @ 1..=MAX_BOUND] => Ok(Delivery::Every { bound }),
            [2, 0] => Ok(Delivery::Asked),
            other => Err(unexpected(
                "newest, every with a bound of 1 to 32, or asked",
                format!("{other:?}"),
            )),
        }
    }

    fn want(&mut self) -> Result<Want, Error> {
        let kind = self.number("a want of 0 to 2", 0..=2)?;
        let model = usize::from(self.model()?);
        let version = Version(u64::from_le_bytes(self.take()?));
        // Each question has one form, and what it does not need is 0.
        match (kind, model, version.is_none()) {
            (0, 0, true) => Ok(Want::Newest),
            (1, _, false) => Ok(Want::AtLeast { model, version }),
            (2, _, false) => Ok(Want::Exactly { model, version }),
            _ => Err(unexpected(
                "the newest, or a version from 1",
                format!("want {kind} of version {} of model {model}", version.0),
            )),
        }
    }

    fn device(&mut self) -> Result<String, Error> {
        let device = self.text()?;
        Ok(cut(&device, MAX_DEVICE).to_owned())
    }

    fn end(&self) -> Result<(), Error> {
        if self.0.is_empty() {
            return Ok(());
        }
        Err(unexpected(
            "the end of the packet",
            format!("{} bytes more", self.0.len()),
        ))
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
