//! The handshake over a blocking socket.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use super::nonce;
use crate::access::Key;
use crate::wire::hello::{Client, Next, Protocols, Role};

/// Connects, and proves both ends to each other. Each step of it takes at most
/// `patience`.
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
    socket.set_nodelay(true)?;
    socket.set_read_timeout(Some(patience))?;
    socket.set_write_timeout(Some(patience))?;
    let (mut client, hello) = Client::new(key.clone(), role, Protocols::OURS, nonce()?);
    socket.write_all(&hello)?;
    let mut wanted = crate::wire::hello::HELLO_BYTES;
    loop {
        let mut bytes = vec![0; wanted];
        if let Err(error) = socket.read_exact(&mut bytes) {
            return Err(match error.kind() {
                io::ErrorKind::UnexpectedEof => invalid(client.hung_up()),
                _ => error,
            });
        }
        let step = client.feed(&mut &bytes[..]);
        socket.write_all(&step.send)?;
        match step.next {
            Next::Read(more) => wanted = more,
            Next::Done(_) => return Ok(socket),
            Next::Close(error) => return Err(invalid(error)),
        }
    }
}

fn invalid(error: crate::wire::hello::HelloError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}
