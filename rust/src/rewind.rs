// SPDX-License-Identifier: Apache-2.0
//! Rewind: what requests count was not written, since a load failed or came in part.
//!
//! Rules: the tokens stay and are computed anew. The keys of the requests' blocks past the count
//! are withdrawn, so nobody else hits them; who counts tokens in such a block is named in the same
//! call. Twin: kvcore/rewind.py.

use std::collections::BTreeSet;

use crate::errors::Error;
use crate::ids::{BlockId, Row};
use crate::release::{check_leaving, cut_tables, leave_open_batch};
use crate::state::{RequestState, State};

/// Take back what requests count past so many tokens: keys withdrawn, blocks released.
///
/// They leave the open batch. Fails with UnknownRequest, RepeatedRequest, SwappedOut,
/// LoadUnfinished, InvalidCount, BeyondComputed, HitInOpenBatch, HeldByOthers.
pub fn rewind(
    state: &mut State,
    request_ids: &[&str],
    num_computed_tokens: i64,
) -> Result<(), Error> {
    let rows = state.distinct(request_ids)?;
    if num_computed_tokens < 0 {
        let name = "num_computed_tokens";
        return Err(Error::InvalidCount { name, value: num_computed_tokens, least: 0 });
    }
    for &row in &rows {
        state.check_idle(row)?;
        let num_computed = i64::from(state[row].num_computed);
        if num_computed_tokens > num_computed {
            let request = state[row].name();
            return Err(Error::BeyondComputed {
                request,
                num_computed,
                asked: num_computed_tokens,
            });
        }
    }
    let count = num_computed_tokens as u32;
    check_leaving(state, &rows)?;
    check_held(state, &rows, count)?;
    for &row in &rows {
        for block in unwritten(state, row, count) {
            state.device.unpublish(block, &mut state.effects);
        }
        leave_open_batch(state, row);
        cut_tables(state, row, count);
    }
    Ok(())
}

/// The blocks of a request that hold, or would hold, tokens past so many.
fn unwritten(state: &State, row: Row, num_tokens: u32) -> Vec<BlockId> {
    let mut blocks = Vec::new();
    for (group, table) in state.config.groups.iter().zip(&state[row].tables) {
        if !group.is_cross() {
            let past = table.iter().skip((num_tokens / group.block_size) as usize);
            blocks.extend(past.filter(|&&block| !state.is_null(block)));
        }
    }
    blocks
}

/// Fails with HeldByOthers if requests outside count tokens that these would leave unwritten.
fn check_held(state: &State, rewound: &[Row], num_tokens: u32) -> Result<(), Error> {
    let shared: BTreeSet<BlockId> = rewound
        .iter()
        .flat_map(|&row| unwritten(state, row, num_tokens))
        .filter(|&block| state.device.ref_count(block) > 1)
        .collect();
    if shared.is_empty() {
        return Ok(());
    }
    let mut blocks: BTreeSet<BlockId> = BTreeSet::new();
    let mut others: BTreeSet<&str> = BTreeSet::new();
    for (row, other) in (0..).map(Row).zip(&state.requests) {
        let Some(other) = other else { continue };
        if other.num_computed <= num_tokens || rewound.contains(&row) {
            continue;
        }
        for block in counted(state, other, num_tokens) {
            if shared.contains(&block) {
                blocks.insert(block);
                others.insert(&other.request_id);
            }
        }
    }
    if others.is_empty() {
        return Ok(());
    }
    Err(Error::HeldByOthers {
        blocks: blocks.into_iter().map(i64::from).collect(),
        requests: others.into_iter().map(str::to_owned).collect(),
    })
}

/// The blocks in which a request counts tokens past so many.
fn counted<'a>(
    state: &'a State,
    request: &'a RequestState,
    num_tokens: u32,
) -> impl Iterator<Item = BlockId> + 'a {
    let tables = state.config.groups.iter().zip(&request.tables);
    tables.filter(|(group, _)| !group.is_cross()).flat_map(move |(group, table)| {
        let first = (num_tokens / group.block_size) as usize;
        let end = request.num_computed.div_ceil(group.block_size) as usize;
        table.iter().take(end).skip(first).copied()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::allocate::allocate_slots;
    use crate::asked::{Asked, AskedHit};
    use crate::batch::take_batch;
    use crate::config::Config;
    use crate::queries::get_computed_blocks;
    use crate::requests::add_request;
    use crate::state::make_state;
    use crate::values::Request;

    #[test]
    fn who_counts_what_was_not_written_is_named() {
        let mut state = make_state(Config::new(6, 2, b"seed")).unwrap();
        for id in ["a", "b"] {
            add_request(&mut state, Request::new(id, &[1, 2, 3, 4, 5])).unwrap();
        }
        allocate_slots(&mut state, "a", &Asked::new(4)).unwrap().unwrap();
        let hit = Some(AskedHit::from(&get_computed_blocks(&state, "b").unwrap()));
        allocate_slots(&mut state, "b", &Asked { hit, ..Asked::new(1) }).unwrap().unwrap();
        take_batch(&mut state).unwrap();
        let held = Error::HeldByOthers { blocks: vec![2], requests: vec!["b".to_owned()] };
        assert_eq!(rewind(&mut state, &["a"], 2), Err(held));
        rewind(&mut state, &["a", "b"], 2).unwrap();
        assert_eq!(state.device.key(BlockId(2)), None);
        assert!(state.device.key(BlockId(1)).is_some());
        assert!(state.requests().all(|each| each.num_computed == 2 && each.tables[0].len() == 1));
    }
}
