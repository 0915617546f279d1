//! A snapshot: one whole version that a worker holds.

mod private;

use std::path::Path;
use std::sync::{Arc, OnceLock};

use weightsync_core::{Digest, Layout, ModelId, Run, TensorRef, Version};

use crate::attributes::Attributes;
use crate::error::{Error, Result};
use crate::extract::{CrateOnly, Extracted, TensorData, WeightExtractor};
use crate::load::{TensorView, WeightLoader};
use crate::load_set::SetLoader;
use crate::mapping::Mapping;
use crate::publish::{self, Prepared};
use crate::safetensors_file;
use crate::tensors::{Element, typed};
use crate::transport::{Image, ModelSpec};

pub use self::private::{PrivateView, Written};

/// One whole version of a model, read in place.
///
/// **Guarantee.** A snapshot does not change while it (or a clone) is held, whatever the sender
/// does, and also after the sender's death. A snapshot in shared memory takes one of the sender's
/// slots until it is dropped; a worker that needs the weights for longer loads them, or
/// [copies](Self::to_owned_copy) them.
///
/// A snapshot can be sent again: by a worker that feeds workers of its own, or by a trainer that
/// goes back to an older version.
#[derive(Clone, Debug)]
pub struct Snapshot {
    model: ModelId,
    attributes: Arc<Attributes>,
    held: SnapshotMemory,
}

/// Where the bytes of a snapshot are.
#[derive(Clone, Debug)]
enum SnapshotMemory {
    /// In a slot of shared memory.
    Slot(weightsync_mem::Snapshot),
    /// In this process.
    Own(Arc<Own>),
}

/// A version in this process's own memory.
#[derive(Debug)]
struct Own {
    image: Image,
    run: Run,
    version: Version,
    published: OnceLock<Digest>,
}

impl Snapshot {
    /// A version that a transport has received, verified, and holds in memory
    /// of this process.
    ///
    /// # Errors
    ///
    /// [`Error::WrongImage`] if the image has another layout than the model.
    pub fn received(model: &ModelSpec, run: Run, version: Version, image: Image) -> Result<Self> {
        if image.layout() != &model.layout {
            return Err(Error::WrongImage {
                expected: model.layout.bytes(),
                got: image.layout().bytes(),
            });
        }
        Ok(Self {
            model: model.id.clone(),
            attributes: Arc::new(model.attributes.clone()),
            held: SnapshotMemory::Own(Arc::new(Own {
                image,
                run,
                version,
                published: OnceLock::new(),
            })),
        })
    }

    /// A version of any source of weights, read in one pass into memory of this process.
    ///
    /// # Errors
    ///
    /// Those of the source, and [`Error::Extract`] with what cannot be a model.
    pub fn of(
        model: &str,
        weights: &dyn WeightExtractor,
        run: Run,
        version: Version,
    ) -> Result<Self> {
        Self::read(ModelId::new(model)?, weights, run, version, None)
    }

    /// The same, in the memory of `spare`, if that has its layout.
    fn read(
        model: ModelId,
        weights: &dyn WeightExtractor,
        run: Run,
        version: Version,
        spare: Option<Image>,
    ) -> Result<Self> {
        let prepared = Prepared::new(model, weights)?;
        let spare = spare.filter(|image| *image.layout() == prepared.layout);
        // Memory that was used before needs no new pages from the system.
        let mut image = spare.unwrap_or_else(|| Image::zeros(&prepared.layout));
        publish::whole(&prepared, weights, &mut |sources| image.write(sources))?;
        let spec = ModelSpec {
            id: prepared.id,
            layout: prepared.layout,
            attributes: prepared.attributes,
        };
        Self::received(&spec, run, version, image)
    }

    /// Whether it lies in a slot of shared memory, which its writer needs back.
    pub fn holds_slot(&self) -> bool {
        matches!(self.held, SnapshotMemory::Slot(_))
    }

    /// The same, with the digest that the sender made and the transport has
    /// compared: workers then find it as [`published_digest`](Self::published_digest).
    #[must_use]
    pub fn with_digest(self, digest: Digest) -> Self {
        self.publish_digest(digest);
        self
    }

    pub(crate) fn of_slot(
        model: ModelId,
        attributes: Arc<Attributes>,
        slot: weightsync_mem::Snapshot,
    ) -> Self {
        Self {
            model,
            attributes,
            held: SnapshotMemory::Slot(slot),
        }
    }

    /// A copy in the memory of this process. Once the original is dropped, the copy takes none of
    /// the sender's slots.
    pub fn to_owned_copy(&self) -> Self {
        // What is in memory of this process is a copy already, and clones share it.
        let SnapshotMemory::Slot(slot) = &self.held else {
            return self.clone();
        };
        let image = Image::from_bytes(slot.layout(), slot.bytes());
        let image = image.unwrap_or_else(|_| unreachable!("a snapshot has its layout's length"));
        let copy = Self {
            model: self.model.clone(),
            attributes: self.attributes.clone(),
            held: SnapshotMemory::Own(Arc::new(Own {
                image,
                run: slot.run(),
                version: slot.version(),
                published: OnceLock::new(),
            })),
        };
        copy.with_digest_of(self)
    }

