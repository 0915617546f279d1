//! `weightsync status`: the sender, every relay and every worker, as a tree.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;
use std::{error::Error, fmt::Write};

use weightsync_core::{LastSend, RelayStatus, SenderStatus, Version, WorkerRoute, WorkerStatus};
use weightsync_engine::status_of_run_dir;
use weightsync_net::Distributed;
use weightsync_store::{Store, status_of_store};

use super::SenderArgs;
use crate::SUCCESS;
use crate::output::print;
use crate::words::{bytes, counted, shown};

/// Asks, and shows the answer.
pub fn run(args: &SenderArgs) -> Result<u8, Box<dyn Error>> {
    let all = ask(args)?;
    print(&match (args.json, &all[..]) {
        // One sender is an object, and not a list of one.
        (true, [one]) => serde_json::to_string_pretty(one)? + "\n",
        (true, all) => serde_json::to_string_pretty(all)? + "\n",
        (false, all) => all.iter().map(text).collect::<Vec<_>>().join("\n"),
    })?;
    Ok(SUCCESS)
}

/// The senders that the arguments name: one, or each of a run directory.
fn ask(args: &SenderArgs) -> Result<Vec<SenderStatus>, Box<dyn Error>> {
    let timeout = args.timeout().unwrap_or(Duration::MAX);
    // What was named can be an init info, a store, a directory or an address. Files and directories
    // are tried first.
    let endpoint = match (args.info()?, &args.sender) {
        // A network has options of its own, which are in the arguments.
        (Some(info), _) if Distributed::endpoint_of(&info).is_ok() => args.endpoint_of(&info)?,
        (Some(info), _) => return Ok(vec![info.status(timeout)?]),
        (None, Some(given)) if let Some(address) = given.strip_prefix("store:") => {
            return Ok(vec![status_of_store(&Store::open(address)?)?]);
        }
        // A directory can be a store or a run directory. A store has a head.
        (None, Some(given)) if Path::new(given).is_dir() => {
            let store = Store::open(given)?;
            return Ok(match store.head()? {
                Some(_) => vec![status_of_store(&store)?],
                None => status_of_run_dir(Path::new(given), timeout)?,
            });
        }
        (None, _) => args.endpoint()?,
    };
    let (address, secret, tls) = endpoint;
    let asked = weightsync_net::status::ask(&address, &secret, tls.as_ref(), args.timeout())?;
    Ok(vec![asked])
}

/// The tree, for people to read.
fn text(status: &SenderStatus) -> String {
    let newest: Vec<_> = status.models.iter().map(|model| model.version).collect();
    let mut text = String::new();
    let _ = writeln!(text, "{}  {}", shown(&status.run), models(status));
    if let Some(last) = &status.last_send {
        let _ = writeln!(
            text,
            "{}, {}",
            counted(status.sends as usize, "send"),
            sent(last)
        );
    }
    let _ = writeln!(text, "{}", counts(status));
    let sender = match status.pid {
        0 => "no sender is there now".into(),
        pid => format!("sender {} (pid {pid})", shown(&status.address)),
    };
    let _ = writeln!(text, "{sender}");
    let (mut tree, unreached) = RelayTree::of(status, &newest);
    tree.branches(&mut text, "", 0);
    // Nothing of it is hidden, although it is in no tree.
    while let Some(agent) = tree.first() {
        let _ = writeln!(text, "agent {agent}, which is not in this list");
        tree.branches(&mut text, "", agent);
    }
    for worker in unreached {
        let _ = writeln!(text, "not reached a moment ago: {}", tree.worker(worker));
    }
    let left_out = status.left_out;
    if (left_out.relays, left_out.workers) != (0, 0) {
        let _ = writeln!(
            text,
            "{} and {} more not listed: the answer was full",
            counted(left_out.relays, "relay"),
            counted(left_out.workers, "worker"),
        );
    }
    text
}

/// The models, and how much of each the newest version changed.
fn models(status: &SenderStatus) -> String {
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
            format!("{} {}{changed}", shown(model.name.as_str()), model.version)
        })
        .collect();
    models.join(", ")
}

/// How many relays and workers there are, and how much was sent to other hosts.
fn counts(status: &SenderStatus) -> String {
    // Workers that are gone are in the list, but not in the count.
    let there = status.workers.iter().filter(|worker| worker.gone.is_none());
    let workers = counted(there.count(), "worker");
    let relays = status.relays.iter().filter(|one| one.serves).count();
    match (status.relays.len(), status.served) {
        (0, 0) => workers,
        _ => format!(
            "{}, {workers}, {} sent in {}",
            counted(relays, "relay"),
            bytes(status.served),
            seconds(status.up_seconds),
        ),
    }
}

/// The last send, as words.
fn sent(last: &LastSend) -> String {
    let took = last.took.map_or_else(
        || "has no report yet".into(),
        |took| format!("took {took:.1?}"),
    );
    format!(
        "the last of {} {took}, {} ago",
        bytes(last.bytes),
        seconds(last.ago.as_secs_f64())
    )
}

