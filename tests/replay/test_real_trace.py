# SPDX-License-Identifier: Apache-2.0
"""The Mooncake conversation trace, if it is here: it is no part of this repository."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcore.replay.loop import replay
from kvcore.replay.optimum import LookUps
from kvcore.replay.request_trace import TraceReader
from kvcore.replay.results import Options
from kvcore.replay.trace_facts import Counting
from kvcore.types.config import EvictionName
from tests.conftest import need_twin

TRACE = Path(__file__).parents[3] / "shared" / "traces" / "mooncake_conversation.jsonl"
pytestmark = pytest.mark.skipif(
    not TRACE.is_file(), reason="the trace mooncake_conversation.jsonl is not beside the project"
)


def test_an_unlimited_cache_finds_what_its_authors_say() -> None:
    """12,031 requests; 288,500 blocks of 512, 182,790 different ones: 36.64 %."""
    reader = TraceReader(TRACE)
    counting = Counting(512)
    counting.read(reader)
    facts = counting.facts(reader.name, 0)
    assert reader.num_lines == 12_031
    assert (facts.num_ids, facts.num_ids - facts.repeated_ids) == (288_500, 182_790)
    assert round(100 * facts.repeated_ids / facts.num_ids, 2) == 36.64


def test_the_bound_is_near_what_another_simulator_found() -> None:
    """kvcache-simulator's offline optimum counts the second half of the requests, on blocks of 512:
    0.320 in 3,276 of them, 0.398 in 13,107. It has to keep what it meets, so it may find less.
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
