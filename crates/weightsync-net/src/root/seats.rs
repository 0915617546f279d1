//! Which workers of other hosts a sender knows, and by which agent each is reached.
//!
//! **Guarantee.** Plain values in, plain values out; times are since any one moment.
//! A worker has one seat at most, and keeps it for as long as it is the same life of
//! it: by whichever agent it is reached, and for [`GRACE`] by none. What an agent
//! says of a worker that is reached by another is not heard. The next life of a
//! worker waits until it is known whether the one that has the seat is there still:
//! until something is heard of the agent that reaches it, or that is gone.
//!
//! A worker that is its own agent, and whose connection was closed, has most likely
//! died; it has [`BACK`] to show that it has not.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use weightsync_core::WorkerId;
use weightsync_mem::Going;

use super::topology::AgentId;

/// How long workers whose agent hung up may take to come back by another way
/// before they count as lost.
pub(super) const GRACE: Duration = Duration::from_millis(900);

/// How long one that was its own agent may take to come back after that hung up before
/// it counts as dead.
pub(super) const BACK: Duration = Duration::from_millis(300);

/// A process, wherever it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Process {
    /// The same for every process of one host.
    pub(crate) host: [u8; 16],
    pub(crate) pid: u32,
}

/// How an agent went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Parting {
    /// It said goodbye.
    Left,
    /// Its connection was closed, perhaps because it died.
    HungUp,
    /// Its connection failed on the way.
    Cut,
    /// It fell silent, or was given up.
    Silent,
}

/// The seats; `T` is what the sender has of each worker, and `W` what one asks for that
/// waits.
#[derive(Debug)]
pub(crate) struct Seats<T, W> {
    seats: BTreeMap<WorkerId, Seat<T>>,
    /// Until when those may come back that are not reached.
    until: BTreeSet<(Duration, WorkerId)>,
    /// At most one for each seat.
    waiting: BTreeMap<WorkerId, Waiter<W>>,
}

/// One that waits for a seat.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Waiter<W> {
    /// By whom it comes.
    pub(crate) agent: AgentId,
    pub(crate) worker: WorkerId,
    pub(crate) instance: u64,
    pub(crate) asks: W,
}

#[derive(Debug)]
struct Seat<T> {
    of: T,
    instance: u64,
    process: Process,
    /// By whom it is reached; `None` while it is not.
    agent: Option<AgentId>,
    /// By whom it was before, as long as that has not said that it is gone.
    before: Option<AgentId>,
    /// Until when it may come from an agent that it was on its way to and that is gone,
    /// should it have been there already.
    went: Option<Duration>,
    /// When it is given up, if it is not reached, and as what.
    until: Option<(Duration, Going)>,
}

/// What a worker that comes is.
#[derive(Debug)]
pub(crate) enum Comer<'a, T> {
    /// One that has a seat and comes by another way.
    Back(&'a mut T),
    /// One without. The worker that had its number and is now silent has died.
    New(Option<T>),
    /// Another life of it has the seat, and is reached by this agent, which may have
    /// fallen silent: it [waits](Seats::wait) until that is known.
    Waits(AgentId),
    /// Another life of it has the seat, and is there.
    Two,
}

/// What it comes to that an agent says of a worker that it is gone.
#[derive(Debug, PartialEq)]
pub(crate) enum Leaver<'a, T> {
    /// It has no seat any more.
    Over(T),
    /// It gave up waiting to be let in there. It has been at the agent before all
    /// the time, and is reached by that one again.
    Back(&'a mut T),
    /// It is reached by another.
    Elsewhere,
}

/// What becomes of the workers of an agent that is gone.
#[derive(Debug, PartialEq)]
pub(crate) struct Parted<T> {
    /// Those that have no seat any more.
    pub(crate) over: Vec<(T, Going)>,
    /// Those that are reached by the agent at which they have been all the time.
    pub(crate) back: Vec<WorkerId>,
}

