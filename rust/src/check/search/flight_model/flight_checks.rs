// SPDX-License-Identifier: Apache-2.0
//! The checks of a new node: of its state, and of its memory when everything is executed.
//!
//! A part of flight_model.rs.

use twox_hash::XxHash3_128;

use crate::check::names::in_flight::{Node, in_flight, unused_wait};
use crate::check::names::packed::pack;
use crate::check::search::ahead_model::device::Device;
use crate::check::search::core_model::CoreModel;
use crate::check::search::flight_model::FlightModel;
use crate::state::state::State;
use crate::types::violation::Violation;

/// States that are remembered as checked.
const MOST_CHECKED: usize = 1 << 22;

impl FlightModel {
    /// Check the state of a new node, and the runs that start in it, unless one that is equal was
    /// checked.
    pub(super) fn check_state(&mut self, state: &State) -> Result<(), Violation> {
        let CoreModel { checker, prefixes, world, .. } = &mut self.core;
        self.looked_up.clear();
        pack(state, prefixes, &mut self.looked_up);
        for request in state.requests() {
            let (until, since) = (request.quiet_until, request.quiet_since as u32);
            let quiet = [until, request.quiet_tokens, since, request.slots_until];
            self.looked_up.extend(quiet.into_iter().flat_map(u32::to_le_bytes));
        }
        let name = XxHash3_128::oneshot(&self.looked_up);
        if self.checked.contains(&name) {
            return Ok(());
        }
        checker.check_new(state, world, prefixes)?;
        if self.checked.len() >= MOST_CHECKED {
            self.checked.clear();
        }
        self.checked.insert(name);
        Ok(())
    }

    /// Check the rest of a new node: its free blocks, and memory when everything is executed.
    pub(super) fn check_node(&mut self, node: &Node) -> Result<(), Violation> {
        let state = &node.state;
        let CoreModel { checker, prefixes, world, .. } = &mut self.core;
        checker.notes.note_goal("quarantine", state.device.num_quarantined() > 0);
        if world.config.max_in_flight > 0 {
            checker.checks.hear_finding("CMD-INFLIGHT", unused_wait(node))?;
        }
        self.ghost.clone_from(&node.memory);
        let mut device = (world.num_output_placeholders > 0).then(|| Device::recall(node, None));
        for batch in node.waiting() {
            self.ghost.epoch = batch.epoch;
            self.ghost.execute(in_flight(&batch.commands), prefixes)?;
            for (row, nodes) in &batch.nodes {
                self.ghost.set_numbers(*row, nodes.clone());
            }
            let found = match &mut device {
                None => self.ghost.forward_numbered(&batch.writes, &node.schedule),
                Some(device) => {
                    device.feed(&batch.feeds);
                    let ghost = (&mut self.ghost, &node.schedule, &mut *prefixes);
                    let epoch_of = |row| batch.epoch_of(row);
                    device.forward((&batch.writes, &batch.tokens), epoch_of, &[], ghost)
                }
            };
            checker.checks.hear(found)?;
        }
        self.ghost.epoch = state.epoch;
        self.ghost.execute(in_flight(&state.effects.commands), prefixes)?;
        let writes = node.schedule.writes();
        let found = match &mut device {
            None => self.ghost.forward(state, writes, &node.schedule, prefixes),
            Some(device) => {
                let ghost = (&mut self.ghost, &node.schedule, &mut *prefixes);
                let epoch_of = |row| state.epoch_of(row);
                device.forward((writes, &node.tokens_of_writes()), epoch_of, &[], ghost)
            }
        };
        checker.checks.hear(found)?;
        self.ghost.assume_owners(state);
        if !node.unreported.is_empty() {
            return Ok(());
        }
        self.ghost.check(state, &node.schedule, prefixes)
    }
}
