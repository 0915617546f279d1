//! Sets: for each model, the data slot and the version in it; and the record that holds a set
//! in shared memory.

use std::fmt;

use weightsync_core::Version;

use crate::protocol::{MAX_MODELS, MAX_SLOTS};

/// The most words that an encoded [`SetRecord`] takes.
pub(crate) const SET_WORDS: usize = SLOTS + MAX_MODELS / 8 + MAX_MODELS;

/// The offset of the packed slots. The versions follow at once, so that the record of a few models
/// fits on one cache line.
const SLOTS: usize = 3;

/// Part of the checksum, so that a page of zeros is no valid record.
const MAGIC: u64 = u64::from_le_bytes(*b"wsSET\x02\0\0");

/// A set of a segment's models, a bit each.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct ModelMask(pub u64);

impl ModelMask {
    /// All models, however many there are.
    pub const ALL: Self = Self(u64::MAX);

    /// The first `count` models.
    pub fn first(count: usize) -> Self {
        match count {
            MAX_MODELS.. => Self::ALL,
            _ => Self((1 << count) - 1),
        }
    }

    /// These models. Numbers from 64 on are ignored.
    pub fn of(models: &[usize]) -> Self {
        let bits = models.iter().filter(|&&model| model < MAX_MODELS);
        Self(bits.fold(0, |all, &model| all | 1 << model))
    }

    /// Whether `model` is in the set.
    pub fn contains(self, model: usize) -> bool {
        model < MAX_MODELS && self.0 & (1 << model) != 0
    }

    /// Models in both sets.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Models in either set.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Models that are not in `other`.
    #[must_use]
    pub fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Whether the set is empty.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// How many models the set has.
    pub fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    /// The models, lowest first.
    pub fn iter(self) -> impl Iterator<Item = usize> {
        let mut rest = self.0;
        std::iter::from_fn(move || {
            let model = rest.trailing_zeros() as usize;
            (rest != 0).then(|| {
                rest &= rest - 1;
                model
            })
        })
    }
}

impl fmt::Debug for ModelMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::ALL => f.write_str("all"),
            models => f.debug_set().entries(models.iter()).finish(),
        }
    }
}

/// The place of one model's version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SetEntry {
    pub(crate) slot: u8,
    pub(crate) version: Version,
}

/// A version for some of the models.
///
/// Unused entries are zero, so that equal sets are equal byte by byte.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct ModelSet {
    models: ModelMask,
    slots: [u8; MAX_MODELS],
    versions: [Version; MAX_MODELS],
}

impl ModelSet {
    /// The set before the first publication.
    pub(crate) const EMPTY: Self = Self {
        models: ModelMask(0),
        slots: [0; MAX_MODELS],
        versions: [Version::NONE; MAX_MODELS],
    };

    pub(crate) fn models(&self) -> ModelMask {
        self.models
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.models.is_empty()
    }

    pub(crate) fn entry(&self, model: usize) -> Option<SetEntry> {
        self.models.contains(model).then(|| SetEntry {
            slot: self.slots[model],
            version: self.versions[model],
        })
    }

    /// Sets a model's version, and replaces an earlier one.
    pub(crate) fn put(&mut self, model: usize, entry: SetEntry) {
        self.models = self.models.or(ModelMask(1 << model));
        self.slots[model] = entry.slot;
        self.versions[model] = entry.version;
    }

    /// Removes models from the set.
    pub(crate) fn remove(&mut self, models: ModelMask) {
        for model in self.models.and(models).iter() {
            // Equality compares whole arrays, so what is unused must be zero.
            self.slots[model] = 0;
            self.versions[model] = Version::NONE;
        }
        self.models = self.models.without(models);
    }

    /// A copy of this set in which the models of `other` replace its own.
    #[must_use]
    pub(crate) fn with(mut self, other: &Self) -> Self {
        self.lay(other);
        self
    }

    /// Replaces models of this set with those of `other`.
    pub(crate) fn lay(&mut self, other: &Self) {
        for (model, entry) in other.iter() {
            self.put(model, entry);
        }
    }

    /// A copy of the set with only these models.
    #[must_use]
    pub(crate) fn only(mut self, models: ModelMask) -> Self {
        self.keep(models);
        self
    }

