//! Links between agents and the sender: messages arrive in order or not at all, and a silent
//! link is given up.

use super::clock::{MS, Time};
use super::network::{Health, Node};
use super::{Event, World};
use crate::root::membership::LinkLoss;
use crate::root::plan::RootInput;
use crate::root::topology::AgentId;
use crate::wire::message::{FromRoot, ToRoot};

/// A link on which nothing arrives for this long is silent, as in `link`.
pub(super) const SUSPECT: Time = 800 * MS;

/// How often an idle end sends a sign of life.
const HEARTBEAT: Time = 200 * MS;

/// One link; its number is the agent's.
pub(super) struct Control {
    pub(super) node: Node,
    /// Whether each end still keeps the link.
    pub(super) agent_open: bool,
    pub(super) root_open: bool,
    /// Messages that were sent while nothing got through.
    held: Vec<Envelope>,
}

#[derive(Debug)]
pub(super) enum Envelope {
    ToRoot(ToRoot),
    ToAgent(FromRoot),
}

impl World {
    /// An agent tries to reach the sender.
    pub(super) fn dial(&mut self, node: Node, life: u64) {
        let latency = self.network.latency;
        let Some(agent) = self.agent(node, life) else {
            return;
        };
        if agent.link.is_some() {
            return;
        }
        let pause = agent.dials.pause().as_micros() as Time;
        match self.network.health(node, 0).0 {
            Health::Good => {
                let link = self.connected(node);
                let control = Control {
                    node,
                    agent_open: true,
                    root_open: true,
                    held: Vec::new(),
                };
                self.controls.insert(link, control);
                self.linked(node, link);
            }
            Health::Cut => self
                .clock
                .after(pause + latency, Event::Dial { node, life }),
            // Until the handshake's deadline.
            Health::Silent => {
                let pause = pause + 2000 * MS;
                self.clock.after(pause, Event::Dial { node, life });
            }
        }
    }

    /// An agent sends a message to the sender.
    pub(super) fn send(&mut self, node: Node, message: ToRoot) {
        let latency = self.network.latency;
        let link = self.hosts[node].agent.as_ref().and_then(|one| one.link);
        if let Some(link) = link {
            let envelope = Envelope::ToRoot(message);
            self.clock
                .after(latency, Event::Delivered { link, envelope });
        }
    }

    /// The sender sends a message to an agent.
    pub(super) fn send_to(&mut self, link: AgentId, message: FromRoot) {
        let latency = self.network.latency;
        if self.controls.get(&link).is_some_and(|one| one.root_open) {
            let envelope = Envelope::ToAgent(message);
            self.clock
                .after(latency, Event::Delivered { link, envelope });
        }
    }

    /// A message arrives, if anything does.
    pub(super) fn delivered(&mut self, link: AgentId, envelope: Envelope) {
        let Some(control) = self.controls.get_mut(&link) else {
            return;
        };
        let good = self.network.is_good(control.node, 0);
        if !good || !control.held.is_empty() {
            control.held.push(envelope);
            return;
        }
        self.arrives(link, envelope);
    }

    fn arrives(&mut self, link: AgentId, envelope: Envelope) {
        let Some(control) = self.controls.get(&link) else {
            return;
        };
        let node = control.node;
        match envelope {
            Envelope::ToRoot(message) if control.root_open => {
                let agent = link;
                self.step_root(RootInput::Message { agent, message });
            }
            Envelope::ToAgent(message) if control.agent_open => self.on_root_message(node, message),
            _ => {}
        }
    }

    /// Held-up messages arrive.
    pub(super) fn flush(&mut self, link: AgentId) {
        let Some(control) = self.controls.get_mut(&link) else {
            return;
        };
        if !self.network.is_good(control.node, 0) {
            return;
        }
        for envelope in std::mem::take(&mut control.held) {
            self.arrives(link, envelope);
        }
    }

