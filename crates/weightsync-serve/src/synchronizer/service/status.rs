//! A look at everything.

use std::collections::BTreeMap;

use serde::Serialize;
use weightsync_core::synchronizer::{Party, State};
use weightsync_engine::{Epoch, Version};
use weightsync_store::SaveOutcome;

use super::super::events::EventKind;
use super::super::settings::{method_word, style_word};
use super::super::wire::{ExplorerLine, Role, short};
use super::{SHOWN, Service};

/// Everything, for people and programs.
#[derive(Clone, Debug, Serialize)]
pub(in crate::synchronizer) struct ServiceStatus {
    pub(in crate::synchronizer) method: &'static str,
    pub(in crate::synchronizer) newest: Version,
    pub(in crate::synchronizer) newest_step: u64,
    pub(in crate::synchronizer) trainer: Option<TrainerStatus>,
    pub(in crate::synchronizer) explorers: Vec<ExplorerStatus>,
    /// The newest versions, the newest first.
    pub(in crate::synchronizer) versions: Vec<VersionStatus>,
    pub(in crate::synchronizer) counts: Counts,
}

/// A version that was published.
#[derive(Clone, Debug, Serialize)]
pub(in crate::synchronizer) struct VersionStatus {
    pub(in crate::synchronizer) version: Version,
    /// The step that made it, if that is known.
    pub(in crate::synchronizer) step: Option<u64>,
    /// When, in milliseconds since 1970, if this service has seen it.
    pub(in crate::synchronizer) at_ms: Option<u64>,
    /// Whether it can be downloaded here: the service has those in memory, and its server adds
    /// those of the store.
    pub(in crate::synchronizer) held: bool,
}

/// How often what has happened.
#[derive(Clone, Debug, Default, Serialize)]
pub(in crate::synchronizer) struct Counts {
    pub(in crate::synchronizer) requests: u64,
    pub(in crate::synchronizer) published: u64,
    pub(in crate::synchronizer) ended: BTreeMap<&'static str, u64>,
    /// Saves of the own store, by how they ended.
    pub(in crate::synchronizer) saves: BTreeMap<&'static str, u64>,
}

#[derive(Clone, Debug, Serialize)]
pub(in crate::synchronizer) struct TrainerStatus {
    pub(in crate::synchronizer) name: String,
    pub(in crate::synchronizer) style: &'static str,
    pub(in crate::synchronizer) state: State,
    pub(in crate::synchronizer) step: u64,
    pub(in crate::synchronizer) epoch: Epoch,
}

#[derive(Clone, Debug, Serialize)]
pub(in crate::synchronizer) struct ExplorerStatus {
    #[serde(flatten)]
    pub(in crate::synchronizer) line: ExplorerLine,
    pub(in crate::synchronizer) style: &'static str,
    pub(in crate::synchronizer) versions_behind: u64,
    pub(in crate::synchronizer) steps_behind: u64,
}

impl Service {
    pub(in crate::synchronizer) fn lines(&self) -> Vec<(Party, ExplorerLine)> {
        let parties = self.members.keys();
        let lines = parties.filter_map(|party| Some((*party, self.line(*party)?)));
        lines.collect()
    }

    /// The line of an explorer.
    pub(in crate::synchronizer) fn line(&self, party: Party) -> Option<ExplorerLine> {
        let member = self.members.get(&party);
        let member = member.filter(|one| one.role == Role::Explorer)?;
        Some(ExplorerLine {
            name: member.name.clone(),
            state: self.core.state(party),
            step: self.core.steps(party).unwrap_or_default(),
            version: self.core.version(party).unwrap_or(Version::NONE),
            ended: member.ended,
            reason: member.reason.clone(),
        })
    }

    /// Notes the saves that have ended.
    pub(in crate::synchronizer) fn note_saves(&mut self) {
        for (version, outcome) in self.held.take_saved() {
            let (word, why) = match outcome {
                SaveOutcome::Durable(_) => ("durable", None),
                SaveOutcome::Failed(error) => ("failed", Some(short(&error.to_string()))),
                SaveOutcome::Superseded => {
                    let why = "a newer version was there before its turn came";
                    ("superseded", Some(why.to_owned()))
                }
                // The store has no others.
                _ => continue,
            };
            *self.counts.saves.entry(word).or_default() += 1;
            let trainer = self.core.trainer().and_then(|one| self.members.get(&one));
            let name = trainer.map_or("", |trainer| &trainer.name);
            if why.is_some() {
                self.events
                    .note(EventKind::NotSaved, Role::Trainer, name, |event| {
                        (event.version, event.reason) = (Some(version), why);
                    });
            }
        }
    }

    pub(in crate::synchronizer) fn status(&mut self) -> ServiceStatus {
        self.note_saves();
        let (newest, newest_step) = self.core.newest();
        let trainer = self.core.trainer().and_then(|party| {
            let member = self.members.get(&party)?;
            Some(TrainerStatus {
                name: member.name.clone(),
                style: style_word(member.style),
                state: self.core.state(party),
                step: self.core.steps(party).unwrap_or_default(),
                epoch: self.core.epoch(),
            })
        });
        let explorers = self.lines().into_iter().map(|(party, line)| {
            let (versions_behind, steps_behind) = self.behind(line.version);
            ExplorerStatus {
                line,
                style: self
                    .members
                    .get(&party)
                    .map_or("", |one| style_word(one.style)),
                versions_behind,
                steps_behind,
            }
        });
        let held = self.held.versions();
        let versions = self.published.iter().rev().take(SHOWN);
        let versions = versions.map(|made| VersionStatus {
            version: made.version,
            step: made.step,
            at_ms: made.at_ms,
            held: held.contains(&made.version),
        });
        ServiceStatus {
            method: method_word(self.core.method()),
            newest,
            newest_step,
            trainer,
            explorers: explorers.collect(),
            versions: versions.collect(),
            counts: self.counts.clone(),
        }
    }

    /// How many versions are newer than one, and how many steps the trainer has made since.
    pub(in crate::synchronizer) fn behind(&self, version: Version) -> (u64, u64) {
        let known = self
            .published
            .partition_point(|made| made.version <= version);
        let versions = (self.published.len() - known) as u64;
        let trainer = self.core.trainer().and_then(|party| self.core.steps(party));
        let latest = trainer.unwrap_or_default().max(self.core.newest().1);
        let step = self.steps.get(&version).copied();
        (versions, step.map_or(0, |step| latest.saturating_sub(step)))
    }
}
