//! Our own sends.

use std::error::Error;
use std::io::Write;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use weightsync_engine::{AnyScheme, InitInfo};

use super::{Row, TENSORS, WARM, row, stream};
use crate::local;
use crate::numbers::{Size, Times};
use crate::peer::Lines;

/// Sends of one case that are counted.
const SENDS: usize = 9;

/// How a version comes to the workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Route {
    /// Each worker fetches it over TCP, by two connections.
    Link,
    /// A relay fetches it over TCP, and the workers share its memory.
    Relay,
    /// They share the trainer's memory, to which they come over a Unix socket.
    Host,
}

impl Route {
    fn settings(self) -> &'static str {
        match self {
            Self::Link => "distributed:share=none",
            Self::Relay => "distributed:share=relay",
            Self::Host => "distributed",
        }
    }

    fn words(self) -> &'static str {
        match self {
            Self::Link => "over TCP",
            Self::Relay => "over TCP to a relay",
            Self::Host => "on the trainer's host",
        }
    }
}

#[derive(Clone, Copy)]
pub(super) struct Case {
    route: Route,
    workers: usize,
    size: Size,
    /// Of the time, by what one stream takes.
    target: Option<f64>,
}

/// The cases that are compared with `iperf3` alone.
pub(super) const CASES: [Case; 5] = [
    Case::new(Route::Link, 1, Some(1.0)),
    Case::new(Route::Relay, 1, None),
    Case::new(Route::Relay, 4, None),
    Case::new(Route::Host, 1, Some(1.0 / 1.2)),
    Case::new(Route::Host, 4, None),
];

impl Case {
    const fn new(route: Route, workers: usize, target: Option<f64>) -> Self {
        Self {
            route,
            workers,
            size: Size(0),
            target,
        }
    }

    pub(super) fn sized(self, size: Size) -> Self {
        Self { size, ..self }
    }

    pub(super) fn name(&self) -> String {
        let (route, size, workers) = (self.route.words(), self.size, self.workers);
        format!("distributed {size} {route}, N = {workers}")
    }

    pub(super) fn rows(&self, flat: &mut Flat) -> Result<Vec<Row>, Box<dyn Error>> {
        let mut streams = Times::default();
        streams.push(stream(self.size)?);
        let ours = measure(self.route, self.workers, self.size, SENDS)?;
        streams.push(stream(self.size)?);
        let (sends, stream) = (ours.sends.median(), streams.median());
        let name = self.name();
        let mut rows = vec![
            row(
                format!("{name}, against iperf3"),
                sends,
                stream,
                self.target,
            ),
            self.first(format!("{name}, the first send"), ours.first, stream),
        ];
        rows.extend(flat.row(self, sends));
        Ok(rows)
    }

    /// Judged by its time, for the gigabyte to one worker.
    fn first(&self, case: String, first: Duration, stream: Duration) -> Row {
        let target = self.route == Route::Link && self.size == Size(1 << 30);
        let target = target.then_some(FIRST);
        Row {
            target: target.map(|target| target.as_secs_f64() * 1e3),
            met: target.map(|target| first <= target),
            ..row(case, first, stream, None)
        }
    }
}

/// How much longer several workers take than one.
#[derive(Default)]
pub(super) struct Flat {
    one: Option<(Route, Duration)>,
}

/// How long `connect` with the first send may take over TCP.
const FIRST: Duration = Duration::from_millis(1500);

/// How much longer than one worker four of a host may take.
const FLAT: f64 = 1.15;

impl Flat {
    fn row(&mut self, case: &Case, took: Duration) -> Option<Row> {
        if case.workers == 1 {
            self.one = Some((case.route, took));
            return None;
        }
        let (route, one) = self.one?;
        let name = format!("{}, over N = 1", case.name());
        (route == case.route).then(|| row(name, took, one, Some(FLAT)))
    }
}

/// What sends have taken.
pub(super) struct Ours {
    pub(super) sends: Times,
    first: Duration,
}

/// Sends so many versions, each of other bytes than the last.
pub(super) fn measure(
    route: Route,
    workers: usize,
    size: Size,
    sends: usize,
) -> Result<Ours, Box<dyn Error>> {
    let scheme = route.settings().parse::<AnyScheme>()?;
    let args = local::LocalArgs {
        size,
        tensors: TENSORS,
        readers: workers,
        changed: Some(100.0),
        ..local::LocalArgs::plain()
    };
    let (mut running, relay) = start(route, &scheme, &args)?;
    let mut ours = Ours {
        sends: Times::default(),
        first: running.first,
    };
    for round in 0..WARM + sends {
        let (took, _) = running.send()?;
        if round >= WARM {
            ours.sends.push(took);
        }
    }
    running.end();
    drop(relay);
    Ok(ours)
}

fn start(
    route: Route,
    scheme: &AnyScheme,
    args: &local::LocalArgs,
) -> Result<(local::RunningBench, Option<Relay>), Box<dyn Error>> {
    if route != Route::Relay {
        return Ok((local::RunningBench::start(scheme, args)?, None));
    }
    let (running, relay) = local::RunningBench::start_with(scheme, args, Relay::start)?;
    Ok((running, Some(relay)))
}

/// `weightsync relay`, as a process. Dropped, it is killed.
struct Relay {
    child: Child,
    said: Lines,
}

/// Longer than it takes a relay to join.
const PATIENCE: Duration = Duration::from_secs(30);

impl Relay {
    /// Returns when it has joined: workers that come before it fetch for themselves.
    fn start(info: &InitInfo) -> Result<Self, Box<dyn Error>> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["relay", "--info", "/dev/stdin"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let pipes = child.stdin.take().zip(child.stdout.take());
        let (mut input, output) = pipes.ok_or("a relay process without its pipes")?;
        let mut relay = Self {
            child,
            said: Lines::new(output),
        };
        input.write_all(&serde_json::to_vec(info)?)?;
        drop(input);
        let until = Instant::now() + PATIENCE;
        match relay.said.next(until)? {
            Some(line) if line.contains("joined") => Ok(relay),
            said => Err(format!("the relay did not join: {said:?}").into()),
        }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flatness_compares_a_route_with_itself() {
        let ms = Duration::from_millis;
        let mut flat = Flat::default();
        let case = |route, workers| Case::new(route, workers, None).sized(Size(1 << 30));
        assert!(flat.row(&case(Route::Relay, 4), ms(9)).is_none());
        assert!(flat.row(&case(Route::Link, 1), ms(100)).is_none());
        assert!(flat.row(&case(Route::Relay, 4), ms(100)).is_none());
        assert!(flat.row(&case(Route::Relay, 1), ms(100)).is_none());
        let row = flat.row(&case(Route::Relay, 4), ms(120)).expect("a pair");
        assert_eq!((row.ratio, row.met), (1.2, Some(false)));
    }
}
