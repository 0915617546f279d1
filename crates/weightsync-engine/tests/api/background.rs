//! A background receiver: nobody asks for weights, and models change at safe
//! points only.

mod ends;
mod hold;
mod safe_points;
mod sets;

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use weightsync_engine::{
    AnyScheme, Background, BackgroundState, BackgroundStatus, Capabilities, Cascade, Epoch, Error,
    Expect, Extracted, Layout, ModelId, Outcome, Pull, Receiver, ReceiverSetup, Remedy, Result,
    Run, SafePoints, SendOptions, Sender, SenderSetup, Set, SetLoader, SetSnapshot, TensorView,
    Tensors, Version, WaitFor, WeightExtractor, WeightLoader,
};

use crate::{BRIEF, connect, pair, pair_by, soon, weights};

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
    let there = background.wait(Some(soon()), |status| {
        status.version().unwrap() == Version(version)
    });
    assert!(there.unwrap(), "{background:?}");
}

/// Looks until the status is as wished, which is no safe point.
fn sees<M: Send + Sync>(
    background: &Background<M>,
    mut wished: impl FnMut(&BackgroundStatus) -> bool,
) {
    let begun = Instant::now();
    while !wished(&background.status().unwrap()) {
        assert!(begun.elapsed() < soon(), "{background:?}");
        thread::sleep(Duration::from_millis(1));
    }
}

fn until(wait: WaitFor) -> SendOptions {
    SendOptions::new().wait(wait).timeout(Some(soon()))
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

/// Two models; the second does what the test wants.
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
    let setup = setup
        .add_model("critic", &one)
        .unwrap()
        .send_timeout(Some(soon()));
    let info = setup.init_info();
    let worker = thread::spawn(|| ReceiverSetup::new(info, 0).connect(Some(soon())).unwrap());
    let set = Set::new().with("actor", &one).with("critic", &one);
    let sender = setup.connect(&set, Expect::Count(1), Some(soon())).unwrap();
    (sender, worker.join().unwrap())
}

fn send_both(sender: &mut Sender, actor: f32, critic: f32) -> Outcome {
    let (actor, critic) = (number(actor), number(critic));
    let set = Set::new().with("actor", &actor).with("critic", &critic);
    let report = sender.send(&set).unwrap();
    report.workers[0].outcome.clone()
}

/// A background receiver that is told a number serves it.
#[test]
fn model_loads_over_any_earlier_version() {
    let begin = |scheme: &str, receive: fn(&mut Receiver)| {
        let scheme: AnyScheme = scheme.parse().unwrap();
        let setup = setup().scheme(scheme).unwrap();
        let info = setup.init_info();
        let worker = thread::spawn(|| {
            let mut model = number(0.0);
            let receiver = ReceiverSetup::new(info, 0).connect_into(&mut model, Some(soon()));
            (receiver.unwrap(), model)
        });
        let mut sender = setup
            .connect(&number(1.0), Expect::Count(1), Some(soon()))
            .unwrap();
        let (mut receiver, model) = worker.join().unwrap();
        let sent = until(WaitFor::Sent);
        sender.send_with(&number(2.0), &sent).unwrap();
        receive(&mut receiver);
        (sender, receiver, model)
    };
    let look = |receiver: Receiver, model| {
        let background = receiver.in_background(model, SafePoints::Declared).unwrap();
        let model = background.read().unwrap();
        (value(&model), model.version().unwrap().0)
    };
    for scheme in ["shared-mem", "multi-process:every=4"] {
        // Another model than the one that was connected into, without shapes.
        let (_sender, receiver, _) = begin(scheme, |_| {});
        assert_eq!(look(receiver, Tensors::new()), (1.0, 1), "{scheme}");
        // One that has less than the worker was handed since.
        let (_sender, receiver, model) = begin(scheme, |receiver| {
            receiver.recv_timeout(soon()).unwrap().expect("a version");
        });
        assert_eq!(look(receiver, model), (2.0, 2), "{scheme}");
    }
}

/// Where nothing is there to be loaded the model does not serve.
#[test]
fn unloaded_model_does_not_serve() {
    let dir = tempfile::tempdir().unwrap();
    let setup = || setup().run_dir(dir.path().join("run")).unwrap();
    let (sender, mut receiver) = pair_by(setup(), &number(1.0));
    sender.shutdown();
    assert!(receiver.recv().unwrap_err().is_sender_closed());
    let (say, ready) = mpsc::channel();
    let unready = Unready {
        weights: number(9.0),
        ready: Mutex::new(ready),
    };
    thread::scope(|scope| {
        let next = scope.spawn(|| setup().connect(&unready, Expect::Count(0), Some(soon())));
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
        let there = background.wait(Some(soon()), |status| status.run == next.run());
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
            (value(&model), model.version().unwrap()),
            (step as f32, Version(step))
        );
        assert_eq!(model.run(), sender.run());
    }
}

#[test]
fn worker_writes_last_until_the_next_version() {
    let (mut sender, background) = numbers(SafePoints::Implied, setup());
    let mut model = background.write().unwrap();
    model.slice_mut::<f32>("value").unwrap().fill(7.0);
    drop(model);
    assert_eq!(value(&background.read().unwrap()), 7.0);
    assert!(sender.send(&number(2.0)).unwrap().all_applied());
    assert_eq!(value(&background.read().unwrap()), 2.0);
}

