//! An agent says what it has, to be compared with what was published.

use weightsync_core::digest::Digest;

use super::{Engine, Event};
use crate::relay::plan::{Input, Item};
use crate::wire::message::ToRoot;

impl Engine {
    /// Makes the digest of a version, after those that were asked for before.
    pub(super) fn scrub(&mut self, item: Item) {
        if self.scrubs.contains(&item) {
            return;
        }
        self.scrubs.push_back(item);
        if self.scrubs.len() == 1 {
            self.next_scrub();
        }
    }

    /// A digest was made; nothing if that was given up.
    pub(super) fn scrubbed(&mut self, item: Item, digest: Option<Digest>) {
        self.scrubs.pop_front();
        self.say(&ToRoot::Scrubbed {
            model: item.model as u8,
            version: item.version,
            digest,
        });
        self.next_scrub();
    }

    fn next_scrub(&mut self) {
        while let Some(item) = self.scrubs.front().copied() {
            if let Some(snapshot) = self.whole.get(&item).cloned() {
                let (events, threads) = (self.events.clone(), self.threads.clone());
                let work = move || {
                    let digest = snapshot.digest_unless(|| threads.is_stopped());
                    // Its slot may be wanted.
                    drop(snapshot);
                    // An engine that has ended hears nothing.
                    let _ = events.blocking_send(Event::Scrubbed { item, digest });
                };
                match self.threads.spawn("weightsync-scrub", work) {
                    Ok(()) => return,
                    Err(error) => tracing::warn!("{item:?} is not compared: {error}"),
                }
            }
            self.scrubs.pop_front();
            self.say(&ToRoot::Scrubbed {
                model: item.model as u8,
                version: item.version,
                digest: None,
            });
        }
    }

    /// What is here of a version is not what was published.
    pub(super) fn spoiled(&mut self, item: Item) {
        tracing::error!(
            "{item:?} is not what was published: what is here of this model is let go of, and \
             the next version is fetched whole"
        );
        self.step([Input::Spoiled { model: item.model }]);
    }
}
