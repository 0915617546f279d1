//! A set: one whole version of each model of a worker.

use weightsync_core::{ModelId, Version};

use crate::error::{Error, Result, place_of};
use crate::load_set::SetLoader;
use crate::snapshot::Snapshot;

/// One whole version of each model of a set, that belong together.
///
/// **Guarantee.** They were published in one step, or were live in addition to what was
/// published, and none of them changes while this (or a snapshot of it) is held.
#[derive(Clone, Debug)]
pub struct SetSnapshot {
    sequence: u64,
    members: Vec<Member>,
}

/// One model's part of a set.
#[derive(Clone, Debug)]
pub struct Member {
    /// Its weights.
    pub snapshot: Snapshot,
    /// Whether this worker has not been handed this version before.
    pub changed: bool,
}

impl SetSnapshot {
    /// A set as a transport hands it over: one member for each model the worker
    /// wanted. The sequence number grows with every publication that reaches
    /// the worker.
    pub fn new(sequence: u64, members: Vec<Member>) -> Self {
        Self { sequence, members }
    }

    /// The same, for one that has been handed it before.
    pub(crate) fn had_before(mut self) -> Self {
        for member in &mut self.members {
            member.changed = false;
        }
        self
    }

    /// Which publication it is; grows from one to the next. 0 for what was
    /// [asked for](crate::Receiver::pull) in addition to the newest.
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Every model, in the order the worker named them.
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// One model's weights.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchModel`].
    pub fn model(&self, id: &str) -> Result<&Snapshot> {
        Ok(&self.members[place_of(id, self.ids())?].snapshot)
    }

    /// The version of each model.
    pub fn versions(&self) -> Vec<(ModelId, Version)> {
        let versions = self.members.iter().map(|member| {
            let snapshot = &member.snapshot;
            (snapshot.model().clone(), snapshot.version())
        });
        versions.collect()
    }

    /// The only member of a set of one.
    ///
    /// # Errors
    ///
    /// [`Error::SeveralModels`].
    pub fn only(&self) -> Result<&Snapshot> {
        match &self.members[..] {
            [one] => Ok(&one.snapshot),
            _ => Err(Error::SeveralModels {
                known: self.ids().cloned().collect(),
            }),
        }
    }

    /// Loads every model of the set, without its sender or receiver being told. No model is touched
    /// unless all of them fit.
    ///
    /// # Errors
    ///
    /// [`Error::WrongModel`], [`Error::NoLoader`]; or a model's own, and then not all of them may have
    /// been loaded.
    pub fn load_into(&self, models: &mut SetLoader<'_>) -> Result<()> {
        for member in self.members() {
            models.shaped(&member.snapshot)?;
        }
        models.load(self, None).map_err(|failed| failed.error)
    }

    fn ids(&self) -> impl Iterator<Item = &ModelId> + Clone {
        self.members.iter().map(|member| member.snapshot.model())
    }
}
