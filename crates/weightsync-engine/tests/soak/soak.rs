//! Whole versions only, whichever process dies and when.

use std::fs::File;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, Signal, kill_process};
use weightsync_engine::worker::{Event, Spawn, Workers};
use weightsync_engine::{InitInfo, Tensors};

use crate::fuse::{BURNT, Fuse};
use crate::leaks::{self, Census, TOKEN};
use crate::scale::{Dice, checks, longest, seed};
use crate::trainer::{OwnWorkers, Progress};
use crate::{Role, reader, trainer};

const KIB_64: Size = Size {
    name: "64 KiB",
    bytes: 64 << 10,
    // Two tests share the full count.
    full: 500_000,
    least: 5_000,
    readers: 3,
    holders: 2,
    max_slots: 6,
    trainer_life: 8_000,
    reader_life: 4_000,
    kill_every: Duration::from_millis(200),
    deaths: 5,
    check_time: Duration::from_millis(2),
};

const MIB_16: Size = Size {
    name: "16 MiB",
    bytes: 16 << 20,
    full: 5_000,
    least: 60,
    readers: 3,
    holders: 2,
    max_slots: 5,
    trainer_life: 100,
    reader_life: 60,
    kill_every: Duration::from_millis(400),
    deaths: 3,
    check_time: Duration::from_millis(200),
};

const GIB_1: Size = Size {
    name: "1 GiB",
    bytes: 1 << 30,
    full: 50,
    least: 4,
    readers: 2,
    holders: 1,
    max_slots: 3,
    trainer_life: 8,
    reader_life: 5,
    kill_every: Duration::from_secs(6),
    deaths: 1,
    check_time: Duration::from_secs(15),
};

pub fn workers_of_a_killed_trainer_stay_whole_at_64_kib() {
    soak(&KIB_64, Arrangement::OwnWorkers);
}

pub fn workers_of_a_killed_trainer_stay_whole_at_16_mib() {
    soak(&MIB_16, Arrangement::OwnWorkers);
}

pub fn workers_of_a_killed_trainer_stay_whole_at_1_gib() {
    soak(&GIB_1, Arrangement::OwnWorkers);
}

pub fn readers_outlive_trainers_whole_at_64_kib() {
    soak(&KIB_64, Arrangement::Outliving);
}

pub fn readers_outlive_trainers_whole_at_16_mib() {
    soak(&MIB_16, Arrangement::Outliving);
}

pub fn readers_outlive_trainers_whole_at_1_gib() {
    soak(&GIB_1, Arrangement::Outliving);
}

/// One size of versions, and how long lives are with it.
struct Size {
    name: &'static str,
    bytes: usize,
    full: u64,
    least: u64,
    readers: u32,
    /// How many of the readers hold snapshots. With one slot for each, the live
    /// one and one to write, everybody goes on.
    holders: u32,
    max_slots: u8,
    /// Versions in the life of a trainer, at most.
    trainer_life: u64,
    /// Checks in the life of a reader, at most.
    reader_life: u64,
    /// How often the test kills a random process.
    kill_every: Duration,
    /// Deaths of trainers, and of readers, at least.
    deaths: u64,
    /// Far more than a check takes, deaths included, on a busy machine and
    /// without optimisation.
    check_time: Duration,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Arrangement {
    /// The trainer starts the readers, and they end with it.
    OwnWorkers,
    /// The readers are started next to it, and go on with its successor.
    Outliving,
}

/// Runs trainer and readers until enough was checked, killing all the while.
fn soak(size: &Size, arrangement: Arrangement) {
    let _alone = alone();
    let (seed, wanted) = (seed(), checks(size.full, size.least));
    let begun = Instant::now();
    eprintln!("soak: {wanted} checks at {}, seed {seed}", size.name);
    let token = format!("soak-{}-{}", std::process::id(), seed);
    let census = Census::take(&token);
    let run_dir = tempfile::tempdir().expect("a temporary directory");
    let dice = Dice::new(seed);
    let run = run_dir.path().join("run");
    let mut stage = Stage::start(size, arrangement, token, run.clone(), dice);
    stage.until(wanted);
    let done = stage.end();
    census.assert_nothing_left();
    leaks::assert_tidy(&run);
    eprintln!(
        "soak: {} of {wanted} checks at {}, seed {seed}: {} versions, {} held and checked again, \
         {} trainers and {} readers died, 0 torn, {:.1?}",
        done.checks,
        size.name,
        done.versions,
        done.again,
        done.trainers,
        done.readers,
        begun.elapsed()
    );
}

/// One soak at a time, also where every test is a process of its own: they take
/// every core, and up to 8 GiB. The lock ends with the file, and that with us.
fn alone() -> File {
    let program = File::open("/proc/self/exe").expect("this program");
    flock(&program, FlockOperation::LockExclusive).expect("a lock");
    program
}

#[derive(Clone, Copy, Debug, Default)]
struct Done {
    checks: u64,
    again: u64,
    versions: u64,
    trainers: u64,
    readers: u64,
}

/// The processes of one soak: worker 0 is the trainer, the others are readers.
struct Stage<'a> {
    size: &'a Size,
    cast: Cast,
    workers: Workers,
    dice: Dice,
    done: Done,
    /// Who was killed here and has not been reported dead.
    victim: Option<u32>,
    /// Who is stopped at present.
    stopped: Option<u32>,
    /// When each trainer and reader last sent a message.
    last_message: Vec<Instant>,
    /// Whether the present process of each place has sent a message yet.
    has_begun: Vec<bool>,
}

