// SPDX-License-Identifier: Apache-2.0
//! The core as a model with batches in flight: taking and executing are edges of their own.
//!
//! An edge is a batch that is filled by some moves and taken, or moves that schedule nothing; the
//! execution of the oldest batch that is not executed; the completion of the oldest one; a cancel
//! of any unfinished one, executed or not; the end of an operation, done or failed, once its batch
//! is executed or cancelled. What a forward pass reads is checked when it is executed. In every
//! node, when all that was taken is executed on a copy, all that the state counts on must be there;
//! and what a batch in flight uses must not be free (CMD-INFLIGHT). A cancel drops commands that
//! were not executed, so nothing is concluded from those that say who owns what.
//! Twin: kvcore/check/search/flight_model.py.

mod flight_checks;
pub(crate) mod flight_ends;

use hashbrown::HashSet;
use rustc_hash::FxBuildHasher;

use crate::check::names::canonical::renaming::Renaming;
use crate::check::names::in_flight::flight_name;
use crate::check::names::in_flight::forgotten::forget_overwritten;
use crate::check::names::in_flight::{
    Node, Unreported, fills, in_flight, keep_live, keep_reportable, reporters, taken,
};
use crate::check::names::packed::packed_node::{pack_node, unpack_node};
use crate::check::properties::outcomes::check_events;
use crate::check::search::ahead_model::device::{Device, Ending, oldest};
use crate::check::search::core_model::path::{Path, Stop, Visit, Walk};
use crate::check::search::core_model::{CoreModel, caught};
use crate::check::search::report::Notes;
use crate::check::world::model::Fingerprint;
use crate::oracle::calls::Call;
use crate::oracle::contents::Ghost;
use crate::oracle::schedule::Schedule;
use crate::oracle::schedule::writes::Write;
use crate::state::state::State;
use crate::types::commands::Command;
use crate::types::ids::Row;
use crate::types::values::PrefixCacheStats;
use crate::types::violation::{Checks, Violation};

/// The nodes of a world with batches in flight, for one worker.
pub struct FlightModel {
    pub(crate) core: CoreModel,
    ghost: Ghost,
    /// Holds what a state counts on.
    wanted: Ghost,
    /// Nodes that are done with.
    spare: Vec<Node>,
    /// Fingerprints of states that were checked: many nodes differ in memory and output alone.
    checked: HashSet<Fingerprint, FxBuildHasher>,
    /// The state that is looked up there.
    looked_up: Vec<u8>,
    num_edges: u32,
}

impl FlightModel {
    /// Return the model of the world of a core model.
    #[must_use]
    pub fn new(core: CoreModel, checks: &Checks) -> Self {
        let ghost = Ghost::checking(&core.world.config, checks);
        let (wanted, checked) = (ghost.clone(), HashSet::default());
        let (spare, looked_up) = (Vec::new(), Vec::new());
        FlightModel { core, ghost, wanted, spare, checked, looked_up, num_edges: 0 }
    }

    /// Return a copy of a node, in the room of one that is done with.
    pub(crate) fn copy_of(&mut self, node: &Node) -> Node {
        self.copy_beside(node, &node.state, &node.schedule)
    }

    /// Return a copy of a node, with a state and a schedule of its own.
    fn copy_beside(&mut self, node: &Node, state: &State, schedule: &Schedule) -> Node {
        let mut copy = self.spare.pop().unwrap_or_else(|| node.clone());
        copy.copy_beside(node, state, schedule);
        copy
    }

    /// Visit everything that can happen next.
    fn walk_from(&mut self, node: &Node, visit: &mut Visit<'_, FlightModel>) -> Result<(), Stop> {
        self.num_edges = 0;
        let full = self.is_full(node);
        if node.filled && !full {
            self.edge("take", visit, |model| model.fill(node, None, full))?;
        }
        if !node.filled {
            self.walk_paths(node, full, visit)?;
        }
        let endings = self.endings(node);
        for ending in self.core.run_guarded(endings)?.unwrap_or_default() {
            self.edge("execute", visit, |model| model.execute(node, &ending))?;
        }
        for &failure in &node.unreported {
            for name in reporters(&node.state, failure) {
                self.edge("report", visit, |model| model.report_load(node, failure, name))?;
            }
        }
        let is_reported = |number| node.unreported.iter().all(|each| each.batch > number);
        if node.pending.first().is_some_and(|batch| batch.executed && is_reported(batch.number)) {
            self.edge("complete", visit, |model| model.complete(node))?;
        }
        let cancels = self.core.world.config.max_in_flight > 0;
        for number in node.pending.iter().filter(|_| cancels).map(|batch| batch.number) {
            self.edge("cancel", visit, |model| model.cancel(node, number))?;
        }
        for (&number, operation) in &node.state.operations {
            let waits = node.waiting().any(|batch| batch.number == operation.batch);
            if waits || operation.batch == node.state.batch.number {
                continue;
            }
            if node.started.contains(&number) {
                self.edge("done", visit, |model| model.end_operation(node, number, true))?;
            }
            self.edge("failed", visit, |model| model.end_operation(node, number, false))?;
        }
        for output in oldest(&node.outputs) {
            self.edge("output", visit, |model| model.hand_in(node, output))?;
            if !node.filled && self.is_appended(&node.state, output) {
                self.edge("append", visit, |model| model.append_output(node, output))?;
            }
        }
        Ok(())
    }

