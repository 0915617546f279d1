//! Processes that fork and are killed while their child lives on, as programs in
//! Python are that load their data in forked processes: the child has a copy of
//! every descriptor.

use std::io::Read;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use weightsync_mem::{CopyOptions, Error, Listener, Outcome, SegmentReader, is_served};

use crate::patience::patience;
use crate::{address, attach, check, outcomes, publish, settle, slots, take, within, writer};

/// How soon a death is to be known: far sooner than anything here would time out.
fn at_once() -> Duration {
    patience(2)
}

/// For an attempt that cannot succeed.
const SHORT: Duration = Duration::from_secs(1);

#[test]
fn killed_sender_is_dead_with_sockets_in_a_child() {
    let address = address();
    let sender = Parent::fork(|| {
        let mut writer = writer(&address, slots(2, 2));
        publish(&mut writer, 1, CopyOptions::default());
        std::mem::forget(writer);
    });
    let mut reader = SegmentReader::attach(&attach(&address, 0), within(20)).unwrap();
    let held = take(&mut reader);
    assert!(is_served(&address).unwrap());
    sender.kill();
    let since = Instant::now();
    let error = reader.next(within(20)).unwrap_err();
    assert!(matches!(error, Error::SenderDied { .. }), "{error}");
    assert!(!is_served(&address).unwrap());
    assert!(since.elapsed() < at_once(), "{:?}", since.elapsed());
    check(&held);
    // The name is still taken, and a process that wants it learns that.
    let error = Listener::at(&address).unwrap_err();
    assert!(matches!(error, Error::AddressInUse { .. }), "{error}");
    for _ in 0..1100 {
        let error = SegmentReader::attach(&attach(&address, 1), within(0)).unwrap_err();
        assert!(matches!(error, Error::NoSender { .. }), "{error}");
    }
    // By now nobody can even queue up.
    let since = Instant::now();
    assert!(!is_served(&address).unwrap());
    assert!(since.elapsed() < at_once(), "{:?}", since.elapsed());
    assert!(sender.child_lives());
}

#[test]
fn closing_sender_refuses_joins_with_sockets_in_child() {
    let address = address();
    let mut writer = writer(&address, slots(2, 2));
    publish(&mut writer, 1, CopyOptions::default());
    let mut reader = SegmentReader::attach(&attach(&address, 0), within(20)).unwrap();
    take(&mut reader);
    let child = Parent::fork(|| ());
    drop(writer);
    let since = Instant::now();
    let error = reader.next(within(20)).unwrap_err();
    assert!(matches!(error, Error::SenderClosed), "{error}");
    assert!(!is_served(&address).unwrap());
    let error = SegmentReader::attach(&attach(&address, 0), within(0)).unwrap_err();
    assert!(matches!(error, Error::NoSender { .. }), "{error}");
    assert!(since.elapsed() < at_once(), "{:?}", since.elapsed());
    assert!(child.child_lives());
}

#[test]
fn closing_sender_disconnects_waiting_readers() {
    let address = address();
    // This listener never accepts the connection.
    let listener = Listener::at(&address).unwrap();
    let child = Parent::fork(|| ());
    std::thread::scope(|scope| {
        let joining = scope.spawn(|| {
            // The sender says no more, and the next attempt is refused.
            SegmentReader::attach(&attach(&address, 0), Some(Instant::now() + SHORT))
        });
        let since = Instant::now();
        drop(listener);
        let error = joining.join().unwrap().unwrap_err();
        assert!(matches!(error, Error::NoSender { .. }), "{error}");
        assert!(since.elapsed() < SHORT + at_once(), "{:?}", since.elapsed());
    });
    assert!(child.child_lives());
}

#[test]
fn killed_worker_is_dead_with_its_socket_in_a_child() {
    let address = address();
    let mut writer = writer(&address, slots(2, 2));
    publish(&mut writer, 1, CopyOptions::default());
    let worker = Parent::fork(|| {
        let mut reader = SegmentReader::attach(&attach(&address, 0), within(20)).unwrap();
        std::mem::forget((take(&mut reader), reader));
    });
    let publication = publish(&mut writer, 2, CopyOptions::default());
    worker.kill();
    let since = Instant::now();
    assert_eq!(
        outcomes(&settle(&writer, &publication)),
        [(0, Outcome::Died)]
    );
    // The dead worker's slot and number are free.
    publish(&mut writer, 3, CopyOptions::default());
    let mut next = SegmentReader::attach(&attach(&address, 0), within(20)).unwrap();
    take(&mut next);
    assert!(since.elapsed() < at_once(), "{:?}", since.elapsed());
    assert!(worker.child_lives());
}

/// A process that has forked a child, which sleeps.
pub(super) struct Parent {
    pid: libc::pid_t,
    killed: std::cell::Cell<bool>,
    child: libc::pid_t,
    /// Ends when the child is gone too: both have the other end.
    line: std::fs::File,
}

impl Parent {
    /// Forks a process that does `work`, forks a child, says so, and sleeps.
    pub(super) fn fork(work: impl FnOnce()) -> Self {
        let mut ends = [0; 2];
        // SAFETY: there is room for two descriptors.
        let made = unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) };
        assert_eq!(made, 0);
        // SAFETY: the kernel has just opened both for this process.
        let [read, write] = ends.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
        // SAFETY: the new process uses what it makes itself and the allocator,
        // which is whole after a fork, and never returns from here.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            let done = catch_unwind(AssertUnwindSafe(work));
            // SAFETY: its child only sleeps.
            let child = unsafe { libc::fork() };
            if child != 0 && done.is_ok() {
                let word = child.to_ne_bytes();
                // SAFETY: the bytes are there to be read.
                unsafe { libc::write(write.as_raw_fd(), word.as_ptr().cast(), word.len()) };
            }
            if done.is_err() {
                // SAFETY: ends it without the exit handlers it was forked with.
                unsafe { libc::_exit(1) };
            }
            // The sockets and memory made here live as long as both processes.
            loop {
                // SAFETY: it has no preconditions.
                unsafe { libc::pause() };
            }
        }
        drop(write);
        let mut line = std::fs::File::from(read);
        let mut word = [0; size_of::<libc::pid_t>()];
        line.read_exact(&mut word).unwrap();
        Self {
            pid,
            killed: false.into(),
            child: libc::pid_t::from_ne_bytes(word),
            line,
        }
    }

    /// Kills the parent alone.
    fn kill(&self) {
        if self.killed.replace(true) {
            return;
        }
        // SAFETY: it is a child of this process that was not waited for yet.
        assert_eq!(unsafe { libc::kill(self.pid, libc::SIGKILL) }, 0);
        // SAFETY: as above; nothing is to be written.
        let waited = unsafe { libc::waitpid(self.pid, std::ptr::null_mut(), 0) };
        assert_eq!(waited, self.pid);
    }

    /// Whether somebody has a copy of what it had.
    fn child_lives(&self) -> bool {
        let mut polled = libc::pollfd {
            fd: self.line.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: there is one entry to be read and written.
        unsafe { libc::poll(&raw mut polled, 1, 0) == 0 }
    }
}

impl Drop for Parent {
    fn drop(&mut self) {
        // SAFETY: it sleeps until this.
        unsafe { libc::kill(self.child, libc::SIGKILL) };
        self.kill();
    }
}
