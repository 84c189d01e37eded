# SPDX-License-Identifier: Apache-2.0
"""Seeded bugs of the index, of hashes and keys, and of the events that mirror them.

Rules: as in seeding.py. `rows` are those of the catalogue (catalogue.py). Twin: none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from kvcore import allocate, caching, requests
from kvcore.block_pool import PoolDraft
from kvcore.check.mutants.seeding import Patcher, after, mutant, put
from kvcore.check.mutants.worlds import ALONE, BASIC, COPIES, CUT, ONE, SALTED, SIZES
from kvcore.config import Config
from kvcore.effects import Effects
from kvcore.extra_keys import ExtraKey, ExtraKeys
from kvcore.free_queue import FreeQueueDraft
from kvcore.hash_index import HashIndexDraft
from kvcore.hashing import hash_block
from kvcore.state import Draft, RequestState


@mutant(ONE, "IDX-SOUND", rows=(1,))
def m_evict_keeps_index(patcher: Patcher) -> None:
    """A block that is taken for another content stays in the index."""

    def remove(self: HashIndexDraft, key: bytes, block: int) -> bool:
        return self.first(key) == block

    patcher.setattr(HashIndexDraft, "remove", remove)


@mutant(ONE, "IDX-COMPLETE", rows=(3,))
def m_evict_keeps_key(patcher: Patcher) -> None:
    """The index forgets a block that is taken, the block keeps its key."""

    def unpublish(self: PoolDraft, block: int) -> None:
        key = self.keys[block]
        if key is not None and self.index.first(key) == block:
            self.index.remove(key, block)

    patcher.setattr(PoolDraft, "unpublish", unpublish)


@mutant(ONE, "CACHED-COUNT")
def m_cached_before_it_is_full(patcher: Patcher) -> None:
    """One block more counts as published than is full."""
    publish = caching.publish_blocks

    def publish_more(draft: Draft, request: RequestState, num_tokens: int) -> None:
        publish(draft, request, num_tokens)
        done = draft.request(request.request_id)
        draft.store(attrs.evolve(done, num_cached=tuple(1 + n for n in done.num_cached)))

    patcher.setattr(allocate, "publish_blocks", publish_more)


@mutant(CUT, "REQ-HASH", rows=(7,))
def m_truncate_keeps_hashes(patcher: Patcher) -> None:
    """A cut request keeps the hashes of the tokens that were cut."""

    def keep(before: Any, cut: Any, name: str) -> Any:
        hashes = before.requests[name].block_hashes
        return put(cut, attrs.evolve(cut.requests[name], block_hashes=hashes))

    after(patcher, "truncate", keep)


@mutant(BASIC, "CACHE-KEY", "CACHE-KV")
def m_publishes_the_key_before(patcher: Patcher) -> None:
    """A block is published under the key of the block published before it."""
    publish = PoolDraft.publish
    last: list[bytes] = []

    def publish_last(self: PoolDraft, block: int, key: bytes) -> None:
        last.append(key)
        publish(self, block, last[-2:][0])

    patcher.setattr(PoolDraft, "publish", publish_last)


@mutant(ONE, "EVT-COPY")
def m_eviction_not_announced(patcher: Patcher) -> None:
    """No event says that the last block of a content is gone."""
    patcher.setattr(Effects, "announce_removed", lambda *_: None)


@mutant(ONE, "HASH-INJ")
def m_hash_without_parent(patcher: Patcher) -> None:
    """A block's hash does not cover what stands before the block."""

    def hash_unchained(parent: bytes, tokens: Sequence[int], size: int, **_: Any) -> list[bytes]:
        root = bytes(len(parent))
        starts = range(0, len(tokens) - size + 1, size)
        return [hash_block(root, tokens[at : at + size]) for at in starts]

    patcher.setattr(requests, "hash_blocks", hash_unchained)


@mutant(SIZES, "KEY-GRAN", rows=(13,))
def m_hash_granularity(patcher: Patcher) -> None:
    """The coarse group takes hashes at the fine group's positions."""
    patcher.setattr(Config, "scale", lambda *_: 1)


@mutant(COPIES, "IDX-COMPLETE", rows=(4,))
def m_evict_drops_dups(patcher: Patcher) -> None:
    """Evicting one copy of a content drops its siblings from the index."""
    remove = HashIndexDraft.remove

    def remove_all(self: HashIndexDraft, key: bytes, _block: int) -> bool:
        while not remove(self, key, self.firsts[key]):
            pass
        return True

    patcher.setattr(HashIndexDraft, "remove", remove_all)


@mutant(COPIES, "EVT-COPY", rows=(5,))
def m_event_per_copy(patcher: Patcher) -> None:
    """An event says that a content is gone although a copy of it is left."""
    remove = HashIndexDraft.remove

    def remove_loudly(self: HashIndexDraft, key: bytes, block: int) -> bool:
        remove(self, key, block)
        return True

    patcher.setattr(HashIndexDraft, "remove", remove_loudly)


@mutant(COPIES, "EVT-COPY")
def m_stored_event_lost(patcher: Patcher) -> None:
    """No event says that blocks became findable."""
    patcher.setattr(Effects, "announce", lambda *_: None)


@mutant(SALTED, "KEY-SEP", rows=(11,))
def m_extra_ignored(patcher: Patcher) -> None:
    """A key is made of tokens only: adapter, media and salt are left out."""
    patcher.setattr(ExtraKeys, "of_block", lambda *_: ())


@mutant(SALTED, "KEY-SEP", rows=(10,))
def m_extra_untagged(patcher: Patcher) -> None:
    """An adapter and a salt of one name give one key."""

    def untagged(self: ExtraKeys, start: int, _end: int, _size: int) -> tuple[ExtraKey, ...]:
        names = [] if self.lora is None else [self.lora.name]
        names += [] if self.cache_salt is None or start else [self.cache_salt]
        return tuple((0, name.encode()) for name in names)

    patcher.setattr(ExtraKeys, "of_block", untagged)


@mutant(BASIC, rows=(53,), costs="only the order of eviction changes", trace="evict_tail_first")
def m_free_head_first(patcher: Patcher) -> None:
    """Blocks are released head first, so that a parent is evicted before its child."""
    release = PoolDraft.release
    patcher.setattr(PoolDraft, "release", lambda self, blocks: release(self, blocks[::-1]))


@mutant(BASIC, costs="only the order of eviction changes", trace="queue_order")
def m_freed_block_leaves_first(patcher: Patcher) -> None:
    """A released block is the next one to be taken."""
    patcher.setattr(FreeQueueDraft, "append", FreeQueueDraft.prepend)


@mutant(ALONE, rows=(14,), costs="less is findable, what is found is right", trace="chunked_local")
def m_num_cached_counts_null(patcher: Patcher) -> None:
    """Behind a null block everything counts as published, so nothing is."""
    publish = caching.publish_blocks

    def publish_before_nulls(draft: Draft, request: RequestState, num_tokens: int) -> None:
        if not any(draft.is_null(table[0]) for table in request.tables if table):
            publish(draft, request, num_tokens)

    patcher.setattr(allocate, "publish_blocks", publish_before_nulls)
