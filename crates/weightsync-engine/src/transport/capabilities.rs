//! What a scheme can do.

/// The capabilities of a scheme. The conformance suite tests those that are stated, and that all
/// others are refused with [`Error::Unsupported`](crate::Error::Unsupported).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// Weights reach the workers.
    pub weights: bool,
    /// A send reaches workers that have not asked for it.
    pub push: bool,
    /// Several models flip together.
    pub sets: bool,
    /// A send to some workers leaves the others as they are.
    pub subsets: bool,
    /// Workers can be held at a version.
    pub hold: bool,
    /// A worker can ask for the newest version, or for one it names.
    pub pull: bool,
    /// Every version reaches every worker, in order.
    pub every_version: bool,
    /// The trainer can write into the place the workers read.
    pub loan: bool,
    /// A restarted sender is found again.
    pub restarts: bool,
    /// The other end learns of a death at once, and not by a timeout.
    pub death: bool,
    /// A published version reaches its workers even if the sender is killed right afterwards.
    pub outlives: bool,
}

impl Capabilities {
    /// Nothing at all.
    pub const NONE: Self = Self {
        weights: false,
        push: false,
        sets: false,
        subsets: false,
        hold: false,
        pull: false,
        every_version: false,
        loan: false,
        restarts: false,
        death: false,
        outlives: false,
    };

    /// All capabilities, also those that later versions of this crate add. A scheme that starts from
    /// this value names what it cannot do.
    pub const ALL: Self = Self {
        weights: true,
        push: true,
        sets: true,
        subsets: true,
        hold: true,
        pull: true,
        every_version: true,
        loan: true,
        restarts: true,
        death: true,
        outlives: true,
    };
}
