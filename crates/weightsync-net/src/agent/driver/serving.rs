//! Relays below fetch from this agent.

use tokio::net::TcpListener;
use weightsync_link::hello::LinkRole;
use weightsync_link::listen::accept_all;

use super::{Driver, DriverEvent};
use crate::agent::plan::PlanInput;
use crate::bulk::{ServeEvent, Serving};

impl Driver {
    /// Begins to serve relays below, of a sender with this many models.
    pub(super) fn serve(&mut self, listener: TcpListener, models: usize) {
        self.serves = listener.local_addr().ok();
        let events = self.events.clone();
        // This may wait for room in the queue. Only threads that serve call it, never an async
        // task.
        let notify = move |served| {
            let _ = events.blocking_send(DriverEvent::Served(served));
        };
        let (store, threads) = (self.store.clone(), self.threads.clone());
        let serving = Serving::new((self.run, models), store, threads, notify);
        // A relay serves fetches alone. Its other roles are the sender's.
        let take = move |socket, _from, role| {
            if role == LinkRole::Bulk {
                tokio::spawn(serving.clone().child(socket));
            }
        };
        let credentials = self.credentials.clone();
        tokio::spawn(accept_all(listener, credentials, || false, |_| {}, take));
    }

    /// Something was served to a relay below.
    pub(super) fn served(&mut self, served: ServeEvent) {
        match served {
            ServeEvent::Wanted { item } => self.step([PlanInput::Wanted { item }]),
            ServeEvent::Unwanted { item } => self.step([PlanInput::Unwanted { item }]),
            ServeEvent::Sent { .. } => {}
        }
    }
}
