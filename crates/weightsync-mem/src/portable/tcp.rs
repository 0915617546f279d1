//! Other systems do not say how the other host of a TCP connection answers.

use std::os::fd::AsFd;
use std::time::Duration;

/// How the other host has answered lately.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostAnswers {
    /// Packets in a row that were sent again, or that asked for an answer, and got none.
    pub unanswered: u32,
    /// The time since the last answer.
    pub since: Duration,
}

/// Always `None`.
pub fn host_answers(_socket: impl AsFd) -> Option<HostAnswers> {
    None
}
