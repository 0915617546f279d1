//! The wire form of fields that have none of their own: mem has no serde, an index of a model is
//! one byte, and a text for people is cut to its limit.

use serde::de::{Deserialize, Deserializer};
use serde::ser::{Error, Serialize, Serializer};
use weightsync_core::{Version, WorkerId};
use weightsync_mem::WorkerInstance;

use super::{Delivery, Item, MAX_DEVICE, MAX_TEXT, Want};

/// A [`Delivery`]. The order of the variants is part of the format.
#[derive(serde::Serialize, serde::Deserialize)]
#[serde(remote = "Delivery")]
pub(super) enum WireDelivery {
    Newest,
    Every { bound: u8 },
    Asked,
}

/// A [`WorkerInstance`]. The order of the fields is part of the format.
#[derive(serde::Serialize, serde::Deserialize)]
#[serde(remote = "WorkerInstance")]
pub(super) struct WireInstance {
    worker: WorkerId,
    instance: u64,
}

/// A [`Want`]. The order of the variants is part of the format.
#[derive(serde::Serialize, serde::Deserialize)]
#[serde(remote = "Want")]
pub(super) enum WireWant {
    Newest,
    AtLeast {
        #[serde(with = "model")]
        model: usize,
        version: Version,
    },
    Exactly {
        #[serde(with = "model")]
        model: usize,
        version: Version,
    },
}

impl Serialize for Item {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let model = u8::try_from(self.model).map_err(S::Error::custom)?;
        (model, self.version).serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Item {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let (model, version) = <(u8, Version)>::deserialize(deserializer)?;
        let model = model.into();
        Ok(Self { model, version })
    }
}

mod model {
    use super::*;

    pub(super) fn serialize<S: Serializer>(
        model: &usize,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.serialize_u8(u8::try_from(*model).map_err(S::Error::custom)?)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<usize, D::Error> {
        u8::deserialize(d).map(usize::from)
    }
}

/// Bytes in one piece, where serde would take a `Vec` byte by byte.
pub(super) mod bytes {
    use super::*;

    pub(in super::super) fn serialize<S: Serializer>(
        bytes: &[u8],
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(bytes)
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Vec<u8>, D::Error> {
        // Borrowed from the payload first: a stated length allocates nothing.
        <&[u8]>::deserialize(deserializer).map(Into::into)
    }
}

pub(super) fn text<S: Serializer>(words: &str, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(cut(words, MAX_TEXT))
}

pub(super) fn device<S: Serializer>(words: &str, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(cut(words, MAX_DEVICE))
}

pub(super) fn refused<S: Serializer>(
    refused: &Option<(u64, String)>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    let refused = refused.as_ref();
    let refused = refused.map(|(sequence, reason)| (sequence, cut(reason, MAX_TEXT)));
    refused.serialize(serializer)
}

/// At most `len` bytes of a text for people, cut between characters.
fn cut(words: &str, len: usize) -> &str {
    &words[..words.floor_char_boundary(len)]
}
