//! The thread that receives: what it does next, and how it ends.

use std::any::Any;
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use weightsync_mem::threads;
use weightsync_mem::{Backoff, Error as Memory, Origin, interrupt};

use super::handoff::{HandoffState, ReceiverHandoff};
use super::status::{BackgroundState, BackgroundStatus};
use crate::error::{Error, MemoryError, Result};
use crate::receiver::{Followed, Receiver};
use crate::set::SetSnapshot;

/// How often a sender that is gone is looked for: soon at first, then less often.
const SEARCH_FIRST: Duration = Duration::from_millis(2);
const SEARCH_LAST: Duration = Duration::from_millis(50);

/// How many reasons why no sender is reached are logged for one search.
const MOST_REASONS: usize = 16;

/// What is done with what arrives.
pub(crate) trait ThreadTask: Send + 'static {
    /// What the thread and the worker's threads both see.
    type Shared: Send + 'static;

    /// Does what can be done with what was taken before.
    ///
    /// # Errors
    ///
    /// What ends the thread.
    fn work(
        &mut self,
        handoff: &ReceiverHandoff<Self::Shared>,
        receiver: &mut Receiver,
    ) -> Result<RemainingWork>;

    /// Deals with what has just been taken.
    ///
    /// # Errors
    ///
    /// What ends the thread.
    fn arrived(
        &mut self,
        handoff: &ReceiverHandoff<Self::Shared>,
        receiver: &mut Receiver,
        set: SetSnapshot,
    ) -> Result<()>;
}

/// What a task still has to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RemainingWork {
    /// Nothing.
    Nothing,
    /// Something waits for its time, and something newer may take its place.
    Replaceable,
    /// Something waits for its time, and nothing more may be taken until then.
    Full,
}

/// Whether a thread that only waits would ever be given anything new, or knows
/// that it would not.
///
/// # Errors
///
/// [`Error::Unsupported`].
pub(crate) fn can_follow(receiver: &Receiver) -> Result<()> {
    let can = receiver.scheme().capabilities();
    if can.weights && !can.push {
        return Err(receiver.without_push());
    }
    receiver.interrupter().map(drop)
}

/// The thread, and the handoff it shares. Dropping it ends the thread.
#[derive(Debug)]
pub(crate) struct Follower<B: Send + 'static> {
    handoff: Arc<ReceiverHandoff<B>>,
    thread: Option<JoinHandle<()>>,
}

impl<B: Send + 'static> Follower<B> {
    /// Starts the thread, unless there is nothing that could ever arrive.
    pub(crate) fn start(
        receiver: Receiver,
        shared: B,
        task: impl ThreadTask<Shared = B>,
    ) -> Result<Self> {
        let carries = receiver.scheme().capabilities().weights;
        let handoff = Arc::new(ReceiverHandoff {
            inner: Mutex::new(HandoffState {
                shared,
                status: BackgroundStatus::of(&receiver),
                interrupter: receiver.interrupter()?,
                receiver: Some(Box::new(receiver)),
                borrowers: 0,
                news: 0,
                stop: false,
                why: None,
                ended: !carries,
                gone: false,
            }),
            changed: Condvar::new(),
            owner: Origin::here(),
        });
        let thread = match carries {
            false => None,
            true => {
                let handoff = handoff.clone();
                let thread = threads::spawn("background", move || {
                    let _gone = GoneOnDrop(&handoff);
                    run(&handoff, task);
                    handoff.fail();
                });
                Some(thread.map_err(Error::os("starting a background receiver"))?)
            }
        };
        Ok(Self { handoff, thread })
    }

    /// The handoff.
    ///
    /// # Errors
    ///
    /// In a forked child.
    pub(crate) fn handoff(&self) -> Result<&Arc<ReceiverHandoff<B>>> {
        self.handoff.owner.check()?;
        Ok(&self.handoff)
    }

    /// Ends the thread and clears the handoff. A caller that gives a permit back after that
    /// finds it empty. If the wait for what the thread is at is interrupted, the
    /// thread ends on its own after that, and drops what is in the handoff.
    ///
    /// # Errors
    ///
    /// In a forked child; [`Error::Interrupted`].
    pub(crate) fn stop(mut self) -> Result<(Receiver, B)>
    where
        B: Default,
    {
        self.handoff()?;
        if self.thread.is_some() {
            self.handoff.notify(|inner| inner.stop = true);
            if let Err(interrupted) = self.handoff.until_gone() {
                self.thread = None;
                return Err(interrupted);
            }
        }
        let handoff = self.handoff.clone();
        drop(self);
        let mut inner = handoff.lock();
        let shared = std::mem::take(&mut inner.shared);
        let receiver = inner.receiver.take();
        drop(inner);
        let mut receiver = receiver
            .unwrap_or_else(|| unreachable!("the thread that takes the receiver brings it back"));
        receiver.expect_interrupt();
        Ok((*receiver, shared))
    }

    /// Whether this is the thread itself: what it loads into called.
    pub(crate) fn is_here(&self) -> bool {
        let thread = self.thread.as_ref();
        thread.is_some_and(|thread| thread.thread().id() == std::thread::current().id())
    }

    fn end(&mut self) {
        let is_here = self.is_here();
        let Some(thread) = self.thread.take() else {
            return;
        };
        if self.handoff().is_err() {
            // The thread is the parent's and does not exist here.
            std::mem::forget(thread);
            return;
        }
        self.handoff.notify(|inner| inner.stop = true);
        if is_here {
            // Ended by what it loads into: it stops once that has returned.
            return;
        }
        // A panic of the thread was caught, and is in the status.
        let _ = thread.join();
    }
}

