//! The description of a version: its layout, run, number and digest, and who writes which of
//! its bytes.

mod parts;
mod serde_impl;
#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};

use crate::digest::Digest;
use crate::error::Error;
use crate::ids::WriterId;
use crate::layout::{ByteRange, Layout};
use crate::version::{Run, Version};

/// The most writers of one version.
pub const MAX_WRITERS: usize = 1 << 16;
/// The most ranges of all parts of one version together.
pub const MAX_RANGES: usize = 16 << 20;

/// The description of one version of a model.
///
/// Every manifest has passed the checks of [`Manifest::new`], also a manifest that was
/// deserialised. In JSON:
///
/// ```
/// use weightsync_core::{Dtype, Epoch, Layout, Manifest, Run, Version};
///
/// let layout = Layout::new([("bias".to_owned(), Dtype::F32, vec![4])])?;
/// let run = Run { epoch: Epoch(1), id: [0; 16] };
/// let manifest = Manifest::single_writer(layout.clone(), run, Version::FIRST, None)?;
///
/// let json = serde_json::to_value(&manifest)?;
/// assert_eq!(json, serde_json::json!({
///     "format": 1,
///     "run": { "epoch": 1, "id": "00000000000000000000000000000000" },
///     "version": 1,
///     "digest": null,
///     "layout_id": layout.id().to_string(),
///     "layout": [{ "name": "bias", "dtype": "F32", "shape": [4] }],
///     "parts": [{ "writer": 0, "ranges": [{ "offset": 0, "len": 64 }] }],
/// }));
/// assert_eq!(serde_json::from_value::<Manifest>(json)?, manifest);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    layout: Layout,
    run: Run,
    version: Version,
    digest: Option<Digest>,
    parts: Vec<Part>,
}

/// The bytes that one writer contributes to a version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// The writer; each has one part.
    pub writer: WriterId,
    /// The bytes the writer writes, in any order, counted from the start of the version. A range
    /// may hold several tensors, or a slice of one, and padding.
    pub ranges: Vec<ByteRange>,
}

impl Manifest {
    /// Describes a version that several writers make together.
    ///
    /// Exactly one writer must write each byte of every tensor; at most one writes padding.
    /// The digest may be unknown while it is still being made.
    ///
    /// ```
    /// use weightsync_core::manifest::Part;
    /// use weightsync_core::{ByteRange, Dtype, Epoch, Error, Layout, Manifest, Run, Version, WriterId};
    ///
    /// let layout = Layout::new([
    ///     ("embed.weight".to_owned(), Dtype::BF16, vec![512, 16]),
    ///     ("head.weight".to_owned(), Dtype::BF16, vec![512, 16]),
    /// ])?;
    /// let run = Run { epoch: Epoch(1), id: [7; 16] };
    /// let parts = vec![
    ///     Part::of_tensors(WriterId(0), &layout, [0])?,
    ///     Part::of_tensors(WriterId(1), &layout, [1])?,
    /// ];
    /// let manifest = Manifest::new(layout.clone(), run, Version(3), None, parts.clone())?;
    /// assert_eq!(manifest.parts().len(), 2);
    ///
    /// let error = Manifest::new(layout, run, Version(3), None, parts[..1].to_vec()).unwrap_err();
    /// assert!(matches!(error, Error::PartsMissing { name, .. } if name == "head.weight"));
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::NoVersion`] for version 0; [`Error::DuplicateWriter`], [`Error::RangeOutside`],
    /// [`Error::PartsOverlap`] and [`Error::PartsMissing`] about the parts; [`Error::TooLarge`]
    /// above [`MAX_WRITERS`] or [`MAX_RANGES`].
    pub fn new(
        layout: Layout,
        run: Run,
        version: Version,
        digest: Option<Digest>,
        parts: Vec<Part>,
    ) -> Result<Self, Error> {
        if version.is_none() {
            return Err(Error::NoVersion);
        }
        parts::check(&layout, &parts)?;
        Ok(Manifest {
            layout,
            run,
            version,
            digest,
            parts,
        })
    }

    /// Describes a version that writer 0 makes alone.
    ///
    /// # Errors
    /// [`Error::NoVersion`] for version 0.
    pub fn single_writer(
        layout: Layout,
        run: Run,
        version: Version,
        digest: Option<Digest>,
    ) -> Result<Self, Error> {
        let all = ByteRange {
            offset: 0,
            len: layout.bytes(),
        };
        // A layout may be empty, and a range must not be.
        let ranges = (!all.is_empty()).then_some(all).into_iter().collect();
        let part = Part {
            writer: WriterId(0),
            ranges,
        };
        Manifest::new(layout, run, version, digest, vec![part])
    }

    /// The same manifest with the digest, which is known only later.
    #[must_use]
    pub fn with_digest(self, digest: Digest) -> Self {
        Manifest {
            digest: Some(digest),
            ..self
        }
    }

    /// The tensors.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The run that published the version.
    pub fn run(&self) -> Run {
        self.run
    }

    /// The version's number within its run.
    pub fn version(&self) -> Version {
        self.version
    }

    /// The identity of the version's bytes, once it is known.
    pub fn digest(&self) -> Option<Digest> {
        self.digest
    }

    /// The parts of all writers, in the order given.
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }
}

impl Part {
    /// Whole tensors, given by their positions in [`Layout::tensors`]; neighbours become one range,
    /// and each takes the padding that follows it along.
    ///
    /// # Errors
    /// [`Error::NoSuchTensor`].
    pub fn of_tensors(
        writer: WriterId,
        layout: &Layout,
        tensors: impl IntoIterator<Item = usize>,
    ) -> Result<Self, Error> {
        let mut ranges: Vec<ByteRange> = Vec::new();
        for index in tensors {
            let range = parts::padded(layout, index)?;
            match ranges.last_mut() {
                // A tensor without elements has no bytes to write, and a range must not be empty.
                _ if range.is_empty() => {}
                Some(last) if last.end() == range.offset => last.len += range.len,
                _ => ranges.push(range),
            }
        }
        Ok(Part { writer, ranges })
    }

    /// How many bytes the writer writes, padding included.
    pub fn bytes(&self) -> u64 {
        self.ranges
            .iter()
            .fold(0, |bytes, range| bytes.saturating_add(range.len))
    }
}
