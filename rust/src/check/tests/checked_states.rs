// SPDX-License-Identifier: Apache-2.0
//! Stories that every check sees, and what each of them finds if something was done wrong.
//!
//! A run makes calls on a state and checks each batch as a search does. A check is shown to fail by
//! one change of what it looks at, behind a run in which it found nothing.

use crate::check::properties::outcomes::{check_events, check_hit, check_outcome};
use crate::check::properties::published::Made;
use crate::check::properties::{liveness, transitions};
use crate::check::world::calls::perform;
use crate::check::world::world::World;
use crate::invariants::pool_and_state::check;
use crate::invariants::requests::Scratch;
use crate::oracle::calls::{Call, Name, Slots, Value};
use crate::oracle::contents::Ghost;
use crate::oracle::hazards;
use crate::oracle::prefixes::Prefixes;
use crate::oracle::schedule::Schedule;
use crate::state::state::{State, make_state};
use crate::transitions::queries::get_computed_blocks;
use crate::types::commands::Command;
use crate::types::config::{Config, Duplicates};
use crate::types::groups::{Group, Kind};
use crate::types::ids::{BlockId, Row};
use crate::types::violation::{Checks, Violation};

pub(crate) const A: Name = Name(0);
pub(crate) const B: Name = Name(1);

/// A state that is checked on its way.
pub(crate) struct Run {
    pub(crate) world: World,
    pub(crate) state: State,
    /// The state before the open batch.
    start: State,
    schedule: Schedule,
    ghost: Ghost,
    pub(crate) prefixes: Prefixes,
    scratch: Scratch,
}

impl Run {
    pub(crate) fn new(config: Config) -> Self {
        let state = make_state(config.clone()).unwrap();
        let mut run = Run {
            schedule: Schedule::default(),
            ghost: Ghost::new(&config),
            prefixes: Prefixes::new(&config),
            scratch: Scratch::default(),
            world: world(config),
            start: state.clone(),
            state,
        };
        run.assume();
        run
    }

    fn assume(&mut self) {
        self.schedule.assume(&self.start);
        self.ghost.assume(&self.start, &self.schedule, &mut self.prefixes).unwrap();
    }

    /// Make a call and check it.
    fn try_call(&mut self, call: &Call) -> Result<Value, Violation> {
        let before = self.state.clone();
        let outcome = perform(&mut self.state, call, &self.world);
        check_outcome(&before, call, &outcome, &self.state)?;
        let made = Made { before: &before, call, outcome: &outcome, after: &self.state };
        let checks = &Checks::default();
        transitions::check(&made, checks)?;
        check(&self.state, checks, &mut self.scratch)?;
        self.prefixes.learn(&self.state)?;
        self.schedule.follow(&before, call, &outcome.value);
        Ok(outcome.value)
    }

    pub(crate) fn call(&mut self, call: &Call) -> Value {
        self.try_call(call).unwrap()
    }

    pub(crate) fn add(&mut self, name: Name, tokens: &[u32]) {
        self.call(&Call::AddRequest { name, tokens: tokens.to_vec(), kind: 0 });
    }

    /// Schedule this many tokens behind the longest hit.
    pub(crate) fn allocate(&mut self, name: Name, num_new: u32) -> Value {
        let hit = get_computed_blocks(&self.state, name.id()).unwrap();
        check_hit(&self.state, self.state.request(name.id()).unwrap(), &hit).unwrap();
        let hit = Some(hit).filter(|hit| hit.num_tokens > 0);
        self.call(&Call::AllocateSlots(Slots { hit, ..Slots::new(name, num_new) }))
    }

    /// Check the open batch and take it.
    fn try_close(&mut self) -> Result<(), Violation> {
        let Run { state, schedule, ghost, prefixes, .. } = self;
        schedule.check(state)?;
        schedule.check_caps(state)?;
        hazards::check(&self.start, state, &Checks::default())?;
        ghost.execute(state.effects.commands.iter(), prefixes)?;
        ghost.forward(state, schedule.writes(), schedule, prefixes)?;
        schedule.take();
        if state.config.enable_events {
            check_events(&self.start, state)?;
        }
        ghost.check(state, schedule, prefixes)?;
        self.call(&Call::TakeBatch);
        let Run { state, schedule, ghost, prefixes, .. } = self;
        ghost.execute(state.effects.commands.iter(), prefixes)?;
        ghost.check(state, schedule, prefixes)?;
        self.call(&Call::TakeBatch);
        self.state.effects.events.take();
        liveness::check(&self.world, &self.state, &Checks::default())?;
        self.start = self.state.clone();
        self.assume();
        Ok(())
    }

