//! Workers that went: which lines they are, and what `connect` makes of them.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;
use std::time::Duration;

use weightsync_engine::{
    AnyScheme, Error, Expect, Outcome, ReceiverSetup, Remedy, SendOptions, Sender, SenderSetup,
    Session, WaitFor,
};

use crate::{connect, join, send, soon, weights};

fn two() -> (Sender, Vec<weightsync_engine::Receiver>) {
    let source = weights();
    connect(SenderSetup::new("policy", &source).unwrap(), &source, 2)
}

fn failed(reason: &str) -> Outcome {
    Outcome::Failed {
        reason: reason.into(),
    }
}

#[test]
fn failed_worker_has_a_line_until_forgotten() {
    let (mut sender, mut workers) = two();
    workers.pop().unwrap().fail("out of memory");
    for _ in 0..3 {
        let (report, _) = send(&mut sender, &weights(), || workers[0].recv_timeout(soon()));
        let report = report.unwrap();
        let line = report.worker(1).unwrap();
        assert_eq!(line.outcome, failed("out of memory"), "{report}");
        assert!(!report.all_applied() && report.failed().count() == 1);
        assert!(matches!(
            report.ensure_applied(),
            Err(Error::NotApplied { .. })
        ));
    }
    let sent = SendOptions::new().wait(WaitFor::Sent);
    let report = sender.send_with(&weights(), &sent).unwrap();
    assert_eq!(report.workers.len(), 1, "{report}");
    workers[0].recv_timeout(soon()).unwrap();
    sender.forget([1]).unwrap();
    let (report, _) = send(&mut sender, &weights(), || workers[0].recv_timeout(soon()));
    let report = report.unwrap().ensure_applied().unwrap();
    assert_eq!(report.workers.len(), 1, "{report}");
}

/// What it holds is no reason not to say that it is gone.
#[test]
fn a_failed_worker_is_a_line_while_its_snapshots_live() {
    let (mut sender, mut workers) = two();
    let held = workers[1].latest().unwrap().unwrap();
    workers.pop().unwrap().fail("out of memory");
    for _ in 0..2 {
        let (report, _) = send(&mut sender, &weights(), || workers[0].recv_timeout(soon()));
        let report = report.unwrap();
        assert_eq!(report.worker(1).unwrap().outcome, failed("out of memory"));
    }
    drop(held);
    let mut again = join(ReceiverSetup::new(sender.init_info(), 1)).unwrap();
    let both = || (workers[0].recv_timeout(soon()), again.recv_timeout(soon()));
    let (report, _) = send(&mut sender, &weights(), both);
    assert!(report.unwrap().all_applied());
}

#[test]
fn a_worker_that_panics_has_failed() {
    let (mut sender, mut workers) = two();
    let receiver = workers.pop().unwrap();
    let panicked = catch_unwind(AssertUnwindSafe(move || {
        let _receiver = receiver;
        std::panic::resume_unwind(Box::new("a panic of a worker"));
    }));
    assert!(panicked.is_err());
    let (report, _) = send(&mut sender, &weights(), || workers[0].recv_timeout(soon()));
    let report = report.unwrap();
    assert_eq!(report.worker(1).unwrap().outcome, failed("it panicked"));
}

#[test]
fn a_session_goes_on_with_those_that_have_joined() {
    for scheme in ["shared-mem", "multi-process"] {
        let mut trainer = Session::new(scheme.parse::<AnyScheme>().unwrap());
        trainer.init_on_sender("policy", &weights()).unwrap();
        let info = trainer.init_info().unwrap().clone();
        let first = thread::spawn({
            let info = info.clone();
            move || join(ReceiverSetup::new(info, 0)).unwrap()
        });
        let both = || Expect::workers([0, 1]);
        let brief = Duration::from_millis(300);
        let error = trainer
            .connect_sender(&weights(), both(), Some(brief))
            .unwrap_err();
        assert_eq!(error.remedy(), Remedy::Retry);
        assert!(error.to_string().contains("(missing: worker 1)"), "{error}");
        let mut first = first.join().unwrap();
        let error = trainer.send(&weights(), &SendOptions::new()).unwrap_err();
        let words = "send cannot be called while workers are missing: call connect_sender again";
        assert!(error.to_string().starts_with(words), "{error}");

        let second = thread::spawn(move || join(ReceiverSetup::new(info, 1)).unwrap());
        trainer
            .connect_sender(&weights(), both(), Some(soon()))
            .unwrap();
        let mut second = second.join().unwrap();
        let sender = trainer.sender().unwrap();
        let both = || (first.recv_timeout(soon()), second.recv_timeout(soon()));
        let (report, _) = send(sender, &weights(), both);
        assert!(report.unwrap().all_applied());
        trainer.shutdown();
    }
}

/// Each of these workers has left before anybody waits for it.
#[test]
fn workers_that_have_left_in_order_have_been_there() {
    let source = weights();
    let setup = SenderSetup::new("policy", &source).unwrap();
    let info = setup.init_info();
    let mut sender = setup.open(&source, Some(soon())).unwrap();
    for worker in 0..3 {
        drop(join(ReceiverSetup::new(info.clone(), worker)).unwrap());
    }
    sender.wait_for(&Expect::Count(3), Some(soon())).unwrap();
    // Nobody is there for the next wait.
    let brief = Duration::from_millis(50);
    let error = sender.wait_for(&Expect::Count(1), Some(brief)).unwrap_err();
    assert!(matches!(error, Error::MissingWorkers { .. }), "{error}");
    join(ReceiverSetup::new(info, 4)).unwrap().fail("no disk");
    // Until the sender has heard of it, the worker counts as joined.
    while sender.workers().iter().any(|one| one.worker.0 == 4) {
        std::thread::sleep(Duration::from_millis(1));
    }
    let expect = Expect::workers([4]);
    let error = sender.wait_for(&expect, Some(brief)).unwrap_err();
    assert!(error.to_string().contains("no disk"), "{error}");
}
