//! A comparison as JSON, an object a line.

use serde::Serialize;
use weightsync_engine::Dtype;

use super::compare::{FileComparison, Row, RowState, Sizes, TensorCounts};
use super::tally::{Power, Summary};
use super::ulps::Unit;

/// What the fields are, for `--help`.
pub const FIELDS: &str = "\
With --json there is an object on a line for each tensor:
  tensor         its name
  state          same, changed, only_in_a, only_in_b, or not_compared: of another dtype or shape
  dtype, shape   as in A, or as in B if it is only there
  dtype_in_b, shape_in_b
                 of one that is not compared
  unit           what is counted: element; part, of which a complex number has two; or byte, of
                 dtypes below eight bits
  elements       how many there are
of one that is same or changed also:
  changed        how many of them did
  percent        the same as a share of all
  median_ulps, largest_ulps
                 of the steps; null if no number became another number
  to_nan, from_nan, between_nans
                 changes that have no step, as one end or both are NaN
and on the last line one object, total, with the same of all tensors and:
  tensors, same, changed_tensors, only_in_a, only_in_b, not_compared
                 how many tensors there are of which state
  steps          how many changes have a step from .. to so many ULPs
  dense_bytes, fast_bytes, gaps_bytes, thin_bytes
                 what all tensors in both files take, and a delta between them by either codec
  other_metadata keys under which the files' metadata differs";

/// An object for each tensor, and one for all.
pub fn json(comparison: &FileComparison) -> Result<String, serde_json::Error> {
    let mut text = String::new();
    for row in &comparison.rows {
        text.push_str(&serde_json::to_string(&TensorLine::new(row))?);
        text.push('\n');
    }
    let all = All {
        total: Total::new(comparison),
    };
    text.push_str(&serde_json::to_string(&all)?);
    text.push('\n');
    Ok(text)
}

/// A tensor as JSON.
#[derive(Serialize)]
struct TensorLine<'a> {
    tensor: &'a str,
    state: &'static str,
    dtype: Dtype,
    shape: &'a [u64],
    #[serde(skip_serializing_if = "Option::is_none")]
    dtype_in_b: Option<Dtype>,
    #[serde(skip_serializing_if = "Option::is_none")]
    shape_in_b: Option<&'a [u64]>,
    unit: Unit,
    elements: u64,
    #[serde(flatten)]
    changes: Option<TensorChanges>,
}

impl<'a> TensorLine<'a> {
    fn new(row: &'a Row) -> Self {
        let (state, changes) = match &row.state {
            RowState::Compared(summary) => (
                match summary.changed {
                    0 => "same",
                    _ => "changed",
                },
                Some(TensorChanges::new(*summary, row.elements)),
            ),
            RowState::OnlyInA => ("only_in_a", None),
            RowState::OnlyInB => ("only_in_b", None),
            RowState::Another { .. } => ("not_compared", None),
        };
        let other = match &row.state {
            RowState::Another { dtype, shape } => Some((*dtype, &shape[..])),
            _ => None,
        };
        Self {
            tensor: &row.tensor.name,
            state,
            dtype: row.tensor.dtype,
            shape: &row.tensor.shape,
            dtype_in_b: other.map(|(dtype, _)| dtype),
            shape_in_b: other.map(|(_, shape)| shape),
            unit: row.unit,
            elements: row.elements,
            changes,
        }
    }
}

#[derive(Serialize)]
struct TensorChanges {
    percent: f64,
    #[serde(flatten)]
    summary: Summary,
}

impl TensorChanges {
    fn new(summary: Summary, elements: u64) -> Self {
        let percent = 100.0 * summary.changed as f64 / elements.max(1) as f64;
        Self { percent, summary }
    }
}

/// The last line.
#[derive(Serialize)]
struct All<'a> {
    total: Total<'a>,
}

/// What all tensors come to.
#[derive(Serialize)]
struct Total<'a> {
    #[serde(flatten)]
    counts: TensorCounts,
    elements: u64,
    #[serde(flatten)]
    changes: TensorChanges,
    steps: &'a [Power],
    #[serde(flatten)]
    sizes: &'a Sizes,
    other_metadata: &'a [String],
}

impl<'a> Total<'a> {
    fn new(comparison: &'a FileComparison) -> Self {
        Self {
            counts: comparison.counts(),
            elements: comparison.elements,
            changes: TensorChanges::new(comparison.total, comparison.elements),
            steps: &comparison.steps,
            sizes: &comparison.sizes,
            other_metadata: &comparison.metadata,
        }
    }
}
