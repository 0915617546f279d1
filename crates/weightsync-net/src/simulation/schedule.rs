//! Random schedules: which machines are there when, what breaks, and what is published.

use std::collections::BTreeMap;

use weightsync_core::WorkerId;
use weightsync_mem::{Delivery, WorkerInstance};

use super::bulk::BLOCK_BYTES;
use super::clock::{Clock, Dice, MS, SECOND, Time};
use super::network::{Health, Network, Node};
use super::rules::{Counts, Facts};
use super::sender::Sender;
use super::{Event, Host, Worker, World};

/// Bytes a second of 1 Gbit/s.
pub(super) const FAST: u64 = 125_000_000;
/// Bytes a second of 1 Mbit/s.
pub(super) const SLOW: u64 = 125_000;

/// With more events than this, a schedule runs in circles.
const ENDLESS: u64 = 400_000;

/// The constants of a schedule.
#[derive(Clone, Debug)]
pub(super) struct Options {
    pub(super) arity: usize,
    /// The speed of each machine's link, in bytes a second.
    pub(super) rates: Vec<u64>,
    /// How often there is no room, in percent.
    pub(super) no_room: u64,
    /// Whether some workers take every version.
    pub(super) every: bool,
    /// Whether anything breaks.
    pub(super) faults: bool,
    /// Whether some machines never reach each other, as behind a firewall.
    pub(super) apart: bool,
    /// How often versions come faster than some machines can take them, in percent.
    pub(super) bursts: u64,
    pub(super) trace: bool,
    /// How many versions are published once everything is well.
    pub(super) last: u32,
}

/// An operation of a schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Op {
    Publish {
        models: u64,
    },
    /// A machine's agent starts, with its present workers.
    Start {
        node: Node,
    },
    EndAgent {
        node: Node,
        in_order: bool,
    },
    StartWorker {
        node: Node,
        index: usize,
    },
    /// A worker starts; if it is not notified for this long, it gives up and starts again.
    Try {
        node: Node,
        index: usize,
        patience: Time,
    },
    EndWorker {
        node: Node,
        index: usize,
        died: bool,
    },
    /// A machine falls silent, with everything on it.
    Vanish {
        node: Node,
    },
    /// One of the machine's workers starts on another machine.
    Elsewhere {
        from: Node,
        index: usize,
        to: Node,
    },
    Health {
        node: Node,
        health: Health,
    },
    Between {
        one: Node,
        other: Node,
        health: Health,
    },
    /// All machines reach each other.
    Near,
    /// The connection over which a machine's agent fetches ends; nothing else does.
    Reset {
        node: Node,
    },
    /// Everything is well from now on; the times between versions are mostly long enough.
    Heal,
    /// Versions come faster than some machines can take them.
    Burst {
        left: u64,
        pause: Time,
    },
    Last {
        left: u32,
    },
}

impl Options {
    /// Random options.
    pub(super) fn random(dice: &mut Dice) -> Self {
        let machines = 1 + dice.below(12) as usize;
        let slow = match dice.below(3) {
            0 => 0,
            _ => dice.below(40),
        };
        let mut rates = vec![FAST];
        for _ in 0..machines {
            let jitter = 60 + dice.below(41);
            let rate = if dice.percent(slow) { SLOW } else { FAST };
            rates.push(rate * jitter / 100);
        }
        Self {
            arity: [1, 1, 1, 2, 3][dice.below(5) as usize],
            rates,
            no_room: [0, 0, 3][dice.below(3) as usize],
            every: dice.percent(50),
            faults: dice.percent(80),
            apart: dice.percent(20),
            bursts: 15,
            trace: traced(),
            last: 8,
        }
    }

    /// Options without faults, for machines with these speeds.
    pub(super) fn calm(arity: usize, rates: &[u64]) -> Self {
        let mut all = vec![FAST];
        all.extend(rates);
        Self {
            arity,
            rates: all,
            no_room: 0,
            every: false,
            faults: false,
            apart: false,
            bursts: 0,
            trace: traced(),
            last: 0,
        }
    }
}

/// Whether to print every event.
fn traced() -> bool {
    std::env::var_os("WEIGHTSYNC_SIMULATION_TRACE").is_some()
}

impl World {
    pub(super) fn new(options: Options, sizes: Vec<u64>, dice: Dice) -> Self {
        let latency = 100;
        let none = Host {
            agent: None,
            lives: 0,
            serves: false,
            own: false,
            workers: Vec::new(),
        };
        Self {
            clock: Clock::new(),
            network: Network::new(&options.rates, latency),
            sender: Sender::new(sizes, options.arity),
            hosts: vec![none],
            options,
            dice,
            controls: BTreeMap::new(),
            transfers: BTreeMap::new(),
            last_transfer: 0,
            facts: Facts::default(),
            counts: Counts::default(),
        }
    }

