//! What parties ask for.

use weightsync_core::synchronizer::{Method, Need, Party, State, SyncEvent};
use weightsync_engine::Version;

use super::super::events::EventKind;
use super::super::memory::{Bridge, FromBridge};
use super::super::wire::{Ended, Reply, Request, RequestProblem, Role, short};
use super::{Answer, Caller, Moment, RequestKind, Service, WaitingRequest};

impl Service {
    pub(super) fn ask(
        &mut self,
        party: Party,
        caller: Caller,
        request: Request,
        answer: Answer<Reply>,
    ) {
        // Not a member: its connection ended, it was replaced, or the service was started again.
        let Some(member) = self.members.get_mut(&party) else {
            return answer(Err(match self.replaced.get(&party) {
                // It must not take the place back.
                Some(reason) => RequestProblem::Replaced {
                    reason: reason.clone(),
                },
                None => RequestProblem::Unknown {},
            }));
        };
        let role = member.role;
        // Checked for each request: a party's number alone does not make a client a trainer.
        if let Err(refused) = caller.may_be(role) {
            return answer(Err(refused));
        }
        self.counts.requests += 1;
        // A party asks one thing at a time: the caller of the earlier one is gone.
        if let Some(earlier) = member.waiting.take() {
            let is_again = matches!(
                (&request, earlier.kind),
                (Request::Sent { version }, RequestKind::Meet(known, _)) if *version == known
            );
            // The client may ask again for the same, as a connection has ended.
            if !is_again {
                // The earlier wait would otherwise count for a caller that is gone.
                self.withdrawn(party, earlier.kind);
            }
        }
        if let Err(refused) = self.may_ask(role, &request) {
            return answer(Err(refused));
        }
        self.answer_request(party, request, answer);
    }

    /// Whether a party of this role may ask this.
    fn may_ask(&self, role: Role, request: &Request) -> Result<(), RequestProblem> {
        let of = match request {
            Request::Sync { .. }
            | Request::Cancel {}
            | Request::Loaded { .. }
            | Request::LoadFailed { .. }
            | Request::Pause { .. }
            | Request::Store {} => Some(Role::Explorer),
            Request::Publishing { .. }
            | Request::Published { .. }
            | Request::Meet { .. }
            | Request::Sent { .. }
            | Request::Failed { .. } => Some(Role::Trainer),
            Request::Need { .. } | Request::WaitNeed { .. } | Request::Leave { .. } => None,
        };
        if let Some(of) = of.filter(|of| *of != role) {
            let reason = format!("this request is for a party that is {of}, and not for a {role}");
            return Err(RequestProblem::Refused { reason });
        }
        // A number far above all others would use the numbers up.
        match request {
            Request::Publishing { version, .. }
            | Request::Published { version, .. }
            | Request::Meet { version, .. } => self.check_version(*version),
            _ => Ok(()),
        }
    }

