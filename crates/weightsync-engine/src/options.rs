//! How one send differs from the plain one.

use std::time::Duration;

use weightsync_core::{ModelId, Version, WaitFor, WorkerId};

use crate::transport::Targets;

/// The options of one send. A plain send goes to all workers, whole, and waits until it is applied.
///
/// ```
/// use std::time::Duration;
/// use weightsync::{SendOptions, WaitFor};
///
/// let options = SendOptions::new()
///     .workers([0, 2])
///     .wait(WaitFor::Staged)
///     .timeout(Some(Duration::from_secs(5)));
/// assert_ne!(options, SendOptions::new());
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SendOptions {
    pub(crate) model: Option<String>,
    pub(crate) targets: Targets,
    pub(crate) wait: WaitFor,
    /// In place of the setup's.
    pub(crate) timeout: Option<Option<Duration>>,
    pub(crate) wait_late: bool,
    pub(crate) partial: bool,
    pub(crate) version: Option<Version>,
    /// As `version`, for models one by one.
    pub(crate) numbers: Vec<(ModelId, Version)>,
}

impl SendOptions {
    /// The plain send.
    pub fn new() -> Self {
        Self::default()
    }

    /// Names the model of the weights. The sender needs this if it has several models and the
    /// weights do not name one; a send whose weights name another model is refused.
    #[must_use]
    pub fn model(mut self, model: &str) -> Self {
        self.model = Some(model.into());
        self
    }

    /// Sends to these workers, and changes only them. A worker that comes back
    /// under its number gets what was last sent to it.
    #[must_use]
    pub fn workers(mut self, workers: impl IntoIterator<Item = impl Into<WorkerId>>) -> Self {
        let mut workers: Vec<_> = workers.into_iter().map(Into::into).collect();
        workers.sort_unstable();
        workers.dedup();
        self.targets = Targets::Workers(workers);
        self
    }

    /// How far the send waits.
    #[must_use]
    pub fn wait(mut self, wait: WaitFor) -> Self {
        self.wait = wait;
        self
    }

    /// How long the send waits at most for a free slot and for its workers, in place of
    /// [the setup's timeout](crate::SenderSetup::send_timeout). The time in which a source writes
    /// its tensors does not count. An asynchronous send waits this long for earlier sends, and for
    /// space in full queues of workers.
    #[must_use]
    pub fn timeout(mut self, timeout: Option<Duration>) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Also waits for workers that were late for an earlier send and have not moved since. By
    /// default the send passes them over, with a report line that says so: a stopped worker costs
    /// one send its deadline, and not every send.
    #[must_use]
    pub fn wait_late(mut self, wait: bool) -> Self {
        self.wait_late = wait;
        self
    }

    /// Makes this a partial update: the weights are some of the model's tensors, and workers keep
    /// the others. Without it, missing tensors are an error.
    #[must_use]
    pub fn partial(mut self, partial: bool) -> Self {
        self.partial = partial;
        self
    }

    /// Sets the version's number, for example the trainer's step. It must be higher than every
    /// version before. By default versions count up by one.
    #[must_use]
    pub fn version(mut self, version: Version) -> Self {
        self.version = Some(version);
        self
    }
}
