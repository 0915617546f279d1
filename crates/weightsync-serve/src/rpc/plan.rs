//! The sender's decisions: who should run what, what each worker is called
//! with next, what its words mean.
//!
//! **Guarantee.** Plain values in, plain values out: no sockets, no clock and no
//! waiting here. The versions themselves are opaque ([`Numbered`]).
//!
//! * A worker should run a whole set: all models of a publication or none.
//! * One that is not named keeps what it has, and one that joins gets the newest
//!   set meant for it.
//! * A worker is called with the newest set meant for it: one that came while the
//!   call before was not begun takes its place.
//! * Words count by the sequence they name: an old one never counts for a new
//!   version.
//! * One that failed, died or was lost has a line of every publication for it, until a
//!   worker of its number is back or it is forgotten.

mod desired;
mod mailboxes;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use weightsync::transport::{Attendance, GoneWorker, Lateness, Level, Targets};
use weightsync::{Outcome, Version, WorkerId, WorkerStatus};

use self::desired::Desired;
pub(crate) use self::desired::Set;

/// A version, by its number.
pub(crate) trait Numbered {
    fn number(&self) -> Version;
}

/// A worker's connection: the worker may come back under another one.
pub(crate) type MailboxId = u64;

/// Who joined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct About {
    pub(crate) worker: WorkerId,
    pub(crate) pid: u32,
    /// Where it is called: another process of that number, in another container say, has
    /// another place.
    pub(crate) addr: SocketAddr,
    pub(crate) device: String,
    /// The models it takes, by their places in the sender's set.
    pub(crate) wanted: Vec<usize>,
    /// It says itself when its rendez-vous is over.
    pub(crate) announces: bool,
}

/// How a connection stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Life {
    Here,
    /// It said so before it hung up.
    Left,
    /// It hung up, or nobody listens there any more.
    Died,
    /// It cannot be reached, or has lost a connection and is there: it may come back.
    Lost,
}

/// What a worker is to be called with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Order<V> {
    pub(crate) sequence: u64,
    /// Only the models it takes.
    pub(crate) set: Set<V>,
}

/// Which set a worker asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Want {
    Newest,
    AtLeast(usize, Version),
    Exactly(usize, Version),
}

/// What becomes of a question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Answer<V> {
    /// The sequence is 0 for a set in addition to the newest.
    Set(Order<V>),
    /// There is no such version for this worker; these there are, newest first.
    Unknown { known: Vec<Version> },
    /// Not yet: the question waits under this number.
    Later(u64),
    /// It has gone, or was replaced, or takes no such model.
    Gone,
}

/// What a publication is for one connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Disposition {
    /// It is called.
    Notified,
    /// It is held: it gets the newest when it is released.
    Held,
}

/// A decided publication.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Publication {
    pub(crate) sequence: u64,
    /// The models with the version each got, in the set's order.
    pub(crate) versions: Vec<(usize, Version)>,
    /// What it is for each connection that it is for. They are
    /// [watched](Plan::watch) until [`Plan::unwatch`].
    pub(crate) dispositions: Vec<(MailboxId, Disposition)>,
    /// Workers that were named and are not connected.
    pub(crate) absent: Vec<WorkerId>,
    /// Whether those that are late already are waited for.
    pub(crate) waits_for_late: bool,
}

/// How far a worker is, as far as it has said: what changes once it moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Progress {
    staged: u64,
    taken: u64,
    applied: u64,
    refused: u64,
    /// Its last question.
    asked: u64,
}

/// One connection.
#[derive(Clone, Debug)]
struct Mailbox<V> {
    about: About,
    life: Life,
    /// Nothing was heard of it for so long that a sender that ends does not wait for
    /// it. It may be stopped: it is late, and not dead.
    silent: bool,
    /// How many signs of life it has given.
    signs: u64,
    desired: Option<Order<V>>,
    /// The sequence it was called with last.
    called: u64,
    staged: u64,
    /// What its program was handed last.
    taken: u64,
    applied: u64,
    /// What it runs of each model of the sender.
    runs: Vec<Version>,
    refused: Option<(u64, String)>,
    /// It can use nothing at all.
    rejected: Option<String>,
    /// Whether it was late for a publication, and where it stood then.
    late: Lateness<Progress>,
    /// The number of its last question.
    asked: u64,
    /// It has read all it needs and its models fit: its own rendez-vous is over.
    joined: bool,
    /// Its questions that wait for what there is not yet.
    asking: BTreeMap<u64, Want>,
    /// How many publications may still have a line of it.
    watchers: usize,
}

