use super::*;

fn address(agent: AgentId) -> Option<AgentEndpoint> {
    Some(AgentEndpoint {
        address: SocketAddr::from(([10, 0, 0, agent as u8], 7)),
        host: [agent as u8; 16],
    })
}

fn with(arity: usize, agents: std::ops::RangeInclusive<AgentId>) -> Topology {
    let mut topology = Topology::new(arity);
    for agent in agents {
        topology.join(agent, address(agent));
    }
    topology
}

fn parents(topology: &Topology) -> Vec<(AgentId, AgentId)> {
    let parents = topology.parents();
    parents
        .map(|(agent, parent)| (agent, parent.unwrap()))
        .collect()
}

const SECOND: Duration = Duration::from_secs(1);

fn failed(now: Duration) -> LeftParent {
    LeftParent::Failed { now }
}

#[test]
fn agents_stand_in_a_chain_and_close_up() {
    let mut chain = with(1, 1..=4);
    assert_eq!(parents(&chain), [(1, 0), (2, 1), (3, 2), (4, 3)]);
    let changed = chain.leave(2);
    let [Assigned { agent, parent, .. }] = changed[..] else {
        panic!("{changed:?}");
    };
    assert_eq!((agent, parent), (3, 1));
    assert_eq!(parents(&chain), [(1, 0), (3, 1), (4, 3)]);
    assert_eq!(chain.leave(4), []);
}

#[test]
fn by_a_higher_arity_they_stand_in_a_tree() {
    let mut tree = with(2, 1..=6);
    assert_eq!(
        parents(&tree),
        [(1, 0), (2, 0), (3, 1), (4, 1), (5, 2), (6, 2)]
    );
    // The last takes the place.
    let changed: Vec<_> = tree.leave(1).iter().map(|one| one.agent).collect();
    assert_eq!(changed, [6, 3, 4]);
}

#[test]
fn a_slow_agent_goes_to_the_end_and_slows_nobody_down() {
    let mut chain = with(1, 1..=4);
    for agent in 1..=4 {
        let bytes = if agent == 2 { 2 << 20 } else { 100 << 20 };
        chain.measured(agent - 1, agent, bytes, SECOND);
    }
    assert_eq!(parents(&chain), [(1, 0), (3, 1), (4, 3), (2, 4)]);
    // Later measurements count more and more.
    for _ in 0..8 {
        chain.measured(4, 2, 100 << 20, SECOND);
    }
    assert_eq!(chain.measured(4, 2, 100 << 20, SECOND), []);
    assert_eq!(parents(&chain), [(1, 0), (3, 1), (4, 3), (2, 4)]);
    // Little says nothing.
    chain.measured(0, 1, 100, SECOND);
    assert_eq!(parents(&chain)[0], (1, 0));
}

/// A version that came through a slow agent came as slowly.
#[test]
fn agent_behind_a_slow_one_is_not_taken_for_slow() {
    // (who is slow, in the order in which they came; the order they are to end in)
    let cases: [(&[AgentId], [AgentId; 5]); 4] = [
        (&[1], [2, 3, 4, 5, 1]),
        (&[3], [1, 2, 4, 5, 3]),
        (&[1, 2], [3, 4, 5, 1, 2]),
        (&[1, 3], [2, 4, 5, 1, 3]),
    ];
    for (slow, expected) in cases {
        let mut chain = with(1, 1..=5);
        for _ in 0..12 {
            let mut measured = parents(&chain);
            // Agents at the end of the chain finish last.
            for (agent, parent) in measured.drain(..) {
                let through = slow.contains(&agent) || slow.contains(&parent);
                let bytes = if through { 1 << 20 } else { 100 << 20 };
                chain.measured(parent, agent, bytes, SECOND);
            }
        }
        let order: Vec<AgentId> = parents(&chain).iter().map(|(agent, _)| *agent).collect();
        let (fast, behind) = order.split_at(5 - slow.len());
        let fast: BTreeSet<_> = fast.iter().collect();
        let expected: BTreeSet<_> = expected[..5 - slow.len()].iter().collect();
        assert_eq!(fast, expected, "{slow:?}: {order:?}");
        assert!(behind.iter().all(|agent| slow.contains(agent)));
    }
}

