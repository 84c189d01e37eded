# SPDX-License-Identifier: Apache-2.0
"""EXPLAIN-SUM on workloads: the causes are ideal less hits, token by token, and each is counted by
something else too: hits by the manager, ideals from the trace's ids.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import attrs
import pytest

from kvcore import Group
from kvcore.explain import observer
from kvcore.explain.explanation import LENGTHS, Span
from kvcore.explain.lengths import spans_of
from kvcore.replay import configuration, loop
from kvcore.replay.explain.explained import Explained, split_evicted
from kvcore.replay.request_trace import TraceReader
from kvcore.replay.results import Options, Result
from kvcore.replay.synthetic import KINDS, generate
from kvcore.replay.workload import TraceRequest
from kvcore.types.config import EVICTIONS, EvictionName
from tests.conftest import need_twin
from tests.explain.test_lengths_on_paper import A, B, C, Engine
from tests.explain.watched import check

TRACE = Path(__file__).parents[3] / "shared" / "traces" / "mooncake_conversation.jsonl"
GROUPS = {
    "sizes": (Group(16), Group(32)),
    "window": (Group(16), Group(16, kind="sliding_window", window=700)),
    "chunks": (Group(16), Group(32, kind="chunked_local", window=512)),
    "mla": (Group(16, kind="mla"), Group(16, kind="sliding_window", window=64)),
    "states": (Group(16), Group(64, kind="state")),
    "parts": (Group(64),),
    "parts-window": (Group(64), Group(64, kind="sliding_window", window=700)),
    "parts-states": (Group(64), Group(64, kind="state")),
}
UNITS = {"parts": 16, "parts-window": 16, "parts-states": 16}
"""Tokens per hash where hits may end inside blocks."""
RUNS = [
    pytest.param(kind, policy, 1024, marks=[] if few else [pytest.mark.slow])
    for kind in KINDS
    for policy in EVICTIONS
    for few in [policy == EVICTIONS[0] or kind == "documents"]
]
RUNS += [
    pytest.param(kind, policy, num_blocks, marks=[] if few else [pytest.mark.slow])
    for kind in KINDS
    for policy, num_blocks in (*((each, 4096) for each in EVICTIONS), (EVICTIONS[0], 65_536))
    for few in [policy == EVICTIONS[0] and kind == "turns"]
]
"""Workloads, policies, and sizes of pools; nothing leaves the largest."""


def explain(requests: Any, options: Options) -> tuple[Explained, Result]:
    """Replay and check every explanation."""
    explained = Explained(lambda _: True)
    result = loop.replay(requests, options, observe=explained.observe, costs=False)
    for each in explained.kept:
        check(each)
    totals = explained.totals
    assert totals.hits == result.hit_tokens
    assert totals.tokens == result.looked_up_tokens
    assert totals.causes.total() == totals.ideal - totals.hits
    assert totals.takers.total() == totals.evictors.total() == totals.causes["evicted"]
    return explained, result


def known_tokens(requests: list[TraceRequest], explained: Explained) -> int:
    """Return the ideal hit by comparing ids, request by request."""
    known: list[TraceRequest] = []
    total = 0
    for each in explained.kept:
        if each.again:
            continue
        request = requests[int(each.request)]
        longest = 0
        for other in known:
            equal = 0
            for mine, its in zip(request.hash_ids, other.hash_ids, strict=False):
                if mine != its:
                    break
                equal += request.unit
            longest = max(longest, min(equal, request.prompt_len, other.prompt_len))
        total += longest
        known.append(request)
    return total


@pytest.mark.parametrize(("kind", "policy", "num_blocks"), RUNS)
def test_the_causes_of_a_workload_are_ideal_less_hits(
    kind: str, policy: EvictionName, num_blocks: int
) -> None:
    need_twin()
    requests = list(generate(kind, 60, 11))
    explained, result = explain(requests, Options(num_blocks=num_blocks, policy=policy))
    assert explained.totals.ideal == known_tokens(requests, explained)
    findable = LENGTHS.index("drafts_dropped")
    firsts = [each for each in explained.kept if not each.again]
    assert sum(each.lengths[findable] for each in firsts) == result.ideal_hit_tokens


@pytest.mark.parametrize(
    ("use_eagle", "num_blocks"),
    [
        (False, 3000),
        (True, 8192),
        pytest.param(False, 8192, marks=pytest.mark.slow),
        pytest.param(True, 3000, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("kind", GROUPS)
def test_the_causes_are_whole_with_groups_of_all_kinds(
    kind: str, use_eagle: bool, num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_twin()
    make = configuration.make_config

    def with_groups(options: Options) -> Any:
        groups, unit = GROUPS[kind], UNITS.get(kind)
        return attrs.evolve(
            make(options),
            block_size=groups[0].block_size,
            groups=groups,
            hash_block_size=unit,
            use_eagle=use_eagle,
        )

    monkeypatch.setattr(loop, "make_config", with_groups)
    requests = list(generate("turns", 60, 5))
    explained, _ = explain(requests, Options(num_blocks=num_blocks, bounds=False))
    assert explained.totals.ideal == known_tokens(requests, explained)
    assert not any(
        span.removal is not None and span.removal.kind == "unknown"
        for each in explained.kept
        for span in each.spans
    )


def test_swaps_are_explained_too() -> None:
    need_twin()
    requests = list(generate("documents", 120, 7))
    options = Options(num_blocks=2048, preempt="swap", bounds=False)
    explained, result = explain(requests, options)
    assert result.swaps
    assert explained.totals.ideal == known_tokens(requests, explained)


def test_the_optimum_splits_what_was_evicted() -> None:
    """If nothing else is missed, the policy lost what the bound finds beyond the hits."""
    need_twin()
    requests = list(generate("documents", 120, 7))
    explained, result = explain(requests, Options(num_blocks=2048))
    split = split_evicted(explained.kept, requests, 16, 2047)
    assert split.total() == explained.totals.causes["evicted"]
    assert set(explained.totals.causes) == {"evicted"}
    assert result.optimum_hit_tokens is not None
    assert split["policy"] >= result.optimum_hit_tokens - result.hit_tokens > 0


BUGS = {
    "two causes for a token": lambda spans: (*spans[:1], *spans),
    "a gap without cause": lambda spans: spans[1:],
    "a cause too short": lambda spans: (attrs.evolve(spans[0], end=spans[0].end - 1), *spans[1:]),
}


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_the_sum_finds_seeded_bugs(bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: Any) -> tuple[Span, ...]:
        spans = spans_of(*args)
        return bug(spans) if spans else spans

    monkeypatch.setattr(observer, "spans_of", wrong)
    with pytest.raises(AssertionError, match="cause"):
        explain(list(generate("shared", 40, 1)), Options(num_blocks=1024, bounds=False))


def test_a_call_that_is_not_seen_leaves_no_gap() -> None:
    """A key whose loss was not observed counts as one that was never findable."""
    engine = Engine()
    engine.run("a", A + B)
    real: Any = engine.manager
    real._manager.reset_prefix_cache()
    engine.run("b", A + B + C)
    assert engine.causes() == [(0, 8, "not_published")]


@pytest.mark.slow
@pytest.mark.skipif(
    not TRACE.is_file(), reason="the trace mooncake_conversation.jsonl is not beside the project"
)
@pytest.mark.parametrize(
    ("num_blocks", "ideal", "hits", "prompt", "decode", "partial"),
    [
        (4_096, 46_548_855, 6_027_776, 39_147_248, 1_372_864, 855),
        (16_384, 54_098_411, 6_276_096, 46_434_688, 1_386_656, 859),
    ],
)
def test_the_recorded_trace_is_explained_as_a_prototype_did(
    num_blocks: int, ideal: int, hits: int, prompt: int, decode: int, partial: int
) -> None:
    """An independent observer of the same loop found these, token by token."""
    need_twin()
    explained = Explained()
    options = Options(num_blocks=num_blocks, bounds=False)
    loop.replay(TraceReader(TRACE), options, observe=explained.observe)
    totals = explained.totals
    assert (totals.ideal, totals.hits) == (ideal, hits)
    assert totals.takers == Counter(prompt=prompt, decode=decode)
    causes = {"evicted": prompt + decode, "partial_block": partial, "last_token": 112}
    assert totals.causes == Counter(causes)
