// SPDX-License-Identifier: Apache-2.0
//! The calls that make sense for a request, or for the blocks, in a state of a world.
//!
//! Each call is tried with every argument that makes sense, in a fixed order. A prompt follows a
//! prefix that a request or a key still knows, or leaves it by one fresh token: nothing is known
//! below that token, so one continuation stands for all (`canonical.rs` renames tokens). Twin:
//! kvcore/check/search/actions.py.

use crate::check::world::keyed::own_hash;
use crate::check::world::world::World;
use crate::oracle::calls::{Call, Name, PIN_NAMES, Slots};
use crate::oracle::prefixes::{Numbers, Prefixes};
use crate::state::state::{RequestState, State};
use crate::transitions::prefix_lookup::longest_hit;
use crate::types::commands::Command::Allocate;
use crate::types::groups::Group;
use crate::types::ids::BlockId;
use crate::types::values::{Hit, Status};
use crate::types::violation::Violation;

/// The tokens of each request and key of a state; none if tokens are not renamed.
pub type Children = Option<Vec<Numbers>>;

/// Return the first name that no request has.
pub(crate) fn fresh_name(state: &State) -> Name {
    let taken = state.requests().fold(0_u32, |taken, each| taken | 1 << Name::of(each).0);
    Name(taken.trailing_ones() as u8)
}

/// Add the calls that name blocks and no request. What the open batch is to write is not pinned
/// before it has a key.
pub(crate) fn block_calls(world: &World, state: &State, out: &mut Vec<Move>) {
    let pool = &state.device;
    let blocks = 0..pool.num_blocks();
    let keyed = |&block: &u32| pool.has_key(BlockId(block));
    if world.tries("evict_blocks") {
        let evict = |block| Move::Call(Call::EvictBlocks { block });
        out.extend(blocks.clone().filter(keyed).map(evict));
    }
    let full = world.config.max_in_flight > 0 && state.operations.len() as u32 >= world.num_pins;
    if world.tries("store") && !full {
        let stored = blocks.clone().filter(|&block| pool.key(BlockId(block)).is_some());
        out.extend(stored.map(|block| Move::Call(Call::Store { block })));
    }
    if world.tries("pin") && pool.pins.values().sum::<u32>() < world.num_pins {
        let is_new = |id| state.effects.commands.iter().any(|each| each == Allocate { block: id });
        let held = |block: &u32| {
            let id = BlockId(*block);
            !pool.is_null(id) && (pool.ref_count(id) > 0 && !is_new(id) || keyed(block))
        };
        out.extend(blocks.clone().filter(held).map(|block| Move::Call(Call::Pin { block })));
    }
    if world.tries("unpin") {
        let pinned = |block: &u32| pool.num_pins(BlockId(*block)) > 0;
        out.extend(blocks.filter(pinned).map(|block| Move::Call(Call::Unpin { block })));
    }
}

/// Add a pin of each prefix that a request has computed, under the first free name, and the end
/// of each pin.
pub(crate) fn prefix_pins(world: &World, state: &State, out: &mut Vec<Move>) {
    let is_free = |pin: &&str| !state.named_pins.contains_key(*pin);
    let free = PIN_NAMES.into_iter().take(world.num_pins as usize).find(is_free);
    if let Some(pin) = free.filter(|_| world.tries("pin_prefix")) {
        for request in state.requests().filter(|each| each.holds_blocks()) {
            let name = Name::of(request);
            let of = |num_tokens| Move::Call(Call::PinPrefix { pin, name, num_tokens });
            out.extend((1..=request.num_accepted()).map(of));
        }
    }
    if world.tries("unpin_prefix") {
        let held = PIN_NAMES.into_iter().filter(|pin| !is_free(pin));
        out.extend(held.map(|pin| Move::Call(Call::UnpinPrefix { pin })));
    }
}

/// Return the tokens that each request and key of a state knows.
pub fn known_children(state: &State, prefixes: &mut Prefixes) -> Result<Vec<Numbers>, Violation> {
    let tokens = |each: &RequestState| each.tokens.iter().chain(&each.drafts).copied().collect();
    let mut known: Vec<Numbers> = state.requests().map(tokens).collect();
    for block in (0..state.device.num_blocks()).map(BlockId) {
        if let Some(key) = state.device.key(block) {
            known.push(Numbers::from_slice(&prefixes.chain(key)?.tokens));
        }
    }
    for (key, _) in state.device.tails.iter().flat_map(|tails| tails.keyed()) {
        known.push(Numbers::from_slice(&prefixes.chain(key)?.tokens));
    }
    known.sort_unstable();
    known.dedup();
    Ok(known)
}