/// Measurements of the others say nothing about their links until one fetches from the sender.
#[test]
fn a_slow_agent_that_came_first_goes_to_the_end() {
    let mib = |speed: u64| speed << 20;
    // (bytes a second of each agent's link, the order they are to end in)
    let cases: [(&[u64], &[AgentId]); 4] = [
        (&[2, 100], &[2, 1]),
        (&[2, 100, 100, 100], &[2, 3, 4, 1]),
        (&[2, 3, 100], &[3, 2, 1]),
        // All are as slow, or as fast as matters.
        (&[100, 100, 100], &[1, 2, 3]),
    ];
    for (speeds, expected) in cases {
        let mut chain = with(1, 1..=speeds.len() as AgentId);
        let mut assigned = 0;
        for _ in 0..12 {
            // The last of a way are done last; who has moved meanwhile is told so first.
            for (agent, parent) in parents(&chain) {
                if chain.agents[&agent].parent != Some(parent) {
                    continue;
                }
                let own = |agent: AgentId| mib(speeds[agent as usize - 1]);
                let bytes = match parent {
                    0 => own(agent),
                    parent => own(agent).min(own(parent)),
                };
                assigned += chain.measured(parent, agent, bytes, SECOND).len();
            }
        }
        let order: Vec<AgentId> = parents(&chain).iter().map(|(agent, _)| *agent).collect();
        assert_eq!(order, expected, "{speeds:?}");
        assert!(assigned <= 5 * speeds.len(), "{assigned} for {speeds:?}");
    }
    // Where all are slow each is first once, and no more.
    let mut chain = with(1, 1..=5);
    for round in 0..20 {
        let mut assigned = 0;
        for (agent, parent) in parents(&chain) {
            assigned += chain.measured(parent, agent, mib(2), SECOND).len();
        }
        assert!(round < 6 || assigned == 0, "round {round}");
    }
}

/// A parent may be found to be slow late, after another parent was measured: then only the other's
/// measurement counts.
#[test]
fn host_behind_a_slow_parent_is_fast_behind_the_next() {
    let mut chain = with(1, 1..=2);
    chain.measured(1, 2, 1 << 20, 10 * SECOND);
    chain.measured(0, 2, 100 << 20, SECOND);
    assert_eq!(chain.speed(2), Some((100 << 20) as f64));
}

/// Whether that one was slow is not to be known any more.
#[test]
fn host_slow_behind_a_dead_parent_is_measured_again() {
    let mut chain = with(1, 1..=4);
    chain.measured(0, 1, 100 << 20, SECOND);
    chain.measured(3, 4, 1 << 20, SECOND);
    chain.measured(1, 2, 1 << 20, 2 * SECOND);
    assert_eq!(parents(&chain), [(1, 0), (3, 1), (4, 3), (2, 4)]);
    chain.leave(3);
    assert_eq!(chain.speed(4), None);
    // Behind what is known to be slow it would never be measured.
    assert_eq!(parents(&chain), [(1, 0), (4, 1), (2, 4)]);
}

#[test]
fn new_agent_stands_before_slow_ones() {
    let mut chain = with(1, 1..=3);
    for agent in 1..=3 {
        let bytes = if agent == 3 { 1 << 20 } else { 100 << 20 };
        chain.measured(agent - 1, agent, bytes, SECOND);
    }
    let changed: Vec<_> = chain
        .join(4, address(4))
        .iter()
        .map(|one| one.agent)
        .collect();
    assert_eq!(changed, [4, 3]);
    assert_eq!(parents(&chain), [(1, 0), (2, 1), (4, 2), (3, 4)]);
}

#[test]
fn slow_link_is_noticed_at_once_and_recovery_later() {
    let mut chain = with(1, 1..=3);
    let bytes = 8 << 20;
    for agent in 1..=3 {
        chain.measured(agent - 1, agent, bytes, Duration::from_millis(64));
    }
    chain.measured(0, 1, bytes, Duration::from_secs(64));
    assert_eq!(parents(&chain), [(2, 0), (3, 2), (1, 3)]);
    let mut count = 0;
    while chain.speed(1).is_some_and(|speed| speed < 1e8 / 4.0) {
        chain.measured(3, 1, bytes, Duration::from_millis(64));
        count += 1;
        assert!(count < 12, "{:?}", chain.speed(1));
    }
    // The agent stays where it is, because some agent has to be last.
    assert_eq!(parents(&chain), [(2, 0), (3, 2), (1, 3)]);
}

