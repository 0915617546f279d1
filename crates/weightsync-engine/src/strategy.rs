//! In which form weights are handed over: a flat list of dotted names, or a
//! nested tree. On the way every name is dotted, so a message of one form loads
//! into a model of the other.

mod state_dict;
mod tensordict;
#[cfg(test)]
mod tests;

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use weightsync_core::Layout;

pub use self::state_dict::{Role, StateDict};
pub use self::tensordict::TensorDict;
use crate::attributes::Attributes;
use crate::error::Result;
use crate::extract::{Extracted, WeightExtractor};
use crate::load::{TensorView, WeightLoader};

/// The form of a model's weights, by its word.
///
/// ```
/// use weightsync::model::{Strategy, TensorDict};
/// use weightsync::Tensors;
///
/// let mut model = Tensors::new();
/// model.insert("actor.weight", [2], vec![1.0_f32, 2.0])?;
/// let weights = "tensordict".parse::<Strategy>()?.extract(&model)?;
///
/// // A model of the other kind takes them.
/// let mut other = Tensors::new();
/// weights.apply_to(&mut other)?;
/// assert_eq!(other.slice::<f32>("actor.weight")?, [1.0, 2.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Strategy {
    /// A flat list of tensors by dotted name.
    #[default]
    #[serde(rename = "state_dict")]
    StateDict,
    /// A tree of tensors by nested names.
    TensorDict,
}

/// A word that is no strategy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no strategy {word:?}; there are state_dict and tensordict")]
pub struct UnknownStrategy {
    /// The word, or its beginning.
    pub word: String,
}

/// Weights in one of the two forms.
#[derive(Clone, Debug)]
pub enum Weights<'a> {
    /// By dotted name.
    StateDict(StateDict<'a>),
    /// By nested names.
    TensorDict(TensorDict<'a>),
}

impl Strategy {
    /// A copy of a model's weights, in this form.
    ///
    /// # Errors
    ///
    /// Those of the model; [`PathConflict`](weightsync_core::Error::PathConflict)
    /// if its names cannot be nested.
    pub fn extract(self, model: &dyn WeightExtractor) -> Result<Weights<'static>> {
        let attributes = model.attributes()?;
        let mut copy = StateDict::new();
        model.extract(&mut |tensors| {
            copy = StateDict::copy_of(tensors, &attributes)?;
            Ok(())
        })?;
        self.arrange(copy)
    }

    /// Tensors that lie somewhere, such as in a snapshot, in this form.
    ///
    /// # Errors
    ///
    /// [`PathConflict`](weightsync_core::Error::PathConflict) if the names cannot
    /// be nested; [`Error::Load`](crate::Error::Load) for extra state that is none.
    pub fn lend<'a>(
        self,
        tensors: impl IntoIterator<Item = TensorView<'a>>,
        attributes: &Attributes,
    ) -> Result<Weights<'a>> {
        self.arrange(StateDict::from_views(tensors, attributes)?)
    }

    /// The word for it.
    pub fn word(self) -> &'static str {
        match self {
            Self::StateDict => "state_dict",
            Self::TensorDict => "tensordict",
        }
    }

    fn arrange(self, weights: StateDict<'_>) -> Result<Weights<'_>> {
        Ok(match self {
            Self::StateDict => Weights::StateDict(weights),
            Self::TensorDict => Weights::TensorDict(weights.try_into()?),
        })
    }
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.word())
    }
}

impl FromStr for Strategy {
    type Err = UnknownStrategy;

    fn from_str(word: &str) -> Result<Self, UnknownStrategy> {
        [Self::StateDict, Self::TensorDict]
            .into_iter()
            .find(|strategy| strategy.word() == word)
            .ok_or_else(|| UnknownStrategy {
                word: word.chars().take(32).collect(),
            })
    }
}

impl<'a> Weights<'a> {
    /// Their form.
    pub fn strategy(&self) -> Strategy {
        match self {
            Self::StateDict(_) => Strategy::StateDict,
            Self::TensorDict(_) => Strategy::TensorDict,
        }
    }

    /// The tensors by dotted name.
    pub fn flat(&self) -> &StateDict<'a> {
        match self {
            Self::StateDict(flat) => flat,
            Self::TensorDict(tree) => tree.flat(),
        }
    }

    /// Loads them into a model of this process, of whatever form. A model
    /// without shapes takes theirs.
    ///
    /// # Errors
    ///
    /// [`LayoutMismatch`](weightsync_core::Error::LayoutMismatch) if the model has
    /// other tensors, and those of the model.
    pub fn apply_to(&self, model: &mut dyn WeightLoader) -> Result<()> {
        let sent = WeightExtractor::layout(self)?;
        let own = match model.shape(&sent)? {
            true => None,
            false => Some(model.layout()?),
        };
        let attributes = self.attributes()?;
        if let Some(own) = &own {
            // Every name is there: ties matter to a model that has fewer.
            let unique = attributes.sent_layout(&sent)?;
            let seen = attributes.layout_for(&unique, own)?;
            if let Err(mismatch) = Layout::compare(own, &seen)
                && !mismatch.is_order_alone()
            {
                return Err(weightsync_core::Error::from(mismatch).into());
            }
        }
        let packed = self.flat().packed()?;
        let views: Vec<_> = packed.views().collect();
        match &own {
            None => model.load(&views),
            // A model may have only some names of tied tensors.
            Some(own) => {
                let named = |view: &TensorView<'_>| own.index_of(view.name()).is_some();
                model.load(&views.into_iter().filter(named).collect::<Vec<_>>())
            }
        }
    }
}

impl WeightExtractor for Weights<'_> {
    fn layout(&self) -> Result<Layout> {
        WeightExtractor::layout(self.flat())
    }

    fn extract(&self, take: &mut dyn FnMut(&[Extracted<'_>]) -> Result<()>) -> Result<()> {
        self.flat().extract(take)
    }

    fn ties(&self) -> Result<Vec<(String, String)>> {
        self.flat().ties()
    }

    fn attributes(&self) -> Result<Attributes> {
        match self {
            Self::StateDict(flat) => flat.attributes(),
            Self::TensorDict(tree) => tree.attributes(),
        }
    }
}