/// The most workers that are remembered once they are gone.
const MAX_GONE: usize = 1 << 16;

/// The most versions an answer names.
const MAX_KNOWN: usize = 16;

/// What all workers should run, and what they said.
#[derive(Debug)]
pub(crate) struct Plan<V> {
    sequence: u64,
    /// The newest version of each model that was published to any worker.
    newest: Vec<Version>,
    desired: Desired<V>,
    mailboxes: BTreeMap<MailboxId, Mailbox<V>>,
    /// The connection of each worker that is here.
    current: BTreeMap<WorkerId, MailboxId>,
    /// The last connection of each worker that failed, died or was lost and is not back.
    missing: BTreeMap<WorkerId, MailboxId>,
    /// The last of each number that left in order.
    left: BTreeMap<WorkerId, GoneWorker>,
    last_mailbox: MailboxId,
    last_question: u64,
    rejected: Vec<(WorkerId, String)>,
}

impl<V: Clone + Numbered> Plan<V> {
    /// The plan of a sender of `models` models that keeps `history` earlier versions
    /// of each.
    pub(crate) fn new(models: usize, history: u8) -> Self {
        Self {
            sequence: 0,
            newest: vec![Version::NONE; models],
            desired: Desired::new(history.into()),
            mailboxes: BTreeMap::new(),
            current: BTreeMap::new(),
            missing: BTreeMap::new(),
            left: BTreeMap::new(),
            last_mailbox: 0,
            last_question: 0,
            rejected: Vec::new(),
        }
    }
}

/// Publishing.
impl<V: Clone + Numbered> Plan<V> {
    /// Publishes versions as one set. Those of `before` that have gone meanwhile have
    /// their line, too: they were here when the send began. A process that has registered
    /// again has the line of its new connection alone.
    pub(crate) fn publish(
        &mut self,
        update: &Set<V>,
        targets: &Targets,
        before: &[MailboxId],
    ) -> Publication {
        self.desired.publish(update, targets);
        for (model, version) in update.iter() {
            self.newest[model] = version.number();
        }
        self.sequence += 1;
        let named = |worker: &WorkerId| match targets {
            Targets::All => true,
            Targets::Workers(workers) => workers.contains(worker),
        };
        let mut dispositions = Vec::new();
        let places = self.current.iter().filter_map(|(worker, id)| {
            let About { pid, addr, .. } = self.mailboxes.get(id)?.about;
            // It listens elsewhere each time that it joins again.
            Some((*worker, (pid, addr.ip())))
        });
        let places: BTreeMap<_, _> = places.collect();
        let (desired, sequence) = (&self.desired, self.sequence);
        for (id, mailbox) in &mut self.mailboxes {
            let worker = mailbox.about.worker;
            let takes_one = update
                .iter()
                .any(|(model, _)| mailbox.about.wanted.contains(&model));
            if !takes_one || !named(&worker) {
                continue;
            }
            if self.current.get(&worker) != Some(id) {
                let place = (mailbox.about.pid, mailbox.about.addr.ip());
                let is_back = places.get(&worker) == Some(&place);
                let is_missing = self.missing.get(&worker) == Some(id);
                if is_missing || (before.contains(id) && !is_back) {
                    dispositions.push((*id, Disposition::Notified));
                }
                continue;
            }
            if desired.is_held(worker) {
                dispositions.push((*id, Disposition::Held));
                continue;
            }
            let set = desired.for_worker(worker).only(&mailbox.about.wanted);
            mailbox.mean(Order { sequence, set });
            dispositions.push((*id, Disposition::Notified));
        }
        for (id, _) in &dispositions {
            self.watch(*id);
        }
        let mut absent = match targets {
            Targets::All => Vec::new(),
            Targets::Workers(workers) => workers.clone(),
        };
        // One that failed, died or was lost has its line.
        let has_line = |worker: &WorkerId| {
            let mailboxes = dispositions
                .iter()
                .filter_map(|(id, _)| self.mailboxes.get(id));
            mailboxes
                .map(|mailbox| mailbox.about.worker)
                .any(|one| one == *worker)
        };
        absent.retain(|worker| !self.current.contains_key(worker) && !has_line(worker));
        absent.sort_unstable();
        absent.dedup();
        Publication {
            sequence,
            versions: update
                .iter()
                .map(|(model, version)| (model, version.number()))
                .collect(),
            dispositions,
            absent,
            waits_for_late: false,
        }
    }

