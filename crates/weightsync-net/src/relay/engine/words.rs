//! What this process says, as it is said on the wire.

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
