//! Tensors that a mapping quantises: their values and their scales, made in the pass that reads the
//! source.
//!
//! The source is read a tile at a time, as `F32`: cast, fused and transposed on the way into a small
//! buffer, or where it lies if it is `F32` and contiguous. A tile holds whole blocks that share a
//! scale, so it is still in the cache when its values are written. One scale for a whole matrix
//! needs the matrix read twice. The values come before their scales in the plan's order, and leave
//! the scales behind for them; scales that are asked for first are made by a pass of their own.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use weightsync_core::quantise::{larger, magnitude};
use weightsync_core::{Dtype, TensorRef};

use super::plan::TargetTensor;
use super::{Problem, Quantisation};
use crate::extract::{TensorData, is_float};

/// The scales of one tensor, once they are known.
pub(super) type Scales = OnceLock<Vec<f32>>;

/// Elements of a tile, unless a single row or block has more; a block has at most
/// [`LARGEST_BLOCK`](super::LARGEST_BLOCK).
const TILE: u64 = 64 * 1024;

/// What a target is quantised from.
#[derive(Clone, Debug)]
pub(super) struct Quantised {
    part: QuantisedPart,
    to: Quantisation,
    /// The tensor as `F32`.
    pub(super) from: Arc<TargetTensor>,
    /// The rule that quantises, from 1.
    pub(super) rule: usize,
    /// Its place among the quantised tensors of the plan.
    pub(super) number: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum QuantisedPart {
    Values,
    Scales,
}

/// The values of a tensor, and the tensor of their scales.
pub(super) fn pair(
    rule: usize,
    target: &TargetTensor,
    to: Quantisation,
    scale: &str,
    number: usize,
) -> Result<[TargetTensor; 2], Problem> {
    if let Some(problem) = target.after_quantising(rule) {
        return Err(problem);
    }
    let shape = to.scales_shape(&target.shape);
    let Some(shape) = shape.filter(|_| is_float(target.dtype)) else {
        return Err(Problem::Quantise {
            rule,
            tensor: target.name.clone(),
            dtype: target.dtype,
            shape: target.shape.clone(),
        });
    };
    // Read as `F32`, whatever the source has: scales are computed in it.
    let mut from = target.clone();
    from.dtype = Dtype::F32;
    let from = Arc::new(from);
    let made = |part, name, dtype, shape| {
        let mut rules = target.rules.clone();
        rules.push(rule);
        TargetTensor {
            name,
            dtype,
            shape,
            pieces: Vec::new(),
            quantised: Some(Quantised {
                part,
                to,
                from: from.clone(),
                rule,
                number,
            }),
            sources: target.sources.clone(),
            rules,
        }
    };
    let values = made(
        QuantisedPart::Values,
        target.name.clone(),
        to.dtype(),
        target.shape.clone(),
    );
    let scales = made(
        QuantisedPart::Scales,
        scale.replace("{}", &target.name),
        Dtype::F32,
        shape,
    );
    Ok([values, scales])
}

impl Quantised {
    /// What is made of the source: the same for two targets that have the same bytes, if their
    /// sources are one.
    pub(super) fn kind(&self) -> impl Eq + std::hash::Hash + use<> {
        (self.part, self.to)
    }

    /// Writes the values or the scales into a place of exactly their length.
    pub(super) fn write<'a>(
        &self,
        place: &mut [u8],
        source: &dyn Fn(usize) -> Result<TensorData<'a>, weightsync_mem::BoxedError>,
        scales: &Scales,
    ) -> Result<(), weightsync_mem::BoxedError> {
        if self.part == QuantisedPart::Scales {
            // Scales that are asked for before their values need a pass of their own.
            if scales.get().is_none() {
                let made = self.all_scales(&mut Tiles::open(self, source)?)?;
                scales.get_or_init(|| made);
            }
            let known = scales.get().map_or(&[][..], |known| known);
            for (to, scale) in place.chunks_mut(4).zip(known) {
                to.copy_from_slice(&scale.to_le_bytes());
            }
            return Ok(());
        }
        let mut tiles = Tiles::open(self, source)?;
        // A block's scale is known once its tile is read, and the tile is then still at hand.
        let known = match (scales.get(), self.to) {
            (Some(known), _) => Some(known.clone()),
            // The largest magnitude of all is known at the end alone.
            (None, Quantisation::Fp8) => Some(self.all_scales(&mut tiles)?),
            (None, _) => None,
        };
        // A block without elements keeps the scale of zeros.
        let none = self.to.scale_for(0.0);
        let mut made = known.clone().unwrap_or_else(|| vec![none; self.scales()]);
        self.each_tile(&mut tiles, &mut |tile, block| {
            let scale = match &known {
                Some(known) => known[block.scale],
                None => self.to.scale_for(tile.magnitude(block)),
            };
            made[block.scale] = scale;
            // Row by row: a block lies in the matrix with gaps between its rows.
            for row in block.rows.clone() {
                let start = tile.index(row, block.columns.start);
                let place = place
                    .get_mut(start..start + block.width())
                    .ok_or("the place is shorter than the tensor")?;
                self.to.quantise(place, tile.row(row, block), scale);
            }
            Ok(())
        })?;
        // Left for the tensor of the scales, which comes later in the plan's order.
        scales.get_or_init(|| made);
        Ok(())
    }

