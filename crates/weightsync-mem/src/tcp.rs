//! What the system knows of the host at the other end of a TCP connection.
//!
//! **Guarantee.** The other host's system answers packets itself, however busy its processes are, or
//! stopped. So what is read here tells a host that is gone from a process that does not get to run.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

/// How the other host has answered lately.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostAnswers {
    /// Packets in a row that were sent again, or that asked for an answer, and got none.
    pub unanswered: u32,
    /// The time since the last answer.
    pub since: Duration,
}

/// How the host at the other end of this connection answers; `None` where the system does not say.
pub fn host_answers(socket: impl AsFd) -> Option<HostAnswers> {
    let mut info = MaybeUninit::<libc::tcp_info>::zeroed();
    let mut bytes = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `bytes` bytes to `info`, which has so many, and the length to
    // `bytes`. Both outlive the call, and so does the descriptor, which is borrowed.
    let done = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &raw mut bytes,
        )
    };
    // An older kernel writes fewer fields, and a socket of another kind none. What it did not write
    // would read as "all is well".
    if done != 0 || (bytes as usize) < size_of::<libc::tcp_info>() {
        return None;
    }
    // SAFETY: it consists of numbers, all of which were zeroed, and then written by the kernel.
    let info = unsafe { info.assume_init() };
    Some(HostAnswers {
        unanswered: u32::from(info.tcpi_retransmits) + u32::from(info.tcpi_probes),
        since: Duration::from_millis(info.tcpi_last_ack_recv.into()),
    })
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn host_answers_though_its_process_reads_nothing() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (_other, _) = listener.accept().unwrap();
        for _ in 0..100 {
            socket.write_all(b"a sign of life").unwrap();
        }
        let answers = host_answers(&socket).unwrap();
        assert_eq!(answers.unanswered, 0);
        // The clock of the kernel's ticks.
        assert!(answers.since < Duration::from_secs(60), "{answers:?}");
    }

    #[test]
    fn other_descriptors_have_no_answers() {
        assert_eq!(host_answers(std::io::stderr()), None);
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        assert_eq!(host_answers(&socket), None);
    }
}
