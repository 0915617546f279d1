//! Converts dotted names to nested ones and back: `actor.0.weight` ⇄ `actor` → `0` → `weight`.

#[cfg(test)]
mod tests;

use std::fmt;

use crate::error::Error;
use crate::index::NameIndex;

/// The most parts of one name, and so the most levels of a [`Tree`].
///
/// The limit keeps walks over trees from outside within any thread's stack.
pub const MAX_DEPTH: usize = 128;

/// What separates the parts of a dotted name.
const SEPARATOR: char = '.';

/// Values under nested names; each level keeps the order in which its names were added.
///
/// A name holds a value or a further level, never both: `a` and `a.b` are a conflict. No part of
/// a name is empty or contains a dot, so the two forms of a name say the same.
///
/// ```
/// use weightsync_core::{Node, Tree};
///
/// let tree = Tree::from_dotted([("actor.weight", 1), ("actor.bias", 2), ("scale", 3)])?;
/// let actor = tree.branch("actor").unwrap();
/// assert_eq!(actor.leaf("bias"), Some(&2));
/// assert_eq!(
///     tree.into_dotted(),
///     [("actor.weight".to_owned(), 1), ("actor.bias".to_owned(), 2), ("scale".to_owned(), 3)],
/// );
/// # Ok::<(), weightsync_core::Error>(())
/// ```
#[derive(Clone)]
pub struct Tree<T> {
    entries: Vec<(String, Node<T>)>,
    index: NameIndex,
}

/// What a name in a [`Tree`] stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Node<T> {
    /// A value.
    Leaf(T),
    /// A level of further names.
    Branch(Tree<T>),
}

impl<T> Tree<T> {
    /// A tree without names.
    pub fn new() -> Self {
        Tree {
            entries: Vec::new(),
            index: NameIndex::default(),
        }
    }

    /// Nests values given by dotted name.
    ///
    /// Names that share a branch come together at the place of the first of them; where they
    /// already were together, [`into_dotted`](Tree::into_dotted) gives back the same list.
    ///
    /// # Errors
    /// Those of [`insert`](Tree::insert), for the first name that is refused.
    pub fn from_dotted<N: AsRef<str>>(
        leaves: impl IntoIterator<Item = (N, T)>,
    ) -> Result<Self, Error> {
        let mut tree = Tree::new();
        for (name, leaf) in leaves {
            tree.insert(name.as_ref(), leaf)?;
        }
        Ok(tree)
    }

    /// All values with their dotted names, depth first. A branch without values leaves no trace.
    pub fn into_dotted(self) -> Vec<(String, T)> {
        let mut leaves = Vec::new();
        flatten(self, &mut String::new(), &mut leaves);
        leaves
    }

    /// The same tree over references to its values.
    pub fn as_ref(&self) -> Tree<&T> {
        let entries = self.entries.iter().map(|(segment, node)| {
            let node = match node {
                Node::Leaf(leaf) => Node::Leaf(leaf),
                Node::Branch(branch) => Node::Branch(branch.as_ref()),
            };
            (segment.clone(), node)
        });
        Tree {
            entries: entries.collect(),
            index: self.index.clone(),
        }
    }

    /// Adds a value under a dotted name, with the branches it leads through.
    ///
    /// # Errors
    /// [`Error::InvalidPath`] if a part of the name is empty or there are more than
    /// [`MAX_DEPTH`]; [`Error::PathConflict`], with the name that is taken, if the name exists or
    /// leads through a value. The tree is then as it was.
    pub fn insert(&mut self, name: &str, leaf: T) -> Result<(), Error> {
        // One part more than allowed shows that there are too many, however long the name is.
        let segments: Vec<&str> = name.split(SEPARATOR).take(MAX_DEPTH + 1).collect();
        if segments.len() > MAX_DEPTH {
            return Err(invalid(name, TOO_DEEP));
        }
        if segments.contains(&"") {
            return Err(invalid(name, EMPTY_PART));
        }
        let Some((last, branches)) = segments.split_last() else {
            return Err(invalid(name, EMPTY_PART));
        };
        let taken = |depth: usize| Error::PathConflict {
            name: segments[..=depth].join("."),
        };
        let mut tree = self;
        for (depth, segment) in branches.iter().enumerate() {
            // Only an existing name can be in the way. Below a branch that is added here everything
            // is free, so a refusal has added nothing.
            let position = match tree.position(segment) {
                Some(position) => position,
                None => {
                    let added = tree.add((*segment).to_owned(), Node::Branch(Tree::new()));
                    debug_assert!(added);
                    tree.entries.len() - 1
                }
            };
            let Node::Branch(branch) = &mut tree.entries[position].1 else {
                return Err(taken(depth));
            };
            tree = branch;
        }
        if tree.add((*last).to_owned(), Node::Leaf(leaf)) {
            Ok(())
        } else {
            Err(taken(branches.len()))
        }
    }

