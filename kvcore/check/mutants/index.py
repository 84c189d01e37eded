# SPDX-License-Identifier: Apache-2.0
"""Seeded bugs of the index, of hashes and keys, and of the events that mirror them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from kvcore.check.mutants.seeding import Patcher, after, mutant, put
from kvcore.check.mutants.worlds import (
    ADAPTERS,
    BASIC,
    COPIES_EVICTED,
    CUT,
    KEYS_EVICTED,
    ONE,
    PICTURED,
    SALTED_HITS,
    SIBLINGS,
    SIZES_TWICE,
)
from kvcore.hashing.block_hash import hash_block
from kvcore.pool.block_pool import PoolTransaction
from kvcore.pool.hash_index import HashIndexTransaction
from kvcore.state.plan_records import Plan
from kvcore.state.state import RequestState, State
from kvcore.state.transaction import Transaction
from kvcore.transitions import (
    allocate,
    append,
    fork,
    plan,
    prefix_lookup,
    publish,
    queries,
    requests,
    slot_request,
    transfers,
)
from kvcore.types.config import Config
from kvcore.types.effects import Effects
from kvcore.types.extra_inputs import CUT_MEDIA, MEDIA, NO_EXTRA_KEYS, ExtraKey, ExtraKeys
from kvcore.types.values import Hit, KVCacheBlocks


@mutant("calls", "IDX-SOUND", rows=(1,))
def m_evict_keeps_index(patcher: Patcher) -> None:
    """A block that is taken for another content stays in the index."""

    def remove(self: HashIndexTransaction, key: bytes, block: int) -> bool:
        return self.first(key) == block

    patcher.replace(HashIndexTransaction, "remove", remove)


@mutant("calls", "IDX-COMPLETE", rows=(3,), shows=ONE)
def m_evict_keeps_key(patcher: Patcher) -> None:
    """The index forgets a block that is taken, the block keeps its key."""

    def unpublish(self: PoolTransaction, block: int) -> None:
        key = self.keys[block]
        if key is not None and self.index.first(key) == block:
            self.index.remove(key, block)

    patcher.replace(PoolTransaction, "unpublish", unpublish)


@mutant("calls", "CACHED-COUNT", costs="a block that is full later is not published")
def m_cached_before_it_is_full(patcher: Patcher) -> None:
    """One block more counts as published than is full."""

    @patcher.around(allocate, "publish_blocks")
    def publish_more(publish: Any, tx: Transaction, request: RequestState, num_tokens: int) -> None:
        publish(tx, request, num_tokens)
        done = tx.request(request.request_id)
        tx.put(replace(done, num_cached=tuple(1 + n for n in done.num_cached)))


@mutant("calls", "REQ-HASH", rows=(7,), shows=CUT)
def m_truncate_keeps_hashes(patcher: Patcher) -> None:
    """A cut request keeps the hashes of the tokens that were cut."""

    def keep(before: Any, cut: Any, name: str) -> Any:
        hashes = before.requests[name].block_hashes
        return put(cut, replace(cut.requests[name], block_hashes=hashes))

    after(patcher, "truncate", keep)


@mutant("calls", "CACHE-KEY", "CACHE-KV", shows=KEYS_EVICTED)
def m_publishes_the_key_before(patcher: Patcher) -> None:
    """A block is published under the key of the block before it."""
    key = RequestState.key

    def key_before(self: RequestState, config: Config, group_id: int, position: int) -> bytes:
        return key(self, config, group_id, max(0, position - 1))

    patcher.during(publish, "_publish_block", RequestState, "key", key_before)


@mutant(
    "calls", "EVT-COPY", rows=(91,), costs="a consumer that mirrors the index counts on lost hits"
)
def m_eviction_not_announced(patcher: Patcher) -> None:
    """No event says that the last block of a content is gone."""
    patcher.replace(Effects, "announce_removed", lambda *_: None)


@mutant("calls", "HASH-INJ")
def m_hash_without_parent(patcher: Patcher) -> None:
    """A block's hash does not cover what stands before the block."""

    def hash_unchained(parent: bytes, tokens: Sequence[int], size: int, **_: Any) -> list[bytes]:
        root = bytes(len(parent))
        starts = range(0, len(tokens) - size + 1, size)
        return [hash_block(root, tokens[at : at + size]) for at in starts]

    patcher.replace(requests, "hash_blocks", hash_unchained)


@mutant("sizes", "KEY-GRAN", rows=(13,), shows=SIZES_TWICE)
def m_hash_granularity(patcher: Patcher) -> None:
    """The coarse group takes hashes at the fine group's positions."""
    ones = property(lambda config: (1,) * len(config.groups), lambda *_: None)
    patcher.replace(Config, "scales", ones)


