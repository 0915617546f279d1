//! The rendez-vous: who is expected, who is missing, who comes later.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use weightsync_engine::transport::{
    Attendance, Deadline, Endpoint, Joining, Opening, ReceiverTransport, Scheme, SenderTransport,
    Staging,
};
use weightsync_engine::{
    Capabilities, Error, Expect, ModelId, NoSync, Outcome, ReceiverSetup, Remedy, SendOptions,
    SenderSetup, Set, SetLoader, Tensors, Version, WaitFor, WorkerId, WorkerStatus,
};

use crate::{
    BRIEF, bytes_of, connect, join, pair, send, send_to, soon, until_all_have_left, weights,
};

#[test]
fn every_worker_gets_every_version() {
    let mut source = weights();
    let (mut sender, receivers) = connect(SenderSetup::new("policy", &source).unwrap(), &source, 4);
    let workers: Vec<_> = sender
        .workers()
        .iter()
        .map(|worker| (worker.worker.0, worker.versions[0]))
        .collect();
    assert_eq!(workers, [0, 1, 2, 3].map(|worker| (worker, Version(1))));
    let working: Vec<_> = receivers
        .into_iter()
        .map(|mut receiver| {
            thread::spawn(move || {
                let mut steps = Vec::new();
                while let Ok(Some(snapshot)) = receiver.recv_timeout(soon()) {
                    steps.push((
                        snapshot.version(),
                        snapshot.slice::<i64>("step").unwrap()[0],
                    ));
                    assert_eq!(receiver.version().unwrap(), snapshot.version());
                }
                steps
            })
        })
        .collect();
    for step in 0..50 {
        source.slice_mut::<i64>("step").unwrap()[0] = step;
        let report = sender.send(&source).unwrap();
        assert!(
            report.all_applied() && report.workers.len() == 4,
            "{report}"
        );
        assert_eq!(report.bytes, (33 * 7 + 7) * 4 + 8);
    }
    drop(sender);
    for worker in working {
        let expected: Vec<_> = (0..50_i64)
            .map(|step| (Version(step as u64 + 2), step))
            .collect();
        assert_eq!(worker.join().unwrap(), expected);
    }
}

#[test]
fn missing_workers_are_named() {
    let setup = SenderSetup::new("policy", &weights()).unwrap();
    let info = setup.init_info();
    let others = thread::spawn(move || {
        (
            join(ReceiverSetup::new(info.clone(), 5)),
            join(ReceiverSetup::new(info, 6)),
        )
    });
    let expect = Expect::workers([5, 2, 9]);
    let error = setup
        .connect(&weights(), expect, Some(Duration::from_millis(500)))
        .unwrap_err();
    assert_eq!(error.remedy(), Remedy::Retry);
    let words = error.to_string();
    let Error::MissingWorkers {
        model,
        expected,
        joined,
        missing,
        gone,
        waited,
    } = error
    else {
        panic!("{words}")
    };
    assert_eq!((model.as_str(), expected), ("policy", 3));
    assert_eq!(
        (joined, missing),
        (
            vec![WorkerId(5), WorkerId(6)],
            vec![WorkerId(2), WorkerId(9)]
        )
    );
    assert!(gone.is_empty(), "{gone:?}");
    assert!(waited >= Duration::from_millis(500));
    assert!(
        words.starts_with("only 1 of 3 workers joined policy within"),
        "{words}"
    );
    assert!(words.contains("(missing: worker 2, worker 9)"), "{words}");
    let (a, b) = others.join().unwrap();
    assert!(a.is_ok() && b.is_ok());
}

#[test]
fn a_count_that_is_not_reached_ends_by_the_deadline() {
    let setup = SenderSetup::new("policy", &weights()).unwrap();
    let since = Instant::now();
    let error = setup
        .clone()
        .connect(&weights(), Expect::Count(2), Some(BRIEF))
        .unwrap_err();
    assert!(since.elapsed() >= BRIEF);
    assert!(
        error
            .to_string()
            .starts_with("only 0 of 2 workers joined policy"),
        "{error}"
    );
    assert!(matches!(error, Error::MissingWorkers { missing, .. } if missing.is_empty()));
    // What to do about it is to try again, with the same setup.
    let (sender, _receivers) = connect(setup, &weights(), 2);
    assert_eq!(sender.workers().len(), 2);
}

