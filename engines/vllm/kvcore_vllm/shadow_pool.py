# SPDX-License-Identifier: Apache-2.0
"""The pools of a shadow's two managers: what connectors hold there, and what both evict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from kvcore.types.commands import COLUMNS, Batch, Evict


class ShadowPool:
    """vLLM's pool. What connectors hold and give back is held and given back in kvcore's too."""

    def __init__(self, shadow: Any) -> None:
        self._shadow = shadow
        self._own = shadow.own.block_pool

    def __getattr__(self, name: str) -> Any:
        """Pass every other call to vLLM's pool."""
        return getattr(self._own, name)

    def touch(self, blocks: Iterable[Any]) -> None:
        """Hold blocks in both pools, so that they are not reused."""
        self._of_both("touch", blocks)

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """Give back held blocks in both pools."""
        self._of_both("free_blocks", ordered_blocks)

    def _of_both(self, name: str, blocks: Iterable[Any]) -> None:
        listed, shadow = list(blocks), self._shadow
        pool = shadow.kvcore.block_pool
        held = shadow.copied if name == "free_blocks" else Counter[int]()
        copied = held & Counter(each.block_id for each in listed)
        held -= copied

        def theirs(_: Any) -> None:
            ids = [each for each in (block.block_id for block in listed) if each not in copied]
            if not shadow.tally.same_ids and not shadow.place.keys() >= set(ids):
                raise LookupError("the blocks that a connector names lie elsewhere in kvcore")
            getattr(pool, name)([pool.block(shadow.place.get(each, each)) for each in ids])

        shadow.compare_call(name, "", None, getattr(self._own, name), theirs, listed)


def count_evictions(shadow: Any) -> None:
    """Let both managers count the cached blocks that they evict."""
    pool, core = shadow.own.block_pool, shadow.kvcore.compat.core
    numbers = shadow.tally.num_evictions
    drop, announce, take = (
        pool._maybe_evict_cached_block,
        pool._emit_block_removed_events,
        core.take_batch,
    )

    def dropped(block: Any) -> bool:
        done: bool = drop(block)
        numbers["vLLM"] += done
        return done

    def announced(block_hashes: Any) -> None:
        numbers["vLLM"] += 1
        announce(block_hashes)

    def taken() -> Batch:
        batch: Batch = take()
        end = len(batch.buffer) // len(COLUMNS)  # the kinds come first, each a byte and zeros
        numbers["kvcore"] += batch.buffer.count(Evict.kind, 0, end)
        return batch

    if shadow.kvcore.parts is None:
        pool._emit_block_removed_events = announced  # once for each block that loses its keys
    else:  # blocks also lose the keys of their parts, without being evicted
        pool._maybe_evict_cached_block = dropped
    setattr(core, "take_batch", taken)  # noqa: B010 # mypy takes no method by assignment
