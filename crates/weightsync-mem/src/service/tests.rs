//! The service thread, one step at a time.

mod forked;

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use weightsync_core::{Attendance, Dtype, Epoch, Layout, Level, Outcome, Run, Targets};

use super::*;
use crate::model::ModelDescription;
use crate::reader::{AttachOptions, SegmentReader as Worker};
use crate::shared::Control;
use crate::slot::Slot;
use crate::wait::{Deadline, WaitStyle};
use crate::writer::{SegmentOptions, SegmentWriter};

const SECRET: [u8; 16] = *b"\x01\x02 hidden word \x03";

const RUN: Run = Run {
    epoch: Epoch(1),
    id: [7; 16],
};

fn soon() -> Deadline {
    Some(Instant::now() + Duration::from_secs(20))
}

fn model() -> ModelDescription {
    ModelDescription {
        layout: Layout::new([("bias".to_owned(), Dtype::F32, vec![3])]).unwrap(),
        note: Vec::new(),
    }
}

fn shared() -> Arc<SharedRegistry> {
    SharedRegistry::new(RUN, &[model()], SECRET, &SegmentOptions::default(), None).unwrap()
}

fn hello() -> ReaderMessage {
    ReaderMessage::Hello {
        secret: SECRET,
        worker: WorkerId(3),
        seen: Epoch(0),
        models: ModelMask::ALL,
        delivery: Delivery::Newest,
        device: String::new(),
        instance: 77,
    }
}

fn address_of(name: &str) -> String {
    format!("weightsync-test/{name}/{}", std::process::id())
}

/// A sender at the address of this name.
fn sender(name: &str) -> (String, SegmentWriter) {
    let (address, options) = (address_of(name), SegmentOptions::default());
    let writer = SegmentWriter::create(&address, SECRET, RUN, &[model()], options).unwrap();
    (address, writer)
}

fn wait_for_one(writer: &SegmentWriter) {
    let one = |there: &Attendance| there.workers.len() == 1;
    assert!(writer.wait_readers(soon(), one).unwrap());
}

/// Says hello, and nothing else.
fn knock(address: &str) -> Socket {
    knock_with(address).0
}

fn knock_with(address: &str) -> (Socket, OwnedFile) {
    let socket = Socket::connect(address).unwrap().unwrap();
    let control = OwnedFile::new("weightsync-control", CONTROL_BYTES).unwrap();
    assert!(
        socket
            .send(&hello().encode(), &[control.fd.as_fd()])
            .unwrap()
    );
    (socket, control)
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
        instance: 0,
        resume: crate::Resume::default(),
    }
}

/// A worker that has joined, with nobody who listens to it.
fn joined(shared: &Arc<SharedRegistry>, name: &str) -> Worker {
    let address = address_of(name);
    let listener = Listener::at(&address).unwrap();
    let joining = thread::spawn(move || Worker::attach(&options(&address), soon()).unwrap());
    poll([listener.as_fd()], None).unwrap();
    let socket = listener.accept().unwrap().unwrap();
    poll([socket.as_fd()], None).unwrap();
    shared.meet(socket);
    joining.join().unwrap()
}

#[test]
fn last_messages_of_a_dead_reader_are_handled() {
    let shared = shared();
    let worker = joined(&shared, "service");
    worker.refuse(None, "no room for the bias").unwrap();
    shared.listen_to((WorkerId(3), 1), true).unwrap();
    let rejected = shared.take_rejected();
    assert_eq!(rejected, [(WorkerId(3), "no room for the bias".to_owned())]);
    assert!(shared.readers().is_empty(), "it is buried as well");
}

/// A connection that was let in and hung up before it took anything: it is among
/// those a publication waits for. One that gives up joining at its deadline says
/// that it leaves; without a word it is a death, also where the kernel does not
/// tell of one.
#[test]
fn reader_counts_as_left_after_giving_up_a_join() {
    let cases = [false, true].map(|again| [(again, true), (again, false)]);
    for (again, says_so) in cases.into_iter().flatten() {
        let (address, mut writer) = sender(&format!("gives-up/{again}/{says_so}"));
        let (gives_up, control) = knock_with(&address);
        wait_for_one(&writer);
        let staging = writer.stage(&[0], soon()).unwrap();
        let publication = staging.publish(&Targets::All).unwrap();
        let page: &Control = control.map.table();
        page.left.store(says_so.into(), Ordering::Release);
        drop(gives_up);
        // Perhaps only the next attempt finds it gone.
        let _next = again.then(|| knock(&address));
        let waiter = writer.waiter();
        let settle = |publication, level| waiter.settle(publication, level, soon()).unwrap();
        let lines = settle(&publication, Level::Staged);
        let expected = match says_so {
            true => Outcome::Left,
            false => Outcome::Died,
        };
        assert_eq!(lines[0].outcome, expected);
    }
}

