//! What the parties and the caller say to each other.

use std::collections::BTreeMap;
use std::num::NonZero;

use serde::{Deserialize, Serialize};

use crate::version::{Epoch, Version};

/// A party in one of its lives. The caller counts them; no number is used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Party(pub u64);

/// A moment, by the caller's clock, which never goes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Moment(pub u64);

/// How versions travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Method {
    /// Both sides meet, and the trainer sends to the explorers.
    Direct,
    /// Through the synchronizer, which keeps the newest versions.
    Memory,
    /// Through a store.
    Checkpoint,
}

/// When versions travel. Intervals are in steps of the party.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Style {
    /// At fixed steps.
    Fixed {
        /// Steps between two syncs, of trainer and explorers.
        interval: NonZero<u64>,
        /// By how many steps explorers are ahead.
        offset: u64,
    },
    /// When an explorer has run for a while.
    ByExplorer {
        /// After how many steps.
        interval: NonZero<u64>,
    },
    /// When the trainer has trained for a while.
    ByTrainer {
        /// After how many steps.
        interval: NonZero<u64>,
    },
    /// Each at its own pace; nobody waits.
    FullyAsync {
        /// Steps between two versions of the trainer.
        trainer: NonZero<u64>,
        /// Steps after which an explorer takes the newest.
        explorer: NonZero<u64>,
    },
    /// No explorer runs a version that is too old.
    Bounded {
        /// Steps between two versions of the trainer.
        interval: NonZero<u64>,
        /// How many versions an explorer may be behind the newest.
        lag: u64,
    },
}

/// What a party does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// It has stopped.
    Stopped,
    /// It trains or explores.
    Running,
    /// It wants another version.
    RequireSync,
    /// It waits for the other side, which it meets.
    WaitingSync,
}

/// Whether a party is to synchronise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Need {
    /// It goes on.
    No,
    /// It synchronises when it can.
    Yes,
    /// It does not go on before it has.
    Must,
}

/// Why a party is not there any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PartyDeparture {
    /// It has stopped in order, and does not come back.
    Stopped,
    /// It died, and may be started again.
    Died,
}

/// Something that happened. Steps are those of the party, and count from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SyncEvent {
    /// A trainer is there, of a run with this epoch, and has made so many steps. It takes the place of
    /// one with the same or a lower epoch.
    TrainerJoined(Party, Epoch, u64, Style),
    /// A trainer has made its `step`th step.
    TrainerStepped(Party, u64),
    /// A trainer has published a version, made of the weights after a step. It can be fetched.
    TrainerPublished(Party, Version, u64),
    /// A trainer waits for explorers, to send them a version of the weights after a step.
    TrainerMeets(Party, Version, u64, Option<Moment>),
    /// A trainer could not publish, or send, and waits no longer.
    TrainerFailed(Party),
    /// A trainer is not there any more.
    TrainerLeft(Party, PartyDeparture),
    /// An explorer is there, runs a version, and has made so many steps: in all, and up to its last sync.
    /// A version that no trainer has given a number to counts as none.
    ExplorerJoined(Party, Version, [u64; 2], Style),
    /// An explorer has made its `step`th step.
    ExplorerStepped(Party, u64),
    /// An explorer waits for a version. If it waits already, this is its deadline now.
    ExplorerSyncs(Party, Option<Moment>),
    /// An explorer waits no longer.
    ExplorerCancelled(Party),
    /// An explorer has verified and loaded a version.
    ExplorerLoaded(Party, Version),
    /// An explorer could not load the version that it was told of.
    ExplorerFailed(Party, Version),
    /// An explorer evaluates, and needs nothing meanwhile; or does so no longer.
    ExplorerPaused(Party, bool),
    /// An explorer is not there any more.
    ExplorerLeft(Party),
    /// Time has passed.
    Ticked,
}

/// Something to do.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum SyncEffect {
    /// Tell the trainer that it needs a sync, in case that it waits to know.
    Wake(Party),
    /// Tell all explorers that there may be something for them, in case that they wait to know.
    Offered,
    /// Tell an explorer to fetch a version.
    Fetch(Party, Version),
    /// Tell the trainer to send a version to these explorers, and the explorers to receive it.
    Meet(Party, Version, Vec<Party>),
    /// Answer an explorer that waits.
    Synced(Party, SyncOutcome),
    /// Answer a trainer that waits: who has loaded the version, and who has not.
    Met(Party, Version, BTreeMap<Party, SyncOutcome>),
    /// Tell a party that nothing it says counts: another one has its place, or it is not known.
    Refused(Party),
}

/// How the sync of an explorer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SyncOutcome {
    /// It has verified and loaded this version.
    Synced(Version),
    /// It has the newest version, and the trainer has stopped.
    NothingNewer,
    /// The trainer has stopped, and nobody can send the newest version.
    OutOfReach,
    /// It could not load the version.
    Failed,
    /// It waits no longer.
    Cancelled,
    /// It, or the trainer that sends, came to its deadline.
    TimedOut,
    /// It left, or died.
    Left,
    /// The trainer failed, left, or died.
    TrainerLeft,
}
