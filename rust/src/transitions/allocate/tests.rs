// SPDX-License-Identifier: Apache-2.0
//! Tests of allocate.rs.

use super::*;
use crate::transitions::append::places_grown;
use crate::transitions::cancel::cancel;
use crate::transitions::free::free;
use crate::transitions::queries::get_computed_blocks;
use crate::transitions::requests::add_tokens;
use crate::transitions::tests::*;
use crate::types::slot_request::RequestedHit;
use crate::types::values::{Appended, Output, Refused};

/// Four usable blocks of two tokens.
fn story() -> State {
    make_state(Config::new(5, 2, b"seed")).unwrap()
}

fn table(state: &State, request_id: &str) -> Vec<u32> {
    let row = state.request(request_id).unwrap();
    state[row].tables[0].iter().map(|block| block.0).collect()
}

#[test]
fn a_second_request_shares_the_cached_prefix() {
    let mut state = story();
    admit(&mut state, "a", &[1, 2, 3], 3);
    add_request(&mut state, Request::new("b", &[1, 2, 9])).unwrap();
    let hit = get_computed_blocks(&state, "b").unwrap();
    assert_eq!(hit.num_tokens, 2);
    let slot_request = SlotRequest { hit: Some(RequestedHit::from(&hit)), ..SlotRequest::new(1) };
    let new = allocate_slots(&mut state, "b", &slot_request).unwrap().unwrap();
    assert_eq!(new.blocks, [[BlockId(3)]]);
    assert_eq!((table(&state, "a"), table(&state, "b")), (vec![1, 2], vec![1, 3]));
    assert_eq!((state.stats.queries, state.stats.hits), (3, 2));
    free(&mut state, "b").unwrap();
    assert_eq!(state.device.ref_count(BlockId(1)), 1);
}

#[test]
fn a_refusal_changes_nothing_and_says_how_much_is_missing() {
    let mut state = story();
    admit(&mut state, "a", &[1; 12], 5);
    let before = crate::codec::encode::encode(&state);
    let refused = Refused { reason: Reason::Never, needed: 3, available: 1, pending: 0 };
    assert_eq!(allocate_slots(&mut state, "a", &SlotRequest::new(7)), Ok(Err(refused)));
    assert_eq!(can_allocate(&state, "a", &SlotRequest::new(7)), Ok(Verdict::Never));
    assert_eq!(can_allocate(&state, "a", &SlotRequest::new(3)), Ok(Verdict::Ok));
    assert_eq!(crate::codec::encode::encode(&state), before);
}

#[test]
fn append_stops_at_the_first_refusal() {
    let mut state = story();
    for id in ["a", "b"] {
        admit(&mut state, id, &[1, 2, 3, 4], 4);
    }
    take_batch(&mut state).unwrap();
    let refused = Refused { reason: Reason::Later, needed: 1, available: 0, pending: 0 };
    let appended = append(&mut state, Requests::Ids(&["a", "b"]), &[5, 5]).unwrap();
    assert_eq!(appended, Appended { refused: Some(refused), ..Appended::default() });
    free(&mut state, "b").unwrap();
    let first = state.effects.commands.len();
    let appended = append(&mut state, Requests::Rows(&[0]), &[5]).unwrap();
    assert_eq!(appended, Appended { done: 1, refused: None });
    assert_eq!(places_grown(&state, &[0], first), [[0, 0, 2, table(&state, "a")[2]]]);
    assert_eq!((table(&state, "a").len(), state[Row(0)].num_tokens()), (3, 5));
}

