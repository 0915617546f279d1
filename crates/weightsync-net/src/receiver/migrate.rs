//! Moves a worker between its host's relay and an agent of its own: to the relay once there is one,
//! and away from one that is silent, until it answers again.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use weightsync_engine::Result;
use weightsync_engine::transport::{Backoff, Handoff, ReceiverTransport};

use super::route::{FoundSegment, Route};
use super::{ReceiverState, SharedReceiver};
use weightsync_mem::threads::{self, CondvarExt as _};

/// The pause before the first look for a relay; later pauses are longer. Until the worker moves,
/// its host fetches everything twice.
const FIRST: Duration = Duration::from_millis(50);

/// How long a worker that has a version stays where it is: a relay that has just started has no
/// version for it.
const STAYS: Duration = Duration::from_millis(500);

/// The longest pause between two looks, of a worker that has no version yet. All that comes to
/// it is fetched once more by a relay that comes meanwhile.
const LONGEST_WITHOUT: Duration = Duration::from_millis(200);

/// The longest pause of one that has.
const LONGEST: Duration = Duration::from_secs(8);

/// How long a relay may take to show a worker that would leave or come that it gets to run.
const SIGN: Duration = Duration::from_millis(300);

impl SharedReceiver {
    /// Starts looking for a relay, unless a thread already does.
    pub(super) fn look_out(shared: &Arc<Self>, state: &mut ReceiverState) {
        if state.looks.is_some() || !shared.route.wants_a_relay() {
            return;
        }
        Self::start_looking(shared, state, Self::look_out_for_a_relay);
    }

    /// The relay of this segment shows no sign of life: its process is stopped, or does not get to run.
    /// The worker fetches for itself meanwhile, if its sender answers.
    pub(super) fn relay_is_silent(shared: &Arc<Self>, relay: &Arc<str>) {
        let mut state = shared.state();
        // Without a thread that looks, the worker is at a relay. A worker that leaves needs none.
        if state.looks.is_none() && !shared.closed.load(Ordering::SeqCst) {
            let relay = relay.clone();
            Self::start_looking(shared, &mut state, move |shared| {
                if Self::leave_a_silent_relay(shared, &relay) || !shared.has_looked() {
                    Self::look_out_for_a_relay(shared);
                }
            });
        }
    }

    fn start_looking(
        shared: &Arc<Self>,
        state: &mut ReceiverState,
        work: impl FnOnce(&Arc<Self>) + Send + 'static,
    ) {
        let own = shared.clone();
        let looks = threads::spawn("look", move || work(&own));
        match looks {
            Ok(looks) => state.looks = Some(looks),
            // The worker stays where it is.
            Err(error) => tracing::warn!("cannot start a thread to look for a relay: {error}"),
        }
    }

    /// Moves from the segment of a relay to an agent of the worker's own. False if the worker stays: the
    /// sender does not answer either, the relay does again, or the worker is at another segment by now.
    pub(super) fn leave_a_silent_relay(shared: &Arc<Self>, relay: &Arc<str>) -> bool {
        let goes_on = || !shared.closed.load(Ordering::SeqCst);
        let agent = match shared.route.agent_of_its_own(goes_on) {
            Ok(Some(agent)) if agent.run == shared.run => agent,
            Ok(_) => return false,
            Err(error) => {
                tracing::warn!(
                    "this host's relay is silent, and the worker cannot fetch for itself: {error}"
                );
                return false;
            }
        };
        // A relay that did not get to run for a while may have just done so.
        if Route::answers(relay, SIGN) {
            return false;
        }
        let moved = Self::moves(shared, |old, handoff| {
            // It may have found another way meanwhile, because its relay has died.
            match Arc::ptr_eq(&old.name, relay) {
                true => shared.route.attach_to(agent, handoff).map(Some),
                false => Ok(None),
            }
        });
        if moved == Some(true) {
            tracing::warn!(
                "this host's relay shows no sign of life, and its sender does: the worker fetches \
                 for itself until the relay answers"
            );
        }
        moved == Some(true)
    }

