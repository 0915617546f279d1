use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, Sender, channel},
    },
    thread::{Builder, JoinHandle},
    time::Duration,
};

use super::{Crew, Ending, Heard};
use crate::{
    Error,
    collector::{
        serve::{self, Port},
        wire::{Collect, Start},
    },
    frames::Frames,
};

/// Workers that are threads of the trainer's process.
///
/// The channels have no bound of their own: a worker is asked for two parts ahead
/// at most, and for one more by each batch that the trainer gives up and tries
/// again. It answers each request once.
#[derive(Debug)]
pub(in crate::collector) struct Threads {
    workers: Vec<Option<Running>>,
    /// They are to end, whatever they have been asked for.
    leaving: Arc<AtomicBool>,
    tell: Sender<(usize, Heard)>,
    heard: Receiver<(usize, Heard)>,
}

#[derive(Debug)]
struct Running {
    /// `None` once it is to end.
    ask: Option<Sender<Collect>>,
    thread: JoinHandle<()>,
}

impl Threads {
    /// Starts one thread for each of `starts`.
    pub fn start(starts: Vec<Start>) -> Result<Self, Error> {
        let (tell, heard) = channel();
        let mut threads = Self {
            workers: starts.iter().map(|_| None).collect(),
            leaving: Arc::default(),
            tell,
            heard,
        };
        for (worker, start) in starts.into_iter().enumerate() {
            threads.restart(worker, start)?;
        }
        Ok(threads)
    }

    /// Waits until a worker has left that was told to, or has told that it ends.
    fn leave(&mut self, worker: usize) {
        if let Some(Running { ask, thread }) = self.workers[worker].take() {
            drop(ask);
            // Its panic has been caught, and told.
            let _ = thread.join();
        }
    }
}

impl Crew for Threads {
    fn ask(&mut self, worker: usize, request: &Collect, _: Option<Duration>) -> Result<(), Error> {
        let running = self.workers[worker].as_ref();
        if let Some(ask) = running.and_then(|running| running.ask.as_ref()) {
            // An error means that it has ended, which is heard.
            let _ = ask.send(*request);
        }
        Ok(())
    }

    fn hear(&mut self, timeout: Option<Duration>) -> Option<(usize, Heard)> {
        let (worker, heard) = match timeout {
            Some(timeout) => self.heard.recv_timeout(timeout).ok()?,
            None => self.heard.recv().ok()?,
        };
        if matches!(heard, Heard::Ended(_)) {
            self.leave(worker);
        }
        Some((worker, heard))
    }

    fn restart(&mut self, worker: usize, start: Start) -> Result<u32, Error> {
        let (ask, requests) = channel();
        let port = Channel {
            worker,
            requests,
            leaving: Arc::clone(&self.leaving),
            tell: self.tell.clone(),
        };
        let thread = Builder::new()
            .name(format!("ws-collect-{worker}"))
            .spawn(move || port.run(start))
            .map_err(|reason| Error::Thread { reason })?;
        self.workers[worker] = Some(Running {
            ask: Some(ask),
            thread,
        });
        Ok(std::process::id())
    }

    fn kill(&mut self, worker: usize) -> Result<(), Error> {
        // It ends with the part it is at.
        if let Some(running) = &mut self.workers[worker] {
            running.ask = None;
        }
        Ok(())
    }

    fn pid(&self, worker: usize) -> Option<u32> {
        self.workers.get(worker)?.as_ref()?;
        Some(std::process::id())
    }

    fn shutdown(&mut self) {
        // All are told before the first is waited for.
        self.leaving.store(true, Ordering::Relaxed);
        for running in self.workers.iter_mut().flatten() {
            running.ask = None;
        }
        (0..self.workers.len()).for_each(|worker| self.leave(worker));
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shutdown();
    }
}

/// A worker thread's way to and from its trainer.
struct Channel {
    worker: usize,
    requests: Receiver<Collect>,
    leaving: Arc<AtomicBool>,
    tell: Sender<(usize, Heard)>,
}

impl Channel {
    fn run(self, start: Start) {
        let words = match catch_unwind(AssertUnwindSafe(|| serve::work(&self, start))) {
            Ok(Ok(())) => "nothing more was asked of it".into(),
            Ok(Err(error)) => error.to_string(),
            Err(panic) => words(&*panic),
        };
        let ended = Heard::Ended(Ending::Thread(words));
        // The trainer may have left.
        let _ = self.tell.send((self.worker, ended));
    }
}

impl Port for Channel {
    fn index(&self) -> usize {
        self.worker
    }

    fn request(&self) -> Result<Option<Collect>, Error> {
        let request = self.requests.recv().ok();
        Ok(request.filter(|_| !self.leaving.load(Ordering::Relaxed)))
    }

    fn deliver(&self, ticket: u64, frames: Frames) -> Result<(), Error> {
        // A trainer that has left asks for nothing more either.
        let _ = self.tell.send((self.worker, Heard::frames(ticket, frames)));
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
    use weightsync_engine::{SenderSetup, Tensors};

    use super::*;
    use crate::{collector::Task, rollout::RolloutOptions};

    #[test]
    fn a_thread_that_fails_says_why_and_is_replaced() {
        let mut weights = Tensors::new();
        weights
            .insert("actor.0.weight", [2, 4], vec![0.0_f32; 8])
            .unwrap();
        let setup = SenderSetup::new("policy", &weights).unwrap();
        let sender = setup.open(&weights, None).unwrap();
        // Its weights are for another task.
        let start = Start {
            task: Task::Acrobot,
            envs: 1,
            seed: 0,
            options: RolloutOptions::default(),
            weights: sender.init_info(),
        };
        let request = Collect {
            ticket: 0,
            steps: 1,
            version: 1,
            random: false,
        };
        let mut threads = Threads::start(vec![start.clone()]).unwrap();
        for _ in 0..2 {
            assert_eq!(threads.pid(0), Some(std::process::id()));
            threads.ask(0, &request, None).unwrap();
            match threads.hear(None) {
                Some((0, Heard::Ended(Ending::Thread(words)))) => {
                    assert!(words.contains("actor.0.bias"), "{words}");
                }
                other => panic!("{other:?}"),
            }
            assert_eq!(threads.pid(0), None);
            threads.restart(0, start.clone()).unwrap();
        }
    }

    #[test]
    fn the_words_of_a_panic_are_kept() {
        assert_eq!(words(&"no way out"), "it panicked: no way out");
        assert_eq!(words(&"formatted".to_owned()), "it panicked: formatted");
        assert_eq!(words(&7), "it panicked: with no words");
    }
}
