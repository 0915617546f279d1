//! What describes a model's weights in addition to their layout: their format, which
//! tensors are one, which are buffers, which are extra state.

#[cfg(test)]
mod tests;

use std::collections::{HashMap, HashSet};

use serde::{Deserialize, Serialize};
use weightsync_core::{Dtype, Layout, TensorSpec, layout};

use crate::error::{Error, Result};
use crate::extract::{CrateOnly, Extracted, TensorData, WeightExtractor};
use crate::load::TensorView;
use crate::plain::is_extra_state;
use crate::strategy::Strategy;

/// The longest encoding of attributes, in bytes.
pub(crate) const MAX_ENCODED_BYTES: usize = 16 << 20;

const FORMAT: u8 = 1;

/// What describes a model's weights in addition to their layout.
///
/// **Guarantee.** A tensor is either sent or the alias of one that is: no alias
/// is named twice, is its own, or leads to another alias.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "WireAttributes", into = "WireAttributes")]
pub struct Attributes {
    wire: WireAttributes,
}

/// How they are written; the order of the fields is part of the format.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct WireAttributes {
    format: Strategy,
    ties: Vec<(String, String)>,
    extra_state: Vec<String>,
    buffers: Vec<String>,
}

/// Why attributes cannot be.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AttributesError {
    /// One tensor is said to be two others.
    #[error("tensor {alias:?} is tied to more than one other: name one")]
    TiedTwice {
        /// The tensor.
        alias: String,
    },
    /// Ties lead in a circle.
    #[error("the ties of tensor {alias:?} lead back to it: remove one of them")]
    TiedToItself {
        /// The tensor.
        alias: String,
    },
    /// Two tensors that are said to be one have different dtypes or shapes.
    #[error(
        "tensor {alias:?} cannot be tied to {of:?}: they have different dtypes or shapes; remove \
         the tie"
    )]
    TiedUnlike {
        /// The alias.
        alias: String,
        /// The tensor that it is said to be.
        of: String,
    },
    /// Two tensors were one when the model was set up, and are not any more.
    #[error(
        "tensor {alias:?} was tied to {of:?} when the model was set up and is not now: set up again"
    )]
    Untied {
        /// The alias.
        alias: String,
        /// The tensor that it was.
        of: String,
    },
    /// Bytes that are no attributes.
    #[error("malformed attributes of a model: {0}")]
    Malformed(&'static str),
}

impl Attributes {
    /// Those of weights in this format, without ties, extra state and buffers.
    pub fn new(format: Strategy) -> Self {
        let wire = WireAttributes {
            format,
            ..WireAttributes::default()
        };
        Self { wire }
    }

    /// The same with these ties: pairs of an alias and the tensor that it is. An
    /// alias of an alias becomes one of the tensor behind both.
    ///
    /// # Errors
    ///
    /// [`AttributesError::TiedTwice`] or [`AttributesError::TiedToItself`], as
    /// [`Error::Extract`].
    pub fn with_ties(mut self, ties: Vec<(String, String)>) -> Result<Self> {
        self.wire.ties = resolved(ties).map_err(|(name, error)| Error::extract(&name, error))?;
        Ok(self)
    }

    /// The same with the names of the tensors that are extra state.
    pub fn with_extra_state(mut self, names: Vec<String>) -> Self {
        self.wire.extra_state = names;
        self
    }

    /// The same with the names of the tensors that are buffers.
    pub fn with_buffers(mut self, names: Vec<String>) -> Self {
        self.wire.buffers = names;
        self
    }

    /// The sender's format.
    pub fn format(&self) -> Strategy {
        self.wire.format
    }

    /// Pairs of an alias, which is not sent, and the tensor that it is.
    pub fn ties(&self) -> &[(String, String)] {
        &self.wire.ties
    }

    /// The tensor that `alias` is, if that is one of its other names.
    pub fn tied_to(&self, alias: &str) -> Option<&str> {
        let mut ties = self.wire.ties.iter();
        ties.find(|(one, _)| one == alias)
            .map(|(_, of)| of.as_str())
    }

    /// The tensors that are extra state.
    pub fn extra_state(&self) -> &[String] {
        &self.wire.extra_state
    }

    /// The tensors that are buffers.
    pub fn buffers(&self) -> &[String] {
        &self.wire.buffers
    }