    /// A random schedule.
    pub(super) fn random(seed: u64) -> Self {
        let mut dice = Dice::new(seed);
        let options = Options::random(&mut dice);
        let models = 1 + dice.below(3);
        let sizes = (0..models).map(|_| {
            let blocks = 1 + dice.below(4);
            // Enough to be measured, and not always a multiple of a block.
            blocks * BLOCK_BYTES + dice.below(2) * 1000
        });
        let sizes = sizes.collect();
        let mut world = Self::new(options, sizes, dice);
        let machines = world.options.rates.len() - 1;
        let horizon = world.dice.span(SECOND, 2000 * SECOND);
        for node in 1..=machines {
            world.add_host(node);
            let at = match world.dice.below(10) {
                0..6 => world.dice.below(10 * MS),
                6..9 => world.dice.below(horizon),
                // An hour late.
                _ => 3600 * SECOND,
            };
            world.clock.after(at, Event::Op(Op::Start { node }));
        }
        let mut publications = vec![0];
        for _ in 0..4 + world.dice.below(12) {
            let models = 1 + world.dice.below((1 << models) - 1);
            let at = publications[publications.len() - 1] + world.dice.span(MS, horizon / 3);
            world.clock.after(at, Event::Op(Op::Publish { models }));
            publications.push(at);
        }
        if world.options.faults {
            for _ in 0..world.dice.below(12) {
                // Mostly while something is on its way.
                let one = world.dice.below(publications.len() as u64) as usize;
                let after = world.dice.span(MS / 10, 10 * SECOND);
                world.add_fault(publications[one] + after);
            }
        }
        world.clock.after(3700 * SECOND, Event::Op(Op::Heal));
        world
    }

    /// Adds a machine with its workers; nothing on it runs yet.
    fn add_host(&mut self, node: Node) {
        let own = self.dice.percent(25);
        let workers = if own { 1 } else { self.dice.below(4) };
        let workers = (0..workers as usize).map(|index| Worker {
            who: WorkerInstance {
                worker: WorkerId((node * 10 + index) as u32),
                instance: 0,
            },
            delivery: match self.dice.below(4) {
                0 if self.options.every => Delivery::Every {
                    bound: 1 + self.dice.below(3) as u8,
                },
                _ => Delivery::Newest,
            },
            alive: false,
            notified: 0,
            told_by: (0, 0),
            taken: 0,
        });
        let workers = workers.collect();
        self.hosts.push(Host {
            agent: None,
            lives: 0,
            serves: self.dice.percent(95),
            own,
            workers,
        });
    }

    /// Adds a machine with this many workers that want the newest version.
    pub(super) fn add_plain_host(&mut self, workers: usize) {
        let node = self.hosts.len();
        let worker = |index| plain_worker(node, index);
        self.hosts.push(Host {
            agent: None,
            lives: 0,
            serves: true,
            own: false,
            workers: (0..workers).map(worker).collect(),
        });
        self.clock
            .after(node as Time, Event::Op(Op::Start { node }));
    }

    fn add_fault(&mut self, at: Time) {
        let machines = self.hosts.len() - 1;
        let node = 1 + self.dice.below(machines as u64) as usize;
        let other = self.dice.below(machines as u64 + 1) as usize;
        let until = at + self.dice.span(5 * MS, 60 * SECOND);
        let health = match self.dice.below(2) {
            0 => Health::Cut,
            _ => Health::Silent,
        };
        let workers = self.hosts[node].workers.len() as u64;
        let chance = self.dice.percent(50);
        if self.dice.percent(25) {
            return self.clock.after(at, Event::Op(Op::Reset { node }));
        }
        if workers > 0 && other != 0 && self.dice.percent(10) {
            let index = self.dice.below(workers) as usize;
            let moved = at + self.dice.span(MS, 2 * SECOND);
            let (from, to) = (node, other);
            self.clock
                .after(moved, Event::Op(Op::Elsewhere { from, index, to }));
            self.clock.after(at, Event::Op(Op::Vanish { node }));
            let mends = Op::Health {
                node,
                health: Health::Good,
            };
            return self.clock.after(until.max(moved), Event::Op(mends));
        }
        let (breaks, mends) = match self.dice.below(8) {
            0..2 => {
                let in_order = self.dice.percent(30);
                (Op::EndAgent { node, in_order }, Op::Start { node })
            }
            2 if workers > 0 => {
                let index = self.dice.below(workers) as usize;
                let died = chance;
                (
                    Op::EndWorker { node, index, died },
                    Op::StartWorker { node, index },
                )
            }
            3..5 if other != 0 && other != node => {
                let between = |health| Op::Between {
                    one: node,
                    other,
                    health,
                };
                (between(health), between(Health::Good))
            }
            _ => {
                let of = |health| Op::Health { node, health };
                (of(health), of(Health::Good))
            }
        };
        self.clock.after(at, Event::Op(breaks));
        self.clock.after(until, Event::Op(mends));
    }

