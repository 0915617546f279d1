//! The binary form of a layout. The form is canonical: a layout has one encoding, and every
//! input that decodes is the encoding of its result. So the hash of the encoding can serve as
//! the layout's id.
//!
//! ```text
//! layout  = "WSLY" format:u8 count:varint tensor*
//! tensor  = name:(len:varint utf8) dtype:u8 rank:varint dim:varint*
//! varint  = LEB128, shortest form, at most 64 bits
//! ```

use super::within;
use super::{
    Layout, LayoutBuilder, MAX_ENCODED_BYTES, MAX_NAME_BYTES, MAX_RANK, MAX_TENSORS, TensorSpec,
};
use crate::dtype::Dtype;
use crate::error::Error;

const MAGIC: [u8; 4] = *b"WSLY";
const FORMAT: u8 = 1;
const WHAT: &str = "layout";

/// No tensor takes fewer bytes than this: a name of one byte, dtype and rank.
const MIN_TENSOR_BYTES: usize = 4;

impl Layout {
    /// The compact binary form, canonical: equal layouts have equal encodings.
    pub fn encode(&self) -> Vec<u8> {
        encode(self.tensors())
    }

    /// Reads what [`encode`](Layout::encode) wrote; safe on any bytes.
    ///
    /// Memory use is bounded by a small multiple of the input's length. Byte ranges are not
    /// read: the decoder lays them out again.
    ///
    /// # Errors
    /// [`Error::Malformed`] if the bytes are not an encoding, also where they are a longer form
    /// of one; [`Error::UnknownFormat`]; and all errors of [`Layout::new`].
    pub fn decode(bytes: &[u8]) -> Result<Layout, Error> {
        within("bytes in an encoded layout", bytes.len(), MAX_ENCODED_BYTES)?;
        let mut reader = LayoutReader { bytes, offset: 0 };
        if reader.take(MAGIC.len())? != MAGIC {
            return Err(reader.malformed_at(0, "it does not begin with WSLY"));
        }
        let format = reader.byte()?;
        if format != FORMAT {
            return Err(Error::UnknownFormat {
                what: WHAT,
                got: format.into(),
                supported: FORMAT.into(),
            });
        }
        let count = reader.length("tensors in a layout", MAX_TENSORS)?;
        // Before there is memory for so many: the count is from outside, and may claim anything.
        if count > reader.remaining() / MIN_TENSOR_BYTES {
            return Err(reader.malformed("fewer bytes than that many tensors need"));
        }
        // The builder checks each tensor and lays it out, as for a layout that is made here.
        let mut builder = LayoutBuilder::with_capacity(count);
        for _ in 0..count {
            let (name, dtype, shape) = reader.tensor()?;
            builder.push(name, dtype, shape)?;
        }
        // Two inputs with one result would be two encodings of one layout, with two ids.
        if reader.remaining() > 0 {
            return Err(reader.malformed("bytes after the last tensor"));
        }
        builder.finish()
    }
}

pub(super) fn encode(tensors: &[TensorSpec]) -> Vec<u8> {
    // A guess at the usual length of a name, a dtype and a shape.
    let mut bytes = Vec::with_capacity(MAGIC.len() + 6 + tensors.len() * 48);
    bytes.extend_from_slice(&MAGIC);
    bytes.push(FORMAT);
    put_varint(&mut bytes, tensors.len() as u64);
    for tensor in tensors {
        put_varint(&mut bytes, tensor.name.len() as u64);
        bytes.extend_from_slice(tensor.name.as_bytes());
        bytes.push(tensor.dtype.code());
        put_varint(&mut bytes, tensor.shape.len() as u64);
        for &dim in &tensor.shape {
            put_varint(&mut bytes, dim);
        }
    }
    bytes
}

fn put_varint(bytes: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
}

struct LayoutReader<'a> {
    bytes: &'a [u8],
    offset: usize,
}

impl<'a> LayoutReader<'a> {
    fn tensor(&mut self) -> Result<(String, Dtype, Vec<u64>), Error> {
        let name_len = self.length("bytes in a tensor name", MAX_NAME_BYTES)?;
        let name_at = self.offset;
        let name = str::from_utf8(self.take(name_len)?)
            .map_err(|_| self.malformed_at(name_at, "a name that is not UTF-8"))?
            .to_owned();
        let dtype = Dtype::from_code(self.byte()?)
            .ok_or_else(|| self.malformed_at(self.offset - 1, "an unknown dtype"))?;
        // Bounded before the shape is allocated.
        let rank = self.length("dimensions of a tensor", MAX_RANK)?;
        let shape = (0..rank).map(|_| self.varint()).collect::<Result<_, _>>()?;
        Ok((name, dtype, shape))
    }

    fn length(&mut self, what: &'static str, limit: usize) -> Result<usize, Error> {
        let got = self.varint()?;
        match usize::try_from(got) {
            Ok(length) if length <= limit => Ok(length),
            _ => Err(Error::TooLarge {
                what,
                got,
                limit: limit as u64,
            }),
        }
    }

    fn varint(&mut self) -> Result<u64, Error> {
        let start = self.offset;
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let bits = u64::from(byte & 0x7f);
            // Nine groups are 63 bits, so the tenth has room for one more.
            if shift == 63 && byte > 1 {
                break;
            }
            value |= bits << shift;
            if byte < 0x80 {
                // A last group of zeros adds nothing: the number has a shorter form, and a layout
                // has only one encoding.
                if byte == 0 && shift > 0 {
                    return Err(self.malformed_at(
                        start,
                        "a number that is not in its shortest \
                                                         form",
                    ));
                }
                return Ok(value);
            }
        }
        Err(self.malformed_at(start, "a number above 64 bits"))
    }

    fn byte(&mut self) -> Result<u8, Error> {
        Ok(self.take(1)?[0])
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8], Error> {
        let (taken, _) = self.bytes[self.offset..]
            .split_at_checked(len)
            .ok_or_else(|| self.malformed("it ends too early"))?;
        self.offset += len;
        Ok(taken)
    }

    fn remaining(&self) -> usize {
        self.bytes.len() - self.offset
    }

    fn malformed(&self, problem: &'static str) -> Error {
        self.malformed_at(self.offset, problem)
    }

    fn malformed_at(&self, offset: usize, problem: &'static str) -> Error {
        Error::Malformed {
            what: WHAT,
            offset,
            problem,
        }
    }
}