    /// Their binary form.
    ///
    /// # Errors
    ///
    /// [`AttributesError::Malformed`] if it would be longer than 16 MiB.
    pub fn encode(&self) -> Result<Vec<u8>, AttributesError> {
        let too_long = AttributesError::Malformed("they take more than 16 MiB");
        let bytes = postcard::to_extend(&self.wire, vec![FORMAT]).map_err(|_| too_long.clone())?;
        match bytes.len() > MAX_ENCODED_BYTES {
            true => Err(too_long),
            false => Ok(bytes),
        }
    }

    /// Reads what [`encode`](Self::encode) wrote; safe on any bytes.
    ///
    /// # Errors
    ///
    /// Any of [`AttributesError`].
    pub fn decode(bytes: &[u8]) -> Result<Self, AttributesError> {
        let malformed = AttributesError::Malformed;
        // Before anything is decoded: they come from a peer.
        if bytes.len() > MAX_ENCODED_BYTES {
            return Err(malformed("they take more than 16 MiB"));
        }
        // The format comes before everything else: a later one may have other fields.
        let (&format, bytes) = bytes.split_first().ok_or(malformed("they are empty"))?;
        if format != FORMAT {
            return Err(malformed("a format that this build does not read"));
        }
        let read = postcard::take_from_bytes::<WireAttributes>(bytes);
        let (wire, rest) = read.map_err(|_| malformed("not what a sender writes"))?;
        if !rest.is_empty() {
            return Err(malformed("bytes after the end"));
        }
        Self::try_from(wire)
    }

    /// What is sent of a model with this layout: everything but the aliases.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchTensor`] if a tie names a tensor that the layout lacks;
    /// [`AttributesError::TiedUnlike`], as [`Error::Extract`].
    pub fn sent_layout(&self, model: &Layout) -> Result<Layout> {
        // One of two tensors travels for both, so they have to be alike.
        for (alias, of) in self.ties() {
            let [alias_spec, of_spec] = [alias, of].map(|name| find(model, name));
            let (one, other) = (alias_spec?, of_spec?);
            if (one.dtype, &one.shape) != (other.dtype, &other.shape) {
                let (alias, of) = (alias.clone(), of.clone());
                let name = alias.clone();
                return Err(Error::extract(
                    &name,
                    AttributesError::TiedUnlike { alias, of },
                ));
            }
        }
        // A tied tensor travels once.
        let aliases = self.aliases();
        let sent = model
            .tensors()
            .iter()
            .filter(|spec| !aliases.contains_key(spec.name.as_str()));
        Ok(Layout::new(sent.map(|spec| named(spec, &spec.name)))?)
    }

    /// The whole model that `sent` is a part of: aliases follow after the rest.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchTensor`] if a tie names a tensor that was not sent, or an
    /// error of [`Layout::new`] if an alias has the name of one that was.
    pub fn model_layout(&self, sent: &Layout) -> Result<Layout> {
        let all = sent
            .tensors()
            .iter()
            .map(|spec| Ok(named(spec, &spec.name)));
        let aliases = self.ties().iter();
        let aliases = aliases.map(|(alias, of)| Ok(named(find(sent, of)?, alias)));
        Ok(Layout::new(
            all.chain(aliases).collect::<Result<Vec<_>>>()?,
        )?)
    }

    /// What was sent, as a worker's model with the layout `own` sees it: under
    /// those of a tensor's names that the model has, and with its own room for
    /// extra state. To be compared with `own`.
    ///
    /// # Errors
    ///
    /// As [`model_layout`](Self::model_layout).
    pub fn layout_for(&self, sent: &Layout, own: &Layout) -> Result<Layout> {
        if self.ties().is_empty() && sent == own {
            // With very many tensors, finding that out one by one takes longer than the copy.
            return Ok(sent.clone());
        }
        let names = self.names(Some(own));
        let specs = sent.tensors().iter().flat_map(|spec| {
            names.of(&spec.name).map(move |name| {
                let mut seen = named(spec, name);
                // The room for extra state is each model's own: only the state has to fit.
                if let Some(own) = own.tensor(name)
                    && is_extra_state(name, spec.dtype, &spec.shape)
                    && is_extra_state(name, own.dtype, &own.shape)
                {
                    seen.2 = own.shape.clone();
                }
                seen
            })
        });
        Ok(Layout::new(specs)?)
    }

