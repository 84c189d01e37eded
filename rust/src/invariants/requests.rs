// SPDX-License-Identifier: Apache-2.0
//! Named properties of requests, their tables, hashes and drafts; `pool_and_state.rs` lists them.
//!
//! Every group is checked at its own block size and by its own retention rule. The hashes of a run
//! of tokens without extra keys are computed once and kept.
//! Twin: kvcore/invariants/requests.py.

use hashbrown::HashMap;
use rustc_hash::FxBuildHasher;

use crate::hashing::block_hash::hash_blocks;
use crate::pool::block_pool::BlockPool;
use crate::state::state::{NO_HOST_BLOCK, RequestState, State};
use crate::types::groups::{Group, skipped_blocks};
use crate::types::ids::{BlockId, Row, Table};
use crate::types::keys::{BlockHash, Key};
use crate::types::values::Status;
use crate::types::violation::Finding;

/// Most runs of tokens whose hashes are kept.
const MAX_KNOWN: usize = 1 << 16;

/// The hashes of runs of tokens, of one configuration.
#[derive(Debug, Default)]
pub struct KnownHashes {
    root: BlockHash,
    block_size: u32,
    hashes: HashMap<Box<[u32]>, Box<[BlockHash]>, FxBuildHasher>,
}

/// A request's tables in the tier that it is in.
pub(crate) fn held_tables(request: &RequestState) -> &[Table] {
    if request.host_tables.is_empty() { &request.tables } else { &request.host_tables }
}

/// Whether an entry of a request's tables is the null block.
pub(crate) fn is_null(state: &State, request: &RequestState, block: BlockId) -> bool {
    if request.host_tables.is_empty() { state.is_null(block) } else { block == NO_HOST_BLOCK }
}

/// Each group of a request with its number and its table in the tier that the request is in.
fn held<'a>(
    state: &'a State,
    request: &'a RequestState,
) -> impl Iterator<Item = (u32, &'a Group, &'a Table)> {
    let groups = (0..).zip(&state.config.groups).zip(held_tables(request));
    groups.map(|((index, group_id), table)| (index, group_id, table))
}

/// Each group of a request with its number and its device table.
fn on_device<'a>(
    state: &'a State,
    request: &'a RequestState,
) -> impl Iterator<Item = (u32, &'a Group, &'a Table)> {
    let groups = (0..).zip(&state.config.groups).zip(&request.tables);
    groups.map(|((index, group_id), table)| (index, group_id, table))
}

/// TABLEN: each group's table has blocks for all computed tokens of a request, which holds blocks
/// of one tier at a time.
pub(crate) fn table_length(state: &State, _: &mut Scratch) -> Finding {
    for request in state.requests() {
        let computed = request.num_computed;
        for (_, group, table) in held(state, request) {
            let needed = if group.is_cross() { 0 } else { computed.div_ceil(group.block_size) };
            if table.len() < needed as usize {
                let (name, length) = (request.name(), table.len());
                return Err(format!("{name} has {length} blocks for {computed} tokens"));
            }
        }
        if !request.host_tables.is_empty() && request.holds_blocks() {
            return Err(format!("{} holds blocks of both tiers", request.name()));
        }
    }
    Ok(())
}

/// WAIT-EMPTY: a waiting request has no computed tokens.
pub(crate) fn wait_empty(state: &State, _: &mut Scratch) -> Finding {
    for request in state.requests() {
        let counts = request.num_computed > 0 || request.num_cached.iter().any(|&count| count > 0);
        if counts && request.status() == Status::Waiting {
            let computed = request.num_computed;
            return Err(format!("{} waits with {computed} computed tokens", request.name()));
        }
    }
    Ok(())
}

/// NULL-PREFIX: the null block is only at the start of tables of windowed groups, in place of
/// blocks that the next query does not read. STATE-LIVE says where it is in a state group.
pub(crate) fn null_prefix(state: &State, _: &mut Scratch) -> Finding {
    for request in state.requests() {
        for (index, group_id, table) in held(state, request).filter(|each| !each.1.is_state()) {
            let null = |block: &&BlockId| is_null(state, request, **block);
            let leading = table.iter().take_while(null).count();
            if table.iter().skip(leading).any(|block| null(&block)) {
                return Err(format!("{} has null blocks inside group {index}", request.name()));
            }
            let skipped = skipped_blocks(group_id, request.num_accepted());
            if leading > skipped as usize {
                let name = request.name();
                return Err(format!(
                    "{name} gave back {leading} blocks of group {index}, not {skipped}"
                ));
            }
        }
    }
    Ok(())
}

