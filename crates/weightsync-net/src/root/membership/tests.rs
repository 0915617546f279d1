use super::*;

const WORKER: WorkerId = WorkerId(7);

fn life(instance: u64) -> WorkerInstance {
    WorkerInstance {
        worker: WORKER,
        instance,
    }
}

fn process(pid: u32) -> HostProcess {
    HostProcess { host: [3; 16], pid }
}

/// A worker of process 50, reached by agent 1; what is had of it is a word.
fn admitted() -> Membership<&'static str, u64> {
    let mut membership = Membership::new();
    assert!(matches!(
        membership.join(1, life(100)),
        JoinOutcome::New(None)
    ));
    membership.put(1, life(100), process(50), "first");
    membership
}

const NOW: Duration = Duration::from_secs(10);

#[test]
fn a_worker_is_heard_by_the_agent_that_reaches_it() {
    let mut membership = admitted();
    assert_eq!(membership.member_at(1, life(100)), Some(&mut "first"));
    assert_eq!(membership.member_at(1, life(99)), None);
    assert_eq!(membership.member_at(2, life(100)), None);
    // Another takes it over, before the first one's end is noticed.
    assert!(matches!(
        membership.join(2, life(100)),
        JoinOutcome::Back(&mut "first")
    ));
    assert_eq!(
        membership.gone(1, life(100), false, NOW),
        LeaveOutcome::Elsewhere
    );
    assert_eq!(
        membership.remove_agent(1, None, LinkLoss::Silent, NOW).over,
        []
    );
    assert_eq!(membership.reached(WORKER), Some((2, &mut "first")));
    assert_eq!(
        membership.gone(2, life(100), false, NOW),
        LeaveOutcome::Over("first")
    );
    assert_eq!(membership.reached(WORKER), None);
}

#[test]
fn worker_stays_where_it_was_after_giving_up_a_move() {
    // (whether the first agent has gone meanwhile, whether it died)
    for (parts, died) in [(false, false), (false, true), (true, false)] {
        let mut membership = admitted();
        // The worker asked to join here long ago, and could not be reached here before.
        assert!(matches!(
            membership.join(2, life(100)),
            JoinOutcome::Back(_)
        ));
        if parts {
            assert_eq!(
                membership.remove_agent(1, None, LinkLoss::Silent, NOW).over,
                []
            );
        }
        match membership.gone(2, life(100), died, NOW) {
            LeaveOutcome::Back(of) => assert_eq!((*of, parts, died), ("first", false, false)),
            gone => assert_eq!((gone, parts || died), (LeaveOutcome::Over("first"), true)),
        }
        let reached = membership.reached(WORKER).map(|(agent, _)| agent);
        assert_eq!(reached, (!parts && !died).then_some(1));
    }
}

#[test]
fn worker_moving_to_a_dead_agent_stays() {
    use LinkLoss::{Cut, HungUp, Left, Silent};
    for how in [Left, HungUp, Cut, Silent] {
        let on_its_way = || {
            let mut membership = admitted();
            assert!(matches!(
                membership.join(2, life(100)),
                JoinOutcome::Back(_)
            ));
            let departed = membership.remove_agent(2, Some(process(60)), how, NOW);
            let (over, back) = (Vec::new(), vec![WORKER]);
            assert_eq!(departed, AgentDeparture { over, back }, "{how:?}");
            assert_eq!(membership.member_at(1, life(100)), Some(&mut "first"));
            assert_eq!(membership.due(), None);
            membership
        };
        // Nowhere else.
        let departed = on_its_way().remove_agent(1, None, LinkLoss::HungUp, NOW);
        assert_eq!(departed.back, []);
        assert_eq!(
            on_its_way().gone(1, life(100), true, NOW),
            LeaveOutcome::Over("first")
        );
        // The worker had arrived, and leaves the first agent: it comes from there by another.
        let mut membership = on_its_way();
        assert_eq!(
            membership.gone(1, life(100), false, NOW),
            LeaveOutcome::Elsewhere
        );
        assert_eq!(membership.due(), Some(NOW + GRACE));
        assert!(matches!(
            membership.join(3, life(100)),
            JoinOutcome::Back(_)
        ));
        assert_eq!(membership.due(), None);
        assert_eq!(
            membership.gone(3, life(100), false, NOW),
            LeaveOutcome::Over("first")
        );
        // Or has left for good.
        let mut membership = on_its_way();
        assert_eq!(
            membership.gone(1, life(100), false, NOW),
            LeaveOutcome::Elsewhere
        );
        assert_eq!(membership.expire(NOW + GRACE), [("first", Departure::Left)]);
        // This long after that, the worker was nowhere else: it has left.
        let (mut membership, late) = (on_its_way(), NOW + GRACE);
        assert_eq!(
            membership.gone(1, life(100), false, late),
            LeaveOutcome::Over("first")
        );
        assert_eq!(membership.due(), None);
    }
}

