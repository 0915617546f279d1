//! What comes after a thread, a sender, or an end that has failed.

use std::fmt;
use std::path::Path;
use std::sync::OnceLock;

use weightsync_engine::transport::{
    Deadline, Endpoint, Interrupter, Joining, ModelSpec, Opening, ReceiverTransport, Scheme,
    SenderTransport, VersionRequest,
};

use super::*;

#[test]
fn stopping_ends_the_wait_and_gives_everything_back() {
    let (mut sender, background) = numbers(SafePoints::Declared, setup());
    sender
        .send_with(&number(2.0), &until(WaitFor::Staged))
        .unwrap();
    background
        .wait(Some(soon()), |status| !status.staged.is_empty())
        .unwrap();
    let begun = Instant::now();
    let (mut receiver, model) = background.stop().unwrap();
    assert!(begun.elapsed() < soon(), "{:?}", begun.elapsed());
    assert_eq!(value(&model), 1.0);
    // What was staged is what comes next, and then a wait is a wait.
    let mut own = model;
    let next = receiver.loading(&mut own).try_recv().unwrap();
    assert_eq!((next, value(&own)), (Some(Version(2)), 2.0));
    let worker = thread::spawn(move || receiver.recv().unwrap().version());
    let report = sender.send(&number(3.0)).unwrap();
    assert!(report.all_applied(), "{report}");
    assert_eq!(worker.join().unwrap(), Version(3));
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
    assert!(begun.elapsed() < soon(), "{:?}", begun.elapsed());
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
fn sender_shutdown_is_a_state_and_the_model_serves() {
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
            .wait(None, |status| status.version().unwrap() == Version(3))
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
    // Without a timeout: nobody knows whether there will be another one.
    assert!(!background.wait(None, |status| status.run != first).unwrap());
    let status = background.status().unwrap();
    assert_eq!(status.state, BackgroundState::Closed, "{background:?}");
    assert_eq!(value(&background.read().unwrap()), 1.0);

    let next = setup().connect(&number(9.0), Expect::Count(1), Some(soon()));
    let mut next = next.unwrap();
    let model = background.read().unwrap();
    assert_eq!((value(&model), model.version().unwrap()), (9.0, Version(1)));
    assert_eq!(model.run(), next.run());
    assert!(model.run().epoch > first.epoch);
    drop(model);
    let status = background.status().unwrap();
    assert_eq!(status.state, BackgroundState::Following);
    let report = next.send(&number(10.0)).unwrap();
    assert!(report.all_applied(), "{report}");
}

#[test]
fn old_versions_are_not_reported_to_the_next_sender() {
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
    joined(BackgroundState::Closed);

    let (say, ready) = mpsc::channel();
    let unready = Unready {
        weights: number(9.0),
        ready: Mutex::new(ready),
    };
    let next = thread::scope(|scope| {
        let next = scope.spawn(|| setup().connect(&unready, Expect::Count(0), Some(soon())));
        joined(BackgroundState::Following);
        // It belongs to the run before, and so says the worker.
        assert!(background.safe_point().unwrap().is_some());
        let model = background.read().unwrap();
        assert_eq!(
            (value(&model), model.version().unwrap(), model.run()),
            (5.0, Version(5), first)
        );
        say.send(()).unwrap();
        next.join().unwrap().unwrap()
    });
    assert_eq!(next.workers()[0].versions[0], Version::NONE);
    staged(Version(1));
    assert_eq!(next.workers()[0].versions[0], Version::NONE);
    assert!(background.safe_point().unwrap().is_some());
    let model = background.read().unwrap();
    assert_eq!(
        (value(&model), model.version().unwrap(), model.run()),
        (9.0, Version(1), next.run())
    );
    assert_eq!(next.workers()[0].versions[0], Version(1));
}

/// One that answers and cannot be followed is told so once, and the worker says
/// why it still searches.
#[test]
fn why_a_sender_is_not_followed_is_in_the_status() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let setup = || setup().run_dir(&run).unwrap();
    for _ in 0..3 {
        let earlier = setup().connect(&number(0.0), Expect::Count(0), Some(soon()));
        earlier.unwrap().shutdown();
    }
    let (first, background) = numbers(SafePoints::Implied, setup());
    assert_eq!(first.run().epoch, Epoch(4));
    first.shutdown();
    sees(&background, |status| {
        status.state == BackgroundState::Closed
    });
    // Older copies of the directory are put back.
    for (before, words) in [(1, "a newer trainer"), (3, "higher epoch")] {
        std::fs::write(run.join("epoch"), before.to_string()).unwrap();
        let other = setup().connect(&number(5.0), Expect::Count(0), Some(soon()));
        let mut other = other.unwrap();
        let mut looks = 0;
        let there = background.wait(Some(soon()), |status| {
            let found = status.failure.as_ref();
            looks += u32::from(found.is_some_and(|failure| failure.contains(words)));
            looks > 12
        });
        assert!(there.unwrap(), "{background:?}");
        let state = background.status().unwrap().state;
        assert_eq!(state, BackgroundState::Closed);
        let report = other.send(&number(6.0)).unwrap();
        assert!(report.workers.len() <= 1, "{report}");
        other.shutdown();
        sees(&background, |status| status.failure.is_none());
    }
    let next = setup().connect(&number(9.0), Expect::Count(1), Some(soon()));
    let next = next.unwrap();
    let there = background.wait(Some(soon()), |status| status.run == next.run());
    assert!(there.unwrap(), "{background:?}");
    let status = background.status().unwrap();
    assert_eq!(
        (status.state, status.failure, status.run),
        (BackgroundState::Following, None, next.run())
    );
}

