//! A driver, between a sender and a parent that are sockets.

use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use weightsync_conformance::scale::longest;
use weightsync_core::{Dtype, Epoch, Layout, Version};
use weightsync_link::SUSPECT;
use weightsync_link::access::Access;
use weightsync_link::stream::AsyncStream;
use weightsync_mem::ModelDescription;

use super::*;
use crate::agent::plan::PlanInput;
use crate::agent::{AgentAddress, runtime};
use crate::bulk::{FetchEnd, Parent, Transferred};
use crate::wire::message::Welcome;

const SECRET: [u8; 16] = [3; 16];

const ITEM: Item = Item {
    model: 0,
    version: Version(1),
};

/// A driver, and what is around it.
struct Around {
    driver: Driver,
    events: mpsc::Sender<DriverEvent>,
    inbox: mpsc::Receiver<DriverEvent>,
    /// Where its sender is, and its parent.
    listener: TcpListener,
    address: SocketAddr,
    /// The sender's end of its link.
    _sender: (Link<FromRoot>, mpsc::Receiver<Result<ToRoot, LinkEnd>>),
}

async fn driver(name: &str) -> Around {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (socket, other) = tokio::join!(TcpStream::connect(address), listener.accept());
    let (events, inbox) = mpsc::channel(1 << 16);
    let root = |what| DriverEvent::Root { number: 0, what };
    // This sender only sends signs of life.
    let (said, words) = mpsc::channel(64);
    let sender =
        Link::<FromRoot>::start::<ToRoot, _>(AsyncStream::plain(other.unwrap().0), &said, |what| {
            what
        });
    let name = format!("weightsync/test/driver/{name}/{}", std::process::id());
    let options = AgentOptions {
        root: address.to_string(),
        secret: SECRET,
        seen: Epoch::default(),
        connections: Some(1),
        address: AgentAddress::Own(name.clone()),
        serves: false,
        access: Access::default(),
        nearer: Vec::new(),
    };
    let joined = JoinedAgent {
        link: Link::start(AsyncStream::plain(socket.unwrap()), &events, root),
        root: address,
        welcome: Welcome {
            run: Run {
                epoch: Epoch(1),
                id: [7; 16],
            },
            agent: 1,
            address: address.to_string(),
            models: 1,
            slots: 3,
            max_slots: 3,
            pid: 1,
            settings: String::new(),
        },
        models: vec![ModelDescription {
            layout: Layout::new([("w".to_owned(), Dtype::U8, vec![8])]).unwrap(),
            note: Vec::new(),
        }],
        bulk: None,
    };
    let near = Listener::at(&name).unwrap();
    let credentials = Credentials::plain(&SECRET);
    let mut driver = Driver::start(&options, credentials, joined, near, events.clone()).unwrap();
    driver.fetches.parent = Some(Parent { agent: 2, address });
    Around {
        driver,
        events,
        inbox,
        listener,
        address,
        _sender: (sender, words),
    }
}

#[test]
fn silent_senders_link_stays_open_until_it_answers() {
    runtime("weightsync-test").unwrap().block_on(async {
        let Around {
            driver,
            events,
            inbox,
            listener,
            _sender: (_link, mut said),
            ..
        } = driver("silent").await;
        let runs = tokio::spawn(driver.run(inbox));
        // The sender does not get to run for a while, and the agent looks for it.
        let silent = |number| DriverEvent::Root {
            number,
            what: Err(LinkEnd::Silent(SUSPECT)),
        };
        events.send(silent(0)).await.unwrap();
        let (again, _) = timeout(longest(), listener.accept())
            .await
            .unwrap()
            .unwrap();
        // A closed link would come before that: the sender would take it for a death.
        let end = timeout(Duration::from_millis(200), said.recv()).await;
        assert!(end.is_err(), "{end:?}");
        // Nobody listens any more: the sender is dead, and the agent ends.
        drop((again, listener));
        assert_eq!(
            timeout(longest(), runs).await.unwrap().unwrap(),
            Ending::Died
        );
    });
}

#[test]
fn driver_checks_for_room_under_constant_messages() {
    runtime("weightsync-test").unwrap().block_on(async {
        let Around {
            mut driver,
            events,
            inbox,
            listener,
            _sender,
            ..
        } = driver("room").await;
        let item = ITEM;
        driver
            .plan
            .step([PlanInput::Parent, PlanInput::Wanted { item }]);
        driver.plan.step([PlanInput::NoRoom { item }]);
        assert!(driver.plan.waits_for_room());
        driver.fetches.room = Instant::now() + Duration::from_millis(20);
        let runs = tokio::spawn(driver.run(inbox));
        // Until it has ended.
        let talks = std::thread::spawn({
            let (events, mut other) = (events.clone(), item);
            other.version = Version(2);
            let event = move || DriverEvent::Served(ServeEvent::Unwanted { item: other });
            move || while events.blocking_send(event()).is_ok() {}
        });
        // There is room, so it fetches.
        let fetches = timeout(longest(), listener.accept()).await;
        fetches.expect("in time").unwrap();
        assert!(events.send(DriverEvent::Stop).await.is_ok());
        runs.await.unwrap();
        talks.join().unwrap();
    });
}

/// The sender acts on what is said of the parent that it has given, and on nothing else.
#[test]
fn verdict_on_a_parent_is_not_applied_to_the_next() {
    runtime("weightsync-test").unwrap().block_on(async {
        let Around {
            mut driver,
            events,
            inbox,
            address,
            _sender,
            ..
        } = driver("complaint").await;
        let item = ITEM;
        driver.step([PlanInput::Parent, PlanInput::Wanted { item }]);
        // The parent does not have it: it comes from the sender in its stead.
        let sender = false;
        driver.step([PlanInput::NotThere { item, sender }]);
        assert!(driver.fetches.under_way[&item].instead);
        driver.fetches.complaint = Some((Instant::now() + longest(), 2, "it broke off".into()));
        driver.on_message(FromRoot::Parent {
            agent: 3,
            address: Some(address.to_string()),
        });
        assert_eq!(driver.fetches.parent.map(|parent| parent.agent), Some(3));
        driver.fetched(Fetched {
            number: driver.fetches.under_way[&item].number,
            item,
            parent: 0,
            end: FetchEnd::Broken(std::io::Error::other("cut")),
            transferred: Transferred::default(),
        });
        let complains = driver.fetches.complaint.as_ref().map(|(_, of, _)| *of);
        assert_eq!(complains, Some(0));
        assert!(events.send(DriverEvent::Stop).await.is_ok());
        driver.run(inbox).await;
    });
}

#[test]
fn rest_of_a_version_comes_from_the_same_parent() {
    runtime("weightsync-test").unwrap().block_on(async {
        let mut around = driver("rest").await;
        let (driver, item) = (&mut around.driver, ITEM);
        driver.on_message(FromRoot::Parent {
            agent: 3,
            address: Some(around.address.to_string()),
        });
        driver.step([PlanInput::Wanted { item }]);
        let number = driver.fetches.under_way[&item].number;
        driver.fetched(Fetched {
            number,
            item,
            parent: 3,
            end: FetchEnd::Partly,
            transferred: Transferred::default(),
        });
        assert!(driver.fetches.complaint.is_none());
        let next = &driver.fetches.under_way[&item];
        assert!(next.number > number && next.parent.agent == 3);
        assert!(around.events.send(DriverEvent::Stop).await.is_ok());
        around.driver.run(around.inbox).await;
    });
}
