//! `weightsync watch`: a command is run for each new version of a store.

mod command;

use std::collections::BTreeSet;
use std::error::Error;
use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::time::Duration;

use weightsync_core::{ModelId, Remedy, Version};
use weightsync_engine::transport::{Backoff, interrupt};
use weightsync_store::{Pulled, Store, StoreError, StoredModel, StoredVersion};

use crate::signals::Signals;
use crate::words::shown;
use crate::{FAILURE, SUCCESS};

/// How many directories are kept: that of the version which runs, and the one before.
const KEPT: usize = 2;

/// How long a store that fails is left alone, at first and at most.
const PAUSES: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(60)];

/// What `watch` is asked for.
#[derive(clap::Args)]
#[command(after_long_help = VARIABLES)]
pub struct WatchArgs {
    /// The store; it need not have a version yet
    #[arg(value_name = "STORE")]
    store: String,
    /// The command for the shell; {} is the path of the version's directory, as one word
    #[arg(long, value_name = "CMD")]
    exec: String,
    /// Where the directories of versions go: DIR/v12 [default: a temporary directory, below TMPDIR,
    /// that is removed in the end]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// The model [default: the only one of the store]
    #[arg(long, value_name = "NAME", value_parser = super::model)]
    model: Option<ModelId>,
    /// End after one version, with exit code 0 if its command succeeded, else 1
    #[arg(long)]
    once: bool,
    /// Leave out the version that is there at the start
    #[arg(long)]
    new_only: bool,
}

const VARIABLES: &str = "\
The command finds in its environment:
  WEIGHTSYNC_CHECKPOINT  the path of the directory
  WEIGHTSYNC_VERSION     the version of the model
  WEIGHTSYNC_MODEL       the name of the model
  WEIGHTSYNC_DIGEST      the digest of its bytes";

/// Watches until a signal comes.
pub fn run(args: &WatchArgs) -> Result<u8, Box<dyn Error>> {
    let signals = Signals::watch()?;
    super::ended(&signals, || watch(args, &signals))
}

