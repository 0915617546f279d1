//! When models change, and when they do not.

use super::*;

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
    assert_eq!((value(&model), model.version().unwrap()), (1.0, Version(1)));

    // A second guard of the same thread does not wait for the version.
    let again = background.read().unwrap();
    assert_eq!(value(&again), 1.0);
    drop((model, again));
    let report = pending.wait(Some(soon())).unwrap();
    assert!(report.all_applied(), "{report}");
    let model = background.read().unwrap();
    assert_eq!((value(&model), model.version().unwrap()), (6.0, Version(6)));
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
    assert_eq!(sender.workers()[0].versions[0], Version(8));
}

#[test]
fn a_send_waits_for_the_declared_safe_point() {
    let (mut sender, background) = numbers(SafePoints::Declared, setup());
    let pending = sender
        .send_async(&number(2.0), &until(WaitFor::Applied))
        .unwrap();
    let staged = background.wait(Some(soon()), |status| !status.staged.is_empty());
    assert!(staged.unwrap());
    assert!(!pending.is_settled().unwrap());
    assert!(background.safe_point().unwrap().is_some());
    let report = pending.wait(Some(soon())).unwrap();
    assert!(report.all_applied(), "{report}");
}

/// A wait without a timeout ends, whatever is staged and whichever end is gone.
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
        let there = background.wait(None, |status| status.version().unwrap() == Version(2));
        assert!(there.unwrap(), "{background:?}");
        assert_eq!(value(&background.read().unwrap()), 2.0);
        if shut_down {
            let more = background.wait(None, |status| status.version().unwrap() == Version(3));
            assert!(!more.unwrap(), "{background:?}");
        }
    }
}

/// A waiting thread is woken when the last guard is dropped.
#[test]
fn wait_applies_staged_versions_after_other_guards() {
    let (mut sender, background) = numbers(SafePoints::Declared, setup());
    let reached = sender.send_with(&number(2.0), &until(WaitFor::Staged));
    assert!(reached.unwrap().all_reached());
    let background = &background;
    let mut reading = Some(background.read().unwrap());
    let (looked, looks) = mpsc::channel();
    thread::scope(|scope| {
        let waiting = scope.spawn(move || {
            let brief = background.wait(Some(BRIEF), |status| {
                status.version().unwrap() == Version(2)
            });
            looked.send(()).unwrap();
            let whole = background.wait(None, |status| {
                let _ = looked.send(());
                status.version().unwrap() == Version(2)
            });
            (brief.unwrap(), whole.unwrap())
        });
        for _ in 0..2 {
            looks.recv_timeout(soon()).unwrap();
        }
        reading.take();
        assert_eq!(waiting.join().unwrap(), (false, true));
    });
    assert_eq!(value(&background.read().unwrap()), 2.0);
}

#[test]
fn safe_point_does_nothing_while_a_thread_reads() {
    let (mut sender, background) = numbers(SafePoints::Declared, setup());
    sender
        .send_with(&number(2.0), &until(WaitFor::Staged))
        .unwrap();
    background
        .wait(Some(soon()), |status| !status.staged.is_empty())
        .unwrap();
    let model = background.read().unwrap();
    let elsewhere = thread::scope(|scope| scope.spawn(|| background.safe_point()).join().unwrap());
    assert_eq!(elsewhere.unwrap(), None);
    assert_eq!(value(&model), 1.0);
    drop(model);
    assert!(background.safe_point().unwrap().is_some());
}

#[test]
fn waiting_for_the_own_thread_is_an_error() {
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

/// Runs threads whose guards are held until the other thread has one, and longer than a thread lets a
/// version go first to begin with; meanwhile it calls the function.
fn among_long_guards<T>(background: &Background<Tensors>, call: impl FnOnce() -> T) -> T {
    let (done, running) = (AtomicBool::new(false), Mutex::new([false; 2]));
    let changed = Condvar::new();
    thread::scope(|scope| {
        for me in 0..2 {
            let (done, running, changed) = (&done, &running, &changed);
            scope.spawn(move || {
                while !done.load(Ordering::Relaxed) {
                    let _guard = background.read().unwrap();
                    let mut runs = running.lock().unwrap();
                    runs[me] = true;
                    changed.notify_all();
                    let held = Duration::from_millis(50);
                    let other = changed.wait_timeout_while(runs, held, |runs| !runs[1 - me]);
                    other.unwrap().0[me] = false;
                }
            });
        }
        let result = call();
        done.store(true, Ordering::Relaxed);
        result
    })
}

#[test]
fn long_guards_that_overlap_keep_no_version_out() {
    let (mut sender, background) = numbers(SafePoints::Implied, setup());
    for report in among_long_guards(&background, || {
        [2.0, 3.0, 4.0].map(|step| sender.send(&number(step)))
    }) {
        let fine = report.as_ref().is_ok_and(|report| report.all_applied());
        assert!(fine, "{report:?}");
    }
}

#[test]
fn long_guards_that_overlap_keep_no_move_out() {
    let (_sender, background) = numbers(SafePoints::Implied, setup());
    let moved = among_long_guards(&background, || {
        background.hand_over(Some(soon()), || Ok::<_, ()>(7))
    });
    assert_eq!(moved.unwrap(), Ok(7));
}

#[test]
fn move_ends_by_its_deadline_if_a_guard_is_held() {
    let (mut sender, background) = numbers(SafePoints::Declared, setup());
    let reading = background.read().unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| background.hand_over(Some(BRIEF), || Ok::<_, ()>(())));
        let error = waiting.join().unwrap().unwrap_err();
        assert!(
            matches!(error, Error::GuardsInUse { waited, .. } if waited == BRIEF),
            "{error}"
        );
    });
    drop(reading);
    // The receiver goes on, and a reader waits for nobody.
    assert!(background.try_hold().unwrap().is_some());
    sender
        .send_with(&number(2.0), &until(WaitFor::Staged))
        .unwrap();
    let there = background.wait(Some(soon()), |status| {
        status.version().unwrap() == Version(2)
    });
    assert!(there.unwrap(), "{background:?}");
    assert_eq!(
        background.hand_over(None, || Ok::<_, ()>(3)).unwrap(),
        Ok(3)
    );
}
