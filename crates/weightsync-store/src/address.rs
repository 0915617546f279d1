//! Where a store is: a directory, or a place in an object store.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use weightsync_engine::files;

use crate::error::{Result, StoreError};
#[cfg(feature = "objects")]
use crate::storage::objects::{self, Objects};
use crate::storage::{Directory, Storage};

/// The address of a store: the path of a directory, or with the feature `objects` a place in an object
/// store (`s3://bucket/path`, `gs://bucket/path`, `az://container/path`), or a name in the memory of
/// this process (`memory:///name`). It never holds a key: keys come from the environment.
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
pub struct Address(Location);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Location {
    /// An absolute path.
    Directory(PathBuf),
    #[cfg(feature = "objects")]
    Objects(objects::BucketPrefix),
}

impl Address {
    /// A directory below this address.
    pub(crate) fn below(&self, name: &str) -> Self {
        Self(match &self.0 {
            Location::Directory(path) => Location::Directory(path.join(name)),
            #[cfg(feature = "objects")]
            Location::Objects(place) => Location::Objects(place.below(name)),
        })
    }

    pub(crate) fn storage(&self) -> Arc<dyn Storage> {
        match &self.0 {
            Location::Directory(path) => Arc::new(Directory::new(path)),
            #[cfg(feature = "objects")]
            Location::Objects(place) => Arc::new(Objects::new(place.clone())),
        }
    }
}

impl FromStr for Address {
    type Err = StoreError;

    fn from_str(text: &str) -> Result<Self> {
        let unusable = |expected: &str| StoreError::Address {
            text: without_key(text),
            expected: expected.into(),
        };
        let path = match text.split_once("://") {
            Some(("file", path)) => path,
            #[cfg(feature = "objects")]
            Some((scheme, rest)) => {
                let place = objects::BucketPrefix::parse(scheme, rest);
                let place = place.ok_or_else(|| {
                    unusable(&format!(
                        "the path of a directory, or {}",
                        objects::EXPECTED
                    ))
                })?;
                return Ok(Self(Location::Objects(place)));
            }
            #[cfg(not(feature = "objects"))]
            Some(("s3" | "gs" | "az" | "memory", _)) => {
                return Err(unusable(
                    "the path of a directory, as this program was built without object stores: \
                     build weightsync-store with its feature `objects`",
                ));
            }
            #[cfg(not(feature = "objects"))]
            Some(_) => return Err(unusable("the path of a directory")),
            None => text,
        };
        let begins = path.split('/').next().unwrap_or_default();
        if begins == "~" || (begins.len() > 2 && begins.ends_with(':')) {
            // Paths of Python turn `s3://bucket` into `s3:/bucket`.
            return Err(unusable(
                "a path as the system has it: ~ is for a shell to replace, and a URL has two slashes \
                 after its colon, which a path object takes for one; put ./ in front if it is a \
                 directory's name",
            ));
        }
        if path.is_empty() || path.chars().any(char::is_control) {
            return Err(unusable(
                "the path of a directory, without control characters",
            ));
        }
        // Other processes run elsewhere.
        let path = files::absolute(Path::new(path));
        let path =
            path.map_err(|error| unusable(&format!("a path that leads to a directory ({error})")))?;
        Ok(Self(Location::Directory(path)))
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Location::Directory(path) => path.display().fmt(f),
            #[cfg(feature = "objects")]
            Location::Objects(place) => place.fmt(f),
        }
    }
}

/// The text, without what looks like a key in front of a host or behind a question mark.
fn without_key(text: &str) -> String {
    let Some((scheme, rest)) = text.split_once("://") else {
        return text.into();
    };
    let rest = rest.split_once('?').map_or(rest, |(before, _)| before);
    let rest = rest.rsplit_once('@').map_or(rest, |(_, behind)| behind);
    format!("{scheme}://{rest}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_shows_no_key_in_an_error() {
        for text in [
            "s3://AKIA:hunter2@bucket/policy",
            "s3://bucket/policy?secret=hunter2",
            "az://a/b@c?sig=hunter2",
        ] {
            let error = text.parse::<Address>().unwrap_err().to_string();
            assert!(!error.contains("hunter2"), "{error}");
        }
    }

    #[cfg(not(feature = "objects"))]
    #[test]
    fn address_names_the_feature_that_it_lacks() {
        let error = "s3://bucket/policy".parse::<Address>().unwrap_err();
        assert!(error.to_string().contains("`objects`"), "{error}");
    }

    #[cfg(feature = "objects")]
    #[test]
    fn address_of_an_object_store_reads_as_written() {
        for text in [
            "s3://bucket",
            "s3://my.bucket-1/runs/policy",
            "gs://bucket/policy",
            "az://container/policy",
            "memory:///policy",
        ] {
            let address: Address = text.parse().unwrap();
            assert_eq!(address.to_string(), text);
            assert_eq!(address.below("a").to_string(), format!("{text}/a"));
        }
        let address: Address = "s3://bucket/policy/".parse().unwrap();
        assert_eq!(address.to_string(), "s3://bucket/policy");
    }

    #[cfg(feature = "objects")]
    #[test]
    fn address_refuses_what_names_no_object() {
        for text in [
            "s3://",
            "s3:///policy",
            "s3://bucket/../x",
            "s3://bucket/./x",
            "s3://bucket//x",
            "s3://bucket/x//",
            "s3://bucket/x?versionId=1",
            "s3://buc ket/x",
            "s3://bucket/a\nb",
            "memory://",
            "memory:///",
            "memory://host/name",
            "http://bucket/x",
        ] {
            let error = text.parse::<Address>().unwrap_err().to_string();
            assert!(error.contains("s3://bucket/path"), "{error}");
        }
    }
}
