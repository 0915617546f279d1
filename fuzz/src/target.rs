//! One target: its valid encodings, its corpus, and what is checked of every decoder.

use std::fmt;
use std::panic::{AssertUnwindSafe, RefUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};

use crate::mutation::{Plan, index};

/// What a decoder may hold at once for each byte of its input, in bytes: a tensor described in
/// four bytes becomes a name, a shape and an index entry.
const ALLOCATED_PER_BYTE: u64 = 256;

/// What a decoder may hold at once besides, in bytes: tables of fixed size, texts of errors.
const ALLOCATED_ANYWAY: u64 = 256 << 10;

/// The inputs of one decoder.
#[derive(Debug)]
pub struct Target {
    corpus: PathBuf,
    seeds: Vec<Vec<u8>>,
}

impl Target {
    /// A target with the files of `corpus/name`, where that exists, and with valid encodings.
    ///
    /// # Panics
    /// If there is no valid encoding: everything would stop at the first check.
    pub fn new(
        corpus: impl AsRef<Path>,
        name: &str,
        seeds: impl IntoIterator<Item = Vec<u8>>,
    ) -> Self {
        let seeds: Vec<Vec<u8>> = seeds.into_iter().collect();
        assert!(
            !seeds.is_empty(),
            "{name}: no valid encodings to start from"
        );
        Self {
            corpus: corpus.as_ref().join(name),
            seeds,
        }
    }

    /// Checks the valid encodings and the corpus, as they are.
    ///
    /// # Panics
    /// If the check does, naming the file; and if the corpus cannot be read.
    pub fn replay(&self, check: &(impl Fn(&[u8]) + RefUnwindSafe)) {
        for seed in &self.seeds {
            Self::check(&Input(seed.clone()), check);
        }
        for path in self.corpus_files() {
            let bytes = std::fs::read(&path)
                .unwrap_or_else(|error| panic!("reading {}: {error}", path.display()));
            eprintln!("corpus: {}", path.display());
            Self::check(&Input(bytes), check);
        }
    }

    /// The input a plan stands for.
    pub fn input(&self, plan: &Plan) -> Input {
        Input(match plan {
            Plan::Random(bytes) => bytes.clone(),
            Plan::Mutated { seed, first, more } => {
                let mut bytes = self.seeds[index((*seed).into(), self.seeds.len())].clone();
                for mutation in [first].into_iter().chain(more) {
                    mutation.apply(&mut bytes, &self.seeds);
                }
                bytes
            }
        })
    }

    /// Runs a check on one input and bounds the memory it held at once by the input's length.
    ///
    /// # Panics
    /// If the check does, or if it held more.
    pub fn check(input: &Input, check: &impl Fn(&[u8])) {
        // The counter nests and must be left in order, so a panic is carried past its end.
        let mut outcome = Ok(());
        let held = allocation_counter::measure(|| {
            outcome = catch_unwind(AssertUnwindSafe(|| check(&input.0)));
        })
        .bytes_max;
        if let Err(panic) = outcome {
            resume_unwind(panic);
        }
        let allowed = ALLOCATED_ANYWAY + ALLOCATED_PER_BYTE * input.0.len() as u64;
        assert!(
            held <= allowed,
            "{held} bytes were allocated for an input of {}: a length was believed before it was checked",
            input.0.len()
        );
    }

    fn corpus_files(&self) -> Vec<PathBuf> {
        let Ok(entries) = std::fs::read_dir(&self.corpus) else {
            return Vec::new();
        };
        let mut files: Vec<PathBuf> = entries
            .map(|entry| match entry {
                Ok(entry) => entry.path(),
                Err(error) => panic!("reading {}: {error}", self.corpus.display()),
            })
            .collect();
        files.sort();
        files
    }
}

/// Bytes for a decoder, shown in hex.
#[derive(Clone, PartialEq, Eq)]
pub struct Input(Vec<u8>);

impl fmt::Debug for Input {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes: ", self.0.len())?;
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn a_length_believed_unchecked_is_found() {
        let believe = |bytes: &[u8]| {
            let claimed = bytes.first().map_or(0, |byte| usize::from(*byte) << 20);
            std::hint::black_box(Vec::<u8>::with_capacity(claimed));
        };
        Target::check(&Input(vec![0]), &believe);
        let panicked = catch_unwind(|| Target::check(&Input(vec![64]), &believe));
        assert!(panicked.is_err(), "64 MiB for an input of one byte");
    }

    #[test]
    fn failure_is_reported_each_time_it_is_shrunk() {
        for _ in 0..1000 {
            let panicked =
                catch_unwind(|| Target::check(&Input(vec![1]), &|_: &[u8]| panic!("found")));
            let payload = panicked.expect_err("the check's own panic");
            assert_eq!(payload.downcast_ref(), Some(&"found"));
        }
    }

    #[test]
    fn the_corpus_is_read_and_a_missing_one_is_empty() {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let sources = Target::new(here, "src", [vec![]]);
        let names: Vec<PathBuf> = sources.corpus_files();
        assert!(
            names.iter().any(|path| path.ends_with("src/target.rs")),
            "{names:?}"
        );
        assert!(
            Target::new(here, "absent", [vec![]])
                .corpus_files()
                .is_empty()
        );
    }

    #[test]
    fn mutation_reaches_what_random_bytes_do_not() {
        // A magic number, then a length that must hold: past both lies the bug.
        let decode = |bytes: &[u8]| {
            let body = bytes
                .strip_prefix(b"MAGIC123")
                .and_then(|rest| rest.split_first());
            matches!(body, Some((len, rest)) if usize::from(*len) == rest.len() && rest.contains(&0))
        };
        let target = Target::new("", "", [b"MAGIC123\x04abcd".to_vec()]);
        let (mutated, random) = (Cell::new(0), Cell::new(0));
        let mut state = 1_u64;
        for _ in 0..20_000 {
            // A linear congruential generator: the same inputs at every run.
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            let at = (state >> 33) as u32;
            let byte = crate::Mutation::Byte {
                at,
                value: (state >> 57) as u8,
            };
            let plan = Plan::Mutated {
                seed: 0,
                first: byte,
                more: Vec::new(),
            };
            mutated.set(mutated.get() + u32::from(decode(&target.input(&plan).0)));
            let plan = Plan::Random(state.to_le_bytes().to_vec());
            random.set(random.get() + u32::from(decode(&target.input(&plan).0)));
        }
        assert!(mutated.get() > 0, "a change of one byte reaches the body");
        assert_eq!(random.get(), 0, "random bytes stop at the magic number");
    }
}
