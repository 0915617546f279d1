use std::collections::{HashMap, HashSet, VecDeque};

use super::*;

const fn every(steps: u64) -> NonZero<u64> {
    NonZero::new(steps).unwrap()
}

/// A trainer that makes its steps, and synchronises when it is told to.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct TrainerRun {
    party: Party,
    step: u64,
    version: Version,
    /// It has asked since its last step.
    asked: bool,
    meets: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct ExplorerRun {
    party: Party,
    step: u64,
    loaded: Version,
    asked: bool,
    waits: bool,
    /// What it was told to fetch, or is sent.
    told: Option<Version>,
}

/// Everybody, and what may still go wrong.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    sync: Synchronizer,
    trainer: Option<TrainerRun>,
    explorers: Vec<Option<ExplorerRun>>,
    faults: u8,
    /// How many deadlines may still come. Each try of a trainer has a version of its own, so that more
    /// of them would be more and more worlds.
    ticks: u8,
    next: u64,
    now: Moment,
}

/// What is explored.
#[derive(Clone, Copy)]
struct Limits {
    method: Method,
    style: Style,
    explorers: usize,
    trained: u64,
    explored: u64,
    faults: u8,
    /// Whether waits have a deadline.
    deadlines: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Normal,
    Fault,
    Tick,
}

impl World {
    fn new(limits: &Limits) -> Self {
        let mut world = Self {
            sync: Synchronizer::new(limits.method, limits.style, Version::NONE),
            trainer: None,
            explorers: Vec::new(),
            faults: limits.faults,
            ticks: 1,
            next: 0,
            now: Moment(0),
        };
        world.join_trainer(0);
        for _ in 0..limits.explorers {
            let explorer = world.join_explorer(0);
            world.explorers.push(Some(explorer));
        }
        world
    }

    fn party(&mut self) -> Party {
        self.next += 1;
        Party(self.next)
    }

    fn join_trainer(&mut self, step: u64) {
        let party = self.party();
        self.trainer = Some(TrainerRun {
            party,
            step,
            // As a store tells it.
            version: self.sync.newest(),
            asked: true,
            meets: false,
        });
        self.tell(Event::TrainerJoined(party));
    }

    fn join_explorer(&mut self, step: u64) -> ExplorerRun {
        let party = self.party();
        self.tell(Event::ExplorerJoined(party, Version::NONE));
        ExplorerRun {
            party,
            step,
            loaded: Version::NONE,
            asked: step > 0,
            waits: false,
            told: None,
        }
    }

    fn explorer(&mut self, party: Party) -> Option<&mut ExplorerRun> {
        self.explorers
            .iter_mut()
            .flatten()
            .find(|one| one.party == party)
    }

    /// Tells the synchronizer, and does what it says.
    fn tell(&mut self, event: Event) {
        let needed = self.sync.trainer_need() != Need::No;
        let joined = matches!(event, Event::TrainerJoined(_));
        let effects = self.sync.step(event, self.now);
        let needs = self.sync.trainer_need() != Need::No;
        let woken = effects
            .iter()
            .any(|effect| matches!(effect, Effect::Wake(_)));
        assert!(
            joined || woken == (needs && !needed),
            "a trainer that waits is told at once"
        );
        for effect in effects {
            match effect {
                Effect::Wake(_) => {}
                Effect::Fetch(party, version) => {
                    let one = self.explorer(party).expect("it is there");
                    assert!(one.waits && version > one.loaded);
                    one.told = Some(version);
                }
                Effect::Meet(_, version, parties) => {
                    assert!(!parties.is_empty());
                    for party in parties {
                        let one = self.explorer(party).expect("it is there");
                        assert!(one.waits);
                        one.told = Some(version);
                    }
                }
                Effect::Ended(party, outcome) => self.end(party, &outcome),
                Effect::Refused(party) => {
                    let own = self.trainer.as_ref().map(|one| one.party);
                    assert_ne!(own, Some(party));
                    assert!(self.explorer(party).is_none(), "{party:?}");
                }
            }
        }
    }

