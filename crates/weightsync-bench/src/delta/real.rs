//! Versions of models that were really trained: pairs of safetensors files, as `bench/delta` makes
//! them.

use std::error::Error;
use std::fs;
use std::hint::black_box;
use std::path::Path;
use std::time::Instant;

use serde::Deserialize;
use weightsync_core::delta::{BitPattern, Codec, Scratch};
use weightsync_engine::{Layout, SafetensorsFile, TensorData, WeightExtractor};

use super::pages::Pages;
use super::passes::{self, Deltas, Pass, SPAN_BYTES, Times};
use super::peers::Peers;
use super::{Row, bytes, timed};

/// What says which pairs a folder has.
const INDEX: &str = "pairs.json";

/// Two consecutive versions.
pub struct Pair {
    case: String,
    old: Pages,
    new: Pages,
    /// How each span is read.
    patterns: Vec<BitPattern>,
    /// What they have without padding.
    elements: u64,
}

/// Where a pair is.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Place {
    pub case: String,
    old: String,
    new: String,
}

/// The pairs of a folder.
pub fn places(folder: &Path) -> Result<Vec<Place>, Box<dyn Error>> {
    let index = folder.join(INDEX);
    let of = |error: &dyn Error| format!("{}: {error}", index.display());
    let text = fs::read(&index).map_err(|error| of(&error))?;
    Ok(serde_json::from_slice(&text).map_err(|error| of(&error))?)
}

impl Place {
    pub fn read(self, folder: &Path) -> Result<Pair, Box<dyn Error>> {
        let (layout, old) = image(&folder.join(&self.old))?;
        let (other, new) = image(&folder.join(&self.new))?;
        if layout != other {
            return Err(format!(
                "{} and {} do not have the same \
                                tensors",
                self.old, self.new
            )
            .into());
        }
        let elements = layout.tensors().iter();
        Ok(Pair {
            case: self.case,
            old,
            new,
            patterns: (0..layout.bytes())
                .step_by(SPAN_BYTES)
                .map(|start| BitPattern::of_span(&layout, start))
                .collect(),
            elements: elements
                .map(|tensor| tensor.shape.iter().product::<u64>())
                .sum(),
        })
    }
}

/// A version's bytes as they lie in a slot.
fn image(path: &Path) -> Result<(Layout, Pages), Box<dyn Error>> {
    let file = SafetensorsFile::open(path)?;
    let layout = file.layout()?;
    let mut image = Pages::new(usize::try_from(layout.bytes())?);
    // Between tensors.
    image.fill(0);
    file.extract(&mut |tensors| {
        for (tensor, spec) in tensors.iter().zip(layout.tensors()) {
            let place = spec.range.of_mut(&mut image);
            let read = match (&tensor.data, place) {
                (TensorData::Read { read, .. }, Some(place)) => read(place),
                _ => Err(std::io::ErrorKind::Unsupported.into()),
            };
            read.map_err(|source| weightsync_engine::Error::File {
                action: "reading",
                path: path.into(),
                source: source.into(),
            })?;
        }
        Ok(())
    })?;
    Ok((layout, image))
}

const CODECS: usize = Codec::ALL.len();

/// What was measured of a pair.
#[derive(Clone, Copy, Debug, Default)]
pub struct Figures {
    /// Seconds.
    memcpy: f64,
    changes: u64,
    /// By codec, in their order.
    coded: [Coded; CODECS],
}

/// What one codec makes of it.
#[derive(Clone, Copy, Debug, Default)]
struct Coded {
    encode: Pass,
    apply: Pass,
    bytes: u64,
}

impl Pair {
    /// Codes it and puts it in, in rounds; whatever was put in is compared.
    pub fn measure(&self, rounds: usize) -> Result<Figures, Box<dyn Error>> {
        let mut image = Pages::new(self.old.len());
        let mut scratch = [Scratch::new()];
        let mut deltas: Deltas = vec![Vec::new(); self.patterns.len()];
        let mut times: [[Times; 2]; CODECS] = Default::default();
        let mut memcpys = Times::default();
        let mut figures = Figures::default();
        // The first round warms caches and faults memory in.
        for round in 0..rounds + 1 {
            if round == 1 {
                (times, memcpys) = Default::default();
            }
            let begun = Instant::now();
            image.copy_from_slice(black_box(&self.old));
            let memcpy = begun.elapsed().as_secs_f64();
            memcpys.push(begun, memcpy);
            let coded = &mut figures.coded;
            for ((&codec, coded), times) in Codec::ALL.iter().zip(coded).zip(&mut times) {
                let [encodes, applies] = times;
                let (patterns, old, new) = (&self.patterns[..], &self.old[..], &self.new[..]);
                let begun = Instant::now();
                let changes = passes::code(patterns, codec, old, new, &mut deltas, &mut scratch)?;
                encodes.push(begun, memcpy);
                image.copy_from_slice(old);
                let begun = Instant::now();
                passes::put(patterns, &deltas, &mut image, false, &mut scratch)?;
                applies.push(begun, memcpy);
                passes::check(&image, new)?;
                figures.changes = changes;
                coded.bytes = deltas.iter().map(|delta| delta.len() as u64).sum();
            }
        }
        for (coded, times) in figures.coded.iter_mut().zip(times) {
            [coded.encode, coded.apply] = times.map(|times| times.median());
        }
        figures.memcpy = memcpys.median().seconds;
        Ok(figures)
    }

