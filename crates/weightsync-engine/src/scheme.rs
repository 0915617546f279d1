//! Schemes chosen by a word.

pub mod settings;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de, ser};
use weightsync_core::{ModelId, SenderStatus};
use weightsync_mem::Delivery;

use self::settings::{Declared, Setting};
use crate::error::{Error, Result};
use crate::transport::{
    Capabilities, Deadline, Endpoint, Joining, LocalMemory, NoSync, Opening, ReceiverTransport,
    Scheme, SenderTransport,
};

/// Shared memory: workers on this machine read the newest version in place.
///
/// A version that is replaced before a worker looked at it is passed over.
/// `shared-mem`, or `shared-mem:pull`, with which workers take a version only
/// when they [ask](crate::Receiver::pull), and sends wait for none of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SharedMem {
    /// Workers ask; nothing is pushed.
    pub pull: bool,
}

/// A queue to each worker process on this machine: it can be told to deliver
/// every version in order, and to give each worker a copy of its own.
///
/// The queues carry handles of slots in shared memory, so a version is copied
/// once, however many workers there are. `multi-process`,
/// `multi-process:every=4`, `multi-process:every=4,own-copy`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MultiProcess {
    /// Which versions a worker gets.
    pub queue: Queue,
    /// Copies each version into the worker's own memory when it is received, so
    /// that a worker that holds on to one keeps no slot.
    pub own_copy: bool,
}

/// Which versions a worker gets that is slower than the trainer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Queue {
    /// The newest; older ones that it has not taken are passed over.
    #[default]
    Newest,
    /// Every one, in order, with at most so many in the worker's queue (1 to 32).
    /// A send waits for room until its deadline. As many again may wait for room
    /// at the sender, of sends that did not wait themselves or still do; one more
    /// is lost for that worker at once, and the report says so.
    Every {
        /// The most that the queue holds.
        bound: u8,
    },
}

impl Queue {
    /// The most versions that may wait in a worker's queue: 0 where there is none.
    pub fn bound(self) -> u8 {
        match self {
            Self::Newest => 0,
            Self::Every { bound } => bound,
        }
    }
}

/// A scheme by its name and settings: `shared-mem`, `multi-process`, `none`, or another
/// that the program is built with ([`Registration`]). It is a plain value: text in any serde
/// format. An [`InitInfo`](crate::InitInfo) or a [`Session`](crate::Session) with a scheme that
/// this program does not know keeps its text as it is.
///
/// ```
/// use weightsync::scheme::{AnyScheme, MultiProcess};
///
/// let scheme: AnyScheme = "multi-process:every=4".parse()?;
/// assert_eq!(scheme.to_string(), "multi-process:every=4");
/// let error = "multiprocess".parse::<AnyScheme>().unwrap_err();
/// assert!(error.to_string().contains("multi-process"), "{error}");
/// # Ok::<(), weightsync::Error>(())
/// ```
#[derive(Clone)]
pub struct AnyScheme(Arc<dyn Scheme>);

/// A scheme that every program knows that is built with it.
///
/// `register!` of the [transport](crate::transport) module adds one. An init info, a [`Session`]
/// or a text that names the scheme then finds it, without a call.
///
/// ```
/// use weightsync::scheme::{AnyScheme, SharedMem};
/// use weightsync::transport::{Registration, register};
///
/// register! {
///     Registration::new("fleet", |_settings| Ok(AnyScheme::new(SharedMem::default())))
/// }
///
/// fn main() -> weightsync::Result<()> {
///     let scheme: AnyScheme = "fleet".parse()?;
///     assert_eq!(scheme, AnyScheme::default());
///     Ok(())
/// }
/// ```
///
/// [`Session`]: crate::Session
#[derive(Clone, Copy, Debug)]
pub struct Registration {
    name: &'static str,
    parse: Parse,
    settings: fn() -> Vec<Declared>,
}

/// How settings become a scheme.
type Parse = fn(&BTreeMap<String, String>) -> Result<AnyScheme>;

impl Registration {
    /// A scheme of this name, which is made of its settings.
    pub const fn new(name: &'static str, parse: Parse) -> Self {
        Self {
            name,
            parse,
            settings: Vec::new,
        }
    }

    /// The same with its settings, as [`AnyScheme::settings_of`] returns them.
    #[must_use]
    pub const fn settings(mut self, settings: fn() -> Vec<Declared>) -> Self {
        self.settings = settings;
        self
    }
}

inventory::collect!(Registration);

impl SharedMem {
    /// The settings of this scheme's text.
    pub const SETTINGS: &[Setting<Self>] = &[Setting {
        key: "pull",
        takes: "",
        about: "workers take a version only when they ask for one, and sends wait for no worker",
        set: |scheme, value| {
            scheme.pull = settings::flag(value)?;
            Ok(())
        },
        get: |scheme| settings::set_flag(scheme.pull),
    }];
}

