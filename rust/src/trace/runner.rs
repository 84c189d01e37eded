// SPDX-License-Identifier: Apache-2.0
//! The calls of text traces, made on a state.
//!
//! A verb is the transition's name and its words are the arguments in order. A hit is the one that
//! the request's last `get_computed_blocks` gave. After each call the state must come back from its
//! canonical bytes, and `take_batch` must hand out exactly what the open batch holds.

pub(crate) mod words;

use std::collections::HashMap;

use crate::codec::{decode, encode};
use crate::invariants::pool_and_state::failing;
use crate::invariants::requests::Scratch;
use crate::state::state::{State, make_state};
use crate::trace::runner::words::{
    Called, Failure, admitted, listed, nothing, number, numbers, read_append, read_done,
    read_hashes, read_output, read_pieces, read_request, read_slot_request, text, write_levels,
    write_operations, write_owners, write_queue, write_verdict, write_waiting,
};
use crate::trace::text::{
    TraceNames, Value, read_tokens, write_commands, write_error, write_events, write_ids,
    write_value,
};
use crate::transitions::append::Requests;
use crate::transitions::batches::{complete, take_batch};
use crate::transitions::cancel::cancel;
use crate::transitions::{
    allocate, append, drain, epochs, fork, free, pins, publish, queries, requests, retention,
    rewind, swap, transfers, truncate, unschedule, window,
};
use crate::types::commands::Command;
use crate::types::config::Config;
use crate::types::errors::Error;
use crate::types::events::Event;
use crate::types::ids::BlockId;
use crate::types::values::{Hit, KVCacheBlocks};

/// The verb or a word of a call cannot be read.
#[derive(Debug)]
pub struct BadCall(pub String);

/// A state that takes calls as words and gives outcomes as lines.
pub struct Runner {
    pub(crate) state: State,
    names: TraceNames,
    hits: HashMap<String, Hit>,
}