/// Return the tokens that are known to follow a prefix, and a fresh one if letters are left.
pub(crate) fn next_tokens(
    world: &World,
    children: &Children,
    prefix: &[u32],
) -> impl Iterator<Item = u32> + use<> {
    let letters = (1_u64 << world.num_letters) - 1;
    let mut next = letters;
    if let Some(known) = children {
        let behind = known.iter().filter_map(|each| each.strip_prefix(prefix)?.first());
        next = behind.fold(0, |next, token| next | 1 << token);
    }
    let fresh = Some(next.trailing_ones()).filter(|&token| token < world.num_letters);
    let known = (0..u64::BITS).filter(move |token| next >> token & 1 == 1);
    known.chain(fresh)
}

/// Return longer prefixes up to this many tokens, one for each way to meet the tree.
pub(crate) fn continuations(
    world: &World,
    children: &Children,
    prefix: &[u32],
    most: u32,
) -> Vec<Numbers> {
    let mut found = Vec::new();
    continue_prefix(world, children, &mut Numbers::from_slice(prefix), most, &mut found);
    found
}

fn continue_prefix(
    world: &World,
    children: &Children,
    prefix: &mut Numbers,
    most: u32,
    found: &mut Vec<Numbers>,
) {
    if prefix.len() as u32 >= most {
        return;
    }
    for token in next_tokens(world, children, prefix) {
        prefix.push(token);
        found.push(prefix.clone());
        continue_prefix(world, children, prefix, most, found);
        prefix.pop();
    }
}

/// Add allocations of any number of tokens, after the longest hit or after none.
pub(crate) fn allocations(
    world: &World,
    state: &State,
    request: &RequestState,
    out: &mut Vec<Move>,
) {
    let name = Name::of(request);
    let mut hits = vec![None];
    if !request.holds_blocks() {
        let hit = longest_hit(state, request);
        hits.extend((hit.num_tokens > 0).then_some(Some(hit)));
        loads(world, state, request, &hits, out);
    }
    let num_encoder_tokens = if request.num_computed > 0 { 0 } else { world.num_encoder };
    for hit in hits {
        let num_hit = hit.as_ref().map_or(0, |hit| hit.num_tokens);
        let left = request.num_tokens() - request.num_computed - num_hit;
        for num_external in 0..=world.num_external.min(left) {
            let most = left - num_external + request.num_drafts();
            let least = u32::from(num_external == 0 && hit.is_none());
            for num_new in least..=most {
                for num_lookahead_tokens in 0..=world.num_lookahead {
                    for &delay_cache_blocks in &world.delays {
                        let slots = Slots {
                            hit: hit.clone(),
                            num_external_computed_tokens: num_external,
                            num_lookahead_tokens,
                            delay_cache_blocks,
                            num_encoder_tokens,
                            ..Slots::new(name, num_new)
                        };
                        let end = request.num_computed + num_hit + num_external + num_new;
                        let marked = Slots { checkpoint: true, ..slots.clone() };
                        out.push(Move::Call(Call::AllocateSlots(slots)));
                        if world.marks && can_mark(state, request, end) {
                            out.push(Move::Call(Call::AllocateSlots(marked)));
                        }
                    }
                }
            }
        }
    }
}

/// Whether the state after this many tokens can be kept.
fn can_mark(state: &State, request: &RequestState, end: u32) -> bool {
    end <= request.num_tokens() && end.is_multiple_of(state.hit_alignment)
}

/// Add loads of whole blocks after each of some hits, which leave at least one token.
pub(crate) fn loads(
    world: &World,
    state: &State,
    request: &RequestState,
    hits: &[Option<Hit>],
    out: &mut Vec<Move>,
) {
    if !world.tries("load") {
        return;
    }
    let (name, step) = (Name::of(request), state.config.block_alignment());
    for hit in hits {
        let first = hit.as_ref().map_or(0, |hit| hit.num_tokens);
        for num_tokens in (step..request.num_tokens() - first).step_by(step as usize) {
            out.push(Move::Call(Call::Load { name, num_tokens, hit: hit.clone() }));
        }
    }
}

/// Add the engine's hashes of the next full blocks that have none, of each number of blocks, if
/// the request has its own hashes.
pub(crate) fn hash_calls(world: &World, request: &RequestState, out: &mut Vec<Move>) {
    if !request.own_hashes {
        return;
    }
    let (name, size) = (Name::of(request), world.config.hash_block_size() as usize);
    let (first, mut hashes) = ((request.block_hashes.len() + 1) * size, Vec::new());
    for end in (first..=request.tokens.len()).step_by(size) {
        hashes.push(own_hash(&request.tokens[..end], world.num_letters));
        out.push(Move::Call(Call::AddBlockHashes { name, hashes: hashes.clone() }));
    }
}