    /// Watches the connections there are: they have a line of what is published next.
    pub(crate) fn watch_all(&mut self) -> Vec<MailboxId> {
        let all: Vec<_> = self.current.values().copied().collect();
        for id in &all {
            self.watch(*id);
        }
        all
    }

    fn watch(&mut self, id: MailboxId) {
        if let Some(mailbox) = self.mailboxes.get_mut(&id) {
            mailbox.watchers += 1;
        }
    }

    /// Nobody makes lines of these any more, on behalf of one who watched them.
    pub(crate) fn unwatch(&mut self, ids: impl IntoIterator<Item = MailboxId>) {
        for id in ids {
            if let Some(mailbox) = self.mailboxes.get_mut(&id) {
                mailbox.watchers = mailbox.watchers.saturating_sub(1);
                self.forget(id);
            }
        }
    }

    /// What became of a publication at a connection; `None` while that is open.
    pub(crate) fn outcome(
        &self,
        of: &Publication,
        (id, disposition): (MailboxId, Disposition),
        level: Level,
    ) -> Option<Outcome> {
        let mailbox = self.mailboxes.get(&id)?;
        let sequence = of.sequence;
        if disposition == Disposition::Notified
            && mailbox.applied >= sequence
            && mailbox.is_current(of)
        {
            return Some(Outcome::Applied);
        }
        if let Some(reason) = mailbox.rejected.clone() {
            return Some(match mailbox.life {
                Life::Here => Outcome::Refused { reason },
                Life::Left | Life::Died | Life::Lost => Outcome::Failed { reason },
            });
        }
        if disposition == Disposition::Held {
            return Some(Outcome::Held);
        }
        match mailbox.life {
            Life::Left => return Some(Outcome::Left),
            Life::Died if level == Level::Applied || mailbox.staged < sequence => {
                return Some(Outcome::Died);
            }
            Life::Lost if level == Level::Applied || mailbox.staged < sequence => {
                return Some(Outcome::Lost);
            }
            Life::Died | Life::Lost | Life::Here => {}
        }
        if let Some((refused, reason)) = &mailbox.refused
            && *refused >= sequence
        {
            let reason = reason.clone();
            return Some(Outcome::Refused { reason });
        }
        if mailbox.applied >= sequence {
            // It had it, and went back to an older one that it asked for.
            return Some(Outcome::Asks);
        }
        if level == Level::Staged && mailbox.staged >= sequence {
            return Some(Outcome::Staged);
        }
        // It waits for one to come and takes nothing meanwhile, and that one may
        // come only after this send.
        (!mailbox.asking.is_empty()).then_some(Outcome::Asks)
    }

    /// For how long a connection has been late, if a publication does not wait for it.
    pub(crate) fn late(&self, of: &Publication, id: MailboxId) -> Option<Duration> {
        let mailbox = self.mailboxes.get(&id).filter(|_| !of.waits_for_late)?;
        mailbox.late.since(of.sequence, || mailbox.progress())
    }

    /// The deadline of a publication that was made at this time has come: later ones do
    /// not wait for those that have not got to this level, until they move.
    pub(crate) fn note_late(&mut self, of: &Publication, level: Level, at: Instant) {
        for disposition in &of.dispositions {
            if self.outcome(of, *disposition, level).is_none()
                && let Some(mailbox) = self.mailboxes.get_mut(&disposition.0)
            {
                let progress = mailbox.progress();
                mailbox.late.note(of.sequence, at, progress);
            }
        }
    }

    /// What became of it so far at a connection for which that is open.
    pub(crate) fn so_far(&self, of: &Publication, id: MailboxId) -> Outcome {
        let mailbox = self.mailboxes.get(&id);
        match mailbox.is_some_and(|mailbox| mailbox.taken >= of.sequence) {
            true => Outcome::Staged,
            false => Outcome::Late,
        }
    }

