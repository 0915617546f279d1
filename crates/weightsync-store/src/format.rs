//! The small files of a store, in JSON: the head and the manifests. `docs/store.md` specifies them.
//!
//! Bytes from outside become a checked value here and nowhere else.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;

use serde::de::{self, DeserializeOwned, Deserializer};
use serde::{Deserialize, Serialize, Serializer};
use serde_json::value::RawValue;
use weightsync_core::{Digest, Epoch, ModelId, Run, Version};
use weightsync_simd::crc64;

use crate::anchor::{SAFETENSORS, StoredBase, is_extra};
use crate::error::{Damage, Result, StoreError};

/// The format that this program writes, and the newest that it reads.
pub(crate) const FORMAT: u32 = 1;

/// The most deltas that a version may be folded from.
pub(crate) const MAX_CHAIN: usize = 4096;

/// The most bytes of all files next to a model's weights: a reader holds them in memory.
pub(crate) const MAX_EXTRA: u64 = 256 << 20;

/// The file of the head.
pub(crate) const HEAD: &str = "head.json";
/// The directory of the manifests.
pub(crate) const VERSIONS: &str = "versions";
/// The directory of the models' layouts and attributes.
pub(crate) const SPECS: &str = "specs";
/// The directory of the weights.
pub(crate) const DATA: &str = "data";
/// The directory of the leases.
pub(crate) const LEASES: &str = "leases";
/// A model's changes, in the directory of a version.
pub(crate) const DELTA: &str = "weights.delta";

/// A saved version's place in the order of all: the writer's epoch, and a number that grows over all
/// epochs. It is the name of the version's files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct VersionKey {
    pub(crate) epoch: Epoch,
    pub(crate) sequence: u64,
}

impl fmt::Display for VersionKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // As many digits as the largest number has, so that names sort as numbers do.
        write!(f, "{:020}-{:020}", self.epoch.0, self.sequence)
    }
}

impl FromStr for VersionKey {
    type Err = ();

    /// Only what `Display` writes.
    fn from_str(text: &str) -> Result<Self, ()> {
        let (epoch, sequence) = text.split_once('-').ok_or(())?;
        let number = |digits: &str| match digits.len() == 20
            && digits.bytes().all(|digit| digit.is_ascii_digit())
        {
            true => digits.parse().map_err(drop),
            false => Err(()),
        };
        Ok(Self {
            epoch: Epoch(number(epoch)?),
            sequence: number(sequence)?,
        })
    }
}

impl Serialize for VersionKey {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for VersionKey {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse()
            .map_err(|()| de::Error::custom(format!("{text:?} is not the place of a version")))
    }
}

impl VersionKey {
    /// The manifest of the version.
    pub(crate) fn manifest(self) -> String {
        format!("{VERSIONS}/{self}.json")
    }

    /// The place of a manifest, by its name within its directory.
    pub(crate) fn of_manifest(name: &str) -> Option<Self> {
        name.strip_suffix(".json")?.parse().ok()
    }

    /// The directory with the weights that were written for this version.
    pub(crate) fn data(self) -> String {
        format!("{DATA}/{self}")
    }

    /// A file of a model in that directory.
    pub(crate) fn file(self, model: &ModelId, file: &str) -> String {
        format!("{DATA}/{self}/{}/{file}", directory_of(model))
    }
}

/// The head: which versions are published. Replacing it publishes one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Head {
    /// The run that may write.
    pub(crate) run: Run,
    /// What each run published, by epoch.
    pub(crate) runs: Vec<PublishedRun>,
    /// How many versions there are: fewer manifests are damage.
    pub(crate) count: u64,
    /// Versions that users named.
    pub(crate) names: BTreeMap<String, VersionKey>,
    /// Versions that are being removed.
    pub(crate) dropped: BTreeSet<VersionKey>,
    /// The newest version that was ever published of each model: its manifest may be damaged, and its
    /// number is used up all the same.
    pub(crate) versions: BTreeMap<ModelId, Version>,
}

/// What one run published.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PublishedRun {
    pub(crate) epoch: Epoch,
    /// The newest; 0 if there is none.
    pub(crate) last: u64,
    /// Numbers below it of versions that failed, and whose manifests may be there. They stay as long as
    /// the run does: storage that is slow may write such a manifest after it was removed.
    pub(crate) failed: BTreeSet<u64>,
}

impl Head {
    /// The newest version.
    pub(crate) fn newest(&self) -> Option<VersionKey> {
        let published = self.runs.iter().rev().find(|run| run.last > 0)?;
        Some(VersionKey {
            epoch: published.epoch,
            sequence: published.last,
        })
    }