impl<'a> Stage<'a> {
    fn start(
        size: &'a Size,
        arrangement: Arrangement,
        token: String,
        run_dir: PathBuf,
        mut dice: Dice,
    ) -> Self {
        let trainer = trainer::Plan {
            model: token.clone(),
            run_dir: Some(run_dir),
            bytes: size.bytes,
            slots: 2,
            max_slots: size.max_slots,
            fuse: None,
            seed: 0,
            workers: None,
        };
        let setup = trainer.setup(&Tensors::new()).expect("a run directory");
        let cast = Cast {
            arrangement,
            trainer,
            info: setup.init_info(),
        };
        let count = match arrangement {
            Arrangement::OwnWorkers => 1,
            Arrangement::Outliving => 1 + size.readers as usize,
        };
        let first: Vec<_> = (0..count)
            .map(|index| cast.role(size, index, &mut dice))
            .collect();
        let workers = Spawn::this_program()
            .expect("this program has a path")
            .count(count)
            .init_each(move |index| first[index].clone())
            .env(TOKEN, token)
            .grace(longest())
            .start()
            .expect("the processes start");
        Self {
            size,
            cast,
            workers,
            dice,
            done: Done::default(),
            victim: None,
            stopped: None,
            last_message: vec![Instant::now(); 1 + size.readers as usize],
            has_begun: vec![false; count],
        }
    }

    /// Goes on until so much was checked, and trainers and readers have died.
    fn until(&mut self, wanted: u64) {
        let mut kill_at = self.next_kill();
        let deaths = self.size.deaths;
        let begun = Instant::now();
        let deadline = longest() + self.size.check_time * wanted as u32;
        while self.done.checks < wanted || self.done.trainers < deaths || self.done.readers < deaths
        {
            let left = kill_at.saturating_duration_since(Instant::now());
            let gap = Duration::from_micros(20 + self.dice.below(400));
            let left = left.min(gap);
            match self.workers.recv_any(Some(left)) {
                Some((index, Event::Frame(frame))) => self.record(index, &frame),
                Some((index, Event::Exited(exit))) => {
                    let killed = self.victim.take_if(|victim| *victim == exit.pid).is_some();
                    assert!(
                        killed || exit.stderr_text().contains(BURNT),
                        "process {index} {exit}\n{}",
                        exit.stderr_text()
                    );
                    self.replace(index);
                }
                Some((_, event)) => panic!("{event:?}"),
                None => {}
            }
            // A process that hangs until another dies shows in the time it all takes.
            assert!(
                begun.elapsed() < deadline,
                "{:?} after {deadline:?}; {:#?}",
                self.done,
                self.doings()
            );
            self.find_the_hanging();
            self.jolt();
            if Instant::now() >= kill_at {
                self.kill_one();
                kill_at = self.next_kill();
            }
        }
    }

    /// Ends everything in order.
    fn end(mut self) -> Done {
        self.let_go();
        for (index, exit) in self
            .workers
            .shutdown(Some(longest()))
            .into_iter()
            .enumerate()
        {
            let killed = self.victim == Some(exit.pid) || exit.stderr_text().contains(BURNT);
            assert!(
                exit.is_success() || killed,
                "at the end, process {index} {exit}\n{}",
                exit.stderr_text()
            );
        }
        while let Some((index, event)) = self.workers.recv_any(Some(Duration::ZERO)) {
            if let Event::Frame(frame) = event {
                self.record(index, &frame);
            }
        }
        self.done
    }

