//! `weightsync status`: the sender, every relay and every worker, as a tree.

use std::collections::BTreeMap;
use std::{error::Error, fmt::Write};

use weightsync_net::status::{Omitted, Relay, Status, Worker};

use super::Asked;
use crate::SUCCESS;
use crate::output::print;
use crate::words::{bytes, counted, shown};

/// Asks, and shows the answer.
pub fn run(args: &Asked) -> Result<u8, Box<dyn Error>> {
    let (address, secret, tls) = args.endpoint()?;
    let status = Status::ask(&address, &secret, tls.as_ref(), args.timeout())?;
    print(&match args.json {
        true => serde_json::to_string_pretty(&status)? + "\n",
        false => text(&status),
    })?;
    Ok(SUCCESS)
}

/// The tree, for people to read.
fn text(status: &Status) -> String {
    let newest: Vec<u64> = status.models.iter().map(|model| model.version).collect();
    let mut text = String::new();
    let models: Vec<_> = status
        .models
        .iter()
        .map(|model| {
            let changed = match (model.changed, model.delta_bytes) {
                (Some(share), Some(delta)) => format!(
                    " ({:.2} % changed, {} for {})",
                    100.0 * share,
                    bytes(delta),
                    bytes(model.bytes)
                ),
                _ => String::new(),
            };
            format!("{} v{}{changed}", shown(&model.name), model.version)
        })
        .collect();
    let workers = status.local.len()
        + status
            .relays
            .iter()
            .map(|one| one.workers.len())
            .sum::<usize>();
    let _ = writeln!(text, "{}  {}", shown(&status.run), models.join(", "));
    let relays = status.relays.iter().filter(|one| one.serves).count();
    let _ = writeln!(
        text,
        "{}, {}, {} sent in {}",
        counted(relays, "relay"),
        counted(workers, "worker"),
        bytes(status.served),
        seconds(status.up_seconds),
    );
    let _ = writeln!(
        text,
        "sender {} (pid {})",
        shown(&status.address),
        status.pid
    );
    let mut tree = Tree {
        below: BTreeMap::new(),
        newest: &newest,
    };
    for relay in &status.relays {
        tree.below.entry(relay.parent).or_default().push(relay);
    }
    tree.branches(&mut text, "", 0, &status.local);
    // Nothing of it is hidden, although it is in no tree.
    while let Some((&parent, _)) = tree.below.first_key_value() {
        let _ = writeln!(text, "agent {parent}, which is not in this list");
        tree.branches(&mut text, "", parent, &[]);
    }
    for worker in &status.lost {
        let _ = writeln!(text, "worker {worker} was not reached a moment ago");
    }
    let left_out = status.left_out;
    if left_out != Omitted::default() {
        let Omitted { relays, workers } = left_out;
        let _ = writeln!(
            text,
            "{} and {} more not listed: the answer was full",
            counted(relays, "relay"),
            counted(workers, "worker"),
        );
    }
    text
}

struct Tree<'a> {
    /// Those not shown yet, by from whom they fetch.
    below: BTreeMap<u64, Vec<&'a Relay>>,
    newest: &'a [u64],
}

impl Tree<'_> {
    /// The workers of an agent, then the relays that fetch from it.
    fn branches(&mut self, text: &mut String, indent: &str, agent: u64, workers: &[Worker]) {
        let relays = self.below.remove(&agent).unwrap_or_default();
        let all = workers.len() + relays.len();
        for (at, worker) in workers.iter().enumerate() {
            let (branch, _) = fork(at + 1 == all);
            let _ = writeln!(text, "{indent}{branch}{}", self.worker(worker));
        }
        for (at, relay) in relays.iter().enumerate() {
            let (branch, rest) = fork(workers.len() + at + 1 == all);
            let _ = writeln!(text, "{indent}{branch}{}", self.relay(relay));
            let indent = format!("{indent}{rest}");
            self.branches(text, &indent, relay.agent, &relay.workers);
        }
    }

    fn worker(&self, worker: &Worker) -> String {
        format!(
            "worker {} (pid {}, {})  {}",
            worker.worker,
            worker.pid,
            shown(&worker.device),
            self.versions(&worker.versions),
        )
    }

    fn relay(&self, relay: &Relay) -> String {
        let speed = relay
            .bytes_per_second
            .map(|speed| format!(", {}/s", bytes(speed as u64)));
        let altered = match relay.altered_for {
            0 => String::new(),
            agents => format!(", ALTERED weights for {}", counted(agents, "host")),
        };
        let mut held = vec![0; self.newest.len()];
        for (model, version) in &relay.holds {
            if let Some(newest) = held.get_mut(usize::from(*model)) {
                *newest = (*version).max(*newest);
            }
        }
        format!(
            "{} {} on {} ({}, pid {})  {}, {} fetched{}{altered}",
            if relay.serves { "relay" } else { "agent" },
            relay.agent,
            shown(&relay.name),
            shown(&relay.address),
            relay.pid,
            self.versions(&held),
            bytes(relay.received),
            speed.unwrap_or_default(),
        )
    }

    /// The versions, and how far behind the newest they are.
    fn versions(&self, versions: &[u64]) -> String {
        let pairs = versions.iter().zip(self.newest);
        let shown: Vec<_> = pairs
            .filter(|(version, _)| **version > 0)
            .map(|(version, newest)| match newest.saturating_sub(*version) {
                0 => format!("v{version}"),
                lag => format!("v{version} ({lag} behind)"),
            })
            .collect();
        match shown.is_empty() {
            true => "nothing yet".into(),
            false => shown.join(", "),
        }
    }
}

