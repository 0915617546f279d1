//! What the models of the suite look like, and what a worker saw of them.

use std::hash::{DefaultHasher, Hash, Hasher};

use serde::{Deserialize, Serialize};
use weightsync_engine::{
    Attributes, Dtype, Error, Plain, Result, Run, SetSnapshot, Snapshot, StateDict, TensorDict,
    TensorRef, TensorView, Tensors,
};

use super::scale::Dice;

/// A kind of model. Its bytes are a function of the kind and one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Shape {
    /// Three tensors of so many 64-bit words in all (at least 8), every word of
    /// which is the number: a mix of two versions is seen anywhere.
    Words(u64),
    /// A tensor of every dtype, scalars, and tensors without elements.
    Dtypes,
    /// So many tensors of one word each.
    Many(u64),
    /// `F32` tensors, for casts.
    Floats,
    /// What a framework knows in addition to the tensors: see [`module`].
    Module,
}

/// The tensors of [`Shape::Words`].
pub(crate) const TENSORS: [&str; 3] = ["a.weight", "b.weight", "b.bias"];

impl Shape {
    /// A model of this kind.
    pub(crate) fn make(self, word: u64) -> Tensors {
        let mut tensors = Tensors::new();
        match self {
            Self::Words(total) => {
                for (name, len) in TENSORS.into_iter().zip(lengths(total)) {
                    put(
                        &mut tensors,
                        name,
                        Dtype::U64,
                        &[len],
                        &word.to_le_bytes().repeat(len as usize),
                    );
                }
            }
            Self::Dtypes => dtypes(&mut tensors, &mut Dice::new(word)),
            Self::Many(count) => {
                for index in 0..count {
                    let name = format!("layers.{}.bias.{index}", index % 97);
                    put(
                        &mut tensors,
                        &name,
                        Dtype::U64,
                        &[1],
                        &(word ^ index << 32).to_le_bytes(),
                    );
                }
            }
            Self::Floats => {
                let values: Vec<f32> = (0..97 * 5)
                    .map(|at| at as f32 * 0.25 - word as f32)
                    .collect();
                tensors
                    .insert("weight", [97, 5], &values[..])
                    .expect("they fit");
                tensors
                    .insert("scale", [], [word as f32 / 3.0])
                    .expect("it fits");
                tensors
                    .insert("steps", [2], [word as i64, -1])
                    .expect("they fit");
            }
            Self::Module => {
                let values = vec![word as f32; 7 * 3];
                tensors
                    .insert(EMBEDDING, [7, 3], &values)
                    .expect("they fit");
                tensors
                    .insert("norm.mean", [3], [word as f32, 0.5, -1.0])
                    .expect("they fit");
            }
        }
        tensors
    }

    /// Makes a model of [`Shape::Words`] that number, in place.
    pub(crate) fn fill(tensors: &mut Tensors, word: u64) {
        for name in TENSORS {
            tensors
                .slice_mut::<u64>(name)
                .expect("a tensor of words")
                .fill(word);
        }
    }
}

/// The tensor of [`Shape::Module`] that has another name as well.
const EMBEDDING: &str = "embed.weight";

/// Whether these are the tensors of [`Shape::Module`].
pub(crate) fn is_module(tensors: &Tensors) -> bool {
    tensors.names().next() == Some(EMBEDDING)
}

/// A model of [`Shape::Module`] as a framework has it: a tensordict with one
/// tensor under two names, a buffer, and extra state.
pub(crate) fn module(tensors: &Tensors) -> Result<TensorDict<'_>> {
    let lent = |name: &str| {
        let view = tensors.tensor(name)?;
        let tensor = TensorRef::new(view.dtype(), view.shape(), view.bytes());
        tensor.map_err(|error| Error::Extract {
            name: name.into(),
            source: error.into(),
        })
    };
    let mut module = StateDict::new();
    module.lend(EMBEDDING, lent(EMBEDDING)?)?;
    module.lend("head.weight", lent(EMBEDDING)?)?;
    module.lend("norm.mean", lent("norm.mean")?)?;
    module.mark_buffer("norm.mean")?;
    let steps = tensors.slice::<f32>(EMBEDDING)?[0] as i64;
    let state = Plain::from_iter([("steps", Plain::from(steps))]);
    module.insert_extra_state("norm", state)?;
    TensorDict::try_from(module)
}

