// SPDX-License-Identifier: Apache-2.0
//! The ends of batches and loads: a report, the completion of a batch, a cancel, an operation.
//!
//! Twin: kvcore/check/search/flight_model.py.

use crate::check::names::in_flight::{Node, Pending, Unreported, fills};
use crate::check::search::flight_model::FlightModel;
use crate::oracle::calls::{Call, Name, Value};
use crate::types::violation::Violation;

impl FlightModel {
    /// Report that an external load failed. Fails with LOAD-FAILED if the report is refused.
    pub(crate) fn report_load(
        &mut self,
        node: &Node,
        failure: Unreported,
        name: Name,
    ) -> Result<Node, Violation> {
        let mut after = self.copy_of(node);
        after.schedule.resume(&node.state);
        let call = Call::Rewind { names: vec![name], num_tokens: failure.first };
        let Node { state, schedule, .. } = &mut after;
        let outcome = self.core.call(&node.state, state, schedule, &call)?;
        if let Value::Misuse(error) = outcome.value {
            return Err(Violation::new("LOAD-FAILED", format!("the report is refused: {error}")));
        }
        self.core.checker.notes.note_goal("reached", outcome.value.fell().len() > 1);
        self.core.checker.checks.hear(after.schedule.check(&after.state))?;
        after.filled |= fills(&node.state, &after.state);
        after.unreported.retain(|&each| each != failure);
        self.note_report(&mut after, &node.state, name, outcome.value.fell());
        self.closed(after, Some(&node.state))
    }

    /// Complete the oldest batch.
    pub(crate) fn complete(&mut self, node: &Node) -> Result<Node, Violation> {
        let mut after = self.copy_of(node);
        let batch = node.pending[0].number;
        self.call(&node.state, &mut after, &Call::Complete { batch })?;
        let merges = after.state.effects.commands.len() > node.state.effects.commands.len();
        self.core.checker.notes.note_goal("merge", merges);
        let mut schedule = node.resumed();
        schedule.resume(&node.state);
        self.core.checker.checks.hear(schedule.check(&after.state))?;
        after.pending.remove(0);
        self.closed(after, Some(&node.state))
    }

    /// Take back a batch and all later ones; unexecuted ones never run.
    pub(crate) fn cancel(&mut self, node: &Node, number: u64) -> Result<Node, Violation> {
        let mut after = self.copy_of(node);
        self.call(&node.state, &mut after, &Call::Cancel { batch: number })?;
        let gone = node.pending.iter().filter(|batch| batch.number >= number);
        let counts = gone.flat_map(|batch| batch.before.iter().copied());
        for (row, before) in counts.chain(node.schedule.scheduled()) {
            let request = after.state.requests.get(row.index()).and_then(Option::as_ref);
            if let Some(request) = request.filter(|request| request.num_computed > before) {
                let (name, count) = (request.name(), request.num_computed);
                let detail = format!("{name} counts {count}, cancelled from {before} on");
                let found = Err(Violation::new("COMPUTED-RULE", detail));
                self.core.checker.checks.hear(found)?;
            }
        }
        self.core.checker.notes.note_goal("cancel", true);
        let gone: Vec<Pending> =
            after.pending.extract_if(.., |batch| batch.number >= number).collect();
        self.cancel_output(&mut after, &gone);
        after.unreported.retain(|each| each.batch < number);
        after.schedule.resume(&after.state);
        after.schedule.take();
        after.schedule.keep_loads(&after.state);
        after.filled = false;
        self.closed(after, Some(&node.state))
    }

    /// Complete an operation, or let it fail.
    pub(crate) fn end_operation(
        &mut self,
        node: &Node,
        number: u32,
        done: bool,
    ) -> Result<Node, Violation> {
        let mut after = self.copy_of(node);
        let mut schedule = node.resumed();
        let call = Call::CompleteOperation { operation: number, done };
        self.call(&node.state, &mut after, &call)?;
        schedule.follow(&node.state, &call, &Value::Nothing);
        self.core.checker.checks.hear(schedule.check(&after.state))?;
        after.memory.complete(number, done, &mut self.core.prefixes)?;
        after.schedule.take_loads(&schedule);
        self.closed(after, Some(&node.state))
    }
}
