//! Transfers: block after block over one connection each, and each block is passed on as soon
//! as it has arrived.

use super::agent::{Fetching, Parent, ROOT};
use super::clock::{MS, SECOND, Time};
use super::network::{Arrival, Health, Network, Node};
use super::perform::FetchEnd;
use super::{Event, World};
use crate::agent::Item;
use crate::agent::plan::PlanInput;
use crate::bulk::Transferred;
use crate::wire::image;

/// As large as a block on the wire.
pub(super) const BLOCK_BYTES: u64 = image::BLOCK_BYTES as u64;

/// How long a relay asks above for a version that it does not have.
const PATIENCE: Time = 30 * SECOND;

/// How long a child waits for a silent parent.
pub(super) const STALLED: Time = 2500 * MS;

/// How long a parent waits for a child that reads nothing.
const STUCK: Time = 5 * SECOND;

/// One fetch, as both of its ends see it.
#[derive(Debug)]
pub(super) struct Transfer {
    pub(super) child: (Node, u64),
    pub(super) parent: Parent,
    pub(super) item: Item,
    /// The fetch goes to the sender instead of the parent.
    pub(super) instead: bool,
    /// The version was not the newest when the fetch began, and some worker takes every version.
    late: bool,
    /// The next block to arrive.
    next: u32,
    blocks: u32,
    pub(super) child_open: bool,
    /// The parent serves the fetch: it was asked, and has not ended.
    pub(super) parent_open: bool,
    pub(super) asked: bool,
    /// The parent has begun to serve it.
    pub(super) found: bool,
    pub(super) revoked: bool,
    /// A block is on its way.
    pub(super) sending: Option<Arrival>,
    /// An arrived block or reply is held up.
    pub(super) held: bool,
    pub(super) gone: bool,
    /// Its first byte has arrived, and its last has not.
    coming: bool,
    bytes: u64,
    /// The link's transferred bytes before it began.
    before: Transferred,
}

impl Transfer {
    /// The child has closed the fetch.
    fn close(&mut self, network: &mut Network) {
        self.child_open = false;
        if std::mem::take(&mut self.coming) {
            network.gauge(self.child, self.parent.agent).end();
        }
        if let Some(arrival) = self.sending {
            network.take_back(self.child.0, arrival);
        }
    }
}

impl World {
    pub(super) fn start_fetch(
        &mut self,
        child: (Node, u64),
        item: Item,
        parent: Parent,
        sender: bool,
    ) {
        self.last_transfer += 1;
        let number = self.last_transfer;
        let agent = self.agent_of(child.0);
        let fetching = Fetching {
            number,
            instead: sender,
        };
        let before = agent.fetching.insert(item, fetching);
        assert!(before.is_none(), "{item:?} is on its arrival to {child:?}");
        let instead = sender && agent.parent != Some(ROOT);
        let next = agent.coming[&item];
        let before = self.network.gauge(child, parent.agent).transferred();
        let transfer = Transfer {
            child,
            parent,
            item,
            instead,
            late: self.options.every && item.version.0 < self.sender.versions[item.model],
            next,
            blocks: self.blocks(item),
            child_open: true,
            parent_open: false,
            asked: false,
            found: false,
            revoked: false,
            sending: None,
            held: false,
            gone: false,
            coming: false,
            bytes: 0,
            before,
        };
        self.trace(|| format!("fetch {number}: {child:?} {item:?} from {parent:?} {next}"));
        self.transfers.insert(number, transfer);
        self.counts.fetches += 1;
        // A sender may also hang up on children beyond its limit.
        let often = if instead { 10 } else { 1 };
        if parent.node == 0 && self.options.faults && self.dice.percent(often) {
            let pause = self.dice.span(MS / 10, SECOND);
            self.clock.after(pause, Event::Broken { number });
        }
        let latency = self.network.latency;
        match self.network.health(child.0, parent.node) {
            (Health::Good, _) => self.clock.after(2 * latency, Event::Asked { number }),
            (Health::Cut, _) => self.clock.after(latency, Event::Broken { number }),
            (Health::Silent, _) => self.clock.after(STALLED, Event::Broken { number }),
        }
    }

    fn blocks(&self, item: Item) -> u32 {
        self.sender.sizes[item.model].div_ceil(BLOCK_BYTES) as u32
    }

