# SPDX-License-Identifier: Apache-2.0
"""The replay loop: the same on both backends, bounded from above, and its handling of faults."""

from __future__ import annotations

import io
from collections.abc import Iterator
from itertools import islice
from typing import Any

import attrs
import pytest
from hypothesis import given, settings

from kvcore import KVCacheManager
from kvcore.replay import arrivals, record
from kvcore.replay.configuration import make_config
from kvcore.replay.errors import InvalidReplayOption, NotJSON
from kvcore.replay.loop import Loop, Step, replay
from kvcore.replay.request_trace import TraceReader
from kvcore.replay.results import BackendName, Options, Result, Sample
from kvcore.replay.summary import course_of
from kvcore.replay.synthetic import generate, to_lines
from kvcore.replay.workload import TraceRequest
from kvcore.types.commands import Batch
from kvcore.types.errors import InvalidConfig, InvalidCount
from tests.conftest import need_twin
from tests.helpers.amount import examples
from tests.replay.small_traces import ask, crowds

BACKENDS: tuple[BackendName, ...] = ("python", "rust")


def without_costs(result: Result) -> Result:
    return attrs.evolve(result, costs=(), backend="")


@settings(max_examples=examples(15))
@given(crowds())
def test_backends_agree_and_no_run_passes_the_bounds(
    crowd: tuple[list[TraceRequest], Options],
) -> None:
    need_twin()
    requests, options = crowd
    python, rust = (replay(requests, options, backend=backend) for backend in BACKENDS)
    assert without_costs(python) == without_costs(rust)
    assert rust.optimum_hit_tokens is not None
    assert rust.ideal_hit_tokens is not None
    assert rust.hit_tokens <= rust.optimum_hit_tokens <= rust.ideal_hit_tokens
    assert rust.finished + rust.num_refused == rust.requests == len(requests)
    served = {each.line for each in requests} - {each.line for each in rust.refused}
    looked_up = sum(each.prompt_len for each in requests if each.line in served)
    outputs = sum(each.output_len for each in requests if each.line in served)
    assert (rust.looked_up_tokens, rust.output_tokens) == (looked_up, outputs)


@settings(max_examples=examples(15))
@given(crowds())
def test_the_manager_counts_the_same_look_ups_and_is_left_empty(
    crowd: tuple[list[TraceRequest], Options],
) -> None:
    need_twin()
    requests, options = crowd
    manager = KVCacheManager(make_config(options), "rust")
    loop = Loop(requests, options, manager)
    while loop.step() is not None:
        pass
    stats, seen = manager.take_stats(), loop.record
    assert (stats.queries, stats.hits) == (seen.looked_up_tokens, seen.hit_tokens)
    again = (seen.again_looked_up_tokens, seen.again_hit_tokens)
    assert (stats.preempted_queries, stats.preempted_hits) == again
    assert manager.num_free_blocks == manager.config.num_usable_blocks
    manager.check()


@given(crowds())
def test_a_pool_that_never_evicts_gives_the_ideal(
    crowd: tuple[list[TraceRequest], Options],
) -> None:
    need_twin()
    requests, options = crowd
    result = replay(requests, attrs.evolve(options, num_blocks=2000), backend="rust")
    assert result.hit_tokens == result.ideal_hit_tokens
    assert result.evictions == result.preemptions == 0


@settings(max_examples=examples(15))
@given(crowds())
def test_every_token_is_computed_once_or_found(
    crowd: tuple[list[TraceRequest], Options],
) -> None:
    """`apply` gets all of a request's slots, in order, within budget and rows."""
    need_twin()
    requests, options = crowd
    computed: dict[str, int] = {}
    tokens: dict[str, list[int]] = {}
    lengths = {str(place): each for place, each in enumerate(requests)}
    batches: list[int] = []

    def apply(batch: Batch, step: Step) -> None:
        batches.append(batch.number)
        assert len({chunk.sequence.row for chunk in step.chunks}) == len(step.chunks)
        assert all(chunk.sequence.row < 2 * options.max_running for chunk in step.chunks)
        widths = [chunk.end - chunk.start for chunk in step.chunks]
        assert sum(widths) == step.num_prefill_tokens + step.num_decodes <= options.token_budget
        for chunk in step.chunks:
            name, held = chunk.sequence.sequence_id, chunk.sequence.num_known
            known = list(chunk.sequence.tokens(0, chunk.end))
            assert chunk.start <= chunk.end - 1 < held == chunk.sequence.num_tokens
            before = tokens.get(name, [])
            assert known[: len(before)] == before[: len(known)]
            tokens[name] = max(before, known, key=len)
            computed[name] = chunk.end

    result = replay(requests, options, backend="rust", apply=apply)
    refused = {each.request for each in result.refused}
    for name, request in lengths.items():
        if name not in refused:
            assert computed[name] == request.prompt_len + max(0, request.output_len - 1)
    assert len(batches) == result.steps
    assert batches == sorted(set(batches))


