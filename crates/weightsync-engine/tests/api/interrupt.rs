//! Calls that the caller's check ends: they end soon, and what they were made on
//! is of use afterwards.

use std::fmt::Debug;
use std::fs;
use std::sync::{Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use weightsync_engine::{
    AnyScheme, AsyncSendLimit, BackgroundState, Cascade, Error, Expect, Layout, Pull,
    ReceiverSetup, Remedy, Result, SafePoints, SendOptions, SenderSetup, SetLoader, TensorView,
    Tensors, Version, WaitFor, WeightLoader, interruptible,
};

use crate::{BRIEF, pair, pair_by, send_to, soon, until_all_have_left, weights};

/// A time for calls that are to be ended before it.
fn long() -> Duration {
    crate::patience::patience(30)
}

/// Makes a call whose check says yes when it is asked for the second time.
#[track_caller]
fn ended<T: Debug>(call: impl FnOnce() -> Result<T>) {
    let mut asked = 0;
    let since = Instant::now();
    let result = interruptible(
        || {
            asked += 1;
            asked == 2
        },
        call,
    );
    let error = result.unwrap_err();
    assert!(matches!(error, Error::Interrupted), "{error}");
    assert_eq!(error.remedy(), Remedy::Retry);
    assert_eq!(asked, 2);
    assert!(since.elapsed() < soon(), "{:?}", since.elapsed());
}

fn sent() -> SendOptions {
    SendOptions::new().wait(WaitFor::Sent)
}

fn setup() -> SenderSetup {
    let setup = SenderSetup::new("policy", &weights()).unwrap();
    setup.send_timeout(Some(long()))
}

#[test]
fn a_connect_leaves_nothing_and_can_be_made_again() {
    let setup = setup();
    let worker = ReceiverSetup::new(setup.init_info(), 0);
    ended(|| worker.clone().connect(Some(long())));
    ended(|| {
        worker
            .clone()
            .connect_into(&mut Tensors::new(), Some(long()))
    });
    ended(|| Cascade::join(worker.clone(), Some(long())));
    ended(|| {
        setup
            .clone()
            .connect(&weights(), Expect::Count(1), Some(long()))
    });
    // One that had joined is told of the end.
    let mut early = thread::scope(|scope| {
        let early = scope.spawn(|| worker.clone().connect(Some(long())).unwrap());
        ended(|| {
            setup
                .clone()
                .connect(&weights(), Expect::Count(2), Some(long()))
        });
        early.join().unwrap()
    });
    early
        .recv_timeout(soon())
        .unwrap()
        .expect("the first version");
    let error = early.recv_timeout(soon()).unwrap_err();
    assert!(error.is_sender_closed(), "{error}");
    let (mut sender, mut receiver) = pair_by(setup, &weights());
    send_to(&mut sender, &weights(), &mut receiver);
    assert_eq!(sender.workers().len(), 1);
}

#[test]
fn a_send_that_had_published_has_published() {
    let (mut sender, mut receiver) = pair_by(setup(), &weights());
    ended(|| sender.send(&weights()));
    assert_eq!(sender.version().unwrap(), Version(2));
    assert_eq!(
        receiver.recv_timeout(soon()).unwrap().unwrap().version(),
        Version(2)
    );

    let pending = sender.send_async(&weights(), &SendOptions::new()).unwrap();
    ended(|| pending.wait(None));
    assert!(!pending.is_settled().unwrap());
    receiver.recv_timeout(soon()).unwrap().expect("the version");
    assert!(pending.wait(Some(soon())).unwrap().all_applied());
}

#[test]
fn death_during_an_interrupted_send_is_reported_later() {
    let (mut sender, receivers) = crate::connect(setup(), &weights(), 2);
    let mut receivers = receivers.into_iter();
    let (mut stays, goes) = (receivers.next().unwrap(), receivers.next().unwrap());
    let gone = goes.worker();
    let mut goes = Some(goes);
    // Asked again after the sender has seen it go.
    let result = interruptible(|| goes.take().is_none(), || sender.send(&weights()));
    assert!(matches!(result, Err(Error::Interrupted)));
    let report = crate::send(&mut sender, &weights(), || {
        // The interrupted send has published version 2, which may come first.
        while stays.recv_timeout(soon()).unwrap().unwrap().version() < Version(3) {}
    });
    let report = report.0.unwrap();
    assert!(
        report.workers.iter().any(|line| line.worker == gone),
        "{report}"
    );
}

#[test]
fn a_send_that_waits_for_room_has_changed_nothing() {
    let (mut sender, mut receiver) = pair_by(setup().slots(2, 2), &weights());
    let first = receiver.latest().unwrap().unwrap();
    let second = send_to(&mut sender, &weights(), &mut receiver);
    ended(|| sender.send(&weights()));
    ended(|| sender.send_async(&weights(), &SendOptions::new()));
    ended(|| sender.loan().map(drop));
    assert_eq!(sender.version().unwrap(), Version(2));
    drop((first, second));
    assert_eq!(
        send_to(&mut sender, &weights(), &mut receiver).version(),
        Version(3)
    );

    // Room among the asynchronous sends.
    for bound in [1, 2] {
        let (mut sender, mut receiver) = pair_by(
            setup().async_send_limit(AsyncSendLimit::Queue(bound)),
            &weights(),
        );
        let flying: Vec<_> = (0..bound)
            .map(|_| sender.send_async(&weights(), &SendOptions::new()).unwrap())
            .collect();
        let version = sender.version().unwrap();
        ended(|| sender.send_async(&weights(), &SendOptions::new()));
        assert_eq!(sender.version().unwrap(), version);
        receiver.recv_timeout(soon()).unwrap().expect("the newest");
        for one in flying {
            assert!(one.wait(Some(soon())).unwrap().failed().next().is_none());
        }
    }
}

#[test]
fn a_receive_loses_nothing() {
    for scheme in ["shared-mem", "multi-process:every=4"] {
        let setup = setup()
            .scheme(scheme.parse::<AnyScheme>().unwrap())
            .unwrap();
        let (mut sender, mut receiver) = pair_by(setup, &weights());
        let mut own = weights();
        ended(|| receiver.recv());
        ended(|| receiver.recv_timeout(long()));
        ended(|| receiver.loading(&mut own).recv());
        for version in 2..4 {
            sender.send_with(&weights(), &sent()).unwrap();
            // What is there is not waited for, and the check not asked.
            let received = interruptible(|| true, || receiver.recv());
            assert_eq!(received.unwrap().version(), Version(version), "{scheme}");
            ended(|| receiver.recv());
        }
    }
}

#[test]
fn a_question_is_taken_back() {
    let (mut sender, mut receiver) = pair(&weights());
    ended(|| receiver.pull(Pull::at_least(Version(3))));
    ended(|| {
        receiver
            .loading(&mut weights())
            .pull(Pull::at_least(Version(3)).timeout(Some(long())))
    });
    for _ in 2..4 {
        sender.send_with(&weights(), &sent()).unwrap();
    }
    let pulled = receiver
        .pull(Pull::version(Version(3)).timeout(Some(soon())))
        .unwrap();
    assert_eq!(pulled.unwrap().version(), Version(3));
    send_to(&mut sender, &weights(), &mut receiver);
}

#[test]
fn interrupted_search_for_a_sender_goes_on_next_call() {
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(
        dir.path(),
        std::os::unix::fs::PermissionsExt::from_mode(0o700),
    )
    .unwrap();
    let setup = setup().run_dir(dir.path()).unwrap();
    let (sender, mut receiver) = pair_by(setup.clone(), &weights());
    drop(sender);
    let error = receiver.recv().unwrap_err();
    assert!(error.is_sender_closed(), "{error}");
    ended(|| receiver.recv());
    ended(|| receiver.loading(&mut weights()).recv_timeout(long()));
    ended(|| receiver.pull(Pull::newest()));
    let next = setup
        .connect(&weights(), Expect::Count(0), Some(soon()))
        .unwrap();
    let found = receiver.recv().unwrap();
    assert_eq!(found.run(), next.run());
}

#[test]
fn interrupt_ends_a_wait_for_the_run_directory_lock() {
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(
        dir.path(),
        std::os::unix::fs::PermissionsExt::from_mode(0o700),
    )
    .unwrap();
    let setup = setup().run_dir(dir.path()).unwrap();
    let connect = || {
        setup
            .clone()
            .connect(&weights(), Expect::Count(0), Some(long()))
    };
    connect().unwrap();
    for name in ["key", "epoch"] {
        let held = fs::File::open(dir.path().join(name)).unwrap();
        held.lock().unwrap();
        match name {
            "key" => ended(|| SenderSetup::new("policy", &weights())?.run_dir(dir.path())),
            _ => ended(connect),
        }
        drop(held);
        connect().unwrap();
    }
}

/// Waits in each load until it is told to go on.
struct Slow {
    loading: mpsc::Sender<()>,
    goes_on: mpsc::Receiver<()>,
}

impl WeightLoader for Slow {
    fn layout(&self) -> Result<Layout> {
        weights().layout()
    }

    fn load(&mut self, _: &[TensorView<'_>]) -> Result<()> {
        self.loading.send(()).unwrap();
        let _ = self.goes_on.recv();
        Ok(())
    }
}

#[test]
fn interrupt_leaves_the_background_thread_alone() {
    let (mut sender, receiver) = pair(&weights());
    let background = receiver
        .in_background(weights(), SafePoints::Implied)
        .unwrap();
    ended(|| background.wait(None, |_| false));
    // Another thread's guard is waited for.
    thread::scope(|scope| {
        let (reads, reading) = mpsc::channel();
        let (drop_it, dropped) = mpsc::channel::<()>();
        let background = &background;
        scope.spawn(move || {
            let guard = background.read().unwrap();
            reads.send(()).unwrap();
            let _ = dropped.recv();
            drop(guard);
        });
        reading.recv().unwrap();
        ended(|| background.write().map(drop));
        drop(drop_it);
    });
    drop(background.write().unwrap());
    assert_eq!(
        background.status().unwrap().state,
        BackgroundState::Following
    );
    assert!(sender.send(&weights()).unwrap().all_applied());
    assert_eq!(background.read().unwrap().version().unwrap(), Version(2));
    let mut receiver = background.stop().unwrap().0;
    ended(|| receiver.recv());

    let snapshots = receiver.snapshots_in_background().unwrap();
    ended(|| snapshots.wait(None, |_| false));
    assert!(sender.send(&weights()).unwrap().all_applied());
    assert!(
        snapshots
            .wait(Some(soon()), |set| set.versions()[0].1 == Version(3))
            .unwrap()
            .is_some()
    );
}

#[test]
fn interrupt_ends_a_wait_for_a_background_load() {
    let (mut sender, receiver) = pair_by(setup(), &weights());
    let (loading, loads) = mpsc::channel();
    let (go_on, goes_on) = mpsc::channel();
    go_on.send(()).unwrap();
    let slow = Mutex::new(Slow { loading, goes_on });
    let background = receiver
        .set_in_background(
            slow,
            // Nobody else has it: the lock is there to be shared with the thread.
            |slow| SetLoader::new().with("policy", slow.get_mut().unwrap()),
            SafePoints::Implied,
        )
        .unwrap();
    loads.recv().unwrap();
    let pending = sender.send_async(&weights(), &SendOptions::new()).unwrap();
    loads.recv().unwrap();
    // It has the models, and the receiver.
    ended(|| background.read().map(drop));
    ended(|| background.stop().map(drop));
    assert_eq!(sender.workers().len(), 1, "it is at its load");
    go_on.send(()).unwrap();
    assert!(pending.wait(Some(soon())).unwrap().all_applied());
    // The thread ends on its own.
    until_all_have_left(&sender);
}

#[test]
fn a_cascade_goes_on_with_what_it_was_at() {
    let trainer = setup();
    let joining = ReceiverSetup::new(trainer.init_info(), 0);
    let joins = thread::spawn(move || Cascade::join(joining, Some(soon())).unwrap());
    let trains = thread::spawn(move || {
        trainer
            .connect(&weights(), Expect::Count(1), Some(soon()))
            .unwrap()
    });
    let middle = joins.join().unwrap();
    let leaf = ReceiverSetup::new(middle.init_info(), 0);
    let leaf = thread::spawn(move || leaf.connect(Some(soon())).unwrap());
    let mut cascade = middle.connect(Expect::Count(1), Some(soon())).unwrap();
    let (mut leaf, mut trainer) = (leaf.join().unwrap(), trains.join().unwrap());
    leaf.recv_timeout(soon()).unwrap().expect("the first");

    ended(|| cascade.forward(None));
    let pending = trainer.send_async(&weights(), &SendOptions::new()).unwrap();
    // Passed on, and not applied by the leaf: the trainer is told nothing yet.
    ended(|| cascade.forward(None));
    assert!(!pending.is_settled().unwrap());
    assert_eq!(
        leaf.recv_timeout(soon()).unwrap().unwrap().version(),
        Version(2)
    );
    assert!(
        cascade.forward(Some(BRIEF)).unwrap().is_none(),
        "the leaf has it"
    );
    assert!(pending.wait(Some(soon())).unwrap().all_applied());

    let background = cascade.in_background().unwrap();
    ended(|| background.wait(None, |_| false));
    let pending = trainer.send_async(&weights(), &SendOptions::new()).unwrap();
    leaf.recv_timeout(soon()).unwrap().expect("passed on");
    assert!(pending.wait(Some(soon())).unwrap().all_applied());
    background.stop().unwrap();
}
