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
use weightsync_mem::{Departure, WorkerInstance};

use super::topology::AgentId;

/// How long workers whose agent hung up may take to return by another route before they count as
/// lost.
pub(super) const GRACE: Duration = Duration::from_millis(900);

/// How long a worker that was its own agent may take to return after its link closed before it
/// counts as dead.
pub(super) const BACK: Duration = Duration::from_millis(300);

/// A process of some host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct HostProcess {
    /// The same for every process of one host.
    pub(crate) host: [u8; 16],
    pub(crate) pid: u32,
}

/// How an agent left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LinkLoss {
    /// The agent said goodbye.
    Left,
    /// The agent's connection was closed, perhaps because it died.
    HungUp,
    /// The agent's connection failed on the way.
    Cut,
    /// The agent was silent, or was given up.
    Silent,
}

/// The memberships. `T` is the sender's record of a worker, `W` a request that waits.
#[derive(Debug)]
pub(crate) struct Membership<T, W> {
    membership: BTreeMap<WorkerId, MembershipRecord<T>>,
    /// Until when unreachable workers may return.
    // By time, so that the next worker to expire is found without a look at the others.
    until: BTreeSet<(Duration, WorkerId)>,
    /// At most one waiting request for each membership.
    waiting: BTreeMap<WorkerId, MembershipWaiter<W>>,
}

/// A request that waits for a membership.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct MembershipWaiter<W> {
    /// The agent that brings the request.
    pub(crate) agent: AgentId,
    pub(crate) who: WorkerInstance,
    pub(crate) asks: W,
}

#[derive(Debug)]
struct MembershipRecord<T> {
    of: T,
    instance: u64,
    process: HostProcess,
    /// The agent that reaches the worker; `None` while none does.
    agent: Option<AgentId>,
    /// The agent that reached it before, as long as that agent has not reported its departure.
    before: Option<AgentId>,
    /// The worker's agent has gone while the worker was moving to it. Until this time the worker
    /// may return as one that had arrived there.
    stranded: Option<Duration>,
    /// When the worker is given up if it is not reached, and what it then counts as.
    until: Option<(Duration, Departure)>,
}

/// The outcome of a request to join.
#[derive(Debug)]
pub(crate) enum JoinOutcome<'a, T> {
    /// The worker has a membership, and comes by another route.
    Back(&'a mut T),
    /// The worker has no membership. A silent worker that had its number has died.
    New(Option<T>),
    /// Another life of the worker has the membership. Its agent, named here, may be silent: the
    /// request [waits](Membership::wait) until that is known.
    Waits(AgentId),
    /// Another life of the worker has the membership, and is alive.
    Two,
}

/// The effect of an agent's report that a worker has gone.
#[derive(Debug, PartialEq)]
pub(crate) enum LeaveOutcome<'a, T> {
    /// The membership has ended.
    Over(T),
    /// The worker gave up joining this agent. It has been at its earlier agent all the time, and is
    /// reached there again.
    Back(&'a mut T),
    /// Another agent reaches the worker.
    Elsewhere,
}

/// The effect of an agent's end on its workers.
#[derive(Debug, PartialEq)]
pub(crate) struct AgentDeparture<T> {
    /// Workers whose membership has ended.
    pub(crate) over: Vec<(T, Departure)>,
    /// Workers that are reached again by an earlier agent, at which they have been all the time.
    pub(crate) back: Vec<WorkerId>,
}

impl<T, W> Membership<T, W> {
    /// No memberships yet.
    pub(crate) fn new() -> Self {
        Self {
            membership: BTreeMap::new(),
            until: BTreeSet::new(),
            waiting: BTreeMap::new(),
        }
    }

