//! The workers of other hosts that a sender knows, and the agent that reaches each.
//!
//! **Guarantee.** The input and the output are plain values; times count from any one moment. A
//! worker has at most one membership. One life of a worker keeps its membership, whichever
//! agent reaches it, and for [`GRACE`] when no agent does. A report from an agent that does not
//! reach the worker is ignored. The next life of a worker waits until it is known whether the
//! earlier life is still there: until the agent that reaches the earlier one sends something,
//! or is gone.
//!
//! A worker that is its own agent and whose connection was closed has most likely died. It has
//! [`BACK`] to show that it has not.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use weightsync_core::WorkerId;
use weightsync_mem::Departure;

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
pub(crate) enum LinkLoss {
    /// It said goodbye.
    Left,
    /// Its connection was closed, perhaps because it died.
    HungUp,
    /// Its connection failed on the way.
    Cut,
    /// It fell silent, or was given up.
    Silent,
}

/// The membership; `T` is what the sender has of each worker, and `W` what one asks for that
/// waits.
#[derive(Debug)]
pub(crate) struct Membership<T, W> {
    membership: BTreeMap<WorkerId, Member<T>>,
    /// Until when those may come back that are not reached.
    until: BTreeSet<(Duration, WorkerId)>,
    /// At most one for each membership.
    waiting: BTreeMap<WorkerId, Waiter<W>>,
}

/// One that waits for a membership.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Waiter<W> {
    /// By whom it comes.
    pub(crate) agent: AgentId,
    pub(crate) worker: WorkerId,
    pub(crate) instance: u64,
    pub(crate) asks: W,
}

#[derive(Debug)]
struct Member<T> {
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
    until: Option<(Duration, Departure)>,
}

/// What a worker that comes is.
#[derive(Debug)]
pub(crate) enum JoinOutcome<'a, T> {
    /// One that has a membership and comes by another way.
    Back(&'a mut T),
    /// One without. The worker that had its number and is now silent has died.
    New(Option<T>),
    /// Another life of it has the membership, and is reached by this agent, which may have
    /// fallen silent: it [waits](Membership::wait) until that is known.
    Waits(AgentId),
    /// Another life of it has the membership, and is there.
    Two,
}

/// What it comes to that an agent says of a worker that it is gone.
#[derive(Debug, PartialEq)]
pub(crate) enum LeaveOutcome<'a, T> {
    /// It has no membership any more.
    Over(T),
    /// It gave up waiting to be let in there. It has been at the agent before all
    /// the time, and is reached by that one again.
    Back(&'a mut T),
    /// It is reached by another.
    Elsewhere,
}

/// What becomes of the workers of an agent that is gone.
#[derive(Debug, PartialEq)]
pub(crate) struct AgentDeparture<T> {
    /// Those that have no membership any more.
    pub(crate) over: Vec<(T, Departure)>,
    /// Those that are reached by the agent at which they have been all the time.
    pub(crate) back: Vec<WorkerId>,
}

impl<T, W> Membership<T, W> {
    /// Nobody's yet.
    pub(crate) fn new() -> Self {
        Self {
            membership: BTreeMap::new(),
            until: BTreeSet::new(),
            waiting: BTreeMap::new(),
        }
    }

