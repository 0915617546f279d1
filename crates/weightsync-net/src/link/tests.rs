use super::*;
use crate::relay::runtime;

/// Longer than anything here takes.
const SOON: Duration = Duration::from_secs(20);

/// Two ends of a connection.
async fn pair() -> (TcpStream, TcpStream) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (one, other) = tokio::join!(TcpStream::connect(address), listener.accept());
    (one.unwrap(), other.unwrap().0)
}

#[test]
fn peer_that_does_not_read_loses_its_link() {
    let runtime = runtime("weightsync-test").unwrap();
    runtime.block_on(async {
        let (one, other) = pair().await;
        let (events, mut inbox) = mpsc::channel(8);
        let link = Link::<FromRoot>::start(
            AsyncStream::plain(one),
            &events,
            |what: Result<ToRoot, _>| what,
        );
        let (_reader, mut writer) = other.into_split();
        // This peer sends signs of life, and reads nothing.
        let pings = async {
            loop {
                writer
                    .write_all(&ToRoot::Ping.frame().unwrap())
                    .await
                    .unwrap();
                tokio::time::sleep(HEARTBEAT).await;
            }
        };
        let part = FromRoot::Part {
            bytes: vec![1; 16 << 10],
        };
        let part = frames(&[part]).unwrap();
        let begun = std::time::Instant::now();
        // Fills the system's buffers and the queue, until no more fits.
        while link.send_frames(part.clone()) {
            tokio::task::yield_now().await;
        }
        let end = tokio::select! {
            end = timeout(SOON, inbox.recv()) => end.unwrap().unwrap().unwrap_err(),
            () = pings => unreachable!("it goes on for ever"),
        };
        assert!(
            matches!(end, LinkEnd::Behind),
            "{end} {:?}",
            begun.elapsed()
        );
        assert!(!link.send(&FromRoot::Ping));
    });
}

/// A relay that stops a fetch, say, while it connects.
#[test]
fn a_client_that_hangs_up_is_not_one_that_is_refused() {
    let credentials = Credentials::plain(&[1; 16]);
    let cases: [(&[u8], bool); 3] = [(b"", true), (b"wsLI", true), (&[b'G'; HELLO_BYTES], false)];
    runtime("weightsync-test").unwrap().block_on(async {
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
    let runtime = runtime("weightsync-test").unwrap();
    runtime.block_on(async {
        let [own, wrong] = [[1; 16], [2; 16]].map(|secret| Credentials::plain(&secret));
        let address = listen(&own).await;
        let peer = Peer::Any(address.ip());
        let mut told = 0;
        for _ in 0..60 {
            let failed = dial(address, &wrong, peer, Role::Control).await;
            let failed = failed.unwrap_err();
            told += u32::from(matches!(failed, DialError::Hello(HelloError::TokenRefused)));
        }
        dial(address, &own, peer, Role::Control).await.unwrap();
        assert_eq!(told, 20);
    });
}

#[test]
fn honest_process_joins_next_to_silent_strangers() {
    let runtime = runtime("weightsync-test").unwrap();
    runtime.block_on(async {
        let own = Credentials::plain(&[1; 16]);
        let address = listen(&own).await;
        let peer = Peer::Any(address.ip());
        let mut silent = Vec::new();
        for _ in 0..300 {
            silent.push(TcpStream::connect(address).await.unwrap());
        }
        dial(address, &own, peer, Role::Control).await.unwrap();
        // Most of them have gone for others.
        let mut gone = 0;
        for mut socket in silent {
            let read = timeout(HEARTBEAT / 10, socket.read(&mut [0; 1])).await;
            gone += u32::from(read.is_ok());
        }
        assert!(gone >= 300 - 64, "{gone}");
    });
}
