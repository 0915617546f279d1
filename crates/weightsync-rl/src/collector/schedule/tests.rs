//! Small worlds, explored exhaustively: every order in which workers answer,
//! babble and die, in which they cannot be started again, and in which the
//! caller updates the weights and loses patience.

use std::collections::{BTreeSet, HashSet};

use super::*;

/// Workers as they are, whatever the schedule believes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    schedule: Schedule,
    goal: Goal,
    max_staleness: Option<u64>,
    /// Of each worker that runs, what it was asked for and has not answered:
    /// ticket and version.
    workers: Vec<Option<Vec<(u64, u64)>>>,
    version: u64,
    /// The batch the caller waits for.
    wanted: Option<Wanted>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Wanted {
    /// Whose parts have come, with their tickets.
    kept: Vec<(usize, u64)>,
    asked: BTreeSet<u64>,
}

/// A part that was just heard: ticket and version of its weights.
type Heard = Option<(u64, u64)>;

impl World {
    fn new(goal: Goal, workers: usize, max_staleness: Option<u64>) -> Self {
        Self {
            schedule: Schedule::new(
                workers,
                Rules {
                    max_staleness,
                    ..Rules::default()
                },
            ),
            goal,
            max_staleness,
            workers: vec![Some(Vec::new()); workers],
            version: 1,
            wanted: None,
        }
    }

    /// Every world that may come next.
    fn next(&self) -> Vec<World> {
        let mut next = Vec::new();
        if self.wanted.is_none() {
            for startable in [true, false] {
                next.push(self.with(|world| {
                    world.wanted = Some(Wanted::default());
                    let (goal, version) = (world.goal, world.version);
                    world.hear(Event::Begin { goal, version }, None, startable);
                }));
            }
            next.push(self.with(|world| world.version += 1));
            return next;
        }
        next.push(self.with(|world| world.wanted = None));
        for worker in 0..self.workers.len() {
            let Some(requests) = &self.workers[worker] else {
                continue;
            };
            if let Some(&(ticket, version)) = requests.first() {
                // It began when it was asked, or only now.
                for oldest in BTreeSet::from([version, self.version]) {
                    next.push(self.with(|world| {
                        world.workers[worker].as_mut().unwrap().remove(0);
                        let part = Event::Part {
                            worker,
                            ticket,
                            oldest,
                        };
                        world.hear(part, Some((ticket, oldest)), true);
                    }));
                }
            }
            next.push(self.with(|world| world.hear(Event::Nonsense { worker }, None, true)));
            for startable in [true, false] {
                next.push(self.with(|world| {
                    world.workers[worker] = None;
                    world.hear(Event::Ended { worker }, None, startable);
                }));
            }
        }
        next
    }

    fn with(&self, change: impl FnOnce(&mut World)) -> World {
        let mut world = self.clone();
        change(&mut world);
        world.check();
        world
    }

    /// Steps the schedule and performs what it decides, as the collector does.
    fn hear(&mut self, event: Event, heard: Heard, startable: bool) {
        let mut effects: std::collections::VecDeque<_> = self.schedule.step(event).into();
        let (mut whole, mut failed) = (false, false);
        while let Some(effect) = effects.pop_front() {
            match effect {
                Effect::Ask { worker, ticket, .. } if failed => {
                    self.schedule.step(Event::NotAsked { worker, ticket });
                }
                Effect::Start { .. } | Effect::Kill { .. } if failed => {}
                Effect::Start { worker } => {
                    assert_eq!(self.workers[worker], None, "it runs: {effect:?}");
                    if startable {
                        self.workers[worker] = Some(Vec::new());
                        effects.extend(self.schedule.step(Event::Started { worker }));
                    } else {
                        failed = true;
                    }
                }
                Effect::Ask {
                    worker,
                    ticket,
                    version,
                    random,
                } => {
                    assert!(version == self.version && !random);
                    let requests = self.workers[worker].as_mut().expect("a worker that runs");
                    requests.push((ticket, version));
                    if self.goal == Goal::Anyone {
                        assert!(requests.len() <= 2, "two parts ahead: {requests:?}");
                    }
                    self.wanted.as_mut().unwrap().asked.insert(ticket);
                }
                Effect::Kill { worker } => {
                    self.workers[worker] = None;
                    effects.extend(self.schedule.step(Event::Ended { worker }));
                }
                Effect::Keep { worker } => {
                    let (ticket, oldest) = heard.expect("a part");
                    if self.goal == Goal::Anyone {
                        let most = self.max_staleness.unwrap_or(u64::MAX);
                        assert!(self.version - oldest <= most, "too old");
                    }
                    self.wanted.as_mut().unwrap().kept.push((worker, ticket));
                }
                Effect::Discard { stale, .. } => {
                    let (_, oldest) = heard.expect("a part");
                    let most = self.max_staleness.unwrap_or(u64::MAX);
                    assert!(!stale || self.version - oldest > most, "young enough");
                    assert!(stale || self.goal != Goal::Anyone, "nothing is lost");
                }
                Effect::Clear { .. } => assert_eq!(self.goal, Goal::Everyone),
                Effect::Deliver => whole = true,
                Effect::GiveUp { worker, deaths } => {
                    assert_eq!(self.workers[worker], None);
                    assert!(deaths > MAX_DEATHS);
                    failed = true;
                }
            }
        }
        if whole {
            self.deliver();
        } else if failed {
            self.wanted = None;
        }
    }

