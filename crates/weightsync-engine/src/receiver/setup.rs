//! The first phase: what is decided, and the rendez-vous.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use weightsync_core::{Epoch, Layout, ModelId, Version, WorkerId};
use weightsync_mem::{Deadline, WaitStyle};

use super::inner::Search;
use super::{Receiver, ReceiverSetup, fits, refused};
use crate::error::{Error, Result, place_of};
use crate::init_info::InitInfo;
use crate::load::WeightLoader;
use crate::load_set::SetLoader;
use crate::scheme::AnyScheme;
use crate::set::SetSnapshot;
use crate::transport::{FirstWeights, Joining, ReceiverTransport, VersionRequest, deadline};

impl ReceiverSetup {
    /// Sets worker number `worker` up to join. Numbers tell the workers of one
    /// sender apart.
    pub fn new(info: InitInfo, worker: impl Into<WorkerId>) -> Self {
        Self {
            info,
            scheme: Arc::default(),
            worker: worker.into(),
            wanted: None,
            own: Vec::new(),
            device: "cpu".into(),
            wait: WaitStyle::default(),
        }
    }

    /// Joins by this scheme, whatever the init info names: for a value with parts that do not
    /// travel as text.
    #[must_use]
    pub fn scheme(mut self, scheme: impl Into<AnyScheme>) -> Self {
        self.scheme = Arc::new(OnceLock::from(scheme.into()));
        self
    }

    /// Takes only these of the sender's models; all of them otherwise.
    #[must_use]
    pub fn models<I: AsRef<str>>(mut self, models: impl IntoIterator<Item = I>) -> Self {
        self.wanted = Some(models.into_iter().map(|id| id.as_ref().into()).collect());
        self
    }

    /// Where this worker runs its models: a label such as `cpu` (the default) or
    /// `cuda:0`, by which a sender can tell workers apart. At most 64 bytes.
    #[must_use]
    pub fn device(mut self, device: &str) -> Self {
        self.device = device.into();
        self
    }

    /// Insists on the names, dtypes and shapes of this model; without it the
    /// worker takes the sender's. The connect of a worker of several models fails with
    /// [`Error::SeveralModels`]: see [`set`](Self::set).
    ///
    /// # Errors
    ///
    /// If the model cannot be asked.
    pub fn model(mut self, model: &dyn WeightLoader) -> Result<Self> {
        self.own.push((None, model.layout()?));
        Ok(self)
    }

    /// Insists on the names, dtypes and shapes of these models: there has to be
    /// one for each model this worker wants, so [`models`](Self::models) comes
    /// first. A connect that does not want one of them is refused.
    ///
    /// # Errors
    ///
    /// [`Error::NoLoader`], [`Error::Path`], or if one of them cannot be asked.
    pub fn set(mut self, models: &mut SetLoader<'_>) -> Result<Self> {
        let wanted = self.wanted()?;
        for index in wanted {
            let id = self.info.models[index].as_str().to_owned();
            let layout = models.layout(&id)?;
            self.own.push((Some(id), layout));
        }
        Ok(self)
    }

    /// How the worker waits for new versions.
    #[must_use]
    pub fn wait_style(mut self, wait: WaitStyle) -> Self {
        self.wait = wait;
        self
    }

    /// The rendez-vous: joins the sender, waiting for it if it is not there
    /// yet, and takes the initial weights; the first receive hands them out at
    /// once (or newer ones, if there are by then). Where the
    /// [first weights](crate::transport::FirstWeights) come with the first send, none
    /// are waited for. The sender's `connect` counts
    /// this worker from here on.
    ///
    /// After an error a clone of this setup can connect again. With `distributed` it goes on with
    /// what had come of the first version. The last clone gives that up when it is dropped, or the
    /// scheme's own value, if this setup was given one.
    ///
    /// A worker that loads into models of its own uses
    /// [`connect_into`](Self::connect_into) or
    /// [`connect_set_into`](Self::connect_set_into) instead.
    ///
    /// # Errors
    ///
    /// [`Error::WrongModel`] if a model of the sender's is not the one insisted
    /// on (the sender is told), [`Error::NoInitialWeights`],
    /// [`Error::NoSuchModel`], and those of the transport, at the latest at the
    /// timeout.
    pub fn connect(self, timeout: Option<Duration>) -> Result<Receiver> {
        let mut receiver = self.take_first(timeout)?;
        if let Some(initial) = receiver.initial.clone() {
            receiver.report_applied(&initial)?;
        }
        Ok(receiver)
    }

