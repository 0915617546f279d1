//! Who is asked for what, and when a batch is whole: decisions alone. A loop
//! feeds [`Schedule::step`] with events and performs the effects it returns.

/// Deaths in a row, without a part delivered, after which a worker is given up.
pub(super) const MAX_DEATHS: u32 = 3;
/// Parts that a worker may be asked for and has not delivered: one that is finished
/// and waits, and one that is under way.
pub(super) const AHEAD: usize = 2;

/// What makes a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Goal {
    /// An empty part of every worker: to deliver it, a worker must have its
    /// first weights, and one that dies instead is noticed at once.
    Meet,
    /// One part of every worker, by weights that are newest when it begins.
    Everyone,
    /// The first part that comes; meanwhile all workers go on.
    Anyone,
}

/// What has happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScheduleEvent {
    /// The caller wants a batch; the newest weights have this version.
    Begin { goal: Goal, version: u64 },
    /// A worker delivered a part, all frames of which were chosen by weights of
    /// this version or newer ones.
    Part {
        worker: usize,
        ticket: u64,
        oldest: u64,
    },
    /// A worker sent what cannot be read, or takes too long.
    Failed { worker: usize },
    /// A worker has ended.
    Ended { worker: usize },
    /// Another has taken its place.
    Started { worker: usize },
    /// A [`ScheduleEffect::Ask`] could not be performed.
    NotAsked { worker: usize, ticket: u64 },
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScheduleEffect {
    /// Start a worker in the place of one that has ended.
    Start { worker: usize },
    /// Ask a worker for a part, by weights of this version or newer ones, or by
    /// actions drawn evenly.
    Ask {
        worker: usize,
        ticket: u64,
        version: u64,
        random: bool,
    },
    /// End a worker.
    Kill { worker: usize },
    /// The part that was just heard is this worker's in the batch.
    Keep { worker: usize },
    /// The part that was just heard is not handed out: because it is stale, or
    /// because the batch it was asked for has been given up.
    Discard { worker: usize, stale: bool },
    /// Nor is the part that was kept: its batch has been given up.
    Clear { worker: usize },
    /// The parts that were kept are the batch.
    Deliver,
    /// Start no worker in the place of this one: it does not help. The others go on.
    Abandon { worker: usize, deaths: u32 },
    /// Fail the batch: starting this worker again does not help, and the batch needs it.
    GiveUp { worker: usize, deaths: u32 },
}

/// What the trainer knows of its workers.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Schedule {
    goal: Goal,
    version: u64,
    rules: Rules,
    /// Frames handed out.
    delivered: u64,
    next_ticket: u64,
    workers: Vec<ScheduledWorker>,
}

/// What the caller has set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Rules {
    /// A part for [`Goal::Anyone`] is stale once so many versions and one more
    /// have come after its weights.
    pub max_staleness: Option<u64>,
    /// While fewer frames than this have been handed out, or are on their way from
    /// the same worker, actions are drawn evenly.
    pub init_random_frames: u64,
    /// Frames of one part.
    pub part: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct ScheduledWorker {
    /// It has ended, and no other has started.
    vacant: bool,
    /// No other is to start while workers are left that do better.
    abandoned: bool,
    /// In a row.
    deaths: u32,
    /// Its part of the batch, which is there.
    kept: Option<AskedPart>,
    /// Parts that it has not delivered.
    asked: Vec<AskedPart>,
}

/// A part that a worker was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct AskedPart {
    ticket: u64,
    version: u64,
    random: bool,
    /// The batch that it was asked for has been given up, and no other can use it.
    late: bool,
}

impl Schedule {
    /// Workers that run and have been asked for nothing.
    pub fn new(workers: usize, rules: Rules) -> Self {
        Self {
            goal: Goal::Meet,
            version: 0,
            rules,
            delivered: 0,
            next_ticket: 0,
            workers: vec![ScheduledWorker::default(); workers],
        }
    }

