//! Relays below fetch from this agent.

use tokio::net::TcpListener;

use super::{Driver, Event};
use crate::bulk::{Served, Serving};
use crate::link::listen::accept_all;
use crate::relay::plan::Input;
use crate::wire::hello::Role;

impl Driver {
    /// Begins to serve relays below, of a sender with this many models.
    pub(super) fn serve(&mut self, listener: TcpListener, models: usize) {
        self.serves = listener.local_addr().ok();
        let events = self.events.clone();
        let notify = move |served| {
            let _ = events.blocking_send(Event::Served(served));
        };
        let (store, threads) = (self.store.clone(), self.threads.clone());
        let serving = Serving::new((self.run, models), store, threads, notify);
        let take = move |socket, _from, role| {
            if role == Role::Bulk {
                tokio::spawn(serving.clone().child(socket));
            }
        };
        let credentials = self.credentials.clone();
        tokio::spawn(accept_all(listener, credentials, || false, |_| {}, take));
    }

    /// Something was served to a relay below.
    pub(super) fn served(&mut self, served: Served) {
        match served {
            Served::Wanted { item } => self.step([Input::Wanted { item }]),
            Served::Unwanted { item } => self.step([Input::Unwanted { item }]),
            Served::Sent { .. } => {}
        }
    }
}