    /// The tensors that were sent, each under all its names, or under those of
    /// them that a model with the layout `own` has.
    pub fn expand<'a>(
        &'a self,
        sent: &[TensorView<'a>],
        own: Option<&Layout>,
    ) -> Vec<TensorView<'a>> {
        let names = self.names(own);
        sent.iter()
            .flat_map(|view| names.of(view.name()).map(|name| view.renamed(name)))
            .collect()
    }

    fn aliases(&self) -> HashMap<&str, &str> {
        let ties = self.ties().iter();
        ties.map(|(alias, of)| (alias.as_str(), of.as_str()))
            .collect()
    }

    fn names<'a, 'o>(&'a self, own: Option<&'o Layout>) -> TensorNames<'a, 'o> {
        let mut aliases: HashMap<&str, Vec<&str>> = HashMap::new();
        for (alias, of) in self.ties() {
            aliases.entry(of).or_default().push(alias);
        }
        TensorNames { aliases, own }
    }
}

impl From<Attributes> for WireAttributes {
    fn from(attributes: Attributes) -> Self {
        attributes.wire
    }
}

/// The checks that every way in goes through.
impl TryFrom<WireAttributes> for Attributes {
    type Error = AttributesError;

    fn try_from(mut wire: WireAttributes) -> Result<Self, AttributesError> {
        let ties = wire.ties.iter().flat_map(|(alias, of)| [alias, of]);
        let names = ties.chain(&wire.extra_state).chain(&wire.buffers);
        let wrong = |name: &&String| name.is_empty() || name.len() > layout::MAX_NAME_BYTES;
        if names.filter(wrong).count() > 0 {
            return Err(AttributesError::Malformed("a name that no tensor can have"));
        }
        wire.ties = resolved(wire.ties).map_err(|(_, error)| error)?;
        Ok(Self { wire })
    }
}

/// The tensors that share their memory, as ties: every one after the first of
/// the same address, dtype, shape and strides is its alias. Tensors without
/// elements share nothing.
pub fn find_ties(tensors: &[Extracted<'_>]) -> Vec<(String, String)> {
    let mut first = HashMap::with_capacity(tensors.len());
    let mut ties = Vec::new();
    for tensor in tensors {
        let TensorData::InMemory(data) = &tensor.data else {
            continue;
        };
        // Empty tensors share places without being tied.
        if data.shape().contains(&0) {
            continue;
        }
        // One memory seen in two ways is not one tensor.
        let place = (data.address(), data.dtype(), data.shape(), data.strides());
        match first.entry(place) {
            std::collections::hash_map::Entry::Vacant(free) => {
                free.insert(tensor.name);
            }
            std::collections::hash_map::Entry::Occupied(of) => {
                ties.push((tensor.name.to_owned(), (*of.get()).to_owned()));
            }
        }
    }
    ties
}

/// A source that lends tied tensors once, leaving out the aliases.
///
/// **Guarantee.** It asks the source each time whether the ties still hold: an
/// alias that has become a tensor of its own is an error, never left behind. A
/// source may have a tied tensor under one of its names alone, whichever: a
/// partial update, say, or what has travelled once.
#[derive(Debug)]
pub struct TiedOnce<'a, E: ?Sized> {
    source: &'a E,
    attributes: &'a Attributes,
}

impl<'a, E: WeightExtractor + ?Sized> TiedOnce<'a, E> {
    /// The source, without the aliases that the attributes name.
    pub fn new(source: &'a E, attributes: &'a Attributes) -> Self {
        Self { source, attributes }
    }

    /// The ties as they are now. To be asked before anything is lent: a source
    /// may be locked then.
    fn now(&self) -> Result<Attributes> {
        Attributes::default().with_ties(self.source.ties()?)
    }

    /// The name under which each of a source's tensors travels; none for those
    /// that travel under the name of another.
    fn names<'n>(&'n self, now: &'n Attributes, lent: &[&'n str]) -> Result<Vec<Option<&'n str>>> {
        let now = now.aliases();
        // Which of them is the alias does not matter.
        let root = |name: &'n str| now.get(name).copied().unwrap_or(name);
        let aliases = self.attributes.aliases();
        let of = |name: &'n str| aliases.get(name).copied().unwrap_or(name);
        // The name of each tensor that travels, as the source has it.
        let mut found: HashMap<&str, &str> = HashMap::with_capacity(lent.len());
        let own = lent.iter().filter(|name| !aliases.contains_key(**name));
        found.extend(own.map(|name| (*name, *name)));
        let names = lent.iter().map(|&name| {
            let travels = of(name);
            // A source may lend the alias and not the tensor it is tied to: the alias then travels
            // for both.
            let first = *found.entry(travels).or_insert(name);
            if root(name) != root(first) {
                let untied = AttributesError::Untied {
                    alias: name.to_owned(),
                    of: first.to_owned(),
                };
                return Err(Error::extract(name, untied));
            }
            Ok((name == first).then_some(travels))
        });
        names.collect()
    }
}

