//! A trainer and explorers, and everything that may happen to them next.

use super::super::*;

/// A trainer that makes its steps of the samples that explorers made, and synchronises when it is told
/// to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct TrainerRun {
    party: Party,
    epoch: Epoch,
    step: u64,
    /// A sync was tried and failed: the next step comes first, if it can.
    tried: bool,
    meets: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct ExplorerRun {
    party: Party,
    step: u64,
    /// The step of its last sync.
    synced: u64,
    loaded: Version,
    /// It has asked since its last step.
    asked: bool,
    waits: bool,
    /// What it was told to fetch, or is sent. It may still come after the wait has ended.
    told: Option<Version>,
}

impl ExplorerRun {
    /// A new process, after so many steps.
    fn new(step: u64) -> Self {
        Self {
            party: Party(0),
            step,
            synced: step,
            loaded: Version::NONE,
            asked: false,
            waits: false,
            told: None,
        }
    }
}

/// A process: it runs, is dead and will be started again with its steps, or has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Life<T> {
    Runs(T),
    Dead(u64),
    Ended,
}

impl<T> Life<T> {
    fn running(&self) -> Option<&T> {
        match self {
            Self::Runs(run) => Some(run),
            _ => None,
        }
    }

    fn running_mut(&mut self) -> Option<&mut T> {
        match self {
            Self::Runs(run) => Some(run),
            _ => None,
        }
    }
}

/// Everybody, and what may still go wrong.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct World {
    sync: Synchronizer,
    trainer: Life<TrainerRun>,
    explorers: Vec<Life<ExplorerRun>>,
    /// The most steps that an explorer has made: a trainer makes no more.
    samples: u64,
    faults: u8,
    /// How many deadlines may still come. Each try of a trainer has a version of its own, so that more
    /// of them would be more and more worlds.
    ticks: u8,
    next: u64,
    pub(super) synced: bool,
    /// Of the trainer, and of the first explorer.
    styles: [Style; 2],
}

/// What is explored.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) method: Method,
    pub(super) style: Style,
    /// Of the first explorer; the others have the trainer's.
    pub(super) own_style: Style,
    pub(super) explorers: usize,
    pub(super) trained: u64,
    pub(super) explored: u64,
    pub(super) faults: u8,
    /// Whether waits have a deadline.
    pub(super) deadlines: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Normal,
    Fault,
}

impl World {
    pub(super) fn new(limits: &Limits) -> Self {
        let mut world = Self {
            sync: Synchronizer::new(limits.method, None, Epoch(0)),
            trainer: Life::Ended,
            explorers: Vec::new(),
            samples: 0,
            faults: limits.faults,
            ticks: 1,
            next: 0,
            synced: false,
            styles: [limits.style, limits.own_style],
        };
        world.join_trainer(0, Epoch(1));
        for _ in 0..limits.explorers {
            world.explorers.push(Life::Dead(0));
            let at = world.explorers.len() - 1;
            world.join_explorer(at, ExplorerRun::new(0));
        }
        world
    }

    fn party(&mut self) -> Party {
        self.next += 1;
        Party(self.next)
    }

    fn join_trainer(&mut self, step: u64, epoch: Epoch) {
        let party = self.party();
        self.trainer = Life::Runs(TrainerRun {
            party,
            epoch,
            step,
            tried: false,
            meets: false,
        });
        self.tell(SyncEvent::TrainerJoined(party, epoch, step, self.styles[0]));
    }

    fn join_explorer(&mut self, at: usize, run: ExplorerRun) {
        let party = self.party();
        self.explorers[at] = Life::Runs(ExplorerRun { party, ..run });
        let (style, steps) = (self.styles[usize::from(at == 0)], [run.step, run.synced]);
        self.tell(SyncEvent::ExplorerJoined(party, run.loaded, steps, style));
    }

    fn explorer(&mut self, party: Party) -> Option<&mut ExplorerRun> {
        let mut runs = self.explorers.iter_mut().filter_map(Life::running_mut);
        runs.find(|one| one.party == party)
    }