    /// A fetch reaches its parent.
    pub(super) fn asked(&mut self, number: u64) {
        let latency = self.network.latency;
        let Some(transfer) = self.transfers.get_mut(&number).filter(|one| one.child_open) else {
            self.transfers.remove(&number);
            return;
        };
        let (parent, item) = (transfer.parent, transfer.item);
        let arrival = self.network.health(transfer.child.0, parent.node).0;
        if arrival == Health::Silent {
            self.clock.after(STALLED, Event::Broken { number });
            return;
        }
        let listens = parent.node == 0 || self.agent(parent.node, parent.life).is_some();
        if !listens || arrival == Health::Cut {
            self.clock.after(latency, Event::Broken { number });
            return;
        }
        if let Some(transfer) = self.transfers.get_mut(&number) {
            transfer.asked = true;
            transfer.parent_open = true;
        }
        self.clock.after(PATIENCE, Event::Patience { number });
        if parent.node != 0 {
            self.step(parent.node, vec![PlanInput::Wanted { item }]);
        }
        self.pump(number);
    }

    /// Sends the next block, if the parent has it.
    fn pump(&mut self, number: u64) {
        let Some(transfer) = self.transfers.get(&number) else {
            return;
        };
        let open = transfer.parent_open && transfer.sending.is_none() && !transfer.held;
        if !open {
            return;
        }
        let (item, parent, next) = (transfer.item, transfer.parent, transfer.next);
        let to = transfer.child.0;
        let there = match parent.node {
            0 => {
                let there = transfer.found || self.sender.keeps(item) || self.is_served(item);
                (there && !transfer.revoked).then_some(u32::MAX)
            }
            node => {
                if transfer.revoked {
                    None
                } else {
                    let agent = self.agent_of(node);
                    let whole = agent.whole.contains(&item).then_some(u32::MAX);
                    match whole.or(agent.coming.get(&item).copied()) {
                        // Waits until the version is known here, or refused.
                        None => return,
                        there => there,
                    }
                }
            }
        };
        let Some(there) = there else {
            self.gone(number);
            return;
        };
        let bytes = BLOCK_BYTES.min(self.sender.sizes[item.model] - u64::from(next) * BLOCK_BYTES);
        let now = self.clock.now();
        let Some(transfer) = self.transfers.get_mut(&number) else {
            return;
        };
        transfer.found = true;
        if next < there {
            let arrival = self.network.send(parent.node, to, bytes, now);
            transfer.sending = Some(arrival);
            let begins = arrival.whole - arrival.busy;
            self.clock.after(begins - now, Event::Begins { number });
            self.clock
                .after(arrival.whole - now, Event::Block { number });
            if parent.node == 0 {
                let beyond = transfer.instead || transfer.late;
                self.note_served((item, to), bytes, beyond);
            }
        }
    }

    /// Whether the sender serves this version to somebody, and so still has it.
    fn is_served(&self, item: Item) -> bool {
        let mut all = self.transfers.values();
        all.any(|one| {
            one.parent.node == 0 && one.item == item && one.found && one.parent_open && !one.revoked
        })
    }

    /// The first byte of a block has arrived.
    pub(super) fn begins(&mut self, number: u64) {
        if let Some(transfer) = self.transfers.get_mut(&number)
            && transfer.child_open
        {
            transfer.coming = true;
            let gauge = self.network.gauge(transfer.child, transfer.parent.agent);
            gauge.begin(self.clock.instant());
        }
    }

    /// A block has arrived.
    pub(super) fn block(&mut self, number: u64) {
        let Some(transfer) = self.transfers.get_mut(&number) else {
            return;
        };
        if !transfer.child_open {
            transfer.sending = None;
            return;
        }
        let ((node, _), parent, item) = (transfer.child, transfer.parent, transfer.item);
        if !self.network.is_good(node, parent.node) {
            transfer.held = true;
            return;
        }
        transfer.sending = None;
        let before = u64::from(transfer.next) * BLOCK_BYTES;
        let bytes = BLOCK_BYTES.min(self.sender.sizes[item.model] - before);
        transfer.next += 1;
        transfer.bytes += bytes;
        transfer.coming = false;
        let gauge = self.network.gauge(transfer.child, parent.agent);
        gauge.more(bytes, self.clock.instant());
        gauge.end();
        let came = gauge.transferred().share(transfer.before, transfer.bytes);
        let next = transfer.next;
        let whole = next == transfer.blocks;
        let served = transfer.parent_open;
        let agent = self.agent_of(node);
        agent.coming.insert(item, next);
        if !whole {
            self.pass_on(node, item);
            self.pump(number);
            return;
        }
        agent.coming.remove(&item);
        agent.whole.insert(item);
        self.transfers.remove(&number);
        self.pass_on(node, item);
        self.fetched(node, item, parent, FetchEnd::Whole { came });
        if served {
            self.served(item, parent);
        }
    }

