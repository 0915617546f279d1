//! The status of the sender, its agents and workers, for programs that ask.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use super::Coordinator;
use super::workers::Worker;
use crate::relay::Item;
use crate::root::topology::AgentId;
use crate::status;

impl Coordinator {
    pub(super) fn status(&self) -> String {
        let models = self.settings.models.iter().enumerate();
        let models = models.map(|(index, name)| {
            let version = self.remote_readers.version(index);
            let item = Item {
                model: index,
                version,
            };
            let changes = self.settings.store.deltas().changes(item);
            status::Model {
                name: name.clone(),
                version: version.0,
                bytes: self.remote_readers.bytes(index),
                changed: changes.map(|changes| changes.share()),
                delta_bytes: changes.map(|changes| changes.bytes),
            }
        });
        let mut workers: BTreeMap<AgentId, Vec<status::Worker>> = BTreeMap::new();
        for (worker, process, by, of) in self.membership.iter() {
            let Some(by) = by else { continue };
            workers.entry(by).or_default().push(status::Worker {
                worker: worker.0,
                pid: process.pid,
                device: of.device.clone(),
                versions: self.versions(of),
            });
        }
        let relays = self.topology.parents().filter_map(|(agent, parent)| {
            let one = self.agents.get(&agent)?;
            let known = one.known.as_ref()?;
            Some(status::Relay {
                agent,
                serves: self.topology.serves(agent),
                parent: parent.unwrap_or(0),
                name: known.name.clone(),
                address: one.from.ip().to_string(),
                pid: known.process.pid,
                received: one.received,
                altered_for: one.altered_for.len(),
                bytes_per_second: self.topology.speed(agent),
                holds: known
                    .holds
                    .iter()
                    .map(|item| (item.model as u8, item.version.0))
                    .collect(),
                workers: workers.remove(&agent).unwrap_or_default(),
            })
        });
        let local = self
            .remote_readers
            .local()
            .into_iter()
            .map(|reader| status::Worker {
                worker: reader.worker.0,
                pid: reader.pid,
                device: reader.device,
                versions: reader.versions.iter().map(|version| version.0).collect(),
            });
        let run = self.remote_readers.run();
        status::Status {
            address: self.settings.address.clone(),
            pid: std::process::id(),
            run: run.to_string(),
            up_seconds: self.since.elapsed().as_secs_f64(),
            models: models.collect(),
            served: self.settings.served.load(Ordering::Relaxed),
            local: local.collect(),
            relays: relays.collect(),
            lost: self
                .membership
                .iter()
                .filter(|(_, _, by, _)| by.is_none())
                .map(|(worker, ..)| worker.0)
                .collect(),
            left_out: status::Omitted::default(),
        }
        .to_json()
    }

    fn versions(&self, worker: &Worker) -> Vec<u64> {
        let models = 0..self.settings.models.len();
        models
            .map(|model| worker.versions.get(&model).map_or(0, |version| version.0))
            .collect()
    }
}