#[test]
fn a_reader_that_gives_up_joining_says_that_it_leaves() {
    let address = address_of("says-so");
    let listener = Listener::at(&address).unwrap();
    let joining = thread::spawn({
        let options = options(&address);
        move || Worker::attach(&options, Some(Instant::now())).unwrap_err()
    });
    poll([listener.as_fd()], soon()).unwrap();
    let socket = listener.accept().unwrap().unwrap();
    poll([socket.as_fd()], soon()).unwrap();
    let Ok(Packet::Data(_, fds)) = socket.receive() else {
        panic!("a hello was expected");
    };
    let page = MemoryMap::of_peer(fds[0].as_fd(), CONTROL_BYTES).unwrap();
    let control: &Control = page.table();
    assert_eq!(control.left.load(Ordering::Acquire), 0);
    // There is no answer.
    let error = joining.join().unwrap();
    assert!(matches!(error, Error::NoSender { .. }), "{error}");
    assert_eq!(control.left.load(Ordering::Acquire), 1);
}

#[test]
fn refusal_fails_if_the_sender_ignores_the_reader() {
    let shared = shared();
    let worker = joined(&shared, "refusal");
    let error = (0..100_000).find_map(|_| worker.refuse(Some(1), "no").err());
    assert!(matches!(error, Some(Error::Protocol { .. })), "{error:?}");
    shared.close(crate::Ending::Closed);
    worker.refuse(Some(1), "no").unwrap();
}

/// A worker has its bell's file in common with nobody.
#[test]
fn a_worker_can_ring_and_nothing_else() {
    use rustix::fs::{OFlags, fcntl_setfl};
    use rustix::io::{read, write};

    let address = address_of("bells");
    let listener = Listener::at(&address).unwrap();
    let shared = shared();
    let join = |worker| {
        let socket = Socket::connect(&address).unwrap().unwrap();
        let control = OwnedFile::new("weightsync-control", CONTROL_BYTES).unwrap();
        let ReaderMessage::Hello { secret, seen, .. } = hello() else {
            unreachable!()
        };
        let hello = ReaderMessage::Hello {
            secret,
            worker: WorkerId(worker),
            seen,
            models: ModelMask::ALL,
            delivery: Delivery::Newest,
            device: String::new(),
            instance: 0,
        };
        let fds = [control.fd.as_fd()];
        assert!(socket.send(&hello.encode(), &fds).unwrap());
        assert!(shared.meet(listener.accept().unwrap().unwrap()).is_none());
        let Ok(Packet::Data(_, mut fds)) = socket.receive() else {
            panic!("a welcome was expected");
        };
        (socket, control, fds.pop().unwrap())
    };
    let [(_one, _, mean), (_other, _, honest)] = [join(0), join(1)];
    let rings = || poll([shared.bells.as_fd()], Some(Instant::now())).unwrap() == [true];
    let ring = |bell: &OwnedFd, count: u64| assert_eq!(write(bell, &count.to_ne_bytes()), Ok(8));
    shared.bells.silence();
    assert!(!rings());
    // Its rings are heard, even if it reads its bell and makes it blocking.
    ring(&honest, 1);
    fcntl_setfl(&mean, OFlags::empty()).unwrap();
    ring(&mean, 1);
    read(&mean, &mut [0; 8]).unwrap();
    assert!(rings());
    shared.bells.silence();
    shared.bells.silence();
    assert!(!rings());
    // Full, it would have its own writer wait, and no other.
    ring(&mean, u64::MAX - 1);
    shared.bells.silence();
    ring(&honest, 1);
    assert!(rings());
}