#[test]
fn nobody_answers_where_no_sender_is() {
    let setup = SenderSetup::new("policy", &weights()).unwrap();
    let since = Instant::now();
    let error = ReceiverSetup::new(setup.init_info(), 0)
        .connect(Some(BRIEF))
        .unwrap_err();
    assert!(since.elapsed() >= BRIEF);
    assert!(matches!(&error, Error::NoSender { .. }), "{error}");
    assert_eq!(error.remedy(), Remedy::Retry);
}

#[test]
fn a_worker_may_be_there_before_its_sender() {
    let setup = SenderSetup::new("policy", &weights()).unwrap();
    let info = setup.init_info();
    let (here, there) = std::sync::mpsc::channel();
    let worker = thread::spawn(move || {
        here.send(()).unwrap();
        join(ReceiverSetup::new(info, 0))
    });
    there.recv().unwrap();
    let sender = setup
        .connect(&weights(), Expect::workers([0]), Some(soon()))
        .unwrap();
    assert_eq!(worker.join().unwrap().unwrap().run(), sender.run());
}

#[test]
fn connect_delivers_weights_without_a_receive() {
    let source = weights();
    let setup = SenderSetup::new("policy", &source).unwrap();
    let (reads, loads) = (setup.init_info(), setup.init_info());
    let reads = thread::spawn(move || ReceiverSetup::new(reads, 0).connect(Some(soon())));
    let mut own = Tensors::zeros(setup.layout().unwrap());
    let loads = thread::spawn(move || {
        let receiver = ReceiverSetup::new(loads, 1).connect_into(&mut own, Some(soon()));
        (receiver, own)
    });
    let sender = setup
        .connect(&source, Expect::Count(2), Some(soon()))
        .unwrap();
    let mut applied = sender
        .workers()
        .into_iter()
        .map(|worker| worker.versions[0]);
    assert!(applied.all(|version| version == Version::FIRST));
    assert_eq!(
        reads.join().unwrap().unwrap().version().unwrap(),
        Version::FIRST
    );
    let (receiver, own) = loads.join().unwrap();
    assert_eq!(receiver.unwrap().version().unwrap(), Version::FIRST);
    assert_eq!(own.slice::<i64>("step").unwrap(), [41]);
}

#[test]
fn first_receive_gives_connect_weights_or_newer() {
    let mut source = weights();
    let setup = SenderSetup::new("policy", &source).unwrap();
    let mut sender = setup
        .connect(&source, Expect::Count(0), Some(soon()))
        .unwrap();
    let receiver = |worker| {
        ReceiverSetup::new(sender.init_info(), worker)
            .connect(Some(soon()))
            .unwrap()
    };
    let (mut prompt, mut slow) = (receiver(0), receiver(1));
    let first = prompt.recv_timeout(BRIEF).unwrap().unwrap();
    assert_eq!(first.version(), Version::FIRST);
    assert!(prompt.recv_timeout(BRIEF).unwrap().is_none());
    source.slice_mut::<i64>("step").unwrap()[0] = 42;
    sender
        .send_with(
            &source,
            &SendOptions::new().wait(WaitFor::Sent).timeout(Some(soon())),
        )
        .unwrap();
    let second = slow.recv().unwrap();
    assert_eq!(
        (second.version(), slow.version().unwrap()),
        (Version(2), Version(2))
    );
    assert_eq!(second.slice::<i64>("step").unwrap(), [42]);
    // Without a sender there is still what it brought.
    let mut last = ReceiverSetup::new(sender.init_info(), 2)
        .connect(Some(soon()))
        .unwrap();
    drop(sender);
    assert_eq!(last.recv().unwrap().version(), Version(2));
    assert!(last.recv().unwrap_err().is_sender_closed());
}

