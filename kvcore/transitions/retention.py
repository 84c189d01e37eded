# SPDX-License-Identifier: Apache-2.0
"""Levels: how long content stays cached, by the wishes of the requests that computed or hit it.

Invariants: the core has no clock: the engine passes the time, which never falls. A level only
orders evictions and never refuses a call. Twin: rust/src/transitions/retention.rs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from kvcore.state.state import State
from kvcore.state.transaction import Transaction, transition
from kvcore.types.arguments import read_int
from kvcore.types.errors import TimeWentBack
from kvcore.types.values import Outcome

if TYPE_CHECKING:
    from kvcore.types.retention import KvCacheRetentionConfig


def tick(state: State, now_ms: int) -> Outcome[State, None]:
    """Set the time, in ms since any moment: free blocks whose level has ended move to their base.

    O(free blocks); in the twin O(log(free blocks)) per level that ends. Under other policies the
    time has no effect and is not kept. Raises TimeWentBack.
    """
    from kvcore.pool.retention import RetentionTransaction  # few pools have levels
    from kvcore.types.retention import TIME_MAX

    now: Any = read_int(now_ms)

    def change(tx: Transaction) -> None:
        device = tx.device
        current = device.now if isinstance(device, RetentionTransaction) else 0
        if not isinstance(now, int) or not current <= now <= TIME_MAX:
            raise TimeWentBack(now_ms=now, current=current, most=TIME_MAX)
        if isinstance(device, RetentionTransaction):
            device.tick(now)

    return transition(state, change)


def extend_retention(
    state: State, request_id: str, retention: KvCacheRetentionConfig
) -> Outcome[State, None]:
    """Join more wishes to those of a request, for blocks that it releases from now on.

    A range without an end ends with the request's current tokens. Raises UnknownRequest.
    """

    def change(tx: Transaction) -> None:
        request = tx.request(request_id)
        if tx.device.pool.retention is not None:
            from kvcore.types.retention import join_steps, steps_of

            more = steps_of(retention.pieces, request.tokens.length)
            tx.put(replace(request, wishes=join_steps(request.wishes, more)))

    return transition(state, change)
