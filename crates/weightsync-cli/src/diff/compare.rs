//! The pass over two files.

use std::collections::BTreeMap;
use std::error::Error;

use serde::Serializer;
use weightsync_core::ByteRange;
use weightsync_core::delta::{self, BitPattern, Codec, SPAN, Scratch};
use weightsync_engine::{Dtype, Layout, SafetensorsFile, TensorSpec, WeightExtractor};
use weightsync_simd::{BLOCK, SLACK, Word};

use super::tally::{Power, Summary, Tally};
use super::ulps::{Scale, Unit};

/// What two files have in common, and what they have not.
pub struct FileComparison {
    /// A line for each tensor: those of A in its order, then those that only B has.
    pub rows: Vec<Row>,
    /// Of all tensors that were compared.
    pub total: Summary,
    /// What was compared one by one, in all of them.
    pub elements: u64,
    pub steps: Vec<Power>,
    pub sizes: Sizes,
    /// The keys under which the files have other metadata.
    pub metadata: Vec<String>,
}

/// One tensor.
pub struct Row {
    /// As it is in A, if it is there.
    pub tensor: TensorSpec,
    /// What is compared one by one, and how many of it there are.
    pub unit: Unit,
    pub elements: u64,
    pub state: RowState,
}

/// What became of a tensor.
pub enum RowState {
    Compared(Summary),
    OnlyInA,
    OnlyInB,
    /// B has one of that name that cannot be compared.
    Another {
        dtype: Dtype,
        shape: Vec<u64>,
    },
}

/// Bytes of the tensors that were compared, and of a delta between them.
#[derive(Clone, serde::Serialize)]
pub struct Sizes {
    #[serde(rename = "dense_bytes")]
    pub dense: u64,
    /// By codec.
    #[serde(flatten, serialize_with = "by_codec")]
    pub coded: BTreeMap<Codec, u64>,
}

impl Default for Sizes {
    fn default() -> Self {
        Self {
            dense: 0,
            coded: Codec::ALL.iter().map(|codec| (*codec, 0)).collect(),
        }
    }
}

fn by_codec<S: Serializer>(coded: &BTreeMap<Codec, u64>, serializer: S) -> Result<S::Ok, S::Error> {
    let named = coded
        .iter()
        .map(|(codec, bytes)| (format!("{}_bytes", codec.as_str()), bytes));
    serializer.collect_map(named)
}

/// Tensors by what became of them.
#[derive(Default, serde::Serialize)]
pub struct TensorCounts {
    pub tensors: u64,
    pub same: u64,
    #[serde(rename = "changed_tensors")]
    pub changed: u64,
    pub only_in_a: u64,
    pub only_in_b: u64,
    pub not_compared: u64,
}

impl FileComparison {
    /// Whether every tensor of either file is in the other, bit by bit.
    pub fn same(&self) -> bool {
        let same =
            |row: &Row| matches!(row.state, RowState::Compared(summary) if summary.changed == 0);
        self.rows.iter().all(same)
    }

    pub fn counts(&self) -> TensorCounts {
        let mut counts = TensorCounts::default();
        for row in &self.rows {
            counts.tensors += 1;
            *match &row.state {
                RowState::Compared(summary) if summary.changed == 0 => &mut counts.same,
                RowState::Compared(_) => &mut counts.changed,
                RowState::OnlyInA => &mut counts.only_in_a,
                RowState::OnlyInB => &mut counts.only_in_b,
                RowState::Another { .. } => &mut counts.not_compared,
            } += 1;
        }
        counts
    }
}