    fn end(&mut self, party: Party, outcome: &Outcome) {
        if let Some(trainer) = self.trainer.as_mut().filter(|one| one.party == party) {
            assert!(trainer.meets);
            (trainer.meets, trainer.asked) = (false, true);
            return;
        }
        let must = self.sync.explorer_need(party) == Need::Must;
        let Some(one) = self.explorer(party) else {
            return;
        };
        assert!(one.waits, "an answer that nobody waits for: {outcome:?}");
        // The label is what was loaded.
        if let Outcome::Synced(version, _) = outcome {
            assert_eq!(*version, one.loaded);
        }
        (one.waits, one.told) = (false, None);
        // One that must synchronise makes no step before it has, unless there is nothing to have.
        one.asked = !must || *outcome == Outcome::NothingNewer;
    }

    /// Every world that may come next.
    fn successors(&self, limits: &Limits) -> Vec<(Kind, Self)> {
        let mut next = Vec::new();
        let mut add = |kind, change: &dyn Fn(&mut Self)| {
            let mut world = self.clone();
            change(&mut world);
            world.check(limits);
            next.push((kind, world));
        };
        let until = limits.deadlines.then_some(Moment(1));
        if let Some(run) = &self.trainer {
            let party = run.party;
            if !run.meets && self.sync.trainer_need() != Need::No {
                let version = run.version.next();
                add(Kind::Normal, &|world| {
                    if let Some(run) = &mut world.trainer {
                        run.version = version;
                        (run.meets, run.asked) = (limits.method == Method::Direct, true);
                    }
                    world.tell(match limits.method {
                        Method::Direct => Event::TrainerMeets(party, version, until),
                        _ => Event::TrainerPublished(party, version, run.step),
                    });
                });
            } else if !run.meets && run.step < limits.trained {
                add(Kind::Normal, &|world| {
                    if let Some(run) = &mut world.trainer {
                        run.step += 1;
                    }
                    world.tell(Event::TrainerStepped(party, run.step + 1));
                });
            } else if !run.meets {
                add(Kind::Normal, &|world| {
                    world.trainer = None;
                    world.tell(Event::TrainerLeft(party));
                });
            }
            if self.faults > 0 {
                // It dies, and another one takes its place; or the other one comes first.
                for dies in [true, false] {
                    add(Kind::Fault, &|world| {
                        world.faults -= 1;
                        world.trainer = None;
                        if dies {
                            world.tell(Event::TrainerLeft(party));
                        }
                        world.join_trainer(run.step);
                        // What the old one still says is refused.
                        world.tell(Event::TrainerPublished(party, Version(99), 99));
                    });
                }
            }
        }
        for (at, run) in self.explorers.iter().enumerate() {
            let Some(run) = run else { continue };
            let party = run.party;
            let change = |world: &mut Self, change: &dyn Fn(&mut ExplorerRun)| {
                if let Some(run) = &mut world.explorers[at] {
                    change(run);
                }
            };
            if let Some(version) = run.told {
                add(Kind::Normal, &|world| {
                    change(world, &|run| run.loaded = version);
                    world.tell(Event::ExplorerLoaded(party, version));
                });
                if self.faults > 0 {
                    add(Kind::Fault, &|world| {
                        world.faults -= 1;
                        world.tell(Event::ExplorerFailed(party));
                    });
                }
            } else if !run.waits && !run.asked {
                let needs = self.sync.explorer_need(party) != Need::No;
                add(Kind::Normal, &|world| {
                    change(world, &|run| (run.asked, run.waits) = (true, needs));
                    if needs {
                        world.tell(Event::ExplorerSyncs(party, until));
                    }
                });
            } else if !run.waits && run.step < limits.explored {
                add(Kind::Normal, &|world| {
                    change(world, &|run| (run.step, run.asked) = (run.step + 1, false));
                    world.tell(Event::ExplorerStepped(party, run.step + 1));
                });
            } else if !run.waits {
                add(Kind::Normal, &|world| {
                    world.explorers[at] = None;
                    world.tell(Event::ExplorerLeft(party));
                });
            }
            if self.faults > 0 {
                add(Kind::Fault, &|world| {
                    world.faults -= 1;
                    world.explorers[at] = None;
                    world.tell(Event::ExplorerLeft(party));
                    let again = world.join_explorer(run.step);
                    world.explorers[at] = Some(again);
                    world.tell(Event::ExplorerLoaded(party, Version(99)));
                });
            }
        }
        if let Some(until) = self.sync.deadline()
            && self.ticks > 0
        {
            add(Kind::Tick, &|world| {
                world.ticks -= 1;
                world.now = until;
                world.tell(Event::Ticked);
                world.now = Moment(0);
            });
        }
        next
    }

