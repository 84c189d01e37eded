# SPDX-License-Identifier: Apache-2.0
"""Overlapped steps: each is planned before the tokens of the one before are read."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from tests.engines.transformers.environment import ABSENT

pytest.importorskip("transformers", reason=ABSENT)

import kvcore_transformers
import torch
from kvcore_transformers import copies
from kvcore_transformers.copies import Copies
from transformers import CompileConfig

from tests.engines.transformers.models import (
    LAYERS,
    PAGE,
    both,
    draw_prompts,
    generated,
    reference,
    serve,
    tiny,
)
from tests.engines.transformers.streams import ActedStream, act_streams

pytestmark = pytest.mark.transformers
ROOMY, SMALL = 60, 16
overlapped = partial(both, use_async_batching=True)


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    act_streams(monkeypatch)


@pytest.mark.parametrize("num_blocks", [ROOMY, SMALL])
@pytest.mark.parametrize("kind", LAYERS)
def test_overlapped_steps_give_the_tokens_of_the_native_cache_and_of_generate(
    kind: str, num_blocks: int
) -> None:
    native, ours = overlapped(kind, 0, num_blocks=num_blocks)
    assert ours.tokens == native.tokens == reference(kind, 0)
    assert ours.num_leaked() == 0
    assert ours.hits >= max(native.hits, 1) or num_blocks == SMALL
    assert ours.computed <= native.computed


@pytest.mark.parametrize("kind", LAYERS)
def test_samples_of_one_prompt_share_blocks_while_steps_overlap(kind: str) -> None:
    native, ours = overlapped(kind, 1, n=3, num_blocks=SMALL)
    answers = reference(kind, 1)
    for tokens in (native.tokens, ours.tokens):
        assert len(tokens) == 3 * len(answers)
        assert tokens == {name: answers[name.split("__")[0]] for name in tokens}
    assert ours.num_leaked() == 0
    assert ours.cache.statistics.copies > 0


@pytest.mark.parametrize("kind", ["full", "hybrid"])
@pytest.mark.parametrize("seed", range(4))
def test_a_cancel_in_flight_leaves_no_block_and_changes_no_other_answer(
    kind: str, seed: int
) -> None:
    chance = random.Random(seed)
    at = {chance.randrange(14): f"r{victim}" for victim in chance.sample(range(8), 3)}
    steps = iter(range(1000))
    cancelled: set[str] = set()

    def cancel(manager: Any) -> None:
        name, scheduler = at.get(next(steps), ""), manager.batch_processor.scheduler
        if name in scheduler.active_requests or name in scheduler.waiting_requests:
            cancelled.add(name)
            manager.cancel_request(name)

    model, prompts = tiny(kind), draw_prompts(1)
    with kvcore_transformers.installed():
        ours = serve(
            model,
            prompts,
            cancel,
            lambda: 8 - len(cancelled),
            num_blocks=16,
            use_async_batching=True,
        )
    expected = reference(kind, 1)
    assert cancelled
    assert ours.errors == {}
    assert {name: ours.tokens[name] for name in expected.keys() - cancelled} == {
        name: expected[name] for name in expected.keys() - cancelled
    }
    assert ours.num_leaked() == 0


def test_a_cancel_while_the_step_in_flight_fills_a_block_which_ends_the_native_loop() -> None:
    cancelled: list[str] = []

    def cancel(manager: Any) -> None:
        state = manager.batch_processor.scheduler.active_requests.get("r0")
        if state is not None and state.position_offset == 2 * PAGE and not cancelled:
            cancelled.append("r0")
            manager.cancel_request("r0")

    model, prompts = tiny(), [[3] * (2 * PAGE - 2), [4] * 5]
    native = serve(model, prompts, cancel, lambda: 1, use_async_batching=True)
    assert native.errors == {"r1": "'r0'"}  # a KeyError that r1 has nothing to do with
    cancelled.clear()
    with kvcore_transformers.installed():
        ours = serve(model, prompts, cancel, lambda: 1, use_async_batching=True)
    assert cancelled
    assert ours.tokens == {"r1": generated(model, prompts)["r1"]}
    assert ours.num_leaked() == 0


def test_generated_tokens_are_found_by_the_prompt_that_goes_on_from_them() -> None:
    model = tiny()
    first = draw_prompts(2, num_prompts=3)
    answers = generated(model, first, new=20)
    prompts = [*first, *([*ids, *answers[f"r{n}"], 9] for n, ids in enumerate(first))]
    changed: dict[str, Any] = {"use_async_batching": True, "max_requests_per_batch": 1, "new": 20}
    native = serve(model, prompts, **changed)
    with kvcore_transformers.installed():
        ours = serve(model, prompts, **changed)
    assert ours.tokens == native.tokens == generated(model, prompts, new=20)
    assert ours.hits >= native.hits > 3 * 20
    assert ours.computed <= native.computed


def test_copies_are_put_on_the_stream_of_the_forward_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copy, current, seen = Copies._copy, [], []

    @contextmanager
    def watched_stream(stream: Any) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    def watched(self: Copies, *args: Any) -> None:
        seen.append(current[-1])
        copy(self, *args)

    monkeypatch.setattr(copies, "stream_context", watched_stream)
    monkeypatch.setattr(Copies, "_copy", watched)
    with kvcore_transformers.installed():
        ours = serve(tiny(), draw_prompts(1), n=3, use_async_batching=True)
    assert isinstance(ours.cache.copies.stream, ActedStream)
    assert seen
    assert all(stream is ours.cache.copies.stream for stream in seen)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("kind", ["full", "hybrid"])
def test_a_warm_up_and_padded_batches_leave_nothing_behind(
    kind: str, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    model, prompts = tiny(kind), [[0] * 40, *draw_prompts(1)]  # a warm-up computes zeros
    with kvcore_transformers.installed() as statistics:
        ours = serve(
            model,
            prompts,
            varlen_compile_config=CompileConfig(),
            q_padding_interval_size=16,
            kv_padding_interval_size=32,
            use_async_batching=is_async,
        )
    assert ours.errors == {}
    assert ours.tokens == generated(model, prompts)
    assert ours.num_leaked() == 0
    assert statistics.queries == sum(map(len, prompts))