    /// Of an element, in bytes.
    fn width(&self) -> usize {
        self.patterns.first().map_or(1, |pattern| pattern.width())
    }
}

impl Figures {
    fn share(&self, pair: &Pair) -> f64 {
        self.changes as f64 / pair.elements.max(1) as f64
    }

    /// What the rows are called.
    pub fn label(&self, pair: &Pair) -> String {
        format!("{} ({:.2} % changed)", pair.case, self.share(pair) * 100.0)
    }

    pub fn rows(&self, pair: &Pair) -> Vec<Row> {
        let label = self.label(pair);
        let coded = Codec::ALL
            .iter()
            .map(|codec| codec.as_str())
            .zip(&self.coded);
        let rows = coded.flat_map(|(codec, coded)| {
            let timed = |what: &str, pass| {
                timed(
                    &format!("{label}: {codec}, {what}"),
                    pass,
                    self.memcpy,
                    None,
                )
            };
            let each = coded.bytes as f64 / self.changes.max(1) as f64;
            [
                timed("compare + encode", &coded.encode),
                bytes(&label, codec, pair.width(), each, None),
                whole(&label, codec, coded.bytes, pair.old.len()),
                timed("decode + apply", &coded.apply),
            ]
        });
        rows.collect()
    }

    /// The others, given the same pair.
    pub fn compared(&self, pair: &Pair, peers: &Peers) -> Result<Vec<Row>, Box<dyn Error>> {
        let theirs = peers.measure(&pair.old, &pair.new, pair.width())?;
        let (label, percent) = (self.label(pair), self.share(pair) * 100.0);
        // The last codec makes the fewest bytes.
        let least = &self.coded[CODECS - 1];
        let rows = theirs.iter();
        rows.map(|theirs| theirs.row(&label, percent, self.changes, least.bytes))
            .collect()
    }
}

/// The bytes of a version that travel, compared with all its bytes.
fn whole(label: &str, codec: &str, delta: u64, dense: usize) -> Row {
    let mib = |bytes: f64| bytes / f64::from(1 << 20);
    Row {
        case: format!("{label}: {codec}, the delta compared with all bytes"),
        value: mib(delta as f64),
        unit: "MiB",
        baseline: mib(dense as f64),
        ratio: delta as f64 / dense.max(1) as f64,
        target: None,
        met: None,
    }
}

#[cfg(test)]
mod tests {
    use safetensors::tensor::{Dtype, TensorView, serialize_to_file};

    use super::*;

    /// A folder with a pair of versions of two tensors, of which the first ends within a line.
    fn folder() -> tempfile::TempDir {
        let folder = tempfile::tempdir().expect("a folder");
        for (name, value) in [("a.safetensors", 1_u8), ("b.safetensors", 2)] {
            let (first, second) = (vec![value; 2 * 3], vec![7_u8; 2 * 1000]);
            let tensors =
                [("first", &first, 3), ("second", &second, 1000)].map(|(name, data, n)| {
                    let view = TensorView::new(Dtype::BF16, vec![n], data).expect("a tensor");
                    (name, view)
                });
            serialize_to_file(tensors, None, &folder.path().join(name)).expect("a file");
        }
        folder
    }

    fn index(folder: &tempfile::TempDir, text: &str) {
        fs::write(folder.path().join(INDEX), text).expect("an index");
    }

    #[test]
    fn pair_is_read_coded_and_reported() {
        let folder = folder();
        let text = r#"[{"case": "x", "old": "a.safetensors", "new": "b.safetensors"}]"#;
        index(&folder, text);
        let mut places = places(folder.path()).unwrap();
        let pair = places.remove(0).read(folder.path()).unwrap();
        assert_eq!((pair.elements, pair.width()), (1003, 2));
        assert_eq!((pair.old[5], pair.new[5], pair.new[6]), (1, 2, 0));
        let figures = pair.measure(1).unwrap();
        assert_eq!(figures.changes, 3);
        let rows = figures.rows(&pair);
        assert_eq!(rows.len(), 4 * CODECS);
        for row in rows {
            assert!(row.case.starts_with("x (0.30 % changed): "), "{}", row.case);
            assert!(row.value > 0.0 && row.ratio > 0.0, "{}", row.case);
        }
    }

    #[test]
    fn pair_files_are_refused_by_name_when_invalid() {
        let folder = folder();
        assert!(
            places(folder.path())
                .err()
                .unwrap()
                .to_string()
                .contains(INDEX)
        );
        index(&folder, "[{}]");
        assert!(
            places(folder.path())
                .err()
                .unwrap()
                .to_string()
                .contains(INDEX)
        );
        let text = r#"[{"case": "x", "old": "a.safetensors", "new": "c.safetensors"}]"#;
        index(&folder, text);
        let place = places(folder.path()).unwrap().remove(0);
        let error = place.read(folder.path()).err().unwrap().to_string();
        assert!(error.contains("c.safetensors"), "{error}");
    }
}
