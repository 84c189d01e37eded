# SPDX-License-Identifier: Apache-2.0
"""Every property finds the bugs that it is there for; bugs that only cost hits are told apart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcore import queries, trace
from kvcore.block_pool import PoolDraft
from kvcore.errors import TraceError
from kvcore.explore import EDGE_PROPERTIES, Broken, Explorer
from kvcore.free_queue import FreeQueueDraft
from kvcore.invariants import PROPERTIES
from tests.explore.mutants import BASIC, MUTANTS
from tests.explore.seeding import Mutant

TRACES = Path(__file__).parents[1] / "traces"
LONGEST_STORY = 8


@pytest.mark.parametrize(
    ("mutant", "name"),
    [(mutant, name) for mutant in MUTANTS for name in mutant.broken],
    ids=str,
)
def test_seeded_bug_is_found_by_its_property_alone(
    mutant: Mutant, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant.patch(monkeypatch)
    with pytest.raises(Broken) as caught:
        Explorer(mutant.world, judges=frozenset({name})).run()
    assert caught.value.name == name
    assert len(caught.value.story) <= LONGEST_STORY


def test_every_property_has_a_seeded_bug_that_breaks_it() -> None:
    assert {name for mutant in MUTANTS for name in mutant.broken} == {*PROPERTIES, *EDGE_PROPERTIES}


def m_free_head_first(patcher: pytest.MonkeyPatch) -> None:
    release = PoolDraft.release
    patcher.setattr(PoolDraft, "release", lambda self, blocks: release(self, blocks[::-1]))


def m_freed_block_leaves_first(patcher: pytest.MonkeyPatch) -> None:
    patcher.setattr(FreeQueueDraft, "append", FreeQueueDraft.prepend)


def m_lookup_misses(patcher: pytest.MonkeyPatch) -> None:
    find = queries.get_computed_blocks

    def find_none(state: Any, request_id: str) -> Any:
        hit = find(state, request_id)
        return type(hit)(type(hit.blocks)(tuple(() for _ in hit.blocks.blocks)), 0)

    patcher.setattr(queries, "get_computed_blocks", find_none)


@pytest.mark.parametrize(
    ("patch", "story"),
    [
        (m_free_head_first, "evict_tail_first"),
        (m_freed_block_leaves_first, "queue_order"),
        (m_lookup_misses, "full_hit"),
    ],
)
def test_bug_that_only_costs_hits_is_harmless_but_fails_its_trace(
    patch: Callable[[pytest.MonkeyPatch], None], story: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch(monkeypatch)
    Explorer(BASIC).run()
    with pytest.raises(TraceError):
        trace.replay(trace.read_trace(TRACES / f"{story}.trace"), "python")
