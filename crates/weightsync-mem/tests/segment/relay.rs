//! What a relay tells of its workers.

use weightsync_core::Version;
use weightsync_mem::{Event, Listener, Reader, Relay, SegmentOptions};

use super::{RUN, SECRET, address, attach, model, within};

#[test]
fn who_has_left_is_not_told_of_again() {
    let address = address();
    let listener = Listener::at(&address).unwrap();
    let relay = Relay::create(
        listener,
        SECRET,
        (RUN, 1),
        &[model()],
        SegmentOptions::default(),
    );
    let relay = relay.unwrap();
    let joining = std::thread::spawn(move || Reader::attach(&attach(&address, 4), within(20)));
    let who = match &relay.wait(within(20)).unwrap()[..] {
        [Event::Joins { ticket, who, .. }] => {
            relay.admit(*ticket).unwrap();
            *who
        }
        events => panic!("{events:?}"),
    };
    let mut worker = joining.join().unwrap().unwrap();
    let room = relay.room(0, Version(1), 1 << 30).unwrap().unwrap();
    room.take(0).unwrap().keep();
    let version = room.commit().unwrap();
    assert!(relay.tell(who, 1, &[version]));
    // It keeps what it has, so that it is not forgotten when it leaves.
    let held = worker.next(within(20)).unwrap().unwrap();
    drop(worker);
    let is_gone = |event: &Event| matches!(event, Event::Gone { .. });
    while !relay.wait(within(20)).unwrap().iter().any(is_gone) {}
    relay.tell_again();
    assert_eq!(relay.last_events(), []);
    drop(held);
}
