//! Hostile input: the trainer goes on serving, its memory stays bounded, and it says
//! once what is going on.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::attacks::ATTACKS;
use super::scale::{longest, seed};
use super::stage::{Actor, Stage};

pub(crate) const TESTS: &[(&str, fn())] =
    &[("a_trainer_under_attack_goes_on_serving", under_attack)];

/// By how much a trainer may grow, in KiB.
const MOST: u64 = 32 << 10;

/// How long a send may take meanwhile, on a busy machine.
const MEANWHILE: Duration = Duration::from_secs(2);

fn under_attack() {
    let seed = seed();
    println!("WEIGHTSYNC_SOAK_SEED={seed}");
    let mut stage = Stage::new(2 + ATTACKS.len(), 1 << 20);
    stage.start_workers(1, &[1]);
    for _ in 0..5 {
        stage.send_everywhere();
    }
    let before = memory(&stage);
    for (number, attack) in ATTACKS.into_iter().enumerate() {
        let seed = seed.wrapping_add(number as u64);
        stage.begin_attack(2 + number, attack, seed);
    }
    // Workers at the same addresses have nothing to do with it, and get in.
    let took = Instant::now();
    for number in 0..ATTACKS.len() {
        stage.begin_worker(10 + number as u32, 2 + number);
    }
    stage.until_all_newest();
    stage.note(&format!(
        "workers at addresses of {} attacks joined in {:?}",
        stage.attacks_left(),
        took.elapsed()
    ));
    let (begun, mut most, mut worst, mut sends) = (Instant::now(), before, Duration::ZERO, 0);
    while stage.attacks_left() > 0 {
        let sent = stage.send_everywhere();
        worst = worst.max(sent.took);
        sends += 1;
        most = most.max(memory(&stage));
        if begun.elapsed() > longest() {
            stage.fail("an attack never ends");
        }
        stage.listen(Instant::now() + Duration::from_millis(20));
    }
    let grown = most.saturating_sub(before);
    stage.note(&format!(
        "{sends} sends, the slowest in {worst:?}; {before} KiB and {grown} KiB more at most; {:?}",
        begun.elapsed()
    ));
    assert!(worst < MEANWHILE, "{worst:?}");
    assert!(grown < MOST, "it grew from {before} to {most} KiB");
    let took = Instant::now();
    stage.start_workers(1, &[2]);
    stage.note(&format!("another worker joined in {:?}", took.elapsed()));
    stage.send_everywhere();
    let mut causes: BTreeMap<String, usize> = BTreeMap::new();
    for line in stage.warnings(Actor::Trainer) {
        *causes.entry(cause(line)).or_default() += 1;
    }
    stage.note(&format!("{causes:#?}"));
    for (cause, lines) in &causes {
        assert_eq!(*lines, 1, "{cause}: {causes:#?}");
    }
    for message in ["token", "took more than", "had not proved themselves"] {
        let message = |cause: &&String| cause.contains(message);
        assert!(causes.keys().any(|cause| message(&cause)), "{causes:#?}");
    }
}

/// A line without who it is about.
fn cause(line: &str) -> String {
    let words = line.split_whitespace();
    let plain = words.filter(|word| !word.contains(|letter: char| letter.is_ascii_digit()));
    plain.collect::<Vec<_>>().join(" ")
}

/// The trainer's memory, in KiB.
fn memory(stage: &Stage) -> u64 {
    let path = format!("/proc/{}/status", stage.pid(Actor::Trainer));
    let text = std::fs::read_to_string(path).expect("a trainer that runs");
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.split_whitespace().next());
    kib.and_then(|kib| kib.parse().ok()).expect("a number")
}
