use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use super::{Crew, Heard, WorkerEnding};
use crate::{
    Error,
    collector::{
        serve::{self, LiveWeights, Port},
        wire::{Collect, Start},
    },
    frames::Frames,
};
use weightsync_engine::transport::threads;

/// How long threads may take to leave.
const SHUTDOWN: Duration = Duration::from_secs(2);

/// Workers that are threads of the trainer's process.
///
/// The channels have no bound of their own: a worker owes two parts at most, and
/// answers each request once.
#[derive(Debug)]
pub(in crate::collector) struct ThreadCrew {
    places: Vec<ThreadSlot>,
    /// They have been told to end, and nothing that they say counts any more.
    left_alone: Vec<(Number, JoinHandle<()>)>,
    threads: Number,
    tell: Sender<(usize, Number, Heard)>,
    heard: Receiver<(usize, Number, Heard)>,
}

/// Counts the threads of a place, so that one is not taken for another.
type Number = u64;

#[derive(Debug, Default)]
struct ThreadSlot {
    /// Of the thread that is listened to.
    number: Number,
    running: Option<RunningThread>,
}

#[derive(Debug)]
struct RunningThread {
    ask: Sender<Collect>,
    live: Arc<LiveWeights>,
    thread: JoinHandle<()>,
}

impl ThreadCrew {
    /// Starts one thread for each of `starts`.
    pub fn start(starts: Vec<Start>) -> Result<Self, Error> {
        let (tell, heard) = channel();
        let mut threads = Self {
            places: starts.iter().map(|_| ThreadSlot::default()).collect(),
            left_alone: Vec::new(),
            threads: 0,
            tell,
            heard,
        };
        for (worker, start) in starts.into_iter().enumerate() {
            threads.restart(worker, start)?;
        }
        Ok(threads)
    }

    /// A number that no thread has had.
    fn next_number(&mut self) -> Number {
        self.threads += 1;
        self.threads
    }

    /// The next message of any thread, also of those that were left alone.
    fn receive(&self, until: Option<Instant>) -> Option<(usize, Number, Heard)> {
        match until {
            Some(until) => {
                let timeout = until.saturating_duration_since(Instant::now());
                self.heard.recv_timeout(timeout).ok()
            }
            None => self.heard.recv().ok(),
        }
    }

    /// Waits for the end of a thread that was left alone, and has said that it ends.
    fn reap(&mut self, number: Number) {
        let all = self.left_alone.iter();
        if let Some(at) = all.clone().position(|(alone, _)| *alone == number) {
            // Its panic has been caught.
            let _ = self.left_alone.swap_remove(at).1.join();
        }
    }
}

impl Crew for ThreadCrew {
    fn ask(&mut self, worker: usize, request: &Collect, _: Option<Duration>) -> Result<(), Error> {
        if let Some(running) = &self.places[worker].running {
            // An error means that it has ended, which is heard.
            let _ = running.ask.send(*request);
        }
        Ok(())
    }

    fn hear(&mut self, timeout: Option<Duration>) -> Option<(usize, Heard)> {
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            let (worker, number, heard) = self.receive(until)?;
            let is_end = matches!(heard, Heard::Ended(_));
            let place = &mut self.places[worker];
            if number == place.number {
                // The thread has sent its last message, so the join does not wait for long.
                if is_end && let Some(running) = place.running.take() {
                    // Its panic has been caught, and told.
                    let _ = running.thread.join();
                }
                return Some((worker, heard));
            }
            // The end of a thread that was left alone: only its handle is of interest.
            if is_end {
                self.reap(number);
            }
        }
    }

    fn restart(&mut self, worker: usize, start: Start) -> Result<u32, Error> {
        let (ask, requests) = channel();
        let live = Arc::<LiveWeights>::default();
        let number = self.next_number();
        let port = ThreadChannel {
            worker,
            number,
            requests,
            live: Arc::clone(&live),
            tell: self.tell.clone(),
        };
        let thread = threads::spawn("collect", move || port.run(start))
            .map_err(|reason| Error::Thread { reason })?;
        let running = Some(RunningThread { ask, live, thread });
        self.places[worker] = ThreadSlot { number, running };
        Ok(std::process::id())
    }

    fn kill(&mut self, worker: usize) -> Result<(), Error> {
        // A number that no thread has, so nothing of the old thread counts from here on.
        let number = self.next_number();
        let place = &mut self.places[worker];
        if let Some(running) = place.running.take() {
            // It ends with the part it is at. Another may join in its place now.
            running.live.give_up();
            // Messages of the old thread carry its old number, and are dropped when they are heard.
            let before = std::mem::replace(&mut place.number, number);
            self.left_alone.push((before, running.thread));
            // The thread cannot say that it has ended, so the crew says it. The schedule hears an
            // end as of a process.
            let ended = Heard::Ended(WorkerEnding::Thread("it was left alone".into()));
            // It is listened to here.
            let _ = self.tell.send((worker, number, ended));
        }
        Ok(())
    }

    fn pid(&self, worker: usize) -> Option<u32> {
        self.places.get(worker)?.running.as_ref()?;
        Some(std::process::id())
    }

    fn shutdown(&mut self) {
        // All are told before the first is waited for.
        for worker in 0..self.places.len() {
            let _ = self.kill(worker);
        }
        // A thread that hangs is left behind after this time.
        let until = Some(Instant::now() + SHUTDOWN);
        while !self.left_alone.is_empty()
            && let Some((_, number, heard)) = self.receive(until)
        {
            if matches!(heard, Heard::Ended(_)) {
                self.reap(number);
            }
        }
    }
}

