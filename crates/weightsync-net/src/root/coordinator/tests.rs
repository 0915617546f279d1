//! A sender, and agents that are none.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, mpsc};
use tokio::time::timeout;
use weightsync_conformance::scale::{longest, slowness};
use weightsync_core::{Epoch, Run, Version, WorkerId, WorkerRoute};
use weightsync_engine::{
    Expect, InitInfo, SendOptions, Sender, SenderSetup, SenderStatus, Tensors,
};
use weightsync_link::hello::LinkRole;
use weightsync_link::message::Message;
use weightsync_link::stream::AsyncStream;
use weightsync_link::tls::TlsPeer;
use weightsync_link::{Credentials, Link, LinkEnd};

use super::CoordinatorEvent;
use crate::agent::{Item, runtime};
use crate::root::listening::answer;
use crate::scheme::Distributed;
use crate::status;
use crate::wire::image::BLOCK_BYTES;
use crate::wire::message::{
    BlockRange, Delivery, FromRoot, RefusalRemedy, ToParent, ToRoot, WantedBlocks, Welcome,
    WorkerInstance, WorkerJoin,
};

fn sender() -> (Sender, InitInfo) {
    let mut weights = Tensors::new();
    let values = vec![1.0_f32; 256];
    weights.insert("layer.weight", [16, 16], values).unwrap();
    let setup = SenderSetup::new("policy", &weights).unwrap();
    let setup = setup.scheme(Distributed::new()).unwrap();
    let info = setup.init_info();
    let sender = setup
        .connect(&weights, Expect::Count(0), Some(longest()))
        .unwrap();
    (sender, info)
}

async fn dial(info: &InitInfo) -> AsyncStream {
    let address: SocketAddr = info.endpoint().address().parse().unwrap();
    let credentials = Credentials::plain(info.endpoint().secret());
    let peer = TlsPeer::Sender(address.ip());
    let dialled = weightsync_link::dial(address, &credentials, peer, LinkRole::Control).await;
    dialled.unwrap()
}

/// Asks how things are until that is as it is to be.
async fn wait_for<T: Send + 'static>(
    info: &InitInfo,
    of: impl Fn(SenderStatus) -> Option<T> + Send + 'static,
) -> T {
    let endpoint = info.endpoint();
    let (address, secret) = (endpoint.address().to_owned(), *endpoint.secret());
    let ask = move || {
        loop {
            if let Some(answer) = of(status::ask(&address, &secret, None, Some(longest())).unwrap())
            {
                return answer;
            }
        }
    };
    tokio::task::spawn_blocking(ask).await.unwrap()
}

/// An agent's end of its link, which does what a test says.
struct Fake {
    link: Link<ToRoot>,
    on_event: mpsc::Receiver<Result<FromRoot, LinkEnd>>,
}

impl Fake {
    async fn dial(info: &InitInfo) -> Self {
        let socket = dial(info).await;
        let (events, on_event) = mpsc::channel(64);
        let link = Link::start(socket, &events, |what| what);
        Self { link, on_event }
    }

    /// Sends the agent's first message.
    fn send_agent(&self, seen: Epoch) {
        self.link.send(&agent(seen));
    }

    /// Asks the sender to admit worker 7.
    fn send_join(&self, instance: u64) {
        self.link.send(&join(instance));
    }

    /// The sender's next message, or how it ended the link.
    async fn on_message(&mut self) -> Result<FromRoot, LinkEnd> {
        let on_event = timeout(longest(), self.on_event.recv()).await;
        on_event.expect("in time").expect("an end, at last")
    }

    /// Hears what the sender says until this comes.
    async fn receive_until(&mut self, what: impl Fn(&FromRoot) -> bool) -> FromRoot {
        loop {
            let on_event = self.on_message().await.expect("the link is there");
            if what(&on_event) {
                return on_event;
            }
        }
    }
}

fn life(instance: u64) -> WorkerInstance {
    WorkerInstance {
        worker: WorkerId(7),
        instance,
    }
}

fn item(version: u64) -> Item {
    Item {
        model: 0,
        version: Version(version),
    }
}

