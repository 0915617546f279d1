//! Plain data as bytes: one encoding per value, and a decoder for any bytes.
//!
//! ```text
//! value  = 0 | 1 (false) | 2 (true) | 3 i64 | 4 u64 | 5 f64 (bits)
//!        | 6 text | 7 count value* | 8 count (text value)*, names ascending
//! text   = len utf8               all numbers little-endian; len, count: u32
//! padded = format:u8 0 0 0 len:u32 value 0*
//! ```

use std::collections::BTreeMap;

use super::{MAX_BYTES, MAX_DEPTH, Plain};

/// Bytes before the value in its padded form.
pub(super) const HEADER: usize = 8;

const FORMAT: u8 = 1;

/// Why extra state does not travel.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlainError {
    /// Lists and maps inside each other.
    #[error("plain data has more than {MAX_DEPTH} levels")]
    TooDeep,
    /// Too much of it.
    #[error("plain data takes {got} bytes, the limit is {limit}")]
    TooLarge {
        /// Bytes it takes.
        got: usize,
        /// The most it may take.
        limit: usize,
    },
    /// It no longer fits into the room that was agreed upon at setup. Connect
    /// again: the room is chosen by what the state takes then.
    #[error(
        "the extra state takes {needed} bytes, but its room has {capacity}: set up and connect \
         again, which makes enough room"
    )]
    Outgrown {
        /// Bytes it takes now.
        needed: usize,
        /// Bytes there are.
        capacity: usize,
    },
    /// Bytes that are no plain data.
    #[error("malformed plain data at byte {offset}: {problem}")]
    Malformed {
        /// How far reading had come.
        offset: usize,
        /// What was found there.
        problem: &'static str,
    },
    /// Plain data in a form that this build does not read.
    #[error("plain data has format {got}, this build reads format {FORMAT}")]
    UnknownFormat {
        /// Its format number.
        got: u8,
    },
}

impl Plain {
    /// The one binary form of this value.
    ///
    /// # Errors
    ///
    /// [`PlainError::TooDeep`] above [`MAX_DEPTH`] levels, [`PlainError::TooLarge`]
    /// above [`MAX_BYTES`].
    pub fn encode(&self) -> Result<Vec<u8>, PlainError> {
        let mut bytes = Vec::new();
        put(self, MAX_DEPTH, &mut bytes)?;
        Ok(bytes)
    }

    /// Reads what [`encode`](Self::encode) wrote; safe on any bytes. Memory is
    /// bounded by a multiple of the input's length.
    ///
    /// # Errors
    ///
    /// [`PlainError::Malformed`], also for another encoding of a value than its
    /// own; [`PlainError::TooDeep`]; [`PlainError::TooLarge`].
    pub fn decode(bytes: &[u8]) -> Result<Self, PlainError> {
        within(bytes.len())?;
        let mut reader = PlainReader { bytes, offset: 0 };
        let value = reader.value(MAX_DEPTH)?;
        match reader.offset == bytes.len() {
            true => Ok(value),
            false => Err(reader.malformed("bytes after the value")),
        }
    }
}

/// A value's encoding with its length before it and zeros behind it.
pub(super) fn padded(encoded: &[u8], capacity: usize) -> Result<Vec<u8>, PlainError> {
    let needed = HEADER + encoded.len();
    if needed > capacity {
        return Err(PlainError::Outgrown { needed, capacity });
    }
    let mut bytes = Vec::with_capacity(capacity);
    bytes.extend_from_slice(&[FORMAT, 0, 0, 0]);
    put_len(encoded.len(), &mut bytes)?;
    bytes.extend_from_slice(encoded);
    bytes.resize(capacity, 0);
    Ok(bytes)
}

/// The encoding in a padded form.
pub(super) fn unpadded(bytes: &[u8]) -> Result<&[u8], PlainError> {
    let mut reader = PlainReader { bytes, offset: 0 };
    let [format, zeros @ ..] = reader.array::<4>()?;
    if format != FORMAT {
        return Err(PlainError::UnknownFormat { got: format });
    }
    // One value has one encoding. Bytes that a decoder skips would break that.
    if zeros != [0; 3] {
        return Err(reader.malformed("a header that is not one"));
    }
    let len = reader.len()?;
    let encoded = reader.take(len)?;
    match bytes[reader.offset..].iter().all(|&byte| byte == 0) {
        true => Ok(encoded),
        false => Err(reader.malformed("padding that is not zero")),
    }
}

