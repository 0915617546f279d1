//! Positions by name, for lists that own their names.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;

/// Finds the position of a name in a list without holding a second copy of the names: each call
/// is told how to look a name up by its position.
///
/// The hash is keyed at random, because names come from outside.
#[derive(Clone, Default)]
pub(crate) struct NameIndex {
    table: HashTable<u32>,
    hasher: RandomState,
}

impl NameIndex {
    /// An index with room for `count` names, which then never hashes a name twice.
    pub(crate) fn with_capacity(count: usize) -> Self {
        NameIndex {
            table: HashTable::with_capacity(count),
            hasher: RandomState::new(),
        }
    }

    /// Notes the name at `position`; says `false`, and notes nothing, if the name is taken.
    ///
    /// Positions must fit in 32 bits; all bounds of this crate do.
    #[must_use]
    pub(crate) fn insert<'a>(
        &mut self,
        position: usize,
        name_at: impl Fn(usize) -> &'a str,
    ) -> bool {
        let NameIndex { table, hasher } = self;
        let name = name_at(position);
        // Equal hashes are compared by name, and a table that grows hashes the names again.
        let entry = table.entry(
            hasher.hash_one(name),
            |&other| name_at(other as usize) == name,
            |&other| hasher.hash_one(name_at(other as usize)),
        );
        match entry {
            Entry::Occupied(_) => false,
            Entry::Vacant(entry) => {
                entry.insert(position as u32);
                true
            }
        }
    }

    /// The position of a name.
    pub(crate) fn find<'a>(&self, name: &str, name_at: impl Fn(usize) -> &'a str) -> Option<usize> {
        self.table
            .find(self.hasher.hash_one(name), |&position| {
                name_at(position as usize) == name
            })
            .map(|&position| position as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_every_name_at_its_first_position() {
        let names: Vec<String> = (0..1000).map(|i| format!("name{}", i % 700)).collect();
        let name_at = |position: usize| names[position].as_str();
        let mut index = NameIndex::default();
        for position in 0..names.len() {
            assert_eq!(index.insert(position, name_at), position < 700);
        }
        for (position, name) in names.iter().enumerate() {
            assert_eq!(index.find(name, name_at), Some(position % 700));
        }
        assert_eq!(index.find("name700", name_at), None);
    }
}
