// SPDX-License-Identifier: Apache-2.0
//! What writes a call: straight into the room that a file has, and past its end it only counts.

use crate::pool::prefetch::prefetch_to_write;
use crate::record::checksum::{crc32c, crc32c_of_copy};
use crate::record::streamed::{MANY_BYTES, bytes_of};

/// The checksum of a frame's bytes up to a place.
#[derive(Clone, Copy, Default)]
pub(crate) struct Sum {
    value: u32,
    end: usize,
}

impl Sum {
    /// The checksum of these bytes of the frame.
    pub(crate) fn of(self, frame: &[u8]) -> u32 {
        crc32c(self.value, &frame[self.end..])
    }
}

/// Writes bytes into the room of a frame.
pub(crate) struct Pen<'a> {
    room: &'a mut [u8],
    size: usize,
    sum: Sum,
}

impl<'a> Pen<'a> {
    /// A pen behind the first bytes of a frame, of which some are in a checksum.
    pub(crate) fn new(room: &'a mut [u8], size: usize, sum: Sum) -> Self {
        Pen { room, size, sum }
    }

    /// How many bytes the frame has, and the checksum of some; None if they exceed the room, which
    /// holds a part of them.
    #[inline]
    pub(crate) fn written(&self) -> Result<(usize, Sum), usize> {
        if self.size <= self.room.len() { Ok((self.size, self.sum)) } else { Err(self.size) }
    }

    /// Write a byte.
    #[inline]
    pub(crate) fn put(&mut self, byte: u8) {
        if let Some(place) = self.room.get_mut(self.size) {
            *place = byte;
        }
        self.size += 1;
    }

    /// Write some bytes.
    #[inline]
    pub(crate) fn put_all(&mut self, bytes: &[u8]) {
        if bytes.len() >= MANY_BYTES {
            return self.put_many(bytes);
        }
        let start = self.size;
        self.size += bytes.len();
        if let Some(places) = self.room.get_mut(start..self.size) {
            places.copy_from_slice(bytes);
        }
    }

    /// Write many bytes, of which the checksum is computed while they are copied.
    #[cold]
    fn put_many(&mut self, bytes: &[u8]) {
        let start = self.size;
        self.size += bytes.len();
        if self.size > self.room.len() {
            return;
        }
        prefetch_to_write(self.room, self.size); // the copy goes past the cache
        let before = self.sum.of(&self.room[..start]);
        let value = crc32c_of_copy(before, &mut self.room[start..self.size], bytes);
        self.sum = Sum { value, end: self.size };
    }

    /// Write numbers of 4 bytes each.
    #[inline]
    pub(crate) fn put_words(&mut self, words: &[u32]) {
        self.put_all(bytes_of(words));
    }

    /// Write numbers of at least 0, most of which are below 128.
    pub(crate) fn put_varints(&mut self, values: impl ExactSizeIterator<Item = u64> + Clone) {
        let end = self.size + values.len();
        if let Some(places) = self.room.get_mut(self.size..end) {
            let pairs = places.iter_mut().zip(values.clone());
            let bits = pairs.fold(0, |bits, (place, value)| {
                *place = value as u8;
                bits | value
            });
            if bits <= 0x7f {
                self.size = end;
                return;
            }
        }
        values.for_each(|value| self.put_varint(value));
    }

    /// Write a number of at least 0.
    #[inline]
    pub(crate) fn put_varint(&mut self, mut value: u64) {
        while value > 0x7f {
            self.put(value as u8 | 0x80);
            value >>= 7;
        }
        self.put(value as u8);
    }
}