@mutant("calls", "IDX-COMPLETE", rows=(4,), shows=COPIES_EVICTED)
def m_evict_drops_dups(patcher: Patcher) -> None:
    """Evicting one copy of a content drops its siblings from the index."""

    @patcher.around(HashIndexTransaction, "remove")
    def remove_all(remove: Any, self: HashIndexTransaction, key: bytes, _block: int) -> bool:
        while not remove(self, key, self.firsts[key]):
            pass
        return True


@mutant("calls", "EVT-COPY", rows=(5,), costs="a mirror of the index does not know of the copy")
def m_event_per_copy(patcher: Patcher) -> None:
    """An event says that a content is gone although a copy of it is left."""

    @patcher.around(HashIndexTransaction, "remove")
    def remove_loudly(remove: Any, self: HashIndexTransaction, key: bytes, block: int) -> bool:
        remove(self, key, block)
        return True


@mutant("calls", "EVT-COPY", costs="a mirror of the index does not know of the hit")
def m_stored_event_lost(patcher: Patcher) -> None:
    """No event says that blocks became findable."""
    patcher.replace(Effects, "announce", lambda *_: None)


@mutant("salts", "KEY-SEP", rows=(11,), shows=SALTED_HITS)
def m_extra_ignored(patcher: Patcher) -> None:
    """A key is made of tokens only: adapter, media and salt are left out."""
    patcher.replace(ExtraKeys, "of_block", lambda *_: ())


@mutant("salts", "KEY-SEP", rows=(10,), shows=SALTED_HITS)
def m_extra_untagged(patcher: Patcher) -> None:
    """An adapter and a salt of one name give one key."""

    def untagged(self: ExtraKeys, start: int, _end: int, _size: int) -> tuple[ExtraKey, ...]:
        names = [] if self.lora is None else [self.lora.name]
        names += [] if self.cache_salt is None or start else [self.cache_salt]
        return tuple((0, name.encode()) for name in names)

    patcher.replace(ExtraKeys, "of_block", untagged)


@mutant(
    "calls",
    "EVICT-ORDER",
    "PREFIX-CLOSED",
    rows=(53,),
    costs="only the order of eviction changes",
    trace="evict_tail_first",
)
def m_free_head_first(patcher: Patcher) -> None:
    """Blocks are released head first, so that a parent is evicted before its child."""
    release = PoolTransaction.release
    patcher.replace(PoolTransaction, "release", lambda self, blocks: release(self, blocks[::-1]))


@mutant(
    SIBLINGS,
    "PREFIX-CLOSED",
    unnamed="3x2x4 shows it, but not within seconds on Python",
    costs="less is findable, what is found is right",
    trace="rewrite_under_the_same_key",
)
def m_same_key_withdrawn(patcher: Patcher) -> None:
    """A block that its owner writes again loses its key, though the write puts back its content."""

    patcher.replace(plan, "writes_same", lambda *_: False)


@mutant("merge-forks", "PREFIX-CLOSED", costs="less is findable, what is found is right")
def m_fork_forgets_merges(patcher: Patcher) -> None:
    """A child counts blocks as published that wait to be merged for its parent alone."""
    patcher.replace(fork, "inherit_merges", lambda *_: None)


@mutant("cuts-lookahead", "CACHE-KV")
def m_key_kept_under_lookahead(patcher: Patcher) -> None:
    """A block keeps its key though a drafter may write its last slots."""

    @patcher.around(plan, "writes_same")
    def of_scheduled(same: Any, tx: Any, request: Any, place: Any, lengths: Any) -> Any:
        return same(tx, request, place, replace(lengths, slots=lengths.scheduled))


@mutant("calls", "LRU", costs="only the order of eviction changes", trace="queue_order")
def m_freed_block_leaves_first(patcher: Patcher) -> None:
    """A released block is the next one to be taken."""

    def leaves_first(tx: PoolTransaction, block: int) -> None:
        tx.queue.prepend(block)

    patcher.replace(PoolTransaction, "_enqueue", leaves_first)


@mutant(
    "chunks",
    "PUBLISHED",
    rows=(14,),
    costs="less is findable, what is found is right",
    trace="chunked_local",
)
def m_num_cached_counts_null(patcher: Patcher) -> None:
    """Behind a null block everything counts as published, so nothing is."""

    @patcher.around(allocate, "publish_blocks")
    def publish_before_nulls(publish: Any, tx: Transaction, request: Any, count: int) -> None:
        if not any(tx.is_null(table[0]) for table in request.tables if table):
            publish(tx, request, count)


