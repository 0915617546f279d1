//! Weights that do not fit are refused with the names, and the old version serves on.

use std::thread;

use weightsync_engine::{
    AnyScheme, Dtype, Error, Expect, Layout, LayoutMismatch, Member, Outcome, ReceiverSetup,
    Result, SendOptions, SenderSetup, Set, TensorView, Tensors, Version, WaitFor, WeightLoader,
};

use crate::{pair, send, send_to, soon, weights};

fn mismatch_of(error: Error) -> LayoutMismatch {
    match error {
        Error::WrongWeights { model, mismatch } | Error::WrongModel { model, mismatch } => {
            assert_eq!(model.as_str(), "policy");
            *mismatch
        }
        other => panic!("{other}"),
    }
}

#[test]
fn wrong_weights_are_refused_and_the_old_serve() {
    let good = weights();
    let (mut sender, mut receiver) = pair(&good);
    let before = receiver.latest().unwrap().unwrap();

    let mut missing = Tensors::new();
    missing.insert("layer.bias", [7], [0.0_f32; 7]).unwrap();
    missing.insert("step", [], [0_i64]).unwrap();
    let refused = mismatch_of(sender.send(&missing).unwrap_err());
    assert_eq!(refused.missing, ["layer.weight"]);
    assert!(refused.unknown.is_empty() && refused.shapes.is_empty());

    let mut unknown = weights();
    unknown.insert("layer.extra", [1], [0.0_f32]).unwrap();
    let refused = mismatch_of(sender.send(&unknown).unwrap_err());
    assert_eq!(refused.unknown, ["layer.extra"]);

    let mut shape = weights();
    shape.insert("layer.bias", [8], [0.0_f32; 8]).unwrap();
    let refused = mismatch_of(sender.send(&shape).unwrap_err());
    assert_eq!(refused.shapes[0].name, "layer.bias");
    assert_eq!(
        (&refused.shapes[0].expected[..], &refused.shapes[0].got[..]),
        (&[7][..], &[8][..])
    );

    let mut dtype = weights();
    dtype.insert("step", [], [0.0_f64]).unwrap();
    let refused = mismatch_of(sender.send(&dtype).unwrap_err());
    assert_eq!(refused.dtypes[0].name, "step");
    assert_eq!(
        (refused.dtypes[0].expected, refused.dtypes[0].got),
        (Dtype::I64, Dtype::F64)
    );

    assert_eq!(sender.version().unwrap(), Version(1));
    assert_eq!(sender.workers()[0].versions[0], Version(1));
    assert_eq!(receiver.latest().unwrap().unwrap().version(), Version(1));
    assert_eq!(before.slice::<f32>("layer.bias").unwrap(), [0.5; 7]);
    drop(before);

    let mut next = weights();
    next.slice_mut::<f32>("layer.bias").unwrap()[6] = 9.0;
    let snapshot = send_to(&mut sender, &next, &mut receiver);
    assert_eq!(snapshot.version(), Version(2));
    assert_eq!(snapshot.slice::<f32>("layer.bias").unwrap()[6], 9.0);
}

#[test]
fn everything_wrong_at_once_is_named_at_once() {
    let (mut sender, _receiver) = pair(&weights());
    let mut wrong = Tensors::new();
    wrong
        .insert("layer.wieght", [33, 7], [0.0_f32; 33 * 7])
        .unwrap();
    wrong.insert("layer.bias", [8], [0.0_f64; 8]).unwrap();
    let error = sender.send(&wrong).unwrap_err();
    let words = error.to_string();
    for name in [
        "policy",
        "layer.weight",
        "step",
        "layer.wieght",
        "layer.bias",
        "[7]",
        "[8]",
        "F32",
        "F64",
    ] {
        assert!(words.contains(name), "{name} is not in {words:?}");
    }
    let refused = mismatch_of(error);
    assert_eq!(refused.missing, ["layer.weight", "step"]);
    assert_eq!(refused.unknown, ["layer.wieght"]);
    assert_eq!((refused.shapes.len(), refused.dtypes.len()), (1, 1));
    assert_eq!(sender.version().unwrap(), Version(1));
}

