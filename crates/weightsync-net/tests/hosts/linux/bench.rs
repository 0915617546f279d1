//! Measurements over hosts: a chain, the sender's cost of workers, and the largest number of
//! workers.

use std::process::ExitCode;
use std::time::Duration;

use serde::Serialize;

use super::messages::{Content, Sent};
use super::stage::{Actor, GIGABIT, Stage};

const MIB: usize = 1 << 20;

/// A row, as every benchmark of the project prints it.
#[derive(Serialize)]
struct Row {
    case: String,
    value: f64,
    unit: &'static str,
    baseline: f64,
    ratio: f64,
    target: Option<f64>,
    met: Option<bool>,
}

impl Row {
    /// Judged by how much more it is than the baseline.
    fn beside(case: &str, (value, unit): (f64, &'static str), baseline: f64) -> Self {
        Self {
            case: case.into(),
            value,
            unit,
            baseline,
            ratio: value / baseline,
            target: None,
            met: None,
        }
    }

    fn at_most(mut self, target: f64) -> Self {
        self.target = Some(target);
        self.met = Some(self.ratio <= target);
        self
    }

    fn print(&self, json: bool) {
        if json {
            let line = serde_json::to_string(self).expect("plain data");
            return println!("{line}");
        }
        let target = self.target.map_or(String::new(), |target| {
            let met = if self.met == Some(true) {
                "met"
            } else {
                "MISSED"
            };
            format!("≤ {:.3} {met}", target)
        });
        let value = format!("{:.2} {}", self.value, self.unit);
        let (case, baseline, ratio) = (&self.case, self.baseline, self.ratio);
        println!("{case:<58}{value:>14}  {baseline:>10.2}  {ratio:>7.3}  {target}");
    }
}

type Case = (&'static str, fn() -> Vec<Row>);

const CASES: [Case; 7] = [
    ("chain", chain),
    ("encrypted", encrypted),
    ("deltas", deltas),
    ("unlimited", unlimited),
    ("cost", cost),
    ("real", real),
    ("simulated", simulated),
];

/// Prints the rows of every case, or of those that are named.
pub(crate) fn run() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let json = arguments.iter().any(|argument| argument == "--json");
    let named: Vec<&String> = arguments
        .iter()
        .filter(|one| !one.starts_with('-'))
        .collect();
    for (name, measure) in CASES {
        if named.is_empty() || named.iter().any(|one| *one == name) {
            measure().iter().for_each(|row| row.print(json));
        }
    }
    ExitCode::SUCCESS
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn median(mut of: Vec<Duration>) -> Duration {
    of.sort();
    of[of.len() / 2]
}

fn sends(stage: &mut Stage, count: usize) -> Vec<Sent> {
    (0..count).map(|_| stage.send_everywhere()).collect()
}

/// 256 MiB to a worker on each of 1, 4 and 8 hosts, by links of 1 Gbit/s.
fn chain() -> Vec<Row> {
    const BYTES: usize = 256 * MIB;
    const SENDS: usize = 3;
    /// The share of the line rate, headers included.
    const OF_LINE: f64 = 0.93;
    let line = Duration::from_secs_f64(BYTES as f64 * 8.0 / GIGABIT as f64);
    let mut rows = Vec::new();
    let mut one = None;
    let mut stage = Stage::new(9, BYTES);
    stage.rate(0..9, GIGABIT);
    let mut there = 0;
    for hosts in [1, 4, 8] {
        for host in there + 1..=hosts {
            stage.start_relay(host);
            stage.start_workers(host, &[host as u32]);
        }
        there = hosts;
        // Slots are made and faulted in.
        sends(&mut stage, 2);
        let took = median(
            sends(&mut stage, SENDS)
                .iter()
                .map(|sent| sent.took)
                .collect(),
        );
        let s = if hosts == 1 { "" } else { "s" };
        let case = format!("256 MiB at 1 Gbit/s, {hosts} host{s}, against line rate");
        rows.push(Row::beside(&case, (ms(took), "ms"), ms(line)).at_most(1.0 / OF_LINE));
        let one = *one.get_or_insert(took);
        if hosts == 8 {
            let case = "256 MiB at 1 Gbit/s, 8 hosts over one";
            rows.push(Row::beside(case, (ms(took), "ms"), ms(one)).at_most(1.2));
        }
    }
    rows
}

/// 256 MiB to a worker of another host by a link of 1 Gbit/s, plain and encrypted in turns.
fn encrypted() -> Vec<Row> {
    const BYTES: usize = 256 * MIB;
    const ROUNDS: usize = 5;
    /// The share of the line rate, headers included.
    const OF_LINE: f64 = 0.95;
    let line = Duration::from_secs_f64(BYTES as f64 * 8.0 / GIGABIT as f64);
    let mut both = [Stage::new(2, BYTES), Stage::encrypted(2, BYTES)].map(|mut stage| {
        stage.rate(0..2, GIGABIT);
        stage.start_relay(1);
        stage.start_workers(1, &[1]);
        // Slots are made and faulted in.
        sends(&mut stage, 2);
        stage
    });
    let turns = (0..ROUNDS).map(|_| both.each_mut().map(|stage| stage.send_everywhere().took));
    let (plain, encrypted): (Vec<_>, Vec<_>) = turns.map(|[plain, other]| (plain, other)).unzip();
    let (plain, encrypted) = (median(plain), median(encrypted));
    vec![
        Row::beside(
            "256 MiB at 1 Gbit/s, encrypted, against line rate",
            (ms(encrypted), "ms"),
            ms(line),
        )
        .at_most(1.0 / OF_LINE),
        Row::beside(
            "256 MiB at 1 Gbit/s, encrypted, over plain",
            (ms(encrypted), "ms"),
            ms(plain),
        ),
    ]
}

/// One step of 1 GiB to a worker of another host over a link of 1 Gbit/s, from publish to live: the
/// time with this many changes over the time with all changed.
fn deltas() -> Vec<Row> {
    const BYTES: usize = 1 << 30;
    const SENDS: usize = 5;
    let measure = |content| {
        let mut stage = Stage::of(2, BYTES, content);
        stage.rate(0..2, GIGABIT);
        stage.start_relay(1);
        stage.start_workers(1, &[1]);
        // Slots are made and faulted in, and it is known how fast the link is.
        sends(&mut stage, 2);
        let sends = if content == DENSE { 3 } else { SENDS };
        let took = sends_of(&mut stage, sends);
        let status = stage.status();
        let model = &status.models[0];
        stage.note(&format!("{content:?}: {took:?}, {:?}", model.delta_bytes));
        (took, model.delta_bytes)
    };
    let (dense, _) = measure(DENSE);
    let mut rows = Vec::new();
    let cases = [
        (0.02, false, 1.0 / 60.0),
        (1.1, false, 1.0 / 25.0),
        (10.0, false, 1.0),
        (33.0, false, 1.03),
        (90.0, false, 1.03),
        (100.0, true, 1.03),
    ];
    for (percent, single, target) in cases {
        let (took, bytes) = measure(Content::Weights {
            percent,
            single,
            deltas: true,
        });
        let dtype = if single { "f32" } else { "bf16" };
        let bytes = bytes.map_or("dense".into(), |bytes| {
            format!("{:.1} MB", bytes as f64 / 1e6)
        });
        let case = format!("1 GiB {dtype} at 1 Gbit/s, {percent} % changed, {bytes}, over dense");
        rows.push(Row::beside(&case, (ms(took), "ms"), ms(dense)).at_most(target));
    }
    rows
}

/// One step of 512 MiB over a link that only the machine limits, where a delta pays only for few
/// changes; alternates with the same step sent whole.
fn unlimited() -> Vec<Row> {
    const BYTES: usize = 512 * MIB;
    const SENDS: usize = 9;
    let begun = |content| {
        let mut stage = Stage::of(2, BYTES, content);
        stage.start_relay(1);
        stage.start_workers(1, &[1]);
        sends(&mut stage, 3);
        stage
    };
    let cases = [
        (1.1, false, 1.0),
        (33.0, false, 1.03),
        (90.0, false, 1.03),
        (100.0, true, 1.03),
    ];
    let rows = cases.map(|(percent, single, target)| {
        let mut both = [false, true].map(|deltas| {
            begun(Content::Weights {
                percent,
                single,
                deltas,
            })
        });
        let turns = (0..SENDS).map(|_| {
            let both = both.each_mut();
            both.map(|stage| stage.send_everywhere().took)
        });
        let (whole, took): (Vec<_>, Vec<_>) = turns.map(|[whole, took]| (whole, took)).unzip();
        let dtype = if single { "f32" } else { "bf16" };
        let case = format!("512 MiB {dtype}, no limit, {percent} % changed, over dense");
        Row::beside(&case, (ms(median(took)), "ms"), ms(median(whole))).at_most(target)
    });
    rows.into()
}

/// Versions that say nothing of each other.
const DENSE: Content = Content::Words { every: 1 };

fn sends_of(stage: &mut Stage, count: usize) -> Duration {
    median(sends(stage, count).iter().map(|sent| sent.took).collect())
}

/// The sender's cost of 64 MiB to 8 hosts, with one worker each and with eight.
fn cost() -> Vec<Row> {
    const BYTES: usize = 64 * MIB;
    const HOSTS: usize = 8;
    const SENDS: usize = 15;
    let mut stage = Stage::new(HOSTS + 1, BYTES);
    stage.rate(0..=HOSTS, GIGABIT);
    let mut measured = Vec::new();
    for workers in [1, 8] {
        for host in 1..=HOSTS {
            if workers == 1 {
                stage.start_relay(host);
            }
            let from = if workers == 1 { 0 } else { 1 };
            let numbers: Vec<u32> = (from..workers).map(|one| 10 * host as u32 + one).collect();
            stage.start_workers(host, &numbers);
        }
        sends(&mut stage, 2);
        let before = settled(&mut stage);
        let sent = sends(&mut stage, SENDS);
        let served = settled(&mut stage) - before;
        let cpu = median(sent.iter().map(|sent| sent.cpu).collect());
        measured.push((served / SENDS as u64, cpu));
    }
    let [few, many] = measured[..] else {
        unreachable!("two were measured");
    };
    let mib = |bytes: u64| bytes as f64 / MIB as f64;
    vec![
        Row::beside(
            "64 MiB to 8 hosts: sent per version, 64 workers over 8",
            (mib(many.0), "MiB"),
            mib(few.0),
        )
        .at_most(1.0),
        Row::beside(
            "64 MiB to 8 hosts: the sender's CPU, 64 workers over 8",
            (ms(many.1), "ms"),
            ms(few.1),
        )
        .at_most(1.1),
    ]
}

/// Bytes that were sent, once they are counted.
fn settled(stage: &mut Stage) -> u64 {
    let mut last = None;
    let status = stage.until_status("everything is counted", |status| {
        last.replace(status.served) == Some(status.served)
    });
    status.served
}

/// 16 KiB to so many workers, compared with one: how long it takes, and what each costs the
/// sender's memory. `gather` brings them.
fn many(what: &str, hosts: usize, count: u32, gather: fn(&mut Stage)) -> Vec<Row> {
    const BYTES: usize = 16 << 10;
    const SENDS: usize = 15;
    let mut stage = Stage::new(hosts, BYTES);
    let memory = stage.memory(Actor::Trainer);
    gather(&mut stage);
    let mut sends = |count: usize| {
        let sent = (0..count).map(|_| stage.send());
        sent.inspect(|sent| {
            assert!(
                sent.failed().is_empty(),
                "not everybody has it: {:?}",
                sent.failed()
            );
        })
        .collect::<Vec<_>>()
    };
    sends(2);
    let sent = sends(SENDS);
    assert!(sent.iter().all(|sent| sent.workers.len() == count as usize));
    let took = median(sent.iter().map(|sent| sent.took).collect());
    let grown = stage.memory(Actor::Trainer).saturating_sub(memory) / u64::from(count);
    vec![
        Row::beside(
            &format!("16 KiB to {count} {what} workers: report, over 1 s"),
            (ms(took), "ms"),
            1e3,
        )
        .at_most(1.0),
        Row::beside(
            &format!("16 KiB to {count} {what} workers: memory of each, over 64 KiB"),
            (grown as f64 / 1024.0, "KiB"),
            64.0,
        )
        .at_most(1.0),
    ]
}

/// Five hundred on each of four hosts, in five processes by a relay.
fn real() -> Vec<Row> {
    many("real", 5, 2000, |stage| {
        for host in 1..=4 {
            stage.start_relay(host);
            for process in 0..5 {
                let crowd = 5 * (host - 1) + process;
                stage.start_crowd((crowd, host), 100 * crowd as u32, 100);
            }
        }
    })
}

/// A hundred agents of a hundred workers each, which are all there is of them.
fn simulated() -> Vec<Row> {
    many("simulated", 1, 10_000, |stage| stage.simulate(100, 100))
}
