// SPDX-License-Identifier: Apache-2.0
//! Nodes with batches in flight, packed: the canonical bytes of the state, then what is beside it.
//!
//! Numbers take a byte if they are small. Numbers of prefixes are those of the search, so that only
//! its workers read what they wrote.

use crate::check::names::in_flight::{Node, Output, Pending, Unreported};
use crate::check::names::packed::settle_all;
use crate::codec::decode::decode;
use crate::codec::encode::encode;
use crate::oracle::calls::Name;
use crate::oracle::contents::{Content, Ghost, Marks};
use crate::oracle::prefixes::Numbers;
use crate::oracle::schedule::writes::{Encoder, Write};
use crate::oracle::schedule::{Known, Schedule};
use crate::types::commands::{Commands, Tier};
use crate::types::ids::{BlockId, Row};
use crate::types::keys::{KEY_SIZE, Key};
use crate::types::violation::Violation;

/// Return a node as bytes.
pub(crate) fn pack_node(node: &Node) -> Vec<u8> {
    let mut out = Vec::new();
    let Node { pending, schedule, started, filled, unreported, outputs, texts, .. } = node;
    let Ghost { contents, tables, marks, loads, epoch, .. } = &node.memory;
    write_bytes(&encode(&node.state), &mut out);
    pending.write(&mut out);
    contents.write(&mut out);
    tables.write(&mut out);
    marks.write(&mut out);
    loads.write(&mut out);
    epoch.write(&mut out);
    schedule.write(&mut out);
    started.write(&mut out);
    filled.write(&mut out);
    unreported.write(&mut out);
    outputs.write(&mut out);
    texts.write(&mut out);
    out
}

/// Read a node of these bytes; node: one of its world. Fails with NOCRASH if its state cannot be
/// restored.
pub(crate) fn unpack_node(mut data: &[u8], node: &mut Node) -> Result<(), Violation> {
    let source = &mut data;
    let state = decode(read_bytes(source));
    node.state = state.map_err(|error| Violation::new("NOCRASH", error.to_string()))?;
    settle_all(&mut node.state);
    node.pending = Vec::read(source);
    let memory = &mut node.memory;
    memory.contents = Vec::read(source);
    memory.tables = Vec::read(source);
    memory.marks = Vec::read(source);
    memory.loads = Vec::read(source);
    memory.epoch = u32::read(source);
    memory.nodes.clear();
    node.schedule = Schedule::read(source);
    node.started = Vec::read(source);
    node.filled = bool::read(source);
    node.unreported = Vec::read(source);
    node.outputs = Vec::read(source);
    node.texts = Vec::read(source);
    Ok(())
}

fn write_bytes(bytes: &[u8], out: &mut Vec<u8>) {
    (bytes.len() as u32).write(out);
    out.extend_from_slice(bytes);
}

fn read_bytes<'a>(source: &mut &'a [u8]) -> &'a [u8] {
    let size = u32::read(source) as usize;
    let (bytes, rest) = source.split_at(size);
    *source = rest;
    bytes
}

/// A value that is a part of packed nodes.
trait Packed: Sized {
    fn write(&self, out: &mut Vec<u8>);

    /// Read a value of bytes that `write` gave, and take them off.
    fn read(source: &mut &[u8]) -> Self;
}

impl Packed for u64 {
    /// Write seven bits per byte, the last one below 128.
    fn write(&self, out: &mut Vec<u8>) {
        let mut number = *self;
        while number >= 128 {
            out.push(number as u8 | 128);
            number >>= 7;
        }
        out.push(number as u8);
    }

    fn read(source: &mut &[u8]) -> Self {
        let (mut number, mut shift) = (0, 0);
        loop {
            let byte = u8::read(source);
            number |= u64::from(byte & 127) << shift;
            if byte < 128 {
                return number;
            }
            shift += 7;
        }
    }
}

impl Packed for u8 {
    fn write(&self, out: &mut Vec<u8>) {
        out.push(*self);
    }

    fn read(source: &mut &[u8]) -> Self {
        let (&first, rest) = source.split_first().expect("packed nodes are written by pack_node");
        *source = rest;
        first
    }
}

