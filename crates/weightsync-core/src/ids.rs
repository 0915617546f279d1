//! Identities: models, workers, writers.

use std::borrow::Borrow;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::de::{self, Deserializer};
use serde::{Deserialize, Serialize, Serializer};

use crate::error::Error;

/// The name of a model whose weights are synchronised, such as `policy` or `env.value_net`.
///
/// 1 to [`ModelId::MAX_BYTES`] bytes of UTF-8 without control characters; cheap to clone. It may
/// contain `/` and dots, so it is not fit to be a file name as it stands.
///
/// ```
/// use weightsync_core::ModelId;
///
/// let id = ModelId::new("policy")?;
/// assert_eq!(id.as_str(), "policy");
/// assert!(ModelId::new("").is_err());
/// # Ok::<(), weightsync_core::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ModelId(Arc<str>);

impl ModelId {
    /// The longest id, in bytes.
    pub const MAX_BYTES: usize = 255;

    /// Checks a name.
    ///
    /// # Errors
    /// [`Error::TooLarge`] above [`ModelId::MAX_BYTES`]; [`Error::InvalidModelId`] if it is empty
    /// or has control characters.
    pub fn new(id: impl AsRef<str>) -> Result<Self, Error> {
        let id = id.as_ref();
        if id.len() > Self::MAX_BYTES {
            return Err(Error::TooLarge {
                what: "bytes in a model id",
                got: id.len() as u64,
                limit: Self::MAX_BYTES as u64,
            });
        }
        // Names are printed in reports and logs, where a control character could pass for something
        // else.
        if id.is_empty() || id.chars().any(char::is_control) {
            return Err(Error::InvalidModelId { id: id.to_owned() });
        }
        Ok(ModelId(id.into()))
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ModelId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl fmt::Debug for ModelId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ModelId({:?})", &*self.0)
    }
}

impl AsRef<str> for ModelId {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

// Equality, order and hash are those of the text, as `Borrow` demands.
impl Borrow<str> for ModelId {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl FromStr for ModelId {
    type Err = Error;

    fn from_str(id: &str) -> Result<Self, Error> {
        ModelId::new(id)
    }
}

impl TryFrom<&str> for ModelId {
    type Error = Error;

    fn try_from(id: &str) -> Result<Self, Error> {
        ModelId::new(id)
    }
}

impl TryFrom<String> for ModelId {
    type Error = Error;

    fn try_from(id: String) -> Result<Self, Error> {
        ModelId::new(id)
    }
}

impl Serialize for ModelId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for ModelId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        ModelId::new(String::deserialize(deserializer)?).map_err(de::Error::custom)
    }
}

/// A receiver's number, from 0, given by the caller that starts the receiver.
///
/// Its serde form is also its form in messages of weightsync-net: golden files hold the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct WorkerId(pub u32);

impl From<u32> for WorkerId {
    fn from(number: u32) -> Self {
        Self(number)
    }
}

impl fmt::Display for WorkerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "worker {}", self.0)
    }
}

/// The number of one of the processes that write a version together, from 0; a trainer that is not
/// sharded is writer 0.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct WriterId(pub u32);

impl fmt::Display for WriterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "writer {}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn model_ids_are_checked_on_every_way_in() {
        let longest = "x".repeat(ModelId::MAX_BYTES);
        for good in [
            "policy",
            "env.value_net",
            "transforms[0]",
            "org/model",
            &longest,
        ] {
            let id = ModelId::new(good).unwrap();
            let json = serde_json::to_string(&id).unwrap();
            assert_eq!(serde_json::from_str::<ModelId>(&json).unwrap(), id);
        }
        let too_long = "x".repeat(ModelId::MAX_BYTES + 1);
        for bad in ["", "a\nb", "\0", &too_long] {
            assert!(ModelId::new(bad).is_err(), "{bad:?}");
            assert!(bad.parse::<ModelId>().is_err());
            let json = serde_json::to_string(bad).unwrap();
            assert!(serde_json::from_str::<ModelId>(&json).is_err());
        }
    }
}
