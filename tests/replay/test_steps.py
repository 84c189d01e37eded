# SPDX-License-Identifier: Apache-2.0
"""Steps of the replay on pools of a few blocks, as a reader does them on paper."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from hypothesis import given

from kvcore import KVCacheManager
from kvcore.replay import record
from kvcore.replay.loop import Step, replay
from kvcore.replay.results import BackendName, Options, Sample
from kvcore.replay.workload import TraceRequest
from kvcore.types.commands import Batch
from tests.replay.small_traces import ask, crowds


def steps_of(requests: list[TraceRequest], options: Options) -> list[dict[str, tuple[int, int]]]:
    """Return what each step computes, by request."""
    steps: list[dict[str, tuple[int, int]]] = []

    def apply(_batch: Batch, step: Step) -> None:
        steps.append({each.sequence.sequence_id: (each.start, each.end) for each in step.chunks})

    replay(requests, options, backend="python", apply=apply)
    return steps


def test_nobody_is_admitted_before_the_whole_prompt_fits() -> None:
    """Of 4 blocks 0 holds two, and 1 wants three in chunks, of which the first would fit."""
    requests = [ask(1, 8, 1, 1, 2), ask(2, 12, 1, 3, 4, 5)]
    options = Options(num_blocks=5, block_size=4, token_budget=12)
    assert steps_of(requests, options) == [{"0": (0, 8)}, {"1": (0, 12)}]


def test_the_youngest_gives_way_and_nobody_is_admitted_in_that_step() -> None:
    """Of 4 blocks 0 and 1 hold two each; 0 grows first, so 1 gives up its blocks.

    There would be room for 2 then, but 2 comes after 1.
    """
    requests = [ask(1, 8, 5, 1, 2), ask(2, 8, 5, 3, 4), ask(3, 4, 1, 5)]
    for preempt in ("recompute", "swap"):
        options = Options(num_blocks=5, block_size=4, preempt=preempt)
        steps = steps_of(requests, options)
        assert steps[:2] == [{"0": (0, 8), "1": (0, 8)}, {"0": (8, 9)}]
        first = {name: min(n for n, each in enumerate(steps) if name in each) for name in "012"}
        back = next(n for n, each in enumerate(steps) if n > 0 and "1" in each)
        assert first["2"] >= back
        assert [each["0"] for each in steps if "0" in each] == [
            (0, 8),
            (8, 9),
            (9, 10),
            (10, 11),
            (11, 12),
        ]


def test_nobody_is_admitted_while_an_older_prompt_sits_out() -> None:
    """There are 8 blocks. 0 and 1 grow by one each, so 2's next 3 do not fit; 3 waits, too."""
    requests = [ask(1, 4, 3, 1), ask(2, 4, 3, 2), ask(3, 24, 1, *range(3, 9)), ask(4, 1, 1, 9)]
    steps = steps_of(requests, Options(num_blocks=9, block_size=4, token_budget=14))
    assert steps[0] == {"0": (0, 4), "1": (0, 4), "2": (0, 6)}
    assert steps[1:3] == [{"0": (4, 5), "1": (4, 5)}, {"0": (5, 6), "1": (5, 6)}]
    assert steps[3:] == [{"2": (6, 20)}, {"2": (20, 24), "3": (0, 1)}]


def test_who_was_swapped_last_is_older_and_comes_back_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of three requests holds two of 6 blocks.

    At token 9 there is no block for 0, so 2 goes; at token 13 again, so 1 goes.
    """
    noted: list[int] = []
    swapped_in = record.Record.swapped_in

    def note(self: record.Record, request: TraceRequest) -> None:
        noted.append(request.line)
        swapped_in(self, request)

    monkeypatch.setattr(record.Record, "swapped_in", note)
    requests = [ask(line, 8, 9, line, 10 + line) for line in (1, 2, 3)]
    steps = steps_of(requests, Options(num_blocks=7, block_size=4, preempt="swap"))
    assert [sorted(each) for each in steps[:9]] == [
        ["0", "1", "2"],
        *[["0", "1"]] * 4,
        *[["0"]] * 4,
    ]
    assert noted == [2, 3]
    assert steps[9] == {"1": (12, 13)}


def test_who_decodes_is_served_before_prompts_and_within_the_budget() -> None:
    requests = [ask(1, 1, 3, 1), ask(2, 1, 3, 2), ask(3, 1, 3, 3)]
    options = Options(num_blocks=50, block_size=4, token_budget=2)
    steps = steps_of(requests, options)
    assert steps[:3] == [
        {"0": (0, 1), "1": (0, 1)},
        {"0": (1, 2), "1": (1, 2)},
        {"0": (2, 3), "1": (2, 3)},
    ]
    assert steps[3:] == [{"2": (0, 1)}, {"2": (1, 2)}, {"2": (2, 3)}]


def test_time_is_virtual_and_made_of_the_stated_costs(backend: BackendName) -> None:
    """Two prompts of 8 tokens arrive at 10 s; each gets 3 outputs, which take two decodes."""
    options = Options(
        num_blocks=50,
        block_size=4,
        token_budget=12,
        base_seconds=1.0,
        seconds_per_prefill_token=0.25,
        seconds_per_decode=0.125,
    )
    requests = [ask(1, 8, 3, 1, 2, at=10.0), ask(2, 8, 3, 3, 4, at=10.0)]
    samples: list[Sample] = []
    result = replay(requests, options, backend=backend, watch=samples.append)
    prefill, mixed = 1 + 12 * 0.25, 1 + 4 * 0.25 + 0.125
    spans = [prefill, mixed, 1 + 2 * 0.125, 1 + 0.125]
    ends = [10 + sum(spans[: place + 1]) for place in range(4)]
    assert [each.time for each in samples] == ends
    assert tuple(samples) == result.samples
    assert [each.running for each in samples] == [2, 2, 1, 0]
    assert [each.finished for each in samples] == [0, 0, 1, 2]
    assert result.virtual_seconds == ends[-1]
    assert result.queueing.worst == 0


@pytest.mark.parametrize("preempt", ["recompute", "swap"])
@given(crowd=crowds())
def test_cached_blocks_are_those_without_owner_that_can_be_found(
    preempt: Any, crowd: tuple[list[TraceRequest], Options]
) -> None:
    requests, options = crowd
    managers: list[KVCacheManager] = []

    def observe(manager: KVCacheManager) -> KVCacheManager:
        managers.append(manager)
        return manager

    def watch(sample: Sample) -> None:
        (manager,) = managers
        blocks = range(1, options.num_blocks)
        cached = [b for b in blocks if manager.has_key(b) and not manager.num_owners(b)]
        assert sample.cached_blocks == len(cached)

    options = attrs.evolve(options, preempt=preempt, num_host_blocks=None)
    replay(requests, options, backend="python", watch=watch, observe=observe)
