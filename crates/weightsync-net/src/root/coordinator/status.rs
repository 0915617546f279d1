//! The status of the sender, its agents and workers, for programs that ask.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use super::Coordinator;
use crate::relay::Item;
use crate::root::plan::WorkerRecord;
use crate::root::topology::AgentId;
use crate::status;

impl Coordinator {
    pub(super) fn status(&self) -> String {
        let lost = self.plan.membership.iter();
        let lost = lost.filter(|(_, _, by, _)| by.is_none());
        status::Status {
            address: self.settings.welcome.address.clone(),
            pid: std::process::id(),
            run: self.remote_readers.run().to_string(),
            up_seconds: self.since.elapsed().as_secs_f64(),
            models: self.models(),
            served: self.settings.served.load(Ordering::Relaxed),
            local: self.local(),
            relays: self.relays(),
            lost: lost.map(|(worker, ..)| worker.0).collect(),
            left_out: status::Omitted::default(),
        }
        .to_json()
    }

    fn models(&self) -> Vec<status::Model> {
        let models = self.settings.models.iter().enumerate();
        let models = models.map(|(model, name)| {
            let version = self.remote_readers.version(model);
            let deltas = self.settings.store.deltas();
            let changes = deltas.changes(Item { model, version });
            status::Model {
                name: name.clone(),
                version: version.0,
                bytes: self.remote_readers.bytes(model),
                changed: changes.map(|changes| changes.share()),
                delta_bytes: changes.map(|changes| changes.bytes),
            }
        });
        models.collect()
    }

    /// The workers of the sender's own host.
    fn local(&self) -> Vec<status::Worker> {
        let local = self.remote_readers.local().into_iter();
        let local = local.map(|reader| status::Worker {
            worker: reader.worker.0,
            pid: reader.pid,
            device: reader.device,
            versions: reader.versions.iter().map(|version| version.0).collect(),
        });
        local.collect()
    }

    /// The agents, each with its workers.
    fn relays(&self) -> Vec<status::Relay> {
        let topology = &self.plan.topology;
        let mut workers = self.members();
        let relays = topology.parents().filter_map(|(agent, parent)| {
            let one = self.plan.agents.get(&agent)?;
            let known = one.introduced.as_ref()?;
            let holds = known.holds.iter();
            Some(status::Relay {
                agent,
                serves: topology.serves(agent),
                parent: parent.unwrap_or(0),
                name: known.name.clone(),
                address: one.from.ip().to_string(),
                pid: known.process.pid,
                received: one.received,
                altered_for: one.altered_for.len(),
                bytes_per_second: topology.speed(agent),
                holds: holds
                    .map(|item| (item.model as u8, item.version.0))
                    .collect(),
                workers: workers.remove(&agent).unwrap_or_default(),
            })
        });
        relays.collect()
    }

    /// The workers that each agent reaches.
    fn members(&self) -> BTreeMap<AgentId, Vec<status::Worker>> {
        let mut workers: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for (worker, process, by, record) in self.plan.membership.iter() {
            let Some(by) = by else { continue };
            workers.entry(by).or_default().push(status::Worker {
                worker: worker.0,
                pid: process.pid,
                device: record.device.clone(),
                versions: self.versions(record),
            });
        }
        workers
    }

    fn versions(&self, worker: &WorkerRecord) -> Vec<u64> {
        let models = 0..self.settings.models.len();
        let version = |model| worker.versions.get(&model).map_or(0, |version| version.0);
        models.map(version).collect()
    }
}
