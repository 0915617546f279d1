//! What can go wrong with a store.

use std::io;

use weightsync_core::{ModelId, Remedy, Run, Version};
use weightsync_engine::{Error, ErrorKind};

use crate::storage::is_interruption;

/// A result of this crate.
pub type Result<T, E = StoreError> = std::result::Result<T, E>;

/// An error of a store.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// A file of the store is not what was written there. The other versions can be read.
    #[error("{0}; versions that do not need it can be loaded")]
    Damaged(Damage),

    /// A file could not be read or written.
    #[error("{action} {file}: {source}")]
    File {
        /// What was tried, as a verb phrase.
        action: &'static str,
        /// The file, by its path or address.
        file: String,
        /// Why not.
        source: io::Error,
    },

    /// Another writer has taken the store over. Nothing of this writer was saved since.
    #[error(
        "{store} was taken over by {by}, so {own} cannot save there: end one of the two trainers, \
         or give each a store of its own"
    )]
    Fenced {
        /// The store.
        store: String,
        /// This writer.
        own: Run,
        /// The writer that took it over.
        by: Run,
    },

    /// A living sender uses the store.
    #[error(
        "the sender of process {pid} on {host} uses {store}: end it first, or use another store"
    )]
    InUse {
        /// The store.
        store: String,
        /// The sender's process.
        pid: u32,
        /// The sender's host.
        host: String,
    },

    /// The store has no such version.
    #[error("{store} has no {asked}; {}", versions(.known))]
    NoSuchVersion {
        /// The store.
        store: String,
        /// What was asked for.
        asked: String,
        /// The newest versions that it has, the newest first.
        known: Vec<Version>,
    },

    /// The store has no whole version at all.
    #[error("{store} has no version that can be read: {}", nothing_whole(.damage))]
    Empty {
        /// The store.
        store: String,
        /// What of it is damaged.
        damage: Vec<Damage>,
    },

    /// The store has no such model.
    #[error("{store} has no model {asked:?}: name one that it has ({})", list(.known))]
    NoSuchModel {
        /// The store.
        store: String,
        /// What was asked for.
        asked: String,
        /// The models there are.
        known: Vec<ModelId>,
    },

    /// The store holds several models, and the call is about one.
    #[error("{store} has several models ({}): name one", list(.known))]
    SeveralModels {
        /// The store.
        store: String,
        /// The models there are.
        known: Vec<ModelId>,
    },

    /// The store was written by a program that is newer than this one.
    #[error("{file} has format {got}, expected {expected} or lower: use a newer weightsync")]
    Format {
        /// The file.
        file: String,
        /// Its format.
        got: u32,
        /// The newest format that this program reads.
        expected: u32,
    },

    /// The text is not the address of a store.
    #[error("{text:?} is not the address of a store: expected {expected}")]
    Address {
        /// What was given.
        text: String,
        /// What is possible.
        expected: String,
    },

    /// A file cannot lie next to the weights.
    #[error(
        "a file named {name:?} cannot be saved with the weights: expected a plain file name, and not \
         one of a file with weights"
    )]
    ExtraFile {
        /// Its name.
        name: String,
    },

    /// Two files that are to lie next to the weights have one name.
    #[error(
        "two files named {name:?} cannot be saved with the weights: they lie in one directory, so give \
         each another name"
    )]
    ExtraFileTwice {
        /// Their name.
        name: String,
    },

    /// The files that are to lie next to the weights are too large.
    #[error(
        "the files that are to lie next to the weights have {got} bytes: expected {most} or fewer, as \
         every reader holds them in memory; put large ones elsewhere"
    )]
    ExtraFilesTooLarge {
        /// Their bytes.
        got: u64,
        /// The most that there may be.
        most: u64,
    },

    /// The text does not say which versions to keep.
    #[error(
        "keep={text:?}: expected keep=all, or a number of versions such as keep=8 or keep=8+every:100"
    )]
    Keep {
        /// What was given.
        text: String,
    },

    /// A version cannot have this name.
    #[error(
        "a version cannot be named {name:?}: expected 1 to 100 letters, digits, dots, hyphens and \
         underscores, and no dot in front"
    )]
    Name {
        /// What was given.
        name: String,
    },

    /// The store has no version of this name.
    #[error("no version of {store} is named {name:?}: use a name that it has ({})", list(.known))]
    NoSuchName {
        /// The store.
        store: String,
        /// The name asked for.
        name: String,
        /// The names there are.
        known: Vec<String>,
    },

    /// What is to be saved has no model, or one twice.
    #[error("a version of a store has each of its models once, and {}", models_given(.given))]
    ModelsOnce {
        /// The models of the versions that were to be saved.
        given: Vec<ModelId>,
    },

    /// What is to be saved is not the next version.
    #[error(
        "{got} of {model} cannot follow {newest}, as versions of a store only grow: save it as {} or a \
         later one", .newest.next()
    )]
    VersionNotNewer {
        /// The model.
        model: ModelId,
        /// The newest version of the store.
        newest: Version,
        /// The version offered.
        got: Version,
    },

    /// A checkpoint is not whole, or is no checkpoint.
    #[error("{path} cannot be read as a checkpoint: {what}")]
    Checkpoint {
        /// The file or directory.
        path: String,
        /// What is wrong with it.
        what: String,
    },

    /// A checkpoint is pickled.
    #[error(
        "{path} is pickled, and reading such a file can run any code: expected safetensors. Only if \
         you trust who wrote it, convert it: {convert}"
    )]
    Pickled {
        /// The file.
        path: String,
        /// A command that converts it.
        convert: String,
    },

    /// A checkpoint cannot be written to a directory.
    #[error("{path} is not replaced: {what}; name an empty directory, or one that is not there")]
    Occupied {
        /// The directory.
        path: String,
        /// What is there.
        what: String,
    },

    /// A temporary store is not where its scheme makes one.
    #[error(
        "{path} is not a temporary store of this user: {why}; name another directory for temporary \
         stores, or remove this one yourself"
    )]
    NotTemporary {
        /// The store.
        path: String,
        /// What says so.
        why: String,
    },

    /// An error of the engine.
    #[error(transparent)]
    Engine(#[from] Box<Error>),
}

