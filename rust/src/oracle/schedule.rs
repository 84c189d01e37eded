// SPDX-License-Identifier: Apache-2.0
//! The engine's view of the open batch: the positions that its forward pass will write.
//!
//! Written from the rules of docs/engines.md, not from the code. A request's count before the batch
//! is the one before its first slots in it, and before its hits. If a cut needs a window that was
//! given back, the count becomes 0. Encoder tokens are written by the step that supplies them.
//! Twin: kvcore/oracle/schedule.py.

pub(crate) mod resumes;
pub mod writes;

use crate::oracle::calls::{Call, Name, Sampled, Slots, Value};
use crate::oracle::schedule::resumes::{keeps_state, kept_by, resumes};
use crate::oracle::schedule::writes::{Encoder, Write, each_once, encoder_of, moved_up, shorten};
use crate::state::state::State;
use crate::types::clone_in_place::clone_in_place;
use crate::types::ids::Row;
use crate::types::values::Appended;
use crate::types::violation::Violation;

/// What an engine knows of a request beside the state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Known {
    /// The count that the request must have; None if there is no request.
    pub(crate) computed: Option<u32>,
    /// What its cross-attention tables hold.
    pub(crate) encoder: Option<Encoder>,
    /// Where its unfinished load begins.
    pub(crate) loading: Option<u32>,
    /// The first token of its first failed load.
    pub(crate) failed: Option<u32>,
    /// The count before its first slots in the open batch, if it has some.
    pub(crate) before: Option<u32>,
}

/// The writes of the open batch, and the computed count that each request must have.
#[derive(Debug, Default)]
pub struct Schedule {
    /// By row.
    pub(crate) known: Vec<Known>,
    pub(crate) writes: Vec<Write>,
    pub(crate) num_encoders: u32,
    /// The rows whose requests were freed, or removed, by the calls that were followed.
    pub(crate) left: Vec<(Row, bool)>,
    /// Those whose requests were cut, or scheduled again below their last token.
    pub(crate) cut: Vec<Row>,
}

// Every edge begins with a copy, so it keeps the room.
clone_in_place!(Schedule { known, writes, num_encoders, left, cut });

impl Schedule {
    /// Start with a state whose open batch schedules nothing.
    pub fn assume(&mut self, state: &State) {
        self.writes.clear();
        self.known.resize(state.requests.len(), Known::default());
        for (at, known) in self.known.iter_mut().enumerate() {
            let request = state.requests[at].as_ref();
            let encoder = request.and_then(|_| encoder_of(state, Row(at as u32)));
            let computed = request.map(|request| request.num_computed);
            *known = Known { computed, encoder, before: None, ..*known };
        }
    }

    /// Go on with a state whose open batch schedules what this one does.
    pub fn resume(&mut self, state: &State) {
        self.left.clear();
        self.cut.clear();
        self.known.resize(state.requests.len(), Known::default());
        for (known, request) in self.known.iter_mut().zip(&state.requests) {
            match request {
                Some(request) => known.computed = Some(request.num_computed),
                None => *known = Known::default(),
            }
        }
    }

    /// Return the requests that the open batch schedules, with their counts before it.
    pub fn scheduled(&self) -> impl Iterator<Item = (Row, u32)> {
        let rows = (0..).map(Row).zip(&self.known);
        rows.filter_map(|(row, known)| Some((row, known.before?)))
    }

    /// Forget the loads that a state no longer has.
    pub fn keep_loads(&mut self, state: &State) {
        for (known, request) in self.known.iter_mut().zip(&state.requests) {
            if request.as_ref().is_none_or(|request| request.num_loading == 0) {
                (known.loading, known.failed) = (None, None);
            }
        }
    }

    /// Take over the positions of the unfinished loads from another schedule of these requests.
    pub fn take_loads(&mut self, other: &Schedule) {
        for (known, other) in self.known.iter_mut().zip(&other.known) {
            (known.loading, known.failed) = (other.loading, other.failed);
        }
    }

    /// The rows whose requests were freed or removed by the calls since it was resumed: true for
    /// removed.
    #[must_use]
    pub fn left(&self) -> &[(Row, bool)] {
        &self.left
    }