    /// As [`connect`](Self::connect), but loads the initial weights into the
    /// worker's own model; the sender counts this worker once they are loaded.
    /// A model without shapes yet takes the sender's.
    ///
    /// # Errors
    ///
    /// As [`connect`](Self::connect), and the loader's error (the sender is
    /// told).
    pub fn connect_into(
        self,
        model: &mut dyn WeightLoader,
        timeout: Option<Duration>,
    ) -> Result<Receiver> {
        let id = self.only_model()?;
        self.connect_set_into(&mut SetLoader::new().with(&id, model), timeout)
    }

    /// As [`connect_into`](Self::connect_into), for several models.
    ///
    /// # Errors
    ///
    /// As [`connect_into`](Self::connect_into).
    pub fn connect_set_into(
        self,
        models: &mut SetLoader<'_>,
        timeout: Option<Duration>,
    ) -> Result<Receiver> {
        let mut receiver = self.take_first(timeout)?;
        receiver.begin_into(models)?;
        Ok(receiver)
    }

    /// Joins the sender and takes the initial weights, without loading them or
    /// saying that this worker runs them: for a worker whose models are not all
    /// there yet.
    ///
    /// # Errors
    ///
    /// As [`connect`](Self::connect).
    pub fn join(self, timeout: Option<Duration>) -> Result<Joined> {
        Ok(Joined {
            receiver: self.take_first(timeout)?,
        })
    }

    pub(crate) fn info(&self) -> &InitInfo {
        &self.info
    }

    pub(super) fn only_model(&self) -> Result<String> {
        match (&self.wanted, &self.info.models[..]) {
            (Some(wanted), _) if wanted.len() == 1 => Ok(wanted[0].clone()),
            (None, [one]) => Ok(one.as_str().to_owned()),
            _ => Err(Error::SeveralModels {
                known: self.info.models.clone(),
            }),
        }
    }

    /// Joins and takes the initial weights, and does not say that this worker
    /// runs them.
    pub(crate) fn take_first(self, timeout: Option<Duration>) -> Result<Receiver> {
        let since = Instant::now();
        let until = deadline(timeout);
        let scheme = match self.scheme.get() {
            Some(scheme) => scheme,
            None => {
                let named = self.info.scheme().parse()?;
                // Kept in the setup: a clone that connects again uses what this scheme has fetched
                // already.
                self.scheme.get_or_init(|| named)
            }
        };
        let scheme = scheme.clone();
        // Another sender may come after one that died before its first version.
        let (transport, initial) = loop {
            match self.begin(&scheme, since, until) {
                // Before its first version: there is another to wait for.
                Err(Error::SenderDied { .. } | Error::SenderClosed)
                    if self.info.at.restarts() && until.is_none_or(|at| Instant::now() < at) => {}
                begun => break begun?,
            }
        };
        Ok(Receiver {
            run: transport.run(),
            transport,
            scheme,
            initial,
            current: None,
            whole: true,
            applied: Vec::new(),
            setup: self,
            sender_lost: false,
            sender_closed: false,
            withdrawn: None,
            conflicting: None,
            interrupted: false,
        })
    }

    /// Joins a sender and takes the first weights from it, where it has some.
    fn begin(
        &self,
        scheme: &AnyScheme,
        since: Instant,
        until: Deadline,
    ) -> Result<(Box<dyn ReceiverTransport>, Option<SetSnapshot>)> {
        let mut transport = self.join_transport(scheme, Epoch(0), Search::Until(until))?;
        // A scheme may start without weights: the first send brings them.
        let waits = scheme.scheme().first_weights() == FirstWeights::AtConnect;
        if !scheme.capabilities().weights || !waits {
            return Ok((transport, None));
        }
        // Without push nothing comes that was not asked for.
        let first = match scheme.capabilities().push {
            true => transport.next(until)?,
            false => transport.pull(0, VersionRequest::AtLeast(Version::FIRST), until)?,
        };
        let first = first.ok_or_else(|| Error::NoInitialWeights {
            model: self.info.models[0].clone(),
            waited: since.elapsed(),
        })?;
        Ok((transport, Some(first)))
    }

