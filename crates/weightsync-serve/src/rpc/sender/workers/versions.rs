//! The versions that workers fetch.

use std::collections::BTreeSet;
use std::sync::Arc;

use weightsync_engine::{Error, Holder, Version};
use weightsync_mem::Snapshot;

use super::{ConnectionId, SharedSender};

impl SharedSender {
    /// Finds a version of a call, or one that the sender keeps.
    pub(in super::super) fn find(&self, model: usize, version: Version) -> Option<Snapshot> {
        let is_it = |one: &&Snapshot| one.model() == model && one.version() == version;
        // A call may name a version that the segment has replaced since. The connection's snapshot
        // keeps it until the call is over.
        let table = self.table();
        let mut calling = table.connections.values().flat_map(|one| &one.calling);
        let called_with = calling.find(is_it).cloned();
        drop(table);
        called_with.or_else(|| self.remote_readers.snapshot(model, version).ok().flatten())
    }

    /// A worker fetches a version, which is held until this is dropped.
    pub(in super::super) fn serve(
        self: &Arc<Self>,
        id: ConnectionId,
        snapshot: Snapshot,
    ) -> Arc<ServingVersion> {
        let what = (id, snapshot.model(), snapshot.version());
        let mut table = self.table();
        // Several answers of one worker may carry one version, so this counts.
        *table.serving.entry(what).or_default() += 1;
        if let Some(connection) = table.connections.get_mut(&id) {
            // From here on a newer set does not replace the call.
            connection.has_begun = true;
        }
        drop(table);
        Arc::new(ServingVersion {
            shared: self.clone(),
            id,
            snapshot,
        })
    }

    /// Names the workers for which the sender itself holds versions.
    pub(in super::super) fn with_holders(&self, mut error: Error) -> Error {
        let Error::AllSlotsPinned { model, holders, .. } = &mut error else {
            return error;
        };
        let Some(model) = self.ids().position(|id| id == model) else {
            return error;
        };
        let mut table = self.table();
        // A version is held for a worker by its call, and by each answer that carries its bytes.
        let calling = table.connections.iter().flat_map(|(id, connection)| {
            let calling = connection.calling.iter();
            calling.map(|one| (*id, one.model(), one.version()))
        });
        let fetching: BTreeSet<_> = calling.chain(table.serving.keys().copied()).collect();
        let of_model = fetching.into_iter().filter(|(_, of, _)| *of == model);
        let fetching: Vec<_> = of_model
            .filter_map(|(id, _, version)| {
                let registration = &table.worker(id)?.registration;
                Some(Holder {
                    worker: Some(registration.worker),
                    pid: registration.pid,
                    versions: vec![version],
                })
            })
            .collect();
        drop(table);
        // The segment counts these pins as the trainer's own. They move to the lines of the workers
        // that fetch.
        for own in holders.iter_mut().filter(|one| one.worker.is_none()) {
            let is_fetched = |version| fetching.iter().any(|one| one.versions == [version]);
            own.versions.retain(|version| !is_fetched(*version));
        }
        holders.extend(fetching);
        // A holder whose versions were all moved away has nothing left to name.
        holders.retain(|one| !one.versions.is_empty());
        error
    }
}

/// A version whose bytes are on their way to a worker, until this is dropped.
#[derive(Debug)]
pub(in super::super) struct ServingVersion {
    shared: Arc<SharedSender>,
    id: ConnectionId,
    snapshot: Snapshot,
}

impl ServingVersion {
    pub(in super::super) fn bytes(&self) -> &[u8] {
        self.snapshot.bytes()
    }
}

impl Drop for ServingVersion {
    fn drop(&mut self) {
        let what = (self.id, self.snapshot.model(), self.snapshot.version());
        let mut table = self.shared.table();
        if let Some(answers) = table.serving.get_mut(&what) {
            *answers -= 1;
            if *answers == 0 {
                table.serving.remove(&what);
            }
        }
    }
}