    /// The rows whose requests were cut, or scheduled again below their last token, since then.
    #[must_use]
    pub fn cut_rows(&self) -> &[Row] {
        &self.cut
    }

    /// Where the first failed block of a request's unfinished load is.
    #[must_use]
    pub fn failed(&self, row: Row) -> Option<u32> {
        self.known.get(row.index())?.failed
    }

    /// What the cross-attention tables of a request hold.
    #[must_use]
    pub fn encoder(&self, row: Row) -> Option<&Encoder> {
        self.known.get(row.index())?.encoder.as_ref()
    }

    /// Where the unfinished load of a request begins: what it brings is not there yet.
    #[must_use]
    pub fn loading(&self, row: Row) -> Option<u32> {
        self.known.get(row.index())?.loading
    }

    /// Take in a call that was made and what it gave; state: the one before it.
    pub fn follow(&mut self, state: &State, call: &Call, value: &Value) {
        if matches!(value, Value::Refused(_) | Value::Misuse(_)) {
            return;
        }
        match call {
            Call::AddRequest { .. } => {
                if let Value::Row(row) = *value {
                    *self.at(Row(row)) = Known { computed: Some(0), ..Known::default() };
                }
            }
            Call::RemoveRequest { name } => {
                if let Some(row) = name.row(state) {
                    *self.at(row) = Known::default();
                    self.left.push((row, true));
                }
            }
            Call::Fork { parent, .. } => self.fork(state, *parent, value),
            Call::AllocateSlots(slots) => self.allocated(state, slots),
            Call::Append { name, .. } => self.appended(state, *name, value),
            Call::Load { name, num_tokens, hit } => {
                let num_hit = hit.as_ref().map_or(0, |hit| hit.num_tokens);
                self.begin_load(state, *name, *num_tokens, num_hit);
            }
            Call::CompleteOperation { operation, done } => self.completed(state, *operation, *done),
            Call::Accept { name, num_accepted } => self.accepted(state, *name, *num_accepted),
            Call::Free { name } => {
                self.left.extend(name.row(state).map(|row| (row, false)));
                self.cut(state, *name, 0);
            }
            Call::Truncate { name, num_tokens } => {
                self.cut.extend(name.row(state));
                self.cut(state, *name, *num_tokens);
            }
            Call::Unschedule { name, num_tokens } => self.shorten(state, *name, *num_tokens),
            Call::AddTokens { name, output: Some(Sampled { num_rejected, .. }), .. } => {
                self.came_in(state, *name, *num_rejected);
            }
            Call::Rewind { names, num_tokens } => {
                let named = names.iter().filter_map(|name| name.row(state));
                self.cut.extend(named.clone());
                for row in each_once(named.chain(value.fell().iter().copied())) {
                    let most = self.came(state, row).min(kept_by(state, row, names, *num_tokens));
                    self.cut_row(state, row, most);
                }
            }
            Call::SwapOut { names } => {
                for row in names.iter().filter_map(|name| name.row(state)) {
                    let to_come = u32::from(state[row].num_output_placeholders() > 0);
                    self.cut_row(state, row, state[row].num_tokens() - to_come);
                }
            }
            _ => {}
        }
    }

    /// One position more, of what the open batch does not compute: nothing else can be sampled.
    fn appended(&mut self, state: &State, name: Name, value: &Value) {
        let row = name.row(state).filter(|&row| self.at(row).before.is_none());
        if let (Some(row), Value::Appended(Appended { done: 1.., .. })) = (row, value) {
            let start = self.computed(row);
            self.schedule(Write::of_next_token(name, row, start));
        }
    }

    /// The writes of the open batch, in the order of the calls.
    pub fn writes(&self) -> &[Write] {
        &self.writes
    }

    /// Those that load external tokens.
    pub fn loads(&self) -> impl Iterator<Item = &Write> {
        self.writes.iter().filter(|write| write.loaded > write.start)
    }

    /// The batch is taken: the next one schedules nothing yet.
    pub fn take(&mut self) {
        self.writes.clear();
        self.known.iter_mut().for_each(|known| known.before = None);
    }