/// Values that are packed as another kind of value.
macro_rules! packed_as {
    ($($kind:ty: $other:ty, $to:expr, $from:expr;)*) => {
        $(impl Packed for $kind {
            fn write(&self, out: &mut Vec<u8>) {
                let to: fn(&$kind) -> $other = $to;
                to(self).write(out);
            }

            fn read(source: &mut &[u8]) -> Self {
                let from: fn($other) -> $kind = $from;
                from(<$other>::read(source))
            }
        })*
    };
}

packed_as! {
    u32: u64, |number| u64::from(*number), |number| number as u32;
    i32: u32, |number| *number as u32, |number| number as i32;
    bool: u8, |flag| u8::from(*flag), |byte| byte > 0;
    Row: u32, |row| row.0, Row;
    BlockId: u32, |block| block.0, BlockId;
    Name: u8, |name| name.0, Name;
    Tier: bool, |tier| *tier == Tier::Host, |host| if host { Tier::Host } else { Tier::Device };
    Content: (u8, (u32, u8)), of_content, to_content;
}

fn of_content(content: &Content) -> (u8, (u32, u8)) {
    match *content {
        Content::Unknown => (0, (0, 0)),
        Content::Rubbish => (1, (0, 0)),
        Content::Zeros => (2, (0, 0)),
        Content::Spoilt => (3, (0, 0)),
        Content::Prefix(number, group) => (4, (number, group)),
        Content::Encoded(number, group) => (5, (number, group)),
    }
}

fn to_content((kind, (number, group)): (u8, (u32, u8))) -> Content {
    match kind {
        0 => Content::Unknown,
        1 => Content::Rubbish,
        2 => Content::Zeros,
        3 => Content::Spoilt,
        4 => Content::Prefix(number, group),
        _ => Content::Encoded(number, group),
    }
}

impl Packed for Key {
    fn write(&self, out: &mut Vec<u8>) {
        out.extend(self.0);
    }

    fn read(source: &mut &[u8]) -> Self {
        let (key, rest) = source.split_first_chunk::<KEY_SIZE>().expect("a key was written");
        *source = rest;
        Key(*key)
    }
}

impl Packed for Commands {
    fn write(&self, out: &mut Vec<u8>) {
        self.rows.write(out);
        write_bytes(&self.keys, out);
        self.moving.write(out);
    }

    fn read(source: &mut &[u8]) -> Self {
        let (rows, keys) = (Vec::read(source), read_bytes(source).to_vec());
        Commands { rows, keys, moving: Vec::read(source) }
    }
}

impl<T: Packed> Packed for Option<T> {
    fn write(&self, out: &mut Vec<u8>) {
        self.is_some().write(out);
        self.iter().for_each(|value| value.write(out));
    }

    fn read(source: &mut &[u8]) -> Self {
        bool::read(source).then(|| T::read(source))
    }
}

impl<T: Packed> Packed for Vec<T> {
    fn write(&self, out: &mut Vec<u8>) {
        (self.len() as u32).write(out);
        self.iter().for_each(|value| value.write(out));
    }

    fn read(source: &mut &[u8]) -> Self {
        (0..u32::read(source)).map(|_| T::read(source)).collect()
    }
}

impl Packed for Numbers {
    fn write(&self, out: &mut Vec<u8>) {
        (self.len() as u32).write(out);
        self.iter().for_each(|value| value.write(out));
    }

    fn read(source: &mut &[u8]) -> Self {
        (0..u32::read(source)).map(|_| u32::read(source)).collect()
    }
}

impl<T: Packed + Copy + Default, const N: usize> Packed for [T; N] {
    fn write(&self, out: &mut Vec<u8>) {
        self.iter().for_each(|value| value.write(out));
    }

    fn read(source: &mut &[u8]) -> Self {
        std::array::from_fn(|_| T::read(source))
    }
}

