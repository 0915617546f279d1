use serde::{Deserialize, Serialize};
use tokio::runtime::Runtime;
use weightsync_conformance::scale::longest;

use super::*;
use crate::message::{Check, CheckText};
use crate::tls::{CertificateRole, Tls};
use crate::{blocking, listen};

/// What both ends of these links say.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
enum TestMessage {
    Ping,
    Goodbye,
    Part { bytes: Vec<u8> },
}

impl Message for TestMessage {
    const KIND: FrameKind = FrameKind::Control;
}

impl Check for TestMessage {
    fn check(&self, _text: CheckText) -> Result<(), MessageError> {
        Ok(())
    }
}

impl ControlMessage for TestMessage {
    fn ping() -> Self {
        Self::Ping
    }

    fn is_ping(&self) -> bool {
        matches!(self, Self::Ping)
    }
}

/// A runtime as the services have it: one thread for all links.
fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .max_blocking_threads(2)
        .enable_all()
        .build()
        .unwrap()
}

/// Two ends of a connection.
async fn pair() -> (TcpStream, TcpStream) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (one, other) = tokio::join!(TcpStream::connect(address), listener.accept());
    (one.unwrap(), other.unwrap().0)
}

#[test]
fn peer_that_does_not_read_loses_its_link() {
    runtime().block_on(async {
        let (one, other) = pair().await;
        does_not_read(AsyncStream::plain(one), AsyncStream::plain(other)).await;
        let (_folder, trainer, worker) = certificates();
        let (ours, theirs) = encrypted(&trainer, &worker).await;
        does_not_read(ours, theirs).await;
    });
}

async fn does_not_read(ours: AsyncStream, mut theirs: AsyncStream) {
    let (events, mut inbox) = mpsc::channel(8);
    let link = Link::<TestMessage>::start(ours, &events, |what: Result<TestMessage, _>| what);
    // This peer sends signs of life, and reads nothing.
    let pings = async {
        loop {
            let ping = TestMessage::Ping.frame().unwrap();
            theirs.write_all(&ping).await.unwrap();
            tokio::time::sleep(HEARTBEAT).await;
        }
    };
    let part = TestMessage::Part {
        bytes: vec![1; 16 << 10],
    };
    let part = frames(&[part]).unwrap();
    let begun = std::time::Instant::now();
    // Fills the system's buffers and the queue, until no more fits.
    while link.send_frames(part.clone()) {
        tokio::task::yield_now().await;
    }
    let end = tokio::select! {
        end = timeout(longest(), inbox.recv()) => end.unwrap().unwrap().unwrap_err(),
        () = pings => unreachable!("it goes on for ever"),
    };
    assert!(
        matches!(end, LinkEnd::Behind),
        "{end} {:?}",
        begun.elapsed()
    );
    assert!(!link.send(&TestMessage::Ping));
}

/// A sender that has not got to run reads them once their process is gone and another one asks for
/// its number.
#[test]
fn last_words_of_a_peer_are_no_sign_of_life() {
    runtime().block_on(async {
        let (one, mut other) = pair().await;
        let words = TestMessage::Goodbye.frame().unwrap();
        other.write_all(&words).await.unwrap();
        drop(other);
        let (events, mut inbox) = mpsc::channel(8);
        let ours = AsyncStream::plain(one);
        let link = Link::<TestMessage>::start(ours, &events, |what: Result<TestMessage, _>| what);
        link.expect_sign();
        let mut next = async || timeout(longest(), inbox.recv()).await.unwrap().unwrap();
        assert!(matches!(next().await, Ok(TestMessage::Goodbye)));
        assert!(matches!(next().await, Err(LinkEnd::HungUp)));
    });
}

/// A relay that stops a fetch, say, while it connects.
#[test]
fn a_client_that_hangs_up_is_not_one_that_is_refused() {
    let credentials = Credentials::plain(&[1; 16]);
    let cases: [(&[u8], bool); 3] = [(b"", true), (b"wsLI", true), (&[b'G'; HELLO_BYTES], false)];
    runtime().block_on(async {
        for (bytes, hangs_up) in cases {
            let (mut client, server) = pair().await;
            client.write_all(bytes).await.unwrap();
            drop(client);
            let server = (server, SocketAddr::from(([127, 0, 0, 1], 1)));
            let error = greet(server, &credentials, false, || true).await;
            let error = error.unwrap_err();
            assert_eq!(error.is_hang_up(), hangs_up, "{bytes:?}: {error}");
        }
    });
}

