//! Messages between a worker of a collector and its trainer, on a collector link.

use serde::{Deserialize, Serialize};
use weightsync_link::frame::FrameKind;
use weightsync_link::message::{Check, CheckText, Message, MessageError, within};

use super::{MAX_JSON, MAX_SAID, MAX_TEXT, fields};

/// A message from a worker to its trainer. The order of variants and fields is part of the format.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToTrainer {
    /// The worker is there: the first message of a link.
    Join {
        /// Its number; none: the trainer gives it one.
        worker: Option<u32>,
        /// Which launch it comes from; none: it came on its own.
        ticket: Option<u64>,
    },
    /// An answer, or last words.
    Say {
        /// JSON; at most [`MAX_SAID`] bytes.
        json: String,
    },
    /// A part is whole, and its bytes follow in pieces, column by column.
    Part {
        /// Its number.
        part: u64,
        /// All its bytes: as many as were ordered.
        bytes: u64,
    },
    /// A sign of life.
    Ping,
}

/// A message from a trainer to its worker. The order of variants and fields is part of the format.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToWorker {
    /// The worker is let in. What it is started with follows in pieces.
    Welcome {
        /// Its number.
        worker: u32,
        /// The bytes that follow.
        bytes: u64,
    },
    /// What the worker is to do.
    Order {
        /// JSON; at most [`MAX_JSON`] bytes.
        json: String,
    },
    /// A sign of life.
    Ping,
    /// Nothing follows.
    End {
        /// Why the worker was not let in; cut to [`MAX_TEXT`]. Empty for an end in order.
        #[serde(serialize_with = "fields::text")]
        reason: String,
    },
    /// The worker is not let in yet, and may ask again. Nothing follows.
    Later {
        /// Why; cut to [`MAX_TEXT`].
        #[serde(serialize_with = "fields::text")]
        reason: String,
    },
}

impl Message for ToTrainer {
    const KIND: FrameKind = FrameKind::Control;
}

impl Message for ToWorker {
    const KIND: FrameKind = FrameKind::Control;
}

impl Check for ToTrainer {
    fn check(&self, _text: CheckText) -> Result<(), MessageError> {
        match self {
            Self::Say { json } => within("bytes of an answer", json.len(), MAX_SAID),
            Self::Join { .. } | Self::Part { .. } | Self::Ping => Ok(()),
        }
    }
}

impl Check for ToWorker {
    fn check(&self, text: CheckText) -> Result<(), MessageError> {
        match self {
            Self::Order { json } => within("bytes of an order", json.len(), MAX_JSON),
            Self::End { reason } | Self::Later { reason } => text(reason, MAX_TEXT),
            Self::Welcome { .. } | Self::Ping => Ok(()),
        }
    }
}