    /// The version as a mapping makes it, in the memory of this process: one pass over the bytes.
    /// The result keeps number and run. Its digest differs, because its bytes do.
    ///
    /// # Errors
    ///
    /// [`Error::Extract`] with every rule that does not fit.
    pub fn mapped(&self, mapping: &Mapping) -> Result<Self> {
        self.made_as(&mapping.extract(self), None)
    }

    /// The same version in another form, which `seen` makes of it; in the memory of
    /// `spare`, if that has its layout.
    pub(crate) fn made_as(&self, seen: &dyn WeightExtractor, spare: Option<Image>) -> Result<Self> {
        Self::read(self.model.clone(), seen, self.run(), self.version(), spare)
    }

    /// Whether the bytes are in the memory of this process alone, as in a
    /// [copy](Self::to_owned_copy). A forked child has such a snapshot, too.
    pub fn is_owned(&self) -> bool {
        matches!(self.held, SnapshotMemory::Own(_))
    }

    /// A copy of another version of the same model: in the memory of this one, if
    /// it is a copy that nobody else holds.
    pub(crate) fn replaced_by(mut self, lent: &Self) -> Self {
        let SnapshotMemory::Slot(slot) = &lent.held else {
            return lent.clone();
        };
        // Another holder would see the bytes change, so then a new copy is made.
        let own = match &mut self.held {
            SnapshotMemory::Own(own) => Arc::get_mut(own),
            SnapshotMemory::Slot(_) => None,
        };
        // Memory that is shared, or too large or small, is left to those who hold it.
        let Some(own) = own.filter(|own| own.image.layout() == slot.layout()) else {
            return lent.to_owned_copy();
        };
        own.image.overwrite(slot.bytes());
        own.run = slot.run();
        own.version = slot.version();
        // The digest was that of the bytes before.
        own.published = OnceLock::new();
        self.with_digest_of(lent)
    }

    /// The same, with the digest that another view of the version has by now.
    pub(crate) fn with_digest_of(self, other: &Self) -> Self {
        match other.published_digest() {
            Some(digest) => self.with_digest(digest),
            None => self,
        }
    }

