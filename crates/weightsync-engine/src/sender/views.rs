//! What was sent, for the sender itself.

use weightsync_core::{Digest, Version};

use super::Sender;
use crate::error::{Error, Result};
use crate::snapshot::Snapshot;
use crate::transport::FirstWeights;

impl Sender {
    /// The sender's own view of the version that was last sent to all workers, to save, compare or
    /// send again later.
    ///
    /// # Errors
    ///
    /// In a forked child; [`Error::Unsupported`]; [`Error::SeveralModels`].
    pub fn snapshot(&self) -> Result<Snapshot> {
        self.setup.only_model()?;
        self.own_view(0)
    }

    /// As [`snapshot`](Self::snapshot), for one of several models.
    ///
    /// # Errors
    ///
    /// As [`snapshot`](Self::snapshot), and [`Error::NoSuchModel`].
    pub fn snapshot_of(&self, model: &str) -> Result<Snapshot> {
        self.own_view(self.index_of(model)?)
    }

    /// An older version of a model, if it is still kept (see
    /// [`SenderSetup::history`](crate::SenderSetup::history)). To go back to it, send
    /// it: it becomes a new version of the same digest.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchVersion`], [`Error::NoSuchModel`],
    /// [`Error::Unsupported`].
    pub fn old_snapshot(&self, model: &str, version: Version) -> Result<Snapshot> {
        let index = self.index_of(model)?;
        let found = self.transport.old_snapshot(index, version);
        let found = found.map_err(|error| error.by(&self.setup.scheme))?;
        found.ok_or_else(|| Error::NoSuchVersion {
            model: self.setup.models[index].prepared.id.clone(),
            asked: version,
            known: vec![self.transport.version(index)],
        })
    }

    /// Makes the digest of the version that was last sent to all workers, and stores it where
    /// workers find it.
    ///
    /// # Errors
    ///
    /// As [`snapshot`](Self::snapshot).
    pub fn digest(&self) -> Result<Digest> {
        self.setup.only_model()?;
        self.digest_at(0)
    }

    /// As [`digest`](Self::digest), of one of several models.
    ///
    /// # Errors
    ///
    /// As [`snapshot_of`](Self::snapshot_of).
    pub fn digest_of(&self, model: &str) -> Result<Digest> {
        self.digest_at(self.index_of(model)?)
    }

    fn digest_at(&self, model: usize) -> Result<Digest> {
        let snapshot = self.own_view(model)?;
        let digest = snapshot.digest();
        snapshot.publish_digest(digest);
        Ok(digest)
    }

    fn own_view(&self, model: usize) -> Result<Snapshot> {
        let held = self.transport.snapshot(model);
        let held = held.map_err(|error| error.by(&self.setup.scheme))?;
        held.ok_or_else(|| match self.setup.scheme.scheme().first_weights() {
            // Nothing was sent yet.
            FirstWeights::AtFirstSend => Error::NothingToKeep {
                model: self.setup.models[model].prepared.id.clone(),
            },
            // `connect` publishes before it returns a sender.
            FirstWeights::AtConnect => {
                Error::unsupported("reading back what was sent", &self.setup.scheme)
            }
        })
    }
}
