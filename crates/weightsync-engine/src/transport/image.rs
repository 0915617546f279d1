//! One version's bytes in this process's own memory.

use std::io::Read;

use memmap2::MmapMut;
use weightsync_core::Layout;
use weightsync_mem::stream_copy_slice;
use zerocopy::IntoBytes;

use crate::error::{Error, Result};
use crate::transport::Source;

/// What is copied at once, in bytes: large enough to be streamed.
const PART: usize = 8 << 20;

/// The bytes of one version, laid out as its layout says, in memory of this
/// process: what a transport without shared memory stages into and hands over.
///
/// ```
/// use weightsync::layout::Layout;
/// use weightsync::{Dtype, transport::{CopyOptions, Image, Source}};
///
/// let layout = Layout::new([("bias".to_owned(), Dtype::F32, vec![2])])?;
/// let mut image = Image::zeros(&layout);
/// image.write(&[Source::Bytes(&[0, 0, 128, 63, 0, 0, 0, 64])])?;
/// assert_eq!(image.tensor(0)[4..], [0, 0, 0, 64]);
/// # Ok::<(), weightsync::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Image {
    layout: Layout,
    memory: ImageMemory,
}

/// Memory in which tensors are aligned for every element type.
#[derive(Debug)]
enum ImageMemory {
    Words(Vec<u64>),
    /// In huge pages where the kernel has some: to take 1 GiB in small ones costs more than to read it
    /// from a file.
    Pages(MmapMut),
}

impl ImageMemory {
    /// From so many bytes on, memory is mapped.
    const LARGE: usize = 4 << 20;

    /// Zeros.
    fn new(bytes: usize) -> Self {
        if bytes >= Self::LARGE
            && let Ok(pages) = MmapMut::map_anon(bytes)
        {
            // A kernel without huge pages uses small ones.
            #[cfg(target_os = "linux")]
            let _ = pages.advise(memmap2::Advice::HugePage);
            return Self::Pages(pages);
        }
        // Rounded to words. A layout is a whole number of them.
        Self::Words(vec![0; bytes / 8])
    }
}

impl Clone for ImageMemory {
    fn clone(&self) -> Self {
        match self {
            Self::Words(words) => Self::Words(words.clone()),
            Self::Pages(pages) => {
                let mut copy = Self::new(pages.len());
                match &mut copy {
                    Self::Pages(copy) => stream_copy_slice(copy, pages),
                    Self::Words(copy) => copy.as_mut_bytes().copy_from_slice(pages),
                }
                copy
            }
        }
    }
}

impl Image {
    /// Zeros.
    pub fn zeros(layout: &Layout) -> Self {
        Self {
            layout: layout.clone(),
            memory: ImageMemory::new(layout.bytes() as usize),
        }
    }

    /// From bytes that came from somewhere else; padding is set to zero.
    ///
    /// # Errors
    ///
    /// [`Error::WrongImage`] if they are not as many as the layout has.
    pub fn from_bytes(layout: &Layout, bytes: &[u8]) -> Result<Self> {
        if bytes.len() as u64 != layout.bytes() {
            return Err(Error::WrongImage {
                expected: layout.bytes(),
                got: bytes.len() as u64,
            });
        }
        let mut image = Self::zeros(layout);
        image.overwrite(bytes);
        Ok(image)
    }

    /// From a file or a connection that has them next: exactly as many as the
    /// layout has are read, and padding is set to zero.
    ///
    /// The memory is taken before the first byte comes: make sure that a layout
    /// from outside may be that large.
    ///
    /// # Errors
    ///
    /// Those of the source; [`UnexpectedEof`](std::io::ErrorKind::UnexpectedEof)
    /// if it has fewer.
    pub fn read_from(layout: &Layout, source: &mut dyn Read) -> std::io::Result<Self> {
        let mut image = Self::zeros(layout);
        source.read_exact(image.bytes_mut())?;
        image.clear_padding();
        Ok(image)
    }

    /// Names, dtypes, shapes and places of the tensors.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// All tensors at their places, padding included.
    pub fn bytes(&self) -> &[u8] {
        match &self.memory {
            ImageMemory::Words(words) => words.as_bytes(),
            ImageMemory::Pages(pages) => pages,
        }
    }

    /// One tensor's bytes, by its index in the layout.
    ///
    /// # Panics
    ///
    /// If the layout has no such index.
    pub fn tensor(&self, index: usize) -> &[u8] {
        let range = self.layout.tensors()[index].range;
        &self.bytes()[range.offset as usize..][..range.len as usize]
    }

    /// Every tensor's place, in layout order.
    pub fn tensors_mut(&mut self) -> Vec<&mut [u8]> {
        let layout = self.layout.clone();
        let mut rest = self.bytes_mut();
        let mut at = 0;
        // Tensors follow each other in the image, so one split after another hands each its place.
        let mut places = Vec::with_capacity(layout.len());
        for tensor in layout.tensors() {
            let start = tensor.range.offset as usize;
            let (_, tail) = rest.split_at_mut(start - at);
            let (place, tail) = tail.split_at_mut(tensor.range.len as usize);
            places.push(place);
            at = start + tensor.range.len as usize;
            rest = tail;
        }
        places
    }

    /// Writes every tensor, in layout order.
    ///
    /// # Errors
    ///
    /// [`Error::Extract`] with the first failure of a [`Source::Fill`].
    ///
    /// # Panics
    ///
    /// If there is not one source per tensor, or one has another length.
    pub fn write(&mut self, sources: &[Source<'_>]) -> Result<()> {
        let layout = self.layout.clone();
        assert_eq!(sources.len(), layout.len(), "one source per tensor");
        let places = self.tensors_mut();
        for ((place, source), tensor) in places.into_iter().zip(sources).zip(layout.tensors()) {
            match source {
                Source::Bytes(bytes) => place.copy_from_slice(bytes),
                Source::Fill(fill) => fill(place).map_err(|source| Error::Extract {
                    name: tensor.name.clone(),
                    source,
                })?,
            }
        }
        Ok(())
    }

    /// Takes other bytes of the same layout into the same memory; padding is set
    /// to zero.
    ///
    /// # Panics
    ///
    /// If they are not as many as the layout has.
    pub(crate) fn overwrite(&mut self, bytes: &[u8]) {
        let places = self.bytes_mut();
        assert_eq!(places.len(), bytes.len(), "bytes of another layout");
        // In parts: where both are hundreds of megabytes and aligned differently,
        // one memcpy of all takes three times as long (glibc, Zen 3).
        for (place, part) in places.chunks_mut(PART).zip(bytes.chunks(PART)) {
            stream_copy_slice(place, part);
        }
        self.clear_padding();
    }

    /// Sets the bytes between the tensors to zero, as every layout has them.
    pub fn clear_padding(&mut self) {
        let layout = self.layout.clone();
        for gap in layout.padding() {
            if let Some(gap) = gap.of_mut(self.bytes_mut()) {
                gap.fill(0);
            }
        }
    }

    /// All tensors at their places, to be written as they come from somewhere else,
    /// padding included: [`clear_padding`](Self::clear_padding) afterwards.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        match &mut self.memory {
            ImageMemory::Words(words) => words.as_mut_bytes(),
            ImageMemory::Pages(pages) => pages,
        }
    }
}