struct RelayTree<'a> {
    /// Agents that are not shown yet, by the agent from which they fetch.
    below: BTreeMap<u64, Vec<&'a RelayStatus>>,
    /// Workers that are not shown yet, by their agent.
    workers: BTreeMap<u64, Vec<&'a WorkerStatus>>,
    newest: &'a [Version],
}

impl<'a> RelayTree<'a> {
    /// The relays and the workers of a sender, and the workers that it does not reach.
    fn of(status: &'a SenderStatus, newest: &'a [Version]) -> (Self, Vec<&'a WorkerStatus>) {
        let mut tree = Self {
            below: BTreeMap::new(),
            workers: BTreeMap::new(),
            newest,
        };
        let mut unreached = Vec::new();
        for relay in &status.relays {
            // Relays by their parent, so the tree can be walked from the sender, which is agent 0.
            tree.below.entry(relay.parent).or_default().push(relay);
        }
        for worker in &status.workers {
            match worker.route {
                // These workers have no relay between, so they hang on the sender.
                WorkerRoute::Memory | WorkerRoute::Http | WorkerRoute::Store => {
                    tree.worker_at(0, worker)
                }
                WorkerRoute::Agent(agent) => tree.worker_at(agent, worker),
                WorkerRoute::Unreached => unreached.push(worker),
            }
        }
        (tree, unreached)
    }
    fn worker_at(&mut self, agent: u64, worker: &'a WorkerStatus) {
        self.workers.entry(agent).or_default().push(worker);
    }

    /// An agent that is not shown, and has something below it that is not shown.
    fn first(&self) -> Option<u64> {
        let agents = self.below.keys().chain(self.workers.keys());
        agents.min().copied()
    }

    /// The workers of an agent, then the relays that fetch from it.
    fn branches(&mut self, text: &mut String, indent: &str, agent: u64) {
        // Taken out, so nothing is shown twice, and a circle of parents ends.
        let relays = self.below.remove(&agent).unwrap_or_default();
        let workers = self.workers.remove(&agent).unwrap_or_default();
        let all = workers.len() + relays.len();
        for (at, worker) in workers.iter().enumerate() {
            let (branch, _) = fork(at + 1 == all);
            let _ = writeln!(text, "{indent}{branch}{}", self.worker(worker));
        }
        for (at, relay) in relays.iter().enumerate() {
            let (branch, rest) = fork(workers.len() + at + 1 == all);
            let _ = writeln!(text, "{indent}{branch}{}", self.relay(relay));
            let indent = format!("{indent}{rest}");
            self.branches(text, &indent, relay.agent);
        }
    }

    fn worker(&self, worker: &WorkerStatus) -> String {
        let host = match (worker.route, &worker.host[..]) {
            // The tree has its host.
            (WorkerRoute::Agent(_), _) | (_, "") => String::new(),
            (_, host) => format!(", on {}", shown(host)),
        };
        let held = if worker.held { ", held" } else { "" };
        let state = match (&worker.gone, &worker.last) {
            (Some(gone), _) => outcome(gone.as_str(), gone.reason()),
            (None, Some(last)) if last.outcome.reason().is_none() => {
                format!(", {} after {:.1?}", last.outcome.as_str(), last.after)
            }
            (None, Some(last)) => outcome(last.outcome.as_str(), last.outcome.reason()),
            (None, None) => String::new(),
        };
        format!(
            "worker {} (pid {}, {}{host})  {}{held}{state}",
            worker.worker.0,
            worker.pid,
            shown(&worker.device),
            self.versions(&worker.versions),
        )
    }