/// Tuples and structs: their fields in order.
macro_rules! packed {
    ($($name:ident { $($field:ident),* $(,)? })*) => {
        $(impl Packed for $name {
            fn write(&self, out: &mut Vec<u8>) {
                $(self.$field.write(out);)*
            }

            fn read(source: &mut &[u8]) -> Self {
                $name { $($field: Packed::read(source)),* }
            }
        })*
    };
    ($(($($kind:ident $place:tt),*))*) => {
        $(impl<$($kind: Packed),*> Packed for ($($kind,)*) {
            fn write(&self, out: &mut Vec<u8>) {
                $(self.$place.write(out);)*
            }

            fn read(source: &mut &[u8]) -> Self {
                ($($kind::read(source),)*)
            }
        })*
    };
}

packed! {
    (A 0, B 1)
    (A 0, B 1, C 2, D 3)
}

packed! {
    Pending {
        number, commands, writes, nodes, used, before, executed,
        tokens, texts, feeds, epoch, epochs,
    }
    Write { name, row, start, loaded, end, num_slots, num_drafts, encoder, failed }
    Encoder { number, num_tokens }
    Marks { owned, cached, empty, evicted }
    Schedule { known, writes, num_encoders, left, cut }
    Known { computed, encoder, loading, failed, before }
    Unreported { batch, name, first }
    Output { name, row, batch, text, num_new, num_rejected, spoilt, stale }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::state::make_state;
    use crate::types::commands::Command;
    use crate::types::config::Config;

    /// Return a batch in flight with a value in every field, the largest of their kinds among them.
    fn pending() -> Pending {
        let (key, row, name) = (Key([7; KEY_SIZE]), Row(300), Name(9));
        let mut commands = Commands::default();
        commands.push(Command::Evict { block: BlockId(2), key });
        commands.push(Command::CopyOnWrite { source: BlockId(1), target: BlockId(2) });
        let encoder = Some(Encoder { number: 1, num_tokens: 128 });
        let write = Write { encoder, failed: Some(0), ..Write::of_next_token(name, row, 127) };
        let numbers = Numbers::from_elem(u32::MAX, 20);
        Pending {
            number: u64::MAX,
            commands,
            writes: vec![write, Write::of_next_token(name, row, 16384)],
            nodes: vec![(row, numbers.clone())],
            used: vec![(Tier::Device, BlockId(1)), (Tier::Host, BlockId(0))],
            before: vec![(row, 5)],
            executed: true,
            tokens: vec![(row, numbers.clone())],
            texts: vec![(row, Numbers::new())],
            feeds: vec![(Row(0), numbers)],
            epoch: 3,
            epochs: vec![(row, 2)],
        }
    }

    #[test]
    fn a_packed_node_comes_back_as_it_was() {
        let config = Config::new(7, 2, b"seed");
        let empty = || Node::new(make_state(config.clone()).unwrap(), Ghost::new(&config));
        let (mut node, name, row) = (empty(), Name(1), Row(2));
        let kinds = [Content::Rubbish, Content::Zeros, Content::Spoilt];
        node.memory.contents[..3].copy_from_slice(&kinds);
        node.memory.contents[3] = Content::Prefix(u32::MAX, 1);
        node.memory.contents[4] = Content::Encoded(0, u8::MAX);
        node.memory.tables = vec![vec![BlockId(3), BlockId(u32::MAX)], Vec::new()];
        node.memory.marks[1] = Marks { owned: true, cached: false, empty: true, evicted: false };
        node.memory.marks[2] = Marks { owned: false, cached: true, empty: false, evicted: true };
        node.memory.loads = vec![(4, Key([8; KEY_SIZE]), BlockId(5), 6)];
        node.memory.epoch = 7;
        node.pending = vec![pending()];
        node.schedule.known =
            vec![Known { computed: Some(0), loading: Some(9), ..Known::default() }];
        node.schedule.writes = node.pending[0].writes.clone();
        node.schedule.num_encoders = 10;
        node.schedule.left = vec![(row, true)];
        node.schedule.cut = vec![row];
        (node.started, node.filled) = (vec![1, 200], true);
        node.unreported = vec![Unreported { batch: 11, name, first: 12 }];
        node.outputs = vec![Output { num_new: 13, stale: true, ..Output::awaited(name, row, 14) }];
        node.texts = node.pending[0].texts.clone();
        let mut again = empty();
        unpack_node(&pack_node(&node), &mut again).unwrap();
        assert_eq!(format!("{again:?}"), format!("{node:?}"));
    }
}