#[test]
fn a_misfit_that_was_not_expected_costs_nobody_else() {
    let source = weights();
    let setup = SenderSetup::new("policy", &source).unwrap();
    let (fits, misfits) = (setup.init_info(), setup.init_info());
    let mut other = Tensors::new();
    other.insert("another.model", [1], [0.0_f32]).unwrap();
    let misfit = thread::spawn(move || {
        let setup = ReceiverSetup::new(misfits, 9).model(&other).unwrap();
        setup
            .connect(Some(soon()))
            .map(drop)
            .unwrap_err()
            .to_string()
    });
    let fitting = thread::spawn(move || {
        let words = misfit.join();
        (join(ReceiverSetup::new(fits, 0)), words)
    });
    let mut sender = setup
        .connect(&source, Expect::workers([0]), Some(soon()))
        .unwrap();
    let (fitting, words) = fitting.join().unwrap();
    assert!(words.unwrap().contains("another.model"));
    let mut fitting = fitting.unwrap();
    // The trainer is told of it once, in the next report.
    let (report, _) = send(&mut sender, &source, || fitting.recv_timeout(soon()));
    let report = report.unwrap();
    let refused: Vec<_> = report.failed().collect();
    assert_eq!(
        (refused.len(), refused[0].worker),
        (1, WorkerId(9)),
        "{report}"
    );
    assert!(report.to_string().contains("another.model"), "{report}");
    send_to(&mut sender, &source, &mut fitting);
}

#[test]
fn a_worker_that_left_is_no_failure() {
    let source = weights();
    let setup = SenderSetup::new("policy", &source).unwrap();
    let (mut sender, mut workers) = connect(setup, &source, 2);
    drop(workers.pop());
    let mut told = 0;
    for _ in 0..4 {
        let (report, _) = send(&mut sender, &source, || workers[0].recv_timeout(soon()));
        let report = report.unwrap();
        assert!(report.all_applied(), "{report}");
        told += report
            .workers
            .iter()
            .filter(|line| line.outcome == Outcome::Left)
            .count();
    }
    assert!(told <= 1, "its leaving was told {told} times");
}

#[test]
fn a_late_joiner_gets_the_newest_version() {
    let mut source = weights();
    let setup = SenderSetup::new("policy", &source).unwrap();
    let mut sender = setup
        .connect(&source, Expect::Count(0), Some(soon()))
        .unwrap();
    for step in 2..=4 {
        source.slice_mut::<i64>("step").unwrap()[0] = step;
        let report = sender.send(&source).unwrap();
        assert!(!report.all_applied() && report.workers.is_empty());
    }
    let mut late = ReceiverSetup::new(sender.init_info(), 8)
        .connect(Some(soon()))
        .unwrap();
    assert_eq!(
        late.version().unwrap(),
        Version(4),
        "connect brings the weights"
    );
    let snapshot = late.recv_timeout(soon()).unwrap().unwrap();
    assert_eq!(
        (snapshot.version(), snapshot.slice::<i64>("step").unwrap()),
        (Version(4), &[4][..])
    );
    assert_eq!(
        send_to(&mut sender, &source, &mut late).version(),
        Version(5)
    );
}

#[test]
fn versions_replaced_meanwhile_are_passed_over() {
    let mut source = weights();
    let (mut sender, mut receiver) = pair(&source);
    for step in 2..=9 {
        source.slice_mut::<i64>("step").unwrap()[0] = step;
        let report = sender
            .send_with(
                &source,
                &SendOptions::new().wait(WaitFor::Sent).timeout(Some(soon())),
            )
            .unwrap();
        assert!(report.workers.is_empty() && report.version().unwrap().0 == step as u64);
    }
    let snapshot = receiver.recv().unwrap();
    assert_eq!(
        (snapshot.version(), snapshot.slice::<i64>("step").unwrap()),
        (Version(9), &[9][..])
    );
    assert!(receiver.try_recv().unwrap().is_none());
    assert_eq!(
        bytes_of(&receiver.latest().unwrap().unwrap()),
        bytes_of(&snapshot)
    );
}

#[test]
fn silent_worker_is_late_and_others_are_up_to_date() {
    let (mut sender, mut receivers) = connect(
        SenderSetup::new("policy", &weights()).unwrap(),
        &weights(),
        2,
    );
    let mut quick = receivers.pop().unwrap();
    let report = thread::scope(|scope| {
        let worker = scope.spawn(|| quick.recv_timeout(soon()).unwrap().unwrap().version());
        let report = sender.send_with(
            &weights(),
            &SendOptions::new()
                .wait(WaitFor::Applied)
                .timeout(Some(Duration::from_millis(300))),
        );
        assert_eq!(worker.join().unwrap(), Version(2));
        report.unwrap()
    });
    let lines: Vec<_> = report
        .workers
        .iter()
        .map(|line| (line.worker.0, &line.outcome, line.versions[0]))
        .collect();
    assert_eq!(
        lines,
        [
            (0, &Outcome::Late, Version(1)),
            (1, &Outcome::Applied, Version(2))
        ]
    );
}