    fn relay(&self, relay: &RelayStatus) -> String {
        let speed = relay
            .bytes_per_second
            .map(|speed| format!(", {}/s", bytes(speed as u64)));
        let altered = match relay.altered_for {
            0 => String::new(),
            agents => format!(", ALTERED weights for {}", counted(agents, "host")),
        };
        // What a relay holds of each model: the newest counts.
        let mut held = vec![Version::NONE; self.newest.len()];
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
    fn versions(&self, versions: &[Version]) -> String {
        let pairs = versions.iter().zip(self.newest);
        let shown: Vec<_> = pairs
            // A model that a worker has never had is left out.
            .filter(|(version, _)| !version.is_none())
            .map(
                |(version, newest)| match newest.0.saturating_sub(version.0) {
                    0 => format!("{version}"),
                    lag => format!("{version} ({lag} behind)"),
                },
            )
            .collect();
        match shown.is_empty() {
            true => "nothing yet".into(),
            false => shown.join(", "),
        }
    }
}

fn outcome(word: &str, reason: Option<&str>) -> String {
    match reason {
        None => format!(", {word}"),
        Some(reason) => format!(", {word}: {}", shown(reason)),
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
    use weightsync_core::{LastOutcome, ModelId, ModelStatus, Omitted, Outcome, WorkerId};

    use super::*;

    fn worker(number: u32, version: u64, route: WorkerRoute) -> WorkerStatus {
        let mut worker = WorkerStatus::new(WorkerId(number), 100 + number, 1);
        worker.versions = vec![Version(version)];
        worker.route = route;
        worker
    }

    fn relay(agent: u64, parent: u64) -> RelayStatus {
        RelayStatus {
            agent,
            serves: true,
            parent,
            name: format!("host-{agent}\u{1b}[2J"),
            address: "10.0.0.1".into(),
            pid: 7,
            received: 3 << 20,
            altered_for: 0,
            bytes_per_second: (agent == 1).then_some(125e6),
            holds: vec![(0, Version(7)), (0, Version(10 - agent))],
        }
    }

    #[test]
    fn everybody_is_in_the_tree_with_what_they_run() {
        let mut status = SenderStatus::default();
        status.address = "10.0.0.9:7070".into();
        status.pid = 42;
        status.run = "epoch 3".into();
        status.up_seconds = 90.0;
        status.models = vec![ModelStatus {
            name: ModelId::new("policy").unwrap(),
            version: Version(9),
            bytes: 1 << 30,
            changed: Some(0.0111),
            delta_bytes: Some(8 << 20),
        }];
        status.served = 1 << 30;
        status.sends = 9;
        status.last_send = Some(LastSend {
            versions: Vec::new(),
            bytes: 1 << 30,
            copied: Duration::from_millis(100),
            took: Some(Duration::from_millis(250)),
            ago: Duration::from_secs(2),
        });
        status.relays = vec![
            relay(1, 0),
            relay(2, 1),
            RelayStatus {
                serves: false,
                holds: Vec::new(),
                altered_for: 1,
                ..relay(3, 0)
            },
        ];
        let mut applied = worker(0, 9, WorkerRoute::Memory);
        applied.last = Some(LastOutcome {
            outcome: Outcome::Applied,
            after: Duration::from_micros(1500),
            ago: Duration::from_secs(2),
        });
        let mut refused = worker(2, 7, WorkerRoute::Agent(1));
        refused.last = Some(LastOutcome {
            outcome: Outcome::Refused {
                reason: "no room".into(),
            },
            after: Duration::ZERO,
            ago: Duration::ZERO,
        });
        let mut died = worker(3, 0, WorkerRoute::Agent(2));
        died.gone = Some(Outcome::Died);
        let mut held = worker(5, 8, WorkerRoute::Agent(3));
        held.held = true;
        status.workers = vec![
            applied,
            worker(1, 9, WorkerRoute::Agent(1)),
            refused,
            died,
            worker(4, 9, WorkerRoute::Unreached),
            held,
        ];
        let expected = "\
epoch 3  policy v9 (1.11 % changed, 8.0 MiB for 1.0 GiB)
9 sends, the last of 1.0 GiB took 250.0ms, 2.0 s ago
2 relays, 5 workers, 1.0 GiB sent in 1.5 min
sender 10.0.0.9:7070 (pid 42)
├─ worker 0 (pid 100, cpu)  v9, applied after 1.5ms
├─ relay 1 on host-1?[2J (10.0.0.1, pid 7)  v9, 3.0 MiB fetched, 119.2 MiB/s
│  ├─ worker 1 (pid 101, cpu)  v9
│  ├─ worker 2 (pid 102, cpu)  v7 (2 behind), refused: no room
│  └─ relay 2 on host-2?[2J (10.0.0.1, pid 7)  v8 (1 behind), 3.0 MiB fetched
│     └─ worker 3 (pid 103, cpu)  nothing yet, died
└─ agent 3 on host-3?[2J (10.0.0.1, pid 7)  nothing yet, 3.0 MiB fetched, ALTERED weights for 1 host
   └─ worker 5 (pid 105, cpu)  v8 (1 behind), held
not reached a moment ago: worker 4 (pid 104, cpu)  v9
";
        assert_eq!(text(&status), expected);
    }

    #[test]
    fn status_shows_treeless_hosts_and_counts_the_omitted() {
        let mut status = SenderStatus::default();
        status.pid = 42;
        // Its own parent, one of a parent that is not there, and two in a circle.
        status.relays = [(0, 0), (2, 7), (3, 4), (4, 3)]
            .map(|(agent, parent)| relay(agent, parent))
            .into();
        status.workers = vec![worker(1, 1, WorkerRoute::Agent(9))];
        status.left_out = Omitted {
            relays: 2,
            workers: 5,
        };
        let text = text(&status);
        for agent in [0, 2, 3, 4] {
            let name = format!("relay {agent} on");
            assert_eq!(text.matches(&name).count(), 1, "{name}: {text}");
        }
        assert!(text.contains("agent 7, which"), "{text}");
        assert!(text.contains("agent 9, which"), "{text}");
        assert!(text.contains("2 relays and 5 workers more"), "{text}");
    }
}
