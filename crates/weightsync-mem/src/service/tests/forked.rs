//! A forked child of a process that has a relay.

use super::*;

/// The thread that has the lock is not in the child, which would wait for it for ever.
#[test]
fn a_forked_child_waits_for_no_lock_of_its_parent() {
    let (address, writer) = sender("fork-lock");
    let remote_reader = remote_reader(&writer);
    let listener = Listener::at(&format!("{address}/relay")).unwrap();
    let relay = crate::RelaySegment::create(
        listener,
        SECRET,
        (RUN, 1),
        &[model()],
        SegmentOptions::default(),
    )
    .unwrap();
    let who = crate::WorkerInstance {
        worker: WorkerId(3),
        instance: 0,
    };
    let lock = writer.shared.state();
    let relayed = relay.locked_for_a_test();
    // SAFETY: the child makes calls that end at once, and ends itself without unwinding.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: no handler is set, so the signal ends a child that waits.
        unsafe { libc::alarm(20) };
        let forked = |result: Result<(), Error>| matches!(result, Err(Error::Forked { .. }));
        remote_reader.start_over();
        relay.report_again();
        relay.deny(1, "");
        relay.forget_bases(0);
        relay.turn_away(who, "");
        let fine = forked(remote_reader.notifications().map(drop))
            && forked(remote_reader.answered().map(drop))
            && forked(remote_reader.ask(1, Want::Newest))
            && forked(relay.wait(None).map(drop))
            && forked(relay.admit(1))
            && !relay.waits(1)
            && !relay.notify(who, 1, &[])
            && !relay.answer(who, 1, 1, &[]);
        // SAFETY: it ends the child, and runs nothing of the parent's.
        unsafe { libc::_exit(i32::from(!fine)) };
    }
    drop((lock, relayed));
    let mut status = 0;
    // SAFETY: the child is this process's own, and the place is valid for the call.
    let ended = unsafe { libc::waitpid(child, &mut status, 0) };
    assert_eq!((ended, status), (child, 0));
}
