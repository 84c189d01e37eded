// SPDX-License-Identifier: Apache-2.0
//! Small ints and the items of lists, read where CPython keeps them.
//!
//! Why it is sound: the stable interface hides these places, so they are used only on the versions
//! of CPython with which this library is tested, and only if the sizes of the types and a few
//! samples confirm them; otherwise the interface's functions are called. What is read of an int
//! never changes; no reference is made to it, since an int may end before `Int` does. The first
//! part of an object, its count and type, is part of the interface. Gain: lists of tokens in a
//! quarter of the time (`python -m benches.crossings`).

use std::mem::offset_of;
use std::sync::OnceLock;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyInt, PyList};

/// The first version of CPython whose objects were not looked at.
const UNKNOWN: (u8, u8) = (3, 14);
/// The digits of an int of one digit are below this.
const DIGIT_END: i64 = 1 << 30;

/// An int: behind what all objects have, its sign and number of digits, then the digits.
#[repr(C)]
struct Int {
    head: ffi::PyObject,
    tag: usize,
    digit: u32,
}

/// A list: behind what all objects have, its length, then where its items are.
#[repr(C)]
struct List {
    head: ffi::PyObject,
    length: ffi::Py_ssize_t,
    items: *const *mut ffi::PyObject,
}

/// What the tag of an int above 0 with one digit is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Layout {
    tag: usize,
}

impl Layout {
    /// The layout of this process's objects; None if it is not known.
    #[inline]
    pub(super) fn known(py: Python<'_>) -> Option<Layout> {
        static FOUND: OnceLock<Option<Layout>> = OnceLock::new();
        *FOUND.get_or_init(|| find(py).unwrap_or(None))
    }

    /// The value of an int above 0 with one digit; None of any other.
    ///
    /// # Safety
    /// The object is an exact int that is alive.
    #[inline(always)]
    pub(super) unsafe fn small(self, object: *mut ffi::PyObject) -> Option<u32> {
        let int = object.cast::<Int>();
        // SAFETY: such an object has a tag, as `find` confirmed, and one of this tag has a digit.
        unsafe { if (*int).tag == self.tag { Some((*int).digit) } else { None } }
    }

    /// Where the items of a list are.
    ///
    /// # Safety
    /// The object is a list that is alive. The place is right as long as the list does not change.
    #[inline(always)]
    pub(super) unsafe fn items(self, list: *mut ffi::PyObject) -> *const *mut ffi::PyObject {
        // SAFETY: such an object has these fields, as `find` confirmed.
        unsafe { (*list.cast::<List>()).items }
    }
}

/// Find the layout, if sizes and samples are as expected. Fails as Python does.
fn find(py: Python<'_>) -> PyResult<Option<Layout>> {
    let version = py.version_info();
    let sizes = [
        ("object", "__basicsize__", size_of::<ffi::PyObject>()),
        ("int", "__basicsize__", offset_of!(Int, digit)),
        ("int", "__itemsize__", size_of::<u32>()),
        ("list", "__basicsize__", size_of::<List>() + size_of::<usize>()),
    ];
    let builtins = py.import("builtins")?;
    for (name, field, size) in sizes {
        if builtins.getattr(name)?.getattr(field)?.extract::<usize>()? != size {
            return Ok(None);
        }
    }
    let is_known =
        (3, 11) <= (version.major, version.minor) && (version.major, version.minor) < UNKNOWN;
    Ok(if is_known { sampled(py) } else { None })
}

/// Read samples of objects of these sizes.
fn sampled(py: Python<'_>) -> Option<Layout> {
    let ints = |values: &[i64]| values.iter().map(|&value| PyInt::new(py, value)).collect();
    let small: Vec<Bound<'_, PyInt>> = ints(&[1, 2, 255, 257, 30_000, DIGIT_END - 1]);
    let other: Vec<Bound<'_, PyInt>> = ints(&[0, -1, -300, DIGIT_END, 1 << 31, i64::MAX]);
    // SAFETY: an int has a tag, whose place the size of its type confirms.
    let layout = Layout { tag: unsafe { (*small[0].as_ptr().cast::<Int>()).tag } };
    // SAFETY: they are ints and alive.
    let read = |object: &Bound<'_, PyInt>| unsafe { layout.small(object.as_ptr()) };
    let is_small = |object: &Bound<'_, PyInt>| read(object) == object.extract::<u32>().ok();
    let list = PyList::new(py, &small).ok()?;
    // SAFETY: it is a list and alive, and has an item for each int.
    let item = |at: usize| unsafe { *layout.items(list.as_ptr()).add(at) };
    let is_right = small.iter().all(|object| read(object).is_some() && is_small(object))
        && other.iter().all(|object| read(object).is_none())
        && (0..small.len()).all(|at| item(at) == small[at].as_ptr());
    is_right.then_some(layout)
}