    fn record(&mut self, index: usize, frame: &[u8]) {
        let now = Instant::now();
        match postcard::from_bytes(frame).expect("a message of our own processes") {
            Progress::Published { versions } => {
                self.done.versions += versions;
                self.last_message[0] = now;
            }
            Progress::Checked {
                reader,
                checks,
                again,
            } => {
                self.done.checks += checks;
                self.done.again += again;
                self.last_message[1 + reader as usize] = now;
            }
            Progress::Restarted => self.done.readers += 1,
        }
        self.last_message[index] = now;
        self.has_begun[index] = true;
    }

    fn replace(&mut self, index: usize) {
        let role = self.cast.role(self.size, index, &mut self.dice);
        self.workers
            .restart(index, Some(role))
            .expect("it starts again");
        let now = Instant::now();
        self.has_begun[index] = false;
        match (index, self.cast.arrangement) {
            (0, Arrangement::OwnWorkers) => {
                self.done.trainers += 1;
                self.last_message.fill(now);
            }
            (0, Arrangement::Outliving) => {
                self.done.trainers += 1;
                self.last_message[0] = now;
            }
            _ => {
                self.done.readers += 1;
                self.last_message[index] = now;
            }
        }
    }

    /// A process that was silent for too long, and is not being killed, hangs.
    fn find_the_hanging(&self) {
        // A process of the largest size has several checks' time of work before its
        // first word: pages to clear and to map.
        let patience = longest().max(6 * self.size.check_time);
        for (index, last) in self.last_message.iter().enumerate() {
            assert!(
                last.elapsed() < patience,
                "process {index} hangs: no message for {:?}; {:#?}",
                last.elapsed(),
                self.doings()
            );
        }
    }

    /// What every process of the test is doing.
    fn doings(&self) -> Vec<String> {
        let pids = (0..self.workers.len()).filter_map(|index| self.workers.pid(index));
        pids.map(leaks::describe).collect()
    }

    /// Kills a process, but not one that may hang: that is found instead. One
    /// that still starts is mostly spared, so that all get going on any machine.
    fn kill_one(&mut self) {
        let Some(index) = self.pick() else {
            return;
        };
        let suspect = self.last_message[index].elapsed() > longest() / 8;
        let spared = !self.has_begun[index] && self.dice.below(8) != 0;
        if self.victim.is_none() && !suspect && !spared {
            self.victim = self.workers.pid(index);
            self.workers.kill(index).expect("it is one of ours");
        }
    }

    /// A trainer or reader; `None` for one that is the trainer's own.
    fn pick(&mut self) -> Option<usize> {
        let index = self.dice.below(self.last_message.len() as u64) as usize;
        (index < self.workers.len()).then_some(index)
    }

    /// Stops a random process wherever it is, for less than a millisecond: what
    /// takes nanoseconds, such as the step between looking and pinning, then
    /// takes long enough for everybody else to come in between.
    fn jolt(&mut self) {
        if self.stopped.is_some() {
            return self.let_go();
        }
        self.stopped = self.pick().and_then(|index| self.workers.pid(index));
        self.signal(Signal::STOP);
    }

    fn let_go(&mut self) {
        self.signal(Signal::CONT);
        self.stopped = None;
    }

    fn signal(&self, signal: Signal) {
        if let Some(pid) = self.stopped.and_then(|pid| Pid::from_raw(pid as i32)) {
            // It may be dead by now.
            let _ = kill_process(pid, signal);
        }
    }

    fn next_kill(&mut self) -> Instant {
        let span = self.size.kill_every.as_micros() as u64;
        Instant::now() + Duration::from_micros(1 + self.dice.below(2 * span))
    }
}

/// Who plays what.
struct Cast {
    arrangement: Arrangement,
    trainer: trainer::Plan,
    info: InitInfo,
}

impl Cast {
    /// The role of a process, with random moments of its own.
    fn role(&self, size: &Size, index: usize, dice: &mut Dice) -> Vec<u8> {
        let role = match index {
            0 => Role::Trainer(trainer::Plan {
                fuse: Fuse::random(dice, size.trainer_life),
                seed: dice.roll(),
                workers: (self.arrangement == Arrangement::OwnWorkers).then_some(OwnWorkers {
                    count: size.readers,
                    holders: size.holders,
                    life: size.reader_life,
                    kill_every: size.kill_every,
                }),
                ..self.trainer.clone()
            }),
            _ => Role::Reader(reader::Plan {
                info: self.info.clone(),
                worker: index as u32 - 1,
                outlives: true,
                sleeps: index.is_multiple_of(2),
                holds: index as u32 <= size.holders,
                fuse: Fuse::random(dice, size.reader_life),
                seed: dice.roll(),
            }),
        };
        postcard::to_stdvec(&role).expect("a role has a postcard form")
    }
}
