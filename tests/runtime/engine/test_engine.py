# SPDX-License-Identifier: Apache-2.0
"""Laws of the engine, on the tiny model in invariant mode, where answers compare bit by bit."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import attrs
import pytest
from kvcore_runtime.cache.errors import StaleRead
from kvcore_runtime.engine.engine import Engine, EngineOptions
from kvcore_runtime.engine.errors import EngineStuck, InvalidOption, NeverFits, RequestInProgress
from kvcore_runtime.engine.scheduler import Preemption
from kvcore_runtime.engine.sequence import GenerationRequest
from kvcore_runtime.errors import InvalidRequest, InvalidSampling
from kvcore_runtime.model.model import Llama, tiny_model
from kvcore_runtime.model.sampling import FinishReason, Sampling

from kvcore import Config
from tests.conftest import Backend
from tests.helpers.amount import every_second
from tests.runtime.backends import both_backends
from tests.runtime.model.questions import (
    SYSTEM,
    answer,
    assert_drained,
    assert_same_answers,
    references,
    requests,
)

LARGE = Config(120)


@cache
def model() -> Llama:
    return tiny_model(invariant=True)


@pytest.fixture
def backend(backend_of_engine: Backend) -> Backend:
    """Return the twin; `make explore` has Python, too."""
    return backend_of_engine


def make_engine(
    config: Config,
    backend: Backend,
    *,
    token_budget: int = 256,
    max_sequences: int = 64,
    preemption: Preemption = "swap",
) -> Engine:
    options = EngineOptions(
        backend=backend,
        token_budget=token_budget,
        max_sequences=max_sequences,
        preemption=preemption,
        guard=True,
        keep_logits=True,
    )
    return Engine(model(), config, options)


@pytest.mark.parametrize(
    ("num_blocks", "num_host_blocks", "token_budget", "preemption"),
    [
        pytest.param(120, 0, 256, "swap", id="all fits"),
        pytest.param(120, 0, 24, "swap", id="small chunks"),
        pytest.param(19, 40, 64, "swap", id="swaps"),
        pytest.param(19, 40, 64, "recompute", id="recomputes"),
        pytest.param(13, 6, 40, "swap", id="swaps and recomputes"),
        pytest.param(11, 6, 7, "swap", id="one at a time"),
    ],
)
def test_answers_depend_on_neither_pool_nor_batching_nor_preemption(
    backend: Backend,
    num_blocks: int,
    num_host_blocks: int,
    token_budget: int,
    preemption: Preemption,
) -> None:
    config = Config(num_blocks, num_host_blocks=num_host_blocks)
    engine = make_engine(config, backend, token_budget=token_budget, preemption=preemption)
    assert_same_answers(answer(engine, requests()), references(model()))
    assert_drained(engine)


@both_backends
def test_a_small_pool_brings_about_all_that_is_claimed(backend: Backend) -> None:
    engine = make_engine(Config(19, num_host_blocks=9), backend, token_budget=64)
    answer(engine, requests())
    metrics = engine.metrics
    assert metrics.num_evictions > 0
    assert metrics.num_copies > 0
    assert metrics.num_blocks_out > 0
    assert metrics.num_blocks_in > 0
    assert engine.scheduler.preemptions.by_swap > 0
    assert engine.scheduler.preemptions.by_recompute > 0
    assert engine.manager.take_stats().hits > 0


def test_both_backends_take_the_same_steps() -> None:
    pytest.importorskip("kvcore._rust")
    backends: tuple[Backend, Backend] = ("python", "rust")
    config = Config(19, num_host_blocks=9)
    engines = [make_engine(config, backend, token_budget=64) for backend in backends]
    for engine in engines:
        for request in requests():
            engine.add_request(request)
    while not engines[0].is_idle:
        completions = [engine.step() for engine in engines]
        assert [(each.request_id, each.sample) for each in completions[0]] == [
            (each.request_id, each.sample) for each in completions[1]
        ]
        assert engines[0].manager.encode() == engines[1].manager.encode()
    assert engines[1].is_idle


def test_samples_share_the_prompt_and_copy_only_its_last_block(backend: Backend) -> None:
    engine = make_engine(LARGE, backend)
    prompt = tuple(SYSTEM)  # 4 whole blocks and 4 tokens of a fifth
    sampling = Sampling(temperature=0.9, max_tokens=4)
    request = GenerationRequest(request_id="r", prompt=prompt, sampling=sampling, num_samples=3)
    engine.add_request(request)
    engine.step()
    assert LARGE.num_usable_blocks - engine.manager.num_free_blocks == 5
    engine.step()
    assert engine.metrics.num_copies == 2
    assert LARGE.num_usable_blocks - engine.manager.num_free_blocks == 7
    assert engine.metrics.num_computed_tokens == len(prompt) + 3


def test_a_later_turn_computes_only_what_is_new(backend: Backend) -> None:
    engine = make_engine(LARGE, backend)
    first = GenerationRequest(
        request_id="1", prompt=tuple(SYSTEM), sampling=Sampling(max_tokens=20)
    )
    (done,) = answer(engine, [first]).values()
    before = engine.metrics.num_computed_tokens
    prompt = (*first.prompt, *done.tokens, *b"And then?")
    second = GenerationRequest(request_id="2", prompt=prompt, sampling=Sampling(max_tokens=1))
    answer(engine, [second])
    # 68 + 20 tokens, the last of which was never computed: five whole blocks are cached.
    assert engine.metrics.num_computed_tokens - before == len(prompt) - 80


@pytest.mark.parametrize("num_steps", every_second([0, 1, 2, 5, 9, 14, 20, 26]))
def test_an_abort_in_mid_flight_leaks_nothing(backend: Backend, num_steps: int) -> None:
    engine = make_engine(Config(13, num_host_blocks=9), backend, token_budget=40)
    for request in requests():
        engine.add_request(request)
    for _ in range(num_steps):
        engine.step()
    for request in requests():
        engine.abort(request.request_id)
        engine.manager.check()
    assert_drained(engine)
    requested = requests()[3:]
    assert_same_answers(answer(engine, requested), references(model()), requested)
    assert_drained(engine)


def test_aborting_some_does_not_touch_the_others(backend: Backend) -> None:
    engine = make_engine(Config(13, num_host_blocks=9), backend, token_budget=40)
    for request in requests():
        engine.add_request(request)
    done = [completion for _ in range(8) for completion in engine.step()]
    for name in ("r0", "r1", "r6", "nobody"):
        engine.abort(name)
    done += engine.run()
    kept = {each.request_id: each.tokens for each in done if each.request_id not in ("r0", "r1")}
    assert kept == {
        name: references(model())[f"{name}#0"].tokens for name in ("r2", "r3", "r4", "r5")
    }
    assert_drained(engine)


def test_what_never_fits_is_refused_by_name_and_the_rest_goes_on(backend: Backend) -> None:
    engine = make_engine(Config(12), backend)
    large = GenerationRequest(
        request_id="large", prompt=tuple(SYSTEM * 2), sampling=Sampling(max_tokens=42)
    )
    with pytest.raises(NeverFits) as caught:
        engine.add_request(large)
    # 136 + 42 tokens, of which the last takes no slot: 177 slots.
    assert str(caught.value) == "request 'large' needs 12 blocks, there are 11"
    fits = attrs.evolve(large, request_id="fits", sampling=Sampling(max_tokens=41))
    assert answer(engine, [fits])["fits#0"].reason is FinishReason.LENGTH
    assert_drained(engine)


def test_what_the_watermark_never_admits_is_refused_too(backend: Backend) -> None:
    sampling = Sampling(max_tokens=41)  # with the prompt 176 slots: all eleven blocks
    large = GenerationRequest(request_id="large", prompt=tuple(SYSTEM * 2), sampling=sampling)
    engine = make_engine(Config(12, watermark_blocks=1), backend)
    with pytest.raises(NeverFits, match="'large' needs 11 blocks, there are 10"):
        engine.add_request(large)
    fits = attrs.evolve(large, sampling=Sampling(max_tokens=25))
    assert answer(engine, [fits])["large#0"].reason is FinishReason.LENGTH
    assert_drained(engine)


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt": ()},
        {"prompt": (1, -1)},
        {"prompt": (1, 1.5)},
        {"answered": (-1,)},
        {"cache_salt": ""},
        {"cache_salt": 5},
        {"num_samples": 0},
    ],
    ids=str,
)
def test_what_is_no_request_is_refused_before_any_step(wrong: dict[str, Any]) -> None:
    with pytest.raises((InvalidRequest, InvalidSampling), match="expected"):
        GenerationRequest(**{"request_id": "r", "prompt": (1, 2)} | wrong)


def test_an_id_that_reads_like_a_sample_of_another_request_is_its_own(backend: Backend) -> None:
    engine = make_engine(LARGE, backend)
    named = [attrs.evolve(requests()[0], request_id=f"r1#{number}") for number in (0, 1)]
    asked = [*named, requests()[1]]
    assert asked[-1].num_samples == 3
    for request in asked:
        engine.add_request(request)
    done = {(each.request_id, each.sample): each.tokens for each in engine.run()}
    expected = references(model())
    assert done == {(f"r1#{number}", 0): expected["r0#0"].tokens for number in (0, 1)} | {
        ("r1", sample): expected[f"r1#{sample}"].tokens for sample in range(3)
    }
    assert_drained(engine)


def test_limits_of_model_and_engine_are_refused_with_their_numbers(backend: Backend) -> None:
    engine = make_engine(Config(200), backend, max_sequences=2)
    long = GenerationRequest(request_id="long", prompt=(1,) * 2000, sampling=Sampling())
    with pytest.raises(NeverFits, match="'long' needs 2064 tokens, there are 2048"):
        engine.add_request(long)
    many = GenerationRequest(request_id="many", prompt=(1,), num_samples=3)
    with pytest.raises(NeverFits, match="'many' needs 3 sequences, there are 2"):
        engine.add_request(many)
    other = GenerationRequest(request_id="other", prompt=(1, 260), answered=(7,))
    with pytest.raises(NeverFits, match="'other' needs 261 token ids, there are 260"):
        engine.add_request(other)
    with pytest.raises(NeverFits, match="'other' needs 301 token ids, there are 260"):
        engine.add_request(attrs.evolve(other, prompt=(1,), answered=(300,)))
    engine.add_request(attrs.evolve(many, num_samples=2))
    with pytest.raises(RequestInProgress, match="'many'"):
        engine.add_request(attrs.evolve(many, num_samples=1))
    with pytest.raises(InvalidOption, match="token_budget is 0, expected 1 or more"):
        EngineOptions(token_budget=0)
    assert engine.step() == []
    engine.abort("many")
    assert_drained(engine)


def test_a_pool_made_for_smaller_steps_is_refused(backend: Backend) -> None:
    config = Config(120, max_num_batched_tokens=64)
    with pytest.raises(InvalidOption, match="max_num_batched_tokens is 64, expected 65 or more"):
        make_engine(config, backend, token_budget=65)
    make_engine(config, backend, token_budget=64)


def test_a_request_is_open_until_its_last_sample_is_answered(backend: Backend) -> None:
    """A step computes one token, so that the second sample ends a step after the first one."""
    engine = make_engine(LARGE, backend, token_budget=1)
    short = GenerationRequest(
        request_id="short", prompt=(1, 2, 3), sampling=Sampling(max_tokens=2), num_samples=2
    )
    engine.add_request(short)
    num_steps = [0, 0, 0]  # by answers that have come
    num_done = 0
    while num_done < 2:
        with pytest.raises(RequestInProgress):
            engine.add_request(short)
        num_done += len(engine.step())
        num_steps[num_done] += 1
    assert num_steps[1] == 1
    engine.add_request(short)
    engine.abort("short")
    assert_drained(engine)


def test_more_requests_than_rows_wait_outside(backend: Backend) -> None:
    engine = make_engine(LARGE, backend, max_sequences=3)
    assert_same_answers(answer(engine, requests()), references(model()))
    assert engine.runtime.tables.max_rows == 6
    assert_drained(engine)


def test_the_youngest_gives_way_and_swapped_ones_come_back_first(backend: Backend) -> None:
    engine = make_engine(Config(19, num_host_blocks=40), backend, token_budget=64)
    for request in requests():
        engine.add_request(request)
    was_swapped: set[str] = set()
    while not engine.is_idle:
        waiting = [each.sequence_id for each in engine.scheduler.waiting]
        swapped = list(engine.scheduler.swapped)
        engine.step()
        now = engine.scheduler
        if swapped and set(swapped) <= set(now.swapped):
            assert [each.sequence_id for each in now.waiting] == waiting, "no request overtakes"
        fresh = [each for each in now.swapped if each not in swapped]
        was_swapped |= {each.sequence_id for each in fresh}
        for victim in fresh:
            assert all(each.age < victim.age for each in now.running)
    assert was_swapped


def test_stop_strings_end_an_answer(backend: Backend) -> None:
    whole = references(model())["r3#0"].tokens
    text = bytes(token for token in whole if token < 256)
    stop = next(chr(byte) for byte in text[3:] if chr(byte).isascii())
    request = attrs.evolve(
        requests()[3], sampling=attrs.evolve(requests()[3].sampling, stop=(stop,))
    )

    def decode(ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token < 256).decode("latin-1")

    options = EngineOptions(backend=backend, guard=True)
    engine = Engine(model(), LARGE, options, decode=decode)
    (done,) = answer(engine, [request]).values()
    assert done.reason is FinishReason.STOP
    assert done.tokens == whole[: whole.index(ord(stop)) + 1]


def test_blocks_that_others_pin_are_named_when_nothing_can_go_on(backend: Backend) -> None:
    engine = make_engine(Config(6), backend)
    request = GenerationRequest(
        request_id="r", prompt=tuple(SYSTEM)[:32], sampling=Sampling(max_tokens=16)
    )
    answer(engine, [request])
    engine.manager.pin([block for block in range(1, 6) if _is_cached(engine, block)])
    other = attrs.evolve(request, prompt=tuple(SYSTEM)[32:64] + tuple(b"0123456789"))
    engine.add_request(other)
    with pytest.raises(EngineStuck, match="nothing of 1 sequences could be scheduled"):
        engine.run()


def _is_cached(engine: Engine, block: int) -> bool:
    return engine.manager.state().device.keys[block] is not None


def test_guard_mode_finds_a_table_that_was_tampered_with(backend: Backend) -> None:
    def tamper(engine: Engine, _batch: object) -> None:
        if engine.metrics.num_steps == 3:
            row = engine.scheduler.running[0].row
            engine.runtime.tables.blocks[0, row, 0] = LARGE.num_blocks - 1

    options = EngineOptions(backend=backend, guard=True)
    engine = Engine(model(), LARGE, options, observe=tamper)
    with pytest.raises(StaleRead, match="request r0: reads block 119"):
        answer(engine, requests()[:1])
