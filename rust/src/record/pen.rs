// SPDX-License-Identifier: Apache-2.0
//! What writes a call: straight into the room that a file has, and past its end it only counts.

/// Writes bytes into room of some size.
pub(crate) struct Pen<'a> {
    room: &'a mut [u8],
    size: usize,
}

impl<'a> Pen<'a> {
    /// A pen at the start of this room.
    pub(crate) fn new(room: &'a mut [u8]) -> Self {
        Pen { room, size: 0 }
    }

    /// How many bytes were given to it.
    #[inline]
    pub(crate) fn size(&self) -> usize {
        self.size
    }

    /// Whether all of them are in the room; otherwise it holds a part of them.
    #[inline]
    pub(crate) fn fits(&self) -> bool {
        self.size <= self.room.len()
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
        if let Some(places) = self.next(bytes.len()) {
            places.copy_from_slice(bytes);
        }
    }

    /// Write numbers of 4 bytes each.
    #[inline]
    pub(crate) fn put_words(&mut self, words: &[u32]) {
        if let Some(places) = self.next(4 * words.len()) {
            for (place, word) in places.as_chunks_mut().0.iter_mut().zip(words) {
                *place = word.to_le_bytes(); // a loop that becomes one copy
            }
        }
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

    fn next(&mut self, size: usize) -> Option<&mut [u8]> {
        let start = self.size;
        self.size += size;
        self.room.get_mut(start..self.size)
    }
}
