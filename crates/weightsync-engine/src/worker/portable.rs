//! Worker processes on other systems: there are none, because nothing there kills a worker whose
//! trainer has died. [`check`] refuses to start a group, so no other call is reached.

use std::os::fd::OwnedFd;

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{SendFlags, SocketFlags};
use rustix::process::Pid;

use super::error::WorkerError;

pub(super) const HANG_UP: PollFlags = PollFlags::HUP;

pub(super) const CLOSES_ON_EXEC: SocketFlags = SocketFlags::empty();

pub(super) const NO_SIGNAL: SendFlags = SendFlags::empty();

/// Refuses to run workers.
pub(super) fn check() -> Result<(), WorkerError> {
    Err(WorkerError::NeedsLinux)
}

pub(super) fn counter() -> rustix::io::Result<OwnedFd> {
    Err(Errno::NOSYS)
}

pub(super) fn open_process(_pid: Pid) -> rustix::io::Result<OwnedFd> {
    Err(Errno::NOSYS)
}

pub(super) fn kill(_process: &OwnedFd) -> rustix::io::Result<()> {
    Err(Errno::NOSYS)
}

pub(super) fn is_unreaped(_process: &OwnedFd) -> bool {
    false
}

pub(super) fn die_with_parent() -> rustix::io::Result<()> {
    Err(Errno::NOSYS)
}

pub(super) fn restore_process_name() {}
