//! How things are, for who asks.

use super::Hub;
use super::workers::Worker;
use crate::root::topology::AgentId;
use crate::status;

impl Hub {
    pub(super) fn status(&self) -> String {
        let models = self.settings.models.iter().enumerate();
        let models = models.map(|(index, name)| status::Model {
            name: name.clone(),
            version: self.guests.version(index).0,
        });
        let workers = |agent: AgentId| {
            let all = self.seats.iter();
            let mine = all.filter(|(_, _, by, _)| *by == Some(agent));
            let workers = mine.map(|(worker, process, _, of)| status::Worker {
                worker: worker.0,
                pid: process.pid,
                device: of.device.clone(),
                versions: self.versions(of),
            });
            workers.collect::<Vec<_>>()
        };
        let relays = self.topology.parents().filter_map(|(agent, parent)| {
            let one = self.agents.get(&agent)?;
            let known = one.known.as_ref()?;
            Some(status::Relay {
                agent,
                parent: parent.unwrap_or(0),
                name: known.name.clone(),
                address: one.from.ip().to_string(),
                pid: known.process.pid,
                received: one.received,
                bytes_per_second: self.topology.speed(agent),
                holds: known
                    .holds
                    .iter()
                    .map(|held| (held.model, held.version.0))
                    .collect(),
                workers: workers(agent),
            })
        });
        let local = self
            .guests
            .local()
            .into_iter()
            .map(|reader| status::Worker {
                worker: reader.worker.0,
                pid: reader.pid,
                device: reader.device,
                versions: reader.applied.iter().map(|version| version.0).collect(),
            });
        let run = self.guests.run();
        status::Status {
            address: self.settings.address.clone(),
            pid: std::process::id(),
            run: run.to_string(),
            up_seconds: self.since.elapsed().as_secs_f64(),
            models: models.collect(),
            served: self.served,
            local: local.collect(),
            relays: relays.collect(),
            lost: self
                .seats
                .iter()
                .filter(|(_, _, by, _)| by.is_none())
                .map(|(worker, ..)| worker.0)
                .collect(),
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