impl<B: Send + 'static> Drop for Follower<B> {
    fn drop(&mut self) {
        self.end();
    }
}

/// Says at the end of the thread that it is gone.
struct GoneOnDrop<'a, B>(&'a ReceiverHandoff<B>);

impl<B> Drop for GoneOnDrop<'_, B> {
    fn drop(&mut self) {
        self.0.update(|inner| inner.gone = true);
    }
}

/// What the thread does next.
#[derive(Clone, Debug)]
enum NextStep {
    Again,
    /// Nothing, until there are news.
    Rest,
    /// Look for the sender again, after a while; and why the one that answered
    /// cannot be followed.
    Search(Option<String>),
    /// Nothing any more.
    End,
}

fn run<T: ThreadTask>(handoff: &ReceiverHandoff<T::Shared>, mut task: T) {
    let mut over = false;
    let mut backoff = Backoff::new(SEARCH_FIRST, SEARCH_LAST);
    // Whether the failure in the status is of the search.
    let mut hindered = false;
    // Why no sender is reached: each reason is logged once.
    let mut logged = BTreeSet::new();
    while let Some((mut receiver, seen)) = handoff.check_out() {
        let done = catch_unwind(AssertUnwindSafe(|| {
            turn(handoff, &mut task, &mut receiver, &mut logged, over)
        }));
        let done = done.unwrap_or_else(|panic| {
            Err(Error::Panicked {
                what: "the background receiver",
                message: message_of(&*panic),
            })
        });
        let (turn, state) = match done {
            Ok(turn) if over => (turn, None),
            Ok(turn) => (turn, Some(state_of(&receiver))),
            Err(_) if over => (NextStep::End, None),
            // Only this set is lost: the next one can be received.
            Err(Error::Memory(MemoryError(
                error @ (Memory::CorruptCommit { .. } | Memory::CorruptSet { .. }),
            ))) => {
                let failure = Some(error.to_string());
                handoff.update(|inner| inner.status.failure = failure);
                (NextStep::Again, None)
            }
            Err(Error::SenderClosed | Error::SenderDied { .. }) if receiver.restarts() => {
                (NextStep::Again, Some(state_of(&receiver)))
            }
            Err(error) => {
                over = true;
                (NextStep::Again, Some(end_of(error, &mut receiver)))
            }
        };
        let hindrance = match &turn {
            NextStep::Search(hindrance) => hindrance.clone(),
            _ => None,
        };
        if hindrance.is_some() || hindered {
            hindered = hindrance.is_some();
            handoff.update(|inner| inner.status.failure = hindrance);
        }
        handoff.check_in(receiver, state, matches!(turn, NextStep::End));
        match turn {
            NextStep::End => return,
            NextStep::Again => backoff.reset(),
            NextStep::Rest => handoff.rest_until_news(seen, None),
            NextStep::Search(_) => {
                handoff.rest_until_news(seen, Some(backoff.pause()));
            }
        }
    }
}

