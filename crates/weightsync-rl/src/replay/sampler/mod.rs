//! Which frames a sample has.

use std::ops::Range;

use rand::{RngExt, SeedableRng};

use super::Schema;
use crate::{Error, env::EnvRng};

mod pool;
mod prioritised;
mod slices;
#[cfg(test)]
mod tests;

use pool::Pool;
use prioritised::Priorities;
use slices::TrajectoryIndex;

/// How a replay buffer chooses the frames of a sample.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum Sampler {
    /// Each frame with the same probability, with replacement.
    #[default]
    Uniform,
    /// Each frame once per epoch, in random order. A frame that is written
    /// during an epoch is part of it. A sample that needs more frames than the
    /// epoch has left begins the next one, so a frame may then come twice.
    WithoutReplacement,
    /// Frames by their priorities.
    Prioritised(Prioritised),
    /// Consecutive steps of trajectories.
    Slices(Slices),
}

impl From<Prioritised> for Sampler {
    fn from(settings: Prioritised) -> Self {
        Self::Prioritised(settings)
    }
}

impl From<Slices> for Sampler {
    fn from(settings: Slices) -> Self {
        Self::Slices(settings)
    }
}

/// Draws frame `i` with probability `P(i) = p(i) / Σ p`, with replacement,
/// where `p(i) = (priority + eps) ^ alpha` (Schaul et al., "Prioritized
/// Experience Replay", 2016).
///
/// The importance weight of a frame is `w(i) = (N × P(i)) ^ -beta`, divided by the
/// largest weight of all `N` frames in the buffer (section 3.4 of the paper, and as
/// TorchRL has it): `w(i) / max w = (p(i) / min p) ^ -beta`. So a frame's weight is at
/// most 1 and does not depend on what else is in its sample. Frames of `p(i) = 0` are
/// never drawn, and not counted in `min p`. A new frame gets the largest priority
/// seen, which is 1 at first.
///
/// ```
/// use weightsync_rl::replay::Prioritised;
///
/// let sampler = Prioritised::new(0.7, 0.5).eps(1e-6);
/// assert_eq!(sampler.eps, 1e-6);
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Prioritised {
    /// How much priorities count: 0 is uniform.
    pub alpha: f64,
    /// How far the weights undo that: 1 is fully.
    pub beta: f64,
    /// Added to each priority, so that a frame of priority 0 is drawn at times.
    pub eps: f64,
}

impl Prioritised {
    /// With an `eps` of 1e-8.
    pub fn new(alpha: f64, beta: f64) -> Self {
        Self {
            alpha,
            beta,
            eps: 1e-8,
        }
    }

    /// Sets what is added to each priority.
    pub fn eps(mut self, eps: f64) -> Self {
        self.eps = eps;
        self
    }
}

/// Draws slices: runs of consecutive steps of one trajectory. Each slice is of
/// a trajectory drawn with the same probability whatever its length, and begins
/// at any of its steps from which a whole slice follows.
///
/// The steps of a trajectory are the frames with the same number in a column,
/// in the order of writing. They need not lie next to each other: frames of
/// other workers may have been written between. So no two trajectories may have
/// the same number while frames of both are in the buffer.
///
/// A sample of `n` frames is `num_slices` slices of `slice_len` steps. Set one
/// of the two, and `n` gives the other; with both, `n` is their product.
///
/// ```
/// use weightsync_rl::replay::Slices;
///
/// let sampler = Slices::of("trajectory").slice_len(16).strict_len(false);
/// assert_eq!(sampler.slice_len, Some(16));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Slices {
    /// The column with the numbers of trajectories: one `U64` or `I64` per
    /// frame.
    pub column: String,
    /// Slices of a sample.
    pub num_slices: Option<usize>,
    /// Steps of a slice.
    pub slice_len: Option<usize>,
    /// Whether trajectories shorter than a slice are left out. Otherwise their
    /// slices are padded with their last step, and the sample has a mask.
    pub strict_len: bool,
}

impl Slices {
    /// Slices of the trajectories that this column numbers, none shorter than
    /// asked for.
    pub fn of(column: impl Into<String>) -> Self {
        Self {
            column: column.into(),
            num_slices: None,
            slice_len: None,
            strict_len: true,
        }
    }

    /// Sets the number of slices of a sample.
    pub fn num_slices(mut self, num_slices: usize) -> Self {
        self.num_slices = Some(num_slices);
        self
    }

