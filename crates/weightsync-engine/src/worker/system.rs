//! What worker processes need of Linux.

use std::ffi::CString;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;

use rustix::event::{EventfdFlags, PollFlags, eventfd};
use rustix::net::{SendFlags, SocketFlags};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, pidfd_open, pidfd_send_signal,
    set_parent_process_death_signal, waitid,
};

use super::error::WorkerError;

/// What a poll asks for to learn that the other end of a socket is closed.
pub(super) const HANG_UP: PollFlags = PollFlags::RDHUP;

/// Sockets that close on exec.
pub(super) const CLOSES_ON_EXEC: SocketFlags = SocketFlags::CLOEXEC;

/// A closed pipe is an error, not a SIGPIPE.
pub(super) const NO_SIGNAL: SendFlags = SendFlags::NOSIGNAL;

/// Checks that this system can run workers; it can.
pub(super) fn check() -> Result<(), WorkerError> {
    Ok(())
}

/// A counter that can be polled.
pub(super) fn counter() -> rustix::io::Result<OwnedFd> {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
}

/// A descriptor of a process, which is readable once the process has ended.
pub(super) fn open_process(pid: Pid) -> rustix::io::Result<OwnedFd> {
    pidfd_open(pid, PidfdFlags::empty())
}

pub(super) fn kill(process: &OwnedFd) -> rustix::io::Result<()> {
    pidfd_send_signal(process, Signal::KILL)
}

/// Whether a child has ended and was not reaped.
pub(super) fn is_unreaped(process: &OwnedFd) -> bool {
    let unreaped = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    matches!(
        waitid(WaitId::PidFd(process.as_fd()), unreaped),
        Ok(Some(_))
    )
}

/// Has this process killed when the thread that started it ends.
pub(super) fn die_with_parent() -> rustix::io::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))
}

/// A program run through [`THIS_PROGRAM`](super::process::THIS_PROGRAM) is called "exe" in process
/// lists; gives it its own name.
pub(super) fn restore_process_name() {
    let is_exe = rustix::thread::name().is_ok_and(|name| name.as_bytes() == b"exe");
    let Some(arg0) = std::env::args_os().next().filter(|_| is_exe) else {
        return;
    };
    let name = std::path::Path::new(&arg0).file_name().unwrap_or(&arg0);
    if let Ok(name) = CString::new(name.as_bytes()) {
        // Cosmetic: the kernel cuts it to 15 bytes, and nothing depends on it.
        let _ = rustix::thread::set_name(&name);
    }
}
