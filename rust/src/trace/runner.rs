// SPDX-License-Identifier: Apache-2.0
//! The calls of text traces, made on a state.
//!
//! Rules: a verb is the transition's name, its words are the arguments in order. A hit is the one
//! that the request's last `get_computed_blocks` gave. After each call the state must come back
//! from its canonical bytes, and `take_batch` must hand out exactly what the open batch holds.

use std::collections::HashMap;

use crate::codec::{decode, encode};
use crate::invariants::pool_and_state::failing;
use crate::invariants::requests::Scratch;
use crate::state::state::{State, make_state};
use crate::trace::text::{
    Names, Value, read_tokens, write_commands, write_error, write_events, write_ids, write_value,
};
use crate::trace::words::{
    Called, Failure, admitted, exactly, listed, nothing, number, numbers, read_done, read_hashes,
    read_request, read_slot_request, text, write_host_tables, write_operations, write_owners,
    write_queue, write_verdict, write_waiting,
};
use crate::transitions::allocate::Requests;
use crate::transitions::batches::{complete, take_batch};
use crate::transitions::cancel::cancel;
use crate::transitions::{
    allocate, drain, fork, free, pins, publish, queries, requests, rewind, swap, transfers,
    truncate, window,
};
use crate::types::commands::Command;
use crate::types::config::Config;
use crate::types::errors::Error;
use crate::types::events::Event;
use crate::types::ids::BlockId;
use crate::types::values::Hit;

/// A call whose verb or words cannot be read.
#[derive(Debug)]
pub struct BadCall(pub String);

/// A state that takes calls as words and gives outcomes as lines.
pub struct Runner {
    pub(crate) state: State,
    names: Names,
    hits: HashMap<String, Hit>,
}

impl Runner {
    /// An empty state. Fails with InvalidConfig.
    pub fn new(config: Config) -> Result<Self, Error> {
        let state = make_state(config)?;
        Ok(Runner { state, names: Names::default(), hits: HashMap::new() })
    }

    /// Make one call; the lines of its whole outcome.
    pub fn call(&mut self, verb: &str, words: &[&str]) -> Result<Vec<String>, BadCall> {
        let number = self.state.batch.number;
        let effects = &self.state.effects;
        let (num_commands, num_events) = (effects.commands.len(), effects.events.len());
        let mut lines = match self.make(verb, words) {
            Ok(value) => write_value(&value),
            Err(Failure::Misuse(error)) => write_error(&error),
            Err(Failure::Words) => {
                return Err(BadCall(format!("{verb} cannot take {}", words.join(" "))));
            }
        };
        let bytes = encode::encode(&self.state);
        let again = decode::decode(&bytes).map(|state| encode::encode(&state));
        assert_eq!(again, Ok(bytes), "{verb} {words:?} leaves a state that its bytes do not hold");
        self.names.learn(&self.state);
        let taken = if number == self.state.batch.number { num_commands } else { 0 };
        let commands: Vec<Command> = self.state.effects.commands.iter().skip(taken).collect();
        let events: Vec<Event> = self.state.effects.events.iter().skip(num_events).collect();
        lines.extend(write_commands(&commands, &self.names));
        lines.extend(write_events(&events, &self.names));
        Ok(lines)
    }

