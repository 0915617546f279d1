//! Ctrl-C and its like, noticed between two steps, which are bounded in time.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::{fs, io};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator;
use signal_hook::low_level::exit;
#[cfg(feature = "net")]
use weightsync_engine::transport::threads::CondvarExt as _;
use weightsync_engine::transport::threads::{self, LockExt as _};

/// The signals that end a command. A second one ends it at once: the demo's workers
/// end by their lifelines, whatever the trainer does.
#[derive(Clone)]
pub struct Signals(Arc<ReceivedSignals>);

#[derive(Default)]
struct ReceivedSignals {
    /// The first signal, once it has come.
    first: AtomicU8,
    again: AtomicBool,
    /// Whether a second one does not end this process.
    held: AtomicBool,
    /// Held by those who wait for the first one, and while it is noted.
    waiting: Mutex<()>,
    noted: Condvar,
}

impl Signals {
    /// Notices them from now on, but for those that this process was started to ignore.
    pub fn watch() -> io::Result<Self> {
        // A signal that `nohup` or a shell has the process ignore stays ignored.
        let ignored = ignored();
        let heeded = [SIGINT, SIGTERM, SIGHUP];
        let heeded = heeded.iter().filter(|one| ignored >> (**one - 1) & 1 == 0);
        // From here on the signals no longer end the process: `note` decides.
        let mut coming = iterator::Signals::new(heeded)?;
        let came = Arc::new(ReceivedSignals::default());
        let noted = Arc::clone(&came);
        // A thread of its own: the others may be in a call that does not look.
        threads::spawn("signals", move || {
            coming.forever().for_each(|signal| noted.note(signal))
        })?;
        Ok(Self(came))
    }

    /// Makes a call during which a second signal does not end this process: the call looks whether it
    /// has come [`again`](Self::again).
    pub fn held<T>(&self, call: impl FnOnce() -> T) -> T {
        self.0.held.store(true, Ordering::SeqCst);
        let done = call();
        self.0.held.store(false, Ordering::SeqCst);
        done
    }

    /// Waits for the first signal.
    #[cfg(feature = "net")]
    pub fn wait(&self) -> u8 {
        // Under the lock from the look to the wait: a signal in between is not missed.
        let mut waiting = self.0.waiting();
        loop {
            if let Some(signal) = self.caught() {
                return signal;
            }
            waiting = self.0.noted.wait_at_most(waiting, None);
        }
    }

    /// The first signal that came, if one did.
    pub fn caught(&self) -> Option<u8> {
        match self.0.first.load(Ordering::SeqCst) {
            0 => None,
            signal => Some(signal),
        }
    }

    /// Whether another one came after it.
    pub fn again(&self) -> bool {
        self.0.again.load(Ordering::SeqCst)
    }
}

impl ReceivedSignals {
    fn waiting(&self) -> MutexGuard<'_, ()> {
        self.waiting.locked()
    }

    fn note(&self, signal: i32) {
        let first = &self.first;
        // Held while the first signal is noted, so a waiter either sees it or is woken.
        let waiting = self.waiting();
        // Of several signals the first one gives the exit code.
        let set = first.compare_exchange(0, signal as u8, Ordering::SeqCst, Ordering::SeqCst);
        drop(waiting);
        if set.is_ok() {
            self.noted.notify_all();
            return;
        }
        // Noted also if it does not end the process: the call that holds it looks for it.
        self.again.store(true, Ordering::SeqCst);
        if !self.held.load(Ordering::SeqCst) {
            // The code of a process that a signal has ended, as shells have it.
            exit(128 + signal);
        }
    }
}

/// The signals that this process ignores, a bit each: `nohup` starts it so, and a shell what it runs in
/// the background.
fn ignored() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mut lines = status.lines();
    // The kernel shows the mask in hexadecimal digits, the first signal in the lowest bit.
    let mask = lines.find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .unwrap_or(0)
}
