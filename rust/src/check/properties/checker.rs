// SPDX-License-Identifier: Apache-2.0
//! The checker: makes calls, checks the selected properties on each, and notes what was reached.
//!
//! A property that fails ends the edge. If only some properties are selected, an edge that breaks
//! another one is left out. Twin: kvcore/check/properties/checker.py.

use crate::check::properties::closure::CLOSURE_PROPERTIES;
use crate::check::properties::hits::called_with;
use crate::check::properties::outcomes::{check_events, check_hit, check_outcome};
use crate::check::properties::published::Made;
use crate::check::properties::{closure, fair_scheduler, liveness, transitions};
use crate::check::search::report::{Notes, Shown};
use crate::check::world::calls::{Outcome, perform};
use crate::check::world::world::World;
use crate::invariants::pool_and_state;
use crate::invariants::requests::Scratch;
use crate::oracle::calls::{Call, Value};
use crate::oracle::hazards;
use crate::oracle::prefixes::Prefixes;
use crate::state::state::State;
use crate::transitions::epochs::stale_requests;
use crate::transitions::prefix_lookup::longest_hit;
use crate::types::commands::Command;
use crate::types::ids::BlockId;
use crate::types::values::{Hit, Reason};
use crate::types::violation::{Checks, Violation};

/// Checks all selected properties, and keeps the notes.
#[derive(Debug, Default)]
pub struct Checker {
    /// Those that count.
    pub checks: Checks,
    /// How often each thing happened.
    pub notes: Notes,
    scratch: Scratch,
    /// Whether the properties of `closure` are checked in the world, once that is known.
    closed: Option<bool>,
}

impl Checker {
    /// Return a checker of these properties.
    #[must_use]
    pub fn new(checks: Checks) -> Self {
        Checker { checks, ..Checker::default() }
    }

    /// Check the structural properties of a state.
    pub fn check(&mut self, state: &State) -> Result<(), Violation> {
        pool_and_state::check(state, &self.checks, &mut self.scratch)
    }

    /// Return the names of all structural properties that fail.
    pub fn failing(&mut self, state: &State) -> Vec<&'static str> {
        pool_and_state::failing(state, &mut self.scratch)
    }

    /// Check the properties of a batch, given the state in which it was empty and the one before it
    /// is taken.
    pub fn check_batch(&mut self, start: &State, opened: &State) -> Result<(), Violation> {
        if opened.config.enable_events {
            self.checks.hear(check_events(start, opened))?;
        }
        hazards::check(start, opened, &self.checks)
    }

    /// Check the properties of a new state, and of the runs that start in it.
    pub fn check_new(
        &mut self,
        state: &State,
        world: &World,
        prefixes: &mut Prefixes,
    ) -> Result<(), Violation> {
        self.check(state)?;
        self.check_closure(state, world, prefixes)?;
        liveness::check(world, state, &self.checks)?;
        if self.checks.named("NO-THRASH") {
            self.checks.hear_finding("NO-THRASH", fair_scheduler::no_thrash(world, state))?;
        }
        Ok(())
    }

    /// Check that cached blocks have their parents, if the calls of the world keep it so.
    fn check_closure(
        &mut self,
        state: &State,
        world: &World,
        prefixes: &mut Prefixes,
    ) -> Result<(), Violation> {
        let named = |property: &&str| self.checks.named(property);
        let holds = || closure::holds_in(world) || CLOSURE_PROPERTIES.iter().any(named);
        if *self.closed.get_or_insert_with(holds) {
            closure::check(state, prefixes, &self.checks)?;
        }
        Ok(())
    }

    /// Make a call, check its outcome and note it. state: equal to the one before.
    pub fn perform(
        &mut self,
        before: &State,
        state: &mut State,
        call: &Call,
        world: &World,
        prefixes: &mut Prefixes,
    ) -> Result<Outcome, Violation> {
        if let Call::AllocateSlots(slots) = call
            && let Some(row) = slots.name.row(before)
        {
            let hit = longest_hit(before, &before[row]);
            self.checks.hear(check_hit(before, row, &hit))?;
        }
        let outcome = perform(state, call, world);
        self.checks.hear(check_outcome(before, call, &outcome, state))?;
        if !outcome.is_misuse() {
            let made = Made { before, call, outcome: &outcome, after: state };
            transitions::check(&made, &self.checks)?;
            if self.checks.named("DETERMINISM") {
                self.checks.hear_finding("DETERMINISM", transitions::determinism(&made, world))?;
            }
        }
        if *call != Call::TakeBatch && changes(&outcome, state) {
            self.checks.hear(prefixes.learn(state))?;
            self.check(state)?;
            self.check_closure(state, world, prefixes)?;
        }
        note(&mut self.notes, call, &outcome, state);
        Ok(outcome)
    }
}