/// The `tracing` target of messages about damage that a result has too.
pub const DAMAGE_TARGET: &str = "weightsync_store::damage";

/// A file that is not what was written there.
#[derive(Clone, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[error("{file} is damaged: {what}")]
#[non_exhaustive]
pub struct Damage {
    /// The file, by its path or address.
    pub file: String,
    /// What is wrong with it.
    pub what: String,
}

impl Damage {
    pub(crate) fn new(file: impl Into<String>, what: impl Into<String>) -> Self {
        Self {
            file: file.into(),
            what: what.into(),
        }
    }
}

impl StoreError {
    pub(crate) fn file(
        action: &'static str,
        file: impl Into<String>,
    ) -> impl FnOnce(io::Error) -> Self {
        let file = file.into();
        move |source| match is_interruption(&source) {
            // The caller's thread was to end the call: no file is at fault.
            true => Error::Interrupted.into(),
            false => Self::File {
                action,
                file,
                source,
            },
        }
    }

    /// The damage, if that is what the error is about.
    pub fn damage(&self) -> Option<&Damage> {
        match self {
            Self::Damaged(damage) => Some(damage),
            _ => None,
        }
    }

    /// What the error is about.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Damaged(_) | Self::Format { .. } => ErrorKind::Corrupt,
            Self::Empty { damage, .. } if !damage.is_empty() => ErrorKind::Corrupt,
            Self::File { .. } => ErrorKind::OperatingSystem,
            Self::Fenced { .. } => ErrorKind::Peer,
            Self::Empty { .. }
            | Self::NoSuchVersion { .. }
            | Self::NoSuchModel { .. }
            | Self::SeveralModels { .. }
            | Self::NoSuchName { .. } => ErrorKind::Model,
            Self::VersionNotNewer { .. } | Self::ModelsOnce { .. } => ErrorKind::Send,
            Self::Checkpoint { .. } | Self::Pickled { .. } => ErrorKind::WrongWeights,
            Self::InUse { .. }
            | Self::Address { .. }
            | Self::ExtraFile { .. }
            | Self::ExtraFileTwice { .. }
            | Self::ExtraFilesTooLarge { .. }
            | Self::Occupied { .. }
            | Self::NotTemporary { .. }
            | Self::Keep { .. }
            | Self::Name { .. } => ErrorKind::Setting,
            Self::Engine(error) => error.kind(),
        }
    }

    /// What to do.
    pub fn remedy(&self) -> Remedy {
        match self {
            // The next version has files of its own, and a disk may have room again.
            Self::Damaged(_) | Self::File { .. } => Remedy::Retry,
            Self::Engine(error) => error.remedy(),
            _ => Remedy::GiveUp,
        }
    }
}

impl From<Damage> for StoreError {
    fn from(damage: Damage) -> Self {
        Self::Damaged(damage)
    }
}

impl From<Error> for StoreError {
    fn from(error: Error) -> Self {
        Self::Engine(Box::new(error))
    }
}

impl From<StoreError> for Error {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::Engine(error) => *error,
            error => Self::Transport {
                remedy: error.remedy(),
                source: error.into(),
            },
        }
    }
}

fn versions(known: &[Version]) -> String {
    match known {
        [] => "it has no version at all: save one first".into(),
        _ => format!("ask for one that it has, such as {}", list(known)),
    }
}

fn models_given(models: &[ModelId]) -> String {
    match models {
        [] => "none was given: give one or more".into(),
        _ => format!("these were given: {}", list(models)),
    }
}

fn nothing_whole(damage: &[Damage]) -> String {
    match damage {
        [] => "save one, or look for a typo".into(),
        _ => format!(
            "{}; restore what is damaged, or save another version",
            joined(damage, "; ")
        ),
    }
}

pub(crate) fn list(all: &[impl ToString]) -> String {
    joined(all, ", ")
}

fn joined(all: &[impl ToString], separator: &str) -> String {
    /// More would hide the rest of the message.
    const MOST: usize = 8;
    let mut texts: Vec<_> = all.iter().take(MOST).map(ToString::to_string).collect();
    if all.is_empty() {
        return "none".into();
    }
    if all.len() > MOST {
        texts.push(format!("{} more", all.len() - MOST));
    }
    texts.join(separator)
}