    /// Removes all models except these.
    pub(crate) fn keep(&mut self, models: ModelMask) {
        self.remove(self.models.without(models));
    }

    /// The models of the set, lowest first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (usize, SetEntry)> {
        self.models.iter().map(|model| {
            let entry = SetEntry {
                slot: self.slots[model],
                version: self.versions[model],
            };
            (model, entry)
        })
    }
}

impl fmt::Debug for ModelSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let members = self.iter().map(|(model, entry)| {
            let SetEntry { slot, version } = entry;
            (model, format!("v{} in slot {slot}", version.0))
        });
        f.debug_map().entries(members).finish()
    }
}

/// A set in shared memory.
///
/// **Guarantee.** Words that decode belong to one record: a flipped bit is detected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SetRecord {
    /// The sequence number for which the record was written. A mailbox may name it under a later
    /// number, to notify its reader of the same set again.
    pub(crate) sequence: u64,
    pub(crate) set: ModelSet,
}

/// Why a set record is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SetFault {
    /// The checksum is wrong.
    Checksum,
    /// The checksum holds, but the record names a slot above the limit.
    Slot,
    /// The checksum holds, but the record names version 0, which is never published.
    Version,
    /// The checksum holds, but it is another record than the announced one.
    Sequence,
}

impl SetFault {
    /// The fault as text.
    pub(crate) fn what(self) -> &'static str {
        match self {
            Self::Checksum => "its checksum is wrong",
            Self::Slot => "it names a slot above 63",
            Self::Version => "it names version 0",
            Self::Sequence => "it is not the record that was announced",
        }
    }
}

impl SetRecord {
    /// The record as words, and how many of them are used: a set of few models is written and
    /// checked in few words.
    pub(crate) fn encode(&self) -> ([u64; SET_WORDS], usize) {
        let mut words = [0; SET_WORDS];
        // A slot number takes a byte, so eight of them share a word. The versions follow without a
        // gap.
        words[0] = self.sequence;
        words[1] = self.set.models.0;
        let versions = versions(words[1]);
        for (at, (_, entry)) in self.set.iter().enumerate() {
            words[SLOTS + at / 8] |= u64::from(entry.slot) << (at % 8 * 8);
            words[versions + at] = entry.version.0;
        }
        // Last: it covers all the other words.
        words[2] = checksum(&words);
        (words, used(words[1]))
    }

    /// Decodes and checks the record that a mailbox announced as `sequence`. Unused words are
    /// ignored.
    pub(crate) fn decode(words: &[u64; SET_WORDS], sequence: u64) -> Result<Self, SetFault> {
        if words[2] != checksum(words) {
            return Err(SetFault::Checksum);
        }
        // A mailbox may name an older record under a later number, but never one that was written
        // after it.
        if !(1..=sequence).contains(&words[0]) {
            return Err(SetFault::Sequence);
        }
        let mut set = ModelSet::EMPTY;
        let versions = versions(words[1]);
        for (at, model) in ModelMask(words[1]).iter().enumerate() {
            let slot = (words[SLOTS + at / 8] >> (at % 8 * 8)) as u8;
            let version = Version(words[versions + at]);
            // These would be indices into tables; a checksum that is right proves only that the
            // sender wrote them.
            if usize::from(slot) >= MAX_SLOTS {
                return Err(SetFault::Slot);
            }
            if version.is_none() {
                return Err(SetFault::Version);
            }
            set.put(model, SetEntry { slot, version });
        }
        let sequence = words[0];
        Ok(Self { sequence, set })
    }

    /// How many words are used, from the word that names the models.
    pub(crate) fn words_used(models: u64) -> usize {
        used(models)
    }
}

/// The offset of the versions.
fn versions(models: u64) -> usize {
    SLOTS + models.count_ones().div_ceil(8) as usize
}

/// The end of the last used word.
fn used(models: u64) -> usize {
    versions(models) + models.count_ones() as usize
}

