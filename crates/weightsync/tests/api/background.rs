//! A background receiver: nobody asks for weights, and models change at safe
//! points only.

mod hold;

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use weightsync::transport::{
    Deadline, Endpoint, Interrupter, Joining, ModelSpec, Opening, ReceiverTransport, Scheme,
    SenderTransport,
};
use weightsync::{
    AnyScheme, Background, BackgroundState, BackgroundStatus, Capabilities, Cascade, Epoch, Error,
    Expect, Extracted, Layout, ModelId, Outcome, Pull, Receiver, ReceiverSetup, Remedy, Result,
    Run, SafePoints, Schemes, SendOptions, Sender, SenderSetup, Set, SetLoader, SetSnapshot,
    TensorView, Tensors, Version, WaitFor, WeightExtractor, WeightLoader,
};

use crate::{BRIEF, SOON, connect, pair, pair_by, weights};

/// A model that is one number, so that a look shows what it has.
fn number(value: f32) -> Tensors {
    let mut tensors = Tensors::new();
    tensors.insert("value", [3], [value; 3]).unwrap();
    tensors
}

fn value(tensors: &Tensors) -> f32 {
    let [one, two, three] = tensors.slice::<f32>("value").unwrap() else {
        panic!("not a number: {tensors:?}");
    };
    assert!(one == two && two == three, "torn: {tensors:?}");
    *one
}

fn wait_for<M: Send + Sync>(background: &Background<M>, version: u64) {
    let there = background.wait(Some(SOON), |status| status.version() == Version(version));
    assert!(there.unwrap(), "{background:?}");
}

/// Looks until the status is as wished, which is no safe point.
fn sees<M: Send + Sync>(
    background: &Background<M>,
    mut wished: impl FnMut(&BackgroundStatus) -> bool,
) {
    let begun = Instant::now();
    while !wished(&background.status().unwrap()) {
        assert!(begun.elapsed() < SOON, "{background:?}");
        thread::yield_now();
    }
}

fn until(wait: WaitFor) -> SendOptions {
    SendOptions::new().wait(wait).deadline(SOON)
}

/// A sender of one number with one background receiver.
fn numbers(when: SafePoints, setup: SenderSetup) -> (Sender, Background<Tensors>) {
    let (sender, receiver) = pair_by(setup, &number(1.0));
    let background = receiver.in_background(number(0.0), when).unwrap();
    assert_eq!(value(&background.read().unwrap()), 1.0);
    (sender, background)
}

fn setup() -> SenderSetup {
    SenderSetup::new("policy", &number(1.0)).unwrap()
}

/// A background receiver that is told a number serves it.
#[test]
fn a_model_is_loaded_whatever_was_loaded_before() {
    let begin = |scheme: &str, receive: fn(&mut Receiver)| {
        let scheme: AnyScheme = scheme.parse().unwrap();
        let setup = setup().scheme(scheme).unwrap();
        let info = setup.init_info();
        let worker = thread::spawn(|| {
            let mut model = number(0.0);
            let receiver = ReceiverSetup::new(info, 0).connect_into(&mut model, SOON);
            (receiver.unwrap(), model)
        });
        let mut sender = setup.connect(&number(1.0), Expect::Count(1), SOON).unwrap();
        let (mut receiver, model) = worker.join().unwrap();
        let sent = until(WaitFor::Sent);
        sender.send_with(&number(2.0), &sent).unwrap();
        receive(&mut receiver);
        (sender, receiver, model)
    };
    let look = |receiver: Receiver, model| {
        let background = receiver.in_background(model, SafePoints::Declared).unwrap();
        let model = background.read().unwrap();
        (value(&model), model.version().0)
    };
    for scheme in ["shared-mem", "multi-process:every=4"] {
        // Another model than the one that was connected into, without shapes.
        let (_sender, receiver, _) = begin(scheme, |_| {});
        assert_eq!(look(receiver, Tensors::new()), (1.0, 1), "{scheme}");
        // One that has less than the worker was handed since.
        let (_sender, receiver, model) = begin(scheme, |receiver| {
            receiver.receive(Some(SOON)).unwrap().expect("a version");
        });
        assert_eq!(look(receiver, model), (2.0, 2), "{scheme}");
    }
}

/// Where nothing is there to be loaded the model does not serve.
#[test]
fn a_model_that_nothing_was_loaded_into_does_not_serve() {
    let dir = tempfile::tempdir().unwrap();
    let setup = || setup().run_dir(dir.path().join("run")).unwrap();
    let (sender, mut receiver) = pair_by(setup(), &number(1.0));
    sender.shutdown();
    assert!(receiver.receive(None).unwrap_err().is_sender_closed());
    let (say, ready) = mpsc::channel();
    let unready = Unready {
        weights: number(9.0),
        ready: Mutex::new(ready),
    };
    thread::scope(|scope| {
        let next = scope.spawn(|| setup().connect(&unready, Expect::Count(0), SOON));
        // It is joined, and sends nothing yet.
        while receiver.latest().unwrap().is_some() {
            thread::yield_now();
        }
        let background = receiver.in_background(number(0.0), SafePoints::Implied);
        let background = background.unwrap();
        let error = background.read().map(drop).unwrap_err();
        assert!(matches!(error, Error::NotWhole { .. }), "{error}");
        say.send(()).unwrap();
        let next = next.join().unwrap().unwrap();
        let there = background.wait(Some(SOON), |status| status.run == next.run());
        assert!(there.unwrap(), "{background:?}");
        assert_eq!(value(&background.read().unwrap()), 9.0);
    });
}

