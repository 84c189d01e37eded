# SPDX-License-Identifier: Apache-2.0
"""Finds the longest cached prefix of a request, over all groups at once.

Invariants: every group resumes at the same token, so the length is a multiple of all block sizes,
except of state groups, which find the state at exactly this length. It is the largest at which each
group finds what its next query would see: full attention the whole prefix, a sliding window the
blocks before the length (at least one), a chunk those from its start. If a group drops its last
hit, the block after the length must be found too. A miss in one group shortens the length for all,
until no group misses. If hits may end inside blocks, the length is a multiple of the hash unit, a
part of a block is found under its tail key, and a group that drops its last hit must find one unit
more.
Source: S000-54, 57, 58; S001-79, 81. Twin: rust/src/transitions/prefix_lookup.rs.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvcore.state.state import NULL_BLOCK, RequestState, State
from kvcore.types.config import Config
from kvcore.types.groups import skipped_blocks
from kvcore.types.values import Hit, KVCacheBlocks


def longest_hit(state: State, request: RequestState) -> Hit:
    """Return the longest hit that leaves at least one token to compute; an empty one if caching is
    off.
    """
    config = state.config
    length = num_common = 0
    if config.enable_caching and not request.skip_reading:
        most = min(request.tokens.length - 1, len(request.block_hashes) * config.hash_block_size)
        length = aligned(config, most)
        if config.has_states:
            length = num_common = common_length(state, request, length, most, states=False)
        length = common_length(state, request, length, most)
    return Hit(KVCacheBlocks(hit_blocks(state, request, length)), length, num_common)


def common_length(
    state: State, request: RequestState, length: int, most: int, *, states: bool = True
) -> int:
    """Return the largest length up to `length` that every group finds. most: tokens that
    may match. states: whether state groups count.
    """
    kinds = state.config.groups
    counted = [g for g in range(len(kinds)) if states or not kinds[g].is_state]
    order = sorted(counted, key=lambda g: kinds[g].is_windowed)
    agreed = 0
    group_id = 0
    while agreed < len(order) and length:
        found = group_length(state, request, order[group_id], length, most)
        agreed = agreed + 1 if found == length else 1
        length = found
        group_id = (group_id + 1) % len(order)
    return length


def group_length(state: State, request: RequestState, group_id: int, length: int, most: int) -> int:
    """Return the largest length up to `length` that one group finds."""
    config = state.config
    if config.groups[group_id].is_state:
        while length and request.key_at(config, group_id, length) not in state.device.index:
            length -= config.hit_alignment
        return length
    if config.has_tails:
        return tailed_length(state, request, group_id, length, most)
    size, dropped = config.groups[group_id].block_size, int(config.drops_last_hit(group_id))
    length = aligned(config, min(length, (most // size - dropped) * size))
    while length:
        missing = first_missing(state, request, group_id, needed(config, group_id, length))
        if missing is None:
            return length
        length = aligned(config, (missing - dropped) * size)
        if not config.groups[group_id].is_windowed:
            return length
    return 0


def tailed_length(
    state: State, request: RequestState, group_id: int, length: int, most: int
) -> int:
    """Return the same length if it may end inside a block."""
    config = state.config
    size, unit = config.groups[group_id].block_size, config.hit_alignment
    dropped = unit * config.drops_last_hit(group_id)
    length = aligned(config, min(length, most - dropped))
    while length > 0:
        missing = first_missing(state, request, group_id, needed(config, group_id, length))
        if missing is not None:
            length = (missing + 1) * size - unit - dropped
        elif any(
            find_tail(state, request, group_id, end) is None
            for end in needed_tails(config, group_id, length)
        ):
            length -= unit
        else:
            return length
    return 0


def aligned(config: Config, num_tokens: int) -> int:
    """Return the largest length up to `num_tokens` tokens at which all groups can resume."""
    return max(0, num_tokens) // config.hit_alignment * config.hit_alignment


def needed(config: Config, group_id: int, length: int) -> Iterable[int]:
    """Return the positions of the whole blocks that a group must find to resume at a length, in the
    order of look-up.
    """
    group = config.groups[group_id]
    num_blocks, dropped = -(-length // group.block_size), int(config.drops_last_hit(group_id))
    end = num_blocks + dropped
    if config.has_tails and not group.is_state:
        end = (length + dropped * config.hash_block_size) // group.block_size
    first = skipped_blocks(group, length)
    if group.kind == "sliding_window":
        first = min(first, num_blocks - 1)
        return range(end - 1, first - 1, -1)
    return range(first, end)


def needed_tails(config: Config, group_id: int, length: int) -> list[int]:
    """Return the ends of the parts of blocks that a group must find to resume at a length."""
    group = config.groups[group_id]
    if not config.has_tails or group.is_state:
        return []
    ends = [length, *([length + config.hash_block_size] * config.drops_last_hit(group_id))]
    return [end for end in ends if end % group.block_size]


def find_tail(state: State, request: RequestState, group_id: int, num_tokens: int) -> int | None:
    """Return the block of the tail key at a number of tokens, or None."""
    tails = state.device.tails
    if tails is None or num_tokens > len(request.block_hashes) * state.config.hash_block_size:
        return None
    blocks = tails.blocks(request.key_at(state.config, group_id, num_tokens))
    return blocks[0] if blocks else None


def first_missing(
    state: State, request: RequestState, group_id: int, positions: Iterable[int]
) -> int | None:
    """Return the first of these positions whose block is not findable."""
    num_hashed = request.num_hashed(state.config, group_id)
    for position in positions:
        if position >= num_hashed:
            return position
        if request.key(state.config, group_id, position) not in state.device.index:
            return position
    return None


def hit_blocks(state: State, request: RequestState, length: int) -> tuple[tuple[int, ...], ...]:
    """Return the blocks of a hit per group, with the null block where no query sees one."""
    groups = []
    for index, group in enumerate(state.config.groups):
        num_blocks = 0 if group.is_cross else -(-length // group.block_size)
        first = min(skipped_blocks(group, length), num_blocks)
        num_whole = length // group.block_size
        if group.is_state and length:
            keys = [request.key_at(state.config, index, length)]
        else:
            keys = [request.key(state.config, index, at) for at in range(first, num_whole)]
        found = [state.device.index.firsts[key] for key in keys]
        if num_whole < num_blocks and not group.is_state:
            tail = find_tail(state, request, index, length)
            assert tail is not None, "IDX-COMPLETE: the group has found each block of the length"
            found.append(tail)
        groups.append((NULL_BLOCK,) * first + tuple(found))
    return tuple(groups)
