// SPDX-License-Identifier: Apache-2.0
//! Batches in flight whose output comes later: positions are scheduled before their tokens are
//! known.
//!
//! A part of flight_model.rs. The device is apart from the engine. It runs batches in order and
//! keeps the text of each request: a pass feeds from the tokens that the passes before it sampled,
//! accepts any number of its drafts, and samples one token more. So a pass that was planned behind
//! drafts begins where the accepted ones end. The engine hands in the output of a batch at any
//! moment after it was executed, oldest first for each request, alone or by an append that
//! schedules the next position. Output must be taken unless its
//! request was cut or scheduled anew since, under no number but its batch's (OUTPUT-ONCE), and must
//! make the request's tokens those that the device fed from. A slot of a rejected draft holds
//! rubbish; so do, if all that was taken is run on a copy, the slots of all positions that a
//! pass may write whose tokens are not known yet. With `max_in_flight=0` a batch is done when it is
//! executed.
//! Twin: kvcore/check/search/ahead_model.py.

pub(crate) mod device;

use crate::check::names::in_flight::{Node, Output, Pending, Texts, Unreported, fills};
use crate::check::search::actions::{Children, Move, continuations, known_children};
use crate::check::search::ahead_model::device::{Device, Ending, tokens_of};
use crate::check::search::core_model::path::{Path, Walk};
use crate::check::search::flight_model::FlightModel;
use crate::check::search::moves::{ahead_calls, grows};
use crate::check::search::other_output::taken_instead;
use crate::oracle::calls::{Call, Name, Sampled, Value};
use crate::oracle::prefixes::Numbers;
use crate::oracle::schedule::Schedule;
use crate::oracle::schedule::writes::{Write, moved_up};
use crate::state::state::State;
use crate::types::ids::Row;
use crate::types::violation::Violation;

/// Return the outputs behind the calls of a path: those of requests that left are dropped, those of
/// requests that were cut or scheduled anew are stale.
fn followed(outputs: &[Output], schedule: &Schedule) -> Vec<Output> {
    let removed = |row| schedule.left().contains(&(row, true));
    let mut found: Vec<Output> =
        outputs.iter().filter(|each| !removed(each.row)).cloned().collect();
    for output in &mut found {
        output.stale |= schedule.cut_rows().contains(&output.row);
    }
    found
}

/// Let the next batch of a request feed from its text, if it feeds from the device.
fn feed_next(pending: &mut [Pending], number: u64, row: Row, text: &Numbers) {
    let is_next = |batch: &&mut Pending| {
        batch.number > number && batch.tokens.iter().any(|each| each.0 == row)
    };
    let Some(batch) = pending.iter_mut().find(is_next) else { return };
    if batch.is_ahead(row) {
        batch.feeds.retain(|each| each.0 != row);
        batch.feeds.push((row, text.clone()));
    }
}

impl Pending {
    fn write_of(&self, row: Row) -> Option<(usize, &Write)> {
        self.writes.iter().enumerate().find(|each| each.1.row == row)
    }

    /// Tell whether the batch feeds a request from the device.
    fn is_ahead(&self, row: Row) -> bool {
        let known = tokens_of(&self.tokens, row).len();
        self.write_of(row).is_some_and(|(_, write)| write.start as usize >= known)
    }

    /// Return the epoch in which a request that the batch writes for began.
    pub(crate) fn epoch_of(&self, row: Row) -> u32 {
        self.epochs.iter().find(|each| each.0 == row).map_or(0, |each| each.1)
    }
}

impl Node {
    /// Return the tokens of the requests that the open batch writes for.
    pub(crate) fn tokens_of_writes(&self) -> Texts {
        let rows = self.schedule.writes().iter().map(|write| write.row);
        rows.map(|row| (row, Numbers::from_slice(&self.state[row].tokens))).collect()
    }

    /// Forget the texts that no batch feeds from.
    fn prune(&mut self) {
        let outputs = &self.outputs;
        self.texts.retain(|each| outputs.iter().any(|output| output.row == each.0));
        self.texts.sort_unstable();
    }

