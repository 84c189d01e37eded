// SPDX-License-Identifier: Apache-2.0
//! Canonical bytes, value by value: what reads and writes them.
//!
//! Invariants: integers are little-endian; a count stands before what it counts. What no writer
//! gives fails with DamagedState and the offset. Twin: kvcore/types/wire.py.

use crate::types::clone_in_place::clone_in_place;
use crate::types::errors::Error;
use crate::types::ids::{BlockId, Table};
use crate::types::keys::{BlockHash, HASH_SIZE, KEY_SIZE, Key};

/// A cursor over bytes to read.
#[derive(Debug)]
pub struct Reader<'a> {
    pub(crate) data: &'a [u8],
    pub(crate) offset: usize,
}

impl<'a> Reader<'a> {
    /// Bytes of which none was read yet.
    #[must_use]
    pub fn new(data: &'a [u8]) -> Self {
        Reader { data, offset: 0 }
    }

    /// The next `size` bytes. Fails with DamagedState at the end.
    pub(crate) fn take(&mut self, size: usize) -> Result<&'a [u8], Error> {
        let end = self.offset.checked_add(size).filter(|&end| end <= self.data.len());
        let Some(end) = end else {
            return Err(self.damaged(format!("{size} bytes are missing")));
        };
        let part = &self.data[self.offset..end];
        self.offset = end;
        Ok(part)
    }

    /// The bytes from a place to what is read next.
    pub(crate) fn since(&self, start: usize) -> &'a [u8] {
        &self.data[start..self.offset]
    }

    /// Bytes read so far.
    pub(crate) fn offset(&self) -> usize {
        self.offset
    }

    /// Make the error for this offset.
    pub(crate) fn damaged(&self, reason: impl Into<String>) -> Error {
        Error::DamagedState { reason: reason.into(), offset: self.offset as i64 }
    }

    /// The next bytes, as an array.
    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N], Error> {
        let mut bytes = [0; N];
        bytes.copy_from_slice(self.take(N)?);
        Ok(bytes)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, Error> {
        Ok(self.array::<1>()?[0])
    }

    pub(crate) fn flag(&mut self) -> Result<bool, Error> {
        Ok(self.choice(2)? == 1)
    }

    /// One byte below a count.
    pub(crate) fn choice(&mut self, count: u8) -> Result<u8, Error> {
        let value = self.u8()?;
        if value < count {
            return Ok(value);
        }
        Err(self.damaged(format!("{value} is not below {count}")))
    }

    pub(crate) fn u32(&mut self) -> Result<u32, Error> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    /// Four bytes, a number below an end.
    pub(crate) fn below(&mut self, end: u32) -> Result<u32, Error> {
        let value = self.u32()?;
        if value < end {
            return Ok(value);
        }
        Err(self.damaged(format!("{value} is not below {end}")))
    }

    pub(crate) fn u64(&mut self) -> Result<u64, Error> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// A count, and that many values read one after the other.
    pub(crate) fn list<T>(
        &mut self,
        mut read: impl FnMut(&mut Self) -> Result<T, Error>,
    ) -> Result<Vec<T>, Error> {
        let count = self.u32()?;
        (0..count).map(|_| read(self)).collect()
    }

    /// A count and that many u32.
    pub(crate) fn numbers(&mut self) -> Result<Vec<u32>, Error> {
        let size = (self.u32()? as usize).saturating_mul(4);
        let bytes = self.take(size)?;
        let number = |part: &[u8]| u32::from_le_bytes([part[0], part[1], part[2], part[3]]);
        Ok(bytes.chunks_exact(4).map(number).collect())
    }

    /// The same, each below end.
    pub(crate) fn ids(&mut self, end: u32) -> Result<Vec<u32>, Error> {
        let values = self.numbers()?;
        if values.iter().any(|&value| value >= end) {
            return Err(self.damaged(format!("an id is not below {end}")));
        }
        Ok(values)
    }

    /// The blocks of a table or queue of a pool.
    pub(crate) fn blocks(&mut self, num_blocks: u32) -> Result<Table, Error> {
        Ok(self.ids(num_blocks)?.into_iter().map(BlockId).collect())
    }

    /// A count and that many bytes.
    pub(crate) fn sized(&mut self) -> Result<&'a [u8], Error> {
        let size = self.u32()?;
        self.take(size as usize)
    }

    /// A key with its size.
    pub(crate) fn key(&mut self) -> Result<Key, Error> {
        let value = self.sized()?;
        let bytes = value.try_into().map_err(|_| {
            self.damaged(format!("a key has {KEY_SIZE} bytes, not {}", value.len()))
        })?;
        Ok(Key(bytes))
    }

    /// A count and that many bytes of UTF-8.
    pub(crate) fn name(&mut self) -> Result<&'a str, Error> {
        let name = std::str::from_utf8(self.sized()?);
        name.map_err(|_| self.damaged("a name is not UTF-8"))
    }

    /// A flag, and the text if there is one.
    pub(crate) fn text(&mut self) -> Result<Option<String>, Error> {
        Ok(if self.flag()? { Some(self.name()?.to_owned()) } else { None })
    }

    /// Read a count and that many block hashes.
    pub(crate) fn hashes(&mut self) -> Result<Vec<BlockHash>, Error> {
        let size = (self.u32()? as usize).saturating_mul(HASH_SIZE);
        let joined = self.take(size)?;
        let hash = |part: &[u8]| {
            let mut hash = [0; HASH_SIZE];
            hash.copy_from_slice(part);
            hash
        };
        Ok(joined.chunks_exact(HASH_SIZE).map(hash).collect())
    }
}

/// A buffer of bytes to write.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Writer {
    pub(crate) data: Vec<u8>,
}

clone_in_place!(Writer { data });

impl Writer {
    /// Bytes that begin with these.
    #[must_use]
    pub fn new(start: &[u8]) -> Self {
        Writer { data: start.to_vec() }
    }

    /// No bytes, and room for `size`.
    #[must_use]
    pub fn with_room(size: usize) -> Self {
        Writer { data: Vec::with_capacity(size) }
    }

    /// The bytes so far.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.data
    }

    pub(crate) fn u8(&mut self, value: u8) {
        self.data.push(value);
    }

    pub(crate) fn flag(&mut self, value: bool) {
        self.u8(u8::from(value));
    }

    pub(crate) fn u32(&mut self, value: u32) {
        self.data.extend_from_slice(&value.to_le_bytes());
    }

    pub(crate) fn u64(&mut self, value: u64) {
        self.data.extend_from_slice(&value.to_le_bytes());
    }

    /// A count and that many u32.
    pub(crate) fn numbers(&mut self, values: &[u32]) {
        self.count(values.len());
        self.data.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    }

    /// A count and that many ids.
    pub(crate) fn ids(&mut self, blocks: &[BlockId]) {
        self.count(blocks.len());
        blocks.iter().for_each(|block| self.u32(block.0));
    }

    /// A count and that many bytes.
    pub(crate) fn sized(&mut self, value: &[u8]) {
        self.count(value.len());
        self.data.extend_from_slice(value);
    }

    /// A flag, and the text if there is one.
    pub(crate) fn text(&mut self, value: Option<&str>) {
        self.flag(value.is_some());
        if let Some(value) = value {
            self.sized(value.as_bytes());
        }
    }

    /// Read a count and that many block hashes.
    pub(crate) fn hashes(&mut self, hashes: &[BlockHash]) {
        self.count(hashes.len());
        self.data.extend_from_slice(hashes.as_flattened());
    }

    pub(crate) fn count(&mut self, count: usize) {
        self.u32(count as u32);
    }
}
