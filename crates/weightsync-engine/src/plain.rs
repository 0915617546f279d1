//! Extra state: what a model keeps in addition to its tensors, as plain data.

mod codec;
mod serde_impl;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

pub use self::codec::PlainError;

/// The most levels of a [`Plain`]: a value alone is one.
pub const MAX_DEPTH: usize = 32;
/// The longest encoding of a [`Plain`], in bytes.
pub const MAX_BYTES: usize = 16 << 20;

/// The last part of the name under which extra state travels.
pub(crate) const EXTRA_STATE: &str = "__extra_state__";

/// The least room for an extra state, in bytes.
const MIN_CAPACITY: usize = 256;

/// Plain data: what extra state is made of. Whatever is not on this list does
/// not travel; tensors travel as tensors.
///
/// In a format for people (JSON) it reads as what it is. A number that is no
/// number, or infinite, has no form there; on the wire it keeps every bit.
///
/// ```
/// use weightsync::model::Plain;
///
/// let state = Plain::from_iter([("steps", Plain::from(12)), ("decay", Plain::from(0.99))]);
/// assert_eq!(Plain::decode(&state.encode()?)?, state);
/// assert_eq!(serde_json::to_string(&state).unwrap(), r#"{"decay":0.99,"steps":12}"#);
/// # Ok::<(), weightsync::model::PlainError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Plain {
    /// Nothing.
    #[default]
    Null,
    /// True or false.
    Bool(bool),
    /// A whole number.
    Int(i64),
    /// A whole number that is too large for an [`Int`](Self::Int); one that is
    /// not comes back as one.
    Unsigned(u64),
    /// Any other number.
    Float(f64),
    /// Text.
    Text(String),
    /// Values in order.
    List(Vec<Plain>),
    /// Values by name.
    Map(BTreeMap<String, Plain>),
}

/// The extra state of one module, with the room it has on the wire.
///
/// **Guarantee.** Its [`bytes`](Self::bytes) are always as long as its
/// [`capacity`](Self::capacity), whatever the value: a model's layout does not
/// change when its extra state does.
#[derive(Clone, Debug, PartialEq)]
pub struct ExtraState {
    value: Plain,
    bytes: Vec<u8>,
}

impl ExtraState {
    /// A state with room to grow: twice what it takes now, at least 256 bytes.
    ///
    /// # Errors
    ///
    /// [`PlainError::TooDeep`] or [`PlainError::TooLarge`].
    pub fn new(value: Plain) -> Result<Self, PlainError> {
        let encoded = value.encode()?;
        let needed = codec::HEADER + encoded.len();
        // Twice the room, so that a state that grows a little still fits without a new setup.
        let capacity = (2 * needed).next_power_of_two().max(MIN_CAPACITY);
        let bytes = codec::padded(&encoded, capacity)?;
        Ok(Self { value, bytes })
    }

    /// A state with a room that was agreed upon before, such as that of the
    /// layout a sender was set up with.
    ///
    /// # Errors
    ///
    /// [`PlainError::Outgrown`] if it does not fit.
    pub fn with_capacity(value: Plain, capacity: usize) -> Result<Self, PlainError> {
        let bytes = codec::padded(&value.encode()?, capacity)?;
        Ok(Self { value, bytes })
    }

    /// Reads what [`bytes`](Self::bytes) says; safe on any bytes.
    ///
    /// # Errors
    ///
    /// Those of [`Plain::decode`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, PlainError> {
        let value = Plain::decode(codec::unpadded(bytes)?)?;
        Ok(Self {
            value,
            bytes: bytes.to_vec(),
        })
    }

    /// Another value in the same room.
    ///
    /// # Errors
    ///
    /// [`PlainError::Outgrown`] if it does not fit; the state is as it was then.
    pub fn set(&mut self, value: Plain) -> Result<(), PlainError> {
        *self = Self::with_capacity(value, self.capacity())?;
        Ok(())
    }

    /// The value.
    pub fn value(&self) -> &Plain {
        &self.value
    }

    /// The value alone.
    pub fn into_value(self) -> Plain {
        self.value
    }

    /// Its form on the wire: the elements of a tensor of `U8`.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Room on the wire, in bytes.
    pub fn capacity(&self) -> usize {
        self.bytes.len()
    }
}

/// The name under which the extra state of a module travels; the root module's
/// name is empty.
pub(crate) fn extra_state_name(module: &str) -> String {
    match module {
        "" => EXTRA_STATE.to_owned(),
        module => format!("{module}.{EXTRA_STATE}"),
    }
}

/// Whether a tensor is the extra state of a module: one dimension of `U8` under
/// the name that is kept for it.
pub(crate) fn is_extra_state(name: &str, dtype: weightsync_core::Dtype, shape: &[u64]) -> bool {
    let module = name.strip_suffix(EXTRA_STATE);
    module.is_some_and(|module| module.is_empty() || module.ends_with('.'))
        && dtype == weightsync_core::Dtype::U8
        && shape.len() == 1
}

macro_rules! from {
    ($($type:ty => |$value:ident| $plain:expr;)*) => {
        $(impl From<$type> for Plain {
            fn from($value: $type) -> Self {
                $plain
            }
        })*
    };
}

from! {
    () => |_unit| Plain::Null;
    bool => |value| Plain::Bool(value);
    i32 => |value| Plain::Int(value.into());
    u32 => |value| Plain::Int(value.into());
    i64 => |value| Plain::Int(value);
    u64 => |value| i64::try_from(value).map_or(Plain::Unsigned(value), Plain::Int);
    f32 => |value| Plain::Float(value.into());
    f64 => |value| Plain::Float(value);
    &str => |value| Plain::Text(value.to_owned());
    String => |value| Plain::Text(value);
    Vec<Plain> => |value| Plain::List(value);
    BTreeMap<String, Plain> => |value| Plain::Map(value);
}

/// A list.
impl FromIterator<Plain> for Plain {
    fn from_iter<I: IntoIterator<Item = Plain>>(values: I) -> Self {
        Self::List(values.into_iter().collect())
    }
}

/// A map; of two values with one name the last stays.
impl<K: Into<String>> FromIterator<(K, Plain)> for Plain {
    fn from_iter<I: IntoIterator<Item = (K, Plain)>>(entries: I) -> Self {
        let entries = entries
            .into_iter()
            .map(|(name, value)| (name.into(), value));
        Self::Map(entries.collect())
    }
}
