use super::*;

fn line(worker: u32, pid: u32, outcome: Outcome) -> WorkerReport {
    WorkerReport {
        worker: WorkerId(worker),
        pid,
        versions: vec![Version(3)],
        current: outcome == Outcome::Applied,
        outcome,
        after: Duration::ZERO,
        late: None,
    }
}

fn report(workers: Vec<WorkerReport>) -> Report {
    Report {
        versions: vec![(ModelId::new("policy").unwrap(), Version(3))],
        bytes: 0,
        partial: None,
        changes: None,
        copied: Duration::ZERO,
        took: Duration::ZERO,
        level: WaitFor::Applied,
        workers,
    }
}

#[test]
fn report_tells_changes_in_one_line() {
    let mut told = report(vec![line(0, 10, Outcome::Applied)]);
    let parts = [
        Changes::new(400_000_000, 4_400_000, 5 << 20, 800_000_000),
        Changes::new(112_000_000, 1_100_000, 5 << 20, 224_000_000),
    ];
    told.changes = Some(parts.into_iter().sum());
    let text = told.to_string();
    let expected = "; 1.07 % changed, 10.0 MiB for 976.6 MiB (98 : 1)";
    assert!(text.ends_with(expected), "{text}");
    let none = Changes::new(10, 0, 0, 20).to_string();
    assert_eq!(none, "0.00 % changed, 0 B for 20 B (20 : 1)");
}

#[test]
fn replaced_worker_is_no_failure() {
    let came_back = report(vec![
        line(0, 10, Outcome::Died),
        line(0, 12, Outcome::Applied),
        line(1, 11, Outcome::Applied),
    ]);
    assert!(came_back.all_applied());
    assert_eq!(came_back.failed().count(), 0);
    assert_eq!(came_back.worker(0).unwrap().pid, 12);
    let text = came_back.to_string();
    assert!(text.contains("applied by 2 of 2 workers"), "{text}");
    assert!(text.contains("(pid 10) died"), "{text}");

    let gone = report(vec![
        line(0, 10, Outcome::Died),
        line(1, 11, Outcome::Applied),
    ]);
    assert!(!gone.all_applied());
    assert_eq!(gone.failed().count(), 1);
    assert_eq!(gone.worker(0).unwrap().pid, 10);
    let text = gone.to_string();
    assert!(text.contains("applied by 1 of 2 workers"), "{text}");

    // A second one that died as well is one worker too few.
    let twice = report(vec![
        line(0, 10, Outcome::Died),
        line(0, 12, Outcome::Died),
        line(1, 11, Outcome::Applied),
    ]);
    assert!(!twice.all_applied());
}

#[test]
fn a_successor_that_is_late_is_the_failure() {
    let late = report(vec![line(0, 10, Outcome::Died), line(0, 12, Outcome::Late)]);
    assert!(!late.all_applied());
    let failed: Vec<u32> = late.failed().map(|line| line.pid).collect();
    assert_eq!(failed, [12]);
}