    /// Tells the synchronizer, and does what it says.
    fn tell(&mut self, event: SyncEvent) {
        let now = Moment(u64::from(event == SyncEvent::Ticked));
        let needed = self.sync.waiting_trainer_need() != Need::No;
        let newest = self.sync.newest().0;
        let effects = self.sync.step(event, now);
        if !effects
            .iter()
            .any(|effect| matches!(effect, SyncEffect::Refused(_)))
        {
            let needs = self.sync.waiting_trainer_need() != Need::No;
            let woken = effects
                .iter()
                .any(|effect| matches!(effect, SyncEffect::Wake(_)));
            assert_eq!(
                woken,
                needs && !needed,
                "a trainer that waits is told at once"
            );
            let offered = effects.contains(&SyncEffect::Offered);
            assert!(
                offered || self.sync.newest().0 == newest,
                "explorers are told at once"
            );
        }
        for effect in effects {
            match effect {
                SyncEffect::Wake(_) | SyncEffect::Offered => {}
                SyncEffect::Fetch(party, version) => self.told(party, version),
                SyncEffect::Meet(trainer, version, parties) => {
                    assert!(!parties.is_empty());
                    for party in parties {
                        self.told(party, version);
                    }
                    let run = self.trainer.running().expect("it waits");
                    assert!(run.party == trainer && run.meets);
                }
                SyncEffect::Synced(party, outcome) => self.end(party, outcome),
                SyncEffect::Met(party, version, all) => {
                    for (party, outcome) in &all {
                        let loaded = self.explorer(*party).map(|run| run.loaded);
                        // It may have left since.
                        let has = loaded.is_none_or(|loaded| loaded >= version);
                        let is_said = matches!(outcome, SyncOutcome::Synced(_));
                        assert!(!is_said || has, "{party:?} {outcome:?}");
                    }
                    let loaded = all
                        .values()
                        .any(|one| matches!(one, SyncOutcome::Synced(_)));
                    let run = self.trainer.running_mut().expect("it waits");
                    assert!(run.party == party && run.meets);
                    (run.meets, run.tried) = (false, !loaded);
                }
                SyncEffect::Refused(party) => {
                    let own = self.trainer.running().map(|one| one.party);
                    assert_ne!(own, Some(party));
                    assert!(self.explorer(party).is_none(), "{party:?}");
                }
            }
        }
    }

    fn told(&mut self, party: Party, version: Version) {
        let run = self.explorer(party).expect("it is there");
        assert!(run.waits && version > run.loaded);
        run.told = Some(version);
    }

    fn end(&mut self, party: Party, outcome: SyncOutcome) {
        let must = self.sync.explorer_need(party) == Need::Must;
        let Some(run) = self.explorer(party) else {
            return;
        };
        assert!(run.waits, "an answer that nobody waits for: {outcome:?}");
        run.waits = false;
        if matches!(outcome, SyncOutcome::Synced(_) | SyncOutcome::NothingNewer) {
            run.synced = run.step;
        }
        // One that must synchronise makes no step before it has.
        run.asked = !must;
        match outcome {
            // The label is what was loaded.
            SyncOutcome::Synced(version) => {
                assert_eq!(version, run.loaded);
                self.synced = true;
            }
            // It stops, as it must.
            SyncOutcome::OutOfReach => self.leave(party, PartyDeparture::Stopped),
            _ => {}
        }
    }

    fn leave(&mut self, party: Party, how: PartyDeparture) {
        for life in &mut self.explorers {
            if let Life::Runs(run) = life
                && run.party == party
            {
                *life = match how {
                    PartyDeparture::Stopped => Life::Ended,
                    PartyDeparture::Died => Life::Dead(run.step),
                };
            }
        }
        self.tell(SyncEvent::ExplorerLeft(party));
    }

