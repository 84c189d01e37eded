// SPDX-License-Identifier: Apache-2.0
//! The sections at the end of canonical bytes: fields that most states do not use.
//!
//! Rules: a section is a tag, a size and so many bytes; the tags rise. A section that would hold
//! defaults only is absent, so a feature that is off adds no byte. Twin: kvcore/sections.py.

use std::collections::BTreeSet;

use crate::decode::Reader;
use crate::encode::Writer;
use crate::errors::Error;
use crate::ids::{BlockId, Row};
use crate::state::State;
use crate::unconfirmed::{UnconfirmedLoad, keyed_only};

/// The tag of the unconfirmed loads.
const LOADS: u8 = 1;
const TAGS: [u8; 1] = [LOADS];

/// Write the sections that hold more than defaults.
pub(crate) fn write_sections(out: &mut Writer, state: &State) {
    if !state.loads.is_empty() {
        let mut section = Writer::new(&[]);
        write_loads(&mut section, state);
        out.u8(LOADS);
        out.sized(section.as_bytes());
    }
}

/// Write the unconfirmed loads, in the order of their calls.
fn write_loads(out: &mut Writer, state: &State) {
    out.count(state.loads.len());
    for load in &state.loads {
        out.u64(load.batch);
        out.u32(load.first);
        out.u32(load.end);
        out.numbers(&load.loader.iter().map(|row| row.0).collect::<Vec<u32>>());
        let resting = load.requests.iter().map(|&(row, end)| (row.0, end)).collect();
        let blocks = keyed_only(state, load).map(|(block, end)| (block.0, end)).collect();
        for pairs in [resting, blocks] as [Vec<(u32, u32)>; 2] {
            out.count(pairs.len());
            pairs.into_iter().for_each(|(id, end)| {
                out.u32(id);
                out.u32(end);
            });
        }
    }
}

/// Read the sections up to the end. Fails with DamagedState.
pub(crate) fn read_sections(source: &mut Reader<'_>, state: &mut State) -> Result<(), Error> {
    let mut last = None;
    while source.offset < source.data.len() {
        let (tag, size) = (source.u8()?, source.u32()?);
        if !TAGS.contains(&tag) || last.is_some_and(|last| tag <= last) {
            let reason = format!("section {tag} is not known, or not in its place");
            return Err(source.damaged(reason));
        }
        let end = source.offset + size as usize;
        last = Some(tag);
        read_loads(source, state)?;
        if source.offset != end {
            return Err(source.damaged(format!("section {tag} has another size")));
        }
    }
    Ok(())
}

/// Read the unconfirmed loads of the next bytes, one at least. Fails with DamagedState.
fn read_loads(source: &mut Reader<'_>, state: &mut State) -> Result<(), Error> {
    let pair = |source: &mut Reader<'_>| Ok((source.u32()?, source.u32()?));
    for _ in 0..source.u32()? {
        let (batch, first, end) = (source.u64()?, source.u32()?, source.u32()?);
        let loaders = source.ids(state.requests.len() as u32)?;
        let (requests, blocks) = (source.list(pair)?, source.list(pair)?);
        let is_known = |row: u32| matches!(state.requests.get(row as usize), Some(Some(_)));
        let rows = || requests.iter().map(|&(row, _)| row);
        let is_distinct = rows().collect::<BTreeSet<u32>>().len() == requests.len();
        if !rows().chain(loaders.iter().copied()).all(is_known) || loaders.len() > 1 || !is_distinct
        {
            return Err(source.damaged("a load is not of requests"));
        }
        let num_blocks = state.config.num_blocks;
        let has_key = |block: u32| block < num_blocks && state.device.key(BlockId(block)).is_some();
        if !blocks.iter().all(|&(block, _)| has_key(block)) {
            return Err(source.damaged("a block without a key rests on a load"));
        }
        let held: BTreeSet<u32> = blocks.iter().map(|&(block, _)| block).collect();
        if held.len() < blocks.len() || first >= end {
            return Err(source.damaged("a load is not in its canonical form"));
        }
        state.loads.push(UnconfirmedLoad {
            batch,
            first,
            end,
            loader: loaders.first().copied().map(Row),
            requests: requests.into_iter().map(|(row, end)| (Row(row), end)).collect(),
            blocks: blocks.into_iter().map(|(block, end)| (BlockId(block), end)).collect(),
        });
    }
    if state.loads.is_empty() {
        return Err(source.damaged("a section holds nothing"));
    }
    Ok(())
}
