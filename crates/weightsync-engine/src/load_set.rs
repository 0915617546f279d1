//! Loading several models as one: all of them, or none.

use weightsync_core::Layout;

use crate::error::{Error, Result};
use crate::load::WeightLoader;
use crate::models::ModelTree;
use crate::receiver::fits;
use crate::set::SetSnapshot;
use crate::snapshot::Snapshot;

/// The worker's own models: what
/// [`Receiver::loading_set`](crate::Receiver::loading_set) loads into.
///
/// Models are registered one by one with [`with`](Self::with), or found in a
/// [tree](Self::tree) by their ids, which are paths then.
///
/// ```
/// use weightsync::model::SetLoader;
/// use weightsync::Tensors;
///
/// let (mut actor, mut critic) = (Tensors::new(), Tensors::new());
/// let mut models = SetLoader::new().with("actor", &mut actor).with("critic", &mut critic);
/// assert!(models.model_mut("critic").is_ok());
/// let error = models.model_mut("critc").err().unwrap().to_string();
/// assert!(error.contains("actor, critic"), "{error}");
/// ```
#[derive(Default)]
pub struct SetLoader<'a> {
    members: Vec<(String, &'a mut dyn WeightLoader)>,
    tree: Option<&'a mut dyn ModelTree>,
}

/// Why a load failed.
#[derive(Debug)]
pub(crate) struct LoadFailure {
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

    /// The models with all those of a tree, for ids that were not named: an id
    /// such as `env.value_net` is the path there.
    #[must_use]
    pub fn tree(mut self, tree: &'a mut dyn ModelTree) -> Self {
        self.tree = Some(tree);
        self
    }

    /// One model.
    ///
    /// # Errors
    ///
    /// [`Error::NoLoader`], or [`Error::Path`] with what the tree has instead.
    pub fn model_mut(&mut self, id: &str) -> Result<&mut dyn WeightLoader> {
        let place = self.members.iter().position(|(one, _)| one == id);
        if let Some(place) = place {
            return Ok(&mut *self.members[place].1);
        }
        match &mut self.tree {
            Some(tree) => Ok(tree.loader(&id.parse()?)?),
            None => Err(Error::NoLoader {
                model: id.into(),
                known: self.members.iter().map(|(id, _)| id.clone()).collect(),
            }),
        }
    }

    /// The names, dtypes and shapes of one model.
    ///
    /// # Errors
    ///
    /// As [`model_mut`](Self::model_mut), and the model's own.
    pub fn layout(&mut self, id: &str) -> Result<Layout> {
        self.model_mut(id)?.layout()
    }

    /// Loads what differs from the set that the models hold whole, or
    /// everything. Every model is compared before the first is touched.
    pub(crate) fn load(
        &mut self,
        set: &SetSnapshot,
        held: Option<&SetSnapshot>,
    ) -> Result<(), LoadFailure> {
        let untouched = |error| LoadFailure {
            error,
            touched: false,
        };
        let members = set.members().iter();
        // Compared with the loaded set: the worker may have been handed sets that were never loaded.
        // Number and run together: a restarted trainer counts from 1 again.
        let is_held = |snapshot: &Snapshot| {
            let held = held.and_then(|held| held.model(snapshot.model().as_str()).ok());
            held.is_some_and(|held| {
                held.version() == snapshot.version() && held.run() == snapshot.run()
            })
        };
        let wanted = members.map(|member| &member.snapshot);
        // A model that holds its version already is not loaded again.
        let wanted: Vec<&Snapshot> = wanted.filter(|snapshot| !is_held(snapshot)).collect();
        // All are compared first: a set that does not fit touches no model.
        let owns = wanted.iter().map(|snapshot| self.compared(snapshot));
        let owns = owns.collect::<Result<Vec<_>>>().map_err(untouched)?;
        for (at, (snapshot, own)) in wanted.iter().zip(&owns).enumerate() {
            let touched = |error| LoadFailure {
                error,
                // This one may be half written, or one before it whole.
                touched: true,
            };
            let model = match self.model_mut(snapshot.model().as_str()) {
                Ok(model) => model,
                // Before the first model no model was written.
                Err(error) if at == 0 => return Err(untouched(error)),
                Err(error) => return Err(touched(error)),
            };
            // From here on a failure leaves a model that may be half written.
            hand_over(snapshot, own, model).map_err(touched)?;
        }
        Ok(())
    }

    /// Loads one version into the model it is of, compared first.
    pub(crate) fn load_one(&mut self, snapshot: &Snapshot) -> Result<()> {
        self.shaped(snapshot)?;
        let own = self.compared(snapshot)?;
        hand_over(snapshot, &own, self.model_mut(snapshot.model().as_str())?)
    }

    /// Gives a model without shapes those of what came, and compares any other.
    pub(crate) fn shaped(&mut self, snapshot: &Snapshot) -> Result<()> {
        let shapes = snapshot.attributes().model_layout(snapshot.layout())?;
        self.model_mut(snapshot.model().as_str())?.shape(&shapes)?;
        self.compared(snapshot).map(|_| ())
    }

    /// The layout of a model, found to fit what came.
    fn compared(&mut self, snapshot: &Snapshot) -> Result<Layout> {
        let id = snapshot.model();
        let own = self.layout(id.as_str())?;
        let sent = snapshot.attributes().layout_for(snapshot.layout(), &own)?;
        match fits(&own, &sent) {
            Ok(()) => Ok(own),
            Err(mismatch) => Err(Error::WrongModel {
                model: id.clone(),
                mismatch: Box::new(mismatch),
            }),
        }
    }
}

/// Binds a model to a version that fits its own layout, or loads it.
fn hand_over(snapshot: &Snapshot, own: &Layout, model: &mut dyn WeightLoader) -> Result<()> {
    // A model that serves from the version itself needs no copy.
    if model.bind(snapshot)? {
        return Ok(());
    }
    let sent: Vec<_> = snapshot.tensors().collect();
    model.load(&snapshot.attributes().expand(&sent, Some(own)))
}

impl std::fmt::Debug for SetLoader<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ids = self.members.iter().map(|(id, _)| id);
        f.debug_set().entries(ids).finish()
    }
}
