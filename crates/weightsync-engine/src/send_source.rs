//! What a send takes: one model's weights, those of several models, or those
//! registered before.

use crate::error::{Error, Result, place_of};
use crate::extract::WeightExtractor;
use crate::models::ModelTree;
use crate::setup::SetupModel;

/// A source that can be sent: anything that is a [`WeightExtractor`], a [`Set`] of them,
/// or [`Registered`].
pub trait SendSource {
    /// The models that are sent, by their ids. `None` in place of an id stands
    /// for the one model there is, or the one the send names.
    fn members(&self) -> Members<'_>;
}

/// What a [`SendSource`] consists of.
#[derive(Clone)]
#[non_exhaustive]
pub enum Members<'a> {
    /// One model, whichever the send is about.
    One(&'a dyn WeightExtractor),
    /// Several models by id, to flip together.
    Set(Vec<(&'a str, &'a dyn WeightExtractor)>),
    /// The sources registered with the sender.
    Registered,
}

impl<W: WeightExtractor> SendSource for W {
    fn members(&self) -> Members<'_> {
        Members::One(self)
    }
}

/// Weights of several models that belong together: sent at once, they flip
/// together on every worker, or not at all.
///
/// ```
/// use weightsync::model::Set;
/// use weightsync::Tensors;
///
/// let (mut actor, mut critic) = (Tensors::new(), Tensors::new());
/// actor.insert("bias", [2], [0.0_f32; 2])?;
/// critic.insert("bias", [1], [0.0_f32])?;
/// let set = Set::new().with("actor", &actor).with("critic", &critic);
/// assert_eq!(set.len(), 2);
/// # Ok::<(), weightsync::Error>(())
/// ```
#[derive(Clone, Default)]
pub struct Set<'a> {
    members: Vec<(&'a str, &'a dyn WeightExtractor)>,
}

impl<'a> Set<'a> {
    /// An empty set.
    pub fn new() -> Self {
        Self::default()
    }

    /// The set with one more model; one of the same name is replaced.
    #[must_use]
    pub fn with(mut self, model: &'a str, weights: &'a dyn WeightExtractor) -> Self {
        match self.members.iter_mut().find(|(id, _)| *id == model) {
            Some((_, old)) => *old = weights,
            None => self.members.push((model, weights)),
        }
        self
    }

    /// The set with models of a tree, each by its path, which is its id too.
    ///
    /// # Errors
    ///
    /// [`Error::Path`] with what the tree has instead.
    pub fn with_paths(
        mut self,
        tree: &'a dyn ModelTree,
        paths: impl IntoIterator<Item = &'a str>,
    ) -> Result<Self> {
        for path in paths {
            let weights = tree.extractor(&path.parse()?)?;
            self = self.with(path, weights);
        }
        Ok(self)
    }

    /// How many models.
    pub fn len(&self) -> usize {
        self.members.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }
}

impl SendSource for Set<'_> {
    fn members(&self) -> Members<'_> {
        Members::Set(self.members.clone())
    }
}

impl std::fmt::Debug for Set<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set()
            .entries(self.members.iter().map(|(id, _)| id))
            .finish()
    }
}

/// The sources given to [`SenderSetup::register`](crate::SenderSetup::register):
/// all of them, or the model the send names.
#[derive(Clone, Copy, Debug)]
pub struct Registered;

impl SendSource for Registered {
    fn members(&self) -> Members<'_> {
        Members::Registered
    }
}

/// The models' places in the sender's set, in its order, with their sources.
pub(crate) type Resolved<'a> = Vec<(usize, &'a dyn WeightExtractor)>;

/// Finds the models that are meant among those there are.
///
/// # Errors
///
/// [`Error::NoSuchModel`], [`Error::SeveralModels`], [`Error::OtherModel`],
/// [`Error::NotRegistered`].
pub(crate) fn resolve<'a>(
    members: Members<'a>,
    named: Option<&str>,
    models: &'a [SetupModel],
) -> Result<Resolved<'a>> {
    let known = models.iter().map(|model| &model.prepared.id);
    let index_of = |id: &str| place_of(id, known.clone());
    let only = || match (named, models) {
        (Some(id), _) => index_of(id),
        (None, [_]) => Ok(0),
        (None, _) => Err(Error::SeveralModels {
            known: known.clone().cloned().collect(),
        }),
    };
    let mut resolved: Resolved<'a> = match members {
        Members::One(weights) => vec![(only()?, weights)],
        Members::Set(set) => {
            // The options name one model, so the set may have no other.
            if let Some(named) = named
                && set.iter().any(|(id, _)| *id != named)
            {
                return Err(Error::OtherModel {
                    named: named.into(),
                    got: set.iter().map(|(id, _)| (*id).into()).collect(),
                });
            }
            let members = set
                .into_iter()
                .map(|(id, weights)| Ok((index_of(id)?, weights)));
            members.collect::<Result<_>>()?
        }
        Members::Registered => {
            let named = named.map(index_of).transpose()?;
            let wanted = (0..models.len()).filter(|index| named.is_none_or(|one| one == *index));
            let sources = wanted.map(|index| {
                let source = models[index].source();
                let source = source.ok_or_else(|| Error::NotRegistered {
                    model: models[index].prepared.id.clone(),
                })?;
                Ok((index, source))
            });
            sources.collect::<Result<_>>()?
        }
    };
    if resolved.is_empty() {
        return Err(Error::EmptySet);
    }
    // In the order of the sender's models, whatever order the set has.
    resolved.sort_by_key(|(index, _)| *index);
    Ok(resolved)
}