fn turn<T: ThreadTask>(
    handoff: &ReceiverHandoff<T::Shared>,
    task: &mut T,
    receiver: &mut Receiver,
    logged: &mut BTreeSet<String>,
    over: bool,
) -> Result<NextStep> {
    let work = task.work(handoff, receiver)?;
    if over {
        return Ok(match work {
            RemainingWork::Nothing => NextStep::End,
            RemainingWork::Replaceable | RemainingWork::Full => NextStep::Rest,
        });
    }
    if work == RemainingWork::Full {
        return Ok(NextStep::Rest);
    }
    let followed = match receiver.has_lost_sender() {
        false => {
            logged.clear();
            receiver.follow()
        }
        // Who ends this thread, or wants the receiver, does not wait for a sender that
        // says much slowly.
        true => interrupt::with(|| handoff.is_wanted(), || receiver.follow()),
    };
    match followed? {
        Followed::Set(set) => {
            task.arrived(handoff, receiver, set)?;
            Ok(NextStep::Again)
        }
        Followed::Interrupted | Followed::NoSender(Error::Interrupted) => Ok(NextStep::Again),
        Followed::NoSender(Error::NoSender { address, last, .. }) => {
            if let Some(reason) = last
                && logged.len() < MOST_REASONS
                && logged.insert(without_numbers(&reason))
            {
                log_unreached(receiver, &address, &reason);
            }
            Ok(NextStep::Search(None))
        }
        Followed::NoSender(error) => Ok(NextStep::Search(Some(error.to_string()))),
    }
}

/// The reason without its ports and times: they differ at each attempt.
fn without_numbers(reason: &str) -> String {
    reason.chars().filter(|one| !one.is_ascii_digit()).collect()
}

/// Logs why no sender is reached. A sender that shut down may have no successor: that is no warning.
fn log_unreached(receiver: &Receiver, address: &str, reason: &str) {
    let worker = receiver.worker();
    match receiver.has_closed_sender() {
        true => tracing::info!(%worker, %address, "no sender is reached: {reason}"),
        false => tracing::warn!(%worker, %address, "no sender is reached: {reason}"),
    }
}

fn state_of(receiver: &Receiver) -> BackgroundState {
    match receiver.has_lost_sender() {
        true if receiver.has_closed_sender() => BackgroundState::Closed,
        true => BackgroundState::Searching,
        false => BackgroundState::Following,
    }
}

/// The state after an error that ends it all.
fn end_of(error: Error, receiver: &mut Receiver) -> BackgroundState {
    match error {
        Error::SenderClosed => BackgroundState::Closed,
        Error::SenderDied { pid } => BackgroundState::Died { pid },
        error => {
            let reason = error.to_string();
            tracing::error!(worker = %receiver.worker(), %reason, "the background receiver ends");
            // Sends are not to wait for it any more, and to say why.
            let _ = receiver.refuse(None, &reason);
            BackgroundState::Failed { reason }
        }
    }
}

/// What a panic said.
pub(crate) fn message_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("no message").to_owned()
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use weightsync_core::{Epoch, Run};

    use super::*;
    use crate::transport::Interrupter;

    /// A forked child has a copy of the handoff, whose lock may be held for ever,
    /// and no thread.
    #[test]
    fn forked_child_gets_errors_and_drops_nothing() {
        let (end, ended) = mpsc::channel::<()>();
        let run = Run {
            epoch: Epoch(1),
            id: [0; 16],
        };
        let handoff = Arc::new(ReceiverHandoff {
            inner: Mutex::new(HandoffState {
                shared: (),
                status: BackgroundStatus {
                    state: BackgroundState::Following,
                    versions: Vec::new(),
                    run,
                    staged: Vec::new(),
                    failure: None,
                },
                receiver: None,
                interrupter: Interrupter::new(|| panic!("the parent's wait goes on")),
                borrowers: 0,
                news: 0,
                stop: false,
                why: None,
                ended: false,
                gone: false,
            }),
            changed: Condvar::new(),
            owner: Origin::NOWHERE,
        });
        let follower = || Follower {
            handoff: handoff.clone(),
            thread: None,
        };
        let held = handoff.lock();
        for error in [
            follower().handoff().map(drop).unwrap_err(),
            follower().stop().map(drop).unwrap_err(),
        ] {
            let is_forked = matches!(error, Error::Forked { owner: 0, .. });
            assert!(is_forked, "{error}");
        }
        // A thread that would never be joined.
        let mut alive = follower();
        alive.thread = Some(std::thread::spawn(move || {
            let _ = ended.recv();
        }));
        drop(alive);
        assert!(!held.stop);
        drop(end);
    }
}
