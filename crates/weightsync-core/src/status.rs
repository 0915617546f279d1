//! What a sender knows of itself and its workers at one moment: one value for every scheme.
//!
//! Its JSON is what `weightsync status --json` prints and `Sender.status()` returns in Python.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::ids::ModelId;
use crate::version::Version;
use crate::worker::{WorkerRoute, WorkerStatus};

/// A sender and everything it reaches, at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct SenderStatus {
    /// The text of its scheme.
    pub scheme: String,
    /// Where workers find it.
    pub address: String,
    /// Its process; 0 where no sender runs.
    pub pid: u32,
    /// Its run.
    pub run: String,
    /// How long it has been running, in seconds.
    pub up_seconds: f64,
    /// Its models, in the order of the set.
    pub models: Vec<ModelStatus>,
    /// How many sends it has made.
    pub sends: u64,
    /// The last of them.
    pub last_send: Option<LastSend>,
    /// Its workers, by number, with those that went and are neither back nor forgotten.
    pub workers: Vec<WorkerStatus>,
    /// Bytes that it has sent over the network.
    pub served: u64,
    /// The relays, in the order in which they fetch, then workers without one.
    pub relays: Vec<RelayStatus>,
    /// What an answer leaves out to stay within its limit.
    pub left_out: Omitted,
}

/// A model of a sender.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelStatus {
    /// Its name.
    pub name: ModelId,
    /// The newest version that was published; 0 before the first.
    pub version: Version,
    /// Bytes of a version.
    pub bytes: u64,
    /// The share of elements that changed since the version before, from 0 to 1, if the version is
    /// sent as a delta.
    #[serde(default)]
    pub changed: Option<f64>,
    /// Bytes of that delta.
    #[serde(default)]
    pub delta_bytes: Option<u64>,
}

/// The last send of a sender.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LastSend {
    /// What was published: the version of each model.
    pub versions: Vec<(ModelId, Version)>,
    /// Bytes of the tensors that were sent.
    pub bytes: u64,
    /// From the call until the version was live.
    #[serde(rename = "copied_seconds", with = "seconds")]
    pub copied: Duration,
    /// From the call until the report; none before it.
    #[serde(rename = "took_seconds", with = "maybe_seconds")]
    pub took: Option<Duration>,
    /// How long ago the version went live.
    #[serde(rename = "ago_seconds", with = "seconds")]
    pub ago: Duration,
}

/// A relay, the one process of a host that fetches; or a worker without one, which fetches for
/// itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RelayStatus {
    /// The agent's number.
    pub agent: u64,
    /// Whether this is a relay: other hosts may fetch from it.
    pub serves: bool,
    /// The agent it fetches from; 0 is the sender.
    pub parent: u64,
    /// The host's name.
    pub name: String,
    /// The address it is connected from.
    pub address: String,
    /// Its process.
    pub pid: u32,
    /// Bytes that it has fetched.
    pub received: u64,
    /// How many agents got other bytes from it than were published, as they say, and do not fetch
    /// from it any more. Looked for with `verify=blake3`.
    pub altered_for: usize,
    /// The measured speed of its link, in bytes a second.
    pub bytes_per_second: Option<f64>,
    /// The versions that it has, as pairs of a model's index and a version.
    pub holds: Vec<(u8, Version)>,
}

/// How many entries an answer leaves out to stay within its limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Omitted {
    /// Relays, and workers without one.
    pub relays: usize,
    /// Workers.
    pub workers: usize,
}

impl SenderStatus {
    /// The connected workers that versions reach this way.
    pub fn workers_by(&self, route: WorkerRoute) -> impl Iterator<Item = &WorkerStatus> {
        let workers = self.workers.iter();
        // A worker that went keeps its last route, by which nothing reaches it.
        workers.filter(move |one| one.route == route && one.gone.is_none())
    }
}

/// A duration as seconds.
pub(crate) mod seconds {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(crate) fn serialize<S: Serializer>(of: &Duration, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_f64(of.as_secs_f64())
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
        // The number comes from outside: a negative or an infinite one is no duration.
        let seconds = f64::deserialize(from)?;
        Duration::try_from_secs_f64(seconds).map_err(D::Error::custom)
    }
}

/// A duration as seconds, if there is one.
mod maybe_seconds {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(
        of: &Option<Duration>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        of.map(|of| of.as_secs_f64()).serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Option<Duration>, D::Error> {
        let seconds = Option::<f64>::deserialize(from)?;
        let duration = seconds.map(Duration::try_from_secs_f64);
        duration.transpose().map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::WorkerId;
    use crate::worker::{LastOutcome, Outcome};

    #[test]
    fn status_is_read_back_from_its_json() {
        let mut died = WorkerStatus::new(WorkerId(1), 42, 1);
        died.route = WorkerRoute::Agent(3);
        died.gone = Some(Outcome::Died);
        died.last = Some(LastOutcome {
            outcome: Outcome::Refused {
                reason: "no such tensor".into(),
            },
            after: Duration::from_millis(250),
            ago: Duration::from_secs(2),
        });
        let status = SenderStatus {
            scheme: "shared-mem".into(),
            models: vec![ModelStatus {
                name: ModelId::new("policy").unwrap(),
                version: Version(7),
                bytes: 64,
                changed: None,
                delta_bytes: None,
            }],
            last_send: Some(LastSend {
                versions: vec![(ModelId::new("policy").unwrap(), Version(7))],
                bytes: 64,
                copied: Duration::from_millis(1),
                took: None,
                ago: Duration::from_secs(1),
            }),
            workers: vec![died],
            ..SenderStatus::default()
        };
        let json = serde_json::to_value(&status).unwrap();
        let worker = &json["workers"][0];
        assert_eq!(worker["last"]["outcome"], "refused");
        assert_eq!(worker["last"]["reason"], "no such tensor");
        assert_eq!(worker["last"]["after_seconds"], 0.25);
        assert_eq!(worker["gone"]["outcome"], "died");
        assert_eq!(worker["route"]["agent"], 3);
        let read: SenderStatus = serde_json::from_value(json).unwrap();
        assert_eq!(read, status);
        // An answer of another version of the program may lack fields.
        let short: SenderStatus = serde_json::from_str(r#"{"pid": 7}"#).unwrap();
        assert_eq!((short.pid, short.workers.len()), (7, 0));
    }
}
