//! What a worker's messages and pieces mean to its trainer: a plain value, without a socket.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use crate::wire::message::ToTrainer;

use super::NoticeKind;

/// Equally long runs of bytes in a file, at equal distances.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// Where the first one begins.
    pub offset: u64,
    /// The bytes of each.
    pub bytes: u64,
    /// How many there are.
    pub count: u64,
    /// From the beginning of one to that of the next.
    pub stride: u64,
}

/// A part that a worker was asked for, and where its bytes belong.
#[derive(Debug)]
pub(super) struct WantedPart {
    part: u64,
    file: File,
    rows: Vec<Rows>,
    bytes: u64,
}

impl WantedPart {
    /// `None` if the rows have more bytes, or end further on, than 64 bits can say.
    pub(super) fn new(part: u64, file: File, rows: Vec<Rows>) -> Option<Self> {
        let bytes = rows.iter().try_fold(0_u64, |sum, rows| {
            let last = rows.stride.checked_mul(rows.count)?;
            rows.offset.checked_add(last)?.checked_add(rows.bytes)?;
            sum.checked_add(rows.bytes.checked_mul(rows.count)?)
        })?;
        Some(Self {
            part,
            file,
            rows,
            bytes,
        })
    }
}

/// A part, some of whose bytes have come.
#[derive(Debug)]
struct IncomingPart {
    wanted: WantedPart,
    /// The bytes that are missing.
    missing: u64,
    /// Where the next byte belongs: a run of a column, and a place in it.
    at: (usize, u64, u64),
}

/// Puts what a worker sends in its place.
#[derive(Debug, Default)]
pub(super) struct Incoming {
    under_way: Option<IncomingPart>,
}

impl Incoming {
    /// Takes a message. `orders` are the parts that were asked for and have not begun to come.
    pub(super) fn message(
        &mut self,
        message: ToTrainer,
        orders: &mut VecDeque<WantedPart>,
    ) -> Result<Option<NoticeKind>, PartError> {
        match message {
            ToTrainer::Ping => Ok(None),
            ToTrainer::Join { .. } => Err(PartError::JoinedTwice),
            // Pieces of that part are missing, and nothing else may come before them.
            _ if self.under_way.is_some() => Err(PartError::Broken),
            ToTrainer::Say { json } => Ok(Some(NoticeKind::Said { json })),
            ToTrainer::Part { part, bytes } => {
                // The next order alone may be answered, with exactly its bytes. So a worker cannot
                // choose where its bytes go.
                let ordered = orders.front().map(|wanted| (wanted.part, wanted.bytes));
                let Some(wanted) =
                    orders.pop_front_if(|one| (one.part, one.bytes) == (part, bytes))
                else {
                    return Err(PartError::NotOrdered {
                        got: (part, bytes),
                        ordered,
                    });
                };
                self.under_way = Some(IncomingPart {
                    wanted,
                    missing: bytes,
                    at: (0, 0, 0),
                });
                // A part without bytes is whole at once.
                Ok(self.whole())
            }
        }
    }

    /// Takes a piece, and writes it where it belongs.
    pub(super) fn piece(&mut self, mut bytes: &[u8]) -> Result<Option<NoticeKind>, PartError> {
        let too_much = PartError::TooMuch {
            got: bytes.len(),
            missing: self.under_way.as_ref().map_or(0, |part| part.missing),
        };
        let Some(part) = &mut self.under_way else {
            return Err(too_much);
        };
        // Before anything is written.
        match part.missing.checked_sub(bytes.len() as u64) {
            Some(rest) => part.missing = rest,
            None => return Err(too_much),
        }
        // Goes on where the last piece ended, which may be within a row.
        while let Some(rows) = part.wanted.rows.get(part.at.0) {
            let (column, row, done) = &mut part.at;
            if *row == rows.count {
                (*column, *row) = (*column + 1, 0);
                continue;
            }
            if bytes.is_empty() {
                break;
            }
            let now = (rows.bytes - *done).min(bytes.len() as u64);
            let (here, rest) = bytes.split_at(now as usize);
            let offset = rows.offset + *row * rows.stride + *done;
            let written = part.wanted.file.write_all_at(here, offset);
            written.map_err(PartError::Write)?;
            bytes = rest;
            *done += now;
            if *done == rows.bytes {
                (*row, *done) = (*row + 1, 0);
            }
        }
        Ok(self.whole())
    }

    /// The part under way, if nothing is missing.
    fn whole(&mut self) -> Option<NoticeKind> {
        let part = self.under_way.take_if(|part| part.missing == 0)?;
        Some(NoticeKind::Part {
            part: part.wanted.part,
        })
    }
}

/// What a worker has done against the protocol, or why its bytes found no place.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PartError {
    #[error("it did not join before it said anything else")]
    NotJoined,
    #[error("it joined twice")]
    JoinedTwice,
    #[error("it began a message in the middle of a part")]
    Broken,
    #[error(
        "it sent part {} of {} bytes, expected {}", .got.0, .got.1,
        ordered.map_or("none".into(), |(part, bytes)| format!("part {part} of {bytes} bytes"))
    )]
    NotOrdered {
        got: (u64, u64),
        ordered: Option<(u64, u64)>,
    },
    #[error("it sent {got} bytes, where {missing} were missing")]
    TooMuch { got: usize, missing: u64 },
    #[error(
        "its frames cannot be written into the collector's memory: {0}; is there enough of it?"
    )]
    Write(io::Error),
}
