//! The errors that several modules make.

use std::io;

use weightsync_core::{Layout, ModelId};
use weightsync_mem::BoxedError;

use super::{Error, Result};

impl Error {
    pub(crate) fn unsupported(what: &'static str, scheme: impl ToString) -> Self {
        let scheme = scheme.to_string();
        Self::Unsupported { what, scheme }
    }

    pub(crate) fn extract(name: &str, source: impl Into<BoxedError>) -> Self {
        let (name, source) = (name.to_owned(), source.into());
        Self::Extract { name, source }
    }

    pub(crate) fn load(name: &str, source: impl Into<BoxedError>) -> Self {
        let (name, source) = (name.to_owned(), source.into());
        Self::Load { name, source }
    }

    pub(crate) fn os(action: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Os { action, source }
    }

    pub(crate) fn no_such_model<'a>(
        model: &str,
        known: impl IntoIterator<Item = &'a ModelId>,
    ) -> Self {
        Self::NoSuchModel {
            model: model.into(),
            known: known.into_iter().cloned().collect(),
        }
    }

    pub(crate) fn no_such_tensor(name: &str, layout: &Layout) -> Self {
        let known = layout.tensors().iter().map(|spec| spec.name.clone());
        Self::NoSuchTensor {
            name: name.into(),
            known: known.collect(),
        }
    }
}

/// The place of a model among those that there are.
///
/// # Errors
///
/// [`Error::NoSuchModel`].
pub(crate) fn place_of<'a>(
    model: &str,
    known: impl IntoIterator<Item = &'a ModelId, IntoIter: Clone>,
) -> Result<usize> {
    let known = known.into_iter();
    let place = known.clone().position(|id| id.as_str() == model);
    place.ok_or_else(|| Error::no_such_model(model, known))
}
