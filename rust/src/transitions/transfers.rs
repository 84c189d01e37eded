// SPDX-License-Identifier: Apache-2.0
//! Store and load: blocks move to and from an external store by key, as operations that may fail.
//!
//! Invariants: an operation holds its block, as a pin does, until it is completed (done or failed),
//! even if the request is freed meanwhile. A load gives its request slots that count as computed.
//! They become findable when the last of its operations is completed: the blocks before the first
//! failed one are published, and the count falls back to there. Until then the request is not
//! scheduled. Commands run before the forward pass, so what the open batch writes cannot be stored
//! yet.
//! Twin: kvcore/transitions/transfers.py.

use crate::state::state::{MAX_OPERATION, Operation, State};
use crate::transitions::allocate::commit;
use crate::transitions::checkpoints::cache_state;
use crate::transitions::drain::forget_new;
use crate::transitions::free::cut_tables;
use crate::transitions::in_flight::num_finished;
use crate::transitions::plan::plan_allocation;
use crate::transitions::publish::{publish_blocks, stored_bytes};
use crate::transitions::tails::keys::cache_tails;
use crate::transitions::unconfirmed_loads::is_unconfirmed;
use crate::transitions::window::apply_trims;
use crate::types::commands::Command;
use crate::types::config::Publish;
use crate::types::errors::Error;
use crate::types::ids::Row;
use crate::types::slot_request::SlotRequest;
use crate::types::values::Admitted;

/// Copy blocks to the external store under their keys; returns one operation per block.
///
/// Fails with UnknownBlock, NotPublished, InOpenBatch, LoadUnconfirmed.
pub fn store(state: &mut State, block_ids: &[i64]) -> Result<Vec<u32>, Error> {
    let unwritten = state.batch.unwritten_blocks();
    let check = |&number: &i64| {
        let block = state.device.check_block(number)?;
        let Some(&key) = state.device.key(block) else {
            return Err(Error::NotPublished { block: number });
        };
        if unwritten.contains(&block) {
            return Err(Error::InOpenBatch { kind: "block", value: number.into() });
        }
        if is_unconfirmed(state, block) {
            return Err(Error::LoadUnconfirmed { block: number });
        }
        Ok((block, key))
    };
    let blocks = block_ids.iter().map(check).collect::<Result<Vec<_>, _>>()?;
    let mut started = Vec::with_capacity(blocks.len());
    for (block, key) in blocks {
        let batch = state.batch.number;
        let operation = Operation { block, key, batch, request: None, first_token: 0 };
        let number = start(state, operation);
        state.effects.emit(Command::Store { operation: number, block, key });
        started.push(number);
    }
    Ok(started)
}

/// Fill slots for the next tokens of a request from the external store; returns one operation
/// per block, group by group, or a refusal.
///
/// slot_request: its external tokens are the ones to load, whole blocks of every group behind whole
/// blocks; a token must be left to compute. If no query sees what would be loaded (a whole chunk),
/// there is no operation, and the tokens count at once. The rest is as in `allocate_slots`, with
/// delayed caching. Fails as that does, and with StaleRequest, WrongLoad.
pub fn load(
    state: &mut State,
    request_id: &str,
    slot_request: &SlotRequest,
) -> Result<Admitted<Vec<u32>>, Error> {
    let row = state.idle(request_id)?;
    let num_tokens = slot_request.num_external_computed_tokens;
    if num_tokens < 1 {
        return Err(Error::InvalidCount { name: "num_tokens", value: num_tokens, least: 1 });
    }
    if state.is_stale(row) {
        let (epoch, current) = (state.epochs[row.index()].into(), state.epoch.into());
        return Err(Error::StaleRequest { request: state[row].name(), epoch, current });
    }
    let slot_request =
        &SlotRequest { delay_cache_blocks: true, loads: true, ..slot_request.clone() };
    let planned = plan_allocation(state, row, slot_request)?;
    check_load(state, row, slot_request)?;
    let plan = match planned {
        Ok(plan) => plan,
        Err(refusal) => {
            apply_trims(state, row, &refusal.trims);
            return Ok(Err(refusal.refused));
        }
    };
    commit(state, slot_request, &plan);
    let started = start_loads(state, row, plan.num_scheduled - num_tokens as u32);
    if !started.is_empty() {
        let request = &mut state[row];
        (request.num_loading, request.quiet_until) = (started.len() as u32, 0);
        request.load_end = plan.num_scheduled;
    }
    Ok(Ok(started))
}

/// Fails unless the load consists of whole blocks with keys and leaves a token to compute.
pub fn check_load(state: &State, row: Row, slot_request: &SlotRequest) -> Result<(), Error> {
    let request = &state[row];
    if !state.config.enable_caching {
        return Err(Error::CachingDisabled { request: request.name(), num_blocks: 0 });
    }
    let num_tokens = slot_request.num_external_computed_tokens;
    let first = i64::from(request.num_computed) + slot_request.num_hit_tokens();
    let (end, alignment) = (first + num_tokens, i64::from(state.config.block_alignment()));
    let limit = i64::from(state.config.length_limit());
    if end > limit {
        let request = request.name();
        return Err(Error::BeyondModelLength { request, requested: end, max_model_len: limit });
    }
    let num_hashed = request.block_hashes.len() as i64;
    let reason = if first % alignment != 0 || num_tokens % alignment != 0 {
        format!("it begins at token {first}, and both must be multiples of {alignment}")
    } else if end >= i64::from(request.num_tokens()) {
        format!("of its {} tokens one must be left to compute", request.num_tokens())
    } else if end > num_hashed * i64::from(state.hash_block_size) {
        format!("it has {num_hashed} block hashes")
    } else {
        return Ok(());
    };
    Err(Error::WrongLoad { request: request.name(), num_tokens, reason })
}