/// A transfer of so many MiB in ten seconds.
fn received(parent: u64, mib: u64) -> ToRoot {
    ToRoot::Received {
        item: item(1),
        parent,
        bytes: mib << 20,
        micros: 10_000_000,
    }
}

fn agent(seen: Epoch) -> ToRoot {
    ToRoot::Agent {
        name: "fake".into(),
        host: [9; 16],
        pid: 1,
        bulk: None,
        seen,
        holds: Vec::new(),
        run: None,
    }
}

fn join(instance: u64) -> ToRoot {
    ToRoot::Join(WorkerJoin {
        ticket: instance,
        who: life(instance),
        pid: 2,
        models: u64::MAX,
        delivery: Delivery::Newest,
        device: String::new(),
        seen: Epoch(0),
    })
}

fn run(test: impl Future<Output = ()>) {
    runtime("weightsync-test").unwrap().block_on(test);
}

#[test]
fn fenced_agent_is_notified_and_disconnected() {
    let (_sender, info) = sender();
    run(async {
        let mut fake = Fake::dial(&info).await;
        fake.send_agent(Epoch(u64::MAX));
        let FromRoot::Refused { remedy, .. } = fake.on_message().await.unwrap() else {
            panic!("it was not refused")
        };
        assert!(matches!(remedy, RefusalRemedy::Fenced { .. }), "{remedy:?}");
        // A live sender would go on sending signs of life.
        let end = fake.on_message().await.unwrap_err();
        assert!(matches!(end, LinkEnd::HungUp), "{end}");
    });
}

#[test]
fn agent_that_claims_impossible_versions_is_dropped() {
    let (_sender, info) = sender();
    run(async {
        let mut fake = Fake::dial(&info).await;
        fake.send_agent(Epoch(0));
        let welcome = |word: &FromRoot| matches!(word, FromRoot::Parent { .. });
        fake.receive_until(welcome).await;
        for page in 0..2 {
            let have = (1..=50).map(|number| Item {
                model: 0,
                version: Version(page * 50 + number),
            });
            fake.link.send(&ToRoot::Holds {
                have: have.collect(),
                dropped: Vec::new(),
            });
        }
        while fake.on_message().await.is_ok() {}
    });
}

#[test]
fn restarted_worker_joins_once_its_host_is_silent() {
    let (_sender, info) = sender();
    run(async {
        // This agent introduces itself, and then sends nothing more.
        let mut silent = dial(&info).await;
        for words in [agent(Epoch(0)), join(100)] {
            silent.write_all(&words.frame().unwrap()).await.unwrap();
        }
        let mut fake = Fake::dial(&info).await;
        fake.send_agent(Epoch(0));
        wait_for(&info, |status| {
            let admitted = !status.workers.is_empty();
            admitted.then_some(())
        })
        .await;
        fake.send_join(101);
        let decided =
            |word: &FromRoot| matches!(word, FromRoot::Joined { .. } | FromRoot::Denied { .. });
        let decided = fake.receive_until(decided).await;
        assert_eq!(decided, FromRoot::Joined { ticket: 101 });
    });
}

/// An agent that was asked by a life of it, and is not the way that this life took in
/// the end, is one to wait for like any other.
#[test]
fn restarted_worker_waits_for_the_agent_that_finds_it() {
    let (_sender, info) = sender();
    run(async {
        let mut agents = Vec::new();
        for _ in 0..3 {
            let fake = Fake::dial(&info).await;
            fake.send_agent(Epoch(0));
            agents.push(fake);
        }
        let [first, by, next] = &mut agents[..] else {
            unreachable!()
        };
        let joined = |word: &FromRoot| matches!(word, FromRoot::Joined { .. });
        first.send_join(100);
        first.receive_until(joined).await;
        by.send_join(100);
        by.receive_until(joined).await;
        next.send_join(101);
        by.link.send(&ToRoot::Gone {
            who: life(100),
            died: false,
        });
        let denied = |word: &FromRoot| matches!(word, FromRoot::Denied { .. });
        next.receive_until(denied).await;
    });
}