@mutant("calls", "IDX-SOUND", rows=(2,), costs="the comparison hides it: what is found is right")
def m_stale_entries_compared(patcher: Patcher) -> None:
    """A block that is taken stays in the index; look-ups compare what it holds by now."""
    m_evict_keeps_index(patcher)
    miss_also(patcher, lambda state, key, *_: state.device.keys[key_owner(state, key)] != key)


def key_owner(state: State, key: bytes) -> int:
    """Return the first block that the index has for a key."""
    return state.device.index.firsts[key]


def miss_also(patcher: Patcher, wrong: Callable[[State, bytes, RequestState, int], bool]) -> None:
    """Let look-ups also miss a block under a key if something is wrong with it."""

    @patcher.around(prefix_lookup, "first_missing")
    def first(missing: Any, state: Any, request: Any, group_id: int, positions: Any) -> Any:
        for position in positions:
            if missing(state, request, group_id, (position,)) is not None:
                return int(position)
            if wrong(state, request.key(state.config, group_id, position), request, group_id):
                return int(position)
        return None


@mutant("cuts", "CACHE-KV", rows=(6,))
def m_superseded_key_comes_back(patcher: Patcher) -> None:
    """A block that is written again gets back the key of what it held before."""

    @patcher.around(append, "commit")
    @patcher.around(allocate, "commit")
    def commit_and_restore(commit: Any, tx: Transaction, planned: Plan) -> Any:
        tables = planned.request.tables
        places = [(each.group_id, each.position) for each in planned.rewrites if not each.shared]
        blocks = [tables[group_id][position] for group_id, position in places]
        keys = {block: tx.device.keys[block] for block in blocks}
        grown = commit(tx, planned)
        for block, key in keys.items():
            if key is not None and tx.device.keys[block] is None:
                tx.device.publish(block, key)
        return grown


@mutant("calls", "KV-READ", "HIT-LONGEST", "HIT-FRESH", rows=(8,))
def m_evicted_block_counts_as_computed(patcher: Patcher) -> None:
    """A request that misses takes the next block of the free queue as computed, since it was
    computed for another request.
    """

    @patcher.around(queries, "longest_hit")
    def longest_or_front(longest: Any, state: State, request: RequestState) -> Any:
        hit, size = longest(state, request), state.config.groups[0].block_size
        front = next(iter(state.device.queue), None)
        if hit.num_tokens or front is None or len(request.tokens) <= size:
            return hit
        return hit if state.device.keys[front] is None else Hit(KVCacheBlocks(((front,),)), size)

    patcher.replace(slot_request, "check_hit", lambda *_: None)


@mutant("calls", "HASH-INJ", rows=(9,), shows=BASIC)
def m_hashes_collide(patcher: Patcher) -> None:
    """A hash of few values: blocks of other tokens have the same."""

    def hash_weakly(parent: bytes, tokens: Sequence[int], size: int, **_: Any) -> list[bytes]:
        hashes = []
        for first in range(0, len(tokens) - size + 1, size):
            parent = hash_block(parent, (sum(tokens[first : first + size]) % 3,))
            hashes.append(parent)
        return hashes

    patcher.replace(requests, "hash_blocks", hash_weakly)


@mutant("salts", "OPERATIONS", rows=(12,), shows=ADAPTERS)
def m_external_key_of_tokens_only(patcher: Patcher) -> None:
    """The key of the external store covers only tokens, so another adapter's content is loaded."""
    own = RequestState.key

    @patcher.around(transfers, "start_loads")
    def start_blind(start: Any, tx: Transaction, *args: Any) -> Any:
        def key(self: RequestState, config: Config, group_id: int, position: int) -> bytes:
            for other in tx.state.requests.values():
                plain = other.extra_keys == NO_EXTRA_KEYS and other.tokens[: len(self.tokens)]
                if plain == self.tokens:
                    return own(other, config, group_id, position)
            return own(self, config, group_id, position)

        with Patcher() as inner:
            inner.replace(RequestState, "key", key)
            return start(tx, *args)


@mutant(PICTURED, "KEY-SEP", unnamed="no named world has media")
def m_cut_is_a_name(patcher: Patcher) -> None:
    """The identity given to the rest of a cut media item can also belong to another item."""

    @patcher.around(ExtraKeys, "of_block")
    def of_block_by_name(of_block: Any, self: ExtraKeys, *args: int) -> tuple[ExtraKey, ...]:
        mark = f" cut at {self.media[-1].end}".encode() if self.media else b""
        return tuple(
            (MEDIA, value[:4] + value[8:] + mark) if tag == CUT_MEDIA else (tag, value)
            for tag, value in of_block(self, *args)
        )
