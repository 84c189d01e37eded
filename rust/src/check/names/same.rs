// SPDX-License-Identifier: Apache-2.0
//! The equality of two states, decided without their bytes.
//!
//! Equal means equal canonical bytes; what is not part of them (`encode.rs`) is left out. Most
//! edges ask for this, so it stops at the first difference and allocates nothing.

use std::sync::Arc;

use crate::codec::encode::encode;
use crate::pool::block_pool::BlockPool;
use crate::pool::quarantine::Quarantine;
use crate::state::batch_records::{BatchInFlight, RequestEntries, in_order};
use crate::state::open_batch::{OpenBatch, UnwrittenBlock};
use crate::state::state::{RequestState, State};
use crate::types::ids::{BlockId, Row};

/// Tell whether two states have the same canonical bytes.
#[must_use]
pub fn same_state(one: &State, other: &State) -> bool {
    let hosts = match (&one.host, &other.host) {
        (Some(one), Some(other)) => same_pool(one, other),
        (None, None) => true,
        _ => false,
    };
    hosts
        && same_pool(&one.device, &other.device)
        && all_same(&one.requests, &other.requests, same_request)
        && (&one.free_rows, &one.held_rows) == (&other.free_rows, &other.held_rows)
        && same_batch(&one.batch, &other.batch)
        && one.effects.commands == other.effects.commands
        && one.effects.events == other.effects.events
        && one.stats == other.stats
        && one.new_blocks == other.new_blocks
        && (one.next_operation, &one.operations) == (other.next_operation, &other.operations)
        && all_same(&one.in_flight, &other.in_flight, same_batch_in_flight)
        && one.config == other.config
        && same_epochs(one, other)
        && (&one.wishes, &one.named_pins) == (&other.wishes, &other.named_pins)
        && (one.device.policy.is_none() || encode(one) == encode(other))
}

/// Tell whether the weights, and what requests that count tokens began with, are of the same
/// epochs.
fn same_epochs(one: &State, other: &State) -> bool {
    let rows = || (0..one.requests.len() as u32).map(Row);
    one.epoch == other.epoch && rows().all(|row| one.epoch_of(row) == other.epoch_of(row))
}

/// Tell whether two lists are equal, entry by entry.
fn all_same<T>(one: &[T], other: &[T], same: impl Fn(&T, &T) -> bool) -> bool {
    one.len() == other.len() && one.iter().zip(other).all(|(one, other)| same(one, other))
}

/// Tell whether two pools have the same owners, keys in the same order, queue and pins.
fn same_pool(one: &BlockPool, other: &BlockPool) -> bool {
    let same = |block: BlockId| {
        (one.ref_count(block), one.is_older(block))
            == (other.ref_count(block), other.is_older(block))
            && (one.key(block), one.kept(block)) == (other.key(block), other.kept(block))
    };
    one.num_blocks() == other.num_blocks()
        && (0..one.num_blocks()).map(BlockId).all(same)
        && one.queue == other.queue
        && one.takers() == other.takers()
        && (&one.pins, one.now()) == (&other.pins, other.now())
        && same_quarantine(one.quarantine.as_ref(), other.quarantine.as_ref())
        && same_tails(one, other)
        && one.index.len() == other.index.len()
        && one.index.firsts().all(|(first, several)| {
            let (key, index) = (one.index.key(first), &other.index);
            index.first(key) == Some(first) && (!several || one.index.get(key) == index.get(key))
        })
}

/// Tell whether the same blocks have the same tail keys, in the same order.
fn same_tails(one: &BlockPool, other: &BlockPool) -> bool {
    let (Some(one), Some(other)) = (&one.tails, &other.tails) else {
        return one.tails.is_none() && other.tails.is_none();
    };
    one.iter().eq(other.iter()) && one.keyed().all(|(key, blocks)| blocks == other.blocks(key))
}

/// Tell whether the same blocks wait in the same order, and the same batches use the same blocks.
fn same_quarantine(one: Option<&Quarantine>, other: Option<&Quarantine>) -> bool {
    match (one, other) {
        (Some(one), Some(other)) => one.blocks() == other.blocks() && one.busy() == other.busy(),
        (None, None) => true,
        _ => false,
    }
}

