// SPDX-License-Identifier: Apache-2.0
//! What the checks of calls and of states find if something is wrong.
//!
//! The stories begin with the runs of checked_states.rs.

use std::collections::BTreeSet;

use crate::check::properties::outcomes::{check_hit, check_outcome};
use crate::check::tests::checked_states::{A, B, Run, config, long_run, scheduled, windowed};
use crate::check::world::calls::Outcome;
use crate::invariants::pool_and_state::{PROPERTIES, failing};
use crate::invariants::requests::Scratch;
use crate::oracle::calls::{Call, Slots, Value};
use crate::state::state::State;
use crate::state::state::named_pins::NamedPin;
use crate::transitions::queries::get_computed_blocks;
use crate::transitions::unconfirmed_loads::note_load;
use crate::types::config::{Config, Eviction};
use crate::types::errors::Error;
use crate::types::groups::{Group, Kind};
use crate::types::ids::{BlockId, Row};
use crate::types::keys::Key;
use crate::types::retention::Wish;
use crate::types::values::{Appended, Hit, Reason, Refused};

/// Return what `check_outcome` finds in a call that returned a value and changed a state to this
/// one.
fn outcome_of(
    before: &State,
    call: &Call,
    value: Value,
    make: impl FnOnce(&mut State),
) -> Option<&'static str> {
    let mut after = before.clone();
    make(&mut after);
    let outcome = Outcome { value, first_command: before.effects.commands.len() };
    check_outcome(before, call, &outcome, &after).err().map(|found| found.property)
}

#[test]
fn misuse_and_refusals_that_change_a_state_are_found() {
    let mut run = scheduled(config());
    run.close();
    let call = Call::Free { name: B };
    let error = Error::NoHostTier {};
    let misuse = || Value::Misuse(error.clone());
    assert_eq!(outcome_of(&run.state, &call, misuse(), |_| ()), None);
    let changed = |state: &mut State| state.stats.requests += 1;
    assert_eq!(outcome_of(&run.state, &call, misuse(), changed), Some("ATOMIC-FAIL"));
    let call = Call::AllocateSlots(Slots::new(A, 9));
    let reason = Reason::Later;
    let refused = |needed| Value::Refused(Refused::new(reason, needed, 3));
    assert_eq!(outcome_of(&run.state, &call, refused(4), |_| ()), None);
    assert_eq!(outcome_of(&run.state, &call, refused(4), changed), Some("ATOMIC-FAIL"));
    assert_eq!(outcome_of(&run.state, &call, refused(3), |_| ()), Some("ADMIT-EXACT"));
    run.state.config.watermark_blocks = 4;
    let call = Call::SwapIn { names: vec![] };
    assert_eq!(outcome_of(&run.state, &call, Value::Nothing, |_| ()), None);
    let took = |state: &mut State| drop(state.device.take(1, &mut state.effects));
    assert_eq!(outcome_of(&run.state, &call, Value::Nothing, took), Some("ADMIT-EXACT"));
}

#[test]
fn a_refusal_for_now_counts_what_the_open_batch_keeps_of_a_window() {
    let mut run = Run::new(windowed());
    run.add(A, &[1, 2, 3, 4, 5]);
    run.allocate(A, 2);
    let call = Call::AllocateSlots(Slots::new(A, 9));
    let refused = || Value::Refused(Refused::new(Reason::Later, 20, 3));
    assert_eq!(outcome_of(&run.state, &call, refused(), |_| ()), None);
    run.close();
    assert_eq!(outcome_of(&run.state, &call, refused(), |_| ()), Some("ADMIT-EXACT"));
}

#[test]
fn a_reset_of_what_is_held_and_a_shared_write_are_found() {
    let mut run = scheduled(config());
    run.close();
    let reset = Call::ResetPrefixCache;
    assert_eq!(outcome_of(&run.state, &reset, Value::Flag(false), |_| ()), None);
    assert_eq!(outcome_of(&run.state, &reset, Value::Flag(true), |_| ()), Some("RESET"));
    run.call(&Call::Fork { parent: A, child: B });
    let call = Call::append(A, Some(6));
    let appended = Appended { done: 1, ..Appended::default() };
    let found = outcome_of(&run.state, &call, Value::Appended(appended), |_| ());
    assert_eq!(found, Some("WRITE-EXCL"));
}

#[test]
fn a_hit_that_is_not_the_longest_is_found() {
    let mut run = scheduled(windowed());
    run.close();
    run.add(B, &[1, 2, 3, 4, 5, 6]);
    let hit = get_computed_blocks(&run.state, B.id()).unwrap();
    assert_eq!((hit.num_tokens, check_hit(&run.state, Row(1), &hit)), (4, Ok(())));
    let found = |change: &dyn Fn(&mut Hit)| {
        let mut other = hit.clone();
        change(&mut other);
        check_hit(&run.state, Row(1), &other).unwrap_err().property
    };
    assert_eq!(found(&|hit| hit.num_tokens = 2), "HIT-LONGEST");
    assert_eq!(found(&|hit| hit.blocks.blocks[0][1] = BlockId(1)), "HIT-LONGEST");
    assert_eq!(found(&|hit| hit.blocks.blocks[1].truncate(1)), "HIT-LONGEST");
}

/// Check a damaged state; add what is found to the earlier findings.
fn damaged(
    state: &State,
    seen: &mut BTreeSet<&str>,
    damage: impl FnOnce(&mut State),
) -> Vec<&'static str> {
    let (mut state, mut scratch) = (state.clone(), Scratch::default());
    assert_eq!(failing(&state, &mut scratch), Vec::<&str>::new());
    damage(&mut state);
    let found = failing(&state, &mut scratch);
    seen.extend(&found);
    found
}

