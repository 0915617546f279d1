//! What an agent does: it performs what its [plan](super::plan) decides.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;
use weightsync_core::{Run, WorkerId};
use weightsync_mem::protocol::MAX_SLOTS;
use weightsync_mem::{
    self as mem, Delivery, Ending, Listener, Relay, Room, Seated, SegmentOptions, Snapshot,
    WaitStyle,
};

use super::join::{Before, Joined, dial, greet};
use super::plan::{Effect, Input, Item, Plan};
use super::{AgentOptions, Reach, StartError, backoff};
use crate::access::Key;
use crate::bulk::{
    Came, Connections, Fetch, FetchEnd, Held, Parent, Served, Serving, Store, Threads,
};
use crate::link::listen::accept_all;
use crate::link::{Link, LinkEnd};
use crate::wire::frame::CHUNK;
use crate::wire::hello::Role;
use crate::wire::message::{self, FromRoot, ToRoot, WorkerProgress};

/// How often it is looked whether there is room, while there was none.
const ROOM: Duration = Duration::from_millis(20);

/// How long an agent whose sender has shut down goes on with what it was told.
const LINGER: Duration = Duration::from_secs(5);

/// Handshakes in a row that nobody answered, although somebody listens, before the
/// sender counts as dead.
const UNANSWERED: u32 = 5;

/// What an engine hears.
pub(crate) enum Event {
    /// The sender has said something, or a link to it has ended.
    Root {
        number: u64,
        what: Result<FromRoot, LinkEnd>,
    },
    /// Something has happened at workers of this host.
    Near(Vec<mem::Event>),
    /// A fetch has ended.
    Fetched(Fetched),
    /// Something was served from here.
    Served(Served),
    /// It is to leave.
    Stop,
}

/// A fetch that has ended.
pub(crate) struct Fetched {
    number: u64,
    item: Item,
    /// By which agent.
    parent: u64,
    end: FetchEnd,
    came: Came,
}

pub(crate) struct Engine {
    options: AgentOptions,
    key: Key,
    run: Run,
    agent: u64,
    root: SocketAddr,
    /// The link to the sender, with its number; none while it is broken.
    link: Option<(u64, Link<ToRoot>)>,
    links: u64,
    events: mpsc::Sender<Event>,
    relay: Arc<Relay>,
    near: Option<std::thread::JoinHandle<()>>,
    plan: Plan,
    parent: Option<Parent>,
    coming: BTreeMap<Item, (Arc<Room>, Arc<Held>)>,
    whole: BTreeMap<Item, Snapshot>,
    fetch: Option<(u64, Item, Parent, Fetch)>,
    fetches: u64,
    /// Fetches that broke off in a row.
    failures: u32,
    /// When the sender is told that a parent is lost.
    complain: Option<(Instant, u64, String)>,
    workers: BTreeMap<WorkerId, Worker>,
    joining: BTreeMap<u64, Joining>,
    /// Workers that are told of to a sender that may know them, by ticket.
    rejoining: BTreeMap<u64, Seated>,
    tickets: u64,
    store: Arc<Store>,
    threads: Arc<Threads>,
    connections: Arc<Connections>,
    bulk: Option<u16>,
    serves: Option<SocketAddr>,
    /// The sender has said goodbye: it ends once nothing is pending, or then.
    closes: Option<Instant>,
}

struct Worker {
    who: Seated,
    joining: Joining,
}

/// What a worker said when it joined.
#[derive(Clone)]
struct Joining {
    who: Seated,
    pid: u32,
    models: u64,
    delivery: Delivery,
    device: String,
    seen: weightsync_core::Epoch,
    /// How its segment names it until it is in.
    ticket: u64,
}

