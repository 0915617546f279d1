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

    /// The signal that came, if one did.
    pub fn caught(&self) -> Option<u8> {
        match self.caught.load(Ordering::Relaxed) {
            0 => None,
            signal => Some(signal as u8),
        }
    }
}
