//! A network between a sender and its workers that can be cut, and that damages what
//! it is told to.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

/// Changes of the sender's answer.
#[derive(Clone, Copy, Debug)]
pub enum Harm {
    /// Hangs up after so many bytes of it.
    Cut(u64),
    /// Changes a bit of this byte of it.
    Flip(u64),
}

/// Replacements for passing a request on.
#[derive(Clone, Copy, Debug)]
pub enum Answer {
    /// The connection ends.
    HangUp,
    /// The proxy answers it itself: the status line, and the headers that say of how
    /// long a body; then it hangs up.
    Says(&'static str),
    /// A request for a part is passed on without its `Range`.
    All,
}

/// Passes on connections to a sender.
pub struct Proxy {
    pub addr: SocketAddr,
    state: Arc<State>,
    thread: Option<JoinHandle<()>>,
}

struct State {
    to: Mutex<Option<SocketAddr>>,
    /// For the next answers that have so many bytes, each once.
    harms: Mutex<Vec<Harm>>,
    /// For the next requests that begin so, each once.
    answers: Mutex<Vec<(&'static str, Answer)>>,
    open: Mutex<Vec<TcpStream>>,
    harmed: AtomicU64,
    answered: AtomicU64,
    over: AtomicBool,
}

impl Proxy {
    pub fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let state = Arc::new(State {
            to: Mutex::default(),
            harms: Mutex::default(),
            open: Mutex::default(),
            harmed: AtomicU64::new(0),
            answered: AtomicU64::new(0),
            answers: Mutex::default(),
            over: AtomicBool::new(false),
        });
        let addr = listener.local_addr().expect("an address");
        let theirs = state.clone();
        let thread = thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if theirs.over.load(Ordering::SeqCst) {
                    return;
                }
                let to = *theirs.to.lock().expect("no panic");
                let Some(sender) = to.and_then(|to| TcpStream::connect(to).ok()) else {
                    continue;
                };
                let state = theirs.clone();
                thread::spawn(move || state.pass(&stream, &sender));
            }
        });
        Self {
            addr,
            state,
            thread: Some(thread),
        }
    }

    pub fn to(&self, sender: SocketAddr) {
        *self.state.to.lock().expect("no panic") = Some(sender);
    }

    pub fn harm(&self, harms: &[Harm]) {
        self.state.harms.lock().expect("no panic").extend(harms);
    }

    /// Sets the answers to the next requests that begin like this.
    pub fn answer(&self, request: &'static str, answers: &[Answer]) {
        let mut all = self.state.answers.lock().expect("no panic");
        all.extend(answers.iter().map(|answer| (request, *answer)));
    }

    /// How many requests were not passed on as they were.
    pub fn answered(&self) -> u64 {
        self.state.answered.load(Ordering::SeqCst)
    }

    /// How many connections were harmed.
    pub fn harmed(&self) -> u64 {
        self.state.harmed.load(Ordering::SeqCst)
    }

    /// Hangs up on everybody, once.
    pub fn cut(&self) {
        for stream in self.state.open.lock().expect("no panic").drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl State {
    fn pass(self: Arc<Self>, worker: &TcpStream, sender: &TcpStream) {
        let clone = |stream: &TcpStream| stream.try_clone().expect("a descriptor");
        let mut open = self.open.lock().expect("no panic");
        open.extend([clone(worker), clone(sender)]);
        drop(open);
        let (from, to) = (clone(worker), clone(sender));
        let (back, state) = (clone(worker), self.clone());
        let up = thread::spawn(move || copy(from, to, |_, bytes| state.ask(bytes, &back)));
        let down = (clone(sender), clone(worker));
        copy(down.0, down.1, |from, bytes| self.damage(from, bytes));
        up.join().expect("no panic");
    }

    /// Passes on a request, unless something else is to become of it; false to hang up.
    fn ask(&self, bytes: &mut [u8], mut back: &TcpStream) -> bool {
        let mut answers = self.answers.lock().expect("no panic");
        let range = bytes.windows(7).position(|name| name == b"range: ");
        let here = answers.iter().position(|(request, answer)| {
            let fits = !matches!(answer, Answer::All) || range.is_some();
            bytes.starts_with(request.as_bytes()) && fits
        });
        let Some((_, answer)) = here.map(|place| answers.remove(place)) else {
            return true;
        };
        self.answered.fetch_add(1, Ordering::SeqCst);
        match answer {
            Answer::HangUp => {}
            Answer::Says(head) => {
                let _ = write!(back, "HTTP/1.1 {head}\r\nConnection: close\r\n\r\n");
            }
            Answer::All => {
                bytes[range.expect("it asks for a part")] = b'_';
                return true;
            }
        }
        false
    }

    /// Harms a part of what passes, if it is to be; false to hang up.
    fn damage(&self, from: u64, bytes: &mut [u8]) -> bool {
        let to = from + bytes.len() as u64;
        let mut harms = self.harms.lock().expect("no panic");
        let here = harms.iter().position(|harm| {
            let (Harm::Cut(at) | Harm::Flip(at)) = harm;
            (from..to).contains(at)
        });
        let Some(harm) = here.map(|place| harms.remove(place)) else {
            return true;
        };
        self.harmed.fetch_add(1, Ordering::SeqCst);
        match harm {
            Harm::Cut(_) => false,
            Harm::Flip(at) => {
                bytes[(at - from) as usize] ^= 4;
                true
            }
        }
    }
}

fn copy(mut from: TcpStream, mut to: TcpStream, mut through: impl FnMut(u64, &mut [u8]) -> bool) {
    let mut buffer = vec![0; 64 << 10];
    let mut passed = 0;
    while let Ok(len @ 1..) = from.read(&mut buffer) {
        if buffer.starts_with(b"HTTP/1.1 ") {
            passed = 0;
        }
        let go_on = through(passed, &mut buffer[..len]);
        if !go_on || to.write_all(&buffer[..len]).is_err() {
            break;
        }
        passed += len as u64;
    }
    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.state.over.store(true, Ordering::SeqCst);
        self.cut();
        let _ = TcpStream::connect(self.addr);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
