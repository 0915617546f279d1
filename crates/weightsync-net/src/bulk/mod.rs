//! Moves versions: fetches them from above and serves them to relays below.
//!
//! A few plain threads per host read and write the sockets. Each block goes from a slot to the
//! socket and from the socket into a slot, and nowhere else.

mod delta;
mod fetch;
pub(crate) mod serve;
mod stop;
mod store;
mod throughput;

pub(crate) use self::delta::{Delta, RING, Rate};
pub(crate) use self::fetch::{BulkFetch, Connections, DeltaBase, FetchEnd, Parent};
pub(crate) use self::serve::{ServeEvent, Serving};
pub(crate) use self::stop::Threads;
#[cfg(test)]
pub(crate) use self::store::replaced;
pub(crate) use self::store::{BlockStore, Find, HeldVersion};
#[cfg(test)]
pub(crate) use self::throughput::Gauge;
pub(crate) use self::throughput::{MEASURABLE, Transferred};

use std::time::Duration;

/// How often a parent that has nothing to send says so.
const IDLE: Duration = Duration::from_millis(200);

/// A bulk link that is silent for this long is given up. This is longer than for a control link,
/// where the sender notices a silent host and names another parent. On a narrow link, TCP may take
/// a second or more to send lost bytes again.
pub(crate) const STALLED: Duration = Duration::from_millis(2500);

/// A relay that says for this long that it has nothing yet is given up: it may withhold what it has.
/// An honest one can take minutes, where many children share a narrow link.
const WITHHELD: Duration = Duration::from_secs(300);

/// How long a relay waits for a version that it does not have itself.
const PATIENCE: Duration = Duration::from_secs(30);

/// A relay below that reads nothing for this long is given up.
const STUCK: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests;
