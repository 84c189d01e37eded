// SPDX-License-Identifier: Apache-2.0
//! Rows of native integers, copied from where their owner keeps them.
//!
//! Only of types whose buffers cost no Python code: `array.array`, `memoryview` and numpy's arrays.
//! Any other buffer, and one with a number that is no id, is left to `bindings/tokens.rs`.
//! Why it is sound: the memory is read between the interface's calls that export and release it.

use std::mem::MaybeUninit;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyMemoryView, PyType};

use crate::bindings::lists::{Tokens, collected};

/// The ids of such a row; None for anything else.
pub(super) fn read_row(object: Borrowed<'_, '_, PyAny>) -> Option<Tokens> {
    if !is_plain(object) {
        return None;
    }
    let mut view = MaybeUninit::uninit();
    let wanted = ffi::PyBUF_FORMAT | ffi::PyBUF_ND; // contiguous
    // SAFETY: the object is alive.
    if unsafe { ffi::PyObject_GetBuffer(object.as_ptr(), view.as_mut_ptr(), wanted) } != 0 {
        drop(PyErr::take(object.py()));
        return None;
    }
    // SAFETY: it was exported, is read while it is, and released once.
    unsafe {
        let read = read(view.assume_init_ref());
        ffi::PyBuffer_Release(view.as_mut_ptr());
        read
    }
}

/// Whether the object is of one of the types above.
fn is_plain(object: Borrowed<'_, '_, PyAny>) -> bool {
    static ARRAY: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    static NUMPY: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let py = object.py();
    if ARRAY.import(py, "array", "array").is_ok_and(|array| object.is_exact_instance(array)) {
        return true;
    }
    if NUMPY.get(py).is_none() && loaded(py, "numpy") {
        drop(NUMPY.import(py, "numpy", "ndarray"));
    }
    let is_numpy = NUMPY.get(py).is_some_and(|array| object.is_exact_instance(array.bind(py)));
    is_numpy || object.is_exact_instance_of::<PyMemoryView>()
}

/// Whether a module was imported.
fn loaded(py: Python<'_>, name: &str) -> bool {
    let modules = || py.import("sys")?.getattr("modules")?.cast::<PyDict>()?.contains(name);
    modules().unwrap_or(false)
}

/// # Safety
/// The view is exported, contiguous and with a format.
unsafe fn read(view: &ffi::Py_buffer) -> Option<Tokens> {
    if view.ndim != 1 || view.format.is_null() {
        return None;
    }
    // SAFETY: a format ends with a zero, so a second character is there if the first is none.
    let [kind, end] =
        unsafe { [*view.format, if *view.format == 0 { 0 } else { *view.format.add(1) }] };
    // SAFETY: an item of this kind and size is one of this type.
    unsafe {
        match (kind as u8, end, view.itemsize) {
            (b'I' | b'L', 0, 4) => items(view, |_: u32| true, |item| item),
            (b'i' | b'l', 0, 4) => items(view, |item: i32| item >= 0, i32::cast_unsigned),
            (b'l' | b'q', 0, 8) => {
                items(view, |item| u32::try_from(item).is_ok(), |item: i64| item as u32)
            }
            _ => None,
        }
    }
}

/// # Safety
/// The items of the view are of this type.
unsafe fn items<T>(
    view: &ffi::Py_buffer,
    is_id: impl Fn(T) -> bool,
    id: impl Fn(T) -> u32,
) -> Option<Tokens> {
    let (first, count) = (view.buf.cast::<T>(), view.len as usize / size_of::<T>());
    if !first.is_aligned() {
        return None;
    }
    // SAFETY: the item is one of the view's.
    let item = |at| unsafe { first.add(at).read() };
    if !(0..count).fold(true, |all, at| all & is_id(item(at))) {
        return None;
    }
    Some(collected((0..count).map(|at| id(item(at)))))
}