    /// Whether everybody who is heard of has taken what is meant for it, or cannot.
    pub(crate) fn is_handed_over(&self) -> bool {
        let mailboxes = self
            .current
            .values()
            .filter_map(|id| self.mailboxes.get(id));
        let mut heard = mailboxes.filter(|mailbox| !mailbox.silent);
        heard.all(|mailbox| {
            let refused = mailbox.refused.as_ref().map_or(0, |(refused, _)| *refused);
            let desired = mailbox.desired.as_ref().map_or(0, |order| order.sequence);
            mailbox.staged.max(refused) >= desired
        })
    }

    /// What a connection runs of the models of a publication, and whether that is all
    /// of what was published to it.
    pub(crate) fn versions(&self, id: MailboxId, of: &Publication) -> (Vec<Version>, bool) {
        let Some(mailbox) = self.mailboxes.get(&id) else {
            return (vec![Version::NONE; of.versions.len()], false);
        };
        let sent = of.versions.iter();
        let runs = sent.map(|(model, _)| mailbox.runs[*model]).collect();
        (runs, mailbox.is_current(of))
    }
}

impl<V: Clone + Numbered> Mailbox<V> {
    /// Means it to have this. The questions that this answers wait no more: a send is
    /// not to find that a worker it is for takes nothing.
    fn mean(&mut self, order: Order<V>) {
        let set = &order.set;
        self.asking.retain(|_, want| match want {
            Want::Newest => set.is_empty(),
            Want::AtLeast(model, least) => set.version(*model) < *least,
            Want::Exactly(model, exact) => set.version(*model) != *exact,
        });
        self.desired = Some(order);
    }

    fn progress(&self) -> Progress {
        Progress {
            staged: self.staged,
            taken: self.taken,
            applied: self.applied,
            refused: self.refused.as_ref().map_or(0, |(sequence, _)| *sequence),
            asked: self.asked,
        }
    }

    /// Whether a rendez-vous counts it: its own has come to an end, or it has loaded
    /// something.
    fn belongs(&self) -> bool {
        self.joined || self.runs.iter().any(|version| !version.is_none())
    }

    /// How it went; `None` while it is here.
    fn end(&self) -> Option<Outcome> {
        Some(match (self.life, &self.rejected) {
            (Life::Here, _) => return None,
            (_, Some(reason)) => Outcome::Failed {
                reason: reason.clone(),
            },
            (Life::Left, None) => Outcome::Left,
            (Life::Died, None) => Outcome::Died,
            (Life::Lost, None) => Outcome::Lost,
        })
    }

    /// Whether it runs what was published, or newer, of each model it takes.
    fn is_current(&self, of: &Publication) -> bool {
        of.versions.iter().all(|(model, version)| {
            !self.about.wanted.contains(model) || self.runs[*model] >= *version
        })
    }
}

/// Holding.
impl<V: Clone + Numbered> Plan<V> {
    /// Holds workers, connected or not, at what they should run now.
    pub(crate) fn hold(&mut self, workers: &[WorkerId]) {
        for worker in workers {
            self.desired.hold(*worker);
        }
    }

    /// Holds them no more: those for which something was published meanwhile are
    /// desired to run the newest at once.
    pub(crate) fn release(&mut self, workers: &[WorkerId]) {
        for worker in workers {
            let Some(was) = self.desired.release(*worker) else {
                continue;
            };
            let Some(mailbox) = self
                .current
                .get(worker)
                .and_then(|id| self.mailboxes.get_mut(id))
            else {
                continue;
            };
            let set = self.desired.for_worker(*worker).only(&mailbox.about.wanted);
            if !set.is_same(&was.only(&mailbox.about.wanted)) && mailbox.rejected.is_none() {
                // A call of its own, above what it had.
                self.sequence += 1;
                let sequence = self.sequence;
                mailbox.mean(Order { sequence, set });
            }
        }
    }
}

/// Looking.
impl<V: Clone + Numbered> Plan<V> {
    /// The newest version of a model that was published to any worker.
    pub(crate) fn newest(&self, model: usize) -> Version {
        self.newest[model]
    }

    /// The version of a model that was sent to all last.
    pub(crate) fn default_version(&self, model: usize) -> Option<&V> {
        self.desired.default_set().of(model)
    }