    /// Takes note of an event, and decides what to do.
    pub fn step(&mut self, event: ScheduleEvent) -> Vec<ScheduleEffect> {
        let mut effects = Vec::new();
        match event {
            ScheduleEvent::Begin { goal, version } => self.begin(goal, version, &mut effects),
            ScheduleEvent::Part {
                worker,
                ticket,
                oldest,
            } => self.part(worker, ticket, oldest, &mut effects),
            // Its end is an event of its own; a fresh worker may do better. What it still sends
            // does not follow what was kept.
            ScheduleEvent::Failed { worker } => {
                // Its parts count no more. Their tickets are unknown from here on, so they are
                // discarded.
                self.workers[worker].asked.clear();
                effects.push(ScheduleEffect::Kill { worker });
            }
            ScheduleEvent::Ended { worker } => self.ended(worker, &mut effects),
            ScheduleEvent::Started { worker } => {
                let state = &mut self.workers[worker];
                // An abandoned worker is started again where no other is left.
                (state.vacant, state.abandoned) = (false, false);
                self.ask(worker, &mut effects);
            }
            ScheduleEvent::NotAsked { worker, ticket } => {
                let asked = &mut self.workers[worker].asked;
                asked.retain(|asked| asked.ticket != ticket);
            }
        }
        effects
    }

    /// The workers whose parts are waited for.
    pub fn missing(&self) -> impl Iterator<Item = usize> {
        let waited_for = |worker: &ScheduledWorker| worker.kept.is_none() && !worker.abandoned;
        (0..self.workers.len()).filter(move |&worker| waited_for(&self.workers[worker]))
    }

    /// Whether a worker has yet to deliver something.
    pub fn owes(&self, worker: usize) -> bool {
        !self.workers[worker].asked.is_empty()
    }

    fn begin(&mut self, goal: Goal, version: u64, effects: &mut Vec<ScheduleEffect>) {
        let of_another_goal = goal != self.goal;
        self.goal = goal;
        self.version = version;
        // All workers of a batch get the same kind of actions, so this is decided once.
        let random = self.is_random(0);
        // A batch that was given up may be tried again: what was asked for it still counts,
        // unless other weights have come.
        let usable = |asked: &AskedPart| {
            !of_another_goal && !asked.late && asked.version == version && asked.random == random
        };
        // Abandoned workers stay so only while others do better.
        let none_is_left = self.workers.iter().all(|worker| worker.vacant);
        for worker in 0..self.workers.len() {
            let state = &mut self.workers[worker];
            // With `Anyone` a part is usable for any batch: its staleness is judged when it
            // arrives.
            if goal != Goal::Anyone {
                // A kept part of weights that are not the newest cannot be in this batch.
                if state.kept.take_if(|kept| !usable(kept)).is_some() {
                    effects.push(ScheduleEffect::Clear { worker });
                }
                let asked = state.asked.iter_mut();
                // A late request cannot be taken back. Its part is discarded when it comes.
                asked.for_each(|asked| asked.late = !usable(asked));
            }
            if !state.vacant {
                self.ask(worker, effects);
            } else if none_is_left || !state.abandoned {
                effects.push(ScheduleEffect::Start { worker });
            }
        }
    }

    fn ended(&mut self, worker: usize, effects: &mut Vec<ScheduleEffect>) {
        let state = &mut self.workers[worker];
        // Vacant until `Started`: nothing is asked of it.
        state.vacant = true;
        state.deaths += 1;
        state.asked.clear();
        let deaths = state.deaths;
        let others_go_on =
            // A batch of all workers needs this one, so it can go on without it only with `Anyone`.
            self.goal == Goal::Anyone && self.workers.iter().any(|other| !other.vacant);
        let keeps_dying = deaths > MAX_DEATHS;
        self.workers[worker].abandoned = keeps_dying && others_go_on;
        effects.push(match (keeps_dying, others_go_on) {
            // The first deaths may be chance: another takes the place at once.
            (false, _) => ScheduleEffect::Start { worker },
            (true, true) => ScheduleEffect::Abandon { worker, deaths },
            (true, false) => ScheduleEffect::GiveUp { worker, deaths },
        });
    }

