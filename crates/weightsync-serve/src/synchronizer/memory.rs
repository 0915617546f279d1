//! The versions that the synchronizer holds in memory: the trainer's, passed on to explorers.
//!
//! The service is a worker of the trainer, and the sender of the explorers. Its own segment outlives
//! the trainer, so that explorers can have the newest version when the trainer is gone.

use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use weightsync_engine::transport::Interrupter;
use weightsync_engine::{
    AnyScheme, Error, InitInfo, ModelId, ReceiverSetup, Result, SendOptions, Sender, SenderSetup,
    Set, SetSnapshot, Snapshot, Version, WaitFor, interruptible,
};
use weightsync_link::access::AccessError;
use weightsync_mem::threads::{self, LockExt as _};
use weightsync_store::{SaveOutcome, Saver, Saving};

/// The number of the service as a worker of the trainer.
const WORKER: u32 = 0;

/// How long joining a trainer may take: it publishes its first version once the service has it joined.
const JOIN: Duration = Duration::from_secs(60);

/// How long passing a version on may wait for a free slot.
const FREE: Duration = Duration::from_secs(60);

/// The most slots: explorers may hold old versions.
const MOST_SLOTS: u8 = 32;

/// What is held.
#[derive(Clone, Debug)]
pub(super) struct HeldVersions(Arc<HeldInner>);

#[derive(Debug)]
struct HeldInner {
    scheme: AnyScheme,
    /// How many older versions are kept.
    history: u8,
    sender: Mutex<Option<Sender>>,
    /// Saves what is passed on.
    saver: Option<Saver>,
    /// The saves whose end nobody has taken.
    saves: Mutex<Vec<(Version, Saving)>>,
    /// What others may look at while a version is passed on.
    seen: Mutex<SeenVersions>,
}

#[derive(Clone, Debug, Default)]
struct SeenVersions {
    info: Option<InitInfo>,
    newest: Version,
    /// The versions that can be downloaded, the newest last.
    versions: Vec<Version>,
}

impl HeldVersions {
    pub(super) fn new(scheme: AnyScheme, history: u8, saver: Option<Saver>) -> Self {
        Self(Arc::new(HeldInner {
            scheme,
            history,
            saver,
            saves: Mutex::default(),
            sender: Mutex::default(),
            seen: Mutex::default(),
        }))
    }

    /// Where explorers get versions.
    pub(super) fn info(&self) -> Option<InitInfo> {
        self.seen().info.clone()
    }

    /// The newest version.
    pub(super) fn newest(&self) -> Version {
        self.seen().newest
    }

    /// The versions that are kept.
    pub(super) fn versions(&self) -> Vec<Version> {
        self.seen().versions.clone()
    }

    /// Takes the versions whose save has ended, and how.
    pub(super) fn take_saved(&self) -> Vec<(Version, SaveOutcome)> {
        let mut ended = Vec::new();
        self.saves().retain(|(version, saving)| {
            let outcome = saving.outcome();
            ended.extend(outcome.clone().map(|outcome| (*version, outcome)));
            outcome.is_none()
        });
        ended
    }

    /// A version of each model, if it is kept.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchVersion`], or the absence of any.
    pub(super) fn snapshots(&self, version: Version) -> Result<Vec<Snapshot>> {
        // Waits while a version is passed on, which lasts until a slot is free.
        let sender = self.sender();
        let Some(sender) = sender.as_ref() else {
            return Ok(Vec::new());
        };
        let models: Vec<ModelId> = sender.models().cloned().collect();
        let snapshot = |model: &ModelId| sender.old_snapshot(model.as_str(), version);
        models.iter().map(snapshot).collect()
    }

