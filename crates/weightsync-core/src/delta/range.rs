//! An adaptive binary range coder: a bit costs as much as its model expected, and then updates
//! the model.
//!
//! The arithmetic is that of G. N. N. Martin, "Range encoding: an algorithm for removing redundancy
//! from a digitised message" (1979), for bits, with carries held back as in LZMA.

/// What is expected of a bit: how probable a zero is, in 1/65536.
///
/// The mean of two estimates, a quick one and a slow one, as the changes of a span are few and not
/// the same everywhere.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bit {
    quick: u16,
    slow: u16,
}

impl Default for Bit {
    fn default() -> Self {
        Self {
            quick: 1 << 15,
            slow: 1 << 15,
        }
    }
}

impl Bit {
    /// A zero's share of the range, of 2^15.
    #[inline(always)]
    fn zero(self) -> u32 {
        // Neither share is ever empty.
        ((u32::from(self.quick) + u32::from(self.slow)) >> 2).clamp(16, (1 << 15) - 16)
    }

    #[inline(always)]
    fn learn(&mut self, bit: bool) {
        // The quick one follows within some 16 bits, the slow one within some 128.
        for (estimate, rate) in [(&mut self.quick, 4), (&mut self.slow, 7)] {
            if bit {
                *estimate -= *estimate >> rate;
            } else {
                *estimate += (u16::MAX - *estimate) >> rate;
            }
        }
    }
}

/// Writes bits.
pub(super) struct RangeEncoder<'a> {
    out: &'a mut Vec<u8>,
    low: u64,
    range: u32,
    /// A byte that a carry may still reach, and how many 0xff follow it.
    held: Option<u8>,
    follow: usize,
}

impl<'a> RangeEncoder<'a> {
    pub(super) fn new(out: &'a mut Vec<u8>) -> Self {
        Self {
            out,
            low: 0,
            range: u32::MAX,
            held: None,
            follow: 0,
        }
    }

    #[inline(always)]
    pub(super) fn put(&mut self, model: &mut Bit, bit: bool) {
        // Encoder and decoder compute this from the same bits before, so both learn alike.
        let bound = (self.range >> 15) * model.zero();
        if bit {
            self.low += u64::from(bound);
            self.range -= bound;
        } else {
            self.range = bound;
        }
        model.learn(bit);
        // The range is kept above 24 bits, so that no share of it rounds to nothing.
        while self.range < 1 << 24 {
            self.range <<= 8;
            self.shift();
        }
    }

    fn shift(&mut self) {
        // A carry reaches the byte that is held, and turns the 0xff behind it into zeros. A byte
        // that is not 0xff stops every later carry.
        let (carry, byte) = (self.low >> 32 != 0, (self.low >> 24) as u8);
        if carry || byte != 0xff {
            if let Some(held) = self.held {
                self.out.push(held.wrapping_add(u8::from(carry)));
            }
            let followed = if carry { 0 } else { 0xff };
            self.out.extend(std::iter::repeat_n(followed, self.follow));
            self.follow = 0;
            self.held = Some(byte);
        } else {
            self.follow += 1;
        }
        self.low = (self.low & 0x00ff_ffff) << 8;
    }

    /// Writes what is left. Zeros at the end need not be written, as a reader finds zeros there.
    pub(super) fn finish(mut self, begin: usize) {
        // One byte is held back until its carry is known, and `low` has four more.
        for _ in 0..5 {
            self.shift();
        }
        while self.out.len() > begin && self.out.last() == Some(&0) {
            self.out.pop();
        }
    }
}

/// Reads bits; behind the end there are zeros.
pub(super) struct RangeDecoder<'a> {
    bytes: &'a [u8],
    at: usize,
    range: u32,
    code: u32,
}

impl<'a> RangeDecoder<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        let mut decoder = Self {
            bytes,
            at: 0,
            range: u32::MAX,
            code: 0,
        };
        // As many bytes as the code holds. A part without bits has none, and reads zeros.
        for _ in 0..4 {
            decoder.shift();
        }
        decoder
    }

    #[inline(always)]
    pub(super) fn take(&mut self, model: &mut Bit) -> bool {
        let bound = (self.range >> 15) * model.zero();
        let bit = self.code >= bound;
        if bit {
            self.code -= bound;
            self.range -= bound;
        } else {
            self.range = bound;
        }
        model.learn(bit);
        while self.range < 1 << 24 {
            self.range <<= 8;
            self.shift();
        }
        bit
    }

    /// Bytes that belong to none of the bits that were read.
    pub(super) fn unread(&self) -> usize {
        self.bytes.len().saturating_sub(self.at)
    }

    #[inline(always)]
    fn shift(&mut self) {
        // The encoder leaves zeros at its end out.
        let byte = self.bytes.get(self.at).copied().unwrap_or(0);
        self.at += 1;
        self.code = self.code << 8 | u32::from(byte);
    }
}
