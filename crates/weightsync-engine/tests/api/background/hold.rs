//! Models kept as they are by somebody who cannot borrow them.

use std::time::Instant;

use weightsync_engine::ModelHold;

use super::*;

/// Sends without waiting, and looks until it is staged.
fn stage(
    sender: &mut Sender,
    background: &Background<Tensors>,
    value: f32,
) -> weightsync_engine::PendingSend {
    let pending = sender.send_async(&number(value), &until(WaitFor::Applied));
    sees(background, |status| !status.staged.is_empty());
    pending.unwrap()
}

#[test]
fn models_stay_as_they_are_while_they_are_held() {
    let (mut sender, background) = numbers(SafePoints::Implied, setup());
    for version in 2..6 {
        let held = background.hold().unwrap();
        let pending = stage(&mut sender, &background, version as f32);
        assert_eq!(value(&background.read().unwrap()), version as f32 - 1.0);
        drop(held);
        assert!(pending.wait(None).unwrap().all_applied());
        assert_eq!(value(&background.read().unwrap()), version as f32);
    }
}

#[test]
fn a_hold_is_its_threads_wherever_it_is_dropped() {
    let (mut sender, background) = numbers(SafePoints::Implied, setup());
    let take = || background.hold().unwrap();
    let elsewhere = || thread::scope(|scope| scope.spawn(take).join().unwrap());
    for version in 2..6 {
        let (one, two): (ModelHold, ModelHold) = (elsewhere(), elsewhere());
        let pending = stage(&mut sender, &background, version as f32);
        // Another thread's guard comes and goes.
        drop(background.read().unwrap());
        drop(one);
        assert_eq!(value(&background.read().unwrap()), version as f32 - 1.0);
        drop(two);
        assert!(pending.wait(None).unwrap().all_applied());
        // Nothing of them is left: this thread has the models alone.
        assert_eq!(value(&background.write().unwrap()), version as f32);
    }
}

#[test]
fn a_thread_that_holds_may_hold_again_but_not_change() {
    let (mut sender, background) = numbers(SafePoints::Implied, setup());
    let held = background.hold().unwrap();
    let pending = stage(&mut sender, &background, 2.0);
    // A version waits: others are to let it go first, once its thread has asked.
    let begun = Instant::now();
    let others = || background.try_hold().unwrap().is_some();
    while thread::scope(|scope| scope.spawn(others).join().unwrap()) {
        assert!(begun.elapsed() < soon(), "others still get in");
    }
    let begun = Instant::now();
    for _ in 0..1000 {
        let again = background.try_hold().unwrap();
        let read = background.read().unwrap();
        let both = (background.hold().unwrap(), again);
        assert_eq!(value(&read), 1.0);
        assert!(both.1.is_some());
    }
    assert!(begun.elapsed() < soon(), "it waited");
    for error in [
        background.write().map(drop).unwrap_err(),
        background.safe_point().map(drop).unwrap_err(),
        background.wait(None, |_| true).map(drop).unwrap_err(),
    ] {
        assert!(matches!(error, Error::GuardHeld { .. }), "{error}");
    }
    drop(held);
    assert!(pending.wait(None).unwrap().all_applied());
    let written = background.write().unwrap();
    for error in [
        background.hold().map(drop).unwrap_err(),
        background.try_hold().map(drop).unwrap_err(),
    ] {
        assert!(matches!(error, Error::GuardHeld { .. }), "{error}");
    }
    drop(written);
}

#[test]
fn model_hold_does_not_delay_shutdown() {
    let (mut sender, background) = numbers(SafePoints::Implied, setup());
    let held = background.hold().unwrap();
    let pending = stage(&mut sender, &background, 2.0);
    let (mut receiver, mut model) = background.stop().unwrap();
    assert_eq!(value(&model), 1.0);
    // It interrupts nobody's wait any more.
    drop(held);
    assert_eq!(
        receiver.loading(&mut model).recv_timeout(soon()).unwrap(),
        Some(Version(2))
    );
    assert!(pending.wait(None).unwrap().all_applied());

    let background = receiver.in_background(model, SafePoints::Implied).unwrap();
    let held = background.hold().unwrap();
    drop(background);
    let report = sender.send(&number(3.0)).unwrap();
    let outcomes: Vec<_> = report.workers.iter().map(|one| &one.outcome).collect();
    assert!(!outcomes.contains(&&Outcome::Applied), "{report}");
    drop(held);
}

#[test]
fn models_that_are_not_whole_are_not_held() {
    let (mut sender, receiver) = two();
    let background = receiver
        .set_in_background(agent(&[2.0], &[]), loaders, SafePoints::Implied)
        .unwrap();
    background.write().unwrap().critic.fails_at.push(1.0);
    reason(send_both(&mut sender, 2.0, 2.0));
    for error in [
        background.hold().map(drop).unwrap_err(),
        background.try_hold().map(drop).unwrap_err(),
    ] {
        assert!(matches!(error, Error::NotWhole { .. }), "{error}");
    }
    // Nor do they keep anything.
    assert_eq!(send_both(&mut sender, 3.0, 3.0), Outcome::Applied);
    drop(background.hold().unwrap());
}

/// A loader that needs a lock of the worker's, as that of an interpreter.
struct Interpreted {
    lock: Arc<Mutex<()>>,
    /// That it is about to load.
    loads: mpsc::Sender<()>,
    value: Tensors,
}

impl WeightLoader for Interpreted {
    fn layout(&self) -> Result<Layout> {
        WeightLoader::layout(&self.value)
    }

    fn load(&mut self, tensors: &[TensorView<'_>]) -> Result<()> {
        self.loads.send(()).unwrap();
        let _locked = self.lock.lock().unwrap();
        self.value.load(tensors)
    }
}

#[test]
fn waiter_for_the_loader_lock_sleeps() {
    let (mut sender, receiver) = pair_by(setup(), &number(1.0));
    let lock = Arc::new(Mutex::new(()));
    let (loads, loading) = mpsc::channel();
    let model = Interpreted {
        lock: lock.clone(),
        loads,
        value: number(0.0),
    };
    let background = &receiver.in_background(model, SafePoints::Implied).unwrap();
    loading.recv().unwrap();
    for version in 2..6 {
        let locked = lock.lock().unwrap();
        let options = until(WaitFor::Applied);
        let pending = sender.send_async(&number(version as f32), &options);
        // The loader waits for the lock, and this thread never for the loader.
        let begun = Instant::now();
        while loading.try_recv().is_err() {
            drop(background.try_hold().unwrap());
            assert!(begun.elapsed() < soon(), "{background:?}");
            thread::yield_now();
        }
        assert!(background.try_hold().unwrap().is_none());
        thread::scope(|scope| {
            let (say, said) = mpsc::channel();
            let waits = scope.spawn(move || {
                say.send(rustix::thread::gettid()).unwrap();
                let held = background.hold().unwrap();
                let value = value(&background.read().unwrap().value);
                drop(held);
                value
            });
            let stat = format!("/proc/self/task/{}/stat", said.recv().unwrap());
            let is_asleep = || {
                let stat = std::fs::read_to_string(&stat).unwrap();
                stat.rsplit_once(") ").unwrap().1.starts_with('S')
            };
            while !is_asleep() {
                assert!(begun.elapsed() < soon(), "it is never asleep");
                thread::yield_now();
            }
            drop(locked);
            let seen = waits.join().unwrap();
            assert_eq!(seen, version as f32);
        });
        assert!(pending.unwrap().wait(None).unwrap().all_applied());
        assert_eq!(value(&background.read().unwrap().value), version as f32);
    }
}