impl Engine {
    /// Makes the segment, and the threads around it.
    pub(super) fn start(
        options: &AgentOptions,
        key: Key,
        joined: Joined,
        listener: Listener,
        events: mpsc::Sender<Event>,
    ) -> Result<Self, StartError> {
        let Joined {
            link,
            root,
            run,
            agent,
            slots,
            pid,
            models,
            bulk,
            ..
        } = joined;
        let segment = SegmentOptions {
            // One that is live, one that comes, one that a slow relay below takes.
            slots: slots.max(3),
            // A worker that holds on to versions holds up nobody on other hosts; here
            // it costs memory.
            max_slots: MAX_SLOTS as u8,
            history: 0,
            wait: WaitStyle::Sleep,
        };
        let relay = Relay::create(listener, options.secret, (run, pid), &models, segment)
            .map_err(StartError::Memory)?;
        let relay = Arc::new(relay);
        let near = watch(&relay, &events).map_err(|source| StartError::Os {
            action: "starting the relay's watch",
            source,
        })?;
        let store = Arc::new(Store::of_relay());
        let threads = Arc::new(Threads::default());
        let serves = bulk.as_ref().and_then(|bulk| bulk.local_addr().ok());
        if let Some(bulk) = bulk {
            let told = events.clone();
            let tell = move |served| {
                let _ = told.blocking_send(Event::Served(served));
            };
            let serving = Serving::new(run, store.clone(), threads.clone(), tell);
            let take = move |socket, _from, role| {
                if role == Role::Bulk {
                    tokio::spawn(serving.clone().child(socket));
                }
            };
            tokio::spawn(accept_all(bulk, key.clone(), || false, take));
        }
        let connections = Connections::new(key.clone(), run, agent, options.connections);
        Ok(Self {
            options: options.clone(),
            key,
            run,
            agent,
            root,
            link: Some((0, link)),
            links: 0,
            events,
            relay,
            near: Some(near),
            plan: Plan::new(),
            parent: None,
            coming: BTreeMap::new(),
            whole: BTreeMap::new(),
            fetch: None,
            fetches: 0,
            failures: 0,
            complain: None,
            workers: BTreeMap::new(),
            joining: BTreeMap::new(),
            rejoining: BTreeMap::new(),
            tickets: 0,
            store,
            threads,
            connections: Arc::new(connections),
            bulk: serves.map(|serves| serves.port()),
            serves,
            closes: None,
        })
    }

    pub(super) fn serves(&self) -> Option<SocketAddr> {
        self.serves
    }

    /// Performs, until the sender ends or the agent is to leave.
    pub(super) async fn run(mut self, mut heard: mpsc::Receiver<Event>) -> Ending {
        let ending = loop {
            if let Some(closes) = self.closes
                && (!self.plan.is_pending() || Instant::now() >= closes)
            {
                break Ending::Closed;
            }
            let room = self.plan.waits_for_room().then(|| Instant::now() + ROOM);
            let complain = self.complain.as_ref().map(|(at, ..)| *at);
            let due = [room, complain, self.closes].into_iter().flatten().min();
            let event = tokio::select! {
                event = heard.recv() => match event {
                    Some(event) => event,
                    None => break Ending::Moved,
                },
                () = tokio::time::sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {
                    self.timers();
                    continue;
                }
            };
            match event {
                Event::Stop => break Ending::Moved,
                Event::Root { number, what } => {
                    if self
                        .link
                        .as_ref()
                        .is_none_or(|(current, _)| *current != number)
                    {
                        continue;
                    }
                    match what {
                        Ok(message) => self.hear(message),
                        Err(end) => {
                            self.link = None;
                            if let Some(ending) = self.reconnect(&end, &mut heard).await {
                                break ending;
                            }
                        }
                    }
                }
                Event::Near(events) => self.near(events),
                Event::Fetched(fetched) => self.fetched(fetched),
                Event::Served(served) => self.served(served),
            }
        };
        self.end(ending, heard).await
    }

    async fn end(mut self, ending: Ending, mut heard: mpsc::Receiver<Event>) -> Ending {
        self.relay.close(ending);
        self.store.close();
        self.fetch = None;
        self.threads.stop();
        let (near, threads) = (self.near.take(), self.threads.clone());
        let mut joined = tokio::task::spawn_blocking(move || {
            if let Some(near) = near {
                // A panic there has been reported by the panic hook already.
                let _ = near.join();
            }
            threads.join();
        });
        // What has happened last is told, if anybody listens; and nobody waits to
        // say something that is not heard.
        loop {
            tokio::select! {
                biased;
                Some(event) = heard.recv() => {
                    if let Event::Near(events) = event {
                        self.near(events);
                    }
                }
                _ = &mut joined => break,
            }
        }
        while let Ok(event) = heard.try_recv() {
            if let Event::Near(events) = event {
                self.near(events);
            }
        }
        let last = self.relay.last_events();
        self.near(last);
        if let Some((_, link)) = self.link.take() {
            link.say(&ToRoot::Goodbye);
            link.finish().await;
        }
        ending
    }