    /// Await the output of a batch that was just taken, for the requests that it computes to the
    /// last token.
    fn await_output(&mut self, tokens: Texts) {
        let (batch, before) = self.pending.split_last_mut().expect("a batch was taken");
        batch.tokens = tokens;
        for write in &batch.writes {
            let (row, known) = (write.row, tokens_of(&batch.tokens, write.row).len());
            if (write.end as usize) < known || write.loaded == write.end {
                continue;
            }
            self.outputs.push(Output::awaited(write.name, row, batch.number));
            let waits = |each: &Pending| !each.executed && each.write_of(row).is_some();
            let text = self.texts.iter().find(|each| each.0 == row);
            if write.start as usize >= known && !before.iter().any(waits) {
                batch.feeds.extend(text.cloned());
            }
        }
    }
}

impl FlightModel {
    /// Tell whether no other batch can be taken.
    pub(crate) fn is_full(&self, node: &Node) -> bool {
        let world = &self.core.world;
        let (most, outputs) = (world.config.max_in_flight as usize, world.num_outputs as usize);
        let full = match most {
            0 => node.waiting().count() >= outputs,
            _ => node.state.in_flight.len() >= most,
        };
        full || node.outputs.len() >= outputs
    }

    /// Return the moves behind a path; a token is the engine's own if none is to come.
    pub(crate) fn possible_behind(
        &mut self,
        node: &Node,
        path: &Path,
    ) -> Result<Vec<Move>, Violation> {
        let mut found = self.core.possible(&path.state)?;
        if self.core.world.num_output_placeholders == 0 {
            return Ok(found);
        }
        let outputs = followed(&node.outputs, &path.schedule);
        let rows: Vec<Name> =
            outputs.iter().filter(|each| !each.stale).map(|each| each.name).collect();
        found.retain(|each| match each {
            Move::Call(Call::Append { name, .. } | Call::AddTokens { name, .. }) => {
                !rows.contains(name)
            }
            _ => true,
        });
        let awaited = |request: &_| rows.contains(&Name::of(request));
        ahead_calls(&self.core.world, &path.state, awaited, &mut found);
        Ok(found)
    }

    /// Note the output that the engine awaits after some calls, which may have taken a batch.
    pub(crate) fn await_outputs(&self, node: &mut Node, schedule: &Schedule, taken: Option<Texts>) {
        if self.core.world.num_output_placeholders == 0 {
            return;
        }
        node.outputs = followed(&node.outputs, schedule);
        if let Some(tokens) = taken {
            node.await_output(tokens);
        }
        node.prune();
    }

    /// Return the ways in which the oldest batch that waits can end, if one waits: which of its
    /// loads fails, and what each of its passes samples.
    pub(crate) fn endings(&mut self, node: &Node) -> Result<Vec<Ending>, Violation> {
        let failures = self.failures(node);
        let plain = |failing| Ending { failing, sampled: Vec::new() };
        let Some(batch) = node.waiting().next() else { return Ok(Vec::new()) };
        if self.core.world.num_output_placeholders == 0 {
            return Ok(failures.into_iter().map(plain).collect());
        }
        let children = match self.core.symmetry.tokens {
            false => None,
            true => {
                let mut known = known_children(&node.state, &mut self.core.prefixes)?;
                known.extend(node.texts.iter().map(|each| each.1.clone()));
                known.extend(node.outputs.iter().map(|each| each.text.clone()));
                Some(known)
            }
        };
        let device = Device::recall(node, Some(batch));
        let mut ways: Vec<Vec<Numbers>> = vec![Vec::new()];
        for write in &batch.writes {
            let awaited = |each: &Output| each.batch == batch.number && each.row == write.row;
            let sampled = match node.outputs.iter().any(awaited) {
                true => self.samples(&device, batch, write, &children),
                false => vec![Numbers::new()],
            };
            let longer = |way: &Vec<Numbers>| {
                let way = way.clone();
                let with = move |each: &Numbers| [&way[..], std::slice::from_ref(each)].concat();
                sampled.iter().map(with).collect::<Vec<_>>()
            };
            ways = ways.iter().flat_map(longer).collect();
        }
        let of = |failing: Option<Unreported>| {
            ways.iter().map(move |way| Ending { failing, sampled: way.clone() })
        };
        Ok(failures.into_iter().flat_map(of).collect())
    }