    /// Adds a value or a whole branch at this level: the way to build a tree from nested data.
    ///
    /// # Errors
    /// [`Error::InvalidPath`] if the name is empty or contains a dot, or if the branch makes the
    /// tree deeper than [`MAX_DEPTH`]; [`Error::PathConflict`] if the name exists. The tree is
    /// then as it was.
    pub fn push(&mut self, segment: impl Into<String>, node: Node<T>) -> Result<(), Error> {
        let segment = segment.into();
        if segment.is_empty() {
            return Err(invalid(&segment, EMPTY_PART));
        }
        if segment.contains(SEPARATOR) {
            return Err(invalid(&segment, "a nested key must not contain a dot"));
        }
        if matches!(&node, Node::Branch(branch) if branch.height() >= MAX_DEPTH) {
            return Err(invalid(&segment, TOO_DEEP));
        }
        if self.position(&segment).is_some() {
            return Err(Error::PathConflict { name: segment });
        }
        let added = self.add(segment, node);
        debug_assert!(added);
        Ok(())
    }

    /// What stands under a dotted name.
    pub fn node(&self, name: &str) -> Option<&Node<T>> {
        // The last part may be a value or a branch; all before it must be branches.
        let (branches, last) = match name.rsplit_once(SEPARATOR) {
            Some((branches, last)) => (Some(branches), last),
            None => (None, name),
        };
        let mut tree = self;
        for segment in branches.into_iter().flat_map(|name| name.split(SEPARATOR)) {
            let Node::Branch(branch) = tree.entry(segment)? else {
                return None;
            };
            tree = branch;
        }
        tree.entry(last)
    }

    /// The value under a dotted name.
    pub fn leaf(&self, name: &str) -> Option<&T> {
        match self.node(name)? {
            Node::Leaf(leaf) => Some(leaf),
            Node::Branch(_) => None,
        }
    }

    /// The level under a dotted name.
    pub fn branch(&self, name: &str) -> Option<&Tree<T>> {
        match self.node(name)? {
            Node::Leaf(_) => None,
            Node::Branch(branch) => Some(branch),
        }
    }

    /// The names of this level, in order, with what they stand for.
    pub fn entries(&self) -> impl ExactSizeIterator<Item = (&str, &Node<T>)> {
        self.entries
            .iter()
            .map(|(segment, node)| (segment.as_str(), node))
    }

    /// The names of this level, in order, with what they stand for.
    pub fn into_entries(self) -> impl ExactSizeIterator<Item = (String, Node<T>)> {
        self.entries.into_iter()
    }

    /// How many names this level has.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether this level has no names.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    fn position(&self, segment: &str) -> Option<usize> {
        self.index.find(segment, |at| &self.entries[at].0)
    }

    fn entry(&self, segment: &str) -> Option<&Node<T>> {
        self.position(segment).map(|at| &self.entries[at].1)
    }

    /// Adds an entry, or says `false` if the name is taken.
    fn add(&mut self, segment: String, node: Node<T>) -> bool {
        // Pushed first, because the index finds a name only by its position in the list.
        self.entries.push((segment, node));
        let entries = &self.entries;
        let added = self.index.insert(entries.len() - 1, |at| &entries[at].0);
        if !added {
            self.entries.pop();
        }
        added
    }

    /// How many levels there are, this one included.
    fn height(&self) -> usize {
        let below = self.entries.iter().map(|(_, node)| match node {
            Node::Leaf(_) => 0,
            Node::Branch(branch) => branch.height(),
        });
        1 + below.max().unwrap_or(0)
    }
}

impl<T> Default for Tree<T> {
    fn default() -> Self {
        Tree::new()
    }
}

impl<T: fmt::Debug> fmt::Debug for Tree<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.entries()).finish()
    }
}

/// Equal names and values, in the same order.
impl<T: PartialEq> PartialEq for Tree<T> {
    fn eq(&self, other: &Self) -> bool {
        self.entries == other.entries
    }
}

impl<T: Eq> Eq for Tree<T> {}

const EMPTY_PART: &str = "a part of it is empty";
const TOO_DEEP: &str = "it has too many levels";

fn invalid(name: &str, problem: &'static str) -> Error {
    Error::InvalidPath {
        name: name.to_owned(),
        problem,
    }
}

/// Appends the leaves below `prefix`, which is left as it was.
fn flatten<T>(tree: Tree<T>, prefix: &mut String, leaves: &mut Vec<(String, T)>) {
    let start = prefix.len();
    for (segment, node) in tree.entries {
        if start > 0 {
            prefix.push(SEPARATOR);
        }
        prefix.push_str(&segment);
        match node {
            Node::Leaf(leaf) => leaves.push((prefix.clone(), leaf)),
            Node::Branch(branch) => flatten(branch, prefix, leaves),
        }
        prefix.truncate(start);
    }
}