fn fork(last: bool) -> (&'static str, &'static str) {
    match last {
        true => ("└─ ", "   "),
        false => ("├─ ", "│  "),
    }
}

fn seconds(seconds: f64) -> String {
    match seconds {
        ..60.0 => format!("{seconds:.1} s"),
        60.0..3600.0 => format!("{:.1} min", seconds / 60.0),
        _ => format!("{:.1} h", seconds / 3600.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weightsync_net::status::Model;

    fn worker(number: u32, version: u64) -> Worker {
        Worker {
            worker: number,
            pid: 100 + number,
            device: "cpu".into(),
            versions: vec![version],
        }
    }

    fn relay(agent: u64, parent: u64, workers: Vec<Worker>) -> Relay {
        Relay {
            agent,
            serves: true,
            parent,
            name: format!("host-{agent}\u{1b}[2J"),
            address: "10.0.0.1".into(),
            pid: 7,
            received: 3 << 20,
            altered_for: 0,
            bytes_per_second: (agent == 1).then_some(125e6),
            holds: vec![(0, 7), (0, 10 - agent)],
            workers,
        }
    }

    #[test]
    fn everybody_is_in_the_tree_with_what_they_run() {
        let status = Status {
            address: "10.0.0.9:7070".into(),
            pid: 42,
            run: "epoch 3".into(),
            up_seconds: 90.0,
            models: vec![Model {
                name: "policy".into(),
                version: 9,
                bytes: 1 << 30,
                changed: Some(0.0111),
                delta_bytes: Some(8 << 20),
            }],
            served: 1 << 30,
            local: vec![worker(0, 9)],
            relays: vec![
                relay(1, 0, vec![worker(1, 9), worker(2, 7)]),
                relay(2, 1, vec![worker(3, 0)]),
                Relay {
                    serves: false,
                    holds: Vec::new(),
                    altered_for: 1,
                    ..relay(3, 0, vec![worker(5, 8)])
                },
            ],
            lost: vec![4],
            left_out: Omitted::default(),
        };
        let expected = "\
epoch 3  policy v9 (1.11 % changed, 8.0 MiB for 1.0 GiB)
2 relays, 5 workers, 1.0 GiB sent in 1.5 min
sender 10.0.0.9:7070 (pid 42)
├─ worker 0 (pid 100, cpu)  v9
├─ relay 1 on host-1?[2J (10.0.0.1, pid 7)  v9, 3.0 MiB fetched, 119.2 MiB/s
│  ├─ worker 1 (pid 101, cpu)  v9
│  ├─ worker 2 (pid 102, cpu)  v7 (2 behind)
│  └─ relay 2 on host-2?[2J (10.0.0.1, pid 7)  v8 (1 behind), 3.0 MiB fetched
│     └─ worker 3 (pid 103, cpu)  nothing yet
└─ agent 3 on host-3?[2J (10.0.0.1, pid 7)  nothing yet, 3.0 MiB fetched, ALTERED weights for 1 host
   └─ worker 5 (pid 105, cpu)  v8 (1 behind)
worker 4 was not reached a moment ago
";
        assert_eq!(text(&status), expected);
    }

    #[test]
    fn status_shows_treeless_hosts_and_counts_the_omitted() {
        let status = Status {
            address: "10.0.0.9:7070".into(),
            pid: 42,
            run: "epoch 3".into(),
            up_seconds: 1.0,
            models: Vec::new(),
            served: 0,
            local: Vec::new(),
            // Its own parent, one of a parent that is not there, and two in a circle.
            relays: [(0, 0), (2, 7), (3, 4), (4, 3)]
                .map(|(agent, parent)| relay(agent, parent, Vec::new()))
                .into(),
            lost: Vec::new(),
            left_out: Omitted {
                relays: 2,
                workers: 5,
            },
        };
        let text = text(&status);
        for agent in [0, 2, 3, 4] {
            let name = format!("relay {agent} on");
            assert_eq!(text.matches(&name).count(), 1, "{name}: {text}");
        }
        assert!(text.contains("agent 7, which"), "{text}");
        assert!(text.contains("2 relays and 5 workers more"), "{text}");
    }
}
