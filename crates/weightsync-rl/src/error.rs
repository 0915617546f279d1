/// Why collecting or training failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A policy was built from weights that lack one of its tensors.
    #[error("the weights have no tensor `{name}`, which the policy needs")]
    MissingTensor {
        /// The tensor looked for.
        name: String,
    },
    /// A tensor of a policy has another number of elements than its neighbours
    /// imply.
    #[error("tensor `{name}` has {got} elements, the policy needs {expected}")]
    TensorLen {
        /// The tensor.
        name: String,
        /// Elements needed.
        expected: usize,
        /// Elements found.
        got: usize,
    },
    /// Frames are not shaped as asked for, or a field's length does not match.
    #[error("frames of shape {got:?} arrived where {expected:?} was asked for, or a field is cut")]
    FrameShape {
        /// `[B, P, T]` asked for.
        expected: [usize; 3],
        /// `[B, P, T]` claimed.
        got: [usize; 3],
    },
    /// The tensor library refused an operation.
    #[cfg(feature = "candle")]
    #[error("candle: {0}")]
    Candle(#[from] candle_core::Error),
}
