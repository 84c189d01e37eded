// SPDX-License-Identifier: Apache-2.0
//! What one call may do to the free queue, to keys and to the blocks that it hits.
//!
//! No transition calls anything here. A checker gets the state before a call, the call, its outcome
//! and the state after it. The queue is followed by the commands of the call, a second time and by
//! itself. Checks of refusals, resets and writes are in outcomes.rs. Twin:
//! kvcore/check/properties/transitions.py.

use smallvec::SmallVec;

use crate::check::names::same::same_state;
use crate::check::properties::claims::{pin_hit, pins};
use crate::check::properties::epochs::{Followed, epoch_first};
use crate::check::properties::floors::floor;
use crate::check::properties::hits::{all_hit_blocks, hit_of};
use crate::check::properties::published::{Made, published};
use crate::check::properties::retention::{leaves_by_level, wishes};
use crate::check::world::calls::perform;
use crate::check::world::keyed::{keys_of, own_tails};
use crate::check::world::world::World;
use crate::oracle::calls::{Call, Value};
use crate::pool::block_pool::BlockPool;
use crate::pool::quarantine::Quarantine;
use crate::transitions::append::places_grown;
use crate::types::commands::Command;
use crate::types::ids::{BlockId, Row};
use crate::types::keys::Key;
use crate::types::values::Hit;
use crate::types::violation::{Checks, Finding, Violation};

