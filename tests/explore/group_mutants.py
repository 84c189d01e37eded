# SPDX-License-Identifier: Apache-2.0
"""Seeded bugs on windows, the null block, several groups, encoders and admission.

Rules: as in mutants.py. Numbers are rows of the bug catalogue.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import attrs
import pytest

from kvcore import Group, allocate, hits, plan, window
from kvcore.block_pool import PoolDraft
from kvcore.commands import Command, SetTable, Zero
from kvcore.config import Config
from kvcore.effects import Effects
from kvcore.groups import skipped_blocks
from kvcore.state import Draft, RequestState
from tests.explore.seeding import mutant, without
from tests.explore.worlds import world

SLOT = Group(1)
WINDOW = Group(1, kind="sliding_window", window=2)
ALONE = world(3, 1, 4, "remove_skipped_blocks", groups=(WINDOW,))
CAPPED = world(4, 1, 5, groups=(WINDOW,), max_num_batched_tokens=1, num_letters=1)
FORKS = world(3, 2, 3, groups=(WINDOW,), num_letters=1)
BOTH = world(4, 2, 3, groups=(SLOT, WINDOW), enable_events=True)
WIDE = world(5, 2, 3, groups=(SLOT, WINDOW))
TWINS = world(4, 2, 3, groups=(SLOT, SLOT))
SIZES = world(4, 1, 3, groups=(Group(2), SLOT))
EAGLE = world(3, 1, 4, use_eagle=True, groups=(SLOT,))
ENCODER = world(
    *(4, 2, 2, "truncate"),
    groups=(SLOT, Group(2, kind="cross_attention")),
    num_encoder=3,
    enable_caching=False,
)
ZEROED = world(2, 1, 3, groups=(Group(2, zero_new_blocks=True),))
WATERMARK = world(2, 2, 3, watermark_blocks=1)
LOADS = world(3, 2, 3, groups=(WINDOW,), num_external=1)


@mutant(ALONE, "NULL")
def m_free_null(patcher: pytest.MonkeyPatch) -> None:
    """Row 47: the null block goes through the free path."""
    patcher.setattr(Draft, "is_null", lambda *_: False)


@mutant(ALONE, "TABLE-MIRROR")
def m_no_table_delta(patcher: pytest.MonkeyPatch) -> None:
    """Row 49: window blocks are given back, the worker's table keeps them."""
    emit = Effects.emit

    def emit_others(self: Effects, command: Command) -> None:
        if not isinstance(command, SetTable) or command.block:
            emit(self, command)

    patcher.setattr(Effects, "emit", emit_others)


@mutant(ALONE, "REF")
def m_stale_window_map(patcher: pytest.MonkeyPatch) -> None:
    """Row 51: a block behind the window is given back and stays in the table."""
    trim = window.apply_trims

    def trim_unmapped(draft: Draft, request: RequestState, trims: Any) -> RequestState:
        trim(draft, request, trims)
        return request

    patcher.setattr(allocate, "apply_trims", trim_unmapped)


@mutant(ALONE, "GROUP-AGREE", "NULL-PREFIX", "KV-READ")
def m_window_one_block_short(patcher: pytest.MonkeyPatch) -> None:
    patcher.setattr(window, "skipped_blocks", lambda *args: skipped_blocks(*args) + 1)


@mutant(ALONE, "NULL-PREFIX")
def m_trim_from_the_front(patcher: pytest.MonkeyPatch) -> None:
    """Only the last skipped block is given back: nulls are no prefix."""
    plan_trims = window.plan_trims

    def plan_last(*args: Any) -> Any:
        return tuple(attrs.evolve(trim, first=trim.end - 1) for trim in plan_trims(*args))

    patcher.setattr(plan, "plan_trims", plan_last)


@mutant(CAPPED, "CAP")
def m_window_never_trimmed(patcher: pytest.MonkeyPatch) -> None:
    patcher.setattr(plan, "plan_trims", lambda *_: ())


@mutant(LOADS, "ATOMIC-FAIL", "NULL-PREFIX")
def m_refusal_trims_for_tokens_that_never_came(patcher: pytest.MonkeyPatch) -> None:
    """Found by exploring: a refused load left the window of the tokens behind it."""
    trimmed: dict[str, Any] = {}

    def plan_as_first(draft: Draft, request: RequestState, seen_from: int) -> Any:
        if trimmed.get("draft") is not draft:
            trims = window.plan_trims(draft, request, seen_from)
            trimmed.update(draft=draft, trims=trims)
        return trimmed["trims"]

    patcher.setattr(plan, "plan_trims", plan_as_first)


