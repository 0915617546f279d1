//! Everything that ends transfers: revoked versions, broken links, and agents that die.

use weightsync_core::Version;

use super::bulk::STALLED;
use super::bulk::Transfer;
use super::network::{Health, Node};
use super::{Event, World};
use crate::agent::Item;
use crate::bulk::replaced;

impl World {
    /// An agent stops serving this version.
    pub(super) fn revoke(&mut self, node: Node, item: Item) {
        let revoked = |one: &Transfer| one.parent.node == node && one.item == item && one.found;
        self.end_serving(revoked);
    }

    /// The agent will not have this version.
    pub(super) fn refuse(&mut self, node: Node, item: Item) {
        let refused = |one: &Transfer| one.parent.node == node && one.item == item && !one.found;
        self.end_serving(refused);
    }

    /// Stops serving a model's old versions as far as they hold slots.
    pub(super) fn keep_oldest(&mut self, model: usize) {
        let newest = Version(self.sender.versions[model]);
        let served = self
            .transfers
            .values()
            .filter(|one| one.parent.node == 0 && one.found && one.parent_open && !one.revoked);
        let served = served.map(|one| one.item);
        let replaced = replaced(served, model, newest, |item| self.sender.keeps(item));
        self.end_serving(|one| one.parent.node == 0 && one.found && replaced.contains(&one.item));
    }

    fn end_serving(&mut self, of: impl Fn(&Transfer) -> bool) {
        let ended = self
            .transfers
            .iter_mut()
            .filter(|(_, one)| one.parent_open && of(one));
        let ended: Vec<u64> = ended
            .map(|(number, one)| {
                one.revoked = true;
                *number
            })
            .collect();
        for number in ended {
            // The block under way is sent to its end.
            if !self
                .transfers
                .get(&number)
                .is_some_and(|one| one.sending.is_some() || one.held)
            {
                self.gone(number);
            }
        }
    }

    /// Handles a change of the routes between these machines.
    pub(super) fn transfers_change(&mut self, of: impl Fn(Node, Node) -> bool) {
        let latency = self.network.latency;
        let all = self.transfers.iter();
        let all = all.filter(|(_, one)| of(one.child.0, one.parent.node));
        let all: Vec<u64> = all.map(|(number, _)| *number).collect();
        for number in all {
            let Some(transfer) = self.transfers.get_mut(&number) else {
                continue;
            };
            match self.network.health(transfer.child.0, transfer.parent.node) {
                (Health::Cut, _) => {
                    let event = match transfer.child_open {
                        true => Event::Broken { number },
                        false => Event::HungUp { number },
                    };
                    self.clock.after(0, event);
                }
                (Health::Silent, since) => {
                    let event = Event::Doubt { number, since };
                    self.clock.after(STALLED, event);
                }
                (Health::Good, _) => {
                    if std::mem::take(&mut transfer.held) {
                        let event = match transfer.gone {
                            true => Event::NotThere { number },
                            false => Event::Block { number },
                        };
                        self.clock.after(latency, event);
                    }
                }
            }
        }
    }

    /// An agent has died: ends what it fetched, and what was fetched from it.
    pub(super) fn transfers_end(&mut self, node: Node, life: u64) {
        let agent = self.hosts[node].agent.as_ref();
        let fetching = agent.map(|one| one.fetching.keys().copied().collect());
        let fetching: Vec<Item> = fetching.unwrap_or_default();
        for item in fetching {
            self.stop_fetch(node, item);
        }
        let latency = self.network.latency;
        let from_it = self
            .transfers
            .iter_mut()
            .filter(|(_, one)| (one.parent.node, one.parent.life) == (node, life) && one.asked);
        for (number, transfer) in from_it {
            transfer.parent_open = false;
            // A peer that receives nothing gives the link up on its own.
            let good = self.network.is_good(transfer.child.0, node);
            let pause = if good { latency } else { STALLED };
            self.clock.after(pause, Event::Broken { number: *number });
        }
    }
}