    /// Whether a manifest of this place is a published version.
    pub(crate) fn has(&self, place: VersionKey) -> bool {
        let run = self.run(place.epoch);
        run.is_some_and(|run| run.has(place.sequence)) && !self.dropped.contains(&place)
    }

    /// Whether this place is certain to be no version that was ever published.
    pub(crate) fn never_had(&self, place: VersionKey) -> bool {
        self.run(place.epoch)
            .is_some_and(|run| !run.has(place.sequence))
    }

    fn run(&self, epoch: Epoch) -> Option<&PublishedRun> {
        let index = self.runs.binary_search_by_key(&epoch, |run| run.epoch);
        index.ok().map(|index| &self.runs[index])
    }

    fn check(&self) -> Result<(), String> {
        // Runs are looked up by halves, which needs this order.
        let epochs = self.runs.windows(2);
        if !epochs.into_iter().all(|pair| pair[0].epoch < pair[1].epoch) {
            return Err("its runs are out of order".into());
        }
        // A claim adds its run, so the run that may write is always the last.
        if self.runs.last().map(|run| run.epoch) != Some(self.run.epoch) {
            return Err("its newest run is not the one that writes".into());
        }
        // Numbers grow over all runs, so the newest version is that of the last run that published.
        let written: Vec<_> = self.runs.iter().filter(|run| run.last > 0).collect();
        if !written.windows(2).all(|pair| pair[0].last < pair[1].last) {
            return Err("its versions are out of order".into());
        }
        Ok(())
    }
}

impl PublishedRun {
    pub(crate) fn none(epoch: Epoch) -> Self {
        Self {
            epoch,
            last: 0,
            failed: BTreeSet::new(),
        }
    }

    fn has(&self, sequence: u64) -> bool {
        sequence <= self.last && !self.failed.contains(&sequence)
    }
}

/// The process that wrote a version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct By {
    pub(crate) host: String,
    pub(crate) pid: u32,
}

/// The manifest of one version of the store: a version of each model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StoreManifest {
    pub(crate) place: VersionKey,
    /// The version published before.
    pub(crate) previous: Option<VersionKey>,
    pub(crate) run: Run,
    pub(crate) by: By,
    /// When it was written, in milliseconds since 1970 by the writer's clock. For people alone.
    pub(crate) at: u64,
    /// The names that the head had then. They count if the head is damaged.
    pub(crate) names: BTreeMap<String, VersionKey>,
    pub(crate) models: Vec<Stored>,
}

/// One model of a version, and the files it is made of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Stored {
    pub(crate) model: ModelId,
    pub(crate) version: Version,
    pub(crate) digest: Digest,
    /// BLAKE3 of the file with the layout and the attributes, which is its name.
    pub(crate) spec: Hash,
    /// Whether it is another version than the one published before.
    pub(crate) changed: bool,
    /// Elements of the model and how many of them changed, where that is known.
    pub(crate) changes: Option<[u64; 2]>,
    pub(crate) anchor: Anchor,
    /// What is folded onto the anchor, in order.
    pub(crate) deltas: Vec<DeltaFile>,
}

/// A full version, in a Hugging Face checkpoint directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Anchor {
    pub(crate) at: VersionKey,
    pub(crate) files: Vec<FileEntry>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileEntry {
    pub(crate) name: String,
    pub(crate) bytes: u64,
    pub(crate) crc64: Crc,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DeltaFile {
    pub(crate) at: VersionKey,
    pub(crate) bytes: u64,
    pub(crate) crc64: Crc,
}

impl Stored {
    /// The places of its files, in order.
    pub(crate) fn needs(&self) -> impl Iterator<Item = VersionKey> + '_ {
        let deltas = self.deltas.iter().map(|delta| delta.at);
        std::iter::once(self.anchor.at).chain(deltas)
    }

    /// The bytes that loading it reads: those of the weights, unless a base has them, and of what is
    /// folded onto them.
    pub(crate) fn read_bytes(&self, base: Option<&StoredBase>) -> u64 {
        let weights = self.anchor.files.iter();
        let weights = weights.filter(|file| base.is_none() && file.name.ends_with(SAFETENSORS));
        let known = base.map_or(0, |base| base.stored.deltas.len());
        let deltas = self.deltas[known..].iter().map(|delta| delta.bytes);
        total(weights.map(|file| file.bytes).chain(deltas))
    }

    /// The bytes that were written for it; 0 if it did not change.
    pub(crate) fn written_bytes(&self) -> u64 {
        match (self.changed, self.deltas.last()) {
            (false, _) => 0,
            (true, Some(delta)) => delta.bytes,
            (true, None) => total(self.anchor.files.iter().map(|file| file.bytes)),
        }
    }

    /// Every file of it, in order: its path, its bytes, and their checksum.
    pub(crate) fn files(&self) -> impl Iterator<Item = (String, u64, Crc)> + '_ {
        let anchor = self.anchor.files.iter().map(|file| {
            let path = self.anchor.at.file(&self.model, &file.name);
            (path, file.bytes, file.crc64)
        });
        let deltas = self.deltas.iter().map(|file| {
            let path = file.at.file(&self.model, DELTA);
            (path, file.bytes, file.crc64)
        });
        anchor.chain(deltas)
    }
}

