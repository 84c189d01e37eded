// SPDX-License-Identifier: Apache-2.0
//! Slots for tokens: `allocate_slots`, and `append` for a whole decode step.
//!
//! Rules: plan first (`plan.rs`), then change; a refusal changes nothing but the window's trim. All
//! groups' hits are touched before any group allocates, so that no allocation evicts a hit;
//! external blocks of all groups come before new ones. The computed count advances by hits,
//! external and new tokens. Full blocks are published by the call that schedules their last token,
//! unless delayed. Source: S000-21 to S000-35, S004-05 to S004-10. Twin: kvcore/allocate.py.

use crate::asked::Asked;
use crate::caching::publish_blocks;
use crate::commands::Command;
use crate::errors::Error;
use crate::groups::Kind;
use crate::ids::{BlockId, Row};
use crate::mutants::{Mutant, seeded};
use crate::plan::{Growth, Plan, Rewrite, fits_in_place, plan_allocation};
use crate::quiet::{is_quiet, settle};
use crate::requests::{check_no_drafts, extend};
use crate::state::{BatchRecord, NULL_BLOCK, State, request_mut};
use crate::unfinished::{let_go, mark, replace};
use crate::values::{Admitted, Appended, KVCacheBlocks, Reason, Verdict};
use crate::window::{apply_trims, moves_on, plan_trims, visible_from};

/// The requests of an `append`: ids, or rows as a buffer holds them.
#[derive(Debug, Clone, Copy)]
pub enum Requests<'a> {
    /// Ids, each known or not.
    Ids(&'a [&'a str]),
    /// Rows, each in use or not.
    Rows(&'a [u32]),
}

/// Schedule the next tokens of a request; returns the blocks that its tables grew by, or a refusal.
///
/// External tokens get blocks that are held and not returned. A refusal keeps the window trim.
/// Fails with UnknownRequest, SwappedOut, InvalidCount, TooManyTokens, BeyondModelLength,
/// LoadUnfinished, DraftsPending, NoEncoderGroup, WrongHit, StaleHits, UnknownBlock,
/// HitsOnRunningRequest, CachingDisabled.
pub fn allocate_slots(
    state: &mut State,
    request_id: &str,
    asked: &Asked,
) -> Result<Admitted<KVCacheBlocks>, Error> {
    let row = state.request(request_id)?;
    let plan = match plan_allocation(state, row, asked)? {
        Ok(plan) => plan,
        Err(refusal) => {
            apply_trims(state, row, &refusal.trims);
            return Ok(Err(refusal.refused));
        }
    };
    commit(state, asked, &plan);
    let grown = |(group, table): (usize, &Vec<BlockId>)| {
        let count = plan.growth.get(group).map_or(0, |each| each.grown) as usize;
        table[table.len() - count..].to_vec()
    };
    let blocks = state[row].tables.iter().enumerate().map(grown).collect();
    Ok(Ok(KVCacheBlocks { blocks }))
}

/// What `allocate_slots` would say to the same arguments. Does not modify the state.
pub fn can_allocate(state: &State, request_id: &str, asked: &Asked) -> Result<Verdict, Error> {
    let row = state.request(request_id)?;
    Ok(match plan_allocation(state, row, asked)? {
        Ok(_) => Verdict::Ok,
        Err(refusal) => match refusal.refused.reason {
            Reason::Later => Verdict::Later,
            Reason::Never => Verdict::Never,
        },
    })
}

/// Add one token to each request and schedule one slot for each, in order.
///
/// Requests from the first refused one on are untouched, but for the refused one's window trim.
/// Fails with UnknownRequest, SwappedOut, LoadUnfinished, LengthMismatch, DraftsPending,
/// BeyondModelLength.
pub fn append(
    state: &mut State,
    requests: Requests<'_>,
    tokens: &[u32],
) -> Result<Appended, Error> {
    let rows = check_append(state, requests, tokens.len())?;
    let asked = Asked::new(1);
    for (done, (&row, &token)) in (0..).zip(rows.iter().zip(tokens)) {
        let num_hashed = state[row].block_hashes.len();
        extend(state, row, &[token]);
        if is_quiet(state, row) {
            note_scheduled(state, row, true);
            state[row].num_computed += 1;
            continue;
        }
        if fits_in_place(state, row) {
            commit_in_place(state, row);
            continue;
        }
        let planned = plan_allocation(state, row, &asked);
        match planned.expect("NOCRASH: check_append has checked every call of the append") {
            Ok(plan) => commit(state, &asked, &plan),
            Err(refusal) => {
                let request = &mut state[row];
                request.tokens.pop();
                request.block_hashes.truncate(num_hashed);
                apply_trims(state, row, &refusal.trims);
                return Ok(Appended { done, refused: Some(refusal.refused) });
            }
        }
    }
    Ok(Appended { done: rows.len() as u64, refused: None })
}

