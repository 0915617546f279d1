//! What a receiver's versions come as, and how one is asked for.

use std::time::Duration;

use weightsync_core::{ModelId, Version};

use super::Receiver;
use crate::error::Result;
use crate::load::WeightLoader;
use crate::load_set::SetLoader;
use crate::set::SetSnapshot;
use crate::snapshot::Snapshot;
use crate::transport::VersionRequest;

/// A version to ask the sender for: see [`Receiver::pull`].
///
/// ```
/// use std::time::Duration;
/// use weightsync::{Pull, Version};
///
/// let pull = Pull::at_least(Version(3)).model("policy").timeout(Some(Duration::from_secs(5)));
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct Pull {
    pub(super) which: VersionRequest,
    pub(super) model: Option<String>,
    pub(super) timeout: Option<Duration>,
}

impl Pull {
    /// The newest version there is.
    pub fn newest() -> Self {
        Self::of(VersionRequest::Newest)
    }

    /// This version or a newer one; waits until there is one.
    pub fn at_least(version: Version) -> Self {
        Self::of(VersionRequest::AtLeast(version))
    }

    /// This version, if it is still kept.
    pub fn version(version: Version) -> Self {
        Self::of(VersionRequest::Exactly(version))
    }

    fn of(which: VersionRequest) -> Self {
        Self {
            which,
            model: None,
            timeout: None,
        }
    }

    /// Names the model that the version is of. A worker of several models needs this, unless it
    /// asks for the newest: that set is the same for all of them.
    pub fn model(mut self, model: &str) -> Self {
        self.model = Some(model.into());
        self
    }

    /// Limits the wait for the answer. Without a limit, only the answer, the sender's death or
    /// shutdown, or an [`Interrupter`](crate::transport::Interrupter) ends it.
    pub fn timeout(mut self, timeout: Option<Duration>) -> Self {
        self.timeout = timeout;
        self
    }
}

/// A receiver's calls, for versions that come as something else than one model's [`Snapshot`]: see
/// [`Receiver::set`], [`Receiver::loading`] and [`Receiver::loading_set`].
#[derive(Debug)]
#[must_use]
pub struct Receiving<'r, F> {
    receiver: &'r mut Receiver,
    form: F,
}

impl<F: Form> Receiving<'_, F> {
    /// As [`Receiver::recv`].
    ///
    /// # Errors
    ///
    /// As [`Receiver::recv`], and those of the form.
    pub fn recv(&mut self) -> Result<F::Got> {
        let got = self.next(None)?;
        // Only of a scheme that carries nothing.
        got.ok_or_else(|| self.receiver.without_push())
    }

    /// As [`Receiver::recv_timeout`].
    ///
    /// # Errors
    ///
    /// As [`recv`](Self::recv).
    pub fn recv_timeout(&mut self, timeout: Duration) -> Result<Option<F::Got>> {
        self.next(Some(timeout))
    }

    /// As [`Receiver::try_recv`].
    ///
    /// # Errors
    ///
    /// As [`recv`](Self::recv).
    pub fn try_recv(&mut self) -> Result<Option<F::Got>> {
        self.next(Some(Duration::ZERO))
    }

    /// As [`Receiver::latest`].
    ///
    /// # Errors
    ///
    /// As [`Receiver::latest`], and those of the form.
    pub fn latest(&mut self) -> Result<Option<F::Got>> {
        self.form.check(self.receiver)?;
        let set = self.receiver.newest()?;
        self.form.make(self.receiver, set, true)
    }

    /// As [`Receiver::pull`].
    ///
    /// # Errors
    ///
    /// As [`Receiver::pull`], and those of the form.
    pub fn pull(&mut self, pull: Pull) -> Result<Option<F::Got>> {
        self.form.check(self.receiver)?;
        let set = self.receiver.ask(&pull)?;
        self.form.make(self.receiver, set, true)
    }

    fn next(&mut self, timeout: Option<Duration>) -> Result<Option<F::Got>> {
        self.form.check(self.receiver)?;
        let set = self.receiver.next(timeout)?;
        self.form.make(self.receiver, set, false)
    }
}

