# SPDX-License-Identifier: Apache-2.0
"""Seeded bugs of tail keys, of the hits that end inside blocks, and of the copies behind them."""

from __future__ import annotations

from typing import Any

import attrs
from msgspec.structs import replace

from kvcore.check.mutants.seeding import Patcher, mutant, without
from kvcore.pool.block_pool import PoolTransaction
from kvcore.pool.tails import KeyedTransaction
from kvcore.state.open_batch import OpenBatch
from kvcore.state.plan_records import Lengths, Rewrite
from kvcore.state.state import RequestState, State
from kvcore.state.transaction import Transaction
from kvcore.transitions import (
    allocate,
    append,
    batches,
    plan,
    prefix_lookup,
    queries,
    rewind,
    slot_request,
)
from kvcore.transitions.tails import keys, rewrites
from kvcore.types.commands import CopyOnWrite
from kvcore.types.values import Hit


@mutant("tails-fork", "PUBLISHED", "KV-READ")
def m_tail_keyed_by_the_call(patcher: Patcher) -> None:
    """A tail is findable, and copied, before its batch has written it."""
    for module in (allocate, append):

        @patcher.around(module, "commit")
        def keyed(commit: Any, tx: Transaction, planned: Any) -> Any:
            blocks = commit(tx, planned)
            request = tx.request(planned.request.request_id)
            keys.publish_tails(tx, request, 0, request.num_accepted)
            return blocks


@mutant("tails-append", "KV-READ")
def m_tail_no_copy(patcher: Patcher) -> None:
    """A call behind a hit inside a block writes into an empty block."""
    without(patcher, CopyOnWrite)


def planning(patcher: Patcher, change: Any) -> None:
    """Change each rewrite of a block."""

    @patcher.around(plan, "plan_rewrites")
    def plan_changed(plan_all: Any, *args: Any) -> tuple[Rewrite, ...]:
        return tuple(change(each) for each in plan_all(*args))


@mutant("tails-append", "L-ADMIT")
def m_tail_copies_refuse_for_ever(patcher: Patcher) -> None:
    """A copy that only keeps cached tokens is not given up if the pool has no block for it."""
    planning(patcher, lambda rewrite: attrs.evolve(rewrite, for_key=False))


@mutant("tails-append", "WRITE-EXCL", "CACHE-KV")
def m_tail_kept_where_it_is_overwritten(patcher: Patcher) -> None:
    """A block that a full pool gives no copy keeps its tail keys when it is overwritten."""
    patcher.replace(keys, "withdraw_past", lambda *_: None)
    patcher.replace(allocate, "withdraw_past", lambda *_: None)


@mutant("tails-cut", "WRITE-EXCL", "CACHE-KV")
def m_tail_kept_past_a_cut(patcher: Patcher) -> None:
    """A request that was cut inside a block writes over the tails past the cut."""

    @patcher.around(rewrites, "tails_past")
    def of_hits(
        past: Any, tx: Transaction, request: RequestState, place: tuple[int, int], *args: int
    ) -> list[bytes]:
        found: list[bytes] = past(tx, request, place, *args)
        return [] if request.tables[place[0]] else found


@mutant("tails-flight", "CACHE-KV")
def m_tail_kept_past_a_cancel(patcher: Patcher) -> None:
    """A cancel leaves the tail keys that the cancelled batch gave."""

    @patcher.around(batches, "settle_tails")
    def unnoted(settle: Any, tx: Transaction, taken: OpenBatch) -> None:
        before = [each.published_keys for each in tx.in_flight]
        settle(tx, taken)
        for index, known in enumerate(before):
            tx.in_flight[index] = replace(tx.in_flight[index], published_keys=known)


@mutant("tails-append", "CMD-EVICT-FIRST", "CACHE-KV")
def m_tail_survives_its_block(patcher: Patcher) -> None:
    """A block that is evicted loses its full key alone."""
    patcher.replace(PoolTransaction, "unpublish", PoolTransaction.unpublish_full)


