//! Schemes chosen by a word.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use weightsync_core::ModelId;
use weightsync_mem::Delivery;

use crate::error::{Error, Result};
use crate::transport::{
    Capabilities, Deadline, Endpoint, Joining, Memory, NoSync, Opening, ReceiverTransport, Scheme,
    SenderTransport,
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
    /// Every one, in order, with at most so many waiting (1 to 32). A send waits
    /// for room until its deadline.
    Every {
        /// The most that wait.
        bound: u8,
    },
}

/// A scheme by its word and settings: `shared-mem`, `multi-process`, `none`, or
/// one of your own ([`Schemes`]). It is a plain value: text in any serde format.
///
/// ```
/// use weightsync::{AnyScheme, MultiProcess};
///
/// let scheme: AnyScheme = "multi-process:every=4".parse()?;
/// assert_eq!(scheme.to_string(), "multi-process:every=4");
/// let error = "multiprocess".parse::<AnyScheme>().unwrap_err();
/// assert!(error.to_string().contains("multi-process"), "{error}");
/// # Ok::<(), weightsync::Error>(())
/// ```
#[derive(Clone)]
pub struct AnyScheme(Arc<dyn Scheme>);

/// How a word and its settings become a scheme.
type Parser = Arc<dyn Fn(&BTreeMap<String, String>) -> Result<AnyScheme> + Send + Sync>;

/// The schemes there are, by their words: those built in, and your own.
#[derive(Clone)]
pub struct Schemes {
    parsers: BTreeMap<String, Parser>,
}

impl Default for Schemes {
    fn default() -> Self {
        let mut schemes = Self {
            parsers: BTreeMap::new(),
        };
        schemes.insert("shared-mem", |settings| {
            let mut scheme = SharedMem::default();
            for (key, value) in settings {
                match key.as_str() {
                    "pull" => scheme.pull = flag(key, value)?,
                    _ => return Err(unknown("shared-mem", key, "pull")),
                }
            }
            Ok(AnyScheme::new(scheme))
        });
        schemes.insert("multi-process", |settings| {
            let mut scheme = MultiProcess::default();
            for (key, value) in settings {
                match key.as_str() {
                    "own-copy" => scheme.own_copy = flag(key, value)?,
                    "every" => {
                        scheme.queue = Queue::Every {
                            bound: bound(value)?,
                        }
                    }
                    _ => return Err(unknown("multi-process", key, "every=1 to 32, own-copy")),
                }
            }
            Ok(AnyScheme::new(scheme))
        });
        schemes.insert("none", |settings| match settings.keys().next() {
            Some(key) => Err(unknown("none", key, "none at all")),
            None => Ok(AnyScheme::new(NoSync)),
        });
        schemes
    }
}

impl Schemes {
    /// Adds a scheme of one's own, or replaces one, under its word.
    pub fn insert(
        &mut self,
        word: &str,
        parse: impl Fn(&BTreeMap<String, String>) -> Result<AnyScheme> + Send + Sync + 'static,
    ) {
        self.parsers.insert(word.into(), Arc::new(parse));
    }

    /// The scheme that `text` names: a word, then settings after a colon,
    /// separated by commas.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownScheme`] with the words there are,
    /// [`Error::BadSetting`].
    pub fn parse(&self, text: &str) -> Result<AnyScheme> {
        let (word, settings) = text.split_once(':').unwrap_or((text, ""));
        let parse = self.parsers.get(word).ok_or_else(|| Error::UnknownScheme {
            got: text.chars().take(80).collect(),
            known: self.parsers.keys().cloned().collect(),
        })?;
        let settings = settings.split(',').filter(|setting| !setting.is_empty());
        let settings = settings.map(|setting| {
            let (key, value) = setting.split_once('=').unwrap_or((setting, ""));
            (key.trim().to_owned(), value.trim().to_owned())
        });
        parse(&settings.collect())
    }
}

impl fmt::Debug for Schemes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.parsers.keys()).finish()
    }
}

impl AnyScheme {
    /// Any scheme.
    pub fn new(scheme: impl Scheme + 'static) -> Self {
        Self(Arc::new(scheme))
    }

    /// The scheme itself.
    pub fn scheme(&self) -> &dyn Scheme {
        &*self.0
    }

    /// Its word, without settings.
    pub fn word(&self) -> &str {
        self.0.word()
    }