/// The rows as a buffer holds them. Fails with UnknownRequest where no request is.
pub fn read_request_ids(state: &State, rows: &[u32]) -> Result<Vec<Row>, Error> {
    let known = |&row: &u32| match state.requests.get(row as usize) {
        Some(Some(_)) => Ok(Row(row)),
        _ => Err(Error::UnknownRequest { request: format!("in row {row}") }),
    };
    rows.iter().map(known).collect()
}

/// The rows of the requests. Fails as any call of the append would, before the first one changes
/// anything.
fn check_append(
    state: &State,
    requests: Requests<'_>,
    num_tokens: usize,
) -> Result<Vec<Row>, Error> {
    let (given, num_requests) = match requests {
        Requests::Ids(ids) => (None, ids.len()),
        Requests::Rows(rows) => (Some(read_request_ids(state, rows)?), rows.len()),
    };
    if num_requests != num_tokens {
        let (num_requests, num_tokens) = (num_requests as i64, num_tokens as i64);
        return Err(Error::LengthMismatch { num_requests, num_tokens });
    }
    let mut rows = given.unwrap_or_else(|| Vec::with_capacity(num_requests));
    for place in 0..num_requests {
        if let Requests::Ids(ids) = requests {
            rows.push(state.request(ids[place])?);
        }
        check_one(state, &rows[..=place])?;
    }
    Ok(rows)
}

/// Fails with SwappedOut, LoadUnfinished, DraftsPending or BeyondModelLength unless the last of
/// these can grow by a token, once for each time that it is among them.
fn check_one(state: &State, rows: &[Row]) -> Result<(), Error> {
    let Some(&row) = rows.last() else { return Ok(()) };
    state.check_idle(row)?;
    check_no_drafts(&state[row])?;
    let (computed, limit) = (u64::from(state[row].num_computed), state.config.length_limit());
    if computed + rows.len() as u64 <= u64::from(limit) {
        return Ok(());
    }
    let times = rows.iter().filter(|&&each| each == row).count() as u64;
    if computed + times > u64::from(limit) {
        let (asked, max_model_len) = ((computed + times) as i64, i64::from(limit));
        return Err(Error::BeyondModelLength { request: state[row].name(), asked, max_model_len });
    }
    Ok(())
}

/// Do what a plan says.
pub(crate) fn commit(state: &mut State, asked: &Asked, plan: &Plan) {
    let row = plan.row;
    let request = &state[row];
    if let Some(hit) = &asked.hit
        && !request.holds_blocks()
    {
        let queries = if request.skip_reading { 0 } else { request.tokens.len() as u64 };
        state.stats.observe(queries, hit.num_tokens as u64, request.preempted);
    }
    note_scheduled(state, row, !asked.delay_cache_blocks || asked.loads);
    apply_trims(state, row, &plan.trims);
    (0..).zip(&plan.hits).for_each(|(group, hits)| attach_hits(state, row, group, hits));
    if !(plan.rewrites.is_empty() && plan.growth.is_empty()) {
        let num_shared = plan.rewrites.iter().filter(|rewrite| rewrite.shared).count() as u32;
        let grown = |each: &Growth| each.external + each.grown;
        let grown: u32 = plan.growth.iter().map(grown).sum();
        let mut fresh = state.device.take(num_shared + grown, &mut state.effects).into_iter();
        for rewrite in &plan.rewrites {
            apply_rewrite(state, row, *rewrite, &mut fresh);
        }
        for (group, &Growth { nulls, external, .. }) in (0..).zip(&plan.growth) {
            grow(state, row, group, std::iter::repeat_n(NULL_BLOCK, nulls as usize), true);
            grow(state, row, group, fresh.by_ref().take(external as usize), asked.loads);
        }
        for (group, growth) in (0..).zip(&plan.growth) {
            grow(state, row, group, fresh.by_ref().take(growth.grown as usize), false);
        }
    }
    state[row].num_computed = plan.num_scheduled;
    if !asked.delay_cache_blocks && state.config.publishes_at_once() {
        publish_blocks(state, row, state[row].num_accepted(), false);
    }
    settle(state, row);
}