/// All of them together. The numbers come from a file, so they may be any.
pub(crate) fn total(bytes: impl Iterator<Item = u64>) -> u64 {
    bytes.fold(0, u64::saturating_add)
}

impl StoreManifest {
    /// The places whose data the version needs.
    pub(crate) fn needs(&self) -> impl Iterator<Item = VersionKey> + '_ {
        self.models.iter().flat_map(Stored::needs)
    }

    /// One model.
    pub(crate) fn model(&self, id: &ModelId) -> Option<&Stored> {
        self.models.iter().find(|stored| stored.model == *id)
    }

    fn check(&self) -> Result<(), String> {
        let ids: BTreeSet<_> = self.models.iter().map(|model| &model.model).collect();
        // Everything below comes from a file, which anybody may have written.
        if self.models.is_empty() || ids.len() != self.models.len() {
            return Err("it has no models, or one twice".into());
        }
        if self.previous.is_some_and(|previous| previous >= self.place) {
            return Err("it comes before its predecessor".into());
        }
        for model in &self.models {
            let id = &model.model;
            if model.version.is_none() {
                return Err(format!("{id} has no version"));
            }
            // Each delta is a file to open and to apply.
            if model.deltas.len() > MAX_CHAIN {
                return Err(format!("{id} has more than {MAX_CHAIN} deltas"));
            }
            // An anchor comes before its deltas, and no file is newer than its version.
            let at: Vec<_> = model.needs().collect();
            let last = at.last().is_some_and(|last| *last <= self.place);
            if !last || !at.windows(2).all(|pair| pair[0] < pair[1]) {
                return Err(format!("the files of {id} are out of order"));
            }
            let names: BTreeSet<_> = model.anchor.files.iter().map(|file| &file.name).collect();
            if names.len() != model.anchor.files.len() {
                return Err(format!("{id} has a file twice"));
            }
            // A name becomes a part of a path, so it must not lead anywhere else.
            if let Some(name) = names.into_iter().find(|name| !is_file_name(name)) {
                return Err(format!("{id} has a file with the name {name:?}"));
            }
            let extra = model.anchor.files.iter().filter(|file| is_extra(file));
            let extra = total(extra.map(|file| file.bytes));
            if extra > MAX_EXTRA {
                return Err(format!(
                    "{id} has {extra} bytes next to its weights, which is more than {MAX_EXTRA}"
                ));
            }
        }
        Ok(())
    }
}

/// Whether this can be the name of a file in an anchor: of a plain file there, and not of one that
/// the store makes in addition.
pub(crate) fn is_file_name(name: &str) -> bool {
    // Names with a dot in front are those of unfinished files.
    let plain = !name.is_empty() && name.len() <= 255 && !name.starts_with('.');
    plain
        && name != DELTA
        && !name
            .chars()
            .any(|c| matches!(c, '/' | '\\') || c.is_control())
}

/// Whether a version can have this name.
pub(crate) fn is_version_name(name: &str) -> bool {
    let letters = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    (1..=100).contains(&name.len()) && !name.starts_with('.') && name.chars().all(letters)
}

/// The directory of a model: its name where that can be the name of a directory. Models with
/// different names have different directories.
pub(crate) fn directory_of(model: &ModelId) -> String {
    let name = model.as_str();
    let letters = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    // A name that could be the hash of another is hashed, too. File systems that ignore case are
    // why capital letters are no reason to trust a name.
    let plain = name.len() <= 64 && !name.starts_with(['.', '_']) && name.chars().all(letters);
    match plain && !name.chars().any(|c| c.is_ascii_uppercase()) {
        true => name.into(),
        false => {
            let readable = name.chars().filter(|c| letters(*c)).take(32);
            let hash = blake3::hash(name.as_bytes()).to_hex();
            format!("_{}-{}", readable.collect::<String>(), &hash[..32])
        }
    }
}

/// A checksum in JSON: hexadecimal, as not every program reads integers of 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Crc(pub(crate) u64);

