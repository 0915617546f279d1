//! Init infos that nobody made.

use std::time::Instant;

use serde_json::{Value, json};
use weightsync_engine::{AnyScheme, InitInfo, ReceiverSetup};

use crate::Subject;
use crate::harness::command::{
    Answer, Join, Payload, SendSettings, TrainerCommand, TrainerSetup, Wait, WorkerCommand,
};
use crate::harness::fault::Kind;
use crate::harness::scale::{BRIEF, Dice, prompt_limit, rounds, seed};
use crate::harness::script::Script;
use crate::harness::shape::Shape;

fn info(subject: &Subject) -> InitInfo {
    let scheme: AnyScheme = subject.scheme.parse().expect("it was parsed before");
    let setup =
        weightsync_engine::SenderSetup::new("policy", &Shape::Words(64).make(1)).expect("a model");
    setup.scheme(scheme).expect("a place").init_info()
}

/// Random, cut and changed bytes are an init info or an error, and whatever they
/// are, joining by them ends.
pub(crate) fn damaged_init_info_is_an_error(subject: &Subject) {
    let seed = seed();
    let mut dice = Dice::new(seed);
    let count = rounds(500_000, 10_000);
    let good = info(subject);
    let text = serde_json::to_vec(&good).expect("it has a JSON form");
    let bytes = postcard::to_stdvec(&good).expect("it has a postcard form");
    let (mut read, mut joined) = (0, 0);
    for round in 0..count {
        let base = if round % 2 == 0 { &text } else { &bytes };
        let damaged = damage(base, &mut dice);
        let info = match round % 2 {
            0 => serde_json::from_slice::<InitInfo>(&damaged).ok(),
            _ => postcard::from_bytes::<InitInfo>(&damaged).ok(),
        };
        let Some(info) = info else { continue };
        read += 1;
        // It is a value like any other.
        let again = postcard::to_stdvec(&info).expect("it has a postcard form");
        assert_eq!(
            postcard::from_bytes::<InitInfo>(&again).ok().as_ref(),
            Some(&info)
        );
        if info != good && read % 64 == 0 && joined < 20 {
            joined += 1;
            let setup = ReceiverSetup::new(info, 0);
            let begun = Instant::now();
            let connected = setup.connect(Some(std::time::Duration::from_millis(5)));
            assert!(
                connected.is_err() || !subject.can.weights,
                "nobody is there"
            );
            assert!(begun.elapsed() < prompt_limit(), "{:?}", begun.elapsed());
        }
    }
    println!(
        "seed {seed}: {count} were damaged, {read} were still init infos, {joined} were joined by"
    );
}

fn damage(base: &[u8], dice: &mut Dice) -> Vec<u8> {
    let mut bytes = base.to_vec();
    match dice.below(6) {
        0 => {
            let len = dice.below(300) as usize;
            return dice.bytes(len);
        }
        1 => bytes.truncate(dice.below(bytes.len() as u64) as usize),
        2 => {
            // A length that is not there.
            let at = dice.below(bytes.len() as u64) as usize;
            bytes.splice(at..at, [0xff, 0xff, 0xff, 0xff, 0x7f]);
        }
        3 => bytes.extend(base),
        _ => {
            for _ in 0..1 + dice.below(3) {
                let at = dice.below(bytes.len() as u64) as usize;
                bytes[at] = dice.roll() as u8;
            }
        }
    }
    bytes
}

/// The secret in an init info is what lets a worker in.
pub(crate) fn worker_without_the_secret_is_refused(subject: &Subject) {
    let mut script = Script::new(subject, 2);
    let info = script.prepare(TrainerSetup::words(64));
    script.gather(&info, &[0]);
    script.take(0);
    let good = serde_json::to_value(&info).expect("it has a JSON form");
    for place in [0, 7, 15] {
        let mut stolen = good.clone();
        let byte = stolen["at"]["secret"][place].as_u64().expect("a byte");
        stolen["at"]["secret"][place] = json!(byte ^ 1);
        let stolen: InitInfo = serde_json::from_value(stolen).expect("another secret");
        let fault = script
            .join(
                1,
                Join {
                    deadline: BRIEF,
                    ..Join::new(&stolen)
                },
            )
            .fault();
        assert!(!fault.text.is_empty());
    }
    let workers: Vec<_> = script
        .status()
        .into_iter()
        .map(|status| status.worker)
        .collect();
    assert_eq!(workers, [0]);
    script.deliver_word(2, &[0]);
    assert_eq!(script.join(1, Join::new(&info)), Answer::Done);
    script.act(TrainerCommand::Close);
    script.close();
}

