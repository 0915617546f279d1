//! Workers that feed workers of their own.

use std::thread::{self, JoinHandle};
use std::time::Duration;

use weightsync_engine::{
    BackgroundState, Cascade, CascadeInBackground, CascadeSetup, Dtype, Error, Expect, Extracted,
    InitInfo, Layout, Outcome, Receiver, ReceiverSetup, SafePoints, SendOptions, Sender,
    SenderSetup, Set, SnapshotsInBackground, Tensors, Version, WaitFor, WeightExtractor,
};

use crate::{BRIEF, soon};

fn number(value: f32) -> Tensors {
    let mut tensors = Tensors::new();
    tensors.insert("value", [3], [value; 3]).unwrap();
    tensors
}

/// A worker that keeps the newest at hand.
fn keeps(info: &InitInfo, worker: u32) -> JoinHandle<SnapshotsInBackground> {
    let setup = ReceiverSetup::new(info.clone(), worker);
    thread::spawn(move || {
        let receiver = setup.connect(Some(soon())).unwrap();
        receiver.snapshots_in_background().unwrap()
    })
}

fn value(worker: &SnapshotsInBackground) -> (Version, f32) {
    let set = worker.newest().unwrap().unwrap();
    let one = &set.members()[0].snapshot;
    (one.version(), one.slice::<f32>("value").unwrap()[0])
}

fn waits_for(worker: &SnapshotsInBackground, version: u64) {
    let there = worker.wait(Some(soon()), |set| set.versions()[0].1 == Version(version));
    assert!(there.unwrap().is_some(), "{:?}", worker.status());
}

fn joins(info: InitInfo) -> JoinHandle<CascadeSetup> {
    thread::spawn(move || Cascade::join(ReceiverSetup::new(info, 7), Some(soon())).unwrap())
}

/// A trainer of one model, the worker in the middle, and its sub-workers.
fn family(sub_workers: u32) -> (Sender, Cascade, Vec<SnapshotsInBackground>) {
    let setup = SenderSetup::new("policy", &number(1.0)).unwrap();
    let middle = joins(setup.init_info());
    let trainer = thread::spawn(move || {
        setup
            .send_timeout(Some(soon()))
            .connect(&number(1.0), Expect::Count(1), Some(soon()))
            .unwrap()
    });
    let middle = middle.join().unwrap();
    // The trainer does not count it yet.
    assert!(!trainer.is_finished());
    let leaves: Vec<_> = (0..sub_workers)
        .map(|leaf| keeps(&middle.init_info(), leaf))
        .collect();
    let count = Expect::Count(sub_workers as usize);
    let middle = middle.connect(count, Some(soon())).unwrap();
    let leaves = leaves.into_iter().map(|leaf| leaf.join().unwrap());
    (trainer.join().unwrap(), middle, leaves.collect())
}

/// Sends while the worker in the middle passes it on.
fn send(
    sender: &mut Sender,
    weights: &Tensors,
    middle: &mut Cascade,
) -> (weightsync_engine::Report, weightsync_engine::Forwarded) {
    thread::scope(|scope| {
        let forwarded = scope.spawn(|| middle.forward(Some(soon())));
        let report = sender.send(weights).unwrap();
        (report, forwarded.join().unwrap().unwrap().unwrap())
    })
}

#[test]
fn sub_workers_have_the_trainer_version_numbers() {
    let (mut sender, mut middle, leaves) = family(2);
    for step in 2..6 {
        let (report, forwarded) = send(&mut sender, &number(step as f32), &mut middle);
        assert!(report.all_applied(), "{report}");
        assert_eq!(forwarded.versions[0].1, Version(step));
        assert_eq!(forwarded.report.version().unwrap(), Version(step));
        assert_eq!(forwarded.report.workers.len(), 2);
        for leaf in &leaves {
            assert_eq!(value(leaf), (Version(step), step as f32));
        }
    }
    assert!(middle.forward(Some(Duration::ZERO)).unwrap().is_none());
}

