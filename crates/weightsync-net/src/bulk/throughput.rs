//! Measures the speed of a link over all its parallel transfers, as each alone has only a share
//! of it.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What came, and how long that took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Came {
    pub(crate) bytes: u64,
    /// Without waits for a parent that did not have it yet: a chunk that has begun to
    /// come is whole at the parent, so from there on only the link holds it up.
    ///
    /// The parent could not tell: what it writes may be taken by a buffer at once.
    pub(crate) busy: Duration,
}

/// Fewer bytes say little of how fast a link is, and are told together with what comes after them.
pub(crate) const MEASURABLE: u64 = 1 << 20;

impl Came {
    /// How fast it came, in bytes a second; `None` of too few bytes.
    pub(crate) fn rate(self) -> Option<f64> {
        let seconds = self.busy.as_secs_f64();
        let measurable = self.bytes >= MEASURABLE && seconds > 0.0;
        measurable.then(|| self.bytes as f64 / seconds)
    }
}

/// One link's.
#[derive(Debug, Default)]
pub(super) struct Throughput(Mutex<Gauge>);

/// The same for one thread: plain values in, plain values out.
#[derive(Debug, Default)]
pub(crate) struct Gauge {
    came: Came,
    /// Chunks that are coming.
    coming: u32,
    /// Up to when the time is counted, while any is.
    counted: Option<Instant>,
}

/// A chunk that is coming. Dropped, it comes no more.
#[derive(Debug)]
pub(super) struct Coming<'a>(&'a Throughput);

impl Throughput {
    /// All that has come.
    pub(super) fn came(&self) -> Came {
        self.gauge().came()
    }

    /// A chunk begins to come.
    pub(super) fn begin(&self, now: Instant) -> Coming<'_> {
        self.gauge().begin(now);
        Coming(self)
    }

    fn gauge(&self) -> MutexGuard<'_, Gauge> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Coming<'_> {
    /// So much more of it is there.
    pub(super) fn more(&self, bytes: usize, now: Instant) {
        self.0.gauge().more(bytes as u64, now);
    }
}

impl Drop for Coming<'_> {
    fn drop(&mut self) {
        self.0.gauge().end();
    }
}

impl Gauge {
    /// All that has come.
    pub(crate) fn came(&self) -> Came {
        self.came
    }

    /// A chunk begins to come.
    pub(crate) fn begin(&mut self, now: Instant) {
        self.count(now);
        self.coming += 1;
    }

    /// So much more of one is there.
    pub(crate) fn more(&mut self, bytes: u64, now: Instant) {
        self.count(now);
        self.came.bytes += bytes;
    }

    /// One that has begun comes no more: what was not counted of it did not come.
    pub(crate) fn end(&mut self) {
        self.coming -= 1;
    }

    fn count(&mut self, now: Instant) {
        let before = self.counted.replace(now);
        if self.coming > 0
            && let Some(before) = before
        {
            self.came.busy += now.saturating_duration_since(before);
        }
    }
}

impl Came {
    /// What so many of the bytes took that came since then.
    pub(crate) fn share(self, before: Self, bytes: u64) -> Self {
        let all = self.bytes - before.bytes;
        let busy = self.busy - before.busy;
        let share = match all {
            0 => 0.0,
            all => bytes as f64 / all as f64,
        };
        Self {
            bytes,
            busy: busy.mul_f64(share),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meter_sums_parallel_transfers() {
        let (throughput, start) = (Throughput::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        let came = |bytes, millis| Came {
            bytes,
            busy: Duration::from_millis(millis),
        };
        let one = throughput.begin(at(0));
        one.more(10, at(1));
        let before = throughput.came();
        let other = throughput.begin(at(1));
        other.more(5, at(2));
        one.more(5, at(2));
        drop(one);
        other.more(10, at(3));
        drop(other);
        assert_eq!(throughput.came(), came(30, 3000));
        assert_eq!(throughput.came().share(before, 15), came(15, 1500));
        // Nobody waits for what the parent does not have yet.
        let late = throughput.begin(at(60));
        late.more(10, at(61));
        assert_eq!(throughput.came(), came(40, 4000));
        assert_eq!(Came::default().share(Came::default(), 0), came(0, 0));
    }
}
