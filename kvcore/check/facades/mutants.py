# SPDX-License-Identifier: Apache-2.0
"""Bugs of the older managers, seeded into the facades and the pool behind them.

As kvcore/check/mutants/seeding.py has it: a patch, the world in which it shows, the property that
finds it, the rows of the catalogue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import attrs

from kvcore.check.facades.model import FacadeModel
from kvcore.check.facades.profiles import FACADES, make_engine
from kvcore.check.mutants.seeding import Patch, Patcher
from kvcore.check.search.report import Report
from kvcore.check.search.search import check
from kvcore.legacy.blocks.blocks import Backing
from kvcore.legacy.v0.block_allocator import BlockAllocator as CachingAllocator
from kvcore.legacy.v0.block_manager import SelfAttnBlockSpaceManager as CachingManager
from kvcore.legacy.v0.block_table import BlockTable as CachingTable
from kvcore.legacy.v0.prefix_caching_allocator import PrefixCachingBlockAllocator
from kvcore.legacy.v0_3.block_allocator import BlockAllocator, BlockTable
from kvcore.legacy.v0_3.block_space_manager import BlockSpaceManager as SpaceManager
from kvcore.pool.hash_index import HashIndexTransaction
from kvcore.pool.priority_eviction import PriorityPoolTransaction
from kvcore.types.commands import Batch, SwapOut, close

LONGEST_RUN = 8
"""Most calls of a run to a bug."""


@attrs.frozen
class FacadeMutant:
    """A seeded bug of a facade, the world in which it shows, and the property that finds it."""

    patch: Patch
    facade: str
    world: str
    broken: str
    rows: tuple[int, ...]

    def __str__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        """The name of its function."""
        return self.patch.__name__


MUTANTS: list[FacadeMutant] = []


def facade_mutant(
    facade: str, world: str, broken: str, *, rows: tuple[int, ...] = ()
) -> Callable[[Patch], Patch]:
    """Add a patch to the mutants."""

    def add(patch: Patch) -> Patch:
        MUTANTS.append(FacadeMutant(patch, facade, world, broken, rows))
        return patch

    return add


def hunt(mutant: FacadeMutant, *, max_states: int = 3000) -> Report:
    """Explore the world of a seeded bug with it."""
    facade = FACADES[mutant.facade]
    make = partial(make_engine, facade.worlds[mutant.world])
    with Patcher() as patcher:
        mutant.patch(patcher)
        return check(FacadeModel(make, facade.known), max_states=max_states)


@facade_mutant("v0.3", "window", "REF", rows=(22,))
def m_ring_given_back_twice(patcher: Patcher) -> None:
    """A ring's blocks are given back once for each place that names them."""
    patcher.replace(BlockTable, "distinct", lambda self: list(self.numbers))


@facade_mutant("v0.3", "window", "REF", rows=(24,))
def m_fork_counts_occurrences(patcher: Patcher) -> None:
    """A fork owns a ring's block once for each place that names it, and gives it back once."""

    def fork(self: Any, parent_seq: Any, child_seq: Any) -> None:
        table = self.block_tables[parent_seq.seq_id]
        table.allocator.hold(table.numbers)
        self.block_tables[child_seq.seq_id] = table.copy()

    patcher.replace(SpaceManager, "fork", fork)


@facade_mutant("v0.3", "prefix", "ATOMIC-FAIL")
def m_prompt_stops_half_way(patcher: Patcher) -> None:
    """A prompt's blocks are taken one by one, and those taken stay if there is no next one."""

    @patcher.around(BlockAllocator, "take")
    def one_by_one(take: Any, self: BlockAllocator, count: int, *of: object) -> tuple[int, ...]:
        return tuple(take(self, 1, *of)[0] for _ in range(count))


@facade_mutant("v0.3", "watermark", "ADMIT-NEVER", rows=(66,))
def m_never_is_later(patcher: Patcher) -> None:
    """A group that can never fit is told to wait."""
    patcher.replace(SpaceManager, "can_allocate", later_for_never(SpaceManager.can_allocate))


@facade_mutant("v0.3", "plain", "REF", rows=(41,))
def m_fork_owns_nothing(patcher: Patcher) -> None:
    """A fork gets its parent's table and no part in its blocks."""

    def fork(self: Any, parent_seq: Any, child_seq: Any) -> None:
        self.block_tables[child_seq.seq_id] = self.block_tables[parent_seq.seq_id].copy()

    patcher.replace(SpaceManager, "fork", fork)


@facade_mutant("v0.3", "swap", "KV-READ", rows=(63,))
def m_swaps_out_last(patcher: Patcher) -> None:
    """In one step blocks are swapped in, before what leaves the same blocks is swapped out."""
    swap_out_last(patcher)


