# SPDX-License-Identifier: Apache-2.0
"""Drafts, right and wrong ones, change how many steps an answer takes and nothing else."""

from collections.abc import Sequence

import attrs
import pytest
from kvcore_runtime.cache.layer_groups import make_groups
from kvcore_runtime.engine.drafts import Drafter, PromptLookup, count_accepted
from kvcore_runtime.engine.engine import Engine, EngineOptions
from kvcore_runtime.engine.errors import InvalidOption
from kvcore_runtime.engine.scheduler import Preemption
from kvcore_runtime.engine.sequence import GenerationRequest
from kvcore_runtime.model.model import Llama
from kvcore_runtime.model.sampling import FinishReason, Sampling

from kvcore import Config
from tests.conftest import Backend
from tests.runtime.backends import both_backends
from tests.runtime.engine.spoiled import Spoiled, foreseen
from tests.runtime.model.questions import (
    MODELS,
    SYSTEM,
    answer,
    assert_drained,
    assert_same_answers,
    model_of,
    references,
    requests,
)

NUM_IDS = 260


def model(name: str) -> Llama:
    return model_of(MODELS[name])


@pytest.fixture
def backend(backend_of_engine: Backend) -> Backend:
    """Return the twin; `make explore` has Python, too."""
    return backend_of_engine


def drafters(name: str, temperature: float) -> dict[str, Drafter]:
    right = foreseen(model(name), temperature)
    lookup = PromptLookup(num_matched=1)
    return {
        "right": right,
        "mixed": Spoiled(drafter=right, seed=3, share=0.2, num_tokens=NUM_IDS),
        "wrong": Spoiled(drafter=right, seed=4, share=1.0, num_tokens=NUM_IDS),
        "look-up": Spoiled(drafter=lookup, seed=5, share=0.1, num_tokens=NUM_IDS),
    }


def make_engine(
    name: str,
    backend: Backend,
    drafter: Drafter | None,
    num_blocks: int = 300,
    num_host_blocks: int = 0,
    *,
    token_budget: int = 64,
    preemption: Preemption = "swap",
) -> Engine:
    config = Config(
        num_blocks,
        num_host_blocks=num_host_blocks,
        groups=make_groups(MODELS[name], 16),
        max_num_batched_tokens=token_budget,
    )
    options = EngineOptions(
        backend=backend,
        token_budget=token_budget,
        preemption=preemption,
        drafter=drafter,
        guard=True,
        keep_logits=True,
    )
    return Engine(model(name), config, options)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("drafts", "temperature"),
    [("right", 0.0), ("mixed", 0.0), ("look-up", 0.0), ("mixed", 0.9), ("wrong", 0.9)],
)
def test_answers_are_those_without_drafts(
    backend: Backend, name: str, drafts: str, temperature: float
) -> None:
    engine = make_engine(name, backend, drafters(name, temperature)[drafts])
    expected = references(model(name), temperature)
    assert_same_answers(answer(engine, requests(temperature)), expected)
    assert_drained(engine)
    metrics = engine.metrics
    assert metrics.num_drafts > 0
    assert (metrics.num_accepted_drafts == 0) == (drafts == "wrong")
    if drafts != "right":  # which guesses the wrong one of three samples while they agree
        assert metrics.num_drafts > metrics.num_accepted_drafts


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("num_host_blocks", "token_budget", "preemption"),
    [
        pytest.param(60, 64, "swap", id="swaps"),
        pytest.param(0, 64, "recompute", id="recomputes"),
        pytest.param(3, 64, "swap", id="both"),
    ],
)
def test_drafts_give_way_to_nothing_but_change_no_answer_in_a_small_pool(
    backend: Backend, name: str, num_host_blocks: int, token_budget: int, preemption: Preemption
) -> None:
    num_blocks = 13 if name == "full" else 21
    engine = make_engine(
        name,
        backend,
        drafters(name, 0.9)["mixed"],
        num_blocks,
        num_host_blocks,
        token_budget=token_budget,
        preemption=preemption,
    )
    assert_same_answers(answer(engine, requests()), references(model(name)))
    assert engine.metrics.num_accepted_drafts > 0
    assert engine.metrics.num_drafts > engine.metrics.num_accepted_drafts
    assert engine.scheduler.preemptions.total > 0
    assert_drained(engine)


@pytest.mark.parametrize("token_budget", [2, 9])
def test_drafts_take_what_a_small_step_has_left(backend: Backend, token_budget: int) -> None:
    engine = make_engine(
        "windowed", backend, foreseen(model("windowed")), token_budget=token_budget
    )
    requested = requests()[:2]
    assert_same_answers(answer(engine, requested), references(model("windowed")), requested)
    assert engine.metrics.num_accepted_drafts > 0
    assert_drained(engine)