/// GROUP-AGREE: every group has the blocks that a request's next query reads, up to the same token.
pub(crate) fn group_agree(state: &State, _: &mut Scratch) -> Finding {
    for request in state.requests() {
        for (index, group, table) in held(state, request) {
            let known = request.num_accepted();
            let first = table.get((known / group.block_size) as usize); // of the first to come
            let is_there = first.is_some_and(|&block| !is_null(state, request, block));
            let ahead = group.is_state() && request.num_computed > known && is_there;
            let count = known + u32::from(ahead);
            let last = if group.is_cross() { 0 } else { count.div_ceil(group.block_size) };
            for position in skipped_blocks(group, count)..last {
                let block = table.get(position as usize);
                if block.is_none_or(|&block| is_null(state, request, block)) {
                    let name = request.name();
                    return Err(format!(
                        "{name} lacks block {position} of group {index} at {count}"
                    ));
                }
            }
        }
    }
    Ok(())
}

/// CROSS: a request without computed tokens has no table of encoder tokens.
pub(crate) fn cross(state: &State, _: &mut Scratch) -> Finding {
    for request in state.requests() {
        for (_, group, table) in held(state, request) {
            if group.is_cross() && !table.is_empty() && request.num_computed == 0 {
                let (name, length) = (request.name(), table.len());
                return Err(format!("{name} holds {length} encoder blocks, but computed nothing"));
            }
        }
    }
    Ok(())
}

/// NO-ALIAS: a block is held at one position of one group, once per table, by requests with equal
/// prefixes up to the last of its tokens that both have computed.
pub(crate) fn no_alias(state: &State, scratch: &mut Scratch) -> Finding {
    for (tier, pool) in pools(state) {
        scratch.holders.clear();
        scratch.holders.resize(pool.num_blocks() as usize, None);
        for (row, request) in (0..).map(Row).zip(&state.requests) {
            let Some(request) = request else { continue };
            let tables = if tier == "device" { &request.tables[..] } else { &request.host_tables };
            for (group_id, table) in (0..).zip(tables) {
                for (position, &block) in (0..).zip(table) {
                    if block == NO_HOST_BLOCK || pool.is_null(block) {
                        continue;
                    }
                    let holder = &mut scratch.holders[block.index()];
                    let &mut (index, at, most) = holder.get_or_insert((group_id, position, row));
                    if (index, at) != (group_id, position) {
                        let block = block.0;
                        return Err(format!(
                            "block {block} is held at positions {at} and {position}"
                        ));
                    }
                    if !same_prefix(state, &state[most], request, group_id, position) {
                        let names = [state[most].name(), request.name()].join(" and ");
                        return Err(format!("block {} is shared by {names}", block.0));
                    }
                    if request.num_accepted() > state[most].num_accepted() {
                        *holder = Some((group_id, position, row));
                    }
                }
            }
        }
    }
    Ok(())
}

/// CACHED-COUNT: blocks that need no publication hold only computed, accepted tokens.
pub(crate) fn cached_count(state: &State, _: &mut Scratch) -> Finding {
    for request in state.requests() {
        let swapped = !request.host_tables.is_empty();
        let accepted = if swapped { 0 } else { request.num_accepted() };
        for (group, &cached) in state.config.groups.iter().zip(&request.num_cached) {
            if cached > accepted / group.block_size {
                let name = request.name();
                return Err(format!(
                    "{name}: {cached} cached blocks, {accepted} computed on the device"
                ));
            }
        }
    }
    Ok(())
}

/// REQ-HASH: a request's hashes are those of its full blocks; if the engine supplied them, there
/// are at most as many.
pub(crate) fn request_hashes(state: &State, scratch: &mut Scratch) -> Finding {
    let size = state.hash_block_size as usize;
    for request in state.requests() {
        let count = request.block_hashes.len();
        if request.own_hashes {
            if count > request.tokens.len() / size {
                return Err(format!("{}: {count} hashes of its own", request.name()));
            }
        } else if !has_its_hashes(state, request, &mut scratch.known) {
            return Err(format!("{}: the {count} hashes are not of its tokens", request.name()));
        }
    }
    Ok(())
}

/// CACHE-KEY: a full, computed block of a request has no key, or the key of its position.
pub(crate) fn published_content(state: &State, _: &mut Scratch) -> Finding {
    for request in state.requests() {
        for (index, group, table) in on_device(state, request) {
            let scale = state.scales[index as usize];
            let num_full = request.num_accepted() / group.block_size;
            let num_full = num_full.min(request.num_hashed(scale));
            for (position, &block) in (0..num_full).zip(table) {
                let is_own = |key: &Key| match group.is_state() {
                    true => (position * scale..(position + 1) * scale).any(|hash| {
                        let size = state.hash_block_size;
                        *key == request.key_at(size, index, (hash + 1) * size)
                    }),
                    false => *key == request.key(scale, index, position),
                };
                if state.device.key(block).is_some_and(|key| !is_own(key)) {
                    let (name, block) = (request.name(), block.0);
                    return Err(format!("{name}: block {block} has another content's key"));
                }
            }
        }
    }
    Ok(())
}

