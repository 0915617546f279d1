//! Converts this process's types into those of the wire.

use super::Joining;
use crate::wire::message::ToRoot;

pub(super) fn join_message(ticket: u64, joining: &Joining) -> ToRoot {
    ToRoot::Join {
        ticket,
        worker: joining.who.worker,
        instance: joining.who.instance,
        pid: joining.pid,
        models: joining.models,
        delivery: joining.delivery,
        device: joining.device.clone(),
        seen: joining.seen,
    }
}