#[test]
fn late_sub_worker_gets_the_trainers_numbers() {
    let one = number(1.0);
    let setup = SenderSetup::new("policy", &one)
        .unwrap()
        .send_timeout(Some(soon()));
    let mut sender = setup.connect(&one, Expect::Count(0), Some(soon())).unwrap();
    let version = SendOptions::new().version(Version(40));
    sender.send_with(&number(4.0), &version).unwrap();
    let middle = Cascade::join(ReceiverSetup::new(sender.init_info(), 0), Some(soon())).unwrap();
    let leaf = keeps(&middle.init_info(), 0);
    let mut middle = middle.connect(Expect::Count(1), Some(soon())).unwrap();
    let leaf = leaf.join().unwrap();
    assert_eq!(value(&leaf), (Version(40), 4.0));
    let (report, _) = send(&mut sender, &number(5.0), &mut middle);
    assert!(report.all_applied(), "{report}");
    assert_eq!(value(&leaf), (Version(41), 5.0));
}

#[test]
fn trainer_is_notified_after_sub_workers_applied() {
    let (mut sender, middle, leaves) = family(1);
    let info = {
        let mut middle = middle;
        let info = middle.sender().init_info();
        (info, middle.in_background().unwrap())
    };
    let (info, middle) = info;
    let slow = ReceiverSetup::new(info, 5).connect(Some(soon())).unwrap();
    let slow = slow
        .in_background(number(0.0), SafePoints::Declared)
        .unwrap();
    let pending = sender
        .send_async(&number(2.0), &SendOptions::new())
        .unwrap();
    let staged = slow.wait(Some(soon()), |status| !status.staged.is_empty());
    assert!(staged.unwrap());
    waits_for(&leaves[0], 2);
    assert!(!pending.wait(Some(BRIEF)).unwrap().all_applied());
    assert!(slow.safe_point().unwrap().is_some());
    let report = pending.wait(Some(soon())).unwrap();
    assert!(report.all_applied(), "{report}");
    let last = middle.wait(Some(soon()), |last| last.versions[0].1 == Version(2));
    assert_eq!(last.unwrap().unwrap().report.workers.len(), 2);
}

#[test]
fn report_names_the_sub_worker_without_the_version() {
    let (mut sender, mut middle, leaves) = family(1);
    let info = middle.sender().init_info();
    // It insists on nothing, and cannot load what comes.
    let stubborn = ReceiverSetup::new(info, 5).connect(Some(soon())).unwrap();
    let stubborn = stubborn
        .in_background(Stubborn(number(0.0)), SafePoints::Implied)
        .unwrap();
    let (report, forwarded) = send(&mut sender, &number(13.0), &mut middle);
    let Outcome::Refused { reason } = &report.workers[0].outcome else {
        panic!("{report}");
    };
    for words in ["1 of its 2 workers", "worker 5", "bad luck"] {
        assert!(reason.contains(words), "{words:?}: {reason}");
    }
    assert!(!forwarded.report.all_applied());
    assert_eq!(value(&leaves[0]), (Version(2), 13.0));
    // The next one is like any other.
    let (report, _) = send(&mut sender, &number(14.0), &mut middle);
    assert!(report.all_applied(), "{report}");
    assert_eq!(stubborn.read().unwrap().version().unwrap(), Version(3));
}

/// A model that does not take 13.
struct Stubborn(Tensors);

impl weightsync_engine::WeightLoader for Stubborn {
    fn layout(&self) -> weightsync_engine::Result<weightsync_engine::Layout> {
        weightsync_engine::WeightLoader::layout(&self.0)
    }

