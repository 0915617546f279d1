//! How a worker finds its sender.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use weightsync_engine::log_limiter::{self, LogLimiter};
use weightsync_engine::transport::{
    Attached, Deadline, Endpoint, Handoff, Joining, ReceiverTransport, SILENT_SENDER, interrupt,
};
use weightsync_engine::{Error, Result, Run};
use weightsync_link::access::Access;
use weightsync_mem::{AttachOptions, Backoff, Origin, SegmentReader, passed};

use crate::agent::local::{self, NameOwner};
use crate::agent::{Agent, AgentAddress, AgentOptions, Patience, StartError, Unreached, left_of};
use crate::error::{NetError, transport};
use crate::scheme::{Distributed, Share, Unfinished};

/// How long one attempt to reach the sender may take.
const ATTEMPT: Duration = Duration::from_secs(3);

/// How long the process at a name of this host may take to answer before a worker asks again.
const ANSWER: Duration = Duration::from_secs(1);

/// How long a relay may take to answer before the worker looks elsewhere; half the worker's time if
/// that is less. A relay first allocates its slots, up to a second for each gigabyte, and it may be
/// stopped. A trainer has as long as it lives, because a link to it would not be faster.
const SETTLES: Duration = Duration::from_secs(10);

/// The least time of one attempt.
const MOMENT: Duration = Duration::from_millis(300);

/// After this many refused connections in a row, nothing listens at the sender's address.
const REFUSALS: u32 = 5;

/// How long a worker looks for another route before it takes a problem as final.
#[derive(Clone, Copy, Debug)]
pub(super) struct Waits {
    /// For being refused: until then, the refusal may rest on an outdated state.
    pub(super) denied: Duration,
    /// For a sender that accepts connections and does not answer.
    pub(super) silent: Duration,
}

impl Default for Waits {
    fn default() -> Self {
        Self {
            denied: Duration::from_secs(10),
            silent: SILENT_SENDER,
        }
    }
}

/// The route of one worker.
#[derive(Debug)]
pub(super) struct Route {
    scheme: Distributed,
    at: Endpoint,
    joining: Joining,
    instance: u64,
    owner: Origin,
}

/// The segment that a route leads to.
#[derive(Debug)]
pub(super) struct FoundSegment {
    // Dropped first: the worker leaves its segment before its agent leaves the sender.
    pub(super) attached: Attached,
    /// The name at which it was found. Each segment has one of its own.
    pub(super) name: Arc<str>,
    /// The agent, if the worker is its own.
    agent: Option<Agent>,
}

impl FoundSegment {
    /// Whether the segment belongs to a relay of this host.
    pub(super) fn is_a_relays(&self) -> bool {
        self.agent.is_none() && self.attached.reader().is_relayed()
    }

    /// Whether the segment's relay has gone.
    pub(super) fn has_lost_its_relay(&self) -> bool {
        self.is_a_relays() && self.attached.reader().is_gone()
    }

    /// Leaves the segment, and returns the agent that this worker is itself.
    pub(super) fn leave(self) -> Option<Agent> {
        drop(self.attached);
        self.agent
    }

    /// How many bytes of versions the worker's own agent has fetched.
    pub(super) fn travelled(&self) -> Option<u64> {
        self.agent.as_ref().map(Agent::travelled)
    }

    /// Whether the segment belongs to the worker's own agent.
    pub(super) fn is_its_own_agents(&self) -> bool {
        self.agent.is_some()
    }
}

/// The result of one search.
enum SearchResult {
    Found(Box<FoundSegment>),
    /// With the reason why the sender could not be reached, if this look dialled it.
    Nothing(Unreached, Option<String>),
}

impl Route {
    pub(super) fn new(scheme: &Distributed, at: &Endpoint, joining: &Joining) -> Result<Self> {
        Ok(Self {
            scheme: scheme.clone(),
            at: at.clone(),
            joining: joining.clone(),
            instance: random()?,
            owner: Origin::here(),
        })
    }