    fn is_over(&self) -> bool {
        self.trainer.is_none() && self.explorers.iter().all(Option::is_none)
    }

    fn check(&self, limits: &Limits) {
        for run in self.explorers.iter().flatten() {
            assert_eq!(self.sync.version(run.party), Some(run.loaded));
            let state = self.sync.state(run.party);
            let waiting = match limits.method {
                Method::Direct => State::WaitingSync,
                _ => State::RequireSync,
            };
            match run.waits {
                true => assert_eq!(state, waiting),
                false => assert!(matches!(state, State::Running | State::RequireSync)),
            }
        }
        if let Some(run) = &self.trainer {
            let expected = match run.meets {
                true => State::WaitingSync,
                false => State::Running,
            };
            assert_eq!(self.sync.state(run.party), expected);
            let asked = !self.sync.asking().is_empty();
            let driven = matches!(limits.style, Style::ByExplorer { .. });
            // No request is lost.
            assert!(!(driven && asked) || self.sync.trainer_need() == Need::Yes);
        }
        assert_eq!(self.sync.state(Party(0)), State::Stopped);
    }
}

/// Explores every order of events. From each world that can be reached, everybody stops in the end,
/// without a further fault, and without a deadline where waits have none.
fn explore(limits: &Limits) -> usize {
    let first = World::new(limits);
    let mut numbers = HashMap::from([(first.clone(), 0_usize)]);
    let mut before: Vec<Vec<usize>> = vec![Vec::new()];
    let mut over = Vec::new();
    let mut queue = VecDeque::from([first]);
    let mut at = 0;
    while let Some(world) = queue.pop_front() {
        if world.is_over() {
            over.push(at);
        }
        for (kind, next) in world.successors(limits) {
            let known = numbers.len();
            let number = *numbers.entry(next.clone()).or_insert(known);
            if number == known {
                assert!(known < MOST, "one of the last worlds: {next:#?}");
                before.push(Vec::new());
                queue.push_back(next);
            }
            if kind != Kind::Fault {
                before[number].push(at);
            }
        }
        at += 1;
    }
    assert!(!over.is_empty());
    let mut ends: HashSet<usize> = over.iter().copied().collect();
    while let Some(end) = over.pop() {
        for &number in &before[end] {
            if ends.insert(number) {
                over.push(number);
            }
        }
    }
    let stuck = numbers.iter().find(|(_, number)| !ends.contains(number));
    assert!(stuck.is_none(), "nobody can go on: {stuck:#?}");
    numbers.len()
}

/// More worlds than this are a number that grows without an end.
const MOST: usize = 2_000_000;

fn styles() -> [Style; 7] {
    [
        Style::Fixed {
            interval: every(1),
            offset: 0,
        },
        Style::Fixed {
            interval: every(2),
            offset: 1,
        },
        Style::ByExplorer { interval: every(1) },
        Style::ByExplorer { interval: every(2) },
        Style::ByTrainer { interval: every(1) },
        Style::FullyAsync {
            trainer: every(1),
            explorer: every(1),
        },
        Style::Bounded {
            interval: every(1),
            lag: 1,
        },
    ]
}

#[test]
fn every_order_of_events_ends_with_all_stopped() {
    let mut all = 0;
    for method in [Method::Direct, Method::Memory] {
        for style in styles() {
            for explorers in 1..=3 {
                for deadlines in [false, true] {
                    // Three explorers have as many states as fit into a test with fewer steps.
                    let few = explorers == 3;
                    let limits = Limits {
                        method,
                        style,
                        explorers,
                        trained: 2,
                        explored: if few { 1 } else { 2 },
                        faults: 1,
                        deadlines,
                    };
                    let states = explore(&limits);
                    println!("{method:?}, {style:?}, {explorers} explorers: {states} states");
                    all += states;
                }
            }
        }
    }
    println!("{all} states in all");
}
