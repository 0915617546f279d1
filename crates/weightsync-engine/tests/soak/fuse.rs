//! A process's own random moment to die. Killing from outside hits whatever
//! takes long; a fuse also hits the microseconds around a publication.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Signal, getpid, kill_process};
use serde::{Deserialize, Serialize};

use crate::scale::Dice;

/// The last words of a process that ended by its fuse.
pub const BURNT: &str = "the fuse burnt down";

/// When a process kills itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fuse {
    /// At this version or check of its own.
    after: u64,
    moment: Moment,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Moment {
    /// With half of it done.
    Midway,
    /// So long after it was done.
    Later(Duration),
}

impl Fuse {
    /// A fuse that burns for at most `life` steps; a few processes have none and
    /// wait to be killed by somebody else.
    pub fn random(dice: &mut Dice, life: u64) -> Option<Self> {
        let moment = match dice.below(16) {
            0 => return None,
            1..=7 => Moment::Midway,
            _ => Moment::Later(Duration::from_micros(dice.below(400))),
        };
        // A trainer's first version is part of its connecting.
        let after = 2 + dice.below(life);
        Some(Self { after, moment })
    }
}

/// A fuse in place. Its thread kills the process while the others go on.
#[derive(Debug)]
pub struct Lit {
    fuse: Option<Fuse>,
    spark: Sender<Instant>,
}

impl Lit {
    pub fn new(fuse: Option<Fuse>) -> Self {
        let (spark, sparks) = channel();
        if fuse.is_some() {
            thread::spawn(move || burn(&sparks));
        }
        Self { fuse, spark }
    }

    /// To be called with half of step `number` done.
    pub fn midway(&self, number: u64) {
        if self
            .fuse
            .is_some_and(|fuse| fuse.after == number && fuse.moment == Moment::Midway)
        {
            end();
        }
    }

    /// To be called when step `number` is done.
    pub fn done(&self, number: u64) {
        match self.fuse {
            Some(Fuse { after, moment }) if after == number => match moment {
                // The thread lives as long as this end of the channel.
                Moment::Later(delay) => drop(self.spark.send(Instant::now() + delay)),
                // A step that has no half.
                Moment::Midway => end(),
            },
            _ => {}
        }
    }
}

fn burn(sparks: &Receiver<Instant>) {
    let Ok(at) = sparks.recv() else {
        return;
    };
    while Instant::now() < at {
        thread::yield_now();
    }
    end();
}

fn end() -> ! {
    eprintln!("{BURNT}");
    let _ = kill_process(getpid(), Signal::KILL);
    unreachable!("the signal is delivered before the call returns")
}