    fn look_out_for_a_relay(shared: &Arc<Self>) {
        let before = Backoff::new(FIRST, LONGEST_WITHOUT);
        let (mut backoff, mut has_version, mut since) = (before, false, Instant::now());
        while !shared.rest(backoff.pause()) {
            if !has_version && shared.state().has_version {
                has_version = true;
                backoff = Backoff::new(LONGEST_WITHOUT, LONGEST);
            }
            // No call of the worker waits for a relay that is stopped.
            let Some(relay) = shared.route.answering_relay(SIGN) else {
                continue;
            };
            let moved = Self::moves(shared, |old, handoff| {
                match since.elapsed() < STAYS && old.attached.reader().has_news() {
                    true => Ok(None),
                    false => shared.route.attach_to_relay(&relay, handoff),
                }
            });
            match moved {
                None => return,
                Some(true) if shared.has_looked() => return,
                // That relay has gone already, and the worker is its own agent again.
                Some(true) => {
                    let longest = if has_version {
                        LONGEST
                    } else {
                        LONGEST_WITHOUT
                    };
                    (backoff, since) = (Backoff::new(FIRST, longest), Instant::now());
                }
                Some(false) => {}
            }
        }
    }

    /// Moves the worker between two calls to the segment that `find` returns; it stays where none
    /// is returned. Returns whether it has moved, or `None` if the worker leaves.
    fn moves(
        shared: &Arc<Self>,
        find: impl FnOnce(&FoundSegment, &Handoff) -> Result<Option<FoundSegment>>,
    ) -> Option<bool> {
        let old = shared.take_between_calls()?;
        let handoff = old.attached.handoff();
        // The old segment stays attached until the worker is in the next one.
        let (next, left) = match find(&old, &handoff) {
            Ok(Some(mut next)) if next.attached.run() == shared.run => {
                if let Err(error) = next.attached.take_over(handoff) {
                    tracing::error!("going on at another segment of this host: {error}");
                }
                (next, Some(old))
            }
            Ok(_) => (old, None),
            Err(error) => {
                tracing::warn!("the worker stays where it is: {error}");
                (old, None)
            }
        };
        shared.state().moving = false;
        let has_moved = left.is_some();
        // The sender registers the new route before the worker leaves the old one.
        Self::take_in(shared, next);
        drop(left);
        Some(has_moved)
    }

    /// Ends the search for a relay, unless the relay has gone meanwhile and the worker is its own
    /// agent again.
    pub(super) fn has_looked(&self) -> bool {
        let mut state = self.state();
        if self.closed.load(Ordering::SeqCst) {
            return true;
        }
        if !state.is_own_agent {
            state.looks = None;
        }
        !state.is_own_agent
    }

    /// Takes the segment once no call uses it; `None` if the worker leaves.
    fn take_between_calls(&self) -> Option<FoundSegment> {
        let mut state = self.state();
        // From here on no call takes the segment.
        state.moving = true;
        // A call that waits in it returns, and goes on waiting in the next one.
        if let Some(interrupter) = &state.interrupter {
            interrupter.interrupt();
        }
        loop {
            if self.closed.load(Ordering::SeqCst) {
                return None;
            }
            if let Some(found) = state.found.take() {
                return Some(found);
            }
            state = self.changed.wait_at_most(state, LONGEST);
        }
    }

    /// Waits this long; returns whether the worker leaves.
    fn rest(&self, pause: Duration) -> bool {
        let since = Instant::now();
        let mut state = self.state();
        loop {
            if self.closed.load(Ordering::SeqCst) {
                return true;
            }
            let left = pause.saturating_sub(since.elapsed());
            if left.is_zero() {
                return false;
            }
            state = self.changed.wait_at_most(state, left);
        }
    }
}
