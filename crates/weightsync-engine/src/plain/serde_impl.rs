//! Plain data in serde formats: as what it is where people read it (JSON), its
//! own encoding elsewhere.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{self, Deserialize, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde::ser::{Error, Serialize, Serializer};

use super::{MAX_DEPTH, Plain, PlainError};

impl Serialize for Plain {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if !serializer.is_human_readable() {
            return serializer.serialize_bytes(&self.encode().map_err(S::Error::custom)?);
        }
        match self {
            Self::Null => serializer.serialize_unit(),
            Self::Bool(value) => serializer.serialize_bool(*value),
            Self::Int(value) => serializer.serialize_i64(*value),
            Self::Unsigned(value) => serializer.serialize_u64(*value),
            Self::Float(value) if !value.is_finite() => Err(S::Error::custom(format_args!(
                "{value} has no form that people read; it travels in binary formats"
            ))),
            Self::Float(value) => serializer.serialize_f64(*value),
            Self::Text(value) => serializer.serialize_str(value),
            Self::List(values) => serializer.collect_seq(values),
            Self::Map(entries) => serializer.collect_map(entries),
        }
    }
}

impl<'de> Deserialize<'de> for Plain {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        if deserializer.is_human_readable() {
            Levels(MAX_DEPTH).deserialize(deserializer)
        } else {
            deserializer.deserialize_bytes(PlainVisitor)
        }
    }
}

struct PlainVisitor;

impl Visitor<'_> for PlainVisitor {
    type Value = Plain;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("encoded plain data")
    }

    fn visit_bytes<E: de::Error>(self, bytes: &[u8]) -> Result<Plain, E> {
        Plain::decode(bytes).map_err(E::custom)
    }
}

/// A value of at most so many levels.
#[derive(Clone, Copy)]
struct Levels(usize);

impl Levels {
    fn below(self) -> Self {
        Self(self.0 - 1)
    }
}

impl<'de> DeserializeSeed<'de> for Levels {
    type Value = Plain;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Plain, D::Error> {
        // Hence never 0 in a visit.
        match self.0 {
            0 => Err(de::Error::custom(PlainError::TooDeep)),
            _ => deserializer.deserialize_any(self),
        }
    }
}

impl<'de> Visitor<'de> for Levels {
    type Value = Plain;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("plain data: null, a boolean, a number, text, a list or a map")
    }

    fn visit_unit<E>(self) -> Result<Plain, E> {
        Ok(Plain::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Plain, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Plain, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Plain, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Plain, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Plain, E> {
        Ok(value.into())
    }

    fn visit_string<E>(self, value: String) -> Result<Plain, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Plain, A::Error> {
        let mut values = Vec::new();
        while let Some(value) = list.next_element_seed(self.below())? {
            values.push(value);
        }
        Ok(Plain::List(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Plain, A::Error> {
        let mut entries = BTreeMap::new();
        while let Some(name) = map.next_key::<String>()? {
            // The last of two would win in one reader and the first in another.
            if entries.contains_key(&name) {
                return Err(de::Error::custom(format_args!("{name:?} appears twice")));
            }
            entries.insert(name, map.next_value_seed(self.below())?);
        }
        Ok(Plain::Map(entries))
    }
}
