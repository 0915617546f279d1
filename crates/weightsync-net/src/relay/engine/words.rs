//! What this process says, as it is said on the wire.

use weightsync_mem::{self as mem, Delivery};

use super::Joining;
use crate::relay::plan::Item;
use crate::wire::message::{self, ToRoot};

pub(super) fn join_message(ticket: u64, joining: &Joining) -> ToRoot {
    ToRoot::Join {
        ticket,
        worker: joining.who.worker,
        instance: joining.who.instance,
        pid: joining.pid,
        models: joining.models,
        delivery: joining.delivery.into(),
        device: joining.device.clone(),
        seen: joining.seen,
    }
}

pub(super) fn held(item: Item) -> message::Held {
    message::Held {
        model: item.model as u8,
        version: item.version,
    }
}

pub(super) fn item(held: message::Held) -> Item {
    Item {
        model: held.model.into(),
        version: held.version,
    }
}

impl From<Delivery> for message::Delivery {
    fn from(delivery: Delivery) -> Self {
        match delivery {
            Delivery::Newest => Self::Newest,
            Delivery::Every { bound } => Self::Every { bound },
            Delivery::Asked => Self::Asked,
        }
    }
}

impl From<mem::Want> for message::Want {
    fn from(want: mem::Want) -> Self {
        match want {
            mem::Want::Newest => Self::Newest,
            mem::Want::AtLeast { model, version } => Self::AtLeast {
                model: model as u8,
                version,
            },
            mem::Want::Exactly { model, version } => Self::Exactly {
                model: model as u8,
                version,
            },
        }
    }
}
