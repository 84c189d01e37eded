// SPDX-License-Identifier: Apache-2.0
//! Calls as data, made on a state.
//!
//! A call that misuses the core gives the error as its value, and compares by it. Requests are
//! named by small numbers, "0", "1" and so on, as every exploration does. Twin of
//! kvcore/trace/calls.py.

use std::cell::RefCell;
use std::slice;

use crate::check::world::world::World;
use crate::oracle::calls::{Call, Name, Sampled, Slots, Value};
use crate::state::state::State;
use crate::transitions::allocate::allocate_slots;
use crate::transitions::append::{Requests, append};
use crate::transitions::batches::{complete, take_batch_into};
use crate::transitions::cancel::cancel;
use crate::transitions::epochs::advance_epoch;
use crate::transitions::fork::fork;
use crate::transitions::free::free;
use crate::transitions::pins::{pin, pin_prefix, unpin, unpin_prefix};
use crate::transitions::publish::{cache_blocks, evict_blocks, reset_prefix_cache};
use crate::transitions::requests::{
    accept, add_block_hashes, add_drafts, add_request, add_tokens, remove_request,
};
use crate::transitions::retention::tick;
use crate::transitions::rewind::rewind;
use crate::transitions::swap::{swap_in, swap_out};
use crate::transitions::transfers::{complete_operation, load, store};
use crate::transitions::truncate::truncate;
use crate::transitions::unschedule::unschedule;
use crate::transitions::window::remove_skipped_blocks;
use crate::types::commands::{Batch, Command};
use crate::types::errors::Error;
use crate::types::slot_request::{RequestedHit, SlotRequest};
use crate::types::values::{Admitted, Hit, Output, Request};

thread_local! {
    /// A batch that nobody reads, for its memory.
    static TAKEN: RefCell<Batch> = RefCell::default();
}

/// The outcome of a call, and the position of its commands among those of the open batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// Its value.
    pub value: Value,
    /// Commands of the open batch before the call; 0 for a call that opens a batch.
    pub first_command: usize,
}

impl Outcome {
    /// Return the commands of the call; state: the one right after it.
    pub fn commands<'a>(&self, state: &'a State) -> impl Iterator<Item = Command> + 'a {
        state.effects.commands.since(self.first_command)
    }

    /// Tell whether the call was wrong.
    #[must_use]
    pub fn is_misuse(&self) -> bool {
        matches!(self.value, Value::Misuse(_))
    }
}

/// Make a call on a state; misuse changes nothing.
pub fn perform(state: &mut State, call: &Call, world: &World) -> Outcome {
    let number = state.batch.number;
    let num_commands = state.effects.commands.len();
    let value = make(state, call, world).unwrap_or_else(Value::Misuse);
    let opened = state.batch.number != number;
    Outcome { value, first_command: if opened { 0 } else { num_commands } }
}

fn make(state: &mut State, call: &Call, world: &World) -> Result<Value, Error> {
    let ids = |names: &[Name]| names.iter().map(|name| name.id()).collect::<Vec<&str>>();
    Ok(match call {
        Call::AddRequest { name, tokens, kind } => {
            Value::Row(add_request(state, new_request(world, *name, tokens, *kind))?.0)
        }
        Call::RemoveRequest { name } => nothing(remove_request(state, name.id()))?,
        Call::AllocateSlots(slots) => {
            let taken = allocate_slots(state, slots.name.id(), &slot_request(slots))?;
            admitted(taken, Value::Blocks)
        }
        Call::Append { name, token, batch } => {
            let sampled = batch.map(|batch| Sampled { batch, num_rejected: 0 });
            let output = output_of(token.as_ref().map(slice::from_ref), sampled);
            Value::Appended(append(state, Requests::Ids(&[name.id()]), output)?)
        }
        Call::Fork { parent, child } => Value::Row(fork(state, parent.id(), child.id())?.0),
        Call::Free { name } => nothing(free(state, name.id()))?,
        Call::Truncate { name, num_tokens } => counted(state, truncate, *name, *num_tokens)?,
        Call::Unschedule { name, num_tokens } => counted(state, unschedule, *name, *num_tokens)?,
        Call::Rewind { names, num_tokens } => {
            Value::Fell(rewind(state, &ids(names), i64::from(*num_tokens))?)
        }
        Call::AddTokens { name, tokens, output } => {
            nothing(add_tokens(state, name.id(), output_of(Some(tokens), *output)))?
        }
        Call::AddBlockHashes { name, hashes } => {
            let given = hashes.iter().copied().map(Some).collect();
            nothing(add_block_hashes(state, name.id(), given))?
        }
        Call::AddDrafts { name, tokens } => nothing(add_drafts(state, name.id(), tokens.clone()))?,
        Call::Accept { name, num_accepted } => counted(state, accept, *name, *num_accepted)?,
        Call::RemoveSkippedBlocks { name, num_tokens } => {
            counted(state, remove_skipped_blocks, *name, *num_tokens)?
        }
        Call::CacheBlocks { name, num_tokens } => counted(state, cache_blocks, *name, *num_tokens)?,
        Call::EvictBlocks { block } => nothing(evict_blocks(state, &[i64::from(*block)]))?,
        Call::AdvanceEpoch => nothing(advance_epoch(state, None).map(|_| ()))?,
        Call::Tick { now } => nothing(tick(state, *now as i64))?,
        Call::ResetPrefixCache => Value::Flag(reset_prefix_cache(state)),
        Call::SwapOut { names } => admitted(swap_out(state, &ids(names))?, |_| Value::Nothing),
        Call::SwapIn { names } => admitted(swap_in(state, &ids(names))?, |_| Value::Nothing),
        Call::Pin { block } => nothing(pin(state, &[i64::from(*block)]))?,
        Call::Unpin { block } => nothing(unpin(state, &[i64::from(*block)]))?,
        Call::PinPrefix { pin, name, num_tokens } => covered(state, pin, *name, *num_tokens)?,
        Call::UnpinPrefix { pin } => nothing(unpin_prefix(state, pin))?,
        Call::Store { block } => Value::Operations(store(state, &[i64::from(*block)])?),
        Call::Load { name, num_tokens, hit } => loaded(state, *name, *num_tokens, hit)?,
        Call::CompleteOperation { operation, done } => {
            nothing(complete_operation(state, i64::from(*operation), *done))?
        }
        Call::TakeBatch => nothing(TAKEN.with_borrow_mut(|taken| take_batch_into(state, taken)))?,
        Call::Complete { batch } => nothing(complete(state, *batch as i64))?,
        Call::Cancel { batch } => nothing(cancel(state, *batch as i64))?,
        Call::Execute { .. } => Value::Nothing,
    })
}

