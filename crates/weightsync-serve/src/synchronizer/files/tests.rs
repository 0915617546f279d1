//! Downloads from a store that counts what is read, or reads nothing for a while.

use std::future::poll_fn;
use std::net::TcpListener;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, mpsc};

use http_body::Body as _;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time::timeout;
use weightsync_conformance::scale::longest;
use weightsync_engine::Tensors;
use weightsync_engine::transport::raise_files;
use weightsync_link::stream::AsyncStream;
use weightsync_link::tls::{
    CertificateRequest, CertificateRole as Role, ClientAuth, Tls, TlsPeer, make,
};
use weightsync_store::{SaveOptions, Store, Work, Writer};

use super::*;
use crate::http::{Bearer, HttpThread, Limits, Server};
use crate::synchronizer::events::Events;
use crate::synchronizer::lasting::Shelf;
use crate::synchronizer::memory::HeldVersions;
use crate::synchronizer::server::{App, router};

/// Bytes of a version: several pieces.
const BYTES: u64 = 5 * StoredWeights::PIECE + 64;

/// A store with one version.
fn store() -> (tempfile::TempDir, Store) {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path().to_str().unwrap()).unwrap();
    let mut weights = Tensors::new();
    let values: Vec<u8> = (0..BYTES).map(|at| (at / 1000) as u8).collect();
    weights.insert("layer", [BYTES], values).unwrap();
    let mut writer = Writer::claim(&store, SaveOptions::default()).unwrap();
    writer.save_weights("policy", &weights).unwrap();
    (dir, store)
}

/// The store, which adds up what is read of it.
fn counted(store: Store) -> (Store, Arc<AtomicU64>) {
    gated(store, || {})
}

/// The same; each read passes a gate when it is done.
fn gated(store: Store, gate: impl Fn() + Send + Sync + 'static) -> (Store, Arc<AtomicU64>) {
    let read = Arc::new(AtomicU64::new(0));
    let count = read.clone();
    let store = store.with_progress(move |work| {
        if let Work::Moved(bytes) = work {
            count.fetch_add(bytes, Ordering::SeqCst);
            gate();
        }
        Ok(())
    });
    (store, read)
}

async fn next(body: &mut FileBody) -> Option<Bytes> {
    let frame = poll_fn(|context| Pin::new(&mut *body).poll_frame(context)).await?;
    Some(frame.unwrap().into_data().unwrap())
}

#[tokio::test]
async fn slow_downloads_read_a_piece_ahead_and_no_more() {
    let (_dir, store) = store();
    let (store, read) = counted(store);
    let stored = Shelf::new(store).weights(Version(1)).unwrap().remove(0);
    stored.compare().unwrap();
    let pieces = Pieces::new(BlockingTurns::new(3), 2);
    let mut downloads: Vec<_> = (0..30)
        .map(|_| {
            let file = File::of(VersionWeights::Stored(stored.clone())).unwrap();
            let all = 0..file.bytes;
            FileBody::new(file, all, &pieces)
        })
        .collect();
    let (mut taken, mut ends) = (0, 0);
    read.store(0, Ordering::SeqCst);
    // The clients take turns, a frame at a time: each waits for all others.
    while ends < downloads.len() {
        ends = 0;
        for body in &mut downloads {
            let header = body.file.header.len() as u64;
            let is_header = body.left.start < header;
            match next(body).await {
                Some(bytes) if !is_header => {
                    let at = body.left.start - header - bytes.len() as u64;
                    assert_eq!(bytes[0], (at / 1000) as u8);
                    taken += bytes.len() as u64;
                }
                Some(_) => {}
                None => ends += 1,
            }
            // What one has read is there for the others.
            let read = read.load(Ordering::SeqCst);
            let most = taken / 30 + 2 * StoredWeights::PIECE;
            assert!(
                read <= most,
                "{read} bytes are read, expected at most {most}"
            );
        }
    }
    assert_eq!(taken, 30 * BYTES);
}

/// Each is at another place, and none is read on.
#[tokio::test]
async fn stalled_downloads_keep_a_few_pieces_together() {
    let (_dir, store) = store();
    let stored = Shelf::new(store).weights(Version(1)).unwrap().remove(0);
    let pieces = Pieces::new(BlockingTurns::new(3), 2);
    let mut downloads = Vec::new();
    for number in 0..BYTES.div_ceil(StoredWeights::PIECE) {
        let file = File::of(VersionWeights::Stored(stored.clone())).unwrap();
        let begins = file.header.len() as u64 + number * StoredWeights::PIECE;
        let rest = begins..file.bytes;
        let mut body = FileBody::new(file, rest, &pieces);
        let first = next(&mut body).await.unwrap();
        downloads.push((number * StoredWeights::PIECE, body, first));
    }
    assert_eq!(pieces.kept().len(), 2);
    for (mut at, mut body, first) in downloads {
        // It holds its own bytes, and not the piece that they are of.
        let mut frame = Some(first);
        while let Some(bytes) = frame {
            assert!(bytes.is_unique(), "the frame at {at} holds a piece");
            assert_eq!(bytes[0], (at / 1000) as u8);
            at += bytes.len() as u64;
            frame = next(&mut body).await;
        }
        assert_eq!(at, BYTES);
    }
}

