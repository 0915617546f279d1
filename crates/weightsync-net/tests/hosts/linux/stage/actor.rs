//! The processes of a test, by name.

use std::fmt;

/// A process of a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Actor {
    Trainer,
    /// The relay of this host.
    Relay(usize),
    Worker(u32),
    /// The crowd of this number.
    Crowd(usize),
    /// The attacker on this host.
    Attacker(usize),
}

impl fmt::Display for Actor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Trainer => f.write_str("trainer"),
            Self::Relay(host) => write!(f, "relay of host {host}"),
            Self::Worker(worker) => write!(f, "worker {worker}"),
            Self::Crowd(crowd) => write!(f, "crowd {crowd}"),
            Self::Attacker(host) => write!(f, "attacker of host {host}"),
        }
    }
}
