# SPDX-License-Identifier: Apache-2.0
"""What stays findable of windows and states: the adapter and vLLM's manager keep the same."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from tests.engines.vllm.environment import ABSENT

pytest.importorskip("vllm", reason=ABSENT)

from vllm.v1.request import RequestStatus

from tests.engines.vllm.both import STATE, WINDOW, Answer, Both
from tests.engines.vllm.engine import BLOCK_SIZE, FULL

pytestmark = pytest.mark.vllm
LARGE = replace(FULL, block_size=16)
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "window": ((WINDOW,), {}),
    "full-window": ((FULL, WINDOW), {}),
    "large-window": ((LARGE, WINDOW), {"scheduler_block_size": 16}),
    "eagle": ((FULL, WINDOW), {"use_eagle": True}),
    "large-eagle": ((LARGE, WINDOW), {"scheduler_block_size": 16, "use_eagle": True}),
    "full-state": ((FULL, STATE), {}),
    "state-eagle": ((FULL, STATE), {"use_eagle": True}),
}


def ask(both: Both, answer: Answer) -> Any:
    """Return the answer of both sides. Blocks without a key may be reused in another order."""
    theirs, ours = (answer(*side) for side in both.sides)
    assert ours == theirs
    kvcore = both.sides[1][0]
    kvcore.compat.core.check()
    return ours


def found(both: Both, name: str) -> Any:
    """Return in which groups each block of a request is found, which both sides agree on."""

    def answer(manager: Any, requests: dict[str, Any]) -> list[bool]:
        hashes, find = requests[name].block_hashes, manager.block_pool.get_cached_block
        scales = [
            each.block_size // BLOCK_SIZE for each in manager.coordinator.single_type_managers
        ]
        return [
            find(each, [group]) is not None
            for group, scale in enumerate(scales)
            for each in hashes[scale - 1 :: scale]
        ]

    return ask(both, answer)


def start(both: Both, name: str, chunk: int) -> Any:
    """Compute a prompt in chunks that end at whole multiples. Returns the hit and the boundary."""

    def answer(manager: Any, requests: dict[str, Any]) -> tuple[int, int]:
        request = requests[name]
        manager.new_step_starts()
        blocks, num_hit, boundary = manager.get_computed_blocks(request)
        request.shared_prefix_boundary = boundary
        request.status = RequestStatus.RUNNING
        count, hit = num_hit, (num_hit, blocks)
        while count < request.num_tokens:
            end = min(request.num_tokens, count // chunk * chunk + chunk)
            assert manager.allocate_slots(request, end - count, *hit) is not None
            manager.take_new_block_ids()
            request.num_computed_tokens = count = end
            manager.new_step_starts()
            manager.remove_skipped_blocks(name, end)
            hit = ()  # type: ignore[assignment] # of later chunks
        return num_hit, boundary

    return ask(both, answer)


def decode(both: Both, name: str, token: int) -> None:
    """Append a token to a request, and schedule the next position."""

    def answer(manager: Any, requests: dict[str, Any]) -> object:
        request = requests[name]
        request.append_output_token_ids(token)
        manager.new_step_starts()
        manager.remove_skipped_blocks(name, request.num_computed_tokens)
        assert manager.allocate_slots(request, 1) is not None
        manager.take_new_block_ids()
        request.num_computed_tokens += 1
        return manager.block_pool.get_num_free_blocks()

    ask(both, answer)


@pytest.mark.parametrize("interval", [None, 0, 16, 32])
@pytest.mark.parametrize("model", MODELS)
def test_the_same_blocks_stay_findable(model: str, interval: int | None) -> None:
    groups, options = MODELS[model]
    cache = {"prefix_cache_retention_interval": interval}
    random, kept, hits = Random(f"{model} {interval}"), list[bool](), 0
    both = Both(*groups, num_blocks=48, max_model_len=128, cache=cache, **options)
    for number in range(12):
        prompt = [random.randrange(2)] * random.choice([16, 33, 48]) + [number] * random.choice(
            [0, 0, 9]
        )
        name = f"request {number}"
        both.add(name, prompt)
        hits += start(both, name, random.choice([16, 32, 64]))[0]
        kept += found(both, name)
        for token in range(random.randrange(8)):
            decode(both, name, token)
        kept += found(both, name)
        for manager, requests in both.sides:
            manager.free(requests.pop(name))
    assert hits or interval is not None
    assert any(kept)
    sparse = interval is not None or "large" in model
    assert not all(kept) or not sparse
