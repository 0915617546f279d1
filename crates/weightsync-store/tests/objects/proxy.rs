//! A proxy in front of the server that spoils one request.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

/// What becomes of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The connection is closed before the server sees the request.
    Unsent,
    /// The server does what it is asked, and its answer gets lost.
    Unanswered,
    /// The server does what it is asked, and answers 500.
    DoneAnd500,
    /// The server does not see it; the answer is 500.
    Error,
    /// The server does not see it; the answer is to slow down.
    SlowDown,
    /// The server does not see it; the answer is 403, which no client tries again.
    Denied,
    /// The server does what it is asked, and the answer comes after the client's time limit.
    TooSlow,
}

/// Which request is spoiled, and how many have come.
#[derive(Debug, Default)]
struct Plan {
    /// Requests since it was armed.
    count: u64,
    fault: Option<(u64, Fault)>,
    /// What was spoiled.
    spoiled: Option<String>,
    /// A header that so many requests lose.
    stripped: Option<(&'static str, u64)>,
    /// What happens before a request is passed on.
    meanwhile: Option<(u64, Event)>,
    log: Vec<String>,
}

/// What others do.
struct Event(Box<dyn FnOnce() + Send>);

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an event")
    }
}

/// A proxy, until this process ends.
pub struct Proxy(Arc<Mutex<Plan>>);

impl Proxy {
    /// Passes what comes to the listener on to the server.
    pub fn start(listener: TcpListener, server: SocketAddr) -> Self {
        let plan = Arc::new(Mutex::new(Plan::default()));
        let theirs = plan.clone();
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let plan = theirs.clone();
                // A client that goes away is no failure.
                thread::spawn(move || drop(pass(client, server, &plan)));
            }
        });
        Self(plan)
    }

    /// Spoils the `n`th request from now on; none, if there are fewer.
    pub fn arm(&self, n: u64, fault: Fault) {
        let mut plan = lock(&self.0);
        *plan = Plan {
            fault: Some((n, fault)),
            ..Plan::default()
        };
    }

    /// Has something happen before the `n`th request from now on is passed on.
    pub fn meanwhile(&self, n: u64, event: impl FnOnce() + Send + 'static) {
        *lock(&self.0) = Plan {
            meanwhile: Some((n, Event(Box::new(event)))),
            ..Plan::default()
        };
    }

    /// Spoils nothing more. The request that was spoiled, if there was one.
    pub fn disarm(&self) -> Option<String> {
        let mut plan = lock(&self.0);
        plan.fault = None;
        plan.spoiled.take()
    }

    /// Takes this header, in lower case, out of the next `count` requests that have it.
    pub fn strip(&self, header: &'static str, count: u64) {
        lock(&self.0).stripped = Some((header, count));
    }

    /// The requests since it was armed.
    pub fn requests(&self) -> Vec<String> {
        lock(&self.0).log.clone()
    }
}

fn lock(plan: &Mutex<Plan>) -> std::sync::MutexGuard<'_, Plan> {
    plan.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Serves the one request of a connection.
fn pass(mut client: TcpStream, server: SocketAddr, plan: &Mutex<Plan>) -> io::Result<()> {
    let Some((mut head, body)) = request(&mut client)? else {
        return Ok(());
    };
    let line = head.lines().next().unwrap_or_default().to_owned();
    let (fault, event) = {
        let mut plan = lock(plan);
        if let Some((header, left @ 1..)) = &mut plan.stripped {
            let mut lines: Vec<_> = head.split("\r\n").collect();
            let before = lines.len();
            lines.retain(|line| !line.to_ascii_lowercase().starts_with(&format!("{header}:")));
            *left -= u64::from(lines.len() < before);
            head = lines.join("\r\n");
        }
        plan.count += 1;
        plan.log.push(line.clone());
        let number = plan.count;
        let fault = plan.fault.filter(|(at, _)| *at == number);
        if fault.is_some() {
            plan.spoiled = Some(line);
        }
        let event = plan.meanwhile.take_if(|(at, _)| *at == number);
        (fault.map(|(_, fault)| fault), event)
    };
    // Its own requests pass meanwhile.
    if let Some((_, Event(event))) = event {
        event();
    }
    let reply = |client: &mut TcpStream, status: &str, code: &str| {
        let body = format!("<Error><Code>{code}</Code><Message>spoiled</Message></Error>");
        let len = body.len();
        let text = format!(
            "HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: {len}\r\n\r\n{body}"
        );
        client.write_all(text.as_bytes())
    };
    match fault {
        Some(Fault::Unsent) => return Ok(()),
        Some(Fault::Error) => {
            return reply(&mut client, "500 Internal Server Error", "InternalError");
        }
        Some(Fault::SlowDown) => {
            return reply(&mut client, "503 Slow Down", "SlowDown");
        }
        Some(Fault::Denied) => return reply(&mut client, "403 Forbidden", "AccessDenied"),
        _ => {}
    }
    let mut upstream = TcpStream::connect(server)?;
    upstream.write_all(head.as_bytes())?;
    upstream.write_all(&body)?;
    let mut answer = Vec::new();
    upstream.read_to_end(&mut answer)?;
    match fault {
        Some(Fault::Unanswered) => Ok(()),
        Some(Fault::DoneAnd500) => reply(&mut client, "500 Internal Server Error", "InternalError"),
        Some(Fault::TooSlow) => {
            // Until the client has had enough.
            client.read_to_end(&mut Vec::new()).map(drop)
        }
        _ => {
            client.write_all(&answer)?;
            client.shutdown(Shutdown::Write)
        }
    }
}

/// The head of a request and its body; `None` for a connection that was opened for nothing.
fn request(client: &mut TcpStream) -> io::Result<Option<(String, Vec<u8>)>> {
    let mut bytes = Vec::new();
    let mut piece = [0; 64 << 10];
    let end = loop {
        if let Some(at) = bytes.windows(4).position(|four| four == b"\r\n\r\n") {
            break at + 4;
        }
        match client.read(&mut piece)? {
            0 => return Ok(None),
            read => bytes.extend_from_slice(&piece[..read]),
        }
    };
    let mut body = bytes.split_off(end);
    let head = String::from_utf8(bytes).map_err(io::Error::other)?;
    let lower = head.to_ascii_lowercase();
    let length = lower.split_once("\r\ncontent-length:");
    let length = length.and_then(|(_, rest)| rest.split("\r\n").next()?.trim().parse().ok());
    let length: usize = length.unwrap_or(0);
    while body.len() < length {
        match client.read(&mut piece)? {
            0 => return Ok(None),
            read => body.extend_from_slice(&piece[..read]),
        }
    }
    // The server closes the connection after its answer, and so does this proxy.
    let (line, headers) = head.split_once("\r\n").unwrap_or((&head, ""));
    Ok(Some((
        format!("{line}\r\nconnection: close\r\n{headers}"),
        body,
    )))
}
