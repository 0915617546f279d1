//! Mappings between two forms of a model: rules that rename, cast, transpose,
//! fuse, split, drop and quantise tensors, on either side of the journey.
//!
//! Rules are applied in order, each to what the one before it left; what no rule
//! matches stays as it is. What they come to is worked out once for a layout,
//! so that each tensor is then made in one pass, straight into its place.

mod dry_run;
mod pattern;
mod plan;
mod problem;
mod quantised;
mod sides;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::fmt;

use serde::{Deserialize, Serialize};
pub use weightsync_core::quantise::Quantisation;
use weightsync_core::{Dtype, Layout};

pub use self::dry_run::{DryRun, TensorOutcome};
pub use self::pattern::Pattern;
use self::plan::MappingPlan;
pub use self::problem::Problem;
pub use self::sides::{MappedExtractor, MappedLoader};
use crate::extract::{WeightExtractor, is_float};
use crate::load::WeightLoader;

/// Values that a block has at most, because a whole one is read at a time.
const LARGEST_BLOCK: u64 = 1 << 20;

/// Rules that make one form of a model into another.
///
/// ```
/// use weightsync::layout::Layout;
/// use weightsync::mapping::Mapping;
/// use weightsync::model::WeightExtractor;
/// use weightsync::{Dtype, Tensors};
///
/// let mut model = Tensors::new();
/// for name in ["q", "k", "v"] {
///     model.insert(&format!("layers.0.{name}.weight"), [2, 4], [1.0_f32; 8])?;
/// }
/// let mapping = Mapping::new()
///     .rename("layers.*", "model.layers.*")?
///     .fuse(["model.layers.*.q.weight", "model.layers.*.k.weight", "model.layers.*.v.weight"],
///           "model.layers.*.qkv.weight", 0)?
///     .cast("*", Dtype::BF16)?;
///
/// let engine = Layout::new([("model.layers.0.qkv.weight".to_owned(), Dtype::BF16, vec![6, 4])])?;
/// let dry_run = mapping.dry_run(&model.layout()?, &engine);
/// assert!(dry_run.is_complete(), "{dry_run}");
/// assert_eq!(mapping.extract(&model).layout()?, engine);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Vec<Rule>", into = "Vec<Rule>")]
pub struct Mapping {
    rules: Vec<Rule>,
}

/// One step of a mapping.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rule {
    /// Another name. A star in `to` stands for what the one in `from` stood for.
    Rename {
        /// Which tensors.
        from: Pattern,
        /// Their name then.
        to: Pattern,
    },
    /// Another floating-point dtype. Of several casts of a tensor the last
    /// counts, so that it is rounded once. Under a star, what is no
    /// floating-point tensor stays as it is.
    Cast {
        /// Which tensors.
        tensors: Pattern,
        /// `F64`, `F32`, `F16` or `BF16`.
        to: Dtype,
    },
    /// The dimensions in another order.
    Transpose {
        /// Which tensors.
        tensors: Pattern,
        /// The dimension that was, for each dimension that will be.
        order: Vec<usize>,
    },
    /// Several tensors behind each other along a dimension, as one; where names
    /// have stars, one for each text that the stars stand for.
    Fuse {
        /// The parts, in order.
        parts: Vec<Pattern>,
        /// The name of the whole.
        into: Pattern,
        /// The dimension, from 0.
        dim: usize,
    },
    /// One tensor as several, cut along a dimension: what undoes a fuse.
    Split {
        /// Which tensors.
        tensor: Pattern,
        /// Name and length along the dimension of each part, in order; together
        /// they are all of it.
        into: Vec<(Pattern, u64)>,
        /// The dimension, from 0.
        dim: usize,
    },
    /// No such tensor.
    Drop {
        /// Which tensors.
        tensors: Pattern,
    },
    /// Eight-bit values, and behind each tensor one with their scales. They are
    /// made of the source's values as `F32`, whatever casts came before. Under a
    /// star, only floating-point matrices and stacks of matrices are quantised.
    Quantise {
        /// Which tensors.
        tensors: Pattern,
        /// To what.
        to: Quantisation,
        /// The name of the scales; `{}` in it stands for the tensor's name.
        scale: String,
    },
}

