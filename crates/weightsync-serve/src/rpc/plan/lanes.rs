//! Connections: who joins and goes, what each is called with, and what it says.

use std::collections::BTreeMap;

use weightsync::transport::{GoneWorker, Lateness};
use weightsync::{Outcome, Version, WorkerId};

use super::{
    About, Answer, Lane, LaneId, Life, MAX_GONE, MAX_KNOWN, Numbered, Order, Plan, Set, Want,
};

impl<V: Clone + Numbered> Plan<V> {
    /// A worker joins, in place of an earlier connection of its number.
    pub(crate) fn join(&mut self, about: About) -> LaneId {
        self.last_lane += 1;
        let (id, worker) = (self.last_lane, about.worker);
        let set = self.meant.for_worker(worker).only(&about.wanted);
        let sequence = self.sequence;
        let lane = Lane {
            life: Life::Here,
            silent: false,
            meant: (!set.is_empty()).then_some(Order { sequence, set }),
            called: 0,
            staged: 0,
            taken: 0,
            applied: 0,
            runs: vec![Version::NONE; self.newest.len()],
            refused: None,
            rejected: None,
            late: Lateness::default(),
            asked: 0,
            joined: !about.announces,
            signs: 0,
            asking: BTreeMap::new(),
            watchers: 0,
            about,
        };
        self.lanes.insert(id, lane);
        if let Some(before) = self.current.insert(worker, id) {
            self.forget(before);
        }
        if let Some(before) = self.missing.remove(&worker) {
            self.forget(before);
        }
        self.rejected.retain(|(rejected, _)| *rejected != worker);
        id
    }

    /// The connection of another worker that has the number of one that comes. A worker
    /// that registers again comes from the same process and listens where it did.
    pub(crate) fn holder(&self, about: &About) -> Option<LaneId> {
        let id = *self.current.get(&about.worker)?;
        let other = &self.lanes.get(&id)?.about;
        ((other.pid, other.addr) != (about.pid, about.addr)).then_some(id)
    }

    /// A worker's own rendez-vous is over.
    pub(crate) fn joined(&mut self, id: LaneId) {
        if let Some(lane) = self.lanes.get_mut(&id) {
            lane.joined = true;
        }
    }

    /// A connection has ended.
    pub(crate) fn end(&mut self, id: LaneId, life: Life) {
        let Some(lane) = self.lanes.get_mut(&id) else {
            return;
        };
        if lane.life == Life::Here {
            lane.life = life;
        }
        lane.meant = None;
        let worker = lane.about.worker;
        if self.current.get(&worker) == Some(&id) {
            self.current.remove(&worker);
            self.go_on_with_another(worker);
            if !self.current.contains_key(&worker) {
                self.remember(id);
            }
        }
        self.forget(id);
    }

    /// Remembers one that is gone, and by which no other connection goes on.
    fn remember(&mut self, id: LaneId) {
        let Some((lane, how)) = self
            .lanes
            .get(&id)
            .and_then(|lane| Some((lane, lane.end()?)))
        else {
            return;
        };
        let worker = lane.about.worker;
        if how == Outcome::Left {
            let gone = GoneWorker {
                status: self.status(lane),
                how,
                joined: id,
            };
            if self.left.len() >= MAX_GONE {
                self.left.pop_first();
            }
            self.left.insert(worker, gone);
            return;
        }
        if !lane.belongs() {
            return;
        }
        if self.missing.len() >= MAX_GONE
            && let Some((_, oldest)) = self.missing.pop_first()
        {
            self.forget(oldest);
        }
        self.missing.insert(worker, id);
    }

    /// Misses these workers no more, until they come and go again.
    pub(crate) fn forget_missing(&mut self, workers: &[WorkerId]) {
        for worker in workers {
            if let Some(id) = self.missing.remove(worker) {
                self.forget(id);
            }
        }
    }

