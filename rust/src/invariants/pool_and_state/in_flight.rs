// SPDX-License-Identifier: Apache-2.0
//! Named properties of batches in flight, of what they use, and of unconfirmed loads;
//! `pool_and_state.rs` lists them.
//!
//! Twin: kvcore/invariants/pool_and_state.py.

use crate::codec::sections::keyed_only;
use crate::invariants::requests::{Scratch, pools};
use crate::pool::block_pool::BlockPool;
use crate::state::batch_records::{Reporter, TableCell, UnconfirmedLoad, in_order};
use crate::state::state::State;
use crate::types::config::Duplicates;
use crate::types::groups::Group;
use crate::types::ids::{BlockId, Row};
use crate::types::violation::Finding;

/// QUARANTINE: an ownerless block is quarantined if and only if a batch in flight uses it.
pub(crate) fn quarantine(state: &State, _: &mut Scratch) -> Finding {
    let known = |number: u64| {
        number == state.batch.number || state.in_flight.iter().any(|batch| batch.number == number)
    };
    for (tier, pool) in pools(state) {
        let Some(quarantine) = &pool.quarantine else { continue };
        for (block, users) in quarantine.busy() {
            if users.is_empty() || !users.iter().all(|&number| known(number)) {
                return Err(format!("{tier} block {} is used by batches {users:?}", block.0));
            }
            if pool.ref_count(block) == 0 && !quarantine.contains(block) {
                let block = block.0;
                return Err(format!("{tier} block {block} is free, but used by batches {users:?}"));
            }
        }
        if let Some(block) = quarantine.blocks().iter().find(|&&block| !quarantine.is_busy(block)) {
            return Err(format!("{tier} block {} is quarantined, but no batch uses it", block.0));
        }
    }
    Ok(())
}

/// IN-FLIGHT: the numbers of batches in flight ascend to that of the open batch; a batch has
/// entries for known requests alone, each with an order of its own, and notes replaced positions
/// only among those that its forward pass uses.
pub(crate) fn in_flight(state: &State, _: &mut Scratch) -> Finding {
    let most = state.config.max_in_flight as usize;
    let taken = state.in_flight.iter().map(|batch| batch.number);
    let rising = taken.chain([state.batch.number]).is_sorted_by(|one, next| one < next);
    if !rising || state.in_flight.len() > most {
        let num_unfinished = state.in_flight.len();
        let open = state.batch.number;
        return Err(format!("{num_unfinished} batches of {most} are in flight, {open} is open"));
    }
    for batch in &state.in_flight {
        let unused = |&&(row, group_id, position): &&TableCell| {
            batch.entries.held(row).get(group_id as usize).is_none_or(|&held| position >= held)
        };
        if let Some((row, group_id, position)) = batch.replaced.iter().find(unused) {
            let place = format!("{position} of group {group_id} of row {}", row.0);
            return Err(format!(
                "batch {} notes place {place} as replaced, which it did not use",
                batch.number
            ));
        }
    }
    let request = |row: Row| state.requests.get(row.index()).and_then(Option::as_ref);
    for batch in &state.in_flight {
        for (row, entry) in in_order(&batch.entries) {
            let name = || format!("batch {} has an entry for row {}", batch.number, row.0);
            let Some(request) = request(row) else {
                return Err(format!("{}, which has no request", name()));
            };
            let held = batch.entries.held(row);
            if held.iter().zip(&request.tables).any(|(&held, table)| held as usize > table.len()) {
                return Err(format!("{} with {held:?} blocks, it has fewer", name()));
            }
            if entry.restore > entry.before {
                let (restore, before) = (entry.restore, entry.before);
                return Err(format!("{}: restores {restore} of {before} tokens", name()));
            }
        }
    }
    let all_entries =
        state.in_flight.iter().map(|batch| &batch.entries).chain([&state.batch.entries]);
    for entries in all_entries {
        if !in_order(entries).is_sorted_by(|one, next| one.1.order < next.1.order) {
            return Err("a batch has two entries with one order".to_owned());
        }
    }
    match in_order(&state.batch.entries).iter().find(|each| request(each.0).is_none()) {
        Some((row, _)) => {
            Err(format!("the open batch has an entry for row {}, which is free", row.0))
        }
        None => Ok(()),
    }
}

