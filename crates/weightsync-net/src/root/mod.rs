//! The sender's end of the network: it listens, tells agents what their workers are to run, and
//! serves the first agents.

mod compare;
mod coordinator;
mod listening;
pub(crate) mod membership;
pub(crate) mod plan;
pub(crate) mod recent;
mod scrub;
pub(crate) mod topology;

use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot};
use weightsync_core::Run;
use weightsync_engine::transport::{
    Attendance, Deadline, ModelSpec, Opening, Segment, SenderTransport, Staging, Targets,
};
use weightsync_engine::{Result, SenderStatus, Snapshot, Version, WorkerId, WorkerStatus};
use weightsync_link::Credentials;
use weightsync_link::access::Key;
use weightsync_mem::threads;
use weightsync_mem::{Listener, Origin};

use self::compare::{Compared, Comparing};
use self::coordinator::{ChangedWorkers, Coordinator, CoordinatorEvent, CoordinatorSettings};
use self::listening::Listening;
use crate::agent::{Item, runtime, tell_to_end};
use crate::bulk::{BlockStore, Find, ServeEvent, Serving, Threads};
use crate::error::os;
use crate::scheme::Distributed;
use crate::wire::message::{FromRoot, Welcome, model_messages};

/// How long a shutdown waits until comparing threads release their versions. They do so after the
/// span that they are coding.
const LET_GO: Duration = Duration::from_millis(100);

/// How long the sender's own thread waits for the coordinator's part of a status.
const STATUS_WITHIN: Duration = Duration::from_secs(1);

/// How many events may wait for the coordinator.
// When the queue is full, links stop reading. So a flood of messages takes no more memory than
// this.
const EVENTS: usize = 1024;

/// The trainer's end.
#[derive(Debug)]
pub(crate) struct NetSender {
    // Dropped before the segment: published versions are still sent before the segment ends.
    server: RootServer,
    segment: Segment,
}

impl NetSender {
    pub(crate) fn open(
        scheme: &Distributed,
        opening: &Opening<'_>,
        (local, remote): (Listener, TcpListener),
    ) -> Result<Self> {
        let segment = Segment::open(opening, local, scheme.queue.bound())?;
        let server = RootServer::start(scheme, opening, &segment, remote)?;
        Ok(Self { server, segment })
    }
}

impl SenderTransport for NetSender {
    fn stage(&mut self, models: &[usize], deadline: Deadline) -> Result<Box<dyn Staging + '_>> {
        // Without agents nothing travels, so neither checksums nor deltas are needed.
        let agents = self.server.agents.load(Ordering::Relaxed) > 0;
        let comparing = &self.server.comparing;
        let (store, deltas) = (&comparing.store, comparing.store.deltas());
        // Dense versions need checksums on the link, and computing them in the copy pass saves a
        // pass over memory. Deltas have checksums of their own.
        let dense = models.iter().any(|model| !deltas.pays(*model));
        self.segment.set_checksums(agents && dense);
        // A comparison holds two slots, and its result is soon out of date. Stopping it at the next
        // span is faster than making another slot.
        models.iter().for_each(|model| deltas.stop(*model));
        let is_making = || models.iter().any(|model| deltas.is_making(*model));
        // A thread that does not stop in time keeps its slots a little longer. The segment then
        // makes another slot.
        store.wait_until(|| !is_making(), LET_GO);
        let mut bases = Vec::new();
        for model in models {
            let newest = self.segment.version(*model);
            // Before a slot is taken: slow children may still fetch replaced versions. From here on
            // they keep one such slot of each model at the most.
            store.keep_oldest(*model, newest);
            match agents {
                // The base is pinned before a slot is chosen, so the new version is not written
                // over it.
                true => bases.extend(comparing.base(*model, newest)),
                // No agent has the versions that these deltas begin with. And no delta will lead to
                // the version that is sent now, so the chain breaks here.
                false => deltas.forget(*model),
            }
        }
        let inner = self.segment.stage(models, deadline)?;
        let comparing = comparing.clone();
        Ok(match bases.is_empty() {
            true => inner,
            false => Box::new(Compared {
                inner,
                bases,
                comparing,
            }),
        })
    }

    fn version(&self, model: usize) -> Version {
        self.segment.version(model)
    }

    fn workers(&self) -> Vec<WorkerStatus> {
        self.segment.workers()
    }

    fn fill_status(&self, status: &mut SenderStatus) {
        self.segment.fill_status(status);
        if let Some(known) = self.server.status() {
            status.address = known.address;
            status.served = known.served;
            status.relays = known.relays;
            status.models = known.models;
        }
    }

    fn wait_workers(
        &mut self,
        deadline: Deadline,
        enough: &mut dyn FnMut(&Attendance) -> bool,
    ) -> Result<bool> {
        self.segment.wait_workers(deadline, enough)
    }

    fn take_rejected(&mut self) -> Vec<(WorkerId, String)> {
        self.segment.take_rejected()
    }

    fn snapshot(&self, model: usize) -> Result<Option<Snapshot>> {
        self.segment.snapshot(model)
    }

    fn snapshot_for(&self, model: usize, targets: &Targets) -> Result<Option<Snapshot>> {
        self.segment.snapshot_for(model, targets)
    }

    fn old_snapshot(&self, model: usize, version: Version) -> Result<Option<Snapshot>> {
        self.segment.old_snapshot(model, version)
    }

    fn hold(&mut self, workers: &[WorkerId], hold: bool) -> Result<()> {
        self.segment.hold(workers, hold)
    }

    fn forget(&mut self, workers: &[WorkerId]) -> Result<()> {
        self.segment.forget(workers)
    }
}