/// The peer that should be notified does not listen.
#[test]
fn messages_of_relayed_workers_are_bounded() {
    let address = address_of("news");
    let listener = Listener::at(&address).unwrap();
    let relayed = crate::relay::Relayed::new(1);
    let options = SegmentOptions::default();
    let shared = SharedRegistry::new(RUN, &[model()], SECRET, &options, Some(relayed)).unwrap();
    let relayed = shared.relayed.as_ref().unwrap();
    let meet = || shared.meet(listener.accept().unwrap().unwrap());
    for _ in 0..50 {
        let gives_up = knock(&address);
        assert!(meet().is_none());
        drop(gives_up);
    }
    let (worker, control) = knock_with(&address);
    assert!(meet().is_none());
    let events = relayed.look(&shared.state());
    let [crate::WorkerEvent::Joins { who, .. }] = events[..] else {
        panic!("{events:?}");
    };
    let page = MemoryMap::of_peer(control.fd.as_fd(), CONTROL_BYTES).unwrap();
    let end = Socket::connect(&address).unwrap().unwrap();
    shared.welcome(request(), Arc::new(end), page).unwrap();
    for question in 1..=1000 {
        let state = shared.state();
        let (key, reader) = state.readers.iter().next().unwrap();
        relayed.note_withdrawal((*key, reader));
        relayed.note_question((*key, reader), question, Want::Newest);
    }
    let events = relayed.look(&shared.state());
    let asks = |event: &&crate::WorkerEvent| {
        let (question, want) = (1000, Want::Newest);
        let instance = 0;
        let who = crate::WorkerInstance { instance, ..who };
        **event
            == crate::WorkerEvent::Asks {
                who,
                question,
                want,
            }
    };
    assert_eq!(events.iter().filter(asks).count(), 1);
    assert!(events.len() < 10, "{events:?}");
    drop(worker);
}

/// The number was free when the worker said hello, and a remote reader was admitted under it since.
#[test]
fn worker_number_is_checked_when_admitted() {
    let (address, mut writer) = sender("two-ways");
    let shared = writer.shared.clone();
    let meeting = format!("{address}/meeting");
    let listener = Listener::at(&meeting).unwrap();
    let hello = knock(&meeting);
    let socket = listener.accept().unwrap().unwrap();
    let Ok(Packet::Data(_, fds)) = socket.receive() else {
        panic!("a hello was expected");
    };
    shared.vacate(&mut shared.state(), WorkerId(3)).unwrap();

    let remote_reader = remote_reader(&writer);
    let late = request();
    let control = take_control(fds).unwrap();
    let denied = shared.welcome(late, Arc::new(socket), control);
    let (_, reason) = denied.unwrap_err();
    assert!(reason.contains("already connected"), "{reason}");
    assert_eq!(shared.readers().len(), 1);

    // Its mailbox is notified as before.
    send(&mut writer);
    let told = remote_reader.notifications().unwrap();
    assert_eq!(told[0].members[0].version(), Version(1));
    drop(hello);
}

fn request() -> JoinRequest {
    JoinRequest {
        worker: WorkerId(3),
        models: ModelMask::ALL,
        delivery: Delivery::Newest,
        device: String::new(),
        instance: 0,
    }
}

/// The worker of the other tests, on another host.
fn remote_reader(writer: &SegmentWriter) -> crate::RemoteReader {
    let options = crate::RemoteReaderOptions {
        worker: WorkerId(3),
        pid: 1,
        seen: Epoch(0),
        models: ModelMask::ALL,
        delivery: Delivery::Newest,
        device: String::new(),
        location: Default::default(),
    };
    crate::RemoteReaders::of(writer)
        .join(options, |_| ())
        .unwrap()
}

/// Whatever its page says later: its mailbox is nobody's any more.
#[test]
fn a_reader_that_has_left_does_not_come_back() {
    let (address, mut writer) = sender("comes-back");
    let (_first, control) = knock_with(&address);
    wait_for_one(&writer);
    send(&mut writer);
    let shared = writer.shared.clone();
    let mailbox = || {
        let state = shared.state();
        let reader = &state.readers[&(WorkerId(3), 1)];
        reader.mailbox().live.0.load()
    };
    assert!(mailbox().is_some());
    let left = &control.map.table::<Control>().left;
    left.store(1, Ordering::Release);
    let remote_reader = remote_reader(&writer);
    left.store(0, Ordering::Release);
    assert_eq!(mailbox(), None, "what it names may be written again");
    assert_eq!(writer.readers().len(), 1);
    let publication = send(&mut writer);
    let told = remote_reader.notifications().unwrap();
    assert_eq!(told[0].members[0].version(), Version(2));
    let waiter = writer.waiter();
    let lines = waiter.settle(&publication, Level::Staged, Some(Instant::now()));
    let lines = lines.unwrap();
    let outcomes: Vec<_> = lines.iter().map(|line| &line.outcome).collect();
    // Its departure is told once, next to the line of the process that has its number now.
    assert_eq!(outcomes, [&Outcome::Late, &Outcome::Left]);
}