    /// Sets the number of steps of a slice.
    pub fn slice_len(mut self, slice_len: usize) -> Self {
        self.slice_len = Some(slice_len);
        self
    }

    /// Sets whether trajectories shorter than a slice are left out.
    pub fn strict_len(mut self, strict_len: bool) -> Self {
        self.strict_len = strict_len;
        self
    }
}

/// Which frames were drawn.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Drawn {
    /// The frames' ids. Slices lie behind each other.
    pub ids: Vec<u64>,
    /// Importance weights, one per frame, none above 1: of a prioritised sampler
    /// alone.
    pub weights: Option<Vec<f32>>,
    /// False where a slice is padded: of a slice sampler that is not strict
    /// alone.
    pub mask: Option<Vec<bool>>,
}

/// A sampler at work: what it knows of the frames in the ring.
pub(super) struct Draws {
    rng: EnvRng,
    kind: SamplerKind,
}

enum SamplerKind {
    Uniform,
    WithoutReplacement(Pool),
    Prioritised(Priorities),
    Slices(TrajectoryIndex),
}

impl Draws {
    /// A sampler of an empty ring.
    pub fn new(
        sampler: &Sampler,
        seed: u64,
        schema: &Schema,
        capacity: usize,
    ) -> Result<Self, Error> {
        let kind = match sampler {
            Sampler::Uniform => SamplerKind::Uniform,
            Sampler::WithoutReplacement => SamplerKind::WithoutReplacement(Pool::new(capacity)),
            Sampler::Prioritised(settings) => {
                SamplerKind::Prioritised(Priorities::new(settings, capacity)?)
            }
            Sampler::Slices(settings) => {
                SamplerKind::Slices(TrajectoryIndex::new(settings, schema)?)
            }
        };
        let rng = EnvRng::seed_from_u64(seed);
        Ok(Self { rng, kind })
    }

    /// The column whose bytes [`append`](Self::append) needs.
    pub fn reads_column(&self) -> Option<usize> {
        match &self.kind {
            SamplerKind::Slices(trajectories) => Some(trajectories.column()),
            _ => None,
        }
    }

    /// The oldest frames are about to be overwritten.
    pub fn evict(&mut self, ids: Range<u64>) {
        match &mut self.kind {
            // `Uniform` keeps nothing of a frame, and a pool notices at the draw that one has gone.
            SamplerKind::Uniform | SamplerKind::WithoutReplacement(_) => {}
            SamplerKind::Prioritised(priorities) => priorities.evict(ids),
            SamplerKind::Slices(trajectories) => trajectories.evict(ids.end - ids.start),
        }
    }

    /// New frames, with the bytes of the column that is read.
    pub fn append(&mut self, ids: Range<u64>, column: Option<&[u8]>) {
        match &mut self.kind {
            SamplerKind::Uniform => {}
            SamplerKind::WithoutReplacement(pool) => pool.append(ids),
            SamplerKind::Prioritised(priorities) => priorities.append(ids),
            SamplerKind::Slices(trajectories) => {
                trajectories.append(ids.start, column.unwrap_or(&[]))
            }
        }
    }

    /// No frame that comes belongs to a trajectory that is here.
    pub fn end_trajectories(&mut self) {
        if let SamplerKind::Slices(trajectories) = &mut self.kind {
            trajectories.end_all();
        }
    }

    /// Draws `n` of the frames in the ring.
    pub fn draw(&mut self, n: usize, live: &Range<u64>) -> Result<Drawn, Error> {
        if live.is_empty() {
            return Err(Error::NothingToSample {
                reason: "it is empty".to_owned(),
            });
        }
        let rng = &mut self.rng;
        let ids = match &mut self.kind {
            // Ids are consecutive, so any number in the range is a frame.
            SamplerKind::Uniform => (0..n).map(|_| rng.random_range(live.clone())).collect(),
            SamplerKind::WithoutReplacement(pool) => pool.draw(n, live, rng),
            SamplerKind::Prioritised(priorities) => return priorities.draw(n, live, rng),
            SamplerKind::Slices(trajectories) => return trajectories.draw(n, rng),
        };
        Ok(Drawn {
            ids,
            ..Drawn::default()
        })
    }

    /// The priorities, if this sampler has some.
    pub fn priorities(&mut self) -> Result<&mut Priorities, Error> {
        match &mut self.kind {
            SamplerKind::Prioritised(priorities) => Ok(priorities),
            _ => Err(Error::NoPriorities),
        }
    }
}
