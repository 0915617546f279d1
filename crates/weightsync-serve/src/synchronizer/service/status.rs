//! A look at everything.

use std::collections::BTreeMap;

use serde::Serialize;
use weightsync_core::synchronizer::{Party, State};
use weightsync_engine::{Epoch, Version};

use super::super::settings::{method_word, style_word};
use super::super::wire::{ExplorerLine, Role};
use super::{Member, SHOWN, Service};

/// Everything, for people and programs.
#[derive(Clone, Debug, Serialize)]
pub(in crate::synchronizer) struct Status {
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
    pub(in crate::synchronizer) step: u64,
    /// When, in milliseconds since 1970, if this service has seen it.
    pub(in crate::synchronizer) at_ms: Option<u64>,
    /// Whether it can be downloaded here.
    pub(in crate::synchronizer) held: bool,
}

/// How often what has happened.
#[derive(Clone, Debug, Default, Serialize)]
pub(in crate::synchronizer) struct Counts {
    pub(in crate::synchronizer) requests: u64,
    pub(in crate::synchronizer) published: u64,
    pub(in crate::synchronizer) ended: BTreeMap<&'static str, u64>,
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
        let explorers = self.members.iter();
        let explorers = explorers.filter(|(_, one)| one.role == Role::Explorer);
        let line = |(party, member): (&Party, &Member)| {
            let line = ExplorerLine {
                name: member.name.clone(),
                state: self.core.state(*party),
                step: self.core.steps(*party).unwrap_or_default(),
                version: self.core.version(*party).unwrap_or(Version::NONE),
                ended: member.ended,
                reason: member.reason.clone(),
            };
            (*party, line)
        };
        explorers.map(line).collect()
    }

    pub(in crate::synchronizer) fn status(&self) -> Status {
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
        Status {
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