#[test]
fn a_connect_with_wrong_weights_is_refused_too() {
    let setup = SenderSetup::new("policy", &weights()).unwrap();
    let mut wrong = weights();
    wrong.insert("step", [1], [0_i64]).unwrap();
    let error = setup
        .connect(&wrong, Expect::Count(0), Some(soon()))
        .unwrap_err();
    assert_eq!(mismatch_of(error).shapes[0].name, "step");
}

#[test]
fn models_without_weights_are_named_before_opening() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("run");
    let setup = SenderSetup::new("actor", &weights()).unwrap();
    let setup = setup.add_model("critic", &weights()).unwrap();
    let setup = setup.run_dir(&dir).unwrap();
    let source = weights();
    let actor = Set::new().with("actor", &source);
    let error = setup
        .clone()
        .connect(&actor, Expect::Count(0), Some(soon()))
        .unwrap_err();
    let Error::MissingModels { missing } = &error else {
        panic!("{error}");
    };
    assert_eq!(missing[0].as_str(), "critic");
    assert!(!dir.join("epoch").exists(), "no run has begun");
    let both = actor.with("critic", &source);
    let sender = setup
        .connect(&both, Expect::Count(0), Some(soon()))
        .unwrap();
    assert_eq!(sender.run().epoch.0, 1);
}

#[test]
fn a_run_directory_is_for_schemes_that_restart() {
    let dir = tempfile::tempdir().unwrap();
    let setup = || SenderSetup::new("policy", &weights()).unwrap();
    let none = || "none".parse::<AnyScheme>().unwrap();
    let in_either_order = [
        setup().scheme(none()).unwrap().run_dir(dir.path()),
        setup()
            .run_dir(dir.path().join("run"))
            .unwrap()
            .scheme(none()),
    ];
    for refused in in_either_order {
        let error = refused.unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
        assert!(error.to_string().starts_with("none cannot"), "{error}");
    }
}