def made(num_requests: int = 40) -> list[TraceRequest]:
    return list(generate("turns", num_requests, 3, sessions_per_second=5.0))


TIGHT = Options(num_blocks=260, block_size=32, max_running=8, token_budget=1024)


@pytest.mark.parametrize("preempt", ["recompute", "swap"])
@pytest.mark.parametrize("policy", ["lru", "uncached_first"])
def test_a_tight_pool_preempts_and_still_finishes(
    preempt: Any, policy: Any, backend_of_engine: BackendName
) -> None:
    options = attrs.evolve(TIGHT, preempt=preempt, policy=policy)
    requests = [each for each in made() if each.prompt_len < 4000]
    result = replay(requests, options, backend=backend_of_engine)
    assert result.finished == len(requests)
    assert result.preemptions > 0
    assert result.swaps == (result.preemptions if preempt == "swap" else 0)
    assert (result.again_looked_up_tokens > 0) == (preempt == "recompute")
    assert result.hit_tokens > 0
    assert result.queueing.worst >= result.queueing.p99 >= result.queueing.median >= 0
    assert result.queueing.worst > 0


def test_a_full_host_tier_makes_them_recompute() -> None:
    need_twin()
    requests = [each for each in made() if each.prompt_len < 4000]
    options = attrs.evolve(TIGHT, preempt="swap", num_host_blocks=60)
    result = replay(requests, options, backend="rust")
    assert 0 < result.swaps < result.preemptions
    assert result.finished == len(requests)


def test_two_runs_are_equal_but_for_the_costs() -> None:
    need_twin()
    first, second = (replay(made(), TIGHT, backend="rust") for _ in range(2))
    assert without_costs(first) == without_costs(second)
    unmeasured = replay(made(), TIGHT, backend="rust", costs=False)
    assert without_costs(unmeasured) == without_costs(first)
    assert not any(each.count for each in unmeasured.costs)


def test_a_request_larger_than_the_pool_is_named_and_the_rest_goes_on(
    backend: BackendName,
) -> None:
    """The last output needs no slot, so 15 tokens and 2 outputs just fit into 4 blocks of 4."""
    requests = [ask(1, 15, 2, *range(4)), ask(2, 15, 3, *range(4)), ask(3, 17, 1, *range(5))]
    requests += [ask(4, 15, 1, *range(4))]
    result = replay(requests, Options(num_blocks=5, block_size=4), backend=backend)
    reported = [
        (each.request, each.line, each.num_tokens, each.needed_blocks) for each in result.refused
    ]
    assert reported == [("1", 2, 17, 5), ("2", 3, 17, 5)]
    assert {each.usable_blocks for each in result.refused} == {4}
    assert (result.requests, result.finished, result.num_refused) == (4, 2, 2)
    assert (result.prompt_tokens, result.looked_up_tokens) == (62, 30)
    assert result.hit_tokens == 12


def test_refused_requests_are_named_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "REFUSED_MAX", 3)
    requests = [ask(line, 40, 1, *range(10)) for line in range(1, 8)]
    result = replay(requests, Options(num_blocks=5, block_size=4), backend="python")
    assert ([each.line for each in result.refused], result.num_refused) == ([1, 2, 3], 7)
    assert (result.steps, result.virtual_seconds, result.samples) == (0, 0.0, ())


def test_who_comes_late_is_waited_for_and_who_waits_is_counted() -> None:
    options = Options(num_blocks=50, block_size=4, max_running=1, base_seconds=1.0)
    requests = [ask(1, 4, 3, 1), ask(2, 4, 1, 1), ask(3, 4, 1, 2, at=100.0)]
    samples: list[Sample] = []
    result = replay(requests, options, backend="python", watch=samples.append)
    assert [each.waiting for each in samples] == [1, 1, 1, 0, 0]
    assert samples[-1].time > 100
    assert result.queueing.worst == pytest.approx(samples[2].time, rel=1 / 64)