    /// Fails with COMPUTED-RULE unless the state has the engine's counts.
    pub fn check(&self, state: &State) -> Result<(), Violation> {
        for at in 0..self.known.len().max(state.requests.len()) {
            let request = state.requests.get(at).and_then(Option::as_ref);
            let counts = request.map(|request| request.num_computed);
            let expected = self.known.get(at).and_then(|known| known.computed);
            if counts != expected {
                let detail = format!("row {at} counts {counts:?}, by the rules {expected:?}");
                return Err(Violation::new("COMPUTED-RULE", detail));
            }
        }
        Ok(())
    }

    /// Fails with CAP if a request that the open batch schedules, by at most as many slots as
    /// the cap is made for, holds more of a windowed group than its cap.
    pub fn check_caps(&self, state: &State) -> Result<(), Violation> {
        if !state.has_windows {
            return Ok(());
        }
        let most = state.config.max_num_batched_tokens.unwrap_or(state.config.length_limit());
        for write in &self.writes {
            let times = self.writes.iter().filter(|each| each.row == write.row).count();
            if times > 1 || write.num_slots - write.loaded > most {
                continue;
            }
            let groups = (0..).zip(&state.config.groups);
            for ((index, group), table) in groups.zip(&state[write.row].tables) {
                let to_come = state[write.row].num_output_placeholders();
                let Some(cap) = state.config.cap(index, to_come) else { continue };
                let held = table.iter().filter(|&&block| !state.is_null(block)).count();
                let blocks = write.num_slots.div_ceil(group.block_size) as usize;
                if table.len() <= blocks && held > cap as usize {
                    let name = state[write.row].name();
                    let detail = format!("{name} holds {held} blocks of group {index}, cap {cap}");
                    return Err(Violation::new("CAP", detail));
                }
            }
        }
        Ok(())
    }

    fn at(&mut self, row: Row) -> &mut Known {
        if self.known.len() <= row.index() {
            self.known.resize(row.index() + 1, Known::default());
        }
        &mut self.known[row.index()]
    }

    fn computed(&mut self, row: Row) -> u32 {
        self.at(row).computed.unwrap_or(0)
    }

    fn fork(&mut self, state: &State, parent: Name, value: &Value) {
        let (Some(parent), &Value::Row(child)) = (parent.row(state), value) else { return };
        let computed = self.computed(parent);
        let before = self.at(parent).before.unwrap_or(computed);
        let settled = before.min(state[parent].num_tokens());
        let shares = settled == computed || keeps_state(state, parent, before);
        let computed = if shares && resumes(state, parent, settled) { settled } else { 0 };
        let encoder = self.at(parent).encoder.filter(|_| computed > 0);
        *self.at(Row(child)) = Known { computed: Some(computed), encoder, ..Known::default() };
    }

    fn allocated(&mut self, state: &State, slots: &Slots) {
        let Some(row) = slots.name.row(state) else { return };
        if self.computed(row) < state[row].num_tokens() {
            self.cut.push(row);
        }
        let start = self.computed(row) + slots.hit.as_ref().map_or(0, |hit| hit.num_tokens);
        let limit = state.config.length_limit();
        let loaded = (start + slots.num_external_computed_tokens).min(limit);
        let end = loaded + slots.num_new_tokens;
        let num_slots = (end + slots.num_lookahead_tokens).min(limit);
        let mut encoder = None;
        if slots.num_encoder_tokens > 0 && self.at(row).encoder.is_none() {
            self.num_encoders += 1;
            let number = 2 * self.num_encoders + 1;
            encoder = Some(Encoder { number, num_tokens: slots.num_encoder_tokens });
            self.at(row).encoder = encoder;
        }
        let write = Write::of_next_token(slots.name, row, start).with_drafts(&state[row], end);
        self.schedule(Write { loaded, num_slots, encoder, ..write });
    }