    pub(super) fn is_forked(&self) -> bool {
        !self.owner.is_here()
    }

    /// Attaches to the trainer's segment if it is on this host, or to that of the host's relay, or
    /// fetches for itself.
    pub(super) fn find(&self, handoff: &Handoff, deadline: Deadline) -> Result<FoundSegment> {
        let since = Instant::now();
        let mut backoff = backoff();
        let mut last = None;
        loop {
            // The user's program may want to end the wait, in Python because of a signal.
            let goes_on = || interrupt::at_most(None).is_ok();
            let is_cut = deadline.is_some_and(|at| at < Instant::now() + ATTEMPT);
            let reason = match self.look(handoff, deadline, goes_on)? {
                SearchResult::Found(found) => return Ok(*found),
                SearchResult::Nothing(_, reason) => reason,
            };
            interrupt::at_most(None)?;
            let is_over = passed(deadline);
            // The reason of the look before says more if this one had less than an attempt's time,
            // or did not dial.
            last = match is_over && is_cut {
                true => last.or(reason),
                false => reason.or(last),
            };
            if is_over {
                return Err(Error::NoSender {
                    address: self.at.address().into(),
                    waited: since.elapsed(),
                    last,
                });
            }
            let pause = backoff.pause();
            interrupt::sleep(pause.min(left_of(deadline, pause)))?;
        }
    }

    /// Finds another route to the sender of `run` after a relay has gone, until the end is `closed`
    /// or the sender is gone too. A problem may have passed at the next attempt, so only one that
    /// lasts is final.
    pub(super) fn find_again(
        &self,
        run: Run,
        handoff: &Handoff,
        closed: &AtomicBool,
        waits: Waits,
    ) -> Result<Option<FoundSegment>> {
        let (mut backoff, mut refusals) = (backoff(), 0);
        // Since when the sender's address accepts connections without answering.
        let mut silent: Option<Instant> = None;
        let mut hindrances = LogLimiter::default();
        // Since when every attempt was refused.
        let mut denied: Option<Instant> = None;
        let goes_on = || !closed.load(Ordering::SeqCst);
        while goes_on() {
            let reach = match self.look(handoff, None, goes_on) {
                Ok(SearchResult::Found(found)) if found.attached.run() == run => {
                    return Ok(Some(*found));
                }
                // A successor, which this look leaves. The caller joins it again, and would be
                // refused for its own number before that.
                Ok(SearchResult::Found(_)) => return Err(Error::SenderDied { pid: None }),
                Ok(SearchResult::Nothing(reach, _)) => {
                    denied = None;
                    reach
                }
                Err(error) => {
                    denied = is_denied(&error).then(|| denied.unwrap_or_else(Instant::now));
                    if denied.is_some_and(|since| since.elapsed() >= waits.denied) {
                        return Err(error);
                    }
                    let hindrance = passing(error)?;
                    if let Some(more) = hindrances.logs(&hindrance, Instant::now()) {
                        log_limiter::warn(
                            more,
                            &format!("no route to the sender now: {hindrance}"),
                        );
                    }
                    Unreached::Unknown
                }
            };
            refusals = match reach {
                Unreached::Refused => refusals + 1,
                _ => 0,
            };
            silent = match reach {
                Unreached::Unanswered => silent.or_else(|| Some(Instant::now())),
                // A silent sender's queue of connections may be full by now, so that attempts time
                // out.
                Unreached::Unknown => silent,
                Unreached::Refused => None,
            };
            let given_up = silent.is_some_and(|since| since.elapsed() >= waits.silent);
            if refusals >= REFUSALS || given_up {
                return Err(Error::SenderDied { pid: None });
            }
            std::thread::sleep(backoff.pause());
        }
        Ok(None)
    }