/// A scheme whose worker's end breaks when it is told to, and calls back before each report.
#[derive(Debug)]
struct Fragile {
    inner: AnyScheme,
    breaks: Arc<AtomicBool>,
    reports: Reports,
}

#[derive(Debug)]
struct FragileEnd {
    inner: Box<dyn ReceiverTransport>,
    breaks: Arc<AtomicBool>,
    reports: Reports,
}

/// Is called before the sender is told that a version was applied.
#[derive(Clone, Default)]
struct Reports(Arc<OnceLock<Box<dyn Fn() + Send + Sync>>>);

impl fmt::Debug for Reports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Reports")
    }
}

impl Scheme for Fragile {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn allocate_endpoint(&self, models: &[ModelId], run_dir: Option<&Path>) -> Result<Endpoint> {
        self.inner.scheme().allocate_endpoint(models, run_dir)
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
            reports: self.reports.clone(),
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

    fn pull(
        &mut self,
        model: usize,
        pull: VersionRequest,
        until: Deadline,
    ) -> Result<Option<SetSnapshot>> {
        self.inner.pull(model, pull, until)
    }

    fn interrupter(&self) -> Result<Interrupter> {
        self.inner.interrupter()
    }

    fn applied(&mut self, set: &SetSnapshot) -> Result<()> {
        if let Some(call) = self.reports.0.get() {
            call();
        }
        self.inner.applied(set)
    }

