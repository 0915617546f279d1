//! The events of a relay's workers.

use std::sync::Barrier;
use std::thread::JoinHandle;

use weightsync_core::{Digest, Version};
use weightsync_mem::{
    Error, Listener, RelaySegment, SegmentOptions, SegmentReader, Taken, WorkerEvent,
    WorkerInstance,
};

use super::{RUN, SECRET, address, attach, model, within};

#[test]
fn departed_worker_is_reported_once() {
    let (relay, address) = relay();
    let (_, worker) = admitted(&relay, &address);
    // The worker keeps its version, so that it is not forgotten when it leaves.
    let held = taken(&relay, worker);
    let is_gone = |event: &WorkerEvent| matches!(event, WorkerEvent::Gone { .. });
    while !relay.wait(within(20)).unwrap().iter().any(is_gone) {}
    relay.report_again();
    assert_eq!(relay.last_events(), []);
    drop(held);
}

#[test]
fn rejoining_worker_leaves_first() {
    let (relay, address) = relay();
    let (first, worker) = admitted(&relay, &address);
    let held = taken(&relay, worker);
    let again = joining(&address);
    while !relay.waits(first + 1) {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    let events = relay.wait(within(20)).unwrap();
    let place = |is: fn(&WorkerEvent) -> bool| events.iter().position(is);
    let gone = place(|event| matches!(event, WorkerEvent::Gone { .. }));
    let joins = place(|event| matches!(event, WorkerEvent::Joins { .. }));
    assert!(gone.is_some() && gone < joins, "{events:?}");
    relay.admit(first + 1).unwrap();
    again.join().unwrap().unwrap();
    drop(held);
}

#[test]
fn of_two_that_wait_under_one_number_one_is_let_in() {
    let (relay, address) = relay();
    let workers = [joining(&address), joining(&address)];
    let mut tickets = Vec::new();
    while tickets.len() < 2 {
        let events = relay.wait(within(20)).unwrap();
        tickets.extend(events.iter().filter_map(|event| match event {
            WorkerEvent::Joins { ticket, .. } => Some(*ticket),
            _ => None,
        }));
    }
    relay.admit(tickets[0]).unwrap();
    let error = relay.admit(tickets[1]).unwrap_err();
    assert!(error.to_string().contains("already connected"), "{error}");
    assert_eq!(relay.readers().len(), 1);
    let joined = workers.map(|worker| worker.join().unwrap());
    let denied =
        |joined: &&Result<SegmentReader, Error>| matches!(joined, Err(Error::Denied { .. }));
    assert_eq!(joined.iter().filter(denied).count(), 1, "{joined:?}");
}

fn relay() -> (RelaySegment, String) {
    let address = address();
    let listener = Listener::at(&address).unwrap();
    let options = SegmentOptions::default();
    let relay = RelaySegment::create(listener, SECRET, (RUN, 1), &[model()], options);
    (relay.unwrap(), address)
}

/// A worker that is on its way.
fn joining(address: &str) -> JoinHandle<Result<SegmentReader, Error>> {
    let attach = attach(address, 4);
    std::thread::spawn(move || SegmentReader::attach(&attach, within(20)))
}

/// A worker that was let in, and its ticket.
fn admitted(relay: &RelaySegment, address: &str) -> (u64, (WorkerInstance, SegmentReader)) {
    let joining = joining(address);
    let (ticket, who) = match relay.wait(within(20)).unwrap()[..] {
        [WorkerEvent::Joins { ticket, who, .. }] => (ticket, who),
        ref events => panic!("{events:?}"),
    };
    relay.admit(ticket).unwrap();
    (ticket, (who, joining.join().unwrap().unwrap()))
}

/// The worker's last set, which it keeps when it leaves.
fn taken(relay: &RelaySegment, (who, mut worker): (WorkerInstance, SegmentReader)) -> Taken {
    let slot = relay.partial_slot(0, Version(1), 1 << 30).unwrap().unwrap();
    slot.take(0).unwrap().keep();
    let version = slot.commit().unwrap();
    assert!(relay.notify(who, 1, &[version]));
    worker.next(within(20)).unwrap().unwrap()
}

/// The commit record is written once: a second time would remove the digest that was published
/// meanwhile. The threads may run in any order.
#[test]
fn one_of_two_commits_publishes_the_version() {
    let (relay, address) = relay();
    let (_, (who, mut worker)) = admitted(&relay, &address);
    let digest = Digest([7; 16]);
    let mut last = None;
    for version in (1..=2000).map(Version) {
        drop(last.take());
        let slot = relay.partial_slot(0, version, 1 << 30).unwrap().unwrap();
        slot.take(0).unwrap().keep();
        let start = Barrier::new(2);
        let commit = |publishes: bool| {
            start.wait();
            let committed = slot.commit().unwrap();
            assert!(!publishes || committed.publish_digest(digest));
            committed
        };
        let [first, second] = std::thread::scope(|scope| {
            [true, false]
                .map(|publishes| {
                    scope.spawn({
                        let commit = &commit;
                        move || commit(publishes)
                    })
                })
                .map(|thread| thread.join().unwrap())
        });
        assert_eq!([first.version(), second.version()], [version; 2]);
        assert_eq!(second.published_digest(), Some(digest), "{version:?}");
        last = Some(first);
    }
    let last = last.unwrap();
    assert!(relay.notify(who, 1, std::slice::from_ref(&last)));
    let taken = worker.next(within(20)).unwrap().unwrap();
    assert_eq!(taken.members[0].snapshot.version(), last.version());
}

#[test]
fn reused_slot_keeps_its_version_until_written() {
    let listener = Listener::at(&address()).unwrap();
    let options = SegmentOptions {
        slots: 2,
        max_slots: 2,
        ..SegmentOptions::default()
    };
    let relay = RelaySegment::create(listener, SECRET, (RUN, 1), &[model()], options).unwrap();
    const PIECE: usize = 64;
    let lend = |version| {
        relay
            .partial_slot(0, Version(version), PIECE)
            .unwrap()
            .unwrap()
    };
    let fill = |version: u64| {
        let slot = lend(version);
        assert!(slot.pieces() > 2);
        for index in slot.missing().collect::<Vec<_>>() {
            let mut piece = slot.take(index).unwrap();
            piece.fill(version as u8);
            piece.keep();
        }
        slot.commit().unwrap()
    };
    let lent = lend(1);
    assert_eq!((lent.base(), lent.take(0).unwrap().base()), (None, None));
    drop(lent);
    let first = fill(1);
    let second = fill(2);
    drop(first);
    // Lent and given back without a word, it has what it had.
    for _ in 0..2 {
        let lent = lend(3);
        assert_eq!(lent.base(), Some(Version(1)));
        let piece = lent.take_all(0..2).unwrap();
        assert_eq!(piece.base(), Some(Version(1)));
        assert!(piece.iter().all(|byte| *byte == 1));
        assert!(lent.take_all(1..3).is_none(), "one of them is taken");
        assert_eq!(lent.take(2).unwrap().base(), Some(Version(1)));
    }
    let lent = lend(3);
    let mut piece = lent.take_all(0..2).unwrap();
    piece[70] = 9;
    assert_eq!(piece.base(), None, "it is written");
    drop(piece);
    assert_eq!(lent.take(0).unwrap().base(), None, "one of them was");
    assert_eq!(lent.take_all(1..3).unwrap().base(), None);
    assert_eq!(lent.missing().count(), lent.pieces());
    drop(lent);
    // A slot with a partial version has no base.
    assert_eq!(lend(3).base(), None);

    // Nor is what has turned out to be wrong: not what is there, not what was lent
    // meanwhile and is given back, not what came meanwhile.
    let third = fill(3);
    drop(second);
    let lent = lend(4);
    assert_eq!(lent.base(), Some(Version(2)));
    relay.forget_bases(0);
    drop(lent);
    let lent = lend(4);
    assert_eq!(lent.base(), None);
    for index in 0..lent.pieces() {
        lent.take(index).unwrap().keep();
    }
    relay.forget_bases(0);
    let fourth = lent.commit().unwrap();
    drop((lent, third, fourth));
    assert_eq!(lend(5).base(), None);
    // Versions from here on are known.
    drop(fill(6));
    drop(fill(7));
    assert!(lend(8).base().is_some());
}