    pub(crate) fn close(&mut self) {
        self.try_close().unwrap();
    }

    /// Return the first error that the checks of the batch find.
    fn found(&mut self) -> &'static str {
        self.try_close().expect_err("something was done wrong").property
    }
}

fn world(config: Config) -> World {
    World { num_drafts: 2, calls: Vec::new(), ..World::new(config, 2, 8, 8) }
}

pub(crate) fn config() -> Config {
    let mut config = Config::new(7, 2, b"seed");
    config.num_host_blocks = 4;
    config.enable_events = true;
    config
}

pub(crate) fn windowed() -> Config {
    let mut config = config();
    config.num_blocks = 13;
    config.groups.push(Group::windowed(2, Kind::SlidingWindow, 3));
    config.max_num_batched_tokens = Some(2);
    config
}

/// Two requests that share a block and a copy of another, one of them swapped out and in again.
pub(crate) fn long_run(config: Config) -> Run {
    let mut run = Run::new(config);
    run.add(A, &[1, 2, 3, 4, 5]);
    run.allocate(A, 3);
    run.close();
    run.call(&Call::Fork { parent: A, child: B });
    run.close();
    run.call(&Call::AllocateSlots(Slots::new(A, 2)));
    run.call(&Call::AllocateSlots(Slots::new(B, 2)));
    run.close();
    for token in [6, 7] {
        run.call(&Call::append(A, Some(token)));
        run.close();
    }
    run.call(&Call::SwapOut { names: vec![B] });
    run.close();
    run.call(&Call::Free { name: A });
    run.call(&Call::SwapIn { names: vec![B] });
    run.close();
    run.call(&Call::RemoveRequest { name: A });
    run.add(A, &[1, 2, 3, 4, 9]);
    run.allocate(A, 1);
    run.close();
    run.call(&Call::Truncate { name: B, num_tokens: 3 });
    run.call(&Call::append(B, Some(8)));
    run.close();
    run
}

/// Return a run whose open batch has scheduled the five tokens of one request.
pub(crate) fn scheduled(config: Config) -> Run {
    let mut run = Run::new(config);
    run.add(A, &[1, 2, 3, 4, 5]);
    run.call(&Call::AllocateSlots(Slots::new(A, 5)));
    run
}

/// Take commands out of the open batch.
fn lose(run: &mut Run, lost: impl Fn(&Command) -> bool) {
    let commands = run.state.effects.commands.iter();
    run.state.effects.commands = commands.filter(|each| !lost(each)).collect();
}

#[test]
fn a_run_of_the_core_breaks_nothing() {
    long_run(config());
    long_run(windowed());
    let mut config = config();
    config.duplicates = Duplicates::Merge;
    let mut run = Run::new(config);
    for name in [A, B] {
        run.add(name, &[1, 2, 3]);
        run.call(&Call::AllocateSlots(Slots::new(name, 3)));
    }
    run.close();
    assert_eq!(run.state[Row(0)].tables[0][0], run.state[Row(1)].tables[0][0]);
}

#[test]
fn a_block_table_that_was_not_told_is_found() {
    let mut run = scheduled(config());
    lose(&mut run, |each| matches!(each, Command::SetTable { position: 2, .. }));
    assert_eq!(run.found(), "KV-READ");
    let mut run = scheduled(config());
    run.close();
    run.call(&Call::Free { name: A });
    lose(&mut run, |each| matches!(each, Command::CutTable { .. }));
    assert_eq!(run.found(), "TABLE-MIRROR");
}

#[test]
fn a_free_that_was_not_told_is_found() {
    let mut run = scheduled(config());
    run.close();
    run.call(&Call::Free { name: A });
    lose(&mut run, |each| matches!(each, Command::Free { .. }));
    assert_eq!(run.found(), "OWNER-MIRROR");
}

#[test]
fn a_copy_that_was_forgotten_is_found() {
    let mut run = scheduled(config());
    run.close();
    run.call(&Call::Fork { parent: A, child: B });
    run.close();
    run.call(&Call::append(B, Some(9)));
    lose(&mut run, |each| matches!(each, Command::CopyOnWrite { .. }));
    assert_eq!(run.found(), "KV-READ");
}