/// Start one operation per block that holds tokens from `first` on, in table order.
fn start_loads(state: &mut State, row: Row, first: u32) -> Vec<u32> {
    let mut started = Vec::new();
    for group_id in 0..state.config.groups.len() as u32 {
        let size = state.config.groups[group_id as usize].block_size;
        for position in first / size..state[row].num_computed / size {
            let block = state[row].tables[group_id as usize][position as usize];
            if state.is_null(block) {
                continue;
            }
            let key = state[row].key(state.scales[group_id as usize], group_id, position);
            let (batch, first_token) = (state.batch.number, position * size);
            let operation = Operation { block, key, batch, request: Some(row), first_token };
            let number = start(state, operation);
            forget_new(state, &[block]);
            state.effects.emit(Command::Load { operation: number, key, block });
            started.push(number);
        }
    }
    started
}

/// Hold an operation's block, and return a number that no unfinished operation has.
fn start(state: &mut State, operation: Operation) -> u32 {
    let next = |number: u32| if number < MAX_OPERATION { number + 1 } else { 0 };
    let mut number = state.next_operation;
    while state.operations.contains_key(&number) {
        number = next(number);
    }
    state.next_operation = next(number);
    state.device.pin(operation.block, &mut state.effects);
    state.device.note_use(operation.block, state.batch.number);
    state.operations.insert(number, operation);
    number
}

/// Finish a store or load, done or failed; its block is no longer held.
///
/// With the last operation of a load the request's loaded blocks are published. Fails with
/// UnknownOperation, InOpenBatch.
pub fn complete_operation(state: &mut State, operation: i64, done: bool) -> Result<(), Error> {
    let known = u32::try_from(operation).ok().and_then(|number| state.operations.get(&number));
    let Some(found) = known else { return Err(Error::UnknownOperation { operation }) };
    if found.batch == state.batch.number {
        return Err(Error::InOpenBatch { kind: "operation", value: operation.into() });
    }
    let found = found.clone();
    state.operations.remove(&(operation as u32));
    state.device.unpin(found.block, &mut state.effects);
    if let Some(row) = found.request {
        finish_load(state, row, &found, done);
    }
    Ok(())
}

/// Note that one operation of a request's load ended; with the last one the load is settled.
fn finish_load(state: &mut State, row: Row, operation: &Operation, done: bool) {
    let request = &mut state[row];
    request.num_loading -= 1;
    if !done {
        request.load_end = request.load_end.min(operation.first_token);
    }
    if request.num_loading > 0 {
        return;
    }
    let end = std::mem::take(&mut request.load_end);
    cut_tables(state, row, end, 0);
    let count = match state.config.publish {
        Publish::Scheduled => state[row].num_accepted(),
        Publish::Completed => num_finished(state, row),
    };
    publish_blocks(state, row, count, false);
    if state.has_states {
        cache_state(state, row, state[row].num_computed, stored_bytes);
    }
    cache_tails(state, row, count);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transitions::free::free;
    use crate::transitions::tests::*;

    /// Seven tokens in blocks of two, of which six are being loaded.
    fn loading() -> (State, Row) {
        let mut state = make_state(Config::new(6, 2, b"seed")).unwrap();
        let row = add_request(&mut state, Request::new("a", &[1, 2, 3, 4, 5, 6, 7])).unwrap();
        let slot_request =
            SlotRequest { num_external_computed_tokens: 6, ..SlotRequest::default() };
        assert_eq!(load(&mut state, "a", &slot_request), Ok(Ok(vec![0, 1, 2])));
        (state, row)
    }

    #[test]
    fn a_load_counts_up_to_its_first_failure() {
        let (mut state, row) = loading();
        let open = Error::InOpenBatch { kind: "operation", value: 0_i64.into() };
        assert_eq!(complete_operation(&mut state, 0, true), Err(open));
        take_batch(&mut state).unwrap();
        complete_operation(&mut state, 1, false).unwrap();
        complete_operation(&mut state, 2, true).unwrap();
        assert!(state.device.key(BlockId(1)).is_none());
        complete_operation(&mut state, 0, true).unwrap();
        assert_eq!((state[row].num_computed, state[row].tables[0].len()), (2, 1));
        assert!(state.device.key(BlockId(1)).is_some());
        let unknown = Error::UnknownOperation { operation: 0 };
        assert_eq!(complete_operation(&mut state, 0, true), Err(unknown));
    }

    #[test]
    fn a_load_ends_at_the_model_length() {
        let mut config = Config::new(6, 2, b"seed");
        config.max_model_len = Some(4);
        let mut state = make_state(config).unwrap();
        add_request(&mut state, Request::new("a", &[1, 2, 3, 4, 5, 6, 7])).unwrap();
        let slot_request =
            |count| SlotRequest { num_external_computed_tokens: count, ..SlotRequest::default() };
        let beyond = load(&mut state, "a", &slot_request(6));
        let request = "a".to_owned();
        assert_eq!(
            beyond,
            Err(Error::BeyondModelLength { request, requested: 6, max_model_len: 4 })
        );
        let last = 2_147_483_647; // the number of an operation fits 31 bits
        state.next_operation = last;
        assert_eq!(load(&mut state, "a", &slot_request(4)), Ok(Ok(vec![last, 0])));
    }

    #[test]
    fn blocks_of_a_freed_request_stay_held_until_their_loads_end() {
        let (mut state, _) = loading();
        take_batch(&mut state).unwrap();
        free(&mut state, "a").unwrap();
        assert_eq!(state.device.num_free(), 2);
        for operation in 0..3 {
            complete_operation(&mut state, operation, true).unwrap();
        }
        assert_eq!((state.device.num_free(), state.device.index.len()), (5, 0));
    }
}