/// A listener at loopback that accepts each client with the key.
async fn listen(credentials: &Credentials) -> SocketAddr {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(listen::accept_all(
        listener,
        credentials.clone(),
        || false,
        |_| {},
        |_, _, _| {},
    ));
    address
}

#[test]
fn honest_process_joins_next_to_failing_strangers() {
    let runtime = runtime();
    runtime.block_on(async {
        let [own, wrong] = [[1; 16], [2; 16]].map(|secret| Credentials::plain(&secret));
        let address = listen(&own).await;
        let peer = TlsPeer::Sender(address.ip());
        let mut told = 0;
        for _ in 0..60 {
            let failed = dial(address, &wrong, peer, LinkRole::Control).await;
            let failed = failed.unwrap_err();
            told += u32::from(matches!(failed, DialError::Hello(HelloError::TokenRefused)));
        }
        dial(address, &own, peer, LinkRole::Control).await.unwrap();
        assert_eq!(told, 20);
    });
}

#[test]
fn honest_process_joins_next_to_silent_strangers() {
    let (_folder, trainer, worker) = certificates();
    // Some begin a handshake of TLS, with its first byte.
    let cases = [(None, &[][..]), (Some((&trainer, &worker)), &[22])];
    runtime().block_on(async {
        for (tls, first) in cases {
            let address = listen(&with(tls.map(|(trainer, _)| trainer))).await;
            let peer = TlsPeer::Sender(address.ip());
            let mut silent = Vec::new();
            for _ in 0..300 {
                let mut socket = TcpStream::connect(address).await.unwrap();
                socket.write_all(first).await.unwrap();
                silent.push(socket);
            }
            let own = with(tls.map(|(_, worker)| worker));
            dial(address, &own, peer, LinkRole::Control).await.unwrap();
            // Most of them have gone for others.
            let mut gone = 0;
            for mut socket in silent {
                let read = timeout(HEARTBEAT / 10, socket.read(&mut [0; 1])).await;
                gone += u32::from(read.is_ok());
            }
            assert!(gone >= 300 - 64, "{gone}");
        }
    });
}

/// A folder of certificates for loopback, and those of two parts.
fn certificates() -> (tempfile::TempDir, Tls, Tls) {
    let folder = tempfile::tempdir().unwrap();
    let request = crate::tls::CertificateRequest {
        out: folder.path().join("pki"),
        hosts: vec!["127.0.0.1".into()],
        days: 2,
    };
    crate::tls::make(&request).unwrap();
    let [trainer, worker] = [CertificateRole::Trainer, CertificateRole::Worker].map(|part| {
        let read = Tls::read(&request.out, part).unwrap();
        read.on_loopback()
    });
    (folder, trainer, worker)
}

fn with(tls: Option<&Tls>) -> Credentials {
    Credentials {
        tls: tls.cloned(),
        ..Credentials::plain(&[1; 16])
    }
}

/// Two ends of an encrypted connection: the trainer's, and its worker's.
async fn encrypted(trainer: &Tls, worker: &Tls) -> (AsyncStream, AsyncStream) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (came, mut accepted) = mpsc::channel(1);
    let take = move |stream, _, _| came.try_send(stream).unwrap();
    tokio::spawn(listen::accept_all(
        listener,
        with(Some(trainer)),
        || false,
        |_| {},
        take,
    ));
    let peer = TlsPeer::Trainer("127.0.0.1");
    let dialled = dial(address, &with(Some(worker)), peer, LinkRole::Control).await;
    (accepted.recv().await.unwrap(), dialled.unwrap())
}

