//! Moves versions: fetches them from above and serves them to relays below.
//!
//! A few plain threads per host read and write the sockets. Each chunk goes from a slot to the
//! socket and from the socket into a slot, and nowhere else.

mod delta;
mod fetch;
mod serve;
mod stop;
mod store;
mod throughput;

pub(crate) use self::delta::{Delta, RING, Rate};
pub(crate) use self::fetch::{Base, Connections, Fetch, FetchEnd, Parent};
pub(crate) use self::serve::{Served, Serving};
pub(crate) use self::stop::Threads;
#[cfg(test)]
pub(crate) use self::store::replaced;
pub(crate) use self::store::{Find, Held, Store};
#[cfg(test)]
pub(crate) use self::throughput::Gauge;
pub(crate) use self::throughput::{Came, MEASURABLE};

use std::time::Duration;

/// How often a parent that has nothing to send says so.
const IDLE: Duration = Duration::from_millis(200);

/// A link that has been silent for so long is given up. Longer than for a control link,
/// by which the sender hears of a host's silence and names another parent: what is lost
/// at a narrow link may take TCP a second and more to send again.
pub(crate) const SUSPECT: Duration = Duration::from_millis(2500);

/// How long a relay asks above for a version that it does not have.
const PATIENCE: Duration = Duration::from_secs(30);

/// A relay below that takes nothing for so long is given up.
const STUCK: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests;
