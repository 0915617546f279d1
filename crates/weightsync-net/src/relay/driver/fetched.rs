//! The outcomes of an agent's fetches.

use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::Instant;
use weightsync_engine::log_limiter;

use super::super::backoff;
use super::super::plan::{Input, Item};
use super::{Driver, Fetched, Fetching};
use crate::bulk::{FetchEnd, Transferred};
use crate::link::refusal;
use crate::wire::message::ToRoot;

impl Driver {
    /// Handles the end of a fetch.
    pub(super) fn fetched(&mut self, fetched: Fetched) {
        let Fetched {
            number,
            item,
            parent: by,
            end,
            came,
        } = fetched;
        self.send_received(item, by, came);
        let current = self.fetching.get(&item).map(|one| one.number);
        if current != Some(number) {
            return;
        }
        let Some(Fetching {
            parent, instead, ..
        }) = self.fetching.remove(&item)
        else {
            return;
        };
        match end {
            FetchEnd::Whole => {
                let committed = match self.coming.get(&item) {
                    Some((slot, _)) => slot.commit(),
                    None => return,
                };
                match committed {
                    Ok(snapshot) => {
                        self.failures = 0;
                        self.store.deltas().trim(item.model);
                        self.whole.insert(item, snapshot);
                        self.send(&ToRoot::Holds {
                            have: vec![item],
                            dropped: Vec::new(),
                        });
                        self.step([Input::Whole { item }]);
                    }
                    Err(error) => tracing::error!("{item:?} cannot be committed: {error}"),
                }
            }
            FetchEnd::NotThere => {
                let sender = parent.agent == 0;
                if !sender {
                    self.send(&ToRoot::Missing {
                        model: item.model as u8,
                        version: item.version,
                    });
                }
                self.step([Input::NotThere { item, sender }]);
            }
            FetchEnd::Broken(error) => {
                // This also waits when the sender was the source: the sender then names a parent
                // again, and the fetch goes on.
                let pause = backoff(self.failures);
                let pause = if self.failures == 0 {
                    Duration::ZERO
                } else {
                    pause
                };
                self.failures += 1;
                let at = parent.address;
                // Until somebody changes an end, each attempt fails so.
                if let Some((why, true)) = refusal(&error) {
                    let cause = format!("nothing can be fetched from {at}");
                    if let Some(more) = self.log_limiter.logs(&cause, Instant::now().into_std()) {
                        log_limiter::warn(more, &format!("{cause}: {why}"));
                    }
                } else {
                    tracing::info!("fetching {item:?} from {at} broke off: {error}");
                }
                // The loss of the parent is worth reporting more than a failure of the sender,
                // which the sender knows of.
                if !instead || self.complain.is_none() {
                    self.complain = Some((Instant::now() + pause, parent.agent, error.to_string()));
                }
                self.leave_parent();
                self.step([Input::Broken { item }, Input::NoParent]);
            }
            FetchEnd::Altered { block } => {
                tracing::warn!(
                    "the relay at {} sent block {block} of {item:?} other than the sender published \
                     it: nothing of the block was used, and another parent is asked for",
                    parent.address
                );
                self.send(&ToRoot::Altered {
                    parent: parent.agent,
                    model: item.model as u8,
                    version: item.version,
                    block: block as u32,
                });
                self.leave_parent();
                self.step([Input::Broken { item }, Input::NoParent]);
            }
            FetchEnd::BaseMismatch(error) => self.start_anew(item.model, &error),
            // The missing blocks are fetched from the same parent.
            FetchEnd::Partly => self.step([Input::Rest { item }]),
            FetchEnd::Stopped => self.step([Input::Broken { item }]),
        }
    }

    /// Reports how much arrived from a parent.
    pub(super) fn send_received(&mut self, item: Item, parent: u64, came: Transferred) {
        if let Some(rate) = came.rate() {
            // A relay knows only its own link, and assumes that the links below are like it.
            self.store.deltas().note_rate(rate as u64);
        }
        let Transferred { bytes, busy } = came;
        self.travelled.fetch_add(bytes, Ordering::Relaxed);
        if bytes > 0 {
            self.send(&ToRoot::Received {
                model: item.model as u8,
                version: item.version,
                parent,
                bytes,
                micros: busy.as_micros() as u64,
            });
        }
    }
}