def test_time_without_requests_counts_as_empty() -> None:
    """Two requests of two steps, each of a second: one block is used for a second of each."""
    requests = [ask(1, 4, 2, 1), ask(2, 4, 2, 2, at=10.0)]
    options = Options(
        num_blocks=3,
        block_size=4,
        base_seconds=1.0,
        seconds_per_prefill_token=0.0,
        seconds_per_decode=0.0,
    )
    result = replay(requests, options, backend="python")
    assert [each.time for each in result.samples] == [1.0, 2.0, 11.0, 12.0]
    assert [each.idle_time for each in result.samples] == [0.0, 0.0, 8.0, 8.0]
    spent = result.spent
    assert spent.running == spent.used == {1: 2.0, 0: 10.0}
    assert spent.cached == {0: 1.0, 1: 11.0}  # the first prompt, until the second took its place
    course = course_of(result)
    assert course is not None
    assert (course.use.median, course.use.mean) == (0.0, 2 * 0.5 / 12)


def test_time_passes_to_an_arrival_and_not_to_a_rounded_sum() -> None:
    # The first one is done at 0.30815, and 0.30815 + (0.809 - 0.30815) is less than 0.809.
    requests = [ask(1, 3, 1, 1, at=0.3), ask(2, 3, 1, 2, at=0.809)]
    assert replay(requests, Options(num_blocks=9, block_size=4)).finished == 2


def test_figures_over_time_are_not_those_of_thinned_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = Options(num_blocks=300, bounds=False)
    requests = list(generate("turns", 30, 1))
    whole = replay(requests, options, backend="python", costs=False)
    monkeypatch.setattr(record, "SAMPLES_MAX", 8)
    thinned = replay(requests, options, backend="python", costs=False)
    assert len(thinned.samples) < 10 < len(whole.samples)
    for name in ("used", "running", "waiting", "first_full"):
        assert getattr(thinned.spent, name) == getattr(whole.spent, name)


def test_the_first_requests_alone_can_be_asked_for() -> None:
    def endless() -> Iterator[TraceRequest]:
        for line in range(1, 10**9):
            yield ask(line, 4, 1, line)

    options = Options(num_blocks=50, block_size=4, num_requests=7)
    result = replay(endless(), options, backend="python")
    assert (result.requests, result.finished) == (7, 7)


def test_a_trace_is_not_read_far_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """All requests have arrived, but no more of them wait in memory than allowed."""
    monkeypatch.setattr(arrivals, "WAITING_MAX", 5)
    num_read = 0

    def requests() -> Iterator[TraceRequest]:
        nonlocal num_read
        for line in range(1, 101):
            num_read = line
            yield ask(line, 4, 2, line)

    ahead: list[int] = []
    options = Options(num_blocks=50, block_size=4, max_running=2)
    result = replay(
        requests(),
        options,
        backend="python",
        watch=lambda sample: ahead.append(num_read - sample.finished),
    )
    assert result.finished == 100
    assert max(ahead) <= 5 + 1 + 2 + 1


def test_an_interrupted_run_gives_what_it_has(backend: BackendName) -> None:
    samples: list[Sample] = []
    whole = replay(made(15), TIGHT, backend=backend, watch=samples.append)

    def stop(sample: Sample) -> None:
        if sample.finished == 5:
            raise KeyboardInterrupt

    result = replay(made(15), TIGHT, backend=backend, watch=stop)
    assert (result.interrupted, whole.interrupted) == (True, False)
    assert 5 == result.finished < whole.finished
    assert result.samples == tuple(samples[: result.steps])
    assert result.steps == result.costs[-1].count == len(result.samples)
    assert result.optimum_hit_tokens is not None
    assert result.hit_tokens <= result.optimum_hit_tokens


def test_an_interrupt_while_reading_gives_what_it_has() -> None:
    def requests() -> Iterator[TraceRequest]:
        yield from (ask(line, 4, 3, line) for line in range(1, 4))
        raise KeyboardInterrupt

    result = replay(requests(), Options(num_blocks=9, block_size=4), backend="python")
    assert (result.interrupted, result.requests, result.steps) == (True, 3, 0)