    /// Passes an arrived block on to waiting children.
    pub(super) fn pass_on(&mut self, node: Node, item: Item) {
        let below = self
            .transfers
            .iter()
            .filter(|(_, one)| one.parent.node == node && one.item == item && one.parent_open);
        let below: Vec<u64> = below.map(|(number, _)| *number).collect();
        for number in below {
            self.pump(number);
        }
    }

    /// A parent has ended a fetch.
    fn served(&mut self, item: Item, parent: Parent) {
        if parent.node != 0 && self.agent(parent.node, parent.life).is_some() {
            self.step(parent.node, vec![PlanInput::Unwanted { item }]);
        }
    }

    /// The parent does not have the version, and says so.
    pub(super) fn gone(&mut self, number: u64) {
        let latency = self.network.latency;
        let Some(transfer) = self.transfers.get_mut(&number) else {
            return;
        };
        transfer.parent_open = false;
        transfer.gone = true;
        let (item, parent) = (transfer.item, transfer.parent);
        self.clock.after(latency, Event::NotThere { number });
        self.served(item, parent);
    }

    /// The child learns that.
    pub(super) fn not_there(&mut self, number: u64) {
        let Some(transfer) = self.transfers.get_mut(&number) else {
            return;
        };
        let ((node, _), parent, item) = (transfer.child, transfer.parent, transfer.item);
        if !self.network.is_good(node, parent.node) {
            transfer.held = true;
            return;
        }
        let open = transfer.child_open;
        self.transfers.remove(&number);
        if open {
            self.counts.not_there += 1;
            self.fetched(node, item, parent, FetchEnd::NotThere);
        }
    }

    /// The parent has asked above for long enough.
    pub(super) fn patience(&mut self, number: u64) {
        let waits = |one: &&Transfer| one.parent_open && !one.found;
        if self.transfers.get(&number).filter(waits).is_some() {
            self.gone(number);
        }
    }

    /// A child stops its fetch; its parent learns of it sooner or later.
    pub(super) fn stop_fetch(&mut self, node: Node, item: Item) {
        let latency = self.network.latency;
        let Some(agent) = self.hosts[node].agent.as_mut() else {
            return;
        };
        let Some(Fetching { number, .. }) = agent.fetching.remove(&item) else {
            return;
        };
        if let Some(transfer) = self.transfers.get_mut(&number) {
            transfer.close(&mut self.network);
            let good = self.network.is_good(node, transfer.parent.node);
            let pause = if good { latency } else { STUCK };
            self.clock.after(pause, Event::HungUp { number });
        }
    }

    /// The parent learns that the child has hung up.
    pub(super) fn hung_up(&mut self, number: u64) {
        if let Some(transfer) = self.transfers.get(&number)
            && !transfer.child_open
        {
            let open = transfer.parent_open;
            let (item, parent) = (transfer.item, transfer.parent);
            self.transfers.remove(&number);
            if open {
                self.served(item, parent);
            }
        }
    }

    /// The child's connection has ended.
    pub(super) fn broken(&mut self, number: u64) {
        let Some(transfer) = self.transfers.get_mut(&number).filter(|one| one.child_open) else {
            return;
        };
        let ((node, _), parent, item) = (transfer.child, transfer.parent, transfer.item);
        transfer.close(&mut self.network);
        self.counts.broken += 1;
        self.clock.after(MS, Event::HungUp { number });
        self.fetched(node, item, parent, FetchEnd::Broken);
    }

    /// The connection has been silent since then.
    pub(super) fn doubt(&mut self, number: u64, since: Time) {
        if let Some(transfer) = self.transfers.get(&number)
            && self.network.health(transfer.child.0, transfer.parent.node)
                == (Health::Silent, since)
        {
            self.broken(number);
        }
    }
}