    /// Whether both are of one version.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        self.version() == other.version() && self.run() == other.run()
    }

    /// Whether it is a copy that nobody else holds.
    pub(crate) fn is_alone(&self) -> bool {
        matches!(&self.held, SnapshotMemory::Own(own) if Arc::strong_count(own) == 1)
    }

    /// The model.
    pub fn model(&self) -> &ModelId {
        &self.model
    }

    /// The version's number in its run.
    pub fn version(&self) -> Version {
        match &self.held {
            SnapshotMemory::Slot(slot) => slot.version(),
            SnapshotMemory::Own(own) => own.version,
        }
    }

    /// The run of the version.
    pub fn run(&self) -> Run {
        match &self.held {
            SnapshotMemory::Slot(slot) => slot.run(),
            SnapshotMemory::Own(own) => own.run,
        }
    }

    /// Names, dtypes and shapes of the tensors that travel; a tied tensor is
    /// one of them.
    pub fn layout(&self) -> &Layout {
        match &self.held {
            SnapshotMemory::Slot(slot) => slot.layout(),
            SnapshotMemory::Own(own) => own.image.layout(),
        }
    }

    /// The model's attributes in addition to its layout: tied tensors, buffers, extra state.
    pub fn attributes(&self) -> &Attributes {
        &self.attributes
    }

    /// A tensor, by its own name or by a name it is tied to.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchTensor`].
    pub fn tensor(&self, name: &str) -> Result<TensorView<'_>> {
        let layout = self.layout();
        // A tied tensor has no place of its own: the tensor that it is tied to stands for it.
        let index = layout
            .index_of(name)
            .or_else(|| layout.index_of(self.attributes.tied_to(name)?));
        let index = index.ok_or_else(|| Error::no_such_tensor(name, layout))?;
        Ok(self.view(index))
    }

    /// One tensor's elements, in place.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchTensor`], or [`Error::WrongDtype`] if they are no `T`.
    pub fn slice<T: Element>(&self, name: &str) -> Result<&[T]> {
        let view = self.tensor(name)?;
        typed(name, view.dtype(), view.bytes())
    }

    /// Every tensor, in layout order; tied ones once.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = TensorView<'_>> {
        (0..self.layout().len()).map(|index| self.view(index))
    }

    /// All tensors at their places in the layout, padding included: as a transport
    /// that is not this crate's sends them.
    pub fn bytes(&self) -> &[u8] {
        match &self.held {
            SnapshotMemory::Slot(slot) => slot.bytes(),
            SnapshotMemory::Own(own) => own.image.bytes(),
        }
    }

    /// The memory of a version that nobody else holds, to write another one into;
    /// `None` if somebody does, or it lies in shared memory.
    pub fn into_image(self) -> Option<Image> {
        match self.held {
            SnapshotMemory::Slot(_) => None,
            SnapshotMemory::Own(own) => Arc::into_inner(own).map(|own| own.image),
        }
    }

    /// The digest of the bytes as this process sees them: one pass over them.
    pub fn digest(&self) -> Digest {
        match &self.held {
            SnapshotMemory::Slot(slot) => slot.digest(),
            SnapshotMemory::Own(own) => {
                let digest = Digest::of(own.image.layout(), own.image.bytes());
                digest.unwrap_or_else(|_| unreachable!("an image has its layout's length"))
            }
        }
    }

    /// The digest as the sender saw them, if it has made it (see
    /// [`SenderSetup::digest`](crate::SenderSetup::digest)).
    pub fn published_digest(&self) -> Option<Digest> {
        match &self.held {
            SnapshotMemory::Slot(slot) => slot.published_digest(),
            SnapshotMemory::Own(own) => own.published.get().copied(),
        }
    }

    /// Compares the bytes with the checksums the sender made while it copied.
    /// False if the sender made no checksums, or if this is a copy.
    ///
    /// # Errors
    ///
    /// Naming the first chunk that differs.
    pub fn verify_checksums(&self) -> Result<bool> {
        match &self.held {
            SnapshotMemory::Slot(slot) => Ok(slot.verify_checksums()?),
            SnapshotMemory::Own(_) => Ok(false),
        }
    }

    /// Loads the version into a model. Neither the sender nor the receiver is told.
    ///
    /// # Errors
    ///
    /// [`Error::WrongModel`] with every tensor that does not fit, before the model
    /// is touched; or the model's own.
    pub fn load_into(&self, model: &mut dyn WeightLoader) -> Result<()> {
        let model_id = self.model().as_str();
        SetLoader::new().with(model_id, model).load_one(self)
    }

    /// Writes the version as a safetensors file, whole or not at all, with its
    /// model, version and digest in the file's metadata. Returns the digest.
    ///
    /// # Errors
    ///
    /// [`Error::File`].
    pub fn save_safetensors(&self, path: impl AsRef<Path>) -> Result<Digest> {
        safetensors_file::save(self, path.as_ref())
    }

    /// Stores a digest where workers find it, if this is the sender's own view.
    pub(crate) fn publish_digest(&self, digest: Digest) {
        match &self.held {
            SnapshotMemory::Slot(slot) => {
                slot.publish_digest(digest);
            }
            SnapshotMemory::Own(own) => {
                let _ = own.published.set(digest);
            }
        }
    }

    pub(crate) fn tensor_bytes(&self, index: usize) -> &[u8] {
        match &self.held {
            SnapshotMemory::Slot(slot) => slot.tensor_bytes(index),
            SnapshotMemory::Own(own) => own.image.tensor(index),
        }
    }

    fn view(&self, index: usize) -> TensorView<'_> {
        let tensor = &self.layout().tensors()[index];
        TensorView::new(
            &tensor.name,
            tensor.dtype,
            &tensor.shape,
            self.tensor_bytes(index),
        )
    }
}

/// As the whole model: a tied tensor has all its names.
impl WeightExtractor for Snapshot {
    fn layout(&self) -> Result<Layout> {
        self.attributes.model_layout(Self::layout(self))
    }

    fn plain_bytes(&self, expected: &Layout, _: CrateOnly) -> Option<Vec<&[u8]>> {
        let layout = Self::layout(self);
        (layout == expected).then(|| {
            (0..layout.len())
                .map(|index| self.tensor_bytes(index))
                .collect()
        })
    }

    fn extract(&self, take: &mut dyn FnMut(&[Extracted<'_>]) -> Result<()>) -> Result<()> {
        // A source lends every name of the model. The sender then leaves the tied ones out again.
        let ties = self.attributes.ties().iter();
        let tied = ties.map(|(alias, of)| Ok(self.tensor(of)?.renamed(alias)));
        let lent = self.tensors().map(Ok).chain(tied).map(|view: Result<_>| {
            let view = view?;
            let data = TensorRef::new(view.dtype(), view.shape(), view.bytes());
            let data = data.map_err(|source| Error::extract(view.name(), source))?;
            Ok(Extracted {
                name: view.name(),
                data: TensorData::InMemory(data),
            })
        });
        take(&lent.collect::<Result<Vec<_>>>()?)
    }

    fn ties(&self) -> Result<Vec<(String, String)>> {
        Ok(self.attributes.ties().to_vec())
    }

    fn attributes(&self) -> Result<Attributes> {
        Ok((*self.attributes).clone())
    }
}
