//! What a network can do to a transfer.

use std::io::{BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;
use socket2::{Domain, Socket, Type};
use weightsync_engine::{
    DigestPolicy, Expect, Outcome, Pull, Receiver, Remedy, SendOptions, Sender, Version, WaitFor,
};
use weightsync_serve::Rpc;

use super::foreign::{LINES, ask, bearer, say, serve};
use super::proxy::{Answer, Harm, Proxy};
use super::{BRIEF, at_connect, parts, receive, setup, soon, weights, worker};

/// A few megabytes, so that there are several blocks.
const FLOATS: usize = 1 << 20;

/// A sender that its worker reaches by a proxy.
fn behind(proxy: &Proxy) -> (Sender, Receiver) {
    let initial = weights(FLOATS, 1.0);
    let scheme = at_connect().advertise(&proxy.addr.to_string());
    let setup = setup(&initial, scheme).history(1);
    let (address, _) = parts(&setup.init_info());
    let (found, listens) = address.split_once(" at ").expect("both");
    assert_eq!(found, proxy.addr.to_string());
    proxy.to(listens.parse().expect("an address"));
    let sender = setup
        .connect(&initial, Expect::Count(0), Some(soon()))
        .expect("a sender");
    let mut receiver = worker(sender.init_info(), 0).expect("it joins");
    assert_eq!(receive(&mut receiver), 1.0);
    (sender, receiver)
}

pub(crate) fn staged() -> SendOptions {
    SendOptions::new().wait(WaitFor::Staged)
}

#[test]
fn damaged_or_broken_fetch_is_repeated() {
    let proxy = Proxy::new();
    let (mut sender, mut receiver) = behind(&proxy);
    for (value, harm) in [
        (2.0, Harm::Flip(3_000_000)),
        (3.0, Harm::Cut(1_500_000)),
        (4.0, Harm::Flip(2_000_000)),
        (5.0, Harm::Cut(200_000)),
    ] {
        let before = proxy.harmed();
        proxy.harm(&[harm]);
        let report = sender
            .send_with(&weights(FLOATS, value), &staged())
            .expect("it is sent");
        assert!(report.all_reached(), "{report}");
        assert_eq!(proxy.harmed(), before + 1, "{harm:?}");
        assert_eq!(receive(&mut receiver), value, "{harm:?}");
    }
}

#[test]
fn persistent_damage_is_refused_and_never_visible() {
    let proxy = Proxy::new();
    let (mut sender, mut receiver) = behind(&proxy);
    // As often as a block is asked for.
    proxy.harm(&[Harm::Flip(700_000); 5]);
    let report = sender
        .send_with(&weights(FLOATS, 2.0), &staged())
        .expect("it is sent");
    let line = report.worker(0).expect("its line");
    let Outcome::Refused { reason } = &line.outcome else {
        panic!("{report}");
    };
    assert!(
        reason.contains("block 0") && reason.contains("damaged"),
        "{reason}"
    );
    assert_eq!(proxy.harmed(), 5);
    let latest = receiver.latest().expect("no failure").expect("it has one");
    assert_eq!(latest.version().0, 1);
    let next = sender.send_with(&weights(FLOATS, 3.0), &staged());
    assert!(next.expect("it is sent").all_reached());
    assert_eq!(receive(&mut receiver), 3.0);
}

#[test]
fn failed_connection_is_retried_not_refused() {
    let proxy = Proxy::new();
    let (mut sender, mut receiver) = behind(&proxy);
    // As often as a worker asks for the same bytes, and each time before any has come.
    proxy.harm(&[Harm::Cut(20); 12]);
    let report = sender
        .send_with(&weights(FLOATS, 2.0), &staged())
        .expect("it is sent");
    assert!(report.all_reached(), "{report}");
    assert_eq!(receive(&mut receiver), 2.0);
}

const IMAGE: &str = "GET /v1/models/0/versions/";

#[test]
fn answer_of_a_proxy_is_not_the_senders() {
    let proxy = Proxy::new();
    let (mut sender, mut receiver) = behind(&proxy);
    // As often as a worker asks for the same bytes, and more.
    proxy.answer(
        IMAGE,
        &[Answer::Says("502 Bad Gateway\r\nContent-Length: 0"); 12],
    );
    assert!(sends(&mut sender, 2.0));
    assert_eq!(proxy.answered(), 12);
    assert_eq!(receive(&mut receiver), 2.0);
    // The question of a worker that asks itself, too.
    proxy.answer(
        "GET /v1/workers/",
        &[Answer::Says("502 Bad Gateway\r\nContent-Length: 0"); 2],
    );
    let got = receiver
        .pull(Pull::newest().timeout(Some(soon())))
        .expect("an answer");
    assert_eq!(got.expect("it is there").version().0, 2);
    assert_eq!(proxy.answered(), 14);
}

#[test]
fn whole_answer_to_a_range_request_is_used() {
    let proxy = Proxy::new();
    let (mut sender, mut receiver) = behind(&proxy);
    proxy.harm(&[Harm::Cut(3_000_000)]);
    proxy.answer(IMAGE, &[Answer::All]);
    assert!(sends(&mut sender, 2.0));
    assert_eq!(proxy.answered(), 1);
    assert_eq!(receive(&mut receiver), 2.0);
}

#[test]
fn empty_answers_are_retried_with_a_pause() {
    let proxy = Proxy::new();
    let (mut sender, mut receiver) = behind(&proxy);
    let empty = Answer::Says("200 OK\r\nContent-Length: 0");
    proxy.answer(IMAGE, &[empty; 12]);
    let begun = Instant::now();
    assert!(sends(&mut sender, 2.0));
    let took = begun.elapsed();
    assert_eq!(proxy.answered(), 12);
    assert!(took >= Duration::from_secs(1), "{took:?}");
    assert_eq!(receive(&mut receiver), 2.0);
}

#[test]
fn impossible_pull_fails_at_once() {
    let proxy = Proxy::new();
    let (mut sender, mut receiver) = behind(&proxy);
    assert!(sends(&mut sender, 2.0));
    assert_eq!(receive(&mut receiver), 2.0);
    // As often as a block is asked for.
    proxy.harm(&[Harm::Flip(700_000); 5]);
    let first = Pull::version(Version::FIRST);
    let error = receiver.pull(first.clone()).unwrap_err();
    let words = error.to_string();
    assert!(
        words.contains("block 0") && words.contains("damaged"),
        "{words}"
    );
    assert_eq!(error.remedy(), Remedy::Retry);
    let got = receiver
        .pull(first.timeout(Some(soon())))
        .expect("an answer");
    assert_eq!(got.expect("it is kept").version(), Version::FIRST);
}

#[test]
fn late_digest_reaches_workers_that_join_later() {
    let initial = weights(FLOATS, 1.0);
    let setup = setup(&initial, at_connect()).digest(DigestPolicy::Background);
    let mut sender = setup
        .connect(&initial, Expect::Count(0), Some(soon()))
        .expect("a sender");
    sender.send(&weights(FLOATS, 2.0)).expect("it is sent");
    let sent = sender.snapshot().expect("it was sent");
    // The send does not wait for the worker.
    let begun = Instant::now();
    let made = loop {
        assert!(begun.elapsed() < soon(), "no digest is made");
        match sent.published_digest() {
            Some(made) => break made,
            None => std::thread::sleep(Duration::from_millis(1)),
        }
    };
    assert_eq!(made, sent.digest());
    let mut receiver = worker(sender.init_info(), 0).expect("it joins");
    let got = receiver.latest().expect("no failure").expect("it has one");
    assert_eq!(got.published_digest(), Some(made));
}

#[test]
fn a_worker_goes_on_where_its_connections_broke() {
    let proxy = Proxy::new();
    let (mut sender, mut receiver) = behind(&proxy);
    for value in [2.0, 3.0, 4.0] {
        proxy.cut();
        // The worker may take a moment to be back, and then has the version that was sent
        // meanwhile.
        let begun = Instant::now();
        let report = loop {
            let report = sender
                .send_with(&weights(FLOATS, value), &staged())
                .expect("it is sent");
            let line = report.worker(0).map(|line| line.outcome.clone());
            match line {
                Some(Outcome::Staged | Outcome::Applied) => break report,
                Some(Outcome::Lost) | None => {}
                Some(other) => panic!("{other:?}"),
            }
            assert!(begun.elapsed() < soon(), "it does not come back");
            std::thread::sleep(Duration::from_millis(1));
        };
        assert!(receive(&mut receiver) == value, "{report}");
        // The report reaches the sender after `receive` has returned.
        loop {
            let status = sender.workers();
            assert_eq!(status.len(), 1);
            if status[0].versions[0] == receiver.version().unwrap() {
                break;
            }
            assert!(begun.elapsed() < soon(), "{status:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test]
fn dropped_registration_does_not_mean_a_dead_sender() {
    let proxy = Proxy::new();
    let (mut sender, mut receiver) = behind(&proxy);
    const REGISTER: &str = "POST /v1/workers ";
    const BAD_GATEWAY: &str = "502 Bad Gateway\r\nContent-Length: 0";
    const UNAVAILABLE: &str = "503 Service Unavailable\r\nContent-Length: 25\r\n\r\n\
                               {\"error\":\"upstream down\"}";
    const TOO_MANY: &str = "429 Too Many Requests\r\nContent-Length: 21\r\n\r\n\
                            {\"error\":\"slow down\"}";
    let answers = [
        Answer::HangUp,
        Answer::HangUp,
        Answer::Says(BAD_GATEWAY),
        Answer::Says(UNAVAILABLE),
        Answer::Says(TOO_MANY),
        Answer::Says("200 OK\r\nContent-Length: 0"),
        Answer::HangUp,
    ];
    proxy.answer(REGISTER, &answers);
    proxy.cut();
    let begun = Instant::now();
    while proxy.answered() < answers.len() as u64 {
        let end = receiver.try_recv();
        end.expect("its sender lives");
        assert!(begun.elapsed() < soon(), "it does not try again");
    }
    while !sends(&mut sender, 2.0) {
        assert!(begun.elapsed() < soon(), "it does not come back");
    }
    assert_eq!(receive(&mut receiver), 2.0);
    // A send that came while it registered may have been called lost, and is here all the same.
    while let Some(more) = receiver.recv_timeout(BRIEF).expect("its sender lives") {
        let values = more.slice::<f32>("layer.weight").expect("floats");
        assert_eq!(values[0], 2.0);
    }
}

#[test]
fn worker_whose_number_was_taken_gets_an_error() {
    let proxy = Proxy::new();
    let (_sender, mut receiver) = behind(&proxy);
    // The sender's answer if another live worker has the number.
    const TAKEN: &str = "409 Conflict\r\nContent-Length: 62\r\n\r\n\
                         {\"error\":\"worker 0 is already connected (pid 7)\",\"taken_by\":7}";
    // More than once: `cut` may also break the connection of the first new attempt.
    proxy.answer("POST /v1/workers ", &[Answer::Says(TAKEN); 80]);
    proxy.cut();
    let end = receiver.recv_timeout(soon()).expect_err("it is not let in");
    assert!(end.to_string().contains("already connected"), "{end}");
}

#[test]
fn a_worker_that_asks_while_it_registers_again_waits() {
    let proxy = Proxy::new();
    let (mut sender, mut receiver) = behind(&proxy);
    // For longer than the sender keeps a connection that broke.
    proxy.answer("POST /v1/workers ", &[Answer::HangUp; 80]);
    proxy.cut();
    let next = Pull::at_least(Version(2));
    thread::scope(|scope| {
        let asks = scope.spawn(|| receiver.pull(next.timeout(Some(soon()))));
        let begun = Instant::now();
        while proxy.answered() < 80 || !sends(&mut sender, 2.0) {
            assert!(begun.elapsed() < soon(), "it does not come back");
            thread::sleep(Duration::from_millis(1));
        }
        let got = asks.join().expect("no panic").expect("its sender lives");
        assert!(got.is_some_and(|got| got.version() >= Version(2)));
    });
}

/// The sender knows that a connection broke before its worker does.
#[test]
fn a_worker_whose_connection_was_given_up_asks_again() {
    let proxy = Proxy::new();
    let (mut sender, mut receiver) = behind(&proxy);
    proxy.answer(
        "GET /v1/workers/",
        &[Answer::Says("410 Gone\r\nContent-Length: 0")],
    );
    let next = Pull::at_least(Version(2));
    thread::scope(|scope| {
        let asks = scope.spawn(|| receiver.pull(next.timeout(Some(soon()))));
        let begun = Instant::now();
        while proxy.answered() < 1 {
            assert!(begun.elapsed() < soon(), "it does not ask");
            thread::sleep(Duration::from_millis(1));
        }
        proxy.cut();
        while !sends(&mut sender, 2.0) {
            assert!(begun.elapsed() < soon(), "it does not come back");
        }
        let got = asks.join().expect("no panic").expect("its sender lives");
        assert!(got.is_some_and(|got| got.version() >= Version(2)));
    });
}

/// Whether the one worker has what is sent.
fn sends(sender: &mut Sender, value: f32) -> bool {
    let report = sender.send_with(&weights(FLOATS, value), &staged());
    let report = report.expect("it is sent");
    let line = report.worker(0);
    line.is_some_and(|line| matches!(line.outcome, Outcome::Staged | Outcome::Applied))
}

/// A worker of sockets alone that says nothing after its first words.
struct Mute {
    listener: TcpListener,
    life: TcpStream,
    registered: BufReader<TcpStream>,
}

impl Mute {
    fn join(sender: &Sender, worker: u32) -> Self {
        let (address, secret) = parts(&sender.init_info());
        // At most one connection may wait there.
        let listener = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
        let here = SocketAddr::from(([127, 0, 0, 1], 0));
        listener.bind(&here.into()).expect("a port");
        listener.listen(0).expect("it listens");
        let listener = TcpListener::from(listener);
        let own = listener.local_addr().expect("an address");
        let register = json!({
            "protocol": 2, "worker": worker, "pid": 1, "device": "cpu",
            "models": ["policy"], "url": format!("http://{own}"), "seen": 0,
            "nonce": "ab".repeat(32),
        });
        let (life, registered) = thread::scope(|scope| {
            let life = scope.spawn(|| {
                let (mut life, _) = listener.accept().expect("the sender");
                serve(&life, &bearer(&secret, "worker"));
                life.write_all(LINES.as_bytes()).expect("it reads");
                say(&mut life, &json!({"here": {"worker": worker, "pid": 1}}));
                life
            });
            let (to_sender, register) = (bearer(&secret, "sender"), register.to_string());
            let (head, answer) = ask(&address, &to_sender, "POST /v1/workers", &register);
            assert!(head.starts_with("http/1.1 200"), "{head}");
            (life.join().expect("no panic"), answer)
        });
        Self {
            listener,
            life,
            registered,
        }
    }
}

/// The outcome at a worker to which this happens after its call.
fn fate<T>(sender: &mut Sender, worker: u32, happens: impl FnOnce(Mute) -> T) -> Outcome {
    let mute = Mute::join(sender, worker);
    let report = thread::scope(|scope| {
        let send = scope.spawn(|| sender.send_with(&weights(8, 1.0), &staged()));
        let _called = mute.listener.accept().expect("the sender");
        let _left = happens(mute);
        send.join().expect("no panic").expect("it is sent")
    });
    let line = report.worker(worker).expect("its line");
    line.outcome.clone()
}

#[test]
fn closed_link_is_dead_and_silent_link_is_lost() {
    let mut sender = super::sender(&weights(8, 1.0), Rpc::default());
    assert_eq!(fate(&mut sender, 1, drop), Outcome::Died);
    let nobody_listens = |mute: Mute| (mute.life, mute.registered);
    assert_eq!(fate(&mut sender, 2, nobody_listens), Outcome::Died);
    let says_nothing = |mute: Mute| {
        let own = mute.listener.local_addr().expect("an address");
        let full = std::iter::from_fn(|| TcpStream::connect_timeout(&own, BRIEF).ok());
        let full: Vec<_> = full.take(8).collect();
        assert!(full.len() < 8, "it has room for more");
        (mute, full)
    };
    assert_eq!(fate(&mut sender, 3, says_nothing), Outcome::Lost);
    // The worker's lifeline exists.
    let one_connection = |mute: Mute| (mute.life, mute.listener);
    assert_eq!(fate(&mut sender, 4, one_connection), Outcome::Lost);
}

#[test]
fn shutdown_arrives_after_all_versions() {
    let initial = weights(FLOATS, 1.0);
    for _ in 0..10 {
        let setup = setup(&initial, at_connect());
        let mut sender = setup
            .connect(&initial, Expect::Count(0), Some(soon()))
            .expect("a sender");
        let mut receiver = worker(sender.init_info(), 0).expect("it joins");
        let sent = SendOptions::new().wait(WaitFor::Sent);
        sender
            .send_with(&weights(FLOATS, 2.0), &sent)
            .expect("sent");
        sender.shutdown();
        assert_eq!(receive(&mut receiver), 2.0);
        let begun = Instant::now();
        let error = receiver.recv().unwrap_err();
        assert!(error.is_sender_closed(), "{error}");
        assert!(begun.elapsed() < soon());
    }
}