/// An agent that goes while a worker is on its way to it has cost that worker nothing.
#[test]
fn worker_moving_to_a_dead_agent_keeps_its_own() {
    let (mut sender, info) = sender();
    let mut weights = Tensors::new();
    weights
        .insert("layer.weight", [16, 16], vec![2.0_f32; 256])
        .unwrap();
    run(async {
        let mut agents = Vec::new();
        for _ in 0..2 {
            let mut fake = Fake::dial(&info).await;
            fake.send_agent(Epoch(0));
            fake.send_join(100);
            let joined = |word: &FromRoot| matches!(word, FromRoot::Joined { .. });
            fake.receive_until(joined).await;
            agents.push(fake);
        }
        drop(agents.pop());
        // Longer than one has that is not reached.
        let held = wait_for(&info, |status| {
            let lost = status.workers_by(WorkerRoute::Unreached).count() == 0;
            let there = status.workers.iter().filter(|one| one.gone.is_none());
            (lost && status.relays.len() == 1).then(|| there.count())
        });
        assert_eq!(held.await, 1);
        let sent = sender.send_async(&weights, &SendOptions::new());
        let _sent = sent.unwrap();
        let is_new = |item: &Item| item.version == Version(2);
        let notified = |word: &FromRoot| matches!(word, FromRoot::Notify { set, .. } if set.iter().any(is_new));
        agents[0].receive_until(notified).await;
    });
}

#[test]
fn worker_with_a_number_in_use_is_refused() {
    let (_sender, info) = sender();
    run(async {
        let mut first = Fake::dial(&info).await;
        first.send_agent(Epoch(0));
        first.send_join(100);
        let joined = |word: &FromRoot| matches!(word, FromRoot::Joined { .. });
        first.receive_until(joined).await;
        let mut second = Fake::dial(&info).await;
        second.send_agent(Epoch(0));
        second.send_join(101);
        let denied = |word: &FromRoot| matches!(word, FromRoot::Denied { .. });
        let FromRoot::Denied { ticket, reason } = second.receive_until(denied).await else {
            unreachable!()
        };
        assert_eq!(ticket, 101);
        assert!(reason.contains("already connected"), "{reason}");
        // The first worker was found alive at no cost to it.
        first.link.send(&ToRoot::Gone {
            who: life(100),
            died: false,
        });
        second.send_join(102);
        let joined = second.receive_until(joined).await;
        assert_eq!(joined, FromRoot::Joined { ticket: 102 });
    });
}

/// The worker need not wait for the newest version, which its agent may take long to fetch.
#[test]
fn new_worker_begins_with_versions_of_its_agent() {
    let (mut sender, info) = sender();
    let mut weights = Tensors::new();
    let values = vec![2.0_f32; 256];
    weights.insert("layer.weight", [16, 16], values).unwrap();
    let notified = |version| move |word: &FromRoot| matches!(word, FromRoot::Notify { set, .. } if *set == [item(version)]);
    run(async {
        let mut fake = Fake::dial(&info).await;
        fake.send_agent(Epoch(0));
        fake.send_join(100);
        fake.receive_until(notified(1)).await;
        // The worker died before that arrived.
        fake.link.send(&ToRoot::Gone {
            who: life(100),
            died: true,
        });
        let sent = sender.send_async(&weights, &SendOptions::new());
        let _sent = sent.unwrap();
        // A worker that joins is notified at once of a version that its agent has, and later of one
        // that arrives.
        for (instance, has_it) in [(101, false), (102, true)] {
            let holds = ToRoot::Holds {
                have: vec![item(1)],
                dropped: Vec::new(),
            };
            if has_it {
                fake.link.send(&holds);
            }
            fake.send_join(instance);
            let FromRoot::Notify { sequence, .. } = fake.receive_until(notified(2)).await else {
                unreachable!()
            };
            if !has_it {
                fake.link.send(&holds);
            }
            let older = fake.receive_until(notified(1)).await;
            let FromRoot::Notify {
                sequence: older,
                workers,
                ..
            } = older
            else {
                unreachable!()
            };
            assert!(older < sequence);
            assert_eq!(workers, [WorkerId(7)]);
            fake.link.send(&ToRoot::Gone {
                who: life(instance),
                died: false,
            });
            fake.link.send(&ToRoot::Holds {
                have: Vec::new(),
                dropped: vec![item(1)],
            });
        }
    });
}