    /// Keeps the agent that this worker was, for its next search: the part of the first version
    /// that has come is not fetched again.
    pub(super) fn keep(&self, agent: Agent) {
        if !self.is_forked() {
            let replaced = self.scheme.unfinished().insert(self.key(), agent);
            // An agent ends its threads when it is dropped: not under the lock.
            drop(replaced);
        }
    }

    /// The agent that was kept, if it can still be used.
    fn kept(&self) -> Option<Agent> {
        // Taken out in any case: an agent that is of no use ends here.
        let kept = self.scheme.unfinished().remove(&self.key());
        kept.filter(|agent| agent.is_there() && agent.run.epoch >= self.joining.seen)
    }

    fn key(&self) -> Unfinished {
        let at = &self.at;
        (at.address().to_owned(), *at.secret(), self.joining.worker)
    }

    /// Whether the worker prefers a relay's memory.
    pub(super) fn wants_a_relay(&self) -> bool {
        self.scheme.share != Share::Nothing
    }

    /// Whether the relay with this name answers within this time.
    pub(super) fn answers(name: &str, within: Duration) -> bool {
        let until = Some(Instant::now() + within);
        weightsync_mem::is_answered(name, until).unwrap_or(false)
    }

    /// A relay of this host that answers within this time. One that is stopped takes no time of the next.
    pub(super) fn answering_relay(&self, within: Duration) -> Option<String> {
        let mut relays =
            local::names(self.at.secret(), self.at.address(), NameOwner::Host).into_iter();
        relays.find(|name| Self::answers(name, within))
    }

    /// An agent of the worker's own, whatever its host has; `None` if the sender does not answer.
    pub(super) fn agent_of_its_own(&self, goes_on: impl FnMut() -> bool) -> Result<Option<Agent>> {
        let agent = self.become_agent(Vec::new(), ATTEMPT.into(), goes_on)?;
        Ok(agent.ok())
    }

    /// Attaches to an agent of the worker's own.
    pub(super) fn attach_to(&self, agent: Agent, handoff: &Handoff) -> Result<FoundSegment> {
        let found = self.attach(&agent.address, handoff, Instant::now() + ANSWER)?;
        let agent = Some(agent);
        Ok(FoundSegment { agent, ..found })
    }