@mutant(TWINS, "NO-ALIAS")
def m_per_group_alloc(patcher: pytest.MonkeyPatch) -> None:
    """Row 19: the first group's allocation evicts hits of the second."""
    commit, attach, take = allocate.commit, allocate.attach_hits, PoolDraft.take

    def commit_by_group(*args: Any) -> Any:
        late: list[int] = []

        def attach_later(draft: Draft, request: Any, group: int, found: tuple[int, ...]) -> Any:
            with pytest.MonkeyPatch.context() as inner:
                if group:
                    inner.setattr(PoolDraft, "touch", lambda _, block: late.append(block))
                return attach(draft, request, group, found)

        def take_first(self: PoolDraft, count: int) -> list[int]:
            blocks = take(self, count)
            for block in late:
                self.touch(block)
            return blocks

        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(allocate, "attach_hits", attach_later)
            inner.setattr(PoolDraft, "take", take_first)
            return commit(*args)

    patcher.setattr(allocate, "commit", commit_by_group)


@mutant(BOTH, "HIT-LONGEST")
def m_group_hit_mismatch(patcher: pytest.MonkeyPatch) -> None:
    """Row 46: one group reports fewer blocks than the other."""
    found = hits.hit_blocks

    def found_less(*args: Any) -> Any:
        first, second = found(*args)
        return first, second[:-1]

    patcher.setattr(hits, "hit_blocks", found_less)


@mutant(WIDE, "NOCRASH")
def m_one_group_decides(patcher: pytest.MonkeyPatch) -> None:
    """The windowed group's misses do not shorten the hit of all."""
    length = hits.group_length

    def length_of_full(state: Any, request: Any, group: int, longest: int, most: int) -> int:
        if state.config.groups[group].is_windowed:
            return longest
        return length(state, request, group, longest, most)

    patcher.setattr(hits, "group_length", length_of_full)


@mutant(BOTH, "HIT-LONGEST")
def m_lookup_misses(patcher: pytest.MonkeyPatch) -> None:
    patcher.setattr(hits, "common_length", lambda *_: 0)


@mutant(EAGLE, "HIT-LONGEST")
def m_eagle_keeps_its_last_hit(patcher: pytest.MonkeyPatch) -> None:
    patcher.setattr(Config, "drops_last_hit", keeps_in_search(Config.drops_last_hit))


def keeps_in_search(drops: Any) -> Any:
    """Whether a group drops its last hit, for all but the search for hits."""

    def drops_elsewhere(config: Config, group: int) -> bool:
        asker = sys._getframe(1).f_globals["__name__"]
        return asker != "kvcore.hits" and bool(drops(config, group))

    return drops_elsewhere


@mutant(SIZES, "KEY-GRAN")
def m_hash_granularity(patcher: pytest.MonkeyPatch) -> None:
    """Row 13: the coarse group takes hashes at the fine group's positions."""
    patcher.setattr(Config, "scale", lambda *_: 1)


@mutant(ENCODER, "CROSS")
def m_encoder_blocks_stay(patcher: pytest.MonkeyPatch) -> None:
    kept = Draft.num_kept

    def keep_encoder(self: Draft, group: int, table: Any, num_tokens: int) -> int:
        if self.config.groups[group].is_cross:
            return len(table)
        return kept(self, group, table, num_tokens)

    patcher.setattr(Draft, "num_kept", keep_encoder)


@mutant(ENCODER, "KV-READ")
def m_encoder_blocks_cut_with_tokens(patcher: pytest.MonkeyPatch) -> None:
    def keep_few(self: Draft, group: int, table: Sequence[int], num_tokens: int) -> int:
        return min(len(table), -(-num_tokens // self.config.groups[group].block_size))

    patcher.setattr(Draft, "num_kept", keep_few)


@mutant(ZEROED, "ZEROED")
def m_no_zero_on_reuse(patcher: pytest.MonkeyPatch) -> None:
    """Row 50: unwritten slots of a reused block read back as what was there."""
    without(patcher, Zero)


@mutant(WATERMARK, "ADMIT-EXACT")
def m_watermark_ignored(patcher: pytest.MonkeyPatch) -> None:
    refuse = plan.refuse

    def refuse_unreserved(draft: Draft, needed: int, available: int, most: int, _: int) -> Any:
        return refuse(draft, needed, available, most, 0)

    patcher.setattr(plan, "refuse", refuse_unreserved)


@mutant(FORKS, "REF")
def m_fork_counts_occurrences(patcher: pytest.MonkeyPatch) -> None:
    """Row 24: a fork counts another number of holdings than free does."""
    touch = PoolDraft.touch

    def touch_twice(self: PoolDraft, block: int) -> None:
        touch(self, block)
        if self.ref_counts[block] > 1:
            self.ref_counts[block] += 1

    patcher.setattr(PoolDraft, "touch", touch_twice)
