//! Processes that fork and are killed while their child lives on, as programs in
//! Python are that load their data in forked processes: the child has a copy of
//! every descriptor.

use std::io::Read;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use weightsync_core::WorkerId;
use weightsync_mem::{
    CopyOptions, Error, Level, Listener, Outcome, Reader, is_served, stream_copy_slice,
};

use crate::{address, attach, outcomes, publish, settle, slots, take, within, writer};

/// How soon a death is to be known: far sooner than anything here would time out.
const AT_ONCE: Duration = Duration::from_secs(5);

/// A process that has forked a child, which sleeps.
struct Parent {
    pid: libc::pid_t,
    /// Ends when the child is gone too: it has the other end.
    line: std::fs::File,
}

impl Parent {
    /// Forks a process that does `work`, forks a child, says so, and sleeps.
    ///
    /// `work` may wait and use memory, but nothing that another thread of this
    /// process may have been at.
    fn fork(work: impl FnOnce()) -> Self {
        let mut ends = [0; 2];
        // SAFETY: there is room for two descriptors.
        assert_eq!(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) }, 0);
        // SAFETY: the kernel has just opened both for this process.
        let [read, write] = ends.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
        // SAFETY: the child uses what it makes itself, and leaves by a signal or
        // `_exit`.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            work();
            // SAFETY: its child only sleeps.
            let child = unsafe { libc::fork() };
            if child != 0 {
                // SAFETY: one byte is there to be read.
                unsafe { libc::write(write.as_raw_fd(), b"!".as_ptr().cast(), 1) };
            }
            // What was made here lives as long as both.
            loop {
                // SAFETY: it has no preconditions.
                unsafe { libc::pause() };
            }
        }
        let mut line = std::fs::File::from(read);
        drop(write);
        let mut word = [0];
        line.read_exact(&mut word).unwrap();
        Self { pid, line }
    }

    /// Kills the parent alone.
    fn kill(&self) {
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
