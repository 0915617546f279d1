//! The steps of a receiver that background receivers and cascades share: follow the sender, load
//! a set, report it, and join a successor.

use weightsync_core::{Epoch, Remedy};
use weightsync_mem::Deadline;

use super::{Followed, Receiver, fits, refused, run_of};
use crate::error::{Error, Result};
use crate::load_set::SetLoader;
use crate::scheme::AnyScheme;
use crate::set::SetSnapshot;
use crate::transport::FirstWeights;

/// How a sender is looked for.
#[derive(Clone, Copy, Debug)]
pub(super) enum Search {
    /// Until the deadline.
    Until(Deadline),
    /// Once, by a caller that looks again: an attempt to join a sender that answers is finished.
    Once,
}

/// Whether a later search may succeed after this error: the error is about the peer that answered,
/// or about this moment, and not about this worker.
fn may_pass(error: &Error) -> bool {
    let of_another = matches!(
        error,
        Error::Transport { .. } | Error::Memory(_) | Error::Os { .. }
    );
    of_another || error.remedy() != Remedy::GiveUp
}

impl Receiver {
    /// As [`next`](Self::next) without a timeout, for a thread that must end on request: every wait
    /// can be interrupted, and each call looks once for the successor of a lost sender. Call this
    /// again as long as the sender [`restarts`](Self::restarts).
    pub(crate) fn follow(&mut self) -> Result<Followed> {
        // An earlier thread may have expected an interrupt. To skip the next one here could skip
        // the interrupt that ends this thread; one too many only makes the caller look again.
        self.interrupted = false;
        // The usual case: the sender is there, and the transport waits.
        if !self.sender_lost {
            return match self.next(None) {
                Ok(Some(set)) => Ok(Followed::Set(set)),
                Ok(None) | Err(Error::Interrupted) => Ok(Followed::Interrupted),
                Err(error) => Err(error),
            };
        }
        match self.rejoin(Search::Once) {
            // Its waits are ended by another interrupter from here on.
            Ok(()) => Ok(Followed::Interrupted),
            Err(error) if may_pass(&error) => Ok(Followed::NoSender(error)),
            Err(error) => Err(error),
        }
    }

    /// Loads the initial weights into all models of this worker, which may be other models than
    /// before. Models without shapes yet take the sender's.
    pub(crate) fn begin_into(&mut self, models: &mut SetLoader<'_>) -> Result<()> {
        let Some(set) = self.begin_or_go_on()? else {
            // Models without weights do not serve, unless the scheme starts without weights.
            self.whole = !self.scheme.capabilities().weights
                || self.scheme.scheme().first_weights() == FirstWeights::AtFirstSend;
            return Ok(());
        };
        for member in set.members() {
            // A model that does not fit now never will, so the sender need not wait.
            if let Err(error) = models.shaped(&member.snapshot) {
                self.refuse(None, &error.to_string())?;
                return Err(error);
            }
        }
        let loaded = self.load_and_report(set, models, None);
        if let Err(error) = &loaded {
            // This receiver is given up, so no later version can repair it.
            self.refuse(None, &error.to_string())?;
        }
        loaded
    }

    /// The initial weights for models without weights; none if the models hold what this receiver
    /// handed out last.
    pub(crate) fn begin(&mut self) -> Result<Option<SetSnapshot>> {
        match (self.initial.take(), &self.current) {
            (Some(initial), _) => Ok(Some(initial)),
            (None, Some(_)) => Ok(None),
            (None, None) => self.transport.latest(),
        }
    }

    /// The initial weights for other models of this worker: the set not handed out yet, else the
    /// set it runs, else the newest.
    fn begin_or_go_on(&mut self) -> Result<Option<SetSnapshot>> {
        if let Some(initial) = self.initial.take() {
            return Ok(Some(initial));
        }
        match self.current.clone() {
            Some(current) if self.runs(&current) => Ok(Some(current)),
            // A successor may have no version yet: the models then keep what this worker runs.
            before => {
                let before = before.filter(|before| run_of(before) == Some(self.run));
                Ok(self.transport.latest()?.or(before))
            }
        }
    }

    /// Whether this worker runs this set.
    fn runs(&self, set: &SetSnapshot) -> bool {
        run_of(set) == Some(self.run) && set.versions() == self.applied
    }

    /// Takes back an unused set: the next receive hands out this set or a newer one.
    pub(crate) fn put_back(&mut self, set: SetSnapshot) {
        self.initial = Some(set);
    }

    /// Notes that an interrupt may have come after the last wait. It must not end the next one.
    pub(crate) fn expect_interrupt(&mut self) {
        self.interrupted = true;
    }

    /// Whether the sender is gone, and its successor was not joined yet.
    pub(crate) fn has_lost_sender(&self) -> bool {
        self.sender_lost
    }

    /// Whether the lost sender shut down in order.
    pub(crate) fn has_closed_sender(&self) -> bool {
        self.sender_lost && self.sender_closed
    }

    /// Whether a sender that is gone may come back.
    pub(crate) fn restarts(&self) -> bool {
        self.setup.info.at.restarts()
    }

    pub(crate) fn scheme(&self) -> &AnyScheme {
        &self.scheme
    }