    fn refuse(&mut self, set: Option<&SetSnapshot>, reason: &str) -> Result<()> {
        self.inner.refuse(set, reason)
    }
}

/// The sender sends nothing more to it, so to wait would be to wait for ever.
#[test]
fn failed_receiver_reports_it_when_returned() {
    let breaks = Arc::new(AtomicBool::new(false));
    let fragile = AnyScheme::new(Fragile {
        inner: AnyScheme::default(),
        breaks: breaks.clone(),
        reports: Reports::default(),
    });
    let mut sender = setup()
        .connect(&number(1.0), Expect::Count(0), Some(soon()))
        .unwrap();
    let join = |worker| ReceiverSetup::new(sender.init_info(), worker).scheme(fragile.clone());
    let receiver = join(0).connect(Some(soon())).unwrap();
    let background = receiver.in_background(number(0.0), SafePoints::Implied);
    let background = background.unwrap();
    let cascade = Cascade::join(join(1), Some(soon())).unwrap();
    let cascade = cascade.connect(Expect::Count(0), Some(soon())).unwrap();
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
        receiver.recv_timeout(BRIEF).map(drop).unwrap_err(),
        receiver.latest().map(drop).unwrap_err(),
        receiver
            .pull(Pull::newest().timeout(Some(BRIEF)))
            .map(drop)
            .unwrap_err(),
        cascade.forward(Some(BRIEF)).map(drop).unwrap_err(),
    ] {
        let withdrawn = matches!(&error, Error::Withdrawn { reason } if reason == "it broke");
        assert!(withdrawn && error.remedy() == Remedy::Reconnect, "{error}");
    }
}

/// A thread that has the sender's report looks at the worker next.
#[test]
fn status_has_a_version_before_its_report() {
    let mut sender = setup()
        .connect(&number(1.0), Expect::Count(0), Some(soon()))
        .unwrap();
    let info = sender.init_info();
    let join = |worker| {
        let reports = Reports::default();
        let scheme = AnyScheme::new(Fragile {
            inner: AnyScheme::default(),
            breaks: Arc::default(),
            reports: reports.clone(),
        });
        let setup = ReceiverSetup::new(info.clone(), worker).scheme(scheme);
        (setup, reports)
    };
    let (say, said) = mpsc::channel();

    let (worker, reports) = join(0);
    let moody = Moody {
        tensors: number(0.0),
        fails_at: vec![2.0],
        ..Moody::default()
    };
    let receiver = worker.connect(Some(soon())).unwrap();
    let background = receiver.in_background(moody, SafePoints::Implied).unwrap();
    let background = Arc::new(background);
    let (weak, tell) = (Arc::downgrade(&background), say.clone());
    let look = move || {
        let status = weak.upgrade().unwrap().status().unwrap();
        tell.send((status, Version(3))).unwrap();
    };
    let _ = reports.0.set(Box::new(look));

    let (worker, reports) = join(1);
    let receiver = worker.connect(Some(soon())).unwrap();
    let snapshots = Arc::new(receiver.snapshots_in_background().unwrap());
    let (weak, tell) = (Arc::downgrade(&snapshots), say.clone());
    let look = move || {
        let snapshots = weak.upgrade().unwrap();
        let newest = snapshots.newest().unwrap().unwrap().versions()[0].1;
        tell.send((snapshots.status().unwrap(), newest)).unwrap();
    };
    let _ = reports.0.set(Box::new(look));

    let (worker, reports) = join(2);
    let cascade = Cascade::join(worker, Some(soon())).unwrap();
    let cascade = cascade.connect(Expect::Count(0), Some(soon())).unwrap();
    let cascade = Arc::new(cascade.in_background().unwrap());
    let (weak, tell) = (Arc::downgrade(&cascade), say);
    let look = move || {
        let cascade = weak.upgrade().unwrap();
        let last = cascade.last().unwrap().unwrap().versions[0].1;
        tell.send((cascade.status().unwrap(), last)).unwrap();
    };
    let _ = reports.0.set(Box::new(look));

    let applied = until(WaitFor::Applied);
    let report = sender.send_with(&number(2.0), &applied).unwrap();
    assert_eq!(report.failed().count(), 1, "{report}");
    sees(&background, |status| status.failure.is_some());
    let report = sender.send_with(&number(3.0), &applied).unwrap();
    assert!(report.all_applied(), "{report}");
    let mut seen = [0; 2];
    for (status, at_hand) in said.try_iter() {
        let version = status.version().unwrap();
        assert_eq!((version, status.failure), (at_hand, None));
        seen[usize::from(version == Version(3))] += 1;
    }
    assert_eq!(seen, [2, 3]);
}