    fn make(&mut self, verb: &str, words: &[&str]) -> Called {
        match verb {
            "add_request" => self.add_request(words),
            "add_tokens" => self.add_tokens(words),
            "add_block_hashes" => self.add_block_hashes(words),
            "remove_request" => self.remove_request(words),
            "add_drafts" => self.add_drafts(words),
            "accept" => self.accept(words),
            "rewind" => self.rewind(words),
            "remove_skipped_blocks" => self.remove_skipped_blocks(words),
            "get_computed_blocks" => self.get_computed_blocks(words),
            "allocate_slots" => self.allocate_slots(words),
            "can_allocate" => self.can_allocate(words),
            "append" => self.append(words),
            "cache_blocks" => self.cache_blocks(words),
            "free" => self.free(words),
            "fork" => self.fork(words),
            "truncate" => self.truncate(words),
            "swap_out" => self.swap_out(words),
            "swap_in" => self.swap_in(words),
            "pin" => self.pin(words),
            "unpin" => self.unpin(words),
            "evict_blocks" => self.evict_blocks(words),
            "store" => self.store(words),
            "load" => self.load(words),
            "complete_operation" => self.complete_operation(words),
            "reset_prefix_cache" => self.reset_prefix_cache(words),
            "take_batch" => self.take_batch(words),
            "complete" => self.complete(words),
            "cancel" => self.cancel(words),
            "in_flight" => self.in_flight(words),
            "take_events" => self.take_events(words),
            "take_stats" => self.take_stats(words),
            "take_new_block_ids" => self.take_new_block_ids(words),
            "new_step_starts" => self.new_step_starts(words),
            "restore" => self.restore(words),
            "queue" => self.queue(words),
            "host_queue" => self.host_queue(words),
            "waiting" => self.waiting(words),
            "host_waiting" => self.host_waiting(words),
            "owners" => self.owners(words),
            "keys" => self.keys(words),
            "table" => self.table(words),
            "host_table" => self.host_table(words),
            "computed" => self.computed(words),
            "drafts" => self.drafts(words),
            "status" => self.status(words),
            "row" => self.row(words),
            "common" => self.common(words),
            _ => Err(Failure::Words),
        }
    }

    fn add_request(&mut self, words: &[&str]) -> Called {
        let request = read_request(words).ok_or(Failure::Words)?;
        let row = requests::add_request(&mut self.state, request)?;
        text(format!("row {}", row.0))
    }

    fn add_tokens(&mut self, words: &[&str]) -> Called {
        let [request_id, tokens] = exactly(words)?;
        let tokens = read_tokens(tokens).ok_or(Failure::Words)?;
        nothing(requests::add_tokens(&mut self.state, request_id, &tokens))
    }

    fn add_block_hashes(&mut self, words: &[&str]) -> Called {
        let [request_id, hashes] = exactly(words)?;
        nothing(requests::add_block_hashes(&mut self.state, request_id, read_hashes(hashes)))
    }

    fn remove_request(&mut self, words: &[&str]) -> Called {
        let [request_id] = exactly(words)?;
        nothing(requests::remove_request(&mut self.state, request_id))
    }

    fn add_drafts(&mut self, words: &[&str]) -> Called {
        let [request_id, tokens] = exactly(words)?;
        let tokens = read_tokens(tokens).ok_or(Failure::Words)?;
        nothing(requests::add_drafts(&mut self.state, request_id, tokens))
    }

    fn accept(&mut self, words: &[&str]) -> Called {
        let [request_id, count] = exactly(words)?;
        nothing(requests::accept(&mut self.state, request_id, number(count)?))
    }

    fn rewind(&mut self, words: &[&str]) -> Called {
        let [count, request_ids @ ..] = words else { return Err(Failure::Words) };
        let fell = rewind::rewind(&mut self.state, request_ids, number(count)?)?;
        let ids = fell.iter().map(|&row| format!(" {}", self.state[row].request_id()));
        text(format!("fell{}", ids.collect::<String>()))
    }

    fn remove_skipped_blocks(&mut self, words: &[&str]) -> Called {
        let [request_id, count] = exactly(words)?;
        nothing(window::remove_skipped_blocks(&mut self.state, request_id, number(count)?))
    }

    fn get_computed_blocks(&mut self, words: &[&str]) -> Called {
        let [request_id] = exactly(words)?;
        let hit = queries::get_computed_blocks(&self.state, request_id)?;
        self.hits.insert(request_id.to_owned(), hit.clone());
        Ok(Value::Hit(hit))
    }

    fn allocate_slots(&mut self, words: &[&str]) -> Called {
        let (request_id, slot_request) = read_slot_request(words, &self.hits)?;
        admitted(
            allocate::allocate_slots(&mut self.state, request_id, &slot_request),
            Value::Blocks,
        )
    }

