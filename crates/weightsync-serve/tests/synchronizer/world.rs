//! A trainer whose weights say which step made them, and explorers that look.

use std::sync::mpsc;
use std::time::Duration;

use weightsync::{SendOptions, Sender, SenderSetup, Tensors, Version, WaitFor};
use weightsync_conformance::scale::patience;
use weightsync_serve::synchronizer::{
    Ended, Explorer, Fetcher, PartyOptions, Style, StyleWords, SyncAnswer, Synchronizer,
    SynchronizerOptions, Trainer, TrainerAnswer,
};

/// Longer than anything here takes.
pub(crate) fn long() -> Option<Duration> {
    Some(patience(20))
}

/// More than one block.
const ELEMENTS: u64 = 1 << 20;

pub(crate) fn style(word: &str, interval: u64) -> Style {
    let words: StyleWords = word.parse().unwrap();
    words.interval(interval).style().unwrap()
}

/// How the parties reach the synchronizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    InProgram,
    OverHttp,
}

/// A synchronizer, and another one that reaches it if it is over HTTP.
pub(crate) struct World {
    pub(crate) sync: Synchronizer,
    _served: Option<Synchronizer>,
}

impl World {
    pub(crate) fn new(way: Way, options: SynchronizerOptions) -> Self {
        match way {
            Way::InProgram => Self {
                sync: Synchronizer::local(options).unwrap(),
                _served: None,
            },
            Way::OverHttp => {
                let served = Synchronizer::serve(options, "127.0.0.1:0").unwrap();
                let at = served.address().unwrap().to_string();
                Self {
                    sync: Synchronizer::connect(&at, None).unwrap(),
                    _served: Some(served),
                }
            }
        }
    }
}

pub(crate) fn weights(step: u64) -> Tensors {
    let mut weights = Tensors::new();
    weights
        .insert(
            "layer.weight",
            [ELEMENTS],
            vec![step as f32; ELEMENTS as usize],
        )
        .unwrap();
    weights
}

/// A trainer and its sender.
pub(crate) struct Training {
    pub(crate) trainer: Trainer,
    pub(crate) sender: Sender,
    pub(crate) step: u64,
}

impl Training {
    pub(crate) fn join(
        sync: &Synchronizer,
        options: PartyOptions,
        scheme: &str,
        step: u64,
    ) -> Self {
        let first = weights(step);
        let setup = SenderSetup::new("policy", &first).unwrap();
        let setup = setup
            .scheme(scheme.parse::<weightsync::scheme::AnyScheme>().unwrap())
            .unwrap();
        let info = setup.init_info();
        let mut trainer = sync.trainer(options.step(step), info, long()).unwrap();
        let open = |version| setup.open_at(&first, version, long());
        let sender = trainer.first(long(), open).unwrap();
        Self {
            trainer,
            sender,
            step,
        }
    }

    pub(crate) fn sync(&mut self, timeout: Option<Duration>) -> TrainerAnswer {
        let (step, sender) = (self.step, &mut self.sender);
        let publish = |version: Version, _| {
            let options = SendOptions::new().version(version).wait(WaitFor::Sent);
            sender.send_with(&weights(step), &options).map(drop)
        };
        self.trainer.sync(step, timeout, publish).unwrap()
    }

    /// Makes steps of samples until there are so many, or no explorer makes any more.
    pub(crate) fn run(mut self, steps: u64, samples: &mpsc::Receiver<()>) -> u64 {
        while self.step < steps {
            loop {
                if samples.recv_timeout(Duration::from_millis(20)).is_ok() {
                    break;
                }
                if self.trainer.need_sync(None).unwrap().is_needed() {
                    self.sync(long());
                }
            }
            self.step += 1;
            if self.trainer.need_sync(Some(self.step)).unwrap().is_needed() {
                self.sync(long());
            }
        }
        let last = self.step;
        self.trainer.leave(None);
        last
    }
}

/// An explorer, and what it runs.
pub(crate) struct Exploring {
    pub(crate) explorer: Explorer,
    fetcher: Fetcher,
    pub(crate) step: u64,
    /// The step of the weights that it runs.
    pub(crate) runs: Option<u64>,
}

impl Exploring {
    pub(crate) fn join(sync: &Synchronizer, options: PartyOptions) -> Self {
        Self {
            explorer: sync.explorer(options, long()).unwrap(),
            fetcher: Fetcher::default(),
            step: 0,
            runs: None,
        }
    }

    pub(crate) fn sync(&mut self, timeout: Option<Duration>) -> SyncAnswer {
        let (runs, fetcher) = (&mut self.runs, &mut self.fetcher);
        let answer = self
            .explorer
            .sync(Some(self.step), timeout, |fetch| {
                let set = fetcher.fetch(fetch)?;
                let snapshot = set.model("policy")?;
                let values = snapshot.slice::<f32>("layer.weight")?;
                // One version, and all of it.
                assert!(values.iter().all(|value| *value == values[0]));
                *runs = Some(values[0] as u64);
                Ok(snapshot.version())
            })
            .unwrap();
        if answer.is_synced() {
            // The label is what was loaded.
            assert_eq!(answer.version, self.explorer.version());
            assert_eq!(answer.step, self.runs, "{answer}");
        }
        answer
    }

    /// Makes so many steps, each of which takes this long, and more if it has not synchronised by then.
    pub(crate) fn run(
        mut self,
        steps: u64,
        each: Duration,
        samples: &mpsc::Sender<()>,
    ) -> Vec<SyncAnswer> {
        let mut answers = Vec::new();
        while self.step < steps || !answers.iter().any(SyncAnswer::is_synced) {
            std::thread::sleep(each);
            self.step += 1;
            // The trainer may have ended.
            let _ = samples.send(());
            if self
                .explorer
                .need_sync(Some(self.step))
                .unwrap()
                .is_needed()
            {
                let answer = self.sync(long());
                let is_over = matches!(answer.ended, Ended::NothingNewer | Ended::OutOfReach);
                answers.push(answer);
                if is_over && self.step >= steps {
                    break;
                }
            }
        }
        self.explorer.leave(None);
        answers
    }
}
