//! Readers whose control pages say what no working reader's does.

use std::sync::atomic::{AtomicBool, AtomicU64};
use std::thread;

use super::*;
use crate::map::Table;
use crate::pins::PinOwner;
use crate::shared::Control;

/// A change of a page.
type Scribble = fn(&Control);

const SCRIBBLES: [(&str, Scribble); 4] = [
    ("set record", |page| {
        (0..64).for_each(|bit| page.records.hold(bit))
    }),
    ("set record", |page| {
        (0..2).for_each(|bit| page.records.hold(bit))
    }),
    ("slots of model 0", |page| {
        (0..64).for_each(|bit| page.pins[0].hold(bit))
    }),
    ("slots of model 0", |page| page.pins[0].hold(63)),
];

fn filled(writer: &mut SegmentWriter) -> Publication {
    let next = writer.version(0).next().0 as u8;
    let mut staging = writer.stage(&[0], soon()).unwrap();
    staging.tensor_mut(0, 0).fill(next);
    staging.publish(&Targets::All).unwrap()
}

#[test]
fn hostile_page_does_not_affect_other_readers() {
    for (word, scribble) in SCRIBBLES {
        let (mut writer, address) = segment(1, 4);
        let mut broken = join(&address, 0, Delivery::Newest);
        let mut others = [
            join(&address, 1, Delivery::Newest),
            join(&address, 2, Delivery::Every { bound: 2 }),
        ];
        filled(&mut writer);
        let held = broken.next(soon()).unwrap().unwrap();
        for other in &mut others {
            let taken = other.next(soon()).unwrap().unwrap();
            other.applied(&taken).unwrap();
        }
        scribble(broken.book.control().unwrap());
        let waiter = writer.waiter();
        let mut refused = 0;
        for _ in 0..70 {
            let publication = filled(&mut writer);
            for other in &mut others {
                let taken = other.next(soon()).unwrap().unwrap();
                other.applied(&taken).unwrap();
            }
            for line in waiter.settle(&publication, Level::Applied, soon()).unwrap() {
                match line.outcome {
                    Outcome::Refused { reason } if line.worker == WorkerId(0) => {
                        assert!(reason.contains(word), "{reason}");
                        refused += 1;
                    }
                    outcome => assert_eq!((outcome, line.worker.0 > 0), (Outcome::Applied, true)),
                }
            }
        }
        assert!(refused > 0, "{word}");
        // Bytes that it held rightly stay held.
        let bytes = held.members[0].snapshot.tensor_bytes(0);
        assert!(bytes.iter().all(|byte| *byte == 1), "{word}");
        assert!(writer.slots(0) <= 4);
        let error = broken.next(soon()).unwrap_err();
        assert!(matches!(error, Error::GivenUp { .. }), "{error}");
    }
}

#[test]
fn send_names_the_holders_of_all_set_records() {
    let (mut writer, address) = segment(2, 64);
    let mut send = |at: usize, deadline| {
        let staging = writer.stage(&[at % 2], deadline)?;
        staging.publish(&Targets::All)
    };
    let slow = Delivery::Every { bound: 32 };
    let _first = join(&address, 0, slow);
    for at in 0..32 {
        send(at, soon()).unwrap();
    }
    // From the newest on, which the first has in its queue as well.
    let mut second = join(&address, 1, slow);
    let third = join(&address, 2, Delivery::Newest);
    for at in 32..64 {
        send(at, soon()).unwrap();
    }
    let error = send(64, Some(Instant::now())).unwrap_err();
    let Error::AllRecordsHeld { holders, .. } = &error else {
        panic!("{error}");
    };
    let named = holders.iter().map(|one| (one.worker.0, one.records));
    let named: Vec<_> = named.collect();
    // The third is on the newest, as all are meant to be.
    assert_eq!(named, [(0, 32), (1, 32)]);
    // One reader takes the second set of its queue, so a record is free again.
    for _ in 0..2 {
        let taken = second.next(soon()).unwrap().unwrap();
        second.applied(&taken).unwrap();
    }
    send(64, soon()).unwrap();
    drop(third);
}

/// A control page as the words it is made of.
#[repr(C)]
struct Words([AtomicU64; size_of::<Control>() / 8]);

// SAFETY: atomics only; `repr(C)`; alignment 8.
unsafe impl Table for Words {}

/// Numbers that look random.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    /// A word that a page may hold, or nearly, or not at all.
    fn word(&mut self) -> u64 {
        match self.below(6) {
            0 => 0,
            1 => u64::MAX,
            2 => 1 << self.below(64),
            3 => self.next() % 8,
            4 => self.next() % 1000,
            _ => self.next(),
        }
    }
}