    /// A worker comes by this agent. One that has a membership is reached by it from now
    /// on.
    pub(crate) fn comes(
        &mut self,
        agent: AgentId,
        worker: WorkerId,
        instance: u64,
    ) -> JoinOutcome<'_, T> {
        let (same, by) = match self.membership.get(&worker) {
            None => return JoinOutcome::New(None),
            Some(member) => (member.instance == instance, member.agent),
        };
        if !same {
            return match by {
                None => JoinOutcome::New(self.take(worker)),
                // This one is heard just now.
                Some(by) if by == agent => JoinOutcome::Two,
                Some(by) => JoinOutcome::Waits(by),
            };
        }
        match self.membership.get_mut(&worker) {
            None => JoinOutcome::New(None),
            Some(member) => {
                if member.agent != Some(agent) {
                    member.before = member.agent;
                }
                member.agent = Some(agent);
                member.went = None;
                if let Some((until, _)) = member.until.take() {
                    self.until.remove(&(until, worker));
                }
                JoinOutcome::Back(&mut member.of)
            }
        }
    }

    /// One waits for a membership that another has; who has waited for that before, in vain.
    pub(crate) fn wait(&mut self, waiter: Waiter<W>) -> Option<Waiter<W>> {
        self.waiting.insert(waiter.worker, waiter)
    }

    /// Who waited in vain: the membership is another's by this agent, of which something has
    /// been heard.
    pub(crate) fn in_vain(&mut self, agent: AgentId) -> Vec<Waiter<W>> {
        self.take_waiting(|by| by == Some(agent))
    }

    /// Who may come again: nobody is reached any more who has the membership.
    pub(crate) fn may_come(&mut self) -> Vec<Waiter<W>> {
        self.take_waiting(|by| by.is_none())
    }

    /// Who waits for this worker's membership comes again, as another reaches it now.
    pub(crate) fn comes_again(&mut self, worker: WorkerId) -> Option<Waiter<W>> {
        self.waiting.remove(&worker)
    }

    fn take_waiting(&mut self, of: impl Fn(Option<AgentId>) -> bool) -> Vec<Waiter<W>> {
        let by = |worker: &WorkerId| self.membership.get(worker).and_then(|member| member.agent);
        let taken = self.waiting.extract_if(.., |worker, _| of(by(worker)));
        taken.map(|(_, waiter)| waiter).collect()
    }

    /// Gives a worker its membership.
    pub(crate) fn put(
        &mut self,
        agent: AgentId,
        (worker, instance): (WorkerId, u64),
        process: Process,
        of: T,
    ) {
        let member = Member {
            of,
            instance,
            process,
            agent: Some(agent),
            before: None,
            went: None,
            until: None,
        };
        self.take(worker);
        self.membership.insert(worker, member);
    }

    /// This life of a worker, if it is reached by this agent.
    pub(crate) fn member_at(
        &mut self,
        agent: AgentId,
        worker: WorkerId,
        instance: u64,
    ) -> Option<&mut T> {
        let member = self.membership.get_mut(&worker)?;
        (member.instance == instance && member.agent == Some(agent)).then_some(&mut member.of)
    }

    /// A worker, and by whom it is reached, if it is.
    pub(crate) fn reached(&mut self, worker: WorkerId) -> Option<(AgentId, &mut T)> {
        let member = self.membership.get_mut(&worker)?;
        Some((member.agent?, &mut member.of))
    }

    /// An agent says that a worker is gone.
    pub(crate) fn gone(
        &mut self,
        agent: AgentId,
        worker: WorkerId,
        instance: u64,
        died: bool,
        now: Duration,
    ) -> LeaveOutcome<'_, T> {
        let this = |waiter: &Waiter<W>| (waiter.agent, waiter.instance) == (agent, instance);
        if self.waiting.get(&worker).is_some_and(this) {
            self.waiting.remove(&worker);
        }
        let Some(member) = self.membership.get_mut(&worker) else {
            return LeaveOutcome::Elsewhere;
        };
        if member.instance != instance || member.agent != Some(agent) {
            if member.instance == instance {
                member.before.take_if(|before| *before == agent);
            }
            return LeaveOutcome::Elsewhere;
        }
        if let Some(before) = member.before.take_if(|_| !died) {
            member.agent = Some(before);
        } else if let Some(until) = member.went.take_if(|until| !died && now < *until) {
            member.agent = None;
            member.until = Some((until, Departure::Left));
            self.until.insert((until, worker));
            return LeaveOutcome::Elsewhere;
        } else if let Some(of) = self.take(worker) {
            return LeaveOutcome::Over(of);
        }
        let member = self.membership.get_mut(&worker);
        member.map_or(LeaveOutcome::Elsewhere, |member| {
            LeaveOutcome::Back(&mut member.of)
        })
    }

    /// An agent is gone. Those of its workers that had not left the agent before it are
    /// reached by that one again. Of the others those are over that went with it, or that
    /// cannot be told from them; the rest has a while to come back.
    pub(crate) fn part(
        &mut self,
        agent: AgentId,
        process: Option<Process>,
        how: LinkLoss,
        now: Duration,
    ) -> AgentDeparture<T> {
        let (mut over, mut back) = (Vec::new(), Vec::new());
        self.waiting.retain(|_, waiter| waiter.agent != agent);
        for (worker, member) in &mut self.membership {
            member.before.take_if(|before| *before == agent);
            if member.agent != Some(agent) {
                continue;
            }
            member.agent = member.before.take();
            if member.agent.is_some() {
                member.went = Some(now + GRACE);
                back.push(*worker);
                continue;
            }
            let until = match how {
                // It was its own agent.
                LinkLoss::HungUp if Some(member.process) == process => {
                    (now + BACK, Departure::Died)
                }
                LinkLoss::HungUp | LinkLoss::Cut | LinkLoss::Left => (now + GRACE, Departure::Lost),
                LinkLoss::Silent => {
                    over.push((*worker, Departure::Lost));
                    continue;
                }
            };
            member.until = Some(until);
            self.until.insert((until.0, *worker));
        }
        let over = over.into_iter();
        let over = over.filter_map(|(worker, departure)| Some((self.take(worker)?, departure)));
        let over = over.collect();
        AgentDeparture { over, back }
    }

    /// When somebody is given up next.
    pub(crate) fn due(&self) -> Option<Duration> {
        self.until.first().map(|(until, _)| *until)
    }

    /// Gives up who was not reached in time.
    pub(crate) fn late(&mut self, now: Duration) -> Vec<(T, Departure)> {
        let mut late = Vec::new();
        while let Some(&(until, worker)) = self.until.first()
            && now >= until
        {
            self.until.pop_first();
            let member = self.membership.remove(&worker);
            late.extend(member.and_then(|member| Some((member.of, member.until?.1))));
        }
        late
    }

    /// Everybody, with its process and by whom it is reached.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (WorkerId, Process, Option<AgentId>, &T)> {
        let membership = self.membership.iter();
        membership.map(|(worker, member)| (*worker, member.process, member.agent, &member.of))
    }

    /// The same, to be changed.
    #[cfg(test)]
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (WorkerId, &mut T)> {
        let membership = self.membership.iter_mut();
        membership.map(|(worker, member)| (*worker, &mut member.of))
    }

    fn take(&mut self, worker: WorkerId) -> Option<T> {
        let member = self.membership.remove(&worker)?;
        if let Some((until, _)) = member.until {
            self.until.remove(&(until, worker));
        }
        Some(member.of)
    }
}

#[cfg(test)]
mod tests;