    /// Visit every way to make one or more moves in a batch, each ended.
    fn walk_paths(
        &mut self,
        node: &Node,
        full: bool,
        visit: &mut Visit<'_, FlightModel>,
    ) -> Result<(), Stop> {
        let mut paths = vec![self.core.path_from(&node.state, &node.schedule)];
        paths[0].schedule.resume(&node.state);
        for left in (0..self.core.world.moves_per_batch).rev() {
            let mut longer = Vec::new();
            for path in &paths {
                self.core.calls.clone_from(&path.calls);
                let found = self.possible_behind(node, path);
                let Some(found) = self.core.run_guarded(found)? else { continue };
                for each in &found {
                    self.core.calls.clone_from(&path.calls);
                    let made = self.core.make(each, path);
                    let Some(made) = self.core.run_guarded(made)? else { continue };
                    let names = made.names.clone();
                    self.edge_of(&names, visit, |model| model.fill(node, Some(&*made), full))?;
                    match left {
                        0 => self.core.spare.push(made),
                        _ => longer.push(made),
                    }
                }
                self.core.moves = found;
            }
            self.core.spare.append(&mut paths);
            paths = longer;
        }
        self.core.spare.append(&mut paths);
        Ok(())
    }

    /// Visit an edge that is no path of moves.
    fn edge(
        &mut self,
        name: &'static str,
        visit: &mut Visit<'_, FlightModel>,
        make: impl FnOnce(&mut Self) -> Result<Node, Violation>,
    ) -> Result<(), Stop> {
        self.core.calls.clear();
        self.edge_of(&[name], visit, make)
    }

