# SPDX-License-Identifier: Apache-2.0
"""Seeded bugs of windows, the null block, several groups, tables and encoders."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import attrs
from msgspec.structs import replace

from kvcore.check.mutants.owners import touch_after_taking
from kvcore.check.mutants.seeding import Patcher, emitting, mutant, without
from kvcore.check.mutants.worlds import ALONE
from kvcore.pool.block_pool import PoolTransaction
from kvcore.state import state
from kvcore.state.state import RequestState, Table
from kvcore.state.table_edit import TableEdit
from kvcore.state.transaction import Transaction
from kvcore.transitions import allocate, append, plan, prefix_lookup, publish, window
from kvcore.types.commands import Command, CutTable, SetTable, Zero
from kvcore.types.config import Config
from kvcore.types.groups import Group, skipped_blocks


@mutant("groups", "NULL", rows=(48,))
def m_null_block_handed_out(patcher: Patcher) -> None:
    """Nothing keeps the null block out of the free queue, so a request gets it."""

    @patcher.around(state, "make_pool")
    def with_null(make_pool: Any, num_blocks: int, **options: Any) -> Any:
        return make_pool(num_blocks, **options, order=range(num_blocks))


@mutant("calls", "TABLEN", "TABLE-MIRROR")
def m_table_misses_a_block(patcher: Patcher) -> None:
    """The last new block does not reach the table."""

    @patcher.around(TableEdit, "extend")
    def extend_less(extend: Any, self: TableEdit, group_id: int, *args: Any, **fresh: Any) -> None:
        before = len(self.tables[group_id])
        extend(self, group_id, *args, **fresh)
        table = self.tables[group_id]
        self.tables[group_id] = table[: max(before, len(table) - 1)]


@mutant("calls", "TABLE-MIRROR", costs="entries stay that no query reads")
def m_cut_table_not_reported(patcher: Patcher) -> None:
    """The worker is not told that a table became shorter."""
    without(patcher, CutTable)


@mutant("groups", "NULL", rows=(47,))
def m_free_null(patcher: Patcher) -> None:
    """The null block goes through the free path."""
    patcher.replace(Transaction, "is_null", lambda *_: False)


@mutant("groups", "TABLE-MIRROR", rows=(49,), shows=ALONE)
def m_no_table_delta(patcher: Patcher) -> None:
    """Window blocks are given back, the worker's table keeps them."""

    def not_null(command: Command) -> Command | None:
        return None if isinstance(command, SetTable) and not command.block else command

    emitting(patcher, not_null)


@mutant("groups", "REF", rows=(51,))
def m_stale_window_map(patcher: Patcher) -> None:
    """A block behind the window is given back and stays in the table."""

    @patcher.around(append, "apply_trims")
    @patcher.around(allocate, "apply_trims")
    def trim_unmapped(trim: Any, tx: Any, request: RequestState, trims: Any) -> RequestState:
        trim(tx, request, trims)
        return request


@mutant("groups", "GROUP-AGREE", "NULL-PREFIX", "KV-READ")
def m_window_one_block_short(patcher: Patcher) -> None:
    """The window gives back one block that the next query still sees."""
    patcher.replace(window, "skipped_blocks", lambda *args: skipped_blocks(*args) + 1)


@mutant("chunks", "KV-READ")
def m_chunk_ends_one_token_early(patcher: Patcher) -> None:
    """A chunk's blocks are given back while the query at its last token still sees them."""

    def skipped_early(group: Group, num_computed: int) -> int:
        return skipped_blocks(group, num_computed + (group.kind == "chunked_local"))

    patcher.replace(window, "skipped_blocks", skipped_early)


@mutant("window", "KV-READ")
def m_open_batch_loses_its_window(patcher: Patcher) -> None:
    """A call that gives back skipped blocks forgets which ones the open batch still reads."""
    patcher.replace(window, "visible_from", lambda _tx, _request, num_computed: num_computed)


@mutant("chunks", "NULL-PREFIX", costs="blocks behind the window are held longer")
def m_trim_from_the_front(patcher: Patcher) -> None:
    """Only the last skipped block is given back, so that null blocks are no prefix."""

    @patcher.around(plan, "plan_trims")
    def plan_last(plan_trims: Any, *args: Any) -> Any:
        return tuple(attrs.evolve(trim, first=trim.end - 1) for trim in plan_trims(*args))


@mutant("caps", "CAP", costs="blocks behind the window are held longer")
def m_window_never_trimmed(patcher: Patcher) -> None:
    """Nothing behind a window is given back."""
    patcher.replace(plan, "plan_trims", lambda *_: ())


@mutant("loads-fail-window", "ATOMIC-FAIL", "NULL-PREFIX")
def m_refusal_trims_for_tokens_that_never_came(patcher: Patcher) -> None:
    """A refused load leaves the window of the tokens that did not come."""
    trimmed: dict[str, Any] = {}

    def plan_as_first(tx: Transaction, request: RequestState, seen_from: int) -> Any:
        if trimmed.get("tx") is not tx:
            trims = window.plan_trims(tx, request, seen_from)
            trimmed.update(tx=tx, trims=trims)
        return trimmed["trims"]

    patcher.replace(plan, "plan_trims", plan_as_first)