impl Runner {
    /// An empty state. Fails with InvalidConfig.
    pub fn new(config: Config) -> Result<Self, Error> {
        let state = make_state(config)?;
        Ok(Runner { state, names: TraceNames::default(), hits: HashMap::new() })
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

    /// Make a call that changes requests and their blocks, or one of the others.
    fn make(&mut self, verb: &str, words: &[&str]) -> Called {
        let state = &mut self.state;
        match (verb, words) {
            ("add_request", words) => {
                let request = read_request(words).ok_or(Failure::Words)?;
                text(format!("row {}", requests::add_request(state, request)?.0))
            }
            ("add_tokens", [id, tokens, options @ ..]) => {
                let tokens = read_tokens(tokens).ok_or(Failure::Words)?;
                let output = read_output(Some(&tokens), options)?;
                nothing(requests::add_tokens(state, id, output))
            }
            ("add_block_hashes", [id, hashes]) => {
                nothing(requests::add_block_hashes(state, id, read_hashes(hashes)))
            }
            ("add_drafts", [id, tokens]) => {
                nothing(requests::add_drafts(state, id, read_tokens(tokens).ok_or(Failure::Words)?))
            }
            ("accept", [id, count]) => nothing(requests::accept(state, id, number(count)?)),
            ("remove_request", [id]) => nothing(requests::remove_request(state, id)),
            ("rewind", [count, ids @ ..]) => {
                let fell = rewind::rewind(state, ids, number(count)?)?;
                let ids = fell.iter().map(|&row| format!(" {}", state[row].request_id));
                text(format!("fell{}", ids.collect::<String>()))
            }
            ("remove_skipped_blocks", [id, count]) => {
                nothing(window::remove_skipped_blocks(state, id, number(count)?))
            }
            ("allocate_slots", words) => {
                let (id, slot_request) = read_slot_request(words, &self.hits)?;
                admitted(allocate::allocate_slots(state, id, &slot_request), Value::Blocks)
            }
            ("append", words) => {
                let (ids, tokens, options) = read_append(words)?;
                let output = read_output(tokens.as_deref(), options)?;
                Ok(Value::Appended(append::append(state, Requests::Ids(&ids), output)?))
            }
            ("cache_blocks", [id, count]) => {
                nothing(publish::cache_blocks(state, id, number(count)?))
            }
            ("free", [id]) => nothing(free::free(state, id)),
            ("fork", [parent, child]) => {
                text(format!("row {}", fork::fork(state, parent, child)?.0))
            }
            ("truncate", [id, count]) => nothing(truncate::truncate(state, id, number(count)?)),
            ("unschedule", [id, count]) => {
                nothing(unschedule::unschedule(state, id, number(count)?))
            }
            ("swap_out", ids) => admitted(swap::swap_out(state, ids), Value::Swapped),
            ("swap_in", ids) => admitted(swap::swap_in(state, ids), Value::Swapped),
            ("load", words) => {
                let (id, mut slot_request) = read_slot_request(words, &self.hits)?;
                slot_request.num_external_computed_tokens =
                    std::mem::take(&mut slot_request.num_new_tokens);
                let started = transfers::load(state, id, &slot_request);
                admitted(started, |started| Value::Text(write_operations(started)))
            }
            _ => self.make_of_batches(verb, words),
        }
    }

    /// The same for calls that change single blocks and batches, or drain.
    fn make_of_batches(&mut self, verb: &str, words: &[&str]) -> Called {
        let state = &mut self.state;
        match (verb, words) {
            ("pin", blocks) => nothing(pins::pin(state, &numbers(blocks)?)),
            ("unpin", blocks) => nothing(pins::unpin(state, &numbers(blocks)?)),
            ("pin_prefix", [name, id, count]) => {
                text(pins::pin_prefix(state, name, id, number(count)?)?)
            }
            ("unpin_prefix", [name]) => nothing(pins::unpin_prefix(state, name)),
            ("evict_blocks", blocks) => nothing(publish::evict_blocks(state, &numbers(blocks)?)),
            ("store", blocks) => {
                text(write_operations(transfers::store(state, &numbers(blocks)?)?))
            }
            ("complete_operation", [operation, result]) => {
                let (operation, done) = (number(operation)?, read_done(result)?);
                nothing(transfers::complete_operation(state, operation, done))
            }
            ("reset_prefix_cache", []) => Ok(Value::Flag(publish::reset_prefix_cache(state))),
            ("take_batch", []) => {
                let emitted: Vec<Command> = state.effects.commands.iter().collect();
                let batch = take_batch(state)?;
                assert_eq!(batch.commands(), Ok(emitted), "a batch is what its calls emitted");
                let num_segments = batch.column(1).last().map_or(0, |last| last + 1);
                let (number, num_commands) = (batch.number, batch.len());
                text(format!("batch {number}: {num_commands} commands, {num_segments} segments"))
            }
            ("advance_epoch", words @ ([] | [_])) => {
                let given = words.first().map(|word| number(word)).transpose()?;
                text(epochs::advance_epoch(state, given)?)
            }
            ("tick", [now]) => nothing(retention::tick(state, number(now)?)),
            ("extend_retention", [id, pieces]) => {
                let pieces = read_pieces(pieces).ok_or(Failure::Words)?;
                nothing(retention::extend_retention(state, id, &pieces))
            }
            ("complete", [batch]) => nothing(complete(state, number(batch)?)),
            ("cancel", [batch]) => nothing(cancel(state, number(batch)?)),
            ("take_events", []) => text(format!("{} events", drain::take_events(state).len())),
            ("take_stats", []) => Ok(Value::Stats(drain::take_stats(state))),
            ("take_new_block_ids", []) => {
                text(write_ids(drain::take_new_block_ids(state).into_iter().map(|each| each.0)))
            }
            ("restore", []) => {
                *state = decode::decode(&encode::encode(state))?;
                let broken = failing(state, &mut Scratch::default());
                assert!(broken.is_empty(), "{broken:?} do not hold in the state of its own bytes");
                Ok(Value::Nothing)
            }
            _ => self.look(verb, words),
        }
    }

    /// The same for calls that change nothing.
    fn look(&mut self, verb: &str, words: &[&str]) -> Called {
        let state = &self.state;
        match (verb, words) {
            ("get_computed_blocks", [id]) => {
                let hit = queries::get_computed_blocks(state, id)?;
                self.hits.insert((*id).to_owned(), hit.clone());
                Ok(Value::Hit(hit))
            }
            ("can_allocate", words) => {
                let (id, slot_request) = read_slot_request(words, &self.hits)?;
                text(write_verdict(allocate::can_allocate(state, id, &slot_request)?))
            }
            ("checkpoint_stop", words) => {
                let (id, slot_request) = read_slot_request(words, &self.hits)?;
                let hit = self.hits.get(id).filter(|_| slot_request.hit.is_some());
                let hit = hit.map(|hit| (i64::from(hit.num_tokens), i64::from(hit.num_common)));
                let count = slot_request.num_new_tokens;
                let (count, marked) = queries::checkpoint_stop(state, id, count, hit)?;
                text(format!("{count}{}", if marked { ", checkpoint" } else { "" }))
            }
            ("in_flight", []) => text(write_ids(state.in_flight().map(|batch| batch as u32))),
            ("stale", []) => {
                let names =
                    epochs::stale_requests(state).map(|row| format!(" {}", state[row].name()));
                text(format!("stale{}", names.collect::<String>()))
            }
            ("queue", []) => text(write_queue(Some(&state.device))),
            ("levels", []) => text(write_levels(&state.device)),
            ("host_queue", []) => text(write_queue(state.host.as_ref())),
            ("waiting", []) => text(write_waiting(Some(&state.device))),
            ("host_waiting", []) => text(write_waiting(state.host.as_ref())),
            ("owners", []) => text(write_owners(&state.device)),
            ("keys", []) => {
                let blocks = (0..state.device.num_blocks()).map(BlockId);
                let keys = |block| {
                    let keys = state.device.key(block).into_iter();
                    keys.chain(state.device.tail_keys(block)).map(move |key| (block, key))
                };
                let keyed = blocks.flat_map(keys);
                text(listed(
                    keyed.map(|(block, key)| format!("{}{}", block.0, self.names.key(key))),
                ))
            }
            ("table", [id]) => Ok(Value::Blocks(queries::get_blocks(state, id)?)),
            ("host_table", [id]) => {
                let blocks = queries::find_request(state, id)?.host_tables.to_vec();
                Ok(Value::Blocks(KVCacheBlocks { blocks }))
            }
            ("computed", [id]) => text(queries::find_request(state, id)?.num_computed),
            ("to_come", [id]) => text(queries::find_request(state, id)?.num_output_placeholders()),
            ("drafts", [id]) => text(queries::find_request(state, id)?.drafts.len()),
            ("status", [id]) => text(queries::find_request(state, id)?.status().name()),
            ("row", [id]) => text(state.request(id)?.0),
            ("common", [id]) => text(write_ids(queries::get_num_common_prefix_blocks(state, id)?)),
            _ => Err(Failure::Words),
        }
    }
}