/// UNCONFIRMED: an unconfirmed load belongs to a batch that may still fail; some known request can
/// report it; requests that rest on it count its tokens; its blocks have keys, or are owed some by
/// batches; and unless duplicates are merged, each request that holds such a block after its start,
/// and counts it to its noted end, rests on it.
pub(crate) fn unconfirmed(state: &State, _: &mut Scratch) -> Finding {
    let open = state.batch.number;
    let may_fail = |number: u64| match state.config.max_in_flight {
        0 => number == open || Some(number) == open.checked_sub(1),
        _ => number == open || state.in_flight.iter().any(|batch| batch.number == number),
    };
    if !state.loads.is_sorted_by_key(|load| load.batch)
        || !state.loads.iter().all(|load| may_fail(load.batch))
    {
        let batches: Vec<u64> = state.loads.iter().map(|load| load.batch).collect();
        return Err(format!(
            "loads of batches {batches:?} are unconfirmed, but batch {open} is open"
        ));
    }
    for load in &state.loads {
        let (first, end, batch) = (load.first, load.end, load.batch);
        let wrong = rest_on_it(state, load).and_then(|()| blocks_rest_on_it(state, load));
        wrong.map_err(|detail| format!("load {first}-{end} of batch {batch}: {detail}"))?;
    }
    Ok(())
}

/// What is wrong in the requests that an unconfirmed load names.
fn rest_on_it(state: &State, load: &UnconfirmedLoad) -> Finding {
    let limit = state.config.length_limit();
    if load.first >= load.end || load.end > limit {
        return Err(format!("a request has at most {limit} tokens"));
    }
    let request = |row: Row| state.requests.get(row.index()).and_then(Option::as_ref);
    if load.reporters.is_empty() {
        return Err("no request can report it".to_owned());
    }
    let resting = load.reporters.iter().any(|each| each.counted > 0);
    if load.batch == state.batch.number && !resting {
        return Err("no request counts it, but its batch is open".to_owned());
    }
    for &Reporter { row, counted, most } in &load.reporters {
        let Some(request) = request(row) else {
            return Err(format!("row {}, which can report it, is free", row.0));
        };
        let (row, most_counted) = (row.0, request.num_accepted());
        if most <= load.first || most > load.end {
            return Err(format!("row {row} rested on it up to {most}"));
        }
        if counted > 0 && (counted <= load.first || counted > most.min(most_counted)) {
            return Err(format!(
                "row {row} rests on it up to {counted}, but counts {most_counted}"
            ));
        }
    }
    Ok(())
}

/// What is wrong in the blocks that rest on an unconfirmed load, or in the requests that hold them.
fn blocks_rest_on_it(state: &State, load: &UnconfirmedLoad) -> Finding {
    let blocks: Vec<(BlockId, u32)> = keyed_only(state, load).collect();
    let groups = &state.config.groups;
    let ends = |end: u32, group: &Group| match group.is_state() {
        _ if state.has_tails => end.is_multiple_of(state.hash_block_size),
        true => end.is_multiple_of(state.hash_block_size),
        false => end.is_multiple_of(group.block_size),
    };
    for &(block, end) in &blocks {
        if end <= load.first || !groups.iter().any(|group| ends(end, group)) {
            return Err(format!("block {} rests on it, but ends at {end}", block.0));
        }
    }
    if state.config.duplicates == Duplicates::Merge {
        return Ok(());
    }
    for (row, request) in (0..).map(Row).zip(&state.requests) {
        let Some(request) = request.as_ref().filter(|_| load.reporter(row).counted == 0) else {
            continue;
        };
        for (group, table) in groups.iter().zip(&request.tables) {
            let mut behind = table.iter().skip(load.first.div_ceil(group.block_size) as usize);
            let counts = |&held: &&BlockId| {
                let ends = blocks.iter().filter(|(block, _)| block == held).map(|&(_, end)| end);
                ends.min().is_some_and(|end| end <= request.num_accepted())
            };
            if let Some(held) = behind.find(counts) {
                let (name, block) = (request.name(), held.0);
                return Err(format!("{name} holds block {block} but does not rest on it"));
            }
        }
    }
    Ok(())
}

/// Whether a batch uses a quarantined block.
pub(crate) fn is_used_by(pool: &BlockPool, number: u64) -> bool {
    let Some(quarantine) = &pool.quarantine else { return false };
    let busy = quarantine.busy();
    let mut waiting = busy.iter().filter(|(block, _)| quarantine.contains(*block));
    waiting.any(|(_, users)| users.contains(&number))
}