    fn deliver(&mut self) {
        let mut wanted = self.wanted.take().expect("a batch that is waited for");
        wanted.kept.sort_unstable();
        if self.goal == Goal::Anyone {
            assert_eq!(wanted.kept.len(), 1);
            return;
        }
        let whose: Vec<_> = wanted.kept.iter().map(|(worker, _)| *worker).collect();
        let everyone: Vec<_> = (0..self.workers.len()).collect();
        assert_eq!(whose, everyone, "one part of each");
        assert!(wanted.kept.iter().all(|(_, t)| wanted.asked.contains(t)));
    }

    /// While a batch is waited for, something can come.
    fn check(&self) {
        let Some(wanted) = &self.wanted else {
            return;
        };
        for (worker, requests) in self.workers.iter().enumerate() {
            if self.goal == Goal::Everyone && wanted.kept.iter().any(|(kept, _)| *kept == worker) {
                continue;
            }
            let requests = requests.as_ref().expect("every worker runs");
            let expected = &self.schedule.workers[worker].asked;
            let known = |(ticket, _): &&(u64, u64)| expected.contains(ticket);
            assert!(requests.iter().any(|r| known(&r)), "waits for nothing");
            assert_eq!(requests.iter().filter(known).count(), expected.len());
        }
    }
}

fn explore(start: World, depth: usize) -> usize {
    let mut seen = HashSet::from([start.clone()]);
    let mut frontier = vec![start];
    for _ in 0..depth {
        let next: Vec<World> = frontier.iter().flat_map(World::next).collect();
        frontier = next
            .into_iter()
            .filter(|w| seen.insert(w.clone()))
            .collect();
    }
    seen.len()
}

#[test]
fn batches_of_everyone_are_whole_in_every_order() {
    assert!(explore(World::new(Goal::Everyone, 2, None), 9) > 1000);
    assert!(explore(World::new(Goal::Everyone, 3, None), 7) > 1000);
}

#[test]
fn first_come_is_first_served_in_every_order() {
    for max_staleness in [None, Some(0), Some(1)] {
        assert!(explore(World::new(Goal::Anyone, 2, max_staleness), 9) > 1000);
        assert!(explore(World::new(Goal::Anyone, 1, max_staleness), 14) > 100);
    }
}

#[test]
fn a_worker_that_keeps_dying_is_given_up() {
    let mut schedule = Schedule::new(1, Rules::default());
    let (goal, version) = (Goal::Everyone, 1);
    schedule.step(Event::Begin { goal, version });
    for _ in 0..MAX_DEATHS {
        let effects = schedule.step(Event::Ended { worker: 0 });
        assert_eq!(effects, [Effect::Start { worker: 0 }]);
        schedule.step(Event::Started { worker: 0 });
    }
    let deaths = MAX_DEATHS + 1;
    let effects = schedule.step(Event::Ended { worker: 0 });
    assert_eq!(effects, [Effect::GiveUp { worker: 0, deaths }]);
    // The next batch tries again.
    let effects = schedule.step(Event::Begin { goal, version });
    assert_eq!(effects, [Effect::Start { worker: 0 }]);
}

#[test]
fn the_first_frames_are_drawn_evenly() {
    let rules = Rules {
        init_random_frames: 25,
        part: 10,
        ..Rules::default()
    };
    // Two workers make 20 frames a batch: the second is random as a whole.
    let mut schedule = Schedule::new(2, rules);
    let random: Vec<bool> = (0..3)
        .map(|_| {
            let (goal, version) = (Goal::Everyone, 1);
            let asked = asked(&schedule.step(Event::Begin { goal, version }));
            for (worker, ticket, random) in &asked {
                assert_eq!(*random, asked[0].2);
                part(&mut schedule, *worker, *ticket);
            }
            asked[0].2
        })
        .collect();
    assert_eq!(random, [true, true, false]);

    // First come, first served: every worker begins with them.
    let mut schedule = Schedule::new(2, rules);
    let (goal, version) = (Goal::Anyone, 1);
    let first = asked(&schedule.step(Event::Begin { goal, version }));
    let random: Vec<bool> = first.iter().map(|ask| ask.2).collect();
    assert_eq!(random, [true; 4]);
    let next = asked(&part(&mut schedule, first[0].0, first[0].1));
    assert!(next[0].2, "20 frames are there or on their way");
    let next = asked(&part(&mut schedule, first[2].0, first[2].1));
    assert!(!next[0].2, "30 are");
}

fn part(schedule: &mut Schedule, worker: usize, ticket: u64) -> Vec<Effect> {
    let oldest = 1;
    schedule.step(Event::Part {
        worker,
        ticket,
        oldest,
    })
}

/// Worker, ticket, and whether actions are drawn evenly.
fn asked(effects: &[Effect]) -> Vec<(usize, u64, bool)> {
    let ask = |effect: &Effect| match *effect {
        Effect::Ask {
            worker,
            ticket,
            random,
            ..
        } => Some((worker, ticket, random)),
        _ => None,
    };
    effects.iter().filter_map(ask).collect()
}