    /// The one version of a model that all the targets should have once they
    /// are not held; all of them, oldest first, if they differ.
    pub(crate) fn common(
        &self,
        model: usize,
        targets: &Targets,
    ) -> Result<Option<V>, Vec<Version>> {
        let mut sets: Vec<Set<V>> = match targets {
            Targets::Workers(workers) => {
                let workers = workers.iter();
                workers
                    .map(|worker| self.desired.if_released(*worker))
                    .collect()
            }
            Targets::All => {
                let takes = |id: &&MailboxId| {
                    let mailbox = self.mailboxes.get(id);
                    mailbox.is_some_and(|mailbox| mailbox.about.wanted.contains(&model))
                };
                let mailboxes = self.current.iter().filter(|(_, id)| takes(id));
                let sets = mailboxes.map(|(worker, _)| self.desired.if_released(*worker));
                let default = std::iter::once(self.desired.default_set().clone());
                default.chain(sets).collect()
            }
        };
        let mut versions: Vec<_> = sets.iter().map(|set| set.version(model)).collect();
        versions.sort_unstable();
        versions.dedup();
        match (sets.pop(), versions.len()) {
            (Some(set), 1) => Ok(set.of(model).cloned()),
            (None, _) => Ok(None),
            _ => Err(versions),
        }
    }

    /// Exactly this version of a model, if it is kept or meant for somebody.
    pub(crate) fn find(&self, model: usize, version: Version) -> Option<&V> {
        let told = || {
            let mailboxes = self.mailboxes.values();
            let mut told = mailboxes.filter_map(|mailbox| mailbox.desired.as_ref()?.set.of(model));
            told.find(|one| one.number() == version)
        };
        self.desired.find(model, version).or_else(told)
    }

    /// The versions of a model that [`find`](Self::find) finds.
    pub(crate) fn kept(&self, model: usize) -> Vec<Version> {
        let told = self
            .mailboxes
            .values()
            .filter_map(|mailbox| mailbox.desired.as_ref());
        let sets = self.desired.sets().chain(told.map(|order| &order.set));
        let mut kept: Vec<_> = sets
            .filter_map(|set| set.of(model))
            .map(Numbered::number)
            .collect();
        kept.sort_unstable_by(|a, b| b.cmp(a));
        kept.dedup();
        kept
    }

    /// The workers that are here and can use the models.
    pub(crate) fn workers(&self) -> Vec<WorkerStatus> {
        self.here(|_| true)
    }

    /// Those of them that a rendez-vous counts.
    fn members(&self) -> Vec<WorkerStatus> {
        self.here(Mailbox::belongs)
    }

    fn here(&self, counts: impl Fn(&Mailbox<V>) -> bool) -> Vec<WorkerStatus> {
        let here = self
            .current
            .values()
            .filter_map(|id| self.mailboxes.get(id));
        let here = here.filter(|mailbox| mailbox.rejected.is_none() && counts(mailbox));
        here.map(|mailbox| self.status(mailbox)).collect()
    }

    fn status(&self, mailbox: &Mailbox<V>) -> WorkerStatus {
        let about = &mailbox.about;
        let mut status = WorkerStatus::new(about.worker, about.pid, self.newest.len());
        status.device = about.device.clone();
        status.held = self.desired.is_held(about.worker);
        status.versions = mailbox.runs.clone();
        status
    }

    /// Who is here, and who was.
    pub(crate) fn attendance(&self) -> Attendance {
        let missing = self.missing.values().filter_map(|id| {
            let mailbox = self.mailboxes.get(id)?;
            Some(GoneWorker {
                status: self.status(mailbox),
                how: mailbox.end()?,
                joined: *id,
            })
        });
        let mut gone: Vec<_> = missing.chain(self.left.values().cloned()).collect();
        gone.sort_by_key(|gone| gone.joined);
        Attendance {
            workers: self.members(),
            rejected: self.rejected.iter().map(|(worker, _)| *worker).collect(),
            gone,
            joined: self.last_mailbox,
        }
    }

    pub(crate) fn take_rejections(&mut self) -> Vec<(WorkerId, String)> {
        std::mem::take(&mut self.rejected)
    }
}

#[cfg(test)]
mod tests;
