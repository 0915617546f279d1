//! Sends whose workers are still on their way.

use std::thread;
use std::time::{Duration, Instant};

use weightsync_engine::{
    AsyncSendLimit, Error, Outcome, Pull, ReceiverSetup, SendOptions, SenderSetup, Version, WaitFor,
};

use crate::{BRIEF, connect, join, pair, soon, weights};

fn to(workers: &[u32], deadline: Duration) -> SendOptions {
    let options = SendOptions::new().workers(workers.iter().copied());
    options.timeout(Some(deadline))
}

#[test]
fn finished_sends_do_not_count_in_any_order() {
    let setup = SenderSetup::new("policy", &weights()).unwrap();
    let setup = setup.slots(2, 8).async_send_limit(AsyncSendLimit::Queue(2));
    let (mut sender, mut receivers) = connect(setup, &weights(), 3);
    let send = |sender: &mut weightsync_engine::Sender, worker, deadline| {
        sender.send_async(&weights(), &to(&[worker], deadline))
    };
    let slow = send(&mut sender, 0, soon()).unwrap();
    let quick = send(&mut sender, 1, soon()).unwrap();
    let error = send(&mut sender, 2, BRIEF).unwrap_err();
    let Error::SendPending { versions, allowed } = error else {
        panic!("{error}")
    };
    assert_eq!((versions[0].1, allowed), (Version(2), 2));
    receivers[1].recv_timeout(soon()).unwrap().unwrap();
    assert!(quick.is_settled().unwrap() && !slow.is_settled().unwrap());
    let third = send(&mut sender, 2, BRIEF).unwrap();

    // Also one that is done while the next waits for its way.
    let since = Instant::now();
    thread::scope(|scope| {
        scope.spawn(|| receivers[2].recv_timeout(soon()).unwrap().unwrap());
        send(&mut sender, 1, soon()).unwrap();
    });
    assert!(since.elapsed() < soon() / 2);
    assert!(third.is_settled().unwrap() && !slow.is_settled().unwrap());
}

#[test]
fn the_report_of_a_settled_send_outlives_the_sender() {
    for level in [WaitFor::Staged, WaitFor::Applied] {
        let (mut sender, mut receiver) = pair(&weights());
        let options = SendOptions::new().wait(level);
        let mut sent = Vec::new();
        for _ in 0..3 {
            sent.push(sender.send_async(&weights(), &options).unwrap());
            receiver.recv_timeout(soon()).unwrap().unwrap();
        }
        // One of them has been waited for, one made way, one was not looked at.
        assert!(sent[0].wait(Some(soon())).unwrap().all_reached());
        sender.shutdown();
        for (version, one) in (2..).zip(&sent) {
            assert!(one.is_settled().unwrap(), "{level:?}");
            let report = one.wait(None).unwrap();
            assert_eq!(report.version().unwrap(), Version(version));
            assert_eq!(report.workers[0].outcome, Outcome::Applied);
        }
    }
}

#[test]
fn unsettled_send_is_unknown_after_shutdown() {
    let (mut sender, _receiver) = pair(&weights());
    let sent = sender.send_async(&weights(), &SendOptions::new()).unwrap();
    assert_eq!(
        sent.wait(Some(BRIEF)).unwrap().workers[0].outcome,
        Outcome::Late
    );
    // A wait in another thread ends as well.
    thread::scope(|scope| {
        let waiting = scope.spawn(|| sent.wait(None));
        sender.shutdown();
        let error = waiting.join().unwrap().unwrap_err();
        assert!(matches!(error, Error::SenderClosed), "{error}");
    });
    let error = sent.is_settled().unwrap_err();
    assert!(matches!(error, Error::SenderClosed), "{error}");
}

/// Two receivers of one number in one process, one after the other.
#[test]
fn departed_worker_does_not_settle_its_successor() {
    let setup = SenderSetup::new("policy", &weights()).unwrap();
    let info = setup.init_info();
    let (mut sender, receivers) = connect(setup, &weights(), 1);
    drop(receivers);
    let mut second = join(ReceiverSetup::new(info, 0)).unwrap();
    let report = sender.send_with(&weights(), &to(&[0], BRIEF)).unwrap();
    let late = |report: &weightsync_engine::Report| {
        let mut lines = report.workers.iter();
        !report.all_applied() && lines.any(|line| line.outcome == Outcome::Late)
    };
    assert!(late(&report), "{report}");
    let sent = sender.send_async(&weights(), &SendOptions::new()).unwrap();
    for _ in 0..2 {
        let report = sent.wait(Some(BRIEF)).unwrap();
        assert!(late(&report), "{report}");
    }
    second.recv_timeout(soon()).unwrap().unwrap();
    assert!(sent.wait(Some(soon())).unwrap().all_applied());
}

/// Once it waits for it no more, it takes what is sent as before.
#[test]
fn pending_send_is_checked_again_after_a_later_one() {
    let (mut sender, mut receiver) = pair(&weights());
    let sent = thread::scope(|scope| {
        let asking = scope.spawn(|| {
            let later = Pull::at_least(Version(9));
            receiver.pull(later.timeout(Some(BRIEF * 5))).unwrap()
        });
        let sent = sender.send_async(&weights(), &SendOptions::new()).unwrap();
        let report = sent.wait(Some(soon())).unwrap();
        assert_eq!(report.workers[0].outcome, Outcome::Asks, "{report}");
        assert!(asking.join().unwrap().is_none());
        sent
    });
    receiver.recv_timeout(soon()).unwrap().unwrap();
    let report = sent.wait(Some(soon())).unwrap();
    assert!(report.all_applied(), "{report}");
    assert_eq!(report.workers[0].outcome, Outcome::Applied, "{report}");
}

/// Not one that it never looked at: its line says why, and the next send waits again.
#[test]
fn a_late_worker_costs_one_send_its_deadline() {
    let (mut sender, mut receiver) = pair(&weights());
    let late = |report: &weightsync_engine::Report| {
        assert_eq!(report.workers[0].outcome, Outcome::Late, "{report}");
        assert!(!report.all_applied() && report.failed().count() == 1);
        report.workers[0].late
    };
    let brief = SendOptions::new().timeout(Some(BRIEF));
    let report = sender.send_with(&weights(), &brief).unwrap();
    assert_eq!(late(&report), None);
    assert!(report.took >= BRIEF, "{report}");
    // It would take the life of this test.
    let long = SendOptions::new().timeout(Some(Duration::MAX));
    for _ in 0..3 {
        let report = sender.send_with(&weights(), &long).unwrap();
        assert!(late(&report).unwrap() >= BRIEF, "{report}");
        let words = report.to_string();
        assert!(
            words.contains("and was not waited for; it goes on with v1"),
            "{words}"
        );
    }
    // Nor are asynchronous ones in each other's way.
    for _ in 0..3 {
        let sent = sender.send_async(&weights(), &long).unwrap();
        assert!(sent.is_settled().unwrap());
        assert!(late(&sent.wait(None).unwrap()).is_some());
    }
    // If it is told to, it waits.
    let insists = brief.clone().wait_late(true);
    let report = sender.send_with(&weights(), &insists).unwrap();
    assert_eq!(late(&report), None);
    assert!(report.took >= BRIEF, "{report}");

    assert_eq!(receiver.recv().unwrap().version(), Version(9));
    let sent = sender.send_async(&weights(), &long).unwrap();
    assert!(!sent.is_settled().unwrap());
    receiver.recv().unwrap();
    assert!(sent.wait(None).unwrap().all_applied());
}
