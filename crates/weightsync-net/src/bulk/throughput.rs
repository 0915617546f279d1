//! Measures the speed of a link over all its parallel transfers, because each of them gets only a
//! share.

use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use weightsync_mem::threads::LockExt as _;

/// Bytes that were transferred, and how long that took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Transferred {
    pub(crate) bytes: u64,
    /// Time in which at least one block was arriving. Waits for a parent that did not have the
    /// block yet are left out: a parent sends a block only once it has all of it. The parent cannot
    /// measure this, as a buffer may accept its writes at once.
    pub(crate) busy: Duration,
}

/// Fewer bytes tell little about a link's speed, so they are reported together with later ones.
pub(crate) const MEASURABLE: u64 = 1 << 20;

impl Transferred {
    /// Bytes a second; `None` for too few bytes.
    pub(crate) fn rate(self) -> Option<f64> {
        let seconds = self.busy.as_secs_f64();
        let measurable = self.bytes >= MEASURABLE && seconds > 0.0;
        measurable.then(|| self.bytes as f64 / seconds)
    }
}

/// The throughput of one link.
#[derive(Debug, Default)]
pub(super) struct Throughput(Mutex<Gauge>);

/// The same for one thread: plain values in, plain values out.
#[derive(Debug, Default)]
pub(crate) struct Gauge {
    transferred: Transferred,
    /// Blocks that are arriving now.
    arriving: u32,
    /// Up to when the time is counted, while a block is arriving.
    counted: Option<Instant>,
}

/// A block that is arriving. Dropping it ends the arrival.
#[derive(Debug)]
pub(super) struct Arrival<'a>(&'a Throughput);

impl Throughput {
    /// Everything that has been transferred.
    pub(super) fn transferred(&self) -> Transferred {
        self.gauge().transferred()
    }

    /// A block begins to arrive.
    pub(super) fn begin(&self, now: Instant) -> Arrival<'_> {
        self.gauge().begin(now);
        Arrival(self)
    }

    fn gauge(&self) -> MutexGuard<'_, Gauge> {
        self.0.locked()
    }
}

impl Arrival<'_> {
    /// More bytes of the block have arrived.
    pub(super) fn more(&self, bytes: usize, now: Instant) {
        self.0.gauge().more(bytes as u64, now);
    }
}

impl Drop for Arrival<'_> {
    fn drop(&mut self) {
        self.0.gauge().end();
    }
}

impl Gauge {
    /// Everything that has been transferred.
    pub(crate) fn transferred(&self) -> Transferred {
        self.transferred
    }

    /// A block begins to arrive.
    pub(crate) fn begin(&mut self, now: Instant) {
        self.count(now);
        self.arriving += 1;
    }

    /// More bytes of a block have arrived.
    pub(crate) fn more(&mut self, bytes: u64, now: Instant) {
        self.count(now);
        self.transferred.bytes += bytes;
    }

    /// A block no longer arrives. Its last bytes that were not counted did not arrive.
    pub(crate) fn end(&mut self) {
        self.arriving -= 1;
    }

    fn count(&mut self, now: Instant) {
        let before = self.counted.replace(now);
        // Between two blocks the parent may have had nothing to send. That time is not the link's.
        if self.arriving > 0
            && let Some(before) = before
        {
            self.transferred.busy += now.saturating_duration_since(before);
        }
    }
}

impl Transferred {
    /// The share of the time since `before` that this many of the bytes took.
    pub(crate) fn share(self, before: Self, bytes: u64) -> Self {
        // Both values only grow, and `before` is the earlier one.
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
        let transferred = |bytes, millis| Transferred {
            bytes,
            busy: Duration::from_millis(millis),
        };
        let one = throughput.begin(at(0));
        one.more(10, at(1));
        let before = throughput.transferred();
        let other = throughput.begin(at(1));
        other.more(5, at(2));
        one.more(5, at(2));
        drop(one);
        other.more(10, at(3));
        drop(other);
        assert_eq!(throughput.transferred(), transferred(30, 3000));
        assert_eq!(
            throughput.transferred().share(before, 15),
            transferred(15, 1500)
        );
        // Time in which the parent itself waits for the block does not count.
        let late = throughput.begin(at(60));
        late.more(10, at(61));
        assert_eq!(throughput.transferred(), transferred(40, 4000));
        assert_eq!(
            Transferred::default().share(Transferred::default(), 0),
            transferred(0, 0)
        );
    }
}
