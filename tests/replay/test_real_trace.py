# SPDX-License-Identifier: Apache-2.0
"""The Mooncake conversation trace, if it is here: it is no part of this repository."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import pytest

from kvcore.replay.bounds.optimum import LookUps
from kvcore.replay.far.far_blocks import FarBlocks
from kvcore.replay.loop import replay
from kvcore.replay.request_trace import TraceReader
from kvcore.replay.results import Options, StorePolicy
from kvcore.replay.trace_facts import Counting
from kvcore.types.config import EvictionName
from tests.conftest import need_twin

TRACE = Path(__file__).parents[3] / "shared" / "traces" / "mooncake_conversation.jsonl"
pytestmark = pytest.mark.skipif(
    not TRACE.is_file(), reason="the trace mooncake_conversation.jsonl is not beside the project"
)


def test_an_unlimited_cache_finds_what_its_authors_say() -> None:
    """12,031 requests have 288,500 blocks of 512, of which 182,790 are distinct: 36.64 %."""
    reader = TraceReader(TRACE)
    counting = Counting(512)
    counting.read(reader)
    facts = counting.facts(reader.name, 0)
    assert reader.num_lines == 12_031
    assert (facts.num_ids, facts.num_ids - facts.repeated_ids) == (288_500, 182_790)
    assert round(100 * facts.repeated_ids / facts.num_ids, 2) == 36.64


def test_the_bound_is_near_what_another_simulator_found() -> None:
    """kvcache-simulator's offline optimum gives 0.320 in 3,276 blocks of 512, 0.398 in 13,107.

    It counts the second half of the requests. It has to keep what it meets, so it may find less.
    """
    requests = list(TraceReader(TRACE))
    half = len(requests) // 2
    noted = LookUps(512)
    for place, each in enumerate(requests):
        noted.add(each.hash_ids, each.prompt_len, each.unit, counts=place >= half)
    num_tokens = sum(each.prompt_len for each in requests[half:])
    assert 0.320 <= noted.best_hit_tokens(3_276) / num_tokens < 0.323
    assert round(noted.best_hit_tokens(13_107) / num_tokens, 3) == 0.398


@pytest.mark.parametrize("policy", ["lru", "uncached_first"])
def test_a_pool_finds_something_and_no_more_than_the_bounds(policy: EvictionName) -> None:
    need_twin()
    options = Options(num_blocks=16_384, num_requests=300, policy=policy)
    result = replay(TraceReader(TRACE), options, backend="rust")
    assert result.finished == 300
    assert result.optimum_hit_tokens is not None
    assert result.ideal_hit_tokens is not None
    assert 0 < result.hit_tokens <= result.optimum_hit_tokens <= result.ideal_hit_tokens


@pytest.mark.parametrize(
    ("policy", "hits", "written"), [("publication", 0.244, 198_000), ("second_use", 0.154, 44_200)]
)
def test_a_far_tier_below_a_simple_cache_brings_what_was_measured(
    policy: StorePolicy, hits: float, written: int
) -> None:
    """An LRU cache of 3,276 blocks of 512 stands above a tier of 26,214 blocks."""
    near: OrderedDict[bytes, None] = OrderedDict()
    far, num_far, num_requested = FarBlocks(26_214, policy), 0, 0
    for each in TraceReader(TRACE):
        keys = [id_.to_bytes(8, "little") for id_ in each.hash_ids]
        start = next((at for at, key in enumerate(keys) if key not in near), len(keys))
        num_far += far.count(keys, start, len(keys))
        num_requested += len(keys)
        far.computed(keys)
        for key in reversed(keys):
            near[key] = None
            near.move_to_end(key)
        while len(near) > 3_276:
            near.popitem(last=False)
    assert num_far / num_requested == pytest.approx(hits, abs=0.002)
    assert far.num_written == pytest.approx(written, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "hits"), [("publication", 0.244), ("second_use", 0.154)])
def test_a_far_tier_below_the_manager_brings_about_the_same(
    policy: StorePolicy, hits: float
) -> None:
    need_twin()
    options = Options(
        num_blocks=3_277, block_size=512, far_blocks=26_214, store_policy=policy, bounds=False
    )
    result = replay(TraceReader(TRACE), options, backend="rust")
    assert result.far_hit_tokens is not None
    assert result.far_hit_tokens / result.looked_up_tokens == pytest.approx(hits, abs=0.02)
