use super::*;

const WORKER: WorkerId = WorkerId(7);

fn process(pid: u32) -> Process {
    Process { host: [3; 16], pid }
}

/// A worker of process 50, reached by agent 1; what is had of it is a word.
fn seated() -> Seats<&'static str, u64> {
    let mut seats = Seats::new();
    assert!(matches!(seats.comes(1, WORKER, 100), Comer::New(None)));
    seats.put(1, (WORKER, 100), process(50), "first");
    seats
}

const NOW: Duration = Duration::from_secs(10);

#[test]
fn a_worker_is_heard_by_the_agent_that_reaches_it() {
    let mut seats = seated();
    assert_eq!(seats.heard(1, WORKER, 100), Some(&mut "first"));
    assert_eq!(seats.heard(1, WORKER, 99), None);
    assert_eq!(seats.heard(2, WORKER, 100), None);
    // Another takes it over, before the first one's end is noticed.
    assert!(matches!(
        seats.comes(2, WORKER, 100),
        Comer::Back(&mut "first")
    ));
    assert_eq!(seats.gone(1, WORKER, 100, false, NOW), Leaver::Elsewhere);
    assert_eq!(seats.part(1, None, Parting::Silent, NOW).over, []);
    assert_eq!(seats.reached(WORKER), Some((2, &mut "first")));
    assert_eq!(
        seats.gone(2, WORKER, 100, false, NOW),
        Leaver::Over("first")
    );
    assert_eq!(seats.reached(WORKER), None);
}

#[test]
fn who_gave_up_waiting_at_an_agent_is_where_it_was() {
    // (whether the first agent has gone meanwhile, whether it died)
    for (parts, died) in [(false, false), (false, true), (true, false)] {
        let mut seats = seated();
        // What it asked for long ago, while it was not heard there.
        assert!(matches!(seats.comes(2, WORKER, 100), Comer::Back(_)));
        if parts {
            assert_eq!(seats.part(1, None, Parting::Silent, NOW).over, []);
        }
        match seats.gone(2, WORKER, 100, died, NOW) {
            Leaver::Back(of) => assert_eq!((*of, parts, died), ("first", false, false)),
            gone => assert_eq!((gone, parts || died), (Leaver::Over("first"), true)),
        }
        let reached = seats.reached(WORKER).map(|(agent, _)| agent);
        assert_eq!(reached, (!parts && !died).then_some(1));
    }
}

#[test]
fn worker_moving_to_a_dead_agent_stays() {
    use Parting::{Cut, HungUp, Left, Silent};
    for how in [Left, HungUp, Cut, Silent] {
        let on_its_way = || {
            let mut seats = seated();
            assert!(matches!(seats.comes(2, WORKER, 100), Comer::Back(_)));
            let parted = seats.part(2, Some(process(60)), how, NOW);
            let (over, back) = (Vec::new(), vec![WORKER]);
            assert_eq!(parted, Parted { over, back }, "{how:?}");
            assert_eq!(seats.heard(1, WORKER, 100), Some(&mut "first"));
            assert_eq!(seats.due(), None);
            seats
        };
        // Nowhere else.
        let parted = on_its_way().part(1, None, Parting::HungUp, NOW);
        assert_eq!(parted.back, []);
        assert_eq!(
            on_its_way().gone(1, WORKER, 100, true, NOW),
            Leaver::Over("first")
        );
        // It was there already, and leaves the first: it comes from there by another.
        let mut seats = on_its_way();
        assert_eq!(seats.gone(1, WORKER, 100, false, NOW), Leaver::Elsewhere);
        assert_eq!(seats.due(), Some(NOW + GRACE));
        assert!(matches!(seats.comes(3, WORKER, 100), Comer::Back(_)));
        assert_eq!(seats.due(), None);
        assert_eq!(
            seats.gone(3, WORKER, 100, false, NOW),
            Leaver::Over("first")
        );
        // Or has left for good.
        let mut seats = on_its_way();
        assert_eq!(seats.gone(1, WORKER, 100, false, NOW), Leaver::Elsewhere);
        assert_eq!(seats.late(NOW + GRACE), [("first", Going::Left)]);
        // So long after that it has been nowhere else: it leaves.
        let (mut seats, late) = (on_its_way(), NOW + GRACE);
        assert_eq!(
            seats.gone(1, WORKER, 100, false, late),
            Leaver::Over("first")
        );
        assert_eq!(seats.due(), None);
    }
}

#[test]
fn how_an_agent_goes_says_what_becomes_of_its_workers() {
    // (the agent's process, how it goes, after how long what is over)
    let cases = [
        (Some(process(50)), Parting::HungUp, BACK, Going::Died),
        (Some(process(51)), Parting::HungUp, GRACE, Going::Lost),
        (None, Parting::HungUp, GRACE, Going::Lost),
        (Some(process(50)), Parting::Cut, GRACE, Going::Lost),
        (Some(process(50)), Parting::Left, GRACE, Going::Lost),
        (
            Some(process(51)),
            Parting::Silent,
            Duration::ZERO,
            Going::Lost,
        ),
    ];
    for (process, how, after, going) in cases {
        let mut seats = seated();
        let over = seats.part(1, process, how, NOW).over;
        assert_eq!(seats.reached(WORKER), None);
        if after.is_zero() {
            assert_eq!(over, [("first", going)], "{process:?} {how:?}");
            assert_eq!(seats.due(), None);
            continue;
        }
        assert_eq!(over, [], "{process:?} {how:?}");
        assert_eq!(seats.due(), Some(NOW + after));
        assert_eq!(seats.late(NOW + after - Duration::from_millis(1)), []);
        let late = seats.late(NOW + after);
        assert_eq!(late, [("first", going)], "{process:?} {how:?}");
        assert_eq!(seats.due(), None);
    }
}

