//! The outcome of a publication at each reader.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use weightsync_core::{Version, WorkerId};

use crate::error::Error;
use crate::plan::{Disposition, Key, Plan, Published, Targets};
use crate::registry::{Departure, Gone, Reader, Shared, State};
use crate::set::Models;
use crate::snapshot::Snapshot;
use crate::wait::Deadline;

/// One step of the sender: new versions of one or more models, which become live together.
#[derive(Clone, Debug)]
pub struct Publication {
    /// Numbers the sender's steps. A reader that has taken a set with this or a higher number has
    /// this publication or a newer one.
    pub sequence: u64,
    /// The models and their new versions.
    pub versions: Vec<(usize, Version)>,
    /// When the publication became live.
    pub at: Instant,
    /// The effect on each reader that was connected.
    dispositions: Vec<(Key, Disposition)>,
    absent: Vec<WorkerId>,
    /// The workers that the publication was for; `None` for all.
    named: Option<BTreeSet<WorkerId>>,
    /// Readers whose queue had no room until their share was given up; `None` if all had room.
    full: Option<Arc<Mutex<BTreeSet<Key>>>>,
    /// Whether to wait for readers that were late for an earlier publication.
    waits_for_late: bool,
}

/// How far a publication must have come at a reader to count as done there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// The reader has taken it: the record is checked, and the slots are pinned.
    Staged,
    /// The worker has reported that it has loaded it.
    Applied,
}

/// The outcome of a publication at one reader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The worker has loaded the publication or a newer one, and runs no older version of any of
    /// its models.
    Applied,
    /// The reader has taken the publication or a newer one; the caller waited only for
    /// [`Level::Staged`].
    Staged,
    /// The worker refused the publication, and goes on with its earlier versions.
    Refused {
        /// The worker's reason.
        reason: String,
    },
    /// The worker's process died.
    Died,
    /// The worker closed its end in order.
    Left,
    /// The worker could use nothing more, and has gone.
    Failed {
        /// The worker's reason.
        reason: String,
    },
    /// Nothing was heard of the worker for too long; it may come back.
    Lost,
    /// The worker was not done at the deadline.
    Late,
    /// The worker is held; it gets the newest set when it is released.
    Held,
    /// The worker's queue had no room in time, or too many publications already waited for room.
    /// The worker will not get this one.
    Full,
    /// The worker takes only what it asks for, so the send did not wait for it; or it has since
    /// asked for an older version, or waits for a version to come.
    Asks,
    /// The worker was named but is not connected; it gets the publication when it joins.
    Absent,
}

/// One line of a publication's result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReaderOutcome {
    /// The worker.
    pub worker: WorkerId,
    /// The worker's process; 0 if it is not connected.
    pub pid: u32,
    /// The outcome.
    pub outcome: Outcome,
    /// The version of each model that the worker reports as loaded; `Version::NONE` before the
    /// first.
    pub versions: Vec<Version>,
    /// Whether these are the published versions or newer ones, for each model that the worker
    /// takes.
    pub current: bool,
    /// How long after the publication the sender learned of the outcome.
    pub after: Duration,
    /// For how long the worker has been late, if it was late for an earlier publication and has not
    /// moved since. The send did not wait for it.
    pub late: Option<Duration>,
}

/// Waits for readers; usable from any thread, also from several.
#[derive(Clone, Debug)]
pub struct Waiter {
    shared: Arc<Shared>,
}

impl Publication {
    pub(crate) fn new(
        published: Published,
        targets: &Targets,
        at: Instant,
        waits_for_late: bool,
    ) -> Self {
        let mut dispositions = published.dispositions.iter();
        let waits = dispositions.any(|(_, disposition)| *disposition == Disposition::Waiting);
        Self {
            full: waits.then(Arc::default),
            sequence: published.sequence,
            versions: published.versions,
            at,
            dispositions: published.dispositions,
            absent: published.absent,
            named: match targets {
                Targets::All => None,
                Targets::Workers(workers) => Some(workers.iter().copied().collect()),
            },
            waits_for_late,
        }
    }

    /// For how long a reader has been late, if the send does not wait for it.
    fn late(&self, reader: &Reader) -> Option<Duration> {
        match self.waits_for_late {
            true => None,
            false => reader.late.since(self.sequence, || reader.progress()),
        }
    }

