//! Fetches what an explorer is told to load.

use std::time::Duration;

use weightsync_engine::{Error, InitInfo, Pull, Receiver, ReceiverSetup, Result, SetSnapshot};
use weightsync_store::StoreScheme;

use super::{Fetch, SyncError, lasting};

/// The receiver of an explorer. It joins where versions can be had, and joins again where that has
/// changed.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use weightsync_serve::synchronizer::{Fetcher, PartyOptions, Synchronizer};
///
/// let minute = Some(Duration::from_secs(60));
/// let sync = Synchronizer::connect("127.0.0.1:7100", None)?;
/// let mut explorer = sync.explorer(PartyOptions::new("e0"), minute)?;
/// let mut fetcher = Fetcher::default();
/// let mut weights = None;
/// for step in 1..=100 {
///     // Explore here, with the weights.
///     if explorer.need_sync(Some(step))?.is_needed() {
///         let answer = explorer.sync(Some(step), minute, |fetch| {
///             let set = fetcher.fetch(fetch)?;
///             let version = set.members()[0].snapshot.version();
///             weights = Some(set);
///             Ok(version)
///         })?;
///         println!("{answer}");
///     }
/// }
/// explorer.leave(None);
/// # Ok(()) }
/// ```
#[derive(Debug, Default)]
pub struct Fetcher {
    /// Where, by which number, and the receiver.
    joined: Option<(InitInfo, u32, Receiver)>,
}

impl Fetcher {
    /// The set of versions that an explorer is told to load, or a newer one.
    ///
    /// # Errors
    ///
    /// Those of joining and of [`Receiver::pull`].
    pub fn fetch(&mut self, fetch: &Fetch) -> Result<SetSnapshot> {
        let fetched = self.receive(fetch);
        match fetched {
            // Versions in a store do not need the trainer, which may be gone.
            Err(error) if !matches!(error, Error::Interrupted) => {
                match StoreScheme::address_of(&fetch.from) {
                    Some(address) => lasting::load(&fetch.from, address, fetch.version),
                    None => Err(error),
                }
            }
            fetched => fetched,
        }
    }

    fn receive(&mut self, fetch: &Fetch) -> Result<SetSnapshot> {
        // Each step gets the time that is left of the sync.
        let left = || {
            let until = fetch.until;
            weightsync_mem::left(until)
        };
        // Another place or number is another sender: the service or the trainer was started again.
        if self
            .joined
            .as_ref()
            .is_none_or(|(from, worker, _)| (from, *worker) != (&fetch.from, fetch.worker))
        {
            self.joined = None;
            let setup = ReceiverSetup::new(fetch.from.clone(), fetch.worker);
            // A store that has no version yet does not get one by waiting here. The fetch then
            // reads the store itself.
            let timeout = match StoreScheme::address_of(&fetch.from) {
                Some(_) => Some(Duration::ZERO),
                None => left(),
            };
            let receiver = setup.connect(timeout)?;
            self.joined = Some((fetch.from.clone(), fetch.worker, receiver));
        }
        let Some((_, _, receiver)) = &mut self.joined else {
            unreachable!("it has joined just now")
        };
        let model = receiver.models().first().map(|spec| spec.id.to_string());
        // Any version above the one that was named is as good, so a pull asks for at least it.
        let mut pull = Pull::at_least(fetch.version).timeout(left());
        if let Some(model) = &model {
            pull = pull.model(model);
        }
        let pulled = receiver.set().pull(pull);
        if pulled.is_err() {
            // It joins again, and finds out more.
            self.joined = None;
        }
        // `None` is the end of the time.
        pulled?.ok_or_else(|| {
            Error::from(SyncError::TooLate {
                version: fetch.version,
            })
        })
    }
}
