# SPDX-License-Identifier: Apache-2.0
"""Cancels, exceptions, other weights, and two bugs of transformers that the adapter fixes."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

from tests.engines.transformers.environment import ABSENT

pytest.importorskip("transformers", reason=ABSENT)

import kvcore_transformers
import torch
from kvcore_transformers.offloading import Offload
from transformers.generation.continuous_batching import ContinuousBatchingManager

from tests.engines.transformers.models import (
    PAGE,
    draw_prompts,
    generated,
    reference,
    serve,
    settings,
    tiny,
)
from tests.engines.transformers.streams import act_streams

pytestmark = pytest.mark.transformers


@pytest.mark.parametrize("kind", ["full", "hybrid"])
@pytest.mark.parametrize("seed", range(4))
def test_a_cancel_at_any_step_leaves_no_block_and_changes_no_other_answer(
    kind: str, seed: int
) -> None:
    chance = random.Random(seed)
    victims = chance.sample(range(8), 3)
    at = {chance.randrange(14): f"r{victim}" for victim in victims}
    steps = iter(range(1000))
    finished: set[str] = set()

    def cancel(manager: Any) -> None:
        name = at.get(next(steps))
        if name is None:
            return
        scheduler = manager.batch_processor.scheduler
        if name in scheduler.active_requests or name in scheduler.waiting_requests:
            finished.add(name)  # in vain: it never delivers
            manager.cancel_request(name)

    model, prompts = tiny(kind), draw_prompts(1)
    with kvcore_transformers.installed():
        ours = serve(model, prompts, cancel, lambda: 8 - len(finished), num_blocks=16)
    expected = reference(kind, 1)
    assert finished
    assert ours.tokens == {name: expected[name] for name in expected.keys() - finished}
    assert ours.errors == {}
    assert ours.num_leaked() == 0


@pytest.mark.parametrize("space", [0, 1e-3])
def test_requests_behind_an_offload_go_on_when_the_active_ones_are_cancelled(
    space: float,
) -> None:
    cancelled: set[str] = set()

    def cancel_active(manager: Any) -> None:
        scheduler = manager.batch_processor.scheduler
        if scheduler.block_new_requests and not cancelled:
            cancelled.update(scheduler.active_requests)
            for name in cancelled:
                manager.cancel_request(name)

    model, prompts = tiny(), [[number] * 30 for number in range(6)]
    with kvcore_transformers.installed():
        ours = serve(
            model,
            prompts,
            cancel_active,
            lambda: 6 - len(cancelled),
            num_blocks=12,
            new=20,
            cpu_offload_space=space,
        )
    expected = generated(model, prompts, new=20)
    assert cancelled
    assert ours.tokens == {name: expected[name] for name in expected.keys() - cancelled}
    assert ours.num_leaked() == 0


@pytest.mark.parametrize("is_async", [False, True])
def test_samples_of_a_prompt_of_which_one_token_is_left_to_compute(
    is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    act_streams(monkeypatch)
    model = tiny()
    prompts = [list(range(2 * PAGE + 1)), [5], list(range(2 * PAGE + 1)), [7, 8]]
    with kvcore_transformers.installed():
        ours = serve(model, prompts, n=3, max_requests_per_batch=1, use_async_batching=is_async)
    answers = generated(model, prompts)
    assert ours.errors == {}
    assert len(ours.tokens) == 12
    assert ours.tokens == {name: answers[name.split("__")[0]] for name in ours.tokens}
    assert ours.num_leaked() == 0


def generate_again(model: Any, prompts: list[list[int]]) -> tuple[list[list[int]], list[str]]:
    """Return tokens and errors of `generate_batch` with a manager that is kept."""
    generation, batching = settings()
    outputs = model.generate_batch(
        prompts,
        generation_config=generation,
        continuous_batching_config=batching,
        persistent_manager=True,
    ).values()
    return [each.generated_tokens for each in outputs], [each.error for each in outputs]


def test_what_a_failed_step_left_unwritten_is_never_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, prompts = tiny(), draw_prompts(1)
    forward, calls = model.forward, iter(range(1000))

    def failing(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 2:
            raise ArithmeticError("a step broke off")
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "forward", failing)
    with kvcore_transformers.installed() as statistics:
        _, errors = generate_again(model, prompts)
        assert "a step broke off" in errors
        cache = model.init_continuous_batching().batch_processor.cache
        assert cache.is_outdated or cache.manager.state().epoch
        tokens, errors = generate_again(model, prompts)
        model.destroy_cached_continuous_batching_manager()
    assert tokens == list(reference("full", 1).values())
    assert errors == [None] * 8
    assert statistics.hits > 0
    cache.manager.check()
    assert cache.manager.num_free_blocks == cache.manager.config.num_usable_blocks


@pytest.mark.parametrize("is_told", [False, True])
def test_other_weights_get_no_keys_and_values_of_the_old_ones(is_told: bool) -> None:
    model, prompts = tiny(), draw_prompts(1)
    with kvcore_transformers.installed() as statistics:
        first, _ = generate_again(model, prompts)
        found = statistics.hits
        assert generate_again(model, prompts)[0] == first
        assert statistics.hits > 2 * found  # the cache is kept from call to call
        for ours, other in zip(model.parameters(), tiny(seed=1).parameters(), strict=True):
            if is_told:
                ours.data.copy_(other.data)  # torch counts no change
            else:
                with torch.no_grad():
                    ours.copy_(other)
        if is_told:
            kvcore_transformers.weights_changed(model.init_continuous_batching())
        second, _ = generate_again(model, prompts)
        model.destroy_cached_continuous_batching_manager()
    assert second == list(generated(model, prompts).values())
    assert second != first


def test_a_kept_manager_notices_other_weights_after_uninstall() -> None:
    model, prompts = tiny(), draw_prompts(1)
    with kvcore_transformers.installed():
        first, _ = generate_again(model, prompts)
    for ours, other in zip(model.parameters(), tiny(seed=1).parameters(), strict=True):
        with torch.no_grad():
            ours.copy_(other)
    second, _ = generate_again(model, prompts)
    model.destroy_cached_continuous_batching_manager()
    assert second == list(generated(model, prompts).values())
    assert second != first


@pytest.mark.parametrize("is_made_before", [False, True])
def test_a_manager_that_its_user_makes_notices_other_weights(is_made_before: bool) -> None:
    model, prompts = tiny(), draw_prompts(1)
    generation, batching = settings()
    early = ContinuousBatchingManager(model, generation, batching) if is_made_before else None
    with kvcore_transformers.installed():
        manager = early or ContinuousBatchingManager(model, generation, batching)
        answers = []
        for change in (None, tiny(seed=1)):
            if change is not None:
                for ours, other in zip(model.parameters(), change.parameters(), strict=True):
                    with torch.no_grad():
                        ours.copy_(other)
            manager.start()
            done: dict[str, list[int]] = {}
            for number, prompt in enumerate(prompts):
                manager.add_request(prompt, request_id=f"r{number}", eos_token_id=-1)
            while len(done) < len(prompts):
                result = manager.get_result(timeout=60)
                assert result is not None
                if result.is_finished():
                    done[result.request_id] = result.generated_tokens
            manager.stop(block=True, keep_for_next_session=True)
            answers.append(done)
        manager.stop(block=True)
    assert answers[1] == generated(model, prompts)
    assert answers[1] != answers[0]


def test_while_requests_of_old_weights_go_on_nothing_of_theirs_is_found() -> None:
    model = tiny()
    prompts = [[number % 2] * 30 for number in range(6)]
    steps = iter(range(1000))

    def change(manager: Any) -> None:
        if next(steps) == 2:
            kvcore_transformers.weights_changed(manager)

    with kvcore_transformers.installed():
        kept = serve(model, prompts, max_requests_per_batch=2)
        ours = serve(model, prompts, change, max_requests_per_batch=2)
    assert ours.tokens == kept.tokens
    assert ours.hits < kept.hits
    assert ours.num_leaked() == 0


def test_two_managers_in_one_process_keep_apart() -> None:
    models = [tiny(seed=0), tiny(seed=1)]
    prompts = draw_prompts(1)
    served: dict[int, Any] = {}

    def run(number: int) -> None:
        served[number] = serve(models[number], prompts, num_blocks=16)

    with kvcore_transformers.installed() as statistics:
        threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for number, model in enumerate(models):
        assert served[number].tokens == generated(model, prompts)
        assert served[number].num_leaked() == 0
    assert served[0].cache.manager is not served[1].cache.manager
    assert statistics.hits == served[0].hits + served[1].hits


def test_a_step_that_breaks_off_between_its_plan_and_its_tensors_fails_all_and_frees_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, prompts = tiny(), [[7] * 30, [7] * 30, [7] * 30]  # the others hit what the first writes

    def failing(_: Any, __: Any) -> None:
        raise ArithmeticError("no tensors")

    monkeypatch.setattr(Offload, "restore_scheduled_requests", failing)
    with kvcore_transformers.installed():
        ours = serve(model, prompts, max_batch_tokens=100)
    assert ours.errors == dict.fromkeys(["r0", "r1", "r2"], "no tensors")
    assert ours.num_leaked() == 0


def test_a_request_that_cannot_be_served_fails_alone() -> None:
    added: list[str] = []

    def add_again(manager: Any) -> None:
        if "r3" in manager.batch_processor.scheduler.active_requests and not added:
            added.append("r3")
            manager.add_request([5, 6], request_id="r3", eos_token_id=-1)

    model, prompts = tiny(), [[7] * 30, [], [3, -4], [1, 2]]
    with kvcore_transformers.installed():
        ours = serve(model, prompts, add_again)
    assert ours.errors == {
        "r1": "request r1 has 0 tokens",
        "r2": "request r2 has 2 tokens, the least of them -4",
        "r3": "request r3 is being served: no other can have its id before it ends",
    }
    assert ours.tokens["r0"] == generated(model, [[7] * 30])["r0"]
    assert ours.num_leaked() == 0
