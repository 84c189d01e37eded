// SPDX-License-Identifier: Apache-2.0
//! The end of an edge: a batch is checked and taken, and what it leaves is settled.
//!
//! Twin: kvcore/check/search/core_model.py.

use crate::check::properties::checker::note;
use crate::check::search::actions::Move;
use crate::check::search::core_model::CoreModel;
use crate::check::search::core_model::path::{Ending, Failing, Path, Stop};
use crate::check::world::calls::{Outcome, perform};
use crate::check::world::remembered::forget_times;
use crate::oracle::calls::{Call, Name, Value};
use crate::oracle::contents::Checked;
use crate::oracle::schedule::Schedule;
use crate::state::state::State;
use crate::transitions::drain::{take_events, take_stats};
use crate::types::ids::Row;
use crate::types::violation::Violation;

impl CoreModel {
    /// Return what an engine can do before it reports a failed load: nothing, or one move.
    ///
    /// Left out are a rewind, which may be the report, and loads and stores by key, which would not
    /// end in it.
    pub(crate) fn late(
        &mut self,
        path: &Path,
        failing: Failing,
    ) -> Result<Vec<Option<Move>>, Stop> {
        let Some((row, _)) = failing else { return Ok(Vec::new()) };
        if path.state[row].num_loading > 0 {
            return Ok(vec![None]);
        }
        let mut taken = path.state.clone();
        perform(&mut taken, &Call::TakeBatch, &self.world);
        self.calls.clone_from(&path.calls);
        let found = self.possible(&taken);
        let found = self.run_guarded(found)?.unwrap_or_default().into_iter();
        let late = found.filter(|each| !matches!(each.name(), "rewind" | "load" | "store"));
        Ok(std::iter::once(None).chain(late.map(Some)).collect())
    }

    /// Take the batch that the calls filled, check it, and finish what it leaves.
    pub(crate) fn close(
        &mut self,
        start: &State,
        state: &mut State,
        schedule: &mut Schedule,
        (failing, late): Ending<'_>,
    ) -> Checked {
        self.assumed.clone()?;
        let loads = failing.is_none_or(|(row, _)| schedule.loading(row).is_some());
        self.check_open_batch(start, state, schedule, failing, loads)?;
        let merges = !state.batch.merges.is_empty();
        let keyed = !state.batch.ends.is_empty() || state.device.tails.is_some();
        self.take(state);
        if loads && keyed && state.effects.commands.is_empty() {
            self.ghost.check(state, schedule, &mut self.prefixes)?;
        }
        self.checker.notes.note_goal("merge", merges && !state.effects.commands.is_empty());
        match failing {
            Some(failing) if !loads => {
                self.make_late(late, state, schedule)?;
                self.report(state, schedule, failing)?;
                self.complete(state, schedule, None)?;
                self.drain(state, schedule, true)
            }
            _ => {
                self.complete(state, schedule, failing)?;
                self.drain(state, schedule, false)
            }
        }
    }

    /// Take batches until nothing is left to run and no load is unconfirmed.
    ///
    /// failed: whether a load failed; then what the state counts on is checked at least once.
    fn drain(&mut self, state: &mut State, schedule: &mut Schedule, mut failed: bool) -> Checked {
        while failed
            || !state.effects.commands.is_empty()
            || state.batch.scheduled.keys().next().is_some()
            || !state.loads.is_empty()
        {
            failed = false;
            self.ghost.epoch = state.epoch;
            self.ghost.execute(state.effects.commands.iter(), &mut self.prefixes)?;
            self.take_writes(schedule);
            let read = self.ghost.forward(state, &self.writes, schedule, &mut self.prefixes);
            self.checker.checks.hear(read)?;
            self.ghost.check(state, schedule, &mut self.prefixes)?;
            self.take(state);
            if state.device.tails.is_some() && state.effects.commands.is_empty() {
                self.ghost.check(state, schedule, &mut self.prefixes)?;
            }
        }
        take_stats(state);
        take_events(state);
        let number = forget_times(&mut state.device, state.batch.number);
        state.batch.clone_from(&self.empty.batch);
        state.batch.number = number;
        for request in state.requests.iter_mut().flatten() {
            request.output_from = 0;
            request.samplers.clear();
        }
        Ok(())
    }