#[test]
fn a_transfer_counts_for_the_link_that_it_came_by() {
    let (_sender, info) = sender();
    run(async {
        let mut agents = Vec::new();
        for port in [7001, 7002] {
            let fake = Fake::dial(&info).await;
            let mut words = agent(Epoch(0));
            if let ToRoot::Agent { bulk, .. } = &mut words {
                *bulk = Some(port);
            }
            fake.link.send(&words);
            agents.push(fake);
        }
        let [first, second] = &mut agents[..] else {
            unreachable!()
        };
        let FromRoot::Welcome(Welcome { agent: parent, .. }) = first.on_message().await.unwrap()
        else {
            panic!("it is not welcome")
        };
        let notified = |by| move |word: &FromRoot| matches!(word, FromRoot::Parent { agent, .. } if *agent == by);
        second.receive_until(notified(parent)).await;
        first.link.send(&received(0, 1));
        second.link.send(&received(parent, 1000));
        // The first has turned out to be slow: it is behind the second now.
        second.receive_until(notified(0)).await;
        // The measurement over the earlier link says nothing about this one.
        second.link.send(&received(parent, 1));
        let speeds = wait_for(&info, |status| {
            let relays = status.relays.iter();
            let all: u64 = relays.clone().map(|relay| relay.received).sum();
            (all == 1002 << 20).then(|| relays.map(|relay| relay.bytes_per_second).collect())
        });
        let speeds: Vec<_> = speeds.await;
        assert_eq!(speeds, [Some(100.0 * 1_048_576.0), Some(104_857.6)]);
    });
}

#[test]
fn agent_accuses_its_own_parent_alone() {
    let (_sender, info) = sender();
    run(async {
        let mut agents = Vec::new();
        for port in [7001, 7002, 7003] {
            let mut fake = Fake::dial(&info).await;
            let mut words = agent(Epoch(0));
            if let ToRoot::Agent { bulk, .. } = &mut words {
                *bulk = Some(port);
            }
            fake.link.send(&words);
            // One after the other: their order is that of the chain.
            let FromRoot::Welcome(Welcome { agent, .. }) = fake.on_message().await.unwrap() else {
                panic!("it is not welcome")
            };
            agents.push((agent, fake));
        }
        let [(first, _), (second, _), (third, last)] = &mut agents[..] else {
            unreachable!()
        };
        let (first, second, third) = (*first, *second, *third);
        let altered = |parent| ToRoot::Altered {
            parent,
            item: item(1),
            block: 0,
        };
        // Neither the sender, nor another's parent, nor itself, nor nobody.
        for parent in [0, first, third, 999, second] {
            last.link.send(&altered(parent));
        }
        let notified = |by| move |word: &FromRoot| matches!(word, FromRoot::Parent { agent, .. } if *agent == by);
        last.receive_until(notified(0)).await;
        let named = wait_for(&info, |status| {
            let relays = status.relays.iter();
            let all: Vec<_> = relays.map(|one| (one.agent, one.altered_for)).collect();
            all.iter().any(|(_, count)| *count > 0).then_some(all)
        });
        let mut named = named.await;
        named.sort();
        assert_eq!(named, [(first, 0), (second, 1), (third, 0)]);
    });
}

#[test]
fn received_bytes_may_be_any_number() {
    let (_sender, info) = sender();
    run(async {
        let fake = Fake::dial(&info).await;
        fake.send_agent(Epoch(0));
        for micros in [1, 0, u64::MAX] {
            fake.link.send(&ToRoot::Received {
                item: item(1),
                parent: 0,
                bytes: u64::MAX,
                micros,
            });
        }
        // More than the first of them has been heard by then.
        fake.link.send(&join(100));
        let received = wait_for(&info, |status| {
            let agent = status.workers.first().map(|worker| worker.route)?;
            let mut relays = status.relays.iter();
            Some(
                relays
                    .find(|one| WorkerRoute::Agent(one.agent) == agent)?
                    .received,
            )
        });
        assert_eq!(received.await, u64::MAX);
    });
}