@mutant("tails-threes", "HIT-LONGEST", "HIT-FRESH", "KV-READ")
def m_hit_takes_a_shorter_tail(patcher: Patcher) -> None:
    """A hit takes a block of which it needs more tokens than the tail key stands for."""
    patcher.replace(slot_request, "check_hit", lambda *_: None)

    @patcher.around(prefix_lookup, "find_tail")
    def shorter(
        find: Any, state: State, request: RequestState, group_id: int, num_tokens: int
    ) -> int | None:
        found: int | None = find(state, request, group_id, num_tokens)
        less = num_tokens - state.config.hash_block_size
        if found is not None or less % state.config.block_size == 0:
            return found
        again: int | None = find(state, request, group_id, less)
        return again


@mutant("tails-append", "HIT-LONGEST", "KV-READ")
def m_hit_counts_to_the_end_of_its_block(patcher: Patcher) -> None:
    """A hit inside a block counts the tokens up to the block's end."""
    patcher.replace(slot_request, "check_hit", lambda *_: None)

    @patcher.around(queries, "longest_hit")
    def rounded(longest: Any, state: State, request: RequestState) -> Hit:
        hit: Hit = longest(state, request)
        size = state.config.block_size
        whole = min(-(-hit.num_tokens // size) * size, len(request.tokens) - 1)
        return Hit(hit.blocks, whole, hit.num_common)


@mutant("tails-loads", "LOAD-FAILED")
def m_failed_load_keeps_tails(patcher: Patcher) -> None:
    """Tails that were computed from what a load left out stay findable when that is reported."""
    patcher.replace(keys, "note_tail", lambda *_, **__: None)
    patcher.replace(rewind, "withdraw_tails", lambda *_: set())


@mutant("tails-cut", "WRITE-EXCL", "CACHE-KV")
def m_same_write_keeps_a_wrong_tail(patcher: Patcher) -> None:
    """A block keeps its tail keys although other tokens are written."""
    patcher.replace(rewrites, "_writes_tails", lambda *_: True)


@mutant("tails-append", "WRITE-EXCL", "KV-READ")
def m_hit_does_not_count_its_owner(patcher: Patcher) -> None:
    """Behind a hit inside a block that another request holds, the block is written in place."""

    @patcher.around(rewrites, "_plan_block")
    def alone(
        plan_block: Any,
        tx: Transaction,
        request: RequestState,
        place: tuple[int, int],
        block: int,
        _: bool,
        lengths: Lengths,
    ) -> Any:
        return plan_block(tx, request, place, block, False, lengths)


@mutant("tails-append", "PUBLISHED", costs="less is findable, what is found is right")
def m_tail_gets_no_key(patcher: Patcher) -> None:
    """Only whole blocks become findable when a batch is taken."""
    patcher.replace(batches, "settle_tails", lambda *_: None)


@mutant("tails-append", "OWNER-MIRROR")
def m_tailed_block_is_freed_as_empty(patcher: Patcher) -> None:
    """A block that is found under tail keys alone is said to be free without content."""
    patcher.replace(KeyedTransaction, "has_key", lambda self, block: self.keys[block] is not None)


@mutant("tails-completed-fork", "CACHE-KV")
def m_completed_keys_go_to_copies(patcher: Patcher) -> None:
    """A batch that completes gives its tail keys to copies that a later batch makes."""

    @patcher.around(keys, "publish_tails")
    def anywhere(publish: Any, *args: Any) -> Any:
        return publish(*args[:4])


@mutant("tails-groups", "TAIL-SOUND")
def m_longer_tails_come_first(patcher: Patcher) -> None:
    """The tail keys of a block do not rise."""

    @patcher.around(KeyedTransaction, "publish_tail")
    def in_front(publish: Any, self: KeyedTransaction, block: int, key: bytes, _: int) -> None:
        publish(self, block, key, 0)
