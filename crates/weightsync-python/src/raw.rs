//! Memory that Python owns, or looks at: the one place of `unsafe` here, but for the calls that
//! vouch for addresses.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::ffi::{CStr, c_int, c_void};
use std::mem::MaybeUninit;

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyType};
use weightsync_engine::{Origin, PrivateView};
use weightsync_simd::{digest_lines, stream_copy};

/// Where a tensor or an array of Python's lies.
///
/// **What the package's Python files promise** with each one they hand over:
/// it is the address of an object they took it from a moment ago, with the
/// dtype, shape and strides they say, and they hold that object until the call
/// returns. That nobody writes it meanwhile is up to the program, as with every
/// reader of a tensor in addition to torch.
#[derive(Clone, Copy, Debug, FromPyObject)]
#[pyo3(transparent)]
pub struct RawAddress(usize);

impl RawAddress {
    /// So many bytes further on in the same object; nowhere if the object has no memory.
    pub fn plus(self, bytes: usize) -> Self {
        match self.0 {
            // A null address means that the object has no memory. Adding to it would hide that.
            0 => self,
            start => Self(start.wrapping_add(bytes)),
        }
    }

    /// Copies bytes into the object, which has room for them, past the caches
    /// where that is faster; false if it has no memory.
    ///
    /// # Safety
    ///
    /// The promise of an address holds until this returns: the object is writable, and has room
    /// for as many bytes. It does not overlap `bytes`.
    pub unsafe fn store(self, bytes: &[u8]) -> bool {
        // An empty tensor may have no memory at all, and needs none.
        if bytes.is_empty() {
            return true;
        }
        if self.0 == 0 {
            return false;
        }
        // SAFETY: as the caller promises; not null.
        unsafe { stream_copy(self.0 as *mut u8, bytes.as_ptr(), bytes.len()) };
        true
    }
}

/// The bytes of an object that a call reads: `len` of them, `before` of which lie in front of
/// its address.
#[derive(Clone, Copy, Debug)]
pub struct ByteSpan {
    pub address: RawAddress,
    pub before: usize,
    pub len: usize,
}

impl ByteSpan {
    /// None if the object has no memory: its storage was taken away, or it wraps other objects.
    ///
    /// # Safety
    ///
    /// The caller uses the bytes only while the object's holder keeps the promise of
    /// [`RawAddress`].
    unsafe fn bytes<'a>(self) -> Option<&'a [u8]> {
        // An empty slice is valid without memory. `from_raw_parts` would refuse a null pointer.
        if self.len == 0 {
            return Some(&[]);
        }
        // With negative strides the first byte in use lies in front of the first element.
        let start = self.address.0.checked_sub(self.before);
        let start = start.filter(|start| *start != 0)?;
        // SAFETY: allocated, by what is promised of an address; not null.
        Some(unsafe { std::slice::from_raw_parts(start as *const u8, self.len) })
    }
}

/// Lends the bytes of all spans, in their order, for the time of one call. The error is the
/// index of the first span whose object has no memory.
///
/// # Safety
///
/// The promise of an address holds for each span until this returns: all its bytes are allocated,
/// and readable.
pub unsafe fn lend<T>(spans: &[ByteSpan], call: impl FnOnce(&[&[u8]]) -> T) -> Result<T, usize> {
    let mut lent = Vec::with_capacity(spans.len());
    // All spans are made into slices before the call, so it sees all of them or none.
    for (index, span) in spans.iter().enumerate() {
        // SAFETY: `call` takes bytes of any lifetime, so none outlives it, and the caller
        // promises that they are there until it returns.
        lent.push(unsafe { span.bytes() }.ok_or(index)?);
    }
    Ok(call(&lent))
}

/// Lends the bytes of all spans to be written, as [`lend`] does to be read. Their `before` is 0.
///
/// # Safety
///
/// The promise of an address holds for each span until this returns: all its bytes are allocated,
/// and writable. No two spans overlap, and nothing else uses their bytes meanwhile.
pub unsafe fn lend_mut<T>(
    spans: &[ByteSpan],
    call: impl FnOnce(&mut [&mut [u8]]) -> T,
) -> Result<T, usize> {
    let mut lent: Vec<&mut [u8]> = Vec::with_capacity(spans.len());
    for (index, span) in spans.iter().enumerate() {
        let start = span.address.0 as *mut u8;
        if span.len == 0 {
            lent.push(&mut []);
        } else if start.is_null() {
            return Err(index);
        } else {
            // SAFETY: allocated and used by nothing else, as the caller promises; not null. `call`
            // takes bytes of any lifetime, so none outlives it.
            lent.push(unsafe { std::slice::from_raw_parts_mut(start, span.len) });
        }
    }
    Ok(call(&mut lent))
}