    /// Passes a set on: explorers can have it from here on.
    ///
    /// # Errors
    ///
    /// [`Error::Interrupted`] if `is_current` says that it is of a trainer that was replaced.
    pub(super) fn publish(
        &self,
        set: &[Snapshot],
        is_current: impl FnOnce() -> bool,
    ) -> Result<Version> {
        let all = set
            .iter()
            .fold(Set::new(), |all, one| all.with(one.model().as_str(), one));
        let version = set.iter().map(Snapshot::version).max();
        let version = version.ok_or(Error::EmptySet)?;
        // Under this lock from the check to the end: a replaced bridge cannot publish after the new
        // one has begun.
        let mut sender = self.sender();
        if !is_current() {
            return Err(Error::Interrupted);
        }
        // Passed on already, by an earlier bridge or in an earlier life.
        if version <= self.newest() {
            return Ok(version);
        }
        // The service does not wait for explorers: it only publishes, so one that is slow holds
        // nobody up.
        let options = SendOptions::new()
            .version(version)
            .wait(WaitFor::Sent)
            .timeout(Some(FREE));
        // A set of fewer models would leave the others as they were.
        let is_same = |sender: &Sender| {
            let ids = set.iter().map(Snapshot::model);
            sender.models().eq(ids)
        };
        let sent = match sender.as_mut().filter(|sender| is_same(sender)) {
            Some(sender) => sender.send_with(&all, &options).map(drop),
            None => Err(Error::EmptySet),
        };
        match sent {
            Ok(()) => {}
            // The first version, or those of another model: explorers join again by the new info.
            Err(Error::EmptySet | Error::WrongWeights { .. }) => {
                // The old sender drops once the new one is open. Its explorers see its end.
                *sender = Some(self.open(set, &all, version)?);
                // Its versions went with it.
                self.seen().versions.clear();
            }
            Err(error) => return Err(error),
        }
        if let (Some(saver), Some(sender)) = (&self.0.saver, &*sender) {
            self.save(saver, sender, version)?;
        }
        // Others learn of the version only now, when explorers can have it.
        self.show(sender.as_ref(), version);
        Ok(version)
    }

    /// Begins to save the version that was just passed on.
    ///
    /// # Errors
    ///
    /// As [`Sender::snapshot_of`].
    fn save(&self, saver: &Saver, sender: &Sender, version: Version) -> Result<()> {
        // The saver gets snapshots of the service's own segment, which need no trainer.
        let models = sender.models();
        let kept = models.map(|model| sender.snapshot_of(model.as_str()));
        let saving = saver.save(kept.collect::<Result<_>>()?);
        self.saves().push((version, saving));
        Ok(())
    }

    /// Shows a version as the newest, and no longer those that are not kept.
    fn show(&self, sender: Option<&Sender>, version: Version) {
        let mut seen = self.seen();
        seen.info = sender.map(Sender::init_info);
        seen.newest = version;
        seen.versions.push(version);
        let most = usize::from(self.0.history) + 1;
        let old = seen.versions.len().saturating_sub(most);
        seen.versions.drain(..old);
    }

    fn open(&self, set: &[Snapshot], all: &Set<'_>, first: Version) -> Result<Sender> {
        let mut setup: Option<SenderSetup> = None;
        for one in set {
            let model = one.model().as_str();
            setup = Some(match setup {
                None => SenderSetup::new(model, one)?,
                Some(setup) => setup.add_model(model, one)?,
            });
        }
        let setup = setup.ok_or(Error::EmptySet)?;
        setup
            .scheme(self.0.scheme.clone())?
            .slots(2, MOST_SLOTS)
            .history(self.0.history)
            .open_at(all, first, Some(FREE))
    }

    fn sender(&self) -> MutexGuard<'_, Option<Sender>> {
        self.0.sender.locked()
    }

    fn saves(&self) -> MutexGuard<'_, Vec<(Version, Saving)>> {
        self.0.saves.locked()
    }

    fn seen(&self) -> MutexGuard<'_, SeenVersions> {
        self.0.seen.locked()
    }
}

/// The thread that receives a trainer's versions and passes them on.
///
/// **Guarantee.** Dropping it ends the thread, and joins it.
#[derive(Debug)]
pub(super) struct Bridge {
    stop: Arc<Mutex<BridgeStop>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct BridgeStop {
    stopped: bool,
    interrupter: Option<Interrupter>,
}

/// What a bridge says.
#[derive(Debug)]
pub(super) enum FromBridge {
    /// Explorers can have this version.
    Has(Version),
    /// A version could not be passed on, or none will be any more.
    Failed(Option<Version>, String),
}

impl Bridge {
    /// Joins the trainer with this info, in a thread. Of a trainer of another program only the address
    /// counts.
    pub(super) fn start(
        from: InitInfo,
        is_own_trainer: bool,
        held: HeldVersions,
        mut tell: impl FnMut(FromBridge) + Send + 'static,
    ) -> std::io::Result<Self> {
        let stop = Arc::new(Mutex::new(BridgeStop::default()));
        let of_thread = stop.clone();
        let body = move || {
            if let Err(error) = pass_on((from, is_own_trainer), &held, &of_thread, &mut tell)
                // An error of a bridge that was told to stop is the consequence of that.
                && !lock(&of_thread).stopped
            {
                tell(FromBridge::Failed(None, told(&error)));
            }
        };
        let thread = threads::spawn("sync-in", body)?;
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }
}

impl Bridge {
    /// Tells the thread to end.
    pub(super) fn stop(&self) {
        // One lock for both: the thread either sees the flag or has its interrupter here.
        let mut stop = lock(&self.stop);
        stop.stopped = true;
        if let Some(interrupter) = &stop.interrupter {
            interrupter.interrupt();
        }
    }