/// CRC-64/NVME of the used words, without the checksum itself.
fn checksum(words: &[u64; SET_WORDS]) -> u64 {
    // Safe although nothing is checked yet: whatever the second word is, it names 64 models at
    // most, and the words have room for those.
    let covered = words[..used(words[1])].iter().enumerate();
    let mut bytes = [0; SET_WORDS * 8];
    let parts = bytes.as_chunks_mut::<8>().0;
    for (at, word) in covered {
        parts[at] = if at == 2 { MAGIC } else { *word }.to_le_bytes();
    }
    weightsync_simd::crc64(&bytes[..used(words[1]) * 8])
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Sets of 0, 1, 9 and 64 models.
    fn records() -> Vec<SetRecord> {
        let record = |models: ModelMask| {
            let mut set = ModelSet::EMPTY;
            for model in models.iter() {
                let slot = (model * 7 % MAX_SLOTS) as u8;
                let version = Version(1 + ((model as u64) << 40));
                set.put(model, SetEntry { slot, version });
            }
            let sequence = 1 << 50;
            SetRecord { sequence, set }
        };
        let few = ModelMask::of(&[0, 2, 3, 17, 30, 31, 40, 62, 63, 64, 1000]);
        assert_eq!(few.len(), 9);
        [ModelMask(0), ModelMask(1 << 63), few, ModelMask::ALL]
            .map(record)
            .to_vec()
    }

    #[test]
    fn records_come_back_as_they_were() {
        for record in records() {
            let (mut words, used) = record.encode();
            assert_eq!(used, SetRecord::words_used(words[1]));
            // Words of an earlier, longer record do not count.
            words[used..].fill(u64::MAX);
            for named in [record.sequence, record.sequence + 1, u64::MAX] {
                assert_eq!(SetRecord::decode(&words, named), Ok(record));
            }
        }
    }

    #[test]
    fn every_flipped_bit_is_noticed() {
        for record in records() {
            let (words, used) = record.encode();
            for word in 0..used {
                for bit in 0..64 {
                    let mut words = words;
                    words[word] ^= 1 << bit;
                    let decoded = SetRecord::decode(&words, record.sequence);
                    assert_eq!(decoded, Err(SetFault::Checksum), "word {word} bit {bit}");
                }
            }
        }
    }

    #[test]
    fn impossible_set_is_refused_with_any_checksum() {
        let sealed = |change: &dyn Fn(&mut [u64; SET_WORDS])| {
            let (mut words, _) = records()[1].encode();
            change(&mut words);
            words[2] = checksum(&words);
            SetRecord::decode(&words, 1 << 50).map(drop)
        };
        assert_eq!(sealed(&|_| ()), Ok(()));
        assert_eq!(sealed(&|words| words[SLOTS] = 64), Err(SetFault::Slot));
        assert_eq!(
            sealed(&|words| words[versions(1 << 63)] = 0),
            Err(SetFault::Version)
        );
        assert_eq!(sealed(&|words| words[0] += 1), Err(SetFault::Sequence));
        assert_eq!(sealed(&|words| words[0] = 0), Err(SetFault::Sequence));
        let zeros = SetRecord::decode(&[0; SET_WORDS], 0);
        assert_eq!(zeros, Err(SetFault::Checksum));
    }

    #[test]
    fn sets_are_laid_over_each_other_and_cut() {
        let set = |members: &[(usize, u64)]| {
            let mut set = ModelSet::EMPTY;
            for &(model, version) in members {
                let slot = version as u8 + 10;
                let version = Version(version);
                set.put(model, SetEntry { slot, version });
            }
            set
        };
        let all = set(&[(0, 1), (1, 1), (63, 4)]).with(&set(&[(1, 2), (5, 3)]));
        assert_eq!(all, set(&[(0, 1), (1, 2), (5, 3), (63, 4)]));
        assert_eq!(
            all.only(ModelMask::of(&[1, 63, 7])),
            set(&[(1, 2), (63, 4)])
        );
        assert_eq!(all.entry(7), None);
        let mut none = all;
        none.remove(ModelMask::ALL);
        assert_eq!(none, ModelSet::EMPTY);
    }

    #[test]
    fn the_first_models_are_counted_from_zero() {
        assert_eq!(ModelMask::first(0), ModelMask(0));
        assert_eq!(ModelMask::first(3).iter().collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(ModelMask::first(64), ModelMask::ALL);
    }
}
