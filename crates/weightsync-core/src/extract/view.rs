//! Parts of a tensor, and its dimensions in another order, where it lies.

use super::{ExtractError, TensorRef};

impl<'a> TensorRef<'a> {
    /// Elements from one to the next along each dimension, or `None` for a sub-byte dtype. A
    /// dimension with fewer than two elements has no next one, and 0 here.
    pub fn strides(&self) -> Option<Vec<i64>> {
        let size = self.dtype.bytes()? as isize;
        // Dimensions of one element, and all of an empty tensor, keep 0.
        let mut strides = vec![0; self.shape.len()];
        if self.elements == 0 {
            return Some(strides);
        }
        // Dimensions that walk through memory as one were joined: taken apart again from within.
        let mut joined = self.dims.iter().rev().map(|dim| (dim.len, dim.stride));
        // A contiguous tensor has no dimensions here: all its elements are one row.
        let (mut left, mut stride) = joined.next().unwrap_or((self.elements, size));
        for (own, &len) in strides.iter_mut().zip(self.shape).rev() {
            if len < 2 {
                continue;
            }
            *own = (stride / size) as i64;
            left /= len as usize;
            stride = stride.wrapping_mul(len as isize);
            // All that was joined is taken apart: the next dimension out begins.
            if left == 1 {
                (left, stride) = joined.next().unwrap_or((1, size));
            }
        }
        Some(strides)
    }

    /// The address of the first element. Two tensors with the same address, dtype, shape and
    /// strides are the same memory, if they have elements at all.
    pub fn address(&self) -> usize {
        self.data.as_ptr().addr() + self.start
    }

    /// A part of the tensor, with its dimensions in another order: dimension `i` of the view is
    /// dimension `order[i]` here, from element `starts[order[i]]` on. A dimension that `order` does
    /// not name is taken at its start alone.
    ///
    /// ```
    /// use weightsync_core::{Dtype, extract::TensorRef};
    ///
    /// let matrix = [1, 2, 3, 4, 5, 6];
    /// let matrix = TensorRef::new(Dtype::U8, &[2, 3], &matrix)?;
    /// let mut place = [0; 4];
    /// // The last two columns, as rows.
    /// matrix.view(&[1, 0], &[0, 1], &[2, 2])?.write_into(&mut place, Dtype::U8)?;
    /// assert_eq!(place, [2, 5, 3, 6]);
    /// # Ok::<(), weightsync_core::extract::ExtractError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`ExtractError::NoSuchView`] if it leaves the tensor or names a dimension twice, and
    /// [`ExtractError::SubByte`] if elements are smaller than a byte.
    pub fn view<'b>(
        &self,
        order: &[usize],
        starts: &[u64],
        shape: &'b [u64],
    ) -> Result<TensorRef<'b>, ExtractError>
    where
        'a: 'b,
    {
        let none = || ExtractError::NoSuchView {
            shape: self.shape.to_vec(),
            order: order.to_vec(),
            starts: starts.to_vec(),
            view: shape.to_vec(),
        };
        let dtype = self.dtype;
        let strides = self.strides().ok_or(ExtractError::SubByte { dtype })?;
        if starts.len() != self.shape.len() || order.len() != shape.len() {
            return Err(none());
        }
        let mut lens = vec![None; self.shape.len()];
        for (&dim, &len) in order.iter().zip(shape) {
            match lens.get_mut(dim) {
                // A dimension that is named twice would have two lengths.
                Some(free @ None) => *free = Some(len),
                _ => return Err(none()),
            }
        }
        for ((&start, len), &own) in starts.iter().zip(lens).zip(self.shape) {
            // A dimension that `order` leaves out is taken at its start, as if its length were 1.
            let end = start.checked_add(len.unwrap_or(1));
            if end.is_none_or(|end| end > own) {
                return Err(none());
            }
        }
        // An empty view has no first element whose place could be computed.
        if self.elements == 0 || shape.contains(&0) {
            return TensorRef::new(dtype, shape, &[]);
        }
        // Inside the tensor, hence inside its data.
        let offset = starts.iter().zip(&strides).fold(
            (self.start as i64) / (size_of_one(self)),
            |at, (&start, &stride)| at.wrapping_add((start as i64).wrapping_mul(stride)),
        );
        // `strided` checks all of it again, against the data.
        let strides: Vec<i64> = order.iter().map(|&dim| strides[dim]).collect();
        TensorRef::strided(dtype, shape, &strides, offset as u64, self.data)
    }
}

