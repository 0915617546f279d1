//! A process that serves, and children that are sockets.

use std::io::Read;
use std::net::TcpStream;
use std::sync::atomic::{AtomicIsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Instant;

use rustix::net::sockopt;
use weightsync_conformance::scale::longest;
use weightsync_core::{Dtype, Epoch, Layout, Version};
use weightsync_mem::threads::LockExt as _;
use weightsync_mem::{Listener, ModelDescription, RelaySegment, SegmentOptions};

use super::*;
use crate::agent::runtime;
use crate::wire::image::BLOCK_BYTES;
use crate::wire::message::BlockRange;

const RUN: Run = Run {
    epoch: Epoch(1),
    id: [7; 16],
};

fn serving() -> Serving {
    let (store, threads) = (Arc::new(BlockStore::of_relay()), Arc::default());
    Serving::new((RUN, 1), store, threads, |_| ())
}

/// A child of it that asks for a version.
fn child(serving: &Serving, run: Run, version: u64) -> TcpStream {
    let (mut socket, fetch) = (connect(serving), fetch(run, version, (0, 1)));
    socket.write_all(&fetch.frame().unwrap()).unwrap();
    socket
}

fn fetch(run: Run, version: u64, (first, count): (u32, u32)) -> ToParent {
    ToParent::Fetch(WantedBlocks {
        run,
        agent: 1,
        model: 0,
        version: Version(version),
        base: None,
        ranges: vec![BlockRange { first, count }],
    })
}

/// A child of it that has said nothing yet.
fn connect(serving: &Serving) -> TcpStream {
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    socket.set_read_timeout(Some(longest())).unwrap();
    let (other, _) = listener.accept().unwrap();
    let serving = serving.clone();
    tokio::spawn(async move {
        serving
            .child(Stream::plain(other).into_async().unwrap())
            .await
    });
    socket
}

const ITEM: Item = Item {
    model: 0,
    version: Version(1),
};

/// A segment with room for a version of so many bytes, before any has come.
fn coming(bytes: u64) -> (RelaySegment, Arc<HeldVersion>) {
    static LAST: AtomicIsize = AtomicIsize::new(0);
    let layout = Layout::new([("w".to_owned(), Dtype::U8, vec![bytes])]).unwrap();
    let models = [ModelDescription {
        layout,
        note: Vec::new(),
    }];
    let number = LAST.fetch_add(1, Ordering::Relaxed);
    let name = format!("weightsync-test/serve/{}/{number}", std::process::id());
    let listener = Listener::at(&name).unwrap();
    let options = SegmentOptions::default();
    let relay = RelaySegment::create(listener, [1; 16], (RUN, 1), &models, options).unwrap();
    let slot = relay.partial_slot(0, ITEM.version, BLOCK_BYTES as usize);
    (
        relay,
        Arc::new(HeldVersion::arriving(slot.unwrap().unwrap())),
    )
}

/// The next message to it; `None` once it is disconnected.
fn receive(socket: &mut TcpStream) -> Option<ToChild> {
    let mut header = [0; HEADER_BYTES];
    if socket.read(&mut header[..1]).expect("in time") == 0 {
        return None;
    }
    socket.read_exact(&mut header[1..]).unwrap();
    let header = FrameHeader::decode(&header, &[FrameKind::Bulk]).unwrap();
    let mut payload = vec![0; header.len];
    socket.read_exact(&mut payload).unwrap();
    Some(ToChild::decode(&payload).unwrap())
}

/// Hears until it is another word than that the other end is there; how often that came.
fn receive_all(socket: &mut TcpStream) -> (Option<ToChild>, usize) {
    let mut idle = 0;
    loop {
        match receive(socket) {
            Some(ToChild::Idle) => idle += 1,
            word => return (word, idle),
        }
    }
}

#[test]
fn waiting_children_take_turns() {
    let runtime = runtime("weightsync-test").unwrap();
    let _inside = runtime.enter();
    let wanted = Arc::new(AtomicIsize::new(0));
    let mut serving = serving();
    let count = wanted.clone();
    serving.notify = Arc::new(move |served| {
        let by = match served {
            ServeEvent::Wanted { .. } => 1,
            ServeEvent::Unwanted { .. } => -1,
            ServeEvent::Sent { .. } => 0,
        };
        count.fetch_add(by, Ordering::Relaxed);
    });
    serving.at_once = Arc::new(Semaphore::new(1));
    let work = std::thread::spawn({
        let (serving, handle) = (serving.clone(), runtime.handle().clone());
        move || {
            let _inside = handle.enter();
            // These are not there, and may come.
            let waiting: Vec<_> = (1..=3)
                .map(|version| child(&serving, RUN, version))
                .collect();
            while serving.at_once.available_permits() > 0 {
                std::thread::yield_now();
            }
            let (other, begun) = (Run { id: [8; 16], ..RUN }, Instant::now());
            let mut quick = child(&serving, other, 1);
            let (word, _) = receive_all(&mut quick);
            assert!(matches!(word, Some(ToChild::Gone { .. })), "{word:?}");
            assert!(begun.elapsed() < longest(), "{:?}", begun.elapsed());
            drop(waiting);
        }
    });
    runtime.block_on(async {
        while !work.is_finished() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    work.join().unwrap();
    // Each is noticed to have gone, also between two turns.
    let begun = Instant::now();
    let all_gone = || serving.children.locked().count() == 0;
    while !all_gone() || wanted.load(Ordering::Relaxed) != 0 {
        assert!(begun.elapsed() < longest(), "{wanted:?} are wanted still");
        runtime.block_on(tokio::time::sleep(Duration::from_millis(5)));
    }
}

#[test]
fn idle_child_is_disconnected() {
    let runtime = runtime("weightsync-test").unwrap();
    runtime.block_on(async {
        let mut serving = serving();
        serving.quiet = Duration::from_millis(50);
        let other = Run { id: [8; 16], ..RUN };
        let mut child = child(&serving, other, 1);
        let heard = tokio::task::spawn_blocking(move || (receive(&mut child), receive(&mut child)));
        let heard = heard.await.unwrap();
        assert!(
            matches!(heard, (Some(ToChild::Gone { .. }), None)),
            "{heard:?}"
        );
    });
}

#[test]
fn idle_child_makes_room_for_another_one() {
    let runtime = runtime("weightsync-test").unwrap();
    runtime.block_on(async {
        let mut serving = serving();
        serving.most_children = 2;
        let wanted = Arc::new(AtomicIsize::new(0));
        let count = wanted.clone();
        serving.notify = Arc::new(move |served| {
            count.fetch_add(
                isize::from(matches!(served, ServeEvent::Wanted { .. })),
                Ordering::Relaxed,
            );
        });
        let wants = async |count| {
            while wanted.load(Ordering::Relaxed) < count {
                tokio::task::yield_now().await;
            }
        };
        let disconnected = async |mut socket: TcpStream| {
            let read = tokio::task::spawn_blocking(move || socket.read(&mut [0]));
            // The child is disconnected without a message.
            assert!(!matches!(read.await.unwrap(), Ok(1..)));
        };
        // Two of this address, which may have as many in all.
        let idle = connect(&serving);
        while serving.children.locked().count() < 1 {
            tokio::task::yield_now().await;
        }
        let busy = child(&serving, RUN, 1);
        wants(1).await;
        let second = child(&serving, RUN, 2);
        disconnected(idle).await;
        wants(2).await;
        // None of them is closed for a third one.
        disconnected(child(&serving, RUN, 3)).await;
        assert_eq!(wanted.load(Ordering::Relaxed), 2);
        drop((busy, second));
        serving.store.close();
    });
}

/// News of other versions wakes a thread that waits for this one, and is no reason to
/// say that nothing has come of it.
#[test]
fn that_nothing_has_come_is_said_now_and_then() {
    let runtime = runtime("weightsync-test").unwrap();
    runtime.block_on(async {
        let (_relay, held) = coming(100);
        let serving = serving();
        serving.store.put(ITEM, held);
        let mut child = child(&serving, RUN, 1);
        let heard = tokio::task::spawn_blocking(move || receive_all(&mut child));
        let begun = Instant::now();
        while begun.elapsed() < 3 * IDLE {
            serving.store.notify();
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let most = begun.elapsed().as_millis() / IDLE.as_millis();
        serving.store.remove(ITEM);
        let (word, idle) = heard.await.unwrap();
        assert!(matches!(word, Some(ToChild::Gone { .. })), "{word:?}");
        assert!(idle as u128 <= most, "{idle}, and at most {most}");
        serving.store.close();
    });
}

/// A few bytes can ask for more blocks than there is memory to count them.
#[test]
fn fetch_beyond_the_last_block_gets_nothing() {
    let runtime = runtime("weightsync-test").unwrap();
    runtime.block_on(async {
        let (_relay, held) = coming(u64::from(BLOCK_BYTES) + 1);
        let serving = serving();
        serving.store.put(ITEM, held);
        for range in [(0, u32::MAX), (0, 3), (2, 1), (u32::MAX - 1, 1)] {
            let mut child = connect(&serving);
            let fetch = fetch(RUN, 1, range);
            child.write_all(&fetch.frame().unwrap()).unwrap();
            // Nothing of it has come: who asked for what there is would wait.
            let heard = tokio::task::spawn_blocking(move || receive(&mut child)).await;
            match heard.unwrap() {
                Some(ToChild::Gone { reason }) => assert!(reason.contains("blocks"), "{reason}"),
                word => panic!("{range:?}: {word:?}"),
            }
        }
        serving.store.close();
    });
}

/// A version of a trainer costs it a slot for as long as somebody is served it.
#[test]
fn waiting_child_releases_a_withdrawn_version() {
    let runtime = runtime("weightsync-test").unwrap();
    runtime.block_on(async {
        let (_relay, held) = coming(100);
        let kept = Arc::downgrade(&held);
        let mut serving = serving();
        serving.at_once = Arc::new(Semaphore::new(1));
        serving.store.put(ITEM, held);
        let mut child = child(&serving, RUN, 1);
        while serving.at_once.available_permits() > 0 {
            tokio::task::yield_now().await;
        }
        // Once it has had its first turn there is no other.
        let _turn = serving.at_once.acquire().await.unwrap();
        serving.store.remove(ITEM);
        let begun = Instant::now();
        while kept.strong_count() > 0 {
            assert!(begun.elapsed() < longest(), "it waits, and holds it");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let heard = tokio::task::spawn_blocking(move || receive_all(&mut child));
        let (word, _) = heard.await.unwrap();
        assert!(matches!(word, Some(ToChild::Gone { .. })), "{word:?}");
        serving.store.close();
    });
}

/// A child that reads a little now and then would otherwise keep its turn for ever.
#[test]
fn block_is_given_up_if_read_too_slowly() {
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let mut reader = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (socket, _) = listener.accept().unwrap();
    // A block is more than both take without being read.
    sockopt::set_socket_send_buffer_size(&socket, 32 << 10).unwrap();
    socket.set_write_timeout(Some(5 * IDLE)).unwrap();
    let mut socket = Stream::plain(socket);
    let (stop, stopped) = mpsc::channel::<()>();
    let slow = std::thread::spawn(move || {
        let mut some = [0; 16 << 10];
        while stopped.recv_timeout(Duration::from_millis(40)) == Err(RecvTimeoutError::Timeout) {
            let _ = reader.read(&mut some);
        }
    });
    let (head, bytes) = ([1; 40], vec![2; BLOCK_BYTES as usize]);
    let begun = Instant::now();
    let late = || begun.elapsed() >= IDLE;
    for written in 0.. {
        match write_both(&mut socket, &head, &bytes, late) {
            Ok(()) => assert!(written < 16, "{:?}", begun.elapsed()),
            Err(error) => {
                assert_eq!(error.kind(), io::ErrorKind::TimedOut);
                break;
            }
        }
    }
    drop((socket, stop));
    slow.join().unwrap();
}