/// A part of a model of [`Shape::Words`]: some tensors, each with a number of its
/// own.
pub(crate) fn part(total: u64, words: &[(String, u64)]) -> Tensors {
    let mut tensors = Tensors::new();
    for (name, word) in words {
        let place = TENSORS.iter().position(|known| known == name);
        let len = place.map_or(2, |place| lengths(total)[place]);
        put(
            &mut tensors,
            name,
            Dtype::U64,
            &[len],
            &word.to_le_bytes().repeat(len as usize),
        );
    }
    tensors
}

/// What a worker saw: one whole version of each of its models.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Seen {
    pub(crate) run: Run,
    pub(crate) sequence: u64,
    pub(crate) members: Vec<Model>,
}

/// One of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Model {
    pub(crate) id: String,
    pub(crate) version: u64,
    pub(crate) changed: bool,
    /// Of a model of words: the number of each tensor.
    pub(crate) words: Vec<u64>,
    /// Stands for every name, dtype, shape and byte.
    pub(crate) print: u64,
    pub(crate) attributes: Attributes,
}

impl Seen {
    /// Looks at everything.
    ///
    /// # Errors
    ///
    /// Where a mix of two versions was found.
    pub(crate) fn of(set: &SetSnapshot) -> Result<Self, String> {
        let members = set.members().iter();
        let members = members.map(|member| Model::of(&member.snapshot, member.changed));
        let members: Vec<_> = members.collect::<Result<_, _>>()?;
        let first = set.members().first().ok_or("a set without a model")?;
        Ok(Self {
            run: first.snapshot.run(),
            sequence: set.sequence(),
            members,
        })
    }

    /// The number of every word of its only model, and its version.
    pub(crate) fn one(&self) -> (u64, u64) {
        let [only] = &self.members[..] else {
            panic!("one model: {self:?}")
        };
        (only.version, only.word())
    }

    /// The number that every word of every model is.
    pub(crate) fn word(&self) -> u64 {
        let word = self.members[0].word();
        assert!(
            self.members.iter().all(|member| member.word() == word),
            "models of two sets: {self:?}"
        );
        word
    }

    pub(crate) fn versions(&self) -> Vec<u64> {
        self.members.iter().map(|member| member.version).collect()
    }

    pub(crate) fn words(&self) -> Vec<u64> {
        self.members.iter().map(Model::word).collect()
    }
}

impl Model {
    /// Looks at every byte of a version.
    ///
    /// # Errors
    ///
    /// Where a mix of two versions was found.
    pub(crate) fn of(snapshot: &Snapshot, changed: bool) -> Result<Self, String> {
        let attributes = snapshot.attributes();
        let sent: Vec<_> = snapshot.tensors().collect();
        // Each under all its names.
        let (words, print) = look(&attributes.expand(&sent, None))?;
        Ok(Self {
            id: snapshot.model().as_str().to_owned(),
            version: snapshot.version().0,
            changed,
            words,
            print,
            attributes: attributes.clone(),
        })
    }

    /// The number of every word.
    pub(crate) fn word(&self) -> u64 {
        let [first, rest @ ..] = &self.words[..] else {
            panic!("no words: {self:?}")
        };
        assert!(
            rest.iter().all(|word| word == first),
            "two versions: {self:?}"
        );
        *first
    }
}