    /// Whether the thread has ended.
    pub(super) fn is_over(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }
}

impl Drop for Bridge {
    fn drop(&mut self) {
        self.stop();
        if let Some(thread) = self.thread.take() {
            // A panic is reported by the panic hook.
            let _ = thread.join();
        }
    }
}

/// A trainer's scheme, with this service's own settings in place of those by which the trainer would
/// choose whose certificates it reads, and whether it sends plain text. A trainer of the service's own
/// program may choose where the service says nothing.
fn with_own_settings(trainers: &str, own: &str, is_own_trainer: bool) -> String {
    let settings = |text: &str| -> Vec<String> {
        let settings = text.split_once(':').map_or("", |(_, settings)| settings);
        let settings = settings.split(',').filter(|setting| !setting.is_empty());
        settings.map(str::to_owned).collect()
    };
    let key = |setting: &str| {
        setting
            .split('=')
            .next()
            .unwrap_or_default()
            .trim()
            .to_owned()
    };
    let is_ours = |setting: &String| OURS.contains(&&*key(setting));
    let name = trainers.split(':').next().unwrap_or_default();
    if !matches!(name, "distributed" | "rpc") {
        return trainers.to_owned();
    }
    let mut own = settings(own);
    own.retain(is_ours);
    let is_said = |setting: &String| own.iter().any(|one| key(one) == key(setting));
    let mut all = settings(trainers);
    all.retain(|setting| match is_own_trainer {
        true => !is_said(setting),
        false => !is_ours(setting),
    });
    all.extend(own);
    match all.is_empty() {
        true => name.to_owned(),
        false => format!("{name}:{}", all.join(",")),
    }
}

/// The settings that are for a service to choose, whatever its trainer says.
const OURS: [&str; 2] = ["tls", "insecure-plaintext"];

/// What parties are told of an error: none of them learns of files of this machine.
fn told(error: &Error) -> String {
    let mut next: Option<&(dyn std::error::Error + 'static)> = match error {
        Error::Transport { source, .. } => Some(&**source),
        error => Some(error),
    };
    let is_of_files = |one: &(dyn std::error::Error + 'static)| {
        let access = one.downcast_ref::<AccessError>();
        access.is_some_and(AccessError::is_of_files)
            || matches!(one.downcast_ref(), Some(Error::File { .. }))
    };
    // The cause may be deep in the chain.
    while let Some(one) = next {
        if is_of_files(one) {
            tracing::warn!("the synchronizer cannot join the trainer: {error}");
            return "the synchronizer cannot use a file of its own, such as its token or certificates: its \
                    log says why"
                .into();
        }
        next = one.source();
    }
    error.to_string()
}

/// How far above the highest number another may be, and how far the first. Runs do not count so far; a
/// run may begin with the time in milliseconds.
const MORE: u64 = 1 << 32;
const FIRST: u64 = 1 << 48;

/// Refuses a number that is far above all that is known: what comes later needs a higher one, so it would
/// use the numbers up.
pub(super) fn check_number(version: Version, highest: Version) -> std::result::Result<(), String> {
    let most = match highest.is_none() {
        true => Version(FIRST),
        false => Version(highest.0.saturating_add(MORE)),
    };
    match version <= most {
        true => Ok(()),
        false => Err(format!(
            "a trainer's version has the number {version}: expected at most {most}, as the highest so far \
             is {highest}; count on from there, or start another synchronizer, with a run_dir of its own"
        )),
    }
}

fn pass_on(
    (from, is_own_trainer): (InitInfo, bool),
    held: &HeldVersions,
    stop: &Mutex<BridgeStop>,
    tell: &mut impl FnMut(FromBridge),
) -> Result<()> {
    let is_stopped = || lock(stop).stopped;
    let own = held.0.scheme.to_string();
    let scheme = with_own_settings(from.scheme(), &own, is_own_trainer).parse::<AnyScheme>()?;
    let setup = ReceiverSetup::new(from, WORKER).scheme(scheme);
    // Joining has no interrupter yet.
    let mut receiver = interruptible(is_stopped, || setup.connect(Some(JOIN)))?;
    // Before the loop checks the flag: a stop from now on interrupts the wait.
    lock(stop).interrupter = Some(receiver.interrupter()?);
    while !is_stopped() {
        let set: SetSnapshot = receiver.set().recv()?;
        let members: Vec<_> = set
            .members()
            .iter()
            .map(|member| member.snapshot.clone())
            .collect();
        let version = members.iter().map(Snapshot::version).max();
        // The number comes from the trainer, so it is checked before the version is passed on.
        let published = check_number(version.unwrap_or_default(), held.newest()).and_then(|()| {
            let publish = || held.publish(&members, || !is_stopped());
            interruptible(is_stopped, publish).map_err(|error| told(&error))
        });
        // A version that could not be passed on is no end: the next one may be.
        tell(match published {
            Ok(version) => FromBridge::Has(version),
            Err(why) => FromBridge::Failed(version, why),
        });
    }
    Ok(())
}

fn lock(stop: &Mutex<BridgeStop>) -> MutexGuard<'_, BridgeStop> {
    stop.locked()
}