impl Drop for ThreadCrew {
    fn drop(&mut self) {
        self.shutdown();
    }
}

/// A worker thread's way to and from its trainer.
struct ThreadChannel {
    worker: usize,
    number: Number,
    requests: Receiver<Collect>,
    live: Arc<LiveWeights>,
    tell: Sender<(usize, Number, Heard)>,
}

impl ThreadChannel {
    fn run(self, start: Start) {
        // A panic must not pass in silence: the trainer would wait for this worker until its
        // deadline.
        let words = match catch_unwind(AssertUnwindSafe(|| serve::work(&self, start, &self.live))) {
            Ok(Ok(())) => "nothing more was asked of it".into(),
            Ok(Err(error)) => error.to_string(),
            Err(panic) => words(&*panic),
        };
        let ended = Heard::Ended(WorkerEnding::Thread(words));
        // The trainer may have left.
        let _ = self.tell.send((self.worker, self.number, ended));
    }
}

impl Port for ThreadChannel {
    fn index(&self) -> usize {
        self.worker
    }

    fn request(&self) -> Result<Option<Collect>, Error> {
        // Ends when the trainer drops its sender, and when it has given the thread up.
        let request = self.requests.recv().ok();
        Ok(request.filter(|_| !self.live.is_given_up()))
    }

    fn deliver(&self, ticket: u64, frames: Frames) -> Result<(), Error> {
        // A trainer that has left asks for nothing more either.
        let frames = Heard::frames(ticket, frames);
        let _ = self.tell.send((self.worker, self.number, frames));
        Ok(())
    }
}

/// What a panic said.
fn words(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("it panicked: {}", text.unwrap_or("with no words"))
}

#[cfg(test)]
mod tests {
    use weightsync_engine::{Sender, SenderSetup, Tensors};

    use super::{Collect, Crew, Heard, Start, ThreadCrew, WorkerEnding, words};
    use crate::{collector::Task, rollout::RolloutOptions};

    fn sender() -> Sender {
        let mut weights = Tensors::new();
        weights
            .insert("actor.0.weight", [2, 4], vec![0.0_f32; 8])
            .unwrap();
        weights
            .insert("actor.0.bias", [2], vec![0.0_f32; 2])
            .unwrap();
        let setup = SenderSetup::new("policy", &weights).unwrap();
        setup.open(&weights, None).unwrap()
    }

    fn start(sender: &Sender, task: Task) -> Start {
        Start {
            task,
            envs: 1,
            seed: 0,
            options: RolloutOptions::default(),
            weights: sender.init_info(),
        }
    }

    fn request(version: u64) -> Collect {
        Collect {
            ticket: version,
            steps: 1,
            version,
            random: false,
        }
    }

    #[test]
    fn a_thread_that_fails_says_why_and_is_replaced() {
        let sender = sender();
        // Its weights are for another task.
        let start = start(&sender, Task::Acrobot);
        let mut threads = ThreadCrew::start(vec![start.clone()]).unwrap();
        for _ in 0..2 {
            assert_eq!(threads.pid(0), Some(std::process::id()));
            threads.ask(0, &request(1), None).unwrap();
            match threads.hear(None) {
                Some((0, Heard::Ended(WorkerEnding::Thread(words)))) => {
                    assert!(words.contains("actor.0.weight"), "{words}");
                }
                other => panic!("{other:?}"),
            }
            assert_eq!(threads.pid(0), None);
            threads.restart(0, start.clone()).unwrap();
        }
    }

    #[test]
    fn a_thread_that_hangs_is_left_alone() {
        let sender = sender();
        let start = start(&sender, Task::CartPole);
        let mut threads = ThreadCrew::start(vec![start.clone()]).unwrap();
        let delivered = |heard| matches!(heard, Some((0, Heard::Frames { ticket: 1, .. })));
        // Nobody sends version 2, and what is asked for afterwards counts for nothing.
        for version in [1, 2, 1] {
            threads.ask(0, &request(version), None).unwrap();
        }
        assert!(delivered(threads.hear(None)));
        threads.kill(0).unwrap();
        let heard = threads.hear(None);
        assert!(matches!(heard, Some((0, Heard::Ended(_)))), "{heard:?}");
        assert_eq!(threads.pid(0), None);
        threads.restart(0, start).unwrap();
        threads.ask(0, &request(1), None).unwrap();
        assert!(delivered(threads.hear(None)));
        // It has heard that it was given up, which ended its wait.
        threads.shutdown();
        assert!(threads.left_alone.is_empty());
    }

    #[test]
    fn a_thread_that_joins_ends_once_it_is_given_up() {
        let mut weights = Tensors::new();
        weights.insert("w", [1], vec![0.0_f32]).unwrap();
        // Nobody lets it in: the sender is not open.
        let setup = SenderSetup::new("policy", &weights).unwrap();
        let start = Start {
            weights: setup.init_info(),
            ..start(&sender(), Task::CartPole)
        };
        let mut threads = ThreadCrew::start(vec![start]).unwrap();
        threads.kill(0).unwrap();
        threads.shutdown();
        assert!(threads.left_alone.is_empty());
    }

    #[test]
    fn the_words_of_a_panic_are_kept() {
        assert_eq!(words(&"no way out"), "it panicked: no way out");
        assert_eq!(words(&"formatted".to_owned()), "it panicked: formatted");
        assert_eq!(words(&7), "it panicked: with no words");
    }
}
