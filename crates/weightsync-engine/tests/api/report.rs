//! The sentences a person reads.

use std::thread;
use std::time::Duration;

use weightsync_engine::{
    AnyScheme, Error, Expect, ModelId, Outcome, Pull, ReceiverSetup, Report, SendOptions,
    SenderSetup, Set, Version, WaitFor, WorkerId, WorkerReport,
};

use crate::{soon, weights};

fn line(worker: u32, outcome: Outcome, version: u64) -> WorkerReport {
    WorkerReport {
        worker: WorkerId(worker),
        pid: 100 + worker,
        outcome,
        versions: vec![Version(version)],
        current: version >= 7,
        after: Duration::from_micros(1500),
        late: None,
    }
}

fn report(workers: Vec<WorkerReport>) -> Report {
    Report {
        versions: vec![(ModelId::new("policy").unwrap(), Version(7))],
        partial: None,
        changes: None,
        level: WaitFor::Applied,
        bytes: 1024,
        copied: Duration::from_micros(250),
        took: Duration::from_millis(3),
        workers,
    }
}

#[test]
fn every_outcome_has_its_sentence() {
    let refused = || Outcome::Refused {
        reason: "tensor \"b\" cannot be loaded: no room".into(),
    };
    for (line, words) in [
        (
            line(0, Outcome::Applied, 7),
            "worker 0 (pid 100) applied it after 1.5ms",
        ),
        (
            line(1, refused(), 6),
            "worker 1 (pid 101) refused it: tensor \"b\" cannot be loaded: no room; it goes on with v6",
        ),
        (
            line(1, refused(), 0),
            "worker 1 (pid 101) refused it: tensor \"b\" cannot be loaded: no room; it has no version yet",
        ),
        (
            line(2, Outcome::Died, 5),
            "worker 2 (pid 102) died; its last version was v5",
        ),
        (
            line(2, Outcome::Died, 0),
            "worker 2 (pid 102) died; it had no version yet",
        ),
        (
            line(
                2,
                Outcome::Failed {
                    reason: "out of memory".into(),
                },
                5,
            ),
            "worker 2 (pid 102) failed: out of memory; its last version was v5",
        ),
        (
            line(3, Outcome::Left, 7),
            "worker 3 (pid 103) left in order",
        ),
        (
            line(4, Outcome::Late, 6),
            "worker 4 (pid 104) had not applied it after 1.5ms; it goes on with v6",
        ),
        (
            line(4, Outcome::Late, 0),
            "worker 4 (pid 104) had not applied it after 1.5ms; it has no version yet",
        ),
        (
            WorkerReport {
                late: Some(Duration::from_millis(32_100)),
                ..line(4, Outcome::Late, 6)
            },
            "worker 4 (pid 104) has been late for 32.1s and was not waited for; it goes on with v6",
        ),
        (
            line(5, Outcome::Staged, 6),
            "worker 5 (pid 105) had staged but not applied it after 1.5ms; it goes on with v6",
        ),
        (
            line(6, Outcome::Held, 3),
            "worker 6 (pid 106) is held at v3",
        ),
        (
            line(7, Outcome::Full, 2),
            "worker 7 (pid 107) will not get it: its queue was full for 1.5ms; it goes on with v2",
        ),
        (
            WorkerReport {
                after: Duration::from_nanos(2100),
                ..line(7, Outcome::Full, 2)
            },
            "worker 7 (pid 107) will not get it: its queue was full; it goes on with v2",
        ),
        (
            WorkerReport {
                versions: [0, 2, 5].map(Version).to_vec(),
                ..line(4, Outcome::Late, 0)
            },
            "worker 4 (pid 104) had not applied it after 1.5ms; it goes on with v2, v5",
        ),
        (
            line(8, Outcome::Asks, 2),
            "worker 8 (pid 108) takes what it asks for, and runs v2",
        ),
        (
            WorkerReport {
                pid: 0,
                ..line(9, Outcome::Absent, 0)
            },
            "worker 9 is not connected; it gets this version if it joins",
        ),
    ] {
        assert_eq!(line.to_string(), words);
    }
}

#[test]
fn report_gives_totals_and_names_missing_workers() {
    let all = report(vec![
        line(0, Outcome::Applied, 7),
        line(1, Outcome::Applied, 7),
    ]);
    assert!(all.all_applied());
    assert_eq!(
        all.to_string(),
        "policy v7 was applied by 2 of 2 workers in 3.0ms"
    );

    let some = report(vec![
        line(0, Outcome::Applied, 7),
        line(1, Outcome::Died, 6),
        line(2, Outcome::Late, 6),
    ]);
    assert!(!some.all_applied());
    assert_eq!(some.failed().count(), 2);
    assert_eq!(
        some.to_string(),
        "policy v7 was applied by 1 of 3 workers in 3.0ms\n  \
         worker 1 (pid 101) died; its last version was v6\n  \
         worker 2 (pid 102) had not applied it after 1.5ms; it goes on with v6"
    );
    let part = |names: &[&str]| Report {
        partial: Some(names.iter().map(|name| (*name).into()).collect()),
        ..report(Vec::new())
    };
    for (names, words) in [
        (&["a"][..], "policy v7 (1 tensor of it) is live"),
        (&["a", "b"], "policy v7 (2 tensors of it) is live"),
    ] {
        let text = part(names).to_string();
        assert!(text.starts_with(words), "{text}");
    }
    let nobody = report(Vec::new());
    assert!(!nobody.all_applied(), "nobody has it");
    let error = nobody.clone().ensure_applied().unwrap_err();
    assert_eq!(error.to_string(), nobody.to_string());
    assert!(all.ensure_applied().is_ok());
    assert_eq!(
        nobody.to_string(),
        "policy v7 is live after 250.0µs; there is no worker"
    );
}