    pub(super) fn join_transport(
        &self,
        scheme: &AnyScheme,
        seen: Epoch,
        search: Search,
    ) -> Result<Box<dyn ReceiverTransport>> {
        let (deadline, single_attempt) = match search {
            Search::Until(deadline) => (deadline, false),
            Search::Once => (Some(Instant::now()), true),
        };
        let joining = Joining {
            worker: self.worker,
            seen,
            models: self.info.models.clone(),
            wanted: self.wanted()?,
            device: self.device.clone(),
            wait: self.wait,
            single_attempt,
        };
        // Before the join: a wrong name is this worker's own mistake, and needs no sender to be
        // found.
        let insists = self.insists(&joining.wanted)?;
        let mut transport = scheme.scheme().join(&self.info.at, &joining, deadline)?;
        for (id, own) in insists {
            let mut theirs = transport.models().iter();
            // A scheme that carries nothing has none.
            let Some(spec) = theirs.find(|spec| spec.id == *id) else {
                continue;
            };
            // As this worker would see the sender's tensors, with the names of tied ones.
            let seen = spec.attributes.layout_for(&spec.layout, own)?;
            if let Err(mismatch) = fits(own, &seen) {
                let model = spec.id.clone();
                return Err(refused(&mut *transport, model, mismatch)?);
            }
        }
        // No first version tells the sender that this worker is there, so it is told now.
        if scheme.scheme().first_weights() == FirstWeights::AtFirstSend {
            transport.joined()?;
        }
        Ok(transport)
    }

    /// The layouts it insists on, by the models they are of.
    fn insists(&self, wanted: &[usize]) -> Result<Vec<(&ModelId, &Layout)>> {
        let wanted = wanted.iter().map(|index| &self.info.models[*index]);
        let wanted: Vec<_> = wanted.collect();
        let pairs = self.own.iter().map(|(id, own)| {
            let id = match id {
                Some(id) => id.clone(),
                None => self.only_model()?,
            };
            let model = wanted[place_of(&id, wanted.iter().copied())?];
            Ok((model, own))
        });
        pairs.collect()
    }

    /// The places of the models it wants in the sender's set.
    fn wanted(&self) -> Result<Vec<usize>> {
        let known = &self.info.models;
        let Some(wanted) = &self.wanted else {
            return Ok((0..known.len()).collect());
        };
        let indices = wanted.iter().map(|id| place_of(id, known));
        let indices = indices.collect::<Result<Vec<_>>>()?;
        // A model that is named twice would have two places in each set.
        let mut places = indices.iter().enumerate();
        if let Some((_, twice)) = places.find(|(at, index)| indices[..*at].contains(index)) {
            return Err(Error::SameModelTwice {
                model: known[*twice].clone(),
            });
        }
        match indices.is_empty() {
            true => Err(Error::EmptySet),
            false => Ok(indices),
        }
    }
}

/// A worker that has joined, and has not loaded anything yet; see
/// [`ReceiverSetup::join`]. Dropping it leaves again.
#[derive(Debug)]
pub struct Joined {
    pub(crate) receiver: Receiver,
}

impl Joined {
    /// The initial weights; none with a scheme that carries nothing.
    pub fn first(&self) -> Option<&SetSnapshot> {
        self.receiver.initial.as_ref()
    }

    /// Leaves, and says why: see [`Receiver::fail`].
    pub fn fail(self, reason: &str) {
        self.receiver.fail(reason);
    }

    /// Loads the initial weights into the worker's own models; the sender counts
    /// this worker from here on.
    ///
    /// # Errors
    ///
    /// As [`ReceiverSetup::connect_set_into`].
    pub fn load(mut self, models: &mut SetLoader<'_>) -> Result<Receiver> {
        self.receiver.begin_into(models)?;
        Ok(self.receiver)
    }
}
