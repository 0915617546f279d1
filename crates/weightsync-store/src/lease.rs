//! Leases: a version that a process reads is not removed.
//!
//! A reader takes its lease first, and then looks whether the manifest is there. A writer removes the
//! manifest first, and then looks whether there is a lease. So one of the two sees the other, in
//! whatever order they come. A lease ends with its process.

use std::io::ErrorKind;
use std::sync::Arc;

use weightsync_engine::files::{is_hex, is_unique};

use crate::error::{Result, StoreError};
use crate::format::{LEASES, VersionKey};
use crate::storage::{Life, Presence, Storage};

/// How the name of a lease of nothing begins.
pub(crate) const NOTHING: &str = "conditions-";

/// A hold on the files of one version, until it is dropped.
#[derive(Debug)]
pub(crate) struct Lease {
    storage: Arc<dyn Storage>,
    path: String,
    /// `None` where this process cannot write: nothing then keeps the version.
    presence: Option<Box<dyn Presence>>,
}

impl Lease {
    pub(crate) fn take(storage: &Arc<dyn Storage>, place: VersionKey) -> Result<Self> {
        // A name of its own, so that no reader waits for another.
        let random: [u8; 8] = weightsync_engine::transport::random()?;
        let path = format!("{LEASES}/{place}.{:016x}", u64::from_le_bytes(random));
        let presence = match storage.announce(&path, b"") {
            Ok(presence) => Some(presence),
            // Such a reader goes without a lease. What it reads may be removed meanwhile: it then
            // looks for the manifest again.
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::PermissionDenied
                        | ErrorKind::ReadOnlyFilesystem
                        | ErrorKind::StorageFull
                        | ErrorKind::QuotaExceeded
                ) =>
            {
                None
            }
            Err(error) => return Err(StoreError::file("writing", storage.name(&path))(error)),
        };
        Ok(Self {
            storage: storage.clone(),
            path,
            presence,
        })
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if self.presence.take().is_some() {
            // Without a presence it counts no more, so a file that stays is only removed later.
            let _ = self.storage.remove(&self.path);
        }
    }
}

/// The version of a lease with this name. The outer `None` if it is the name of no lease, the inner one
/// for a lease of nothing, by which a writer has tried out an object store.
fn place_of(name: &str) -> Option<Option<VersionKey>> {
    if let Some(rest) = name.strip_prefix(NOTHING) {
        return is_unique(rest).then_some(None);
    }
    let (place, random) = name.split_once('.')?;
    let place = place.parse().ok().filter(|_| is_random(random))?;
    Some(Some(place))
}

/// Whether this is how a name ends that has 8 random bytes.
pub(crate) fn is_random(text: &str) -> bool {
    is_hex(text, 16)
}

/// Whether this is the name of a lease.
pub(crate) fn is_one(name: &str) -> bool {
    place_of(name).is_some()
}

/// The versions that living processes read. Removes the leases of others, and no file that is none.
pub(crate) fn leased(storage: &dyn Storage) -> Result<Vec<VersionKey>> {
    let listed = storage.list(LEASES);
    let names = listed.map_err(StoreError::file("listing", storage.name(LEASES)))?;
    let mut leased = Vec::new();
    for name in names {
        let Some(place) = place_of(&name) else {
            continue;
        };
        let path = format!("{LEASES}/{name}");
        let peer = storage.peer(&path);
        match peer.map_err(StoreError::file("reading", storage.name(&path)))? {
            Some(peer) if peer.life() == Life::Here => leased.extend(place),
            _ => {
                // A user who may not remove anything can save all the same.
                if let Err(error) = storage.remove(&path) {
                    tracing::warn!("{} is not removed yet: {error}", storage.name(&path));
                }
            }
        }
    }
    Ok(leased)
}
