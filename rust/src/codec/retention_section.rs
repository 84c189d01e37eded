// SPDX-License-Identifier: Apache-2.0
//! The section of canonical bytes for levels: the time, and the wishes of blocks and requests.
//!
//! The place of a free block follows from them.
//!
//! Twin: kvcore/codec/retention_section.py.

use crate::pool::free_queue::num_older;
use crate::pool::retention_state::Kept;
use crate::state::state::State;
use crate::types::config::Eviction;
use crate::types::errors::Error;
use crate::types::ids::{BlockId, Row};
use crate::types::retention::{DEFAULT_STEPS, DURATION_MAX, LEVEL_MAX, Step, TIME_MAX, Wish};
use crate::types::wire::{Reader, Writer};

/// Whether any value differs from its default.
pub(crate) fn has_retention(state: &State) -> bool {
    let has_kept = || state.device.all_kept().next().is_some();
    state.device.retention.is_some()
        && (state.device.now() > 0 || !state.wishes.is_empty() || has_kept())
}

/// Write the time, the blocks with a wish in ascending order, and the steps of requests that differ
/// from the defaults, in row order.
pub(crate) fn write_retention(out: &mut Writer, state: &State) {
    out.u64(state.device.now());
    out.count(state.device.all_kept().count());
    for (block, kept) in state.device.all_kept() {
        out.u32(block.0);
        write_wish(out, (kept.base, kept.level, kept.until));
    }
    let mut rows: Vec<(&Row, &Vec<Step>)> = state.wishes.iter().collect();
    rows.sort_unstable_by_key(|each| each.0);
    out.count(rows.len());
    for (row, steps) in rows {
        out.u32(row.0);
        out.count(steps.len());
        for (first, wish) in steps {
            out.u32(*first);
            write_wish(out, (wish.base, wish.level, wish.duration));
        }
    }
}

/// Read the levels of the next bytes. Fails with DamagedState.
pub(crate) fn read_retention(source: &mut Reader<'_>, state: &mut State) -> Result<(), Error> {
    let (now, mut kept): (u64, Vec<(BlockId, Kept)>) = (source.u64()?, Vec::new());
    for _ in 0..source.u32()? {
        let block = BlockId(source.u32()?);
        let (base, level, until) = read_wish(source, TIME_MAX + DURATION_MAX)?;
        let (each, pool) = (Kept { base, level, until }, &state.device);
        let is_known = !pool.is_null(block)
            && block.0 < pool.num_blocks()
            && kept.last().is_none_or(|last| last.0 < block);
        let is_idle = |block| pool.key(block).is_none() && pool.queue.contains(block);
        if !is_known || each == Kept::default() || is_idle(block) {
            return Err(source.damaged(format!("block {} has an empty wish", block.0)));
        }
        kept.push((block, each));
    }
    let mut last = None;
    for _ in 0..source.u32()? {
        let row = Row(source.u32()?);
        let steps: Vec<Step> = source.list(|source| {
            let first = source.u32()?;
            let (base, level, duration) = read_wish(source, DURATION_MAX)?;
            Ok((first, Wish { base, level, duration }))
        })?;
        let is_known = matches!(state.requests.get(row.index()), Some(Some(_)));
        let is_there = is_known && last.is_none_or(|last| last < row);
        let begins = steps.first().is_some_and(|step| step.0 == 0);
        if !is_there || !begins || !steps.is_sorted_by(falls) || steps == DEFAULT_STEPS {
            return Err(source.damaged("the wishes of a request are impossible"));
        }
        last = Some(row);
        state.wishes.insert(row, steps);
    }
    if now > TIME_MAX || state.config.eviction != Eviction::Retention {
        return Err(source.damaged("levels are not in canonical form"));
    }
    if now == 0 && kept.is_empty() && last.is_none() {
        return Err(source.damaged("a section is empty"));
    }
    state.device.set_kept(now, &kept);
    Ok(())
}

/// Put the free blocks into the rings of their levels. Fails with DamagedState.
pub(crate) fn place_levels(source: &Reader<'_>, state: &mut State) -> Result<(), Error> {
    let pool = &mut state.device;
    let (order, older): (Vec<BlockId>, u32) = (pool.queue.iter().collect(), num_older(&pool.queue));
    pool.place_by_level();
    let is_first = state.epoch == 0 || older == num_older(&pool.queue);
    if !is_first || !pool.queue.iter().eq(order) {
        return Err(source.damaged("the free queue is not in the order of its levels"));
    }
    Ok(())
}

/// Whether a step is before another one and wishes more.
fn falls(one: &Step, other: &Step) -> bool {
    let (one, other, is_before) = (one.1, other.1, one.0 < other.0);
    let is_more = one.base >= other.base && one.level >= other.level;
    is_before && is_more && one.duration >= other.duration && one != other
}

fn write_wish(out: &mut Writer, (base, level, time): (u8, u8, u64)) {
    out.u8(base);
    out.u8(level);
    out.u64(time);
}

fn read_wish(source: &mut Reader<'_>, most: u64) -> Result<(u8, u8, u64), Error> {
    let (base, level, time) = (source.u8()?, source.u8()?, source.u64()?);
    if base.max(level) > LEVEL_MAX || time > most {
        return Err(source.damaged(format!("({base}, {level}, {time}) is not a possible wish")));
    }
    Ok((base, level, time))
}