inventory::submit! {
    Registration::new("shared-mem", |given| {
        let scheme = settings::read("shared-mem", SharedMem::SETTINGS, given)?;
        Ok(AnyScheme::new(scheme))
    })
    .settings(|| settings::declared(SharedMem::SETTINGS))
}

impl MultiProcess {
    /// The settings of this scheme's text.
    pub const SETTINGS: &[Setting<Self>] = &[
        Setting {
            key: "every",
            takes: "1 to 32",
            about: "every version in order, with at most this many in a worker's queue; the newest alone, \
                    without it",
            set: |scheme, value| {
                let bound = settings::number(value, 1..=32)?;
                scheme.queue = Queue::Every { bound };
                Ok(())
            },
            get: |scheme| match scheme.queue {
                Queue::Newest => None,
                Queue::Every { bound } => Some(bound.to_string()),
            },
        },
        Setting {
            key: "own-copy",
            takes: "",
            about: "each version is copied into the worker's own memory, so that a worker that holds one \
                    keeps no slot",
            set: |scheme, value| {
                scheme.own_copy = settings::flag(value)?;
                Ok(())
            },
            get: |scheme| settings::set_flag(scheme.own_copy),
        },
    ];
}

inventory::submit! {
    Registration::new("multi-process", |given| {
        let scheme = settings::read("multi-process", MultiProcess::SETTINGS, given)?;
        Ok(AnyScheme::new(scheme))
    })
    .settings(|| settings::declared(MultiProcess::SETTINGS))
}

/// A scheme without settings.
const NONE: &[Setting<NoSync>] = &[];

inventory::submit! {
    Registration::new("none", |given| {
        let scheme = settings::read("none", NONE, given)?;
        Ok(AnyScheme::new(scheme))
    })
}

/// The only scheme of this name.
fn registered(name: &str, text: &str) -> Result<&'static Registration> {
    let all = inventory::iter::<Registration>.into_iter();
    let mut found = all.clone().filter(|one| one.name == name);
    // Two crates may register one name. Which of the two was meant cannot be told.
    match (found.next(), found.count()) {
        (Some(one), 0) => Ok(one),
        (None, _) => {
            let known: BTreeSet<_> = all.map(|one| one.name.to_owned()).collect();
            Err(Error::UnknownScheme {
                got: cut(text),
                known: known.into_iter().collect(),
            })
        }
        (Some(_), more) => Err(Error::BadSetting {
            setting: cut(name),
            expected: "one scheme of this name in the program".into(),
            got: (more + 1).to_string(),
        }),
    }
}

/// The longest text of a scheme, in bytes.
pub(crate) const MAX_TEXT: usize = 1024;

/// A scheme's word and its settings, as its text says them.
fn parts(text: &str) -> (&str, impl Iterator<Item = (&str, &str)>) {
    let (word, settings) = text.split_once(':').unwrap_or((text, ""));
    let settings = settings.split(',').filter(|setting| !setting.is_empty());
    let settings = settings.map(|setting| {
        let (key, value) = setting.split_once('=').unwrap_or((setting, ""));
        (key.trim(), value.trim())
    });
    (word, settings)
}

impl AnyScheme {
    /// Any scheme.
    pub fn new(scheme: impl Scheme + 'static) -> Self {
        Self(Arc::new(scheme))
    }

    /// The settings of the scheme of this name.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownScheme`] with the names there are.
    pub fn settings_of(name: &str) -> Result<Vec<Declared>> {
        Ok((registered(name, name)?.settings)())
    }

    /// The scheme itself.
    pub fn scheme(&self) -> &dyn Scheme {
        &*self.0
    }

    /// Its word, without settings.
    pub fn name(&self) -> &str {
        self.0.name()
    }

    /// What it can do.
    pub fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }

    /// Its word and settings as text, which says them all: what is read from it
    /// is this scheme.
    ///
    /// # Errors
    ///
    /// [`Error::BadSetting`] if a name or a value would not be read back as it
    /// is, or the text is longer than anybody reads.
    pub(crate) fn text(&self) -> Result<String> {
        let text = self.to_string();
        let bad = |setting: &str, expected: &str, got: &str| {
            Err(Error::BadSetting {
                setting: cut(setting),
                expected: expected.into(),
                got: cut(got),
            })
        };
        if text.len() > MAX_TEXT {
            let expected = format!("a scheme whose text has at most {MAX_TEXT} bytes");
            return bad(self.name(), &expected, &text);
        }
        // A worker reads these settings back from text, so a text that reads otherwise is refused
        // here, where the mistake is, and not at the worker.
        let (word, read) = parts(&text);
        if word != self.name() || word.is_empty() {
            return bad("the word of a scheme", "text without a colon", self.name());
        }
        let read: Vec<_> = read.collect();
        let settings = self.0.settings();
        for (at, (key, value)) in settings.iter().enumerate() {
            if read.get(at) != Some(&(key, value)) {
                let expected = "a name without commas and equals signs and a value without \
                                commas, neither with spaces around it";
                return bad(key, expected, value);
            }
            // A worker that reads the text refuses a key that comes twice.
            if settings[..at].iter().any(|(earlier, _)| earlier == key) {
                return bad(key, "to be set once", &text);
            }
        }
        Ok(text)
    }
}

