//! Any message within its bounds, for proptest.

use proptest::collection::vec;
use proptest::prelude::*;
use weightsync_core::digest::Digest;
use weightsync_core::{Epoch, Run, Version, WorkerId};
use weightsync_net::wire::message::{
    BlockRange, Delivery, FromRoot, Item, JsonReply, MAX_PART, RefusalRemedy, ToChild, ToParent,
    ToRoot, ToTrainer, ToWorker, Want, WantedBlocks, Welcome, WorkerInstance, WorkerJoin,
    WorkerProgress,
};

/// Raw values for the fields of a message.
#[derive(Clone, Debug)]
struct Raw {
    worker: WorkerId,
    pid: u32,
    n: [u64; 5],
    bytes: [u8; 16],
    item: Item,
    list: Vec<Item>,
    set: Vec<Item>,
    text: String,
    flag: bool,
    choice: u8,
}

fn version() -> impl Strategy<Value = Version> {
    prop_oneof![1_u64..300, 1..=u64::MAX].prop_map(Version)
}

fn item() -> impl Strategy<Value = Item> {
    (0_usize..64, version()).prop_map(|(model, version)| Item { model, version })
}

fn set() -> impl Strategy<Value = Vec<Item>> {
    vec(item(), 0..64).prop_map(|mut set| {
        let mut models = 0_u64;
        set.retain(|item| {
            let bit = 1 << item.model;
            let is_new = models & bit == 0;
            models |= bit;
            is_new
        });
        set
    })
}

fn raw() -> impl Strategy<Value = Raw> {
    (
        (any::<u32>(), any::<u32>(), any::<[u64; 5]>()),
        (any::<[u8; 16]>(), item(), vec(item(), 0..20), set()),
        ("\\PC{0,16}", any::<bool>(), any::<u8>()),
    )
        .prop_map(|((worker, pid, n), (bytes, item, list, set), rest)| {
            let worker = WorkerId(worker);
            let (text, flag, choice) = rest;
            Raw {
                worker,
                pid,
                n,
                bytes,
                item,
                list,
                set,
                text,
                flag,
                choice,
            }
        })
}

impl Raw {
    fn run(&self) -> Run {
        Run {
            epoch: Epoch(self.n[4]),
            id: self.bytes,
        }
    }

    fn model(&self) -> u8 {
        self.item.model as u8
    }

    fn who(&self) -> WorkerInstance {
        WorkerInstance {
            worker: self.worker,
            instance: self.n[0],
        }
    }

    fn progress(&self) -> WorkerProgress {
        WorkerProgress {
            who: self.who(),
            taken: self.n[1],
            through: self.n[3],
            loaded: self.n[4],
            versions: self.set.clone(),
            refused: self.flag.then(|| (self.n[1], self.text.clone())),
        }
    }
}

pub fn to_root() -> impl Strategy<Value = ToRoot> {
    (0..15_u8, raw(), vec(raw(), 0..5)).prop_map(|(variant, raw, more)| {
        let (who, item, question) = (raw.who(), raw.item, raw.n[1]);
        match variant {
            0 => ToRoot::Agent {
                host: raw.bytes,
                pid: raw.pid,
                bulk: raw.flag.then_some(u16::from(raw.choice) + 1),
                seen: Epoch(raw.n[0]),
                run: raw.flag.then(|| raw.run()),
                holds: raw.list,
                name: raw.text,
            },
            1 => ToRoot::Join(WorkerJoin {
                ticket: raw.n[2],
                who,
                pid: raw.pid,
                models: raw.n[3].max(1),
                delivery: match raw.choice % 34 {
                    0 => Delivery::Newest,
                    33 => Delivery::Asked,
                    bound => Delivery::Every { bound },
                },
                device: raw.text,
                seen: Epoch(raw.n[4]),
            }),
            2 => ToRoot::Progress {
                workers: more.iter().map(Raw::progress).collect(),
            },
            3 => ToRoot::Gone {
                who,
                died: raw.flag,
            },
            4 => ToRoot::Unusable {
                who,
                reason: raw.text,
            },
            5 => ToRoot::Ask {
                who,
                question,
                want: {
                    let Item { model, version } = item;
                    match raw.choice % 3 {
                        0 => Want::Newest,
                        1 => Want::AtLeast { model, version },
                        _ => Want::Exactly { model, version },
                    }
                },
            },
            6 => ToRoot::Withdraw { who },
            7 => ToRoot::Holds {
                have: raw.list,
                dropped: raw.set,
            },
            8 => ToRoot::Received {
                item,
                parent: raw.n[2],
                bytes: raw.n[0],
                micros: raw.n[1],
            },
            9 => ToRoot::ParentLost {
                parent: raw.n[0],
                reason: raw.text,
            },
            10 => ToRoot::Missing { item },
            11 => ToRoot::Ping,
            12 => ToRoot::Goodbye,
            13 => ToRoot::Altered {
                parent: raw.n[0],
                item,
                block: raw.pid,
            },
            _ => ToRoot::Scrubbed {
                item,
                digest: raw.flag.then_some(Digest([raw.choice; 16])),
            },
        }
    })
}

