// SPDX-License-Identifier: Apache-2.0
//! The property PUBLISHED: full blocks become findable by the call that may publish them.
//!
//! No transition calls anything here. The calls that publish are checked: those that schedule
//! tokens, or the completion of a batch if blocks are published then; from the first block on that
//! still needs it. A call that delays publication is not checked. Twin:
//! kvcore/check/properties/published.py.

use smallvec::SmallVec;

use crate::check::world::calls::Outcome;
use crate::check::world::keyed::own_tails;
use crate::oracle::calls::{Call, Name, Value};
use crate::state::batch_records::{RequestEntry, in_order};
use crate::state::open_batch::Merge;
use crate::state::state::State;
use crate::transitions::in_flight::num_finished;
use crate::types::commands::Command;
use crate::types::config::{Duplicates, Publish};
use crate::types::ids::{BlockId, Row};
use crate::types::keys::Key;
use crate::types::values::Status;
use crate::types::violation::Finding;

/// PUBLISHED: a full block that a call may publish is findable after the call, or waits to be
/// merged with one that is; no other block is published, and none of a request of an older epoch.
/// A state whose last token comes late is findable then, or belongs to the batch that writes it; so
/// is one that a call marked, when its batch is taken. Tails of what a batch writes are findable
/// when it is taken or completed, and not before. A cancel leaves the keys of what it leaves.
pub(crate) fn published(made: &Made<'_>) -> Finding {
    if made.after.has_states {
        check_states(made)?;
        check_marks(made)?;
    }
    if made.after.device.tails.is_some() {
        check_tails(made)?;
    }
    if let Call::Cancel { .. } = made.call {
        check_cancel(made)?;
    }
    let (before, after) = (made.before, made.after);
    let late = after.config.publish == Publish::Completed;
    let is_copied = |block: BlockId| {
        let mut commands = after.effects.commands.iter();
        let copies = |each| matches!(each, Command::CopyOnWrite { target, .. } if target == block);
        late && commands.any(copies)
    };
    for (row, num_tokens) in publishing(made) {
        let (known, request) = (&before[row], &after[row]);
        let stale = known.num_computed > 0 && before.epochs[row.index()] < after.epoch;
        let num_tokens = if stale { 0 } else { num_tokens };
        let groups = (0..).zip(&after.config.groups).filter(|(_, group)| group.has_tokens());
        for (index, group) in groups {
            let num_full = num_tokens / group.block_size;
            let num_full = num_full.min(request.num_hashed(after.scales[index as usize]));
            let places = known.num_cached[index as usize]..num_full;
            for (position, &block) in places
                .clone()
                .zip(request.tables[index as usize].iter().skip(places.start as usize))
            {
                let merges = |merge: &Merge| {
                    merge.block == block && (merge.group_id, merge.position) == (index, position)
                };
                let waits = after.batch.merges.iter().any(merges);
                let has_key = after.device.key(block).is_some();
                if !after.is_null(block) && !has_key && !waits {
                    let place = format!("{position} of group {index}");
                    return Err(format!("block {} is full at {place}, but has no key", block.0));
                }
                if has_key && is_copied(block) {
                    return Err(format!("block {} is findable before it is copied", block.0));
                }
            }
            let num_cached = request.num_cached[index as usize];
            if num_cached > num_full.max(known.num_cached[index as usize]) {
                let found = format!("{num_cached} blocks of group {index} count as published");
                return Err(format!("{found}, not {num_full}"));
            }
        }
    }
    Ok(())
}

/// Fails if a cancel dropped the key or the merge of a block, though every request that counted it
/// as published keeps its tokens.
fn check_cancel(made: &Made<'_>) -> Finding {
    let (before, after) = (made.before, made.after);
    let (mut kept, mut fallen) = (Vec::new(), Vec::new());
    for request in before.requests() {
        let count = after[after.rows[&request.request_id]].num_computed;
        for ((index, group), table) in (0..).zip(&after.config.groups).zip(&request.tables) {
            for (position, &block) in (0..request.num_cached[index as usize]).zip(table) {
                if count < (position + 1) * group.block_size {
                    fallen.push(block);
                } else {
                    kept.push((block, &request.request_id, (index, position)));
                }
            }
        }
    }
    for (block, name, (index, position)) in kept {
        let is_own = |merge: &Merge| {
            merge.request_id == *name && (merge.group_id, merge.position) == (index, position)
        };
        let [known, held] = [before, after].map(|state| {
            state.device.key(block).is_some() || state.batch.merges.iter().any(is_own)
        });
        if known && !held && !fallen.contains(&block) {
            let place = format!("{position} of group {index}");
            return Err(format!("block {} at {place} loses its key by a cancel", block.0));
        }
    }
    Ok(())
}

