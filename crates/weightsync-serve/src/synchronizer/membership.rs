//! A party's membership, which is renewed when the service was away.

use std::time::{Duration, Instant};

use weightsync_core::synchronizer::Need;
use weightsync_engine::log_limiter::LogLimiter;
use weightsync_engine::transport::{Deadline, deadline};
use weightsync_engine::{Error, Origin, Result, interruptible};

use super::SyncError;
use super::link::{PartyConnection, ServiceLink, Unanswered};
use super::wire::{Join, JoinAnswer, NeedAnswer, Reply, Request, Role};

/// How long a question that waits for nothing looks for a synchronizer that is away.
pub(super) const LOOK: Duration = Duration::from_millis(500);

/// For how long such questions do not look again for a synchronizer that was away.
const AGAIN: Duration = Duration::from_secs(1);

/// How long a party that ends waits for the synchronizer to know it.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// A membership that is renewed when the service was away.
#[derive(Debug)]
pub(super) struct PartyMembership {
    link: ServiceLink,
    /// With what it joins again.
    pub(super) join: Join,
    connection: Option<PartyConnection>,
    pub(super) joined: JoinAnswer,
    /// When a question that waits for nothing has found the service away.
    away: Option<Instant>,
    warnings: LogLimiter,
    owner: Origin,
}

impl PartyMembership {
    pub(super) fn join(link: ServiceLink, join: Join, until: Deadline) -> Result<Self> {
        let connection = match link.join(&join, None, until) {
            Ok(connection) => connection,
            Err(Unanswered::Away(why)) => return Err(SyncError::Away { why }.into()),
            Err(lost) => return Err(lost.into()),
        };
        let joined = connection.joined.clone();
        let mut membership = Self {
            link,
            join,
            connection: Some(connection),
            joined,
            away: None,
            warnings: LogLimiter::default(),
            owner: Origin::here(),
        };
        membership.note_joined();
        Ok(membership)
    }

    fn note_step(&mut self, step: Option<u64>) {
        // Steps only grow: an older number of the caller changes nothing.
        self.join.step = self.join.step.max(step.unwrap_or_default());
    }

    fn note_joined(&mut self) {
        // On joining again the party asks for the number that it has.
        self.join.worker = Some(self.joined.worker);
        if self.join.role == Role::Trainer {
            self.join.method = Some(self.joined.method);
            // The epoch proves later that no other trainer has joined since.
            self.join.epoch = Some(self.joined.epoch);
        }
    }

    /// Asks. If the service was away and has the party again, [`Unanswered::Away`]: what it knew of this
    /// party's request is lost.
    pub(super) fn ask(
        &mut self,
        request: Request,
        waits: Option<Duration>,
        until: Deadline,
    ) -> std::result::Result<Reply, Unanswered> {
        // In a forked child the connection is the parent's.
        self.owner.check().map_err(Error::from)?;
        // Also when the service is away: the party then joins again with its newest step.
        self.note_step(step_of(&request));
        if self.connection.as_ref().is_none_or(|one| !one.is_alive()) {
            // Compared below: another lineage is a service that has lost its record.
            let before = self.joined.lineage;
            self.rejoin(until)?;
            let is_loaded = matches!(request, Request::Loaded { .. } | Request::LoadFailed { .. });
            if is_loaded && self.joined.lineage != before {
                // The number is of an earlier life of the service, which gives it to other weights.
                return Err(Unanswered::Away("it was started again".into()));
            }
        }
        let Some(connection) = &self.connection else {
            return Err(Unanswered::Away("it is not connected".into()));
        };
        match connection.ask(request, waits) {
            Err(Unanswered::Away(why) | Unanswered::Untrusted(why)) => {
                // The next question joins again.
                self.connection = None;
                Err(Unanswered::Away(why))
            }
            asked => asked,
        }
    }

    /// Says something that an interruption of the caller must not keep back.
    pub(super) fn say(&mut self, request: Request) -> std::result::Result<Reply, Unanswered> {
        // The caller's own interrupt, such as Ctrl-C, must not stop a message that others wait for.
        // The time is short.
        interruptible(
            || false,
            || self.ask(request, Some(LOOK), deadline(Some(LOOK))),
        )
    }