    fn can_allocate(&mut self, words: &[&str]) -> Called {
        let (request_id, slot_request) = read_slot_request(words, &self.hits)?;
        text(write_verdict(allocate::can_allocate(&self.state, request_id, &slot_request)?))
    }

    fn append(&mut self, words: &[&str]) -> Called {
        let pairs: Option<Vec<(&str, &str)>> =
            words.iter().map(|word| word.split_once('=')).collect();
        let (ids, tokens): (Vec<&str>, Vec<&str>) =
            pairs.ok_or(Failure::Words)?.into_iter().unzip();
        let tokens: Vec<u32> = tokens.into_iter().map(number).collect::<Result<_, _>>()?;
        let appended = allocate::append(&mut self.state, Requests::Ids(&ids), &tokens)?;
        Ok(Value::Appended(appended))
    }

    fn cache_blocks(&mut self, words: &[&str]) -> Called {
        let [request_id, count] = exactly(words)?;
        nothing(publish::cache_blocks(&mut self.state, request_id, number(count)?))
    }

    fn free(&mut self, words: &[&str]) -> Called {
        let [request_id] = exactly(words)?;
        nothing(free::free(&mut self.state, request_id))
    }

    fn fork(&mut self, words: &[&str]) -> Called {
        let [parent_id, child_id] = exactly(words)?;
        text(format!("row {}", fork::fork(&mut self.state, parent_id, child_id)?.0))
    }

    fn truncate(&mut self, words: &[&str]) -> Called {
        let [request_id, count] = exactly(words)?;
        nothing(truncate::truncate(&mut self.state, request_id, number(count)?))
    }

    fn swap_out(&mut self, words: &[&str]) -> Called {
        admitted(swap::swap_out(&mut self.state, words), |()| Value::Nothing)
    }

    fn swap_in(&mut self, words: &[&str]) -> Called {
        admitted(swap::swap_in(&mut self.state, words), |()| Value::Nothing)
    }

    fn pin(&mut self, words: &[&str]) -> Called {
        nothing(pins::pin(&mut self.state, &numbers(words)?))
    }

    fn unpin(&mut self, words: &[&str]) -> Called {
        nothing(pins::unpin(&mut self.state, &numbers(words)?))
    }

    fn evict_blocks(&mut self, words: &[&str]) -> Called {
        nothing(publish::evict_blocks(&mut self.state, &numbers(words)?))
    }

    fn store(&mut self, words: &[&str]) -> Called {
        let started = transfers::store(&mut self.state, &numbers(words)?)?;
        text(write_operations(started))
    }

    fn load(&mut self, words: &[&str]) -> Called {
        let (request_id, mut slot_request) = read_slot_request(words, &self.hits)?;
        slot_request.num_external_computed_tokens =
            std::mem::take(&mut slot_request.num_new_tokens);
        let started = transfers::load(&mut self.state, request_id, &slot_request);
        admitted(started, |started| Value::Text(write_operations(started)))
    }

    fn complete_operation(&mut self, words: &[&str]) -> Called {
        let [operation, result] = exactly(words)?;
        let (operation, done) = (number(operation)?, read_done(result)?);
        nothing(transfers::complete_operation(&mut self.state, operation, done))
    }

    fn reset_prefix_cache(&mut self, words: &[&str]) -> Called {
        let [] = exactly(words)?;
        Ok(Value::Flag(publish::reset_prefix_cache(&mut self.state)))
    }

    fn take_batch(&mut self, words: &[&str]) -> Called {
        let [] = exactly(words)?;
        let emitted: Vec<Command> = self.state.effects.commands.iter().collect();
        let batch = take_batch(&mut self.state)?;
        assert_eq!(batch.commands(), Ok(emitted), "a batch is what its calls emitted");
        let num_segments = batch.column(1).last().map_or(0, |last| last + 1);
        let (number, num_commands) = (batch.number, batch.len());
        text(format!("batch {number}: {num_commands} commands, {num_segments} segments"))
    }

    fn complete(&mut self, words: &[&str]) -> Called {
        let [batch] = exactly(words)?;
        nothing(complete(&mut self.state, number(batch)?))
    }