/// Why a mapping cannot be, or be applied.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MappingError {
    /// A pattern with more than one star, or none at all.
    #[error("invalid pattern {pattern:?}: {problem}")]
    BadPattern {
        /// The pattern.
        pattern: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A rule that makes no sense with any layout.
    #[error("invalid rule {rule}: {problem}")]
    BadRule {
        /// The rule.
        rule: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// The rules do not fit the tensors there are.
    #[error("the mapping does not fit: {}", problems_text(.0))]
    DoesNotFit(Vec<Problem>),
    /// What the mapping makes is not what the model has room for.
    #[error("the mapping does not lead to the model:\n{}", Differences(.0))]
    Incomplete(Box<DryRun>),
}

impl Mapping {
    /// No rules: everything stays as it is.
    pub fn new() -> Self {
        Self::default()
    }

    /// Renames: `a` to `b`, `actor.*` to `policy.actor.*`, `*.gamma` to
    /// `*.weight`.
    ///
    /// # Errors
    ///
    /// [`MappingError::BadPattern`] or [`MappingError::BadRule`].
    pub fn rename(self, from: &str, to: &str) -> Result<Self, MappingError> {
        let (from, to) = (from.parse()?, to.parse()?);
        self.and(Rule::Rename { from, to })
    }

    /// Casts floating-point tensors.
    ///
    /// # Errors
    ///
    /// As [`rename`](Self::rename).
    pub fn cast(self, tensors: &str, to: Dtype) -> Result<Self, MappingError> {
        let tensors = tensors.parse()?;
        self.and(Rule::Cast { tensors, to })
    }

    /// Puts dimensions in another order: `[1, 0]` transposes a matrix.
    ///
    /// # Errors
    ///
    /// As [`rename`](Self::rename).
    pub fn transpose(
        self,
        tensors: &str,
        order: impl Into<Vec<usize>>,
    ) -> Result<Self, MappingError> {
        let (tensors, order) = (tensors.parse()?, order.into());
        self.and(Rule::Transpose { tensors, order })
    }

    /// Makes several tensors one, behind each other along a dimension.
    ///
    /// # Errors
    ///
    /// As [`rename`](Self::rename).
    pub fn fuse<'a>(
        self,
        parts: impl IntoIterator<Item = &'a str>,
        into: &str,
        dim: usize,
    ) -> Result<Self, MappingError> {
        let parts = parts
            .into_iter()
            .map(str::parse)
            .collect::<Result<_, _>>()?;
        let into = into.parse()?;
        self.and(Rule::Fuse { parts, into, dim })
    }

    /// Cuts a tensor along a dimension into parts of these names and lengths.
    ///
    /// # Errors
    ///
    /// As [`rename`](Self::rename).
    pub fn split<'a>(
        self,
        tensor: &str,
        into: impl IntoIterator<Item = (&'a str, u64)>,
        dim: usize,
    ) -> Result<Self, MappingError> {
        let into = into.into_iter().map(|(name, len)| Ok((name.parse()?, len)));
        let into = into.collect::<Result<_, MappingError>>()?;
        let tensor = tensor.parse()?;
        self.and(Rule::Split { tensor, into, dim })
    }

    /// Leaves tensors out.
    ///
    /// # Errors
    ///
    /// As [`rename`](Self::rename).
    pub fn drop(self, tensors: &str) -> Result<Self, MappingError> {
        let tensors = tensors.parse()?;
        self.and(Rule::Drop { tensors })
    }

    /// Quantises matrices to eight bits. Their scales travel with them, as
    /// `F32` tensors of their own: `weight_scale_inv` of a `weight` if there is one
    /// for each block, `weight_scale` otherwise, or a name in which `{}` stands for
    /// the tensor's. A block has at most 2^20 values, even where the matrix is smaller.
    /// A rule that fuses, splits or transposes comes before this one.
    ///
    /// ```
    /// use weightsync::Dtype;
    /// use weightsync::layout::Layout;
    /// use weightsync::mapping::{Mapping, Quantisation};
    ///
    /// let blocks = Quantisation::Fp8Blocks { rows: 128, columns: 128 };
    /// let mapping = Mapping::new().quantise("*_proj.weight", blocks, None)?;
    /// let trainer = Layout::new([("q_proj.weight".to_owned(), Dtype::BF16, vec![300, 256])])?;
    /// let made = mapping.layout(&trainer)?;
    /// let [values, scales] = made.tensors() else { panic!() };
    /// assert_eq!((values.dtype, &*values.shape), (Dtype::F8_E4M3, &[300, 256][..]));
    /// assert_eq!((&*scales.name, &*scales.shape), ("q_proj.weight_scale_inv", &[3, 2][..]));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`rename`](Self::rename).
    pub fn quantise(
        self,
        tensors: &str,
        to: Quantisation,
        scale: Option<&str>,
    ) -> Result<Self, MappingError> {
        // The names that inference engines look for in such checkpoints.
        let scale = scale.unwrap_or(match to {
            Quantisation::Fp8Blocks { .. } => "{}_scale_inv",
            _ => "{}_scale",
        });
        let (tensors, scale) = (tensors.parse()?, scale.to_owned());
        self.and(Rule::Quantise { tensors, to, scale })
    }

    /// Adds a rule after the others.
    ///
    /// # Errors
    ///
    /// [`MappingError::BadRule`].
    pub fn and(mut self, rule: Rule) -> Result<Self, MappingError> {
        if let Err(problem) = rule.check() {
            let rule = rule.to_string();
            return Err(MappingError::BadRule { rule, problem });
        }
        self.rules.push(rule);
        Ok(self)
    }

    /// The rules, in order.
    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }

    /// The layout that the rules make of another.
    ///
    /// # Errors
    ///
    /// [`MappingError::DoesNotFit`] names every rule and tensor that do not go
    /// together.
    pub fn layout(&self, source: &Layout) -> Result<Layout, MappingError> {
        MappingPlan::new(&self.rules, source).layout()
    }

    /// What would happen to every tensor of `source`, and what would be missing
    /// or left over in a model with the layout `target`.
    pub fn dry_run(&self, source: &Layout, target: &Layout) -> DryRun {
        DryRun::new(&self.rules, source, target)
    }

    /// A source seen through the mapping: the sender's side.
    pub fn extract<E: WeightExtractor>(&self, source: E) -> MappedExtractor<'_, E> {
        MappedExtractor::new(Cow::Borrowed(self), source)
    }

    /// As [`extract`](Self::extract), with the mapping in it: for a program that
    /// keeps both.
    pub fn into_extractor<E: WeightExtractor>(self, source: E) -> MappedExtractor<'static, E> {
        MappedExtractor::new(Cow::Owned(self), source)
    }

    /// A model seen through the mapping: the worker's side. It takes the layout
    /// of whatever sender it meets, if the rules lead from there to the model.
    pub fn load<L: WeightLoader>(&self, model: L) -> MappedLoader<'_, L> {
        MappedLoader::new(Cow::Borrowed(self), model)
    }

    /// As [`load`](Self::load), with the mapping in it: for a program that keeps
    /// both.
    pub fn into_loader<L: WeightLoader>(self, model: L) -> MappedLoader<'static, L> {
        MappedLoader::new(Cow::Owned(self), model)
    }
}

