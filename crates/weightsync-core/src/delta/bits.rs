//! Streams of bits: the lowest bit of a byte comes first.

/// Most bits that are written or read at once.
// Eight bytes from any bit on hold at least 56 bits: up to seven of the first byte are skipped.
pub(super) const MOST: u32 = 56;

/// Appends bits to bytes.
pub(super) struct BitWriter<'a> {
    out: &'a mut Vec<u8>,
    at: usize,
    word: u64,
    filled: u32,
}

impl<'a> BitWriter<'a> {
    /// Begins behind what is there; so many bytes are expected.
    pub(super) fn new(out: &'a mut Vec<u8>, expected: usize) -> Self {
        let at = out.len();
        out.resize(at + expected + 8, 0);
        Self {
            out,
            at,
            word: 0,
            filled: 0,
        }
    }

    /// Writes the lowest `count` bits of `bits`, which has no others, at most [`MOST`].
    #[inline(always)]
    pub(super) fn put(&mut self, bits: u64, count: u32) {
        // At most seven bits are left over from before, so 56 more fit.
        self.word |= bits << self.filled;
        self.filled += count;
        if self.at + 8 > self.out.len() {
            self.grow();
        }
        // Always eight bytes: a store of fixed width is cheaper than one of the bytes that are full.
        self.out[self.at..self.at + 8].copy_from_slice(&self.word.to_le_bytes());
        self.at += (self.filled / 8) as usize;
        self.word >>= self.filled & !7;
        self.filled &= 7;
    }

    #[cold]
    fn grow(&mut self) {
        self.out.resize(self.at + self.at / 2 + 64, 0);
    }

    /// Writes `zeros` zeros and a one.
    #[inline(always)]
    pub(super) fn put_unary(&mut self, mut zeros: u64) {
        // There may be any number of zeros, but at most 56 bits are written at once.
        while zeros >= u64::from(MOST) {
            self.put(0, MOST);
            zeros -= u64::from(MOST);
        }
        self.put(1 << zeros, zeros as u32 + 1);
    }

    /// Writes a number above zero: its length in bits less one as zeros, a one, and the bits below
    /// its highest (Elias gamma).
    #[inline(always)]
    pub(super) fn put_gamma(&mut self, number: u64) {
        let below = 63 - number.leading_zeros();
        // The usual case: zeros, one and rest fit into one word.
        if below < MOST / 2 {
            let rest = number & !(1 << below);
            return self.put(1 << below | rest << (below + 1), 2 * below + 1);
        }
        self.put_unary(u64::from(below));
        let rest = number & !(1 << below);
        self.put(rest & ((1 << 32) - 1), below.min(32));
        self.put(rest >> 32, below.saturating_sub(32));
    }

    /// Ends at the next whole byte.
    pub(super) fn finish(self) {
        // The bytes behind were room for whole words.
        let used = self.at + usize::from(self.filled > 0);
        self.out.truncate(used);
    }
}

/// Reads bits; behind the end there are zeros.
#[derive(Clone, Copy)]
pub(super) struct BitReader<'a> {
    bytes: &'a [u8],
    /// The next bit.
    at: usize,
}

impl<'a> BitReader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// Goes on at another bit.
    pub(super) fn seek(&mut self, at: usize) {
        self.at = at;
    }

    /// At least [`MOST`] bits from here.
    #[inline(always)]
    pub(super) fn peek(&self) -> u64 {
        bits_at(self.bytes, self.at)
    }

    #[inline(always)]
    pub(super) fn take(&mut self, count: u32) -> u64 {
        let bits = self.peek() & ((1 << count) - 1);
        self.at += count as usize;
        bits
    }

    /// How many zeros stand before the next one; `None` if there is none any more.
    #[inline(always)]
    pub(super) fn take_unary(&mut self) -> Option<u64> {
        let mut zeros = 0;
        loop {
            let word = self.peek() & ((1 << MOST) - 1);
            if word != 0 {
                let here = word.trailing_zeros();
                self.at += here as usize + 1;
                return Some(zeros + u64::from(here));
            }
            // Bits past the end read as zeros: without this check they would never end.
            if self.is_past_the_end() {
                return None;
            }
            self.at += MOST as usize;
            zeros += u64::from(MOST);
        }
    }

    /// A number as [`BitWriter::put_gamma`] writes it; `None` if none is of that length.
    #[inline(always)]
    pub(super) fn take_gamma(&mut self) -> Option<u64> {
        // The length comes from outside: no number has more bits than this.
        let below = self.take_unary().filter(|below| *below < 64)? as u32;
        let low = self.take(below.min(32));
        let high = self.take(below.saturating_sub(32));
        Some(1 << below | high << 32 | low)
    }

    /// Whether more was read than there is.
    pub(super) fn is_past_the_end(&self) -> bool {
        self.at > self.bytes.len() * 8
    }

    /// How many bytes were begun.
    pub(super) fn bytes(&self) -> usize {
        self.at.div_ceil(8)
    }
}

/// At least [`MOST`] bits from bit `at`; zeros behind the end.
#[inline(always)]
pub(super) fn bits_at(bytes: &[u8], at: usize) -> u64 {
    let first = at / 8;
    let word = match bytes.get(first..first + 8) {
        Some(eight) => {
            let mut word = [0; 8];
            word.copy_from_slice(eight);
            u64::from_le_bytes(word)
        }
        // Fewer than eight bytes are left.
        None => tail(bytes, first),
    };
    word >> (at % 8)
}

#[cold]
fn tail(bytes: &[u8], first: usize) -> u64 {
    let rest = bytes.get(first..).unwrap_or_default();
    let mut word = [0; 8];
    word[..rest.len()].copy_from_slice(rest);
    u64::from_le_bytes(word)
}
