# SPDX-License-Identifier: Apache-2.0
"""Bad input that names blocks, and requests that leave an open batch on which others count."""

from __future__ import annotations

from kvcore import KVCacheManager
from kvcore.types.errors import HitInOpenBatch, NotPinned, UnknownBlock, UnusedBlock
from tests.conftest import Backend
from tests.helpers.misuse import Row, bad
from tests.helpers.stories import make, serve, step


def pinned(backend: Backend) -> KVCacheManager:
    """Let "runs" have 3 tokens in blocks 1 and 2; block 1 has two pins; 3 to 9 are unused."""
    manager = make(backend)
    serve(manager, "runs", [0, 1, 2])
    manager.pin([1, 1])
    step(manager)
    return manager


def counted_on(backend: Backend) -> KVCacheManager:
    """Let "writer" publish blocks 1 and 2 in the open batch; "reader" and "other" hit them in it.

    "other" hits only the first: its tokens are 0, 1, 9.
    """
    manager = make(backend, num_host_blocks=8)
    serve(manager, "writer", [0, 1, 2, 3, 4])
    serve(manager, "reader", [0, 1, 2, 3, 5])
    serve(manager, "other", [0, 1, 9])
    return manager


def _unknown(block: object) -> list[Row]:
    """Return a row for each transition that takes block ids; the good block stays untouched."""
    error = UnknownBlock(block=block, first=1, last=9)
    return [bad(pinned, error, name, [1, block]) for name in ("pin", "unpin", "evict_blocks")]


BLOCKS = [
    *(row for block in (0, -1, 10, 2**31, 2**32, 10**30, "1", None) for row in _unknown(block)),
    bad(pinned, UnusedBlock(block=3), "pin", [3]),
    bad(pinned, UnusedBlock(block=9), "pin", [1, 2, 9]),
    bad(pinned, NotPinned(block=2, num_pins=0, requested=1), "unpin", [2]),
    bad(pinned, NotPinned(block=3, num_pins=0, requested=1), "unpin", [1, 3]),
    bad(pinned, NotPinned(block=1, num_pins=2, requested=3), "unpin", [1, 1, 1]),
]

BOTH = HitInOpenBatch(blocks=[1, 2], requests=["other", "reader"])
ONE = HitInOpenBatch(blocks=[1], requests=["other"])
LAST = HitInOpenBatch(blocks=[2], requests=["reader"])

LEAVING = [
    bad(counted_on, BOTH, "free", "writer"),
    bad(counted_on, BOTH, "truncate", "writer", 5),
    bad(counted_on, BOTH, "truncate", "writer", 1),
    bad(counted_on, BOTH, "unschedule", "writer", 1),
    bad(counted_on, LAST, "unschedule", "writer", 2),
    bad(counted_on, BOTH, "swap_out", ["writer"]),
    bad(counted_on, ONE, "swap_out", ["writer", "reader"]),
    bad(counted_on, ONE, "swap_out", ["reader", "writer"]),
]

ROWS = [*BLOCKS, *LEAVING]