/// Fails if a state whose last token a call added cannot become findable.
fn check_states(made: &Made<'_>) -> Finding {
    let (before, after) = (made.before, made.after);
    let (Call::AddTokens { name, .. } | Call::Accept { name, .. }) = made.call else {
        return Ok(());
    };
    let publishes = |row: &Row| after.config.enable_caching && !after.is_stale(*row);
    let Some(row) = name.row(after).filter(publishes) else { return Ok(()) };
    let (request, first) = (&after[row], before[row].num_tokens() + 1);
    let record = after.batch.scheduled.get(row);
    let taken = record.map_or(request.num_computed, |record| record.num_computed_before);
    let groups = (0..).zip(&after.config.groups).filter(|(_, group)| group.is_state());
    for (index, size) in groups.map(|(index, group)| (index, group.block_size)) {
        let hashed = request.block_hashes.len() as u32 * after.hash_block_size;
        let last = request.num_tokens().min(taken).min(hashed);
        let counts = (first..=last).filter(|n| n.is_multiple_of(size));
        for count in counts {
            let key = request.key(after.scales[index as usize], index, count / size - 1);
            let mut owed = after.in_flight.iter().flat_map(|batch| &batch.owed);
            if after.device.index.first(&key).is_none() && !owed.any(|owed| owed.key == key) {
                return Err(format!("the state after {count} tokens of group {index} has no key"));
            }
        }
    }
    Ok(())
}

/// Fails if the batch does not keep a state that a call marked, or if such a state is not findable
/// once the batch was taken.
fn check_marks(made: &Made<'_>) -> Finding {
    let (before, after) = (made.before, made.after);
    if let Call::AllocateSlots(slots) = made.call {
        let wanted = slots.checkpoint && after.config.enable_caching && !slots.delay_cache_blocks;
        let done = !matches!(made.outcome.value, Value::Misuse(_) | Value::Refused(_));
        let kept = |row: Row| after.batch.ends.contains(&row);
        if wanted && done && slots.num_new_tokens > 0 && !slots.name.row(after).is_some_and(kept) {
            return Err(format!("request {} marks a state that is not kept", slots.name.id()));
        }
    }
    let marked = if let Call::TakeBatch = made.call { Some(&before.batch.marked) } else { None };
    for &row in marked.into_iter().flatten().filter(|&&row| !after.is_stale(row)) {
        let count = after[row].num_computed;
        if count / after.hash_block_size > after[row].block_hashes.len() as u32 {
            continue;
        }
        for (index, _) in (0..).zip(&after.config.groups).filter(|(_, group)| group.is_state()) {
            let key = after[row].key_at(after.hash_block_size, index, count);
            let mut owed = after.in_flight.iter().flat_map(|batch| &batch.owed);
            if after.device.index.first(&key).is_none() && !owed.any(|owed| owed.key == key) {
                return Err(format!("the state after {count} tokens of group {index} has no key"));
            }
        }
    }
    Ok(())
}

/// Fails if a call gives keys to tails before its batch is taken, or if the end of a batch leaves
/// tails without keys.
fn check_tails(made: &Made<'_>) -> Finding {
    let (before, after) = (made.before, made.after);
    let early = match made.call {
        Call::AllocateSlots(_) => true,
        Call::Append { .. } => !before.requests().any(|each| each.num_output_placeholders() > 0),
        _ => false,
    };
    let name = made.call.transition();
    for block in (0..after.device.num_blocks()).map(BlockId).filter(|_| early) {
        let known = before.device.tail_keys(block);
        if after.device.tail_keys(block).iter().any(|key| !known.contains(key)) {
            let block = block.0;
            return Err(format!("{name} gives block {block} a tail key before its batch is taken"));
        }
    }
    let merges = after.config.duplicates == Duplicates::Merge;
    for (row, first, num_tokens) in written(made) {
        if after[row].num_loading > 0 || after.is_stale(row) {
            continue;
        }
        let groups = (0..).zip(&after.config.groups).zip(&after[row].tables);
        for ((index, _), table) in groups.filter(|((_, group), _)| group.has_tokens()) {
            for (position, &block) in (0..).zip(table) {
                if is_of_later_batch(made, row, (index, position)) {
                    continue;
                }
                let held = after.device.tail_keys(block);
                let begun = own_tails(after, row, index, position, first).len();
                let written = own_tails(after, row, index, position, num_tokens);
                let lacks = |key: &&Key| {
                    !(held.contains(key) || merges && after.device.first_tail(key).is_some())
                };
                let lost = written.iter().skip(begun).any(|key| lacks(&key));
                if lost && !after.is_null(block) {
                    let place = format!("{position} of group {index}");
                    return Err(format!("block {} at {place} lacks a tail key", block.0));
                }
            }
        }
    }
    Ok(())
}

