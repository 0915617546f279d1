//! Small worlds, explored exhaustively: every order in which workers answer,
//! babble, hang and die, in which they cannot be started again, and in which the
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
    /// Workers in whose places no others are started.
    abandoned: BTreeSet<usize>,
    version: u64,
    /// Whether the caller waits for a batch.
    is_wanted: bool,
    /// Whose parts are kept, with the versions they were asked for by.
    kept: Vec<(usize, u64)>,
}

/// A part that was just heard: the version it was asked for by, and that of its
/// weights.
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
            abandoned: BTreeSet::new(),
            version: 1,
            is_wanted: false,
            kept: Vec::new(),
        }
    }

    /// Every world that may come next.
    fn next(&self) -> Vec<World> {
        let mut next = Vec::new();
        if !self.is_wanted {
            for startable in [true, false] {
                next.push(self.with(|world| {
                    world.is_wanted = true;
                    let (goal, version) = (world.goal, world.version);
                    world.hear(ScheduleEvent::Begin { goal, version }, None, startable);
                }));
            }
            next.push(self.with(|world| world.version += 1));
            return next;
        }
        next.push(self.with(|world| world.is_wanted = false));
        for worker in 0..self.workers.len() {
            let Some(requests) = &self.workers[worker] else {
                continue;
            };
            if let Some(&(ticket, version)) = requests.first() {
                // It began when it was asked, or only now.
                for oldest in BTreeSet::from([version, self.version]) {
                    next.push(self.with(|world| {
                        world.workers[worker].as_mut().unwrap().remove(0);
                        let part = ScheduleEvent::Part {
                            worker,
                            ticket,
                            oldest,
                        };
                        world.hear(part, Some((version, oldest)), true);
                    }));
                }
            }
            next.push(self.with(|world| world.hear(ScheduleEvent::Failed { worker }, None, true)));
            for startable in [true, false] {
                next.push(self.with(|world| {
                    world.workers[worker] = None;
                    world.hear(ScheduleEvent::Ended { worker }, None, startable);
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
    fn hear(&mut self, event: ScheduleEvent, heard: Heard, startable: bool) {
        let mut effects: std::collections::VecDeque<_> = self.schedule.step(event).into();
        let (mut whole, mut failed) = (false, false);
        while let Some(effect) = effects.pop_front() {
            match effect {
                ScheduleEffect::Ask { worker, ticket, .. } if failed => {
                    self.schedule
                        .step(ScheduleEvent::NotAsked { worker, ticket });
                }
                ScheduleEffect::Start { .. } | ScheduleEffect::Kill { .. } if failed => {}
                ScheduleEffect::Start { worker } => {
                    assert_eq!(self.workers[worker], None, "it runs: {effect:?}");
                    if startable {
                        self.abandoned.remove(&worker);
                        self.workers[worker] = Some(Vec::new());
                        effects.extend(self.schedule.step(ScheduleEvent::Started { worker }));
                    } else {
                        failed = true;
                    }
                }
                ScheduleEffect::Ask {
                    worker,
                    ticket,
                    version,
                    random,
                } => {
                    assert!(version == self.version && !random);
                    let requests = self.workers[worker].as_mut().expect("a worker that runs");
                    requests.push((ticket, version));
                    assert!(requests.len() <= AHEAD, "they pile up: {requests:?}");
                }
                ScheduleEffect::Kill { worker } => {
                    self.workers[worker] = None;
                    effects.extend(self.schedule.step(ScheduleEvent::Ended { worker }));
                }
                ScheduleEffect::Keep { worker } => {
                    let (asked, oldest) = heard.expect("a part");
                    if self.goal == Goal::Anyone {
                        let most = self.max_staleness.unwrap_or(u64::MAX);
                        assert!(self.version - oldest <= most, "too old");
                    }
                    self.kept.push((worker, asked));
                }
                ScheduleEffect::Discard { stale, .. } => {
                    let (_, oldest) = heard.expect("a part");
                    let most = self.max_staleness.unwrap_or(u64::MAX);
                    assert!(!stale || self.version - oldest > most, "young enough");
                    assert!(stale || self.goal != Goal::Anyone, "nothing is lost");
                }
                ScheduleEffect::Clear { worker } => {
                    let kept = self.kept.iter().position(|(kept, _)| *kept == worker);
                    let (_, version) = self.kept.remove(kept.expect("a part of it"));
                    assert_ne!(version, self.version, "of use yet");
                }
                ScheduleEffect::Deliver => whole = true,
                ScheduleEffect::Abandon { worker, deaths } => {
                    assert_eq!((self.goal, &self.workers[worker]), (Goal::Anyone, &None));
                    assert!(deaths > MAX_DEATHS);
                    assert!(self.workers.iter().any(Option::is_some), "none is left");
                    self.abandoned.insert(worker);
                }
                ScheduleEffect::GiveUp { worker, deaths } => {
                    assert_eq!(self.workers[worker], None);
                    assert!(deaths > MAX_DEATHS);
                    let lives = self.workers.iter().any(Option::is_some);
                    assert!(self.goal == Goal::Everyone || !lives, "others go on");
                    failed = true;
                }
            }
        }
        if whole {
            self.deliver();
        } else if failed {
            self.is_wanted = false;
        }
    }

    fn deliver(&mut self) {
        assert!(std::mem::take(&mut self.is_wanted), "nobody waits for it");
        let mut kept = std::mem::take(&mut self.kept);
        kept.sort_unstable();
        if self.goal == Goal::Anyone {
            assert_eq!(kept.len(), 1);
            return;
        }
        let expected = (0..self.workers.len()).map(|worker| (worker, self.version));
        assert!(kept.into_iter().eq(expected), "one part of each");
    }

    /// While a batch is waited for, something can come.
    fn check(&self) {
        if !self.is_wanted {
            return;
        }
        assert!(self.workers.iter().any(Option::is_some), "nobody works");
        for (worker, requests) in self.workers.iter().enumerate() {
            let is_kept = self.kept.iter().any(|(kept, _)| *kept == worker);
            if is_kept || self.abandoned.contains(&worker) {
                continue;
            }
            let requests = requests.as_ref().expect("every worker runs");
            assert!(!requests.is_empty(), "waits for nothing");
            let known = self.schedule.workers[worker].asked.iter();
            let known = known.map(|asked| asked.ticket);
            assert!(known.eq(requests.iter().map(|(ticket, _)| *ticket)));
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
    schedule.step(ScheduleEvent::Begin { goal, version });
    for _ in 0..MAX_DEATHS {
        let effects = schedule.step(ScheduleEvent::Ended { worker: 0 });
        assert_eq!(effects, [ScheduleEffect::Start { worker: 0 }]);
        schedule.step(ScheduleEvent::Started { worker: 0 });
    }
    let deaths = MAX_DEATHS + 1;
    let effects = schedule.step(ScheduleEvent::Ended { worker: 0 });
    assert_eq!(effects, [ScheduleEffect::GiveUp { worker: 0, deaths }]);
    // The next batch tries again.
    let effects = schedule.step(ScheduleEvent::Begin { goal, version });
    assert_eq!(effects, [ScheduleEffect::Start { worker: 0 }]);
}

#[test]
fn what_was_asked_for_is_not_asked_for_again() {
    let mut schedule = Schedule::new(2, Rules::default());
    let begin = |schedule: &mut Schedule, version| {
        let goal = Goal::Everyone;
        schedule.step(ScheduleEvent::Begin { goal, version })
    };
    let first = asked(&begin(&mut schedule, 1));
    part(&mut schedule, 0, first[0].1);
    // The batch is given up; the part that is there counts, and the other is under way.
    assert_eq!(begin(&mut schedule, 1), []);
    // Other weights: neither counts.
    let effects = begin(&mut schedule, 2);
    assert_eq!(effects[0], ScheduleEffect::Clear { worker: 0 });
    let second = asked(&effects);
    assert_eq!(second.len(), 2);
    // Worker 1 owes two parts, and is asked for a third once it has delivered one.
    let third = asked(&begin(&mut schedule, 3));
    assert_eq!(third.len(), 1, "worker 0 alone");
    let effects = part(&mut schedule, 1, first[1].1);
    let stale = false;
    assert_eq!(effects[0], ScheduleEffect::Discard { worker: 1, stale });
    let last = asked(&effects);
    assert_eq!(last.len(), 1);
    part(&mut schedule, 1, second[1].1);
    part(&mut schedule, 1, last[0].1);
    assert!(schedule.owes(0) && !schedule.owes(1));
}

#[test]
fn a_worker_that_keeps_dying_is_abandoned() {
    let mut schedule = Schedule::new(2, Rules::default());
    let (goal, version) = (Goal::Anyone, 1);
    let die = |schedule: &mut Schedule, worker| {
        for _ in 0..MAX_DEATHS {
            let effects = schedule.step(ScheduleEvent::Ended { worker });
            assert_eq!(effects, [ScheduleEffect::Start { worker }]);
            schedule.step(ScheduleEvent::Started { worker });
        }
        schedule.step(ScheduleEvent::Ended { worker })
    };
    schedule.step(ScheduleEvent::Begin { goal, version });
    let (worker, deaths) = (0, MAX_DEATHS + 1);
    assert_eq!(
        die(&mut schedule, 0),
        [ScheduleEffect::Abandon { worker, deaths }]
    );
    assert!(schedule.missing().eq([1]));
    // The next batch does without it, and asks nobody for more than before.
    assert_eq!(schedule.step(ScheduleEvent::Begin { goal, version }), []);
    let worker = 1;
    assert_eq!(
        die(&mut schedule, 1),
        [ScheduleEffect::GiveUp { worker, deaths }]
    );
    // The last one has failed, too: the next batch tries all again.
    let effects = schedule.step(ScheduleEvent::Begin { goal, version });
    assert_eq!(
        effects,
        [0, 1].map(|worker| ScheduleEffect::Start { worker })
    );
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
            let asked = asked(&schedule.step(ScheduleEvent::Begin { goal, version }));
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
    let first = asked(&schedule.step(ScheduleEvent::Begin { goal, version }));
    let random: Vec<bool> = first.iter().map(|ask| ask.2).collect();
    assert_eq!(random, [true; 4]);
    let next = asked(&part(&mut schedule, first[0].0, first[0].1));
    assert!(next[0].2, "20 frames are there or on their way");
    let next = asked(&part(&mut schedule, first[2].0, first[2].1));
    assert!(!next[0].2, "30 are");
}

fn part(schedule: &mut Schedule, worker: usize, ticket: u64) -> Vec<ScheduleEffect> {
    let oldest = 1;
    schedule.step(ScheduleEvent::Part {
        worker,
        ticket,
        oldest,
    })
}

/// Worker, ticket, and whether actions are drawn evenly.
fn asked(effects: &[ScheduleEffect]) -> Vec<(usize, u64, bool)> {
    let ask = |effect: &ScheduleEffect| match *effect {
        ScheduleEffect::Ask {
            worker,
            ticket,
            random,
            ..
        } => Some((worker, ticket, random)),
        _ => None,
    };
    effects.iter().filter_map(ask).collect()
}