/// Of any three versions, each fast agent gets two a hundred times as slowly.
#[test]
fn agents_that_a_busy_machine_slows_down_for_moments_keep_their_places() {
    let mut chain = with(1, 1..=4);
    let (bytes, moment) = (1 << 20, Duration::from_millis(4));
    for agent in 1..=4 {
        chain.measured(agent - 1, agent, bytes, moment);
        chain.measured(agent - 1, agent, bytes, moment * 3);
    }
    // This one gets slow, and a version takes it as long as hundreds take the others.
    chain.measured(1, 2, bytes, 8 * SECOND);
    let order = [(1, 0), (3, 1), (4, 3), (2, 4)];
    assert_eq!(parents(&chain), order);
    for round in 0..500 {
        for (place, (agent, parent)) in order[..3].iter().enumerate() {
            let factor = if (round + place) % 3 == 0 { 1 } else { 100 };
            let moved = chain.measured(*parent, *agent, bytes, moment * factor);
            assert_eq!(moved, [], "round {round}");
        }
    }
}

/// Bytes that have waited in buffers come at the speed of memory.
#[test]
fn one_high_measurement_moves_nobody() {
    let mut chain = with(1, 1..=4);
    for agent in 1..=4 {
        let bytes = if agent == 4 { 2 << 20 } else { 110 << 20 };
        chain.measured(agent - 1, agent, bytes, SECOND);
    }
    let moved = chain.measured(0, 1, 2 << 20, Duration::from_millis(1));
    assert_eq!(moved, []);
    assert_eq!(parents(&chain), [(1, 0), (2, 1), (3, 2), (4, 3)]);
}

/// It came behind a slow agent, where nothing else is measured.
#[test]
fn agent_that_was_stopped_for_a_moment_is_measured_again() {
    let mut chain = with(1, 1..=4);
    for agent in 1..=4 {
        let bytes = if agent == 4 { 3 << 20 } else { 110 << 20 };
        chain.measured(agent - 1, agent, bytes, SECOND);
    }
    chain.measured(1, 2, 1 << 20, 2 * SECOND);
    assert_eq!(parents(&chain), [(1, 0), (3, 1), (4, 3), (2, 4)]);
    // As fast as its slow parent is: the sender is to measure it.
    chain.measured(4, 2, 3 << 20, SECOND);
    assert_eq!(parents(&chain), [(2, 0), (1, 2), (3, 1), (4, 3)]);
    chain.measured(0, 2, 110 << 20, SECOND);
    assert_eq!(parents(&chain), [(2, 0), (1, 2), (3, 1), (4, 3)]);
}

/// The others would wait for it with each version.
#[test]
fn agent_that_stays_a_little_slow_goes_to_the_end_after_a_second() {
    let mut chain = with(1, 1..=3);
    let (bytes, moment) = (1 << 20, Duration::from_millis(8));
    for agent in 1..=3 {
        chain.measured(agent - 1, agent, bytes, moment);
    }
    let mut took = Duration::ZERO;
    while chain.measured(0, 1, bytes, 10 * moment).is_empty() {
        took += 10 * moment;
        assert!(took < 2 * SECOND, "it is first still");
    }
    assert!(took >= SECOND - 10 * moment, "{took:?}");
    assert_eq!(parents(&chain), [(2, 0), (3, 2), (1, 3)]);
}

#[test]
fn host_that_does_not_serve_has_no_children() {
    let mut chain = Topology::new(1);
    chain.join(1, None);
    chain.join(2, address(2));
    chain.join(3, None);
    chain.join(4, address(4));
    assert_eq!(parents(&chain), [(2, 0), (4, 2), (1, 0), (3, 0)]);
    // The agent asks again, or leaves; no other agent moves.
    let [again] = chain.leave_parent(3, 0, failed(SECOND))[..] else {
        panic!("it waits for ever");
    };
    assert_eq!((again.agent, again.parent), (3, 0));
    assert_eq!(chain.leave(1), []);
    // However fast it is, no host is slow compared with it.
    chain.measured(0, 3, 1000 << 20, SECOND);
    chain.measured(0, 2, 40 << 20, SECOND);
    chain.measured(2, 4, 80 << 20, SECOND);
    assert_eq!(parents(&chain), [(2, 0), (4, 2), (3, 0)]);
}

