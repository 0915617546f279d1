//! Reports an agent's digests, to be compared with the published ones.

use std::fmt;

use weightsync_core::digest::Digest;

use super::{Driver, DriverEvent};
use crate::agent::plan::{Item, PlanInput};
use crate::wire::message::ToRoot;

impl Driver {
    /// Computes the digest of a version, after those requested before.
    pub(super) fn scrub(&mut self, item: Item) {
        if self.scrubs.contains(&item) {
            return;
        }
        self.scrubs.push_back(item);
        // One digest at a time: each of them reads a whole version.
        if self.scrubs.len() == 1 {
            self.next_scrub();
        }
    }

    /// A digest was computed; `None` if that was given up.
    pub(super) fn scrubbed(&mut self, item: Item, digest: Option<Digest>) {
        self.scrubs.pop_front();
        self.send(&ToRoot::Scrubbed { item, digest });
        self.next_scrub();
    }

    fn next_scrub(&mut self) {
        while let Some(item) = self.scrubs.front().copied() {
            if let Some(snapshot) = self.fetches.whole.get(&item).cloned() {
                let (events, threads) = (self.events.clone(), self.threads.clone());
                let work = move || {
                    let digest = snapshot.digest_unless(|| threads.is_stopped());
                    // The slot may be needed for the next version.
                    drop(snapshot);
                    // A driver that has ended receives nothing.
                    let _ = events.blocking_send(DriverEvent::Scrubbed { item, digest });
                };
                match self.threads.spawn("scrub", work) {
                    Ok(()) => return,
                    Err(error) => tracing::warn!("{item:?} is not compared: {error}"),
                }
            }
            // The version is gone, or no thread could be started. The sender waits for an answer in
            // any case.
            self.scrubs.pop_front();
            let digest = None;
            self.send(&ToRoot::Scrubbed { item, digest });
        }
    }

    /// Drops a model whose bytes differ from the published ones, and fetches it again.
    pub(super) fn drop_model(&mut self, model: usize, reason: &dyn fmt::Display) {
        tracing::error!(
            "what is here of model {model} is damaged, so the relay drops it and fetches the next \
             version whole: {reason}"
        );
        // Versions still in slots, and their deltas, may come from the wrong bytes too.
        self.store.deltas().forget(model);
        self.relay.forget_bases(model);
        self.step([PlanInput::Spoiled { model }]);
    }
}
