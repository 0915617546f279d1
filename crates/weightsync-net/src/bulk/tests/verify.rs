//! What comes is compared with the sender's digests.

use std::sync::atomic::Ordering;
use std::time::Instant;

use weightsync_mem::Snapshot;

use super::deltas::{relay, whole};
use super::*;
use crate::wire::message::ToParent;

/// A sender that has this image as a version; where it listens.
fn sender(runtime: &tokio::runtime::Runtime, version: Version, snapshot: Snapshot) -> SocketAddr {
    let find = move |item: Item| (item.version == version).then(|| snapshot.clone());
    let store = Arc::new(BlockStore::of_sender(Box::new(find)));
    let threads = Arc::new(Threads::default());
    runtime.block_on(listen(Serving::new((RUN, 1), store, threads, |_| ())))
}

/// A relay that has this version; where it listens.
fn serving(runtime: &tokio::runtime::Runtime, snapshot: Snapshot) -> SocketAddr {
    let store = Arc::new(BlockStore::of_relay());
    store.put(ITEM, Arc::new(HeldVersion::whole(snapshot)));
    let threads = Arc::new(Threads::default());
    runtime.block_on(listen(Serving::new((RUN, 1), store, threads, |_| ())))
}

/// The image whose blocks [`block`] makes.
fn image() -> Vec<u8> {
    let blocks = (0..BLOCKS).map(|index| vec![index as u8; BLOCK_BYTES as usize]);
    blocks.collect::<Vec<_>>().concat()
}

/// What a relay sends that changes this block, with the checksum of what it sends.
fn lie(about: u32) -> Vec<u8> {
    let blocks = (0..BLOCKS).map(|index| {
        let mut bytes = vec![index as u8; BLOCK_BYTES as usize];
        if index == about {
            bytes[4711] ^= 1;
        }
        block_of(index, &bytes)
    });
    [blocks.collect::<Vec<_>>().concat(), end()].concat()
}

/// What a sender of [`image`] tells.
fn told() -> Vec<u8> {
    let of = |index: u32| blake3::hash(&vec![index as u8; BLOCK_BYTES as usize]);
    let digests = (0..BLOCKS).flat_map(|index| *of(index).as_bytes());
    let digests = ToChild::Digests {
        digests: digests.collect(),
    };
    [digests.frame().unwrap(), ToChild::End.frame().unwrap()].concat()
}

fn answer(runtime: &tokio::runtime::Runtime, answer: Vec<u8>) -> SocketAddr {
    let whole = answer.len();
    runtime.block_on(parent(answer, whole, Duration::ZERO))
}

#[test]
fn published_blocks_are_taken_from_a_relay() {
    let runtime = runtime();
    let segment = relay("verify-published", 2);
    let published = whole(&segment, ITEM.version, &image());
    let digests = sender(&runtime, ITEM.version, published.clone());
    for connections in [1, 2] {
        let address = serving(&runtime, published.clone());
        let name = format!("verify-taken-{connections}");
        let child = child_of(&name, address, connections, ITEM, Some(digests));
        let (ended, _) = child.ends.recv_timeout(longest()).unwrap();
        assert!(matches!(ended, FetchEnd::Whole), "{ended:?}");
        assert_eq!(child.slot.commit().unwrap().bytes(), image());
    }
}

#[test]
fn altered_block_is_noticed_and_not_kept() {
    let runtime = runtime();
    let segment = relay("verify-altered", 2);
    let published = whole(&segment, ITEM.version, &image());
    let digests = sender(&runtime, ITEM.version, published);
    for about in [0, 2, BLOCKS - 1] {
        let address = answer(&runtime, lie(about));
        let name = format!("verify-lie-{about}");
        let child = child_of(&name, address, 1, ITEM, Some(digests));
        let (ended, _) = child.ends.recv_timeout(longest()).unwrap();
        let block = about as usize;
        assert!(
            matches!(ended, FetchEnd::Altered { block: found } if found == block),
            "{ended:?}"
        );
        for index in 0..BLOCKS as usize {
            assert_eq!(child.slot.read(index).is_some(), index < block, "{index}");
        }
        // Nobody looks: only the checksum is compared, and the relay made that of its own bytes.
        let name = format!("verify-trusts-{about}");
        let child = child_of(&name, address, 1, ITEM, None);
        let (ended, _) = child.ends.recv_timeout(longest()).unwrap();
        assert!(matches!(ended, FetchEnd::Whole), "{ended:?}");
    }
}

#[test]
fn nothing_is_taken_where_the_sender_tells_nothing() {
    let runtime = runtime();
    let segment = relay("verify-nothing", 2);
    let other = whole(&segment, Version(9), &image());
    let digests = sender(&runtime, Version(9), other);
    let address = answer(&runtime, lie(BLOCKS));
    let child = child_of("verify-gone", address, 1, ITEM, Some(digests));
    let (ended, _) = child.ends.recv_timeout(longest()).unwrap();
    assert!(matches!(ended, FetchEnd::NotThere), "{ended:?}");
    assert!((0..BLOCKS as usize).all(|index| child.slot.read(index).is_none()));
}