#[test]
fn slow_link_belongs_to_the_host_that_fetches() {
    let mut chain = with(1, 1..=3);
    chain.join(4, None);
    assert_eq!(chain.slowest(), None);
    let mib = |count: u64| count << 20;
    let cases = [
        ((0, 1, mib(100)), 100),
        ((1, 2, mib(50)), 50),
        ((0, 4, mib(20)), 20),
        // Not the worker that fetches for itself any more.
        ((0, 4, mib(1000)), 39),
    ];
    for ((parent, agent, bytes), slowest) in cases {
        chain.measured(parent, agent, bytes, SECOND);
        let found = chain.slowest().unwrap() as u64 >> 20;
        assert_eq!(found, slowest, "{agent} from {parent}");
    }
    chain.leave(4);
    assert_eq!(chain.slowest().unwrap() as u64 >> 20, 50);
    chain.leave(2);
    assert_eq!(chain.slowest().unwrap() as u64 >> 20, 100);
}

/// To another host its address would be that host's own.
#[test]
fn loopback_address_serves_only_its_own_host() {
    let mut chain = Topology::new(1);
    let near = |port| AgentEndpoint {
        address: SocketAddr::from(([127, 0, 0, 1], port)),
        host: [1; 16],
    };
    chain.join(1, Some(near(1)));
    chain.join(2, address(2));
    chain.join(3, address(3));
    chain.join(4, Some(near(4)));
    assert_eq!(parents(&chain), [(1, 0), (2, 0), (3, 2), (4, 1)]);
}

#[test]
fn event_that_moves_nobody_assigns_nobody() {
    let mut chain = Topology::new(1);
    chain.order = (1..=6).collect();
    for agent in 1..=6 {
        let mut one = Topology::new(1);
        one.join(agent, address(agent));
        chain.agents.extend(one.agents);
    }
    // The order gives 2 to 6 other parents than they were told. To assign them again would move them.
    for agent in 7..=12 {
        let told = chain.join(agent, None);
        let told = told.iter().map(|one| (one.agent, one.parent));
        assert_eq!(told.collect::<Vec<_>>(), [(agent, 0)]);
    }
    for agent in 1..=12 {
        let parent = if agent > 6 { 0 } else { agent - 1 };
        let bytes = (100 + agent % 7) << 20;
        assert_eq!(chain.measured(parent, agent, bytes, SECOND), []);
        assert_eq!(chain.due(), None);
    }
    assert_eq!(chain.leave(12), []);
    assert_eq!(chain.assign().len(), 5);
}

#[test]
fn unreachable_parent_is_not_assigned_again_at_once() {
    let mut chain = with(1, 1..=3);
    let changed = chain.leave_parent(3, 2, failed(SECOND));
    assert_eq!(parents(&chain), [(1, 0), (2, 1), (3, 0)]);
    assert_eq!(changed[0].parent, 0);
    // The sender itself is told again.
    assert_eq!(chain.leave_parent(3, 0, failed(SECOND)).len(), 1);
    // A report about an earlier parent changes nothing.
    assert_eq!(chain.leave_parent(3, 2, failed(SECOND)), []);
    // An agent with another parent that lost the sender in its place gets its parent again.
    let [again] = chain.leave_parent(2, 0, failed(SECOND))[..] else {
        panic!("it waits for ever");
    };
    assert_eq!((again.agent, again.parent), (2, 1));
    assert_eq!(again.address, address(1).map(|endpoint| endpoint.address));
    // An agent that has left meanwhile is assigned nothing.
    assert_eq!(chain.leave_parent(9, 0, failed(SECOND)), []);
}

