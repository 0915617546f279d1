//! Moves a worker that is its own agent to its host's relay once there is one.

use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use weightsync_engine::transport::ReceiverTransport;

use super::route::Found;
use super::{Shared, State};

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

impl Shared {
    /// Starts looking for a relay, unless a thread already does.
    pub(super) fn look_out(shared: &Arc<Self>, state: &mut State) {
        if state.looks.is_some() || !shared.route.wants_a_relay() {
            return;
        }
        let own = shared.clone();
        let looks = std::thread::Builder::new()
            .name("weightsync-look".into())
            .spawn(move || Self::look_out_for_a_relay(&own));
        match looks {
            Ok(looks) => state.looks = Some(looks),
            // The worker continues as its own agent.
            Err(error) => tracing::warn!("cannot start a thread to look for a relay: {error}"),
        }
    }

    fn look_out_for_a_relay(shared: &Arc<Self>) {
        let (mut pause, mut since) = (FIRST, Instant::now());
        while !shared.rest(pause) {
            let longest = match shared.state().has_version {
                true => LONGEST,
                false => LONGEST_WITHOUT,
            };
            pause = (pause * 2).min(longest);
            if !shared.route.has_a_relay() {
                continue;
            }
            let Some(old) = shared.take_between_calls() else {
                return;
            };
            let stays = since.elapsed() < STAYS && old.attached.reader().has_news();
            let (next, left) = match stays {
                true => (old, None),
                false => shared.at_the_relay(old),
            };
            shared.state().moving = false;
            let is_over = left.is_some();
            // The sender registers the new route before the worker leaves the old one.
            Self::take_in(shared, next);
            if is_over {
                drop(left);
                if shared.has_looked() {
                    return;
                }
                (pause, since) = (FIRST, Instant::now());
            }
        }
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

    /// The relay's segment and the one left for it; otherwise the current segment.
    fn at_the_relay(&self, old: Found) -> (Found, Option<Found>) {
        let handoff = old.attached.handoff();
        match self.route.find_relay(&handoff) {
            Ok(Some(mut next)) if next.attached.run() == self.run => {
                if let Err(error) = next.attached.take_over(handoff) {
                    tracing::error!("going on at a relay: {error}");
                }
                (next, Some(old))
            }
            Ok(_) => (old, None),
            Err(error) => {
                tracing::warn!("this host's relay cannot be used: {error}");
                (old, None)
            }
        }
    }

    /// Takes the segment once no call uses it; `None` if the worker leaves.
    fn take_between_calls(&self) -> Option<Found> {
        let mut state = self.state();
        state.moving = true;
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
            state = self.wait_for_a_change(state, LONGEST);
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
            state = self.wait_for_a_change(state, left);
        }
    }

    fn wait_for_a_change<'a>(
        &self,
        state: MutexGuard<'a, State>,
        most: Duration,
    ) -> MutexGuard<'a, State> {
        let waited = self.changed.wait_timeout(state, most);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }
}
