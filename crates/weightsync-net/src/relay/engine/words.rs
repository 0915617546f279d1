//! What this process says, as it is said on the wire.

use super::Joining;
use crate::wire::message::ToRoot;

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