/// Schedule one more token of a request whose slot is there.
fn commit_in_place(state: &mut State, row: Row) {
    if state.has_windows {
        let seen_from = visible_from(state, row, state[row].num_computed);
        if moves_on(state, row, seen_from) {
            apply_trims(state, row, &plan_trims(state, row, seen_from));
        }
    }
    note_scheduled(state, row, true);
    state[row].num_computed += 1;
    if state.config.publishes_at_once() {
        publish_blocks(state, row, state[row].num_computed, false);
    }
    settle(state, row);
}

/// Remember what a request had computed before its first slots in the open batch.
///
/// publishes: the batch's completion may publish them.
fn note_scheduled(state: &mut State, row: Row, publishes: bool) {
    let before = state[row].num_computed;
    if state.batch.records.get(row).is_none() {
        state.batch.records.insert_new(row, BatchRecord::new(before));
    }
    mark(state, row, before, before, Some(publishes && state.config.enable_caching));
}

/// Add the request as an owner of its hits, at the start of its table.
fn attach_hits(state: &mut State, row: Row, group: u32, hits: &[BlockId]) {
    for (position, &block) in (0..).zip(hits) {
        if !state.is_null(block) {
            state.device.touch(block, &mut state.effects);
        }
        state.effects.emit(Command::SetTable { row, group, position, block });
    }
    let request = &mut state[row];
    request.tables[group as usize].extend_from_slice(hits);
    if !hits.is_empty() {
        request.num_cached[group as usize] = hits.len() as u32;
    }
}

/// Make one block of a table fit to be written.
fn apply_rewrite(
    state: &mut State,
    row: Row,
    rewrite: Rewrite,
    fresh: &mut impl Iterator<Item = BlockId>,
) {
    let Rewrite { group, position, shared, copied } = rewrite;
    let block = state[row].tables[group as usize][position as usize];
    if !shared {
        if !seeded(Mutant::KeyedWrittenInPlace) {
            state.device.unpublish(block, &mut state.effects);
        }
        return;
    }
    let target = fresh.next().expect("ADMIT-EXACT: the plan counts a block for each rewrite");
    let restore = position * state.config.groups[group as usize].block_size;
    mark(state, row, state[row].num_computed, restore, None);
    let_go(state, row, group, position..position + 1);
    replace(state, row, group, position);
    if copied && !seeded(Mutant::CowNoCopy) {
        state.effects.emit(Command::CopyOnWrite { source: block, target });
        state.device.note_use(block, state.batch.number);
        state.device.note_use(target, state.batch.number);
    } else {
        use_fresh(state, group, target);
    }
    state.effects.emit(Command::SetTable { row, group, position, block: target });
    state.device.release([block], &mut state.effects);
    state[row].tables[group as usize][position as usize] = target;
}

/// Put blocks at the end of a table; filled: they are null, or get their content.
fn grow(
    state: &mut State,
    row: Row,
    group: u32,
    blocks: impl Iterator<Item = BlockId>,
    filled: bool,
) {
    for block in blocks {
        if !filled {
            use_fresh(state, group, block);
        }
        let State { effects, requests, .. } = state;
        let table = &mut request_mut(requests, row).tables[group as usize];
        effects.emit(Command::SetTable { row, group, position: table.len() as u32, block });
        table.push(block);
    }
}

