//! Loading several models as one: all of them, or none.

use crate::error::{Error, Result};
use crate::load::WeightLoader;
use crate::receiver::fits;
use crate::set::SetSnapshot;
use crate::snapshot::Snapshot;

/// The worker's own models by id: what
/// [`Receiver::receive_set_into`](crate::Receiver::receive_set_into) loads into.
///
/// ```
/// use weightsync::{SetLoader, Tensors};
///
/// let (mut actor, mut critic) = (Tensors::new(), Tensors::new());
/// let models = SetLoader::new().with("actor", &mut actor).with("critic", &mut critic);
/// assert_eq!(models.members().count(), 2);
/// ```
#[derive(Default)]
pub struct SetLoader<'a> {
    members: Vec<(String, &'a mut dyn WeightLoader)>,
}

/// Why a load failed.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) error: Error,
    /// Whether any model may have been written.
    pub(crate) touched: bool,
}

impl<'a> SetLoader<'a> {
    /// No models.
    pub fn new() -> Self {
        Self::default()
    }

    /// The models with one more; one of the same name is replaced.
    #[must_use]
    pub fn with(mut self, id: &str, model: &'a mut dyn WeightLoader) -> Self {
        match self.members.iter_mut().find(|(one, _)| one == id) {
            Some((_, old)) => *old = model,
            None => self.members.push((id.to_owned(), model)),
        }
        self
    }

    /// Every model with its id.
    pub fn members(&self) -> impl Iterator<Item = (&str, &dyn WeightLoader)> {
        self.members
            .iter()
            .map(|(id, model)| (id.as_str(), &**model))
    }

    /// One model.
    pub fn model_mut(&mut self, id: &str) -> Option<&mut (dyn WeightLoader + 'a)> {
        let mut members = self.members.iter_mut();
        members
            .find(|(one, _)| one == id)
            .map(|(_, model)| &mut **model)
    }

    /// Loads what has changed, or everything. Every model is compared before
    /// the first is touched.
    pub(crate) fn load(&mut self, set: &SetSnapshot, all: bool) -> Result<(), Failure> {
        let untouched = |error| Failure {
            error,
            touched: false,
        };
        let members = set.members().iter();
        let wanted = members.filter(|member| all || member.changed);
        let wanted: Vec<&Snapshot> = wanted.map(|member| &member.snapshot).collect();
        for snapshot in &wanted {
            self.check(snapshot).map_err(untouched)?;
        }
        for snapshot in wanted {
            let Some(model) = self.model_mut(snapshot.model().as_str()) else {
                continue;
            };
            let own = model.layout().map_err(untouched)?;
            let sent: Vec<_> = snapshot.tensors().collect();
            let views = snapshot.attributes().expand(&sent, Some(&own));
            model.load(&views).map_err(|error| Failure {
                error,
                touched: true,
            })?;
        }
        Ok(())
    }

    fn check(&self, snapshot: &Snapshot) -> Result<()> {
        let id = snapshot.model();
        let mut members = self.members.iter();
        let model = members.find(|(one, _)| one == id.as_str());
        let Some((_, model)) = model else {
            let known = self.members.iter();
            return Err(Error::NoLoader {
                model: id.clone(),
                known: known.map(|(id, _)| id.clone()).collect(),
            });
        };
        let own = model.layout()?;
        let sent = snapshot.layout();
        fits(&own, &snapshot.attributes().layout_for(sent, &own)?).map_err(|mismatch| {
            Error::WrongModel {
                model: id.clone(),
                mismatch: Box::new(mismatch),
            }
        })
    }
}

impl std::fmt::Debug for SetLoader<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ids = self.members.iter().map(|(id, _)| id);
        f.debug_set().entries(ids).finish()
    }
}