impl<T, W> Seats<T, W> {
    /// Nobody's yet.
    pub(crate) fn new() -> Self {
        Self {
            seats: BTreeMap::new(),
            until: BTreeSet::new(),
            waiting: BTreeMap::new(),
        }
    }

    /// A worker comes by this agent. One that has a seat is reached by it from now
    /// on.
    pub(crate) fn comes(
        &mut self,
        agent: AgentId,
        worker: WorkerId,
        instance: u64,
    ) -> Comer<'_, T> {
        let (same, by) = match self.seats.get(&worker) {
            None => return Comer::New(None),
            Some(seat) => (seat.instance == instance, seat.agent),
        };
        if !same {
            return match by {
                None => Comer::New(self.take(worker)),
                // This one is heard just now.
                Some(by) if by == agent => Comer::Two,
                Some(by) => Comer::Waits(by),
            };
        }
        match self.seats.get_mut(&worker) {
            None => Comer::New(None),
            Some(seat) => {
                if seat.agent != Some(agent) {
                    seat.before = seat.agent;
                }
                seat.agent = Some(agent);
                seat.went = None;
                if let Some((until, _)) = seat.until.take() {
                    self.until.remove(&(until, worker));
                }
                Comer::Back(&mut seat.of)
            }
        }
    }

    /// One waits for a seat that another has; who has waited for that before, in vain.
    pub(crate) fn wait(&mut self, waiter: Waiter<W>) -> Option<Waiter<W>> {
        self.waiting.insert(waiter.worker, waiter)
    }

    /// Who waited in vain: the seat is another's by this agent, of which something has
    /// been heard.
    pub(crate) fn in_vain(&mut self, agent: AgentId) -> Vec<Waiter<W>> {
        self.take_waiting(|by| by == Some(agent))
    }

    /// Who may come again: nobody is reached any more who has the seat.
    pub(crate) fn may_come(&mut self) -> Vec<Waiter<W>> {
        self.take_waiting(|by| by.is_none())
    }

    /// Who waits for this worker's seat comes again, as another reaches it now.
    pub(crate) fn comes_again(&mut self, worker: WorkerId) -> Option<Waiter<W>> {
        self.waiting.remove(&worker)
    }

    fn take_waiting(&mut self, of: impl Fn(Option<AgentId>) -> bool) -> Vec<Waiter<W>> {
        let by = |worker: &WorkerId| self.seats.get(worker).and_then(|seat| seat.agent);
        let taken = self.waiting.extract_if(.., |worker, _| of(by(worker)));
        taken.map(|(_, waiter)| waiter).collect()
    }

    /// Gives a worker its seat.
    pub(crate) fn put(
        &mut self,
        agent: AgentId,
        (worker, instance): (WorkerId, u64),
        process: Process,
        of: T,
    ) {
        let seat = Seat {
            of,
            instance,
            process,
            agent: Some(agent),
            before: None,
            went: None,
            until: None,
        };
        self.take(worker);
        self.seats.insert(worker, seat);
    }

    /// This life of a worker, if it is reached by this agent.
    pub(crate) fn heard(
        &mut self,
        agent: AgentId,
        worker: WorkerId,
        instance: u64,
    ) -> Option<&mut T> {
        let seat = self.seats.get_mut(&worker)?;
        (seat.instance == instance && seat.agent == Some(agent)).then_some(&mut seat.of)
    }

    /// A worker, and by whom it is reached, if it is.
    pub(crate) fn reached(&mut self, worker: WorkerId) -> Option<(AgentId, &mut T)> {
        let seat = self.seats.get_mut(&worker)?;
        Some((seat.agent?, &mut seat.of))
    }

    /// An agent says that a worker is gone.
    pub(crate) fn gone(
        &mut self,
        agent: AgentId,
        worker: WorkerId,
        instance: u64,
        died: bool,
        now: Duration,
    ) -> Leaver<'_, T> {
        let this = |waiter: &Waiter<W>| (waiter.agent, waiter.instance) == (agent, instance);
        if self.waiting.get(&worker).is_some_and(this) {
            self.waiting.remove(&worker);
        }
        let Some(seat) = self.seats.get_mut(&worker) else {
            return Leaver::Elsewhere;
        };
        if seat.instance != instance || seat.agent != Some(agent) {
            if seat.instance == instance {
                seat.before.take_if(|before| *before == agent);
            }
            return Leaver::Elsewhere;
        }
        if let Some(before) = seat.before.take_if(|_| !died) {
            seat.agent = Some(before);
        } else if let Some(until) = seat.went.take_if(|until| !died && now < *until) {
            seat.agent = None;
            seat.until = Some((until, Going::Left));
            self.until.insert((until, worker));
            return Leaver::Elsewhere;
        } else if let Some(of) = self.take(worker) {
            return Leaver::Over(of);
        }
        let seat = self.seats.get_mut(&worker);
        seat.map_or(Leaver::Elsewhere, |seat| Leaver::Back(&mut seat.of))
    }

    /// An agent is gone. Those of its workers that had not left the agent before it are
    /// reached by that one again. Of the others those are over that went with it, or that
    /// cannot be told from them; the rest has a while to come back.
    pub(crate) fn part(
        &mut self,
        agent: AgentId,
        process: Option<Process>,
        how: Parting,
        now: Duration,
    ) -> Parted<T> {
        let (mut over, mut back) = (Vec::new(), Vec::new());
        self.waiting.retain(|_, waiter| waiter.agent != agent);
        for (worker, seat) in &mut self.seats {
            seat.before.take_if(|before| *before == agent);
            if seat.agent != Some(agent) {
                continue;
            }
            seat.agent = seat.before.take();
            if seat.agent.is_some() {
                seat.went = Some(now + GRACE);
                back.push(*worker);
                continue;
            }
            let until = match how {
                // It was its own agent.
                Parting::HungUp if Some(seat.process) == process => (now + BACK, Going::Died),
                Parting::HungUp | Parting::Cut | Parting::Left => (now + GRACE, Going::Lost),
                Parting::Silent => {
                    over.push((*worker, Going::Lost));
                    continue;
                }
            };
            seat.until = Some(until);
            self.until.insert((until.0, *worker));
        }
        let over = over.into_iter();
        let over = over.filter_map(|(worker, going)| Some((self.take(worker)?, going)));
        let over = over.collect();
        Parted { over, back }
    }

    /// When somebody is given up next.
    pub(crate) fn due(&self) -> Option<Duration> {
        self.until.first().map(|(until, _)| *until)
    }

    /// Gives up who was not reached in time.
    pub(crate) fn late(&mut self, now: Duration) -> Vec<(T, Going)> {
        let mut late = Vec::new();
        while let Some(&(until, worker)) = self.until.first()
            && now >= until
        {
            self.until.pop_first();
            let seat = self.seats.remove(&worker);
            late.extend(seat.and_then(|seat| Some((seat.of, seat.until?.1))));
        }
        late
    }

    /// Everybody, with its process and by whom it is reached.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (WorkerId, Process, Option<AgentId>, &T)> {
        let seats = self.seats.iter();
        seats.map(|(worker, seat)| (*worker, seat.process, seat.agent, &seat.of))
    }

    /// The same, to be changed.
    #[cfg(test)]
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (WorkerId, &mut T)> {
        let seats = self.seats.iter_mut();
        seats.map(|(worker, seat)| (*worker, &mut seat.of))
    }

    fn take(&mut self, worker: WorkerId) -> Option<T> {
        let seat = self.seats.remove(&worker)?;
        if let Some((until, _)) = seat.until {
            self.until.remove(&(until, worker));
        }
        Some(seat.of)
    }
}

#[cfg(test)]
mod tests;