def test_right_drafts_save_steps_and_are_all_accepted(backend: Backend) -> None:
    (whole,) = [each for each in requests(0.0) if each.request_id == "r6"]
    request = attrs.evolve(whole, sampling=attrs.evolve(whole.sampling, max_tokens=17))
    plain = make_engine("full", backend, None)
    answer(plain, [request])
    drafted = make_engine("full", backend, foreseen(model("full"), 0.0))
    answer(drafted, [request])
    # 17 tokens: one from the prompt, then at most 5 drafts and the token behind them a step.
    assert plain.metrics.num_steps - drafted.metrics.num_steps == 16 - 3
    assert drafted.metrics.num_drafts == drafted.metrics.num_accepted_drafts == 13


@both_backends
def test_an_end_among_the_drafts_ends_the_answer_there(backend: Backend) -> None:
    whole = references(model("full"))["r5#0"].tokens
    (request,) = [each for each in requests() if each.request_id == "r5"]
    end = whole[9]
    ended = attrs.evolve(request, sampling=attrs.evolve(request.sampling, end_ids=frozenset({end})))
    engine = make_engine("full", backend, foreseen(model("full")))
    (done,) = answer(engine, [ended]).values()
    assert done.reason is FinishReason.END
    assert done.tokens == whole[: whole.index(end) + 1]
    assert done.logits is not None
    assert done.logits.shape[0] == len(done.tokens)
    # Behind the first token; drafts behind the end do not count, right as they were.
    assert 0 < engine.metrics.num_accepted_drafts < len(done.tokens)
    assert engine.metrics.num_drafts > engine.metrics.num_accepted_drafts
    assert_drained(engine)


@both_backends
def test_drafts_are_never_reused_by_others_only_accepted_tokens_are(backend: Backend) -> None:
    """The second request begins with what the first one drafted in vain."""
    wrong = Spoiled(drafter=PromptLookup(), seed=1, share=1.0, num_tokens=NUM_IDS)
    drafted: list[tuple[int, ...]] = []

    class Noting:
        def propose(self, tokens: Sequence[int], num_drafts_max: int) -> Sequence[int]:
            drafts = wrong.propose(tokens, num_drafts_max)
            drafted.append((*tokens, *drafts))
            return drafts

    engine = make_engine("full", backend, Noting())
    first = GenerationRequest(
        request_id="1", prompt=tuple(SYSTEM), sampling=Sampling(max_tokens=40)
    )
    answer(engine, [first])
    # A sequence whose drafts filled a block: its tokens with the drafts end one.
    filled = next(each for each in drafted if len(each) % 16 == 0)
    reused_before = engine.manager.take_stats().hits
    second = GenerationRequest(request_id="2", prompt=(*filled, 1), sampling=Sampling(max_tokens=2))
    answer(engine, [second])
    assert reused_before == 0
    assert engine.manager.take_stats().hits == len(filled) - 16
    assert_drained(engine)


@pytest.mark.parametrize("num_steps", [1, 4, 9])
def test_an_abort_between_drafted_steps_leaks_nothing(backend: Backend, num_steps: int) -> None:
    engine = make_engine("windowed", backend, drafters("windowed", 0.9)["mixed"], 33, 20)
    for request in requests():
        engine.add_request(request)
    for _ in range(num_steps):
        engine.step()
    for request in requests():
        engine.abort(request.request_id)
        engine.manager.check()
    assert_drained(engine)


def test_prompt_lookup_guesses_what_followed_last_time() -> None:
    lookup = PromptLookup(num_matched=2, num_drafts=3)
    assert lookup.propose([1, 2, 9, 1, 2, 7, 8, 6, 5, 1, 2], 8) == [7, 8, 6]
    assert lookup.propose([1, 2, 9, 1, 2], 1) == [9]
    assert lookup.propose([1, 1, 1], 8) == [1]
    assert list(lookup.propose([1, 2, 3], 8)) == []
    assert list(lookup.propose([1], 8)) == []
    with pytest.raises(InvalidOption, match="num_matched is 0, expected 1 or more"):
        PromptLookup(num_matched=0)


def test_spoiled_guesses_are_never_right() -> None:
    drafter = Spoiled(drafter=PromptLookup(), seed=9, share=1.0, num_tokens=5)
    tokens = [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
    right = PromptLookup().propose(tokens, 4)
    wrong = drafter.propose(tokens, 4)
    assert len(wrong) == len(right) == 4
    assert all(mine != other for mine, other in zip(wrong, right, strict=True))
    assert all(0 <= each < 5 for each in wrong)
    assert drafter.propose(tokens, 4) == wrong
    kept = attrs.evolve(drafter, share=0.0)
    assert list(kept.propose(tokens, 4)) == list(right)


def test_drafts_count_up_to_the_first_that_was_not_sampled() -> None:
    assert count_accepted([], [4]) == 0
    assert count_accepted([4, 5], [4, 5, 6]) == 2
    assert count_accepted([4, 5, 6], [4, 9, 6, 7]) == 1
    assert count_accepted([8, 5], [4, 5, 6]) == 0
