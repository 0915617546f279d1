//! One value of each wire type, the same in every run.

use weightsync_core::digest::Digest;
use weightsync_core::{Epoch, Run, Version, WorkerId};
use weightsync_link::access::{Key, Token};
use weightsync_link::hello::{
    ClientHandshake, HELLO_BYTES, HelloVerdict, LinkRole, Next, Protocols, ServerHandshake,
    ServerHello,
};
use weightsync_net::wire::image::{BlockHead, DeltaHead};
use weightsync_net::wire::message::{
    BlockRange, Delivery, FromRoot, Item, JsonReply, RefusalRemedy, ToChild, ToParent, ToRoot,
    ToTrainer, ToWorker, Want, WantedBlocks, Welcome, WorkerInstance, WorkerJoin, WorkerProgress,
};

pub const RUN: Run = Run {
    epoch: Epoch(7),
    id: *b"0123456789abcdef",
};

pub fn item(model: u8, version: u64) -> Item {
    Item {
        model: model.into(),
        version: Version(version),
    }
}

pub fn key() -> Key {
    let token = Token::new("a token for these tests alone").expect("long enough");
    Key::new(&token.secret())
}

pub fn client() -> (ClientHandshake, [u8; HELLO_BYTES]) {
    ClientHandshake::new(key(), LinkRole::Control, Protocols::OURS, [0xc1; 32])
}

pub fn server() -> ServerHandshake {
    ServerHandshake::new(key(), Protocols::OURS, None, [0x5e; 32])
}

/// The bytes of a handshake, in order.
pub fn handshake() -> [Vec<u8>; 4] {
    let ((mut client, hello), mut server) = (client(), server());
    let server_hello = server.feed(&mut &hello[..]).send;
    let client_proof = client.feed(&mut &server_hello[..]).send;
    let last = server.feed(&mut &client_proof[..]);
    assert!(matches!(last.next, Next::Done(_)), "{last:?}");
    [hello.into(), server_hello, client_proof, last.send]
}

pub fn refusals() -> Vec<(&'static str, Vec<u8>)> {
    let hello = |verdict| {
        let protocols = Protocols {
            oldest: 3,
            newest: 4,
        };
        let nonce = [0x5e; 32];
        let hello = ServerHello {
            verdict,
            protocols,
            nonce,
        };
        hello.encode().to_vec()
    };
    let mut stranger = server();
    let [hello_bytes, ..] = handshake();
    let _ = stranger.feed(&mut &hello_bytes[..]);
    let refused = stranger.feed(&mut &[0; 32][..]).send;
    vec![
        (
            "server_hello_no_protocol",
            hello(HelloVerdict::NoCommonProtocol),
        ),
        ("server_hello_busy", hello(HelloVerdict::Busy)),
        ("server_proof_wrong_token", refused),
    ]
}

/// A block's bytes: the last of an image of one whole block and these.
pub const BLOCK_DATA: &[u8] = b"weights";

pub fn block() -> BlockHead {
    BlockHead {
        model: 2,
        version: Version(42),
        index: 1,
        bytes: BLOCK_DATA.len() as u32,
        crc: weightsync_simd::crc64(BLOCK_DATA),
        image_bytes: (1 << 20) + BLOCK_DATA.len() as u64,
    }
}

/// A delta's bytes: of the last span of an image of one whole span and 64 bytes.
pub const DELTA_DATA: &[u8] = b"changes";

pub fn delta() -> DeltaHead {
    DeltaHead {
        model: 2,
        version: Version(42),
        base: Version(40),
        index: 1,
        bytes: DELTA_DATA.len() as u32,
        crc: weightsync_simd::crc64(DELTA_DATA),
        image_bytes: (4 << 20) + 64,
    }
}

fn who(worker: u32, instance: u64) -> WorkerInstance {
    let worker = WorkerId(worker);
    WorkerInstance { worker, instance }
}

