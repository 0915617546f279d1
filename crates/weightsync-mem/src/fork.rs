//! Tells a forked child from the process that opened an end, without a system call per use.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::mm::{MapFlags, ProtFlags};

use crate::error::Error;
use crate::file;

/// The process that made an object. A forked child is another process, even with the same number in
/// a process namespace of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    /// How many forks lie between the first process that asked and this one.
    generation: u32,
    /// The process's number, for people to read.
    pid: u32,
}

impl Origin {
    /// No process: it is never [here](Self::is_here).
    pub const NOWHERE: Self = Self {
        generation: 0,
        pid: 0,
    };

    /// This process. Takes a nanosecond, because ends ask at every use whether they were made here.
    ///
    /// The identity is kept in a page that a fork wipes (`MADV_WIPEONFORK`, Linux 4.14), so that
    /// the kernel is asked once per process. Without that, the process's number is used.
    pub fn here() -> Self {
        static PAGE: OnceLock<Option<&'static ForkPage>> = OnceLock::new();
        /// In memory that a fork copies: the generation of the last process that asked.
        static LAST: AtomicU32 = AtomicU32::new(0);
        let Some(known) = PAGE.get_or_init(wiped_on_fork) else {
            return Self {
                generation: 0,
                pid: std::process::id(),
            };
        };
        if known.generation.load(Ordering::Acquire) == 0 {
            // Two threads that get here at the same time write the same value.
            let next = LAST.load(Ordering::Relaxed) + 1;
            // The pid before the generation: a thread that finds the generation finds the pid.
            known.pid.store(std::process::id(), Ordering::Relaxed);
            let first =
                known
                    .generation
                    .compare_exchange(0, next, Ordering::AcqRel, Ordering::Acquire);
            // Kept where a fork copies it, so that a child of this process counts on from here.
            if first.is_ok() {
                LAST.store(next, Ordering::Relaxed);
            }
        }
        Self {
            generation: known.generation.load(Ordering::Acquire),
            pid: known.pid.load(Ordering::Relaxed),
        }
    }

    /// Whether this is the current process.
    pub fn is_here(self) -> bool {
        self == Self::here()
    }

    /// Fails unless this is the current process.
    ///
    /// # Errors
    ///
    /// [`Error::Forked`] in a forked child.
    pub fn check(self) -> Result<(), Error> {
        let here = Self::here();
        match self == here {
            true => Ok(()),
            false => Err(Error::Forked {
                owner: self.pid,
                child: here.pid,
            }),
        }
    }
}

/// The page with this process's identity.
#[repr(C)]
struct ForkPage {
    /// 0 until the first call.
    generation: AtomicU32,
    pid: AtomicU32,
}

/// A page of zeros that every forked child finds zeroed again. `None` if the kernel cannot do that.
fn wiped_on_fork() -> Option<&'static ForkPage> {
    const PAGE: usize = 4096;
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: the kernel picks an unused address range, so no existing memory is
    // affected.
    let page =
        unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), PAGE, prot, MapFlags::PRIVATE) }
            .ok()?;
    // SAFETY: the range is exactly the page mapped above.
    if unsafe { file::wipe_on_fork(page, PAGE) }.is_err() {
        // SAFETY: the page was mapped above and nothing refers to it.
        let _ = unsafe { rustix::mm::munmap(page, PAGE) };
        return None;
    }
    // SAFETY: the page is mapped readable and writable, aligned, never unmapped, and holds
    // zeros, which are a value of atomics; it is accessed through these alone.
    unsafe { page.cast::<ForkPage>().as_ref() }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes a child, and gives what it ended with.
    fn in_child(call: impl FnOnce() -> i32) -> i32 {
        // SAFETY: the child has no other thread, makes system calls and ends itself.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let code = call();
            // SAFETY: it ends the child, and runs nothing of the parent's.
            unsafe { libc::_exit(code) };
        }
        let mut status = 0;
        // SAFETY: the child is this process's own, and the place is valid for the call.
        let ended = unsafe { libc::waitpid(child, &mut status, 0) };
        match ended == child && libc::WIFEXITED(status) {
            true => libc::WEXITSTATUS(status),
            false => -1,
        }
    }

    /// Children of this process are the first of a process namespace from here on.
    fn leave_namespace() -> bool {
        // SAFETY: it changes the namespaces of this process, which a test has forked.
        unsafe { libc::unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWPID) == 0 }
    }

    #[test]
    fn forked_child_is_another_process_with_any_pid() {
        const NO_NAMESPACES: i32 = 40;
        let here = Origin::here();
        assert!(here.is_here() && here.check().is_ok());
        assert_eq!(in_child(|| here.is_here().into()), 0);
        // A first process of a namespace whose child is the first of another.
        let code = in_child(|| {
            if !leave_namespace() {
                return NO_NAMESPACES;
            }
            in_child(|| {
                let parent = Origin::here();
                if parent.pid != 1 || !leave_namespace() {
                    return NO_NAMESPACES;
                }
                in_child(|| match (std::process::id(), parent.check()) {
                    (1, Err(Error::Forked { owner: 1, child: 1 })) => 0,
                    _ => 1,
                })
            })
        });
        // Where they are forbidden, there is no such child either.
        assert!(code == 0 || code == NO_NAMESPACES, "{code}");
    }
}
