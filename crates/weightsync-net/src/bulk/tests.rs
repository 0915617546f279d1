//! Fetching from a parent that is not what it should be.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::Notify;
use weightsync_conformance::scale::longest;
use weightsync_core::{Dtype, Epoch, Layout, Run, Version};
use weightsync_link::Credentials;
use weightsync_link::frame::{FrameHeader, FrameKind, HEADER_BYTES};
use weightsync_link::listen::accept_all;
use weightsync_link::message::Message;
use weightsync_link::stream::AsyncStream;
use weightsync_mem::{
    BlockWrite, Listener, ModelDescription, PartialSlot, RelaySegment, SegmentOptions,
};

use super::{
    BlockStore, BulkFetch, Connections, FetchEnd, HeldVersion, Parent, Serving, Threads,
    Transferred,
};
use crate::agent::Item;
use crate::wire::image::{BLOCK_BYTES, BlockHead};
use crate::wire::message::ToChild;

mod deltas;
mod verify;

const SECRET: [u8; 16] = [3; 16];

const RUN: Run = Run {
    epoch: Epoch(1),
    id: [7; 16],
};

const ITEM: Item = Item {
    model: 0,
    version: Version(1),
};

/// How many blocks the version has.
const BLOCKS: u32 = 6;

/// A parent that answers whatever it is asked by these bytes, `pause` between one piece
/// and the next; where it listens.
async fn parent(answer: Vec<u8>, piece: usize, pause: Duration) -> SocketAddr {
    parent_after(|| std::future::ready(()), answer, piece, pause).await
}

/// The same; `before` runs before each answer.
async fn parent_after<F: Future<Output = ()> + Send>(
    before: impl Fn() -> F + Clone + Send + Sync + 'static,
    answer: Vec<u8>,
    piece: usize,
    pause: Duration,
) -> SocketAddr {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let take = move |mut socket: AsyncStream, _, _| {
        let (answer, before) = (answer.clone(), before.clone());
        tokio::spawn(async move {
            let mut header = [0; HEADER_BYTES];
            while socket.read_exact(&mut header).await.is_ok() {
                let header = FrameHeader::decode(&header, &[FrameKind::Bulk]).unwrap();
                let mut payload = vec![0; header.len];
                socket.read_exact(&mut payload).await.unwrap();
                before().await;
                for part in answer.chunks(piece) {
                    if socket.write_all(part).await.is_err() {
                        return;
                    }
                    tokio::time::sleep(pause).await;
                }
            }
        });
    };
    let credentials = Credentials::plain(&SECRET);
    tokio::spawn(accept_all(listener, credentials, || false, |_| {}, take));
    address
}

/// A parent that is asked, and answers once it is told to: (its address, asked, told).
fn held_parent(
    runtime: &tokio::runtime::Runtime,
    answer: Vec<u8>,
) -> (SocketAddr, mpsc::Receiver<()>, Arc<Notify>) {
    let told = Arc::new(Notify::new());
    let (note, asked) = mpsc::channel();
    let go = told.clone();
    let wait = move || {
        let _ = note.send(());
        let go = go.clone();
        async move { go.notified().await }
    };
    let whole = answer.len();
    let address = runtime.block_on(parent_after(wait, answer, whole, Duration::ZERO));
    (address, asked, told)
}

/// A fetching process, and its segment.
struct Child {
    slot: Arc<PartialSlot>,
    store: Arc<BlockStore>,
    fetch: BulkFetch,
    ends: mpsc::Receiver<(FetchEnd, Transferred)>,
    _relay: RelaySegment,
}

fn child(name: &str, address: SocketAddr, connections: usize) -> Child {
    child_of(name, address, connections, ITEM, None)
}

fn child_of(
    name: &str,
    address: SocketAddr,
    connections: usize,
    item: Item,
    digests: Option<SocketAddr>,
) -> Child {
    let connections = Connections::new(Credentials::plain(&SECRET), (RUN, 1), connections, digests);
    child_by(name, address, connections, item)
}