impl fmt::Display for Crc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl Serialize for Crc {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Crc {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        // One spelling only, so that equal checksums are equal texts.
        let value = u64::from_str_radix(&text, 16).map(Self).ok();
        let value = value.filter(|value| value.to_string() == text);
        value.ok_or_else(|| de::Error::custom(format!("{text:?} is not a checksum")))
    }
}

/// The BLAKE3 hash of a file, as its name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub(crate) struct Hash(String);

impl Hash {
    pub(crate) fn of(bytes: &[u8]) -> Self {
        Self(blake3::hash(bytes).to_hex().to_string())
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    /// The hash in the name of such a file within its directory.
    pub(crate) fn of_spec(name: &str) -> Option<Self> {
        let text = name.strip_suffix(".json")?;
        let hash = text.parse::<blake3::Hash>().ok()?;
        (hash.to_hex().as_str() == text).then(|| Self(text.into()))
    }

    /// The file of this hash with a layout and attributes.
    pub(crate) fn spec(&self) -> String {
        format!("{SPECS}/{}.json", self.0)
    }
}

impl<'de> Deserialize<'de> for Hash {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        // It becomes a part of a path.
        match Self::of_spec(&format!("{text}.json")) {
            Some(hash) => Ok(hash),
            None => Err(de::Error::custom(format!("{text:?} is not a hash"))),
        }
    }
}

/// A value that is checked when it is read.
pub(crate) trait Value: Serialize + DeserializeOwned {
    fn check(&self) -> Result<(), String>;
}

impl Value for Head {
    fn check(&self) -> Result<(), String> {
        self.check()
    }
}

impl Value for StoreManifest {
    fn check(&self) -> Result<(), String> {
        self.check()
    }
}

/// How a value lies in its file.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SealedValue {
    format: u32,
    /// Of the format and the text of the value.
    crc64: Crc,
    value: Box<RawValue>,
}

/// The bytes of a value, with a checksum.
pub(crate) fn seal(value: &impl Value) -> Vec<u8> {
    let text = serde_json::value::to_raw_value(value);
    let value = text.unwrap_or_else(|error| unreachable!("plain values become JSON: {error}"));
    seal_text(value)
}

fn seal_text(value: Box<RawValue>) -> Vec<u8> {
    let sealed = SealedValue {
        format: FORMAT,
        crc64: seal_of(FORMAT, value.get()),
        value,
    };
    serde_json::to_vec(&sealed).unwrap_or_else(|error| unreachable!("{error}"))
}

/// Any JSON with the seal of a value.
#[cfg(feature = "fuzz")]
pub(crate) fn sealed(text: &str) -> Option<Vec<u8>> {
    RawValue::from_string(text.to_owned()).ok().map(seal_text)
}

/// Reads a value; `file` is named in the error.
pub(crate) fn unseal<T: Value>(file: &str, bytes: &[u8]) -> Result<T> {
    let damaged = |what: String| Damage::new(file, what);
    // First of all: a later format may have other fields.
    if let Ok(Format { format }) = serde_json::from_slice(bytes)
        && format > FORMAT
        && !is_sealed_as(FORMAT, bytes)
    {
        return Err(StoreError::Format {
            file: file.into(),
            got: format,
            expected: FORMAT,
        });
    }
    let sealed: SealedValue = serde_json::from_slice(bytes)
        .map_err(|error| damaged(format!("it is not what a store writes: {error}")))?;
    // Of the text as it lies in the file: nothing is written again to compare it.
    let crc64 = seal_of(sealed.format, sealed.value.get());
    if crc64 != sealed.crc64 {
        let expected = sealed.crc64;
        return Err(damaged(format!("its checksum is {crc64}, expected {expected}")).into());
    }
    let value: T = serde_json::from_str(sealed.value.get())
        .map_err(|error| damaged(format!("it is not what a store writes: {error}")))?;
    // A right checksum says that a store wrote it, and not that its parts agree.
    value.check().map_err(damaged)?;
    Ok(value)
}

/// What every format has.
#[derive(Deserialize)]
struct Format {
    format: u32,
}

/// Whether the checksum is that of another format than the file names: the number is then damaged.
fn is_sealed_as(format: u32, bytes: &[u8]) -> bool {
    let sealed = serde_json::from_slice::<SealedValue>(bytes);
    sealed.is_ok_and(|sealed| sealed.crc64 == seal_of(format, sealed.value.get()))
}

fn seal_of(format: u32, value: &str) -> Crc {
    Crc(crc64(&[&format.to_le_bytes(), value.as_bytes()].concat()))
}

#[cfg(test)]
mod tests;
