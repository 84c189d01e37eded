# SPDX-License-Identifier: Apache-2.0
"""The offline bound against MIN block by block, and against every choice there is."""

from __future__ import annotations

from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.replay.bounds.ideal import Ideal
from kvcore.replay.bounds.optimum import LookUps
from kvcore.replay.workload import TraceRequest
from tests.helpers.amount import examples
from tests.replay.small_traces import traces

Reference = tuple[tuple[int, ...], bool]
"""A block, as the ids up to its end and its place, and whether finding it counts."""

MOST = 14
"""References whose every choice is tried; the time doubles with each."""
FLAGS = st.lists(st.booleans(), min_size=12, max_size=12)


def block_references(
    requests: list[TraceRequest], counts: list[bool], block_size: int
) -> list[Reference]:
    """Return all block look-ups, one after the other, with no notion of items."""
    found = []
    for request, counted in zip(requests, counts, strict=False):
        for end in range(block_size, request.prompt_len + 1, block_size):
            ids = tuple(request.hash_ids[: -(-end // request.unit)])
            found.append(((*ids, -end), counted and end < request.prompt_len))
    return found


def look_ups(requests: list[TraceRequest], counts: list[bool], block_size: int) -> LookUps:
    """Return all block look-ups, as a run notes them."""
    noted = LookUps(block_size)
    for each, counted in zip(requests, counts, strict=False):
        noted.add(each.hash_ids, each.prompt_len, each.unit, counts=counted)
    return noted


def best_by_all_choices(references: list[Reference], num_blocks: int) -> int:
    """Return the most hits, over all ways to keep blocks."""

    @cache
    def best(place: int, cached: frozenset[tuple[int, ...]]) -> int:
        if place == len(references):
            return 0
        block, counted = references[place]
        hit = int(block in cached and counted)
        wider = cached | {block}
        if len(wider) <= num_blocks:
            return hit + best(place + 1, wider)
        return hit + max(best(place + 1, wider - {each}) for each in wider)

    return best(0, frozenset())


def best_block_by_block(references: list[Reference], num_blocks: int) -> int:
    """Play MIN with bypass: the block whose next counted use is farthest or missing leaves."""
    cached: set[tuple[int, ...]] = set()
    num_hits = 0

    def next_use(block: tuple[int, ...], place: int) -> int:
        for later in range(place + 1, len(references)):
            if references[later][0] == block:
                return later if references[later][1] else len(references)
        return len(references)

    for place, (block, counted) in enumerate(references):
        num_hits += int(block in cached and counted)
        cached.add(block)
        if len(cached) > num_blocks:
            cached.remove(max(cached, key=lambda each: next_use(each, place)))
    return num_hits


@settings(max_examples=examples(30))
@given(traces(most=5, longest=12), FLAGS, st.sampled_from([1, 2, 3, 4]), st.integers(1, 5))
def test_it_is_the_best_of_all_choices(
    requests: list[TraceRequest], counts: list[bool], block_size: int, num_blocks: int
) -> None:
    references = block_references(requests, counts, block_size)[:MOST]
    while len(block_references(requests, counts, block_size)) > len(references):
        requests = requests[:-1]
        references = block_references(requests, counts, block_size)
    best = best_by_all_choices(references, num_blocks)
    assert best_block_by_block(references, num_blocks) == best
    noted = look_ups(requests, counts, block_size)
    assert noted.best_hit_tokens(num_blocks) == best * block_size


@settings(max_examples=examples(40))
@given(traces(longest=60), FLAGS, st.sampled_from([1, 2, 3, 4, 5, 16]), st.integers(1, 40))
def test_items_give_what_single_blocks_give(
    requests: list[TraceRequest], counts: list[bool], block_size: int, num_blocks: int
) -> None:
    best = best_block_by_block(block_references(requests, counts, block_size), num_blocks)
    noted = look_ups(requests, counts, block_size)
    assert noted.best_hit_tokens(num_blocks) == best * block_size


@given(traces(), st.sampled_from([1, 3, 4]))
def test_without_limit_it_is_the_ideal(requests: list[TraceRequest], block_size: int) -> None:
    ideal, counts = Ideal(block_size), [True] * len(requests)
    for each in requests:
        ideal.look_up(each.hash_ids, each.prompt_len, each.unit)
    noted = look_ups(requests, counts, block_size)
    assert noted.best_hit_tokens(10**6) == ideal.hit_tokens


def test_a_scan_does_not_push_out_what_comes_again() -> None:
    """LRU would find nothing: three prompts of 4 blocks in turn, in 5 blocks."""
    noted = LookUps(1)
    for _ in range(2):
        for each in (1, 2, 3):
            noted.add([each], 5, 5)
    assert noted.best_hit_tokens(5) == 5
    assert noted.best_hit_tokens(4) == 4
    assert noted.best_hit_tokens(1) == 1