    /// The sender wants a sign of life of an agent: the next message on its link is one.
    pub(super) fn expect_sign(&mut self, link: AgentId) {
        let pause = self.network.latency + self.dice.below(HEARTBEAT);
        self.clock.after(pause, Event::Sign { link });
    }

    /// A sign of life arrives, or would.
    pub(super) fn sign(&mut self, link: AgentId) {
        let Some(control) = self.controls.get(&link) else {
            return;
        };
        match control.agent_open && control.root_open {
            true if self.network.is_good(control.node, 0) => {
                let (agent, message) = (link, ToRoot::Ping);
                self.step_root(RootInput::Message { agent, message });
            }
            true => self.expect_sign(link),
            // The end of the link is the next event.
            false => {}
        }
    }

    /// One end gives a link up; the other learns of it, unless nothing gets through.
    pub(super) fn close_link(&mut self, link: AgentId, at_root: bool) {
        let Some(control) = self.controls.get_mut(&link) else {
            return;
        };
        match at_root {
            true => control.root_open = false,
            false => control.agent_open = false,
        }
        let node = control.node;
        if self.network.is_good(node, 0) {
            let ended = Event::LinkEnded {
                link,
                at_root: !at_root,
            };
            self.clock.after(self.network.latency, ended);
        }
        self.forget_link(link);
    }

    /// One end learns that a link has ended.
    pub(super) fn link_ended(&mut self, link: AgentId, at_root: bool, how: LinkLoss) {
        let Some(control) = self.controls.get_mut(&link) else {
            return;
        };
        let node = control.node;
        let open = match at_root {
            true => &mut control.root_open,
            false => &mut control.agent_open,
        };
        if !std::mem::replace(open, false) {
            return;
        }
        if at_root {
            let (agent, reason) = (link, String::new());
            self.step_root(RootInput::Ended { agent, how, reason });
        } else if let Some(agent) = self.hosts[node].agent.as_mut()
            && agent.link == Some(link)
        {
            agent.link = None;
            agent.dials.reset();
            let life = agent.life;
            self.clock.after(0, Event::Dial { node, life });
        }
        self.forget_link(link);
    }

    fn forget_link(&mut self, link: AgentId) {
        let over = |one: &Control| !one.agent_open && !one.root_open;
        if self.controls.get(&link).is_some_and(over) {
            self.controls.remove(&link);
        }
    }

    /// Checks whether a link has been silent since then.
    pub(super) fn suspect(&mut self, link: AgentId, since: Time, at_root: bool) {
        let Some(control) = self.controls.get(&link) else {
            return;
        };
        if self.network.health(control.node, 0) == (Health::Silent, since) {
            self.link_ended(link, at_root, LinkLoss::Silent);
        }
    }

    /// Handles a change of these machines' links.
    pub(super) fn links_change(&mut self, of: impl Fn(Node) -> bool) {
        let links = self.controls.iter().filter(|(_, one)| of(one.node));
        let links: Vec<(AgentId, Node)> = links.map(|(link, one)| (*link, one.node)).collect();
        for (link, node) in links {
            let (health, since) = self.network.health(node, 0);
            let latency = self.network.latency;
            match health {
                Health::Cut => {
                    self.link_ended(link, true, LinkLoss::HungUp);
                    self.link_ended(link, false, LinkLoss::HungUp);
                }
                Health::Silent => {
                    for at_root in [true, false] {
                        let pause = SUSPECT + self.dice.below(200 * MS);
                        let event = Event::Suspect {
                            link,
                            since,
                            at_root,
                        };
                        self.clock.after(pause, event);
                    }
                }
                Health::Good => {
                    self.clock.after(latency, Event::Flush { link });
                    let control = &self.controls[&link];
                    for (open, at_root) in [(control.agent_open, true), (control.root_open, false)]
                    {
                        if !open {
                            let event = Event::LinkEnded { link, at_root };
                            self.clock.after(2 * latency, event);
                        }
                    }
                }
            }
        }
    }
}