    /// The outcome at a reader, if it is known yet.
    fn outcome(
        &self,
        (key, disposition): (Key, Disposition),
        reader: &Reader,
        plan: &Plan,
        level: Level,
    ) -> Option<Outcome> {
        let sequence = self.sequence;
        let applied = |model: &usize| reader.version(*model);
        let loaded = reader.applied();
        let is_applied = || self.is_applied(reader.models, loaded, applied);
        match disposition {
            Disposition::Waiting if self.is_full(key) => return Some(Outcome::Full),
            // Also for a reader that was rejected after it had loaded the set.
            Disposition::Notified | Disposition::Waiting if is_applied() => {
                return Some(Outcome::Applied);
            }
            _ if reader.unusable.is_some() => {
                let reason = reader.unusable.clone().unwrap_or_default();
                return Some(match reader.has_left() {
                    true => Outcome::Failed { reason },
                    false => Outcome::Refused { reason },
                });
            }
            Disposition::Notified | Disposition::Waiting => {}
            Disposition::Held => return Some(Outcome::Held),
            Disposition::Full => return Some(Outcome::Full),
            Disposition::Asks => return Some(Outcome::Asks),
            // The worker is unusable, so it was a refusal above.
            Disposition::Shut => return Some(Outcome::Late),
        }
        if reader.has_left() {
            return Some(Outcome::Left);
        }
        if let Some((refused, reason)) = &reader.refused
            && *refused >= sequence
        {
            let reason = reason.clone();
            return Some(Outcome::Refused { reason });
        }
        if loaded >= sequence {
            // The worker had loaded it, and went back to an older version that it asked for.
            return Some(Outcome::Asks);
        }
        if level == Level::Staged && reader.taken() >= sequence {
            return Some(Outcome::Staged);
        }
        // The worker waits for a version to come, takes nothing meanwhile, and that version may
        // come only after this send.
        let awaits = plan.awaits(key, reader.through());
        awaits.then_some(Outcome::Asks)
    }

    /// Whether a reader of these models with these loaded versions has loaded the publication. It
    /// may have gone back since, to a version that it asked for.
    fn is_applied(&self, mine: Models, sequence: u64, applied: impl Fn(&usize) -> Version) -> bool {
        sequence >= self.sequence && self.is_current(mine, applied)
    }

    /// Whether a reader of these models runs the published versions or newer ones.
    fn is_current(&self, mine: Models, applied: impl Fn(&usize) -> Version) -> bool {
        let mut published = self.versions.iter();
        published.all(|(model, version)| !mine.contains(*model) || applied(model) >= *version)
    }

    fn full(&self) -> Option<MutexGuard<'_, BTreeSet<Key>>> {
        let full = self.full.as_ref()?;
        Some(full.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn is_full(&self, key: Key) -> bool {
        self.full().is_some_and(|full| full.contains(&key))
    }

    fn is_for(&self, worker: WorkerId) -> bool {
        self.named
            .as_ref()
            .is_none_or(|named| named.contains(&worker))
    }
}

impl Waiter {
    /// The sender's own pin on the version of a model that was last sent to all; `None` before the
    /// first.
    ///
    /// # Errors
    ///
    /// [`Error::SenderClosed`] if the [`Writer`](crate::Writer) is gone, [`Error::Forked`] in a
    /// forked child, [`Error::BadOption`] if there is no such model.
    pub fn snapshot(&self, model: usize) -> Result<Option<Snapshot>, Error> {
        self.shared.check_model(model)?;
        let state = self.shared.state();
        self.shared.hold(&state, model, state.plan.default_set())
    }

    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        Self { shared }
    }

    /// Waits until the publication has come to `level` at every reader it was
    /// for, or the reader has refused it or gone, or the deadline comes. One line
    /// for each reader it was for, for each of its workers that left in order since
    /// the last lines were made, and for each that failed, died or was lost and is
    /// neither back nor [forgotten](crate::Writer::forget); by worker.
    ///
    /// While it waits it also puts into queues what had no room there before.
    /// What finds none by the deadline is [`Outcome::Late`] and goes on waiting
    /// for room, until it is [given up](Self::give_up).
    ///
    /// A reader that was [late](Self::late) for an earlier publication and has not moved
    /// since is not waited for, unless the publication
    /// [waits for such](crate::Staging::wait_for_late).
    ///
    /// # Errors
    ///
    /// [`Error::SenderClosed`] if the [`Writer`](crate::Writer) is gone,
    /// [`Error::Forked`] in a forked child, or of the operating system: what goes
    /// wrong at a reader is its line.
    pub fn settle(
        &self,
        publication: &Publication,
        level: Level,
        deadline: Deadline,
    ) -> Result<Vec<ReaderOutcome>, Error> {
        let shared = &self.shared;
        shared.open()?;
        let mut settling = Settling {
            shared,
            after: None,
            publication,
            level,
            listener: None,
            passed: Open::default(),
            awaited: Open::of(publication.dispositions.clone()),
            lines: Vec::with_capacity(publication.dispositions.len()),
            reported: Vec::new(),
            named: Vec::new(),
        };
        let done = shared.wait_until(deadline, || {
            settling.look();
            Ok(settling.awaited.is_empty().then_some(()))
        });
        done.inspect_err(|_| settling.unreport())?;
        settling.late();
        settling.report_the_rest();
        let mut lines = std::mem::take(&mut settling.lines);
        lines.sort_by_key(|line| line.worker);
        Ok(lines)
    }

