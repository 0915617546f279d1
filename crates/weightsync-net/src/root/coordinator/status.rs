//! The status of the sender, its agents and workers, for programs that ask.

use std::sync::atomic::Ordering;

use weightsync_core::RelayStatus;
use weightsync_engine::SenderStatus;

use super::Coordinator;
use crate::agent::Item;
use crate::status;

impl Coordinator {
    /// The sender's status as JSON.
    pub(super) fn status(&self) -> String {
        let history = &self.settings.history;
        status::to_json(history.status(|status| self.fill_status(status)))
    }

    fn fill_status(&self, status: &mut SenderStatus) {
        status.address.clone_from(&self.settings.welcome.address);
        status.served = self.settings.served.load(Ordering::Relaxed);
        status.workers = self.remote_readers.roster();
        for (index, model) in status.models.iter_mut().enumerate() {
            let item = Item {
                model: index,
                version: model.version,
            };
            let changes = self.settings.store.deltas().changes(item);
            model.changed = changes.map(|changes| changes.share());
            model.delta_bytes = changes.map(|changes| changes.bytes);
        }
        let relays = self.plan.topology.parents().filter_map(|(agent, parent)| {
            let one = self.plan.agents.get(&agent)?;
            let known = one.introduced.as_ref()?;
            let holds = known.holds.iter();
            Some(RelayStatus {
                agent,
                serves: self.plan.topology.serves(agent),
                parent: parent.unwrap_or(0),
                name: known.name.clone(),
                address: one.from.ip().to_string(),
                pid: known.process.pid,
                received: one.received,
                altered_for: one.altered_for.len(),
                bytes_per_second: self.plan.topology.speed(agent),
                holds: holds.map(|item| (item.model as u8, item.version)).collect(),
            })
        });
        status.relays = relays.collect();
    }
}