/// Its client has left in the middle of the first piece.
#[tokio::test]
async fn comparison_stops_when_nobody_waits_for_it() {
    let (_dir, store) = store();
    let (gate, reads) = (Gate::default(), Arc::new(Notify::new()));
    let opens = Opens(gate.clone());
    let is_open = Arc::new(AtomicBool::new(true));
    let (passes, begun) = (is_open.clone(), reads.clone());
    let (store, read) = gated(store, move || {
        if !passes.load(Ordering::SeqCst) {
            begun.notify_one();
            gate.pass();
        }
    });
    let stored = Shelf::new(store).weights(Version(1)).unwrap().remove(0);
    read.store(0, Ordering::SeqCst);
    is_open.store(false, Ordering::SeqCst);
    let turns = BlockingTurns::new(1);
    let mut compares = Box::pin(compare(stored.clone(), &turns));
    tokio::select! {
        biased;
        _ = &mut compares => panic!("it is compared"),
        () = reads.notified() => {}
    }
    drop(compares);
    drop(opens);
    // When the turn of the comparison is over.
    turns.take(|| ()).await.unwrap();
    assert_eq!(read.load(Ordering::SeqCst), StoredWeights::PIECE);
    // The next one goes on there.
    compare(stored, &turns).await.unwrap().unwrap();
    assert_eq!(read.load(Ordering::SeqCst), BYTES);
}

#[test]
fn version_is_compared_once_however_many_there_are() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path().to_str().unwrap()).unwrap();
    let mut writer = Writer::claim(&store, SaveOptions::default()).unwrap();
    let versions = 1..=5;
    for version in versions.clone() {
        let mut weights = Tensors::new();
        let values = vec![version as u8; 1 << 20];
        weights.insert("layer", [1 << 20], values).unwrap();
        writer.save_weights("policy", &weights).unwrap();
    }
    let (store, read) = counted(store);
    let shelf = Shelf::new(store);
    let compare_all = || {
        read.store(0, Ordering::SeqCst);
        for version in versions.clone() {
            let stored = shelf.weights(Version(version)).unwrap().remove(0);
            stored.compare().unwrap();
        }
        read.load(Ordering::SeqCst)
    };
    assert!(compare_all() >= 5 << 20);
    let again = compare_all();
    assert!(again < 1 << 20, "{again} bytes are read again");
}

/// Where reads of a store wait until it is opened.
#[derive(Clone, Default)]
struct Gate(Arc<(Mutex<bool>, Condvar)>);

impl Gate {
    fn pass(&self) {
        let (is_open, opened) = &*self.0;
        let open = opened.wait_while(is_open.lock().unwrap(), |is_open| !*is_open);
        drop(open.unwrap());
    }

    fn open(&self) {
        let (is_open, opened) = &*self.0;
        *is_open.lock().unwrap() = true;
        opened.notify_all();
    }
}

/// Opens a gate when it is dropped, also if the test fails.
struct Opens(Gate);

impl Drop for Opens {
    fn drop(&mut self) {
        self.0.open();
    }
}

/// More clients than there are threads for calls that block.
const CLIENTS: usize = 600;

#[test]
fn handshake_ends_while_all_reads_are_blocked() {
    raise_files();
    let (_dir, store) = store();
    let gate = Gate::default();
    let opens = Opens(gate.clone());
    let store = store.with_progress(move |_| {
        gate.pass();
        Ok(())
    });
    let folder = tempfile::tempdir().unwrap();
    let request = CertificateRequest {
        out: folder.path().to_owned(),
        hosts: vec!["127.0.0.1".into()],
        days: 2,
    };
    make(&request).unwrap();
    let tls = |part| Tls::read(folder.path(), part).unwrap().on_loopback();

    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    let server_tls = Some((tls(Role::Trainer), ClientAuth::IfAny));
    let bearer = Bearer::to_synchronizer(None);
    let server = Server::new(listener, bearer, server_tls, Limits::default()).unwrap();
    let (inputs, _inputs) = mpsc::channel();
    let held = HeldVersions::new("shared-mem".parse().unwrap(), 0, None);
    let shelf = Some(Shelf::new(store));
    let app = App::new(inputs, Events::default(), held, shelf, true);
    let thread = HttpThread::start("test", move |stopping| {
        server.serve(router(app, stopping.clone()), stopping, |_| {})
    });
    let _thread = thread.unwrap();

    let tls = tls(Role::Worker);
    let ask = async |path: &str| {
        let asked = async {
            let socket = TcpStream::connect(at).await.unwrap();
            let peer = TlsPeer::Trainer("127.0.0.1");
            let stream = AsyncStream::dial(socket, Some(&tls), at, peer).await;
            let mut stream = stream.expect("the handshake ends");
            let head = format!("GET {path} HTTP/1.1\r\nHost: {at}\r\n\r\n");
            stream.write_all(head.as_bytes()).await.unwrap();
            stream
        };
        timeout(longest(), asked).await.expect("the handshake ends")
    };
    let status = async |mut stream: AsyncStream| {
        let mut head = [0; 12];
        let read = timeout(longest(), stream.read_exact(&mut head)).await;
        read.expect("it answers").unwrap();
        String::from_utf8(head.to_vec()).unwrap()
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let mut lists = Vec::new();
        for _ in 0..CLIENTS {
            lists.push(ask("/v1/versions/1/").await);
        }
        assert_eq!(status(ask("/healthz").await).await, "HTTP/1.1 200");
        drop(opens);
        for list in lists {
            assert_eq!(status(list).await, "HTTP/1.1 200");
        }
    });
}
