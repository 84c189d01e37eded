// SPDX-License-Identifier: Apache-2.0
//! Nodes with batches in flight, packed: the state, then what is beside it.
//!
//! Numbers of prefixes are those of the search, so that only its workers read what they wrote.

use crate::check::names::in_flight::{Node, Output, Pending, Unreported};
use crate::check::names::packed::packed_value::{Packed, packed, read_bytes, write_bytes};
use crate::check::names::packed::{pack, unpack};
use crate::oracle::contents::{Content, Ghost, Marks};
use crate::oracle::prefixes::Prefixes;
use crate::oracle::schedule::writes::{Encoder, Write};
use crate::oracle::schedule::{Known, Schedule};
use crate::state::state::State;
use crate::types::violation::Violation;

/// Bytes of most packed nodes.
const FEW_BYTES: usize = 1024;

/// Return a node as bytes.
pub(crate) fn pack_node(node: &Node, prefixes: &mut Prefixes) -> Vec<u8> {
    let mut out = Vec::with_capacity(FEW_BYTES);
    let Node { pending, schedule, started, filled, unreported, outputs, texts, .. } = node;
    let Ghost { contents, tables, marks, loads, epoch, .. } = &node.memory;
    let mut state = Vec::with_capacity(FEW_BYTES);
    pack(&node.state, prefixes, &mut state);
    write_bytes(&state, &mut out);
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

/// Read a node of these bytes; node: one of its world. empty: a state of it that holds nothing.
/// Fails with NOCRASH if its state cannot be restored.
pub(crate) fn unpack_node(
    mut data: &[u8],
    empty: &State,
    prefixes: &mut Prefixes,
    node: &mut Node,
) -> Result<(), Violation> {
    let source = &mut data;
    unpack(read_bytes(source), empty, prefixes, &mut node.state)?;
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

impl Packed for Content {
    fn write(&self, out: &mut Vec<u8>) {
        let (kind, place) = match *self {
            Content::Unknown => (0, None),
            Content::Rubbish => (1, None),
            Content::Zeros => (2, None),
            Content::Spoilt => (3, None),
            Content::Prefix(number, group) => (4, Some((number, group))),
            Content::Encoded(number, group) => (5, Some((number, group))),
        };
        out.push(kind);
        place.iter().for_each(|place| place.write(out));
    }

    fn read(source: &mut &[u8]) -> Self {
        match u8::read(source) {
            0 => Content::Unknown,
            1 => Content::Rubbish,
            2 => Content::Zeros,
            3 => Content::Spoilt,
            4 => Content::Prefix(u32::read(source), u8::read(source)),
            _ => Content::Encoded(u32::read(source), u8::read(source)),
        }
    }
}

packed! {
    Pending {
        number, commands, writes, nodes, used, before, executed,
        tokens, texts, feeds, epoch, epochs,
    }
    Write {
        name, row, start, loaded, end, num_slots, num_drafts, num_rejected, ahead, encoder, failed,
    }
    Encoder { number, num_tokens }
    Marks { owned, cached, empty, evicted }
    Schedule { known, writes, num_encoders, left, cut }
    Known { computed, encoder, loading, failed, before }
    Unreported { batch, row, first }
    Output { name, row, batch, text, num_new, num_rejected, spoilt, stale }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oracle::calls::Name;
    use crate::oracle::prefixes::Numbers;
    use crate::state::state::make_state;
    use crate::types::commands::{Command, Commands, Tier};
    use crate::types::config::Config;
    use crate::types::ids::{BlockId, Row};
    use crate::types::keys::{KEY_SIZE, Key};

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
        let mut prefixes = Prefixes::new(&config);
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
        node.unreported = vec![Unreported { batch: 11, row, first: 12 }];
        node.outputs = vec![Output { num_new: 13, stale: true, ..Output::awaited(name, row, 14) }];
        node.texts = node.pending[0].texts.clone();
        let mut again = empty();
        let packed = pack_node(&node, &mut prefixes);
        unpack_node(&packed, &empty().state, &mut prefixes, &mut again).unwrap();
        assert_eq!(format!("{again:?}"), format!("{node:?}"));
    }
}