#[test]
fn unreachable_parent_is_retried_with_backoff() {
    let mut chain = with(1, 1..=2);
    let mut now = SECOND;
    // (for how long it is not given, for how long it is all right after that)
    let cases = [
        (30, 29),
        (60, 0),
        (120, 0),
        (240, 0),
        (480, 0),
        (960, 0),
        (960, 960),
        (30, 0),
    ];
    for (avoided, well) in cases {
        assert_eq!(parents(&chain), [(1, 0), (2, 1)]);
        assert_eq!(chain.due(), None);
        chain.leave_parent(2, 1, failed(now));
        let due = now + avoided * SECOND;
        assert_eq!(chain.due(), Some(due));
        assert_eq!(chain.retry_avoided(due - Duration::from_millis(1)), []);
        assert_eq!(parents(&chain), [(1, 0), (2, 0)]);
        let [again] = chain.retry_avoided(due)[..] else {
            panic!("it is not given again")
        };
        assert_eq!((again.agent, again.parent), (2, 1));
        now = due + well * SECOND;
    }
}

#[test]
fn parent_that_altered_a_block_is_never_given_again() {
    let mut chain = with(1, 1..=3);
    // It was avoided for a while before, and fails again later.
    chain.leave_parent(3, 2, failed(SECOND));
    chain.retry_avoided(100 * SECOND);
    assert_eq!(parents(&chain), [(1, 0), (2, 1), (3, 2)]);
    chain.leave_parent(3, 2, LeftParent::Altered);
    assert_eq!(parents(&chain), [(1, 0), (2, 1), (3, 0)]);
    assert_eq!(chain.due(), None);
    assert_eq!(chain.retry_avoided(Duration::MAX), []);
    chain.leave_parent(3, 0, failed(SECOND));
    assert_eq!(parents(&chain), [(1, 0), (2, 1), (3, 0)]);
    // What one agent says takes the relay from no other.
    chain.join(4, address(4));
    chain.leave(3);
    assert_eq!(parents(&chain), [(1, 0), (2, 1), (4, 2)]);
}

#[test]
fn returned_parent_is_assigned_at_once() {
    let mut chain = with(1, 1..=2);
    chain.leave_parent(2, 1, failed(SECOND));
    chain.leave(1);
    chain.join(3, address(3));
    assert_eq!(chain.due(), None);
    assert_eq!(parents(&chain), [(2, 0), (3, 2)]);
    // Were it the other way round, it would be the same: it has another number.
    chain.leave_parent(3, 2, failed(SECOND));
    chain.leave(2);
    chain.join(4, address(4));
    assert_eq!(parents(&chain), [(3, 0), (4, 3)]);
}

/// Whatever happens, everybody who serves is reached from the sender.
#[test]
fn there_is_never_a_circle() {
    let mut state = 0x5eed_u64;
    let mut random = |below: u64| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 33) % below
    };
    for arity in 1..=3 {
        let mut topology = Topology::new(arity);
        let mut there: Vec<AgentId> = Vec::new();
        let mut now = Duration::ZERO;
        for next in 1..800 {
            now += SECOND;
            match random(7) {
                0 | 1 => {
                    topology.join(next, (random(4) > 0).then(|| address(next % 250).unwrap()));
                    there.push(next);
                }
                2 if !there.is_empty() => {
                    let at = random(there.len() as u64) as usize;
                    topology.leave(there.swap_remove(at));
                }
                3 if !there.is_empty() => {
                    let agent = there[random(there.len() as u64) as usize];
                    let parent = topology.agents[&agent].parent.unwrap();
                    let why = match random(2) {
                        0 => LeftParent::Altered,
                        _ => failed(now),
                    };
                    topology.leave_parent(agent, parent, why);
                }
                4 => drop(topology.retry_avoided(now)),
                _ if !there.is_empty() => {
                    let agent = there[random(there.len() as u64) as usize];
                    let parent = topology.agents[&agent].parent.unwrap();
                    topology.measured(parent, agent, (1 + random(100)) << 20, SECOND);
                }
                _ => {}
            }
            for agent in &there {
                let (mut at, mut steps) = (*agent, 0);
                while at != 0 {
                    at = topology.agents[&at].parent.unwrap();
                    steps += 1;
                    assert!(steps <= there.len(), "a circle at {agent}");
                }
            }
        }
    }
}
