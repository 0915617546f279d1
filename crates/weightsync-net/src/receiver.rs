//! A worker's end: it attaches to a segment on its host, or fetches for itself. When a relay is
//! gone, it looks again.

mod migrate;
mod route;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Instant;

use weightsync_engine::transport::{
    Attached, Deadline, Endpoint, Handoff, Interrupter, Joining, ModelSpec, ReceiverTransport,
    VersionRequest, interrupt,
};
use weightsync_engine::{Error, Result, Run, SetSnapshot};
use weightsync_mem::threads::{self, CondvarExt as _, LockExt as _};

use self::route::{FoundSegment, Route, Waits};
use crate::error::NetError;
use crate::scheme::Distributed;

/// A worker's end.
///
/// When a relay goes, its segment goes too. A thread then looks for another route, even while the
/// worker is in no call: so its sender keeps the worker.
#[derive(Debug)]
pub(crate) struct NetReceiver {
    shared: Arc<SharedReceiver>,
    models: Vec<ModelSpec>,
}

#[derive(Debug)]
struct SharedReceiver {
    route: Route,
    run: Run,
    state: Mutex<ReceiverState>,
    changed: Condvar,
    /// Ends waits from another thread, in whichever segment they are.
    interrupted: AtomicBool,
    closed: AtomicBool,
}

#[derive(Debug)]
struct ReceiverState {
    /// The segment, unless a call uses it or there is none.
    found: Option<FoundSegment>,
    interrupter: Option<Interrupter>,
    /// What the session gave this end; kept here while there is no segment to pass it to.
    handoff: Handoff,
    /// A set that was applied while there was no segment, to be reported to the next one.
    applied: Option<SetSnapshot>,
    refused: Option<(Option<SetSnapshot>, String)>,
    /// The thread that looks for another route.
    search: Option<JoinHandle<()>>,
    /// The thread that looks for a relay while the worker is its own agent, or makes it that.
    looks: Option<JoinHandle<()>>,
    /// Another route was found, a relay or an agent of its own: the worker moves to it between two calls.
    moving: bool,
    /// The worker is its own agent, or was when it last had a segment.
    is_own_agent: bool,
    /// The worker has been given a version.
    has_version: bool,
    /// The worker has said that it cannot use the sender's models, or a call has failed.
    is_useless: bool,
    /// The search for another route has ended without one.
    ended: Option<SearchEnd>,
}

/// Why a search ended without a route.
#[derive(Debug)]
enum SearchEnd {
    /// The sender is dead.
    Died,
    /// The sender cannot be looked for; the text says why.
    Hindered(String),
}

impl NetReceiver {
    pub(crate) fn join(
        scheme: &Distributed,
        at: &Endpoint,
        joining: &Joining,
        deadline: Deadline,
    ) -> Result<Self> {
        let route = Route::new(scheme, at, joining)?;
        let found = route.find(&Handoff::default(), deadline)?;
        let models = found.attached.models().to_vec();
        let shared = Arc::new(SharedReceiver {
            run: found.attached.run(),
            route,
            state: Mutex::new(ReceiverState {
                found: None,
                interrupter: None,
                handoff: Handoff::default(),
                applied: None,
                refused: None,
                search: None,
                looks: None,
                moving: false,
                is_own_agent: false,
                has_version: false,
                is_useless: false,
                ended: None,
            }),
            changed: Condvar::new(),
            interrupted: AtomicBool::new(false),
            closed: AtomicBool::new(false),
        });
        SharedReceiver::take_in(&shared, found);
        Ok(Self { shared, models })
    }

    /// Calls the current segment. If its relay is gone, waits for the next segment, and calls that.
    /// `None` if the deadline or an interrupt comes first.
    fn with<T>(
        &self,
        deadline: Deadline,
        mut call: impl FnMut(&mut Attached) -> Result<Option<T>>,
    ) -> Result<Option<T>> {
        let shared = &self.shared;
        loop {
            let mut state = shared.state();
            if let Some(ended) = &state.ended {
                return Err(shared.lost(ended));
            }
            let Some(mut found) = state.take_found() else {
                if shared.interrupted.swap(false, Ordering::SeqCst)
                    || weightsync_mem::passed(deadline)
                {
                    return Ok(None);
                }
                drop(state);
                let left = weightsync_mem::left(deadline);
                // Called without the lock, because this may run the user's code.
                let pause = interrupt::at_most(left)?;
                let state = shared.state();
                // Looked at again, because the lock was free for a moment.
                if (state.found.is_none() || state.moving) && state.ended.is_none() {
                    shared.wait(state, pause);
                }
                continue;
            };
            // A call may wait for long, and the other threads need the state.
            drop(state);
            let result = call(&mut found.attached);
            let gone = matches!(&result, Err(Error::Memory(error)) if error.is_relay_gone());
            // The relay may have gone during the call.
            let lost = gone || (result.is_ok() && found.has_lost_its_relay());
            let mut state = shared.state();
            state.has_version |= matches!(result, Ok(Some(_)));
            let interrupted = matches!(result, Err(Error::Interrupted));
            // `drop` keeps the agent of an unfinished worker for the next `connect`, but not that
            // of a useless one.
            state.is_useless |= result.is_err() && !interrupted && !gone;
            if lost {
                SharedReceiver::look_again(shared, &mut state, found);
            } else {
                state.found = Some(found);
                // A thread that moves the worker waits until the call has ended.
                shared.changed.notify_all();
            }
            drop(state);
            // A wait that ended before its deadline was interrupted: by the user, or by a thread
            // that moves the worker to another segment, where the wait goes on.
            let cut_short = matches!(result, Ok(None)) && !weightsync_mem::passed(deadline);
            let goes_on = cut_short && !shared.interrupted.swap(false, Ordering::SeqCst);
            if !gone && !goes_on {
                return result;
            }
        }
    }

