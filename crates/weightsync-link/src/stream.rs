//! A connection, encrypted or not.
//!
//! **Guarantee.** What is read and written is the same either way, and so is what another thread can
//! do with [`Stream::socket`]: shut it down.

use std::io::{self, IoSlice, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd;
use std::pin::Pin;
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use rustix::net::sockopt;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use weightsync_mem::threads::LockExt as _;

use crate::tls::CertificateRole;
use crate::tls::session::{self, AT_ONCE, IncomingBytes, OF_MESSAGES, TlsSession};

/// Bytes that a call writes at most. It returns when all of them are with the system, so that a
/// caller that looks at the time between calls does not look seldom.
const WRITTEN: usize = 64 << 10;

/// A host that answers nothing for this long is gone, where a socket is kept alive.
const OUT_OF_REACH: Duration = Duration::from_secs(12);

/// A connection whose calls block. One thread may read while another writes.
#[derive(Debug)]
pub struct Stream {
    socket: TcpStream,
    tls: Option<Box<TlsStream>>,
}

/// Locks are taken in this order.
#[derive(Debug)]
struct TlsStream {
    /// Of the thread that reads.
    incoming: Mutex<IncomingBytes>,
    /// Of the thread that writes: what it has taken out of the session.
    sending: Mutex<Vec<u8>>,
    /// Held for no wait.
    session: Mutex<TlsSession>,
}

impl Stream {
    /// One that is not encrypted.
    pub fn plain(socket: TcpStream) -> Self {
        Self { socket, tls: None }
    }

    /// One whose handshake is done.
    pub(crate) fn encrypted(
        socket: TcpStream,
        session: TlsSession,
        incoming: IncomingBytes,
    ) -> Self {
        let tls = TlsStream {
            incoming: Mutex::new(incoming),
            sending: Mutex::default(),
            session: Mutex::new(session),
        };
        Self {
            socket,
            tls: Some(Box::new(tls)),
        }
    }

    /// The socket below, for its settings and its end: bytes must not be read or written there.
    pub fn socket(&self) -> &TcpStream {
        &self.socket
    }

    /// Ends the connection. To end the writing side tells the peer that nothing is missing.
    ///
    /// # Errors
    ///
    /// Those of the socket.
    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        if let (Some(tls), Shutdown::Write) = (&self.tls, how) {
            // First this lock, so that the end follows whatever other threads are sending.
            let mut sending = tls.sending.locked();
            tls.session.locked().close();
            let sent = tls.send(&self.socket, &mut sending);
            return self.socket.shutdown(how).and(sent);
        }
        self.socket.shutdown(how)
    }

    /// The same connection, whose calls do not block.
    ///
    /// # Errors
    ///
    /// Those of the socket.
    pub fn into_async(self) -> io::Result<AsyncStream> {
        self.socket.set_nonblocking(true)?;
        let socket = tokio::net::TcpStream::from_std(self.socket)?;
        Ok(match self.tls {
            None => AsyncStream::plain(socket),
            Some(tls) => AsyncStream::encrypted(
                socket,
                tls.session
                    .into_inner()
                    .unwrap_or_else(PoisonError::into_inner),
                tls.incoming
                    .into_inner()
                    .unwrap_or_else(PoisonError::into_inner),
            ),
        })
    }
}

impl TlsStream {
    /// Sends what the session has to send. The caller holds `sending` throughout, so that everything
    /// goes out in the order in which it was encrypted.
    fn send(&self, mut socket: &TcpStream, sending: &mut Vec<u8>) -> io::Result<()> {
        if !sending.is_empty() {
            // An earlier call failed midway: what comes now would not be understood.
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        // Taken out of the session, whose lock must not be held while the socket blocks.
        std::mem::swap(sending, self.session.locked().outgoing());
        socket.write_all(sending)?;
        sending.clear();
        Ok(())
    }
}

impl Read for &Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let Some(tls) = &self.tls else {
            return (&self.socket).read(buffer);
        };
        if buffer.is_empty() {
            return Ok(0);
        }
        let mut incoming = tls.incoming.locked();
        loop {
            let mut session = tls.session.locked();
            let read = session.read(buffer, &mut incoming);
            let has_reply = !session.outgoing().is_empty();
            drop(session);
            // A thread that writes sends the reply with what it has to send.
            if has_reply && let Ok(mut sending) = tls.sending.try_lock() {
                tls.send(&self.socket, &mut sending)?;
            }
            if let Some(count) = read.map_err(session::broken)? {
                return Ok(count);
            }
            // Without the session's lock, so that another thread can write meanwhile.
            match (&self.socket).read(incoming.room(AT_ONCE)) {
                // As of a plain one: frames say where they end.
                Ok(0) => return Ok(0),
                Ok(count) => incoming.note_received(count),
                Err(error) => return Err(error),
            }
        }
    }
}

impl Write for &Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        let Some(tls) = &self.tls else {
            return (&self.socket).write_vectored(slices);
        };
        // Held until all is sent, so that bytes leave in the order in which they were encrypted.
        let mut sending = tls.sending.locked();
        let mut session = tls.session.locked();
        let mut room = WRITTEN;
        for slice in slices {
            let now = &slice[..slice.len().min(room)];
            if !now.is_empty() {
                session.write(now)?;
                room -= now.len();
            }
        }
        drop(session);
        tls.send(&self.socket, &mut sending)?;
        Ok(WRITTEN - room)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Read for Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        (&*self).read(buffer)
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        (&*self).write(bytes)
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        (&*self).write_vectored(slices)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A connection whose calls do not block, encrypted or not.
#[derive(Debug)]
pub struct AsyncStream {
    socket: tokio::net::TcpStream,
    tls: Option<Box<AsyncTls>>,
}