/// Compares all tensors. A span of each file is held at a time; `progress` is told how many bytes
/// of either were compared, of how many.
pub fn compare(
    a: &SafetensorsFile,
    b: &SafetensorsFile,
    mut progress: impl FnMut(u64, u64),
) -> Result<FileComparison, Box<dyn Error>> {
    // Only tensors with one dtype and shape in both files are compared.
    let (mut rows, pairs) = pair(&a.layout()?, &b.layout()?);
    let image = layout_of(&rows, &pairs)?;
    let mut sides = [
        Side::new(a, pairs.iter().map(|pair| pair.a)),
        Side::new(b, pairs.iter().map(|pair| pair.b)),
    ];
    let mut coder = Coder::default();
    let (mut tally, mut total) = (Tally::default(), Tally::default());
    // A span of each file at a time, so the memory does not depend on the size of the files.
    for start in (0..image.bytes()).step_by(SPAN as usize) {
        let span = ByteRange {
            offset: start,
            len: SPAN.min(image.bytes() - start),
        };
        for side in &mut sides {
            side.read(&image, span)?;
        }
        let [old, new] = [&sides[0].bytes[..], &sides[1].bytes[..]];
        // Equal spans need no coding and no counting.
        let differ = old != new;
        if differ {
            coder.code(BitPattern::of_span(&image, start), old, new)?;
        }
        for (at, place, _) in pieces(&image, span) {
            let tensor = &image.tensors()[at];
            if differ {
                let scale = Scale::of(tensor.dtype);
                let (old, new) = (&old[place.clone()], &new[place.clone()]);
                count(scale, old, new, &mut tally);
            }
            // It may have begun in an earlier span.
            if tensor.range.end() == start + place.end as u64 {
                // The last piece of the tensor: its counts are complete.
                rows[pairs[at].row].state = RowState::Compared(tally.summary());
                // Classes of steps add up, so the totals need no second pass.
                total.merge(&tally);
                tally.clear();
            }
        }
        progress(start + span.len, image.bytes());
    }
    Ok(FileComparison {
        elements: pairs.iter().map(|pair| rows[pair.row].elements).sum(),
        rows,
        total: total.summary(),
        steps: total.powers(),
        sizes: Sizes {
            dense: image.payload_bytes(),
            ..coder.sizes
        },
        metadata: other_metadata(a, b),
    })
}

/// A tensor that both files have: its row, and where it is in each file's layout.
struct TensorPair {
    row: usize,
    a: usize,
    b: usize,
}

/// A row for every tensor, and which of them can be compared.
fn pair(a: &Layout, b: &Layout) -> (Vec<Row>, Vec<TensorPair>) {
    let mut rows = Vec::with_capacity(a.len());
    let mut pairs = Vec::with_capacity(a.len());
    for (at, tensor) in a.tensors().iter().enumerate() {
        let other = b.index_of(&tensor.name);
        let state = match other.map(|at| &b.tensors()[at]) {
            None => RowState::OnlyInA,
            // Another dtype or shape: there is no pair of elements to compare.
            Some(one) if (one.dtype, &one.shape) != (tensor.dtype, &tensor.shape) => {
                let shape = one.shape.clone();
                RowState::Another {
                    dtype: one.dtype,
                    shape,
                }
            }
            Some(_) => RowState::Compared(Summary::default()),
        };
        if let (RowState::Compared(_), Some(b)) = (&state, other) {
            let row = rows.len();
            pairs.push(TensorPair { row, a: at, b });
        }
        rows.push(Row::new(tensor, state));
    }
    let more = b.tensors().iter();
    // In the order of B, behind the tensors of A.
    let more = more.filter(|tensor| a.index_of(&tensor.name).is_none());
    rows.extend(more.map(|tensor| Row::new(tensor, RowState::OnlyInB)));
    (rows, pairs)
}

/// The layout of a sender of the tensors that are compared.
fn layout_of(rows: &[Row], pairs: &[TensorPair]) -> Result<Layout, Box<dyn Error>> {
    // What a sender would have of these tensors: the delta is measured as it would be sent.
    let tensors = pairs.iter().map(|pair| {
        let tensor = &rows[pair.row].tensor;
        (tensor.name.clone(), tensor.dtype, tensor.shape.clone())
    });
    // The layout of a sender: the delta is coded in its order, with its gaps.
    Ok(Layout::new(tensors)?)
}

impl Row {
    fn new(tensor: &TensorSpec, state: RowState) -> Self {
        let scale = Scale::of(tensor.dtype);
        Self {
            tensor: tensor.clone(),
            unit: scale.unit,
            elements: tensor.range.len / scale.width as u64,
            state,
        }
    }
}

/// One of the files, and the span of it that is looked at.
struct Side<'a> {
    file: &'a SafetensorsFile,
    /// Where in the file's layout each tensor of the image is.
    tensors: Vec<usize>,
    bytes: Vec<u8>,
}