/// Each says what is wrong with it, and nothing is opened for it.
pub(crate) fn absurd_init_info_is_refused_in_words(subject: &Subject) {
    let good = serde_json::to_value(info(subject)).expect("it has a JSON form");
    let long = "x".repeat(1 << 20);
    let many: Vec<_> = (0..65).map(|index| format!("model{index}")).collect();
    let cases: &[(&str, Value, &str)] = &[
        ("/format", json!(99), "format 99"),
        ("/scheme", json!(""), "scheme"),
        ("/scheme", json!(long), "scheme"),
        ("/models", json!([]), "0 models"),
        ("/models", json!(many), "65 models"),
        ("/models", json!(["policy", "policy"]), "twice"),
        ("/models", json!([""]), "model id"),
        ("/models", json!("policy"), "sequence"),
        ("/at/address", json!(""), "0 bytes"),
        ("/at/address", json!(long), "1048576 bytes"),
        ("/at/secret", json!([1, 2, 3]), "16"),
        ("/at/restarts", json!("maybe"), "bool"),
    ];
    for (place, value, words) in cases {
        let mut absurd = good.clone();
        *absurd.pointer_mut(place).expect("a field") = value.clone();
        let error = serde_json::from_value::<InitInfo>(absurd)
            .expect_err("it is absurd")
            .to_string();
        assert!(error.contains(words), "{place}: {error}");
    }
    let mut more = good.clone();
    more["pickle"] = json!("gASVAAAA");
    let error = serde_json::from_value::<InitInfo>(more)
        .expect_err("nobody knows it")
        .to_string();
    assert!(error.contains("pickle"), "{error}");

    // A scheme is looked up where it is used.
    let mut unknown = good;
    unknown["scheme"] = json!("carrier-pigeon:fast");
    let unknown: InitInfo = serde_json::from_value(unknown).expect("any word");
    let joined = ReceiverSetup::new(unknown, 0).connect(Some(BRIEF));
    let error = joined.expect_err("nobody knows it");
    assert_eq!(Kind::of(&error), Kind::UnknownScheme);
    let word = subject.scheme.split(':').next().expect("a word");
    let text = error.to_string();
    assert!(
        text.contains("carrier-pigeon") && text.contains(word),
        "{text}"
    );
}

/// A worker that looks is told what is wrong and keeps what it has, and the sender
/// knows no better; the next version arrives like any other.
pub(crate) fn a_damaged_commit_record_costs_its_version_alone(subject: &Subject) {
    let lead = TrainerSetup {
        slots: (2, 8),
        ..TrainerSetup::words(1 << 10)
    };
    let (mut script, _) = Script::open(subject, lead, 2);
    for before in (1..40).step_by(2) {
        let damaged = before + 1;
        script.send(Payload::Word(damaged), SendSettings::wait(Wait::Sent));
        let words = script.act(TrainerCommand::Corrupt(damaged)).damaged();
        for worker in 0..2 {
            let fault = script.deed(worker, script.take_deed()).fault();
            assert!(fault.text.contains(&words), "{words:?}: {}", fault.text);
            let held = script.deed(worker, WorkerCommand::Reread(2)).held();
            assert_eq!(held[0].one(), (before, before));
        }
        let status = script.status();
        assert!(
            status.iter().all(|worker| worker.versions == [before]),
            "{status:?}"
        );
        script.deliver_word(damaged + 1, &[0, 1]);
    }
    script.close();
}
