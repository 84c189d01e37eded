// SPDX-License-Identifier: Apache-2.0
//! Stores into the file of a record, which is mapped.
//!
//! Why it is sound: the buffer is held as long as this value, so the mapping stays, and it is
//! writable and of this length. Nothing else in the process reads or writes it while the manager
//! records. Every place is checked against the length before it is accessed. Gain: the commit is
//! one store, which cannot be torn if the process dies, and a call of 20 bytes needs no system
//! call.

#![allow(unsafe_code)]

use std::fs::File;
use std::sync::atomic::{AtomicU32, Ordering};

use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;

const PAGE_SIZE: usize = 1 << 12;
static ZEROS: [u8; 1 << 18] = [0; 1 << 18];

/// A writable mapping, and the file behind it.
pub(crate) struct Mapped {
    buffer: PyBuffer<u8>,
    file: Option<File>,
}

impl Mapped {
    /// Open the mapping and the path that a recorder's files give; None if they failed.
    pub(crate) fn of(opened: &Bound<'_, PyAny>) -> PyResult<Option<Self>> {
        let Ok((buffer, path)) = opened.extract::<(Bound<'_, PyAny>, String)>() else {
            return Ok(None);
        };
        let buffer = PyBuffer::get(&buffer)?;
        let fits = !buffer.readonly() && buffer.is_c_contiguous();
        let file = File::options().write(true).open(path).ok();
        Ok(fits.then_some(Mapped { buffer, file }))
    }

    /// Its bytes.
    pub(crate) fn len(&self) -> usize {
        self.buffer.len_bytes()
    }

    /// The bytes from a place on, at most this many.
    #[inline]
    pub(crate) fn room(&mut self, at: usize, most: usize) -> &mut [u8] {
        let start = at.min(self.len());
        let size = most.min(self.len() - start);
        // SAFETY: the place is inside the mapping, and `&mut self` makes the borrow exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.place(start, size), size) }
    }

    /// Fill unused pages behind a place through the file; returns where they end. A page that is
    /// first touched through the mapping costs 3 us, one that is written with many others 1 us.
    #[cold]
    pub(crate) fn warm(&self, from: usize) -> usize {
        let start = from.next_multiple_of(PAGE_SIZE);
        let size = ZEROS.len().min(self.len().saturating_sub(start));
        self.write_to_file(start, &ZEROS[..size]);
        start + ZEROS.len()
    }

    /// Copy many bytes to a place through the file, which shares its pages with the mapping.
    pub(crate) fn write(&mut self, at: usize, bytes: &[u8]) {
        if !self.write_to_file(at, bytes) {
            self.room(at, bytes.len()).copy_from_slice(bytes);
        }
    }

    /// Write bytes to the file; returns whether that succeeded.
    fn write_to_file(&self, at: usize, bytes: &[u8]) -> bool {
        #[cfg(unix)]
        if let Some(file) = &self.file
            && std::os::unix::fs::FileExt::write_all_at(file, bytes, at as u64).is_ok()
        {
            return true;
        }
        false
    }

    /// Set a word in one store, after everything that was written before.
    pub(crate) fn set_word(&self, at: usize, value: u32) {
        let place = self.place(at, 4).cast::<u32>();
        assert!(place.is_aligned(), "frames begin at multiples of 8");
        // SAFETY: the place is inside the mapping and aligned.
        unsafe { AtomicU32::from_ptr(place) }.store(value.to_le(), Ordering::Release);
    }

    /// Extend the checksum of what came before by a part.
    pub(crate) fn checksum(&self, before: u32, at: usize, size: usize) -> u32 {
        let place = self.place(at, size);
        // SAFETY: the place is inside the mapping, and it is not written meanwhile.
        crc32c::crc32c_append(before, unsafe { std::slice::from_raw_parts(place, size) })
    }

    fn place(&self, at: usize, size: usize) -> *mut u8 {
        assert!(
            at.checked_add(size).is_some_and(|end| end <= self.len()),
            "the mapping ends there"
        );
        self.buffer.buf_ptr().cast::<u8>().wrapping_add(at)
    }
}