    /// Process output: positions scheduled after rejected drafts move up to where these were.
    fn came_in(&mut self, state: &State, name: Name, num_rejected: u32) {
        let Some(row) = name.row(state) else { return };
        let (known, computed) = (state[row].num_tokens(), self.computed(row));
        let count = num_rejected.min(computed.saturating_sub(known));
        if count > 0 && state.has_states {
            self.cut.push(row);
            return self.cut_row(state, row, 0);
        }
        let request = self.at(row);
        request.computed = Some(computed - count);
        request.before = request.before.map(|before| moved_up(before, known, count));
        for write in self.writes.iter_mut().filter(|write| write.row == row && write.start > known)
        {
            write.start -= count;
            write.loaded -= count;
            write.end -= count;
            write.num_slots -= count;
        }
    }

    fn begin_load(&mut self, state: &State, name: Name, num_tokens: u32, hits: u32) {
        let Some(row) = name.row(state) else { return };
        self.cut.push(row);
        let known = self.at(row);
        let before = known.computed.unwrap_or(0);
        known.before.get_or_insert(before);
        (known.computed, known.loading) = (Some(before + hits + num_tokens), Some(before + hits));
    }

    fn accepted(&mut self, state: &State, name: Name, num_accepted: u32) {
        let Some(row) = name.row(state) else { return };
        let most = state[row].num_tokens() + num_accepted;
        self.at(row).computed = Some(self.computed(row).min(most));
    }

    /// Complete an operation. A load's last one settles it: tokens before the failed block stay.
    fn completed(&mut self, state: &State, number: u32, done: bool) {
        let Some(operation) = state.operations.get(&number) else { return };
        let Some(row) = operation.request else { return };
        let first = operation.first_token;
        if !done {
            let failed = self.at(row).failed.map_or(first, |failed| failed.min(first));
            self.at(row).failed = Some(failed);
        }
        let mut others = state.operations.iter().filter(|other| *other.0 != number);
        if others.all(|(_, other)| other.request != Some(row)) {
            let count = self.at(row).failed.unwrap_or(u32::MAX);
            self.cut_row(state, row, count);
        }
    }

    /// Return the tokens of a request before the first that waits for a load or failed to load.
    fn came(&mut self, state: &State, row: Row) -> u32 {
        let computed = self.computed(row);
        let mine = state.operations.values().filter(|each| each.request == Some(row));
        let least = mine.map(|each| each.first_token).fold(computed, u32::min);
        self.failed(row).map_or(least, |failed| failed.min(least))
    }

    fn schedule(&mut self, write: Write) {
        let known = self.at(write.row);
        let before = known.computed.unwrap_or(0);
        known.before.get_or_insert(before);
        known.computed = Some(write.end);
        self.writes.push(write);
    }

    /// Stop writing a request from this token on, lookahead slots included.
    fn shorten(&mut self, state: &State, name: Name, num_tokens: u32) {
        let shorter = name.row(state).filter(|&row| num_tokens < self.computed(row));
        let Some(row) = shorter else { return };
        shorten(&mut self.writes, row, num_tokens);
        let known = self.at(row);
        known.computed = Some(num_tokens);
        known.before = known.before.filter(|&before| before < num_tokens);
    }

    /// Take a request out of the open batch, drop its drafts, and lower its count to `num_tokens`.
    fn cut(&mut self, state: &State, name: Name, num_tokens: u32) {
        if let Some(row) = name.row(state) {
            self.cut_row(state, row, num_tokens);
        }
    }

    fn cut_row(&mut self, state: &State, row: Row, num_tokens: u32) {
        let loading = self.loading(row).is_some() && self.at(row).before.is_some();
        let brought = loading || self.loads().any(|write| write.row == row);
        self.writes.retain(|write| write.row != row);
        let computed = self.computed(row);
        let (known, drafts) = (state[row].num_tokens(), state[row].num_scheduled_drafts());
        let before = self.at(row).before.take().unwrap_or(computed - drafts.min(computed));
        let resumed = |count| if resumes(state, row, count) { count } else { 0 };
        let mut most = if state[row].host_tables.is_empty() { num_tokens } else { 0 };
        let count = resumed(before.min(known));
        if state.has_states && (brought || most.min(known) < before) {
            most = 0;
        }
        let count = resumed(count.min(most));
        let known = self.at(row);
        (known.computed, known.loading, known.failed) = (Some(count), None, None);
        known.encoder = known.encoder.take().filter(|_| count > 0);
    }
}