#[test]
fn how_an_agent_goes_says_what_becomes_of_its_workers() {
    // (the agent's process, how it goes, after how long what is over)
    let cases = [
        (Some(process(50)), LinkLoss::HungUp, BACK, Departure::Died),
        (Some(process(51)), LinkLoss::HungUp, GRACE, Departure::Lost),
        (None, LinkLoss::HungUp, GRACE, Departure::Lost),
        (Some(process(50)), LinkLoss::Cut, GRACE, Departure::Lost),
        (Some(process(50)), LinkLoss::Left, GRACE, Departure::Lost),
        (
            Some(process(51)),
            LinkLoss::Silent,
            Duration::ZERO,
            Departure::Lost,
        ),
    ];
    for (process, how, after, departure) in cases {
        let mut membership = admitted();
        let over = membership.remove_agent(1, process, how, NOW).over;
        assert_eq!(membership.reached(WORKER), None);
        if after.is_zero() {
            assert_eq!(over, [("first", departure)], "{process:?} {how:?}");
            assert_eq!(membership.due(), None);
            continue;
        }
        assert_eq!(over, [], "{process:?} {how:?}");
        assert_eq!(membership.due(), Some(NOW + after));
        assert_eq!(
            membership.expire(NOW + after - Duration::from_millis(1)),
            []
        );
        let late = membership.expire(NOW + after);
        assert_eq!(late, [("first", departure)], "{process:?} {how:?}");
        assert_eq!(membership.due(), None);
    }
}

#[test]
fn worker_keeps_its_membership_if_back_in_time() {
    let mut membership = admitted();
    assert_eq!(
        membership.remove_agent(1, None, LinkLoss::HungUp, NOW).over,
        []
    );
    assert!(matches!(
        membership.join(2, life(100)),
        JoinOutcome::Back(&mut "first")
    ));
    assert_eq!(membership.due(), None);
    assert_eq!(membership.expire(NOW + GRACE), []);
    // Also one whose agent it was itself: a link that was cut is not its death.
    assert_eq!(
        membership
            .remove_agent(2, Some(process(50)), LinkLoss::HungUp, NOW)
            .over,
        []
    );
    assert!(matches!(
        membership.join(3, life(100)),
        JoinOutcome::Back(_)
    ));
    assert_eq!(membership.expire(NOW + GRACE), []);
}

#[test]
fn restarted_worker_replaces_a_silent_one() {
    let mut membership = admitted();
    membership.remove_agent(1, None, LinkLoss::HungUp, NOW);
    assert!(matches!(
        membership.join(2, life(101)),
        JoinOutcome::New(Some("first"))
    ));
    membership.put(2, life(101), process(52), "second");
    assert_eq!(membership.due(), None);
    let all: Vec<_> = membership.iter().collect();
    assert_eq!(all, [(WORKER, process(52), Some(2), &"second")]);
}