    fn all_scales(&self, tiles: &mut Tiles<'_>) -> Result<Vec<f32>, weightsync_mem::BoxedError> {
        // A block may be spread over several tiles, so each scale waits for the end.
        let mut magnitudes = vec![0.0; self.scales()];
        self.each_tile(tiles, &mut |tile, block| {
            let known = &mut magnitudes[block.scale];
            *known = larger(*known, tile.magnitude(block));
            Ok(())
        })?;
        let scales = magnitudes.into_iter();
        Ok(scales.map(|one| self.to.scale_for(one)).collect())
    }

    /// How many scales there are.
    fn scales(&self) -> usize {
        let shape = self.to.scales_shape(&self.from.shape).unwrap_or_default();
        shape.iter().product::<u64>() as usize
    }

    /// Calls with each tile, and with the part of each block in it. Blocks lie in one tile each,
    /// but for those of a whole matrix.
    fn each_tile(
        &self,
        tiles: &mut Tiles<'_>,
        call: &mut dyn FnMut(&Tile<'_>, &ScaleBlock) -> Result<(), weightsync_mem::BoxedError>,
    ) -> Result<(), weightsync_mem::BoxedError> {
        let [rows, columns] = tiles.matrix;
        if tiles.matrices == 0 || rows == 0 || columns == 0 {
            // Without this, 2^62 rows of nothing would each be a step.
            return Ok(());
        }
        let [block_rows, block_columns] = self.to.block(rows, columns);
        // Blocks in a row of blocks, and in a matrix; the last ones may be smaller.
        let across = columns.div_ceil(block_columns);
        let per_matrix = rows.div_ceil(block_rows) * across;
        // As many blocks as fit; a block that is a whole matrix is cut by rows.
        let (tall, wide) = if self.to == Quantisation::Fp8 {
            ((TILE / columns).max(1), columns)
        } else {
            let blocks = (TILE / block_rows.saturating_mul(block_columns)).max(1);
            match blocks.checked_div(across).unwrap_or(1) {
                0 => (block_rows, blocks.saturating_mul(block_columns)),
                more => (more.saturating_mul(block_rows), columns),
            }
        };
        for matrix in 0..tiles.matrices {
            for rows in steps(rows, tall) {
                for columns in steps(columns, wide) {
                    // The source is read once for all blocks of the tile.
                    let tile = tiles.tile(matrix, rows.clone(), columns.clone())?;
                    for own_rows in steps_within(&rows, block_rows) {
                        for own_columns in steps_within(&columns, block_columns) {
                            // The number of the scale of this block: matrix by matrix, then row by
                            // row of blocks.
                            let scale = matrix * per_matrix
                                + own_rows.start / block_rows * across
                                + own_columns.start / block_columns;
                            let block = ScaleBlock {
                                scale: scale as usize,
                                rows: own_rows.clone(),
                                columns: own_columns,
                            };
                            call(&tile, &block)?;
                        }
                    }
                }
            }
        }
        Ok(())
    }
}

/// Values of a tile that share a scale.
struct ScaleBlock {
    /// The place of their scale.
    scale: usize,
    rows: Range<u64>,
    columns: Range<u64>,
}

impl ScaleBlock {
    fn width(&self) -> usize {
        (self.columns.end - self.columns.start) as usize
    }
}

/// A part of a matrix as `F32`.
struct Tile<'a> {
    bytes: &'a [u8],
    /// The row and column of its first element, and elements from one of its rows to the next.
    first: [u64; 2],
    pitch: u64,
    /// Elements of a row of the matrix, and of the matrices before this one.
    columns: u64,
    before: u64,
}

impl Tile<'_> {
    /// The elements of a row of a block.
    fn row(&self, row: u64, block: &ScaleBlock) -> &[u8] {
        let start = (row - self.first[0]) * self.pitch + block.columns.start - self.first[1];
        &self.bytes[start as usize * 4..][..block.width() * 4]
    }

    fn magnitude(&self, block: &ScaleBlock) -> f32 {
        let rows = block.rows.clone();
        rows.fold(0.0, |known, row| {
            larger(known, magnitude(self.row(row, block)))
        })
    }

    /// The index of an element in the whole tensor.
    fn index(&self, row: u64, column: u64) -> usize {
        (self.before + row * self.columns + column) as usize
    }
}

/// Reads a tensor that is quantised, a tile at a time.
struct Tiles<'a> {
    from: &'a TargetTensor,
    matrices: u64,
    matrix: [u64; 2],
    sources: Vec<(usize, SourceTensor<'a>)>,
    buffer: Vec<u8>,
}