    /// Whether [`settle`](Self::settle) would find nothing to wait for. Only looks: lines that are
    /// reported once are still to be reported.
    ///
    /// # Errors
    ///
    /// As [`settle`](Self::settle).
    pub fn is_settled(&self, publication: &Publication, level: Level) -> Result<bool, Error> {
        self.shared.open()?;
        let state = self.shared.state();
        Ok(publication.dispositions.iter().all(|(key, disposition)| {
            state.readers.get(key).is_none_or(|reader| {
                let disposition = (*key, *disposition);
                let known = publication.outcome(disposition, reader, &state.plan, level);
                known.is_some() || publication.late(reader).is_some()
            })
        }))
    }

    /// The lines that are known without waiting: readers that will not get the publication
    /// ([`Outcome::Full`]), not now ([`Outcome::Held`]) or cannot use it ([`Outcome::Refused`]);
    /// readers that departed, not in order; and named workers that are not connected.
    ///
    /// # Errors
    ///
    /// As [`settle`](Self::settle).
    pub fn decided(&self, publication: &Publication) -> Result<Vec<ReaderOutcome>, Error> {
        let shared = &self.shared;
        shared.open()?;
        let decided = |(_, disposition): &&(Key, Disposition)| {
            matches!(
                disposition,
                Disposition::Full | Disposition::Held | Disposition::Shut
            )
        };
        let mut settling = Settling {
            shared,
            after: None,
            publication,
            level: Level::Staged,
            listener: None,
            passed: Open::default(),
            awaited: Open::of(
                publication
                    .dispositions
                    .iter()
                    .filter(decided)
                    .copied()
                    .collect(),
            ),
            lines: Vec::new(),
            reported: Vec::new(),
            named: Vec::new(),
        };
        settling.look();
        settling.report_missing(&shared.state());
        settling.report_absent();
        let mut lines = std::mem::take(&mut settling.lines);
        lines.sort_by_key(|line| line.worker);
        Ok(lines)
    }

    /// Notes that the deadline of the publication has come. Later publications do not wait for
    /// readers that have not reached `level`, until these move. The caller can still wait for this
    /// publication again.
    ///
    /// # Errors
    ///
    /// As [`settle`](Self::settle).
    pub fn late(&self, publication: &Publication, level: Level) -> Result<(), Error> {
        self.shared.open()?;
        let mut state = self.shared.state();
        let State { readers, plan, .. } = &mut *state;
        for (key, disposition) in &publication.dispositions {
            if let Some(reader) = readers.get_mut(key)
                && publication
                    .outcome((*key, *disposition), reader, plan, level)
                    .is_none()
            {
                let progress = reader.progress();
                let (sequence, at) = (publication.sequence, publication.at);
                reader.late.note(sequence, at, progress);
            }
        }
        Ok(())
    }

    /// Gives up the notifications that still wait for room in a queue. Those readers will not get
    /// the publication, and their line says so ([`Outcome::Full`]). A reader that wants only the
    /// newest still gets it.
    ///
    /// # Errors
    ///
    /// As [`settle`](Self::settle).
    pub fn give_up(&self, publication: &Publication) -> Result<(), Error> {
        self.shared.open()?;
        let mut state = self.shared.state();
        // Uses the room that there is by now.
        self.shared.deliver(&mut state);
        for (key, disposition) in &publication.dispositions {
            if *disposition == Disposition::Waiting
                && state.plan.give_up(*key, publication.sequence)
                && let Some(mut full) = publication.full()
            {
                full.insert(*key);
                state.mark_changed(*key);
            }
        }
        Ok(())
    }
}