#[test]
fn a_loop_that_never_receives_runs_what_was_sent() {
    let (mut sender, background) = numbers(SafePoints::Implied, setup());
    for step in 2..20 {
        let report = sender.send(&number(step as f32)).unwrap();
        assert!(report.all_applied(), "{report}");
        let model = background.read().unwrap();
        assert_eq!(
            (value(&model), model.version()),
            (step as f32, Version(step))
        );
        assert_eq!(model.run(), sender.run());
    }
}

#[test]
fn a_model_does_not_change_while_its_guard_is_held() {
    let (mut sender, background) = numbers(SafePoints::Implied, setup());
    let model = background.read().unwrap();
    // The next versions are taken, and wait.
    for step in 2..6 {
        let report = sender.send_with(&number(step as f32), &until(WaitFor::Staged));
        assert!(report.as_ref().unwrap().all_reached(), "{report:?}");
    }
    let pending = sender
        .send_async(&number(6.0), &until(WaitFor::Applied))
        .unwrap();
    let report = pending.wait(Some(BRIEF)).unwrap();
    assert!(!report.all_applied(), "{report}");
    assert_eq!(report.workers[0].versions, [Version(1)]);
    assert_eq!((value(&model), model.version()), (1.0, Version(1)));

    // A second guard of the same thread does not wait for the version.
    let again = background.read().unwrap();
    assert_eq!(value(&again), 1.0);
    drop((model, again));
    let report = pending.wait(Some(SOON)).unwrap();
    assert!(report.all_applied(), "{report}");
    let model = background.read().unwrap();
    assert_eq!((value(&model), model.version()), (6.0, Version(6)));
}

#[test]
fn a_declared_safe_point_is_the_only_moment_of_change() {
    // Room for what is loaded, what is staged, and what is written.
    let (mut sender, background) = numbers(SafePoints::Declared, setup().slots(3, 3));
    assert_eq!(background.safe_point().unwrap(), None);
    for step in 2..9 {
        let report = sender.send_with(&number(step as f32), &until(WaitFor::Staged));
        assert!(report.as_ref().unwrap().all_reached(), "{report:?}");
        assert_eq!(value(&background.read().unwrap()), 1.0);
    }
    sees(&background, |status| {
        let mut staged = status.staged.iter();
        staged.any(|(_, version)| *version == Version(8))
    });
    let policy = ModelId::new("policy").unwrap();
    assert_eq!(
        background.safe_point().unwrap(),
        Some(vec![(policy, Version(8))])
    );
    assert_eq!(value(&background.read().unwrap()), 8.0);
    assert_eq!(background.safe_point().unwrap(), None);
    assert_eq!(sender.workers()[0].version(), Version(8));
}

#[test]
fn a_send_waits_for_the_declared_safe_point() {
    let (mut sender, background) = numbers(SafePoints::Declared, setup());
    let pending = sender
        .send_async(&number(2.0), &until(WaitFor::Applied))
        .unwrap();
    let staged = background.wait(Some(SOON), |status| !status.staged.is_empty());
    assert!(staged.unwrap());
    assert!(!pending.is_settled().unwrap());
    assert!(background.safe_point().unwrap().is_some());
    let report = pending.wait(Some(SOON)).unwrap();
    assert!(report.all_applied(), "{report}");
}

/// A wait without a timeout ends, whatever is staged and whoever is gone.
#[test]
fn a_wait_is_a_safe_point() {
    for shut_down in [false, true] {
        let (mut sender, background) = numbers(SafePoints::Declared, setup());
        let reached = sender.send_with(&number(2.0), &until(WaitFor::Staged));
        assert!(reached.unwrap().all_reached());
        if shut_down {
            sender.shutdown();
            sees(&background, |status| {
                status.state == BackgroundState::Closed
            });
        }
        let there = background.wait(None, |status| status.version() == Version(2));
        assert!(there.unwrap(), "{background:?}");
        assert_eq!(value(&background.read().unwrap()), 2.0);
        if shut_down {
            let more = background.wait(None, |status| status.version() == Version(3));
            assert!(!more.unwrap(), "{background:?}");
        }
    }
}

/// Whoever waits is told when the last guard is dropped.
#[test]
fn a_wait_applies_what_is_staged_once_other_guards_are_dropped() {
    let (mut sender, background) = numbers(SafePoints::Declared, setup());
    let reached = sender.send_with(&number(2.0), &until(WaitFor::Staged));
    assert!(reached.unwrap().all_reached());
    let background = &background;
    let mut reading = Some(background.read().unwrap());
    let (looked, looks) = mpsc::channel();
    thread::scope(|scope| {
        let waiting = scope.spawn(move || {
            let brief = background.wait(Some(BRIEF), |status| status.version() == Version(2));
            looked.send(()).unwrap();
            let whole = background.wait(None, |status| {
                let _ = looked.send(());
                status.version() == Version(2)
            });
            (brief.unwrap(), whole.unwrap())
        });
        for _ in 0..2 {
            looks.recv_timeout(SOON).unwrap();
        }
        reading.take();
        assert_eq!(waiting.join().unwrap(), (false, true));
    });
    assert_eq!(value(&background.read().unwrap()), 2.0);
}

