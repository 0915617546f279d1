//! What a message has to fulfil besides its form.

use weightsync_core::Version;
use weightsync_link::message::{MessageError, within};
use weightsync_mem::{Delivery, Want};

use super::super::image::MAX_MODELS;
use super::MAX_BOUND;
use crate::agent::Item;

pub(super) fn require(
    holds: bool,
    expected: &'static str,
    got: impl FnOnce() -> String,
) -> Result<(), MessageError> {
    match holds {
        true => Ok(()),
        false => Err(MessageError::OutOfRange {
            expected,
            got: got(),
        }),
    }
}

pub(super) fn check_model(model: impl Into<usize>) -> Result<(), MessageError> {
    let model = model.into();
    require(model < MAX_MODELS.into(), "a model below 64", || {
        model.to_string()
    })
}

pub(super) fn check_version(version: Version) -> Result<(), MessageError> {
    require(!version.is_none(), "a version from 1", || "0".into())
}

pub(super) fn check_item(model: impl Into<usize>, version: Version) -> Result<(), MessageError> {
    check_model(model)?;
    check_version(version)
}

pub(super) fn check_items(
    what: &'static str,
    items: &[Item],
    limit: usize,
) -> Result<(), MessageError> {
    within(what, items.len(), limit)?;
    let mut items = items.iter();
    items.try_for_each(|item| check_item(item.model, item.version))
}

/// A set: no model has two versions in it.
pub(super) fn check_set(set: &[Item]) -> Result<(), MessageError> {
    check_items("models of a set", set, MAX_MODELS.into())?;
    let mut models = 0_u64;
    set.iter().try_for_each(|item| {
        // No shift is too large: `check_items` has bounded the model.
        let bit = 1 << item.model;
        let is_new = models & bit == 0;
        models |= bit;
        require(is_new, "each model once in a set", || {
            format!("model {} twice", item.model)
        })
    })
}

pub(super) fn check_want(want: Want) -> Result<(), MessageError> {
    match want {
        Want::Newest => Ok(()),
        Want::AtLeast { model, version } | Want::Exactly { model, version } => {
            check_item(model, version)
        }
    }
}

pub(super) fn check_delivery(delivery: Delivery) -> Result<(), MessageError> {
    match delivery {
        Delivery::Newest | Delivery::Asked => Ok(()),
        Delivery::Every { bound } => require(
            (1..=MAX_BOUND).contains(&bound),
            "a bound of 1 to 32",
            || bound.to_string(),
        ),
    }
}
