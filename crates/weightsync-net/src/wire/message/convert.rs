//! Converts between the types of messages and those of the wire.

use serde::{Deserialize, Serialize};
use weightsync_core::{Epoch, Run, Version};
use weightsync_mem::{Delivery, Want};

use super::Item;

/// An [`Item`] on the wire.
pub(super) type WireItem = (u8, u64);

/// A [`Run`] on the wire.
pub(super) type WireRun = (u64, [u8; 16]);

#[derive(Clone, Copy, Serialize, Deserialize)]
pub(super) enum WireDelivery {
    Newest,
    Every { bound: u8 },
    Asked,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
pub(super) enum WireWant {
    Newest,
    AtLeast { model: u8, version: u64 },
    Exactly { model: u8, version: u64 },
}

pub(super) fn items_to_wire(items: &[Item]) -> Vec<WireItem> {
    let items = items.iter();
    // Encoding happens only after the checks, so the numbers fit.
    items
        .map(|item| (item.model as u8, item.version.0))
        .collect()
}

pub(super) fn items_from_wire(items: Vec<WireItem>) -> Vec<Item> {
    let items = items.into_iter();
    items
        .map(|(model, version)| Item {
            model: model.into(),
            version: Version(version),
        })
        .collect()
}

pub(super) fn run_to_wire(run: Run) -> WireRun {
    (run.epoch.0, run.id)
}

pub(super) fn run_from_wire((epoch, id): WireRun) -> Run {
    Run {
        epoch: Epoch(epoch),
        id,
    }
}

impl From<Delivery> for WireDelivery {
    fn from(delivery: Delivery) -> Self {
        match delivery {
            Delivery::Newest => Self::Newest,
            Delivery::Every { bound } => Self::Every { bound },
            Delivery::Asked => Self::Asked,
        }
    }
}

impl From<WireDelivery> for Delivery {
    fn from(delivery: WireDelivery) -> Self {
        match delivery {
            WireDelivery::Newest => Self::Newest,
            WireDelivery::Every { bound } => Self::Every { bound },
            WireDelivery::Asked => Self::Asked,
        }
    }
}

impl From<Want> for WireWant {
    /// After the checks of [`super::check_want`], so the model's index fits.
    fn from(want: Want) -> Self {
        match want {
            Want::Newest => Self::Newest,
            Want::AtLeast { model, version } => Self::AtLeast {
                model: model as u8,
                version: version.0,
            },
            Want::Exactly { model, version } => Self::Exactly {
                model: model as u8,
                version: version.0,
            },
        }
    }
}

impl From<WireWant> for Want {
    fn from(want: WireWant) -> Self {
        match want {
            WireWant::Newest => Self::Newest,
            WireWant::AtLeast { model, version } => Self::AtLeast {
                model: model.into(),
                version: Version(version),
            },
            WireWant::Exactly { model, version } => Self::Exactly {
                model: model.into(),
                version: Version(version),
            },
        }
    }
}