    /// A worker that has registered twice, as the first attempt was not answered in
    /// time, goes on by the connection that is left.
    fn go_on_with_another(&mut self, worker: WorkerId) {
        let set = self.meant.for_worker(worker);
        let mut others = self.lanes.iter_mut().rev();
        let other = others.find(|(_, lane)| {
            lane.about.worker == worker && lane.life == Life::Here && lane.rejected.is_none()
        });
        let Some((other, lane)) = other else {
            return;
        };
        let set = set.only(&lane.about.wanted);
        if !set.is_empty() {
            let sequence = self.sequence;
            lane.mean(Order { sequence, set });
        }
        self.current.insert(worker, *other);
    }

    /// Forgets a connection that has ended, once no publication has a line of it, nor
    /// any to come.
    pub(super) fn forget(&mut self, id: LaneId) {
        let over = |lane: &Lane<V>| {
            let is_missing = self.missing.get(&lane.about.worker) == Some(&id);
            lane.life != Life::Here && lane.watchers == 0 && !is_missing
        };
        if self.lanes.get(&id).is_some_and(over) {
            self.lanes.remove(&id);
        }
    }

    /// Whether this is the connection of a worker that is here.
    pub(crate) fn is_here(&self, id: LaneId) -> bool {
        let lane = self.lanes.get(&id);
        lane.is_some_and(|lane| lane.life == Life::Here)
    }

    /// Whether nothing is heard of a connection.
    pub(crate) fn is_silent(&self, id: LaneId) -> bool {
        self.lanes.get(&id).is_some_and(|lane| lane.silent)
    }

    pub(crate) fn about(&self, id: LaneId) -> Option<&About> {
        self.lanes.get(&id).map(|lane| &lane.about)
    }

    /// The sequence of what a connection is meant to have; 0 for nothing.
    pub(crate) fn sequence_for(&self, id: LaneId) -> u64 {
        let meant = self.lanes.get(&id).and_then(|lane| lane.meant.as_ref());
        meant.map_or(0, |order| order.sequence)
    }

    /// What to call a connection with next, if there is anything new for it.
    pub(crate) fn next_call(&mut self, id: LaneId) -> Option<Order<V>> {
        let lane = self.lanes.get_mut(&id)?;
        if lane.life != Life::Here || lane.rejected.is_some() {
            return None;
        }
        let order = lane.meant.as_ref()?;
        if order.sequence <= lane.called {
            return None;
        }
        lane.called = order.sequence;
        Some(order.clone())
    }

    /// A call did not come through: the next one says the newest again.
    pub(crate) fn call_failed(&mut self, id: LaneId) {
        if let Some(lane) = self.lanes.get_mut(&id) {
            lane.called = lane.called.min(lane.staged);
        }
    }

    /// A worker has all of it, and has checked it.
    pub(crate) fn staged(&mut self, id: LaneId, sequence: u64) {
        if let Some(lane) = self.lanes.get_mut(&id) {
            let sequence = sequence.min(self.sequence);
            lane.staged = lane.staged.max(sequence);
        }
    }

    /// A worker's program has been handed it.
    pub(crate) fn taken(&mut self, id: LaneId, sequence: u64) {
        self.staged(id, sequence);
        if let Some(lane) = self.lanes.get_mut(&id) {
            lane.taken = lane.taken.max(sequence.min(self.sequence));
        }
    }

    /// A worker runs these versions from here on; the sequence is that of the call
    /// that brought them, or 0.
    pub(crate) fn applied(&mut self, id: LaneId, sequence: u64, versions: &[(usize, Version)]) {
        let newest = &self.newest;
        let Some(lane) = self.lanes.get_mut(&id) else {
            return;
        };
        let sequence = sequence.min(self.sequence);
        // What came by another way may have overtaken it.
        if sequence != 0 && sequence < lane.applied {
            return;
        }
        lane.applied = lane.applied.max(sequence);
        lane.staged = lane.staged.max(sequence);
        for (model, version) in versions {
            // No worker runs what was not sent.
            if lane.about.wanted.contains(model) && *version <= newest[*model] {
                lane.runs[*model] = *version;
            }
        }
    }

