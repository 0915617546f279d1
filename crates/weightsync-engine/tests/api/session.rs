//! The lifecycle as one value, and several senders side by side.

use std::thread;

use weightsync_engine::transport::{Registration, register};
use weightsync_engine::{
    AnyScheme, Dtype, Error, Expect, MultiProcess, SendOptions, SenderSetup, Senders, Session, Set,
    SharedMem, Version,
};

use crate::{BRIEF, soon, weights};

/// What a call out of order says.
fn wrong(result: weightsync_engine::Result<()>) -> String {
    let error = result.unwrap_err();
    assert!(matches!(error, Error::WrongOrder { .. }), "{error}");
    error.to_string()
}

#[test]
fn every_call_out_of_order_says_what_to_do() {
    let shared = || Session::new(AnyScheme::new(SharedMem::default()));
    let options = SendOptions::new();
    let source = weights();

    let mut idle = shared();
    for (result, fix) in [
        (
            idle.send(&source, &options).map(drop),
            "call init_on_sender first",
        ),
        (idle.receiver().map(drop), "call init_on_receiver first"),
        (
            idle.connect_sender(&source, Expect::Count(0), Some(soon())),
            "call init_on_sender first",
        ),
        (
            idle.connect_receiver(Some(soon())),
            "call init_on_receiver first",
        ),
        (idle.init_on_receiver(0), "init_on_sender where the trainer"),
    ] {
        let words = wrong(result);
        assert!(words.contains(fix), "{words}");
    }

    let mut sender = shared();
    sender.init_on_sender("policy", &source).unwrap();
    for (result, fix) in [
        (
            sender.send(&source, &options).map(drop),
            "call connect_sender first",
        ),
        (sender.receiver().map(drop), "the workers' half"),
        (sender.connect_receiver(Some(soon())), "the workers' half"),
        (sender.init_on_receiver(0), "the workers' half"),
    ] {
        let words = wrong(result);
        assert!(words.contains(fix), "{words}");
    }
    let info = serde_json::to_string(&sender).unwrap();
    sender
        .connect_sender(&source, Expect::Count(0), Some(soon()))
        .unwrap();
    for (result, fix) in [
        (
            sender.connect_sender(&source, Expect::Count(0), Some(soon())),
            "shut it down to start again",
        ),
        (
            sender.init_on_sender("policy", &source),
            "shut it down to start again",
        ),
        (sender.receiver().map(drop), "the workers' half"),
    ] {
        let words = wrong(result);
        assert!(words.contains(fix), "{words}");
    }

    let mut worker: Session = serde_json::from_str(&info).unwrap();
    worker.init_on_receiver(0).unwrap();
    for (result, fix) in [
        (worker.receiver().map(drop), "call connect_receiver first"),
        (
            worker.send(&source, &options).map(drop),
            "the trainer's half",
        ),
    ] {
        let words = wrong(result);
        assert!(words.contains(fix), "{words}");
    }
    worker.connect_receiver(Some(soon())).unwrap();
    let words = wrong(worker.connect_receiver(Some(soon())));
    assert!(words.contains("shut it down"), "{words}");
    worker.shutdown();
    worker.shutdown();
    let words = wrong(worker.receiver().map(drop));
    assert!(words.contains("start again"), "{words}");
}

#[test]
fn session_crosses_before_and_after_init() {
    let source = weights();
    for text in ["shared-mem", "multi-process:every=2", "none"] {
        let before = Session::new(text.parse().unwrap());
        let before = serde_json::to_string(&before).unwrap();
        let mut trainer: Session = serde_json::from_str(&before).unwrap();
        for round in 0..2 {
            trainer.init_on_sender("policy", &source).unwrap();
            let bytes = postcard::to_stdvec(&trainer).unwrap();
            let worker = thread::spawn(move || {
                let mut worker: Session = postcard::from_bytes(&bytes).unwrap();
                worker.init_on_receiver(3).unwrap();
                worker.connect_receiver(Some(soon())).unwrap();
                let got = worker.receiver().unwrap().recv_timeout(BRIEF).unwrap();
                // Kept: one that has left again does not count.
                (worker, got)
            });
            trainer
                .connect_sender(&source, Expect::Count(1), Some(soon()))
                .unwrap();
            let (_worker, got) = worker.join().unwrap();
            let got = got.map(|snapshot| snapshot.version());
            let expected = (text != "none").then_some(Version(1));
            assert_eq!(got, expected, "{text}, round {round}");
            trainer.shutdown();
        }
    }
}

register! {
    Registration::new("homing-pigeon", |settings| {
        assert_eq!(settings["loft"], "3");
        Ok(AnyScheme::new(SharedMem::default()))
    })
}