/// DRAFT: no block with scheduled drafts or positions to come has a key.
pub(crate) fn drafts(state: &State, _: &mut Scratch) -> Finding {
    for request in state.requests() {
        let num_tokens = request.num_tokens();
        if request.num_computed <= num_tokens {
            continue;
        }
        for (_, group, table) in on_device(state, request) {
            let first = (num_tokens / group.block_size) as usize;
            let mut held = table.iter().skip(if group.is_cross() { table.len() } else { first });
            if let Some(block) = held.find(|&&block| state.device.key(block).is_some()) {
                let name = request.name();
                return Err(format!(
                    "{name}: block {} holds unknown tokens, but has a key",
                    block.0
                ));
            }
        }
    }
    Ok(())
}

/// COMPUTED: no request has computed more than the model's length, or than its tokens and drafts. A
/// running request without drafts may have computed more than its tokens: positions to come.
pub(crate) fn computed_bound(state: &State, _: &mut Scratch) -> Finding {
    for request in state.requests() {
        let (limit, computed) = (state.config.length_limit(), request.num_computed);
        let to_come = request.drafts.is_empty() && request.status() == Status::Running;
        let known = request.num_tokens() + request.num_drafts();
        let most = if to_come { limit } else { known.min(limit) };
        if computed > most {
            return Err(format!("{} computed {computed} of {most} tokens", request.name()));
        }
    }
    Ok(())
}

/// Whether a request has the hashes that its tokens and extra keys give.
fn has_its_hashes(state: &State, request: &RequestState, known: &mut KnownHashes) -> bool {
    let (size, hashing) = (state.hash_block_size, state.config.hashing);
    let tokens: &[u32] = if state.config.enable_caching { &request.tokens } else { &[] };
    let make = || hash_blocks(state.root, tokens, size, 0, request.extra_keys(), hashing);
    if request.extra_keys.is_some() {
        return request.block_hashes.iter().copied().eq(make());
    }
    let full = &tokens[..tokens.len() - tokens.len() % size as usize];
    if full.is_empty() {
        return request.block_hashes.is_empty();
    }
    let same = (known.root, known.block_size) == (state.root, size);
    if !same || known.hashes.len() > MAX_KNOWN {
        *known = KnownHashes { root: state.root, block_size: size, ..KnownHashes::default() };
    }
    if let Some(hashes) = known.hashes.get(full) {
        return request.block_hashes[..] == hashes[..];
    }
    let hashes: Box<[BlockHash]> = make().collect();
    let same = request.block_hashes[..] == hashes[..];
    known.hashes.insert(full.into(), hashes);
    same
}

/// Whether two requests have one prefix, as far as both count tokens of a block.
///
/// Equal hashes of the engine's own mean equal content, whatever the tokens are. Tokens after the
/// last block that both have hashed are then not compared. If both have gone on past a block of a
/// state, this may be the state after any of its tokens: they are compared up to its first one.
fn same_prefix(
    state: &State,
    one: &RequestState,
    other: &RequestState,
    group_id: u32,
    position: u32,
) -> bool {
    let group = &state.config.groups[group_id as usize];
    if group.is_cross() || std::ptr::eq(one, other) {
        return true;
    }
    let mut end = (position + 1).saturating_mul(group.block_size);
    if group.is_state() && one.state_count().min(other.state_count()) > end {
        end = position * group.block_size + 1;
    }
    end = end.min(one.num_accepted()).min(other.num_accepted());
    let size = state.hash_block_size;
    if one.own_hashes || other.own_hashes {
        let last = (end / size) as usize;
        let last = last.min(one.block_hashes.len()).min(other.block_hashes.len());
        return last == 0 || one.block_hashes[last - 1] == other.block_hashes[last - 1];
    }
    if one.tokens[..end as usize] != other.tokens[..end as usize] {
        return false;
    }
    let (mine, its) = (one.extra_keys(), other.extra_keys());
    mine == its || mine.cut(end, size) == its.cut(end, size)
}

/// Counters of the properties; their content has no meaning between two properties.
#[derive(Debug, Default)]
pub struct Scratch {
    /// By block or row.
    pub(crate) counts: Vec<u32>,
    /// By block: its first holder, as group, position and row.
    pub(crate) holders: Vec<Option<(u32, u32, Row)>>,
    /// The hashes of tokens that were seen before.
    pub(crate) known: KnownHashes,
}

impl Scratch {
    /// Counters, all 0.
    pub(crate) fn zeros(&mut self, count: usize) -> &mut [u32] {
        self.counts.clear();
        self.counts.resize(count, 0);
        &mut self.counts
    }
}

/// The pool of each tier, with its name.
pub(crate) fn pools(state: &State) -> impl Iterator<Item = (&'static str, &BlockPool)> {
    std::iter::once(("device", &state.device)).chain(state.host.iter().map(|pool| ("host", pool)))
}