    /// Does what a party asks.
    // Longer than a screen: a list with a short arm for each request, which depends on no other arm.
    fn answer_request(&mut self, party: Party, request: Request, answer: Answer<Reply>) {
        match request {
            Request::Need { step } => {
                // The step first: it may be what makes the sync due.
                self.stepped(party, step);
                answer(Ok(Reply::Need(self.need(party))));
            }
            Request::WaitNeed { step, timeout_ms } => {
                self.stepped(party, step);
                self.wait_need(party, timeout_ms, answer);
            }
            Request::Sync { step, timeout_ms } => {
                self.stepped(party, step);
                self.sync(party, timeout_ms, answer);
            }
            Request::Cancel {} => {
                self.tell(SyncEvent::ExplorerCancelled(party));
                answer(Ok(Reply::Done {}));
            }
            Request::Loaded { version } => self.loaded(party, version, answer),
            Request::LoadFailed { version, reason } => {
                self.load_failed(party, version, &reason, answer);
            }
            Request::Pause { paused } => {
                self.tell(SyncEvent::ExplorerPaused(party, paused));
                answer(Ok(Reply::Done {}));
            }
            Request::Store {} => answer(Ok(Reply::Stored {
                store: self.store_address(),
            })),
            Request::Publishing { version, step } => {
                self.stepped(party, Some(step));
                self.announced(version, step);
                answer(Ok(Reply::Done {}));
            }
            Request::Published {
                version,
                step,
                timeout_ms,
            } => {
                self.stepped(party, Some(step));
                let until = self.after(timeout_ms);
                self.wait_published(party, version, step, until, answer);
            }
            Request::Meet {
                version,
                step,
                timeout_ms,
            } => {
                self.stepped(party, Some(step));
                self.meet(party, version, step, timeout_ms, answer);
            }
            Request::Sent { version } => self.sent(party, version, answer),
            Request::Failed { reason } => {
                self.trainer_failed(party, &reason);
                answer(Ok(Reply::Done {}));
            }
            Request::Leave { reason } => {
                self.leave(party, reason.map(|reason| short(&reason)));
                answer(Ok(Reply::Done {}));
            }
        }
    }

    /// Tells a party what it needs, once it needs something or the time is over.
    fn wait_need(&mut self, party: Party, timeout_ms: Option<u64>, answer: Answer<Reply>) {
        let need = self.waiting_need(party);
        if need.need != Need::No || need.trainer_stopped {
            return answer(Ok(Reply::Need(need)));
        }
        let until = self.after(timeout_ms);
        self.wait(party, RequestKind::Need, answer, until);
    }

    /// An explorer begins a sync.
    fn sync(&mut self, party: Party, timeout_ms: Option<u64>, answer: Answer<Reply>) {
        // It waits no longer for what it was told before.
        self.tell(SyncEvent::ExplorerCancelled(party));
        // The request waits before the core is told, because the effects may answer it at
        // once.
        self.wait(party, RequestKind::Sync, answer, None);
        let until = self.after(timeout_ms);
        self.note(EventKind::Asked, party, |_| {});
        self.tell(SyncEvent::ExplorerSyncs(party, until));
    }

    /// An explorer has loaded a version.
    fn loaded(&mut self, party: Party, version: Version, answer: Answer<Reply>) {
        // Those that are passed on are versions, also before the trainer says so.
        self.core.saw(self.held.newest());
        // The trainer has not said yet that it can be had.
        if self.core.method() != Method::Direct
            && self.can_be_had(version)
            && version > self.core.newest().0
            && let Some(step) = self.steps.get(&version).copied()
            && let Some(trainer) = self.core.trainer()
        {
            self.published(trainer, version, step);
        }
        self.wait(party, RequestKind::Sync, answer, None);
        self.tell(SyncEvent::ExplorerLoaded(party, version));
        // It was too late for its sync, and runs the version all the same.
        if self.is_waiting(party) {
            self.ended(party, Ended::Synced);
        }
    }

    /// An explorer could not load a version.
    fn load_failed(&mut self, party: Party, version: Version, reason: &str, answer: Answer<Reply>) {
        self.set_reason(party, Some(short(reason)));
        self.wait(party, RequestKind::Sync, answer, None);
        self.tell(SyncEvent::ExplorerFailed(party, version));
        // If the core has ended the sync, the request is answered already. Otherwise it is
        // answered here.
        self.answer_sync(party, Ended::Failed);
    }

    /// A trainer is about to publish a version.
    fn announced(&mut self, version: Version, step: u64) {
        // A trainer that takes its place gives its versions higher numbers.
        self.core.saw(version);
        self.record.announce(version);
        // Explorers can load the version before the trainer says more, and are then told
        // its step.
        self.remember(version, step);
    }

    /// A trainer could not publish or send what it was to.
    fn trainer_failed(&mut self, party: Party, reason: &str) {
        self.set_reason(party, Some(short(reason)));
        self.note(EventKind::Failed, party, |event| {
            event.reason = Some(short(reason));
        });
        self.tell(SyncEvent::TrainerFailed(party));
    }

