//! How an agent reconnects to its sender after a link has ended.

use std::sync::Arc;

use tokio::sync::mpsc;
use tokio::time::Instant;
use weightsync_engine::transport::SILENT_SENDER;
use weightsync_mem::Ending;

use super::words::join_message;
use super::{Engine, Event, Joining};
use crate::bulk::Connections;
use crate::link::LinkEnd;
use crate::relay::join::{Before, dial, greet};
use crate::relay::{EVENTS, Reach, StartError, backoff};

impl Engine {
    /// Finds the sender again after a link has ended. How the agent ends, if it
    /// does not come back.
    pub(super) async fn reconnect(
        &mut self,
        end: &LinkEnd,
        inbox: &mut mpsc::Receiver<Event>,
    ) -> Option<Ending> {
        if self.closes.is_some() {
            return Some(Ending::Closed);
        }
        tracing::warn!("the link to the sender has ended: {end}");
        let mut failures = 0;
        // Since when somebody listens there and answers nobody: it may be stopped.
        let mut silent: Option<Instant> = None;
        loop {
            let mut meanwhile = Vec::new();
            let again = tokio::select! {
                again = self.try_again() => again,
                () = stop(inbox, &mut meanwhile) => return Some(Ending::Moved),
            };
            for event in meanwhile {
                self.defer(event);
            }
            match again {
                Ok(()) => return None,
                Err(Again::Died) => return Some(Ending::Died),
                Err(Again::Unanswered) => {
                    let since = *silent.get_or_insert_with(Instant::now);
                    if since.elapsed() >= SILENT_SENDER {
                        return Some(Ending::Died);
                    }
                }
                // One that answers nobody has a full queue after a while.
                Err(Again::Unreachable) => {}
            }
            // Workers go on meanwhile with what they have.
            let until = Instant::now() + backoff(failures);
            failures += 1;
            loop {
                tokio::select! {
                    event = inbox.recv() => match event {
                        Some(Event::Stop) | None => return Some(Ending::Moved),
                        Some(event) => self.defer(event),
                    },
                    () = tokio::time::sleep_until(until) => break,
                }
            }
        }
    }

    /// What happens while there is no link.
    fn defer(&mut self, event: Event) {
        match event {
            Event::Near(events) => self.near(events),
            Event::Fetched(fetched) => self.fetched(fetched),
            Event::Served(served) => self.served(served),
            Event::Scrubbed { item, digest } => self.scrubbed(item, digest),
            // By a link that has ended.
            Event::Root { .. } | Event::Stop => {}
        }
    }

    async fn try_again(&mut self) -> Result<(), Again> {
        let (socket, root) = match dial(&self.options.root, &self.key).await {
            Ok(reached) => reached,
            Err(StartError::Refused(_)) => return Err(Again::Died),
            Err(StartError::Unreachable(reach, _)) => {
                return Err(match reach {
                    // Nobody listens where the sender did.
                    Reach::Refused => Again::Died,
                    Reach::Unanswered => Again::Unanswered,
                    Reach::Unknown => Again::Unreachable,
                });
            }
            Err(_) => return Err(Again::Unreachable),
        };
        let before = Before {
            run: Some(self.run),
            holds: self.whole.keys().copied().collect(),
        };
        let number = self.links + 1;
        let events = self.events.clone();
        let bulk = (self.bulk, before);
        let greeted = greet(socket, &self.options, bulk, number, &events).await;
        let (link, welcome) = match greeted {
            Ok(greeted) => greeted,
            Err(StartError::Unreachable(..)) => return Err(Again::Unreachable),
            Err(_) => return Err(Again::Died),
        };
        if welcome.run != self.run {
            // Its successor: workers look for it on their own.
            return Err(Again::Died);
        }
        self.links = number;
        self.link = Some((number, link));
        self.root = root;
        self.agent = welcome.agent;
        let connections = Connections::new(
            self.key.clone(),
            self.run,
            self.agent,
            self.options.connections,
        );
        self.connections = Arc::new(connections);
        self.come_back();
        Ok(())
    }

    /// Tells the sender again who is here.
    fn come_back(&mut self) {
        self.rejoining.clear();
        let workers: Vec<Joining> = self
            .workers
            .values()
            .map(|worker| worker.joining.clone())
            .collect();
        for joining in workers {
            self.tickets += 1;
            let ticket = self.tickets;
            self.rejoining.insert(ticket, joining.who);
            self.send(&join_message(ticket, &joining));
        }
        // By this link nobody has been told of them, and some may be there by a way of
        // their own.
        self.take_those_who_gave_up();
        for (ticket, joining) in self.joining.clone() {
            self.send(&join_message(ticket, &joining));
        }
        // And how far they are.
        self.relay.report_again();
    }
}

/// Waits until the agent is to leave; what else is heard until then is kept, as far as
/// there is room for it.
async fn stop(inbox: &mut mpsc::Receiver<Event>, meanwhile: &mut Vec<Event>) {
    while meanwhile.len() < EVENTS {
        match inbox.recv().await {
            Some(Event::Stop) | None => return,
            Some(event) => meanwhile.push(event),
        }
    }
    std::future::pending().await
}

/// Why another attempt did not bring the sender back.
enum Again {
    /// It is dead, or another one.
    Died,
    /// Something listens there, and does not answer.
    Unanswered,
    /// It cannot be reached.
    Unreachable,
}