    fn timers(&mut self) {
        let now = Instant::now();
        if let Some((_, parent, reason)) = self.complain.take_if(|(at, ..)| now >= *at) {
            self.say(&ToRoot::ParentLost { parent, reason });
        }
        if self.plan.waits_for_room() {
            self.step([Input::MayHaveRoom]);
        }
    }

    fn hear(&mut self, message: FromRoot) {
        match message {
            FromRoot::Joined { ticket } => self.admit(ticket),
            FromRoot::Denied { ticket, reason } => {
                if let Some(joining) = self.joining.remove(&ticket) {
                    self.relay.deny(joining.ticket, &reason);
                } else if let Some(who) = self.rejoining.remove(&ticket) {
                    self.relay.turn_away(who, &reason);
                }
            }
            FromRoot::Tell {
                sequence,
                set,
                workers,
            } => {
                let set: Vec<Item> = set.into_iter().map(item).collect();
                let known = workers.iter().filter_map(|worker| self.workers.get(worker));
                let told = known.map(|worker| Input::Told {
                    who: worker.who,
                    sequence,
                    set: set.clone(),
                });
                let told: Vec<_> = told.collect();
                self.step(told);
            }
            FromRoot::Answer {
                worker,
                question,
                sequence,
                set,
            } => {
                if let Some(worker) = self.workers.get(&worker) {
                    let answered = Input::Answered {
                        who: worker.who,
                        question,
                        sequence,
                        set: set.into_iter().map(item).collect(),
                    };
                    self.step([answered]);
                }
            }
            FromRoot::NoSuchVersion {
                worker,
                question,
                model,
                asked,
                known,
            } => {
                if let Some(worker) = self.workers.get(&worker) {
                    let asked = (usize::from(model), asked);
                    self.relay
                        .no_such_version(worker.who, question, asked, known);
                }
            }
            FromRoot::TurnAway {
                worker,
                instance,
                reason,
            } => self.relay.turn_away(Seated { worker, instance }, &reason),
            FromRoot::Parent { agent, address } => {
                let address = match address {
                    None => Some(self.root),
                    Some(address) => address.parse().ok(),
                };
                match address {
                    Some(address) => self.follow(Parent { agent, address }),
                    None => self.say(&ToRoot::ParentLost {
                        parent: agent,
                        reason: "its address cannot be read".into(),
                    }),
                }
            }
            FromRoot::Goodbye => self.closes = Some(Instant::now() + LINGER),
            // They are of the way in.
            FromRoot::Welcome { .. }
            | FromRoot::Model { .. }
            | FromRoot::Part { .. }
            | FromRoot::Refused { .. }
            | FromRoot::Ping => {}
        }
    }

    /// Lets a worker in that the sender has agreed to.
    fn admit(&mut self, ticket: u64) {
        self.rejoining.remove(&ticket);
        let Some(joining) = self.joining.remove(&ticket) else {
            return;
        };
        let who = joining.who;
        if self.relay.admit(joining.ticket).is_err() {
            self.say(&ToRoot::Gone {
                worker: who.worker,
                instance: who.instance,
                died: false,
            });
            return;
        }
        let delivery = joining.delivery;
        self.workers.insert(who.worker, Worker { who, joining });
        self.step([Input::Joined { who, delivery }]);
    }

    /// Fetches from another from here on.
    fn follow(&mut self, parent: Parent) {
        if self.parent.replace(parent) == Some(parent) && self.fetch.is_some() {
            return;
        }
        // What is fetched from the sender itself goes on.
        let from_parent = |fetch: &mut (u64, Item, Parent, Fetch)| fetch.2.agent != 0;
        self.fetch.take_if(from_parent);
        self.step([Input::NoParent, Input::Parent]);
    }