#[test]
fn reordered_tensors_land_in_their_places() {
    let (mut sender, mut receiver) = pair(&weights());
    let mut reordered = Tensors::new();
    reordered.insert("step", [], [42_i64]).unwrap();
    reordered
        .insert("layer.bias", [7], [1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
        .unwrap();
    reordered
        .insert("layer.weight", [33, 7], [8.0_f32; 33 * 7])
        .unwrap();
    let snapshot = send_to(&mut sender, &reordered, &mut receiver);
    assert_eq!(snapshot.slice::<i64>("step").unwrap(), [42]);
    assert_eq!(
        snapshot.slice::<f32>("layer.bias").unwrap(),
        [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    );
    assert_eq!(
        snapshot.slice::<f32>("layer.weight").unwrap(),
        [8.0; 33 * 7]
    );
    let names: Vec<_> = snapshot
        .tensors()
        .map(|tensor| tensor.name().to_owned())
        .collect();
    assert_eq!(
        names,
        ["layer.weight", "layer.bias", "step"],
        "the layout's order stays"
    );

    // A worker's own model may have its own order as well.
    let (report, loaded) = send(&mut sender, &weights(), || {
        receiver.loading(&mut reordered).recv_timeout(soon())
    });
    assert!(report.unwrap().all_applied());
    assert_eq!(loaded.unwrap(), Some(Version(3)));
    assert_eq!(reordered.slice::<i64>("step").unwrap(), [41]);
}

#[test]
fn both_ends_learn_that_the_model_does_not_fit() {
    let setup = SenderSetup::new("policy", &weights()).unwrap();
    let info = setup.init_info();
    let worker = thread::spawn(move || {
        let mut own = weights();
        own.insert("layer.bias", [9], [0.0_f32; 9]).unwrap();
        own.insert("head", [1], [0.0_f32]).unwrap();
        ReceiverSetup::new(info, 3)
            .model(&own)
            .unwrap()
            .connect(Some(soon()))
            .map(|_| ())
    });
    // Nobody waits for the deadline: the refusal ends the wait.
    let at_trainer = setup
        .connect(&weights(), Expect::Count(1), Some(soon()))
        .unwrap_err();
    let words = at_trainer.to_string();
    let Error::Refused { model, refusals } = at_trainer else {
        panic!("{words}")
    };
    assert_eq!(
        (model.as_str(), refusals.len(), refusals[0].0.0),
        ("policy", 1, 3)
    );
    assert!(
        words.contains("worker 3") && words.contains("layer.bias") && words.contains("head"),
        "{words}"
    );

    let at_worker = mismatch_of(worker.join().unwrap().unwrap_err());
    assert_eq!(at_worker.missing, ["head"]);
    assert_eq!(at_worker.shapes[0].name, "layer.bias");
}

/// A worker's model that says no as often as it is told to.
struct Reluctant {
    own: Tensors,
    noes: u32,
}

impl WeightLoader for Reluctant {
    fn layout(&self) -> Result<Layout> {
        WeightLoader::layout(&self.own)
    }

    fn load(&mut self, tensors: &[TensorView<'_>]) -> Result<()> {
        if self.noes > 0 {
            self.noes -= 1;
            return Err(Error::Load {
                name: "layer.bias".into(),
                source: "the engine is out of memory".into(),
            });
        }
        self.own.load(tensors)
    }
}

#[test]
fn a_worker_whose_first_load_fails_is_refused_at_once() {
    let setup = SenderSetup::new("policy", &weights()).unwrap();
    let info = setup.init_info();
    let worker = thread::spawn(move || {
        let mut model = Reluctant {
            own: weights(),
            noes: u32::MAX,
        };
        let setup = ReceiverSetup::new(info, 3);
        setup.connect_into(&mut model, Some(soon())).map(drop)
    });
    // Nobody waits for the deadline.
    let error = setup.connect(&weights(), Expect::Count(1), Some(soon()));
    let words = error.unwrap_err().to_string();
    assert!(
        words.contains("refused by worker 3") && words.contains("out of memory"),
        "{words}"
    );
    let error = worker.join().unwrap().unwrap_err();
    assert!(matches!(error, Error::Load { .. }), "{error}");
}

#[test]
fn failed_load_is_a_report_line_and_the_next_loads() {
    let (mut sender, mut receiver) = pair(&weights());
    let mut model = Reluctant {
        own: weights(),
        noes: 1,
    };
    let mut next = weights();
    next.slice_mut::<i64>("step").unwrap()[0] = 2;

    let (report, loaded) = send(&mut sender, &next, || {
        receiver.loading(&mut model).recv_timeout(soon())
    });
    assert!(matches!(loaded, Err(Error::Load { .. })), "{loaded:?}");
    let report = report.unwrap();
    assert!(!report.all_applied());
    let line = report.failed().next().unwrap();
    assert!(
        matches!(&line.outcome, Outcome::Refused { reason } if reason.contains("layer.bias") && reason.contains("out of memory")),
        "{line}"
    );
    assert_eq!(
        (report.version().unwrap(), line.versions[0]),
        (Version(2), Version(1))
    );
    // The label is that of the weights this worker has.
    assert_eq!(receiver.version().unwrap(), Version(1));
    assert_eq!(sender.workers()[0].versions[0], Version(1));
    assert_eq!(model.own.slice::<i64>("step").unwrap(), [41]);

    next.slice_mut::<i64>("step").unwrap()[0] = 3;
    let (report, loaded) = send(&mut sender, &next, || {
        receiver.loading(&mut model).recv_timeout(soon())
    });
    assert_eq!(loaded.unwrap(), Some(Version(3)));
    assert!(report.unwrap().all_applied());
    assert_eq!(receiver.version().unwrap(), Version(3));
    assert_eq!(model.own.slice::<i64>("step").unwrap(), [3]);
}

#[test]
fn model_that_no_longer_fits_is_refused_at_load() {
    let (mut sender, mut receiver) = pair(&weights());
    let mut other = Tensors::new();
    other.insert("step", [], [0_i64]).unwrap();
    let (report, loaded) = send(&mut sender, &weights(), || {
        receiver.loading(&mut other).recv_timeout(soon())
    });
    assert_eq!(
        mismatch_of(loaded.unwrap_err()).unknown,
        ["layer.weight", "layer.bias"]
    );
    assert!(report.unwrap().to_string().contains("layer.weight"));
    assert_eq!(
        (
            receiver.version().unwrap(),
            other.slice::<i64>("step").unwrap()
        ),
        (Version(1), &[0][..])
    );
}

/// Looks at what the sender believes while a load is under way.
struct Watched<'a> {
    own: Tensors,
    sender_says: &'a (dyn Fn() -> Version + Sync),
    during: Vec<Version>,
}

impl WeightLoader for Watched<'_> {
    fn layout(&self) -> Result<Layout> {
        WeightLoader::layout(&self.own)
    }

    fn load(&mut self, tensors: &[TensorView<'_>]) -> Result<()> {
        self.during.push((self.sender_says)());
        self.own.load(tensors)
    }
}

#[test]
fn a_version_is_reported_only_once_it_is_loaded() {
    let (mut sender, mut receiver) = pair(&weights());
    sender
        .send_with(
            &weights(),
            &SendOptions::new().wait(WaitFor::Sent).timeout(Some(soon())),
        )
        .unwrap();
    let sender_says = || sender.workers()[0].versions[0];
    let mut model = Watched {
        own: weights(),
        sender_says: &sender_says,
        during: Vec::new(),
    };
    assert_eq!(
        receiver.loading(&mut model).recv_timeout(soon()).unwrap(),
        Some(Version(2))
    );
    assert_eq!(model.during, [Version(1)]);
    assert_eq!((sender_says)(), Version(2));
}

#[test]
fn cast_applies_to_every_model_and_names_are_unique() {
    let mut one = Tensors::new();
    one.insert("bias", [2], [1.5_f32, 2.5]).unwrap();
    let setup = SenderSetup::new("actor", &one).unwrap();
    let error = setup.clone().add_model("actor", &one).unwrap_err();
    assert!(matches!(error, Error::SameModelTwice { .. }), "{error}");

    // In whichever order the two are said.
    let setup = setup.cast(Dtype::BF16).unwrap();
    let setup = setup.add_model("critic", &one).unwrap();
    let info = setup.init_info();
    let both = Set::new().with("actor", &one).with("critic", &one);
    let _sender = setup
        .connect(&both, Expect::Count(0), Some(soon()))
        .unwrap();
    let joins = || ReceiverSetup::new(info.clone(), 0);
    let mut receiver = joins().connect(Some(soon())).unwrap();
    let sent = receiver.set().latest().unwrap().unwrap();
    assert_eq!(sent.members().len(), 2);
    for Member { snapshot, .. } in sent.members() {
        let dtype = snapshot.layout().tensors()[0].dtype;
        assert_eq!(dtype, Dtype::BF16, "{}", snapshot.model());
    }
    drop(receiver);

    let twice = joins().models(["critic", "critic"]);
    let error = twice.connect(Some(soon())).unwrap_err();
    assert!(matches!(error, Error::SameModelTwice { .. }), "{error}");
}

#[test]
fn calls_about_one_model_refuse_several_models() {
    fn refused<T>(call: &str, result: Result<T>) {
        match result.err() {
            Some(Error::SeveralModels { known }) => assert_eq!(known.len(), 2, "{call}"),
            other => panic!("{call}: {other:?}"),
        }
    }
    let one = weights();
    let setup = SenderSetup::new("actor", &one).unwrap();
    let setup = setup.add_model("critic", &one).unwrap();
    refused("SenderSetup::layout", setup.layout());
    let info = setup.init_info();
    let insisting = ReceiverSetup::new(info.clone(), 1).model(&one).unwrap();
    let joined = thread::spawn(|| ReceiverSetup::new(info, 0).connect(Some(soon())).unwrap());
    let set = Set::new().with("actor", &one).with("critic", &one);
    let mut sender = setup.connect(&set, Expect::Count(1), Some(soon())).unwrap();
    refused("ReceiverSetup::model", insisting.connect(Some(soon())));

    refused("Sender::version", sender.version());
    refused("Sender::layout", sender.layout());
    refused("Sender::snapshot", sender.snapshot());
    refused("Sender::digest", sender.digest());
    refused("Sender::loan", sender.loan());
    assert_eq!(sender.version_of("critic").unwrap(), Version(1));
    refused("Receiver::version", joined.join().unwrap().version());

    let sent = SendOptions::new().wait(WaitFor::Sent);
    let pending = sender.send_async(&set, &sent).unwrap();
    refused("PendingSend::version", pending.version());
    refused(
        "Report::version",
        pending.wait(Some(soon())).unwrap().version(),
    );
    let report = sender.send_with(&one, &sent.model("critic")).unwrap();
    assert_eq!(report.version().unwrap(), Version(3));
}
