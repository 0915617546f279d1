//! What a plan knows of one worker.

use std::collections::VecDeque;

use weightsync_mem::{Delivery, WorkerInstance};

use super::{Item, PlanEffect};

#[derive(Debug)]
pub(super) struct WorkerPlan {
    pub(super) delivery: Delivery,
    /// Sets to notify the worker of once they are whole, oldest first.
    pub(super) pending: VecDeque<Notification>,
    pub(super) answer: Option<(u64, Notification)>,
    /// The last question that the worker has withdrawn.
    pub(super) withdrawn: u64,
    /// The set in the worker's mailbox, and its sequence number.
    pub(super) notified: Vec<Item>,
    pub(super) notified_at: u64,
    /// The worker's last answer.
    pub(super) answered: Vec<Item>,
    /// A set was passed over since the last notification.
    pub(super) missed: bool,
    /// The newest sequence number that arrived for the worker.
    pub(super) newest: u64,
}

#[derive(Clone, Debug)]
pub(super) struct Notification {
    pub(super) sequence: u64,
    pub(super) set: Vec<Item>,
}

impl WorkerPlan {
    pub(super) fn new(delivery: Delivery) -> Self {
        Self {
            delivery,
            pending: VecDeque::new(),
            answer: None,
            withdrawn: 0,
            notified: Vec::new(),
            notified_at: 0,
            answered: Vec::new(),
            missed: false,
            newest: 0,
        }
    }

    /// Whether a worker that runs nothing yet may begin with this older set if it is here. It goes
    /// on to the newer set later.
    pub(super) fn may_begin_with(&self, next: &Notification) -> bool {
        let newest = !matches!(self.delivery, Delivery::Every { .. });
        newest && self.notified_at < next.sequence && next.sequence < self.newest
    }

    /// Queues a notification for the worker. `comes` tells whether a set is finished in any case,
    /// and whether it has begun to arrive.
    pub(super) fn enqueue(
        &mut self,
        next: Notification,
        comes: impl Fn(&Notification) -> (bool, bool),
    ) {
        // After a link broke, the sender may repeat a notification.
        if next.sequence <= self.newest {
            return;
        }
        self.newest = next.sequence;
        if !matches!(self.delivery, Delivery::Every { .. })
            && let Some(front) = self.pending.front()
        {
            let (is_finished, is_begun) = comes(front);
            // A set that has begun gives way to a newer one only once in a row: otherwise a host
            // slower than the trainer's sends would never have a whole set.
            if is_finished || is_begun && self.missed {
                // A set that is on its way is finished; the sets behind it are replaced.
                self.pending.truncate(1);
            } else {
                // Nothing of it has arrived, or it is the first in a row that is given up.
                self.pending.clear();
                self.missed = true;
            }
        }
        self.pending.push_back(next);
    }

    /// Puts the worker's mailbox on a set.
    pub(super) fn put_on(
        &mut self,
        who: WorkerInstance,
        Notification { sequence, set }: Notification,
    ) -> PlanEffect {
        // An older set that is still on its way is no longer useful.
        self.pending.retain(|next| next.sequence > sequence);
        self.notified.clone_from(&set);
        self.notified_at = sequence;
        PlanEffect::Notify { who, sequence, set }
    }
}
