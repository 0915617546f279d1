//! How long a test waits for what must happen, and for the end of what it started.
//!
//! A limit is not a verdict: only what hangs reaches it. So each is generous, and grows with the
//! number of programs that want the processors. The tests of crates that the suite is built on have
//! this file as a module of their own.

use std::fs;
use std::thread::available_parallelism;
use std::time::Duration;

/// A limit is this many times what a quiet machine needs, at least. Load that comes after a limit was
/// set is covered by it too.
const GENEROUS: f64 = 4.0;

/// No limit is longer: the test runner ends a test after 15 minutes, and the test is to say what it
/// waited for.
const MOST: Duration = Duration::from_secs(8 * 60);

/// How many programs want each processor now, or wanted it in the last minute; at least 1.
pub fn slowness() -> f64 {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let mut fields = text.split_whitespace();
    let average: f64 = fields
        .next()
        .and_then(|one| one.parse().ok())
        .unwrap_or(0.0);
    let running = fields
        .nth(2)
        .and_then(|one| one.split_once('/')?.0.parse().ok());
    let wanted = average.max(running.unwrap_or(0.0));
    (wanted / available_parallelism().map_or(1.0, |cores| cores.get() as f64)).max(1.0)
}

/// The limit for what takes at most so many seconds on a quiet machine.
pub fn patience(seconds: u64) -> Duration {
    let limit = Duration::from_secs(seconds).mul_f64(GENEROUS * slowness());
    limit.min(MOST)
}