#[test]
fn panic_in_a_load_stops_serving_until_the_next() {
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

fn reason(outcome: Outcome) -> String {
    match outcome {
        Outcome::Refused { reason } => reason,
        other => panic!("{other:?}"),
    }
}

#[test]
fn every_version_is_applied_in_order_by_such_schemes() {
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
        ready.recv_timeout(soon()).expect("somebody says so");
        self.weights.extract(take)
    }
}

#[test]
fn background_snapshots_hold_only_the_newest() {
    // Room for what is at hand and what is written.
    let setup = SenderSetup::new("policy", &weights()).unwrap();
    let (mut sender, receivers) =
        connect(setup.slots(2, 2).send_timeout(Some(soon())), &weights(), 1);
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
    let newest = snapshots.wait(Some(soon()), |set| set.versions()[0].1 == Version(9));
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
fn no_sync_scheme_delivers_nothing() {
    let scheme: AnyScheme = "none".parse().unwrap();
    let setup = setup().scheme(scheme).unwrap();
    let info = setup.init_info();
    let receiver = ReceiverSetup::new(info, 0).connect(Some(soon())).unwrap();
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
fn background_refuses_a_scheme_without_push() {
    let scheme: AnyScheme = "shared-mem:pull".parse().unwrap();
    let setup = setup().scheme(scheme).unwrap();
    let info = setup.init_info();
    let sender = setup
        .connect(&number(1.0), Expect::Count(0), Some(soon()))
        .unwrap();
    let receiver = || {
        ReceiverSetup::new(info.clone(), 0)
            .connect(Some(soon()))
            .unwrap()
    };
    for error in [
        receiver()
            .in_background(number(0.0), SafePoints::Implied)
            .map(drop)
            .unwrap_err(),
        receiver().snapshots_in_background().map(drop).unwrap_err(),
        Cascade::join(ReceiverSetup::new(info.clone(), 0), Some(soon()))
            .and_then(|setup| setup.connect(Expect::Count(0), Some(soon())))
            .and_then(|mut cascade| cascade.forward(None))
            .map(drop)
            .unwrap_err(),
    ] {
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    }
    drop(sender);
}

#[test]
fn pulled_version_is_loaded_and_then_reported() {
    for scheme in ["shared-mem:pull", "shared-mem"] {
        let setup = setup().history(2);
        let setup = setup.scheme(scheme.parse::<AnyScheme>().unwrap()).unwrap();
        let info = setup.init_info();
        let mut sender = setup
            .connect(&number(1.0), Expect::Count(0), Some(soon()))
            .unwrap();
        let mut model = number(0.0);
        let worker = ReceiverSetup::new(info, 0);
        let mut receiver = worker.connect_into(&mut model, Some(soon())).unwrap();
        assert_eq!(value(&model), 1.0);
        let sent = SendOptions::new().wait(WaitFor::Sent);
        for version in [2.0, 3.0] {
            sender.send_with(&number(version), &sent).unwrap();
        }
        for (pull, version) in [(Pull::version(Version(2)), 2), (Pull::newest(), 3)] {
            let loaded = receiver
                .loading(&mut model)
                .pull(pull.timeout(Some(soon())))
                .unwrap();
            assert_eq!(
                (loaded, value(&model)),
                (Some(Version(version)), version as f32)
            );
            assert_eq!(receiver.version().unwrap(), Version(version), "{scheme}");
            assert_eq!(
                sender.workers()[0].versions[0],
                Version(version),
                "{scheme}"
            );
        }
        // A version that it has, into a model that was changed, and into another.
        let mut other = number(0.0);
        model.slice_mut::<f32>("value").unwrap().fill(7.0);
        for model in [&mut model, &mut other] {
            let loaded = receiver
                .loading(model)
                .pull(Pull::newest().timeout(Some(soon())))
                .unwrap();
            assert_eq!((loaded, value(model)), (Some(Version(3)), 3.0), "{scheme}");
        }
        // Another model's name, and a version that does not come.
        let unknown = receiver
            .set()
            .pull(Pull::newest().model("critic").timeout(Some(soon())));
        assert!(
            matches!(unknown, Err(Error::NoSuchModel { .. })),
            "{unknown:?}"
        );
        let least = Pull::at_least(Version(4));
        let nothing = receiver
            .loading(&mut model)
            .pull(least.timeout(Some(BRIEF)))
            .unwrap();
        assert_eq!((nothing, value(&model)), (None, 3.0));
    }
}

#[test]
fn an_interrupt_ends_one_wait_and_no_other() {
    let (mut sender, mut receiver) = pair(&weights());
    let interrupter = receiver.interrupter().unwrap();
    let rounds = Arc::new(AtomicU32::new(0));
    let seen = rounds.clone();
    let worker = thread::spawn(move || {
        loop {
            match receiver.recv() {
                Ok(snapshot) => return (receiver, snapshot.version()),
                Err(Error::Interrupted) => seen.fetch_add(1, Ordering::SeqCst),
                Err(error) => panic!("{error}"),
            };
        }
    });
    // Each finds the worker about to wait, waiting, or between two waits.
    for round in 0..500 {
        interrupter.interrupt();
        let begun = Instant::now();
        while rounds.load(Ordering::SeqCst) <= round {
            assert!(begun.elapsed() < soon(), "interrupt {round} was lost");
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
