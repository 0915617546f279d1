//! Schedules, and what comes of them.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};

use super::bulk::BLOCK_BYTES;
use super::clock::{Dice, MS, SECOND};
use super::network::Health;
use super::rules::Counts;
use super::schedule::{FAST, Op, Options, SLOW};
use super::{Event, World};

/// The first seed of every day: the same schedules each time, so that a change fails
/// for what it changed. Others are drawn when `WEIGHTSYNC_SOAK` is set.
const EVERY_DAY: u64 = 0x5eed;

/// How many schedules, every day; 25 times as many with `WEIGHTSYNC_SOAK=full`.
const SCHEDULES: u64 = 400;

/// Schedules that failed before what they found was mended. They are the same schedules
/// for as long as nothing is drawn in another order; what they found in an agent has a
/// test of its own next to it.
const FAILED: [u64; 10] = [
    1_795_323_496_109_698_690,
    1_795_325_658_197_831_334,
    1_795_325_737_480_550_198,
    1_795_325_850_539_912_993,
    1_795_332_254_656_112_629,
    1_795_332_415_443_390_575,
    1_795_332_514_762_307_422,
    1_795_446_689_263_564_121,
    1_795_448_599_604_514_151,
    1_795_448_834_436_881_823,
];

#[test]
fn schedules_that_failed_once_do_not_again() {
    for seed in FAILED {
        run(World::random(seed));
    }
}

#[test]
fn every_schedule_ends_with_all_workers_at_the_newest() {
    let (first, schedules) = (seed(), schedules());
    println!("{schedules} schedules from WEIGHTSYNC_SOAK_SEED={first}");
    let next = AtomicU64::new(0);
    // The counts, or the seed of a schedule that failed.
    let work = || {
        let mut counts = Counts::default();
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= schedules {
                return Ok(counts);
            }
            let seed = first.wrapping_add(number);
            let run = || run(World::random(seed)).counts;
            match catch_unwind(AssertUnwindSafe(run)) {
                Ok(of_it) => counts.add(&of_it),
                Err(_) => {
                    // One failure is enough: the others end.
                    next.store(schedules, Ordering::Relaxed);
                    return Err(seed);
                }
            }
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, |count| count.get().min(4));
    let ends: Vec<Result<Counts, u64>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        let ends = threads.into_iter().map(|thread| thread.join());
        ends.map(|end| end.expect("panics are caught")).collect()
    });
    let mut counts = Counts::default();
    for end in ends {
        match end {
            Ok(of_it) => counts.add(&of_it),
            Err(seed) => panic!("WEIGHTSYNC_SOAK_SEED={seed} WEIGHTSYNC_SOAK=0.001 repeats it"),
        }
    }
    println!("{counts:#?}");
}

/// Publications at these times, to machines of these speeds, each with two workers that want the
/// newest version.
fn calm(
    arity: usize,
    rates: &[u64],
    sizes: &[u64],
    publications: impl Iterator<Item = u64>,
) -> World {
    let options = Options::calm(arity, rates);
    let mut world = World::new(options, sizes.to_vec(), Dice::new(1));
    let models = (1 << sizes.len()) - 1;
    for _ in rates {
        world.add_plain_host(2);
    }
    for at in publications {
        world.clock.after(at, Event::Op(Op::Publish { models }));
    }
    run(world)
}

fn run(mut world: World) -> World {
    world.run();
    world.check_end();
    world
}

#[test]
fn sender_load_does_not_grow_with_hosts() {
    for arity in 1..=3 {
        for machines in [1, 2, 3, 8, 12] {
            let world = calm(
                arity,
                &vec![FAST; machines],
                &[3 * BLOCK_BYTES, BLOCK_BYTES + 1000],
                (1..=8).map(|number| number * SECOND),
            );
            let children = arity.min(machines) as u64;
            let expected = 8 * (4 * BLOCK_BYTES + 1000) * children;
            assert_eq!(world.facts.served, expected, "{arity}, {machines} machines");
            assert_eq!(world.counts.broken + world.counts.not_there, 0);
        }
    }
}

#[test]
fn a_slow_machine_holds_nobody_up_and_does_not_starve() {
    for slow in 0..6 {
        let mut rates = [FAST; 6];
        rates[slow] = SLOW;
        // A set takes it 25 seconds; the others get one a second once it is
        // known to be slow.
        let at = |number| match number {
            0..6 => (1 + number * 200) * SECOND,
            _ => (1200 + number) * SECOND,
        };
        for sizes in [
            &[3 * BLOCK_BYTES][..],
            &[BLOCK_BYTES, BLOCK_BYTES + 1000, BLOCK_BYTES],
        ] {
            let world = calm(1, &rates, sizes, (0..106).map(at));
            for (who, notified) in &world.facts.notified {
                let late = notified.iter().filter(|sequence| **sequence > 6).count();
                match who.worker.0 as usize / 10 == slow + 1 {
                    true => assert!(late >= 3, "{who:?} of {sizes:?} was told {notified:?}"),
                    false => assert_eq!(late, 100, "{who:?} of {sizes:?} was told {notified:?}"),
                }
            }
        }
    }
}

/// The agent is not known to be slow before an agent behind it stood before it.
#[test]
fn slow_first_host_delays_the_others_once() {
    let options = Options::calm(1, &[2_500_000, FAST, FAST]);
    let mut world = World::new(options, vec![20 * BLOCK_BYTES], Dice::new(1));
    for _ in 0..3 {
        world.add_plain_host(1);
    }
    for number in 0..30 {
        let publish = Event::Op(Op::Publish { models: 1 });
        world.clock.after((1 + 3 * number) * SECOND, publish);
    }
    let world = run(world);
    for node in [2, 3] {
        let who = world.hosts[node].workers[0].who;
        let notified = world.facts.notified[&who]
            .iter()
            .zip(&world.facts.notified_at[&who]);
        // The first version took this agent nine seconds, as it did the slow one.
        let late = notified.filter(|(sequence, at)| **at > (3 * **sequence - 1) * SECOND);
        let late: Vec<_> = late.collect();
        assert!(late.len() <= 3, "{who:?}: {late:?}");
    }
}

