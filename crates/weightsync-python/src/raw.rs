//! Memory that Python owns, or looks at: the one place of `unsafe` here.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use weightsync::PrivateView;
use weightsync_simd::stream_copy_slice;

/// Where a tensor or an array of Python's lies.
///
/// **What the package's Python files promise** with each one they hand over:
/// it is the address of an object they took it from a moment ago, with the
/// dtype, shape and strides they say, and they hold that object until the call
/// returns. That nobody writes it meanwhile is up to the program, as with every
/// reader of a tensor beside torch.
#[derive(Clone, Copy, Debug, FromPyObject)]
#[pyo3(transparent)]
pub struct Address(usize);

impl Address {
    /// The object's bytes: so many, of which `before` lie in front of the
    /// address. For the time of the call it came with.
    pub fn lend<'a>(self, before: usize, len: usize) -> &'a [u8] {
        if len == 0 {
            return &[];
        }
        // SAFETY: allocated, by what is promised of an address; not null,
        // because it has a length.
        unsafe { std::slice::from_raw_parts((self.0 - before) as *const u8, len) }
    }

    /// Copies bytes into the object, which has room for them, past the caches
    /// where that is faster.
    pub fn store(self, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        // SAFETY: allocated and writable, by what is promised of an address.
        let place = unsafe { std::slice::from_raw_parts_mut(self.0 as *mut u8, bytes.len()) };
        stream_copy_slice(place, bytes);
    }
}

/// The bytes of one whole version, as a buffer: what tensors are bound over.
///
/// It can be written; what is written is this process's alone, and is gone with
/// the version.
#[pyclass(frozen, module = "weightsync._native")]
pub struct View {
    held: PrivateView,
}

impl View {
    pub fn new(held: PrivateView) -> Self {
        Self { held }
    }
}

#[pymethods]
impl View {
    /// Hands the memory out, and keeps this view, and with it the version, for
    /// as long as it is looked at.
    ///
    /// # Safety
    ///
    /// `buffer` is Python's own, to be filled in; called by Python alone.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        buffer: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        if buffer.is_null() {
            return Err(PyBufferError::new_err("no place for the buffer"));
        }
        let held = &slf.get().held;
        let (start, len) = (held.as_ptr().cast::<c_void>(), held.len() as isize);
        let keeper = slf.as_ptr();
        // SAFETY: the memory lives as long as this view, of which the filled
        // buffer holds a reference; it may be written, as a private view's may.
        let done = unsafe { ffi::PyBuffer_FillInfo(buffer, keeper, start, len, 0, flags) };
        match done {
            0 => Ok(()),
            _ => Err(PyErr::fetch(slf.py())),
        }
    }

    /// Python gives its reference back by itself.
    ///
    /// # Safety
    ///
    /// Called by Python alone.
    unsafe fn __releasebuffer__(&self, _buffer: *mut ffi::Py_buffer) {}
}