    fn near(&mut self, events: Vec<mem::Event>) {
        let mut progress = Vec::new();
        let mut inputs = Vec::new();
        for event in events {
            match event {
                mem::Event::Joins {
                    ticket,
                    who,
                    pid,
                    models,
                    delivery,
                    device,
                    seen,
                } => {
                    let joining = Joining {
                        who,
                        pid,
                        models: models.0,
                        delivery,
                        device,
                        seen,
                        ticket,
                    };
                    self.ask_in(joining);
                }
                mem::Event::Progress(one) => progress.push(one),
                mem::Event::Unusable { who, reason } => self.say(&ToRoot::Unusable {
                    worker: who.worker,
                    instance: who.instance,
                    reason,
                }),
                mem::Event::Asks {
                    who,
                    question,
                    want,
                } => self.say(&ToRoot::Ask {
                    worker: who.worker,
                    instance: who.instance,
                    question,
                    want: want.into(),
                }),
                mem::Event::Withdraws { who } => self.say(&ToRoot::Withdraw {
                    worker: who.worker,
                    instance: who.instance,
                }),
                mem::Event::Gone { who, died } => {
                    // How far it came is told before that.
                    self.say_progress(std::mem::take(&mut progress));
                    if self
                        .workers
                        .get(&who.worker)
                        .is_some_and(|one| one.who == who)
                    {
                        self.workers.remove(&who.worker);
                    }
                    self.say(&ToRoot::Gone {
                        worker: who.worker,
                        instance: who.instance,
                        died,
                    });
                    inputs.push(Input::Left { who });
                }
            }
        }
        self.say_progress(progress);
        // What workers gave back may be room for what comes next.
        inputs.push(Input::MayHaveRoom);
        self.step(inputs);
    }

    /// Asks the sender whether a worker may join.
    fn ask_in(&mut self, joining: Joining) {
        for gave_up in self.take_those_who_gave_up() {
            // It may be who asks now, once more, or another with its number.
            if gave_up != joining.who {
                self.say(&ToRoot::Gone {
                    worker: gave_up.worker,
                    instance: gave_up.instance,
                    died: false,
                });
            }
        }
        self.tickets += 1;
        let ticket = self.tickets;
        self.say(&join_message(ticket, &joining));
        self.joining.insert(ticket, joining);
    }

    /// Workers that do not wait to be let in any more: they died, or found another
    /// way.
    fn take_those_who_gave_up(&mut self) -> Vec<Seated> {
        let relay = &self.relay;
        let gave_up = self
            .joining
            .extract_if(.., |_, one| !relay.waits(one.ticket));
        gave_up.map(|(_, one)| one.who).collect()
    }

    fn say_progress(&mut self, progress: Vec<mem::Progress>) {
        if progress.is_empty() {
            return;
        }
        let all = progress.into_iter().map(|one| WorkerProgress {
            worker: one.who.worker,
            instance: one.who.instance,
            taken: one.taken,
            through: one.through,
            loaded: one.loaded,
            versions: one
                .versions
                .into_iter()
                .map(|(model, version)| held(Item { model, version }))
                .collect(),
            refused: one.refused,
        });
        for message in ToRoot::progress(all.collect()) {
            self.say(&message);
        }
    }

    fn fetched(&mut self, fetched: Fetched) {
        let Fetched {
            number,
            item,
            parent: by,
            end,
            came: Came { bytes, busy },
        } = fetched;
        if bytes > 0 {
            self.say(&ToRoot::Received {
                model: item.model as u8,
                version: item.version,
                parent: by,
                bytes,
                micros: busy.as_micros() as u64,
            });
        }
        let Some((current, _, parent, _)) = &self.fetch else {
            return;
        };
        if *current != number {
            return;
        }
        let parent = *parent;
        self.fetch = None;
        match end {
            FetchEnd::Whole => {
                let committed = match self.coming.get(&item) {
                    Some((room, _)) => room.commit(),
                    None => return,
                };
                match committed {
                    Ok(snapshot) => {
                        self.failures = 0;
                        self.whole.insert(item, snapshot);
                        self.say(&ToRoot::Holds {
                            have: vec![held(item)],
                            dropped: Vec::new(),
                        });
                        self.step([Input::Whole { item }]);
                    }
                    Err(error) => tracing::error!("{item:?} cannot be committed: {error}"),
                }
            }
            FetchEnd::NotThere => {
                let sender = parent.agent == 0;
                if !sender {
                    self.say(&ToRoot::Missing {
                        model: item.model as u8,
                        version: item.version,
                    });
                }
                self.step([Input::NotThere { item, sender }]);
            }
            FetchEnd::Broken(error) => {
                // Also where it was the sender: it says so once more, which is when
                // this goes on.
                let pause = backoff(self.failures);
                let pause = if self.failures == 0 {
                    Duration::ZERO
                } else {
                    pause
                };
                self.failures += 1;
                tracing::info!(
                    "fetching {item:?} from {} broke off: {error}",
                    parent.address
                );
                self.complain = Some((Instant::now() + pause, parent.agent, error.to_string()));
                self.parent = None;
                self.step([Input::Broken { item }, Input::NoParent]);
            }
            // What is missing still is fetched, from the same parent.
            FetchEnd::Stopped | FetchEnd::Partly => self.step([Input::Broken { item }]),
        }
    }

