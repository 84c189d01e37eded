# SPDX-License-Identifier: Apache-2.0
"""Seeded bugs of the host tier, of stores and loads, and of reset."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace
from pyrsistent import pvector

from kvcore.check.mutants.seeding import Patcher, emitting, mutant, without
from kvcore.check.mutants.worlds import (
    FLYING_LOADS,
    LOADED_PAIRS,
    LOADS_LEFT,
    SWAP_CHAIN,
    SWAP_PAIRS,
)
from kvcore.check.properties import checker
from kvcore.pool.block_pool import PoolTransaction
from kvcore.state.state import NO_HOST_BLOCK, RequestState
from kvcore.state.transaction import Transaction, transition
from kvcore.transitions import TRANSITIONS, allocate, free, swap, transfers
from kvcore.transitions.publish import publish_blocks
from kvcore.types import commands
from kvcore.types.commands import Command, SwapIn, SwapOut
from kvcore.types.config import Config


@mutant("host", "KV-READ")
def m_swap_out_no_copy(patcher: Patcher) -> None:
    """A block goes to the host tier without its content."""
    without(patcher, SwapOut)


@mutant("host", "KV-READ")
def m_swap_in_no_copy(patcher: Patcher) -> None:
    """A block comes back from the host tier without its content."""
    without(patcher, SwapIn)


@mutant("three", "KV-READ", rows=(81,))
def m_swap_in_hits_unwritten(patcher: Patcher) -> None:
    """A request that comes back hits blocks that the open batch has yet to write."""

    @patcher.around(swap, "find_hits")
    def find_all(find: Any, tx: Transaction, found: list[RequestState]) -> Any:
        scheduled, tx.scheduled = tx.scheduled, pvector([None] * len(tx.scheduled))
        hits = find(tx, found)
        tx.scheduled = scheduled
        return hits


@mutant("calls", "RESET", rows=(54,))
def m_reset_in_use(patcher: Patcher) -> None:
    """A reset forgets the keys while blocks are used."""
    reset_if(patcher, lambda _: True)


def reset_if(patcher: Patcher, unused: Callable[[PoolTransaction], bool]) -> None:
    """Allow a reset by a condition on the device's pool alone."""

    def reset(before: Any) -> Any:
        def change(tx: Transaction) -> bool:
            if not unused(tx.device):
                return False
            tx.device.clear_index()
            return True

        return transition(before, change)

    patcher.replace(TRANSITIONS, "reset_prefix_cache", reset)


@mutant("loads", "OPERATIONS", rows=(57,))
def m_operation_holds_no_block(patcher: Patcher) -> None:
    """A block can be reused while it is still stored or loaded."""
    patcher.replace(PoolTransaction, "pin", lambda *_: None)


@mutant("loads", "COMPUTED-RULE", rows=(84,))
def m_failed_operation_counts(patcher: Patcher) -> None:
    """A load that failed counts as done."""

    @patcher.around(transfers, "finish_load")
    def finish_done(finish: Any, *args: Any) -> None:
        finish(*args[:-1], True)


@mutant("loads", "CACHE-KV", rows=(74,), shows=LOADED_PAIRS)
def m_loaded_block_keeps_its_old_key(patcher: Patcher) -> None:
    """A block that is taken for a load keeps the key of what it held before."""
    patcher.during(TRANSITIONS, "load", PoolTransaction, "unpublish", lambda *_: None)


@mutant("loads", "CACHE-KV", rows=(75,))
def m_load_is_findable_when_it_starts(patcher: Patcher) -> None:
    """Blocks of a load are found, and stored elsewhere, before the load has filled them."""

    @patcher.around(transfers, "start_loads")
    def start_found(start: Any, tx: Transaction, request: RequestState, first: int) -> Any:
        started = start(tx, request, first)
        publish_blocks(tx, request, request.num_accepted)
        return started


@mutant("loads", "OPERATIONS", rows=(85,), shows=LOADED_PAIRS)
def m_load_brings_what_another_request_has(patcher: Patcher) -> None:
    """A load uses the key that the first request has at that position, whichever request loads."""
    own = RequestState.key

    @patcher.around(transfers, "start_loads")
    def start_other(start: Any, tx: Transaction, *args: Any) -> Any:
        def key(_: RequestState, config: Config, group_id: int, position: int) -> bytes:
            known = (tx.requests[name] for name in tx.rows if name is not None)
            others = (each for each in known if each.num_hashed(config, group_id) > position)
            return own(next(others), config, group_id, position)

        with Patcher() as inner:
            inner.replace(RequestState, "key", key)
            return start(tx, *args)


@mutant("loads", "REF", "LEAK", rows=(86,))
def m_finished_operation_keeps_its_block(patcher: Patcher) -> None:
    """A store or load that has ended still counts as an owner of its block."""
    patcher.during(PoolTransaction, "unpin", PoolTransaction, "release", lambda *_: None)


@mutant("loads", "PINS", rows=(86,), costs="what looks for leaks lets all pins go before")
def m_finished_operation_stays_pinned(patcher: Patcher) -> None:
    """A store or load that has ended holds its block forever."""
    patcher.during(transfers, "transition", PoolTransaction, "unpin", lambda *_: None)


