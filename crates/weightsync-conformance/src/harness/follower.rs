//! A worker whose models are loaded by a thread.

use std::time::Instant;

use weightsync_engine::{
    Background, BackgroundState, BackgroundStatus, ModelId, Receiver, SetLoader, Tensors, Version,
};

use super::command::{Answer, Followed, FollowerState, SafePoints};
use super::process::Stop;
use super::scale::longest;
use super::shape::words_of;

/// Models of its own, by name.
pub(crate) type Own = Vec<(String, Tensors)>;

/// The thread, and the models that it loads.
pub(crate) struct Follower(Background<Own>);

impl Follower {
    /// Starts the thread; the models are those of the last one, or take the
    /// sender's shapes.
    pub(crate) fn start(receiver: Receiver, own: Own, when: SafePoints) -> Result<Self, Stop> {
        let ids = receiver.models().iter();
        let fresh = ids.map(|model| (model.id.as_str().to_owned(), Tensors::new()));
        let own = match own.is_empty() {
            true => fresh.collect(),
            false => own,
        };
        let when = match when {
            SafePoints::Implied => weightsync_engine::SafePoints::Implied,
            SafePoints::Declared => weightsync_engine::SafePoints::Declared,
        };
        Ok(Self(receiver.set_in_background(own, loaders, when)?))
    }

    /// What is loaded, under one guard.
    pub(crate) fn look(&self) -> Result<Answer, Stop> {
        let status = self.0.status()?;
        let models = self.0.read()?;
        Ok(Answer::Followed(Followed {
            words: models.iter().map(|(_, own)| words_of(own)).collect(),
            runs: numbers(models.versions()),
            staged: numbers(&status.staged),
            state: state(&status),
        }))
    }

    pub(crate) fn wait_for(&self, version: u64, staged: bool) -> Result<Answer, Stop> {
        let reached = self.0.wait(Some(longest()), |status| {
            let versions = match staged {
                true => &status.staged,
                false => &status.versions,
            };
            versions
                .first()
                .is_some_and(|(_, one)| *one == Version(version))
        })?;
        match reached {
            true => Ok(Answer::Done),
            false => Err(format!("v{version} did not come: {:?}", self.0.status()?).into()),
        }
    }

    pub(crate) fn wait_for_the_end(&self) -> Result<Answer, Stop> {
        let ended = |status: &BackgroundStatus| !matches!(state(status), FollowerState::Follows);
        match self.0.wait(Some(longest()), ended)? || ended(&self.0.status()?) {
            true => self.look(),
            false => Err(format!("no end: {:?}", self.0.status()?).into()),
        }
    }

    /// Reads, again and again, until the models are of this number: always one
    /// whole set, and never an older one.
    pub(crate) fn read_until(&self, word: u64) -> Result<Answer, Stop> {
        let until = Instant::now() + longest();
        let mut checks = 0;
        let mut last = 0;
        loop {
            let models = self.0.read()?;
            let version = models.versions()[0].1.0;
            let mut words = models.iter().flat_map(|(_, own)| words_of(own));
            let first = words.next().flatten();
            let Some(first) = first.filter(|first| words.all(|word| word == Some(*first))) else {
                return Err(format!("v{version} is a mix").into());
            };
            if version < last {
                return Err(format!("v{version} came after v{last}").into());
            }
            last = version;
            checks += 1;
            if first == word {
                return Ok(Answer::Count(checks));
            }
            if Instant::now() > until {
                return Err(format!("after {checks} checks v{version} is the last").into());
            }
        }
    }

    pub(crate) fn safe_point(&self) -> Result<Answer, Stop> {
        match self.0.safe_point()? {
            Some(_) => self.look(),
            None => Ok(Answer::Nothing),
        }
    }

    pub(crate) fn stop(self) -> Result<(Receiver, Own), Stop> {
        Ok(self.0.stop()?)
    }
}

fn loaders(own: &mut Own) -> SetLoader<'_> {
    let each = own.iter_mut();
    each.fold(SetLoader::new(), |set, (id, tensors)| set.with(id, tensors))
}

fn numbers(versions: &[(ModelId, Version)]) -> Vec<u64> {
    versions.iter().map(|(_, version)| version.0).collect()
}

fn state(status: &BackgroundStatus) -> FollowerState {
    match status.state {
        BackgroundState::Following => FollowerState::Follows,
        BackgroundState::Searching => FollowerState::Searches,
        BackgroundState::Closed => FollowerState::SenderClosed,
        BackgroundState::Died { .. } => FollowerState::SenderDied,
        _ => FollowerState::Failed,
    }
}