    /// Visit the edge that `make` gives; none if it breaks a property that does not count.
    fn edge_of(
        &mut self,
        names: &[&'static str],
        visit: &mut Visit<'_, FlightModel>,
        make: impl FnOnce(&mut Self) -> Result<Node, Violation>,
    ) -> Result<(), Stop> {
        let made = make(self);
        let Some(reached) = self.core.run_guarded(made)? else { return Ok(()) };
        self.core.checker.notes.note_moves(names);
        let number = self.num_edges;
        self.num_edges += 1;
        visit(self, number, reached)
    }

    /// Let some moves fill the open batch, and take it if it is not empty and there is room.
    pub(crate) fn fill(
        &mut self,
        node: &Node,
        path: Option<&Path>,
        full: bool,
    ) -> Result<Node, Violation> {
        let start: &State = &node.state;
        let (opened, schedule) =
            path.map_or((start, &node.schedule), |path| (&path.state, &path.schedule));
        let mut after = self.copy_beside(node, opened, schedule);
        if path.is_none() {
            after.schedule.resume(start);
        }
        self.note_left(&mut after);
        keep_reportable(&mut after);
        let checks = &self.core.checker.checks;
        checks.hear(after.schedule.check(&after.state))?;
        if path.is_some() {
            checks.hear(after.schedule.check_caps(&after.state))?;
            self.core.checker.check_batch(start, &after.state)?;
        }
        after.filled = path.is_none() || fills(start, &after.state);
        let schedule = after.schedule.clone();
        if full || !after.filled {
            self.await_outputs(&mut after, &schedule, None);
            return self.closed(after, Some(start));
        }
        let tokens = after.tokens_of_writes();
        let batch = taken(&after.state, &after.schedule, &mut self.core.prefixes);
        self.call(opened, &mut after, &Call::TakeBatch)?;
        let merges = !after.state.effects.commands.is_empty();
        self.core.checker.notes.note_goal("merge", merges);
        after.pending.push(batch);
        after.schedule.take();
        after.filled = false;
        self.await_outputs(&mut after, &schedule, Some(tokens));
        self.closed(after, Some(start))
    }

    /// Return the ways in which the loads of the oldest batch that waits can end, if one waits: all
    /// are done, or one fails.
    pub(crate) fn failures(&self, node: &Node) -> Vec<Option<Unreported>> {
        let Some(batch) = node.waiting().next() else { return Vec::new() };
        let writes = batch.writes.iter().filter(|_| self.core.world.loads_fail);
        let failing = writes.flat_map(|write| {
            let Write { row, start, loaded, .. } = *write;
            (start..loaded).map(move |first| Unreported { batch: batch.number, row, first })
        });
        std::iter::once(None).chain(failing.map(Some)).collect()
    }

    /// Run the oldest batch that waits: its commands, then its forward pass.
    fn execute(&mut self, node: &Node, ending: &Ending) -> Result<Node, Violation> {
        let (mut after, failing) = (self.copy_of(node), ending.failing);
        let mut device = Device::recall(node, node.waiting().next());
        let texts = device.texts();
        let waiting = after.pending.iter().position(|batch| !batch.executed);
        let batch = &mut after.pending[waiting.expect("a batch waits")];
        let number = batch.number;
        if self.core.recording {
            self.core.calls.push(Call::Execute { batch: batch.number });
        }
        after.memory.epoch = batch.epoch;
        after.memory.execute(in_flight(&batch.commands), &mut self.core.prefixes)?;
        for (row, nodes) in std::mem::take(&mut batch.nodes) {
            after.memory.set_numbers(row, nodes);
        }
        let mut writes = std::mem::take(&mut batch.writes);
        for write in &mut writes {
            let fails = failing.filter(|failure| failure.row == write.row);
            write.failed = fails.map(|failure| failure.first).or(write.failed);
        }
        let found = match self.core.world.num_output_placeholders {
            0 => after.memory.forward_numbered(&writes, &after.schedule),
            _ => {
                let ghost = (&mut after.memory, &after.schedule, &mut self.core.prefixes);
                let epoch_of = |row| batch.epoch_of(row);
                device.forward((&writes, &batch.tokens), epoch_of, &ending.sampled, ghost)
            }
        };
        self.core.checker.checks.hear(found)?;
        for command in batch.commands.iter() {
            if let Command::Load { operation, .. } | Command::Store { operation, .. } = command {
                after.started.push(operation);
            }
        }
        after.started.sort_unstable();
        after.started.dedup();
        batch.commands.clear();
        batch.executed = true;
        after.unreported.extend(failing);
        keep_reportable(&mut after);
        if self.core.world.num_output_placeholders > 0 {
            self.note_output(&mut after, (number, &writes), &ending.sampled, (texts, device));
        }
        self.closed(after, None)
    }

    /// Make a call on the state of a node that is no part of a path. before: equal to that state.
    pub(crate) fn call(
        &mut self,
        before: &State,
        node: &mut Node,
        call: &Call,
    ) -> Result<(), Violation> {
        self.core.call(before, &mut node.state, &mut Schedule::default(), call).map(|_| ())
    }

    /// Let batches in flight forget removed requests.
    fn note_left(&mut self, node: &mut Node) {
        for &(row, removed) in node.schedule.left() {
            let known = |before: &[(Row, u32)]| before.iter().any(|each| each.0 == row);
            let is_known = node.pending.iter().any(|batch| known(&batch.before));
            self.core.checker.notes.note_goal("abort in flight", is_known);
            if removed {
                for batch in &mut node.pending {
                    batch.before.retain(|each| each.0 != row);
                }
            }
        }
    }

    /// Return a node whose state's events are drained, without what is never read again.
    pub(crate) fn closed(
        &mut self,
        mut node: Node,
        start: Option<&State>,
    ) -> Result<Node, Violation> {
        if let Some(start) = start
            && node.state.config.enable_events
        {
            self.core.checker.checks.hear(check_events(start, &node.state))?;
        }
        node.state.effects.events.take();
        node.state.stats = PrefixCacheStats::default();
        node.state.new_blocks.take();
        node.schedule.resume(&node.state);
        self.wanted.assume(&node.state, &node.schedule, &mut self.core.prefixes)?;
        keep_live(&mut node, &self.wanted);
        if self.core.world.forgets_overwritten {
            forget_overwritten(&mut node);
        }
        Ok(node)
    }
}

impl Walk for FlightModel {
    type Node<'n> = Node;

    fn record(&mut self) -> (&mut Notes, &mut bool, &mut Vec<Call>) {
        self.core.record()
    }

    fn empty(&self) -> State {
        self.core.empty.clone()
    }

    fn first(&self, empty: &State) -> Node {
        Node::new(empty.clone(), self.ghost.clone())
    }

    fn state(node: &Node) -> &State {
        &node.state
    }

    fn walk(&mut self, packed: &[u8], visit: &mut Visit<'_, FlightModel>) -> Result<(), Stop> {
        let ghost = &self.ghost;
        let made = || Node::new(self.core.empty.clone(), ghost.clone());
        let mut node = self.spare.pop().unwrap_or_else(made);
        unpack_node(packed, &self.core.empty, &mut self.core.prefixes, &mut node)?;
        let walked = caught(|| self.walk_from(&node, visit));
        self.spare.push(node);
        walked
    }

    fn fingerprint(&mut self, node: &Node) -> Result<Fingerprint, Violation> {
        let CoreModel { namer, prefixes, keys, world, .. } = &mut self.core;
        let stages = world.forgets_overwritten.then(|| flight_name::stages(node));
        let mut more =
            |names: &mut Renaming<'_>| flight_name::write(node, stages.as_deref(), names);
        Ok(keys.of(namer.canonical_with(&node.state, prefixes, &mut more)?))
    }

    fn check(&mut self, node: &Node) -> Result<(), Violation> {
        self.check_state(&node.state)?;
        self.check_node(node)
    }

    fn pack(&mut self, node: Node) -> Vec<u8> {
        let packed = pack_node(&node, &mut self.core.prefixes);
        self.spare.push(node);
        packed
    }

    fn reuse(&mut self, node: Node) {
        self.spare.push(node);
    }
}
