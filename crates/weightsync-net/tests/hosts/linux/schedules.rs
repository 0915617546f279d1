//! Random schedules of everything that can happen; each ends with every
//! worker at the newest version, with the right bytes.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use weightsync_core::WorkerRoute;

use super::messages::Content;
use super::scale::{Dice, rounds, schedule_seed};
use super::stage::{Actor, Stage, TRAINERS, at_agents};

pub(crate) const TESTS: &[(&str, fn())] = &[(
    "every_event_order_ends_with_the_newest_everywhere",
    schedules,
)];

/// How many are asked for.
const FULL: u64 = 30;

/// Things that happen in one.
const EVENTS: u64 = 12;

/// Hosts next to the trainer's.
const HOSTS: usize = 3;

/// How long a send waits for those that cannot be reached.
const WAITS: Duration = Duration::from_secs(5);

const BYTES: usize = 9 << 20;

fn schedules() {
    let (seed, count) = (schedule_seed(), rounds(FULL, 3));
    for round in 0..count {
        // Each can be repeated alone.
        let seed = seed.wrapping_add(round);
        println!(
            "schedule {} of {count}: WEIGHTSYNC_SOAK_SEED={seed}",
            round + 1
        );
        let mut schedule = Schedule::new(seed);
        for _ in 0..EVENTS {
            schedule.go_on();
        }
        schedule.end();
    }
}

struct Schedule {
    stage: Stage,
    dice: Dice,
    /// Hosts that are cut off.
    apart: BTreeSet<usize>,
    /// Processes that were killed and not started again, with their hosts.
    dead: Vec<(Actor, usize)>,
    workers: u32,
}

impl Schedule {
    fn new(seed: u64) -> Self {
        let mut dice = Dice::new(seed);
        // Every second one is of versions that differ in little.
        let every = [1, 50][dice.below(2) as usize];
        let mut stage = Stage::of(1 + HOSTS, BYTES, Content::Words { every });
        let (mut relays, mut workers) = (BTreeSet::new(), 0);
        for host in 1..=HOSTS {
            if dice.below(3) > 0 {
                stage.start_relay(host);
                relays.insert(host);
            }
            let count = 1 + dice.below(2) as u32;
            let new: Vec<u32> = (workers..workers + count).collect();
            stage.start_workers(host, &new);
            workers += count;
        }
        stage.note(&format!(
            "{workers} workers, relays on {relays:?}, one element in {every} changes"
        ));
        Self {
            stage,
            dice,
            apart: BTreeSet::new(),
            dead: Vec::new(),
            workers,
        }
    }

    fn go_on(&mut self) {
        match self.dice.below(10) {
            0..=2 => self.publish(),
            3 => self.send(),
            4..=5 => self.kill(),
            6 => self.start_again(),
            7 => self.cut(),
            8 => self.restore(),
            _ => self.change_rate(),
        }
        // Sometimes at once, sometimes in the middle of what the last one began.
        let pause = Duration::from_millis(self.dice.below(400));
        self.stage.listen(Instant::now() + pause);
    }

    fn publish(&mut self) {
        if self.has_trainer() {
            let word = self.stage.publish();
            self.stage.note(&format!("version {word} is published"));
        }
    }

    /// Begins a send whose report comes while other things happen.
    fn send(&mut self) {
        if self.has_trainer() {
            let word = self.stage.begin_send_within(WAITS);
            self.stage.note(&format!("version {word} is sent"));
        }
    }

    fn kill(&mut self) {
        let processes = self.stage.processes();
        let (who, host) = *self.dice.pick(&processes);
        // Other hosts may depend on this process now.
        self.stage.kill(who);
        self.stage.note(&format!("{who} is killed"));
        self.dead.push((who, host));
    }

    fn start_again(&mut self) {
        if self.dead.is_empty() {
            // A host that may be late, then.
            let host = 1 + self.dice.below(HOSTS as u64) as usize;
            let worker = self.workers;
            self.workers += 1;
            self.stage.begin_worker(worker, host);
            self.stage
                .note(&format!("worker {worker} begins on {host}"));
            return;
        }
        let at = self.dice.below(self.dead.len() as u64) as usize;
        let (who, host) = self.dead.swap_remove(at);
        self.start(who, host);
    }

    fn start(&mut self, who: Actor, host: usize) {
        self.stage.note(&format!("{who} begins again"));
        match who {
            Actor::Trainer => self.stage.start_trainer(),
            Actor::Relay(host) => self.stage.begin_relay(host),
            Actor::Worker(worker) => self.stage.begin_worker(worker, host),
            Actor::Crowd(_) | Actor::Attacker(_) => unreachable!("there are none here"),
        }
    }

    fn cut(&mut self) {
        let host = self.dice.below(1 + HOSTS as u64) as usize;
        let silent = self.dice.below(2) == 0;
        let hosts = &self.stage.hosts;
        let done = match silent {
            true => hosts.silence(host),
            false => hosts.cut(host),
        };
        done.unwrap_or_else(|error| panic!("{error}"));
        self.apart.insert(host);
        self.stage
            .note(&format!("host {host} is apart (silent: {silent})"));
    }

    fn restore(&mut self) {
        let Some(host) = self.apart.pop_first() else {
            return;
        };
        let done = self.stage.hosts.restore(host);
        done.unwrap_or_else(|error| panic!("{error}"));
        self.stage.note(&format!("host {host} is back"));
    }

    fn change_rate(&mut self) {
        let host = self.dice.below(1 + HOSTS as u64) as usize;
        let megabits = *self.dice.pick(&[20, 100, 1000]);
        self.stage.rate([host], megabits * 1_000_000);
        self.stage
            .note(&format!("host {host} has {megabits} Mbit/s"));
    }

    /// Everything is there again; one more version, and everybody has it.
    fn end(mut self) {
        while !self.apart.is_empty() {
            self.restore();
        }
        self.stage.rate(TRAINERS..=HOSTS, 1_000_000_000);
        // The trainer first: what waits for others waits for it.
        self.dead.sort_by_key(|(who, _)| *who);
        for (who, host) in std::mem::take(&mut self.dead) {
            self.start(who, host);
        }
        let word = self.stage.publish();
        let took = {
            let begun = Instant::now();
            self.stage.until_all_newest();
            begun.elapsed()
        };
        let count = self.stage.workers().count();
        self.stage.note(&format!(
            "version {word} is at {count} workers after {took:?}"
        ));
        self.stage.until_status("everybody is reached", |status| {
            let unreached = status.workers_by(WorkerRoute::Unreached).next();
            at_agents(status) == count && unreached.is_none()
        });
        self.stage.send_everywhere();
    }

    fn has_trainer(&self) -> bool {
        !self.dead.iter().any(|(who, _)| *who == Actor::Trainer)
    }
}
