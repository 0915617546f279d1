//! When the first weights come, and what comes after.

use std::time::Instant;

use weightsync_engine::{Error, Expect, Outcome, ReceiverSetup, SendOptions, Tensors, WaitFor};
use weightsync_serve::Rpc;

use super::{BRIEF, at_connect, receive, sender, setup, soon, weights, worker};

#[test]
fn the_first_weights_come_with_the_first_send() {
    let initial = weights(64, 1.0);
    let setup = setup(&initial, Rpc::default());
    let info = setup.init_info();
    std::thread::scope(|scope| {
        let joins = [0, 1].map(|number| {
            let info = info.clone();
            scope.spawn(move || worker(info, number).expect("it joins"))
        });
        let expect = Expect::workers([0, 1]);
        let mut sender = setup
            .connect(&initial, expect, Some(soon()))
            .expect("both join");
        let mut workers = joins.map(|join| join.join().expect("no panic"));
        // Both ends are connected, and nothing has moved.
        assert!(sender.version().unwrap().is_none());
        assert!(sender.workers().iter().all(|worker| !worker.is_ready()));
        assert_eq!(sender.workers().len(), 2);
        for worker in &mut workers {
            assert!(worker.version().unwrap().is_none());
            assert!(worker.recv_timeout(BRIEF).expect("no failure").is_none());
            assert!(worker.latest().expect("no failure").is_none());
            assert_eq!(worker.models()[0].layout, *sender.layout().unwrap());
        }
        // There is nothing to keep the rest of, nor to look at.
        let partial = SendOptions::new().partial(true);
        let error = sender.send_with(&initial, &partial).unwrap_err();
        assert!(matches!(error, Error::NothingToKeep { .. }), "{error}");
        let error = sender.snapshot().unwrap_err();
        assert!(matches!(error, Error::NothingToKeep { .. }), "{error}");

        let waits = workers.map(|mut worker| {
            scope.spawn(move || {
                let value = receive(&mut worker);
                (value, worker)
            })
        });
        let report = sender.send(&weights(64, 2.0)).expect("it is sent");
        assert!(
            report.all_applied() && report.version().unwrap().0 == 1,
            "{report}"
        );
        let workers = waits.map(|wait| wait.join().expect("no panic"));
        assert!(workers.iter().all(|(value, _)| *value == 2.0));
        // A late worker has the version without a send.
        let mut late = worker(info, 2).expect("it joins");
        assert_eq!(receive(&mut late), 2.0);
        let status = sender.workers();
        assert!(status.iter().all(|worker| worker.versions[0].0 == 1));
    });
}

#[test]
fn worker_model_is_unchanged_until_the_first_send() {
    let initial = weights(8, 1.0);
    let mut sender = sender(&initial, Rpc::default());
    let mut own = weights(8, 7.0);
    let join = ReceiverSetup::new(sender.init_info(), 0);
    let mut receiver = join.connect_into(&mut own, Some(soon())).expect("it joins");
    assert!(receiver.is_whole(), "it serves by what it has");
    let none = receiver.loading(&mut own).recv_timeout(BRIEF);
    assert!(none.expect("no failure").is_none());
    let value = |own: &Tensors| own.slice::<f32>("layer.weight").expect("floats")[0];
    assert_eq!(value(&own), 7.0);
    std::thread::scope(|scope| {
        let loads = scope.spawn(|| receiver.loading(&mut own).recv_timeout(soon()));
        let report = sender.send(&weights(8, 3.0)).expect("it is sent");
        assert!(report.all_applied(), "{report}");
        loads.join().expect("no panic").expect("it loads");
    });
    assert_eq!(value(&own), 3.0);
}

#[test]
fn connect_reports_a_mismatch_before_any_send() {
    let initial = weights(8, 1.0);
    let expect = Expect::Count(0);
    let error = setup(&initial, Rpc::default())
        .connect(&weights(9, 1.0), expect.clone(), Some(soon()))
        .unwrap_err();
    assert!(matches!(error, Error::WrongWeights { .. }), "{error}");

    let sender = sender(&initial, Rpc::default());
    let other = ReceiverSetup::new(sender.init_info(), 0);
    let other = other.model(&weights(9, 1.0)).expect("it can be asked");
    let error = other.connect(Some(soon())).unwrap_err();
    assert!(matches!(error, Error::WrongModel { .. }), "{error}");
}

#[test]
fn silent_worker_is_late_and_delays_no_other() {
    let initial = weights(64, 1.0);
    let mut sender = sender(&initial, at_connect());
    let busy = worker(sender.init_info(), 0).expect("it joins");
    let mut eager = worker(sender.init_info(), 1).expect("it joins");
    assert_eq!(receive(&mut eager), 1.0);
    std::thread::scope(|scope| {
        let wait = scope.spawn(|| receive(&mut eager));
        let begun = Instant::now();
        let staged = SendOptions::new().wait(WaitFor::Staged);
        let report = sender.send_with(&weights(64, 2.0), &staged).expect("sent");
        assert!(report.all_reached(), "{report}");
        assert_eq!(wait.join().expect("no panic"), 2.0);
        let brief = SendOptions::new().timeout(Some(BRIEF));
        let report = sender.send_with(&weights(64, 3.0), &brief).expect("sent");
        assert_eq!(
            report.worker(0).map(|line| &line.outcome),
            Some(&Outcome::Late)
        );
        assert!(begun.elapsed() < soon());
    });
    drop(busy);
}

#[test]
fn set_arrives_as_one_and_only_changes_travel() {
    let (actor, critic) = (weights(64, 1.0), weights(32, 1.0));
    let setup = weightsync_engine::SenderSetup::new("actor", &actor).expect("a model");
    let setup = setup.add_model("critic", &critic).expect("another");
    let setup = setup.scheme(Rpc::default()).expect("a place");
    let both = weightsync_engine::Set::new()
        .with("actor", &actor)
        .with("critic", &critic);
    let mut sender = setup
        .connect(&both, Expect::Count(0), Some(soon()))
        .expect("a sender");
    let join = ReceiverSetup::new(sender.init_info(), 0);
    let mut receiver = join.connect(Some(soon())).expect("it joins");
    let sent = SendOptions::new().wait(WaitFor::Staged);
    // The first send may be of one of them alone.
    let alone = sent.clone().model("critic");
    sender.send_with(&critic, &alone).expect("it is sent");
    let set = receiver.set().recv_timeout(soon()).expect("it comes");
    let set = set.expect("it comes in time");
    assert_eq!(set.members().len(), 1);
    sender.send_with(&both, &sent).expect("it is sent");
    let set = receiver.set().recv_timeout(soon()).expect("it comes");
    let versions: Vec<_> = set
        .expect("it comes in time")
        .versions()
        .into_iter()
        .map(|(id, version)| (id.to_string(), version.0))
        .collect();
    assert_eq!(versions, [("actor".into(), 1), ("critic".into(), 2)]);
    assert_eq!(sender.workers()[0].versions.len(), 2);
}
