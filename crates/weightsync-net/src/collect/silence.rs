//! When the other end of a link counts as gone.
//!
//! **Guarantee.** No end is given up because it does not get to run. A process that ends closes its
//! connection. A host that is gone answers no packet, whereas the system of a host that is there
//! answers for a process that is starved or stopped. A pause of this end does not count as silence of
//! the other.

use std::time::Duration;

use weightsync_engine::transport::SILENT_SENDER;
use weightsync_mem::HostAnswers;

use super::LinkError;

/// How long a read waits before this end looks at the other host.
pub(super) const LOOK: Duration = Duration::from_secs(1);

/// A host that answers no packet for this long is gone.
pub(super) const HOST_SILENT: Duration = Duration::from_secs(10);

/// An end that sends nothing for this long is gone, though a host answers: behind a tunnel or a proxy
/// it is the host of that which answers.
pub(super) const SILENT: Duration = SILENT_SENDER;

/// The silence of an end.
#[derive(Debug)]
pub(super) struct Silence {
    /// How long it may last while the host answers.
    limit: Duration,
    /// How long it has lasted, by the looks of this end.
    lasted: Duration,
    /// The last look found packets without an answer.
    is_unanswered: bool,
}

impl Silence {
    pub(super) fn new(limit: Duration) -> Self {
        Self {
            limit,
            lasted: Duration::ZERO,
            is_unanswered: false,
        }
    }

    /// Something has arrived.
    pub(super) fn ends(&mut self) {
        *self = Self::new(self.limit);
    }

    /// Nothing has arrived for another [`LOOK`], and the other host has answered like this.
    ///
    /// # Errors
    ///
    /// Why the other end is gone.
    pub(super) fn goes_on(&mut self, answers: Option<HostAnswers>) -> Result<(), LinkError> {
        self.lasted += LOOK;
        // The answer to the newest packet may be on its way: it will be here at the next look.
        let was_unanswered = self.is_unanswered;
        self.is_unanswered = answers.is_some_and(|host| host.unanswered > 0);
        match answers {
            Some(host) if was_unanswered && self.is_unanswered && host.since >= HOST_SILENT => {
                Err(LinkError::HostSilent)
            }
            _ if self.lasted >= self.limit => Err(LinkError::Silent(self.lasted)),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::ZERO;

    fn answers(unanswered: u32, since: Duration) -> Option<HostAnswers> {
        Some(HostAnswers { unanswered, since })
    }

    /// How many looks it takes until the end is gone, and why it is.
    fn looks(answers: impl Fn(u64) -> Option<HostAnswers>) -> (u64, String) {
        let mut silence = Silence::new(SILENT);
        for look in 1.. {
            if let Err(gone) = silence.goes_on(answers(look)) {
                return (look, gone.to_string());
            }
        }
        unreachable!("a silence ends")
    }

    #[test]
    fn starved_end_is_kept_while_its_host_answers() {
        let five_minutes = (300, "nothing arrived for 300s".to_owned());
        // It answers at once, or a question to a full window is on its way at every other look.
        assert_eq!(looks(|_| answers(0, NOW)), five_minutes);
        let other = |look| answers((look % 2) as u32, Duration::from_secs(60));
        assert_eq!(looks(other), five_minutes);
        // Nothing was sent that it could answer.
        assert_eq!(looks(|look| answers(0, LOOK * look as u32)), five_minutes);
        // The system does not say.
        assert_eq!(looks(|_| None), five_minutes);
    }

    #[test]
    fn end_is_gone_once_its_host_answers_nothing() {
        let (look, why) = looks(|look| answers(look as u32, LOOK * look as u32));
        assert_eq!(why, "its host answered nothing for 10s");
        assert_eq!(look, 10);
        // A packet that is lost on the way is answered when it is sent again.
        let lossy = |look| answers(2, LOOK * (look % 9) as u32);
        assert_eq!(looks(lossy).0, 300);
    }

    #[test]
    fn silence_ends_when_something_arrives() {
        let mut silence = Silence::new(2 * LOOK);
        for _ in 0..10 {
            silence.goes_on(answers(1, HOST_SILENT)).unwrap();
            silence.ends();
        }
    }
}
