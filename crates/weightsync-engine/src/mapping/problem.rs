//! Why rules do not fit the tensors there are.

use weightsync_core::Dtype;

/// A rule and tensors that do not go together. Rules are counted from 1.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// A tensor has not the number of dimensions that its new order has.
    #[error(
        "rule {rule}: {tensor:?} of {shape:?} cannot have its dimensions in the order {order:?}"
    )]
    Rank {
        /// The rule.
        rule: usize,
        /// The tensor.
        tensor: String,
        /// Its shape.
        shape: Vec<u64>,
        /// The order asked for.
        order: Vec<usize>,
    },
    /// A tensor has no such dimension.
    #[error("rule {rule}: {tensor:?} of {shape:?} has no dimension {dim}")]
    Dim {
        /// The rule.
        rule: usize,
        /// The tensor.
        tensor: String,
        /// Its shape.
        shape: Vec<u64>,
        /// The dimension.
        dim: usize,
    },
    /// A tensor that is no floating-point tensor is to be cast.
    #[error("rule {rule}: {tensor:?} is {from} and cannot be cast to {to}")]
    Cast {
        /// The rule.
        rule: usize,
        /// The tensor.
        tensor: String,
        /// What it is.
        from: Dtype,
        /// What it was to be.
        to: Dtype,
    },
    /// Some parts of a whole are not there.
    #[error("rule {rule}: {into:?} lacks the parts {missing:?}")]
    PartsMissing {
        /// The rule.
        rule: usize,
        /// The whole.
        into: String,
        /// Their names.
        missing: Vec<String>,
    },
    /// Two parts of a whole differ in more than their length along the dimension.
    #[error(
        "rule {rule}: {second:?} ({} {:?}) cannot follow {first:?} ({} {:?})",
        second_kind.0, second_kind.1, first_kind.0, first_kind.1
    )]
    PartsDiffer {
        /// The rule.
        rule: usize,
        /// The first part.
        first: String,
        /// Its dtype and shape.
        first_kind: Box<(Dtype, Vec<u64>)>,
        /// The part that differs from it.
        second: String,
        /// Its dtype and shape.
        second_kind: Box<(Dtype, Vec<u64>)>,
    },
    /// The parts are together longer or shorter than the whole.
    #[error(
        "rule {rule}: the parts of {tensor:?} are {got} long together, expected {expected}: give \
         lengths that add up"
    )]
    Lengths {
        /// The rule.
        rule: usize,
        /// The tensor.
        tensor: String,
        /// Its length along the dimension.
        expected: u64,
        /// That of the parts together.
        got: u64,
    },
    /// Elements smaller than a byte can only stay as they are.
    #[error(
        "rule {rule}: {tensor:?} is packed {dtype}, which can neither be transposed nor fused nor split"
    )]
    Packed {
        /// The rule.
        rule: usize,
        /// The tensor.
        tensor: String,
        /// Its dtype.
        dtype: Dtype,
    },
    /// Something that is no floating-point matrix is to be quantised.
    #[error(
        "rule {rule}: {tensor:?} is {dtype} {shape:?} and cannot be quantised: expected a \
         floating-point matrix, or a stack of them"
    )]
    Quantise {
        /// The rule.
        rule: usize,
        /// The tensor.
        tensor: String,
        /// Its dtype.
        dtype: Dtype,
        /// Its shape.
        shape: Vec<u64>,
    },
    /// A rule other than a rename or a drop comes after the one that quantised the tensor.
    #[error(
        "rule {rule}: {tensor:?} is made by the quantising rule {by}, and can then only be renamed \
         or dropped: put rule {rule} before it"
    )]
    Quantised {
        /// The rule.
        rule: usize,
        /// The tensor: values or scales.
        tensor: String,
        /// The rule that quantises.
        by: usize,
    },
    /// Several tensors get one name.
    #[error(
        "several tensors ({}) would be named {name:?}: give each its own name",
        sources.iter().map(|source| format!("{source:?}")).collect::<Vec<_>>().join(", ")
    )]
    SameName {
        /// The name.
        name: String,
        /// What they are made of.
        sources: Vec<String>,
    },
    /// The result is no layout.
    #[error("{0}")]
    Layout(weightsync_core::Error),
}