    fn load(
        &mut self,
        tensors: &[weightsync_engine::TensorView<'_>],
    ) -> weightsync_engine::Result<()> {
        match tensors[0].elements::<f32>()?[0] == 13.0 {
            true => Err(Error::Load {
                name: "value".into(),
                source: "bad luck".into(),
            }),
            false => self.0.load(tensors),
        }
    }
}

#[test]
fn models_keep_their_own_numbers_and_flip_together() {
    let one = number(1.0);
    let setup = SenderSetup::new("actor", &one).unwrap();
    let setup = setup
        .add_model("critic", &one)
        .unwrap()
        .send_timeout(Some(soon()));
    let middle = joins(setup.init_info());
    let mut sender = thread::scope(|scope| {
        let sender = scope.spawn(|| {
            let set = Set::new().with("actor", &one).with("critic", &one);
            setup.connect(&set, Expect::Count(1), Some(soon())).unwrap()
        });
        let middle = middle.join().unwrap();
        let leaf = keeps(&middle.init_info(), 0);
        let middle = middle.connect(Expect::Count(1), Some(soon())).unwrap();
        (sender.join().unwrap(), middle, leaf.join().unwrap())
    });
    let (sender, middle, leaf) = (&mut sender.0, &mut sender.1, &sender.2);
    let passed = |middle: &mut Cascade| middle.forward(Some(soon())).unwrap().unwrap();
    let sent = SendOptions::new().wait(WaitFor::Sent);
    let has = |leaf: &SnapshotsInBackground| -> Vec<u64> {
        let set = leaf.newest().unwrap().unwrap();
        set.versions()
            .iter()
            .map(|(_, version)| version.0)
            .collect()
    };

    let options = sent.clone().model("critic").version(Version(30));
    sender.send_with(&number(2.0), &options).unwrap();
    let forwarded = passed(middle);
    // Only what is new is passed on.
    assert_eq!(forwarded.report.versions.len(), 1);
    assert_eq!(has(leaf), [1, 30]);

    let two = number(3.0);
    let set = Set::new().with("actor", &two).with("critic", &two);
    sender.send_with(&set, &sent).unwrap();
    let forwarded = passed(middle);
    assert_eq!(forwarded.report.versions.len(), 2);
    assert_eq!(has(leaf), [2, 31]);
}

#[test]
fn restarted_trainer_continues_the_numbers() {
    let dir = tempfile::tempdir().unwrap();
    let setup = || {
        let setup = SenderSetup::new("policy", &number(1.0)).unwrap();
        setup
            .run_dir(dir.path().join("run"))
            .unwrap()
            .send_timeout(Some(soon()))
    };
    let first = joins(setup().init_info());
    let trainer = thread::spawn({
        let setup = setup();
        move || {
            setup
                .connect(&number(1.0), Expect::Count(1), Some(soon()))
                .unwrap()
        }
    });
    let middle = first.join().unwrap();
    let leaf = keeps(&middle.init_info(), 0);
    let middle = middle.connect(Expect::Count(1), Some(soon())).unwrap();
    let (mut sender, leaf) = (trainer.join().unwrap(), leaf.join().unwrap());
    let middle = middle.in_background().unwrap();
    for step in 2..5 {
        let report = sender.send(&number(step as f32)).unwrap();
        assert!(report.all_applied(), "{report}");
    }
    sender.shutdown();
    let mut next = setup()
        .connect(&number(8.0), Expect::Count(1), Some(soon()))
        .unwrap();
    assert_eq!(value(&leaf), (Version(5), 8.0));
    let report = next.send(&number(9.0)).unwrap();
    assert!(report.all_applied(), "{report}");
    assert_eq!(value(&leaf), (Version(6), 9.0));
    let last = middle.wait(Some(soon()), |last| {
        last.report.version().unwrap() == Version(6)
    });
    assert_eq!(last.unwrap().unwrap().versions[0].1, Version(2));
}

#[test]
fn cascade_without_workers_ends_and_says_why() {
    let setup = SenderSetup::new("policy", &number(1.0)).unwrap();
    let middle = joins(setup.init_info());
    let trainer = thread::spawn(move || {
        setup
            .connect(&number(1.0), Expect::Count(1), Some(soon()))
            .map(drop)
    });
    let error = middle
        .join()
        .unwrap()
        .connect(Expect::Count(1), Some(BRIEF));
    assert!(
        matches!(error, Err(Error::MissingWorkers { .. })),
        "{error:?}"
    );
    let error = trainer.join().unwrap().unwrap_err();
    let Error::Refused { refusals, .. } = &error else {
        panic!("{error}");
    };
    assert!(refusals[0].1.contains("its own workers"), "{error}");
}

/// A model with one tensor under two names.
struct Tied(Tensors);

impl WeightExtractor for Tied {
    fn layout(&self) -> weightsync_engine::Result<Layout> {
        WeightExtractor::layout(&self.0)
    }

