//! A nested tree of tensors.

use weightsync_core::{Dtype, Layout, Node, TensorRef, Tree, names};

use super::{StateDict, Strategy};
use crate::attributes::Attributes;
use crate::error::Result;
use crate::extract::{Extracted, WeightExtractor};
use crate::load::{TensorView, WeightLoader};
use crate::plain::{Plain, extra_state_name};
use crate::tensors::Element;

/// Tensors under nested names, with buffers and extra state, as
/// [`StateDict`] has them under dotted ones.
///
/// **Guarantee.** A name is a tensor or a level of further names, never both.
///
/// ```
/// use weightsync::model::{StateDict, TensorDict};
///
/// let mut actor = TensorDict::new();
/// actor.insert("weight", [2], [1.0_f32, 2.0])?;
/// let mut policy = TensorDict::new();
/// policy.nest("actor", actor)?;
/// assert_eq!(*policy.flat().slice::<f32>("actor.weight")?, [1.0, 2.0]);
/// assert!(policy.insert("actor", [1], [0.0_f32]).is_err());
/// # Ok::<(), weightsync::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct TensorDict<'a> {
    /// Every name of `flat`; what it stands for is found there.
    tree: Tree<()>,
    flat: StateDict<'a>,
}

impl<'a> TensorDict<'a> {
    /// No tensors.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a parameter of its own, or replaces the one of that name.
    ///
    /// # Errors
    ///
    /// Those of [`StateDict::insert`];
    /// [`PathConflict`](weightsync_core::Error::PathConflict) if a part of the name
    /// is a tensor, or all of it a level;
    /// [`InvalidPath`](weightsync_core::Error::InvalidPath) if a part of it is empty.
    pub fn insert<T: Element>(
        &mut self,
        name: &str,
        shape: impl Into<Vec<u64>>,
        data: impl AsRef<[T]>,
    ) -> Result<()> {
        self.grown(name, |flat| flat.insert(name, shape, data))
    }

    /// The same for any dtype: contiguous, row-major, little-endian bytes.
    ///
    /// # Errors
    ///
    /// As [`insert`](Self::insert).
    pub fn insert_bytes(
        &mut self,
        name: &str,
        dtype: Dtype,
        shape: impl Into<Vec<u64>>,
        bytes: &[u8],
    ) -> Result<()> {
        self.grown(name, |flat| flat.insert_bytes(name, dtype, shape, bytes))
    }

    /// Adds a parameter that lies somewhere else, at any strides.
    ///
    /// # Errors
    ///
    /// As [`insert`](Self::insert).
    pub fn lend(&mut self, name: &str, tensor: TensorRef<'a>) -> Result<()> {
        self.grown(name, |flat| flat.lend(name, tensor))
    }

    /// Says that a tensor is a buffer.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchTensor`](crate::Error::NoSuchTensor).
    pub fn mark_buffer(&mut self, name: &str) -> Result<()> {
        self.flat.mark_buffer(name)
    }

    /// Adds or replaces the extra state of a level; the root's name is empty.
    ///
    /// # Errors
    ///
    /// As [`insert`](Self::insert), and [`StateDict::insert_extra_state`].
    pub fn insert_extra_state(&mut self, level: &str, state: Plain) -> Result<()> {
        let name = extra_state_name(level);
        self.grown(&name, |flat| flat.insert_extra_state(level, state))
    }

    /// Changes the extra state of a level in the room that it has.
    ///
    /// # Errors
    ///
    /// As [`StateDict::set_extra_state`].
    pub fn set_extra_state(&mut self, level: &str, state: Plain) -> Result<()> {
        self.flat.set_extra_state(level, state)
    }

    /// Puts a whole tree under a name that is free.
    ///
    /// # Errors
    ///
    /// [`PathConflict`](weightsync_core::Error::PathConflict) or
    /// [`InvalidPath`](weightsync_core::Error::InvalidPath).
    pub fn nest(&mut self, name: &str, part: TensorDict<'a>) -> Result<()> {
        let conflict = || weightsync_core::Error::PathConflict {
            name: name.to_owned(),
        };
        if self.tree.node(name).is_some() {
            return Err(conflict().into());
        }
        // On a copy: a name in the middle may be refused.
        let mut tree = self.tree.clone();
        for below in part.flat.names() {
            tree.insert(&format!("{name}.{below}"), ())?;
        }
        self.tree = tree;
        self.flat.absorb(name, part.flat);
        Ok(())
    }