/// Bytes of an element that has an address of its own.
fn size_of_one(tensor: &TensorRef<'_>) -> i64 {
    i64::from(tensor.dtype.bytes().unwrap_or(1))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::dtype::Dtype;

    /// Every index of a shape, in row-major order.
    fn indices(shape: &[u64]) -> Vec<Vec<u64>> {
        shape.iter().fold(vec![Vec::new()], |outer, &len| {
            outer
                .into_iter()
                .flat_map(|index| {
                    (0..len).map(move |at| index.iter().copied().chain([at]).collect())
                })
                .collect()
        })
    }

    fn written(tensor: &TensorRef<'_>) -> Vec<u8> {
        let mut place = vec![0; tensor.bytes_as(tensor.dtype()).unwrap() as usize];
        tensor.write_into(&mut place, tensor.dtype()).unwrap();
        place
    }

    proptest! {
        /// Views of views of random tensors hold the elements that counting by hand says.
        #[test]
        fn a_view_holds_what_the_definition_says(
            dims in prop::collection::vec((1_u64..5, 0_usize..100, 0_u64..5, 1_u64..5), 0..5),
            wide in any::<bool>(),
        ) {
            let dtype = if wide { Dtype::U16 } else { Dtype::U8 };
            let size = if wide { 2 } else { 1 };
            let full: Vec<u64> = dims.iter().map(|dim| dim.0).collect();
            let count = full.iter().product::<u64>() as usize;
            let data: Vec<u8> = (0..count * size).map(|at| (at * 7 + at / 256) as u8).collect();
            let tensor = TensorRef::new(dtype, &full, &data).unwrap();

            let mut order: Vec<usize> = (0..dims.len()).collect();
            order.sort_by_key(|&dim| dims[dim].1);
            let starts: Vec<u64> = dims.iter().map(|dim| dim.2.min(dim.0 - 1)).collect();
            let lens: Vec<u64> = dims.iter().zip(&starts).map(|(dim, start)| dim.3.min(dim.0 - start)).collect();
            let shape: Vec<u64> = order.iter().map(|&dim| lens[dim]).collect();
            let view = tensor.view(&order, &starts, &shape).unwrap();
            let expected: Vec<u8> = indices(&shape).into_iter().flat_map(|index| {
                let mut own = starts.clone();
                for (&dim, at) in order.iter().zip(&index) {
                    own[dim] += at;
                }
                let flat = own.iter().zip(&full).fold(0, |flat, (at, len)| flat * len + at) as usize;
                data[flat * size..][..size].to_vec()
            }).collect();
            prop_assert_eq!(&written(&view), &expected);

            // The view is a tensor like any other: its strides say where its elements are.
            let strides = view.strides().unwrap();
            let offset = ((view.address() - data.as_ptr().addr()) / size) as u64;
            let again = TensorRef::strided(dtype, &shape, &strides, offset, &data).unwrap();
            prop_assert_eq!(written(&again), expected);
            let all: Vec<usize> = (0..shape.len()).collect();
            let itself = view.view(&all, &vec![0; shape.len()], &shape).unwrap();
            prop_assert_eq!(written(&itself), written(&view));
        }
    }

    #[test]
    fn a_dimension_left_out_is_taken_at_its_start() {
        let data: Vec<u8> = (0..24).collect();
        let tensor = TensorRef::new(Dtype::U8, &[2, 3, 4], &data).unwrap();
        assert_eq!(
            written(&tensor.view(&[2], &[1, 2, 1], &[3]).unwrap()),
            [21, 22, 23]
        );
        assert_eq!(written(&tensor.view(&[], &[1, 0, 3], &[]).unwrap()), [15]);
    }

    #[test]
    fn view_refuses_elements_outside_the_tensor() {
        let data = [0_u8; 6];
        let tensor = TensorRef::new(Dtype::U8, &[2, 3], &data).unwrap();
        let cases: [(&[usize], &[u64], &[u64]); 7] = [
            (&[0, 0], &[0, 0], &[1, 1]),
            (&[0, 2], &[0, 0], &[1, 1]),
            (&[0, 1], &[0, 0], &[2, 4]),
            (&[0, 1], &[1, 0], &[2, 3]),
            (&[0, 1], &[u64::MAX, 0], &[2, 3]),
            (&[0, 1], &[0], &[2, 3]),
            (&[0], &[0, 3], &[2]),
        ];
        for (order, starts, shape) in cases {
            let error = tensor.view(order, starts, shape).unwrap_err();
            assert!(matches!(error, ExtractError::NoSuchView { .. }), "{error}");
        }
        let packed = TensorRef::new(Dtype::F4, &[2, 2], &data[..2]).unwrap();
        let error = packed.view(&[1, 0], &[0, 0], &[2, 2]).unwrap_err();
        assert_eq!(error, ExtractError::SubByte { dtype: Dtype::F4 });
    }

    #[test]
    fn empty_and_repeated_tensors_have_views_too() {
        let empty = TensorRef::new(Dtype::F32, &[0, 3], &[]).unwrap();
        assert!(written(&empty.view(&[1, 0], &[0, 0], &[3, 0]).unwrap()).is_empty());
        let data = [1_u8, 2];
        let repeated = TensorRef::strided(Dtype::U8, &[3, 2], &[0, 1], 0, &data).unwrap();
        assert_eq!(repeated.strides(), Some(vec![0, 1]));
        let turned = repeated.view(&[1, 0], &[1, 0], &[2, 2]).unwrap();
        assert_eq!(written(&turned), [1, 1, 2, 2]);
    }
}