#[test]
fn status_query_waits_its_turn_among_many() {
    run(async {
        let (events, mut on_event) = mpsc::channel(1);
        let asking = Arc::new(Semaphore::new(1));
        let others = asking.clone().acquire_owned().await.unwrap();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut asks = TcpStream::connect(address).await.unwrap();
        let (socket, _) = listener.accept().await.unwrap();
        let socket = AsyncStream::plain(socket);
        tokio::spawn(answer(socket, CoordinatorEvent::Status, events, asking));
        let early = timeout(Duration::from_millis(50), asks.read_u8()).await;
        assert!(early.is_err(), "it is not disconnected: {early:?}");
        drop(others);
        let Some(CoordinatorEvent::Status(answer)) = on_event.recv().await else {
            panic!("nobody asks");
        };
        answer.send("{}".into()).unwrap();
        timeout(longest(), asks.read_u8()).await.unwrap().unwrap();
    });
}

#[test]
fn sender_admits_nobody_after_goodbye() {
    let (sender, info) = sender();
    run(async {
        let mut first = Fake::dial(&info).await;
        first.send_agent(Epoch(0));
        let welcome = |word: &FromRoot| matches!(word, FromRoot::Parent { .. });
        first.receive_until(welcome).await;
        let ends = tokio::task::spawn_blocking(move || drop(sender));
        let goodbye = |word: &FromRoot| matches!(word, FromRoot::Goodbye);
        first.receive_until(goodbye).await;
        // The sender still serves the versions that it has announced.
        let mut late = Fake::dial(&info).await;
        late.send_agent(Epoch(0));
        let end = late.on_message().await.unwrap_err();
        assert!(matches!(end, LinkEnd::HungUp | LinkEnd::Failed(_)), "{end}");
        // So the sender does not wait for that agent.
        drop(first);
        ends.await.unwrap();
    });
}

/// A child that fetches the first model's version, and reads only its beginning.
async fn stuck(info: &InitInfo, run: Run, version: u64) -> AsyncStream {
    let address: SocketAddr = info.endpoint().address().parse().unwrap();
    let credentials = Credentials::plain(info.endpoint().secret());
    let peer = TlsPeer::Sender(address.ip());
    let dialled = weightsync_link::dial(address, &credentials, peer, LinkRole::Bulk).await;
    let mut socket = dialled.unwrap();
    let fetch = ToParent::Fetch(WantedBlocks {
        run,
        agent: 1,
        model: 0,
        version: Version(version),
        base: None,
        ranges: vec![BlockRange {
            first: 0,
            count: LARGE.div_ceil(BLOCK_BYTES as usize) as u32,
        }],
    });
    socket.write_all(&fetch.frame().unwrap()).await.unwrap();
    let first = timeout(longest(), socket.read_u8()).await;
    first.expect("in time").expect("a block");
    socket
}

/// Bytes of a model that no connection takes without being read.
const LARGE: usize = 48 << 20;

/// Less than a child may read nothing for, which a send would wait for.
fn three_seconds() -> Duration {
    Duration::from_secs(3).mul_f64(slowness())
}

#[test]
fn stalled_children_hold_no_slot_of_the_trainer() {
    let mut weights = Tensors::new();
    weights
        .insert("w", [LARGE as u64 / 4], vec![1.0_f32; LARGE / 4])
        .unwrap();
    let setup = SenderSetup::new("policy", &weights).unwrap().slots(3, 3);
    let setup = setup.scheme(Distributed::new()).unwrap();
    let info = setup.init_info();
    let mut sender = setup
        .connect(&weights, Expect::Count(0), Some(longest()))
        .unwrap();
    run(async {
        let mut fake = Fake::dial(&info).await;
        fake.send_agent(Epoch(0));
        let FromRoot::Welcome(Welcome { run, .. }) = fake.on_message().await.unwrap() else {
            panic!("it is not welcome")
        };
        let mut children = Vec::new();
        for version in 2..=4 {
            let begun = Instant::now();
            sender.send(&weights).unwrap();
            // The oldest goes on, and of the others one after the other is cut off.
            assert!(begun.elapsed() < three_seconds(), "version {version}");
            children.push(stuck(&info, run, version).await);
        }
        let begun = Instant::now();
        sender.send(&weights).unwrap();
        assert!(begun.elapsed() < three_seconds(), "{:?}", begun.elapsed());
    });
}