fn child_by(name: &str, address: SocketAddr, connections: Connections, item: Item) -> Child {
    let listener = Listener::at(&format!("weightsync/test/{name}/{}", std::process::id()));
    let bytes = u64::from(BLOCKS) * u64::from(BLOCK_BYTES);
    let model = ModelDescription {
        layout: Layout::new([("w".to_owned(), Dtype::U8, vec![bytes])]).unwrap(),
        note: Vec::new(),
    };
    let options = SegmentOptions::default();
    let relay =
        RelaySegment::create(listener.unwrap(), SECRET, (RUN, 1), &[model], options).unwrap();
    let slot = relay.partial_slot(ITEM.model, ITEM.version, BLOCK_BYTES as usize);
    let slot = slot.unwrap().unwrap();
    let held = Arc::new(HeldVersion::arriving(slot.clone()));
    let parent = Parent { agent: 2, address };
    let (note, ends) = mpsc::channel();
    let store = Arc::new(BlockStore::of_relay());
    let fetch = BulkFetch::start(
        (item, parent),
        (&Arc::new(connections), 0),
        (slot.clone(), held, None),
        &store,
        &Arc::new(Threads::default()),
        move |end, came| {
            let _ = note.send((end, came));
        },
    );
    Child {
        slot,
        store,
        fetch,
        ends,
        _relay: relay,
    }
}

/// A process that serves; where it listens.
async fn listen(serving: Serving) -> SocketAddr {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let take = move |socket, _, _| drop(tokio::spawn(serving.clone().child(socket)));
    let credentials = Credentials::plain(&SECRET);
    tokio::spawn(accept_all(listener, credentials, || false, |_| {}, take));
    address
}

fn block(index: u32) -> Vec<u8> {
    block_of(index, &vec![index as u8; BLOCK_BYTES as usize])
}

fn block_of(index: u32, bytes: &[u8]) -> Vec<u8> {
    let head = BlockHead {
        model: 0,
        version: ITEM.version,
        index,
        bytes: BLOCK_BYTES,
        crc: weightsync_simd::crc64(bytes),
        image_bytes: u64::from(BLOCKS) * u64::from(BLOCK_BYTES),
    };
    [head.frame().as_ref(), bytes].concat()
}

fn end() -> Vec<u8> {
    ToChild::End.frame().unwrap()
}

fn runtime() -> tokio::runtime::Runtime {
    crate::agent::runtime("test").unwrap()
}

#[test]
fn parent_that_ends_early_is_blamed() {
    let runtime = runtime();
    let some: Vec<u8> = [0, 1, 3, 4, 5].map(block).concat();
    for (name, answer) in [("none", end()), ("some", [some, end()].concat())] {
        let whole = answer.len();
        let address = runtime.block_on(parent(answer, whole, Duration::ZERO));
        let child = child(name, address, 1);
        let (ended, _) = child.ends.recv_timeout(longest()).unwrap();
        assert!(matches!(ended, FetchEnd::Broken(_)), "{name}: {ended:?}");
    }
}

#[test]
fn parent_that_only_says_it_has_nothing_is_blamed() {
    let runtime = runtime();
    let idle = ToChild::Idle.frame().unwrap();
    let address = runtime.block_on(parent(idle, 1 << 10, Duration::ZERO));
    let mut connections = Connections::new(Credentials::plain(&SECRET), (RUN, 1), 1, None);
    connections.withheld = Duration::ZERO;
    let child = child_by("withheld", address, connections, ITEM);
    let (ended, _) = child.ends.recv_timeout(longest()).unwrap();
    let FetchEnd::Broken(error) = ended else {
        panic!("{ended:?}");
    };
    assert!(error.to_string().contains("nothing yet"), "{error}");
}

#[test]
fn parent_is_not_blamed_for_blocks_taken_elsewhere() {
    let runtime = runtime();
    let answer: Vec<u8> = (0..BLOCKS).flat_map(block).chain(end()).collect();
    for (name, keeps, expected) in [("kept", true, "Whole"), ("released", false, "Partly")] {
        let (address, asked, go) = held_parent(&runtime, answer.clone());
        let child = child(name, address, 1);
        asked.recv_timeout(longest()).unwrap();
        // As a stopped fetch takes them, after this one has requested them.
        let taken = [1, 2, 5].map(|index| child.slot.take(index).unwrap());
        if keeps {
            taken.into_iter().for_each(BlockWrite::keep);
            go.notify_one();
        } else {
            go.notify_one();
            // Block 4 comes after 1 and 2 were skipped.
            let came = || child.slot.read(4).is_some();
            child.store.wait_until(came, longest());
            drop(taken);
        }
        let (ended, _) = child.ends.recv_timeout(longest()).unwrap();
        let ended = format!("{ended:?}");
        assert!(ended.starts_with(expected), "{name}: {ended}");
    }
}

