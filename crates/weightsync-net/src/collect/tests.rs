//! A trainer and workers over loopback, and workers that do not keep to the protocol.

use std::collections::VecDeque;
use std::fs::File;
use std::io::Write;
use std::net::Shutdown;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use proptest::prelude::*;
use weightsync_link::access::Token;
use weightsync_link::frame::MAX_PIECE;
use weightsync_link::hello::LinkRole;
use weightsync_link::stream::Stream;
use weightsync_link::tls::TlsPeer;
use weightsync_link::{Credentials, blocking};

use super::incoming::{Incoming, WantedPart};
use super::*;
use crate::scheme::Distributed;
use crate::wire::message::{ToTrainer, ToWorker};

/// For what has to come: only a test that fails waits so long.
const LONG: Duration = Duration::from_secs(60);

const SENTINEL: u8 = 0xee;

fn memory(bytes: usize) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&vec![SENTINEL; bytes]).unwrap();
    file
}

fn content(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

fn trainer() -> CollectorPort {
    CollectorPort::listen(&Distributed::new(), 2, false).unwrap()
}

fn joining(trainer: &CollectorPort, worker: Option<u32>, ticket: Option<u64>) -> JoinOptions {
    JoinOptions {
        address: trainer.address().into(),
        secret: trainer.secret(),
        insecure_plaintext_code: false,
        tls: None,
        worker,
        ticket,
        patience: LONG,
    }
}

#[test]
fn code_travels_in_plain_text_only_with_its_own_permission() {
    let scheme = || {
        let token = Token::new("a token of 16 bytes or more").unwrap();
        let scheme = Distributed::new().listen("0.0.0.0:0").token(token);
        scheme.insecure_plaintext()
    };
    let refused = CollectorPort::listen(&scheme(), 1, false)
        .unwrap_err()
        .to_string();
    assert!(
        refused.contains("insecure_plaintext_code=True"),
        "{refused}"
    );
    let trainer = CollectorPort::listen(&scheme(), 1, true).unwrap();
    let far = JoinOptions {
        // Of no machine.
        address: "192.0.2.1:9".into(),
        ..joining(&trainer, None, None)
    };
    let refused = CollectorLink::join(&far, |_| {}).unwrap_err().to_string();
    assert!(refused.contains("--insecure-plaintext-code"), "{refused}");
}

/// A worker, and what ends it, if anything does.
fn join(trainer: &CollectorPort, worker: Option<u32>) -> (JoinedWorker, mpsc::Receiver<String>) {
    let (gone, ends) = mpsc::channel();
    let joined = CollectorLink::join(&joining(trainer, worker, None), move |reason| {
        gone.send(reason).unwrap();
    });
    (joined.unwrap(), ends)
}

/// The next thing that a place hears, which has to come.
fn hear(place: &WorkerSeat) -> NoticeKind {
    let until = std::time::Instant::now() + LONG;
    loop {
        if let Some(heard) = place.hear() {
            return heard.what;
        }
        assert!(std::time::Instant::now() < until, "nothing was heard");
        // As a trainer does: the descriptor says when there is something.
        let mut ready = [rustix::event::PollFd::new(
            place.hears(),
            rustix::event::PollFlags::IN,
        )];
        rustix::event::poll(&mut ready, None).unwrap();
    }
}

fn hear_joined(place: &WorkerSeat) {
    let heard = hear(place);
    assert!(matches!(heard, NoticeKind::Joined { .. }), "{heard:?}");
}

fn reason(place: &WorkerSeat) -> String {
    match hear(place) {
        NoticeKind::Gone { reason } => reason,
        other => panic!("{other:?}"),
    }
}

/// A peer that has the secret and says what it likes, and the answer to its wish to join.
fn asking(trainer: &CollectorPort, worker: Option<u32>) -> (Arc<Stream>, FrameReader, ToWorker) {
    let address: std::net::SocketAddr = trainer.address().parse().unwrap();
    let credentials = Credentials::plain(&trainer.secret());
    let peer = TlsPeer::Sender(address.ip());
    let socket = blocking::dial(address, &credentials, peer, LinkRole::Collector, Some(LONG));
    let socket = Arc::new(socket.unwrap());
    let ticket = None;
    write_message(&socket, &ToTrainer::Join { worker, ticket }).unwrap();
    prepare(&socket).unwrap();
    let mut frames = FrameReader::new(socket.clone(), LONG);
    let (_, payload) = frames.next().unwrap();
    let answer = ToWorker::decode(payload).unwrap();
    (socket, frames, answer)
}

/// Such a peer that was let in.
fn rogue(trainer: &CollectorPort, worker: Option<u32>) -> (Arc<Stream>, FrameReader) {
    let (socket, frames, answer) = asking(trainer, worker);
    assert!(matches!(answer, ToWorker::Welcome { .. }), "{answer:?}");
    (socket, frames)
}

/// The reason for which a worker is to ask again.
fn later(trainer: &CollectorPort, worker: Option<u32>) -> String {
    match asking(trainer, worker).2 {
        ToWorker::Later { reason } => reason,
        other => panic!("{other:?}"),
    }
}

/// Two columns in a file of 1,000 bytes: one run, and three at equal distances.
fn rows() -> Vec<Rows> {
    let row = |offset, bytes, count, stride| Rows {
        offset,
        bytes,
        count,
        stride,
    };
    vec![row(100, 200, 1, 0), row(500, 20, 3, 100)]
}

/// What the file holds once the part is there.
fn filled(column: &[u8], runs: &[u8]) -> Vec<u8> {
    let mut expected = vec![SENTINEL; 1000];
    expected[100..300].copy_from_slice(column);
    for (run, bytes) in runs.chunks(20).enumerate() {
        expected[500 + 100 * run..][..20].copy_from_slice(bytes);
    }
    expected
}

#[test]
fn part_lands_where_its_order_said() {
    let trainer = trainer();
    let settings = vec![7; 3 * MAX_PIECE + 5];
    let place = trainer.open(0, None, settings.clone()).unwrap();
    // What is ordered before the worker is there waits for it.
    place.order("first".into());
    let (joined, ends) = join(&trainer, None);
    assert_eq!((joined.worker, joined.settings), (0, settings));
    hear_joined(&place);
    assert_eq!(joined.link.next().as_deref(), Some("first"));

    let file = memory(1000);
    place.expect(4, file.try_clone().unwrap(), rows()).unwrap();
    let (column, runs) = (vec![1; 200], (0..60).collect::<Vec<u8>>());
    joined.link.send_part(4, &[&column, &runs]).unwrap();
    assert_eq!(hear(&place), NoticeKind::Part { part: 4 });
    assert_eq!(content(&file), filled(&column, &runs));

    joined.link.say("words".into()).unwrap();
    let json = "words".into();
    assert_eq!(hear(&place), NoticeKind::Said { json });
    // An end in order: the worker is told, and leaves.
    place.leave();
    assert_eq!(joined.link.next(), None);
    drop(joined.link);
    assert!(place.wait(LONG));
    assert!(reason(&place).contains("closed at the other end"));
    assert!(ends.try_recv().is_err());
}

#[test]
fn part_of_many_pieces_comes_whole() {
    let trainer = trainer();
    let place = trainer.open(0, None, Vec::new()).unwrap();
    let (joined, _ends) = join(&trainer, Some(0));
    hear_joined(&place);
    let bytes: Vec<u8> = (0..9 * MAX_PIECE + 321).map(|at| (at / 7) as u8).collect();
    let file = memory(bytes.len());
    let row = Rows {
        offset: 0,
        bytes: bytes.len() as u64,
        count: 1,
        stride: 0,
    };
    place
        .expect(1, file.try_clone().unwrap(), vec![row])
        .unwrap();
    joined.link.send_part(1, &[&bytes]).unwrap();
    assert!(matches!(hear(&place), NoticeKind::Part { part: 1 }));
    assert!(content(&file) == bytes);
}

/// What each rogue sends, and what is said of it. The file is written in part at most.
#[test]
fn part_out_of_its_order_is_never_delivered() {
    let part = |socket: &Stream, part, bytes| {
        write_message(socket, &ToTrainer::Part { part, bytes }).unwrap();
    };
    type Send = Box<dyn Fn(&Stream)>;
    let cases: Vec<(&str, Send)> = vec![
        ("sent part 5 of 260 bytes, expected part 4", {
            Box::new(move |socket| part(socket, 5, 260))
        }),
        ("sent part 4 of 259 bytes, expected part 4", {
            Box::new(move |socket| part(socket, 4, 259))
        }),
        ("sent 261 bytes, where 260 were missing", {
            Box::new(move |socket| {
                part(socket, 4, 260);
                write_pieces(socket, &[1; 261]).unwrap();
            })
        }),
        ("sent 3 bytes, where 0 were missing", {
            Box::new(|socket| write_pieces(socket, &[1; 3]).unwrap())
        }),
        ("in the middle of a part", {
            Box::new(move |socket| {
                part(socket, 4, 260);
                write_pieces(socket, &[1; 100]).unwrap();
                let json = String::new();
                write_message(socket, &ToTrainer::Say { json }).unwrap();
            })
        }),
        ("checksum of a frame of 160 bytes is wrong", {
            Box::new(move |mut socket| {
                part(socket, 4, 260);
                write_pieces(socket, &[1; 100]).unwrap();
                let mut head = header(FrameKind::Piece, &[1; 160]);
                head[8] ^= 1;
                socket.write_all(&head).unwrap();
                socket.write_all(&[1; 160]).unwrap();
            })
        }),
        ("joined twice", {
            Box::new(|socket| {
                let (worker, ticket) = (None, None);
                write_message(socket, &ToTrainer::Join { worker, ticket }).unwrap();
            })
        }),
        // The link is cut in the middle.
        ("closed at the other end", {
            Box::new(move |socket| {
                part(socket, 4, 260);
                write_pieces(socket, &[1; 259]).unwrap();
                socket.shutdown(Shutdown::Both).unwrap();
            })
        }),
    ];
    let trainer = trainer();
    for (words, misbehave) in cases {
        let place = trainer.open(0, None, Vec::new()).unwrap();
        let file = memory(1000);
        place.expect(4, file.try_clone().unwrap(), rows()).unwrap();
        let (socket, _frames) = rogue(&trainer, None);
        hear_joined(&place);
        misbehave(&socket);
        let said = reason(&place);
        assert!(said.contains(words), "{said}");
        assert_eq!(place.hear(), None);
        let (outside, expected) = (content(&file), filled(&[1; 200], &[1; 60]));
        let differs = |at: &usize| outside[*at] != SENTINEL && outside[*at] != expected[*at];
        assert_eq!((0..1000).find(differs), None, "{words}");
    }
}

#[test]
fn place_that_was_cut_is_written_no_more() {
    let trainer = trainer();
    let place = trainer.open(0, None, Vec::new()).unwrap();
    let (socket, _frames) = rogue(&trainer, None);
    hear_joined(&place);
    let (bytes, link) = (1 << 30, socket.clone());
    let file = memory(0);
    let row = Rows {
        offset: 0,
        bytes,
        count: 1,
        stride: 0,
    };
    place
        .expect(1, file.try_clone().unwrap(), vec![row])
        .unwrap();
    let sending = std::thread::spawn(move || {
        write_message(&socket, &ToTrainer::Part { part: 1, bytes }).unwrap();
        // Until the link is cut.
        while write_pieces(&socket, &[1; MAX_PIECE]).is_ok() {}
    });
    while file.metadata().unwrap().len() == 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    place.cut();
    let len = file.metadata().unwrap().len();
    // A worker's thread that reads sees the end, and does this.
    let _ = link.shutdown(Shutdown::Both);
    sending.join().unwrap();
    assert_eq!(file.metadata().unwrap().len(), len);
    assert!(len < bytes);
    assert!(reason(&place).contains("has ended"));
}

#[test]
fn worker_without_a_place_is_told_why() {
    let trainer = trainer();
    let open = |worker, ticket| trainer.open(worker, ticket, Vec::new()).unwrap();
    let (first, launched) = (open(0, None), open(1, Some(77)));
    let refused = |worker, ticket| {
        let error = CollectorLink::join(&joining(&trainer, worker, ticket), |_| {});
        error.map(|joined| joined.worker).unwrap_err().to_string()
    };
    assert!(refused(Some(9), None).contains("there is no worker 9: the collector has 2 workers"));
    // A worker of an earlier launch, and one that was not launched.
    assert!(refused(Some(1), Some(76)).contains("its launch was given up"));
    assert!(refused(Some(1), None).contains("its launcher starts them"));
    let (one, _) = join(&trainer, Some(0));
    hear_joined(&first);
    assert!(refused(Some(0), None).contains("worker 0 is there already"));
    assert!(refused(None, None).contains("all are there"));
    let two = CollectorLink::join(&joining(&trainer, Some(1), Some(77)), |_| {}).unwrap();
    hear_joined(&launched);
    assert_eq!((one.worker, two.worker), (0, 1));
    assert_eq!(first.hear(), None);
}

#[test]
fn worker_asks_again_until_its_place_is_open() {
    let trainer = trainer();
    let open = |worker| trainer.open(worker, None, Vec::new()).unwrap();
    // The trainer has not opened all places.
    let first = open(0);
    assert!(later(&trainer, Some(1)).contains("is starting"));
    let second = open(1);
    let (one, _) = join(&trainer, Some(0));
    let (two, _) = join(&trainer, Some(1));
    // A worker comes back, and its trainer has not asked for another.
    drop(one.link);
    assert!(first.wait(LONG));
    for worker in [Some(0), None] {
        assert!(later(&trainer, worker).contains("worker 0 has ended"));
    }
    let mut hasty = joining(&trainer, Some(0), None);
    hasty.patience = Duration::ZERO;
    let refused = CollectorLink::join(&hasty, |_| {}).map(drop).unwrap_err();
    assert!(refused.to_string().contains("has not asked for another"));
    std::thread::scope(|scope| {
        let back = scope.spawn(|| join(&trainer, Some(0)).0.worker);
        // It is likely to have been turned away once by then.
        std::thread::sleep(Duration::from_millis(300));
        let _first = open(0);
        assert_eq!(back.join().unwrap(), 0);
    });
    drop((two, second));
}

#[test]
fn silent_workers_place_may_be_asked_for_again() {
    let trainer = trainer();
    let _place = trainer.open(0, None, Vec::new()).unwrap();
    let _silent = rogue(&trainer, Some(0));
    // Its host has gone without a word, and is back before the trainer counts it as gone.
    std::thread::sleep(Duration::from_millis(3100));
    for worker in [Some(0), None] {
        assert!(later(&trainer, worker).contains("worker 0"));
    }
}

#[test]
fn refused_worker_that_stays_is_cut() {
    let trainer = trainer();
    let (socket, _frames, answer) = asking(&trainer, Some(9));
    assert!(matches!(answer, ToWorker::End { .. }), "{answer:?}");
    let until = std::time::Instant::now() + LONG;
    while write_message(&socket, &ToTrainer::Ping).is_ok() {
        assert!(std::time::Instant::now() < until, "it is still served");
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn last_words_are_read_once_a_worker_has_left() {
    let trainer = trainer();
    let place = trainer.open(0, None, Vec::new()).unwrap();
    let (joined, _ends) = join(&trainer, None);
    for word in 0..10 {
        joined.link.say(word.to_string()).unwrap();
    }
    joined.link.leave();
    // Nothing is waited for here.
    let heard: Vec<NoticeKind> = std::iter::from_fn(|| Some(place.hear()?.what)).collect();
    let json = "9".into();
    assert!(heard.contains(&NoticeKind::Said { json }), "{heard:?}");
}

#[test]
fn worker_that_says_too_much_is_cut() {
    let trainer = trainer();
    let place = trainer.open(0, None, Vec::new()).unwrap();
    let (socket, _frames) = rogue(&trainer, None);
    for _ in 0..17 {
        let json = "x".repeat(64 << 10);
        // It may be cut before the last one.
        let _ = write_message(&socket, &ToTrainer::Say { json });
    }
    assert!(place.wait(LONG));
    hear_joined(&place);
    for _ in 0..16 {
        assert!(matches!(hear(&place), NoticeKind::Said { .. }));
    }
    assert!(reason(&place).contains("more messages than it was asked for"));
    // Longer words do not even travel.
    let json = "x".repeat((64 << 10) + 1);
    assert!(ToTrainer::Say { json }.encode().is_err());
}

#[test]
fn too_many_orders_end_the_link() {
    let trainer = trainer();
    let place = trainer.open(0, None, Vec::new()).unwrap();
    for _ in 0..=1024 {
        place.order(String::new());
    }
    assert!(reason(&place).contains("more orders wait"));
    assert!(later(&trainer, Some(0)).contains("worker 0 has ended"));
}

#[test]
fn stranger_without_the_secret_gets_nowhere() {
    let trainer = trainer();
    let place = trainer.open(0, None, b"secrets".into()).unwrap();
    let mut stranger = joining(&trainer, None, None);
    stranger.secret[0] ^= 1;
    let error = CollectorLink::join(&stranger, |_| {})
        .map(|_| ())
        .unwrap_err();
    assert!(error.to_string().contains("refused the token"), "{error}");
    // One that may not even ask for this role.
    let address: std::net::SocketAddr = trainer.address().parse().unwrap();
    let credentials = Credentials::plain(&trainer.secret());
    let peer = TlsPeer::Sender(address.ip());
    let other = blocking::dial(address, &credentials, peer, LinkRole::Control, Some(LONG)).unwrap();
    assert!(FrameReader::new(Arc::new(other), LONG).next().is_err());
    assert_eq!(place.hear(), None);
}

#[test]
fn trainer_that_goes_ends_its_worker() {
    let trainer = trainer();
    let place = trainer.open(0, None, Vec::new()).unwrap();
    let (joined, ends) = join(&trainer, None);
    hear_joined(&place);
    place.cut();
    let reason = ends.recv_timeout(LONG).unwrap();
    assert!(reason.contains("closed"), "{reason}");
    drop(joined);
}

#[test]
fn launched_worker_ends_where_its_trainer_is_gone() {
    let trainer = trainer();
    let mut launched = joining(&trainer, Some(0), Some(7));
    launched.patience = Duration::from_secs(24 * 3600);
    drop(trainer);
    let gone = CollectorLink::join(&launched, |_| {})
        .map(drop)
        .unwrap_err();
    assert!(gone.to_string().contains("refused"), "{gone}");
}

#[test]
fn worker_that_does_not_leave_is_ended() {
    let trainer = trainer();
    let place = trainer.open(0, None, Vec::new()).unwrap();
    let (joined, ends) = join(&trainer, None);
    place.leave();
    assert_eq!(joined.link.next(), None);
    let reason = ends.recv_timeout(LONG).unwrap();
    assert!(reason.contains("did not leave within 5s"), "{reason}");
}

#[test]
fn silent_end_is_gone_at_its_limit() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let silent = Arc::new(Stream::plain(silent));
    prepare(&silent).unwrap();
    let gone = FrameReader::new(silent, LOOK).next().map(drop).unwrap_err();
    assert_eq!(gone.to_string(), "nothing arrived for 1s");
}

#[test]
fn worker_in_the_middle_of_a_part_ends_with_its_trainer() {
    let trainer = trainer();
    let place = trainer.open(0, None, Vec::new()).unwrap();
    let (joined, ends) = join(&trainer, None);
    hear_joined(&place);
    let bytes = vec![1; 64 << 20];
    let file = memory(0);
    let row = Rows {
        offset: 0,
        bytes: bytes.len() as u64,
        count: 1,
        stride: 0,
    };
    place
        .expect(1, file.try_clone().unwrap(), vec![row])
        .unwrap();
    std::thread::scope(|scope| {
        let sending = scope.spawn(|| while joined.link.send_part(1, &[&bytes]).is_ok() {});
        while file.metadata().unwrap().len() == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        // The trainer reads nothing any more, and the worker may wait for room.
        place.cut();
        ends.recv_timeout(LONG).unwrap();
        sending.join().unwrap();
    });
}

#[test]
fn link_ends_though_the_worker_reads_nothing() {
    let trainer = trainer();
    // More than the system takes for a worker that reads nothing.
    let settings = vec![7; 64 << 20];
    let place = trainer.open(0, None, settings).unwrap();
    let (_socket, _frames) = rogue(&trainer, None);
    hear_joined(&place);
    place.cut();
    assert!(reason(&place).contains("has ended"));
}

/// What a worker may send, in any order.
#[derive(Clone, Debug)]
enum Sent {
    Message(ToTrainer),
    Piece(Vec<u8>),
}

fn sent() -> impl Strategy<Value = Sent> {
    let piece = prop_oneof![0..400_usize, Just(100), Just(260), Just(160)];
    let part = |(part, bytes)| Sent::Message(ToTrainer::Part { part, bytes });
    prop_oneof![
        4 => (any::<u8>(), piece).prop_map(|(byte, len)| Sent::Piece(vec![byte; len])),
        3 => (1..4_u64, prop_oneof![Just(260), 0..600_u64]).prop_map(part),
        1 => Just(Sent::Message(ToTrainer::Ping)),
        1 => Just(Sent::Message(ToTrainer::Say { json: String::new() })),
    ]
}

proptest! {
    #[test]
    fn bytes_go_where_an_order_said_or_nowhere(all in proptest::collection::vec(sent(), 0..12)) {
        let file = memory(1000);
        let wanted = |part| WantedPart::new(part, file.try_clone().unwrap(), rows()).unwrap();
        let mut orders: VecDeque<WantedPart> = [wanted(1), wanted(2)].into();
        let (mut incoming, mut parts) = (Incoming::default(), Vec::<u64>::new());
        // The bytes of the part under way, as a trainer that keeps them all would have them.
        let mut came: Vec<u8> = Vec::new();
        for one in all {
            let result = match one {
                Sent::Message(message) => {
                    if matches!(message, ToTrainer::Part { .. }) {
                        came.clear();
                    }
                    incoming.message(message, &mut orders)
                }
                Sent::Piece(piece) => {
                    came.extend_from_slice(&piece);
                    incoming.piece(&piece)
                }
            };
            match result {
                Ok(Some(NoticeKind::Part { part })) => {
                    prop_assert_eq!(came.len(), 260);
                    prop_assert_eq!(content(&file), filled(&came[..200], &came[200..]));
                    parts.push(part);
                }
                Ok(_) => {}
                Err(_) => break,
            }
        }
        prop_assert!([1, 2].starts_with(&parts), "{:?}", parts);
        let (after, places) = (content(&file), filled(&[0; 200], &[0; 60]));
        for at in 0..1000 {
            prop_assert!(places[at] == 0 || after[at] == SENTINEL, "byte {}", at);
        }
    }

    #[test]
    fn rows_beyond_64_bits_are_refused(
        offset: u64, bytes: u64, count: u64, stride: u64,
    ) {
        let row = Rows { offset, bytes, count, stride };
        let wide = |value: u64| u128::from(value);
        let ends = wide(offset) + wide(stride) * wide(count) + wide(bytes);
        let all = wide(bytes) * wide(count);
        let fits = ends <= wide(u64::MAX) && all <= wide(u64::MAX);
        prop_assert_eq!(WantedPart::new(1, memory(0), vec![row]).is_some(), fits);
    }
}