/// Make a call that takes a request and a count.
fn counted(
    state: &mut State,
    change: fn(&mut State, &str, i64) -> Result<(), Error>,
    name: Name,
    count: u32,
) -> Result<Value, Error> {
    nothing(change(state, name.id(), i64::from(count)))
}

/// Load tokens by their keys, after a hit.
fn loaded(
    state: &mut State,
    name: Name,
    num_external_computed_tokens: u32,
    hit: &Option<Hit>,
) -> Result<Value, Error> {
    let hit = hit.clone();
    let slots = Slots { num_external_computed_tokens, hit, ..Slots::new(name, 0) };
    Ok(admitted(load(state, name.id(), &slot_request(&slots))?, Value::Operations))
}

/// Pin a prefix.
fn covered(state: &mut State, pin: &str, name: Name, count: u32) -> Result<Value, Error> {
    Ok(Value::Covered(pin_prefix(state, pin, name.id(), i64::from(count))?))
}

/// Append tokens, as the output of a batch or as the engine's own.
fn output_of(tokens: Option<&[u32]>, sampled: Option<Sampled>) -> Output<'_> {
    let num_rejected = sampled.map_or(0, |sampled| i64::from(sampled.num_rejected));
    let batch = sampled.map(|sampled| sampled.batch as i64);
    Output { tokens, num_rejected, batch }
}

/// Return the request that is added, of a kind of the world.
fn new_request<'a>(world: &'a World, name: Name, tokens: &[u32], kind: usize) -> Request<'a> {
    let kind = &world.kinds_of_requests[kind];
    Request {
        request_id: name.id(),
        tokens: tokens.to_vec(),
        extra_keys: kind.extra_keys(),
        block_hashes: kind.own_hashes.then(Vec::new),
        skip_reading_prefix_cache: kind.skip_reading,
        retention: kind.retention.clone(),
    }
}

/// Return the arguments of an allocation as the core takes them.
#[must_use]
pub fn slot_request(slots: &Slots) -> SlotRequest {
    SlotRequest {
        num_new_tokens: i64::from(slots.num_new_tokens),
        hit: slots.hit.as_ref().map(RequestedHit::from),
        num_lookahead_tokens: i64::from(slots.num_lookahead_tokens),
        num_external_computed_tokens: i64::from(slots.num_external_computed_tokens),
        delay_cache_blocks: slots.delay_cache_blocks,
        num_encoder_tokens: i64::from(slots.num_encoder_tokens),
        reserved_blocks: i64::from(slots.reserved_blocks),
        num_output_placeholders: i64::from(slots.num_output_placeholders),
        checkpoint: slots.checkpoint,
        ..SlotRequest::default()
    }
}

fn nothing(outcome: Result<(), Error>) -> Result<Value, Error> {
    outcome.map(|()| Value::Nothing)
}

fn admitted<T>(outcome: Admitted<T>, value: impl FnOnce(T) -> Value) -> Value {
    outcome.map_or_else(Value::Refused, value)
}
