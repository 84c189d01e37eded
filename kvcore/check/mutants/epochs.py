# SPDX-License-Identifier: Apache-2.0
"""Seeded bugs of epochs of weights: old keys that are found, stale requests that act as fresh."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace
from pyrsistent import pvector

from kvcore.check.mutants.seeding import Patcher, after, mutant, put
from kvcore.check.mutants.worlds import world
from kvcore.check.profiles.profile import SLOT
from kvcore.check.world.world import World
from kvcore.pool.block_pool import PoolTransaction
from kvcore.pool.free_queue import CURRENT, OLDER, FreeQueueTransaction
from kvcore.state.state import State
from kvcore.state.transaction import Transaction
from kvcore.trace.calls import Call
from kvcore.transitions import TRANSITIONS, allocate, append, batches, epochs, requests, swap
from kvcore.types.commands import EvictAll
from kvcore.types.values import Request

ONLY_HITS = "content that is evicted too early is computed again"


def loading(_: World, state: State) -> Iterator[Call]:
    """Yield the calls of an engine with one request, which computes a token and loads the rest."""
    if not state.requests:
        yield Call("add_request", (Request("0", [0, 0, 0]),))
    for request in state.requests.values():
        if not request.num_computed:
            yield Call("allocate_slots", ("0", 1))
        elif not state.epoch:
            yield Call("advance_epoch")
        elif request.num_computed == 1:
            yield Call("load", ("0", 1))


LOADING = world(3, 1, 3, groups=(SLOT,), moves=loading, max_in_flight=1)


def never_stale(*_: Any) -> bool:
    """Report that no request is stale."""
    return False


@mutant("epoch", "CACHE-KV", "KV-READ")
def m_keys_outlive_their_epoch(patcher: Patcher) -> None:
    """A look-up finds what was computed with older weights."""

    @patcher.around(PoolTransaction, "start_epoch")
    def start_epoch(_: Any, self: PoolTransaction) -> None:
        self.queue.splice(CURRENT, behind=OLDER)
        self.effects.commands.append(EvictAll())


@mutant("epoch-fork", "CACHE-KV", "PUBLISHED")
def m_stale_request_publishes(patcher: Patcher) -> None:
    """A request of an older epoch publishes what it computes."""
    patcher.replace(Transaction, "is_stale", never_stale)


@mutant("epoch-completed", "CACHE-KV", "PUBLISHED")
def m_completion_publishes_for_stale_requests(patcher: Patcher) -> None:
    """A batch of older weights publishes its blocks when it is completed."""
    patcher.during(batches, "publish_written", Transaction, "is_stale", never_stale)


@mutant("epoch-ahead", "CACHE-KV", "PUBLISHED")
def m_late_token_publishes_for_stale_requests(patcher: Patcher) -> None:
    """A token that comes late publishes the block that older weights computed."""
    for module in (append, requests):
        patcher.during(module, "publish_filled", Transaction, "is_stale", never_stale)


@mutant("epoch-merge", "KV-READ")
def m_epoch_begins_in_an_open_batch(patcher: Patcher) -> None:
    """The weights change while the open batch schedules requests."""
    patcher.replace(epochs, "check_open_batch", lambda _: None)


@mutant("epoch", "PUBLISHED", "KV-READ")
def m_epoch_stays_after_a_preemption(patcher: Patcher) -> None:
    """A request that is admitted again is of the epoch in which it first began."""

    @patcher.around(allocate, "replace")
    def keep_epoch(change: Any, value: Any, **fields: Any) -> Any:
        if "epoch" in fields and value.preempted:
            fields["epoch"] = 0
        return change(value, **fields)


@mutant("epoch", "EPOCHS", costs="equal states have other bytes")
def m_waiting_request_keeps_its_epoch(patcher: Patcher) -> None:
    """A request that was freed is still of an epoch."""

    @patcher.around(Transaction, "put")
    def put_as_it_is(put: Any, self: Transaction, request: Any) -> None:
        put(self, request)
        self.requests.slots[self.requests.places[request.request_id]] = request


@mutant("epoch-fork", "KV-READ")
def m_forked_child_is_fresh(patcher: Patcher) -> None:
    """A child of a request of an older epoch is of this one."""

    def freshen(before: Any, state: Any, _: Any) -> Any:
        for name in {*state.requests} - {*before.requests}:
            if state.requests[name].num_computed:
                state = put(state, replace(state.requests[name], epoch=state.epoch))
        return state

    after(patcher, "fork", freshen)


@mutant("epoch-swap", "KV-READ")
def m_stale_request_comes_back_to_hits(patcher: Patcher) -> None:
    """A request of an older epoch comes back to blocks that the new weights computed."""
    patcher.during(swap, "find_hits", Transaction, "is_stale", never_stale)


@mutant(LOADING, "KV-READ", unnamed="the moves of worlds load for requests that hold nothing alone")
def m_stale_request_loads(patcher: Patcher) -> None:
    """A request of an older epoch loads what the new weights computed."""

    @patcher.around(TRANSITIONS, "load")
    def load(transition: Any, *args: Any, **options: Any) -> Any:
        with Patcher() as inner:
            inner.replace(Transaction, "is_stale", never_stale)
            return transition(*args, **options)


@mutant("epoch", "EPOCH-FIRST", costs=ONLY_HITS)
def m_older_epochs_age_among_others(patcher: Patcher) -> None:
    """What is free when an epoch begins leaves when its turn comes."""
    patcher.replace(FreeQueueTransaction, "splice", lambda *_, **__: None)


@mutant("epoch", "EPOCH-FIRST", "LRU", costs=ONLY_HITS)
def m_older_blocks_are_freed_among_others(patcher: Patcher) -> None:
    """A block with a key of an older epoch joins behind all others when it is freed."""

    @patcher.around(FreeQueueTransaction, "append")
    def append(old: Any, self: FreeQueueTransaction, block: int, ring: int = CURRENT) -> None:
        del ring
        old(self, block)


@mutant("epoch-flight", costs="a mirror of the keys by commands alone", trace="epoch_in_flight")
def m_cancel_takes_the_epoch_back(patcher: Patcher) -> None:
    """A cancel drops the event that no key is found any more, and it is never sent again."""

    def silenced(_: Any, state: Any, __: Any) -> Any:
        commands = [each for each in state.batch.commands if not isinstance(each, EvictAll)]
        return replace(state, batch=replace(state.batch, commands=pvector(commands)))

    after(patcher, "cancel", silenced)
