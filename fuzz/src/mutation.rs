//! Changes to a valid encoding that keep most of it valid.

use bolero::generator::*;

/// How one input is made.
#[derive(Debug, Clone, TypeGenerator)]
pub enum Plan {
    /// Any bytes.
    Random(#[generator(produce::<Vec<u8>>().with().len(0_usize..256))] Vec<u8>),
    /// A valid encoding, changed.
    Mutated {
        /// Which of the target's encodings, modulo their number.
        seed: u8,
        /// The first change.
        first: Mutation,
        /// A few more: with many, nothing valid would be left.
        #[generator(produce::<Vec<Mutation>>().with().len(0_usize..4))]
        more: Vec<Mutation>,
    },
}

/// One change. Positions are taken modulo the length, so that every one of them does something.
#[derive(Debug, Clone, TypeGenerator)]
pub enum Mutation {
    /// Flips a bit.
    Flip {
        /// Byte.
        at: u32,
        /// Bit.
        bit: u8,
    },
    /// Replaces a byte.
    Byte {
        /// Where.
        at: u32,
        /// By what.
        value: u8,
    },
    /// Writes a number a length check is likely to mishandle, little-endian.
    Number {
        /// Where.
        at: u32,
        /// 1, 2, 4 or 8 bytes.
        width: u8,
        /// Which number.
        which: u8,
    },
    /// Inserts bytes.
    Insert {
        /// Where.
        at: u32,
        /// What.
        bytes: [u8; 3],
        /// How many times: a long run of the same few.
        times: u8,
    },
    /// Inserts a piece of JSON.
    Json {
        /// Where.
        at: u32,
        /// Which piece.
        which: u8,
        /// How many times: nesting.
        times: u8,
    },
    /// Puts another piece of JSON in the place of a number.
    JsonNumber {
        /// Which of the numbers in the text.
        nth: u8,
        /// Which piece.
        which: u8,
    },
    /// Removes bytes.
    Remove {
        /// Where.
        at: u32,
        /// How many.
        count: u8,
    },
    /// Repeats a part, as a duplicated entry would.
    Repeat {
        /// Where.
        at: u32,
        /// How many bytes.
        count: u8,
    },
    /// Ends early.
    Truncate {
        /// Where.
        at: u32,
    },
    /// Continues as another of the target's encodings.
    Splice {
        /// Where.
        at: u32,
        /// Which other.
        seed: u8,
        /// From where in the other.
        from: u32,
    },
}

/// Off by one around every width and every power a format may bound by.
const NUMBERS: [u64; 20] = [
    0,
    1,
    2,
    0x7f,
    0x80,
    0xff,
    0x100,
    0x7fff,
    0x8000,
    0xffff,
    0x1_0000,
    (4 << 20) + 1,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    1 << 32,
    (1 << 50) + 1,
    i64::MAX as u64,
    1 << 63,
    u64::MAX,
];

const JSON: [&str; 16] = [
    "0",
    "-1",
    "1e999",
    "0.5",
    "4294967296",
    "18446744073709551615",
    "18446744073709551616",
    "null",
    "true",
    "\"\"",
    "\"\\u0000\"",
    "[",
    "]",
    "{\"a\":",
    "}",
    ",",
];

impl Mutation {
    /// Changes `bytes`; `seeds` are the target's valid encodings, at least one.
    pub(crate) fn apply(&self, bytes: &mut Vec<u8>, seeds: &[Vec<u8>]) {
        let len = bytes.len();
        match *self {
            Mutation::Flip { at, bit } => {
                if let Some(byte) = bytes.get_mut(index(at, len)) {
                    *byte ^= 1 << (bit % 8);
                }
            }
            Mutation::Byte { at, value } => {
                if let Some(byte) = bytes.get_mut(index(at, len)) {
                    *byte = value;
                }
            }
            Mutation::Number { at, width, which } => {
                let number = NUMBERS[index(which.into(), NUMBERS.len())].to_le_bytes();
                let width = 1 << (width % 4);
                for (byte, part) in bytes.iter_mut().skip(index(at, len)).zip(&number[..width]) {
                    *byte = *part;
                }
            }
            Mutation::Insert {
                at,
                bytes: new,
                times,
            } => {
                splice(bytes, at, &new.repeat(usize::from(times)));
            }
            Mutation::Json { at, which, times } => {
                let piece = JSON[index(which.into(), JSON.len())];
                splice(bytes, at, piece.repeat(usize::from(times)).as_bytes());
            }
            Mutation::JsonNumber { nth, which } => {
                let numbers = numbers(bytes);
                if let Some(range) = numbers.get(index(nth.into(), numbers.len())).cloned() {
                    bytes.splice(range, JSON[index(which.into(), JSON.len())].bytes());
                }
            }
            Mutation::Remove { at, count } => {
                let start = index(at, len);
                bytes.drain(start..len.min(start + usize::from(count)));
            }
            Mutation::Repeat { at, count } => {
                let start = index(at, len);
                let end = len.min(start + usize::from(count));
                let part = bytes[start..end].to_vec();
                bytes.splice(end..end, part);
            }
            Mutation::Truncate { at } => bytes.truncate(index(at, len)),
            Mutation::Splice { at, seed, from } => {
                let other = &seeds[index(seed.into(), seeds.len())];
                bytes.truncate(index(at, len));
                bytes.extend_from_slice(&other[index(from, other.len())..]);
            }
        }
    }
}

/// `at` modulo `len`; 0 in an empty place.
pub(crate) fn index(at: u32, len: usize) -> usize {
    (at as usize).checked_rem(len).unwrap_or(0)
}

fn splice(bytes: &mut Vec<u8>, at: u32, new: &[u8]) {
    // The end is a place too.
    let at = index(at, bytes.len() + 1);
    bytes.splice(at..at, new.iter().copied());
}

/// The runs of digits in a text.
fn numbers(bytes: &[u8]) -> Vec<std::ops::Range<usize>> {
    let mut numbers = Vec::new();
    let mut start = None;
    for (at, byte) in bytes.iter().chain([&b' ']).enumerate() {
        match (byte.is_ascii_digit(), start) {
            (true, None) => start = Some(at),
            (false, Some(from)) => {
                numbers.push(from..at);
                start = None;
            }
            _ => {}
        }
    }
    numbers
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mutated(mutation: &Mutation, bytes: &[u8]) -> Vec<u8> {
        let mut bytes = bytes.to_vec();
        mutation.apply(&mut bytes, &[b"other".to_vec()]);
        bytes
    }

    #[test]
    fn each_mutation_does_what_it_says() {
        let cases: [(Mutation, &[u8]); 10] = [
            (
                Mutation::Flip { at: 1, bit: 0 },
                b"{\"a\":[12,345]}".as_slice(),
            ),
            (Mutation::Byte { at: 0, value: b'(' }, b"(\"a\":[12,345]}"),
            (
                Mutation::Number {
                    at: 12,
                    width: 1,
                    which: 9,
                },
                b"{\"a\":[12,345\xff\xff",
            ),
            (
                Mutation::Insert {
                    at: 14,
                    bytes: *b"xyz",
                    times: 2,
                },
                b"{\"a\":[12,345]}xyzxyz",
            ),
            (
                Mutation::Json {
                    at: 0,
                    which: 13,
                    times: 2,
                },
                b"{\"a\":{\"a\":{\"a\":[12,345]}",
            ),
            (
                Mutation::JsonNumber { nth: 1, which: 1 },
                b"{\"a\":[12,-1]}",
            ),
            (Mutation::Remove { at: 5, count: 200 }, b"{\"a\":"),
            (Mutation::Repeat { at: 6, count: 3 }, b"{\"a\":[12,12,345]}"),
            (Mutation::Truncate { at: 6 }, b"{\"a\":["),
            (
                Mutation::Splice {
                    at: 1,
                    seed: 7,
                    from: 2,
                },
                b"{her",
            ),
        ];
        for (mutation, expected) in cases {
            let mut expected = expected.to_vec();
            if matches!(mutation, Mutation::Flip { .. }) {
                expected[1] ^= 1;
            }
            assert_eq!(
                mutated(&mutation, b"{\"a\":[12,345]}"),
                expected,
                "{mutation:?}"
            );
        }
    }

    #[test]
    fn nothing_is_out_of_bounds() {
        bolero::check!()
            .with_iterations(2000)
            .with_type::<(Mutation, Vec<u8>)>()
            .for_each(|(mutation, bytes)| {
                for input in [bytes.as_slice(), &[]] {
                    let grown = mutated(mutation, input).len().saturating_sub(input.len());
                    assert!(
                        grown <= 255 * 20,
                        "one change adds at most a few thousand bytes"
                    );
                }
            });
    }
}
