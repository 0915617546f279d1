//! What trainer and workers say to each other over a worker's pipe: postcard
//! behind a version byte, in types of their own.

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use weightsync_engine::InitInfo;

use super::Task;
use crate::{
    Error,
    frames::{Actions, Episode, Frames},
    rollout::RolloutOptions,
};

/// The first byte of every message.
const VERSION: u8 = 2;

/// What a worker process is started with.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Start {
    pub task: Task,
    pub envs: u32,
    pub seed: u64,
    pub options: RolloutOptions,
    pub weights: InitInfo,
}

/// Trainer to worker: take `steps` steps in every environment, with weights of
/// version `version` or newer, or with actions drawn evenly.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Collect {
    pub ticket: u64,
    pub steps: u32,
    pub version: u64,
    pub random: bool,
}

/// Worker to trainer: the frames asked for with this ticket.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Collected {
    ticket: u64,
    columns: Columns,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Columns {
    envs: u32,
    steps: u32,
    observation_len: u32,
    observations: Vec<f32>,
    next_observations: Vec<f32>,
    actions: ActionColumn,
    log_probs: Vec<f32>,
    rewards: Vec<f32>,
    terminated: Vec<bool>,
    truncated: Vec<bool>,
    policy_versions: Vec<u64>,
    traj_ids: Vec<u64>,
    episodes: Vec<(f32, u32)>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
enum ActionColumn {
    Discrete(Vec<u32>),
    Continuous { len: u32, values: Vec<f32> },
}

/// The most bytes the frames of one worker take on the wire.
pub(super) fn longest(envs: usize, steps: usize, task: &Task) -> usize {
    const HEAD: usize = 256;
    let action = if task.is_continuous() {
        4 * task.actions()
    } else {
        // A `u32` takes at most 5 bytes as a varint.
        5
    };
    // Two observations; varints of 10 and 10 bytes; three times 4; two flags; an
    // episode of 4 + 5.
    let frame = 2 * 4 * task.observation_len() + action + 10 + 10 + 3 * 4 + 2 + 9;
    HEAD + envs * steps * frame
}

pub(super) fn encode(message: &impl Serialize) -> Result<Vec<u8>, Error> {
    postcard::to_extend(message, vec![VERSION]).map_err(|error| unreadable(0, error.to_string()))
}

/// Reads a message; everything in it is as long as the bytes are, at most.
pub(super) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Error> {
    let refuse = |reason| unreadable(bytes.len(), reason);
    match bytes.split_first() {
        None => Err(refuse("it is empty".into())),
        // The version byte comes first: another protocol is refused before its body is read.
        Some((&VERSION, body)) => match postcard::take_from_bytes(body) {
            Ok((message, [])) => Ok(message),
            // A rest means that the ends disagree about the format.
            Ok((_, rest)) => Err(refuse(format!("{} bytes too many", rest.len()))),
            Err(error) => Err(refuse(error.to_string())),
        },
        Some((other, _)) => Err(refuse(format!("it is of protocol {other}"))),
    }
}

impl Collected {
    pub fn new(ticket: u64, frames: Frames) -> Self {
        let steps = frames.steps();
        let envs = frames.shape.first().copied().unwrap_or(0);
        let episodes = frames.episodes.iter();
        Self {
            ticket,
            columns: Columns {
                envs: envs as u32,
                steps: steps as u32,
                observation_len: frames.observation_len as u32,
                episodes: episodes.map(|e| (e.reward, e.steps)).collect(),
                observations: frames.observations,
                next_observations: frames.next_observations,
                actions: match frames.actions {
                    Actions::Discrete(actions) => ActionColumn::Discrete(actions),
                    Actions::Continuous { values, len } => ActionColumn::Continuous {
                        len: len as u32,
                        values,
                    },
                },
                log_probs: frames.log_probs,
                rewards: frames.rewards,
                terminated: frames.terminated,
                truncated: frames.truncated,
                policy_versions: frames.policy_versions,
                traj_ids: frames.traj_ids,
            },
        }
    }

    /// The ticket, and the frames as they came: nothing is checked.
    pub fn into_frames(self) -> (u64, Frames) {
        let columns = self.columns;
        let episodes = columns.episodes.into_iter();
        let frames = Frames {
            shape: vec![columns.envs as usize, columns.steps as usize],
            observation_len: columns.observation_len as usize,
            observations: columns.observations,
            next_observations: columns.next_observations,
            actions: match columns.actions {
                ActionColumn::Discrete(actions) => Actions::Discrete(actions),
                ActionColumn::Continuous { values, len } => Actions::Continuous {
                    values,
                    len: len as usize,
                },
            },
            log_probs: columns.log_probs,
            rewards: columns.rewards,
            terminated: columns.terminated,
            truncated: columns.truncated,
            policy_versions: columns.policy_versions,
            traj_ids: columns.traj_ids,
            episodes: episodes
                .map(|(reward, steps)| Episode { reward, steps })
                .collect(),
        };
        (self.ticket, frames)
    }
}

fn unreadable(len: usize, reason: String) -> Error {
    Error::Message {
        len,
        expected: VERSION,
        reason,
    }
}

/// The collector's decoders, for the fuzz targets.
#[cfg(feature = "fuzz")]
pub mod fuzz {
    use super::*;

    /// Reads the bytes as each message; true if they are frames that fit.
    pub fn messages(bytes: &[u8]) -> bool {
        let _ = decode::<Start>(bytes);
        let _ = decode::<Collect>(bytes);
        decode::<Collected>(bytes).is_ok_and(|collected| {
            let (_, frames) = collected.into_frames();
            Task::CartPole.check_part(&frames, 2, 4).is_ok()
        })
    }

    /// The frames of a small batch.
    pub fn valid() -> Vec<u8> {
        let frames = Frames::zeroed(2, 4, 4, Task::CartPole.action_kind());
        encode(&Collected::new(7, frames)).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use rand::{Rng, RngExt, SeedableRng};

    use super::*;
    use crate::{env::EnvRng, frames::ActionKind};

    fn frames() -> Frames {
        let mut frames = Frames::zeroed(1, 2, 4, ActionKind::Discrete);
        frames.observations[7] = 1.0;
        frames.actions = Actions::Discrete(vec![0, 1]);
        frames.log_probs[0] = -0.5;
        frames.rewards.fill(1.0);
        frames.terminated[1] = true;
        frames.policy_versions.fill(300);
        frames.traj_ids.copy_from_slice(&[4, 129]);
        frames.episodes.push(Episode {
            reward: 2.0,
            steps: 2,
        });
        frames
    }

    #[test]
    fn messages_keep_their_bytes_on_the_wire() {
        let collect = Collect {
            ticket: 3,
            steps: 64,
            version: 300,
            random: true,
        };
        let bytes = encode(&collect).unwrap();
        assert_eq!(bytes, [2, 3, 64, 0xac, 2, 1]);
        assert_eq!(decode::<Collect>(&bytes).unwrap(), collect);

        let bytes = encode(&Collected::new(3, frames())).unwrap();
        let zeros = |n: usize| "00".repeat(n);
        let golden = [
            "02030102",
            "04",
            "08",
            &zeros(28),
            "0000803f",
            "08",
            &zeros(32),
            "00020001",
            "02000000bf00000000",
            "020000803f0000803f",
            "020001",
            "020000",
            "02ac02ac02",
            "02048101",
            "010000004002",
        ]
        .concat();
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, golden);
        let back: Collected = decode(&bytes).unwrap();
        assert_eq!(back.into_frames(), (3, frames()));
        assert!(bytes.len() <= longest(1, 2, &Task::CartPole));
    }

    #[test]
    fn frames_that_were_not_asked_for_are_refused() {
        let check = |frames: &Frames, envs, steps| Task::CartPole.check_part(frames, envs, steps);
        check(&frames(), 1, 2).unwrap();
        assert!(check(&frames(), 2, 1).is_err());
        assert!(check(&Frames::zeroed(1, 2, 3, ActionKind::Discrete), 1, 2).is_err());
        let mut wild = frames();
        wild.actions = Actions::Discrete(vec![2, 0]);
        assert!(check(&wild, 1, 2).is_err());
        wild.actions = Actions::zeroed(ActionKind::Continuous(1), 2);
        assert!(check(&wild, 1, 2).is_err(), "of another kind");
    }

    #[test]
    fn continuous_actions_keep_their_bytes_on_the_wire() {
        let mut frames = Frames::zeroed(1, 1, 3, ActionKind::Continuous(1));
        frames.actions = Actions::Continuous {
            values: vec![1.0],
            len: 1,
        };
        let bytes = encode(&Collected::new(0, frames.clone())).unwrap();
        let mut golden = vec![2, 0, 1, 1, 3, 3];
        golden.extend([0; 12]);
        golden.push(3);
        golden.extend([0; 12]);
        // The kind, the length of an action, and the number of quantities.
        golden.extend([1, 1, 1, 0, 0, 0x80, 0x3f]);
        golden.extend([1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 1, 0, 1, 0, 1, 0, 0]);
        assert_eq!(bytes, golden);
        let back: Collected = decode(&bytes).unwrap();
        assert_eq!(back.into_frames(), (0, frames));
    }

    #[test]
    fn random_and_damaged_bytes_are_refused_or_harmless() {
        let mut rng = EnvRng::seed_from_u64(20);
        let good = encode(&Collected::new(3, frames())).unwrap();
        let mut read = 0;
        for _ in 0..20_000 {
            let mut bytes = good.clone();
            if rng.random_bool(0.5) {
                bytes.resize(rng.random_range(0..80), 0);
                rng.fill_bytes(&mut bytes);
                if let Some(first) = bytes.first_mut() {
                    *first = VERSION;
                }
            } else {
                for _ in 0..rng.random_range(1..4) {
                    let at = rng.random_range(0..bytes.len());
                    bytes[at] = rng.random();
                }
                bytes.truncate(rng.random_range(0..=bytes.len()));
            }
            if let Ok(collected) = decode::<Collected>(&bytes) {
                let (_, frames) = collected.into_frames();
                read += usize::from(Task::CartPole.check_part(&frames, 1, 2).is_ok());
            }
            let _ = decode::<Collect>(&bytes);
            let _ = decode::<Start>(&bytes);
        }
        assert!(read > 0, "some damage hits nothing but values");
        // A length that promises far more than there is.
        let huge = [VERSION, 3, 1, 2, 4, 0xff, 0xff, 0xff, 0xff, 0x0f];
        assert!(decode::<Collected>(&huge).is_err());
    }
}