pub fn to_root() -> Vec<(&'static str, ToRoot)> {
    let who = who(300, 5_000_000_000);
    let ask = |want| ToRoot::Ask {
        who,
        question: 3,
        want,
    };
    let join = |models, delivery| {
        ToRoot::Join(WorkerJoin {
            ticket: 9,
            who,
            pid: 4711,
            models,
            delivery,
            device: "cuda:0".into(),
            seen: Epoch(6),
        })
    };
    let (model, version) = (63, Version(1 << 40));
    vec![
        (
            "agent",
            ToRoot::Agent {
                name: "größer".into(),
                host: [0xab; 16],
                pid: 4700,
                bulk: Some(7008),
                seen: Epoch(7),
                holds: vec![item(0, 41), item(0, 42), item(63, 1)],
                run: Some(RUN),
            },
        ),
        (
            "agent_new",
            ToRoot::Agent {
                name: String::new(),
                host: [0; 16],
                pid: 1,
                bulk: None,
                seen: Epoch(0),
                holds: Vec::new(),
                run: None,
            },
        ),
        ("join_newest", join(u64::MAX, Delivery::Newest)),
        ("join_every", join(0b101, Delivery::Every { bound: 32 })),
        ("join_asked", join(1 << 63, Delivery::Asked)),
        (
            "progress",
            ToRoot::Progress {
                workers: vec![
                    WorkerProgress {
                        who,
                        taken: 12,
                        through: 2,
                        loaded: 11,
                        versions: vec![item(0, 42), item(2, 7)],
                        refused: Some((12, "the layout is another".into())),
                    },
                    WorkerProgress {
                        who: self::who(0, 1),
                        taken: 0,
                        through: 0,
                        loaded: 0,
                        versions: Vec::new(),
                        refused: None,
                    },
                ],
            },
        ),
        ("gone", ToRoot::Gone { who, died: true }),
        (
            "unusable",
            ToRoot::Unusable {
                who,
                reason: "out of memory".into(),
            },
        ),
        ("ask_newest", ask(Want::Newest)),
        ("ask_at_least", ask(Want::AtLeast { model, version })),
        ("ask_exactly", ask(Want::Exactly { model, version })),
        ("withdraw", ToRoot::Withdraw { who }),
        (
            "holds",
            ToRoot::Holds {
                have: vec![item(0, 43)],
                dropped: vec![item(0, 40), item(0, 41)],
            },
        ),
        (
            "received",
            ToRoot::Received {
                item: item(1, 43),
                parent: 4,
                bytes: 1 << 30,
                micros: 123_456,
            },
        ),
        (
            "parent_lost",
            ToRoot::ParentLost {
                parent: 4,
                reason: "silent for 800 ms".into(),
            },
        ),
        ("missing", ToRoot::Missing { item: item(1, 43) }),
        ("ping", ToRoot::Ping),
        ("goodbye", ToRoot::Goodbye),
        (
            "scrubbed",
            ToRoot::Scrubbed {
                item: item(1, 43),
                digest: Some(Digest(core::array::from_fn(|at| at as u8))),
            },
        ),
        (
            "altered",
            ToRoot::Altered {
                parent: 4,
                item: item(1, 43),
                block: 7,
            },
        ),
    ]
}

