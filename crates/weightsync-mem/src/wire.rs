//! The few words the two ends say to each other over their Unix socket.
//!
//! One message is one packet. Everything in it is bounded and checked here,
//! once; file descriptors ride beside it.

use weightsync_core::{Epoch, LayoutId, Run, Version, WorkerId};

use crate::error::{Error, unexpected};
use crate::protocol::MAX_SLOTS;

/// The longest packet, in bytes.
pub const MAX_PACKET: usize = 1024;

/// The longest text in a packet, in bytes of UTF-8; longer ones are cut.
pub const MAX_TEXT: usize = 900;

/// Bumped on every change of a message or of a shared page.
pub const PROTOCOL: u16 = 1;

const MAGIC: [u8; 4] = *b"wsMM";

/// What a reader says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FromReader {
    /// The first words; the control page's descriptor rides along.
    Hello {
        /// Proof that the reader holds the init info.
        secret: [u8; 16],
        /// Who it is.
        worker: WorkerId,
        /// The highest epoch it has seen.
        seen: Epoch,
        /// The layout it insists on, if it does.
        layout: Option<LayoutId>,
    },
    /// It cannot use a version (0: any version) and says why.
    Refused {
        /// The version.
        version: Version,
        /// The reason, for the report.
        reason: String,
    },
}

/// What a sender says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FromSender {
    /// The reader is in; header, layout, doorbell and slots ride along, in this
    /// order.
    Welcome {
        /// The run the segment belongs to.
        run: Run,
        /// How many slots there are now.
        slots: u8,
        /// Bytes of one slot's mapping.
        slot_bytes: u64,
        /// Bytes of the encoded layout.
        layout_bytes: u64,
    },
    /// The reader is turned away.
    Denied {
        /// Why.
        reason: String,
    },
    /// The segment has grown; the new slot rides along.
    Slot {
        /// Its number, the next one.
        index: u8,
    },
}

impl FromReader {
    /// The message as one packet.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Hello {
                secret,
                worker,
                seen,
                layout,
            } => {
                let mut packet = begin(1);
                packet.extend_from_slice(secret);
                packet.extend_from_slice(&worker.0.to_le_bytes());
                packet.extend_from_slice(&seen.0.to_le_bytes());
                packet.push(u8::from(layout.is_some()));
                packet.extend_from_slice(&layout.unwrap_or(LayoutId([0; 32])).0);
                packet
            }
            Self::Refused { version, reason } => {
                let mut packet = begin(2);
                packet.extend_from_slice(&version.0.to_le_bytes());
                push_text(&mut packet, reason);
                packet
            }
        }
    }

    /// Reads one packet.
    ///
    /// # Errors
    ///
    /// [`Error::Protocol`] for another protocol version, an unknown kind, or a
    /// wrong length. Text that is not UTF-8 is mended, not refused.
    pub fn decode(packet: &[u8]) -> Result<Self, Error> {
        let (kind, mut rest) = open(packet)?;
        let message = match kind {
            1 => {
                let secret = rest.take()?;
                let worker = WorkerId(u32::from_le_bytes(rest.take()?));
                let seen = Epoch(u64::from_le_bytes(rest.take()?));
                let [named] = rest.take()?;
                let layout = LayoutId(rest.take()?);
                Self::Hello {
                    secret,
                    worker,
                    seen,
                    layout: (named != 0).then_some(layout),
                }
            }
            2 => Self::Refused {
                version: Version(u64::from_le_bytes(rest.take()?)),
                reason: rest.text()?,
            },
            other => return Err(unexpected("a reader's message", format!("kind {other}"))),
        };
        rest.end()?;
        Ok(message)
    }
}