/// The next life of the worker, by an agent.
fn next_life(agent: AgentId, instance: u64) -> MembershipWaiter<u64> {
    MembershipWaiter {
        agent,
        who: life(instance),
        asks: instance,
    }
}

/// A membership that another life of the worker asks for.
fn contested() -> Membership<&'static str, u64> {
    let mut membership = admitted();
    assert!(matches!(
        membership.join(2, life(101)),
        JoinOutcome::Waits(1)
    ));
    assert_eq!(membership.wait(next_life(2, 101)), None);
    assert_eq!(membership.take_retriable(), []);
    assert_eq!(membership.take_in_vain(2), []);
    assert_eq!(membership.member_at(1, life(100)), Some(&mut "first"));
    membership
}

#[test]
fn restarted_worker_waits_for_news_of_its_predecessor() {
    let mut membership = contested();
    assert_eq!(membership.take_in_vain(1), [next_life(2, 101)]);
    assert_eq!(membership.take_in_vain(1), []);
    for how in [LinkLoss::Silent, LinkLoss::HungUp, LinkLoss::Left] {
        let mut membership = contested();
        let over = membership.remove_agent(1, None, how, NOW).over;
        assert_eq!(over.len(), usize::from(how == LinkLoss::Silent));
        assert_eq!(membership.take_retriable(), [next_life(2, 101)]);
        let left = over.is_empty().then_some("first");
        match membership.join(2, life(101)) {
            JoinOutcome::New(old) => assert_eq!(old, left, "{how:?}"),
            joiner => panic!("{how:?}: {joiner:?}"),
        }
    }
    // The one before it was over already, and that is said now.
    let mut membership = contested();
    assert_eq!(
        membership.gone(1, life(100), true, NOW),
        LeaveOutcome::Over("first")
    );
    assert_eq!(membership.take_retriable(), [next_life(2, 101)]);
    // The earlier life came by another route, so it is alive.
    let mut membership = contested();
    assert!(matches!(
        membership.join(3, life(100)),
        JoinOutcome::Back(_)
    ));
    assert_eq!(membership.take_in_vain(3), [next_life(2, 101)]);
}

#[test]
fn agent_counts_as_alive_after_a_message() {
    assert!(matches!(admitted().join(1, life(101)), JoinOutcome::Two));
}

#[test]
fn waiting_worker_leaves_with_its_agent() {
    let mut membership = contested();
    assert_eq!(
        membership.gone(2, life(101), false, NOW),
        LeaveOutcome::Elsewhere
    );
    assert_eq!(membership.take_in_vain(1), []);
    let mut membership = contested();
    assert_eq!(
        membership.remove_agent(2, None, LinkLoss::HungUp, NOW).over,
        []
    );
    assert_eq!(membership.take_in_vain(1), []);
    let mut membership = contested();
    assert_eq!(membership.wait(next_life(3, 102)), Some(next_life(2, 101)));
    assert_eq!(
        membership.gone(2, life(101), false, NOW),
        LeaveOutcome::Elsewhere
    );
    assert_eq!(membership.take_in_vain(1), [next_life(3, 102)]);
}

/// Then it is another whose silence is waited for.
#[test]
fn waiting_worker_retries_when_predecessor_is_found() {
    let mut membership = admitted();
    assert!(matches!(
        membership.join(3, life(100)),
        JoinOutcome::Back(_)
    ));
    assert!(matches!(
        membership.join(2, life(101)),
        JoinOutcome::Waits(3)
    ));
    assert_eq!(membership.wait(next_life(2, 101)), None);
    // The worker gave up the move, and is where it was.
    assert_eq!(
        membership.gone(3, life(100), false, NOW),
        LeaveOutcome::Back(&mut "first")
    );
    assert_eq!(membership.take_waiting_for(WORKER), Some(next_life(2, 101)));
    assert!(matches!(
        membership.join(2, life(101)),
        JoinOutcome::Waits(1)
    ));
}