impl Rule {
    /// What can be said without a layout.
    fn check(&self) -> Result<(), &'static str> {
        const NO_STAR: &str = "the star has nothing to stand for";
        match self {
            Self::Rename { from, to } if to.has_star() && !from.has_star() => Err(NO_STAR),
            Self::Cast { to, .. } if !is_float(*to) => Err("a cast goes to F64, F32, F16 or BF16"),
            Self::Transpose { order, .. } if !is_permutation(order) => {
                Err("the order does not name each dimension once")
            }
            Self::Fuse { parts, .. } if parts.is_empty() => Err("there are no parts"),
            // The star of the parts becomes that of the whole, so all of them need one.
            Self::Fuse { parts, into, .. }
                if parts.iter().any(|part| part.has_star() != into.has_star()) =>
            {
                Err("either all names have a star or none has")
            }
            Self::Fuse { parts, .. }
                if (1..parts.len()).any(|end| parts[..end].contains(&parts[end])) =>
            {
                Err("a part is named twice")
            }
            Self::Split { into, .. } if into.is_empty() => Err("there are no parts"),
            Self::Split { tensor, into, .. }
                if into
                    .iter()
                    .any(|(part, _)| part.has_star() && !tensor.has_star()) =>
            {
                Err(NO_STAR)
            }
            Self::Quantise {
                to: Quantisation::Fp8Blocks { rows, columns },
                ..
            } if *rows == 0 || *columns == 0 => Err("a block has at least one row and one column"),
            Self::Quantise {
                to: Quantisation::Fp8Blocks { rows, columns },
                ..
            } if rows.saturating_mul(*columns) > LARGEST_BLOCK => Err(
                "a block has at most 1048576 values: make it smaller, or leave the block out for \
                 one scale of the whole matrix",
            ),
            // The name of the scales is made of the tensor's, and must differ from it.
            Self::Quantise { scale, .. } if scale.matches("{}").count() != 1 || scale == "{}" => {
                Err("the name of the scales contains {} once, and more than that")
            }
            _ => Ok(()),
        }
    }
}