pub fn from_root() -> Vec<(&'static str, FromRoot)> {
    let worker = WorkerId(300);
    let set = vec![item(0, 42), item(2, 7)];
    let refused = |remedy| FromRoot::Refused {
        reason: "another sender has taken over".into(),
        remedy,
    };
    let parent = |agent, address: Option<&str>| FromRoot::Parent {
        agent,
        address: address.map(Into::into),
    };
    vec![
        (
            "welcome",
            FromRoot::Welcome(Welcome {
                run: RUN,
                agent: 3,
                address: "trainer:7007".into(),
                models: 64,
                slots: 3,
                max_slots: 64,
                pid: 4700,
                settings: "verify=blake3".into(),
            }),
        ),
        (
            "model",
            FromRoot::Model {
                index: 2,
                layout_bytes: 64 << 20,
                note_bytes: 16 << 20,
            },
        ),
        (
            "part",
            FromRoot::Part {
                bytes: (0..=255).collect(),
            },
        ),
        ("refused_gone", refused(RefusalRemedy::Gone)),
        (
            "refused_fenced",
            refused(RefusalRemedy::Fenced {
                seen: Epoch(8),
                got: Epoch(7),
            }),
        ),
        ("refused_other", refused(RefusalRemedy::Other)),
        ("joined", FromRoot::Joined { ticket: 9 }),
        (
            "denied",
            FromRoot::Denied {
                ticket: 9,
                reason: "no such model".into(),
            },
        ),
        (
            "tell",
            FromRoot::Notify {
                sequence: 12,
                set: set.clone(),
                workers: vec![WorkerId(0), worker, WorkerId(u32::MAX)],
            },
        ),
        (
            "answer",
            FromRoot::Answer {
                worker,
                question: 3,
                sequence: 13,
                set,
            },
        ),
        (
            "no_such_version",
            FromRoot::NoSuchVersion {
                worker,
                question: 3,
                model: 63,
                asked: Version(9),
                known: vec![Version(42), Version(41)],
            },
        ),
        (
            "turn_away",
            FromRoot::TurnAway {
                who: who(300, 5_000_000_000),
                reason: "it came back under its number".into(),
            },
        ),
        ("parent_root", parent(0, None)),
        ("parent_other", parent(4, Some("[2001:db8::4]:7008"))),
        ("ping", FromRoot::Ping),
        ("goodbye", FromRoot::Goodbye),
        ("scrub", FromRoot::Scrub { item: item(1, 64) }),
        ("spoiled", FromRoot::Spoiled { item: item(1, 64) }),
    ]
}

pub fn to_parent() -> Vec<(&'static str, ToParent)> {
    let fetch = |base: Option<u64>, ranges: &[(u32, u32)]| {
        ToParent::Fetch(WantedBlocks {
            run: RUN,
            agent: 3,
            model: 2,
            version: Version(42),
            base: base.map(Version),
            ranges: ranges
                .iter()
                .map(|&(first, count)| BlockRange { first, count })
                .collect(),
        })
    };
    vec![
        ("fetch", fetch(None, &[(0, 1), (1, 5), (300, 70_000)])),
        ("fetch_changes", fetch(Some(40), &[(0, 8)])),
        ("fetch_nothing", fetch(None, &[])),
        (
            "digests",
            ToParent::Digests {
                run: RUN,
                model: 2,
                version: Version(42),
            },
        ),
    ]
}

pub fn to_child() -> Vec<(&'static str, ToChild)> {
    vec![
        ("idle", ToChild::Idle),
        ("end", ToChild::End),
        (
            "gone",
            ToChild::Gone {
                reason: "superseded by v43".into(),
            },
        ),
        (
            "digests",
            ToChild::Digests {
                digests: (0..64).collect(),
            },
        ),
    ]
}

pub fn to_trainer() -> Vec<(&'static str, ToTrainer)> {
    vec![
        (
            "join",
            ToTrainer::Join {
                worker: Some(3),
                ticket: Some(77),
            },
        ),
        (
            "say",
            ToTrainer::Say {
                json: "{\"is\":\"joined\"}".into(),
            },
        ),
        (
            "part",
            ToTrainer::Part {
                part: 9,
                bytes: 70_000,
            },
        ),
        ("ping", ToTrainer::Ping),
    ]
}

pub fn to_worker() -> Vec<(&'static str, ToWorker)> {
    vec![
        (
            "welcome",
            ToWorker::Welcome {
                worker: 3,
                bytes: 1234,
            },
        ),
        (
            "order",
            ToWorker::Order {
                json: "{\"do\":\"reset\"}".into(),
            },
        ),
        ("ping", ToWorker::Ping),
        (
            "end",
            ToWorker::End {
                reason: "there is no worker 9".into(),
            },
        ),
        (
            "later",
            ToWorker::Later {
                reason: "its place is not open".into(),
            },
        ),
    ]
}

pub fn status() -> JsonReply {
    JsonReply {
        json: "{\"run\":\"7\"}".into(),
    }
}
