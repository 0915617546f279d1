//! Layouts in serde formats: a list of tensors where people read it (JSON), the canonical encoding
//! elsewhere. Reading goes through the checks of [`Layout::new`] and [`Layout::decode`].

use std::fmt;

use serde::de::{self, Deserialize, Deserializer, SeqAccess, Visitor};
use serde::ser::{Serialize, SerializeSeq, SerializeStruct, Serializer};

use super::{Layout, LayoutBuilder, MAX_ENCODED_BYTES, TensorSpec};
use crate::dtype::Dtype;

impl Serialize for Layout {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        // The canonical encoding, so that the bytes have the id that the layout has.
        if !serializer.is_human_readable() {
            return serializer.serialize_bytes(&self.encode());
        }
        let mut list = serializer.serialize_seq(Some(self.len()))?;
        for tensor in self.tensors() {
            list.serialize_element(tensor)?;
        }
        list.end()
    }
}

/// Name, dtype and shape; the byte range follows from the layout.
impl Serialize for TensorSpec {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut tensor = serializer.serialize_struct("TensorSpec", 3)?;
        tensor.serialize_field("name", &self.name)?;
        tensor.serialize_field("dtype", &self.dtype)?;
        tensor.serialize_field("shape", &self.shape)?;
        tensor.end()
    }
}

impl<'de> Deserialize<'de> for Layout {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        if deserializer.is_human_readable() {
            deserializer.deserialize_seq(TensorList)
        } else {
            // Some formats give bytes one by one: the visitor takes both.
            deserializer.deserialize_bytes(LayoutVisitor)
        }
    }
}

#[derive(serde::Deserialize)]
struct ReadTensor {
    name: String,
    dtype: Dtype,
    shape: Vec<u64>,
}

struct TensorList;

impl<'de> Visitor<'de> for TensorList {
    type Value = Layout;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of tensors, each with name, dtype and shape")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Layout, A::Error> {
        // Nothing is reserved ahead: memory grows with what was read.
        let mut builder = LayoutBuilder::default();
        while let Some(ReadTensor { name, dtype, shape }) = list.next_element()? {
            builder
                .push(name, dtype, shape)
                .map_err(de::Error::custom)?;
        }
        builder.finish().map_err(de::Error::custom)
    }
}

struct LayoutVisitor;

impl<'de> Visitor<'de> for LayoutVisitor {
    type Value = Layout;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an encoded layout")
    }

    fn visit_bytes<E: de::Error>(self, bytes: &[u8]) -> Result<Layout, E> {
        Layout::decode(bytes).map_err(E::custom)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Layout, A::Error> {
        let mut bytes = Vec::new();
        while let Some(byte) = list.next_element()? {
            // One past the limit is enough for `decode` to say what is wrong.
            if bytes.len() <= MAX_ENCODED_BYTES {
                bytes.push(byte);
            }
        }
        self.visit_bytes(&bytes)
    }
}
