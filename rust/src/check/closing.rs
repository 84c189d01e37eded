// SPDX-License-Identifier: Apache-2.0
//! The end of an edge: a batch is judged and taken, and what it leaves is settled.
//!
//! Rules: as in core_model.rs, of which this is a part. Twin: kvcore/check/core_model.py.

use crate::check::Violation;
use crate::check::calls::{Call, Name, Outcome, Value, perform};
use crate::check::core_model::{CoreModel, Failing, Path};
use crate::check::judge::note;
use crate::check::schedule::Schedule;
use crate::drain::{take_events, take_stats};
use crate::errors::Error;
use crate::ids::Row;
use crate::state::{OpenBatch, Operation, State};

impl CoreModel {
    /// Take the batch that the calls filled, judge it, and settle what it leaves.
    pub(super) fn close(
        &mut self,
        start: &State,
        state: &mut State,
        schedule: &mut Schedule,
        failing: Failing,
    ) -> Result<(), Violation> {
        self.assumed.clone()?;
        let loads = failing.is_none_or(|(row, _)| schedule.loading(row).is_some());
        self.judge_batch(start, state, schedule, failing, loads)?;
        let merges = !state.batch.merges.is_empty();
        self.take(state);
        match failing {
            Some(failing) if !loads => self.rewind(state, failing)?,
            _ => self.complete(state, schedule, failing)?,
        }
        if !state.effects.commands.is_empty() {
            self.judge.notes.note_goal("merge", merges);
            self.ghost.execute(state.effects.commands.iter(), &mut self.prefixes)?;
            self.ghost.check(state, schedule, &mut self.prefixes)?;
            self.take(state);
        }
        take_stats(state);
        take_events(state);
        state.batch = OpenBatch::default();
        Ok(())
    }

    /// Judge a batch that is about to be taken, and its forward pass.
    fn judge_batch(
        &mut self,
        start: &State,
        opened: &State,
        schedule: &mut Schedule,
        failing: Failing,
        loads: bool,
    ) -> Result<(), Violation> {
        self.judge.judges.hear(schedule.check(opened))?;
        self.judge.judges.hear(schedule.check_caps(opened))?;
        self.ghost.clone_from(&self.base);
        self.ghost.execute(opened.effects.commands.iter(), &mut self.prefixes)?;
        self.writes.clear();
        self.writes.extend_from_slice(schedule.writes());
        if let Some((row, first)) = failing {
            for write in self.writes.iter_mut().filter(|write| write.row == row) {
                write.failed = Some(first);
            }
        }
        schedule.take();
        let read = self.ghost.forward(opened, &self.writes, schedule, &mut self.prefixes);
        self.judge.judges.hear(read)?;
        self.judge.check_batch(start, opened)?;
        if loads { self.ghost.check(opened, schedule, &mut self.prefixes) } else { Ok(()) }
    }

    /// Take the batch: nothing is judged that needs the state before.
    fn take(&mut self, state: &mut State) {
        if self.recording {
            self.calls.push(Call::TakeBatch);
        }
        let outcome = perform(state, &Call::TakeBatch, &self.world);
        note(&mut self.judge.notes, &Call::TakeBatch, &outcome, state);
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
            self.judge.judges.hear(schedule.check(state))?;
        }
        Ok(())
    }

    /// Take back what a failed load left, of all requests that count it.
    fn rewind(
        &mut self,
        state: &mut State,
        (row, num_tokens): (Row, u32),
    ) -> Result<(), Violation> {
        let mut names = vec![Name::of(&state[row])];
        loop {
            let mut schedule = Schedule::default();
            schedule.assume(state);
            let call = Call::Rewind { names: names.clone(), num_tokens };
            match self.settle(state, &mut schedule, &call)?.value {
                Value::Misuse(Error::HeldByOthers { requests, .. }) => {
                    names.extend(requests.iter().map(|id| Name(id.as_bytes()[0] - b'0')));
                }
                Value::Misuse(error) => {
                    return Err(Violation::new("NOCRASH", error.to_string()));
                }
                _ => return schedule.check(state),
            }
        }
    }
}

/// Each request whose external tokens a path loads, with each token that may be the first to be
/// missing: of the call itself, or of a block that an operation loads.
pub(super) fn failures(path: &Path) -> Vec<(Row, u32)> {
    let of = |each: &Operation| each.request.map(|row| (row, each.first_token));
    let operations = path.state.operations.values().filter_map(of);
    let loads = path.schedule.loads();
    let writes =
        loads.flat_map(|write| (write.start..write.loaded).map(|first| (write.row, first)));
    operations.chain(writes).collect()
}