impl Default for AnyScheme {
    fn default() -> Self {
        Self::new(SharedMem::default())
    }
}

impl<S: Scheme + 'static> From<S> for AnyScheme {
    fn from(scheme: S) -> Self {
        Self::new(scheme)
    }
}

impl FromStr for AnyScheme {
    type Err = Error;

    /// A name, then settings after a colon, separated by commas.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownScheme`] with the names there are, [`Error::BadSetting`].
    fn from_str(text: &str) -> Result<Self> {
        let (name, settings) = parts(text);
        let registration = registered(name, text)?;
        let mut known = BTreeMap::new();
        for (key, value) in settings {
            // The map would keep the last one without a word.
            if known.contains_key(key) {
                return Err(Error::BadSetting {
                    setting: cut(key),
                    expected: "to be set once".into(),
                    got: cut(text),
                });
            }
            known.insert(key.to_owned(), value.to_owned());
        }
        (registration.parse)(&known)
    }
}

impl fmt::Display for AnyScheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        for (index, (key, value)) in self.0.settings().iter().enumerate() {
            let before = if index == 0 { ':' } else { ',' };
            write!(f, "{before}{key}")?;
            if !value.is_empty() {
                write!(f, "={value}")?;
            }
        }
        Ok(())
    }
}

impl fmt::Debug for AnyScheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AnyScheme({self})")
    }
}

impl PartialEq for AnyScheme {
    fn eq(&self, other: &Self) -> bool {
        self.name() == other.name() && self.0.settings() == other.0.settings()
    }
}

impl Eq for AnyScheme {}

impl Serialize for AnyScheme {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.text().map_err(ser::Error::custom)?)
    }
}

impl<'de> Deserialize<'de> for AnyScheme {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(de::Error::custom)
    }
}

impl Scheme for SharedMem {
    fn name(&self) -> &str {
        "shared-mem"
    }

    fn settings(&self) -> Vec<(String, String)> {
        settings::given(self, Self::SETTINGS)
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            push: !self.pull,
            every_version: false,
            ..Capabilities::ALL
        }
    }

    fn allocate_endpoint(&self, models: &[ModelId], run_dir: Option<&Path>) -> Result<Endpoint> {
        LocalMemory::place(models, run_dir)
    }

    fn open(&self, opening: &Opening<'_>) -> Result<Box<dyn SenderTransport>> {
        LocalMemory::open(opening, Queue::Newest.bound())
    }

    fn ask_status(&self, at: &Endpoint, timeout: Duration) -> Result<SenderStatus> {
        LocalMemory::ask_status(at, timeout)
    }

    fn join(
        &self,
        at: &Endpoint,
        joining: &Joining,
        deadline: Deadline,
    ) -> Result<Box<dyn ReceiverTransport>> {
        let delivery = if self.pull {
            Delivery::Asked
        } else {
            Delivery::Newest
        };
        LocalMemory::join(at, joining, (delivery, false), deadline)
    }
}

impl Scheme for MultiProcess {
    fn name(&self) -> &str {
        "multi-process"
    }

    fn settings(&self) -> Vec<(String, String)> {
        settings::given(self, Self::SETTINGS)
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            every_version: matches!(self.queue, Queue::Every { .. }),
            pull: self.queue == Queue::Newest,
            ..Capabilities::ALL
        }
    }

    fn allocate_endpoint(&self, models: &[ModelId], run_dir: Option<&Path>) -> Result<Endpoint> {
        LocalMemory::place(models, run_dir)
    }

    fn open(&self, opening: &Opening<'_>) -> Result<Box<dyn SenderTransport>> {
        LocalMemory::open(opening, self.queue.bound())
    }

    fn ask_status(&self, at: &Endpoint, timeout: Duration) -> Result<SenderStatus> {
        LocalMemory::ask_status(at, timeout)
    }

    fn join(
        &self,
        at: &Endpoint,
        joining: &Joining,
        deadline: Deadline,
    ) -> Result<Box<dyn ReceiverTransport>> {
        let delivery = match self.queue {
            Queue::Newest => Delivery::Newest,
            Queue::Every { bound } => Delivery::Every { bound },
        };
        LocalMemory::join(at, joining, (delivery, self.own_copy), deadline)
    }
}

/// As much of a text as an error repeats.
fn cut(text: &str) -> String {
    text.chars().take(80).collect()
}

#[cfg(test)]
mod tests;