#[test]
fn session_of_an_unknown_scheme_is_passed_on() {
    let source = weights();
    let text = r#"{"scheme":"carrier-pigeon:loft=3","info":null}"#;
    let mut session: Session = serde_json::from_str(text).unwrap();
    assert_eq!(session.scheme(), "carrier-pigeon:loft=3");
    assert_eq!(serde_json::to_string(&session).unwrap(), text);
    let error = session.init_on_sender("policy", &source).unwrap_err();
    assert!(matches!(error, Error::UnknownScheme { .. }), "{error}");
    // Where it is known it is what it was.
    let text = text.replace("carrier-pigeon", "homing-pigeon");
    let mut session: Session = serde_json::from_str(&text).unwrap();
    session.init_on_sender("policy", &source).unwrap();
    for damaged in [
        r#"{"scheme":"","info":null}"#.to_owned(),
        format!(r#"{{"scheme":"{}","info":null}}"#, "x".repeat(1025)),
    ] {
        let error = serde_json::from_str::<Session>(&damaged).unwrap_err();
        assert!(error.to_string().contains("1 to 1024"), "{error}");
    }
}

#[test]
fn second_init_of_one_model_leaves_the_others() {
    let small = weights();
    let mut large = weights();
    large.insert("extra", [3], [1.0_f32; 3]).unwrap();
    let mut trainer = Session::new(AnyScheme::new(SharedMem::default()));
    let setup = SenderSetup::new("actor", &small).unwrap();
    let setup = setup.add_model("critic", &small).unwrap();
    let setup = setup.cast(Dtype::F64).unwrap();
    trainer.prepare_sender(setup.history(2)).unwrap();
    let info = trainer.init_info().cloned();
    trainer.init_on_sender("actor", &large).unwrap();
    assert_eq!(trainer.init_info().cloned(), info);
    let both = Set::new().with("actor", &large).with("critic", &small);
    trainer
        .connect_sender(&both, Expect::Count(0), Some(soon()))
        .unwrap();
    let sender = trainer.sender().unwrap();
    assert_eq!(sender.models().len(), 2);
    let sent = sender.snapshot_of("actor").unwrap();
    assert_eq!(sent.layout().tensor("extra").unwrap().dtype, Dtype::F64);
    sender.send(&both).unwrap();
    let old = sender.old_snapshot("critic", Version(1)).unwrap();
    assert_eq!(old.version(), Version(1), "the history");
    let error = sender.old_snapshot("critic", Version(9)).unwrap_err();
    let Error::NoSuchVersion { known, .. } = &error else {
        panic!("{error}")
    };
    assert_eq!(*known, [Version(2), Version(1)]);
}

#[test]
fn first_version_has_the_number_of_its_connect() {
    let mut trainer = Session::new(AnyScheme::new(SharedMem::default()));
    let source = weights();
    trainer.init_on_sender("policy", &source).unwrap();
    let first = Some(Version(7));
    trainer
        .connect_sender_at(&source, first, Expect::Count(0), Some(soon()))
        .unwrap();
    let sender = trainer.sender().unwrap();
    assert_eq!(
        sender.old_snapshot("policy", Version(7)).unwrap().version(),
        Version(7)
    );
    assert_eq!(sender.send(&source).unwrap().version().unwrap(), Version(8));
}

#[test]
fn set_across_two_senders_is_refused() {
    let (actor, critic) = (weights(), weights());
    let mut senders = Senders::new();
    for (model, source, scheme) in [
        ("actor", &actor, AnyScheme::new(SharedMem::default())),
        ("critic", &critic, AnyScheme::new(MultiProcess::default())),
    ] {
        let setup = SenderSetup::new(model, source).unwrap();
        let setup = setup.scheme(scheme).unwrap();
        let sender = setup
            .connect(source, Expect::Count(0), Some(soon()))
            .unwrap();
        senders.push(sender).unwrap();
    }
    let set = Set::new().with("actor", &actor).with("critic", &critic);
    let error = senders.send_with(&set, &SendOptions::new()).unwrap_err();
    assert!(matches!(error, Error::MixedSenders { .. }), "{error}");
    for model in ["actor", "critic"] {
        assert_eq!(
            senders.of(model).unwrap().version().unwrap(),
            Version(1),
            "{model}"
        );
    }
    let report = senders
        .send_with(&critic, &SendOptions::new().model("critic"))
        .unwrap();
    assert_eq!(report.version().unwrap(), Version(2));
    let error = senders.send_with(&critic, &SendOptions::new()).unwrap_err();
    assert!(matches!(error, Error::SeveralModels { .. }), "{error}");
}