fn put(value: &Plain, levels: usize, bytes: &mut Vec<u8>) -> Result<(), PlainError> {
    // The depth is bounded: a peer's bytes must not use up the stack of a thread.
    let below = levels.checked_sub(1).ok_or(PlainError::TooDeep)?;
    match value {
        Plain::Null => bytes.push(0),
        Plain::Bool(value) => bytes.push(1 + u8::from(*value)),
        Plain::Int(value) => put_number(3, value.to_le_bytes(), bytes),
        Plain::Unsigned(value) => match i64::try_from(*value) {
            Ok(value) => put_number(3, value.to_le_bytes(), bytes),
            Err(_) => put_number(4, value.to_le_bytes(), bytes),
        },
        Plain::Float(value) => put_number(5, value.to_bits().to_le_bytes(), bytes),
        Plain::Text(text) => {
            bytes.push(6);
            put_text(text, bytes)?;
        }
        Plain::List(values) => {
            bytes.push(7);
            put_len(values.len(), bytes)?;
            for value in values {
                put(value, below, bytes)?;
            }
        }
        Plain::Map(entries) => {
            bytes.push(8);
            put_len(entries.len(), bytes)?;
            for (name, value) in entries {
                put_text(name, bytes)?;
                put(value, below, bytes)?;
            }
        }
    }
    within(bytes.len())
}

fn put_number(tag: u8, number: [u8; 8], bytes: &mut Vec<u8>) {
    bytes.push(tag);
    bytes.extend_from_slice(&number);
}

fn put_text(text: &str, bytes: &mut Vec<u8>) -> Result<(), PlainError> {
    put_len(text.len(), bytes)?;
    bytes.extend_from_slice(text.as_bytes());
    Ok(())
}

fn put_len(len: usize, bytes: &mut Vec<u8>) -> Result<(), PlainError> {
    // Every element takes a byte at least, so this bounds the whole early.
    within(len)?;
    bytes.extend_from_slice(&(len as u32).to_le_bytes());
    Ok(())
}

fn within(got: usize) -> Result<(), PlainError> {
    match got > MAX_BYTES {
        true => Err(PlainError::TooLarge {
            got,
            limit: MAX_BYTES,
        }),
        false => Ok(()),
    }
}

struct PlainReader<'a> {
    bytes: &'a [u8],
    offset: usize,
}

impl<'a> PlainReader<'a> {
    fn value(&mut self, levels: usize) -> Result<Plain, PlainError> {
        let below = levels.checked_sub(1).ok_or(PlainError::TooDeep)?;
        let [tag] = self.array()?;
        Ok(match tag {
            0 => Plain::Null,
            1 | 2 => Plain::Bool(tag == 2),
            3 => Plain::Int(i64::from_le_bytes(self.array()?)),
            4 => match Plain::from(u64::from_le_bytes(self.array()?)) {
                Plain::Int(_) => {
                    return Err(self.malformed("a number in a larger form than its own"));
                }
                value => value,
            },
            5 => Plain::Float(f64::from_bits(u64::from_le_bytes(self.array()?))),
            6 => Plain::Text(self.text()?.to_owned()),
            7 => {
                let count = self.len()?;
                // Without room for all: a count may be as large as the bytes that follow, and each
                // value takes more memory than its shortest form, a byte.
                let mut values = Vec::new();
                for _ in 0..count {
                    values.push(self.value(below)?);
                }
                Plain::List(values)
            }
            8 => {
                let count = self.len()?;
                let mut entries = BTreeMap::new();
                for _ in 0..count {
                    let name = self.text()?;
                    let last = entries.last_key_value().map(|(last, _): (&String, _)| last);
                    // One order only, so that equal maps have equal bytes, and so equal digests.
                    if last.is_some_and(|last| last.as_str() >= name) {
                        return Err(self.malformed("names that do not ascend"));
                    }
                    entries.insert(name.to_owned(), self.value(below)?);
                }
                Plain::Map(entries)
            }
            _ => return Err(self.malformed("an unknown kind of value")),
        })
    }

    fn text(&mut self) -> Result<&'a str, PlainError> {
        let len = self.len()?;
        let bytes = self.take(len)?;
        str::from_utf8(bytes).map_err(|_| self.malformed("text that is not UTF-8"))
    }

    /// A length or count; no more than the bytes that follow, one for each at least.
    fn len(&mut self) -> Result<usize, PlainError> {
        let len = u32::from_le_bytes(self.array()?) as usize;
        // Before memory is taken for it.
        match len > self.bytes.len() - self.offset {
            true => Err(self.malformed("a length beyond the end")),
            false => Ok(len),
        }
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], PlainError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8], PlainError> {
        let (taken, _) = self.bytes[self.offset..]
            .split_at_checked(len)
            .ok_or_else(|| self.malformed("it ends too early"))?;
        self.offset += len;
        Ok(taken)
    }

    fn malformed(&self, problem: &'static str) -> PlainError {
        PlainError::Malformed {
            offset: self.offset,
            problem,
        }
    }
}