impl Receiver {
    /// The receiver's calls for all models of this worker: what was sent together comes together,
    /// with what the others were at that time.
    pub fn set(&mut self) -> Receiving<'_, impl Form<Got = SetSnapshot>> {
        self.receiving(WholeSet)
    }

    /// The receiver's calls, loading into the worker's own model; they return the version. The
    /// sender is told that the version is applied only once it is loaded. A pull loads the version
    /// also if the model has it.
    ///
    /// A load fails with [`Error::WrongModel`](crate::Error::WrongModel) or the loader's error. Then the sender's report
    /// carries the words, and this worker has the version it had: it was loaded again. If that
    /// failed too, the model is not whole: the calls fail with [`Error::NotWhole`](crate::Error::NotWhole) until a version
    /// has been loaded.
    pub fn loading<'r>(
        &'r mut self,
        model: &'r mut dyn WeightLoader,
    ) -> Receiving<'r, impl Form<Got = Version>> {
        self.receiving(OneLoader(model))
    }

    /// As [`loading`](Self::loading), for all models of this worker: either all of them have the
    /// new versions afterwards, or none has. A missing loader is an [`Error::NoLoader`](crate::Error::NoLoader).
    ///
    /// They are the same models each time: one whose version did not change since the last load is
    /// not loaded again. A pull loads all of them, also into others.
    pub fn loading_set<'r, 'm>(
        &'r mut self,
        models: &'r mut SetLoader<'m>,
    ) -> Receiving<'r, impl Form<Got = Vec<(ModelId, Version)>> + use<'r, 'm>> {
        self.receiving(models)
    }

    pub(super) fn one(&mut self) -> Receiving<'_, OneModel> {
        self.receiving(OneModel)
    }

    fn receiving<F>(&mut self, form: F) -> Receiving<'_, F> {
        Receiving {
            receiver: self,
            form,
        }
    }
}

/// What a version comes as.
pub trait Form {
    /// What the calls return.
    type Got;

    /// Refuses a worker whose models this is not for.
    #[doc(hidden)]
    fn check(&self, receiver: &Receiver) -> Result<()>;

    /// Makes it of what came. A set that was asked for is loaded whole.
    #[doc(hidden)]
    fn make(
        &mut self,
        receiver: &mut Receiver,
        set: Option<SetSnapshot>,
        asked: bool,
    ) -> Result<Option<Self::Got>>;
}

#[derive(Debug)]
pub(super) struct OneModel;

struct WholeSet;

struct OneLoader<'m>(&'m mut dyn WeightLoader);

impl Form for OneModel {
    type Got = Snapshot;

    fn check(&self, receiver: &Receiver) -> Result<()> {
        receiver.one_model().map(drop)
    }

    fn make(
        &mut self,
        receiver: &mut Receiver,
        set: Option<SetSnapshot>,
        asked: bool,
    ) -> Result<Option<Snapshot>> {
        let set = WholeSet.make(receiver, set, asked)?;
        set.map(|set| set.only().cloned()).transpose()
    }
}

impl Form for WholeSet {
    type Got = SetSnapshot;

    fn check(&self, _: &Receiver) -> Result<()> {
        Ok(())
    }

    fn make(
        &mut self,
        receiver: &mut Receiver,
        set: Option<SetSnapshot>,
        _: bool,
    ) -> Result<Option<SetSnapshot>> {
        if let Some(set) = &set {
            receiver.report_applied(set)?;
        }
        Ok(set)
    }
}

impl Form for OneLoader<'_> {
    type Got = Version;

    fn check(&self, receiver: &Receiver) -> Result<()> {
        OneModel.check(receiver)
    }

    fn make(
        &mut self,
        receiver: &mut Receiver,
        set: Option<SetSnapshot>,
        asked: bool,
    ) -> Result<Option<Version>> {
        let id = receiver.one_model()?;
        let mut models = SetLoader::new().with(&id, &mut *self.0);
        let versions = (&mut models).make(receiver, set, asked)?;
        Ok(versions.and_then(|versions| versions.first().map(|(_, version)| *version)))
    }
}

impl Form for &mut SetLoader<'_> {
    type Got = Vec<(ModelId, Version)>;

    fn check(&self, _: &Receiver) -> Result<()> {
        Ok(())
    }

    fn make(
        &mut self,
        receiver: &mut Receiver,
        set: Option<SetSnapshot>,
        asked: bool,
    ) -> Result<Option<Self::Got>> {
        let Some(set) = set else {
            // A loop that goes on after a timeout would go on with half a model.
            return match receiver.whole {
                true => Ok(None),
                false => Err(receiver.not_whole()),
            };
        };
        let versions = set.versions();
        // A set that was asked for is loaded whole, also into models that hold it.
        let held = receiver.held().filter(|_| !asked);
        receiver.load_and_report(set, self, held.as_ref())?;
        Ok(Some(versions))
    }
}