fn watch(args: &WatchArgs, signals: &Signals) -> Result<u8, Box<dyn Error>> {
    let store = super::open(&args.store)?;
    // Removed when it is dropped, however watching ends.
    let temporary = match &args.out {
        Some(_) => None,
        None => Some(tempfile::Builder::new().prefix("weightsync-").tempdir()?),
    };
    let out = match (&args.out, &temporary) {
        (Some(out), _) => out.clone(),
        (None, Some(temporary)) => temporary.path().into(),
        (None, None) => unreachable!("one of the two is there"),
    };
    // Held as long as watching lasts.
    let _lock = lock(&out)?;
    let mut watched = WatchedStore {
        store,
        model: args.model.clone(),
        out,
        leaves_newest: args.new_only,
        seen: None,
        ran: None,
        failed: None,
        left: BTreeSet::new(),
        backoff: Backoff::new(PAUSES[0], PAUSES[1]),
    };
    loop {
        // Pulled before the command runs, so the command finds a whole directory.
        let pulled = match watched.next() {
            Ok(Some(pulled)) => pulled,
            Ok(None) => continue,
            // A signal ended the wait. It is no failure of the store.
            Err(error) if signals.caught().is_some() => return Err(error.into()),
            // The store may be out of reach for a while. Watching goes on.
            Err(error) if error.remedy() == Remedy::Retry => {
                eprintln!("weightsync: {}", shown(&error.to_string()));
                interrupt::sleep(watched.backoff.pause())?;
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        watched.backoff.reset();
        super::warn(&pulled.damage);
        let name = format!("{} {}", shown(pulled.model.as_str()), pulled.version);
        // One command at a time: versions that come meanwhile are passed over but for the newest.
        let Some(status) = command::run(&args.exec, &pulled, signals)? else {
            // A signal ended it.
            return Ok(signals.caught().map_or(SUCCESS, |signal| 128 + signal));
        };
        // Only after the command has ended, because it may read older directories.
        watched.remove_others(&pulled, status.success());
        match status.success() {
            true => eprintln!("weightsync: {name}: the command succeeded"),
            false => eprintln!("weightsync: {name}: the command failed: {status}"),
        }
        if args.once {
            return Ok(if status.success() { SUCCESS } else { FAILURE });
        }
    }
}

/// Makes a directory, and keeps other watches out of it: they would replace and remove its versions.
fn lock(out: &Path) -> Result<File, Box<dyn Error>> {
    let failed = |error: std::io::Error| format!("{}: {error}", out.display());
    fs::create_dir_all(out).map_err(failed)?;
    let dir = File::open(out).map_err(failed)?;
    match dir.try_lock() {
        Err(TryLockError::WouldBlock) => Err(format!(
            "{} is used by another watch: name another directory with --out",
            out.display()
        )
        .into()),
        // Not every file system has locks for directories.
        _ => Ok(dir),
    }
}

struct WatchedStore {
    store: Store,
    model: Option<ModelId>,
    out: PathBuf,
    /// Whether the version that is there first is not one to run the command for.
    leaves_newest: bool,
    /// The newest version of the store that needs no more looking at.
    seen: Option<u64>,
    /// The version of the model for which the command ran last.
    ran: Option<Version>,
    /// The version for which the command failed last: its directory is there to look at until the next.
    failed: Option<Version>,
    /// The directories that could not be removed, and are named once.
    left: BTreeSet<PathBuf>,
    /// The pauses while the store is out of reach.
    backoff: Backoff,
}

impl WatchedStore {
    /// Waits for a version, and writes it out. `None` if it is not one to run the command for.
    fn next(&mut self) -> Result<Option<Pulled>, StoreError> {
        // What is there at the start counts as seen.
        if self.leaves_newest {
            let newest = self.store.wait_newer(None, Some(Duration::ZERO))?;
            let stored = newest.as_ref().and_then(|newest| self.stored(newest));
            self.ran = stored.map(|stored| stored.version);
            self.seen = newest.map(|newest| newest.sequence);
            self.leaves_newest = false;
        }
        let Some(newest) = self.store.wait_newer(self.seen, None)? else {
            return Ok(None);
        };
        let mut pulled = self.pull(&newest);
        // A damaged version is no end: the one before may be whole.
        if let Err(StoreError::Damaged(damage)) = &pulled {
            eprintln!("weightsync: {}", shown(&damage.to_string()));
            pulled = self.pull_before(newest.sequence);
        }
        match pulled {
            // It was removed meanwhile, so there is a newer one.
            Err(StoreError::NoSuchVersion { .. }) => Ok(None),
            pulled => {
                let pulled = pulled?;
                // Only now: after an error the version is looked at again.
                self.seen = Some(newest.sequence);
                self.ran = pulled.as_ref().map(|one| one.version).or(self.ran);
                Ok(pulled)
            }
        }
    }

    /// The newest version before one that is damaged, and after those that were seen.
    fn pull_before(&self, sequence: u64) -> Result<Option<Pulled>, StoreError> {
        let versions = self.store.versions()?.versions;
        let between = versions
            .iter()
            .rev()
            .filter(|version| version.sequence < sequence && Some(version.sequence) > self.seen);
        for version in between {
            match self.pull(version) {
                Err(StoreError::Damaged(damage)) => {
                    eprintln!("weightsync: {}", shown(&damage.to_string()));
                }
                pulled => return pulled,
            }
        }
        Ok(None)
    }

    /// The model in a version of the store.
    fn stored<'a>(&self, version: &'a StoredVersion) -> Option<&'a StoredModel> {
        let models = &version.models;
        match &self.model {
            Some(id) => models.iter().find(|stored| stored.model == *id),
            None => models.first(),
        }
    }

    fn pull(&self, version: &StoredVersion) -> Result<Option<Pulled>, StoreError> {
        let stored = self.stored(version);
        let asked = stored.map_or(Version::NONE, |stored| stored.version);
        // The store has a new version of another model, or no version of this one yet.
        if self.model.is_some() && stored.is_none() || self.ran >= Some(asked) {
            return Ok(None);
        }
        let out = self.out.join(format!("v{}", asked.0));
        stored
            .map(|stored| self.store.pull_again(stored, self.model.as_ref(), &out))
            .transpose()
    }

    /// Removes what is of no more use once the command has ended for this version: the directory for
    /// which it failed before, and, if it succeeded, those of older versions but for the newest of them.
    fn remove_others(&mut self, pulled: &Pulled, succeeded: bool) {
        let (model, than) = (&pulled.model, pulled.version);
        let failed = match succeeded {
            true => self.failed.take(),
            false => self.failed.replace(than),
        };
        let mut kept = 0;
        for (version, path) in self.versions_of(model) {
            let is_older = succeeded && version <= than;
            // A directory of an older version stays until a command has succeeded with a newer one.
            if failed != Some(version) && (!is_older || kept < KEPT) {
                kept += usize::from(is_older);
                continue;
            }
            if let Err(error) = self.store.remove_pulled(model, &path)
                // Said once for each directory, and tried again each time.
                && self.left.insert(path.clone())
            {
                let (path, error) = (path.display().to_string(), error.to_string());
                eprintln!("weightsync: {} stays: {}", shown(&path), shown(&error));
            }
        }
    }

    /// The directories that watching has made for a model, the newest first.
    fn versions_of(&self, model: &ModelId) -> Vec<(Version, PathBuf)> {
        let entries = fs::read_dir(&self.out).into_iter().flatten().flatten();
        let versions = entries.filter_map(|entry| {
            let name = entry.file_name();
            let version = name.to_str()?.strip_prefix('v')?.parse().ok()?;
            let path = entry.path();
            // Only what was pulled from this store is ever removed. Another store may not have its version
            // any more.
            let is_own = self.store.has_pulled(model, &path);
            is_own.then_some((Version(version), path))
        });
        let mut versions: Vec<_> = versions.collect();
        versions.sort();
        versions.reverse();
        versions
    }
}