/// Add new drafts if all tokens and no drafts are scheduled, or the verdict on drafts. Beside
/// states, some tokens may be left: a step then computes them, and writes states after drafts.
pub(crate) fn draft_calls(
    world: &World,
    request: &RequestState,
    children: &Children,
    out: &mut Vec<Move>,
) {
    let (name, num_tokens) = (Name::of(request), request.num_tokens());
    let has_states = world.config.groups.iter().any(Group::is_state);
    let leaves_some = has_states && (1..num_tokens).contains(&request.num_computed);
    if request.num_computed > num_tokens && request.num_drafts() > 0 {
        let verdict = |num_accepted| Move::Call(Call::Accept { name, num_accepted });
        out.extend((0..=request.num_computed - num_tokens).map(verdict));
    } else if (leaves_some || request.num_computed == num_tokens) && world.num_drafts > 0 {
        let most = (num_tokens + world.num_drafts).min(world.num_tokens);
        for longer in continuations(world, children, &request.tokens, most) {
            let tokens = longer[num_tokens as usize..].to_vec();
            if tokens != request.drafts {
                out.push(Move::Call(Call::AddDrafts { name, tokens }));
            }
        }
    }
}

/// Add the calls that shorten a running request, and those on its blocks meanwhile.
pub(crate) fn cuts(world: &World, state: &State, request: &RequestState, out: &mut Vec<Move>) {
    let (name, num_accepted) = (Name::of(request), request.num_accepted());
    if world.tries("truncate") {
        let cut = |num_tokens| Move::Call(Call::Truncate { name, num_tokens });
        out.extend((1..request.num_tokens()).map(cut));
    }
    if world.tries("rewind") {
        let back = |num_tokens| Move::Call(Call::Rewind { names: vec![name], num_tokens });
        out.extend((0..request.num_computed).map(back));
    }
    if world.tries("unschedule")
        && request.drafts.is_empty()
        && let Some(record) = name.row(state).and_then(|row| state.batch.scheduled.get(row))
    {
        let shorter = |num_tokens| Move::Call(Call::Unschedule { name, num_tokens });
        out.extend((record.num_kept..request.num_computed).map(shorter));
    }
    if world.tries("remove_skipped_blocks") {
        out.push(Move::Call(Call::RemoveSkippedBlocks { name, num_tokens: num_accepted }));
    }
    if world.tries("cache_blocks") {
        let mut counts = state.config.groups.iter().zip(&request.num_cached);
        if counts.any(|(group, &cached)| num_accepted / group.block_size > cached) {
            out.push(Move::Call(Call::CacheBlocks { name, num_tokens: request.num_computed }));
        }
    }
}

/// Add a swap of every set of requests that can be swapped, out and in.
pub(crate) fn swaps(world: &World, state: &State, out: &mut Vec<Move>) {
    let those = |status| -> Vec<Name> {
        state.requests().filter(|each| each.status() == status).map(Name::of).collect()
    };
    if world.tries("swap_out") {
        let sets = subsets(&those(Status::Running)).into_iter();
        out.extend(sets.map(|names| Move::Call(Call::SwapOut { names })));
    }
    if world.tries("swap_in") {
        let sets = subsets(&those(Status::Swapped)).into_iter();
        out.extend(sets.map(|names| Move::Call(Call::SwapIn { names })));
    }
}

/// Return the subsets that are not empty, smaller ones first, each in the given order.
fn subsets(names: &[Name]) -> Vec<Vec<Name>> {
    let chosen = |bits: u32| -> Vec<usize> {
        (0..names.len()).filter(|place| bits >> place & 1 == 1).collect()
    };
    let mut sets: Vec<Vec<usize>> = (1..1 << names.len()).map(chosen).collect();
    sets.sort_by(|one, other| (one.len(), one).cmp(&(other.len(), other)));
    sets.iter().map(|places| places.iter().map(|&place| names[place]).collect()).collect()
}

/// Calls that are made at once, in one batch.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)] // the fields are those of the calls
pub enum Move {
    /// One call.
    Call(Call),
    /// Add a request and schedule all its tokens; forget it again if that is refused.
    Admit { name: Name, tokens: Vec<u32>, kind: usize },
    /// Free a request and forget it.
    Finish { name: Name },
}

impl Move {
    /// Return the name that an engine gives it.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Move::Call(call) => call.transition(),
            Move::Admit { .. } => "admit",
            Move::Finish { .. } => "finish",
        }
    }
}
