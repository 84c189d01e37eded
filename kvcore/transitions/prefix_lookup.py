# SPDX-License-Identifier: Apache-2.0
"""Finds the longest cached prefix of a request, over all groups at once.

Invariants: every group resumes at the same token, so the length is a multiple of all block sizes,
except of state groups, which find the state at exactly this length. It is the largest at which each
group finds what its next query would see: full attention the whole prefix, a sliding window the
blocks before the length (at least one), a chunk those from its start. If a group drops its last
hit, the block after the length must be found too. A miss in one group shortens the length for all,
until no group misses.
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
        most = min(len(request.tokens) - 1, len(request.block_hashes) * config.hash_block_size)
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


def aligned(config: Config, num_tokens: int) -> int:
    """Return the largest length up to `num_tokens` tokens at which all groups can resume."""
    return max(0, num_tokens) // config.hit_alignment * config.hit_alignment


def needed(config: Config, group_id: int, length: int) -> Iterable[int]:
    """Return the positions that a group must find to resume at a length, in the order of
    look-up.
    """
    group = config.groups[group_id]
    end = -(-length // group.block_size) + int(config.drops_last_hit(group_id))
    first = skipped_blocks(group, length)
    if group.kind == "sliding_window":
        first = min(first, length // group.block_size - 1)
        return range(end - 1, first - 1, -1)
    return range(first, end)


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
        if group.is_state and length:
            keys = [request.key_at(state.config, index, length)]
        else:
            keys = [request.key(state.config, index, at) for at in range(first, num_blocks)]
        found = [state.device.index.firsts[key] for key in keys]
        groups.append((NULL_BLOCK,) * first + tuple(found))
    return tuple(groups)