    /// Tells a trainer when explorers can have what it has published.
    fn wait_published(
        &mut self,
        party: Party,
        version: Version,
        step: u64,
        until: Option<Moment>,
        answer: Answer<Reply>,
    ) {
        // The step may come with this request alone, if the announcement was lost while the
        // service was away.
        self.remember(version, step);
        let held = self.can_be_had(version);
        // It may have failed before the trainer has said that it has published it.
        if let Some((_, reason)) = self.failed.take_if(|(failed, _)| *failed >= version)
            && !held
        {
            let answered = self.trained(version, step, Ended::Failed, Some(reason));
            return answer(Ok(Reply::Trained(answered)));
        }
        // The request waits until the bridge has the version, or the time is over.
        self.wait(party, RequestKind::Published(version, step), answer, until);
        if held {
            self.published(party, version, step);
        } else if self.bridge.as_ref().is_none_or(Bridge::is_over) {
            // It has ended by an error: the trainer is there, and so it joins again.
            self.start_bridge(party);
        }
    }

    /// A trainer begins a meeting with the explorers.
    fn meet(
        &mut self,
        party: Party,
        version: Version,
        step: u64,
        timeout_ms: Option<u64>,
        answer: Answer<Reply>,
    ) {
        self.remember(version, step);
        // An earlier meeting, or this one if the client asks again as a connection has ended.
        if self.core.state(party) == State::WaitingSync {
            self.tell(SyncEvent::TrainerFailed(party));
        }
        if let Some(member) = self.members.get_mut(&party) {
            member.met = None;
        }
        self.record.announce(version);
        // As for a sync: the effects may answer the request at once.
        self.wait(party, RequestKind::Meet(version, step), answer, None);
        let until = self.after(timeout_ms);
        self.tell(SyncEvent::TrainerMeets(party, version, step, until));
    }

    /// Whether explorers can have a version, as far as the service can tell.
    fn can_be_had(&self, version: Version) -> bool {
        self.core.method() != Method::Memory || version <= self.held.newest()
    }

    fn is_waiting(&self, party: Party) -> bool {
        let member = self.members.get(&party);
        member.is_some_and(|member| member.waiting.is_some())
    }

    pub(super) fn wait(
        &mut self,
        party: Party,
        kind: RequestKind,
        answer: Answer<Reply>,
        until: Option<Moment>,
    ) {
        if let Some(member) = self.members.get_mut(&party) {
            member.waiting = Some(WaitingRequest {
                number: self.number,
                kind,
                answer,
                until,
            });
        }
    }

    /// The caller of a request that waits is gone.
    pub(super) fn withdraw(&mut self, party: Party, number: u64) {
        let member = self.members.get_mut(&party);
        let waiting = member.and_then(|member| {
            // Only the request whose caller has gone. A newer one may wait by now.
            let is_it = |waiting: &mut WaitingRequest| waiting.number == number;
            member.waiting.take_if(is_it)
        });
        let Some(waiting) = waiting else {
            return;
        };
        self.withdrawn(party, waiting.kind);
    }

    fn withdrawn(&mut self, party: Party, kind: RequestKind) {
        match kind {
            RequestKind::Sync => self.tell(SyncEvent::ExplorerCancelled(party)),
            RequestKind::Meet(..) => self.tell(SyncEvent::TrainerFailed(party)),
            // The core was told of none of these.
            RequestKind::Need | RequestKind::Published(..) => {}
        }
    }

    pub(super) fn stepped(&mut self, party: Party, step: Option<u64>) {
        let Some(step) = step else {
            return;
        };
        match self.members.get(&party).map(|member| member.role) {
            Some(Role::Trainer) => self.tell(SyncEvent::TrainerStepped(party, step)),
            Some(Role::Explorer) => self.tell(SyncEvent::ExplorerStepped(party, step)),
            None => {}
        }
    }