    /// Check a batch that is about to be taken, and its forward pass.
    fn check_open_batch(
        &mut self,
        start: &State,
        opened: &State,
        schedule: &mut Schedule,
        failing: Failing,
        loads: bool,
    ) -> Result<(), Violation> {
        self.checker.checks.hear(schedule.check(opened))?;
        self.checker.checks.hear(schedule.check_caps(opened))?;
        self.ghost.clone_from(&self.base);
        self.ghost.epoch = opened.epoch;
        self.ghost.execute(opened.effects.commands.iter(), &mut self.prefixes)?;
        self.take_writes(schedule);
        if let Some((row, first)) = failing {
            for write in self.writes.iter_mut().filter(|write| write.row == row) {
                write.failed = Some(first);
            }
        }
        self.ghost.number(opened, &mut self.prefixes);
        self.checker.checks.hear(self.ghost.forward_numbered(&self.writes, schedule))?;
        self.checker.check_batch(start, opened)?;
        if loads {
            self.ghost.check_numbered(opened, schedule, &mut self.prefixes)?;
        }
        Ok(())
    }

    /// Take over what a batch writes.
    fn take_writes(&mut self, schedule: &mut Schedule) {
        self.writes.clear();
        self.writes.extend_from_slice(schedule.writes());
        schedule.take();
    }

    /// Take the batch: nothing is checked that needs the state before.
    fn take(&mut self, state: &mut State) {
        if self.recording {
            self.calls.push(Call::TakeBatch);
        }
        let outcome = perform(state, &Call::TakeBatch, &self.world);
        note(&mut self.checker.notes, &Call::TakeBatch, &outcome, state);
    }

    /// Make a call that closes an edge.
    fn settle(
        &mut self,
        state: &mut State,
        schedule: &mut Schedule,
        call: &Call,
    ) -> Result<Outcome, Violation> {
        let before = state.clone();
        self.call(&before, state, schedule, call)
    }

    /// Finish every operation, in the order of their numbers.
    fn complete(
        &mut self,
        state: &mut State,
        schedule: &mut Schedule,
        failing: Failing,
    ) -> Result<(), Violation> {
        let started: Vec<(u32, u32)> =
            state.operations.iter().map(|(&number, each)| (number, each.first_token)).collect();
        for (operation, first_token) in started {
            let done = failing.is_none_or(|(_, first)| first_token < first);
            self.settle(state, schedule, &Call::CompleteOperation { operation, done })?;
            self.ghost.complete(operation, done, &mut self.prefixes)?;
            self.checker.checks.hear(schedule.check(state))?;
        }
        Ok(())
    }

    /// Make one move in the next batch.
    fn make_late(
        &mut self,
        late: Option<&Move>,
        state: &mut State,
        schedule: &mut Schedule,
    ) -> Checked {
        let Some(late) = late else { return Ok(()) };
        let mut last: Option<Outcome> = None;
        let mut num_made = 0;
        while let Some(call) = late.next(&self.world, state, num_made, last.as_ref()) {
            last = Some(self.settle(state, schedule, &call)?);
            num_made += 1;
        }
        Ok(())
    }

    /// Report that a load failed, unless no request is left that can. Fails with LOAD-FAILED if
    /// the report is refused.
    fn report(
        &mut self,
        state: &mut State,
        schedule: &mut Schedule,
        (row, num_tokens): (Row, u32),
    ) -> Checked {
        let own = state.requests[row.index()].as_ref().map(|_| row);
        let mut others = state.loads.iter().flat_map(|load| &load.reporters);
        let other = others.find(|each| each.most > num_tokens).map(|each| each.row);
        let Some(reporter) = own.or(other) else { return Ok(()) };
        let call = Call::Rewind { names: vec![Name::of(&state[reporter])], num_tokens };
        match self.settle(state, schedule, &call)?.value {
            Value::Misuse(error) => {
                Err(Violation::new("LOAD-FAILED", format!("the report is refused: {error}")))
            }
            value => {
                self.checker.notes.note_goal("reached", value.fell().len() > 1);
                self.checker.checks.hear(schedule.check(state))
            }
        }
    }
}