@mutant("loads", "REF", rows=(86,))
def m_finished_operation_releases_twice(patcher: Patcher) -> None:
    """A store or load that ends takes two owners from its block."""

    @patcher.around(PoolTransaction, "unpin")
    def unpin_twice(unpin: Any, self: PoolTransaction, block: int) -> None:
        unpin(self, block)
        self.release([block])


@mutant("host", "REF", rows=(31,))
def m_tier_read_after_the_move(patcher: Patcher) -> None:
    """Host blocks are given back to the device's queue, by their own ids."""

    def release_to_device(tx: Transaction, request: RequestState) -> None:
        for table in request.host_tables:
            tx.device.release([block for block in table[::-1] if block != NO_HOST_BLOCK])
        tx.put(replace(request, host_tables=(), num_computed=0))

    patcher.replace(swap, "release_host", release_to_device)


@mutant("flight-loads", "CACHE-KV", rows=(36,), shows=FLYING_LOADS)
def m_removed_request_publishes_late(patcher: Patcher) -> None:
    """A request that leaves publishes what its unfinished loads have yet to bring."""

    @patcher.around(free, "abandon_loads")
    def abandon_published(abandon: Any, tx: Transaction, request: RequestState) -> Any:
        left, table = abandon(tx, request), request.tables[0]
        for position in range(min(len(table), request.num_hashed(tx.config, 0))):
            if request.num_loading and tx.device.keys[table[position]] is None:
                tx.device.publish(table[position], request.key(tx.config, 0, position))
        return left


@mutant("host", "RESET", rows=(54,))
def m_reset_checks_one_tier(patcher: Patcher) -> None:
    """A reset checks only the device for blocks in use."""
    reset_if(patcher, lambda device: device.num_free == device.num_usable)


@mutant("three", "KV-READ", rows=(63,))
def m_swaps_in_run_first(patcher: Patcher) -> None:
    """A batch's copies to the device run before its copies to the host."""
    in_order(patcher, SwapIn)


@mutant("three", "KV-READ", rows=(59,))
def m_swaps_out_run_first(patcher: Patcher) -> None:
    """A batch's copies to the host run before its copies to the device, into what those read."""
    in_order(patcher, SwapOut)


def in_order(patcher: Patcher, kind: type[Command], *, last: bool = False) -> None:
    """Move the commands of one kind to the front of a batch, or to its end."""

    @patcher.around(Transaction, "freeze")
    def freeze_sorted(freeze: Any, self: Transaction) -> Any:
        frozen = freeze(self)
        commands = sorted(frozen.batch.commands, key=lambda each: isinstance(each, kind) is last)
        return replace(frozen, batch=replace(frozen.batch, commands=pvector(commands)))


@mutant("host", "KV-READ", rows=(60,))
def m_id_taken_for_an_index(patcher: Patcher) -> None:
    """A device block's id is taken for the host block that holds its content."""

    def by_id(command: Command) -> Command:
        return SwapIn(command.block, command.block) if isinstance(command, SwapIn) else command

    emitting(patcher, by_id)


@mutant("flight-loads", "OPERATIONS", rows=(65, 76), shows=LOADS_LEFT)
def m_preempted_still_waits_for_loads(patcher: Patcher) -> None:
    """A preempted request still waits for its unfinished loads, and they still belong to it."""
    patcher.replace(free, "abandon_loads", lambda _, request: request)


@mutant("three", "CMD-COW-SRC", "KV-READ", rows=(63,))
def m_swaps_out_run_last(patcher: Patcher) -> None:
    """A batch's copies to the host run last, after their sources were handed out again."""
    in_order(patcher, SwapOut, last=True)


@mutant("three", "CMD-HAZARD", "CMD-ORDER", rows=(58,), shows=SWAP_PAIRS)
def m_transfers_in_one_segment(patcher: Patcher) -> None:
    """A batch orders no two transfers, although one must wait for the other."""
    for module in (commands, checker):
        patcher.replace(module, "segments", lambda batch: [0] * len(batch))


@mutant("three", "CMD-COPYSET", "CMD-ORDER", rows=(62,), shows=SWAP_CHAIN)
def m_copies_of_a_chain_run_at_once(patcher: Patcher) -> None:
    """A copy into a block that another copy of the same segment reads does not wait for it."""

    def segments(batch: Any) -> list[int]:
        numbers: list[int] = []
        written: set[Any] = set()
        for command in batch:
            new = command.reads() in written or command.writes() in written
            numbers.append((numbers[-1] if numbers else 0) + new)
            written = set() if new else written
            written |= {command.writes()} - {None}
        return numbers

    for module in (commands, checker):
        patcher.replace(module, "segments", segments)


@mutant("host", costs="no command zeroes what is named: an engine does", trace="new_blocks")
def m_names_what_is_filled(patcher: Patcher) -> None:
    """A block is listed as new, and so zeroed by its engine, although a command filled it."""
    for module in (allocate, transfers, swap):
        patcher.replace(module, "forget_new", lambda *_: None)