    /// A trainer has sent what the explorers of the meeting are to load.
    pub(super) fn sent(&mut self, party: Party, version: Version, answer: Answer<Reply>) {
        let member = self.members.get_mut(&party);
        // The meeting ended while the trainer was sending. Its answer was kept.
        if let Some(met) = member.and_then(|member| member.met.take()) {
            return answer(Ok(Reply::Trained(met)));
        }
        let step = self.steps.get(&version).copied().unwrap_or_default();
        if self.core.state(party) != State::WaitingSync {
            let reason = "the synchronizer knows of no meeting: it was started again meanwhile";
            let answered = self.trained(version, step, Ended::Failed, Some(reason.into()));
            return answer(Ok(Reply::Trained(answered)));
        }
        // The trainer waits from here on for the outcome, and the explorers begin to load.
        self.wait(party, RequestKind::Meet(version, step), answer, None);
        for explorer in std::mem::take(&mut self.meeting) {
            self.fetch(explorer, version);
        }
    }

    pub(super) fn fetch(&mut self, party: Party, version: Version) {
        let from = match self.core.method() {
            Method::Memory => self.held.info(),
            Method::Direct | Method::Checkpoint => self.source.clone(),
        };
        match (self.waiting(party, |kind| kind == RequestKind::Sync), from) {
            (Some(waiting), Some(from)) => {
                let from = Box::new(from);
                (waiting.answer)(Ok(Reply::Fetch { version, from }));
            }
            (waiting, _) => {
                if let Some(waiting) = waiting {
                    // It is answered by what follows.
                    self.wait(party, RequestKind::Sync, waiting.answer, None);
                    let reason = "nobody can say where the version can be had";
                    self.set_reason(party, Some(reason.into()));
                }
                self.tell(SyncEvent::ExplorerFailed(party, version));
            }
        }
    }

    /// A version of a trainer can be had.
    pub(super) fn published(&mut self, party: Party, version: Version, step: u64) {
        // A version is published once. The trainer, the bridge or an explorer that has it says so
        // first.
        if version > self.core.newest().0 {
            self.remember(version, step);
            self.tell(SyncEvent::TrainerPublished(party, version, step));
            self.note_published(party, version, step);
        }
        // The answer for a version also answers a request for an older one.
        let is_done = |kind| matches!(kind, RequestKind::Published(known, _) if known <= version);
        if let Some(waiting) = self.waiting(party, is_done) {
            let answer = self.trained(version, step, Ended::Synced, None);
            (waiting.answer)(Ok(Reply::Trained(answer)));
        }
    }

    pub(super) fn bridged(&mut self, party: Party, said: FromBridge) {
        // A bridge of a trainer that has left may still speak.
        if !self.members.contains_key(&party) {
            return;
        }
        match said {
            FromBridge::Has(version) => {
                // Without a step the trainer has not announced it yet. Its own request publishes it
                // then.
                if let Some(step) = self.steps.get(&version).copied() {
                    self.published(party, version, step);
                }
            }
            FromBridge::Failed(version, reason) => {
                self.trainer_failed(party, &reason);
                if version.is_none() {
                    // The next version that is published starts another.
                    self.retire_bridge();
                }
                let is_publishing = |kind| match (kind, version) {
                    (RequestKind::Published(known, _), Some(version)) => known <= version,
                    (RequestKind::Published(..), None) => true,
                    _ => false,
                };
                if let Some(waiting) = self.waiting(party, is_publishing)
                    && let RequestKind::Published(version, step) = waiting.kind
                {
                    let answer = self.trained(version, step, Ended::Failed, Some(reason));
                    (waiting.answer)(Ok(Reply::Trained(answer)));
                } else if let Some(version) = version {
                    // No trainer waits yet. Its request finds the failure here.
                    self.failed = Some((version, reason));
                }
            }
        }
    }
}