/// One that asks has a version if that is what it runs, and is no failure if not.
#[test]
fn asking_worker_counts_by_the_version_it_runs() {
    for (runs, has) in [(6, false), (7, true), (8, true)] {
        let report = report(vec![
            line(0, Outcome::Applied, 7),
            line(1, Outcome::Asks, runs),
        ]);
        assert_eq!(report.all_applied(), has, "{report}");
        assert_eq!(report.failed().count(), 0, "{report}");
        let count = if has { 2 } else { 1 };
        let words = format!("policy v7 was applied by {count} of 2 workers in 3.0ms");
        assert!(report.to_string().starts_with(&words), "{report}");
    }
    let mut held = report(vec![line(0, Outcome::Held, 3), line(1, Outcome::Left, 0)]);
    assert!(!held.all_applied(), "nobody has it");
    held.workers.push(line(2, Outcome::Applied, 7));
    assert!(held.all_applied());
    // Different weights for different workers: what counts is what each was sent.
    held.versions
        .push((ModelId::new("policy").unwrap(), Version(8)));
    held.workers.push(line(3, Outcome::Asks, 7));
    assert!(held.all_applied());
    held.workers.push(line(4, Outcome::Asks, 6));
    assert!(!held.all_applied());
}

/// A model it does not take is none that it has not.
#[test]
fn asking_worker_counts_by_the_models_it_takes() {
    let one = weights();
    let both = || Set::new().with("actor", &one).with("critic", &one);
    let setup = SenderSetup::new("actor", &one).unwrap();
    let setup = setup.add_model("critic", &one).unwrap();
    let setup = setup.scheme("shared-mem:pull".parse::<AnyScheme>().unwrap());
    let setup = setup.unwrap();
    let joining = ReceiverSetup::new(setup.init_info(), 0).models(["critic"]);
    let joining = thread::spawn(move || joining.connect(Some(soon())).unwrap());
    let mut sender = setup
        .connect(&both(), Expect::Count(1), Some(soon()))
        .unwrap();
    let mut receiver = joining.join().unwrap();
    receiver.recv_timeout(soon()).unwrap();
    for has in [false, true] {
        let pending = sender.send_async(&both(), &SendOptions::new()).unwrap();
        if has {
            receiver
                .pull(Pull::newest().timeout(Some(soon())))
                .unwrap()
                .unwrap();
        }
        let report = pending.wait(Some(soon())).unwrap();
        assert_eq!(report.workers[0].outcome, Outcome::Asks);
        assert_eq!(report.all_applied(), has, "{report}");
        assert_eq!(report.failed().count(), 0, "{report}");
    }
}

/// What was waited for is what had not happened.
#[test]
fn late_line_names_the_level_waited_for() {
    let late = Report {
        level: WaitFor::Staged,
        ..report(vec![line(4, Outcome::Late, 6)])
    };
    let words = "worker 4 (pid 104) had not staged it after 1.5ms; it goes on with v6";
    assert!(late.to_string().ends_with(words), "{late}");
    let lost = Report {
        level: WaitFor::Sent,
        ..report(vec![line(7, Outcome::Full, 2)])
    };
    let words = "will not get it: its queue was full; it goes on with v2";
    assert!(lost.to_string().ends_with(words), "{lost}");
}

#[test]
fn the_times_of_a_report_are_in_order() {
    let setup = SenderSetup::new("policy", &weights()).unwrap();
    let mut sender = setup
        .connect(&weights(), Expect::Count(0), Some(soon()))
        .unwrap();
    let report = sender
        .send_with(
            &weights(),
            &SendOptions::new()
                .wait(WaitFor::Applied)
                .timeout(Some(soon())),
        )
        .unwrap();
    assert!(report.copied <= report.took && report.took < soon());
    assert_eq!(
        (report.version().unwrap(), report.versions[0].0.as_str()),
        (Version(2), "policy")
    );
}

#[test]
fn every_refusal_is_named() {
    let error = Error::Refused {
        model: ModelId::new("policy").unwrap(),
        refusals: vec![
            (WorkerId(2), "no room".into()),
            (WorkerId(4), "no head".into()),
        ],
    };
    assert_eq!(
        error.to_string(),
        "policy was refused by worker 2: no room; worker 4: no head"
    );
}

#[test]
fn worker_that_leaves_after_applying_has_one_line() {
    const WORKERS: u32 = 4;
    for _ in 0..25 {
        let setup = SenderSetup::new("policy", &weights()).unwrap();
        let info = setup.init_info();
        let workers: Vec<_> = (0..WORKERS)
            .map(|worker| {
                let info = info.clone();
                thread::spawn(move || {
                    let mut receiver = ReceiverSetup::new(info, worker)
                        .connect(Some(soon()))
                        .unwrap();
                    let mut version = Version::NONE;
                    while version < Version(2) {
                        version = receiver.recv().unwrap().version();
                    }
                })
            })
            .collect();
        let expect = Expect::Count(WORKERS as usize);
        let mut sender = setup.connect(&weights(), expect, Some(soon())).unwrap();
        let report = sender.send(&weights()).unwrap();
        let lines: Vec<_> = report.workers.iter().map(|line| line.worker.0).collect();
        assert_eq!(lines, [0, 1, 2, 3], "{report}");
        assert!(report.all_applied(), "{report}");
        for worker in workers {
            worker.join().unwrap();
        }
    }
}