impl FromSender {
    /// The message as one packet.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Welcome {
                run,
                slots,
                slot_bytes,
                layout_bytes,
            } => {
                let mut packet = begin(65);
                packet.extend_from_slice(&run.epoch.0.to_le_bytes());
                packet.extend_from_slice(&run.id);
                packet.push(*slots);
                packet.extend_from_slice(&slot_bytes.to_le_bytes());
                packet.extend_from_slice(&layout_bytes.to_le_bytes());
                packet
            }
            Self::Denied { reason } => {
                let mut packet = begin(66);
                push_text(&mut packet, reason);
                packet
            }
            Self::Slot { index } => {
                let mut packet = begin(67);
                packet.push(*index);
                packet
            }
        }
    }

    /// Reads one packet.
    ///
    /// # Errors
    ///
    /// [`Error::Protocol`] for another protocol version, an unknown kind, a wrong
    /// length, or a number out of range. Text that is not UTF-8 is mended, not
    /// refused.
    pub fn decode(packet: &[u8]) -> Result<Self, Error> {
        let (kind, mut rest) = open(packet)?;
        let message = match kind {
            65 => {
                let epoch = Epoch(u64::from_le_bytes(rest.take()?));
                let id = rest.take()?;
                let [slots] = rest.take()?;
                if slots == 0 || usize::from(slots) > MAX_SLOTS {
                    return Err(unexpected("1 to 64 slots", slots.to_string()));
                }
                Self::Welcome {
                    run: Run { epoch, id },
                    slots,
                    slot_bytes: u64::from_le_bytes(rest.take()?),
                    layout_bytes: u64::from_le_bytes(rest.take()?),
                }
            }
            66 => Self::Denied {
                reason: rest.text()?,
            },
            67 => {
                let [index] = rest.take()?;
                if usize::from(index) >= MAX_SLOTS {
                    return Err(unexpected("a slot below 64", index.to_string()));
                }
                Self::Slot { index }
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

/// Checks what every packet begins with.
fn open(packet: &[u8]) -> Result<(u8, Rest<'_>), Error> {
    let mut rest = Rest(packet);
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
            expected: "protocol version 1 (install the same weightsync on both ends)",
            got: format!("version {protocol}"),
        });
    }
    let [kind] = rest.take()?;
    Ok((kind, rest))
}

fn push_text(packet: &mut Vec<u8>, text: &str) {
    let text = &text[..text.floor_char_boundary(MAX_TEXT)];
    packet.extend_from_slice(&(text.len() as u16).to_le_bytes());
    packet.extend_from_slice(text.as_bytes());
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
        let text = self
            .0
            .split_off(..len)
            .filter(|_| len <= MAX_TEXT)
            .ok_or_else(|| {
                unexpected("a text of at most 900 bytes", format!("a length of {len}"))
            })?;
        // Words for a human: a broken character must not cost the message.
        Ok(String::from_utf8_lossy(text).into_owned())
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

#[cfg(test)]
mod tests {
    use super::*;

    fn readers() -> Vec<FromReader> {
        let hello = |layout| FromReader::Hello {
            secret: *b"sixteen bytes ok",
            worker: WorkerId(3),
            seen: Epoch(9),
            layout,
        };
        vec![
            hello(None),
            hello(Some(LayoutId([7; 32]))),
            FromReader::Refused {
                version: Version(4),
                reason: "wrong shape: größer".into(),
            },
        ]
    }

    fn senders() -> Vec<FromSender> {
        vec![
            FromSender::Welcome {
                run: Run {
                    epoch: Epoch(2),
                    id: [5; 16],
                },
                slots: 64,
                slot_bytes: 1 << 40,
                layout_bytes: 77,
            },
            FromSender::Denied {
                reason: String::new(),
            },
            FromSender::Slot { index: 63 },
        ]
    }

    #[test]
    fn messages_come_back_as_they_were() {
        for message in readers() {
            assert_eq!(FromReader::decode(&message.encode()).unwrap(), message);
        }
        for message in senders() {
            assert_eq!(FromSender::decode(&message.encode()).unwrap(), message);
        }
    }

    #[test]
    fn cut_and_lengthened_packets_are_refused() {
        for packet in readers().iter().map(FromReader::encode) {
            for len in 0..packet.len() {
                assert!(
                    FromReader::decode(&packet[..len]).is_err(),
                    "{len} of {}",
                    packet.len()
                );
            }
            assert!(FromReader::decode(&[&packet[..], b"x"].concat()).is_err());
        }
        for packet in senders().iter().map(FromSender::encode) {
            for len in 0..packet.len() {
                assert!(
                    FromSender::decode(&packet[..len]).is_err(),
                    "{len} of {}",
                    packet.len()
                );
            }
            assert!(FromSender::decode(&[&packet[..], b"x"].concat()).is_err());
        }
    }

    #[test]
    fn long_texts_are_cut_at_a_character() {
        let reason = "ö".repeat(2 * MAX_TEXT);
        let packet = FromSender::Denied { reason }.encode();
        assert!(packet.len() <= MAX_PACKET);
        let FromSender::Denied { reason } = FromSender::decode(&packet).unwrap() else {
            panic!("another message came back")
        };
        assert_eq!(reason, "ö".repeat(MAX_TEXT / 2));
    }

    #[test]
    fn another_protocol_version_is_named() {
        let mut packet = FromSender::Slot { index: 0 }.encode();
        packet[4] = 9;
        let error = FromSender::decode(&packet).unwrap_err().to_string();
        assert!(
            error.contains("version 9") && error.contains("same weightsync"),
            "{error}"
        );
    }
}