#[test]
fn it_is_no_safe_point_while_another_thread_reads() {
    let (mut sender, background) = numbers(SafePoints::Declared, setup());
    sender
        .send_with(&number(2.0), &until(WaitFor::Staged))
        .unwrap();
    background
        .wait(Some(SOON), |status| !status.staged.is_empty())
        .unwrap();
    let model = background.read().unwrap();
    let elsewhere = thread::scope(|scope| scope.spawn(|| background.safe_point()).join().unwrap());
    assert_eq!(elsewhere.unwrap(), None);
    assert_eq!(value(&model), 1.0);
    drop(model);
    assert!(background.safe_point().unwrap().is_some());
}

#[test]
fn a_thread_is_told_before_it_waits_for_itself() {
    let (mut sender, background) = numbers(SafePoints::Declared, setup());
    sender
        .send_with(&number(2.0), &until(WaitFor::Staged))
        .unwrap();
    let reading = background.read().unwrap();
    for error in [
        background.write().map(drop).unwrap_err(),
        background.safe_point().map(drop).unwrap_err(),
        background.wait(None, |_| false).map(drop).unwrap_err(),
    ] {
        assert!(matches!(error, Error::GuardHeld { .. }), "{error}");
    }
    drop(reading);
    let writing = background.write().unwrap();
    for error in [
        background.read().map(drop).unwrap_err(),
        background.write().map(drop).unwrap_err(),
        background.safe_point().map(drop).unwrap_err(),
    ] {
        assert!(matches!(error, Error::GuardHeld { .. }), "{error}");
    }
    drop(writing);
    background.read().unwrap();
}

#[test]
fn what_the_worker_writes_lasts_until_the_next_version() {
    let (mut sender, background) = numbers(SafePoints::Implied, setup());
    let mut model = background.write().unwrap();
    model.slice_mut::<f32>("value").unwrap().fill(7.0);
    drop(model);
    assert_eq!(value(&background.read().unwrap()), 7.0);
    assert!(sender.send(&number(2.0)).unwrap().all_applied());
    assert_eq!(value(&background.read().unwrap()), 2.0);
}

#[test]
fn a_panic_while_writing_leaves_a_model_that_does_not_serve_until_the_next_version() {
    let (mut sender, background) = numbers(SafePoints::Implied, setup());
    thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut model = background.write().unwrap();
            model.slice_mut::<f32>("value").unwrap()[0] = 7.0;
            panic!("in the middle of it");
        });
        assert!(writer.join().is_err());
    });
    let error = background.read().map(drop).unwrap_err();
    assert!(matches!(error, Error::NotWhole { .. }), "{error}");
    assert!(sender.send(&number(2.0)).unwrap().all_applied());
    assert_eq!(value(&background.read().unwrap()), 2.0);
}

/// Threads whose guards overlap all the time, and a version that has to get in.
#[test]
fn guards_that_overlap_keep_no_version_out() {
    let (mut sender, background) = numbers(SafePoints::Implied, setup());
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let mut last = 0.0;
                while !done.load(Ordering::Relaxed) {
                    let model = background.read().unwrap();
                    let now = value(&model);
                    assert!(now >= last, "{now} after {last}");
                    last = now;
                }
            });
        }
        for step in 2..30 {
            let report = sender.send(&number(step as f32));
            let fine = report.as_ref().is_ok_and(|report| report.all_applied());
            if !fine || step == 29 {
                done.store(true, Ordering::Relaxed);
            }
            assert!(fine, "{report:?}");
        }
    });
}

/// Two models, the second of which does what the test wants.
#[derive(Default)]
struct Agent {
    actor: Tensors,
    critic: Moody,
}

#[derive(Default)]
struct Moody {
    tensors: Tensors,
    /// Values it cannot load.
    fails_at: Vec<f32>,
    /// Values it panics at.
    panics_at: Vec<f32>,
}

impl WeightLoader for Moody {
    fn layout(&self) -> Result<Layout> {
        WeightLoader::layout(&self.tensors)
    }

    fn load(&mut self, tensors: &[TensorView<'_>]) -> Result<()> {
        let value = tensors[0].elements::<f32>()?[0];
        assert!(!self.panics_at.contains(&value), "not {value} again");
        if self.fails_at.contains(&value) {
            // Half done.
            self.tensors.slice_mut::<f32>("value")?[0] = value;
            return Err(Error::Load {
                name: "value".into(),
                source: format!("it does not like {value}").into(),
            });
        }
        self.tensors.load(tensors)
    }
}

fn agent(fails_at: &[f32], panics_at: &[f32]) -> Agent {
    Agent {
        actor: number(0.0),
        critic: Moody {
            tensors: number(0.0),
            fails_at: fails_at.to_vec(),
            panics_at: panics_at.to_vec(),
        },
    }
}

fn loaders(agent: &mut Agent) -> SetLoader<'_> {
    SetLoader::new()
        .with("actor", &mut agent.actor)
        .with("critic", &mut agent.critic)
}

