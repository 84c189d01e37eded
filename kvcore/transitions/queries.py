# SPDX-License-Identifier: Apache-2.0
"""Queries of a state. None of them changes it.

Source: S000-43, 48, 54, 56. Twin: rust/src/transitions/queries.rs.
"""

from __future__ import annotations

from kvcore.state.state import RequestState, State
from kvcore.transitions.prefix_lookup import aligned, longest_hit
from kvcore.types.arguments import read_count, read_int
from kvcore.types.errors import InvalidKey, UnknownBlock, UnknownRequest
from kvcore.types.keys import KEY_SIZE
from kvcore.types.values import Hit, KVCacheBlocks


def find_request(state: State, request_id: str) -> RequestState:
    """Return the request with this id. Raises UnknownRequest."""
    request = state.requests.get(request_id) if isinstance(request_id, str) else None
    if request is None:
        raise UnknownRequest(request=request_id)
    return request


def get_computed_blocks(state: State, request_id: str) -> Hit:
    """Return the longest cached prefix that leaves at least one token to compute.

    Empty if caching is off. Raises UnknownRequest.
    """
    return longest_hit(state, find_request(state, request_id))


def checkpoint_stop(
    state: State, request_id: str, num_new_tokens: int, hit: Hit | None = None
) -> tuple[int, bool]:
    """Return how many of these tokens to schedule behind a hit so that the state after them is
    worth keeping, and whether the call should say `checkpoint=True`.

    In this order: up to the end of what other groups find, where prompts part; up to the last place
    where a hit on all tokens can end; with tokens left, up to the last whole block of all groups.
    Else all, without a mark. Raises UnknownRequest, InvalidCount.
    """
    request, config = find_request(state, request_id), state.config
    count, known = read_count("num_new_tokens", num_new_tokens, 1), request.tokens.length
    if not (config.has_states and config.enable_caching):
        return count, False
    start, stops = request.num_computed, list[int]()
    if hit is not None:
        start += read_count("num_tokens", hit.num_tokens)
        stops.append(read_count("num_common", hit.num_common))
    stops.append(aligned(config, known - 1))
    end = start + count
    if end < known:
        stops.append(end // config.block_alignment * config.block_alignment)
    found = next((stop for stop in stops if start < stop <= end), None)
    return (count, False) if found is None else (found - start, True)


def get_blocks(state: State, request_id: str) -> KVCacheBlocks:
    """Return the device blocks of a request; empty while it waits or is swapped out.

    Raises UnknownRequest.
    """
    request = find_request(state, request_id)
    return KVCacheBlocks(tuple(tuple(table) for table in request.tables))


def get_block_keys(state: State, request_id: str) -> tuple[tuple[bytes, ...], ...]:
    """Return the keys of a request's full blocks, one tuple per group, for an external store.

    Raises UnknownRequest.
    """
    request, config = find_request(state, request_id), state.config
    return tuple(
        tuple(request.key(config, g, place) for place in range(request.num_hashed(config, g)))
        for g in range(len(config.groups))
    )


def get_num_common_prefix_blocks(state: State, request_id: str) -> list[int]:
    """Count, per group, the leading blocks of a request that every request with device blocks
    holds.

    0 for groups that are windowed or cross-attention, and if caching is off.

    Raises UnknownRequest.
    """
    request = find_request(state, request_id)
    holders = sum(any(each.tables) for each in state.requests.values())
    common = []
    for group, table in zip(state.config.groups, request.tables, strict=True):
        count = 0
        counted = state.config.enable_caching and not (group.is_windowed or group.is_cross)
        for block in table if counted else ():
            pins = state.device.pins.get(block, 0)
            if state.device.ref_counts[block] - pins != holders:
                break
            count += 1
        common.append(count)
    return common


def has_key(state: State, block: int) -> bool:
    """Return whether a device block is findable, as the null block is. Raises UnknownBlock."""
    number = find_block(state, block)
    return number is None or state.device.has_key(number)


def get_block_key(state: State, block: int) -> bytes | None:
    """Return the key of a device block, 36 bytes, or else its longest tail key; None if it has
    neither, like the null block. Raises UnknownBlock.
    """
    number = find_block(state, block)
    if number is None:
        return None
    tails = state.device.tails.keys(number) if state.device.tails else ()
    return state.device.keys[number] or (tails[-1] if tails else None)


def get_own_keys(state: State, block: int) -> tuple[bytes, ...]:
    """Return the keys of a device block: that of the whole block, then its tail keys, shortest
    first; none for the null block. Raises UnknownBlock.
    """
    number = find_block(state, block)
    if number is None:
        return ()
    key, tails = state.device.keys[number], state.device.tails
    return (*(() if key is None else (key,)), *(tails.keys(number) if tails else ()))


def get_cached_block(state: State, key: bytes) -> int | None:
    """Return the device block of a key or tail key, the first of several. Raises InvalidKey."""
    if len(key) != KEY_SIZE:
        raise InvalidKey(size=len(key), expected=KEY_SIZE)
    found = state.device.index.firsts.get(key)
    if found is None and state.device.tails:
        found = next(iter(state.device.tails.blocks(key)), None)
    return found


def num_owners(state: State, block: int) -> int:
    """Count the tables, pins and operations that hold a device block; 0 for the null block. Raises
    UnknownBlock.
    """
    number = find_block(state, block)
    return 0 if number is None else state.device.ref_counts[number]


def find_block(state: State, block: int) -> int | None:
    """Return the id of a device block as int, None for the null block. Raises UnknownBlock."""
    pool, number = state.device, read_int(block)
    if not isinstance(number, int) or not 0 <= number < pool.num_blocks:
        raise UnknownBlock(block=number, first=pool.first_block, last=pool.num_blocks - 1)
    return None if number < pool.first_block else number


def usage(state: State) -> float:
    """Return the share of the usable device blocks that have an owner, 0.0 to 1.0."""
    return 1.0 - state.device.num_free / state.device.num_usable