impl<'a> Side<'a> {
    fn new(file: &'a SafetensorsFile, tensors: impl Iterator<Item = usize>) -> Self {
        Self {
            file,
            tensors: tensors.collect(),
            bytes: Vec::new(),
        }
    }

    fn read(&mut self, image: &Layout, span: ByteRange) -> Result<(), weightsync_engine::Error> {
        // Zeros between the tensors, as in every image.
        self.bytes.clear();
        self.bytes.resize(span.len as usize, 0);
        for (at, place, start) in pieces(image, span) {
            let place = &mut self.bytes[place];
            self.file.read_at(self.tensors[at], start, place)?;
        }
        Ok(())
    }
}

/// The tensors of a span that are not empty: which one, where in the span its bytes lie, and from
/// which of its bytes on.
fn pieces(
    image: &Layout,
    span: ByteRange,
) -> impl Iterator<Item = (usize, std::ops::Range<usize>, u64)> + '_ {
    let tensors = image.tensors();
    // Tensors are in the order of their places, so a binary search skips those before the span.
    let first = tensors.partition_point(|tensor| tensor.range.end() <= span.offset);
    let within = tensors.iter().enumerate().skip(first);
    within
        .take_while(move |(_, tensor)| tensor.range.offset < span.end())
        .filter_map(move |(at, tensor)| {
            // An empty tensor has no bytes in any span.
            let here = tensor.range.intersection(span)?;
            let place = ByteRange {
                offset: here.offset - span.offset,
                len: here.len,
            };
            Some((at, place.indices()?, here.offset - tensor.range.offset))
        })
}

/// Adds what changed in a part of a tensor.
fn count(scale: Scale, old: &[u8], new: &[u8], tally: &mut Tally) {
    // The width alone decides how bytes are read. The scale says what a change means.
    match scale.width {
        1 => count_words::<u8>(scale, old, new, tally),
        2 => count_words::<u16>(scale, old, new, tally),
        4 => count_words::<u32>(scale, old, new, tally),
        _ => count_words::<u64>(scale, old, new, tally),
    }
}

fn count_words<W: Word>(scale: Scale, old: &[u8], new: &[u8], tally: &mut Tally) {
    // A small tensor needs no buffers of a whole block.
    let most = BLOCK.min(old.len() / W::BYTES);
    let mut masks = vec![0; most.div_ceil(64)];
    let mut places = vec![0; most + SLACK];
    let mut steps = vec![W::default(); most + SLACK];
    let block = BLOCK * W::BYTES;
    for (old, new) in old.chunks(block).zip(new.chunks(block)) {
        // The kernel of the sender finds the changed places. The steps are counted here, by value.
        let changes = weightsync_simd::compare(old, new, &mut masks, &mut places, &mut steps);
        for &place in &places[..changes] {
            let at = usize::from(place) * W::BYTES;
            let (old, new) = (W::read(&old[at..]), W::read(&new[at..]));
            tally.add(scale.step(old.widen(), new.widen()));
        }
    }
}

/// Measures the delta, span by span; of its bytes nothing is kept.
#[derive(Default)]
struct Coder {
    sizes: Sizes,
    scratch: Scratch,
    delta: Vec<u8>,
}

impl Coder {
    fn code(
        &mut self,
        pattern: BitPattern,
        old: &[u8],
        new: &[u8],
    ) -> Result<(), delta::DeltaError> {
        for &codec in Codec::ALL {
            // Only the length counts, so the bytes of the delta are dropped with each span.
            self.delta.clear();
            let (delta, scratch) = (&mut self.delta, &mut self.scratch);
            let made = delta::encode(pattern, codec, old, new, delta, scratch)?;
            *self.sizes.coded.entry(codec).or_default() += made.bytes;
        }
        Ok(())
    }
}

fn other_metadata(a: &SafetensorsFile, b: &SafetensorsFile) -> Vec<String> {
    let keys = a.metadata().keys().chain(b.metadata().keys());
    let mut other: Vec<String> = keys
        // A key counts if its values differ, or if only one file has it.
        .filter(|&key| a.metadata().get(key) != b.metadata().get(key))
        .cloned()
        .collect();
    other.sort();
    other.dedup();
    other
}
