//! Ending a wait from another thread.

use std::fmt;
use std::sync::Arc;

/// Ends a receiver's wait from another thread.
///
/// **Guarantee.** After [`interrupt`](Self::interrupt) the wait that the receiver
/// is in, or else the next one that it begins, ends at once, as if its deadline
/// had come; nothing that was sent is lost. Several interrupts before that wait
/// add up to one. It may outlive its receiver, and then does nothing.
#[derive(Clone)]
pub struct Interrupter(Arc<dyn Fn() + Send + Sync>);

impl Interrupter {
    /// One of a transport of one's own.
    pub fn new(interrupt: impl Fn() + Send + Sync + 'static) -> Self {
        Self(Arc::new(interrupt))
    }

    /// Ends the wait.
    pub fn interrupt(&self) {
        (self.0)();
    }
}

impl fmt::Debug for Interrupter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Interrupter")
    }
}