    fn part(&mut self, worker: usize, ticket: u64, oldest: u64, effects: &mut Vec<ScheduleEffect>) {
        let state = &mut self.workers[worker];
        // A part of a worker that was declared failed, or a ticket that it made up.
        let Some(at) = state.asked.iter().position(|asked| asked.ticket == ticket) else {
            let stale = false;
            effects.push(ScheduleEffect::Discard { worker, stale });
            return;
        };
        let asked = state.asked.remove(at);
        // A worker that delivers is healthy. Only deaths in a row count.
        state.deaths = 0;
        if asked.late {
            let stale = false;
            effects.push(ScheduleEffect::Discard { worker, stale });
            self.ask(worker, effects);
            return;
        }
        if self.goal == Goal::Anyone {
            // Judged by the oldest action of the part, as the caller's limit is for each frame.
            let age = self.version.saturating_sub(oldest);
            if self.rules.max_staleness.is_some_and(|most| age > most) {
                let stale = true;
                effects.push(ScheduleEffect::Discard { worker, stale });
            } else {
                // Frames count towards `init_random_frames` when they are handed out.
                self.delivered += self.rules.part;
                effects.extend([ScheduleEffect::Keep { worker }, ScheduleEffect::Deliver]);
            }
            // At once, so that the worker never idles while the trainer trains.
            self.ask(worker, effects);
            return;
        }
        state.kept = Some(asked);
        effects.push(ScheduleEffect::Keep { worker });
        // The batch is whole. The kept parts are handed out, and nothing is kept for the next one.
        if self.workers.iter().all(|worker| worker.kept.is_some()) {
            self.workers
                .iter_mut()
                .for_each(|worker| worker.kept = None);
            if self.goal == Goal::Everyone {
                self.delivered += self.rules.part * self.workers.len() as u64;
            }
            effects.push(ScheduleEffect::Deliver);
        }
    }

    /// Asks a worker for as much as it may be asked for. What it owes never grows: a
    /// worker that is busy with late parts is asked once it has delivered one.
    fn ask(&mut self, worker: usize, effects: &mut Vec<ScheduleEffect>) {
        let most = match self.goal {
            Goal::Meet | Goal::Everyone => 1,
            Goal::Anyone => AHEAD,
        };
        loop {
            let state = &self.workers[worker];
            let awaited = state.asked.iter().filter(|asked| !asked.late).count();
            // A worker with a kept part waits for the next weights. Late parts count towards what
            // it owes.
            if state.kept.is_some() || awaited >= most || state.asked.len() >= AHEAD {
                return;
            }
            let asked = AskedPart {
                ticket: self.next_ticket,
                version: self.version,
                // Parts on their way count too: otherwise a worker that is asked in advance would
                // draw too many random actions.
                random: self.is_random(awaited),
                late: false,
            };
            effects.push(ScheduleEffect::Ask {
                worker,
                ticket: asked.ticket,
                version: asked.version,
                random: asked.random,
            });
            self.next_ticket += 1;
            self.workers[worker].asked.push(asked);
        }
    }

    /// Whether the part that a worker is asked for next has actions drawn evenly, if it
    /// owes so many. All parts of a batch are alike in this, and every worker begins
    /// with them.
    fn is_random(&self, awaited: usize) -> bool {
        let on_their_way = match self.goal {
            Goal::Meet => return false,
            Goal::Everyone => 0,
            Goal::Anyone => awaited as u64,
        };
        // Random actions end with the part in which the number is reached.
        self.delivered + on_their_way * self.rules.part < self.rules.init_random_frames
    }
}

#[cfg(test)]
mod tests;