    /// Attaches to the segment of the relay with this name, if it answers.
    pub(super) fn attach_to_relay(
        &self,
        name: &str,
        handoff: &Handoff,
    ) -> Result<Option<FoundSegment>> {
        match self.attach(name, handoff, Instant::now() + ANSWER) {
            Ok(found) => Ok(Some(found)),
            Err(Error::NoSender { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Whether the sender may have a successor at the same address.
    pub(super) fn restarts(&self) -> bool {
        self.at.restarts()
    }

    fn look(
        &self,
        handoff: &Handoff,
        deadline: Deadline,
        mut goes_on: impl FnMut() -> bool,
    ) -> Result<SearchResult> {
        // A caller that waits for the answer of a process it reached does so here, too.
        let until = deadline.filter(|_| !self.joining.single_attempt);
        let nearer = match self.look_nearer(handoff, until, &mut goes_on)? {
            ControlFlow::Break(result) => return Ok(result),
            ControlFlow::Continue(nearer) => nearer,
        };
        let patience = self.patience(deadline);
        let agent = match self.kept() {
            Some(agent) => agent,
            None => match self.become_agent(nearer, patience, goes_on)? {
                Ok(agent) => agent,
                Err((reach, last)) => return Ok(SearchResult::Nothing(reach, last)),
            },
        };
        let until = Instant::now() + left_of(deadline, ANSWER).max(ANSWER);
        match self.attach(&agent.address, handoff, until) {
            Ok(found) => {
                let agent = Some(agent);
                Ok(SearchResult::Found(Box::new(FoundSegment {
                    agent,
                    ..found
                })))
            }
            // The sender ended in between, or its answer takes long.
            Err(Error::NoSender { .. }) => {
                self.keep(agent);
                Ok(SearchResult::Nothing(Unreached::Unknown, None))
            }
            Err(error) => Err(error),
        }
    }

    /// Looks for a segment of this host, and waits for one that is about to answer. If the search
    /// goes on elsewhere, returns the names at which a segment may still appear.
    fn look_nearer(
        &self,
        handoff: &Handoff,
        until: Deadline,
        goes_on: &mut impl FnMut() -> bool,
    ) -> Result<ControlFlow<SearchResult, Vec<String>>> {
        let settles = Instant::now() + SETTLES.min(left_of(until, 2 * SETTLES) / 2);
        let mut nearer = self.names();
        loop {
            let mut silent = Vec::new();
            for (owner, name) in &nearer {
                if !weightsync_mem::is_served(name).unwrap_or(false) {
                    continue;
                }
                match self.attach(name, handoff, Instant::now() + left_of(until, ANSWER)) {
                    Ok(found) => {
                        // This segment has what the kept agent fetches.
                        drop(self.kept());
                        return Ok(ControlFlow::Break(SearchResult::Found(Box::new(found))));
                    }
                    // This process does not answer, or is about to end.
                    Err(Error::NoSender { .. }) => silent.push((*owner, name.clone())),
                    Err(error) => return Err(error),
                }
            }
            // A trainer on this host is worth any wait, and a relay a short one.
            let is_trainer = silent.iter().any(|(owner, _)| *owner == NameOwner::Sender);
            let is_over = passed(until) || !goes_on();
            if is_over && is_trainer {
                let nothing = SearchResult::Nothing(Unreached::Unknown, None);
                return Ok(ControlFlow::Break(nothing));
            }
            if silent.is_empty() || is_over || !is_trainer && Instant::now() >= settles {
                // A worker that joins meanwhile through another name is noticed before this one
                // fetches for itself.
                nearer.retain(|one| !silent.contains(one));
                break;
            }
        }
        let nearer = nearer.into_iter().map(|(_, name)| name);
        Ok(ControlFlow::Continue(nearer.collect()))
    }

    /// How long an agent of the worker's own looks for the sender.
    fn patience(&self, deadline: Deadline) -> Patience {
        match self.joining.single_attempt {
            true => ATTEMPT.into(),
            false => Patience {
                // Even an attempt without time left gives a process that is there a moment to
                // answer.
                dial: left_of(deadline, ATTEMPT).max(MOMENT),
                until: deadline.map(|at| at.max(Instant::now() + ANSWER)),
            },
        }
    }

    /// The names at which this worker looks for a segment, in order.
    fn names(&self) -> Vec<(NameOwner, String)> {
        let names = |owner| {
            let names = local::names(self.at.secret(), self.at.address(), owner);
            names
                .into_iter()
                .map(|name| (owner, name))
                .collect::<Vec<_>>()
        };
        match self.scheme.share {
            Share::All => {
                let mut all = names(NameOwner::Sender);
                all.extend(names(NameOwner::Host));
                all
            }
            Share::Relay => names(NameOwner::Host),
            Share::Nothing => Vec::new(),
        }
    }

    fn attach(&self, name: &str, handoff: &Handoff, until: Instant) -> Result<FoundSegment> {
        let options = AttachOptions {
            address: name.into(),
            secret: *self.at.secret(),
            worker: self.joining.worker,
            seen: self.joining.seen,
            models: Some(self.joining.wanted.clone()),
            delivery: self.scheme.delivery(),
            device: self.joining.device.clone(),
            wait: self.joining.wait,
            instance: self.instance,
            resume: handoff.resume(),
        };
        let reader = SegmentReader::attach(&options, Some(until))?;
        Ok(FoundSegment {
            attached: Attached::new(reader, &self.joining, self.scheme.own_copy)?,
            name: name.into(),
            agent: None,
        })
    }

    /// Connects to the sender itself, or returns why that is not possible now.
    fn become_agent(
        &self,
        nearer: Vec<String>,
        patience: Patience,
        goes_on: impl FnMut() -> bool,
    ) -> Result<std::result::Result<Agent, (Unreached, Option<String>)>> {
        // A name of its own: several workers of one process must not meet at one agent.
        let [high, low] = [random()?, random()?];
        let address = || self.at.address().to_owned();
        let access = self.scheme.access_to_dial()?;
        self.may_dial(&access)?;
        let options = AgentOptions {
            root: address(),
            secret: *self.at.secret(),
            seen: self.joining.seen,
            connections: None,
            address: AgentAddress::Own(format!("weightsync/net/own/{high:016x}{low:016x}")),
            // A stopped worker must not hold up other hosts.
            serves: false,
            access,
            nearer,
        };
        match Agent::start(options, patience, goes_on) {
            Ok(agent) => Ok(Ok(agent)),
            Err(StartError::Unreachable(reach, reason)) => Ok(Err((reach, Some(reason)))),
            // The segment on this host appeared after this worker had looked.
            Err(StartError::Nearer) => Ok(Err((Unreached::Unknown, None))),
            Err(error) => Err(error.into_error(address())),
        }
    }

    /// Checks that the settings allow a link to the sender.
    fn may_dial(&self, access: &Access) -> Result<()> {
        use std::net::ToSocketAddrs;
        // A name that cannot be resolved is reported by the attempt to connect.
        let addresses = self.at.address().to_socket_addrs();
        for address in addresses.into_iter().flatten() {
            access
                .may_dial_with_secret(address)
                .map_err(crate::error::transport)?;
        }
        Ok(())
    }
}

impl StartError {
    /// The error for the session.
    pub(crate) fn into_error(self, address: String) -> Error {
        match self {
            Self::Unreachable(_, reason) => NetError::Unreachable { address, reason }.into(),
            Self::Nearer => NetError::Unreachable {
                address,
                reason: "the sender is on this host".into(),
            }
            .into(),
            Self::Taken => NetError::AnotherRelay { address }.into(),
            Self::Fenced { seen, got } => Error::Fenced { seen, got },
            Self::Memory(error) => error.into(),
            Self::Os { action, source } => Error::Os { action, source },
            Self::Refused(source) => NetError::Hello { address, source }.into(),
            Self::Access(error) => transport(error),
            Self::Denied(reason) => NetError::Denied { address, reason }.into(),
            Self::Broken(reason) => NetError::Broken { address, reason }.into(),
        }
    }
}

/// Whether a live process refuses this worker, for example because its number is taken.
fn is_denied(error: &Error) -> bool {
    match error {
        Error::Denied { .. } => true,
        Error::Transport { source, .. } => {
            matches!(source.downcast_ref(), Some(NetError::Denied { .. }))
        }
        _ => false,
    }
}

/// The text of a problem that may have passed at the next attempt.
///
/// # Errors
///
/// The error itself if it would be the same then; `SenderDied` if another sender has the address.
fn passing(error: Error) -> Result<String> {
    let is_passing = match &error {
        Error::Fenced { .. } => None,
        Error::Os { .. }
        | Error::Memory(_)
        | Error::Denied { .. }
        | Error::SenderClosed
        | Error::SenderDied { .. } => Some(true),
        Error::Transport { source, .. } => match source.downcast_ref() {
            Some(NetError::Hello { .. }) => None,
            Some(NetError::Broken { .. } | NetError::Denied { .. }) => Some(true),
            _ => Some(false),
        },
        _ => Some(false),
    };
    match is_passing {
        Some(true) => Ok(error.to_string()),
        Some(false) => Err(error),
        None => {
            tracing::warn!("another sender has taken this sender's address: {error}");
            Err(Error::SenderDied { pid: None })
        }
    }
}

/// The pauses between looks for a route: a look takes little, and a worker waits for it.
fn backoff() -> Backoff {
    Backoff::new(Duration::from_millis(5), Duration::from_millis(80))
}

fn random() -> Result<u64> {
    weightsync_engine::transport::random().map(u64::from_le_bytes)
}
