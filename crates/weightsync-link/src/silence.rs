//! When the other end of a link counts as gone.
//!
//! **Guarantee.** No end is given up because it does not get to run for a moment. A process that ends
//! closes its connection. A host that is gone answers no packet, whereas the system of a host that is
//! there answers for a process that is starved or stopped. A pause of this end does not count as silence
//! of the other: looks count, and no clock.

use std::time::Duration;

use weightsync_mem::HostAnswers;

/// How long an end may be silent.
#[derive(Clone, Copy, Debug)]
pub struct SilenceLimits {
    /// How long a read waits before this end looks at the other host.
    pub look: Duration,
    /// A host is gone if so many looks in a row find packets without an answer,
    pub unanswered: u32,
    /// and nothing has come from it for this long.
    pub host: Duration,
    /// An end is gone after this long though a host answers: behind a tunnel or a proxy it is the host
    /// of that which answers.
    pub end: Duration,
    /// The same, where the system does not say whether the host answers.
    pub unknown: Duration,
}

/// Who is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SilentPeer {
    /// The host answers nothing.
    Host,
    /// Nothing has come from the end for this long.
    End(Duration),
}

/// The silence of an end.
#[derive(Debug)]
pub struct Silence {
    limits: SilenceLimits,
    /// How long it has lasted, by the looks of this end.
    lasted: Duration,
    /// How many looks in a row found packets without an answer.
    unanswered: u32,
}

impl Silence {
    /// One that has only begun.
    pub fn new(limits: SilenceLimits) -> Self {
        Self {
            limits,
            lasted: Duration::ZERO,
            unanswered: 0,
        }
    }

    /// Something has arrived.
    pub fn ends(&mut self) {
        *self = Self::new(self.limits);
    }

    /// How long it has lasted.
    pub(crate) fn lasted(&self) -> Duration {
        self.lasted
    }

    /// Nothing has arrived for another look, and the other host has answered like this. `Some` if an
    /// end is gone.
    pub fn goes_on(&mut self, answers: Option<HostAnswers>) -> Option<SilentPeer> {
        let limits = self.limits;
        self.lasted += limits.look;
        let end = match answers {
            Some(host) => {
                // The answer to the newest packet may be on its way: it will be here at the next look.
                self.unanswered = match host.unanswered {
                    0 => 0,
                    _ => self.unanswered + 1,
                };
                if self.unanswered >= limits.unanswered && host.since >= limits.host {
                    return Some(SilentPeer::Host);
                }
                limits.end
            }
            None => {
                self.unanswered = 0;
                limits.end.min(limits.unknown)
            }
        };
        (self.lasted >= end).then_some(SilentPeer::End(self.lasted))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::ZERO;
    const LOOK: Duration = Duration::from_secs(1);
    const HOST_SILENT: Duration = Duration::from_secs(10);
    const LIMITS: SilenceLimits = SilenceLimits {
        look: LOOK,
        unanswered: 2,
        host: HOST_SILENT,
        end: Duration::from_secs(300),
        unknown: Duration::from_secs(300),
    };

    fn answers(unanswered: u32, since: Duration) -> Option<HostAnswers> {
        Some(HostAnswers { unanswered, since })
    }

    /// How many looks it takes until the end is gone, and why it is.
    fn looks(answers: impl Fn(u64) -> Option<HostAnswers>) -> (u64, SilentPeer) {
        let mut silence = Silence::new(LIMITS);
        for look in 1.. {
            if let Some(gone) = silence.goes_on(answers(look)) {
                return (look, gone);
            }
        }
        unreachable!("a silence ends")
    }

    #[test]
    fn starved_end_is_kept_while_its_host_answers() {
        let five_minutes = (300, SilentPeer::End(LIMITS.end));
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
        assert_eq!(why, SilentPeer::Host);
        assert_eq!(look, 10);
        // A packet that is lost on the way is answered when it is sent again.
        let lossy = |look| answers(2, LOOK * (look % 9) as u32);
        assert_eq!(looks(lossy).0, 300);
    }

    #[test]
    fn silence_ends_when_something_arrives() {
        let mut silence = Silence::new(SilenceLimits {
            end: 2 * LOOK,
            ..LIMITS
        });
        for _ in 0..10 {
            assert_eq!(silence.goes_on(answers(1, HOST_SILENT)), None);
            silence.ends();
        }
    }

    #[test]
    fn unknown_host_may_have_a_shorter_silence() {
        let mut silence = Silence::new(SilenceLimits {
            unknown: LOOK,
            ..LIMITS
        });
        assert_eq!(silence.goes_on(answers(0, NOW)), None);
        assert_eq!(silence.goes_on(None), Some(SilentPeer::End(2 * LOOK)));
    }
}