struct Settling<'a> {
    shared: &'a Shared,
    /// When the last look that found something took place; read once for all its lines.
    after: Option<Duration>,
    publication: &'a Publication,
    level: Level,
    /// The number under which it gets [changes](State::mark_changed) of remote readers, from its
    /// first look on.
    listener: Option<u64>,
    /// Readers to wait for, whose outcome is not known yet.
    awaited: Open,
    /// Readers not to wait for, because they were late before and have not moved.
    passed: Open,
    lines: Vec<ReaderOutcome>,
    /// Departed readers among the lines, which are reported once.
    reported: Vec<Key>,
    /// Readers that have a line. Some were connected when it was made, and may depart at any
    /// moment.
    named: Vec<Key>,
}

/// Readers whose outcome is not known yet.
#[derive(Debug, Default)]
struct Open {
    /// Looked at each time.
    processes: Vec<(Key, Disposition)>,
    /// Looked at only after a change.
    remote_readers: BTreeMap<Key, Disposition>,
}

impl Open {
    /// The first look finds out which of them are remote readers.
    fn of(dispositions: Vec<(Key, Disposition)>) -> Self {
        Self {
            processes: dispositions,
            remote_readers: BTreeMap::new(),
        }
    }

    fn is_empty(&self) -> bool {
        self.processes.is_empty() && self.remote_readers.is_empty()
    }

    fn take(&mut self) -> impl Iterator<Item = Key> {
        let Self {
            processes,
            remote_readers,
        } = std::mem::take(self);
        let remote_readers = remote_readers.into_keys();
        processes
            .into_iter()
            .map(|(key, _)| key)
            .chain(remote_readers)
    }
}

