// SPDX-License-Identifier: Apache-2.0
//! The sections of canonical bytes for eviction policies: arrivals, and what the policies remember.
//!
//! The order of arrival determines what is due, so the keys that waiting requests will look up are
//! not written, nor are places that follow from them.
//! Twin: kvcore/codec/policy_sections.py.

use crate::state::state::State;
use crate::types::errors::Error;
use crate::types::ids::{BlockId, Row};
use crate::types::policies::{KEYLESS, MAIN, ORDERS_END, Place, Uses};
use crate::types::wire::{Reader, Writer};

/// Write the due number of each request, in row order, and the next one.
pub(crate) fn write_waiting(out: &mut Writer, state: &State) {
    let Some(waiting) = &state.waiting else { return };
    for row in (0..state.requests.len() as u32).map(Row) {
        if let Some(known) = waiting.requests.get(&row) {
            out.u64(known.due);
        }
    }
    out.u64(waiting.next_due);
}

/// Write a policy's memory, the uses of each block with a key, and those of evicted contents.
pub(crate) fn write_uses(out: &mut Writer, state: &State) {
    let Some(policy) = &state.device.policy else { return };
    out.count(policy.memory.len());
    policy.memory.iter().for_each(|&number| out.u64(number));
    let history = &policy.history;
    history.uses.iter().filter(|each| each.uses > 0).for_each(|each| write_use(out, each));
    out.count(history.num_left());
    for (number, key, known) in history.left() {
        out.sized(&key.0);
        out.u64(number);
        write_use(out, known);
    }
    out.u64(history.next_number);
}

fn write_use(out: &mut Writer, known: &Uses) {
    out.u32(known.uses);
    out.u64(known.last);
    out.u64(known.before);
    out.u32(known.depth);
    out.u8(known.place.section());
    out.u64(known.place.order());
}

/// Read the arrivals of the next bytes. Fails with DamagedState.
pub(crate) fn read_waiting(source: &mut Reader<'_>, state: &mut State) -> Result<(), Error> {
    let mut rows: Vec<Row> = state.rows.values().copied().collect();
    rows.sort_unstable();
    let mut dues: Vec<(u64, Row)> = Vec::new();
    for row in rows {
        dues.push((source.u64()?, row));
    }
    let next_due = source.u64()?;
    dues.sort_unstable();
    let rises = dues.is_sorted_by(|before, after| before.0 < after.0)
        && dues.last().is_none_or(|last| last.0 < next_due);
    if !rises || !(1..ORDERS_END).contains(&next_due) || state.waiting.is_none() {
        return Err(source.damaged("the order of arrival of the requests is impossible"));
    }
    for (due, row) in dues {
        if let Some(waiting) = &mut state.waiting {
            waiting.next_due = due;
        }
        state.settle_waiting(row);
    }
    if let Some(waiting) = &mut state.waiting {
        waiting.next_due = next_due;
    }
    Ok(())
}

/// Read what a policy remembers, of the next bytes. Fails with DamagedState.
pub(crate) fn read_uses(source: &mut Reader<'_>, state: &mut State) -> Result<(), Error> {
    let memory = source.list(Reader::u64)?;
    let Some(mut policy) = state.device.policy.take() else {
        return Err(source.damaged("the policy does not remember uses"));
    };
    let history = &mut policy.history;
    for block in (0..state.device.num_blocks()).map(BlockId) {
        if state.device.key(block).is_some() {
            let known = read_use(source)?;
            let Some(uses) = history.uses.get_mut(block.index()) else {
                return Err(source.damaged("the policy does not remember uses"));
            };
            *uses = known;
        }
    }
    let num_left = source.u32()?;
    if num_left > state.device.num_blocks() {
        return Err(source.damaged("more evicted contents than blocks"));
    }
    let mut last: Option<u64> = None;
    for _ in 0..num_left {
        let (key, number) = (source.key()?, source.u64()?);
        let known = read_use(source)?;
        let rises = last.is_none_or(|last| last < number);
        if !rises || !history.leaves(number, &key, known) || known.place != KEYLESS {
            return Err(source.damaged("the order of evictions is impossible"));
        }
        last = Some(number);
    }
    history.next_number = source.u64()?;
    let ends = last.is_none_or(|last| last < history.next_number);
    if memory.len() != policy.memory.len() || !ends {
        return Err(source.damaged("the uses that the policy remembers are impossible"));
    }
    policy.memory = memory;
    state.device.policy = Some(policy);
    Ok(())
}

fn read_use(source: &mut Reader<'_>) -> Result<Uses, Error> {
    let (uses, last, before, depth) = (source.u32()?, source.u64()?, source.u64()?, source.u32()?);
    let (section, order) = (source.u8()?, source.u64()?);
    let is_place = (1..=MAIN).contains(&section) && order < ORDERS_END;
    if uses == 0 || before > last || !(is_place || (section, order) == (0, 0)) {
        return Err(source.damaged("the use of a content is impossible"));
    }
    Ok(Uses { uses, depth, last, before, place: Place::new(section, order) })
}

/// Give the free blocks their places by the policy. Fails with DamagedState.
pub(crate) fn place_blocks(source: &mut Reader<'_>, state: &mut State) -> Result<(), Error> {
    let num_known = state.waiting.as_ref().map_or(usize::MAX, |each| each.requests.len());
    if num_known < state.rows.len() {
        return Err(source.damaged("requests without an arrival"));
    }
    state.device.set_batch(state.batch.number);
    if !state.device.place_blocks() {
        return Err(source.damaged("the free queue is not in the order of its policy"));
    }
    Ok(())
}