/// A checksum of the bytes of an object of this size, that of the digest's lines.
///
/// The caller keeps the promise of an address: so many bytes are allocated until this returns.
#[pyfunction]
pub fn checksum(py: Python<'_>, address: RawAddress, size: usize) -> PyResult<i64> {
    let span = ByteSpan {
        address,
        before: 0,
        len: size,
    };
    let sum = |bytes: &[&[u8]]| digest_lines(bytes[0], 0);
    // SAFETY: the Python files make the promise of an address.
    let made = py.detach(|| unsafe { lend(&[span], sum) });
    let [low, high] = made.map_err(|_| {
        PyBufferError::new_err("there is no memory at address 0: give the address of a buffer")
    })?;
    // 64 bits are enough to notice a change.
    Ok((low ^ high.rotate_left(32)).cast_signed())
}

/// Has the main thread make a call as soon as it runs Python. Any thread may ask
/// for it, with or without the interpreter's lock.
pub fn soon(call: fn(Python<'_>)) {
    extern "C" fn made(call: *mut c_void) -> c_int {
        // SAFETY: it is the pointer below, to a function of this type.
        let call: fn(Python<'_>) = unsafe { std::mem::transmute(call) };
        Python::try_attach(call);
        0
    }
    // SAFETY: any thread may ask.
    let alive = unsafe { ffi::Py_IsInitialized() } != 0;
    if alive {
        // SAFETY: any thread may, while there is an interpreter. A full queue is no
        // harm: what is in it makes the same call.
        unsafe {
            ffi::Py_AddPendingCall(Some(made), call as *mut c_void);
        }
    }
}

/// Makes a call with the interpreter's lock; None if the interpreter has ended. A thread that Python
/// did not start keeps its thread state between calls: to make a new state takes longer than most
/// calls.
pub fn attached<T>(call: impl FnOnce(Python<'_>) -> T) -> Option<T> {
    thread_local! {
        static THREAD_STATE: Cell<Option<ThreadState>> = const { Cell::new(None) };
    }
    // SAFETY: any thread may ask, with or without the lock.
    let is_known = !unsafe { ffi::PyGILState_GetThisThreadState() }.is_null();
    Python::try_attach(|py| {
        if !is_known {
            THREAD_STATE.set(Some(ThreadState::new(py)));
        }
        call(py)
    })
}

/// One more `PyGILState_Ensure` in this thread, so that its state stays.
struct ThreadState;

impl ThreadState {
    fn new(_: Python<'_>) -> Self {
        // SAFETY: any thread may, and this one has the lock. What it returns says so.
        let _ = unsafe { ffi::PyGILState_Ensure() };
        Self
    }
}

/// When the thread ends.
impl Drop for ThreadState {
    fn drop(&mut self) {
        // Without an interpreter there is no state any more.
        Python::try_attach(|_| {
            // SAFETY: it undoes the one above, in the thread that made it, which had the lock
            // then and has it now; the attaching around it counts one more.
            unsafe { ffi::PyGILState_Release(ffi::PyGILState_STATE::PyGILState_LOCKED) };
        });
    }
}

/// The bytes of one whole version, as a buffer: what tensors are bound over.
///
/// The memory can be written. Changes are private to this process, and are gone with
/// the version.
#[pyclass(frozen, module = "weightsync._native")]
pub struct View {
    held: PrivateView,
    /// A forked child does not have the memory.
    origin: Origin,
}

impl View {
    pub fn new(held: PrivateView) -> Self {
        let origin = Origin::here();
        Self { held, origin }
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
        // A forked child does not have the mapping. An address of it would end the child by a
        // segmentation fault.
        if !slf.get().origin.is_here() {
            return Err(PyBufferError::new_err(
                "the memory of this version belongs to the parent process: receive the version in \
                 this process, or copy it before the fork",
            ));
        }
        let held = &slf.get().held;
        // The address does not change for the life of the view, so Python may keep it.
        let (start, len) = (held.as_ptr().cast::<c_void>(), held.len() as isize);
        // Python holds the view, and the view holds the version's pin. The slot is free again when
        // the last tensor over it has gone.
        let keeper = slf.as_ptr();
        // SAFETY: the memory lives as long as this view, of which the filled
        // buffer holds a reference; it may be written, as a private view's may.
        let done = unsafe { ffi::PyBuffer_FillInfo(buffer, keeper, start, len, 0, flags) };
        match done {
            0 => Ok(()),
            _ => Err(PyErr::fetch(slf.py())),
        }
    }

    /// Python drops its own reference.
    ///
    /// # Safety
    ///
    /// Called by Python alone.
    unsafe fn __releasebuffer__(&self, _buffer: *mut ffi::Py_buffer) {}
}

/// How torch shows its tensors to others without a call through the interpreter: DLPack's
/// exchange functions, which a class of tensors carries.
pub struct Exchange {
    class: Py<PyType>,
    look: LookAt,
}

/// Fills in what a tensor is and where, and lends it as long as the tensor is not changed.
type LookAt = unsafe extern "C" fn(*mut c_void, *mut DlTensor) -> c_int;

/// DLPack's table of functions, as far as it is read here; the same in every minor version.
#[repr(C)]
struct ExchangeTable {
    major: u32,
    minor: u32,
    previous: *const c_void,
    allocate: *const c_void,
    from_object: *const c_void,
    to_object: *const c_void,
    look: Option<LookAt>,
}

/// DLPack's tensor.
#[repr(C)]
struct DlTensor {
    data: *const c_void,
    device: DlDevice,
    dimensions: i32,
    dtype: DlType,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

/// Where memory is.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DlDevice {
    kind: i32,
    id: i32,
}

impl DlDevice {
    /// Whether this process's own instructions can read it.
    pub fn is_host(self) -> bool {
        self.kind == 1
    }
}

/// A dtype as DLPack says it: a class, its bits, and how many of it an element has.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DlType {
    pub class: u8,
    pub bits: u8,
    pub lanes: u16,
}

/// The type and address of a tensor at one moment.
pub struct TensorInfo<'a> {
    pub address: RawAddress,
    pub device: DlDevice,
    pub dtype: DlType,
    pub shape: &'a [i64],
    /// In elements.
    pub strides: &'a [i64],
}

/// An object whose type is, or derives from, that of an exchange.
pub struct Exchanged(Py<PyAny>);

impl Exchanged {
    pub fn object(&self) -> &Py<PyAny> {
        &self.0
    }
}

impl Exchange {
    /// The major version of DLPack whose table this is written for.
    const MAJOR: u32 = 1;
    const NAME: &CStr = c"dlpack_exchange_api";

    /// The functions of a class, such as `torch.Tensor`; none if it has none, or newer ones.
    pub fn of(class: &Bound<'_, PyType>) -> PyResult<Option<Self>> {
        // A class without the exchange functions is read attribute by attribute, which takes
        // longer.
        let Some(capsule) = class.getattr_opt("__dlpack_c_exchange_api__")? else {
            return Ok(None);
        };
        let capsule = capsule.cast_into::<PyCapsule>()?;
        let table = capsule.pointer_checked(Some(Self::NAME))?;
        // SAFETY: a capsule of this name has a table of DLPack's that lives as long as the
        // process, by DLPack's words; its first fields say of which version the others are.
        let table = unsafe { table.cast::<ExchangeTable>().as_ref() };
        // Another major version may have other fields in other places.
        let look = table.look.filter(|_| table.major == Self::MAJOR);
        Ok(look.map(|look| Self {
            class: class.clone().unbind(),
            look,
        }))
    }

    /// An object these functions may be given; none if its type is another.
    pub fn admit(&self, object: &Bound<'_, PyAny>) -> Option<Exchanged> {
        let (own, class) = (object.get_type(), self.class.as_ptr().cast());
        // SAFETY: both are types, and alive. It looks at the real type: an object may say that
        // it is of any class.
        let derives = unsafe { ffi::PyType_IsSubtype(own.as_type_ptr(), class) };
        (derives != 0).then(|| Exchanged(object.clone().unbind()))
    }

    /// Looks at a tensor. An error if it has no memory of its own to look at.
    pub fn look<T>(
        &self,
        py: Python<'_>,
        tensor: &Exchanged,
        seen: impl FnOnce(TensorInfo<'_>) -> T,
    ) -> PyResult<T> {
        // Zeroed, so that a function that fills in less leaves no undefined bytes.
        let mut found = MaybeUninit::<DlTensor>::zeroed();
        // SAFETY: the object is of the functions' class, as it was admitted, and the
        // interpreter's lock is held.
        let done = unsafe { (self.look)(tensor.0.as_ptr().cast(), found.as_mut_ptr()) };
        if done != 0 {
            return Err(PyErr::fetch(py));
        }
        // SAFETY: filled in; all zeros would be a value, too.
        let found = unsafe { found.assume_init() };
        // A scalar has no dimensions, and then both lists may be null.
        let dimensions = usize::try_from(found.dimensions).unwrap_or(0);
        let list = |list: *const i64| match list.is_null() || dimensions == 0 {
            true => &[][..],
            // SAFETY: a list of as many numbers as there are dimensions, which the tensor keeps
            // for as long as nobody changes it: nobody can before `seen` has returned.
            false => unsafe { std::slice::from_raw_parts(list, dimensions) },
        };
        Ok(seen(TensorInfo {
            // DLPack counts the offset in bytes from `data`.
            address: RawAddress(found.data as usize + found.byte_offset as usize),
            device: found.device,
            dtype: found.dtype,
            shape: list(found.shape),
            strides: list(found.strides),
        }))
    }
}