    /// Return what a pass can add to its request's text: accepted drafts, and one token.
    fn samples(
        &self,
        device: &Device,
        batch: &Pending,
        write: &Write,
        children: &Children,
    ) -> Vec<Numbers> {
        let text = device.text_of(tokens_of(&batch.tokens, write.row), write);
        let known = text.tokens.len() as u32;
        let first = if batch.is_ahead(write.row) { known - 1 } else { write.start };
        let num_new = (first + write.end - write.start + 1).saturating_sub(known);
        let left = self.core.world.num_tokens.saturating_sub(known);
        if left == 0 {
            return vec![Numbers::new()];
        }
        let most = known + left.min(num_new);
        let longer = continuations(&self.core.world, children, &text.tokens, most);
        longer.iter().map(|longer| Numbers::from_slice(&longer[known as usize..])).collect()
    }

    /// Note what an executed batch sampled. before: the texts that it ran on. device: those behind.
    pub(crate) fn note_output(
        &self,
        node: &mut Node,
        (number, writes): (u64, &[Write]),
        sampled: &[Numbers],
        (before, device): (Texts, Device),
    ) {
        let texts = device.texts();
        let at = node.pending.iter().position(|each| each.number == number).expect("it was taken");
        for (way, write) in sampled.iter().zip(writes) {
            let awaited = |each: &&mut Output| each.batch == number && each.row == write.row;
            let Some(output) = node.outputs.iter_mut().find(awaited) else { continue };
            let text = Numbers::from_slice(tokens_of(&texts, write.row));
            let (end, count) = (text.len() as u32, way.len() as u32);
            let taken = tokens_of(&node.pending[at].tokens, write.row).len();
            let is_ahead = write.start as usize >= taken;
            let first = if is_ahead { end.saturating_sub(count + 1) } else { write.start };
            let stop = first + write.end - write.start;
            output.num_rejected = stop.saturating_sub(end.saturating_sub(1));
            let last = (stop - output.num_rejected).saturating_sub(1);
            output.spoilt = node.memory.holds_spoilt(write.row, last);
            (output.text, output.num_new) = (text, count);
        }
        node.outputs.retain(|each| each.batch != number || each.num_new > 0);
        let rows: Vec<Row> = node.pending[at].tokens.iter().map(|each| each.0).collect();
        for (row, text) in texts.iter().filter(|each| rows.contains(&each.0)) {
            feed_next(&mut node.pending, number, *row, text);
        }
        (node.pending[at].texts, node.texts) = (before, texts);
        node.pending[at].feeds.clear();
        if self.core.world.config.max_in_flight == 0 {
            node.pending.remove(at);
        }
        node.prune();
    }

    /// Drop the output of cancelled batches, and restore the device's texts from before the first
    /// of them that ran.
    pub(crate) fn cancel_output(&self, node: &mut Node, gone: &[Pending]) {
        if let Some(first) = gone.iter().find(|batch| batch.executed) {
            node.texts.clone_from(&first.texts);
        }
        node.outputs.retain(|each| gone.iter().all(|batch| batch.number != each.batch));
        node.prune();
    }

    /// Mark as stale what was sampled from a failed load, and what the requests that its report
    /// reaches await, even those that left. before: the state before the report.
    pub(crate) fn note_report(&self, node: &mut Node, before: &State, name: Name, fell: &[Row]) {
        let Node { state, outputs, .. } = node;
        for output in outputs {
            let (request, before) = (&state[output.row], &before[output.row]);
            let reached = request.output_from != before.output_from;
            let left = reached && request.num_computed == 0;
            let named = output.name == name || fell.contains(&output.row);
            output.stale |= output.spoilt || named || left;
        }
    }