fn same_request(one: &Option<RequestState>, other: &Option<RequestState>) -> bool {
    let (one, other) = match (one, other) {
        (Some(one), Some(other)) => (one, other),
        (None, None) => return true,
        _ => return false,
    };
    let counts = |request: &RequestState| {
        let loads = (request.num_loading, request.load_end, request.preempted);
        let numbers = (request.num_computed, request.output_from);
        (numbers, loads, request.own_hashes, request.skip_reading)
    };
    counts(one) == counts(other)
        && one.request_id == other.request_id
        && one.tokens == other.tokens
        && one.drafts == other.drafts
        && one.tables == other.tables
        && one.num_cached == other.num_cached
        && one.host_tables == other.host_tables
        && one.block_hashes == other.block_hashes
        && one.extra_keys() == other.extra_keys()
        && one.samplers == other.samplers
}

/// Tell whether two batches remember the same; what requests that left had published is out of
/// reach.
fn same_batch(one: &OpenBatch, other: &OpenBatch) -> bool {
    let said = |item: &UnwrittenBlock| (item.group_id, item.position, item.block, item.key);
    let held = |row| match (one.scheduled.get(row), other.scheduled.get(row)) {
        (Some(mine), Some(its)) => {
            (mine.num_computed_before, mine.num_kept) == (its.num_computed_before, its.num_kept)
                && one.unwritten_of(mine).map(said).eq(other.unwritten_of(its).map(said))
        }
        _ => false,
    };
    (one.number, one.starts_epoch) == (other.number, other.starts_epoch)
        && one.scheduled.values().count() == other.scheduled.values().count()
        && one.scheduled.keys().all(held)
        && one.merges == other.merges
        && (&one.ends, &one.marked) == (&other.ends, &other.marked)
        && one.delayed == other.delayed
        && same_entries(&one.entries, &other.entries)
        && one.published_keys == other.published_keys
}

/// Tell whether two batches remember the same of the same requests, in the same order.
fn same_entries(one: &RequestEntries, other: &RequestEntries) -> bool {
    let held = |row| one.held(row) == other.held(row);
    all_same(&in_order(one), &in_order(other), |(row, mine), (other, its)| {
        row == other
            && (mine.before, mine.restore, mine.publishes)
                == (its.before, its.restore, its.publishes)
            && held(*row)
    })
}

fn same_batch_in_flight(one: &Arc<BatchInFlight>, other: &Arc<BatchInFlight>) -> bool {
    Arc::ptr_eq(one, other)
        || one.number == other.number
            && same_entries(&one.entries, &other.entries)
            && (&one.published_keys, &one.rows) == (&other.published_keys, &other.rows)
            && (one.starts_epoch, &one.replaced) == (other.starts_epoch, &other.replaced)
            && one.owed == other.owed
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::decode::decode;
    use crate::codec::encode::encode;
    use crate::transitions::free::free;
    use crate::transitions::tests::*;

    /// Tell whether each state whose bytes differ in one place from a state's is told from it.
    fn is_told_apart(state: &State) -> u32 {
        let bytes = encode(state);
        assert!(same_state(state, &decode(&bytes).unwrap()));
        let mut num_other = 0;
        for place in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[place] ^= 1;
            let Ok(other) = decode(&changed) else { continue };
            let again = encode(&other) == bytes;
            assert_eq!(same_state(state, &other), again, "byte {place} of {}", bytes.len());
            num_other += u32::from(!again);
        }
        num_other
    }

    fn running(config: Config) -> State {
        let mut state = make_state(config).unwrap();
        admit(&mut state, "a", &[1, 2, 3], 2);
        admit(&mut state, "b", &[1, 2, 3], 2);
        state
    }

    #[test]
    fn a_state_is_the_one_of_its_bytes_and_of_no_other() {
        let mut config = Config::new(4, 2, b"seed");
        config.num_host_blocks = 2;
        assert!(is_told_apart(&running(config)) > 200);
    }

    #[test]
    fn what_is_in_flight_is_a_part_of_the_state() {
        let mut config = Config::new(4, 2, b"seed");
        config.max_in_flight = 2;
        let mut state = running(config);
        take_batch(&mut state).unwrap();
        allocate_slots(&mut state, "a", &SlotRequest::new(1)).unwrap().unwrap();
        free(&mut state, "b").unwrap();
        assert!(!state.in_flight.is_empty() && state.device.num_quarantined() > 0);
        assert!(is_told_apart(&state) > 200);
    }
}