    /// Every world that may come next.
    pub(super) fn successors(&self, limits: &Limits) -> Vec<(Kind, Self)> {
        let mut next = Vec::new();
        let mut add = |kind, change: &dyn Fn(&mut Self)| {
            let mut world = self.clone();
            world.faults -= u8::from(kind == Kind::Fault);
            change(&mut world);
            world.check(limits);
            next.push((kind, world));
        };
        let until = limits.deadlines.then_some(Moment(1));
        let faulty = self.faults > 0;
        match self.trainer {
            Life::Runs(run) => {
                let party = run.party;
                let alone = self.explorers.iter().all(|one| *one == Life::Ended);
                let may_step = run.step < limits.trained && (self.samples > run.step || alone);
                let waits = !may_step && run.step < limits.trained;
                let needs = match waits {
                    true => self.sync.waiting_trainer_need() != Need::No,
                    false => self.sync.trainer_need() != Need::No,
                };
                let version = self.sync.highest().next();
                if run.meets {
                    if faulty {
                        add(Kind::Fault, &|world| {
                            world.tell(SyncEvent::TrainerFailed(party))
                        });
                    }
                } else {
                    // One that could not do it makes its next step first, if it has samples for it.
                    if needs && !(run.tried && may_step) && !(run.tried && alone) {
                        add(Kind::Normal, &|world| {
                            if let Life::Runs(run) = &mut world.trainer {
                                run.meets = limits.method == Method::Direct;
                                run.tried = false;
                            }
                            world.tell(match limits.method {
                                Method::Direct => {
                                    SyncEvent::TrainerMeets(party, version, run.step, until)
                                }
                                _ => SyncEvent::TrainerPublished(party, version, run.step),
                            });
                        });
                        if faulty {
                            add(Kind::Fault, &|world| {
                                if let Life::Runs(run) = &mut world.trainer {
                                    run.tried = true;
                                }
                                world.tell(SyncEvent::TrainerFailed(party));
                            });
                        }
                    }
                    if may_step && (!needs || run.tried) {
                        add(Kind::Normal, &|world| {
                            if let Life::Runs(run) = &mut world.trainer {
                                (run.step, run.tried) = (run.step + 1, false);
                            }
                            world.tell(SyncEvent::TrainerStepped(party, run.step + 1));
                        });
                    }
                    if !may_step && (run.step == limits.trained || alone) && (!needs || run.tried) {
                        add(Kind::Normal, &|world| {
                            world.trainer = Life::Ended;
                            world.tell(SyncEvent::TrainerLeft(party, PartyDeparture::Stopped));
                        });
                    }
                }
                if faulty {
                    add(Kind::Fault, &|world| {
                        world.trainer = Life::Dead(run.step);
                        world.tell(SyncEvent::TrainerLeft(party, PartyDeparture::Died));
                    });
                    // Another one takes its place. It comes back, and is nobody.
                    add(Kind::Fault, &|world| {
                        world.trainer = Life::Ended;
                        world.join_trainer(run.step, Epoch(run.epoch.0 + 1));
                        let again = world.party();
                        let style = world.styles[0];
                        world.tell(SyncEvent::TrainerJoined(again, run.epoch, run.step, style));
                        world.tell(SyncEvent::TrainerPublished(party, Version(99), 99));
                        assert_eq!(world.sync.state(again), State::Stopped);
                    });
                }
            }
            Life::Dead(step) => add(Kind::Normal, &|world| world.join_trainer(step, Epoch(9))),
            Life::Ended => {}
        }
        for (at, life) in self.explorers.iter().enumerate() {
            let run = match *life {
                Life::Runs(run) => run,
                Life::Dead(step) => {
                    add(Kind::Normal, &|world| {
                        world.join_explorer(at, ExplorerRun::new(step));
                    });
                    continue;
                }
                Life::Ended => continue,
            };
            let party = run.party;
            let change = |world: &mut Self, change: &dyn Fn(&mut ExplorerRun)| {
                if let Life::Runs(run) = &mut world.explorers[at] {
                    change(run);
                }
            };
            if let Some(version) = run.told {
                // Also after its wait has ended: it may be in the middle of it.
                add(Kind::Normal, &|world| {
                    change(world, &|run| (run.loaded, run.told) = (version, None));
                    world.tell(SyncEvent::ExplorerLoaded(party, version));
                });
                if faulty {
                    add(Kind::Fault, &|world| {
                        change(world, &|run| run.told = None);
                        world.tell(SyncEvent::ExplorerFailed(party, version));
                    });
                }
            }
            if run.waits {
                if faulty {
                    add(Kind::Fault, &|world| {
                        world.tell(SyncEvent::ExplorerCancelled(party))
                    });
                    add(Kind::Fault, &|world| {
                        world.tell(SyncEvent::ExplorerSyncs(party, until))
                    });
                }
            } else if run.told.is_some() {
                // It knows that it is too late, and goes on when it has loaded or thrown away.
                add(Kind::Normal, &|world| change(world, &|run| run.told = None));
            } else if !run.asked {
                let needs = self.sync.explorer_need(party) != Need::No;
                add(Kind::Normal, &|world| {
                    change(world, &|run| (run.asked, run.waits) = (true, needs));
                    if needs {
                        world.tell(SyncEvent::ExplorerSyncs(party, until));
                    }
                });
            } else if run.step < limits.explored {
                add(Kind::Normal, &|world| {
                    change(world, &|run| (run.step, run.asked) = (run.step + 1, false));
                    world.samples = world.samples.max(run.step + 1);
                    world.tell(SyncEvent::ExplorerStepped(party, run.step + 1));
                });
            } else {
                add(Kind::Normal, &|world| {
                    world.leave(party, PartyDeparture::Stopped)
                });
            }
            if faulty {
                add(Kind::Fault, &|world| {
                    world.leave(party, PartyDeparture::Died);
                    world.tell(SyncEvent::ExplorerLoaded(party, Version(99)));
                });
                // Its connection ends, and it joins again with what it has.
                add(Kind::Fault, &|world| {
                    world.leave(party, PartyDeparture::Died);
                    let run = ExplorerRun {
                        asked: false,
                        waits: false,
                        told: None,
                        ..run
                    };
                    world.join_explorer(at, run);
                });
            }
        }
        if limits.deadlines && self.ticks > 0 && self.sync.deadline().is_some() {
            add(Kind::Normal, &|world| {
                world.ticks -= 1;
                world.tell(SyncEvent::Ticked);
                assert_eq!(world.sync.deadline(), None, "nobody waits any longer");
            });
        }
        next
    }

