// SPDX-License-Identifier: Apache-2.0
//! Stores into the file of a record, which is mapped, and into its open frame.
//!
//! Why it is sound: the buffer is held as long as this value, so the mapping stays, and it is
//! writable and of this length. Nothing else in the process reads or writes it while the manager
//! records. Every place is checked against the length before it is accessed. Gain: the commit is
//! one store, which cannot be torn if the process dies, and a call needs no system call.

#![allow(unsafe_code)]

use std::sync::atomic::{AtomicU32, Ordering, compiler_fence};

use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;

use crate::pool::prefetch::prefetch_to_write;
use crate::record::pen::{Pen, Sum};

/// The bytes of a frame's length and checksum.
pub(crate) const FRAME_SIZE: usize = 8;
const OPEN: u32 = 1 << 31;
/// What stays unused at the end: the padding of a frame, and the words of one that follows.
const MARGIN: usize = 16;
/// How many cache lines are fetched before they are written. A store waits for its line, all later
/// stores wait for it, and so do loads of what these store.
const NUM_FETCHED: usize = 4;
const LINE: usize = 64;

/// A writable mapping.
pub(crate) struct Mapped {
    buffer: PyBuffer<u8>,
}

impl Mapped {
    /// Open the mapping that a recorder's files give; None if they failed.
    pub(crate) fn of(opened: &Bound<'_, PyAny>) -> PyResult<Option<Self>> {
        if opened.is_none() {
            return Ok(None);
        }
        let buffer = PyBuffer::get(opened)?;
        let fits = !buffer.readonly() && buffer.is_c_contiguous();
        Ok(fits.then_some(Mapped { buffer }))
    }

    /// All bytes.
    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        let size = self.buffer.len_bytes();
        // SAFETY: these are the mapping's, and `&mut self` makes the borrow exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.buffer.buf_ptr().cast(), size) }
    }

    /// The bytes from a place on that a frame may have.
    #[inline]
    pub(crate) fn room(&mut self, at: usize) -> &mut [u8] {
        let bytes = self.bytes();
        let end = bytes.len().saturating_sub(MARGIN).max(at);
        bytes.get_mut(at..end).unwrap_or_default()
    }

    /// Fetch the cache lines behind a place, which the next steps write.
    #[inline]
    pub(crate) fn fetch_behind(&mut self, at: usize) {
        let bytes = self.bytes();
        (1..=NUM_FETCHED).for_each(|line| prefetch_to_write(bytes, at + LINE * line));
    }

    /// Set a word in one store, after everything that was written before.
    #[inline]
    pub(crate) fn set_word(&self, at: usize, value: u32) {
        assert!(at + 4 <= self.buffer.len_bytes(), "the mapping ends there");
        let place = self.buffer.buf_ptr().cast::<u8>().wrapping_add(at).cast::<u32>();
        assert!(place.is_aligned(), "frames begin at multiples of 8");
        // SAFETY: the place is inside the mapping and aligned.
        unsafe { AtomicU32::from_ptr(place) }.store(value.to_le(), Ordering::Release);
    }

    /// Set a word in one store, before everything that is written later.
    #[inline]
    pub(crate) fn begin_word(&self, at: usize, value: u32) {
        self.set_word(at, value);
        compiler_fence(Ordering::SeqCst);
    }
}

/// The open frame: where it begins, how many bytes it has, and the checksum of some.
pub(crate) struct OpenFrame {
    pub(crate) mapped: Mapped,
    pub(crate) at: usize,
    pub(crate) size: usize,
    sum: Sum,
}

impl OpenFrame {
    /// A frame in this mapping, which is to be begun.
    pub(crate) fn new(mapped: Mapped) -> Self {
        OpenFrame { mapped, at: 0, size: 0, sum: Sum::default() }
    }

    /// Begin a frame behind this place.
    pub(crate) fn begin(&mut self, end: usize) {
        self.at = end.next_multiple_of(8);
        (self.size, self.sum) = (0, Sum::default());
    }

    /// What writes behind the bytes that are committed.
    #[inline(always)] // of each call
    pub(crate) fn pen(&mut self) -> Pen<'_> {
        if self.size == 0 {
            self.mapped.begin_word(self.at, OPEN);
        }
        Pen::new(self.mapped.room(self.at + FRAME_SIZE), self.size, self.sum)
    }

    /// Commit what a pen has written. Fails with the place up to which the mapping has to have
    /// room, and then another pen has to write it.
    #[inline(always)] // of each call
    pub(crate) fn commit(&mut self, written: Result<(usize, Sum), usize>) -> Result<(), usize> {
        let (size, sum) = written.map_err(|size| self.at + size + 2 * FRAME_SIZE)?;
        (self.size, self.sum) = (size, sum);
        self.mapped.set_word(self.at, OPEN | size as u32);
        Ok(())
    }

    /// Close the frame, and begin the next one.
    pub(crate) fn close(&mut self) {
        let start = self.at + FRAME_SIZE;
        let sum = self.sum.of(&self.mapped.room(start)[..self.size]);
        self.mapped.set_word(self.at + 4, sum);
        self.mapped.set_word(self.at, self.size as u32);
        self.begin(start + self.size);
        self.mapped.fetch_behind(self.at);
    }
}
