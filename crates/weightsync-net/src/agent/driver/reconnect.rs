//! How an agent reconnects to its sender after a link has ended.

use std::sync::Arc;

use tokio::sync::mpsc;
use tokio::time::Instant;
use weightsync_engine::transport::SILENT_SENDER;
use weightsync_link::LinkEnd;
use weightsync_link::hello::HelloError;
use weightsync_mem::Ending;

use super::{Driver, DriverEvent};
use crate::agent::join::{Before, dial, greet, note_untrusted};
use crate::agent::{EVENTS, StartError, Unreached, backoff};
use crate::bulk::Connections;
use crate::scheme::Distributed;

impl Driver {
    /// Finds the sender again after a link has ended. Returns how the agent ends if the sender does
    /// not come back.
    pub(super) async fn reconnect(
        &mut self,
        end: &LinkEnd,
        inbox: &mut mpsc::Receiver<DriverEvent>,
    ) -> Option<Ending> {
        // The sender has said goodbye, so it does not come back.
        if self.closes.is_some() {
            return Some(Ending::Closed);
        }
        tracing::warn!("the link to the sender has ended: {end}");
        let mut backoff = backoff();
        // Since when the sender's address accepts connections without answering: the sender may be
        // stopped.
        let mut silent: Option<Instant> = None;
        loop {
            // An attempt borrows the driver and may take seconds. Events of that time are handled
            // after it.
            let mut meanwhile = Vec::new();
            let again = tokio::select! {
                again = self.try_again() => again,
                () = stop(inbox, &mut meanwhile) => return Some(Ending::Moved),
            };
            // The sender's messages among these are of links that have ended. Those of a new link
            // come only after `try_again` has returned.
            for event in meanwhile {
                self.handle_unlinked(event);
            }
            match again {
                Ok(()) => return None,
                Err(ReconnectError::Died) => return Some(Ending::Died),
                Err(ReconnectError::Unanswered) => {
                    // A stopped sender looks like this, too, and may go on. So this waits for as
                    // long as a worker would.
                    let since = *silent.get_or_insert_with(Instant::now);
                    if since.elapsed() >= SILENT_SENDER {
                        return Some(Ending::Died);
                    }
                }
                // A stopped sender's queue of connections is full after a while, so later attempts
                // time out.
                Err(ReconnectError::Unreachable) => {}
            }
            // Workers continue meanwhile with the versions that they have.
            let until = Instant::now() + backoff.pause();
            loop {
                tokio::select! {
                    event = inbox.recv() => match event {
                        Some(DriverEvent::Stop) | None => return Some(Ending::Moved),
                        Some(event) => self.handle_unlinked(event),
                    },
                    () = tokio::time::sleep_until(until) => break,
                }
            }
        }
    }

    /// Handles an event while there is no link: messages are those of a link that has ended.
    fn handle_unlinked(&mut self, event: DriverEvent) {
        if !matches!(event, DriverEvent::Root { .. }) {
            self.handle(event);
        }
    }

    async fn try_again(&mut self) -> Result<(), ReconnectError> {
        let (socket, root) = match dial(&self.options.root, &self.credentials).await {
            Ok(reached) => reached,
            // Certificates are renewed at one end after the other.
            Err(StartError::Refused(error @ HelloError::Tls { .. })) => {
                note_untrusted(&self.options.root, &error);
                return Err(ReconnectError::Unreachable);
            }
            // Another program has the sender's address: one with another secret, or one that is no
            // sender.
            Err(StartError::Refused(_)) => return Err(ReconnectError::Died),
            Err(StartError::Unreachable(reach, _)) => {
                return Err(match reach {
                    // Nothing listens at the sender's address.
                    Unreached::Refused => ReconnectError::Died,
                    Unreached::Unanswered => ReconnectError::Unanswered,
                    Unreached::Unknown => ReconnectError::Unreachable,
                });
            }
            Err(_) => return Err(ReconnectError::Unreachable),
        };
        // The sender takes a new link for a new agent, so the agent says what it has.
        let before = Before {
            run: Some(self.run),
            holds: self.fetches.whole.keys().copied().collect(),
        };
        let number = self.links + 1;
        let events = self.events.clone();
        let bulk = (self.serves.map(|serves| serves.port()), before);
        let greeted = greet(socket, &self.options, bulk, number, &events).await;
        let (link, welcome, _) = match greeted {
            Ok(greeted) => greeted,
            Err(StartError::Unreachable(..)) => return Err(ReconnectError::Unreachable),
            // The sender answers, and does not take this agent back.
            Err(_) => return Err(ReconnectError::Died),
        };
        if welcome.run != self.run {
            // A successor: workers look for it on their own.
            return Err(ReconnectError::Died);
        }
        let Ok(scheme) = Distributed::told_by_sender(&welcome.settings) else {
            return Err(ReconnectError::Died);
        };
        self.links = number;
        self.link = Some((number, link));
        self.root = root;
        self.agent = welcome.agent;
        // A fetch names its agent, and the number is a new one. Fetches under way keep the old
        // connections.
        let connections = Connections::new(
            self.credentials.clone(),
            (self.run, self.agent),
            self.options.connections.unwrap_or(scheme.connections),
            scheme.verifies().then_some(root),
        );
        self.connections = Arc::new(connections);
        self.join_again();
        Ok(())
    }

    /// Ends the link before, once the sender knows the workers on this one.
    pub(super) fn end_link_before(&mut self) {
        if self.members.all_rejoined() {
            self.before = None;
        }
    }
}

/// Waits until the agent is to leave. Keeps other events for later, as far as there is room.
async fn stop(inbox: &mut mpsc::Receiver<DriverEvent>, meanwhile: &mut Vec<DriverEvent>) {
    // The rest stays in the channel, where its senders wait.
    while meanwhile.len() < EVENTS {
        match inbox.recv().await {
            Some(DriverEvent::Stop) | None => return,
            Some(event) => meanwhile.push(event),
        }
    }
    // A stop is heard after the attempt now. Each step of the attempt has a deadline.
    std::future::pending().await
}

/// Why another attempt did not bring the sender back.
enum ReconnectError {
    /// The sender is dead, or another one has its place.
    Died,
    /// A program listens there, and does not answer.
    Unanswered,
    /// The sender cannot be reached.
    Unreachable,
}
