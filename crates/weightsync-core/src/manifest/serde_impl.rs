//! Manifests in serde formats. The wire form is separate from [`Manifest`], and parsing checks
//! it.

use serde::de::{self, Deserialize, Deserializer};
use serde::ser::{Serialize, Serializer};

use super::{Manifest, Part};
use crate::digest::Digest;
use crate::error::Error;
use crate::layout::{Layout, LayoutId};
use crate::version::{Run, Version};

const FORMAT: u32 = 1;

#[derive(serde::Serialize)]
#[serde(rename = "Manifest")]
struct WrittenManifest<'a> {
    format: u32,
    run: Run,
    version: Version,
    digest: Option<Digest>,
    layout_id: LayoutId,
    layout: &'a Layout,
    parts: &'a [Part],
}

/// Fields that it does not know are skipped: a later build may add some.
#[derive(serde::Deserialize)]
#[serde(rename = "Manifest")]
struct ReadManifest {
    format: u32,
    run: Run,
    version: Version,
    digest: Option<Digest>,
    layout_id: LayoutId,
    layout: Layout,
    parts: Vec<Part>,
}

impl Serialize for Manifest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        WrittenManifest {
            format: FORMAT,
            run: self.run,
            version: self.version,
            digest: self.digest,
            layout_id: self.layout.id(),
            layout: &self.layout,
            parts: &self.parts,
        }
        .serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Manifest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        parse(ReadManifest::deserialize(deserializer)?).map_err(de::Error::custom)
    }
}

fn parse(read: ReadManifest) -> Result<Manifest, Error> {
    // Before everything else: another format may mean other things by the same names.
    if read.format != FORMAT {
        return Err(Error::UnknownFormat {
            what: "manifest",
            got: read.format,
            supported: FORMAT,
        });
    }
    // The id is stated so that a damaged list of tensors cannot pass for another model's.
    if read.layout_id != read.layout.id() {
        return Err(Error::LayoutId {
            expected: read.layout_id,
            got: read.layout.id(),
        });
    }
    // The checks of a manifest that is made here hold for one that was read, too.
    Manifest::new(read.layout, read.run, read.version, read.digest, read.parts)
}