#[test]
fn a_slot_that_finds_no_room_on_its_way_comes_later() {
    let (address, writer) = sender("owed");
    let shared = &writer.shared;
    let worker = knock(&address);
    wait_for_one(&writer);
    let (_, socket, _) = shared.watched().remove(0);
    let answer = SenderMessage::NoSuchVersion {
        question: 1,
        model: 0,
        asked: Version(9),
        known: Vec::new(),
    };
    while socket.send(&answer.encode(), &[]).unwrap() {}
    for index in 2..5 {
        let file = Slot::new(4096, &AtomicBool::new(false)).unwrap();
        let mut state = shared.state();
        shared.add_slot(&mut state, 0, Arc::new(file));
        assert_eq!(state.slots[0].len(), index + 1);
    }
    assert!(writer.take_rejected().is_empty());
    let mut came = Vec::new();
    while came.len() < 3 {
        match worker.receive().unwrap() {
            Packet::Data(bytes, fds) => match SenderMessage::decode(&bytes).unwrap() {
                SenderMessage::Slot { model: 0, index } => came.push((index, fds.len())),
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
fn closing_sender_admits_no_reader() {
    let address = address_of("closing");
    let shared = shared();
    let listener = Listener::at(&address).unwrap();
    let knock = || {
        let socket = knock(&address);
        let end = listener.accept().unwrap().unwrap();
        assert!(shared.meet(end).is_none());
        socket.receive().unwrap()
    };
    assert!(matches!(knock(), Packet::Data(..)));
    shared.close(crate::Ending::Closed);
    assert!(matches!(knock(), Packet::HungUp));
    assert_eq!(shared.watched().len(), 1);
}

/// Gives the model another slot, and tells nobody yet.
fn grow_unheard(shared: &SharedRegistry) {
    let bytes = shared.models[0].model.slot_bytes();
    let file = Slot::new(bytes, &AtomicBool::new(false)).unwrap();
    let mut state = shared.state();
    let index = state.plan.grown(0);
    state.slots[0].push(Arc::new(file));
    for reader in state.readers.values_mut() {
        reader.owed.push_back((0, index));
    }
}

fn send(writer: &mut SegmentWriter) -> crate::Publication {
    let staging = writer.stage(&[0], soon()).unwrap();
    staging.publish(&Targets::All).unwrap()
}

#[test]
fn set_is_handed_out_after_its_slot_arrives() {
    for delivery in [Delivery::Newest, Delivery::Every { bound: 2 }] {
        let (address, mut writer) = sender(&format!("late/{delivery:?}"));
        let options = AttachOptions {
            delivery,
            ..options(&address)
        };
        let mut worker = Worker::attach(&options, soon()).unwrap();
        let held: Vec<_> = (0..2)
            .map(|_| {
                send(&mut writer);
                worker.next(soon()).unwrap().unwrap()
            })
            .collect();
        grow_unheard(&writer.shared);
        let third = send(&mut writer);
        let begun = Instant::now();
        let short = Duration::from_millis(30);
        for _ in 0..2 {
            assert!(worker.next(Some(begun + short)).unwrap().is_none());
        }
        let interrupter = worker.interrupter();
        interrupter.interrupt();
        assert!(worker.next(None).unwrap().is_none());
        assert!(writer.take_rejected().is_empty());
        let shared = &writer.shared;
        assert!(!shared.hand_slots(&mut shared.state()));
        let taken = worker.next(soon()).unwrap().unwrap();
        assert_eq!(taken.members[0].snapshot.version(), Version(3));
        worker.applied(&taken).unwrap();

        // Its earlier work counts, even if it can use nothing from then on.
        worker.refuse(None, "the device is gone").unwrap();
        while writer.take_rejected().is_empty() {
            thread::yield_now();
        }
        let lines = writer.waiter().settle(&third, Level::Applied, soon());
        assert_eq!(lines.unwrap()[0].outcome, Outcome::Applied);
        drop(held);
    }
}

#[test]
fn refused_reader_gets_the_reason() {
    let address = address_of("turned-away");
    let segment = SegmentOptions::default();
    let mut writer = SegmentWriter::create(&address, SECRET, RUN, &[model()], segment).unwrap();
    let mut worker = Worker::attach(&options(&address), soon()).unwrap();
    send(&mut writer);
    worker.next(soon()).unwrap().unwrap();
    let why = "there was no room for its slot";
    let key = (WorkerId(3), 1);
    writer.shared.state().turn_away(key, why.into());
    for _ in 0..2 {
        let error = worker.next(None).unwrap_err();
        let told = matches!(&error, Error::GivenUp { reason } if reason == why);
        assert!(told, "{error}");
    }
    let error = worker.ask(Want::Newest).unwrap_err();
    assert!(matches!(error, Error::GivenUp { .. }), "{error}");
}

#[test]
fn departed_reader_gets_no_new_slots() {
    let address = address_of("no-more");
    let segment = SegmentOptions::default();
    let mut writer = SegmentWriter::create(&address, SECRET, RUN, &[model()], segment).unwrap();
    let mut worker = Worker::attach(&options(&address), soon()).unwrap();
    send(&mut writer);
    let held = worker.next(soon()).unwrap().unwrap();
    grow_unheard(&writer.shared);
    drop(worker);
    let owed = |state: &RegistryState| {
        state
            .readers
            .values()
            .map(|one| one.owed.len())
            .sum::<usize>()
    };
    let shared = &writer.shared;
    let mut state = shared.state();
    assert_eq!(owed(&state), 1);
    let file = Slot::new(4096, &AtomicBool::new(false)).unwrap();
    shared.add_slot(&mut state, 0, Arc::new(file));
    assert_eq!(owed(&state), 0);
    drop(held);
}

#[test]
fn death_found_by_a_refused_successor_is_reported() {
    let address = address_of("found");
    let listener = Listener::at(&address).unwrap();
    let shared = shared();
    let meet = || shared.meet(listener.accept().unwrap().unwrap());
    let first = knock(&address);
    assert!(meet().is_none());
    drop(first);
    shared.bells.silence();
    let socket = Socket::connect(&address).unwrap().unwrap();
    assert!(socket.send(&hello().encode(), &[]).unwrap());
    assert!(meet().is_none(), "it has no control page");
    assert!(shared.watched().is_empty());
    assert_eq!(
        poll([shared.bells.as_fd()], Some(Instant::now())).unwrap(),
        [true]
    );
}

fn relay(listener: Listener) -> crate::RelaySegment {
    let options = SegmentOptions::default();
    crate::RelaySegment::create(listener, SECRET, (RUN, 1), &[model()], options).unwrap()
}

/// Admits the next worker that asks, which is to be this one.
fn admit_at(relay: &crate::RelaySegment, worker: WorkerId) {
    match relay.wait(soon()).unwrap()[..] {
        [crate::WorkerEvent::Joins { ticket, who, .. }] if who.worker == worker => {
            relay.admit(ticket).unwrap();
        }
        ref events => panic!("{events:?}"),
    }
}

#[test]
fn reader_hears_that_its_relay_does_not_get_to_run() {
    let address = address_of("silent");
    let relay = relay(Listener::at(&address).unwrap());
    let options = options(&address);
    let joining = thread::spawn(move || Worker::attach(&options, soon()).unwrap());
    admit_at(&relay, WorkerId(3));
    let worker = joining.join().unwrap();
    let (tell, silent) = std::sync::mpsc::channel();
    worker.end().while_silent(move || {
        let _ = tell.send(());
    });
    // The service thread waits for this.
    let lock = relay.locked_for_a_test();
    silent.recv_timeout(Duration::from_secs(20)).unwrap();
    let answers = |deadline| crate::is_answered(&address, deadline).unwrap();
    assert!(crate::is_served(&address).unwrap());
    assert!(!answers(Some(Instant::now())));
    drop(lock);
    assert!(answers(soon()));
}

/// A relay that was stopped finds its hello.
#[test]
fn relay_does_not_ask_for_a_worker_that_has_gone() {
    let address = address_of("late");
    let listener = Listener::at(&address).unwrap();
    drop(knock(&address));
    let mut options = options(&address);
    options.worker = WorkerId(4);
    let joining = thread::spawn(move || Worker::attach(&options, soon()).unwrap());
    let relay = relay(listener);
    admit_at(&relay, WorkerId(4));
    joining.join().unwrap();
}
