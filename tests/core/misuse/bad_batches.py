# SPDX-License-Identifier: Apache-2.0
"""Bad input on batches in flight: taken, completed and cancelled out of turn."""

from __future__ import annotations

from typing import Any

from kvcore import KVCacheManager
from kvcore.types.errors import BatchOutOfOrder, NotInFlight, TooManyInFlight
from tests.conftest import Backend
from tests.helpers.misuse import Row, bad
from tests.helpers.stories import add, make, serve


def flying(backend: Backend) -> KVCacheManager:
    """Put batches 1 and 2, the most allowed, in flight; batch 0 is completed, 3 is open."""
    manager = make(backend, num_blocks=12, max_in_flight=2, num_host_blocks=4)
    serve(manager, "r", range(5))
    manager.take_batch()
    manager.complete(0)
    serve(manager, "s", range(20, 23))
    manager.take_batch()
    manager.append(["r"], [5])
    manager.take_batch()
    manager.append(["s"], [23])
    return manager


def landed(backend: Backend) -> KVCacheManager:
    """Make a manager whose taken batches count as executed, so none is ever unfinished."""
    manager = make(backend)
    add(manager, "r", range(5))
    manager.allocate_slots("r", 5)
    manager.take_batch()
    return manager


def neither(batch: Any, in_flight: list[int]) -> NotInFlight:
    return NotInFlight(batch=batch, in_flight=in_flight)


ROWS: list[Row] = [
    bad(flying, TooManyInFlight(num_in_flight=2, max_in_flight=2), "take_batch"),
    bad(flying, BatchOutOfOrder(batch=2, oldest=1), "complete", 2),
    *(
        bad(flying, neither(batch, [1, 2]), name, batch)
        for name in ("complete", "cancel")
        for batch in (0, 3, -1, 2**70)
    ),
    *(
        bad(flying, neither(batch, [1, 2]), name, batch)
        for name in ("complete", "cancel")
        for batch in ("1", None, 1.0)
    ),
    *(bad(landed, neither(0, []), name, 0) for name in ("complete", "cancel")),
]