#[test]
fn who_comes_back_in_time_has_its_seat() {
    let mut seats = seated();
    assert_eq!(seats.part(1, None, Parting::HungUp, NOW).over, []);
    assert!(matches!(
        seats.comes(2, WORKER, 100),
        Comer::Back(&mut "first")
    ));
    assert_eq!(seats.due(), None);
    assert_eq!(seats.late(NOW + GRACE), []);
    // Also one whose agent it was itself: a link that was cut is not its death.
    assert_eq!(
        seats.part(2, Some(process(50)), Parting::HungUp, NOW).over,
        []
    );
    assert!(matches!(seats.comes(3, WORKER, 100), Comer::Back(_)));
    assert_eq!(seats.late(NOW + GRACE), []);
}

#[test]
fn restarted_worker_replaces_a_silent_one() {
    let mut seats = seated();
    seats.part(1, None, Parting::HungUp, NOW);
    assert!(matches!(
        seats.comes(2, WORKER, 101),
        Comer::New(Some("first"))
    ));
    seats.put(2, (WORKER, 101), process(52), "second");
    assert_eq!(seats.due(), None);
    let all: Vec<_> = seats.iter().collect();
    assert_eq!(all, [(WORKER, process(52), Some(2), &"second")]);
}

/// The next life of the worker, by an agent.
fn next_life(agent: AgentId, instance: u64) -> Waiter<u64> {
    Waiter {
        agent,
        worker: WORKER,
        instance,
        asks: instance,
    }
}

/// It has come, and waits.
fn contested() -> Seats<&'static str, u64> {
    let mut seats = seated();
    assert!(matches!(seats.comes(2, WORKER, 101), Comer::Waits(1)));
    assert_eq!(seats.wait(next_life(2, 101)), None);
    assert_eq!(seats.may_come(), []);
    assert_eq!(seats.in_vain(2), []);
    assert_eq!(seats.heard(1, WORKER, 100), Some(&mut "first"));
    seats
}

#[test]
fn restarted_worker_waits_for_news_of_its_predecessor() {
    let mut seats = contested();
    assert_eq!(seats.in_vain(1), [next_life(2, 101)]);
    assert_eq!(seats.in_vain(1), []);
    for how in [Parting::Silent, Parting::HungUp, Parting::Left] {
        let mut seats = contested();
        let over = seats.part(1, None, how, NOW).over;
        assert_eq!(over.len(), usize::from(how == Parting::Silent));
        assert_eq!(seats.may_come(), [next_life(2, 101)]);
        let left = over.is_empty().then_some("first");
        match seats.comes(2, WORKER, 101) {
            Comer::New(old) => assert_eq!(old, left, "{how:?}"),
            comer => panic!("{how:?}: {comer:?}"),
        }
    }
    // The one before it was over already, and that is said now.
    let mut seats = contested();
    assert_eq!(seats.gone(1, WORKER, 100, true, NOW), Leaver::Over("first"));
    assert_eq!(seats.may_come(), [next_life(2, 101)]);
    // It has come by another way, so it is there.
    let mut seats = contested();
    assert!(matches!(seats.comes(3, WORKER, 100), Comer::Back(_)));
    assert_eq!(seats.in_vain(3), [next_life(2, 101)]);
}

#[test]
fn who_is_heard_just_now_is_there() {
    assert!(matches!(seated().comes(1, WORKER, 101), Comer::Two));
}

#[test]
fn waiting_worker_leaves_with_its_agent() {
    let mut seats = contested();
    assert_eq!(seats.gone(2, WORKER, 101, false, NOW), Leaver::Elsewhere);
    assert_eq!(seats.in_vain(1), []);
    let mut seats = contested();
    assert_eq!(seats.part(2, None, Parting::HungUp, NOW).over, []);
    assert_eq!(seats.in_vain(1), []);
    let mut seats = contested();
    assert_eq!(seats.wait(next_life(3, 102)), Some(next_life(2, 101)));
    assert_eq!(seats.gone(2, WORKER, 101, false, NOW), Leaver::Elsewhere);
    assert_eq!(seats.in_vain(1), [next_life(3, 102)]);
}

/// Then it is another whose silence is waited for.
#[test]
fn waiting_worker_retries_when_predecessor_is_found() {
    let mut seats = seated();
    assert!(matches!(seats.comes(3, WORKER, 100), Comer::Back(_)));
    assert!(matches!(seats.comes(2, WORKER, 101), Comer::Waits(3)));
    assert_eq!(seats.wait(next_life(2, 101)), None);
    // It gave up waiting there, and is where it was.
    assert_eq!(
        seats.gone(3, WORKER, 100, false, NOW),
        Leaver::Back(&mut "first")
    );
    assert_eq!(seats.comes_again(WORKER), Some(next_life(2, 101)));
    assert!(matches!(seats.comes(2, WORKER, 101), Comer::Waits(1)));
}
