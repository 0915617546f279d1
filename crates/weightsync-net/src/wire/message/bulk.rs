//! Messages between a child and its parent on a bulk link.

use serde::{Deserialize, Serialize};
use weightsync_core::{Run, Version};
use weightsync_link::frame::FrameKind;
use weightsync_link::message::{Check, CheckText, Message, MessageError, within};

use super::check::{check_item, require};
use super::{DIGEST_BYTES, MAX_DIGESTS, MAX_RANGES, MAX_TEXT, fields};

/// A message from a child to its parent. The order of variants and fields is part of the format.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToParent {
    /// Requests blocks of a version. The parent sends each as soon as it has it, or a delta in
    /// place of all blocks of a span, then [`ToChild::End`].
    Fetch(WantedBlocks),
    /// Requests the digests of a version's blocks. Only the sender answers: with
    /// [`ToChild::Digests`], in the order of the blocks, then [`ToChild::End`].
    Digests {
        /// The run the version belongs to.
        run: Run,
        /// The model's index.
        model: u8,
        /// The version.
        version: Version,
    },
}

/// The blocks that a child wants. The order of fields is part of the format.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WantedBlocks {
    /// The run the version belongs to.
    pub run: Run,
    /// The number of the child.
    pub agent: u64,
    /// The model's index.
    pub model: u8,
    /// The version.
    pub version: Version,
    /// An older version that the child has, to which deltas can be applied.
    pub base: Option<Version>,
    /// The blocks: ascending, none twice, at most [`MAX_RANGES`] ranges.
    pub ranges: Vec<BlockRange>,
}

/// A message from a parent to its child, besides blocks. The order of variants and fields is part
/// of the format.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToChild {
    /// A sign of life: there is no block to send now.
    Idle,
    /// Every requested block has been sent.
    End,
    /// The parent cannot send the requested blocks, or the rest of them.
    Gone {
        /// The reason; cut to [`MAX_TEXT`].
        #[serde(serialize_with = "fields::text")]
        reason: String,
    },
    /// The BLAKE3 digests of the next blocks of the version whose digests were requested.
    Digests {
        /// 32 bytes for each block; 1 to [`MAX_DIGESTS`] of them.
        #[serde(with = "fields::bytes")]
        digests: Vec<u8>,
    },
}

/// A range of consecutive blocks. The order of fields is part of the format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockRange {
    /// The index of the first.
    pub first: u32,
    /// The number of blocks, from 1.
    pub count: u32,
}

impl BlockRange {
    /// The index after the last block, unless it overflows.
    pub fn end(self) -> Option<u32> {
        self.first.checked_add(self.count)
    }
}

impl Message for ToParent {
    const KIND: FrameKind = FrameKind::Bulk;
}

impl Message for ToChild {
    const KIND: FrameKind = FrameKind::Bulk;
}

impl Check for ToParent {
    fn check(&self, _text: CheckText) -> Result<(), MessageError> {
        let &WantedBlocks {
            model,
            version,
            base,
            ref ranges,
            ..
        } = match self {
            &Self::Digests { model, version, .. } => return check_item(model, version),
            Self::Fetch(wanted) => wanted,
        };
        check_item(model, version)?;
        // Deltas lead to newer versions only.
        if base.is_some_and(|base| base.is_none() || base >= version) {
            return Err(MessageError::OutOfRange {
                expected: "an older version than the one that is fetched, or none",
                got: format!("{base:?} for {version}"),
            });
        }
        within("ranges of one fetch", ranges.len(), MAX_RANGES)?;
        // Where the range before ends. Its end bounds what a parent looks up for one request.
        let mut behind = 0;
        ranges.iter().try_for_each(|range| {
            let end = range
                .end()
                .filter(|_| range.count > 0 && range.first >= behind);
            require(
                end.is_some(),
                "ranges that ascend and do not overlap",
                || {
                    format!(
                        "{} blocks from {} behind {behind}",
                        range.count, range.first
                    )
                },
            )?;
            behind = end.unwrap_or(behind);
            Ok(())
        })
    }
}

impl Check for ToChild {
    fn check(&self, text: CheckText) -> Result<(), MessageError> {
        match self {
            Self::Gone { reason } => text(reason, MAX_TEXT),
            Self::Digests { digests } => {
                let whole = digests.len() % DIGEST_BYTES == 0 && !digests.is_empty();
                require(whole, "whole digests of 32 bytes", || {
                    format!("{} bytes", digests.len())
                })?;
                within(
                    "digests in one message",
                    digests.len() / DIGEST_BYTES,
                    MAX_DIGESTS,
                )
            }
            Self::Idle | Self::End => Ok(()),
        }
    }
}