    /// A worker comes by this agent, which reaches it from now on if it has a membership.
    pub(crate) fn join(&mut self, agent: AgentId, who: WorkerInstance) -> JoinOutcome<'_, T> {
        let worker = who.worker;
        let (same, by) = match self.membership.get(&worker) {
            None => return JoinOutcome::New(None),
            Some(member) => (member.instance == who.instance, member.agent),
        };
        // Another process asks for this number.
        if !same {
            return match by {
                // No agent reaches the earlier life, so it cannot object: the new one gets the
                // number at once.
                None => JoinOutcome::New(self.take(worker)),
                // The agent is alive: this request came from it.
                Some(by) if by == agent => JoinOutcome::Two,
                // The earlier life may have died with that agent a moment ago. So neither a yes nor
                // a no would be safe now.
                Some(by) => JoinOutcome::Waits(by),
            };
        }
        match self.membership.get_mut(&worker) {
            None => JoinOutcome::New(None),
            Some(member) => {
                // The worker leaves its earlier agent only after it has joined this one. If it
                // gives this one up, it is still there.
                if member.agent != Some(agent) {
                    member.before = member.agent;
                }
                member.agent = Some(agent);
                member.stranded = None;
                // It has come back in time.
                if let Some((until, _)) = member.until.take() {
                    self.until.remove(&(until, worker));
                }
                JoinOutcome::Back(&mut member.of)
            }
        }
    }

    /// Makes a request wait for a membership; returns a request that this one replaces.
    pub(crate) fn wait(&mut self, waiter: MembershipWaiter<W>) -> Option<MembershipWaiter<W>> {
        self.waiting.insert(waiter.who.worker, waiter)
    }

    /// Requests to deny: the agent that reaches the membership's worker is alive.
    pub(crate) fn take_in_vain(&mut self, agent: AgentId) -> Vec<MembershipWaiter<W>> {
        self.take_waiting_where(|by| by == Some(agent))
    }

    /// Requests to retry: no agent reaches the worker that has the membership.
    pub(crate) fn take_retriable(&mut self) -> Vec<MembershipWaiter<W>> {
        self.take_waiting_where(|by| by.is_none())
    }

    /// Requests to retry because another agent now reaches the worker.
    pub(crate) fn take_waiting_for(&mut self, worker: WorkerId) -> Option<MembershipWaiter<W>> {
        self.waiting.remove(&worker)
    }

    fn take_waiting_where(
        &mut self,
        of: impl Fn(Option<AgentId>) -> bool,
    ) -> Vec<MembershipWaiter<W>> {
        let by = |worker: &WorkerId| self.membership.get(worker).and_then(|member| member.agent);
        let taken = self.waiting.extract_if(.., |worker, _| of(by(worker)));
        taken.map(|(_, waiter)| waiter).collect()
    }

    /// Gives a worker a membership.
    pub(crate) fn put(&mut self, agent: AgentId, who: WorkerInstance, process: HostProcess, of: T) {
        let member = MembershipRecord {
            of,
            instance: who.instance,
            process,
            agent: Some(agent),
            before: None,
            stranded: None,
            until: None,
        };
        // Also removes the deadline of an earlier membership, which would end this one.
        self.take(who.worker);
        self.membership.insert(who.worker, member);
    }

    /// The record of this life of a worker, if this agent reaches it.
    pub(crate) fn member_at(&mut self, agent: AgentId, who: WorkerInstance) -> Option<&mut T> {
        let member = self.membership.get_mut(&who.worker)?;
        let is_here = member.instance == who.instance && member.agent == Some(agent);
        is_here.then_some(&mut member.of)
    }

    /// A worker's record, and the agent that reaches it.
    pub(crate) fn reached(&mut self, worker: WorkerId) -> Option<(AgentId, &mut T)> {
        let member = self.membership.get_mut(&worker)?;
        Some((member.agent?, &mut member.of))
    }

    /// An agent reports that a worker has gone.
    pub(crate) fn gone(
        &mut self,
        agent: AgentId,
        who: WorkerInstance,
        died: bool,
        now: Duration,
    ) -> LeaveOutcome<'_, T> {
        let WorkerInstance { worker, instance } = who;
        let this = |waiter: &MembershipWaiter<W>| (waiter.agent, waiter.who) == (agent, who);
        // The worker that waits for this number has given up.
        if self.waiting.get(&worker).is_some_and(this) {
            self.waiting.remove(&worker);
        }
        let Some(member) = self.membership.get_mut(&worker) else {
            return LeaveOutcome::Elsewhere;
        };
        if member.instance != instance || member.agent != Some(agent) {
            // It has left its earlier agent, so it cannot be reached there again.
            if member.instance == instance {
                member.before.take_if(|before| *before == agent);
            }
            return LeaveOutcome::Elsewhere;
        }
        // The worker gave up on the way to this agent, and had never left the earlier one.
        if let Some(before) = member.before.take_if(|_| !died) {
            member.agent = Some(before);
        } else if let Some(until) = member.stranded.take_if(|until| !died && now < *until) {
            // The worker left this agent for one that is gone by now. It may be there again by
            // another route in a moment.
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

    /// Removes an agent. Workers that had not left their earlier agent are reached there again. A
    /// worker's membership ends if the worker went with the agent, or if nobody can tell the
    /// difference. The others have some time to return.
    pub(crate) fn remove_agent(
        &mut self,
        agent: AgentId,
        process: Option<HostProcess>,
        how: LinkLoss,
        now: Duration,
    ) -> AgentDeparture<T> {
        let (mut over, mut back) = (Vec::new(), Vec::new());
        // The workers of these requests lost their route, and ask again by another one.
        self.waiting.retain(|_, waiter| waiter.agent != agent);
        for (worker, member) in &mut self.membership {
            member.before.take_if(|before| *before == agent);
            if member.agent != Some(agent) {
                continue;
            }
            member.agent = member.before.take();
            if member.agent.is_some() {
                // The worker may have arrived at the agent that is gone. Then its earlier agent
                // reports soon that the worker has left.
                member.stranded = Some(now + GRACE);
                back.push(*worker);
                continue;
            }
            let until = match how {
                // The worker was its own agent.
                LinkLoss::HungUp if Some(member.process) == process => {
                    (now + BACK, Departure::Died)
                }
                // The worker may well live: only its relay went, or the connection. It looks for
                // another route.
                LinkLoss::HungUp | LinkLoss::Cut | LinkLoss::Left => (now + GRACE, Departure::Lost),
                // The whole host may be gone, so a send does not wait for its workers.
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

    /// When the next unreachable worker is given up.
    pub(crate) fn due(&self) -> Option<Duration> {
        self.until.first().map(|(until, _)| *until)
    }

    /// Gives up workers that were not reached in time.
    pub(crate) fn expire(&mut self, now: Duration) -> Vec<(T, Departure)> {
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

    /// The records of the workers that no agent reaches.
    pub(crate) fn unreached(&self) -> impl Iterator<Item = &T> {
        let until = self.until.iter();
        until.filter_map(|(_, worker)| Some(&self.membership.get(worker)?.of))
    }

    /// All workers, each with its process and the agent that reaches it.
    pub(crate) fn iter(
        &self,
    ) -> impl Iterator<Item = (WorkerId, HostProcess, Option<AgentId>, &T)> {
        let membership = self.membership.iter();
        membership.map(|(worker, member)| (*worker, member.process, member.agent, &member.of))
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