pub fn from_root() -> impl Strategy<Value = FromRoot> {
    (0..15_u8, raw(), vec(any::<u8>(), 1..300)).prop_map(|(variant, raw, bytes)| {
        let model = raw.model();
        let (who, item, sequence) = (raw.who(), raw.item, raw.n[1]);
        let (worker, question) = (raw.worker, raw.n[2]);
        match variant {
            0 => FromRoot::Welcome(Welcome {
                run: raw.run(),
                agent: raw.n[0].max(1),
                address: format!("x{}", raw.text),
                models: raw.choice % 64 + 1,
                slots: raw.choice % 32 + 1,
                max_slots: raw.choice % 32 + 33,
                pid: raw.pid,
                settings: format!("verify={}", raw.text),
            }),
            1 => FromRoot::Model {
                index: model,
                layout_bytes: raw.n[0] % ((64 << 20) + 1),
                note_bytes: raw.n[1] % ((16 << 20) + 1),
            },
            2 => FromRoot::Part { bytes },
            3 => FromRoot::Refused {
                reason: raw.text,
                remedy: match raw.choice % 3 {
                    0 => RefusalRemedy::Gone,
                    1 => RefusalRemedy::Fenced {
                        seen: Epoch(raw.n[0]),
                        got: Epoch(raw.n[1]),
                    },
                    _ => RefusalRemedy::Other,
                },
            },
            4 => FromRoot::Joined { ticket: raw.n[0] },
            5 => FromRoot::Denied {
                ticket: raw.n[0],
                reason: raw.text,
            },
            6 => FromRoot::Notify {
                sequence,
                set: raw.set,
                workers: bytes.iter().map(|byte| WorkerId((*byte).into())).collect(),
            },
            7 => FromRoot::Answer {
                worker,
                question,
                sequence,
                set: raw.set,
            },
            8 => FromRoot::NoSuchVersion {
                worker,
                question,
                model,
                asked: Version(raw.n[0]),
                known: raw.list.iter().take(16).map(|item| item.version).collect(),
            },
            9 => FromRoot::TurnAway {
                who,
                reason: raw.text,
            },
            10 => FromRoot::Parent {
                agent: raw.n[0],
                address: raw.flag.then(|| format!("x{}", raw.text)),
            },
            11 => FromRoot::Ping,
            12 => FromRoot::Goodbye,
            13 => FromRoot::Scrub { item },
            _ => FromRoot::Spoiled { item },
        }
    })
}

pub fn to_parent() -> impl Strategy<Value = ToParent> {
    (raw(), vec((0_u32..70_000, 1_u32..70_000), 0..40)).prop_map(|(raw, gaps)| {
        let mut behind = 0;
        let ranges = gaps.iter().map(|(gap, count)| {
            let first = behind + gap;
            behind = first + count;
            let count = *count;
            BlockRange { first, count }
        });
        if raw.flag {
            return ToParent::Digests {
                run: raw.run(),
                model: raw.model(),
                version: raw.item.version,
            };
        }
        ToParent::Fetch(WantedBlocks {
            run: raw.run(),
            agent: raw.n[0],
            model: raw.model(),
            version: raw.item.version,
            base: Some(Version(raw.n[1]))
                .filter(|base| !base.is_none() && *base < raw.item.version),
            ranges: ranges.collect(),
        })
    })
}

pub fn to_child() -> impl Strategy<Value = ToChild> {
    (0..4_u8, raw(), 1..50_usize).prop_map(|(variant, raw, count)| match variant {
        0 => ToChild::Idle,
        1 => ToChild::End,
        2 => ToChild::Digests {
            digests: vec![raw.choice; 32 * count],
        },
        _ => ToChild::Gone { reason: raw.text },
    })
}

pub fn to_trainer() -> impl Strategy<Value = ToTrainer> {
    (0..4_u8, raw()).prop_map(|(variant, raw)| match variant {
        0 => ToTrainer::Join {
            worker: raw.flag.then_some(raw.pid),
            ticket: (raw.choice > 9).then_some(raw.n[0]),
        },
        1 => ToTrainer::Say { json: raw.text },
        2 => ToTrainer::Part {
            part: raw.n[0],
            bytes: raw.n[1],
        },
        _ => ToTrainer::Ping,
    })
}

pub fn to_worker() -> impl Strategy<Value = ToWorker> {
    (0..5_u8, raw()).prop_map(|(variant, raw)| match variant {
        0 => ToWorker::Welcome {
            worker: raw.pid,
            bytes: raw.n[0],
        },
        1 => ToWorker::Order { json: raw.text },
        2 => ToWorker::Ping,
        3 => ToWorker::End { reason: raw.text },
        _ => ToWorker::Later { reason: raw.text },
    })
}

pub fn status() -> impl Strategy<Value = JsonReply> {
    "\\PC{0,200}".prop_map(|json| JsonReply { json })
}

/// Lengths of a layout and a note around the length of a part.
pub fn model_lengths() -> impl Strategy<Value = (usize, usize)> {
    let len = || prop_oneof![0..4_usize, MAX_PART - 2..MAX_PART + 3, 0..2 * MAX_PART];
    (len(), len())
}
