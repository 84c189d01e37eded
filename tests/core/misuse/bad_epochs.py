# SPDX-License-Identifier: Apache-2.0
"""Bad input on epochs: numbers that do not rise, an open batch that computes, stale requests."""

from __future__ import annotations

from kvcore import KVCacheManager
from kvcore.types.config import MAX_EPOCH
from kvcore.types.errors import EpochWentBack, InOpenBatch, NotPublished, StaleHits, StaleRequest
from kvcore.types.values import Hit, KVCacheBlocks
from tests.conftest import Backend
from tests.helpers.misuse import Row, bad
from tests.helpers.stories import add, make, serve


def aged(backend: Backend) -> KVCacheManager:
    """Begin epoch 5 after epoch 2, in which r computed two blocks of four and s a free one."""
    manager = make(backend, num_blocks=12, block_size=4, epoch=2)
    add(manager, "r", range(12))
    manager.allocate_slots("r", 8)
    serve(manager, "s", range(20, 24))
    add(manager, "t", range(20, 28))
    manager.take_batch()
    manager.free("s")
    manager.take_batch()
    assert manager.advance_epoch(5) == 5
    manager.take_batch()
    return manager


def scheduled(backend: Backend) -> KVCacheManager:
    """Let the open batch schedule r."""
    manager = make(backend, num_blocks=12)
    serve(manager, "r", range(4))
    return manager


def storing(backend: Backend) -> KVCacheManager:
    """Put a store into the open batch."""
    manager = scheduled(backend)
    manager.take_batch()
    assert manager.store([1]) == (0,)
    return manager


def no_epoch(epoch: object) -> EpochWentBack:
    return EpochWentBack(epoch=epoch, current=5, least=6, most=MAX_EPOCH)


HIT = Hit(KVCacheBlocks(((3,),)), 4)

ROWS: list[Row] = [
    *(
        bad(aged, no_epoch(epoch), "advance_epoch", epoch)
        for epoch in (5, 4, 0, -1, MAX_EPOCH + 1, 2**70, "6", 6.0)
    ),
    bad(scheduled, InOpenBatch(kind="request", value="r"), "advance_epoch"),
    bad(storing, InOpenBatch(kind="operation", value=0), "advance_epoch"),
    bad(aged, StaleRequest(request="r", epoch=2, current=5), "load", "r", 4),
    bad(aged, NotPublished(block=1), "store", [1]),
    bad(aged, StaleHits(request="t", block=3, position=0), "allocate_slots", "t", 1, HIT),
]