/// Stands for every name, dtype, shape and byte of a worker's or trainer's own
/// tensors.
pub(crate) fn print_of(tensors: &Tensors) -> u64 {
    if is_module(tensors) {
        let module = module(tensors).expect("a model of the suite");
        return print_of_state(module.flat());
    }
    let views: Vec<_> = tensors
        .names()
        .map(|name| tensors.tensor(name).expect("its own name"))
        .collect();
    print(&views)
}

fn print_of_state(state: &StateDict<'_>) -> u64 {
    let tensors: Vec<_> = state
        .names()
        .map(|name| (name, state.tensor(name).expect("its own name")))
        .collect();
    let parts = tensors.iter().map(|(name, tensor)| {
        let bytes = tensor.contiguous_bytes().expect("it lies in order");
        (*name, tensor.dtype(), tensor.shape(), bytes)
    });
    print_parts(parts)
}

/// The number of each tensor of one's own model of words; `None` where a tensor
/// has several.
pub(crate) fn words_of(tensors: &Tensors) -> Vec<Option<u64>> {
    let words = TENSORS
        .iter()
        .map(|name| uniform(tensors.slice::<u64>(name).ok()?));
    words.collect()
}

fn look(views: &[TensorView<'_>]) -> Result<(Vec<u64>, u64), String> {
    let mut words = Vec::new();
    if views.iter().map(TensorView::name).eq(TENSORS) {
        for view in views {
            let elements = view.elements::<u64>().map_err(|error| error.to_string())?;
            let word = uniform(&elements);
            words.push(word.ok_or_else(|| torn(view.name(), &elements))?);
        }
        // Every word is known: there is nothing else to stand for.
        return Ok((words, 0));
    }
    Ok((words, print(views)))
}

fn uniform(words: &[u64]) -> Option<u64> {
    let (first, rest) = words.split_first()?;
    rest.iter().all(|word| word == first).then_some(*first)
}

fn torn(name: &str, words: &[u64]) -> String {
    let first = words.first();
    let at = words.iter().position(|word| Some(word) != first);
    format!(
        "TORN: word 0 of {name} is {first:?}, word {at:?} is {:?}",
        at.map(|at| words[at])
    )
}

fn print(views: &[TensorView<'_>]) -> u64 {
    let parts = views.iter();
    print_parts(parts.map(|view| (view.name(), view.dtype(), view.shape(), view.bytes())))
}

fn print_parts<'a>(
    parts: impl ExactSizeIterator<Item = (&'a str, Dtype, &'a [u64], &'a [u8])>,
) -> u64 {
    let mut hasher = DefaultHasher::new();
    parts.len().hash(&mut hasher);
    for (name, dtype, shape, bytes) in parts {
        name.hash(&mut hasher);
        dtype.name().hash(&mut hasher);
        shape.hash(&mut hasher);
        bytes.hash(&mut hasher);
    }
    hasher.finish()
}

fn lengths(total: u64) -> [u64; 3] {
    // Nothing here is a multiple of anything.
    let first = total / 2 + 1;
    [first, total - first - 1, 1]
}

fn dtypes(tensors: &mut Tensors, dice: &mut Dice) {
    for dtype in Dtype::ALL {
        // Lengths that fill whole bytes also where elements are smaller.
        for shape in [&[3, 8][..], &[8], &[0], &[4, 0, 2], &[]] {
            let elements: u64 = shape.iter().product();
            let bits = elements * u64::from(dtype.bits());
            if !bits.is_multiple_of(8) {
                continue;
            }
            let mut bytes = dice.bytes((bits / 8) as usize);
            if *dtype == Dtype::BOOL {
                bytes.iter_mut().for_each(|byte| *byte &= 1);
            }
            let name = format!("{}.{shape:?}", dtype.name());
            put(tensors, &name, *dtype, shape, &bytes);
        }
    }
}

fn put(tensors: &mut Tensors, name: &str, dtype: Dtype, shape: &[u64], bytes: &[u8]) {
    tensors
        .insert_bytes(name, dtype, shape.to_vec(), bytes)
        .expect("a tensor of the suite");
}
