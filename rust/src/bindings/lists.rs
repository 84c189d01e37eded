// SPDX-License-Identifier: Apache-2.0
//! Lists of ints in one pass, without a copy of the list, and rows of native integers.
//! Anything but a list or tuple of exact Python ints below 2**32, or such a row, is left to the
//! slower reader, which reports what is wrong and where.
//!
//! Why it is sound: the items are borrowed, which is right as long as the list does not change. The
//! thread is attached; if that does not exclude other threads, the critical section does. No Python
//! code runs until the last item is read, since reading the digits of an exact int runs none, and
//! the first item of another kind ends the reading.

#![allow(unsafe_code)]

mod buffers;
mod in_place;

use std::ffi::c_ulong;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::critical_section::with_critical_section;
use pyo3::types::{PyList, PyTuple};
use smallvec::SmallVec;

use self::buffers::read_row;
use self::in_place::Layout;
use crate::pool::prefetch::prefetch_at;
use crate::types::values::room_for;

/// How many items before it is read an int is fetched: a prompt is seldom in the processor's cache.
const AHEAD: usize = 256;

/// The items of a list, tuple or native row of ints below 2**32; None for anything else.
pub(crate) fn exact_ids(object: Borrowed<'_, '_, PyAny>) -> Option<Tokens> {
    let (py, pointer) = (object.py(), object.as_ptr());
    if let Ok(list) = object.cast::<PyList>() {
        return with_critical_section(&object, || read_list(list));
    }
    let Ok(tuple) = object.cast::<PyTuple>() else {
        return read_row(object);
    };
    // SAFETY: it is a tuple; `read` only reads its items.
    read(py, tuple.len(), |at| unsafe { ffi::PyTuple_GetItem(pointer, at as ffi::Py_ssize_t) })
}

fn read_list(list: Borrowed<'_, '_, PyList>) -> Option<Tokens> {
    let (py, pointer) = (list.py(), list.as_ptr());
    if let Some(layout) = Layout::known(py) {
        // SAFETY: it is a list; `read` only reads its items.
        let items = unsafe { layout.items(pointer) };
        let last = list.len().saturating_sub(1);
        return read(py, list.len(), |at| {
            // SAFETY: both positions are below its length.
            unsafe {
                if at % 2 == 0 {
                    prefetch_at(*items.add(last.min(at + AHEAD)));
                }
                *items.add(at)
            }
        });
    }
    // SAFETY: it is a list; `read` only reads its items.
    read(py, list.len(), |at| unsafe { ffi::PyList_GetItem(pointer, at as ffi::Py_ssize_t) })
}

/// The only item of a list or tuple; None for anything else.
pub(crate) fn only_item<'py>(object: Borrowed<'_, 'py, PyAny>) -> Option<Bound<'py, PyAny>> {
    if let Ok(list) = object.cast::<PyList>() {
        return if list.len() == 1 { list.get_item(0).ok() } else { None };
    }
    let tuple = object.cast::<PyTuple>().ok()?;
    if tuple.len() == 1 { tuple.get_item(0).ok() } else { None }
}

/// The only item of a list or tuple if it is an int below 2**32.
pub(crate) fn only_id(object: Borrowed<'_, '_, PyAny>) -> Option<u32> {
    let item = only_item(object)?;
    read_one(object.py(), Layout::known(object.py()), item.as_ptr())
}

#[inline(always)]
fn read(
    py: Python<'_>,
    count: usize,
    item: impl Fn(usize) -> *mut ffi::PyObject,
) -> Option<Tokens> {
    let (mut ids, layout) = (collected((0..count).map(|_| 0)), Layout::known(py));
    for (position, id) in ids.iter_mut().enumerate() {
        *id = read_one(py, layout, item(position))?;
    }
    Some(ids)
}

/// Collect the ids; many get spare capacity, as for prompts.
pub(crate) fn collected(ids: impl ExactSizeIterator<Item = u32>) -> Tokens {
    if ids.len() <= Tokens::new().inline_size() {
        return ids.collect();
    }
    let mut column = Vec::with_capacity(room_for(ids.len()));
    column.extend(ids);
    column.into()
}

/// object: of a list that is not changed meanwhile, or owned.
#[inline(always)]
fn read_one(py: Python<'_>, layout: Option<Layout>, object: *mut ffi::PyObject) -> Option<u32> {
    // SAFETY: the object is alive, and an int if it is handed on.
    let value = unsafe {
        if ffi::PyLong_CheckExact(object) == 0 {
            return None;
        }
        if let Some(value) = layout.and_then(|layout| layout.small(object)) {
            return Some(value);
        }
        ffi::PyLong_AsUnsignedLong(object)
    };
    if value == c_ulong::MAX && PyErr::take(py).is_some() {
        return None;
    }
    u32::try_from(value).ok()
}

/// Tokens that were read: one is held without an allocation.
pub(crate) type Tokens = SmallVec<[u32; 4]>;
