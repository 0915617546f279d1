//! The digest without AES instructions, by the usual table of a round's columns.

use super::{BLOCKS, KEYS, Line, STRIDES, digest_add};

/// The sum of `lines`; the first has index `first_line`.
pub(super) fn sum(lines: &[Line], first_line: u64) -> [u64; 2] {
    let mut total = [0; 2];
    let mut number = first_line.wrapping_mul(BLOCKS);
    for line in lines {
        for block in line.as_chunks::<16>().0 {
            total = digest_add(total, halves(hash(u128::from_le_bytes(*block), number)));
            number = number.wrapping_add(1);
        }
    }
    total
}

/// What block `number` adds to the sum.
fn hash(block: u128, number: u64) -> u128 {
    let tweak = STRIDES.map(|stride| number.wrapping_mul(stride));
    let exchanged = whole([tweak[1], tweak[0]]);
    let mut state = block ^ whole(KEYS[0]) ^ whole(tweak);
    state = round(state) ^ whole(KEYS[1]);
    state = round(state) ^ whole(KEYS[2]) ^ exchanged;
    state = round(state) ^ whole(KEYS[3]);
    round(state) ^ whole(KEYS[4])
}

/// SubBytes, ShiftRows and MixColumns; byte 0 of the state is the lowest.
pub(super) fn round(state: u128) -> u128 {
    let bytes = state.to_le_bytes();
    let mut mixed = [0; 16];
    for (column, out) in mixed.as_chunks_mut::<4>().0.iter_mut().enumerate() {
        let word = (0..4).fold(0, |word, row| {
            // ShiftRows: row r of a column comes from r columns further on.
            let byte = bytes[(4 * (column + row) + row) % 16];
            word ^ COLUMNS[usize::from(byte)].rotate_left(8 * row as u32)
        });
        *out = word.to_le_bytes();
    }
    u128::from_le_bytes(mixed)
}

fn whole([low, high]: [u64; 2]) -> u128 {
    u128::from(low) | u128::from(high) << 64
}

fn halves(word: u128) -> [u64; 2] {
    [word as u64, (word >> 64) as u64]
}

/// For each byte, the column that its substitute in row 0 contributes: (2, 1, 1, 3) times it.
static COLUMNS: [u32; 256] = {
    let mut columns = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let substitute = substitute(byte as u8);
        let twice = times(substitute, 2);
        let column = [twice, substitute, substitute, twice ^ substitute];
        columns[byte] = u32::from_le_bytes(column);
        byte += 1;
    }
    columns
};

/// The S-box: the inverse in GF(2^8), then an affine map (FIPS 197, section 5.1.1).
const fn substitute(byte: u8) -> u8 {
    // byte^254 is the inverse, and 0 for 0.
    let mut inverse = 1;
    let mut step = 0;
    while step < 254 {
        inverse = times(inverse, byte);
        step += 1;
    }
    inverse
        ^ inverse.rotate_left(1)
        ^ inverse.rotate_left(2)
        ^ inverse.rotate_left(3)
        ^ inverse.rotate_left(4)
        ^ 0x63
}

/// The product in AES's field, modulo x^8 + x^4 + x^3 + x + 1.
const fn times(left: u8, right: u8) -> u8 {
    let mut product = 0;
    let mut shifted = left;
    let mut rest = right;
    while rest != 0 {
        if rest & 1 == 1 {
            product ^= shifted;
        }
        shifted = (shifted << 1) ^ if shifted & 0x80 != 0 { 0x1b } else { 0 };
        rest >>= 1;
    }
    product
}
