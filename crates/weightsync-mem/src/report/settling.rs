//! One wait for the readers of a publication.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use weightsync_core::{Level, Outcome, Version, WorkerReport};

use super::Publication;
use crate::plan::{Disposition, Key};
use crate::registry::{Departure, GoneReader, RegisteredReader, RegistryState, SharedRegistry};

/// What a wait for readers knows so far.
pub(super) struct Settling<'a> {
    shared: &'a SharedRegistry,
    /// When the last look that found something took place; read once for all its lines.
    after: Option<Duration>,
    publication: &'a Publication,
    level: Level,
    /// The number under which it gets [changes](RegistryState::mark_changed) of remote readers,
    /// from its first look on.
    listener: Option<u64>,
    /// Readers to wait for, whose outcome is not known yet.
    pub(super) awaited: Open,
    /// Readers not to wait for, because they were late before and have not moved.
    passed: Open,
    pub(super) lines: Vec<WorkerReport>,
    /// Departed readers among the lines, which are reported once.
    reported: Vec<Key>,
    /// Readers that have a line. Some were connected when it was made, and may depart at any
    /// moment.
    named: Vec<Key>,
}

/// Readers whose outcome is not known yet.
#[derive(Debug, Default)]
pub(super) struct Open {
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

    pub(super) fn is_empty(&self) -> bool {
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

impl<'a> Settling<'a> {
    pub(super) fn new(
        shared: &'a SharedRegistry,
        publication: &'a Publication,
        level: Level,
        awaited: Vec<(Key, Disposition)>,
    ) -> Self {
        Self {
            shared,
            after: None,
            publication,
            level,
            listener: None,
            passed: Open::default(),
            lines: Vec::with_capacity(awaited.len()),
            awaited: Open::of(awaited),
            reported: Vec::new(),
            named: Vec::new(),
        }
    }

    /// Moves readers whose outcome is known to `lines`.
    pub(super) fn note_settled(&mut self) {
        self.after = None;
        let mut state = self.shared.state();
        // Some queue had no room at publication. This thread delivers meanwhile, in addition to the
        // service thread.
        if self.publication.full.is_some() && state.plan.anything_waits() {
            self.shared.deliver(&mut state);
        }
        match self.listener {
            // Under the same lock as the first look at all readers. So no change falls between the
            // two.
            None => self.listener = Some(state.listen()),
            Some(listener) => {
                for key in state.take_changed(listener) {
                    let awaited = self.awaited.remote_readers.remove_entry(&key);
                    // A late reader that has changed may have moved, and is then waited for again.
                    let again = awaited.or_else(|| self.passed.remote_readers.remove_entry(&key));
                    self.awaited.processes.extend(again);
                }
            }
        }
        // Processes write their pages without a word to anybody, so each is looked at every time.
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
            match reader.and_then(RegisteredReader::socket) {
                Some(_) => open.processes.push((key, disposition)),
                None => drop(open.remote_readers.insert(key, disposition)),
            }
        }
    }

    /// Whether a reader's outcome is known; its line is there then.
    fn is_known(&mut self, state: &mut RegistryState, key: Key, disposition: Disposition) -> bool {
        // A worker moves from the table to the departed ones in a single step. So a reader is in
        // one of the two, unless thousands departed since.
        if let Some(reader) = state.readers.get(&key) {
            let publication = self.publication;
            let known = publication.outcome((key, disposition), reader, &state.plan, self.level);
            let Some(outcome) = known else {
                return false;
            };
            // From now on no other report has a line about this departure.
            if outcome == Outcome::Left
                && let Some(reader) = state.readers.get_mut(&key)
                && !std::mem::replace(&mut reader.reported, true)
            {
                self.reported.push(key);
            }
            self.line(state, key, outcome);
        } else if let Some(gone) = state.report_gone(key) {
            // Only a departure that this wait has marked is unmarked if the wait fails.
            if !gone.reported {
                self.reported.push(key);
            }
            self.gone_line(&gone);
        }
        true
    }

    /// No report has the lines, so departed workers must be reported again.
    pub(super) fn unreport(&mut self) {
        let mut state = self.shared.state();
        for key in self.reported.drain(..) {
            state.unreport(key);
        }
    }

    /// Adds the lines of readers that did not answer in time, or were not waited for.
    pub(super) fn late(&mut self) {
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
    pub(super) fn report_the_rest(&mut self) {
        let mut state = self.shared.state();
        // The first version may be out now, so further slots can be made.
        self.shared.make_ahead(&mut state);
        let publication = self.publication;
        for one in state.report_rejected(|worker| publication.is_for(worker)) {
            // Such a reader has its line from the outcome, or gets it with the missing ones below.
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
            self.lines.push(WorkerReport {
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
    pub(super) fn report_missing(&mut self, state: &RegistryState) {
        let publication = self.publication;
        let mut missing = state.missing().peekable();
        // Without anybody missing, no set of the named readers is built: a send may have thousands
        // of lines.
        if missing.peek().is_none() {
            return;
        }
        let named: BTreeSet<Key> = self.named.iter().copied().collect();
        for gone in missing {
            let mut sent = publication.versions.iter();
            // A send of other models was not for this worker.
            let takes_one = sent.any(|(model, _)| gone.models.contains(*model));
            if takes_one && publication.is_for(gone.key.0) && !named.contains(&gone.key) {
                self.gone_line(gone);
            }
        }
    }

    /// Adds the lines of workers that were named and are not connected.
    pub(super) fn report_absent(&mut self) {
        let publication = self.publication;
        for worker in &publication.absent {
            // The worker may be missing or rejected, and then has its line.
            if self.lines.iter().any(|line| line.worker == *worker) {
                continue;
            }
            self.lines.push(WorkerReport {
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

    fn line(&mut self, state: &RegistryState, key: Key, outcome: Outcome) {
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
        self.lines.push(WorkerReport {
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

    fn gone_line(&mut self, gone: &GoneReader) {
        let loaded = |model: &usize| gone.status.versions[*model];
        let did_its_part = self
            .publication
            .is_applied(gone.models, gone.applied, loaded);
        let outcome = match gone.departure {
            // The worker did its part before it left.
            Departure::Left if did_its_part => Outcome::Applied,
            Departure::Left | Departure::Died | Departure::Lost => gone.outcome(),
        };
        let after = self.after();
        self.named.push(gone.key);
        self.lines.push(WorkerReport {
            worker: gone.key.0,
            pid: gone.status.pid,
            outcome,
            current: self.publication.is_current(gone.models, loaded),
            versions: gone.status.versions.clone(),
            after,
            late: None,
        });
    }
}

impl Drop for Settling<'_> {
    fn drop(&mut self) {
        if let Some(listener) = self.listener {
            // Otherwise changes would be collected for this wait for ever.
            self.shared.state().stop_listening(listener);
        }
    }
}
