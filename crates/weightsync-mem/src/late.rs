//! Late workers: later publications do not wait for a late worker until it makes progress.

use std::time::{Duration, Instant};

/// What a sender remembers of a worker that was late: for which publication, and how
/// far the worker was. `P` is the worker's progress, whatever tells that it has moved.
///
/// **Guarantee.** A worker that was late for one publication is not waited for by a
/// later one for as long as its progress stays the same. The first such publication
/// counts until the worker moves.
///
/// ```
/// use std::time::Instant;
/// use weightsync_mem::Lateness;
///
/// let mut late = Lateness::default();
/// late.note(7, Instant::now(), "has v6");
/// assert!(late.since(8, || "has v6").is_some());
/// assert!(late.since(8, || "has v7").is_none(), "it has moved");
/// assert!(late.since(7, || "has v6").is_none(), "that one can be waited for again");
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Lateness<P>(Option<LateMark<P>>);

#[derive(Clone, Copy, Debug)]
struct LateMark<P> {
    sequence: u64,
    since: Instant,
    progress: P,
}

impl<P: PartialEq> Lateness<P> {
    /// Notes that the worker did not do its part of the publication with this sequence number, live
    /// since `since`, before the deadline.
    pub fn note(&mut self, sequence: u64, since: Instant, progress: P) {
        // A worker that has not moved since keeps its first mark: the report says since when it is
        // late.
        let known = self.0.as_ref();
        if known.is_none_or(|mark| mark.progress != progress) {
            self.0 = Some(LateMark {
                sequence,
                since,
                progress,
            });
        }
    }

    /// For how long the worker has been late, if the publication with this sequence number must not
    /// wait for it.
    pub fn since(&self, sequence: u64, progress: impl FnOnce() -> P) -> Option<Duration> {
        let mark = self.0.as_ref()?;
        // The publication that found it late may be waited for again, and so may those before.
        let stands = sequence > mark.sequence && progress() == mark.progress;
        stands.then(|| mark.since.elapsed())
    }
}

impl<P> Default for Lateness<P> {
    fn default() -> Self {
        Self(None)
    }
}
