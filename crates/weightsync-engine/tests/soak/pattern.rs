//! What a version consists of: bytes that are a function of the trainer's life,
//! the version and the place, written and compared at the speed of memory in
//! every build profile.
//!
//! Every 64-bit word differs from the word at the same place of any other
//! version, so a mix of two versions anywhere is found.

use std::fmt;

use weightsync_engine::{Dtype, Layout, Loan, Snapshot, Tensors};
use zerocopy::IntoBytes;

use crate::scale::mix;

/// The first tensor: one word that names the life of the trainer.
const SEED: &str = "seed";
/// The others. The last has an odd length, so that slots have padding.
const BODY: [&str; 3] = ["body.0", "body.1", "body.2"];
const TAIL: usize = 61;

const BLOCK: usize = 16 << 10;
/// Blocks are cut out of the stripe at so many places, a line apart.
const SHIFTS: usize = 64;
const LINE: usize = 64;

/// The tensors of a model of `bytes` bytes but for a word, all zero.
pub fn zeros(bytes: usize) -> Tensors {
    let words = (bytes - 8 - TAIL) as u64 / 8;
    let specs = [
        (SEED, Dtype::U64, 1),
        (BODY[0], Dtype::U64, words / 3),
        (BODY[1], Dtype::U64, words - words / 3),
        (BODY[2], Dtype::U8, TAIL as u64),
    ];
    let specs = specs.map(|(name, dtype, len)| (name.to_owned(), dtype, vec![len]));
    Tensors::zeros(&Layout::new(specs).expect("names and shapes that fit"))
}

/// The bytes of one version of one life.
pub struct Pattern {
    seed: u64,
    stripe: Vec<u8>,
}

impl Pattern {
    pub fn new(seed: u64, version: u64) -> Self {
        let mut word = mix(seed ^ mix(version));
        let mut stripe = vec![0; BLOCK + SHIFTS * LINE];
        for place in stripe.chunks_exact_mut(8) {
            place.copy_from_slice(&word.to_le_bytes());
            word = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
        }
        Self { seed, stripe }
    }

    /// The life that a snapshot says it is of.
    pub fn seed_of(snapshot: &Snapshot) -> weightsync_engine::Result<u64> {
        Ok(snapshot.slice::<u64>(SEED)?[0])
    }

    /// Makes `tensors` this version.
    pub fn fill(&self, tensors: &mut Tensors) -> weightsync_engine::Result<()> {
        tensors.slice_mut::<u64>(SEED)?[0] = self.seed;
        self.write(0, tensors.slice_mut::<u64>(BODY[0])?.as_mut_bytes());
        self.write(1, tensors.slice_mut::<u64>(BODY[1])?.as_mut_bytes());
        self.write(2, tensors.slice_mut::<u8>(BODY[2])?);
        Ok(())
    }

    /// Writes this version into a slot; `midway` is called when half is written.
    pub fn fill_loan(
        &self,
        loan: &mut Loan<'_>,
        midway: impl FnOnce(),
    ) -> weightsync_engine::Result<()> {
        loan.tensor_mut(SEED)?.copy_from_slice(self.seed.as_bytes());
        self.write(0, loan.tensor_mut(BODY[0])?);
        midway();
        self.write(1, loan.tensor_mut(BODY[1])?);
        self.write(2, loan.tensor_mut(BODY[2])?);
        Ok(())
    }

    /// Compares every byte.
    pub fn check(&self, snapshot: &Snapshot) -> Result<(), Torn> {
        let torn = |tensor, at, detail: String| Torn {
            version: format!("{} of {}", snapshot.version(), snapshot.run()),
            tensor,
            at,
            detail,
        };
        match Self::seed_of(snapshot) {
            Ok(seed) if seed == self.seed => {}
            other => return Err(torn(SEED, 0, format!("{other:?}, not {}", self.seed))),
        }
        for (number, name) in BODY.into_iter().enumerate() {
            let view = snapshot.tensor(name);
            let view = view.map_err(|error| torn(name, 0, error.to_string()))?;
            for (index, part) in view.bytes().chunks(BLOCK).enumerate() {
                let block = &self.block(number, index)[..part.len()];
                if part == block {
                    continue;
                }
                let same = part.iter().zip(block).take_while(|(a, b)| a == b).count();
                let differing = part.iter().zip(block).filter(|(a, b)| a != b).count();
                let detail = format!("{differing} of {} bytes of the block differ", part.len());
                return Err(torn(name, index * BLOCK + same, detail));
            }
        }
        Ok(())
    }

    fn write(&self, tensor: usize, place: &mut [u8]) {
        for (index, part) in place.chunks_mut(BLOCK).enumerate() {
            part.copy_from_slice(&self.block(tensor, index)[..part.len()]);
        }
    }

    /// Neighbouring blocks, and equal blocks of two tensors, differ.
    fn block(&self, tensor: usize, index: usize) -> &[u8] {
        let start = (index * 7 + tensor * 13) % SHIFTS * LINE;
        &self.stripe[start..start + BLOCK]
    }
}

/// Bytes that are not those of the version they came as.
#[derive(Debug)]
pub struct Torn {
    version: String,
    tensor: &'static str,
    at: usize,
    detail: String,
}

impl fmt::Display for Torn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            version,
            tensor,
            at,
            detail,
        } = self;
        write!(f, "TORN: {version} at byte {at} of {tensor}: {detail}")
    }
}

impl std::error::Error for Torn {}
