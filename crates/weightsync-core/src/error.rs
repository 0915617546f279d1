//! The one error type of this crate, and what a caller can do about each error.

use std::fmt;

use crate::dtype::Dtype;
use crate::engine_update::UpdateState;
use crate::ids::WriterId;
use crate::layout::{ByteRange, LayoutId, LayoutMismatch};

/// Shorthand for results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, with the facts needed to act on it.
///
/// [`Error::remedy`] says what to do next.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A count or a size is over its bound.
    #[error("{what}: {got} is over the limit of {limit}")]
    TooLarge {
        /// What was measured, with its unit.
        what: &'static str,
        /// How much of it there was.
        got: u64,
        /// The most that is accepted.
        limit: u64,
    },

    /// A dtype name that safetensors does not know.
    #[error("unknown dtype {name:?}; the names are those of safetensors, such as F32 or BF16")]
    UnknownDtype {
        /// The name as given (cut after 32 characters).
        name: String,
    },

    /// A model id that is empty or carries control characters.
    #[error("model id {id:?} is not usable: it must not be empty or contain control characters")]
    InvalidModelId {
        /// The id as given.
        id: String,
    },

    /// A tensor without a name.
    #[error("tensor number {index} has an empty name; every tensor needs one")]
    EmptyName {
        /// Position of the tensor, from 0.
        index: usize,
    },

    /// Two tensors of one layout or chunk share a name.
    #[error("two tensors are named {name:?}; names must be unique")]
    DuplicateName {
        /// The name both have.
        name: String,
    },

    /// A tensor's size in bytes does not fit the bound of a layout.
    #[error("tensor {name:?} of {dtype} {shape:?} is larger than a layout may be")]
    TensorTooLarge {
        /// The tensor.
        name: String,
        /// Its dtype.
        dtype: Dtype,
        /// Its shape.
        shape: Vec<u64>,
    },

    /// A tensor of a sub-byte dtype does not end on a byte.
    #[error(
        "tensor {name:?} of {dtype} {shape:?} takes {bits} bits, which is not a whole number of bytes; pad its last dimension"
    )]
    PartialByte {
        /// The tensor.
        name: String,
        /// Its dtype.
        dtype: Dtype,
        /// Its shape.
        shape: Vec<u64>,
        /// Its size in bits.
        bits: u64,
    },

    /// Two layouts that should be the same are not.
    #[error(transparent)]
    LayoutMismatch(Box<LayoutMismatch>),

    /// Bytes or text from outside do not follow their format.
    #[error("malformed {what} at byte {offset}: {problem}")]
    Malformed {
        /// What was being read.
        what: &'static str,
        /// How far reading had come.
        offset: usize,
        /// What was found there.
        problem: &'static str,
    },

    /// A format of a version this build does not read.
    #[error("{what} has format {got}, this build reads format {supported}")]
    UnknownFormat {
        /// What was being read.
        what: &'static str,
        /// Its format number.
        got: u32,
        /// The format number this build reads.
        supported: u32,
    },

    /// A dotted name with an empty part, or a nested key that contains a dot.
    #[error("name {name:?} cannot be nested: {problem}")]
    InvalidPath {
        /// The name as given.
        name: String,
        /// What is wrong with it.
        problem: &'static str,
    },

    /// A name is wanted both for a tensor and for a group of tensors.
    #[error("{name:?} is both a tensor and a group of tensors, or appears twice")]
    PathConflict {
        /// The name in conflict.
        name: String,
    },

    /// The columns of a chunk have different lengths.
    #[error(
        "a chunk needs one name, dtype, shape and tensor each, got {names} names, {dtypes} dtypes, {shapes} shapes and {tensors} tensors"
    )]
    ChunkColumns {
        /// Number of names.
        names: usize,
        /// Number of dtypes.
        dtypes: usize,
        /// Number of shapes.
        shapes: usize,
        /// Number of tensors.
        tensors: usize,
    },

    /// There are more or fewer tensors than the layout has.
    #[error("the layout has {expected} tensors, got {got}")]
    TensorCount {
        /// Tensors in the layout.
        expected: usize,
        /// Tensors given.
        got: usize,
    },

    /// A tensor number that the layout does not have.
    #[error("there is no tensor number {index} in a layout of {len} tensors")]
    NoSuchTensor {
        /// The number given, from 0.
        index: usize,
        /// Tensors in the layout.
        len: usize,
    },

    /// A manifest names a layout by an id that is not the id of its tensors.
    #[error("the manifest says layout {expected}, its tensors make layout {got}")]
    LayoutId {
        /// The id the manifest states.
        expected: LayoutId,
        /// The id of the tensors it lists.
        got: LayoutId,
    },

    /// A manifest for version 0, which stands for "nothing published".
    #[error("version 0 is never published; the first version of a run is 1")]
    NoVersion,

    /// One writer has two parts in a manifest.
    #[error("{writer} has more than one part; give all its ranges in one")]
    DuplicateWriter {
        /// The writer.
        writer: WriterId,
    },

    /// A part of a manifest is empty or reaches past the layout.
    #[error("{writer}: range {range} is empty or leaves the {bytes} bytes of the layout")]
    RangeOutside {
        /// The writer whose part it is.
        writer: WriterId,
        /// The range.
        range: ByteRange,
        /// Size of the layout in bytes.
        bytes: u64,
    },

    /// Two writers, or one writer twice, would write the same bytes.
    #[error("{first} and {second} both write the bytes {range}")]
    PartsOverlap {
        /// The writer whose range begins first.
        first: WriterId,
        /// The writer whose range begins inside it.
        second: WriterId,
        /// The bytes they share.
        range: ByteRange,
    },

    /// No writer covers some bytes of a tensor.
    #[error("no part writes the bytes {range} of tensor {name:?}")]
    PartsMissing {
        /// The first tensor that is not covered.
        name: String,
        /// The bytes of the tensor that no writer covers, counted from the start of the layout.
        range: ByteRange,
    },

    /// An event that does not fit the state of an engine's update.
    #[error("{event} does not fit an engine update in the state \"{state}\": {fix}")]
    WrongEvent {
        /// The event.
        event: &'static str,
        /// The state of the update.
        state: UpdateState,
        /// What to do.
        fix: String,
    },
}

/// What to do about an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Remedy {
    /// The same call may succeed later: a worker or a sender was slow or absent, or one version was
    /// damaged and the next is not.
    Retry,
    /// The two ends no longer match: open this end again from the init info. Weights already held
    /// stay valid.
    Reconnect,
    /// The caller must change something first.
    GiveUp,
}

impl Error {
    /// What to do: connect again for a whole version, or change the call.
    ///
    /// Nothing in this crate waits or does input and output, so nothing here is mended by a plain
    /// retry.
    pub fn remedy(&self) -> Remedy {
        match self {
            Error::Malformed { .. } | Error::LayoutId { .. } => Remedy::Reconnect,
            _ => Remedy::GiveUp,
        }
    }
}

impl From<LayoutMismatch> for Error {
    fn from(mismatch: LayoutMismatch) -> Self {
        Error::LayoutMismatch(Box::new(mismatch))
    }
}

impl fmt::Display for Remedy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Remedy::Retry => "retry",
            Remedy::Reconnect => "reconnect",
            Remedy::GiveUp => "give up",
        })
    }
}