#[test]
fn departing_worker_has_a_line_and_frees_its_number() {
    let (mut sender, receiver) = pair(&weights());
    drop(receiver);
    assert!(sender.workers().is_empty(), "it is not waited for any more");
    // The first report after its hang-up was noticed has the line.
    let until = Instant::now() + soon();
    let left = loop {
        let report = sender.send(&weights()).unwrap();
        assert!(Instant::now() < until, "{report}");
        if let Some(line) = report.workers.first() {
            break line.clone();
        }
    };
    assert_eq!((left.worker, left.outcome), (WorkerId(0), Outcome::Left));
    assert_eq!(left.versions[0], Version(1));
    assert!(
        sender.send(&weights()).unwrap().workers.is_empty(),
        "one line, once"
    );

    let mut again = join(ReceiverSetup::new(sender.init_info(), 0)).unwrap();
    let (report, snapshot) = send(&mut sender, &weights(), || again.recv_timeout(soon()));
    let report = report.unwrap();
    assert!(
        report.all_applied() && report.workers.len() == 1,
        "{report}"
    );
    assert_eq!(
        snapshot.unwrap().unwrap().version(),
        sender.version().unwrap()
    );
}

#[test]
fn a_number_that_is_taken_is_denied_in_words() {
    let (sender, receiver) = pair(&weights());
    let error = ReceiverSetup::new(sender.init_info(), 0)
        .connect(Some(soon()))
        .unwrap_err();
    assert!(matches!(error, Error::Denied { .. }), "{error}");
    assert!(
        error.to_string().contains("worker 0 is already connected"),
        "{error}"
    );
    drop(receiver);
}

#[test]
fn the_senders_shutdown_ends_a_wait_without_a_timeout() {
    let (sender, mut receiver) = pair(&weights());
    let waiting = thread::spawn(move || {
        let error = receiver.recv().unwrap_err();
        let after = receiver.latest().unwrap().unwrap();
        (error, receiver.recv().unwrap_err(), after.version())
    });
    drop(sender);
    let (error, again, version) = waiting.join().unwrap();
    for error in [error, again] {
        assert!(matches!(error, Error::SenderClosed), "{error}");
        assert_eq!(error.remedy(), Remedy::Reconnect);
    }
    assert_eq!(version, Version(1), "what was sent last stays readable");
}

#[test]
fn insisted_layout_applies_to_the_wanted_model() {
    let source = weights();
    let mut other = Tensors::new();
    other.insert("value", [1], [1.0_f32]).unwrap();
    let setup = SenderSetup::new("actor", &source).unwrap();
    let setup = setup.add_model("critic", &other).unwrap();
    let both = Set::new().with("actor", &source).with("critic", &other);
    let sender = setup
        .connect(&both, Expect::Count(0), Some(soon()))
        .unwrap();
    let joins = |worker| ReceiverSetup::new(sender.init_info(), worker);
    // Whichever is said first.
    let setups = [
        joins(0).model(&other).unwrap().models(["critic"]),
        joins(1).models(["critic"]).model(&other).unwrap(),
    ];
    for setup in setups {
        assert_eq!(
            setup.connect(Some(soon())).unwrap().models()[0].id.as_str(),
            "critic"
        );
    }
    let setups = [
        joins(2).model(&source).unwrap().models(["critic"]),
        joins(3).models(["critic"]).model(&source).unwrap(),
    ];
    for setup in setups {
        let error = setup.connect(Some(soon())).unwrap_err();
        assert!(matches!(error, Error::WrongModel { .. }), "{error}");
    }
    // Insisting on a model that does not come is no insisting.
    let (mut actor, mut critic) = (source.clone(), other.clone());
    let mut loader = SetLoader::new()
        .with("actor", &mut actor)
        .with("critic", &mut critic);
    let setup = joins(4).set(&mut loader).unwrap().models(["critic"]);
    let error = setup.connect(Some(soon())).unwrap_err();
    assert!(
        matches!(&error, Error::NoSuchModel { model, .. } if model == "actor"),
        "{error}"
    );
    until_all_have_left(&sender);
}

