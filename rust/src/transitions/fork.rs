// SPDX-License-Identifier: Apache-2.0
//! Fork: a child that shares its parent's blocks (parallel sampling, beam search).
//!
//! Invariants: the child shares its parent's blocks up to the tokens that the parent had computed
//! before the open batch, including a partial tail, and gets no lookahead. The first write to a
//! shared block copies it (`allocate.rs`).
//! Why: commands run before the forward pass, so a copy would miss what the open batch schedules.
//! Twin: kvcore/transitions/fork.py.

use std::sync::Arc;

use crate::mutants::{Mutant, seeded};
use crate::state::open_batch::Merge;
use crate::state::state::State;
use crate::state::table_edit::TableEdit;
use crate::transitions::free::num_cached_after;
use crate::transitions::in_flight::inherit_entries;
use crate::transitions::requests::{check_drafts_settled, check_new_id, empty_request};
use crate::transitions::unconfirmed_loads::inherit_loads;
use crate::types::errors::Error;
use crate::types::ids::Row;

/// Add a child with its parent's tokens, hashes and computed blocks; returns its row.
///
/// Fails with UnknownRequest, SwappedOut, LoadUnfinished, EmptyRequestId, RepeatedRequest,
/// DraftsPending.
pub fn fork(state: &mut State, parent_id: &str, child_id: &str) -> Result<Row, Error> {
    let parent_row = state.idle(parent_id)?;
    check_new_id(state, child_id)?;
    check_drafts_settled(&state[parent_row])?;
    let computed = state.num_settled(parent_row);
    let row = empty_request(state, child_id);
    let mut child = state[parent_row].clone();
    child.request_id = Arc::clone(&state[row].request_id);
    child.drafts.clear();
    child.num_computed = computed;
    child.preempted = false;
    child.quiet_until = 0;
    if !seeded(Mutant::ForkKeepsQuiet) {
        state[parent_row].quiet_until = 0;
    }
    let tables = std::mem::replace(&mut child.tables, std::mem::take(&mut state[row].tables));
    for (cached, group) in child.num_cached.iter_mut().zip(&state.config.groups) {
        *cached = num_cached_after(*cached, group, computed);
    }
    if !child.samplers.is_empty() || computed < child.num_tokens() {
        child.set_awaited(&state[parent_row].awaited_before(state.batch.number));
    }
    state[row] = child;
    state.epochs[row.index()] = state.epochs[parent_row.index()];
    if let Some(steps) = state.wishes.get(&parent_row).cloned() {
        state.wishes.insert(row, steps);
    }
    for (group, mut table) in (0..).zip(tables) {
        table.truncate(state.num_kept(group, &table, computed));
        TableEdit::of(state, row, group).share(table);
    }
    inherit_entries(state, parent_row, row);
    inherit_merges(state, parent_row, row);
    inherit_loads(state, parent_row, row, computed);
    state.settle_waiting(row);
    Ok(row)
}

/// Let the blocks that wait to be merged for a parent wait for its child, too, which counts them as
/// published.
fn inherit_merges(state: &mut State, parent: Row, child: Row) {
    let (parent, child) = (&state[parent].request_id, &state[child]);
    let counts = |merge: &&Merge| {
        merge.request_id == *parent && merge.position < child.num_cached[merge.group_id as usize]
    };
    let shared = state.batch.merges.iter().filter(counts);
    let renamed =
        |merge: &Merge| Merge { request_id: Arc::clone(&child.request_id), ..merge.clone() };
    let shared: Vec<Merge> = shared.map(renamed).collect();
    state.batch.merges.extend(shared);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transitions::tests::*;

    fn parent_of_three_tokens() -> State {
        let mut state = make_state(Config::new(5, 2, b"seed")).unwrap();
        admit(&mut state, "a", &[1, 2, 3], 3);
        state
    }

    #[test]
    fn a_child_shares_nothing_that_the_open_batch_writes() {
        let mut state = parent_of_three_tokens();
        let row = fork(&mut state, "a", "b").unwrap();
        assert_eq!((state[row].num_computed, state[row].holds_blocks()), (0, false));
        assert_eq!(state[row].tokens, [1, 2, 3]);
    }

    #[test]
    fn the_first_to_write_a_shared_tail_gets_a_copy() {
        let mut state = parent_of_three_tokens();
        take_batch(&mut state).unwrap();
        let child = fork(&mut state, "a", "b").unwrap();
        assert_eq!(state[child].tables[..], [[BlockId(1), BlockId(2)]]);
        append(&mut state, Requests::Ids(&["b", "a"]), &[7, 8]).unwrap();
        assert_eq!(state[child].tables[..], [[BlockId(1), BlockId(3)]]);
        assert_eq!(state[Row(0)].tables[..], [[BlockId(1), BlockId(2)]]);
        let commands = commands(&state);
        let copy = Command::CopyOnWrite { source: BlockId(2), target: BlockId(3) };
        assert_eq!(commands.iter().filter(|&each| *each == copy).count(), 1);
    }
}