    /// Reports to the sender; if there is no segment now, the next one carries the report.
    fn notify(
        &self,
        notify: impl FnOnce(&mut Attached) -> Result<()>,
        later: impl FnOnce(&mut ReceiverState),
    ) -> Result<()> {
        let mut state = self.shared.state();
        match &mut state.found {
            Some(found) => notify(&mut found.attached),
            None => {
                later(&mut state);
                Ok(())
            }
        }
    }
}

impl SharedReceiver {
    /// Makes this the current segment.
    fn take_in(shared: &Arc<Self>, mut found: FoundSegment) {
        let mut state = shared.state();
        if let Some(set) = state.applied.take() {
            // A segment that is gone needs no report.
            let _ = found.attached.applied(&set);
        }
        if let Some((set, reason)) = state.refused.take() {
            let _ = found.attached.refuse(set.as_ref(), &reason);
        }
        state.interrupter = found.attached.interrupter().ok();
        // Interrupts that arrived meanwhile went to the earlier segment, or to none.
        if let Some(interrupter) = &state.interrupter
            && shared.interrupted.load(Ordering::SeqCst)
        {
            interrupter.interrupt();
        }
        // Weak, because the segment's watching thread must not keep this receiver alive.
        let watched = found.is_a_relays().then(|| Arc::downgrade(shared));
        let relay = found.name.clone();
        let end = found.attached.end();
        state.is_own_agent = found.is_its_own_agents();
        if state.is_own_agent {
            Self::look_out(shared, &mut state);
        }
        state.found = Some(found);
        // Before `then`: if the segment has ended already, it runs `notice` at once, which takes
        // the lock.
        drop(state);
        shared.changed.notify_all();
        if let Some(weak) = watched {
            let own = weak.clone();
            end.while_silent(move || {
                if let Some(shared) = own.upgrade() {
                    Self::relay_is_silent(&shared, &relay);
                }
            });
            end.then(move || {
                if let Some(shared) = weak.upgrade() {
                    Self::notice(&shared);
                }
            });
        }
    }

    /// The segment has ended, perhaps while no call uses it.
    fn notice(shared: &Arc<Self>) {
        let mut state = shared.state();
        if shared.closed.load(Ordering::SeqCst) {
            // The segment is dropped with its worker, not here: its watching thread runs this, and
            // must not wait for itself.
            return;
        }
        // A call that uses the segment notices without a message.
        if let Some(found) = state.found.take_if(|found| found.has_lost_its_relay()) {
            Self::look_again(shared, &mut state, found);
        }
    }

    /// Looks for another route on a thread of its own.
    fn look_again(shared: &Arc<Self>, state: &mut ReceiverState, found: FoundSegment) {
        state.handoff = found.attached.handoff();
        state.interrupter = None;
        let own = shared.clone();
        // The segment is dropped by that thread: its watching thread may run this, and must not
        // wait for itself.
        let ends = Arc::new(Mutex::new(Some(found)));
        let theirs = ends.clone();
        let search = threads::spawn("route", move || {
            drop(taken(&theirs));
            own.search();
        });
        match search {
            Ok(search) => {
                state.search = Some(search);
            }
            Err(error) => {
                tracing::error!("cannot start a thread to look for another relay: {error}");
                state.found = taken(&ends);
                state.ended = Some(SearchEnd::Hindered(format!(
                    "cannot start a thread for it: \
                                                            {error}"
                )));
            }
        }
    }