    fn served(&mut self, served: Served) {
        match served {
            Served::Wanted { item } => self.step([Input::Wanted { item }]),
            Served::Unwanted { item } => self.step([Input::Unwanted { item }]),
            Served::Sent { .. } => {}
        }
    }

    /// Notes what has happened, and performs what follows from it.
    fn step(&mut self, inputs: impl IntoIterator<Item = Input>) {
        let mut effects = self.plan.step(inputs);
        let mut more = Vec::new();
        while !effects.is_empty() {
            for effect in effects.drain(..) {
                if let Some(input) = self.perform(effect) {
                    more.push(input);
                }
            }
            if more.is_empty() {
                return;
            }
            effects = self.plan.step(more.drain(..));
        }
    }

    fn perform(&mut self, effect: Effect) -> Option<Input> {
        match effect {
            Effect::Tell { who, sequence, set } => {
                if let Some(set) = self.snapshots(&set) {
                    self.relay.tell(who, sequence, &set);
                }
            }
            Effect::Answer {
                who,
                question,
                sequence,
                set,
            } => {
                if let Some(set) = self.snapshots(&set) {
                    self.relay.answer(who, question, sequence, &set);
                }
            }
            Effect::Fetch { item, sender } => return self.begin(item, sender),
            Effect::Stop { item } => {
                self.fetch.take_if(|(_, of, ..)| *of == item);
            }
            Effect::Release { item } => {
                self.store.remove(item);
                self.coming.remove(&item);
                if self.whole.remove(&item).is_some() {
                    self.say(&ToRoot::Holds {
                        have: Vec::new(),
                        dropped: vec![held(item)],
                    });
                }
            }
            Effect::Refuse { item } => self.store.refuse(item),
        }
        None
    }

    /// Begins a fetch; what has happened instead, if it cannot.
    fn begin(&mut self, item: Item, sender: bool) -> Option<Input> {
        let root = Parent {
            agent: 0,
            address: self.root,
        };
        let parent = match sender {
            true => Some(root),
            false => self.parent,
        };
        let Some(parent) = parent else {
            return Some(Input::NoParent);
        };
        if !self.coming.contains_key(&item) {
            let room = match self.relay.room(item.model, item.version, CHUNK as usize) {
                Ok(Some(room)) => room,
                Ok(None) => return Some(Input::NoRoom { item }),
                Err(error) => {
                    tracing::error!("there is no room for {item:?}: {error}");
                    return Some(Input::NoRoom { item });
                }
            };
            let coming = Arc::new(Held::coming(room.clone()));
            self.store.put(item, coming.clone());
            self.coming.insert(item, (room, coming));
        }
        let (room, coming) = self.coming.get(&item)?;
        self.fetches += 1;
        let number = self.fetches;
        let events = self.events.clone();
        let fetch = Fetch::start(
            (item, parent),
            &self.connections,
            (room.clone(), coming.clone()),
            &self.store,
            &self.threads,
            move |end, came| {
                let fetched = Fetched {
                    number,
                    item,
                    parent: parent.agent,
                    end,
                    came,
                };
                let _ = events.blocking_send(Event::Fetched(fetched));
            },
        );
        self.fetch = Some((number, item, parent, fetch));
        None
    }

    fn snapshots(&self, set: &[Item]) -> Option<Vec<Snapshot>> {
        set.iter()
            .map(|item| self.whole.get(item).cloned())
            .collect()
    }

    fn say(&mut self, message: &ToRoot) {
        if let Some((_, link)) = &self.link
            && !link.say(message)
        {
            tracing::warn!("the sender does not keep up");
        }
    }

