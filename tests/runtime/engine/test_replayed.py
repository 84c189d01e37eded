# SPDX-License-Identifier: Apache-2.0
"""A replay on real tensors in guard mode: every read is checked, and what is wrong is found."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from kvcore_runtime.cache.cache import Cache
from kvcore_runtime.cache.segments import Copying, run_program_order
from kvcore_runtime.engine.simulated import TorchDevice, make_device

from kvcore.oracle.content_oracle import Pass
from kvcore.oracle.device import DeviceSize
from kvcore.replay.applied import OnDevice, Prefix
from kvcore.replay.loop import replay
from kvcore.replay.results import Options, Result
from kvcore.replay.workload import TraceRequest
from kvcore.types.commands import SwapIn
from kvcore.types.errors import InvariantViolation
from tests.conftest import Backend


def trace_of(num_requests: int) -> list[TraceRequest]:
    """Return requests of which every two share a long prefix; together they far exceed a pool."""
    return [
        TraceRequest(line, 0.0, 70, 12, [line % 2, 5, 6, 100 + line], 20)
        for line in range(1, num_requests + 1)
    ]


def options(num_blocks: int = 40, **given: object) -> Options:
    """Return a small pool of small blocks."""
    made = {"block_size": 4, "max_running": 6, "token_budget": 64} | given
    return Options(num_blocks=num_blocks, **made)  # type: ignore[arg-type]  # by name


def replayed(backend: Backend, requested: Options) -> Result:
    """Return the result of a run on tensors."""
    return replayed_on(backend, requested)[0]


def replayed_on(backend: Backend, requested: Options) -> tuple[Result, OnDevice]:
    """Return the result of a run on tensors, and the device's side of it."""
    device = OnDevice(make_device, requested)
    return replay(trace_of(8), requested, backend=backend, apply=device), device


@pytest.mark.parametrize("policy", ["lru", "uncached_first"])
@pytest.mark.parametrize("preempt", ["recompute", "swap"])
def test_what_a_replay_reads_is_what_was_written(
    backend: Backend, policy: str, preempt: str
) -> None:
    requested = options(policy=policy, preempt=preempt)
    result = replayed(backend, requested)
    assert result.finished == 8
    assert result.hit_tokens > 0
    assert result.evictions > 0
    assert result.preemptions > 0
    assert (result.swaps > 0) == (preempt == "swap")


def test_each_step_reads_all_that_its_requests_see(backend: Backend) -> None:
    """Two requests in a large pool compute chunks of 64 and 6 tokens, then 11 tokens singly."""
    requested = options(400, num_requests=1)
    _, device = replayed_on(backend, requested)
    assert device.num_read == 64 + 70 + sum(range(71, 82))


def test_tensors_change_nothing_in_the_result(backend: Backend) -> None:
    requested = options()
    beside = replay(trace_of(8), requested, backend=backend)
    result = replayed(backend, requested)
    assert result.samples == beside.samples
    assert result.hit_tokens == beside.hit_tokens


def test_a_swap_that_is_forgotten_is_found(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forget(cache: Cache, commands: Sequence[Copying]) -> None:
        run_program_order(cache, [each for each in commands if each.kind != SwapIn.kind])

    monkeypatch.setattr("kvcore_runtime.cache.apply.run_program_order", forget)
    with pytest.raises(InvariantViolation, match="KV-READ: in the tensors: step "):
        replayed(backend, options(preempt="swap"))


def test_a_block_that_holds_another_prefix_is_found(backend: Backend) -> None:
    requested = options()

    class Mixing(TorchDevice):
        """Puts the content of one block into another before its third forward pass."""

        num_passes = 0

        def forward(self, passes: Sequence[Pass]) -> None:
            """See `Device`."""
            self.num_passes += 1
            if self.num_passes == 3:
                first, second = self.stamped.runtime.tables.blocks[0, passes[0].row, :2].tolist()
                data = self.stamped.runtime.cache.blocks.data
                data[second] = data[first].clone()
            super().forward(passes)

    def mixing(plan: DeviceSize) -> TorchDevice:
        return Mixing(plan)

    with pytest.raises(InvariantViolation, match="does not hold position 4"):
        replay(trace_of(8), requested, backend=backend, apply=OnDevice(mixing, requested))


def test_numbers_of_prefixes_tell_histories_apart() -> None:
    numbers = Prefix().nodes([3, 1, 4, 1, 5], 5)
    assert len(set(numbers)) == 5
    grown = Prefix()
    assert list(grown.nodes([3, 1, 4, 1, 5], 2)) == list(numbers)[:2]
    assert list(grown.nodes([3, 1, 4, 1, 5], 5)) == list(numbers)
    assert list(Prefix().nodes([1, 3, 4, 1, 5], 5))[1:] != list(numbers)[1:]
    assert all(0 <= each < 2**45 for each in numbers)
    assert torch.tensor(list(numbers), dtype=torch.float64).long().tolist() == list(numbers)