#[test]
fn a_key_of_other_content_is_found() {
    let mut run = scheduled(config());
    run.close();
    run.call(&Call::Free { name: A });
    run.close();
    let (one, other) = (BlockId(1), BlockId(2));
    let keys = [one, other].map(|block| *run.state.device.key(block).unwrap());
    let mut effects = crate::types::effects::Effects::silent();
    for block in [one, other] {
        run.state.device.unpublish(block, &mut effects);
    }
    run.state.device.publish(one, keys[1]);
    run.state.device.publish(other, keys[0]);
    assert_eq!(run.found(), "CACHE-KV");
}

#[test]
fn a_wrong_count_is_found() {
    let mut run = scheduled(config());
    run.state[Row(0)].num_computed = 4;
    assert_eq!(run.found(), "COMPUTED-RULE");
}

#[test]
fn a_block_that_should_be_zero_is_found() {
    let mut config = config();
    config.groups[0].zero_new_blocks = true;
    let mut run = scheduled(config.clone());
    run.close();
    let mut run = scheduled(config);
    lose(&mut run, |each| matches!(each, Command::Zero { .. }));
    assert_eq!(run.found(), "ZEROED");
}

#[test]
fn a_request_that_holds_more_than_its_cap_is_found() {
    let mut run = Run::new(windowed());
    run.add(A, &[1, 2, 3, 4, 5, 6, 7, 8]);
    for _ in 0..4 {
        run.call(&Call::AllocateSlots(Slots::new(A, 2)));
        run.close();
    }
    run.call(&Call::append(A, Some(9)));
    run.state[Row(0)].tables[1].fill(BlockId(7));
    assert_eq!(run.found(), "CAP");
}

#[test]
fn an_event_that_was_lost_is_found() {
    let mut run = scheduled(config());
    run.state.effects.events.take();
    assert_eq!(run.found(), "EVT-COPY");
}

#[test]
fn spoilt_slots_spread_and_must_not_be_counted() {
    let mut run = Run::new(config());
    run.add(A, &[1, 2, 3, 4, 5]);
    let slots = Slots { num_external_computed_tokens: 2, ..Slots::new(A, 3) };
    run.call(&Call::AllocateSlots(slots));
    let mut writes = run.schedule.writes().to_vec();
    writes[0].failed = Some(1);
    let Run { state, schedule, ghost, prefixes, .. } = &mut run;
    ghost.execute(state.effects.commands.iter(), prefixes).unwrap();
    ghost.forward(state, &writes, schedule, prefixes).unwrap();
    assert_eq!(ghost.check(state, schedule, prefixes).unwrap_err().property, "LOAD-FAILED");
    schedule.take();
    run.call(&Call::TakeBatch);
    run.call(&Call::Rewind { names: vec![A], num_tokens: 1 });
    let Run { state, schedule, ghost, prefixes, .. } = &mut run;
    ghost.execute(state.effects.commands.iter(), prefixes).unwrap();
    ghost.check(state, schedule, prefixes).unwrap();
    schedule.check(state).unwrap();
}

#[test]
fn a_load_counts_when_it_is_done_and_its_failure_spoils() {
    for done in [true, false] {
        let mut run = Run::new(config());
        run.add(A, &[1, 2, 3]);
        run.call(&Call::Load { name: A, num_tokens: 2, hit: None });
        let Run { state, schedule, ghost, prefixes, .. } = &mut run;
        schedule.check(state).unwrap();
        ghost.execute(state.effects.commands.iter(), prefixes).unwrap();
        ghost.check(state, schedule, prefixes).unwrap();
        schedule.take();
        run.call(&Call::TakeBatch);
        run.call(&Call::CompleteOperation { operation: 0, done });
        let Run { state, schedule, ghost, prefixes, .. } = &mut run;
        schedule.check(state).unwrap();
        ghost.execute(state.effects.commands.iter(), prefixes).unwrap();
        assert_eq!(ghost.check(state, schedule, prefixes).is_ok(), !done, "it has not come");
        ghost.complete(0, done, prefixes).unwrap();
        ghost.check(state, schedule, prefixes).unwrap();
        assert_eq!(state[Row(0)].num_computed, if done { 2 } else { 0 });
    }
}
