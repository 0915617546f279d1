//! What an agent tells its sender.

use std::sync::atomic::Ordering;

use weightsync_mem::ReportedProgress;

use super::Driver;
use crate::agent::plan::Item;
use crate::bulk::Transferred;
use crate::wire::message::{ToRoot, WorkerProgress};

impl Driver {
    /// Sends the sender a message, if there is a link. The next link begins with a report of
    /// everything here, so what a broken link loses is told again.
    pub(super) fn send(&mut self, message: &ToRoot) {
        if let Some((_, link)) = &self.link
            && !link.send(message)
        {
            tracing::warn!("the sender does not keep up");
        }
    }

    pub(super) fn send_progress(&mut self, progress: Vec<ReportedProgress>) {
        if progress.is_empty() {
            return;
        }
        let all = progress.into_iter().map(|one| WorkerProgress {
            who: one.who,
            taken: one.taken,
            through: one.through,
            loaded: one.loaded,
            versions: one
                .versions
                .into_iter()
                .map(|(model, version)| Item { model, version })
                .collect(),
            refused: one.refused,
        });
        for message in ToRoot::progress(all.collect()) {
            self.send(&message);
        }
    }

    /// Reports how much arrived from a parent.
    pub(super) fn send_received(&mut self, item: Item, parent: u64, transferred: Transferred) {
        if let Some(rate) = transferred.rate() {
            // A relay knows only its own link, and assumes that the links below are like it.
            self.store.deltas().note_rate(rate as u64);
        }
        let Transferred { bytes, busy } = transferred;
        self.travelled.fetch_add(bytes, Ordering::Relaxed);
        if bytes > 0 {
            self.send(&ToRoot::Received {
                item,
                parent,
                bytes,
                micros: busy.as_micros() as u64,
            });
        }
    }
}
