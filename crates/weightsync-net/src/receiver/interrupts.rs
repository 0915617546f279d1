//! Interrupts of a worker that may go from one segment to another.

use std::sync::{Mutex, MutexGuard, PoisonError};

use weightsync::transport::Interrupter;

/// What ends a wait, whichever segment it is in.
///
/// **Guarantee.** An interrupt is not lost with the segment that it was meant for: it
/// ends the wait for another one, or the first wait there.
#[derive(Debug, Default)]
pub(super) struct Interrupts {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Of the segment, while there is one.
    segment: Option<Interrupter>,
    /// It is not known yet that a wait was ended.
    open: bool,
}

impl Interrupts {
    /// Ends the wait there is, or the next.
    pub(super) fn interrupt(&self) {
        let mut state = self.state();
        state.open = true;
        if let Some(segment) = &state.segment {
            segment.interrupt();
        }
    }

    /// Waits are in this segment from here on, or in none.
    pub(super) fn go_to(&self, segment: Option<Interrupter>) {
        let mut state = self.state();
        if let Some(segment) = &segment
            && state.open
        {
            segment.interrupt();
        }
        state.segment = segment;
    }

    pub(super) fn is_open(&self) -> bool {
        self.state().open
    }

    /// A wait ends; whether it was to be ended.
    pub(super) fn take(&self) -> bool {
        std::mem::take(&mut self.state().open)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn segment() -> (Interrupter, Arc<AtomicUsize>) {
        let count = Arc::new(AtomicUsize::new(0));
        let own = count.clone();
        let interrupter = Interrupter::new(move || {
            own.fetch_add(1, Ordering::SeqCst);
        });
        (interrupter, count)
    }

    #[test]
    fn an_interrupt_outlives_the_segment_it_was_meant_for() {
        let interrupts = Interrupts::default();
        let (first, in_first) = segment();
        interrupts.go_to(Some(first));
        interrupts.interrupt();
        assert_eq!(in_first.load(Ordering::SeqCst), 1);
        // The relay goes before anybody waits: the next wait is without a segment,
        interrupts.go_to(None);
        assert!(interrupts.is_open());
        // or in the next one.
        let (second, in_second) = segment();
        interrupts.go_to(Some(second));
        assert_eq!(in_second.load(Ordering::SeqCst), 1);
        assert!(interrupts.take());
        // It ends one wait.
        assert!(!interrupts.take());
        let (third, in_third) = segment();
        interrupts.go_to(Some(third));
        assert_eq!(in_third.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn an_interrupt_without_a_segment_ends_one_wait() {
        let interrupts = Interrupts::default();
        interrupts.interrupt();
        interrupts.interrupt();
        assert!(interrupts.take());
        assert!(!interrupts.take());
    }
}