#[test]
fn encrypted_link_carries_messages_both_ways() {
    let (_folder, trainer, worker) = certificates();
    runtime().block_on(async {
        let (accepted, dialled) = encrypted(&trainer, &worker).await;
        let (one, mut ones) = mpsc::channel(64);
        let (other, mut others) = mpsc::channel(64);
        let worker = Link::<TestMessage>::start::<TestMessage, _>(dialled, &one, |what| what);
        let root = Link::<TestMessage>::start::<TestMessage, _>(accepted, &other, |what| what);
        // More than the system's buffers take at once.
        let part = || TestMessage::Part {
            bytes: vec![3; 16 << 10],
        };
        for _ in 0..500 {
            assert!(root.send(&part()));
        }
        assert!(worker.send(&TestMessage::Goodbye));
        for _ in 0..500 {
            let came = timeout(longest(), ones.recv()).await.unwrap().unwrap();
            assert_eq!(came.unwrap(), part());
        }
        let said = timeout(longest(), others.recv()).await.unwrap().unwrap();
        assert!(matches!(said.unwrap(), TestMessage::Goodbye));
        root.finish().await;
        let end = timeout(longest(), ones.recv()).await.unwrap().unwrap();
        assert!(matches!(end.unwrap_err(), LinkEnd::HungUp));
    });
}

#[test]
fn ends_with_and_without_certificates_say_what_to_do() {
    let (folder, trainer, worker) = certificates();
    let other = certificates();
    // It trusts the trainer, which does not trust it.
    let stranger = {
        let [own, theirs] = [&other.0, &folder]
            .map(|of| std::fs::read_to_string(of.path().join("pki/worker.pem")).unwrap());
        let begins = "-----BEGIN CERTIFICATE";
        let text = [
            &own[..own.rfind(begins).unwrap()],
            &theirs[theirs.rfind(begins).unwrap()..],
        ];
        let path = other.0.path().join("stranger.pem");
        std::fs::write(&path, text.concat()).unwrap();
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600))
            .unwrap();
        Tls::read(path, CertificateRole::Worker)
            .unwrap()
            .on_loopback()
    };
    let cases = [
        (
            Some(&stranger),
            Some(&trainer),
            "this end's certificate is of another",
            "another authority",
        ),
        (
            Some(&worker),
            None,
            "TLS handshake: has it no certificate",
            "speaks TLS, and this end",
        ),
        (
            None,
            Some(&trainer),
            "takes encrypted links alone",
            "began without TLS",
        ),
        (
            Some(&other.2),
            Some(&trainer),
            "another authority",
            "another authority",
        ),
    ];
    runtime().block_on(async {
        for (client, server, at_client, at_server) in cases {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            let server = with(server);
            let serves = async {
                let accepted = listener.accept().await.unwrap();
                greet(accepted, &server, false, || true).await.unwrap_err()
            };
            let (client, peer) = (with(client), TlsPeer::Trainer("127.0.0.1"));
            let (at, error) = tokio::join!(serves, dial(address, &client, peer, LinkRole::Control));
            let error = error.unwrap_err().to_string();
            assert!(error.contains(at_client), "{error}");
            assert!(at.to_string().contains(at_server), "{at}");
        }
    });
}

#[test]
fn encrypted_stream_reads_and_writes_in_two_threads() {
    let (_folder, trainer, worker) = certificates();
    let runtime = runtime();
    let (address, accepted) = runtime.block_on(async {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (came, accepted) = std::sync::mpsc::channel();
        let take = move |stream: AsyncStream, _, _| came.send(stream.into_blocking()).unwrap();
        tokio::spawn(listen::accept_all(
            listener,
            with(Some(&trainer)),
            || false,
            |_| {},
            take,
        ));
        (address, accepted)
    });
    let (peer, limit) = (TlsPeer::Trainer("127.0.0.1"), Some(longest()));
    let one = blocking::dial(
        address,
        &with(Some(&worker)),
        peer,
        LinkRole::Collector,
        limit,
    );
    let (one, other) = (one.unwrap(), accepted.recv().unwrap().unwrap());
    let bytes: Vec<u8> = (0..3_000_000_u32).map(|at| (at / 3) as u8).collect();
    std::thread::scope(|scope| {
        for stream in [&one, &other] {
            let bytes = &bytes;
            scope.spawn(move || {
                use std::io::Write;
                let mut stream = stream;
                for part in bytes.chunks(700_001) {
                    stream.write_all(part).unwrap();
                }
                stream.shutdown(std::net::Shutdown::Write).unwrap();
            });
            scope.spawn(move || {
                use std::io::Read;
                let (mut stream, mut came) = (stream, Vec::new());
                stream.read_to_end(&mut came).unwrap();
                assert!(came == *bytes);
            });
        }
    });
}