    /// The level under a name, lent.
    pub fn level(&self, name: &str) -> Option<TensorDict<'_>> {
        let tree = self.tree.branch(name)?.clone();
        let flat = self.flat.by_reference(&format!("{name}."));
        Some(TensorDict { tree, flat })
    }

    /// The names of the topmost level, each with whether it is a tensor.
    pub fn entries(&self) -> impl ExactSizeIterator<Item = (&str, bool)> {
        let entries = self.tree.entries();
        entries.map(|(name, node)| (name, matches!(node, Node::Leaf(()))))
    }

    /// The same by dotted names.
    pub fn flat(&self) -> &StateDict<'a> {
        &self.flat
    }

    /// Adds what `insert` adds to the flat form, if the name can be nested.
    fn grown(
        &mut self,
        name: &str,
        insert: impl FnOnce(&mut StateDict<'a>) -> Result<()>,
    ) -> Result<()> {
        // A leaf of this name is replaced, and the tree stays as it is.
        if self.tree.leaf(name).is_some() {
            return insert(&mut self.flat);
        }
        // Checked on a tree of its own first, so that nothing stays behind if `insert` fails.
        can_be_added(&self.tree, name)?;
        insert(&mut self.flat)?;
        Ok(self.tree.insert(name, ())?)
    }
}

/// Nests the names.
impl<'a> TryFrom<StateDict<'a>> for TensorDict<'a> {
    type Error = crate::Error;

    fn try_from(flat: StateDict<'a>) -> Result<Self> {
        let tree = Tree::from_dotted(flat.names().map(|name| (name, ())))?;
        Ok(Self { tree, flat })
    }
}

impl<'a> From<TensorDict<'a>> for StateDict<'a> {
    fn from(tree: TensorDict<'a>) -> Self {
        tree.flat
    }
}

impl WeightExtractor for TensorDict<'_> {
    fn layout(&self) -> Result<Layout> {
        WeightExtractor::layout(&self.flat)
    }

    fn extract(&self, take: &mut dyn FnMut(&[Extracted<'_>]) -> Result<()>) -> Result<()> {
        self.flat.extract(take)
    }

    fn ties(&self) -> Result<Vec<(String, String)>> {
        self.flat.ties()
    }

    fn attributes(&self) -> Result<Attributes> {
        self.flat.described_as(Strategy::TensorDict)
    }
}

impl WeightLoader for TensorDict<'_> {
    fn layout(&self) -> Result<Layout> {
        WeightLoader::layout(&self.flat)
    }

    fn shape(&mut self, layout: &Layout) -> Result<bool> {
        if !self.flat.is_empty() {
            return Ok(false);
        }
        let zeros = StateDict::zeros(layout, &Attributes::default())?;
        *self = zeros.try_into()?;
        Ok(true)
    }

    fn load(&mut self, tensors: &[TensorView<'_>]) -> Result<()> {
        self.flat.load(tensors)
    }
}

/// The first of a name's levels that exists decides.
fn can_be_added(tree: &Tree<()>, name: &str) -> Result<(), weightsync_core::Error> {
    let conflict = |name: &str| weightsync_core::Error::PathConflict {
        name: name.to_owned(),
    };
    // Its own form first: no empty part, not too deep.
    Tree::new().insert(name, ())?;
    let ends = name
        .match_indices('.')
        .map(|(end, _)| end)
        .take(names::MAX_DEPTH);
    // No tensor may have others below it.
    for end in ends {
        if tree.leaf(&name[..end]).is_some() {
            return Err(conflict(&name[..end]));
        }
    }
    match tree.node(name) {
        Some(_) => Err(conflict(name)),
        None => Ok(()),
    }
}
