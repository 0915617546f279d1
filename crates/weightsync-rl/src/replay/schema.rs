//! What a frame consists of.

use std::fmt;

use serde::{Deserialize, Serialize};
use weightsync_engine::Dtype;

use crate::Error;

/// One part of every frame, such as the observation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Column {
    name: String,
    dtype: Dtype,
    shape: Vec<u64>,
}

impl Column {
    /// A column whose entry for one frame has this dtype and shape. An empty
    /// shape is one element.
    pub fn new(name: impl Into<String>, dtype: Dtype, shape: impl Into<Vec<u64>>) -> Self {
        Self {
            name: name.into(),
            dtype,
            shape: shape.into(),
        }
    }

    /// Its name, unlike all others of the schema.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What one element is.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// The shape of one frame's entry.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// Size in bytes of one frame's entry, if it is whole bytes, at least one
    /// and no more than memory can have.
    fn frame_bytes(&self) -> Option<usize> {
        // Narrow dtypes have less than a byte for an element, so sizes are counted in bits.
        let bits = self.dtype.bits_of(&self.shape)?;
        let bytes = isize::try_from(bits / 8).ok()?;
        (bits % 8 == 0 && bytes > 0).then_some(bytes.unsigned_abs())
    }
}

impl fmt::Display for Column {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` {} {:?}", self.name, self.dtype, self.shape)
    }
}

/// The columns of a replay buffer, in the order in which their bytes are
/// handed over.
///
/// ```
/// use weightsync_engine::Dtype;
/// use weightsync_rl::replay::{Column, Schema};
///
/// let schema = Schema::new([
///     Column::new("observation", Dtype::F32, [4]),
///     Column::new("reward", Dtype::F32, []),
/// ])?;
/// assert_eq!(schema.frame_bytes(0), 16);
/// assert!(Schema::new([Column::new("packed", Dtype::F4, [3])]).is_err());
/// # Ok::<(), weightsync_rl::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schema {
    columns: Vec<Column>,
    frame_bytes: Vec<usize>,
}

impl Schema {
    /// Columns with names that differ, each with at least one whole byte per
    /// frame.
    ///
    /// # Errors
    /// [`Error::ReplaySettings`] names the column at fault.
    pub fn new(columns: impl IntoIterator<Item = Column>) -> Result<Self, Error> {
        let columns: Vec<Column> = columns.into_iter().collect();
        let refuse = |reason| Err(Error::ReplaySettings { reason });
        if columns.is_empty() {
            return refuse("its schema has no column: name at least one".to_owned());
        }
        let mut frame_bytes = Vec::with_capacity(columns.len());
        for (index, column) in columns.iter().enumerate() {
            if columns[..index].iter().any(|it| it.name == column.name) {
                return refuse(format!("its schema has two columns `{}`", column.name));
            }
            let Some(bytes) = column.frame_bytes() else {
                return refuse(format!(
                    "a frame of column {column} is not a whole number of bytes between 1 and {}",
                    isize::MAX
                ));
            };
            frame_bytes.push(bytes);
        }
        Ok(Self {
            columns,
            frame_bytes,
        })
    }

    /// The columns, in order.
    pub fn columns(&self) -> &[Column] {
        &self.columns
    }

    /// The index of a column.
    pub fn index(&self, name: &str) -> Option<usize> {
        self.columns.iter().position(|column| column.name == name)
    }

    /// Size in bytes of one frame's entry in the column of this index.
    ///
    /// # Panics
    /// If there is no such column.
    pub fn frame_bytes(&self, column: usize) -> usize {
        self.frame_bytes[column]
    }

    /// The sizes of all columns' entries.
    pub(super) fn all_frame_bytes(&self) -> &[usize] {
        &self.frame_bytes
    }

    /// The first difference to another schema: what this one has, and what the
    /// other has there.
    pub(super) fn difference(&self, other: &Self) -> Option<(String, String)> {
        let (len, other_len) = (self.columns.len(), other.columns.len());
        let name = |column: Option<&Column>| match column {
            Some(column) => format!("column {column}"),
            None => "no further column".to_owned(),
        };
        (0..len.max(other_len))
            // Beyond the end of the shorter one `get` is `None`, which differs.
            .map(|index| (self.columns.get(index), other.columns.get(index)))
            .find(|(ours, theirs)| ours != theirs)
            .map(|(ours, theirs)| (name(ours), name(theirs)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schema_refuses_columns_that_cannot_be() {
        let scalar = |name: &str| Column::new(name, Dtype::F32, []);
        let cases = [
            (vec![], "no column"),
            (vec![scalar("a"), scalar("a")], "two columns `a`"),
            (vec![Column::new("a", Dtype::F4, [3])], "whole number"),
            (vec![Column::new("a", Dtype::F32, [0])], "whole number"),
            (vec![Column::new("a", Dtype::U8, [1 << 63])], "whole number"),
        ];
        for (columns, expected) in cases {
            let message = Schema::new(columns).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
        let packed = Schema::new([Column::new("a", Dtype::F4, [2, 3])]).unwrap();
        assert_eq!(packed.frame_bytes(0), 3);
    }

    #[test]
    fn difference_names_the_first_column_that_differs() {
        let schema = |columns: &[(&str, u64)]| {
            let columns = columns.iter();
            Schema::new(columns.map(|&(name, len)| Column::new(name, Dtype::F32, [len]))).unwrap()
        };
        let ours = schema(&[("a", 1), ("b", 2)]);
        assert_eq!(ours.difference(&ours), None);
        let told = |other: &[(&str, u64)]| ours.difference(&schema(other)).unwrap();
        let column = |text: &str| format!("column {text}");
        assert_eq!(
            told(&[("a", 1), ("b", 3)]),
            (column("`b` F32 [2]"), column("`b` F32 [3]"))
        );
        assert_eq!(
            told(&[("a", 1)]),
            (column("`b` F32 [2]"), "no further column".to_owned())
        );
    }
}