    fn rejoin(&mut self, until: Deadline) -> std::result::Result<(), Unanswered> {
        self.connection = None;
        let connection = self
            .link
            .join(&self.join, Some(&mut self.warnings), until)?;
        tracing::info!(name = self.join.name, "joined the synchronizer again");
        // The service may have been started again with other versions and another method.
        self.joined = connection.joined.clone();
        self.connection = Some(connection);
        self.away = None;
        self.note_joined();
        Ok(())
    }

    /// Whether the party is to synchronise. Answers at once.
    pub(super) fn need_sync(&mut self, step: Option<u64>) -> Result<NeedAnswer> {
        // A training loop asks after each step. It must not pay for a service that is away each
        // time.
        if self.away.is_some_and(|since| since.elapsed() < AGAIN) {
            self.owner.check()?;
            self.note_step(step);
            return Ok(self.unknown_need());
        }
        // A connection that has ended is noticed by the first question.
        for _ in 0..2 {
            let asked = self.ask(Request::Need { step }, Some(LOOK), Some(Instant::now()));
            match self.need_of(asked)? {
                Ok(answer) => return Ok(answer),
                Err(why) => tracing::debug!(name = self.join.name, %why, "no answer"),
            }
        }
        tracing::warn!(name = self.join.name, "the synchronizer is away");
        // From here on steps count without questions for a second.
        self.away = Some(Instant::now());
        Ok(self.unknown_need())
    }

    /// Waits until it is, or the timeout.
    pub(super) fn wait_need_sync(
        &mut self,
        step: Option<u64>,
        timeout: Option<Duration>,
    ) -> Result<NeedAnswer> {
        let until = deadline(timeout);
        loop {
            let timeout = weightsync_mem::left(until);
            let timeout_ms = ms(timeout);
            let asked = self.ask(Request::WaitNeed { step, timeout_ms }, timeout, until);
            match self.need_of(asked)? {
                Ok(answer) => return Ok(answer),
                // The service was away and is back, or will be: the question is asked again.
                Err(_) if timeout.is_none_or(|left| !left.is_zero()) => {}
                Err(why) => {
                    tracing::warn!(name = self.join.name, %why, "the synchronizer is away");
                    return Ok(self.unknown_need());
                }
            }
        }
    }

    /// The answer, or why the service is away.
    fn need_of(
        &self,
        asked: std::result::Result<Reply, Unanswered>,
    ) -> Result<std::result::Result<NeedAnswer, String>> {
        match asked {
            Ok(Reply::Need(answer)) => Ok(Ok(answer)),
            Ok(_) => Err(SyncError::Protocol.into()),
            Err(Unanswered::Away(why)) => Ok(Err(why)),
            Err(lost) => Err(lost.into()),
        }
    }

    /// The answer where the service gives none.
    fn unknown_need(&self) -> NeedAnswer {
        NeedAnswer {
            need: Need::No,
            asked_by: Vec::new(),
            // The last that the service has said.
            newest: self.joined.newest,
            trainer_stopped: false,
            connected: false,
        }
    }

    /// Ends in order, or for a reason. A service that is away sees the connection end.
    pub(super) fn leave(&mut self, reason: Option<String>) {
        if let Some(connection) = self.connection.take()
            // In a forked child the membership is the parent's, which goes on.
            && self.owner.is_here()
            && connection.is_alive()
        {
            let _ = connection.ask(Request::Leave { reason }, Some(LAST_WORDS));
        }
    }
}

fn step_of(request: &Request) -> Option<u64> {
    match request {
        Request::Need { step } | Request::WaitNeed { step, .. } | Request::Sync { step, .. } => {
            *step
        }
        Request::Published { step, .. } | Request::Meet { step, .. } => Some(*step),
        _ => None,
    }
}

pub(super) fn ms(timeout: Option<Duration>) -> Option<u64> {
    timeout.map(|timeout| timeout.as_millis() as u64)
}