/// Returns once the first block is there and waits for its digest.
fn wait_for_the_digest(child: &Child) {
    let until = Instant::now() + longest();
    while child.store.waits.load(Ordering::Acquire) == 0 {
        assert!(Instant::now() < until, "no block waits for its digest");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    assert!(child.slot.read(0).is_none(), "the block counts already");
}

#[test]
fn block_waits_for_a_digest_that_comes_late() {
    let runtime = runtime();
    let (sender, asked, go) = held_parent(&runtime, told());
    let address = answer(&runtime, lie(BLOCKS));
    let child = child_of("verify-late", address, 1, ITEM, Some(sender));
    asked.recv_timeout(longest()).unwrap();
    wait_for_the_digest(&child);
    go.notify_one();
    let (ended, _) = child.ends.recv_timeout(longest()).unwrap();
    assert!(matches!(ended, FetchEnd::Whole), "{ended:?}");
}

#[test]
fn parent_is_not_blamed_while_a_digest_is_late() {
    let runtime = runtime();
    let (sender, asked, go) = held_parent(&runtime, told());
    let address = runtime.block_on(quitter());
    let child = child_of("verify-blames", address, 1, ITEM, Some(sender));
    asked.recv_timeout(longest()).unwrap();
    wait_for_the_digest(&child);
    go.notify_one();
    let (ended, _) = child.ends.recv_timeout(longest()).unwrap();
    assert!(matches!(ended, FetchEnd::Partly), "{ended:?}");
    assert!(child.slot.read(0).is_some());
}

#[test]
fn reading_of_digests_ends_with_its_fetch() {
    let runtime = runtime();
    // The sender is asked, and never answers.
    let (sender, asked, _go) = held_parent(&runtime, Vec::new());
    let (address, wanted, go) = {
        let reason = String::new();
        held_parent(&runtime, ToChild::Gone { reason }.frame().unwrap())
    };
    let child = child_of("verify-ends", address, 1, ITEM, Some(sender));
    asked.recv_timeout(longest()).unwrap();
    wanted.recv_timeout(longest()).unwrap();
    go.notify_one();
    let (ended, _) = child.ends.recv_timeout(longest()).unwrap();
    assert!(matches!(ended, FetchEnd::NotThere), "{ended:?}");
    drop(child.fetch);
    // The thread held the slot: nothing of the fetch is left.
    let until = Instant::now() + longest();
    while Arc::strong_count(&child.slot) > 1 {
        assert!(Instant::now() < until, "the slot is held");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

#[test]
fn relay_tells_no_digests() {
    let runtime = runtime();
    let segment = relay("verify-relay", 2);
    let published = whole(&segment, ITEM.version, &image());
    let relay = serving(&runtime, published);
    // A child that asks it in the sender's place gets nothing to compare with.
    let address = answer(&runtime, lie(BLOCKS));
    let child = child_of("verify-asks-relay", address, 1, ITEM, Some(relay));
    let (ended, _) = child.ends.recv_timeout(longest()).unwrap();
    assert!(matches!(ended, FetchEnd::NotThere), "{ended:?}");
}

/// A relay that sends block 0 and closes the connection, as one does whose child reads nothing.
async fn quitter() -> SocketAddr {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let take = |mut socket: AsyncStream, _, _| {
        tokio::spawn(async move {
            let mut header = [0; HEADER_BYTES];
            socket.read_exact(&mut header).await.unwrap();
            let header = FrameHeader::decode(&header, &[FrameKind::Bulk]).unwrap();
            socket.read_exact(&mut vec![0; header.len]).await.unwrap();
            let block = block_of(0, &vec![0; BLOCK_BYTES as usize]);
            socket.write_all(&block).await.unwrap();
        });
    };
    let credentials = Credentials::plain(&SECRET);
    tokio::spawn(accept_all(listener, credentials, || false, |_| {}, take));
    address
}

/// A relay that alters block 0, and says forever that it is there on every other connection.
async fn idler() -> SocketAddr {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let take = move |mut socket: AsyncStream, _, _| {
        tokio::spawn(async move {
            let mut header = [0; HEADER_BYTES];
            socket.read_exact(&mut header).await.unwrap();
            let header = FrameHeader::decode(&header, &[FrameKind::Bulk]).unwrap();
            let mut payload = vec![0; header.len];
            socket.read_exact(&mut payload).await.unwrap();
            let ToParent::Fetch(wanted) = ToParent::decode(&payload).unwrap() else {
                panic!("{payload:?}");
            };
            if wanted.ranges[0].first == 0 {
                let altered = block_of(0, &vec![9; BLOCK_BYTES as usize]);
                let _ = socket.write_all(&altered).await;
            }
            let idle = ToChild::Idle.frame().unwrap();
            while socket.write_all(&idle).await.is_ok() {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        });
    };
    let credentials = Credentials::plain(&SECRET);
    tokio::spawn(accept_all(listener, credentials, || false, |_| {}, take));
    address
}

#[test]
fn altered_block_is_told_while_others_idle() {
    let runtime = runtime();
    let segment = relay("verify-idle", 2);
    let published = whole(&segment, ITEM.version, &image());
    let digests = sender(&runtime, ITEM.version, published);
    let address = runtime.block_on(idler());
    let child = child_of("verify-idles", address, 2, ITEM, Some(digests));
    let (ended, _) = child.ends.recv_timeout(longest()).unwrap();
    assert!(matches!(ended, FetchEnd::Altered { block: 0 }), "{ended:?}");
}