    /// Hand in the output of a batch for a request. Fails with OUTPUT-ONCE.
    pub(crate) fn hand_in(&mut self, node: &Node, output: &Output) -> Result<Node, Violation> {
        let (start, mut after) = (&node.state, self.copy_of(node));
        after.schedule.resume(start);
        let (known, to_come) = {
            let request = &start[output.row];
            (request.num_tokens(), request.num_output_placeholders())
        };
        let tokens = output.text[output.text.len() - output.num_new as usize..].to_vec();
        let sampled = Sampled { batch: output.batch, num_rejected: output.num_rejected };
        let call = Call::AddTokens { name: output.name, tokens, output: Some(sampled) };
        let Node { state, schedule, .. } = &mut after;
        let value = self.core.call(start, state, schedule, &call)?.value;
        self.check_taken(output, &value, &after.state)?;
        if !matches!(value, Value::Misuse(_)) {
            for other in taken_instead(start, output, &node.outputs) {
                let detail =
                    format!("output of batch {} is taken as that of {other}", output.batch);
                self.core.checker.checks.hear(Err(Violation::new("OUTPUT-ONCE", detail)))?;
            }
            self.core.checker.checks.hear(after.schedule.check(&after.state))?;
            let count = output.num_rejected.min(to_come);
            let counts = after.pending.iter_mut().flat_map(|batch| &mut batch.before);
            for (_, before) in counts.filter(|each| each.0 == output.row) {
                *before = moved_up(*before, known, count);
            }
        }
        after.filled |= fills(start, &after.state);
        after.outputs.retain(|each| each != output);
        after.outputs = followed(&after.outputs, &after.schedule);
        let mut after = self.closed(after, Some(start))?;
        after.prune();
        Ok(after)
    }

    /// Tell whether an engine can hand in an output by an append.
    pub(crate) fn is_appended(&self, state: &State, output: &Output) -> bool {
        let one = output.num_new == 1 && output.num_rejected == 0;
        one && grows(&self.core.world, state, &state[output.row])
    }

    /// Hand in the output of a batch by an append, which schedules the position behind it, too.
    /// Fails with OUTPUT-ONCE.
    pub(crate) fn append_output(
        &mut self,
        node: &Node,
        output: &Output,
    ) -> Result<Node, Violation> {
        let (start, mut left) = (&node.state, self.copy_of(node));
        let mut path = self.core.path_from(start, &node.schedule);
        path.schedule.resume(start);
        let token = output.text.last().copied();
        let call = Call::Append { name: output.name, token, batch: Some(output.batch) };
        let value = self.core.call(start, &mut path.state, &mut path.schedule, &call)?.value;
        self.check_taken(output, &value, &path.state)?;
        if !matches!(&value, Value::Appended(appended) if appended.done == 0) {
            left.outputs.retain(|each| each != output);
            left.prune();
        }
        let full = self.is_full(&left);
        let after = self.fill(&left, Some(&path), full);
        self.core.spare.push(path);
        self.reuse(left);
        after
    }

    /// Fails with OUTPUT-ONCE unless a call took an output, or refused a stale one.
    fn check_taken(
        &mut self,
        output: &Output,
        value: &Value,
        after: &State,
    ) -> Result<(), Violation> {
        let refused = matches!(value, Value::Misuse(_));
        self.core.checker.notes.note_goal("stale output", refused);
        let hear =
            |detail| self.core.checker.checks.hear(Err(Violation::new("OUTPUT-ONCE", detail)));
        if refused != output.stale {
            hear(format!("output of batch {} gives {value:?}", output.batch))?;
        }
        let stays = matches!(value, Value::Appended(appended) if appended.done == 0);
        if !(refused || stays) && after[output.row].tokens[..] != output.text[..] {
            hear(format!("{:?} has other tokens than the device fed from", output.name))?;
        }
        Ok(())
    }
}