/// A transport whose only worker leaves as soon as it has been seen.
#[derive(Debug)]
struct Fleeting;

#[derive(Debug)]
struct Fled(Box<dyn SenderTransport>);

impl Scheme for Fleeting {
    fn name(&self) -> &str {
        "fleeting"
    }

    fn capabilities(&self) -> Capabilities {
        let mut can = Capabilities::NONE;
        can.weights = true;
        can
    }

    fn allocate_endpoint(
        &self,
        models: &[ModelId],
        _: Option<&Path>,
    ) -> weightsync_engine::Result<Endpoint> {
        NoSync.allocate_endpoint(models, None)
    }

    fn open(&self, opening: &Opening<'_>) -> weightsync_engine::Result<Box<dyn SenderTransport>> {
        Ok(Box::new(Fled(NoSync.open(opening)?)))
    }

    fn join(
        &self,
        at: &Endpoint,
        joining: &Joining,
        deadline: Deadline,
    ) -> weightsync_engine::Result<Box<dyn ReceiverTransport>> {
        NoSync.join(at, joining, deadline)
    }
}

impl SenderTransport for Fled {
    fn stage(
        &mut self,
        models: &[usize],
        deadline: Deadline,
    ) -> weightsync_engine::Result<Box<dyn Staging + '_>> {
        self.0.stage(models, deadline)
    }

    fn version(&self, model: usize) -> Version {
        self.0.version(model)
    }

    fn workers(&self) -> Vec<WorkerStatus> {
        Vec::new()
    }

    fn wait_workers(
        &mut self,
        _: Deadline,
        enough: &mut dyn FnMut(&Attendance) -> bool,
    ) -> weightsync_engine::Result<bool> {
        let mut there = WorkerStatus::new(WorkerId(3), 0, 1);
        there.versions[0] = Version(1);
        Ok(enough(&Attendance {
            workers: vec![there],
            ..Attendance::default()
        }))
    }

    fn take_rejected(&mut self) -> Vec<(WorkerId, String)> {
        Vec::new()
    }
}

#[test]
fn worker_that_leaves_after_joining_has_joined() {
    let setup = SenderSetup::new("policy", &weights()).unwrap();
    let setup = setup.scheme(Fleeting).unwrap();
    let connect = |worker| {
        let expect = Expect::workers([worker]);
        setup.clone().connect(&weights(), expect, Some(soon()))
    };
    let sender = connect(3).unwrap();
    assert!(sender.workers().is_empty());
    // What its transport does not do is refused by the scheme's own word.
    let error = sender.snapshot().unwrap_err().to_string();
    assert!(error.starts_with("fleeting cannot do this"), "{error}");
    let error = connect(4).unwrap_err();
    assert!(
        matches!(&error, Error::MissingWorkers { joined, .. } if *joined == [WorkerId(3)]),
        "{error}"
    );
}

#[test]
fn a_models_name_is_checked() {
    for name in ["", &"x".repeat(256)[..], "line\nbreak"] {
        assert!(
            matches!(SenderSetup::new(name, &weights()), Err(Error::Layout(_))),
            "{name:?}"
        );
    }
    // The longest, of letters of several bytes.
    let name = "ß".repeat(127);
    let (sender, receiver) = connect(SenderSetup::new(&name, &weights()).unwrap(), &weights(), 1);
    assert_eq!(receiver[0].models()[0].id.as_str(), name);
    assert_eq!(sender.init_info().models()[0].as_str(), name);
}

#[test]
fn ends_move_between_threads_and_snapshots_are_shared() {
    fn moves<T: Send>() {}
    fn is_shared<T: Send + Sync>() {}
    moves::<weightsync_engine::Sender>();
    moves::<weightsync_engine::Receiver>();
    is_shared::<weightsync_engine::Snapshot>();
    is_shared::<weightsync_engine::InitInfo>();
    is_shared::<weightsync_engine::Error>();
}