/// The thread that listens, and those that serve.
#[derive(Debug)]
struct RootServer {
    events: mpsc::Sender<CoordinatorEvent>,
    thread: Option<JoinHandle<()>>,
    /// How many agents there are.
    agents: Arc<AtomicUsize>,
    comparing: Comparing,
    owner: Origin,
}

impl RootServer {
    fn start(
        scheme: &Distributed,
        opening: &Opening<'_>,
        segment: &Segment,
        listener: TcpListener,
    ) -> Result<Self> {
        let access = scheme.access()?;
        let remote_readers = segment.remote_readers();
        let found = remote_readers.clone();
        let find: Find =
            Box::new(move |Item { model, version }| found.snapshot(model, version).ok().flatten());
        let store = Arc::new(BlockStore::of_sender(find));
        let children = Arc::new(Threads::default());
        let agents = Arc::<AtomicUsize>::default();
        let (events, on_event) = mpsc::channel(EVENTS);
        let comparing = Comparing {
            events: events.clone(),
            remote_readers: remote_readers.clone(),
            store: store.clone(),
            threads: children.clone(),
            deltas: scheme.deltas,
            unscrubbed: opening.models.iter().map(|_| AtomicU64::new(0)).collect(),
        };
        let run_id = remote_readers.run();
        let settings = settings(scheme, opening, run_id, (&store, &children))?;
        let count = settings.served.clone();
        // A sender has a version or not: it never asks another process for one.
        let notify = move |served| {
            if let ServeEvent::Sent { bytes } = served {
                count.fetch_add(bytes, Ordering::Relaxed);
            }
        };
        let offers = (run_id, opening.models.len());
        let listening = Listening {
            credentials: Credentials {
                key: Key::new(opening.at.secret()),
                tls: access.tls,
            },
            events: events.clone(),
            serving: Serving::new(offers, store.clone(), children.clone(), notify),
            remote_readers: remote_readers.clone(),
            agents: agents.clone(),
        };
        let coordinator = Coordinator::new(
            settings,
            remote_readers,
            Arc::new(ChangedWorkers::default()),
            events.clone(),
            agents.clone(),
        );
        let thread = run(listener, listening, coordinator, on_event)?;
        Ok(Self {
            events,
            thread: Some(thread),
            agents,
            comparing,
            owner: Origin::here(),
        })
    }
}