/// A source tensor; one behind a read is read once.
enum SourceTensor<'a> {
    Lent(TensorRef<'a>),
    Read(Dtype, Vec<u64>, Vec<u8>),
}

impl SourceTensor<'_> {
    fn view(&self) -> Result<TensorRef<'_>, weightsync_mem::BoxedError> {
        match self {
            Self::Lent(tensor) => Ok(tensor.clone()),
            Self::Read(dtype, shape, bytes) => Ok(TensorRef::new(*dtype, shape, bytes)?),
        }
    }
}

impl<'a> Tiles<'a> {
    fn open<'b: 'a>(
        quantised: &'a Quantised,
        source: &dyn Fn(usize) -> Result<TensorData<'b>, weightsync_mem::BoxedError>,
    ) -> Result<Self, weightsync_mem::BoxedError> {
        let from = &*quantised.from;
        let (matrices, matrix) = match from.shape[..] {
            [rows, columns] => (1, [rows, columns]),
            [matrices, rows, columns] => (matrices, [rows, columns]),
            _ => return Err("only matrices are quantised".into()),
        };
        let mut sources: Vec<(usize, SourceTensor<'a>)> = Vec::new();
        for piece in &from.pieces {
            // A source that several pieces come from is opened once.
            if sources.iter().any(|(known, _)| *known == piece.source) {
                continue;
            }
            let held = match source(piece.source)? {
                TensorData::InMemory(tensor) => SourceTensor::Lent(tensor),
                // Read whole: tiles ask for parts, and a read gives the whole tensor.
                TensorData::Read { dtype, shape, read } => {
                    let bits = dtype.bits_of(shape).ok_or("the tensor is too large")?;
                    let mut bytes = vec![0; (bits / 8) as usize];
                    read(&mut bytes)?;
                    SourceTensor::Read(dtype, shape.to_vec(), bytes)
                }
            };
            sources.push((piece.source, held));
        }
        Ok(Self {
            from,
            matrices,
            matrix,
            sources,
            buffer: Vec::new(),
        })
    }

    fn tile(
        &mut self,
        matrix: u64,
        rows: Range<u64>,
        columns: Range<u64>,
    ) -> Result<Tile<'_>, weightsync_mem::BoxedError> {
        let before = matrix * self.matrix[0] * self.matrix[1];
        let mut tile = Tile {
            bytes: &[],
            first: [rows.start, columns.start],
            pitch: columns.end - columns.start,
            columns: self.matrix[1],
            before,
        };
        // No copy where the source lies as the tile needs it.
        if let (Some(_), [(_, source)]) = (self.from.as_it_is(), &self.sources[..]) {
            // As it is may also mean its first columns, whose rows lie apart.
            let lying = match source {
                SourceTensor::Lent(tensor)
                    if tensor.dtype() == Dtype::F32 && tensor.shape() == self.from.shape =>
                {
                    tensor.contiguous_bytes()
                }
                SourceTensor::Read(Dtype::F32, shape, bytes) if *shape == self.from.shape => {
                    Some(bytes.as_slice())
                }
                _ => None,
            };
            if let Some(bytes) = lying {
                let start = before + rows.start * tile.columns + columns.start;
                tile.pitch = tile.columns;
                tile.bytes = bytes
                    .get(start as usize * 4..)
                    .ok_or("the source is shorter than the tensor")?;
                return Ok(tile);
            }
        }
        let dims = self.from.shape.len();
        // What the tile needs of each piece, as a small target of its own.
        let mut part = self
            .from
            .narrowed(dims - 1, columns.start, columns.end - columns.start)
            .narrowed(dims - 2, rows.start, rows.end - rows.start);
        if dims == 3 {
            part = part.narrowed(0, matrix, 1);
        }
        let len = (rows.end - rows.start) * (columns.end - columns.start) * 4;
        // The buffer of the last tile serves again.
        self.buffer.resize(len as usize, 0);
        for piece in &part.pieces {
            let source = self.sources.iter().find(|(at, _)| *at == piece.source);
            let (_, source) = source.ok_or("a source is missing")?;
            part.write(&mut self.buffer, piece, &source.view()?)?;
        }
        tile.bytes = &self.buffer;
        Ok(tile)
    }
}

/// The parts of `0..len`, of `step` each.
fn steps(len: u64, step: u64) -> impl Iterator<Item = Range<u64>> {
    steps_within(&(0..len), step)
}

/// The parts of a range, of `step` each.
fn steps_within(range: &Range<u64>, step: u64) -> impl Iterator<Item = Range<u64>> + use<> {
    let (end, step) = (range.end, step.max(1));
    let starts = std::iter::successors(Some(range.start), move |at| at.checked_add(step));
    starts
        .take_while(move |&at| at < end)
        .map(move |at| at..at.saturating_add(step).min(end))
}
