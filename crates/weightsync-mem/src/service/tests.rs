//! What the service thread does, one step at a time.

use std::thread;

use weightsync_core::{Dtype, Epoch, Layout, Run};

use super::*;
use crate::model::ModelSpec;
use crate::plan::Targets;
use crate::reader::{AttachOptions, Reader as Worker};
use crate::report::{Level, Outcome};
use crate::wait::{Deadline, WaitStyle};
use crate::writer::{SegmentOptions, Writer};

const SECRET: [u8; 16] = *b"\x01\x02 hidden word \x03";

const RUN: Run = Run {
    epoch: Epoch(1),
    id: [7; 16],
};

fn soon() -> Deadline {
    Some(Instant::now() + Duration::from_secs(20))
}

fn model() -> ModelSpec {
    ModelSpec {
        layout: Layout::new([("bias".to_owned(), Dtype::F32, vec![3])]).unwrap(),
        note: Vec::new(),
    }
}

fn shared() -> Arc<Shared> {
    Shared::new(RUN, &[model()], SECRET, &SegmentOptions::default()).unwrap()
}

/// Says hello, and nothing else.
fn knock(address: &str) -> Socket {
    let hello = FromReader::Hello {
        secret: SECRET,
        worker: WorkerId(3),
        seen: Epoch(0),
        models: Models::ALL,
        delivery: Delivery::Newest,
        device: String::new(),
    };
    let socket = Socket::connect(address).unwrap().unwrap();
    let control = OwnedFile::new("weightsync-control", CONTROL_BYTES).unwrap();
    assert!(socket.send(&hello.encode(), &[control.fd.as_fd()]).unwrap());
    socket
}

fn options(address: &str) -> AttachOptions {
    AttachOptions {
        address: address.into(),
        secret: SECRET,
        worker: WorkerId(3),
        seen: Epoch(0),
        wait: WaitStyle::Sleep,
        models: None,
        delivery: Delivery::Newest,
        device: String::new(),
    }
}

/// A worker that has joined, with nobody who listens to it.
fn joined(shared: &Arc<Shared>, name: &str) -> Worker {
    let address = format!("weightsync-test/{name}/{}", std::process::id());
    let listener = Socket::listen(&address).unwrap();
    let joining = thread::spawn(move || Worker::attach(&options(&address), soon()).unwrap());
    poll([listener.as_fd()], None).unwrap();
    let socket = Socket::accept(&listener).unwrap().unwrap();
    poll([socket.as_fd()], None).unwrap();
    shared.meet(socket);
    joining.join().unwrap()
}

#[test]
fn what_a_reader_said_before_it_died_is_heard() {
    let shared = shared();
    let worker = joined(&shared, "service");
    worker.refuse(None, "no room for the bias").unwrap();
    shared.listen_to((WorkerId(3), 1), true).unwrap();
    let rejected = shared.take_rejected();
    assert_eq!(rejected, [(WorkerId(3), "no room for the bias".to_owned())]);
    assert!(shared.readers().is_empty(), "it is buried as well");
}

/// A connection that was let in and hung up before it took anything, as one does
/// that gives up joining at its deadline: it is among those a publication waits
/// for, and neither a death nor a line of later ones.
#[test]
fn one_that_gives_up_joining_has_left() {
    for again in [false, true] {
        let address = format!("weightsync-test/gives-up/{again}/{}", std::process::id());
        let options = SegmentOptions::default();
        let mut writer = Writer::create(&address, SECRET, RUN, &[model()], options).unwrap();
        let gives_up = knock(&address);
        let one = |readers: &[_], _: &[_]| readers.len() == 1;
        assert!(writer.wait_readers(soon(), one).unwrap());
        let staging = writer.stage(&[0], soon()).unwrap();
        let publication = staging.publish(&Targets::All).unwrap();
        drop(gives_up);
        // Its next attempt may be what finds it gone.
        let _next = again.then(|| knock(&address));
        let waiter = writer.waiter();
        let settle = |publication, level| waiter.settle(publication, level, soon()).unwrap();
        let lines = settle(&publication, Level::Staged);
        assert_eq!(lines[0].outcome, Outcome::Left);
    }
}

#[test]
fn a_refusal_that_nobody_hears_is_an_error() {
    let shared = shared();
    let worker = joined(&shared, "refusal");
    let error = (0..100_000).find_map(|_| worker.refuse(Some(1), "no").err());
    assert!(matches!(error, Some(Error::Protocol { .. })), "{error:?}");
    shared.close();
    worker.refuse(Some(1), "no").unwrap();
}

#[test]
fn a_slot_that_finds_no_room_on_its_way_comes_later() {
    let address = format!("weightsync-test/owed/{}", std::process::id());
    let options = SegmentOptions::default();
    let writer = Writer::create(&address, SECRET, RUN, &[model()], options).unwrap();
    let shared = &writer.shared;
    let worker = knock(&address);
    let one = |readers: &[_], _: &[_]| readers.len() == 1;
    assert!(writer.wait_readers(soon(), one).unwrap());
    let (_, socket, _) = shared.watched().remove(0);
    let answer = FromSender::NoSuchVersion {
        question: 1,
        model: 0,
        asked: Version(9),
        known: Vec::new(),
    };
    while socket.send(&answer.encode(), &[]).unwrap() {}
    for index in 2..5 {
        let file = OwnedFile::new("weightsync-slot", 4096).unwrap();
        let mut state = shared.state();
        assert_eq!(shared.add_slot(&mut state, 0, Arc::new(file)), index);
    }
    assert!(writer.take_rejected().is_empty());
    let mut came = Vec::new();
    while came.len() < 3 {
        match worker.receive().unwrap() {
            Packet::Data(bytes, fds) => match FromSender::decode(&bytes).unwrap() {
                FromSender::Slot { model: 0, index } => came.push((index, fds.len())),
                other => drop(other),
            },
            Packet::Empty => drop(poll([worker.as_fd()], soon()).unwrap()),
            Packet::HungUp => panic!("after {came:?}"),
        }
    }
    assert_eq!(came, [(2, 1), (3, 1), (4, 1)]);
}

#[test]
fn descriptors_on_their_way_are_nobodys_fault() {
    let error = |number| Error::Os {
        action: "sending to the peer",
        source: std::io::Error::from_raw_os_error(number),
    };
    assert!(error(libc::ETOOMANYREFS).is_crowded_out());
    assert!(!error(libc::EMFILE).is_crowded_out());
}

#[test]
fn no_debug_output_shows_the_secret() {
    let shown = format!("{:?} {:?}", shared(), options("here"));
    assert!(!shown.contains(&format!("{SECRET:?}")), "{shown}");
}

#[test]
fn a_sender_that_closes_takes_nobody_in_again() {
    let address = format!("weightsync-test/closing/{}", std::process::id());
    let shared = shared();
    let listener = Socket::listen(&address).unwrap();
    let knock = || {
        let socket = knock(&address);
        let end = Socket::accept(&listener).unwrap().unwrap();
        assert!(shared.meet(end).is_none());
        socket.receive().unwrap()
    };
    assert!(matches!(knock(), Packet::Data(..)));
    shared.close();
    assert!(matches!(knock(), Packet::HungUp));
    assert_eq!(shared.watched().len(), 1);
}