/// A machine of 20 Mbit/s, to which a version takes 36 seconds, gets one every two. Its
/// workers give up after 30 seconds, and try again.
#[test]
fn slow_host_has_a_version_in_one_transfer_time() {
    const RATE: u64 = 2_500_000;
    const BYTES: u64 = 87 * BLOCK_BYTES;
    let transfer = BYTES * SECOND / RATE;
    // (bytes a second, when each worker comes, and when all are to have a version)
    let cases: [(u64, &[u64], u64); 3] = [
        (RATE, &[0, 29], transfer),
        (RATE, &[0, 29, 55, 71], transfer),
        (RATE / 2, &[0], 2 * transfer),
    ];
    for (rate, workers, takes) in cases {
        // A quick agent stands before it.
        let options = Options::calm(1, &[FAST, rate]);
        let mut world = World::new(options, vec![BYTES], Dice::new(1));
        world.add_plain_host(1);
        world.add_plain_host(0);
        for number in 0..160 {
            let publish = Event::Op(Op::Publish { models: 1 });
            world.clock.after(SECOND + number * 2 * SECOND, publish);
        }
        for (index, at) in workers.iter().enumerate() {
            let patience = 30 * SECOND;
            let (node, at) = (2, 4 + at);
            let op = Op::Try {
                node,
                index,
                patience,
            };
            world.clock.after(at * SECOND, Event::Op(op));
        }
        let world = run(world);
        for (index, at) in workers.iter().enumerate() {
            let begun = world.hosts[2].workers[index].who;
            let first = world.facts.notified_at[&begun][0];
            let due = (4 + at).max(4 + takes / SECOND) + 2;
            assert!(
                first <= due * SECOND,
                "worker {index} after {first} us, not {due} s"
            );
        }
    }
}

/// Two machines that do not reach each other from ten seconds on, and again after so
/// long; a version each second.
fn two_apart(until: u64, seconds: u64) -> World {
    let mut options = Options::calm(1, &[FAST; 2]);
    options.apart = true;
    let mut world = World::new(options, vec![BLOCK_BYTES], Dice::new(until));
    for _ in 0..2 {
        world.add_plain_host(2);
    }
    for number in 1..seconds {
        world
            .clock
            .after(number * SECOND, Event::Op(Op::Publish { models: 1 }));
    }
    world.clock.after(
        10 * SECOND,
        Event::Op(Op::Between {
            one: 1,
            other: 2,
            health: Health::Cut,
        }),
    );
    world.clock.after(until * SECOND, Event::Op(Op::Near));
    run(world)
}

#[test]
fn host_retries_an_unreachable_parent_with_backoff() {
    let world = two_apart(20, 60);
    let parents = |world: &World| {
        let parents = world.sender.plan.topology.parents();
        parents.map(|(_, parent)| parent).collect::<Vec<_>>()
    };
    assert_eq!(parents(&world), [Some(0), Some(1)]);
    assert_eq!(world.counts.broken, 1);
    // After 30 seconds, 60 more, 120, 240, 480, and 960.
    let world = two_apart(4000, 1800);
    assert_eq!(world.counts.broken, 6);
}

/// Whether or not it is known by then that its machine has gone.
#[test]
fn worker_restarted_elsewhere_joins_at_any_time() {
    for after in (0..1200).step_by(25) {
        let mut world = World::new(
            Options::calm(1, &[FAST; 3]),
            vec![BLOCK_BYTES],
            Dice::new(after),
        );
        for _ in 0..3 {
            world.add_plain_host(2);
        }
        let moves = Op::Elsewhere {
            from: 1,
            index: 0,
            to: 2,
        };
        let ops = [
            (5 * SECOND, Op::Publish { models: 1 }),
            (10 * SECOND, Op::Vanish { node: 1 }),
            (10 * SECOND + after * MS, moves),
            (60 * SECOND, Op::Heal),
        ];
        for (at, op) in ops {
            world.clock.after(at, Event::Op(op));
        }
        let world = run(world);
        assert_eq!(world.counts.denied, 0, "after {after} ms");
    }
}

/// How many schedules, as `WEIGHTSYNC_SOAK` scales them.
fn schedules() -> u64 {
    match std::env::var("WEIGHTSYNC_SOAK") {
        Ok(text) if text == "full" => 25 * SCHEDULES,
        Ok(text) if !text.is_empty() => {
            let factor: f64 = text.parse().expect("WEIGHTSYNC_SOAK: a factor or `full`");
            ((SCHEDULES as f64 * factor) as u64).max(1)
        }
        _ => SCHEDULES,
    }
}

/// The first schedule's seed: of an earlier run, if `WEIGHTSYNC_SOAK_SEED` says so.
fn seed() -> u64 {
    match std::env::var("WEIGHTSYNC_SOAK_SEED") {
        Ok(text) => text.parse().expect("WEIGHTSYNC_SOAK_SEED: a number"),
        Err(_) if std::env::var("WEIGHTSYNC_SOAK").is_ok_and(|soak| !soak.is_empty()) => {
            let now = std::time::SystemTime::now();
            let since = now.duration_since(std::time::UNIX_EPOCH);
            since.map_or(1, |since| since.as_nanos() as u64)
        }
        Err(_) => EVERY_DAY,
    }
}