    /// Joins the successor of a sender that is gone. Its run has a higher
    /// epoch, and its versions count again.
    pub(super) fn rejoin(&mut self, search: Search) -> Result<()> {
        // The endpoint may still lead to a run that this worker must not follow.
        let knew = self.transport.run();
        // A run that was refused for its epoch would be refused again: join a higher epoch only.
        let above = u64::from(self.conflicting.is_some());
        let seen = Epoch(knew.epoch.0.saturating_add(above));
        let joined = self.setup.join_transport(&self.scheme, seen, search);
        let mut transport = match (joined, self.conflicting) {
            // The refused run still answers, and is below the epoch that this worker now asks for.
            (Err(Error::Denied { .. } | Error::Fenced { .. }), Some(got)) => {
                return Err(Error::ConflictingRun { knew, got });
            }
            (joined, _) => joined?,
        };
        let got = transport.run();
        // Both claim one epoch, so neither fences off the other. The worker keeps to the one it
        // knew.
        if got.conflicts_with(&knew) {
            self.conflicting = Some(got);
            let error = Error::ConflictingRun { knew, got };
            transport.refuse(None, &error.to_string())?;
            return Err(error);
        }
        // Compared before the switch: a successor with other models leaves this receiver as it was.
        let pairs = self.transport.models().iter();
        let mut wrong = None;
        for own in pairs {
            let mut others = transport.models().iter();
            if let Some(theirs) = others.find(|spec| spec.id == own.id)
                && let Err(mismatch) = fits(&own.layout, &theirs.layout)
            {
                wrong = Some((own.id.clone(), mismatch));
                break;
            }
        }
        if let Some((model, mismatch)) = wrong {
            return Err(refused(&mut *transport, model, mismatch)?);
        }
        // From here on errors, waits and reports are those of the successor.
        self.transport = transport;
        self.sender_lost = false;
        self.conflicting = None;
        Ok(())
    }

    /// The set that the worker's models hold; none after a load that ended midway, so that every
    /// model is loaded again.
    pub(crate) fn held(&self) -> Option<SetSnapshot> {
        self.current.clone().filter(|_| self.whole)
    }

    /// Loads the members of a set that the models do not hold yet, and reports the set as applied.
    /// A load that fails is undone and reported with its reason.
    pub(crate) fn load_and_report(
        &mut self,
        set: SetSnapshot,
        models: &mut SetLoader<'_>,
        held: Option<&SetSnapshot>,
    ) -> Result<()> {
        self.load(&set, models, held)?;
        self.tell_applied(&set)
    }

    /// The same, but the caller tells the sender of a set that is loaded.
    pub(crate) fn load(
        &mut self,
        set: &SetSnapshot,
        models: &mut SetLoader<'_>,
        held: Option<&SetSnapshot>,
    ) -> Result<()> {
        // If the loader panics, the models stay marked as half loaded.
        let was_whole = std::mem::replace(&mut self.whole, false);
        let Err(failure) = models.load(set, held) else {
            self.whole = true;
            self.note_applied(set);
            self.current = Some(set.clone());
            return Ok(());
        };
        // A model may be half written: what the worker ran is loaded again.
        if failure.touched {
            self.go_back(set, models, &failure.error.to_string())?;
        } else {
            // No model was touched: the worker still runs what it ran.
            self.whole = was_whole;
            self.refuse_half_loaded(set, &failure.error.to_string())?;
        }
        Err(failure.error)
    }

    /// Loads what the models had before a load of `set` that left them half
    /// done, and tells the sender why.
    pub(crate) fn go_back(
        &mut self,
        set: &SetSnapshot,
        models: &mut SetLoader<'_>,
        reason: &str,
    ) -> Result<()> {
        // Everything, also what did not change: nobody knows how far the failed load came.
        self.whole = match &self.current {
            Some(before) => models.load(before, None).is_ok(),
            None => false,
        };
        match self.whole {
            true => self.refuse(
                Some(set),
                &format!("{reason}; it went back to its old version"),
            ),
            false => self.refuse_half_loaded(set, reason),
        }
    }

    /// Tells the sender why a set was not loaded, and what that means for models
    /// that are not whole.
    pub(crate) fn refuse_half_loaded(&mut self, set: &SetSnapshot, reason: &str) -> Result<()> {
        let now = match self.whole {
            true => "",
            false => "; its models are half loaded, and do not serve until one load succeeds",
        };
        self.refuse(Some(set), &format!("{reason}{now}"))
    }

    /// Marks the models as half loaded: other code changed them and did not finish.
    pub(crate) fn lose_whole(&mut self) {
        self.whole = false;
    }

    /// Tells the sender that this worker cannot use a set, or, without a set, any version. The
    /// sender is not told of sets of an earlier sender.
    pub(crate) fn refuse(&mut self, set: Option<&SetSnapshot>, reason: &str) -> Result<()> {
        // The sender sends nothing more to this end. Later receives say why.
        if set.is_none() && !self.sender_lost {
            self.withdrawn.get_or_insert_with(|| reason.to_owned());
        }
        match set.is_none_or(|set| run_of(set).is_none_or(|run| run == self.transport.run())) {
            true => self.transport.refuse(set, reason),
            false => Ok(()),
        }
    }

    /// Notes that this worker runs a set.
    pub(crate) fn note_applied(&mut self, set: &SetSnapshot) {
        self.applied = set.versions();
        self.run = run_of(set).unwrap_or(self.transport.run());
    }

    /// Tells the sender that this worker runs a set, if the sender published it. The version
    /// numbers of an earlier sender mean nothing to this one.
    pub(crate) fn tell_applied(&mut self, set: &SetSnapshot) -> Result<()> {
        match run_of(set).is_none_or(|run| run == self.transport.run()) {
            true => self.transport.applied(set),
            false => Ok(()),
        }
    }

    /// Tells the sender, and notes it.
    pub(crate) fn report_applied(&mut self, set: &SetSnapshot) -> Result<()> {
        self.tell_applied(set)?;
        self.note_applied(set);
        Ok(())
    }
}
