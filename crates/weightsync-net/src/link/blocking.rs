//! The handshake over a blocking socket.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use super::{HANDSHAKE, nonce};
use crate::access::Key;
use crate::wire::hello::{Client, Next, Protocols, Role};

/// Connects, and proves both ends to each other. Each step of it takes at most
/// `patience`, and all of the proving as long as a server gives it.
///
/// # Errors
///
/// Of the connection; a [`HelloError`](crate::wire::hello::HelloError) inside an
/// [`io::ErrorKind::InvalidData`] one.
pub(crate) fn dial(
    address: SocketAddr,
    key: &Key,
    role: Role,
    patience: Duration,
) -> io::Result<TcpStream> {
    let mut socket = TcpStream::connect_timeout(&address, patience)?;
    prove(&mut socket, key, role, patience)?;
    Ok(socket)
}

/// The same over a connection that there is.
pub(crate) fn prove(
    socket: &mut TcpStream,
    key: &Key,
    role: Role,
    patience: Duration,
) -> io::Result<()> {
    let until = Instant::now() + HANDSHAKE.max(patience);
    socket.set_nodelay(true)?;
    socket.set_write_timeout(Some(patience))?;
    let (mut client, hello) = Client::new(key.clone(), role, Protocols::OURS, nonce()?);
    socket.write_all(&hello)?;
    let mut wanted = crate::wire::hello::HELLO_BYTES;
    loop {
        let mut bytes = vec![0; wanted];
        if let Err(error) = read_until(socket, &mut bytes, patience, until) {
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
                socket.set_read_timeout(Some(patience))?;
                return Ok(());
            }
            Next::Close(error) => return Err(invalid(error)),
        }
    }
}

/// Reads all of it: something each `patience`, and the rest by then.
fn read_until(
    socket: &mut TcpStream,
    mut bytes: &mut [u8],
    patience: Duration,
    until: Instant,
) -> io::Result<()> {
    while !bytes.is_empty() {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        socket.set_read_timeout(Some(patience.min(left)))?;
        match socket.read(bytes) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => bytes = &mut bytes[read..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn invalid(error: crate::wire::hello::HelloError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn who_answers_a_byte_at_a_time_is_not_waited_for() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let trickle = std::thread::spawn(move || {
            let (mut socket, _) = listener.accept().unwrap();
            // Until nobody reads it any more.
            while socket.write_all(b"w").is_ok() {
                std::thread::sleep(Duration::from_millis(150));
            }
        });
        let begun = Instant::now();
        let key = Key::new(&[1; 16]);
        dial(address, &key, Role::Bulk, Duration::from_millis(500)).unwrap_err();
        let took = begun.elapsed();
        assert!(took < 2 * HANDSHAKE, "{took:?}");
        trickle.join().unwrap();
    }
}