#[test]
fn blocks_that_may_not_come_are_refused() {
    let runtime = runtime();
    let of = |blocks: &[u32]| -> Vec<u8> { blocks.iter().copied().flat_map(block).collect() };
    // With two connections, each requests every second block, and either may end first.
    let cases = [
        ("twice", [0, 1, 1], 1, "head of a block: block 1 with"),
        ("others", [0, 1, 2], 2, "head of a block: block "),
    ];
    for (name, blocks, connections, expected) in cases {
        let answer = [of(&blocks), end()].concat();
        let whole = answer.len();
        let address = runtime.block_on(parent(answer, whole, Duration::ZERO));
        let child = child(name, address, connections);
        let (ended, _) = child.ends.recv_timeout(longest()).unwrap();
        let FetchEnd::Broken(error) = ended else {
            panic!("{name}: {ended:?}");
        };
        assert!(error.to_string().contains(expected), "{name}: {error}");
    }
}

#[test]
fn block_changed_in_transit_is_rejected() {
    let runtime = runtime();
    let whole = block(2).len();
    let first = whole - BLOCK_BYTES as usize;
    for (name, at) in [("first", first), ("middle", whole / 2), ("last", whole - 1)] {
        let mut blocks: Vec<Vec<u8>> = (0..BLOCKS).map(block).collect();
        blocks[2][at] ^= 1;
        let answer = [blocks.concat(), end()].concat();
        let whole = answer.len();
        let address = runtime.block_on(parent(answer, whole, Duration::ZERO));
        let child = child(name, address, 1);
        let (ended, _) = child.ends.recv_timeout(longest()).unwrap();
        let FetchEnd::Broken(error) = ended else {
            panic!("{name}: {ended:?}");
        };
        assert!(error.to_string().contains("checksum"), "{name}: {error}");
    }
}

#[test]
fn arrival_is_announced_once_before_it_completes() {
    let runtime = runtime();
    let all: Vec<u8> = (0..BLOCKS).map(block).collect::<Vec<_>>().concat();
    let whole = all.len() as u64;
    let answer = [all, end()].concat();
    let pause = Duration::from_millis(5);
    let address = runtime.block_on(parent(answer, 64 << 10, pause));
    let child = child("told", address, 1);
    let mut told = 0;
    let (ended, last) = loop {
        let came = child.fetch.take_transferred(u64::from(BLOCK_BYTES) / 2);
        if came.bytes > 0 {
            assert!(came.bytes >= u64::from(BLOCK_BYTES) / 2);
            assert!(came.busy > Duration::ZERO);
        }
        told += came.bytes;
        match child.ends.try_recv() {
            Ok(end) => break end,
            Err(_) => std::thread::yield_now(),
        }
    };
    assert!(matches!(ended, FetchEnd::Whole), "{ended:?}");
    assert!(told >= 2 * u64::from(BLOCK_BYTES), "{told}");
    let heads = whole - u64::from(BLOCKS) * u64::from(BLOCK_BYTES);
    assert_eq!(told + last.bytes + heads, whole);
}

#[test]
fn relay_does_not_search_for_an_unknown_model() {
    let runtime = runtime();
    let (note, served) = mpsc::channel();
    let note = move |served| {
        let _ = note.send(served);
    };
    let store = Arc::new(BlockStore::of_relay());
    let serving = Serving::new((RUN, 1), store, Arc::new(Threads::default()), note);
    let address = runtime.block_on(listen(serving));
    let item = Item { model: 1, ..ITEM };
    let child = child_of("model", address, 1, item, None);
    let (ended, _) = child.ends.recv_timeout(longest()).unwrap();
    assert!(matches!(ended, FetchEnd::NotThere), "{ended:?}");
    assert_eq!(served.try_iter().next(), None);
}