/// Tell whether a call may have changed anything.
fn changes(outcome: &Outcome, state: &State) -> bool {
    match outcome.value {
        Value::Misuse(_) | Value::Flag(false) => false,
        Value::Refused(_) => state.effects.commands.len() > outcome.first_command,
        _ => true,
    }
}

/// Count what an exploration must reach to show anything.
pub fn note(notes: &mut Notes, call: &Call, outcome: &Outcome, state: &State) {
    notes.note_call(call.transition(), said(&outcome.value));
    let (mut seen, mut trimmed) = (0_u32, false);
    for command in outcome.commands(state) {
        let bit = 1 << command.kind();
        if seen & bit == 0 {
            notes.note_command(command.name());
        }
        seen |= bit;
        trimmed |= matches!(command, Command::SetTable { block, .. } if state.is_null(block));
    }
    notes.note_goal("trim", trimmed);
    if let Some((name, hit)) = called_with(call)
        && let Some(row) = name.row(state)
        && !outcome.is_misuse()
    {
        notes.note_goal("full hit", is_full(state, hit, state[row].num_tokens()));
    }
}

/// Tell whether a hit has all of this many tokens except those that must be computed.
fn is_full(state: &State, hit: &Hit, num_tokens: u32) -> bool {
    if state.config.has_tails() {
        let mut indices = 0..state.config.groups.len() as u32;
        let dropped = u32::from(indices.any(|index| state.config.drops_last_hit(index)));
        let units = (num_tokens.saturating_sub(1) / state.hit_alignment).saturating_sub(dropped);
        return hit.num_tokens > 0 && hit.num_tokens == units * state.hit_alignment;
    }
    let groups = state.config.groups.iter().zip(0..).filter(|(group, _)| !group.is_state());
    let ends = groups.map(|(group, index)| {
        let dropped = u32::from(state.config.drops_last_hit(index));
        let num_blocks = num_tokens.saturating_sub(1) / group.block_size;
        num_blocks.saturating_sub(dropped) * group.block_size
    });
    let end = ends.min().unwrap_or(0);
    hit.num_tokens > 0 && hit.num_tokens == end / state.hit_alignment * state.hit_alignment
}

/// Return what a new state shows, by its position in `SHOWN`.
#[must_use]
pub fn shown(state: &State) -> Shown {
    let mut blocks = (0..state.device.num_blocks()).map(BlockId);
    let sharing = blocks.any(|block| state.device.ref_count(block) > 1);
    let keyed = (0..state.device.num_blocks()).map(BlockId);
    let num_keyed = keyed.filter(|&block| state.device.key(block).is_some()).count();
    [sharing, num_keyed > state.device.index.len(), stale_requests(state).next().is_some()]
}

/// Describe a call's result in a word or two: done, refused and why, or the error's name.
fn said(value: &Value) -> &'static str {
    let refused = match value {
        Value::Misuse(error) => return error.name(),
        Value::Refused(refused) => Some(refused),
        Value::Appended(appended) => appended.refused.as_ref(),
        _ => None,
    };
    match refused.map(|refused| refused.reason) {
        Some(Reason::Later) => "refused later",
        Some(Reason::Never) => "refused never",
        None => "done",
    }
}