    pub(super) fn operate(&mut self, op: Op) {
        match op {
            Op::Publish { models } => self.publish(models),
            Op::Start { node } => {
                if self.hosts[node].agent.is_none() {
                    // All of its workers are there before the agent, or come with it.
                    for index in 0..self.hosts[node].workers.len() {
                        if !self.hosts[node].workers[index].alive {
                            self.start_worker(node, index);
                        }
                    }
                }
                if self.hosts[node].agent.is_none() {
                    self.start_agent(node);
                }
            }
            Op::EndAgent { node, in_order } => self.end_agent(node, in_order),
            Op::StartWorker { node, index } => {
                let worker = self.hosts[node].workers.get(index);
                if worker.is_some_and(|worker| !worker.alive) {
                    self.start_worker(node, index);
                }
            }
            Op::Try {
                node,
                index,
                patience,
            } => {
                if self.hosts[node].workers.len() == index {
                    self.hosts[node].workers.push(plain_worker(node, index));
                }
                if self.hosts[node].workers[index].notified == 0 {
                    self.end_worker(node, index, false);
                    self.start_worker(node, index);
                    self.clock.after(patience, Event::Op(op));
                }
            }
            Op::EndWorker { node, index, died } => {
                if index < self.hosts[node].workers.len() {
                    self.end_worker(node, index, died);
                }
            }
            Op::Vanish { node } => self.vanish(node),
            Op::Elsewhere { from, index, to } => self.move_worker(from, index, to),
            Op::Health { node, health } => self.set_health(node, health),
            Op::Between { health, .. } if self.options.apart && health == Health::Good => {}
            Op::Between { one, other, health } => self.set_health_between(one, other, health),
            Op::Near => self.network.heal(false, self.clock.now()),
            Op::Reset { node } => {
                let agent = self.hosts[node].agent.as_ref();
                let fetching = agent.and_then(|one| one.fetching.values().next());
                if let Some(fetching) = fetching {
                    self.broken(fetching.number);
                }
            }
            Op::Heal => {
                self.heal();
                let often = 4 + self.dice.below(17);
                let burst = match self.dice.percent(self.options.bursts) {
                    true => 5 * often,
                    false => 0,
                };
                let next = Op::Burst {
                    left: burst,
                    pause: self.time_for_all() / often,
                };
                self.clock.after(60 * SECOND, Event::Op(next));
            }
            Op::Burst { left: 0, .. } => {
                let left = self.options.last;
                self.operate(Op::Last { left });
            }
            Op::Burst { left, pause } => {
                self.publish_any();
                let left = left - 1;
                let next = Event::Op(Op::Burst { left, pause });
                self.clock.after(pause, next);
            }
            Op::Last { left } => {
                self.publish_any();
                if left > 1 {
                    let all = self.time_for_all();
                    let pause = match self.dice.below(5) {
                        // Too short for some machines.
                        0 => self.dice.span(MS, all),
                        _ => all + self.dice.below(all),
                    };
                    let next = Event::Op(Op::Last { left: left - 1 });
                    self.clock.after(pause, next);
                }
            }
        }
    }

    /// Publishes new versions of any of the models.
    fn publish_any(&mut self) {
        let all = (1 << self.sender.sizes.len()) - 1;
        let models = 1 + self.dice.below(all);
        self.publish(models);
    }

    /// Handles events until none are left.
    pub(super) fn run(&mut self) {
        while let Some(event) = self.clock.next() {
            self.trace(|| format!("{event:?}"));
            self.counts.events += 1;
            assert!(self.counts.events < ENDLESS, "it does not come to an end");
            self.handle(event);
        }
    }

    /// Prints an event if `WEIGHTSYNC_SIMULATION_TRACE` is set.
    pub(super) fn trace(&self, what: impl Fn() -> String) {
        if self.options.trace {
            println!("{:>12} {}", self.clock.now(), what());
        }
    }
}

/// A worker that wants the newest version.
fn plain_worker(node: Node, index: usize) -> Worker {
    Worker {
        who: WorkerInstance {
            worker: WorkerId((node * 10 + index) as u32),
            instance: 0,
        },
        delivery: Delivery::Newest,
        alive: false,
        notified: 0,
        told_by: (0, 0),
        taken: 0,
    }
}
