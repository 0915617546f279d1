//! The handshake over a blocking socket.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use crate::hello::{ClientHandshake, LinkRole, Next, Protocols};
use crate::link::{HANDSHAKE, nonce};
use crate::secure::Credentials;
use crate::stream::{Stream, keep_alive};
use crate::tls::TlsPeer;

/// The longest timeout of a handshake: a longer one of the caller is for what follows.
const LONGEST_HANDSHAKE: Duration = Duration::from_secs(3600);

/// Connects and authenticates both ends. Each step takes at most `timeout`; without one, connecting
/// takes as long as the system lets it. The handshake takes at most `timeout`, but 2 seconds are
/// always allowed; without a timeout it takes at most 2 seconds.
///
/// # Errors
///
/// Those of the connection. A [`HelloError`](crate::hello::HelloError) comes as an
/// [`io::ErrorKind::InvalidData`] error.
pub fn dial(
    address: SocketAddr,
    credentials: &Credentials,
    peer: TlsPeer<'_>,
    role: LinkRole,
    timeout: Option<Duration>,
) -> io::Result<Stream> {
    let socket = match timeout {
        Some(timeout) => TcpStream::connect_timeout(&address, timeout)?,
        None => TcpStream::connect(address)?,
    };
    // A wait without end still ends when the other host is gone.
    keep_alive(&socket)?;
    prove(socket, credentials, peer, role, timeout)
}

/// The same over an open connection.
///
/// # Errors
///
/// As [`dial`].
pub fn prove(
    socket: TcpStream,
    credentials: &Credentials,
    peer: TlsPeer<'_>,
    role: LinkRole,
    timeout: Option<Duration>,
) -> io::Result<Stream> {
    let until = Instant::now()
        + timeout
            .unwrap_or(HANDSHAKE)
            .clamp(HANDSHAKE, LONGEST_HANDSHAKE);
    socket.set_nodelay(true)?;
    socket.set_write_timeout(timeout)?;
    let address = socket.peer_addr()?;
    let mut socket = credentials.dialled_blocking(socket, address, peer, until)?;
    let key = credentials.key.clone();
    let (mut client, hello) = ClientHandshake::new(key, role, Protocols::OURS, nonce()?);
    socket.write_all(&hello)?;
    let mut wanted = crate::hello::HELLO_BYTES;
    loop {
        let mut bytes = vec![0; wanted];
        if let Err(error) = read_until(&mut socket, &mut bytes, timeout, until) {
            return Err(match error.kind() {
                io::ErrorKind::UnexpectedEof => invalid(client.hung_up()),
                _ => error,
            });
        }
        let step = client.feed(&mut &bytes[..]);
        socket.write_all(&step.send)?;
        match step.next {
            Next::Read(more) => wanted = more,
            Next::Done(_) => {
                // The handshake left a shorter timeout.
                socket.socket().set_read_timeout(timeout)?;
                return Ok(socket);
            }
            Next::Close(error) => return Err(invalid(error)),
        }
    }
}

/// Fills the buffer. Each read takes at most `timeout`, and all of them end by the deadline.
fn read_until(
    socket: &mut Stream,
    mut bytes: &mut [u8],
    timeout: Option<Duration>,
    until: Instant,
) -> io::Result<()> {
    while !bytes.is_empty() {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let limit = timeout.map_or(left, |timeout| timeout.min(left));
        socket.socket().set_read_timeout(Some(limit))?;
        match socket.read(bytes) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => bytes = &mut bytes[read..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn invalid(error: crate::hello::HelloError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn handshake_ends_by_its_limit_at_a_slow_server() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let trickle = std::thread::spawn(move || {
            let (mut socket, _) = listener.accept().unwrap();
            // Writes until the other end closes.
            while socket.write_all(b"w").is_ok() {
                std::thread::sleep(Duration::from_millis(150));
            }
        });
        let begun = Instant::now();
        let credentials = Credentials::plain(&[1; 16]);
        let (peer, limit) = (
            TlsPeer::Sender(address.ip()),
            Some(Duration::from_millis(500)),
        );
        dial(address, &credentials, peer, LinkRole::Bulk, limit).unwrap_err();
        let took = begun.elapsed();
        assert!(took < 2 * HANDSHAKE, "{took:?}");
        trickle.join().unwrap();
    }
}