impl TryFrom<Vec<Rule>> for Mapping {
    type Error = MappingError;

    fn try_from(rules: Vec<Rule>) -> Result<Self, MappingError> {
        rules.into_iter().try_fold(Self::new(), Self::and)
    }
}

impl From<Mapping> for Vec<Rule> {
    fn from(mapping: Mapping) -> Self {
        mapping.rules
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rename { from, to } => write!(f, "rename {from} to {to}"),
            Self::Cast { tensors, to } => write!(f, "cast {tensors} to {to}"),
            Self::Transpose { tensors, order } => write!(f, "transpose {tensors} to {order:?}"),
            Self::Fuse { parts, into, dim } => {
                let parts: Vec<_> = parts.iter().map(ToString::to_string).collect();
                write!(f, "fuse {} along {dim} into {into}", parts.join(", "))
            }
            Self::Split { tensor, into, dim } => {
                let parts: Vec<_> = into
                    .iter()
                    .map(|(part, len)| format!("{part} ({len})"))
                    .collect();
                write!(f, "split {tensor} along {dim} into {}", parts.join(", "))
            }
            Self::Drop { tensors } => write!(f, "drop {tensors}"),
            Self::Quantise { tensors, to, scale } => {
                match to {
                    Quantisation::Fp8Blocks { rows, columns } => {
                        write!(
                            f,
                            "quantise {tensors} to fp8 by blocks of {rows} x {columns}"
                        )?;
                    }
                    Quantisation::Int8 => write!(f, "quantise {tensors} to int8")?,
                    _ => write!(f, "quantise {tensors} to fp8")?,
                }
                write!(f, ", scales as {scale}")
            }
        }
    }
}

/// What is wrong alone: those who read it may see its beginning only.
struct Differences<'a>(&'a DryRun);

impl fmt::Display for Differences<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.write_differences(f)
    }
}

fn is_permutation(order: &[usize]) -> bool {
    let mut sorted = order.to_vec();
    sorted.sort_unstable();
    sorted.into_iter().eq(0..order.len())
}

fn problems_text(problems: &[Problem]) -> String {
    let texts: Vec<_> = problems.iter().take(8).map(ToString::to_string).collect();
    match problems.len().saturating_sub(8) {
        0 => texts.join("; "),
        more => format!("{} … and {more} more", texts.join("; ")),
    }
}