impl<E: WeightExtractor + ?Sized> WeightExtractor for TiedOnce<'_, E> {
    fn layout(&self) -> Result<Layout> {
        let layout = self.source.layout()?;
        // Most models have no ties.
        if self.attributes.ties().is_empty() {
            return Ok(layout);
        }
        let specs = layout.tensors();
        let lent: Vec<_> = specs.iter().map(|spec| spec.name.as_str()).collect();
        // Asked for each send: a program may untie tensors between two of them.
        let now = self.now()?;
        let names = self.names(&now, &lent)?;
        let sent = specs.iter().zip(names);
        let sent = sent.filter_map(|(spec, name)| Some(named(spec, name?)));
        Ok(Layout::new(sent)?)
    }

    fn plain_bytes(&self, layout: &Layout, asked: CrateOnly) -> Option<Vec<&[u8]>> {
        match self.attributes.ties() {
            [] => self.source.plain_bytes(layout, asked),
            _ => None,
        }
    }

    fn extract(&self, take: &mut dyn FnMut(&[Extracted<'_>]) -> Result<()>) -> Result<()> {
        if self.attributes.ties().is_empty() {
            return self.source.extract(take);
        }
        let now = self.now()?;
        self.source.extract(&mut |tensors| {
            let lent: Vec<_> = tensors.iter().map(|tensor| tensor.name).collect();
            let names = self.names(&now, &lent)?;
            let sent = tensors.iter().zip(names).filter_map(|(tensor, name)| {
                Some(Extracted {
                    name: name?,
                    data: tensor.data.clone(),
                })
            });
            take(&sent.collect::<Vec<_>>())
        })
    }

    fn attributes(&self) -> Result<Attributes> {
        Ok(self.attributes.clone())
    }
}

/// The names under which tensors are handed over.
struct TensorNames<'a, 'o> {
    aliases: HashMap<&'a str, Vec<&'a str>>,
    own: Option<&'o Layout>,
}

impl<'a> TensorNames<'a, '_> {
    /// The names under which a sent tensor is handed over. If the model has none of them, the
    /// tensor's own name, so that the comparison reports the difference.
    fn of(&self, sent: &'a str) -> std::vec::IntoIter<&'a str> {
        let mut names = vec![sent];
        names.extend(self.aliases.get(sent).into_iter().flatten());
        if let Some(own) = self.own {
            names.retain(|name| own.index_of(name).is_some());
            if names.is_empty() {
                names.push(sent);
            }
        }
        names.into_iter()
    }
}

type Ties = Vec<(String, String)>;

/// Ties; none leads to another alias.
fn resolved(ties: Ties) -> Result<Ties, (String, AttributesError)> {
    let mut of = HashMap::with_capacity(ties.len());
    for (alias, target) in &ties {
        if of.insert(alias.as_str(), target.as_str()).is_some() {
            let alias = alias.clone();
            return Err((alias.clone(), AttributesError::TiedTwice { alias }));
        }
    }
    // Each alias is walked over once: what it leads to is noted.
    let mut roots: HashMap<&str, &str> = HashMap::with_capacity(ties.len());
    for (alias, _) in &ties {
        let mut at = alias.as_str();
        let mut passed = HashSet::new();
        let root = loop {
            if let Some(root) = roots.get(at) {
                break *root;
            }
            if !passed.insert(at) {
                // Ties may lead into a circle that does not contain the first alias.
                let in_circle = at.to_owned();
                let error = AttributesError::TiedToItself { alias: in_circle };
                return Err((alias.clone(), error));
            }
            match of.get(at) {
                Some(next) => at = next,
                None => break at,
            }
        };
        passed.remove(root);
        roots.extend(passed.into_iter().map(|name| (name, root)));
    }
    let resolved = ties.iter().map(|(alias, _)| {
        let root = roots.get(alias.as_str()).copied().unwrap_or(alias);
        (alias.clone(), root.to_owned())
    });
    Ok(resolved.collect())
}

fn find<'a>(layout: &'a Layout, name: &str) -> Result<&'a TensorSpec> {
    let found = layout.tensor(name);
    found.ok_or_else(|| Error::no_such_tensor(name, layout))
}

fn named(spec: &TensorSpec, name: &str) -> (String, Dtype, Vec<u64>) {
    (name.to_owned(), spec.dtype, spec.shape.clone())
}