    fn extract(
        &self,
        take: &mut dyn FnMut(&[Extracted<'_>]) -> weightsync_engine::Result<()>,
    ) -> weightsync_engine::Result<()> {
        self.0.extract(take)
    }

    fn ties(&self) -> weightsync_engine::Result<Vec<(String, String)>> {
        Ok(vec![("again".into(), "value".into())])
    }
}

#[test]
fn ties_survive_a_cascade() {
    let tied = |value| {
        let mut tensors = number(value);
        tensors.insert("again", [3], [value; 3]).unwrap();
        Tied(tensors)
    };
    let setup = SenderSetup::new("policy", &tied(1.0)).unwrap();
    let mut sender = setup
        .connect(&tied(1.0), Expect::Count(0), Some(soon()))
        .unwrap();
    let middle = Cascade::join(ReceiverSetup::new(sender.init_info(), 0), Some(soon())).unwrap();
    let middle = middle.configure(|setup| setup.cast(Dtype::F64)).unwrap();
    let mut middle = middle.connect(Expect::Count(0), Some(soon())).unwrap();
    let sent = SendOptions::new().wait(WaitFor::Sent);
    sender.send_with(&tied(2.0), &sent).unwrap();
    let forwarded = middle.forward(Some(soon())).unwrap().unwrap();
    assert_eq!(forwarded.report.version().unwrap(), Version(2));
    let own = middle.sender().snapshot().unwrap();
    for name in ["value", "again"] {
        assert_eq!(own.slice::<f64>(name).unwrap(), [2.0; 3], "{name}");
    }
    assert_eq!(own.layout().len(), 1);
}

#[test]
fn the_sub_workers_may_have_another_scheme_and_dtype() {
    let setup = SenderSetup::new("policy", &number(1.5)).unwrap();
    let mut sender = setup
        .connect(&number(1.5), Expect::Count(0), Some(soon()))
        .unwrap();
    let middle = Cascade::join(ReceiverSetup::new(sender.init_info(), 0), Some(soon())).unwrap();
    let middle = middle.configure(|setup| {
        setup
            .scheme("multi-process:every=4".parse::<weightsync_engine::AnyScheme>()?)?
            .cast(Dtype::BF16)
    });
    let middle = middle.unwrap();
    let leaf: JoinHandle<Receiver> = thread::spawn({
        let info = middle.init_info();
        move || ReceiverSetup::new(info, 0).connect(Some(soon())).unwrap()
    });
    let middle = middle.connect(Expect::Count(1), Some(soon())).unwrap();
    let mut leaf = leaf.join().unwrap();
    let middle: CascadeInBackground = middle.in_background().unwrap();
    for step in 2..5_u64 {
        let sent = SendOptions::new().wait(WaitFor::Sent);
        sender.send_with(&number(step as f32), &sent).unwrap();
        loop {
            let snapshot = leaf.recv_timeout(soon()).unwrap().expect("a version");
            assert_eq!(snapshot.tensor("value").unwrap().dtype(), Dtype::BF16);
            if snapshot.version() == Version(step) {
                break;
            }
        }
    }
    sender.shutdown();
    // Nothing to wait for: the trainer has gone, and will not come back.
    assert!(
        middle
            .wait(None, |last| last.versions.is_empty())
            .unwrap()
            .is_none()
    );
    assert_eq!(middle.status().unwrap().state, BackgroundState::Closed);
    // The sub-workers are served on.
    let mut middle = middle.stop().unwrap();
    assert_eq!(middle.sender().workers().len(), 1);
    assert!(matches!(middle.forward(None), Err(Error::SenderClosed)));
}