/// How many versions are sent at least, and how many readers are turned away meanwhile.
const ROUNDS: u64 = 3000;
const TURNED_AWAY: usize = 10;

#[test]
fn random_words_in_control_pages_stop_nobody() {
    let seed = Instant::now().duration_since(Instant::now() - Duration::from_secs(1));
    let seed = u64::from(seed.subsec_nanos()) ^ u64::from(std::process::id()) << 32 | 1;
    println!("seed {seed}");
    let (mut writer, address) = segment(2, 6);
    let over = AtomicBool::new(false);
    let works = [Delivery::Newest, Delivery::Every { bound: 2 }];
    let scribbles = [
        Delivery::Newest,
        Delivery::Every { bound: 32 },
        Delivery::Asked,
        Delivery::Newest,
    ];
    thread::scope(|scope| {
        let (address, over) = (&address, &over);
        for (worker, delivery) in (0..).zip(works) {
            scope.spawn(move || work(join(address, worker, delivery)));
        }
        for (worker, delivery) in (10..).zip(scribbles) {
            let random = Random(seed.wrapping_mul(u64::from(worker)));
            scope.spawn(move || scribble(address, (worker, delivery), random, over));
        }
        // Also after a failure, or the others would go on for ever.
        let _ends = Ends(over);
        let at_work = |writer: &SegmentWriter, version| {
            let applied = |reader: &crate::WorkerStatus| reader.versions[0].0 >= version;
            let all = |there: &crate::Attendance| {
                let mut workers = (0..2).map(WorkerId);
                let readers = &there.workers;
                workers.all(|one| readers.iter().any(|it| it.worker == one && applied(it)))
            };
            writer.wait_readers(soon(), all).unwrap()
        };
        assert!(at_work(&writer, 0));
        let (mut version, mut turned_away) = (0, 0);
        while version < ROUNDS || turned_away < TURNED_AWAY {
            version += 1;
            let models = match version % 3 {
                0 => &[0][..],
                _ => &[0, 1],
            };
            let next: Vec<_> = models
                .iter()
                .map(|one| writer.version(*one).next())
                .collect();
            let mut staging = writer.stage(models, soon()).unwrap();
            for (model, version) in models.iter().zip(next) {
                staging.tensor_mut(*model, 0).fill(version.0 as u8);
            }
            let publication = staging.publish(&Targets::All).unwrap();
            assert!(at_work(&writer, version), "version {version}");
            let waiter = writer.waiter();
            let lines = waiter.settle(&publication, Level::Applied, Some(Instant::now()));
            let lines = lines.unwrap();
            let applied = lines.iter().filter(|line| line.worker.0 < 2);
            assert!(applied.clone().all(|line| line.outcome == Outcome::Applied));
            assert_eq!(applied.count(), 2);
            turned_away += writer.take_rejected().len();
            let refused =
                |line: &&crate::WorkerReport| matches!(line.outcome, Outcome::Refused { .. });
            turned_away += lines.iter().filter(refused).count();
        }
        assert!(writer.slots(0) <= 40 && writer.slots(1) <= 40);
        drop(writer);
    });
}

struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Takes what comes, checks every byte of it, and keeps it until the next has come.
fn work(mut reader: SegmentReader) {
    let whole = |member: &TakenModel| {
        let bytes = member.snapshot.tensor_bytes(0);
        bytes
            .iter()
            .all(|byte| *byte == member.snapshot.version().0 as u8)
    };
    let mut held = None::<Taken>;
    while let Ok(taken) = reader.next(None) {
        let taken = taken.unwrap();
        assert!(held.iter().flat_map(|held| &held.members).all(whole));
        assert!(taken.members.iter().all(whole));
        reader.applied(&taken).unwrap();
        held = Some(taken);
    }
}

/// Joins again and again, and writes anything anywhere into its page.
fn scribble(
    address: &str,
    (worker, delivery): (u32, Delivery),
    mut random: Random,
    over: &AtomicBool,
) {
    while !over.load(Ordering::Relaxed) {
        let options = options(address, worker, delivery);
        let Ok(mut reader) = SegmentReader::attach(&options, Some(Instant::now())) else {
            thread::yield_now();
            continue;
        };
        let book = reader.book.clone();
        let PinOwner::Reader { control, .. } = &book.owner else {
            unreachable!("a reader's")
        };
        let page: &Words = control.map.table();
        for _ in 0..random.below(400) {
            let at = random.below(page.0.len());
            page.0[at].store(random.word(), Ordering::Relaxed);
            match random.below(32) {
                0 => drop(reader.next(Some(Instant::now()))),
                1 => drop(reader.ask(Want::Newest)),
                2 => drop(reader.answer(Some(Instant::now()))),
                3 => thread::yield_now(),
                _ => {}
            }
        }
    }
}