/// Return a state with a block that waits for a batch in flight.
fn in_flight() -> State {
    let mut config = config();
    config.max_in_flight = 1;
    let mut run = scheduled(config);
    run.call(&Call::TakeBatch);
    run.call(&Call::Free { name: A });
    assert!(run.state.device.num_quarantined() > 0);
    run.state
}

/// Return a state with a free block that stands in the part of its level.
fn of_levels() -> State {
    let mut run = scheduled(Config { eviction: Eviction::Retention, ..config() });
    run.close();
    run.call(&Call::Free { name: A });
    run.state
}

/// Raise the level of a block that stays where it is.
fn wish_while_free(state: &mut State) {
    let last = state.device.queue.iter().last().expect("a block is free");
    state.device.note_wish(last, Wish { base: 80, ..Wish::default() });
}

/// Add a pin of a prefix that holds no block.
fn pin_nothing(state: &mut State) {
    let pin = NamedPin { epoch: state.epoch, blocks: Vec::new() };
    state.named_pins.insert("p".to_owned(), pin);
}

/// Damage the table of states of a request, and note its checkpoint twice.
fn damaged_states(seen: &mut BTreeSet<&str>) {
    let mut config = config();
    config.groups.push(Group { kind: Kind::State, ..Group::new(2) });
    let state = &scheduled(config).state;
    let found = damaged(state, seen, |state| state[Row(0)].tables[1].clear());
    assert!(found.contains(&"STATE-LIVE"), "{found:?}");
    let found = damaged(state, seen, |state| state.batch.ends = vec![Row(0); 2]);
    assert!(found.contains(&"STATE-OWN"), "{found:?}");
}

/// Give a block a tail key more than it can have.
fn damaged_tails(seen: &mut BTreeSet<&str>) {
    let mut run = scheduled(Config { hash_unit: Some(1), ..config() });
    run.call(&Call::TakeBatch);
    let block = run.state[Row(0)].tables[0][0];
    let found =
        damaged(&run.state, seen, |state| state.device.publish_tail(block, Key([7; 36]), 0));
    assert!(found.contains(&"TAIL-SOUND"), "{found:?}");
}

#[test]
fn each_invariant_finds_its_own_damage() {
    let seen = &mut BTreeSet::new();
    let state = &long_run(config()).state;
    let (row, block) = (Row(1), state[Row(1)].tables[0][0]);
    let mut finds = |name: &str, damage: &dyn Fn(&mut State)| {
        let found = damaged(state, seen, damage);
        assert!(found.contains(&name), "{name} is not in {found:?}");
    };
    finds("REF", &|state| state.device.restore(block, 9));
    finds("PARTITION", &|state| state.device.restore(block, 0));
    finds("FQ-UNIQ", &|state| state.device.queue.miscount());
    finds("LEAK", &|state| state.requests.iter_mut().for_each(|request| *request = None));
    finds("NULL", &|state| state.device.restore(BlockId(0), 1));
    finds("ROWS", &|state| state.free_rows.push(Row(0)));
    finds("TABLEN", &|state| state[row].tables[0].truncate(1));
    finds("GROUP-AGREE", &|state| state[row].tables[0].truncate(1));
    finds("NULL-PREFIX", &|state| state[row].tables[0][0] = BlockId(0));
    finds("NO-ALIAS", &|state| state[row].tables[0][1] = block);
    finds("CACHED-COUNT", &|state| state[row].num_cached[0] = 5);
    finds("REQ-HASH", &|state| state[row].block_hashes[0][0] ^= 1);
    finds("CACHE-KEY", &|state| state[row].block_hashes[0][0] ^= 1);
    let draft = |state: &mut State| state[row].drafts = vec![1];
    finds("COMPUTED", &|state| {
        draft(state);
        state[row].num_computed = 20;
    });
    finds("WAIT-EMPTY", &|state| state[row].tables[0].clear());
    finds("OPERATIONS", &|state| state[row].num_loading = 1);
    finds("UNCONFIRMED", &|state| note_load(state, row, 0, 90));
    finds("DRAFT", &|state| {
        state[row].tokens.truncate(1);
        state[row].num_computed = 3;
    });
    finds("EPOCHS", &|state| state.config.epoch = 1);
    finds("NAMED-PINS", &pin_nothing);
    finds("IDX-COMPLETE", &|state| state.device.index.clear());
    finds("IDX-SOUND", &|state| state.device.index.insert(Key([7; 36]), BlockId(6)));
    let open = &scheduled(config()).state;
    let found = damaged(open, seen, |state| state[Row(0)].tables[0].clear());
    assert!(found.contains(&"OPEN-BATCH"), "{found:?}");
    let mut config = config();
    config.enable_caching = false;
    config.groups.push(Group { kind: Kind::CrossAttention, ..Group::new(2) });
    let mut run = Run::new(config);
    run.add(A, &[1, 2]);
    run.call(&Call::AllocateSlots(Slots { num_encoder_tokens: 2, ..Slots::new(A, 2) }));
    let found = damaged(&run.state, seen, |state| state[Row(0)].num_computed = 0);
    assert!(found.contains(&"CROSS"), "{found:?}");
    let state = &in_flight();
    let found = damaged(state, seen, |state| state.device.end_use(|_| true));
    assert!(found.contains(&"QUARANTINE"), "{found:?}");
    let found = damaged(state, seen, |state| state.batch.number = 0);
    assert!(found.contains(&"IN-FLIGHT"), "{found:?}");
    let found = damaged(&of_levels(), seen, wish_while_free);
    assert!(found.contains(&"RANK-ORDER"), "{found:?}");
    damaged_states(seen);
    damaged_tails(seen);
    let all: BTreeSet<&str> = PROPERTIES.iter().map(|each| each.0).collect();
    assert_eq!(*seen, all);
}