#[cfg(test)]
mod tests {
    use super::super::SyncError;
    use super::*;

    #[test]
    fn own_settings_take_the_place_of_the_trainers() {
        let own = "distributed:listen=1.2.3.4:0,tls=/own,insecure-plaintext";
        for (trainers, with_own, with_none) in [
            (
                "distributed",
                "distributed:tls=/own,insecure-plaintext",
                "distributed",
            ),
            (
                "rpc: tls = /theirs",
                "rpc:tls=/own,insecure-plaintext",
                "rpc",
            ),
            (
                "distributed:every=4,tls=/theirs,insecure-plaintext=true",
                "distributed:every=4,tls=/own,insecure-plaintext",
                "distributed:every=4",
            ),
            ("shared-mem", "shared-mem", "shared-mem"),
        ] {
            assert_eq!(with_own_settings(trainers, own, false), with_own);
            assert_eq!(with_own_settings(trainers, own, true), with_own);
            let none = "distributed:listen=1.2.3.4:0";
            assert_eq!(with_own_settings(trainers, none, false), with_none);
            assert_eq!(with_own_settings(trainers, none, true), trainers);
        }
    }

    #[test]
    fn files_of_the_service_are_told_to_nobody() {
        let source = std::io::Error::other("no such file");
        let path = std::path::PathBuf::from("/srv/pki/trainer.pem");
        let of_files = || {
            AccessError::from(weightsync_link::tls::TlsError::Missing {
                path: path.clone(),
                part: weightsync_link::tls::CertificateRole::Trainer,
            })
        };
        let error = |source: Box<dyn std::error::Error + Send + Sync>| Error::Transport {
            source,
            remedy: weightsync_engine::Remedy::GiveUp,
        };
        for error in [error(of_files().into()), SyncError::from(of_files()).into()] {
            assert!(error.to_string().contains("/srv/pki"), "{error}");
            let said = told(&error);
            assert!(said.contains("its log says why"), "{said}");
            assert!(!said.contains("/srv"), "{said}");
        }
        assert_eq!(told(&error(source.into())), "no such file");
    }

    #[test]
    fn number_far_above_the_highest_is_refused() {
        let milliseconds = Version(1_800_000_000_000);
        assert_eq!(check_number(milliseconds, Version::NONE), Ok(()));
        assert_eq!(check_number(milliseconds.next(), milliseconds), Ok(()));
        for highest in [Version::NONE, Version(3), milliseconds] {
            let said = check_number(Version(u64::MAX), highest).unwrap_err();
            assert!(
                said.contains("v18446744073709551615: expected at most"),
                "{said}"
            );
        }
        assert!(check_number(milliseconds, Version(3)).is_err());
    }
}
