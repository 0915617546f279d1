//! The outcome of a publication at each reader.

mod settling;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use weightsync_core::{Level, Outcome, Targets, Version, WorkerId, WorkerReport};

use self::settling::Settling;
use crate::error::Error;
use crate::plan::{Disposition, Key, Plan, PublicationPlan};
use crate::registry::{RegisteredReader, RegistryState, SharedRegistry};
use crate::set::ModelMask;
use crate::snapshot::Snapshot;
use crate::threads::LockExt as _;
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

/// Waits for readers; usable from any thread, also from several.
#[derive(Clone, Debug)]
pub struct Waiter {
    shared: Arc<SharedRegistry>,
}

impl Publication {
    pub(crate) fn new(
        published: PublicationPlan,
        targets: &Targets,
        at: Instant,
        waits_for_late: bool,
    ) -> Self {
        let mut dispositions = published.dispositions.iter();
        let waits = dispositions.any(|(_, disposition)| *disposition == Disposition::Waiting);
        Self {
            // Shared by the clones of this publication: any of them may give the waiting
            // notifications up.
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
    fn late(&self, reader: &RegisteredReader) -> Option<Duration> {
        match self.waits_for_late {
            true => None,
            false => reader.late.since(self.sequence, || reader.progress()),
        }
    }

    /// The outcome at a reader, if it is known yet.
    fn outcome(
        &self,
        (key, disposition): (Key, Disposition),
        reader: &RegisteredReader,
        plan: &Plan,
        level: Level,
    ) -> Option<Outcome> {
        let sequence = self.sequence;
        let applied = |model: &usize| reader.version(*model);
        // Read before the versions below, which the reader stores before this number.
        let loaded = reader.applied();
        let is_applied = || self.is_applied(reader.models, loaded, applied);
        match disposition {
            Disposition::Waiting if self.is_full(key) => return Some(Outcome::Full),
            // Also for a reader that was rejected after it had loaded the set.
            Disposition::Notified | Disposition::Waiting if is_applied() => {
                return Some(Outcome::Applied);
            }
            // Its end may still be open: then the worker lives, and only refused.
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
        // A reader that left reports nothing more.
        if reader.has_left() {
            return Some(Outcome::Left);
        }
        // The reader refused this set, or a newer one that replaced it.
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
    fn is_applied(
        &self,
        mine: ModelMask,
        sequence: u64,
        applied: impl Fn(&usize) -> Version,
    ) -> bool {
        sequence >= self.sequence && self.is_current(mine, applied)
    }

    /// Whether a reader of these models runs the published versions or newer ones.
    fn is_current(&self, mine: ModelMask, applied: impl Fn(&usize) -> Version) -> bool {
        let mut published = self.versions.iter();
        published.all(|(model, version)| !mine.contains(*model) || applied(model) >= *version)
    }

    fn full(&self) -> Option<MutexGuard<'_, BTreeSet<Key>>> {
        let full = self.full.as_ref()?;
        Some(full.locked())
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
    /// [`Error::SenderClosed`] if the [`SegmentWriter`](crate::SegmentWriter) is gone,
    /// [`Error::Forked`] in a forked child, [`Error::BadOption`] if there is no such model.
    pub fn snapshot(&self, model: usize) -> Result<Option<Snapshot>, Error> {
        self.shared.check_model(model)?;
        let state = self.shared.state();
        self.shared.hold(&state, model, state.plan.default_set())
    }

    pub(crate) fn new(shared: Arc<SharedRegistry>) -> Self {
        Self { shared }
    }

    /// Waits until the publication has come to `level` at every reader it was
    /// for, or the reader has refused it or gone, or the deadline comes. One line
    /// for each reader it was for, for each of its workers that left in order since
    /// the last lines were made, and for each that failed, died or was lost and is
    /// neither back nor [forgotten](crate::SegmentWriter::forget); by worker.
    ///
    /// While it waits it also puts into queues what had no room there before.
    /// What finds none by the deadline is [`Outcome::Late`] and goes on waiting
    /// for room, until it is [given up](Self::give_up).
    ///
    /// A reader that was [late](Self::late) for an earlier publication and has not moved
    /// since is not waited for, unless the publication
    /// [waits for such](crate::StagingSlots::wait_for_late).
    ///
    /// # Errors
    ///
    /// [`Error::SenderClosed`] if the [`SegmentWriter`](crate::SegmentWriter) is gone,
    /// [`Error::Forked`] in a forked child, or of the operating system: what goes
    /// wrong at a reader is its line.
    pub fn settle(
        &self,
        publication: &Publication,
        level: Level,
        deadline: Deadline,
    ) -> Result<Vec<WorkerReport>, Error> {
        let shared = &self.shared;
        shared.open()?;
        let awaited = publication.dispositions.clone();
        let mut settling = Settling::new(shared, publication, level, awaited);
        // A look takes the lock for a moment. Nothing is held while this thread sleeps.
        let done = shared.wait_until(deadline, || {
            settling.note_settled();
            Ok(settling.awaited.is_empty().then_some(()))
        });
        // The deadline is no error: the lines of those that did not answer are made below.
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
            // A reader that is gone has its outcome.
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
    pub fn decided(&self, publication: &Publication) -> Result<Vec<WorkerReport>, Error> {
        let shared = &self.shared;
        shared.open()?;
        let decided = |(_, disposition): &&(Key, Disposition)| {
            matches!(
                disposition,
                Disposition::Full | Disposition::Held | Disposition::Shut
            )
        };
        let awaited = publication.dispositions.iter().filter(decided);
        // Each of these has its outcome at the first look, so nothing is waited for.
        let awaited = awaited.copied().collect();
        let mut settling = Settling::new(shared, publication, Level::Staged, awaited);
        settling.note_settled();
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
        // Split, because a reader is changed while the plan is read.
        let RegistryState { readers, plan, .. } = &mut *state;
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