#[test]
fn append_checks_every_call_before_the_first() {
    let mut config = Config::new(5, 2, b"seed");
    config.max_model_len = Some(4);
    let mut state = make_state(config).unwrap();
    admit(&mut state, "b", &[1], 1);
    let name = str::to_owned;
    admit(&mut state, "c", &[1, 2, 3], 2);
    take_batch(&mut state).unwrap();
    admit(&mut state, "a", &[1, 2, 3, 4], 4);
    let before = crate::codec::encode::encode(&state);
    let mut misuse =
        |ids: &[&str]| append(&mut state, Requests::Ids(ids), &vec![1; ids.len()]).unwrap_err();
    let reason = "is named twice in one call";
    assert_eq!(misuse(&["b", "b"]), Error::RepeatedRequest { request: name("b"), reason });
    let in_batch = Error::InOpenBatch { kind: "request", value: name("a").into() };
    assert_eq!(misuse(&["b", "a"]), in_batch);
    let not_computed = Error::NotComputed { request: name("c"), num_tokens: 3, num_computed: 2 };
    assert_eq!(misuse(&["b", "c"]), not_computed);
    assert_eq!(crate::codec::encode::encode(&state), before);
    take_batch(&mut state).unwrap();
    let before = crate::codec::encode::encode(&state);
    let beyond = append(&mut state, Requests::Ids(&["b", "a"]), &[1, 2]);
    let request = name("a");
    assert_eq!(beyond, Err(Error::BeyondModelLength { request, requested: 5, max_model_len: 4 }));
    let unknown = append(&mut state, Requests::Rows(&[0, 7]), &[1, 2]).unwrap_err();
    assert_eq!(unknown.to_string(), "request in row 7 is not known");
    let lengths = append(&mut state, Requests::Ids(&["x"]), &[]).unwrap_err();
    assert_eq!(lengths, Error::LengthMismatch { num_requests: 1, num_tokens: 0 });
    assert_eq!(crate::codec::encode::encode(&state), before);
}

#[test]
fn a_block_is_found_when_its_last_token_came_and_its_write_is_scheduled() {
    let mut state = make_state(Config::new(9, 4, b"seed")).unwrap();
    let row = admit(&mut state, "a", &[1, 2, 3, 4, 5, 6, 7], 7);
    take_batch(&mut state).unwrap();
    append(&mut state, Requests::Ids(&["a"]), Output::default()).unwrap();
    take_batch(&mut state).unwrap();
    assert_eq!((state[row].num_computed, state[row].num_output_placeholders()), (8, 1));
    assert!(state.device.key(BlockId(2)).is_none());
    let output = Output { tokens: Some(&[50]), batch: Some(0), ..Output::default() };
    append(&mut state, Requests::Rows(&[row.0]), output).unwrap();
    assert_eq!((state[row].num_computed, state[row].num_output_placeholders()), (9, 1));
    assert_eq!(state.device.key(BlockId(2)), Some(&state[row].key(1, 0, 1)));
    take_batch(&mut state).unwrap();
    let again = Error::StaleOutput { request: "a".to_owned(), batch: 0, output_from: 1 };
    assert_eq!(append(&mut state, Requests::Rows(&[row.0]), output), Err(again));
}

#[test]
fn a_rejected_draft_lets_the_next_batch_begin_earlier() {
    let mut state = make_state(Config { max_in_flight: 2, ..Config::new(9, 4, b"seed") }).unwrap();
    let row = admit(&mut state, "a", &[1, 2, 3, 4, 5, 6], 5);
    take_batch(&mut state).unwrap();
    complete(&mut state, 0).unwrap();
    for new in [3, 3] {
        let request = SlotRequest { num_output_placeholders: new, ..SlotRequest::new(new) };
        allocate_slots(&mut state, "a", &request).unwrap().unwrap();
        take_batch(&mut state).unwrap();
    }
    let output = Output { tokens: Some(&[70, 71]), num_rejected: 1, batch: Some(1) };
    add_tokens(&mut state, "a", output).unwrap();
    assert_eq!((state[row].num_tokens(), state[row].num_computed), (8, 10));
    cancel(&mut state, 2).unwrap();
    assert_eq!(state[row].num_computed, 7);
}

#[test]
fn a_hit_that_lost_its_key_is_stale() {
    let mut state = story();
    add_request(&mut state, Request::new("a", &[1, 2, 3])).unwrap();
    let hit = Some(RequestedHit { blocks: vec![vec![1]], num_tokens: 2 });
    let stale = allocate_slots(&mut state, "a", &SlotRequest { hit, ..SlotRequest::new(1) });
    let request = "a".to_owned();
    assert_eq!(stale, Err(Error::StaleHits { request, block: 1, position: 0 }));
}
