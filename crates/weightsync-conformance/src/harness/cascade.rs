//! A worker that feeds workers of its own.

use std::time::Instant;

use weightsync_engine::{
    AnyScheme, Cascade, CascadeInBackground, CascadeSetup, Expect, ReceiverSetup,
};

use super::command::Answer;
use super::process::Stop;
use super::scale::longest;
use super::trainer::sent_report;

/// How far it is.
pub(crate) enum CascadeNode {
    Joined(Box<CascadeSetup>),
    ByHand(Box<Cascade>),
    ByThread(CascadeInBackground),
}

impl CascadeNode {
    /// Joins; its own workers are fed by the same scheme.
    pub(crate) fn join(setup: ReceiverSetup, scheme: AnyScheme) -> Result<(Self, Answer), Stop> {
        let joined = Cascade::join(setup, Some(longest()))?;
        let joined =
            joined.configure(|setup| Ok(setup.scheme(scheme)?.send_timeout(Some(longest()))))?;
        let info = joined.init_info();
        Ok((Self::Joined(Box::new(joined)), Answer::Info(info)))
    }

    pub(crate) fn feed(self, workers: &[u32]) -> Result<Self, Stop> {
        let Self::Joined(setup) = self else {
            return Err("it has been connected".into());
        };
        let expect = Expect::workers(workers.iter().copied());
        let cascade = setup.connect(expect, Some(longest()))?;
        Ok(Self::ByHand(Box::new(cascade)))
    }

    pub(crate) fn pass_on(&mut self) -> Result<Answer, Stop> {
        let Self::ByHand(cascade) = self else {
            return Err("it is not for it to pass on".into());
        };
        let begun = Instant::now();
        Ok(match cascade.forward(None)? {
            Some(forwarded) => Answer::Sent(sent_report(&forwarded.report, begun.elapsed())),
            None => Answer::Nothing,
        })
    }

    pub(crate) fn forget(&mut self, workers: &[u32]) -> Result<Answer, Stop> {
        let Self::ByHand(cascade) = self else {
            return Err("it is not for it to pass on".into());
        };
        cascade.forget(workers.iter().copied())?;
        Ok(Answer::Done)
    }

    /// Starts the thread, or ends it.
    pub(crate) fn turn(self) -> Result<Self, Stop> {
        match self {
            Self::Joined(_) => Err("it has no workers yet".into()),
            Self::ByHand(cascade) => Ok(Self::ByThread(cascade.in_background()?)),
            Self::ByThread(cascade) => Ok(Self::ByHand(Box::new(cascade.stop()?))),
        }
    }
}
