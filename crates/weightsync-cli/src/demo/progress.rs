//! What is seen while the demo runs: a few lines that change in place on a
//! terminal, a line every second or so anywhere else.

use std::{
    io::{self, IsTerminal, Write},
    time::Duration,
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::job::Job;

/// How often a line is printed where lines stay.
const INTERVAL: Duration = Duration::from_secs(1);
/// How often the terminal is redrawn, per second.
const REDRAWS: u8 = 10;
/// Steps of the bar.
const BAR: u64 = 1000;

/// Where the training stands.
pub struct TrainingStatus {
    pub elapsed: Duration,
    pub frames: usize,
    /// `None` before there are enough episodes.
    pub mean_return: Option<f64>,
    /// The trainer's version.
    pub version: u64,
    /// Each worker's number and version.
    pub workers: Vec<(u32, u64)>,
    /// From the call of send until every worker had the version.
    pub latency: Duration,
    /// How many versions older than the newest the frames were, where workers do not
    /// wait for it.
    pub staleness: Option<u64>,
}

/// Shows a [`TrainingStatus`] as often as is good to read.
pub struct ProgressDisplay {
    /// On a terminal.
    bar: Option<ProgressBar>,
    /// Task and algorithm.
    name: String,
    goal: f64,
    /// The first mean return: where the bar begins.
    first: Option<f64>,
    workers: usize,
    next_line: Duration,
}

impl ProgressDisplay {
    pub fn new(job: &Job, workers: usize) -> Self {
        // A bar that changes in place needs a terminal. Logs get lines.
        let bar = io::stdout().is_terminal().then(|| {
            let target = ProgressDrawTarget::stdout_with_hz(REDRAWS);
            let bar = ProgressBar::with_draw_target(Some(BAR), target);
            let style = ProgressStyle::with_template("return {bar:40.cyan} {msg}");
            match style {
                Ok(style) => bar.with_style(style),
                Err(_) => bar,
            }
        });
        Self {
            bar,
            name: format!("{}, {}", job.task.name(), job.algorithm.name()),
            goal: job.goal,
            first: None,
            workers,
            next_line: Duration::ZERO,
        }
    }

    pub fn show(&mut self, status: &TrainingStatus) {
        match &self.bar {
            Some(bar) => {
                if let Some(mean) = status.mean_return {
                    // The bar begins at the first mean, below the goal, so the division has a
                    // sense.
                    let first = *self.first.get_or_insert(mean.min(self.goal - 1.0));
                    let part = (mean - first) / (self.goal - first);
                    bar.set_position((part.clamp(0.0, 1.0) * BAR as f64) as u64);
                }
                bar.set_message(self.several_lines(status));
            }
            // Lines that stay come once a second at most.
            None if status.elapsed >= self.next_line => {
                self.next_line = status.elapsed + INTERVAL;
                let line = self.one_line(status);
                self.say(&line);
            }
            None => {}
        }
    }

    /// A line that stays.
    pub fn say(&mut self, line: &str) {
        match &self.bar {
            // Above the bar, which is drawn again below the line.
            Some(bar) if !bar.is_finished() => bar.println(line),
            // The reader of stdout may be gone: the training is still worth finishing.
            _ => drop(writeln!(io::stdout(), "{line}")),
        }
    }

    /// Leaves the last status where it is.
    pub fn finish(&mut self) {
        if let Some(bar) = &self.bar {
            bar.abandon();
        }
    }

    fn several_lines(&self, status: &TrainingStatus) -> String {
        let frames_per_second = status.frames as f64 / status.elapsed.as_secs_f64();
        format!(
            "{} of {}\n\
             {}: {:.1} s, {} frames, {frames_per_second:.0} frames/s\n\
             version {} at the trainer; {}{}\n\
             send → applied on all workers: {}",
            mean_of(status),
            self.goal,
            self.name,
            status.elapsed.as_secs_f64(),
            status.frames,
            status.version,
            self.versions(status),
            staleness(status),
            micros(status.latency),
        )
    }

    fn one_line(&self, status: &TrainingStatus) -> String {
        format!(
            "{}  {:5.1} s  {:>6} frames  {:>5.0} frames/s  return {:>5}  version {}; {}{}  \
             send → applied {}",
            self.name,
            status.elapsed.as_secs_f64(),
            status.frames,
            status.frames as f64 / status.elapsed.as_secs_f64(),
            mean_of(status),
            status.version,
            self.versions(status),
            staleness(status),
            micros(status.latency),
        )
    }

    /// What each worker has, in the order of the workers.
    fn versions(&self, status: &TrainingStatus) -> String {
        let of = |worker| {
            let mut found = status
                .workers
                .iter()
                .filter(|(number, _)| *number == worker);
            found
                .next()
                .map_or("gone".into(), |(_, version)| version.to_string())
        };
        let versions: Vec<String> = (0..self.workers as u32).map(of).collect();
        format!("workers {}", versions.join(" "))
    }
}

/// The mean return, once there is one.
fn mean_of(status: &TrainingStatus) -> String {
    let mean = status.mean_return;
    mean.map_or("–".into(), |mean| format!("{mean:.1}"))
}

/// How old the frames were, where that can differ.
fn staleness(status: &TrainingStatus) -> String {
    let age = status.staleness;
    age.map_or(String::new(), |age| format!("  staleness {age}"))
}

/// A latency as people read it.
pub fn micros(duration: Duration) -> String {
    match duration.as_micros() {
        micros if micros < 10_000 => format!("{micros} µs"),
        micros => format!("{} ms", micros / 1000),
    }
}