    pub(super) fn is_over(&self) -> bool {
        self.trainer == Life::Ended && self.explorers.iter().all(|one| *one == Life::Ended)
    }

    fn check(&self, limits: &Limits) {
        let direct = limits.method == Method::Direct;
        for run in self.explorers.iter().filter_map(Life::running) {
            assert_eq!(self.sync.version(run.party), Some(run.loaded));
            let needs = self.sync.explorer_need(run.party) != Need::No;
            let expected = match (run.waits, direct, needs) {
                (true, true, _) => State::WaitingSync,
                (true, false, _) | (false, _, true) => State::RequireSync,
                (false, _, false) => State::Running,
            };
            assert_eq!(self.sync.state(run.party), expected);
        }
        let newest = self.sync.newest().0;
        assert!(newest <= self.sync.highest());
        // No request is lost.
        for party in self.sync.asking() {
            let behind = self.sync.version(party) < Some(newest);
            assert!(direct || !behind, "it could fetch one");
            if let Some(run) = self.trainer.running() {
                let driven = matches!(limits.style, Style::ByExplorer { .. });
                let needs = self.sync.trainer_need() == Need::Yes;
                assert!(needs || run.meets || !(behind || driven));
            }
        }
        if let Some(run) = self.trainer.running() {
            let state = self.sync.state(run.party);
            assert_eq!(state == State::WaitingSync, run.meets);
        }
        assert_eq!(self.sync.state(Party(0)), State::Stopped);
    }
}