def test_a_result_has_its_traces_name_and_skipped_lines() -> None:
    content = b"".join([b"rubbish\n", *to_lines(made(3))])
    options = Options(num_blocks=2000)
    reader = TraceReader(io.BytesIO(content), skip_bad=True, name="t.jsonl")
    result = replay(reader, options, backend="python")
    assert (result.trace, result.skipped_lines, result.requests) == ("t.jsonl", 1, 3)
    with pytest.raises(NotJSON):
        replay(TraceReader(io.BytesIO(content)), options, backend="python")


def test_samples_of_a_long_run_are_thinned_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "SAMPLES_MAX", 16)
    samples: list[Sample] = []
    options = Options(num_blocks=50, block_size=4)
    result = replay([ask(1, 4, 101, 1)], options, backend="python", watch=samples.append)
    assert result.steps == len(samples) == 101
    assert len(result.samples) <= 16
    strides = [b.step - a.step for a, b in zip(result.samples, result.samples[1:-1], strict=False)]
    assert set(strides) == {8}
    assert (result.samples[0], result.samples[-1]) == (samples[0], samples[-1])


def test_costs_are_of_the_calls_that_were_made() -> None:
    result = replay(made(6), attrs.evolve(TIGHT, num_blocks=2000), backend="python")
    counts = {each.name: each.count for each in result.costs}
    assert counts["step"] == counts["take_batch"] == result.steps
    assert counts["add_request"] == counts["remove_request"] == counts["free"] == 6
    assert counts["append"] <= result.steps
    calls = sum(each.total for each in result.costs if each.name != "step")
    assert calls == pytest.approx(result.costs[-1].total)
    for each in result.costs:
        assert 0 <= each.median <= each.p99 <= each.p999 <= each.worst <= each.total


def test_one_append_serves_all_who_decode() -> None:
    """If no request is refused a block, a step appends once."""
    requests = [ask(line, 4, 20, line) for line in range(1, 9)]
    result = replay(requests, Options(num_blocks=200, block_size=4), backend="python")
    counts = {each.name: each.count for each in result.costs}
    assert counts["append"] == 19
    assert result.steps == 20


def test_bounds_can_be_left_out() -> None:
    options = Options(num_blocks=50, block_size=4, bounds=False)
    result = replay([ask(1, 4, 1, 1)], options, backend="python")
    assert (result.ideal_hit_tokens, result.optimum_hit_tokens) == (None, None)


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"num_blocks": 1}, InvalidConfig, "num_blocks=1"),
    ({"block_size": 0}, InvalidConfig, "block_size"),
    ({"policy": "mru"}, InvalidConfig, "eviction='mru'"),
    ({"max_running": 0}, InvalidCount, "max_running is 0"),
    ({"token_budget": 0}, InvalidCount, "token_budget is 0"),
    ({"num_requests": 0}, InvalidCount, "num_requests is 0"),
    ({"preempt": "drop"}, InvalidReplayOption, "preempt='drop'"),
    ({"preempt": "swap", "num_host_blocks": -1}, InvalidConfig, "num_host_blocks=-1"),
    ({"base_seconds": -1.0}, InvalidReplayOption, "base_seconds=-1.0"),
    ({"seconds_per_decode": float("nan")}, InvalidReplayOption, "seconds_per_decode=nan"),
    (
        {"seconds_per_prefill_token": float("inf")},
        InvalidReplayOption,
        "must be at least 0, and finite",
    ),
]


@pytest.mark.parametrize(("given", "kind", "says"), WRONG)
def test_wrong_options_are_refused_before_anything_is_read(
    given: dict[str, Any], kind: type[Exception], says: str
) -> None:
    unread: Iterator[TraceRequest] = iter(lambda: pytest.fail("read"), None)
    options = Options(**({"num_blocks": 100} | given))
    with pytest.raises(kind, match=says):
        replay(unread, options, backend="python")


def test_generated_traces_stream_through() -> None:
    """The generator is asked for no more than the loop takes."""
    need_twin()
    requests = generate("documents", 500, 1)
    options = Options(num_blocks=8192, num_requests=20)
    assert replay(requests, options, backend="rust").requests == 20
    assert len(list(islice(requests, 480))) == 480
