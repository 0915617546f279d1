//! A connection between two hosts, each end of which is a process that passes on
//! what it is given.

use std::error::Error;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use weightsync_conformance::hosts::Hosts;

/// Longer than anything takes on a busy machine, a retransmission after a cut
/// included.
pub(crate) use weightsync_conformance::scale::longest;

/// The arguments that make this binary an end.
pub(crate) const LISTEN: &str = "role:listen";
pub(crate) const CONNECT: &str = "role:connect";

/// This binary.
pub(crate) fn program() -> io::Result<PathBuf> {
    std::env::current_exe()
}

/// What an end that listens does: says where, and takes one connection.
pub(crate) fn listen() -> Result<(), Box<dyn Error>> {
    let listener = TcpListener::bind("0.0.0.0:0")?;
    println!("{}", listener.local_addr()?.port());
    let (stream, _) = listener.accept()?;
    pass_on(stream)
}

/// What an end that connects does.
pub(crate) fn connect(to: &str) -> Result<(), Box<dyn Error>> {
    pass_on(TcpStream::connect(to)?)
}

/// Input to the connection, and the connection to output, until either ends.
fn pass_on(stream: TcpStream) -> Result<(), Box<dyn Error>> {
    let mut incoming = stream.try_clone()?;
    thread::spawn(move || {
        if let Err(error) = copy(&mut incoming, &mut io::stdout()) {
            eprintln!("the connection has failed: {error}");
        }
        std::process::exit(4);
    });
    Ok(copy(&mut io::stdin(), &mut &stream)?)
}

/// As [`io::copy`], but nothing waits in between.
fn copy(from: &mut impl Read, to: &mut impl Write) -> io::Result<()> {
    let mut bytes = [0; 1 << 16];
    loop {
        match from.read(&mut bytes)? {
            0 => return Ok(()),
            read => to.write_all(&bytes[..read])?,
        }
        to.flush()?;
    }
}

/// Two ends of one connection.
pub(crate) struct Pair {
    pub(crate) near: End,
    pub(crate) far: End,
}

impl Pair {
    pub(crate) fn new(hosts: &Hosts, near: usize, far: usize) -> Result<Self, Box<dyn Error>> {
        let to = hosts.address(far).to_string();
        let far = End::listen(&mut hosts.command(far, program()?))?;
        let near = End::connect(&mut hosts.command(near, program()?), &to, far.port)?;
        Ok(Self { near, far })
    }
}

/// One end. Dropped, its process is killed.
pub(crate) struct End {
    child: Child,
    output: Words,
    /// Where it listens, or listened.
    pub(crate) port: u16,
}

impl End {
    pub(crate) fn listen(command: &mut Command) -> Result<Self, Box<dyn Error>> {
        let mut end = Self::start(command.arg(LISTEN), 0)?;
        end.port = end.output.line(longest())?.parse()?;
        Ok(end)
    }

    pub(crate) fn connect(
        command: &mut Command,
        address: &str,
        port: u16,
    ) -> Result<Self, Box<dyn Error>> {
        Self::start(command.args([CONNECT, &format!("{address}:{port}")]), port)
    }

    fn start(command: &mut Command, port: u16) -> Result<Self, Box<dyn Error>> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let output = Words::of(&mut child);
        Ok(Self {
            child,
            output,
            port,
        })
    }

    /// Hands it bytes for the other end.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let input = self.child.stdin.as_mut().expect("it was asked for");
        input.write_all(bytes)?;
        input.flush()
    }

    /// So many bytes from the other end, or those that came in time.
    pub(crate) fn read(&mut self, count: usize, within: Duration) -> io::Result<Vec<u8>> {
        self.output.read(count, Instant::now() + within)
    }

    /// Whether its connection is still one.
    pub(crate) fn runs(&mut self) -> io::Result<bool> {
        Ok(self.child.try_wait()?.is_none())
    }
}

impl Drop for End {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What a process says.
pub(crate) struct Words(ChildStdout);

impl Words {
    pub(crate) fn of(child: &mut Child) -> Self {
        Self(child.stdout.take().expect("it was asked for"))
    }

    /// The next line, without its end.
    pub(crate) fn line(&mut self, within: Duration) -> Result<String, Box<dyn Error>> {
        let until = Instant::now() + within;
        let mut line = Vec::new();
        loop {
            match self.read(1, until)?.as_slice() {
                [b'\n'] => return Ok(String::from_utf8(line)?),
                [byte] => line.push(*byte),
                _ => return Err(format!("no line, but {:?}", line.escape_ascii()).into()),
            }
        }
    }

    /// So many bytes, or those that came before the end or in time.
    fn read(&mut self, count: usize, until: Instant) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; count];
        let mut read = 0;
        while read < count && self.wait(until)? {
            match self.0.read(&mut bytes[read..])? {
                0 => break,
                more => read += more,
            }
        }
        bytes.truncate(read);
        Ok(bytes)
    }

    /// Whether there is something to read, or the end, in time.
    fn wait(&self, until: Instant) -> io::Result<bool> {
        let left = until.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).map_err(io::Error::other)?;
        let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
        Ok(rustix::event::poll(&mut fds, Some(&timeout))? > 0)
    }
}