impl RootServer {
    /// What the coordinator says; `None` if it has ended, or does not answer at once.
    fn status(&self) -> Option<SenderStatus> {
        let (answer, mut answered) = oneshot::channel();
        // A full queue means a busy coordinator: the caller does not wait for room there.
        self.events
            .try_send(CoordinatorEvent::Status(answer))
            .ok()?;
        let until = Instant::now() + STATUS_WITHIN;
        // Not a blocking receive: that panics in a thread of an async runtime.
        loop {
            match answered.try_recv() {
                Ok(json) => return serde_json::from_str(&json).ok(),
                Err(oneshot::error::TryRecvError::Empty) if Instant::now() < until => {
                    std::thread::sleep(Duration::from_micros(200));
                }
                Err(_) => return None,
            }
        }
    }
}

/// What the coordinator works with.
fn settings(
    scheme: &Distributed,
    opening: &Opening<'_>,
    run: Run,
    (store, threads): (&Arc<BlockStore>, &Arc<Threads>),
) -> Result<CoordinatorSettings> {
    let models = opening.models.iter();
    Ok(CoordinatorSettings {
        welcome: Welcome {
            run,
            agent: 0,
            address: opening.at.address().into(),
            models: opening.models.len() as u8,
            slots: opening.options.slots,
            max_slots: opening.options.max_slots,
            pid: std::process::id(),
            settings: scheme.told_to_agents(),
        },
        history: opening.history.clone(),
        models: models.map(|spec| spec.id.to_string()).collect(),
        arity: scheme.arity,
        descriptions: descriptions(opening.models)?,
        served: Arc::default(),
        store: store.clone(),
        threads: threads.clone(),
    })
}

/// Starts the thread that accepts connections and decides.
fn run(
    listener: TcpListener,
    listening: Listening,
    coordinator: Coordinator,
    on_event: mpsc::Receiver<CoordinatorEvent>,
) -> Result<JoinHandle<()>> {
    let runtime =
        runtime("weightsync-link").map_err(os("starting the sender's network threads"))?;
    // Tokio takes over only sockets that do not block.
    listener
        .set_nonblocking(true)
        .map_err(os("preparing the listening socket"))?;
    let work = move || {
        runtime.block_on(async move {
            // A listener can be registered only from inside the runtime.
            let Ok(listener) = tokio::net::TcpListener::from_std(listener) else {
                return;
            };
            let accepting = tokio::spawn(listening.accept(listener));
            coordinator.run(on_event).await;
            accepting.abort();
        });
        // Ends the tasks; none of them waits.
        runtime.shutdown_timeout(weightsync_link::HANDSHAKE);
    };
    threads::spawn("net", work).map_err(os("starting the sender's network thread"))
}

impl Drop for RootServer {
    fn drop(&mut self) {
        if !self.owner.is_here() {
            // In a forked child the threads do not exist: they belong to the parent.
            if let Some(thread) = self.thread.take() {
                std::mem::forget(thread);
            }
            return;
        }
        // If the event were lost, the join below would not end.
        tell_to_end(&self.events, CoordinatorEvent::Stop);
        if let Some(thread) = self.thread.take() {
            // The panic hook has already reported a panic there.
            let _ = thread.join();
        }
        let Comparing { store, threads, .. } = &self.comparing;
        // In this order: the store's end ends waits for blocks and deltas, `stop` ends waits in
        // sockets, and then every thread can be joined.
        store.close();
        threads.stop();
        threads.join();
    }
}

/// The models as frames, the same for every agent.
fn descriptions(models: &[ModelSpec]) -> Result<Arc<[u8]>> {
    let mut messages = Vec::new();
    for (index, spec) in Segment::specs(models)?.iter().enumerate() {
        let layout = spec.layout.encode();
        let all =
            model_messages(index as u8, &layout, &spec.note).map_err(crate::error::transport)?;
        messages.extend(all);
    }
    weightsync_link::frames::<FromRoot>(&messages).map_err(crate::error::transport)
}