@mutant("groups", "NO-ALIAS", "HIT-PINNED", rows=(19,))
def m_per_group_alloc(patcher: Patcher) -> None:
    """The first group's new blocks are taken before the hits of the second get their owner."""

    @patcher.around(allocate, "commit")
    def commit_by_group(commit: Any, *args: Any) -> Any:
        with Patcher() as outer:
            late = touch_after_taking(outer)

            @outer.around(TableEdit, "share")
            def share_later(share: Any, self: TableEdit, group_id: int, found: Table) -> None:
                with Patcher() as inner:
                    if group_id:
                        inner.replace(PoolTransaction, "touch", lambda _, block: late.append(block))
                    share(self, group_id, found)

            return commit(*args)


@mutant("sizes", "PUBLISHED", rows=(82,), costs="what would have been a hit is computed again")
def m_window_publishes_what_no_hit_needs(patcher: Patcher) -> None:
    """A windowed group publishes its blocks but for those that a hit would end with."""

    @patcher.around(publish, "_publish_block")
    def publish_inner(block: Any, tx: Transaction, request: Any, group_id: int, *rest: Any) -> bool:
        group, end = tx.config.groups[group_id], rest[0] + 1
        if group.is_windowed and end * group.block_size % tx.config.hit_alignment == 0:
            return False
        return bool(block(tx, request, group_id, *rest))


@mutant("groups", "HIT-LONGEST", rows=(46,))
def m_group_hit_mismatch(patcher: Patcher) -> None:
    """One group reports fewer hit blocks than the other."""

    @patcher.around(prefix_lookup, "hit_blocks")
    def found_less(found: Any, *args: Any) -> Any:
        first, second = found(*args)
        return first, second[:-1]


@mutant("groups", "NOCRASH")
def m_one_group_decides(patcher: Patcher) -> None:
    """The windowed group's misses do not shorten the hit of all."""

    @patcher.around(prefix_lookup, "group_length")
    def of_full(length: Any, state: Any, request: Any, group_id: int, *lengths: int) -> Any:
        if state.config.groups[group_id].is_windowed:
            return lengths[0]
        return length(state, request, group_id, *lengths)


@mutant("eagle", "HIT-LONGEST", costs="the draft model guesses worse")
def m_eagle_keeps_its_last_hit(patcher: Patcher) -> None:
    """A look-up keeps the hit block that a draft model has to compute."""
    patcher.replace(Config, "drops_last_hit", keeps_in_search(Config.drops_last_hit))


def keeps_in_search(drops: Any) -> Any:
    """Tell whether a group drops its last hit, except in the search for hits."""

    def drops_elsewhere(config: Config, group_id: int) -> bool:
        asker = sys._getframe(1).f_globals["__name__"]
        return asker != "kvcore.transitions.prefix_lookup" and bool(drops(config, group_id))

    return drops_elsewhere


@mutant("encoder", "CROSS")
def m_encoder_blocks_stay(patcher: Patcher) -> None:
    """The encoder's blocks stay with a request that computed nothing."""

    @patcher.around(Transaction, "num_kept")
    def keep_encoder(kept: Any, self: Transaction, group_id: int, table: Any, count: int) -> Any:
        if self.config.groups[group_id].is_cross:
            return len(table)
        return kept(self, group_id, table, count)


@mutant("encoder", "KV-READ")
def m_encoder_blocks_cut_with_tokens(patcher: Patcher) -> None:
    """The encoder's blocks are cut as if they held the request's tokens."""

    def keep_few(self: Transaction, group_id: int, table: Sequence[int], num_tokens: int) -> int:
        return min(len(table), -(-num_tokens // self.config.groups[group_id].block_size))

    patcher.replace(Transaction, "num_kept", keep_few)


@mutant("zeroing", "ZEROED", rows=(50,))
def m_no_zero_on_reuse(patcher: Patcher) -> None:
    """Unwritten slots of a reused block read back as what was there."""
    without(patcher, Zero)


@mutant("groups", "NOCRASH", rows=(55,))
def m_needs_fewer_than_it_holds(patcher: Patcher) -> None:
    """A windowed group counts the blocks that it needs without those behind the window, and the
    blocks that it holds with them.
    """

    @patcher.around(plan, "plan_growth")
    def grow_signed(grow: Any, tx: Transaction, request: RequestState, *rest: Any) -> Any:
        signed = []
        for group, each in zip(tx.config.groups, grow(tx, request, *rest), strict=True):
            skipped = skipped_blocks(group, rest[-1].seen_from)
            signed.append(replace(each, num_new=each.num_new - skipped))
        return tuple(signed)
