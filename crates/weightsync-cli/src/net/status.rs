//! `weightsync status`: the sender, every relay and every worker, as a tree.

use std::{collections::BTreeMap, error::Error, fmt::Write, process::ExitCode, time::Duration};

use weightsync_net::status::{Relay, Status, Worker};

use super::{Key, Way, address};

/// What `status` is asked for.
#[derive(clap::Args)]
pub struct Args {
    /// The sender, as HOST:PORT
    #[arg(value_name = "HOST:PORT", required_unless_present = "info")]
    sender: Option<String>,
    #[command(flatten)]
    key: Key,
    /// As JSON
    #[arg(long)]
    json: bool,
    /// Use links that leave this machine, although they are not encrypted
    #[arg(long)]
    insecure_plaintext: bool,
    /// Seconds until it is given up
    #[arg(long, default_value_t = 5)]
    timeout: u64,
}

/// Asks, and shows the answer.
pub fn run(args: &Args) -> Result<ExitCode, Box<dyn Error>> {
    let (address, secret) = match args.key.way()? {
        Way::Token(token) => (address(args.sender.as_deref())?, token.secret()),
        Way::Info(info) => {
            let at = info.endpoint();
            (at.address().to_owned(), *at.secret())
        }
    };
    let mut access = weightsync_net::Access::from_env()?;
    access.insecure_plaintext |= args.insecure_plaintext;
    use std::net::ToSocketAddrs;
    for one in address.to_socket_addrs().into_iter().flatten() {
        access.may_dial_with_secret(one)?;
    }
    let status = Status::ask(&address, &secret, Duration::from_secs(args.timeout.max(1)))?;
    match args.json {
        true => println!("{}", serde_json::to_string_pretty(&status)?),
        false => print!("{}", text(&status)),
    }
    Ok(ExitCode::SUCCESS)
}

/// The tree, for people to read.
fn text(status: &Status) -> String {
    let newest: Vec<u64> = status.models.iter().map(|model| model.version).collect();
    let mut text = String::new();
    let models: Vec<_> = status
        .models
        .iter()
        .map(|model| format!("{} v{}", shown(&model.name), model.version))
        .collect();
    let workers = status.local.len()
        + status
            .relays
            .iter()
            .map(|one| one.workers.len())
            .sum::<usize>();
    let _ = writeln!(text, "{}  {}", shown(&status.run), models.join(", "));
    let _ = writeln!(
        text,
        "{} relays, {workers} workers, {} sent in {}",
        status.relays.len(),
        bytes(status.served),
        seconds(status.up_seconds),
    );
    let _ = writeln!(
        text,
        "sender {} (pid {})",
        shown(&status.address),
        status.pid
    );
    let mut below: BTreeMap<u64, Vec<&Relay>> = BTreeMap::new();
    for relay in &status.relays {
        below.entry(relay.parent).or_default().push(relay);
    }
    let tree = Tree {
        below: &below,
        newest: &newest,
    };
    tree.branches(&mut text, "", 0, &status.local);
    for worker in &status.lost {
        let _ = writeln!(text, "worker {worker} was not reached a moment ago");
    }
    text
}

struct Tree<'a> {
    below: &'a BTreeMap<u64, Vec<&'a Relay>>,
    newest: &'a [u64],
}

impl Tree<'_> {
    /// The workers of an agent, then the relays that fetch from it.
    fn branches(&self, text: &mut String, indent: &str, agent: u64, workers: &[Worker]) {
        let relays = self.below.get(&agent).map_or(&[][..], |relays| relays);
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
        format!(
            "relay {} on {} ({}, pid {})  {} fetched{}",
            relay.agent,
            shown(&relay.name),
            shown(&relay.address),
            relay.pid,
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

/// Words of others, without what would move a terminal's cursor.
fn shown(text: &str) -> String {
    text.chars()
        .map(|one| if one.is_control() { '?' } else { one })
        .collect()
}

fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    match unit {
        0 => format!("{bytes} B"),
        _ => format!("{value:.1} {}", UNITS[unit]),
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
            parent,
            name: format!("host-{agent}\u{1b}[2J"),
            address: "10.0.0.1".into(),
            pid: 7,
            received: 3 << 20,
            bytes_per_second: (agent == 1).then_some(125e6),
            holds: Vec::new(),
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
            }],
            served: 1 << 30,
            local: vec![worker(0, 9)],
            relays: vec![
                relay(1, 0, vec![worker(1, 9), worker(2, 7)]),
                relay(2, 1, vec![worker(3, 0)]),
            ],
            lost: vec![4],
        };
        let expected = "\
epoch 3  policy v9
2 relays, 4 workers, 1.0 GiB sent in 1.5 min
sender 10.0.0.9:7070 (pid 42)
├─ worker 0 (pid 100, cpu)  v9
└─ relay 1 on host-1?[2J (10.0.0.1, pid 7)  3.0 MiB fetched, 119.2 MiB/s
   ├─ worker 1 (pid 101, cpu)  v9
   ├─ worker 2 (pid 102, cpu)  v7 (2 behind)
   └─ relay 2 on host-2?[2J (10.0.0.1, pid 7)  3.0 MiB fetched
      └─ worker 3 (pid 103, cpu)  nothing yet
worker 4 was not reached a moment ago
";
        assert_eq!(text(&status), expected);
    }
}