/// One property of a call: on which state, with which outcome, and the state after it.
pub type TransitionCheck = fn(&Made<'_>) -> Finding;

/// The properties of this file, by name; DETERMINISM is checked only if it is named.
pub static TRANSITION_PROPERTIES: [(&str, TransitionCheck); 14] = [
    ("LRU", lru),
    ("EPOCH-FIRST", epoch_first),
    ("WISHES", wishes),
    ("ROW-LIFE", row_life),
    ("GROWN", grown),
    ("PINS", pins),
    ("PIN-HIT", pin_hit),
    ("FLOOR", floor),
    ("HIT-PRESERVE", hit_preserve),
    ("HIT-PINNED", hit_pinned),
    ("HIT-FRESH", hit_fresh),
    ("FULLHIT", full_hit),
    ("HASH-MONO", hash_mono),
    ("PUBLISHED", published),
];

/// Fails with the first property that counts and that a call breaks; misuse is checked elsewhere.
pub fn check(made: &Made<'_>, checks: &Checks) -> Result<(), Violation> {
    if made.outcome.is_misuse() {
        return Ok(());
    }
    for &(name, holds) in &TRANSITION_PROPERTIES {
        if checks.count(name) {
            holds(made).map_err(|detail| Violation::new(name, detail))?;
        }
    }
    Ok(())
}

/// LRU: a call takes the front of the free queue, or any free block if there are floors (see
/// FLOOR); freed blocks are placed by the policy, and the others keep their order.
fn lru(made: &Made<'_>) -> Finding {
    let (before, after) = (&made.before.device, &made.after.device);
    let mut commands = made.outcome.commands(made.after).peekable();
    if commands.peek().is_none() && before.queue == after.queue {
        return Ok(());
    }
    if matches!(made.call, Call::Cancel { .. }) || before.eviction().has_places() {
        return Ok(());
    }
    if before.retention.is_some() {
        return leaves_by_level(made);
    }
    let name = made.call.transition();
    let mut queue = Followed::new(before);
    let waits = |block: BlockId| after.quarantine.as_ref().is_some_and(|each| each.contains(block));
    for block in before.quarantine.iter().flat_map(Quarantine::blocks) {
        let touches = |command| command == Command::Touch { block };
        if !waits(block) && !made.outcome.commands(made.after).any(touches) {
            queue.join(block, before.has_key(block));
        }
    }
    for command in commands {
        match command {
            Command::Allocate { block } if queue.take(block, before.floors.is_some()) => {}
            Command::Allocate { block } => {
                let front = queue.blocks.first();
                let block = block.0;
                return Err(format!("{name} takes block {block}, but {front:?} is the front"));
            }
            Command::Touch { block } => queue.blocks.retain(|each| *each != block),
            Command::Free { block, cached } if !waits(block) => queue.join(block, cached),
            _ => {}
        }
    }
    let queue = queue.blocks;
    if after.queue.iter().eq(queue.iter().copied()) {
        return Ok(());
    }
    let left: Vec<BlockId> = after.queue.iter().collect();
    Err(format!("{name} leaves the queue {left:?}; its commands give {queue:?}"))
}

/// ROW-LIFE: a row becomes free when the batch that was open at its request's removal is finished;
/// after a cancel, if no remaining batch uses it.
fn row_life(made: &Made<'_>) -> Finding {
    let (before, after) = (made.before, made.after);
    let is_unfinished =
        |number: u64| number == after.batch.number || after.in_flight().any(|each| each == number);
    let cancels = matches!(made.call, Call::Cancel { .. });
    for row in after.free_rows.iter().filter(|&row| !before.free_rows.contains(row)) {
        let held = before.held_rows.iter().find(|(each, _)| each == row);
        let left = cancels && after.in_flight.iter().any(|batch| batch.rows.contains(row));
        if held.is_none_or(|&(_, batch)| is_unfinished(batch)) || left {
            let name = made.call.transition();
            return Err(format!("{name} gives back row {}, which a batch may have", row.0));
        }
    }
    Ok(())
}

/// GROWN: `append` returns each table position that it set, in the order of its commands.
fn grown(made: &Made<'_>) -> Finding {
    let (Value::Appended(_), Call::Append { name, .. }) = (&made.outcome.value, made.call) else {
        return Ok(());
    };
    let rows: Vec<u32> = name.row(made.after).map(|row| row.0).into_iter().collect();
    let said = places_grown(made.after, &rows, made.outcome.first_command);
    let place = |command| match command {
        Command::SetTable { group_id, position, block, .. } => {
            Some([0, group_id, position, block.0])
        }
        _ => None,
    };
    let set: Vec<[u32; 4]> = made.outcome.commands(made.after).filter_map(place).collect();
    if set == said {
        return Ok(());
    }
    Err(format!("append set the positions {set:?} of tables, but returned {said:?}"))
}

/// HIT-PRESERVE: the blocks of a hit keep their keys and stay findable.
fn hit_preserve(made: &Made<'_>) -> Finding {
    let after = &made.after.device;
    if hit_of(made).is_none() {
        return Ok(());
    }
    for (_, _, block) in hit_blocks(made) {
        let key = made.before.device.key(block);
        if after.key(block) != key {
            return Err(format!("block {} was hit and lost its key", block.0));
        }
        let is_found = |first| after.index.blocks(first).any(|each| each == block);
        if key.is_some_and(|key| !after.index.first(key).is_some_and(is_found)) {
            return Err(format!("block {} was hit and is no longer found", block.0));
        }
        if made.before.device.tail_keys(block).iter().any(|key| !has_tail(after, block, key)) {
            return Err(format!("block {} was hit and lost a tail key", block.0));
        }
    }
    match hit_tails(made).iter().find(|(block, key)| !has_tail(after, *block, key)) {
        Some((block, _)) => Err(format!("block {} was hit up to a tail that it lost", block.0)),
        None => Ok(()),
    }
}

/// HIT-PINNED: the blocks of a hit are in their request's tables, and the call evicts none of them.
fn hit_pinned(made: &Made<'_>) -> Finding {
    let Some((row, _)) = hit_of(made) else { return Ok(()) };
    for (group_id, position, block) in hit_blocks(made) {
        let table = made.after[row].tables.get(group_id as usize);
        if table.and_then(|table| table.get(position as usize)) != Some(&block) {
            let place = format!("{position} of group {group_id}");
            return Err(format!("block {} was hit at {place}, but is not there", block.0));
        }
    }
    for command in made.outcome.commands(made.after) {
        if let Command::Evict { block, .. } | Command::Allocate { block } = command
            && hit_blocks(made).any(|(_, _, hit)| hit == block)
        {
            return Err(format!("{command:?} of a block that the call hits"));
        }
    }
    Ok(())
}

/// HIT-FRESH: a hit is used only if its blocks still have the request's keys.
fn hit_fresh(made: &Made<'_>) -> Finding {
    let Some((row, hit)) = hit_of(made) else { return Ok(()) };
    let request = &made.before[row];
    for (group_id, position, block) in all_hit_blocks(made) {
        let size = made.before.hash_block_size;
        let block_size = made.before.config.groups[group_id as usize].block_size;
        let end = ((position + 1) * block_size).min(hit.num_tokens);
        let known = end / size <= request.block_hashes.len() as u32;
        let wanted = known.then(|| request.key_at(size, group_id, end));
        let has = |wanted: &Key| keys_of(&made.before.device, block).any(|key| key == wanted);
        if !wanted.as_ref().is_some_and(has) {
            let place = format!("{position} of group {group_id}");
            return Err(format!("block {} at {place} has another key by now", block.0));
        }
    }
    Ok(())
}

/// FULLHIT: a hit leaves at least one token to compute, and no token is written into a block of the
/// hit.
fn full_hit(made: &Made<'_>) -> Finding {
    let Some((row, hit)) = hit_of(made) else { return Ok(()) };
    if hit_blocks(made).next().is_none() {
        return Ok(());
    }
    let request = &made.after[row];
    let (num_hit, num_tokens) = (hit.num_tokens, request.num_tokens());
    if num_hit >= num_tokens {
        return Err(format!("{num_hit} tokens of {num_tokens} are hit"));
    }
    if num_hit >= request.num_computed {
        return Ok(());
    }
    let groups = made.before.config.groups.iter().zip(&request.tables).enumerate();
    for (index, (group, table)) in groups.filter(|(_, (group, _))| !group.is_cross()) {
        let mut written = table.iter().skip((num_hit / group.block_size) as usize);
        let hit = |block: &&BlockId| hit_blocks(made).any(|(_, _, each)| each == **block);
        if let Some(block) = written.find(hit) {
            return Err(format!("block {} of group {index} is hit and written", block.0));
        }
    }
    Ok(())
}

/// HASH-MONO: a block's key changes to another key only after an eviction.
fn hash_mono(made: &Made<'_>) -> Finding {
    let (before, after) = (&made.before.device, &made.after.device);
    let same = |&block: &BlockId| before.tails.is_none() && before.key(block) == after.key(block);
    let blocks = (0..before.num_blocks()).map(BlockId).filter(|block| !same(block));
    for (block, key) in blocks.flat_map(|block| keys_of(before, block).map(move |key| (block, key)))
    {
        if after.key(block) == Some(key) || has_tail(after, block, key) {
            continue;
        }
        let evicts = |command: Command| match command {
            Command::EvictAll => true,
            Command::Evict { block: gone, key: its } => gone == block && its == *key,
            _ => false,
        };
        if !made.outcome.commands(made.after).any(evicts) {
            let name = made.call.transition();
            let block = block.0;
            return Err(format!("{name} changes the key of block {block}, which was not evicted"));
        }
    }
    Ok(())
}

/// DETERMINISM: the same call on the same state gives the same outcome.
pub fn determinism(made: &Made<'_>, world: &World) -> Finding {
    let mut again = made.before.clone();
    let outcome = perform(&mut again, made.call, world);
    let name = made.call.transition();
    if outcome != *made.outcome {
        return Err(format!("{name} gives {outcome:?} when repeated, not {:?}", made.outcome));
    }
    if !same_state(&again, made.after) {
        return Err(format!("{name} gives another state when repeated"));
    }
    Ok(())
}

/// Return the tail keys, up to the end of the hit, of the blocks inside which the hit of a call
/// ends.
fn hit_tails(made: &Made<'_>) -> SmallVec<[(BlockId, Key); 4]> {
    let mut found = SmallVec::new();
    let Some((row, hit)) = hit_of(made).filter(|_| made.before.config.has_tails()) else {
        return found;
    };
    for (group_id, position, block) in all_hit_blocks(made) {
        let group = &made.before.config.groups[group_id as usize];
        if group.is_state() || (position + 1) * group.block_size <= hit.num_tokens {
            continue;
        }
        let mine = own_tails(made.before, row, group_id, position, hit.num_tokens);
        let tails = made.before.device.tail_keys(block).iter().filter(|key| mine.contains(key));
        found.extend(tails.map(|&key| (block, key)));
    }
    found
}

fn has_tail(pool: &BlockPool, block: BlockId, key: &Key) -> bool {
    pool.tail_keys(block).contains(key)
}

/// Return those of `all_hit_blocks` that the call does not write. A state, or a part of a block,
/// inside whose block the hit ends is written, or a copy of it; the part also if only lookahead
/// slots follow.
fn hit_blocks<'a>(made: &Made<'a>) -> impl Iterator<Item = (u32, u32, BlockId)> + use<'a> {
    let (before, after, of) = (made.before, made.after, hit_of(made));
    let has_lookahead = match made.call {
        Call::AllocateSlots(slots) => slots.num_lookahead_tokens > 0,
        _ => false,
    };
    all_hit_blocks(made).filter(move |&(group_id, position, _)| {
        let group = &before.config.groups[group_id as usize];
        let steps = |(row, hit): (Row, &Hit)| after[row].num_computed > hit.num_tokens;
        let writes = |of| steps(of) || (has_lookahead && !group.is_state());
        let is_inside = |(_, hit): (Row, &Hit)| (position + 1) * group.block_size > hit.num_tokens;
        let may_be_inside = group.is_state() || before.has_tails;
        !(may_be_inside && of.is_some_and(|of| writes(of) && is_inside(of)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::tests::checked_states::{A, B, Run, config, scheduled};
    use crate::check::world::calls::Outcome;
    use crate::oracle::calls::Slots;
    use crate::pool::free_queue::CURRENT;
    use crate::state::state::State;
    use crate::transitions::queries::get_computed_blocks;
    use crate::types::effects::Effects;

    /// Return a request that can hit four tokens, and the call that does.
    fn about_to_hit() -> (Run, Call) {
        let mut run = scheduled(config());
        run.close();
        run.call(&Call::Free { name: A });
        run.close();
        run.add(B, &[1, 2, 3, 4, 5]);
        run.close();
        let hit = Some(get_computed_blocks(&run.state, B.id()).unwrap());
        (run, Call::AllocateSlots(Slots { hit, ..Slots::new(B, 1) }))
    }

    /// Return the errors found in a call whose states before and after were changed.
    fn found(change: impl FnOnce(&mut State, &mut State, &mut Outcome)) -> Option<&'static str> {
        let (run, call) = about_to_hit();
        let (mut before, mut after) = (run.state.clone(), run.state);
        let mut outcome = perform(&mut after, &call, &run.world);
        change(&mut before, &mut after, &mut outcome);
        let made = Made { before: &before, call: &call, outcome: &outcome, after: &after };
        check(&made, &Checks::default()).err().map(|found| found.property)
    }

    #[test]
    fn a_hit_breaks_nothing_and_is_made_again() {
        assert_eq!(found(|_, _, _| ()), None);
        let (run, call) = about_to_hit();
        let mut after = run.state.clone();
        let outcome = perform(&mut after, &call, &run.world);
        let made = Made { before: &run.state, call: &call, outcome: &outcome, after: &after };
        assert_eq!(determinism(&made, &run.world), Ok(()));
        let other = Outcome { value: Value::Nothing, ..outcome.clone() };
        let made = Made { outcome: &other, ..made };
        assert!(determinism(&made, &run.world).is_err());
    }

    #[test]
    fn each_check_finds_its_own_wrong_call() {
        let row = Row(1);
        let unpublished = |_: &mut State, after: &mut State, _: &mut Outcome| {
            after.device.unpublish(BlockId(1), &mut Effects::silent());
        };
        assert_eq!(found(unpublished), Some("HIT-PRESERVE"));
        let moved = found(|_, after, _| {
            let front = after.device.queue.front().unwrap();
            after.device.queue.remove(front);
            after.device.queue.append(front, CURRENT);
        });
        assert_eq!(moved, Some("LRU"));
        let elsewhere = found(|_, after, _| after[row].tables[0][0] = BlockId(6));
        assert_eq!(elsewhere, Some("HIT-PINNED"));
        assert_eq!(found(|before, _, _| before[row].tokens[0] = 7), None);
        let stale = found(|before, _, _| before[row].block_hashes[0][0] ^= 1);
        assert_eq!(stale, Some("HIT-FRESH"));
        let whole = found(|_, after, _| after[row].tokens.truncate(4));
        assert_eq!(whole, Some("FULLHIT"));
    }

    #[test]
    fn a_key_that_goes_without_a_word_is_found() {
        let run = scheduled(config());
        let mut after = run.state.clone();
        after.device.unpublish(BlockId(1), &mut Effects::silent());
        let (call, num_commands) = (Call::TakeBatch, after.effects.commands.len());
        let outcome = Outcome { value: Value::Nothing, first_command: num_commands };
        let made = Made { before: &run.state, call: &call, outcome: &outcome, after: &after };
        let found = check(&made, &Checks::default()).unwrap_err();
        assert_eq!(found.property, "HASH-MONO");
    }
}
