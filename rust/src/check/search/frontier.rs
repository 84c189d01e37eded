// SPDX-License-Identifier: Apache-2.0
//! Compression of packed nodes, since many nodes of a search wait at a time.
//!
//! Nodes of one world look alike, so those of a piece are compressed together (LZ4).
//! Twin: kvcore/check/search/frontier.py.

use lz4_flex::block::{compress_prepend_size, decompress_size_prepended};

/// Nodes that are compressed together, and that a worker takes at once.
pub(crate) const PIECE: usize = 64;

/// Packed nodes, one after the other.
#[derive(Debug, Default)]
pub(crate) struct Nodes {
    data: Vec<u8>,
    /// Where each node ends.
    ends: Vec<u32>,
}

impl Nodes {
    /// Count the nodes.
    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    /// Return a node.
    pub(crate) fn node(&self, place: usize) -> &[u8] {
        let start = if place == 0 { 0 } else { self.ends[place - 1] };
        &self.data[start as usize..self.ends[place] as usize]
    }

    /// Add a node.
    pub(crate) fn push(&mut self, node: &[u8]) {
        self.data.extend_from_slice(node);
        self.ends.push(self.data.len() as u32);
    }

    /// Return the nodes compressed, and forget them.
    fn squeeze(&mut self) -> Box<[u8]> {
        self.data.extend(self.ends.drain(..).flat_map(u32::to_le_bytes));
        let squeezed = compress_prepend_size(&self.data).into_boxed_slice();
        self.data.clear();
        squeezed
    }

    /// Return the nodes of a full piece that was compressed.
    fn open(squeezed: &[u8]) -> Self {
        let mut data = decompress_size_prepended(squeezed).expect("squeeze made it");
        let ends = data.split_off(data.len() - PIECE * size_of::<u32>());
        let end = |bytes: &[u8; 4]| u32::from_le_bytes(*bytes);
        Nodes { data, ends: ends.as_chunks().0.iter().map(end).collect() }
    }
}

/// The nodes of a level, in pieces; all but the last are compressed.
#[derive(Debug, Default)]
pub(crate) struct Level {
    pieces: Vec<Box<[u8]>>,
    last: Nodes,
    num_bytes: usize,
}

impl Level {
    /// Count the nodes.
    pub(crate) fn len(&self) -> usize {
        self.pieces.len() * PIECE + self.last.len()
    }

    /// Add a node.
    pub(crate) fn push(&mut self, node: &[u8]) {
        self.last.push(node);
        if self.last.len() == PIECE {
            let squeezed = self.last.squeeze();
            self.num_bytes += squeezed.len() + size_of::<Box<[u8]>>();
            self.pieces.push(squeezed);
        }
    }

    /// Return the nodes of a piece, in order; the last one may have fewer than the others.
    pub(crate) fn piece(&self, number: usize) -> Nodes {
        match self.pieces.get(number) {
            Some(squeezed) => Nodes::open(squeezed),
            None => Nodes { data: self.last.data.clone(), ends: self.last.ends.clone() },
        }
    }

    /// Return the memory of the nodes in bytes.
    pub(crate) fn num_bytes(&self) -> usize {
        self.num_bytes + self.last.data.capacity() + self.last.ends.capacity() * size_of::<u32>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_come_back_in_their_order() {
        let node = |number: usize| [number.to_le_bytes().repeat(number % 5), vec![7; 300]].concat();
        let mut level = Level::default();
        (0..20 * PIECE + 3).for_each(|number| level.push(&node(number)));
        assert_eq!(level.len(), 20 * PIECE + 3);
        for number in 0..level.len() {
            let piece = level.piece(number / PIECE);
            assert_eq!(piece.node(number % PIECE), node(number));
        }
        assert_eq!(level.piece(20).len(), 3);
        assert!(level.num_bytes() < 80_000, "{} bytes of 400,000", level.num_bytes());
    }
}