    fn search(self: Arc<Self>) {
        let handoff = self.state().handoff.clone();
        let found = self
            .route
            .find_again(self.run, &handoff, &self.closed, Waits::default());
        match found {
            Ok(Some(mut found)) => {
                if let Err(error) = found.attached.take_over(handoff) {
                    tracing::error!("going on at another relay: {error}");
                }
                Self::take_in(&self, found);
            }
            Ok(None) => {}
            Err(Error::SenderDied { .. }) => self.end(SearchEnd::Died),
            Err(error) => {
                tracing::warn!("no other route to the sender: {error}");
                self.end(SearchEnd::Hindered(error.to_string()));
            }
        }
    }

    fn end(&self, ended: SearchEnd) {
        self.state().ended = Some(ended);
        self.changed.notify_all();
    }

    /// The error of a call without a segment. If the sender may restart, the session looks again
    /// after a death, and then learns the reason.
    fn lost(&self, ended: &SearchEnd) -> Error {
        match ended {
            SearchEnd::Hindered(reason) if !self.route.restarts() => {
                let reason = reason.clone();
                NetError::NoRoute { reason }.into()
            }
            _ => Error::SenderDied { pid: None },
        }
    }

    fn wait(&self, state: MutexGuard<'_, ReceiverState>, pause: Option<std::time::Duration>) {
        drop(self.changed.wait_at_most(state, pause));
    }

    fn state(&self) -> MutexGuard<'_, ReceiverState> {
        // Each change is one step, so the state is valid after a panic.
        self.state.locked()
    }
}

impl ReceiverState {
    /// Takes the segment for a call.
    fn take_found(&mut self) -> Option<FoundSegment> {
        self.found.take_if(|_| !self.moving)
    }
}

impl ReceiverTransport for NetReceiver {
    fn models(&self) -> &[ModelSpec] {
        &self.models
    }

    fn run(&self) -> Run {
        self.shared.run
    }

    fn travelled(&self) -> Option<u64> {
        let state = self.shared.state();
        state.found.as_ref().and_then(FoundSegment::travelled)
    }

    fn next(&mut self, deadline: Deadline) -> Result<Option<SetSnapshot>> {
        self.with(deadline, |attached| attached.next(deadline))
    }

    fn latest(&mut self) -> Result<Option<SetSnapshot>> {
        self.with(Some(Instant::now()), Attached::latest)
    }

    fn pull(
        &mut self,
        model: usize,
        pull: VersionRequest,
        deadline: Deadline,
    ) -> Result<Option<SetSnapshot>> {
        self.with(deadline, |attached| attached.pull(model, pull, deadline))
    }

    fn interrupter(&self) -> Result<Interrupter> {
        let weak = Arc::downgrade(&self.shared);
        Ok(Interrupter::new(move || {
            let Some(shared) = weak.upgrade() else {
                return;
            };
            let state = shared.state();
            // Set even if there is a segment: that segment may end before it notices.
            shared.interrupted.store(true, Ordering::SeqCst);
            shared.changed.notify_all();
            if let Some(interrupter) = &state.interrupter {
                interrupter.interrupt();
            }
        }))
    }

    fn applied(&mut self, set: &SetSnapshot) -> Result<()> {
        self.notify(
            |attached| attached.applied(set),
            |state| state.applied = Some(set.clone()),
        )
    }

    fn refuse(&mut self, set: Option<&SetSnapshot>, reason: &str) -> Result<()> {
        self.shared.state().is_useless |= set.is_none();
        self.notify(
            |attached| attached.refuse(set, reason),
            |state| state.refused = Some((set.cloned(), reason.into())),
        )
    }
}

impl Drop for NetReceiver {
    fn drop(&mut self) {
        let shared = &self.shared;
        let (found, threads) = {
            let mut state = shared.state();
            // Under the lock: a thread that looks at `closed` either sees this, or is woken below.
            shared.closed.store(true, Ordering::SeqCst);
            let threads = [state.search.take(), state.looks.take()];
            (state.found.take(), threads)
        };
        shared.changed.notify_all();
        // Without the lock, which these threads take.
        for thread in threads.into_iter().flatten() {
            if shared.route.is_forked() {
                // In a forked child the thread does not exist: it belongs to the parent.
                std::mem::forget(thread);
            } else {
                // The panic hook has already reported a panic there.
                let _ = thread.join();
            }
        }
        // A thread may have brought a segment after the first look.
        let (late, is_unfinished) = {
            let mut state = shared.state();
            let is_unfinished = !state.has_version && !state.is_useless;
            (state.found.take(), is_unfinished)
        };
        // The worker leaves its segment before its agent leaves the sender.
        let agents = [found, late]
            .into_iter()
            .flatten()
            .filter_map(FoundSegment::leave);
        for agent in agents.filter(|_| is_unfinished) {
            shared.route.keep(agent);
        }
    }
}

fn taken(found: &Mutex<Option<FoundSegment>>) -> Option<FoundSegment> {
    found.locked().take()
}

#[cfg(test)]
mod tests;