    /// Finds the sender again after a link has ended. How the agent ends, if it
    /// does not come back.
    async fn reconnect(
        &mut self,
        end: &LinkEnd,
        heard: &mut mpsc::Receiver<Event>,
    ) -> Option<Ending> {
        if self.closes.is_some() {
            return Some(Ending::Closed);
        }
        tracing::warn!("the link to the sender has ended: {end}");
        let (mut failures, mut unanswered) = (0, 0);
        loop {
            match self.try_again().await {
                Ok(()) => return None,
                Err(Again::Died) => return Some(Ending::Died),
                Err(Again::Unanswered) => {
                    unanswered += 1;
                    if unanswered >= UNANSWERED {
                        return Some(Ending::Died);
                    }
                }
                Err(Again::Unreachable) => unanswered = 0,
            }
            // Workers go on meanwhile with what they have.
            let until = Instant::now() + backoff(failures);
            failures += 1;
            loop {
                tokio::select! {
                    event = heard.recv() => match event {
                        Some(Event::Stop) | None => return Some(Ending::Moved),
                        Some(Event::Near(events)) => self.near(events),
                        Some(Event::Fetched(fetched)) => self.fetched(fetched),
                        Some(Event::Served(served)) => self.served(served),
                        Some(Event::Root { .. }) => {}
                    },
                    () = tokio::time::sleep_until(until) => break,
                }
            }
        }
    }

    async fn try_again(&mut self) -> Result<(), Again> {
        let (socket, root) = match dial(&self.options.root, &self.key).await {
            Ok(reached) => reached,
            Err(StartError::Refused(_)) => return Err(Again::Died),
            Err(StartError::Unreachable(reach, _)) => {
                return Err(match reach {
                    // Nobody listens where the sender did.
                    Reach::Refused => Again::Died,
                    Reach::Unanswered => Again::Unanswered,
                    Reach::Unknown => Again::Unreachable,
                });
            }
            Err(_) => return Err(Again::Unreachable),
        };
        let before = Before {
            run: Some(self.run),
            holds: self.whole.keys().copied().collect(),
        };
        let number = self.links + 1;
        let events = self.events.clone();
        let bulk = (self.bulk, before);
        let greeted = greet(socket, &self.options, bulk, number, &events).await;
        let (link, welcome) = match greeted {
            Ok(greeted) => greeted,
            Err(StartError::Unreachable(..)) => return Err(Again::Unreachable),
            Err(_) => return Err(Again::Died),
        };
        if welcome.run != self.run {
            // Its successor: workers look for it by themselves.
            return Err(Again::Died);
        }
        self.links = number;
        self.link = Some((number, link));
        self.root = root;
        self.agent = welcome.agent;
        let connections = Connections::new(
            self.key.clone(),
            self.run,
            self.agent,
            self.options.connections,
        );
        self.connections = Arc::new(connections);
        self.come_back();
        Ok(())
    }

    /// Tells the sender again who is here.
    fn come_back(&mut self) {
        self.rejoining.clear();
        let workers: Vec<Joining> = self
            .workers
            .values()
            .map(|worker| worker.joining.clone())
            .collect();
        for joining in workers {
            self.tickets += 1;
            let ticket = self.tickets;
            self.rejoining.insert(ticket, joining.who);
            self.say(&join_message(ticket, &joining));
        }
        // By this link nobody has been told of them, and some may be there by a way of
        // their own.
        self.take_those_who_gave_up();
        for (ticket, joining) in self.joining.clone() {
            self.say(&join_message(ticket, &joining));
        }
        // And how far they are.
        self.relay.tell_again();
    }
}

/// Why another attempt did not bring the sender back.
enum Again {
    /// It is dead, or another one.
    Died,
    /// Something listens there, and does not answer.
    Unanswered,
    /// It cannot be reached.
    Unreachable,
}

/// Watches the workers of this host.
fn watch(
    relay: &Arc<Relay>,
    events: &mpsc::Sender<Event>,
) -> std::io::Result<std::thread::JoinHandle<()>> {
    let (relay, events) = (relay.clone(), events.clone());
    std::thread::Builder::new()
        .name("weightsync-near".into())
        .spawn(move || {
            // It ends when the segment is closed.
            while let Ok(near) = relay.wait(None) {
                if !near.is_empty() && events.blocking_send(Event::Near(near)).is_err() {
                    return;
                }
            }
        })
}

fn join_message(ticket: u64, joining: &Joining) -> ToRoot {
    ToRoot::Join {
        ticket,
        worker: joining.who.worker,
        instance: joining.who.instance,
        pid: joining.pid,
        models: joining.models,
        delivery: joining.delivery.into(),
        device: joining.device.clone(),
        seen: joining.seen,
    }
}

fn held(item: Item) -> message::Held {
    message::Held {
        model: item.model as u8,
        version: item.version,
    }
}

fn item(held: message::Held) -> Item {
    Item {
        model: held.model.into(),
        version: held.version,
    }
}