/// Zero a block that nothing fills, where its group asks for it, and record it as new.
fn use_fresh(state: &mut State, group: u32, block: BlockId) {
    let rule = &state.config.groups[group as usize];
    if rule.zero_new_blocks {
        state.effects.emit(Command::Zero { block });
    }
    if state.config.record_new_blocks && matches!(rule.kind, Kind::FullAttention | Kind::Mla) {
        state.new_blocks[group as usize].push(block);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::asked::AskedHit;
    use crate::config::Config;
    use crate::queries::get_computed_blocks;
    use crate::release::free;
    use crate::requests::add_request;
    use crate::state::make_state;
    use crate::values::Refused;
    use crate::values::Request;

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
        add_request(&mut state, Request::new("a", &[1, 2, 3])).unwrap();
        add_request(&mut state, Request::new("b", &[1, 2, 9])).unwrap();
        allocate_slots(&mut state, "a", &Asked::new(3)).unwrap().unwrap();
        let hit = get_computed_blocks(&state, "b").unwrap();
        assert_eq!(hit.num_tokens, 2);
        let asked = Asked { hit: Some(AskedHit::from(&hit)), ..Asked::new(1) };
        let new = allocate_slots(&mut state, "b", &asked).unwrap().unwrap();
        assert_eq!(new.blocks, [[BlockId(3)]]);
        assert_eq!((table(&state, "a"), table(&state, "b")), (vec![1, 2], vec![1, 3]));
        assert_eq!((state.stats.queries, state.stats.hits), (3, 2));
        free(&mut state, "b").unwrap();
        assert_eq!(state.device.ref_count(BlockId(1)), 1);
    }

    #[test]
    fn a_refusal_changes_nothing_and_says_how_much_is_missing() {
        let mut state = story();
        add_request(&mut state, Request::new("a", &[1; 12])).unwrap();
        allocate_slots(&mut state, "a", &Asked::new(5)).unwrap().unwrap();
        let before = crate::encode::encode(&state);
        let refused = Refused { reason: Reason::Never, needed: 3, available: 1, pending: 0 };
        assert_eq!(allocate_slots(&mut state, "a", &Asked::new(7)), Ok(Err(refused)));
        assert_eq!(can_allocate(&state, "a", &Asked::new(7)), Ok(Verdict::Never));
        assert_eq!(can_allocate(&state, "a", &Asked::new(3)), Ok(Verdict::Ok));
        assert_eq!(crate::encode::encode(&state), before);
    }

    #[test]
    fn append_stops_at_the_first_refusal() {
        let mut state = story();
        for id in ["a", "b"] {
            add_request(&mut state, Request::new(id, &[1, 2, 3, 4])).unwrap();
            allocate_slots(&mut state, id, &Asked::new(4)).unwrap().unwrap();
        }
        let refused = Refused { reason: Reason::Later, needed: 1, available: 0, pending: 0 };
        let appended = append(&mut state, Requests::Ids(&["a", "b"]), &[5, 5]).unwrap();
        assert_eq!(appended, Appended { done: 0, refused: Some(refused) });
        free(&mut state, "b").unwrap();
        let appended = append(&mut state, Requests::Rows(&[0, 0, 0]), &[5, 6, 7]).unwrap();
        assert_eq!(appended, Appended { done: 3, refused: None });
        assert_eq!((table(&state, "a").len(), state[Row(0)].num_tokens()), (4, 7));
    }

    #[test]
    fn append_checks_every_call_before_the_first() {
        let mut config = Config::new(5, 2, b"seed");
        config.max_model_len = Some(4);
        let mut state = make_state(config).unwrap();
        add_request(&mut state, Request::new("a", &[1, 2])).unwrap();
        allocate_slots(&mut state, "a", &Asked::new(2)).unwrap().unwrap();
        let before = crate::encode::encode(&state);
        let beyond = append(&mut state, Requests::Ids(&["a", "a", "a"]), &[1, 2, 3]);
        let request = "'a'".to_owned();
        assert_eq!(beyond, Err(Error::BeyondModelLength { request, asked: 5, max_model_len: 4 }));
        let unknown = append(&mut state, Requests::Rows(&[0, 7]), &[1, 2]).unwrap_err();
        assert_eq!(unknown.to_string(), "request in row 7 is not known");
        let lengths = append(&mut state, Requests::Ids(&["x"]), &[]).unwrap_err();
        assert_eq!(lengths, Error::LengthMismatch { num_requests: 1, num_tokens: 0 });
        assert_eq!(crate::encode::encode(&state), before);
    }

    #[test]
    fn a_hit_that_lost_its_key_is_stale() {
        let mut state = story();
        add_request(&mut state, Request::new("a", &[1, 2, 3])).unwrap();
        let hit = Some(AskedHit { blocks: vec![vec![1]], num_tokens: 2 });
        let stale = allocate_slots(&mut state, "a", &Asked { hit, ..Asked::new(1) });
        let request = "'a'".to_owned();
        assert_eq!(stale, Err(Error::StaleHits { request, block: 1, position: 0 }));
    }
}
