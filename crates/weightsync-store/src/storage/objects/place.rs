//! Where a store of objects is.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::memory::InMemory;
use object_store::{ObjectStore, RetryConfig};
use weightsync_engine::transport::threads::LockExt as _;

use super::error::io_error;

/// For how long a request is tried again that failed for a reason which may pass. A store that
/// throttles its users recovers in seconds; one that does not should not hold up a trainer.
const RETRIES: Duration = Duration::from_secs(60);

/// A prefix in a bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BucketPrefix {
    service: ObjectService,
    bucket: String,
    /// Empty, or names with `/` between them.
    prefix: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ObjectService {
    S3,
    Google,
    Azure,
    /// Of this process.
    Memory,
}

impl ObjectService {
    const ALL: [Self; 4] = [Self::S3, Self::Google, Self::Azure, Self::Memory];

    fn scheme(self) -> &'static str {
        match self {
            Self::S3 => "s3",
            Self::Google => "gs",
            Self::Azure => "az",
            Self::Memory => "memory",
        }
    }
}

/// What an address can be.
pub(crate) const EXPECTED: &str = "s3://bucket/path, gs://bucket/path, az://container/path or \
                                   memory:///name, of names without control characters, `?`, `#`, \
                                   `.` and `..` between single slashes, and without a key: keys \
                                   come from the environment";

impl BucketPrefix {
    /// Reads what follows the scheme and `://`; `None` if it names no place.
    pub(crate) fn parse(scheme: &str, rest: &str) -> Option<Self> {
        let mut services = ObjectService::ALL.into_iter();
        let service = services.find(|service| service.scheme() == scheme)?;
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let prefix = prefix.strip_suffix('/').unwrap_or(prefix);
        // No name may hold what a URL gives a meaning to.
        let letters = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
        let is_bucket = match service {
            // The name is all there is, so it is the prefix.
            ObjectService::Memory => bucket.is_empty() && !prefix.is_empty(),
            _ => !bucket.is_empty() && bucket.len() <= 255 && bucket.chars().all(letters),
        };
        let bad = |c: char| c.is_control() || matches!(c, '?' | '#' | '\\');
        let is_prefix = prefix.is_empty()
            || (prefix.len() <= 512
                && !prefix.contains(bad)
                && !prefix
                    .split('/')
                    .any(|name| matches!(name, "" | "." | "..")));
        (is_bucket && is_prefix).then(|| Self {
            service,
            bucket: bucket.into(),
            prefix: prefix.into(),
        })
    }

    /// A directory below this one.
    pub(crate) fn below(&self, name: &str) -> Self {
        Self {
            prefix: self.key(name),
            ..self.clone()
        }
    }

    /// The key of an object.
    pub(super) fn key(&self, path: &str) -> String {
        match (self.prefix.is_empty(), path.is_empty()) {
            (true, _) => path.into(),
            (_, true) => self.prefix.clone(),
            _ => format!("{}/{path}", self.prefix),
        }
    }

    /// A client, with the credentials and the endpoint of the environment.
    pub(super) fn client(&self) -> io::Result<Arc<dyn ObjectStore>> {
        let retries = RetryConfig {
            retry_timeout: RETRIES,
            // The time alone ends them: ten are over after three seconds.
            max_retries: usize::MAX,
            ..RetryConfig::default()
        };
        let bucket = &self.bucket;
        Ok(match self.service {
            ObjectService::S3 => {
                let builder = AmazonS3Builder::from_env().with_bucket_name(bucket);
                Arc::new(builder.with_retry(retries).build().map_err(io_error)?)
            }
            ObjectService::Google => {
                let builder = GoogleCloudStorageBuilder::from_env().with_bucket_name(bucket);
                Arc::new(builder.with_retry(retries).build().map_err(io_error)?)
            }
            ObjectService::Azure => {
                let builder = MicrosoftAzureBuilder::from_env().with_container_name(bucket);
                Arc::new(builder.with_retry(retries).build().map_err(io_error)?)
            }
            ObjectService::Memory => memory(&self.prefix),
        })
    }
}

/// The store in memory of this name: the same for the same first part of a name, so that what lies
/// below a store is in it.
fn memory(name: &str) -> Arc<InMemory> {
    static STORES: Mutex<BTreeMap<String, Arc<InMemory>>> = Mutex::new(BTreeMap::new());
    let name = name.split('/').next().unwrap_or(name);
    let mut stores = STORES.locked();
    stores.entry(name.into()).or_default().clone()
}

impl fmt::Display for BucketPrefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (scheme, bucket) = (self.service.scheme(), &self.bucket);
        write!(f, "{scheme}://{bucket}")?;
        match self.prefix.as_str() {
            "" => Ok(()),
            prefix => write!(f, "/{prefix}"),
        }
    }
}
