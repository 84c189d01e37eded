# SPDX-License-Identifier: Apache-2.0
"""Every property finds the bugs that it is there for; bugs that only cost hits are told apart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvcore import allocate, caching, trace
from kvcore.block_pool import PoolDraft
from kvcore.check.actions import World
from kvcore.check.search import EDGE_PROPERTIES, Broken, Explorer
from kvcore.errors import TraceError
from kvcore.free_queue import FreeQueueDraft
from kvcore.invariants import PROPERTIES
from kvcore.state import Draft, RequestState
from tests.explore.all_mutants import MUTANTS
from tests.explore.group_mutants import ALONE
from tests.explore.mutants import BASIC
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


def m_num_cached_counts_null(patcher: pytest.MonkeyPatch) -> None:
    """Row 14: behind a null block everything counts as cached, so nothing is hashed."""
    publish = caching.publish_blocks

    def publish_before_nulls(draft: Draft, request: RequestState, num_tokens: int) -> None:
        if not any(draft.is_null(table[0]) for table in request.tables if table):
            publish(draft, request, num_tokens)

    patcher.setattr(allocate, "publish_blocks", publish_before_nulls)


@pytest.mark.parametrize(
    ("patch", "where", "story"),
    [
        (m_free_head_first, BASIC, "evict_tail_first"),
        (m_freed_block_leaves_first, BASIC, "queue_order"),
        (m_num_cached_counts_null, ALONE, "chunked_local"),
    ],
)
def test_bug_that_only_costs_hits_is_harmless_but_fails_its_trace(
    patch: Callable[[pytest.MonkeyPatch], None],
    where: World,
    story: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    patch(monkeypatch)
    Explorer(where).run()
    with pytest.raises(TraceError):
        trace.replay(trace.read_trace(TRACES / f"{story}.trace"), "python")