    fn cancel(&mut self, words: &[&str]) -> Called {
        let [batch] = exactly(words)?;
        nothing(cancel(&mut self.state, number(batch)?))
    }

    fn in_flight(&mut self, words: &[&str]) -> Called {
        let [] = exactly(words)?;
        text(write_ids(self.state.in_flight().map(|batch| batch as u32)))
    }

    fn take_events(&mut self, words: &[&str]) -> Called {
        let [] = exactly(words)?;
        text(format!("{} events", drain::take_events(&mut self.state).len()))
    }

    fn take_stats(&mut self, words: &[&str]) -> Called {
        let [] = exactly(words)?;
        Ok(Value::Stats(drain::take_stats(&mut self.state)))
    }

    fn take_new_block_ids(&mut self, words: &[&str]) -> Called {
        let [] = exactly(words)?;
        text(write_ids(drain::take_new_block_ids(&mut self.state).into_iter().map(|each| each.0)))
    }

    fn new_step_starts(&mut self, words: &[&str]) -> Called {
        let [] = exactly(words)?;
        drain::new_step_starts(&mut self.state);
        Ok(Value::Nothing)
    }

    fn restore(&mut self, words: &[&str]) -> Called {
        let [] = exactly(words)?;
        self.state = decode::decode(&encode::encode(&self.state))?;
        let broken = failing(&self.state, &mut Scratch::default());
        assert!(broken.is_empty(), "{broken:?} do not hold in the state of its own bytes");
        Ok(Value::Nothing)
    }

    fn queue(&mut self, words: &[&str]) -> Called {
        let [] = exactly(words)?;
        text(write_queue(&self.state.device))
    }

    fn host_queue(&mut self, words: &[&str]) -> Called {
        let [] = exactly(words)?;
        text(self.state.host.as_ref().map_or_else(|| write_ids([]), write_queue))
    }

    fn waiting(&mut self, words: &[&str]) -> Called {
        let [] = exactly(words)?;
        text(write_waiting(&self.state.device))
    }

    fn host_waiting(&mut self, words: &[&str]) -> Called {
        let [] = exactly(words)?;
        text(self.state.host.as_ref().map_or_else(|| write_ids([]), write_waiting))
    }

    fn owners(&mut self, words: &[&str]) -> Called {
        let [] = exactly(words)?;
        text(write_owners(&self.state.device))
    }

    fn keys(&mut self, words: &[&str]) -> Called {
        let [] = exactly(words)?;
        let write = |block| {
            let key = self.state.device.key(BlockId(block));
            key.map(|key| format!("{block}{}", self.names.key(key)))
        };
        text(listed((0..self.state.device.num_blocks()).filter_map(write)))
    }

    fn table(&mut self, words: &[&str]) -> Called {
        let [request_id] = exactly(words)?;
        Ok(Value::Blocks(queries::get_blocks(&self.state, request_id)?))
    }

    fn host_table(&mut self, words: &[&str]) -> Called {
        let [request_id] = exactly(words)?;
        let request = queries::find_request(&self.state, request_id)?;
        text(write_host_tables(&request.host_tables))
    }

    fn computed(&mut self, words: &[&str]) -> Called {
        let [request_id] = exactly(words)?;
        text(queries::find_request(&self.state, request_id)?.num_computed)
    }

    fn drafts(&mut self, words: &[&str]) -> Called {
        let [request_id] = exactly(words)?;
        text(queries::find_request(&self.state, request_id)?.drafts.len())
    }

    fn status(&mut self, words: &[&str]) -> Called {
        let [request_id] = exactly(words)?;
        text(queries::find_request(&self.state, request_id)?.status().name())
    }

    fn row(&mut self, words: &[&str]) -> Called {
        let [request_id] = exactly(words)?;
        text(self.state.request(request_id)?.0)
    }

    fn common(&mut self, words: &[&str]) -> Called {
        let [request_id] = exactly(words)?;
        text(write_ids(queries::get_num_common_prefix_blocks(&self.state, request_id)?))
    }
}