/// Return the requests whose tails a call makes findable, as it takes or completes a batch: those
/// behind a number of tokens, up to another.
fn written(made: &Made<'_>) -> SmallVec<[(Row, u32, u32); 2]> {
    let (before, after) = (made.before, made.after);
    let completed = after.config.publish == Publish::Completed;
    let taken = matches!(made.call, Call::TakeBatch);
    if taken && !completed {
        let rows = before.batch.scheduled.keys().filter(|row| !before.batch.delayed.contains(row));
        let first = |row: Row| before.batch.scheduled.get(row).map_or(0, |r| r.num_computed_before);
        return rows.map(|row| (row, first(row), after[row].num_accepted())).collect();
    }
    let entries = match made.call {
        Call::TakeBatch if after.config.max_in_flight == 0 => in_order(&before.batch.entries),
        Call::Complete { .. } if completed => in_order(&before.in_flight[0].entries),
        _ => return SmallVec::new(),
    };
    let runs = |row: Row| after[row].status() == Status::Running;
    let known = entries.into_iter().filter(|(row, entry)| entry.publishes && runs(*row));
    known.map(|(row, entry)| (row, entry.before, num_finished(after, row))).collect()
}

/// Whether a place of a request's tables may have a copy that a batch after the completed one
/// makes. A cancel may leave it unwritten, so it gets no key.
fn is_of_later_batch(made: &Made<'_>, row: Row, (group_id, position): (u32, u32)) -> bool {
    let State { in_flight, batch, .. } = made.before;
    if !matches!(made.call, Call::Complete { .. }) {
        return false;
    }
    let (completed, others) = (&in_flight[0], &in_flight[1..]);
    let later = others.iter().map(|batch| &batch.entries);
    later.chain([&batch.entries]).any(|entries| entries.get(row).is_some())
        && !completed.uses(row, group_id, position)
}

/// Return the requests of which a call publishes blocks, each with its last such token.
fn publishing(made: &Made<'_>) -> SmallVec<[(Row, u32); 2]> {
    let (before, after) = (made.before, made.after);
    let late = after.config.publish == Publish::Completed;
    let refused = match &made.outcome.value {
        Value::Misuse(_) | Value::Refused(_) => true,
        Value::Appended(appended) => appended.done == 0,
        _ => false,
    };
    let row = |name: &Name| name.row(after);
    let accepted = |row: Row| (row, after[row].num_accepted());
    let most = |row: Row| if late { num_finished(after, row) } else { accepted(row).1 };
    if !after.config.enable_caching || refused {
        return SmallVec::new();
    }
    match made.call {
        Call::AllocateSlots(slots) if !late && !slots.delay_cache_blocks => {
            row(&slots.name).into_iter().map(accepted).collect()
        }
        Call::Append { name, .. } if !late => row(name).into_iter().map(accepted).collect(),
        Call::AddTokens { name, .. } | Call::Append { name, token: Some(_), .. } => {
            let fills = |row: &Row| before[*row].num_output_placeholders() > 0;
            row(name).into_iter().filter(fills).map(|row| (row, most(row))).collect()
        }
        Call::CacheBlocks { name, num_tokens } => {
            row(name).into_iter().map(|row| (row, most(row).min(*num_tokens))).collect()
        }
        Call::Complete { .. } if late => {
            let entries = in_order(&before.in_flight[0].entries).into_iter();
            let publishes = |row: Row, entry: &RequestEntry| {
                let request = &after[row];
                entry.publishes && request.status() == Status::Running && request.num_loading == 0
            };
            let known = entries.filter(|&(row, entry)| publishes(row, entry));
            known.map(|(row, _)| (row, num_finished(after, row))).collect()
        }
        _ => SmallVec::new(),
    }
}

/// A call that was made.
#[derive(Debug, Clone, Copy)]
pub struct Made<'a> {
    /// The state before it.
    pub before: &'a State,
    /// The call.
    pub call: &'a Call,
    /// Its value.
    pub outcome: &'a Outcome,
    /// The state after it.
    pub after: &'a State,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::tests::checked_states::{A, Run, config, scheduled};
    use crate::check::world::calls::Outcome;
    use crate::oracle::calls::Slots;
    use crate::state::state::State;
    use crate::types::effects::Effects;

    /// Return a request that is not scheduled yet.
    fn empty() -> Run {
        let mut run = Run::new(config());
        run.add(A, &[1, 2, 3, 4, 5]);
        run
    }

    #[test]
    fn a_full_block_without_a_key_is_found() {
        let finds = |change: fn(&mut State)| {
            let (before, mut after) = (empty().state, scheduled(config()).state);
            change(&mut after);
            let call = Call::AllocateSlots(Slots::new(A, 5));
            let outcome = Outcome { value: Value::Nothing, first_command: 0 };
            published(&Made { before: &before, call: &call, outcome: &outcome, after: &after })
        };
        assert_eq!(finds(|_| ()), Ok(()));
        let said = finds(|after| after.device.unpublish(BlockId(1), &mut Effects::silent()));
        assert_eq!(said, Err("block 1 is full at 0 of group 0, but has no key".to_owned()));
    }
}
