//! Worker processes: started, watched and ended, so that none outlives its trainer.
//!
//! A *trainer* starts a group of [`Workers`] with [`Spawn`]; a worker is usually the same program,
//! run again, which finds its end of the pipe with [`current`]:
//!
//! ```standalone_crate
//! use weightsync::worker::{Event, Spawn, self};
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     // In a worker: before anything else.
//!     if let Some(worker) = worker::current()? {
//!         while let Some(frame) = worker.recv(None)? {
//!             worker.send(&[worker.init(), &frame[..]].concat())?;
//!         }
//!         return Ok(()); // the trainer closed the pipe
//!     }
//!
//!     // In the trainer.
//!     let workers = Spawn::this_program()?.count(4).init(b"hello ".to_vec()).start()?;
//!     workers.send(2, b"world", None)?;
//!     match workers.recv_any(None) {
//!         Some((worker, Event::Frame(frame))) => assert_eq!((worker, &frame[..]), (2, &b"hello world"[..])),
//!         Some((worker, Event::Exited(exit))) => panic!("worker {worker}: {exit}"),
//!         other => unreachable!("{other:?}"),
//!     }
//!     Ok(()) // dropping `workers` ends them
//! }
//! ```
//!
//! # What is guaranteed
//!
//! * **No worker outlives its trainer**, however that dies. A worker's standard input is its
//!   *lifeline*: a Unix socket whose other end only the trainer holds. A thread in the worker ends
//!   the process, by SIGKILL, a short grace after the lifeline hangs up, whatever the main thread
//!   is doing; and the kernel is asked to send SIGKILL when the trainer dies. Both nets are in
//!   place once [`current`] was called, so call it first.
//! * **Death is an event.** A worker that ends is noticed through its pidfd at once and reported
//!   as [`Event::Exited`] after everything it sent, with its status or signal and the end of its
//!   standard error.
//! * **The pipe is bounded** both ways: by the longest frame, by the bytes queued for a reader,
//!   and by the kernel's socket buffer. The end that is ahead waits.
//! * **Every wait ends**: by its timeout, by the death of the other side, or by shutdown.
//! * **Nothing is left** after [`Workers::shutdown`] or a drop: no process, thread or descriptor.
//!
//! Workers are in process groups of their own, so a terminal's Ctrl-C reaches the trainer alone.
//! When a worker ends, the trainer kills what is left of its group. Once the trainer is dead
//! nobody is left to do so: a worker that needs processes of its own starts them as [`Workers`]
//! too, and the lifelines form a chain. Workers' standard output is the trainer's.

mod error;
mod exit;
mod frame;
mod pipe;
mod process;
mod spawn;
#[cfg_attr(not(target_os = "linux"), path = "portable.rs")]
mod system;
mod wait;
mod watch;
mod workers;

pub use error::{PipeFault, WorkerError};
pub use exit::{Exit, STDERR_TAIL};
pub use process::{WorkerProcess, current};
pub use spawn::{Restart, Spawn};
pub use workers::{Event, Workers};

/// The environment variable by which a worker knows itself: `<inode of its pipe>:<trainer's pid>`.
const MARK: &str = "WEIGHTSYNC_WORKER";

/// The pipe's decoders, for the fuzz targets.
#[cfg(feature = "fuzz")]
#[doc(hidden)]
pub mod fuzz {
    use super::frame::{FrameAssembler, Greeting, PipeFrameKind, header};

    /// Frames of at most 64 KiB from whatever bytes come, in pieces of any size.
    pub fn frames(bytes: &[u8]) -> usize {
        let mut assembler = FrameAssembler::new(64 << 10);
        let (mut rest, mut frames) = (bytes, 0);
        while !rest.is_empty() {
            let missing = assembler.missing();
            // The first byte of a piece says how large it is, so that the
            // seams are everywhere.
            let piece = missing.len().min(rest.len()).min(1 + usize::from(rest[0]));
            missing[..piece].copy_from_slice(&rest[..piece]);
            rest = &rest[piece..];
            match assembler.advance(piece) {
                Ok(None) => {}
                Ok(Some((kind, payload))) => {
                    frames += 1;
                    if kind == PipeFrameKind::Greeting {
                        let _ = Greeting::parse(&payload);
                    }
                }
                Err(_) => break,
            }
        }
        frames
    }

    /// A greeting, an init frame and a user frame.
    pub fn valid() -> Vec<u8> {
        let greeting = Greeting {
            version: super::frame::PIPE_VERSION,
            index: 1,
            count: 4,
            max_frame: 1000,
            queue_bytes: 1 << 20,
            grace_ms: 500,
        };
        let mut bytes = greeting.frame_before_init(3);
        bytes.extend_from_slice(b"abc");
        bytes.extend_from_slice(&header(PipeFrameKind::User, 5));
        bytes.extend_from_slice(b"frame");
        bytes
    }
}