#[derive(Debug)]
struct AsyncTls {
    session: TlsSession,
    incoming: IncomingBytes,
    /// How much of what the session has to send was sent.
    sent: usize,
    /// Bytes of the caller that were encrypted, and that the call has not returned for.
    accepted: usize,
}

impl AsyncStream {
    /// One that is not encrypted.
    pub fn plain(socket: tokio::net::TcpStream) -> Self {
        Self { socket, tls: None }
    }

    /// One whose handshake is done.
    pub(crate) fn encrypted(
        socket: tokio::net::TcpStream,
        session: TlsSession,
        incoming: IncomingBytes,
    ) -> Self {
        let tls = AsyncTls {
            session,
            incoming,
            sent: 0,
            accepted: 0,
        };
        Self {
            socket,
            tls: Some(Box::new(tls)),
        }
    }

    /// Whether it is encrypted.
    pub fn is_encrypted(&self) -> bool {
        self.tls.is_some()
    }

    /// What the peer is, by its certificate. `None` without one, and where nothing is encrypted.
    pub fn part(&self) -> Option<CertificateRole> {
        self.tls.as_ref()?.session.part()
    }

    /// The socket below, for its settings.
    pub fn socket(&self) -> &tokio::net::TcpStream {
        &self.socket
    }

    /// The same connection, whose calls block.
    ///
    /// # Errors
    ///
    /// Those of the socket, and that of a connection whose last write did not end.
    pub fn into_blocking(mut self) -> io::Result<Stream> {
        if let Some(tls) = &mut self.tls {
            if tls.accepted != 0 {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            // These bytes went out already.
            tls.session.outgoing().drain(..tls.sent);
            tls.incoming.shrink();
        }

        let socket = self.socket.into_std()?;
        socket.set_nonblocking(false)?;
        Ok(match self.tls {
            None => Stream::plain(socket),
            Some(tls) => Stream::encrypted(socket, tls.session, tls.incoming),
        })
    }
}

impl AsyncTls {
    /// Sends as much of a reply as there is room for, for a reader. It leaves the wakers alone: that
    /// of a socket's writing side is the writer's.
    fn try_send(&mut self, socket: &tokio::net::TcpStream) -> io::Result<()> {
        let outgoing = self.session.outgoing();
        while self.sent < outgoing.len() {
            match socket.try_write(&outgoing[self.sent..]) {
                Ok(count) => self.sent += count,
                // The next write sends it.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        outgoing.clear();
        self.sent = 0;
        Ok(())
    }

    /// Sends what the session has to send.
    fn poll_send(
        &mut self,
        socket: &mut tokio::net::TcpStream,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<()>> {
        let outgoing = self.session.outgoing();
        while self.sent < outgoing.len() {
            let rest = &outgoing[self.sent..];
            match ready!(Pin::new(&mut *socket).poll_write(context, rest))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                count => self.sent += count,
            }
        }
        outgoing.clear();
        self.sent = 0;
        Poll::Ready(Ok(()))
    }
}

impl AsyncRead for AsyncStream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let Self { socket, tls } = self.get_mut();
        let Some(tls) = tls else {
            return Pin::new(socket).poll_read(context, buffer);
        };
        loop {
            let read = tls
                .session
                .read(buffer.initialize_unfilled(), &mut tls.incoming);
            // Before the error is looked at: an alert tells the peer what was wrong.
            tls.try_send(socket)?;
            if let Some(count) = read.map_err(session::broken)? {
                buffer.advance(count);
                return Poll::Ready(Ok(()));
            }
            let mut room = ReadBuf::new(tls.incoming.room(OF_MESSAGES));
            ready!(Pin::new(&mut *socket).poll_read(context, &mut room))?;
            match room.filled().len() {
                // As of a plain one: frames say where they end.
                0 => return Poll::Ready(Ok(())),
                count => tls.incoming.note_received(count),
            }
        }
    }
}

impl AsyncWrite for AsyncStream {
    /// Returns once the bytes are with the system: a caller need not flush.
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let Self { socket, tls } = self.get_mut();
        let Some(tls) = tls else {
            return Pin::new(socket).poll_write(context, bytes);
        };
        // A call that was pending has encrypted its bytes already. To do so again would send them
        // twice.
        if tls.accepted == 0 {
            let now = &bytes[..bytes.len().min(OF_MESSAGES)];
            tls.session.write(now)?;
            tls.accepted = now.len();
        }
        ready!(tls.poll_send(socket, context))?;
        Poll::Ready(Ok(std::mem::take(&mut tls.accepted)))
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Self { socket, tls } = self.get_mut();
        match tls {
            Some(tls) => tls.poll_send(socket, context),
            None => Pin::new(socket).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Self { socket, tls } = self.get_mut();
        if let Some(tls) = tls {
            tls.session.close();
            ready!(tls.poll_send(socket, context))?;
        }
        Pin::new(socket).poll_shutdown(context)
    }
}

/// Enables TCP keep-alive: the system notices when the host of the other end is gone.
///
/// # Errors
///
/// Those of the socket.
pub fn keep_alive(socket: &impl AsFd) -> io::Result<()> {
    // Six seconds of silence, then three questions, two seconds apart.
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, OUT_OF_REACH / 2)?;
    sockopt::set_tcp_keepintvl(socket, OUT_OF_REACH / 6)?;
    Ok(sockopt::set_tcp_keepcnt(socket, 3)?)
}