    /// A worker cannot use the set of this sequence.
    pub(crate) fn refused(&mut self, id: LaneId, sequence: u64, reason: String) {
        if let Some(lane) = self.lanes.get_mut(&id)
            && lane
                .refused
                .as_ref()
                .is_none_or(|(before, _)| *before <= sequence)
        {
            lane.refused = Some((sequence, reason));
        }
    }

    /// A worker can use nothing at all.
    pub(crate) fn rejected(&mut self, id: LaneId, reason: String) {
        let Some(lane) = self.lanes.get_mut(&id) else {
            return;
        };
        let worker = lane.about.worker;
        lane.meant = None;
        lane.rejected = Some(reason.clone());
        if self.current.get(&worker) == Some(&id) {
            self.rejected.push((worker, reason));
        }
    }

    /// Whether anything was heard of a connection lately; true if that is news.
    pub(crate) fn silent(&mut self, id: LaneId, silent: bool) -> bool {
        let Some(lane) = self.lanes.get_mut(&id) else {
            return false;
        };
        lane.signs += u64::from(!silent);
        std::mem::replace(&mut lane.silent, silent) != silent
    }

    /// How many signs of life a connection has given; `None` if it has ended, or nothing
    /// is heard of it.
    pub(crate) fn signs(&self, id: LaneId) -> Option<u64> {
        let lane = self.lanes.get(&id)?;
        (lane.life == Life::Here && !lane.silent).then_some(lane.signs)
    }

    /// What a worker that asks for a set gets. After [`Answer::Later`] it is one that
    /// waits, until there is such a set or [`asks_no_more`](Self::asks_no_more).
    pub(crate) fn ask(&mut self, id: LaneId, want: Want) -> Answer<V> {
        let answer = self.answer(id, want);
        if let Answer::Later(_) = answer
            && let Some(lane) = self.lanes.get_mut(&id)
        {
            self.last_question += 1;
            lane.asked = self.last_question;
            lane.asking.insert(self.last_question, want);
            return Answer::Later(self.last_question);
        }
        answer
    }

    /// The same without asking, for one that waits already.
    pub(crate) fn answer(&self, id: LaneId, want: Want) -> Answer<V> {
        let Some(lane) = self.lanes.get(&id) else {
            return Answer::Gone;
        };
        let wanted = &lane.about.wanted;
        let allowed = match want {
            Want::Newest => true,
            Want::AtLeast(model, _) | Want::Exactly(model, _) => wanted.contains(&model),
        };
        if lane.life != Life::Here || lane.rejected.is_some() || !allowed {
            return Answer::Gone;
        }
        let worker = lane.about.worker;
        let sets = || {
            let sets = self.meant.askable(worker);
            sets.map(|set| set.only(wanted)).enumerate()
        };
        let order = |(place, set): (usize, Set<V>)| {
            let newest = lane.meant.as_ref().filter(|_| place == 0);
            let sequence = newest.map_or(0, |order| order.sequence);
            Answer::Set(Order { sequence, set })
        };
        match want {
            Want::Newest => sets().next().filter(|(_, set)| !set.is_empty()),
            Want::AtLeast(model, least) => {
                let newest = sets().next();
                newest.filter(|(_, set)| set.version(model) >= least)
            }
            Want::Exactly(model, exact) => {
                let found = sets().find(|(_, set)| set.version(model) == exact);
                if found.is_none() {
                    let versions = sets().map(|(_, set)| set.version(model));
                    let mut known: Vec<_> = versions.filter(|one| !one.is_none()).collect();
                    known.sort_unstable_by(|a, b| b.cmp(a));
                    known.dedup();
                    known.truncate(MAX_KNOWN);
                    return Answer::Unknown { known };
                }
                found
            }
        }
        .map_or(Answer::Later(0), order)
    }

    /// A question that waited does not any more.
    pub(crate) fn asks_no_more(&mut self, id: LaneId, question: u64) {
        if let Some(lane) = self.lanes.get_mut(&id) {
            lane.asking.remove(&question);
        }
    }
}