/// A sender of two models that are 1 and 1, and a worker that has joined.
fn two() -> (Sender, Receiver) {
    let one = number(1.0);
    let setup = SenderSetup::new("actor", &one).unwrap();
    let setup = setup.and("critic", &one).unwrap().deadline(SOON);
    let info = setup.init_info();
    let worker = thread::spawn(|| ReceiverSetup::new(info, 0).connect(SOON).unwrap());
    let set = Set::new().with("actor", &one).with("critic", &one);
    let sender = setup.connect(&set, Expect::Count(1), SOON).unwrap();
    (sender, worker.join().unwrap())
}

fn both(background: &Background<Agent>) -> (f32, f32) {
    let agent = background.read().unwrap();
    (value(&agent.actor), value(&agent.critic.tensors))
}

fn send_both(sender: &mut Sender, actor: f32, critic: f32) -> Outcome {
    let (actor, critic) = (number(actor), number(critic));
    let set = Set::new().with("actor", &actor).with("critic", &critic);
    let report = sender.send(&set).unwrap();
    report.workers[0].outcome.clone()
}

fn reason(outcome: Outcome) -> String {
    match outcome {
        Outcome::Refused { reason } => reason,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_set_is_loaded_whole_or_not_at_all() {
    for (agent, words) in [
        (agent(&[3.0], &[]), "does not like 3"),
        (agent(&[], &[3.0]), "panicked: not 3 again"),
    ] {
        let (mut sender, receiver) = two();
        let background = receiver
            .set_in_background(agent, loaders, SafePoints::Implied)
            .unwrap();
        assert_eq!(send_both(&mut sender, 2.0, 2.0), Outcome::Applied);
        assert_eq!(both(&background), (2.0, 2.0));

        let reason = reason(send_both(&mut sender, 3.0, 3.0));
        assert!(
            reason.contains(words) && reason.contains("went back"),
            "{reason}"
        );
        assert_eq!(both(&background), (2.0, 2.0));
        let status = background.status().unwrap();
        assert!(
            status.failure.as_ref().unwrap().contains(words),
            "{status:?}"
        );
        assert_eq!(status.version(), Version(2));

        // The next one has the whole of it, also what was sent in between.
        let critic = number(4.0);
        let options = SendOptions::new().model("critic");
        let report = sender.send_with(&critic, &options).unwrap();
        assert!(report.all_applied(), "{report}");
        assert_eq!(both(&background), (3.0, 4.0));
        assert_eq!(background.status().unwrap().failure, None);
    }
}

#[test]
fn models_that_are_not_whole_do_not_serve() {
    let (mut sender, receiver) = two();
    // Neither the new version nor the way back.
    let shy = agent(&[2.0], &[]);
    let background = receiver
        .set_in_background(shy, loaders, SafePoints::Implied)
        .unwrap();
    background.write().unwrap().critic.fails_at.push(1.0);
    let reason = reason(send_both(&mut sender, 2.0, 2.0));
    assert!(reason.contains("half loaded"), "{reason}");
    let error = background.read().map(drop).unwrap_err();
    assert!(matches!(error, Error::NotWhole { .. }), "{error}");

    assert_eq!(send_both(&mut sender, 3.0, 3.0), Outcome::Applied);
    assert_eq!(both(&background), (3.0, 3.0));
}

#[test]
fn a_safe_point_whose_load_fails_says_so_on_both_sides() {
    let (mut sender, receiver) = two();
    let background = receiver
        .set_in_background(agent(&[2.0], &[]), loaders, SafePoints::Declared)
        .unwrap();
    let two = number(2.0);
    let set = Set::new().with("actor", &two).with("critic", &two);
    let pending = sender.send_async(&set, &until(WaitFor::Applied)).unwrap();
    background
        .wait(Some(SOON), |status| !status.staged.is_empty())
        .unwrap();
    let error = background.safe_point().unwrap_err();
    assert!(matches!(error, Error::Load { .. }), "{error}");
    assert_eq!(both(&background), (1.0, 1.0));
    let report = pending.wait(Some(SOON)).unwrap();
    assert!(
        reason(report.workers[0].outcome.clone()).contains("like 2"),
        "{report}"
    );
}

/// Without a background too: what was refused is not what the worker has.
#[test]
fn a_set_after_a_refused_one_is_loaded_whole() {
    let (mut sender, mut receiver) = two();
    let mut own = agent(&[2.0], &[]);
    let mut receive = |sends: &mut dyn FnMut()| {
        sends();
        let mut models = loaders(&mut own);
        let received = receiver.receive_set_into(&mut models, Some(SOON));
        (received, value(&own.actor), value(&own.critic.tensors))
    };
    let sent = until(WaitFor::Sent);
    let (received, ..) = receive(&mut || {});
    received.unwrap();
    let (received, actor, critic) = receive(&mut || {
        let two = number(2.0);
        let set = Set::new().with("actor", &two).with("critic", &two);
        sender.send_with(&set, &sent).unwrap();
    });
    assert!(received.is_err());
    assert_eq!((actor, critic), (1.0, 1.0));
    let (received, actor, critic) = receive(&mut || {
        let options = sent.clone().model("critic");
        sender.send_with(&number(3.0), &options).unwrap();
    });
    received.unwrap();
    assert_eq!((actor, critic), (2.0, 3.0));
}

#[test]
fn every_version_is_applied_in_order_where_the_scheme_says_so() {
    /// Remembers what it was given.
    #[derive(Default)]
    struct Diary(Vec<f32>);

    impl WeightLoader for Diary {
        fn layout(&self) -> Result<Layout> {
            WeightLoader::layout(&number(0.0))
        }

        fn load(&mut self, tensors: &[TensorView<'_>]) -> Result<()> {
            self.0.push(tensors[0].elements::<f32>()?[0]);
            Ok(())
        }
    }

    let scheme: AnyScheme = "multi-process:every=8".parse().unwrap();
    // Room for what is loaded, staged, queued and written.
    let setup = setup().scheme(scheme).unwrap().slots(2, 12);
    let (mut sender, receiver) = pair_by(setup, &number(1.0));
    let background = receiver
        .in_background(Diary::default(), SafePoints::Implied)
        .unwrap();
    let held = background.read().unwrap();
    for step in 2..8 {
        let sent = until(WaitFor::Sent);
        sender.send_with(&number(step as f32), &sent).unwrap();
    }
    assert_eq!(held.0, [1.0]);
    drop(held);
    wait_for(&background, 7);
    assert_eq!(
        background.read().unwrap().0,
        [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    );
}

#[test]
fn stopping_ends_the_wait_and_gives_everything_back() {
    let (mut sender, background) = numbers(SafePoints::Declared, setup());
    sender
        .send_with(&number(2.0), &until(WaitFor::Staged))
        .unwrap();
    background
        .wait(Some(SOON), |status| !status.staged.is_empty())
        .unwrap();
    let begun = Instant::now();
    let (mut receiver, model) = background.stop().unwrap();
    assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
    assert_eq!(value(&model), 1.0);
    // What was staged is what comes next, and then a wait is a wait.
    let mut own = model;
    let next = receiver
        .receive_into(&mut own, Some(Duration::ZERO))
        .unwrap();
    assert_eq!((next, value(&own)), (Some(Version(2)), 2.0));
    let worker = thread::spawn(move || receiver.receive(None).unwrap().map(|one| one.version()));
    let report = sender.send(&number(3.0)).unwrap();
    assert!(report.all_applied(), "{report}");
    assert_eq!(worker.join().unwrap(), Some(Version(3)));
}

#[test]
fn a_second_thread_ends_as_the_first_did() {
    let (mut sender, mut background) = numbers(SafePoints::Implied, setup());
    for step in 2..5 {
        // The interrupt that ended the thread before may have met its wait, or not.
        let (receiver, model) = background.stop().unwrap();
        background = receiver.in_background(model, SafePoints::Implied).unwrap();
        let report = sender.send(&number(step as f32)).unwrap();
        assert!(report.all_applied(), "{report}");
    }
    let begun = Instant::now();
    let (_, model) = background.stop().unwrap();
    assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
    assert_eq!(value(&model), 4.0);
}

#[test]
fn a_dropped_background_has_left() {
    let (mut sender, background) = numbers(SafePoints::Implied, setup());
    drop(background);
    let report = sender.send(&number(2.0)).unwrap();
    // The sender may have forgotten it already.
    let left = report
        .workers
        .iter()
        .all(|line| line.outcome == Outcome::Left);
    assert!(left, "{report}");
}

#[test]
fn the_end_of_the_sender_is_a_state_and_the_model_serves_on() {
    let (mut sender, background) = numbers(SafePoints::Implied, setup());
    let held = background.read().unwrap();
    sender
        .send_with(&number(2.0), &until(WaitFor::Staged))
        .unwrap();
    sender.shutdown();
    sees(&background, |status| {
        status.state == BackgroundState::Closed
    });
    assert_eq!(value(&held), 1.0);
    // What was sent before is applied all the same.
    drop(held);
    wait_for(&background, 2);
    assert_eq!(value(&background.read().unwrap()), 2.0);
    // Nothing comes any more, so this does not wait.
    assert!(
        !background
            .wait(None, |status| status.version() == Version(3))
            .unwrap()
    );
}

#[test]
fn a_restarted_sender_is_found_again() {
    let dir = tempfile::tempdir().unwrap();
    let setup = || setup().run_dir(dir.path().join("run")).unwrap();
    let (sender, background) = numbers(SafePoints::Implied, setup());
    let first = sender.run();
    sender.shutdown();
    let searching = background.wait(Some(SOON), |status| {
        status.state == BackgroundState::Searching
    });
    assert!(searching.unwrap(), "{background:?}");
    assert_eq!(value(&background.read().unwrap()), 1.0);

    let next = setup().connect(&number(9.0), Expect::Count(1), SOON);
    let mut next = next.unwrap();
    let model = background.read().unwrap();
    assert_eq!((value(&model), model.version()), (9.0, Version(1)));
    assert_eq!(model.run(), next.run());
    assert!(model.run().epoch > first.epoch);
    drop(model);
    let status = background.status().unwrap();
    assert_eq!(status.state, BackgroundState::Following);
    let report = next.send(&number(10.0)).unwrap();
    assert!(report.all_applied(), "{report}");
}

/// Weights that are not there before somebody says so: their sender can be
/// joined, and has nothing yet.
struct Unready {
    weights: Tensors,
    ready: Mutex<mpsc::Receiver<()>>,
}

impl WeightExtractor for Unready {
    fn layout(&self) -> Result<Layout> {
        WeightExtractor::layout(&self.weights)
    }

    fn extract(&self, take: &mut dyn FnMut(&[Extracted<'_>]) -> Result<()>) -> Result<()> {
        let ready = self.ready.lock().unwrap();
        ready.recv_timeout(SOON).expect("somebody says so");
        self.weights.extract(take)
    }
}

#[test]
fn what_an_earlier_sender_sent_is_not_reported_to_the_next() {
    let dir = tempfile::tempdir().unwrap();
    let setup = || setup().run_dir(dir.path().join("run")).unwrap();
    let (mut sender, background) = numbers(SafePoints::Declared, setup());
    let first = sender.run();
    for step in 2..6 {
        let sent = sender.send_with(&number(step as f32), &until(WaitFor::Staged));
        assert!(sent.unwrap().all_reached());
    }
    let staged = |version| {
        sees(&background, |status| {
            status.staged.iter().any(|(_, one)| *one == version)
        });
    };
    let joined = |state: BackgroundState| sees(&background, |status| status.state == state);
    staged(Version(5));
    sender.shutdown();
    joined(BackgroundState::Searching);

    let (say, ready) = mpsc::channel();
    let unready = Unready {
        weights: number(9.0),
        ready: Mutex::new(ready),
    };
    let next = thread::scope(|scope| {
        let next = scope.spawn(|| setup().connect(&unready, Expect::Count(0), SOON));
        joined(BackgroundState::Following);
        // It belongs to the run before, and so says the worker.
        assert!(background.safe_point().unwrap().is_some());
        let model = background.read().unwrap();
        assert_eq!(
            (value(&model), model.version(), model.run()),
            (5.0, Version(5), first)
        );
        say.send(()).unwrap();
        next.join().unwrap().unwrap()
    });
    assert_eq!(next.workers()[0].version(), Version::NONE);
    staged(Version(1));
    assert_eq!(next.workers()[0].version(), Version::NONE);
    assert!(background.safe_point().unwrap().is_some());
    let model = background.read().unwrap();
    assert_eq!(
        (value(&model), model.version(), model.run()),
        (9.0, Version(1), next.run())
    );
    assert_eq!(next.workers()[0].version(), Version(1));
}

/// One that answers and cannot be followed is told so once, and the worker says
/// why it still searches.
#[test]
fn why_a_sender_is_not_followed_is_in_the_status() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let setup = || setup().run_dir(&run).unwrap();
    for _ in 0..3 {
        let earlier = setup().connect(&number(0.0), Expect::Count(0), SOON);
        earlier.unwrap().shutdown();
    }
    let (first, background) = numbers(SafePoints::Implied, setup());
    assert_eq!(first.run().epoch, Epoch(4));
    first.shutdown();
    sees(&background, |status| {
        status.state == BackgroundState::Searching
    });
    // Older copies of the directory are put back.
    for (before, words) in [(1, "a newer trainer"), (3, "higher epoch")] {
        std::fs::write(run.join("epoch"), before.to_string()).unwrap();
        let other = setup().connect(&number(5.0), Expect::Count(0), SOON);
        let mut other = other.unwrap();
        let mut looks = 0;
        let there = background.wait(Some(SOON), |status| {
            let found = status.failure.as_ref();
            looks += u32::from(found.is_some_and(|failure| failure.contains(words)));
            looks > 12
        });
        assert!(there.unwrap(), "{background:?}");
        let state = background.status().unwrap().state;
        assert_eq!(state, BackgroundState::Searching);
        let report = other.send(&number(6.0)).unwrap();
        assert!(report.workers.len() <= 1, "{report}");
        other.shutdown();
        sees(&background, |status| status.failure.is_none());
    }
    let next = setup().connect(&number(9.0), Expect::Count(1), SOON);
    let next = next.unwrap();
    let there = background.wait(Some(SOON), |status| status.run == next.run());
    assert!(there.unwrap(), "{background:?}");
    let status = background.status().unwrap();
    assert_eq!(
        (status.state, status.failure, status.run),
        (BackgroundState::Following, None, next.run())
    );
}

/// A scheme whose worker's end breaks when it is told to.
#[derive(Debug)]
struct Fragile {
    inner: AnyScheme,
    breaks: Arc<AtomicBool>,
}

#[derive(Debug)]
struct FragileEnd {
    inner: Box<dyn ReceiverTransport>,
    breaks: Arc<AtomicBool>,
}

impl Scheme for Fragile {
    fn word(&self) -> &str {
        self.inner.word()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn place(&self, models: &[ModelId], run_dir: Option<&Path>) -> Result<Endpoint> {
        self.inner.scheme().place(models, run_dir)
    }

    fn open(&self, opening: &Opening<'_>) -> Result<Box<dyn SenderTransport>> {
        self.inner.scheme().open(opening)
    }

    fn join(
        &self,
        at: &Endpoint,
        joining: &Joining,
        deadline: Deadline,
    ) -> Result<Box<dyn ReceiverTransport>> {
        Ok(Box::new(FragileEnd {
            inner: self.inner.scheme().join(at, joining, deadline)?,
            breaks: self.breaks.clone(),
        }))
    }
}

impl ReceiverTransport for FragileEnd {
    fn models(&self) -> &[ModelSpec] {
        self.inner.models()
    }

    fn run(&self) -> Run {
        self.inner.run()
    }

    fn next(&mut self, deadline: Deadline) -> Result<Option<SetSnapshot>> {
        let set = self.inner.next(deadline)?;
        match set.is_some() && self.breaks.load(Ordering::SeqCst) {
            true => Err(Error::Transport {
                source: "it broke".into(),
                remedy: Remedy::GiveUp,
            }),
            false => Ok(set),
        }
    }

    fn latest(&mut self) -> Result<Option<SetSnapshot>> {
        self.inner.latest()
    }

    fn pull(&mut self, model: usize, pull: Pull, until: Deadline) -> Result<Option<SetSnapshot>> {
        self.inner.pull(model, pull, until)
    }

    fn interrupter(&self) -> Result<Interrupter> {
        self.inner.interrupter()
    }

    fn applied(&mut self, set: &SetSnapshot) -> Result<()> {
        self.inner.applied(set)
    }

    fn refuse(&mut self, set: Option<&SetSnapshot>, reason: &str) -> Result<()> {
        self.inner.refuse(set, reason)
    }
}

/// The sender sends nothing more to it, so to wait would be to wait for ever.
#[test]
fn a_receiver_that_has_failed_says_so_when_it_is_given_back() {
    let breaks = Arc::new(AtomicBool::new(false));
    let mut schemes = Schemes::default();
    schemes.insert("shared-mem", {
        let breaks = breaks.clone();
        move |_| {
            let (inner, breaks) = (AnyScheme::default(), breaks.clone());
            Ok(AnyScheme::new(Fragile { inner, breaks }))
        }
    });
    let mut sender = setup()
        .connect(&number(1.0), Expect::Count(0), SOON)
        .unwrap();
    let join = |worker| {
        let setup = ReceiverSetup::new(sender.init_info(), worker);
        setup.schemes(schemes.clone())
    };
    let receiver = join(0).connect(SOON).unwrap();
    let background = receiver.in_background(number(0.0), SafePoints::Implied);
    let background = background.unwrap();
    let cascade = Cascade::join(join(1), SOON).unwrap();
    let cascade = cascade.connect(Expect::Count(0), SOON).unwrap();
    let cascade = cascade.in_background().unwrap();

    breaks.store(true, Ordering::SeqCst);
    let report = sender
        .send_with(&number(2.0), &until(WaitFor::Applied))
        .unwrap();
    assert_eq!(report.workers.len(), 2, "{report}");
    for line in report.workers {
        assert!(reason(line.outcome).contains("it broke"));
    }
    let failed = |state: &BackgroundState| matches!(state, BackgroundState::Failed { .. });
    sees(&background, |status| failed(&status.state));
    let nothing = cascade.wait(None, |_| true).unwrap();
    assert!(nothing.is_none() && failed(&cascade.status().unwrap().state));

    let (mut receiver, model) = background.stop().unwrap();
    assert_eq!(value(&model), 1.0);
    let mut cascade = cascade.stop().unwrap();
    for error in [
        receiver.receive(Some(BRIEF)).map(drop).unwrap_err(),
        receiver.latest().map(drop).unwrap_err(),
        receiver
            .pull(Pull::Newest, Some(BRIEF))
            .map(drop)
            .unwrap_err(),
        cascade.forward(Some(BRIEF)).map(drop).unwrap_err(),
    ] {
        let withdrawn = matches!(&error, Error::Withdrawn { reason } if reason == "it broke");
        assert!(withdrawn && error.remedy() == Remedy::Reconnect, "{error}");
    }
}

#[test]
fn snapshots_in_the_background_hold_the_newest_and_nothing_else() {
    // Room for what is at hand and what is written.
    let setup = SenderSetup::new("policy", &weights()).unwrap();
    let (mut sender, receivers) = connect(setup.slots(2, 2).deadline(SOON), &weights(), 1);
    let mut receivers = receivers.into_iter();
    let snapshots = receivers.next().unwrap().snapshots_in_background().unwrap();
    assert_eq!(
        snapshots.newest().unwrap().unwrap().versions()[0].1,
        Version(1)
    );
    let mut changing = weights();
    for step in 2..10_i64 {
        changing.slice_mut::<i64>("step").unwrap()[0] = step;
        let report = sender.send(&changing).unwrap();
        assert!(report.all_applied(), "{report}");
    }
    let newest = snapshots.wait(Some(SOON), |set| set.versions()[0].1 == Version(9));
    let newest = newest.unwrap().unwrap();
    assert_eq!(
        newest
            .model("policy")
            .unwrap()
            .slice::<i64>("step")
            .unwrap(),
        [9]
    );
    sender.shutdown();
    let none = snapshots.wait(None, |set| set.versions()[0].1 == Version(10));
    assert!(none.unwrap().is_none());
    assert_eq!(snapshots.status().unwrap().state, BackgroundState::Closed);
    // It still holds what came last.
    assert_eq!(
        snapshots.newest().unwrap().unwrap().versions()[0].1,
        Version(9)
    );
}

#[test]
fn nothing_ever_comes_by_a_scheme_that_carries_nothing() {
    let scheme: AnyScheme = "none".parse().unwrap();
    let setup = setup().scheme(scheme).unwrap();
    let info = setup.init_info();
    let receiver = ReceiverSetup::new(info, 0).connect(SOON).unwrap();
    let background = receiver
        .in_background(number(5.0), SafePoints::Implied)
        .unwrap();
    assert_eq!(value(&background.read().unwrap()), 5.0);
    assert_eq!(background.safe_point().unwrap(), None);
    assert!(
        !background
            .wait(None, |status| !status.versions.is_empty())
            .unwrap()
    );
    let (_, model) = background.stop().unwrap();
    assert_eq!(value(&model), 5.0);
}

#[test]
fn what_has_to_be_asked_for_is_not_waited_for() {
    let scheme: AnyScheme = "shared-mem:pull".parse().unwrap();
    let setup = setup().scheme(scheme).unwrap();
    let info = setup.init_info();
    let sender = setup.connect(&number(1.0), Expect::Count(0), SOON).unwrap();
    let receiver = || ReceiverSetup::new(info.clone(), 0).connect(SOON).unwrap();
    for error in [
        receiver()
            .in_background(number(0.0), SafePoints::Implied)
            .map(drop)
            .unwrap_err(),
        receiver().snapshots_in_background().map(drop).unwrap_err(),
        Cascade::join(ReceiverSetup::new(info.clone(), 0), SOON)
            .and_then(|setup| setup.connect(Expect::Count(0), SOON))
            .and_then(|mut cascade| cascade.forward(None))
            .map(drop)
            .unwrap_err(),
    ] {
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    }
    drop(sender);
}

#[test]
fn what_is_asked_for_is_loaded_into_a_model_and_reported_then() {
    for scheme in ["shared-mem:pull", "shared-mem"] {
        let setup = setup().history(2);
        let setup = setup.scheme(scheme.parse::<AnyScheme>().unwrap()).unwrap();
        let info = setup.init_info();
        let mut sender = setup.connect(&number(1.0), Expect::Count(0), SOON).unwrap();
        let mut model = number(0.0);
        let worker = ReceiverSetup::new(info, 0);
        let mut receiver = worker.connect_into(&mut model, SOON).unwrap();
        assert_eq!(value(&model), 1.0);
        let sent = SendOptions::new().wait(WaitFor::Sent);
        for version in [2.0, 3.0] {
            sender.send_with(&number(version), &sent).unwrap();
        }
        for (pull, version) in [(Pull::Exactly(Version(2)), 2), (Pull::Newest, 3)] {
            let loaded = receiver.pull_into(&mut model, pull, Some(SOON)).unwrap();
            assert_eq!(
                (loaded, value(&model)),
                (Some(Version(version)), version as f32)
            );
            assert_eq!(receiver.version(), Version(version), "{scheme}");
            assert_eq!(sender.workers()[0].version(), Version(version), "{scheme}");
        }
        // A version that it has, into a model that was changed, and into another.
        let mut other = number(0.0);
        model.slice_mut::<f32>("value").unwrap().fill(7.0);
        for model in [&mut model, &mut other] {
            let loaded = receiver.pull_into(model, Pull::Newest, Some(SOON)).unwrap();
            assert_eq!((loaded, value(model)), (Some(Version(3)), 3.0), "{scheme}");
        }
        // Another model's name, and a version that does not come.
        let unknown = receiver.pull_set("critic", Pull::Newest, Some(SOON));
        assert!(
            matches!(unknown, Err(Error::NoSuchModel { .. })),
            "{unknown:?}"
        );
        let least = Pull::AtLeast(Version(4));
        let nothing = receiver.pull_into(&mut model, least, Some(BRIEF)).unwrap();
        assert_eq!((nothing, value(&model)), (None, 3.0));
    }
}

#[test]
fn a_loader_that_cannot_begin_is_an_error_at_once() {
    let (sender, receiver) = two();
    let error = receiver.set_in_background(agent(&[1.0], &[]), loaders, SafePoints::Implied);
    let error = error.unwrap_err();
    assert!(matches!(error, Error::Load { .. }), "{error}");
    drop(sender);
}

#[test]
fn an_interrupt_ends_one_wait_and_no_other() {
    let (mut sender, mut receiver) = pair(&weights());
    let interrupter = receiver.interrupter().unwrap();
    let rounds = Arc::new(AtomicU32::new(0));
    let seen = rounds.clone();
    let worker = thread::spawn(move || {
        loop {
            if let Some(snapshot) = receiver.receive(None).unwrap() {
                return (receiver, snapshot.version());
            }
            seen.fetch_add(1, Ordering::SeqCst);
        }
    });
    // Each finds the worker about to wait, waiting, or between two waits.
    for round in 0..500 {
        interrupter.interrupt();
        let begun = Instant::now();
        while rounds.load(Ordering::SeqCst) <= round {
            assert!(begun.elapsed() < SOON, "interrupt {round} was lost");
            thread::yield_now();
        }
    }
    assert!(sender.send(&weights()).unwrap().all_applied());
    let (receiver, version) = worker.join().unwrap();
    assert_eq!((rounds.load(Ordering::SeqCst), version), (500, Version(2)));
    drop(receiver);
    // Nobody is there to be interrupted.
    interrupter.interrupt();
}
