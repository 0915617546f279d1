//! Many workers in one process: real ones, and ones that are only said to be there.

use std::collections::BTreeMap;
use std::error::Error;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use weightsync_core::Epoch;
use weightsync_engine::{Receiver, ReceiverSetup, WorkerId};
use weightsync_link::frame::{FrameHeader, FrameKind, HEADER_BYTES};
use weightsync_link::hello::LinkRole;
use weightsync_link::message::Message;
use weightsync_net::wire::message::{
    Delivery, FromRoot, Item, ToRoot, WorkerInstance, WorkerJoin, WorkerProgress,
};

use super::attacks;
use super::messages::{Crowd, Notice, Simulated, emit};
use super::roles::token;
use super::scale::longest;

type Outcome = Result<(), Box<dyn Error>>;

/// After so many that have joined it is said how many there are.
const SOME: u32 = 20;

/// How often a simulated agent says that it is there.
const BEAT: Duration = Duration::from_millis(200);

/// Takes every version as it comes, at all of them in turn.
pub(crate) fn work(crowd: &Crowd) -> Outcome {
    allow_files()?;
    let mut workers: Vec<Receiver> = Vec::new();
    for number in 0..crowd.count {
        let setup = ReceiverSetup::new(crowd.info.clone(), crowd.first + number);
        let setup = setup;
        workers.push(setup.connect(Some(longest()))?);
        if (number + 1) % SOME == 0 {
            emit(&Notice::Together(number + 1));
        }
    }
    emit(&Notice::Together(crowd.count));
    let mut live = BTreeMap::new();
    loop {
        for (number, worker) in workers.iter_mut().enumerate() {
            match worker.try_recv() {
                Ok(Some(snapshot)) => drop(live.insert(number, snapshot)),
                Ok(None) => {}
                Err(error) if error.is_sender_closed() => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
        // They are polled, and others want the processor too.
        thread::sleep(Duration::from_millis(1));
    }
}

/// Agents whose workers have loaded whatever they are told at once, without fetching
/// any of it.
pub(crate) fn simulate(what: &Simulated) -> Outcome {
    allow_files()?;
    let together = AtomicU32::new(0);
    thread::scope(|scope| {
        let agents = (0..what.agents).map(|number| {
            let first = number * what.workers;
            let workers = first..first + what.workers;
            let together = &together;
            scope.spawn(move || {
                let agent = Agent::join(&what.root, number).map_err(|error| error.to_string())?;
                agent
                    .follow(workers, together)
                    .map_err(|error| error.to_string())
            })
        });
        let agents: Vec<_> = agents.collect();
        for agent in agents {
            agent.join().map_err(|_| "a thread panicked")??;
        }
        Ok(())
    })
}

fn allow_files() -> io::Result<()> {
    let most = getrlimit(Resource::Nofile).maximum;
    let (current, maximum) = (most, most);
    Ok(setrlimit(Resource::Nofile, Rlimit { current, maximum })?)
}

/// A simulated agent.
struct Agent {
    socket: TcpStream,
    inbox: Vec<u8>,
    beat: Instant,
}

impl Agent {
    fn join(root: &str, number: u32) -> Result<Self, Box<dyn Error>> {
        let begun = Instant::now();
        let mut socket = loop {
            // So many strangers connect at once that the oldest are disconnected.
            match attacks::let_in(root, &token(), LinkRole::Control, number.into()) {
                Ok(socket) => break socket,
                Err(error) if begun.elapsed() > longest() => return Err(error.into()),
                Err(_) => thread::sleep(BEAT / 10),
            }
        };
        let mut host = [0; 16];
        host[..4].copy_from_slice(&number.to_le_bytes());
        let agent = ToRoot::Agent {
            name: format!("simulated {number}"),
            host,
            pid: std::process::id(),
            bulk: None,
            seen: Epoch(0),
            holds: Vec::new(),
            run: None,
        };
        socket.write_all(&agent.frame()?)?;
        socket.set_read_timeout(Some(BEAT / 2))?;
        Ok(Self {
            socket,
            inbox: Vec::new(),
            beat: Instant::now(),
        })
    }

    /// Has its workers join, and says of each set that they run it.
    fn follow(mut self, workers: std::ops::Range<u32>, together: &AtomicU32) -> Outcome {
        for worker in workers {
            self.send(&ToRoot::Join(WorkerJoin {
                ticket: worker.into(),
                who: who(WorkerId(worker)),
                pid: std::process::id(),
                models: u64::MAX,
                delivery: Delivery::Newest,
                device: "cpu".into(),
                seen: Epoch(0),
            }))?;
        }
        loop {
            match self.receive()? {
                Some(FromRoot::Joined { .. }) => {
                    let count = together.fetch_add(1, Ordering::Relaxed) + 1;
                    if count.is_multiple_of(100) {
                        emit(&Notice::Together(count));
                    }
                }
                Some(FromRoot::Denied { reason, .. } | FromRoot::Refused { reason, .. }) => {
                    return Err(reason.into());
                }
                Some(FromRoot::Notify {
                    sequence,
                    set,
                    workers,
                }) => {
                    let run = |worker| loaded(worker, sequence, &set);
                    for progress in ToRoot::progress(workers.into_iter().map(run).collect()) {
                        self.send(&progress)?;
                    }
                }
                Some(FromRoot::Goodbye) => return Ok(()),
                Some(_) | None => {}
            }
            if self.beat.elapsed() >= BEAT {
                self.send(&ToRoot::Ping)?;
            }
        }
    }

    fn send(&mut self, message: &ToRoot) -> Outcome {
        self.socket.write_all(&message.frame()?)?;
        self.beat = Instant::now();
        Ok(())
    }

    /// The next message, if one has come.
    fn receive(&mut self) -> Result<Option<FromRoot>, Box<dyn Error>> {
        loop {
            if let Some((head, rest)) = self.inbox.split_first_chunk::<HEADER_BYTES>() {
                let header = FrameHeader::decode(head, &[FrameKind::Control])?;
                if let Some(payload) = rest.get(..header.len) {
                    header.check(payload)?;
                    let message = FromRoot::decode(payload)?;
                    self.inbox.drain(..HEADER_BYTES + header.len);
                    return Ok(Some(message));
                }
            }
            let mut bytes = [0; 1 << 16];
            match self.socket.read(&mut bytes) {
                Ok(0) => return Err("the sender has hung up".into()),
                Ok(came) => self.inbox.extend_from_slice(&bytes[..came]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

fn who(worker: WorkerId) -> WorkerInstance {
    WorkerInstance {
        worker,
        instance: 1,
    }
}

fn loaded(worker: WorkerId, sequence: u64, set: &[Item]) -> WorkerProgress {
    WorkerProgress {
        who: who(worker),
        taken: sequence,
        through: 0,
        loaded: sequence,
        versions: set.to_vec(),
        refused: None,
    }
}
