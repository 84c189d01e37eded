# SPDX-License-Identifier: Apache-2.0
"""Tracks which requests wait and what they will look up, for policies that use it.

Invariants: a request waits if it was added and holds no block of any tier. Its due number is that
of its arrival, even if it waits again. It will look up the keys that its longest hit needs, each
group's last one first. Other policies keep nothing here.
Twin: rust/src/state/waiting.rs.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
from immutables import Map
from msgspec.structs import replace

from kvcore.pool.policy_pool import PolicyTransaction
from kvcore.state.state import RequestState, State
from kvcore.state.transaction import Transaction
from kvcore.types.config import Config
from kvcore.types.groups import skipped_blocks


def settle_waiting(tx: Transaction, request_id: str) -> None:
    """Note whether a request waits now, and for which keys, after a change of its blocks or
    hashes.
    """
    device = tx.device
    if not isinstance(device, PolicyTransaction) or not device.policy.sees_waiting:
        return
    keys = keys_ahead(tx.config, tx.requests[request_id])
    due, before = tx.waiting.get(request_id, (tx.next_due, ()))
    tx.next_due = max(tx.next_due, due + 1)
    if keys != before:
        device.stop_waiting(before, due)
        device.wait(keys, due)
    tx.waiting = tx.waiting.set(request_id, (due, keys))


def forget_waiting(tx: Transaction, request_id: str) -> None:
    """Forget a request that was removed."""
    known = tx.waiting.get(request_id)
    if known is not None and isinstance(tx.device, PolicyTransaction):
        due, keys = known
        tx.device.stop_waiting(keys, due)
        tx.waiting = tx.waiting.delete(request_id)


def keys_ahead(config: Config, request: RequestState) -> tuple[bytes, ...]:
    """Return the keys that a request will look up; none if it does not wait."""
    if any(request.tables) or request.host_tables or request.skip_reading:
        return ()
    most = min(request.tokens.length - 1, len(request.block_hashes) * config.hash_block_size)
    length = max(0, most) // config.hit_alignment * config.hit_alignment
    keys = []
    for group_id, group in enumerate(config.groups if length else ()):
        if group.is_state:
            step = config.hit_alignment
            keys += [request.key_at(config, group_id, at) for at in range(length, 0, -step)]
            continue
        size = group.block_size
        end = min(length // size + config.drops_last_hit(group_id), most // size)
        first = min(skipped_blocks(group, length), length // size - 1)
        keys += [request.key(config, group_id, place) for place in range(end - 1, first - 1, -1)]
    return tuple(keys)


def with_waiting(state: State, dues: Mapping[str, int], next_due: int) -> State:
    """Return the state in which requests arrived in this order; its free blocks have no
    places yet.
    """
    waiting, ahead, policy = {}, dict[bytes, tuple[int, ...]](), state.device.policy
    assert policy is not None
    for request_id, due in sorted(dues.items(), key=lambda item: item[1]):
        keys = keys_ahead(state.config, state.requests[request_id])
        waiting[request_id] = (due, keys)
        for key in keys:
            ahead[key] = (*ahead.get(key, ()), due)
    device = attrs.evolve(state.device, policy=attrs.evolve(policy, dues=Map(ahead)))
    return replace(state, device=device, waiting=Map(waiting), next_due=next_due)