    /// What it can do.
    pub fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
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

    /// One of the schemes built in; see [`Schemes::parse`] for others.
    fn from_str(text: &str) -> Result<Self> {
        Schemes::default().parse(text)
    }
}

impl fmt::Display for AnyScheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())?;
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
        self.word() == other.word() && self.0.settings() == other.0.settings()
    }
}

impl Eq for AnyScheme {}

impl Serialize for AnyScheme {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for AnyScheme {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(de::Error::custom)
    }
}

impl Scheme for SharedMem {
    fn word(&self) -> &str {
        "shared-mem"
    }

    fn settings(&self) -> Vec<(String, String)> {
        let pull = self.pull.then(|| ("pull".to_owned(), String::new()));
        pull.into_iter().collect()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            push: !self.pull,
            every_version: false,
            ..Memory::CAPABILITIES
        }
    }

    fn place(&self, models: &[ModelId], run_dir: Option<&Path>) -> Result<Endpoint> {
        Memory::place(models, run_dir)
    }

    fn open(&self, opening: &Opening<'_>) -> Result<Box<dyn SenderTransport>> {
        Memory::open(opening)
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
        Memory::join(at, joining, (delivery, false), deadline)
    }
}

impl Scheme for MultiProcess {
    fn word(&self) -> &str {
        "multi-process"
    }

    fn settings(&self) -> Vec<(String, String)> {
        let mut settings = Vec::new();
        if let Queue::Every { bound } = self.queue {
            settings.push(("every".to_owned(), bound.to_string()));
        }
        if self.own_copy {
            settings.push(("own-copy".to_owned(), String::new()));
        }
        settings
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            every_version: matches!(self.queue, Queue::Every { .. }),
            pull: self.queue == Queue::Newest,
            ..Memory::CAPABILITIES
        }
    }

    fn place(&self, models: &[ModelId], run_dir: Option<&Path>) -> Result<Endpoint> {
        Memory::place(models, run_dir)
    }

    fn open(&self, opening: &Opening<'_>) -> Result<Box<dyn SenderTransport>> {
        Memory::open(opening)
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
        Memory::join(at, joining, (delivery, self.own_copy), deadline)
    }
}

fn flag(key: &str, value: &str) -> Result<bool> {
    match value {
        "" | "true" => Ok(true),
        "false" => Ok(false),
        _ => Err(Error::BadSetting {
            setting: key.into(),
            expected: "no value, true or false".into(),
            got: value.into(),
        }),
    }
}

fn bound(value: &str) -> Result<u8> {
    let bound = value.parse().ok().filter(|bound| (1..=32).contains(bound));
    bound.ok_or_else(|| Error::BadSetting {
        setting: "every".into(),
        expected: "a number from 1 to 32".into(),
        got: value.into(),
    })
}

fn unknown(word: &str, key: &str, known: &str) -> Error {
    Error::BadSetting {
        setting: key.chars().take(80).collect(),
        expected: format!("a setting of {word}: {known}"),
        got: key.chars().take(80).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_scheme_is_its_text() {
        for text in [
            "shared-mem",
            "shared-mem:pull",
            "multi-process",
            "multi-process:every=1",
            "multi-process:every=32,own-copy",
            "multi-process:own-copy",
            "none",
        ] {
            let scheme: AnyScheme = text.parse().unwrap();
            assert_eq!(scheme.to_string(), text);
            let json = serde_json::to_string(&scheme).unwrap();
            assert_eq!(serde_json::from_str::<AnyScheme>(&json).unwrap(), scheme);
            let bytes = postcard::to_stdvec(&scheme).unwrap();
            assert_eq!(postcard::from_bytes::<AnyScheme>(&bytes).unwrap(), scheme);
        }
    }

    #[test]
    fn what_is_not_known_is_refused_with_what_is() {
        for (text, hint) in [
            ("", "multi-process, none, shared-mem"),
            ("sharedmem", "shared-mem"),
            ("shared-mem:fast", "pull"),
            ("shared-mem:pull=maybe", "true or false"),
            ("multi-process:every", "1 to 32"),
            ("multi-process:every=0", "1 to 32"),
            ("multi-process:every=33", "1 to 32"),
            ("none:pull", "none at all"),
        ] {
            let error = text.parse::<AnyScheme>().unwrap_err().to_string();
            assert!(error.contains(hint), "{text:?}: {error}");
        }
    }
}
