//! Frames through a socket, never blocking: what is possible now is done, the rest is for later.

use std::io::IoSlice;
use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendFlags, SocketType, recv, sendmsg, socketpair,
};

use super::error::{PipeFault, WorkerError};
use super::frame::{FrameAssembler, PipeFrameKind};
use super::system;

/// Two connected ends; both close on exec.
pub(super) fn pair() -> Result<(OwnedFd, OwnedFd), WorkerError> {
    socketpair(
        AddressFamily::UNIX,
        SocketType::STREAM,
        system::CLOSES_ON_EXEC,
        None,
    )
    .map_err(WorkerError::os("making a socket pair"))
}

/// What an attempt to read brought.
#[derive(Debug)]
pub(super) enum PipeRead {
    /// A whole frame.
    Frame(PipeFrameKind, Vec<u8>),
    /// Nothing more for now.
    Pending,
    /// The other end is closed and everything it sent has been read.
    Disconnected,
}

/// Reads until `assembler` has a frame, or nothing more can be read.
pub(super) fn read(
    socket: impl AsFd,
    assembler: &mut FrameAssembler,
) -> Result<PipeRead, PipeFault> {
    loop {
        match recv(&socket, assembler.missing(), RecvFlags::DONTWAIT) {
            // The buffer is never empty, so no bytes mean the end of the stream.
            Ok((_, 0)) => return Ok(PipeRead::Disconnected),
            Ok((_, read)) => {
                if let Some((kind, payload)) = assembler.advance(read)? {
                    return Ok(PipeRead::Frame(kind, payload));
                }
            }
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(PipeRead::Pending),
            // ECONNRESET: closed with unread data of ours. Nothing else can happen to a socket
            // pair that would leave it usable.
            Err(_) => return Ok(PipeRead::Disconnected),
        }
    }
}

/// The other end of the pipe is closed.
#[derive(Debug)]
pub(super) struct Disconnected;

/// Writes what fits of `first` followed by `second`, leaving out their first `done` bytes, and
/// returns how many bytes are now done.
pub(super) fn write(
    socket: impl AsFd,
    first: &[u8],
    second: &[u8],
    mut done: usize,
) -> Result<usize, Disconnected> {
    while done < first.len() + second.len() {
        let parts = [
            IoSlice::new(&first[done.min(first.len())..]),
            IoSlice::new(&second[done.saturating_sub(first.len())..]),
        ];
        // NO_SIGNAL: a closed pipe is an error here, not a SIGPIPE.
        let flags = SendFlags::DONTWAIT | system::NO_SIGNAL;
        match sendmsg(&socket, &parts, &mut SendAncillaryBuffer::default(), flags) {
            Ok(written) => done += written,
            Err(Errno::INTR) => {}
            // ENOBUFS and ENOMEM pass, as a full socket does.
            Err(Errno::AGAIN | Errno::NOBUFS | Errno::NOMEM) => break,
            Err(_) => return Err(Disconnected),
        }
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::worker::frame::{HEADER, header};

    #[test]
    fn a_frame_larger_than_the_socket_arrives_in_turns() {
        let (ours, theirs) = pair().expect("a socket pair");
        let payload: Vec<u8> = (0..1_000_000_u32).map(|i| (i % 251) as u8).collect();
        let header = header(PipeFrameKind::User, payload.len() as u32);
        let mut assembler = FrameAssembler::new(payload.len());
        let (mut done, mut turns) = (0, 0);
        let frame = loop {
            done = write(&ours, &header, &payload, done).expect("the other end is open");
            turns += 1;
            match read(&theirs, &mut assembler).expect("no fault") {
                PipeRead::Frame(kind, frame) => break (kind, frame),
                PipeRead::Pending => assert!(done < HEADER + payload.len()),
                PipeRead::Disconnected => panic!("the other end is open"),
            }
        };
        assert!(turns > 1, "the socket took everything at once");
        assert_eq!(frame, (PipeFrameKind::User, payload));
    }

    #[test]
    fn pipe_close_arrives_after_all_frames() {
        let (ours, theirs) = pair().expect("a socket pair");
        write(&ours, &header(PipeFrameKind::User, 1), &[5], 0).expect("the other end is open");
        drop(ours);
        let mut assembler = FrameAssembler::new(1);
        assert!(
            matches!(read(&theirs, &mut assembler), Ok(PipeRead::Frame(PipeFrameKind::User, frame)) if frame == [5])
        );
        assert!(matches!(
            read(&theirs, &mut assembler),
            Ok(PipeRead::Disconnected)
        ));
        assert!(write(&theirs, &header(PipeFrameKind::User, 0), &[], 0).is_err());
    }
}
