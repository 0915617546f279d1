//! An engine, between a sender and a parent that are sockets.

use tokio::net::{TcpListener, TcpStream};
use weightsync_core::{Dtype, Epoch, Layout, Version};
use weightsync_mem::ModelSpec;

use super::*;
use crate::access::Access;
use crate::relay::{Place, runtime};

/// Longer than anything here takes.
const SOON: Duration = Duration::from_secs(10);

const SECRET: [u8; 16] = [3; 16];

#[test]
fn it_is_looked_for_room_however_much_there_is_to_hear() {
    runtime("weightsync-test").unwrap().block_on(async {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (socket, other) = tokio::join!(TcpStream::connect(address), listener.accept());
        let (events, heard) = mpsc::channel(1 << 16);
        let root = |what| Event::Root { number: 0, what };
        // It says that it is there.
        let (said, _words) = mpsc::channel(64);
        let _sender = Link::<FromRoot>::start::<ToRoot, _>(other.unwrap().0, &said, |what| what);
        let name = format!("weightsync/test/engine/{}", std::process::id());
        let options = AgentOptions {
            root: address.to_string(),
            secret: SECRET,
            seen: Epoch::default(),
            connections: 1,
            place: Place::Own(name.clone()),
            serves: false,
            access: Access::default(),
        };
        let joined = Joined {
            link: Link::start(socket.unwrap(), &events, root),
            root: address,
            run: Run {
                epoch: Epoch(1),
                id: [7; 16],
            },
            agent: 1,
            address: address.to_string(),
            slots: 3,
            pid: 1,
            models: vec![ModelSpec {
                layout: Layout::new([("w".to_owned(), Dtype::U8, vec![8])]).unwrap(),
                note: Vec::new(),
            }],
            bulk: None,
        };
        let near = Listener::at(&name).unwrap();
        let key = Key::new(&SECRET);
        let mut engine = Engine::start(&options, key, joined, near, events.clone()).unwrap();
        let item = Item {
            model: 0,
            version: Version(1),
        };
        engine.parent = Some(Parent { agent: 2, address });
        engine.plan.step([Input::Parent, Input::Wanted { item }]);
        engine.plan.step([Input::NoRoom { item }]);
        assert!(engine.plan.waits_for_room());
        engine.room = Instant::now() + ROOM;
        let runs = tokio::spawn(engine.run(heard));
        // Until it has ended.
        let talks = std::thread::spawn({
            let (events, mut other) = (events.clone(), item);
            other.version = Version(2);
            let event = move || Event::Served(Served::Unwanted { item: other });
            move || while events.blocking_send(event()).is_ok() {}
        });
        // There is room, so it fetches.
        let fetches = tokio::time::timeout(SOON, listener.accept()).await;
        fetches.expect("in time").unwrap();
        assert!(events.send(Event::Stop).await.is_ok());
        runs.await.unwrap();
        talks.join().unwrap();
    });
}
