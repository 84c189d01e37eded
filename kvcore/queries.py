# SPDX-License-Identifier: Apache-2.0
"""Questions to a state. None of them changes it.

Source: S000-43, 48, 54, 56. Twin: rust/src/queries.rs.
"""

from __future__ import annotations

from kvcore.errors import UnknownRequest
from kvcore.state import RequestState, State
from kvcore.values import Hit, KVCacheBlocks


def find_request(state: State, request_id: str) -> RequestState:
    """The request of this id. Raises UnknownRequest."""
    request = state.requests.get(request_id) if isinstance(request_id, str) else None
    if request is None:
        raise UnknownRequest(request=repr(request_id))
    return request


def get_computed_blocks(state: State, request_id: str) -> Hit:
    """The longest cached prefix that leaves at least one token to compute.

    Nothing where caching is off. Raises UnknownRequest.
    """
    request = find_request(state, request_id)
    num_groups = len(request.tables)
    found: list[tuple[int, ...]] = []
    most = (len(request.tokens) - 1) // state.config.block_size
    for position in range(min(most, len(request.block_hashes))):
        entries = [state.device.index.get(request.key(position, g)) for g in range(num_groups)]
        if any(entry is None for entry in entries):
            break
        found.append(tuple(entry[0] for entry in entries if entry is not None))
    groups = tuple(tuple(blocks[group] for blocks in found) for group in range(num_groups))
    return Hit(KVCacheBlocks(groups), len(found) * state.config.block_size)


def get_blocks(state: State, request_id: str) -> KVCacheBlocks:
    """The device blocks of a request; empty while it waits or is swapped out.

    Raises UnknownRequest.
    """
    request = find_request(state, request_id)
    return KVCacheBlocks(tuple(tuple(table) for table in request.tables))


def get_num_common_prefix_blocks(state: State, request_id: str) -> list[int]:
    """Leading blocks of a request that every request with device blocks holds, a group.

    Raises UnknownRequest.
    """
    request = find_request(state, request_id)
    holders = sum(any(each.tables) for each in state.requests.values())
    common = []
    for table in request.tables:
        count = 0
        for block in table:
            pins = state.device.pins.get(block, 0)
            if state.device.ref_counts[block] - pins != holders:
                break
            count += 1
        common.append(count)
    return common


def usage(state: State) -> float:
    """Share of the usable device blocks that have an owner, 0.0 to 1.0."""
    return 1.0 - state.device.num_free / state.device.num_usable