impl Settling<'_> {
    /// Moves readers whose outcome is known to `lines`.
    fn look(&mut self) {
        self.after = None;
        let mut state = self.shared.state();
        if self.publication.full.is_some() && state.plan.anything_waits() {
            self.shared.deliver(&mut state);
        }
        match self.listener {
            None => self.listener = Some(state.listen()),
            Some(listener) => {
                for key in state.take_changed(listener) {
                    let awaited = self.awaited.remote_readers.remove_entry(&key);
                    let again = awaited.or_else(|| self.passed.remote_readers.remove_entry(&key));
                    self.awaited.processes.extend(again);
                }
            }
        }
        let mut again = std::mem::take(&mut self.awaited.processes);
        again.append(&mut self.passed.processes);
        for (key, disposition) in again {
            if self.is_known(&mut state, key, disposition) {
                continue;
            }
            let reader = state.readers.get(&key);
            let late = reader.and_then(|reader| self.publication.late(reader));
            let open = match late {
                Some(_) => &mut self.passed,
                None => &mut self.awaited,
            };
            match reader.and_then(Reader::socket) {
                Some(_) => open.processes.push((key, disposition)),
                None => drop(open.remote_readers.insert(key, disposition)),
            }
        }
    }

    /// Whether a reader's outcome is known; its line is there then.
    fn is_known(&mut self, state: &mut State, key: Key, disposition: Disposition) -> bool {
        // A worker moves from the table to the departed ones in a single step. So a reader is in
        // one of the two, unless thousands departed since.
        if let Some(reader) = state.readers.get(&key) {
            let publication = self.publication;
            let known = publication.outcome((key, disposition), reader, &state.plan, self.level);
            let Some(outcome) = known else {
                return false;
            };
            if outcome == Outcome::Left
                && let Some(reader) = state.readers.get_mut(&key)
                && !std::mem::replace(&mut reader.reported, true)
            {
                self.reported.push(key);
            }
            self.line(state, key, outcome);
        } else if let Some(gone) = state.report_gone(key) {
            if !gone.reported {
                self.reported.push(key);
            }
            self.gone_line(&gone);
        }
        true
    }

    /// No report has the lines, so departed workers must be reported again.
    fn unreport(&mut self) {
        let mut state = self.shared.state();
        for key in self.reported.drain(..) {
            state.unreport(key);
        }
    }

    /// Adds the lines of readers that did not answer in time, or were not waited for.
    fn late(&mut self) {
        self.after = None;
        let open: Vec<Key> = self.awaited.take().chain(self.passed.take()).collect();
        if open.is_empty() {
            return;
        }
        let state = self.shared.state();
        for key in open {
            self.line(&state, key, Outcome::Late);
        }
    }

    /// Adds the lines of workers that were not among the publication's readers: those that are not
    /// connected, cannot use the models, or departed.
    fn report_the_rest(&mut self) {
        let mut state = self.shared.state();
        // The first version may be out now, so further slots can be made.
        self.shared.make_ahead(&mut state);
        let publication = self.publication;
        for one in state.report_rejected(|worker| publication.is_for(worker)) {
            let reported = publication
                .dispositions
                .iter()
                .any(|(key, _)| *key == one.key)
                || state.missing().any(|gone| gone.key == one.key);
            // If a departed worker's number belongs to another reader by now, that reader has the
            // line.
            let succeeded = !state.readers.contains_key(&one.key)
                && publication
                    .dispositions
                    .iter()
                    .any(|(key, _)| *key > one.key && key.0 == one.key.0);
            if reported || succeeded {
                continue;
            }
            let reason = one.reason;
            self.named.push(one.key);
            self.lines.push(ReaderOutcome {
                worker: one.key.0,
                pid: one.pid,
                outcome: Outcome::Refused { reason },
                versions: vec![Version::NONE; self.shared.models.len()],
                current: false,
                after: publication.at.elapsed(),
                late: None,
            });
        }
        let mut again = Vec::new();
        for gone in state.report_unreported(|worker| publication.is_for(worker)) {
            if !self.named.contains(&gone.key) {
                self.gone_line(&gone);
            } else if !gone.is_in_order() {
                // The reader has its line, and one is enough: the next report names its death.
                again.push(gone.key);
            }
        }
        for key in again {
            state.unreport(key);
        }
        self.report_missing(&state);
        drop(state);
        self.report_absent();
    }

    /// Adds the lines of workers that failed, died or were lost, and are not back.
    fn report_missing(&mut self, state: &State) {
        let publication = self.publication;
        let mut missing = state.missing().peekable();
        if missing.peek().is_none() {
            return;
        }
        let named: BTreeSet<Key> = self.named.iter().copied().collect();
        for gone in missing {
            let mut sent = publication.versions.iter();
            let takes_one = sent.any(|(model, _)| gone.models.contains(*model));
            if takes_one && publication.is_for(gone.key.0) && !named.contains(&gone.key) {
                self.gone_line(gone);
            }
        }
    }

    /// Adds the lines of workers that were named and are not connected.
    fn report_absent(&mut self) {
        let publication = self.publication;
        for worker in &publication.absent {
            if self.lines.iter().any(|line| line.worker == *worker) {
                continue;
            }
            self.lines.push(ReaderOutcome {
                worker: *worker,
                pid: 0,
                outcome: Outcome::Absent,
                versions: vec![Version::NONE; self.shared.models.len()],
                current: false,
                after: publication.at.elapsed(),
                late: None,
            });
        }
    }

    fn line(&mut self, state: &State, key: Key, outcome: Outcome) {
        let Some(reader) = state.readers.get(&key) else {
            return;
        };
        let after = self.after();
        let versions = reader.versions(self.shared.models.len());
        let applied = |model: &usize| versions[*model];
        let late = match outcome {
            Outcome::Late => self.publication.late(reader),
            _ => None,
        };
        self.named.push(key);
        self.lines.push(ReaderOutcome {
            worker: key.0,
            pid: reader.pid(),
            outcome,
            current: self.publication.is_current(reader.models, applied),
            versions,
            after,
            late,
        });
    }

    fn after(&mut self) -> Duration {
        *self
            .after
            .get_or_insert_with(|| self.publication.at.elapsed())
    }

    fn gone_line(&mut self, gone: &Gone) {
        let loaded = |model: &usize| gone.versions[*model];
        let did_its_part = self
            .publication
            .is_applied(gone.models, gone.applied, loaded);
        let outcome = match (gone.departure, &gone.reason) {
            // The worker did its part before it left.
            (Departure::Left, _) if did_its_part => Outcome::Applied,
            (_, Some(reason)) => Outcome::Failed {
                reason: reason.clone(),
            },
            (Departure::Left, None) => Outcome::Left,
            (Departure::Died, None) => Outcome::Died,
            (Departure::Lost, None) => Outcome::Lost,
        };
        let after = self.after();
        self.named.push(gone.key);
        self.lines.push(ReaderOutcome {
            worker: gone.key.0,
            pid: gone.pid,
            outcome,
            current: self.publication.is_current(gone.models, loaded),
            versions: gone.versions.clone(),
            after,
            late: None,
        });
    }
}

impl Drop for Settling<'_> {
    fn drop(&mut self) {
        if let Some(listener) = self.listener {
            self.shared.state().stop_listening(listener);
        }
    }
}