@facade_mutant("v0", "exchange", "KV-READ", rows=(63,))
def m_swaps_out_late(patcher: Patcher) -> None:
    """V0 swaps in before it swaps out: a block is copied out after its new content has come."""
    swap_out_last(patcher)


@facade_mutant("v0", "watermark", "ADMIT-NEVER", rows=(66,))
def m_never_waits(patcher: Patcher) -> None:
    """A group whose prompt can never fit is told to wait."""
    patcher.replace(CachingManager, "can_allocate", later_for_never(CachingManager.can_allocate))


@facade_mutant("v0", "lookahead", "ATOMIC-FAIL")
def m_append_stops_half_way(patcher: Patcher) -> None:
    """Blocks for tokens and lookahead slots are taken one by one, as far as they go."""
    add = CachingTable._add

    def one_by_one(self: Any, num_blocks: int, extra_hash: int | None) -> None:
        for _ in range(num_blocks):
            add(self, 1, extra_hash)

    patcher.replace(CachingTable, "_check_room", lambda *_: None)
    patcher.replace(CachingTable, "_add", one_by_one)


@facade_mutant("v0", "caching", "IDX-SOUND", rows=(1,))
def m_evicted_block_stays_in_the_index(patcher: Patcher) -> None:
    """An evicted block is still found under its old key."""
    patcher.replace(HashIndexTransaction, "remove", lambda *_: False)


@facade_mutant("v0", "swap", "ADMIT-EXACT", rows=(17,))
def m_evictable_hits_cost_nothing(patcher: Patcher) -> None:
    """The count for a swap leaves out ownerless cached blocks, although these count as free."""

    def count_absent(self: Any, keys: list[bytes]) -> int:
        return sum(owners is None for owners in self.blocks.owners_of(keys))

    patcher.replace(PrefixCachingBlockAllocator, "count_idle", count_absent)


@facade_mutant("v0", "caching", "PRIORITY-ORDER")
def m_newest_leaves_first(patcher: Patcher) -> None:
    """Cached blocks leave in the wrong order: the one that was used last goes first."""

    def sort_key(self: PriorityPoolTransaction, block: int) -> tuple[float, int, int]:
        time, length = self.priorities.get(block, (-1.0, 0))
        return (-time, length, block)

    patcher.replace(PriorityPoolTransaction, "sort_key", sort_key)


@facade_mutant("v0", "naive", "KV-READ", rows=(41,))
def m_shared_block_written_in_place(patcher: Patcher) -> None:
    """A block that a fork shares is written without a copy."""
    patcher.replace(CachingAllocator, "own", lambda _, block_id: block_id)


@facade_mutant("v0", "window", "REF", rows=(22,))
def m_passed_block_given_back_twice(patcher: Patcher) -> None:
    """A block that the window passed is given back and stays in the table."""

    @patcher.around(CachingTable, "_drop_passed")
    def drop_and_keep(drop: Any, self: Any, *counts: Any) -> None:
        known, ids = self.blocks[:], self.physical_block_ids[:]
        drop(self, *counts)
        for block, block_id in zip(known, ids, strict=True):
            block.block_id = block_id
        self.blocks[:], self.physical_block_ids[:], self.num_null_blocks = known, ids, 0


def later_for_never(can_allocate: Callable[..., Any]) -> Callable[..., Any]:
    """Answer as the original does, with LATER in the place of NEVER."""

    def changed(self: Any, *args: Any) -> Any:
        status = can_allocate(self, *args)
        return type(status).LATER if status.name == "NEVER" else status

    return changed


def swap_out_last(patcher: Patcher) -> None:
    """Reorder each batch."""

    @patcher.around(Backing, "take_batch")
    def reordered(take_batch: Any, self: Backing) -> Batch:
        batch = take_batch(self)
        return close(batch.number, sorted(batch, key=lambda each: isinstance(each, SwapOut)))


def report_text(mutant: FacadeMutant, report: Report) -> tuple[str, bool]:
    """Describe a hunt in a line; return it, and whether the property kills the bug quickly."""
    found = report.violation
    rows = ", ".join(map(str, mutant.rows))
    head = f"{mutant}" + (f" (row {rows})" if rows else "")
    if found is None:
        return f"{head} lives: {report.verdict}", False
    killed = found.name == mutant.broken and len(found.calls) <= LONGEST_RUN
    said = f"{found.name}, {len(found.calls)} calls, {report.num_states} states"
    return f"{head}: {said} in {mutant.facade} {mutant.world}", killed


def run_mutants(names: Iterable[str] = tuple(FACADES)) -> Iterator[tuple[str, bool]]:
    """Hunt the seeded bugs of these facades."""
    chosen = set(names)
    for mutant in MUTANTS:
        if mutant.facade in chosen:
            yield report_text(mutant, hunt(mutant))


__all__ = ["MUTANTS", "FacadeMutant", "hunt", "report_text", "run_mutants"]
