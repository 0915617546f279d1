//! Ctrl-C and its like, noticed between two steps, which are bounded in time.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    flag,
};

/// The signals that end a command. A second one ends it at once: the demo's workers
/// end by their lifelines, whatever the trainer does.
#[derive(Clone)]
pub struct Signals {
    caught: Arc<AtomicUsize>,
}

impl Signals {
    pub fn watch() -> io::Result<Self> {
        let caught = Arc::new(AtomicUsize::new(0));
        let again = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            // In this order: the first signal arms the shutdown for the second.
            flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&again))?;
            flag::register(signal, Arc::clone(&again))?;
            flag::register_usize(signal, Arc::clone(&caught), signal as usize)?;
        }
        Ok(Self { caught })
    }

    /// The same, without an end at the second signal, for a command that ends what it has started: it
    /// looks [`again`](Self::again) then.
    pub fn watch_each() -> io::Result<Self> {
        let caught = Arc::new(AtomicUsize::new(0));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            flag::register_usize(signal, Arc::clone(&caught), signal as usize)?;
        }
        Ok(Self { caught })
    }

    /// Waits for another signal after the first one, for as long as `wait` says, which is asked often.
    pub fn again(&self, mut wait: impl FnMut() -> bool) {
        let first = self.caught.swap(0, Ordering::Relaxed);
        while self.caught().is_none() && wait() {}
        self.caught.store(first, Ordering::Relaxed);
    }

    /// The signal that came, if one did.
    pub fn caught(&self) -> Option<u8> {
        match self.caught.load(Ordering::Relaxed) {
            0 => None,
            signal => Some(signal as u8),
        }
    }
}
