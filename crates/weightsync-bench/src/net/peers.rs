//! What people use today to bring weights to other processes.

use std::error::Error;
use std::time::Duration;

use super::ours::{self, Route};
use super::{Row, TENSORS, WARM, median, row, stream};
use crate::numbers::{Size, Times};
use crate::peer::{Arrangement, Peer, Program};

/// Their sends that are counted, and ours before and after them.
const SENDS: usize = 9;
const OURS: usize = 5;

/// Every way to send there is, to the numbers of workers it is meant for, and how much
/// of its time ours may take.
pub(super) const CASES: [Case; 11] = [
    Case::new("gloo-send", 1, 1.0 / 1.3),
    Case::new("gloo-broadcast", 4, 1.0 / 4.0),
    Case::new("zmq-push", 1, 1.0),
    Case::new("zmq-push", 4, 1.0),
    Case::new("zmq-pub", 4, 1.0),
    Case::new("mooncake", 1, 1.0),
    Case::new("mooncake", 4, 1.0),
    Case::new("nixl", 1, 1.0),
    Case::new("nixl", 4, 1.0),
    Case::new("ray", 1, 1.0),
    Case::new("ray", 4, 1.0),
];

#[derive(Clone, Copy)]
pub(super) struct Case {
    scheme: &'static str,
    workers: usize,
    size: Size,
    target: f64,
}

/// What their sends came to.
struct Theirs {
    first: Duration,
    sends: Times,
}

impl Case {
    const fn new(scheme: &'static str, workers: usize, target: f64) -> Self {
        let size = Size(0);
        Self {
            scheme,
            workers,
            size,
            target,
        }
    }

    pub(super) fn sized(self, size: Size) -> Self {
        Self { size, ..self }
    }

    pub(super) fn name(&self) -> String {
        format!("{} {}, N = {}", self.scheme, self.size, self.workers)
    }

    pub(super) fn rows(&self, program: &Program) -> Result<Vec<Row>, Box<dyn Error>> {
        let before = (stream(self.size)?, self.ours()?);
        let theirs = self.theirs(program)?;
        let after = (self.ours()?, stream(self.size)?);
        let mut streams = Times::default();
        [before.0, after.1]
            .into_iter()
            .for_each(|time| streams.push(time));
        let (stream, sends) = (streams.median(), theirs.sends.median());
        let (name, workers) = (self.name(), self.workers);
        let ours = median([before.1, after.0]);
        Ok(vec![
            row(
                format!("distributed, N = {workers}, against {name}"),
                ours,
                sends,
                Some(self.target),
            ),
            row(format!("{name}, against iperf3"), sends, stream, None),
            row(
                format!("{name}, the first send"),
                theirs.first,
                stream,
                None,
            ),
        ])
    }

    /// A single worker fetches directly; several workers of a host share a relay.
    fn ours(&self) -> Result<Times, Box<dyn Error>> {
        let route = if self.workers == 1 {
            Route::Link
        } else {
            Route::Relay
        };
        Ok(ours::measure(route, self.workers, self.size, OURS)?.sends)
    }

    fn theirs(&self, program: &Program) -> Result<Theirs, Box<dyn Error>> {
        let mut peer = Peer::start(
            program,
            &Arrangement {
                scheme: self.scheme,
                bytes: self.size.0,
                tensors: TENSORS,
                workers: self.workers,
            },
        )?;
        peer.round(WARM)?;
        let mut sends = Times::default();
        for _ in 0..SENDS {
            let round = peer.round(1)?;
            round.sends.into_iter().for_each(|time| sends.push(time));
        }
        let first = peer.first();
        peer.quit()?;
        Ok(Theirs { first, sends })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;

    use super::*;

    /// A scheme nobody measures, or one nobody has written, would go unnoticed.
    #[test]
    fn the_cases_are_the_schemes_of_the_program() {
        let script = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../bench/peers/net/__main__.py"
        );
        let text = fs::read_to_string(script).expect("the program");
        let theirs: BTreeSet<&str> = text
            .lines()
            .filter_map(|line| line.strip_prefix("    \"")?.split_once("\": (\"of_"))
            .map(|(scheme, _)| scheme)
            .collect();
        let ours: BTreeSet<&str> = CASES.iter().map(|case| case.scheme).collect();
        assert_eq!(theirs, ours);
        let names: BTreeSet<String> = CASES.iter().map(Case::name).collect();
        assert_eq!(names.len(), CASES.len());
    }
}
