//! Where a store is: a directory, or a place in an object store.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use crate::error::{Result, StoreError};
use crate::storage::{Directory, Storage};

/// The address of a store.
///
/// ```
/// use weightsync_store::Address;
///
/// let address: Address = "/srv/runs/policy".parse()?;
/// assert_eq!(address.to_string(), "/srv/runs/policy");
/// assert!("ftp://host/policy".parse::<Address>().is_err());
/// # Ok::<(), weightsync_store::StoreError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address(Place);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Place {
    /// An absolute path.
    Directory(PathBuf),
}

impl Address {
    /// A directory below this address.
    pub(crate) fn below(&self, name: &str) -> Self {
        let Self(Place::Directory(path)) = self;
        Self(Place::Directory(path.join(name)))
    }

    pub(crate) fn storage(&self) -> Arc<dyn Storage> {
        let Self(Place::Directory(path)) = self;
        Arc::new(Directory::new(path))
    }
}

impl FromStr for Address {
    type Err = StoreError;

    fn from_str(text: &str) -> Result<Self> {
        let unusable = |expected: &str| StoreError::Address {
            text: text.into(),
            expected: expected.into(),
        };
        let path = match text.split_once("://") {
            Some(("file", path)) => path,
            Some(_) => return Err(unusable("the path of a directory")),
            None => text,
        };
        if path.is_empty() || path.chars().any(char::is_control) {
            return Err(unusable(
                "the path of a directory, without control characters",
            ));
        }
        // Other processes run elsewhere.
        let path = std::path::absolute(Path::new(path));
        let path =
            path.map_err(|error| unusable(&format!("a path that can be resolved ({error})")))?;
        Ok(Self(Place::Directory(path)))
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(Place::Directory(path)) = self;
        path.display().fmt(f)
    }
}
