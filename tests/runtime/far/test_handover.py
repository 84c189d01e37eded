# SPDX-License-Identifier: Apache-2.0
"""Prefill in one engine, decode in another: the same tokens, whatever of the pages is found."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import attrs
import pytest
from kvcore_runtime.cache.layer_groups import make_groups
from kvcore_runtime.engine.engine import Engine, EngineOptions
from kvcore_runtime.engine.sequence import Completion, GenerationRequest
from kvcore_runtime.errors import InvalidSampling
from kvcore_runtime.far.handover import (
    BYTES_MAX,
    BadHandover,
    Handover,
    as_decode,
    as_prefill,
    hand_over,
    read_handover,
)
from kvcore_runtime.model.sampling import Sampling

from kvcore import Config
from tests.conftest import Backend
from tests.runtime.far.kept import keep_in, settled
from tests.runtime.model.questions import DEEP_MODELS, model_of, references, requests

RIGHT = Handover(request_id="r", num_tokens=9, first_token=3, identity="ab" * 32)


def make(path: Path | None, name: str = "full", backend: Backend = "rust") -> Engine:
    model = model_of(DEEP_MODELS[name])
    config = Config(60, groups=make_groups(DEEP_MODELS[name], 16), hash_seed=b"apart")
    options = EngineOptions(backend=backend, guard=True, token_budget=64)
    exchange = None if path is None else (lambda engine: keep_in(path, engine))
    return Engine(model, config, options, exchange=exchange)


def single() -> list[GenerationRequest]:
    return [attrs.evolve(each, num_samples=1) for each in requests()]


def prefill(engine: Engine, request: GenerationRequest) -> Handover | None:
    engine.add_request(as_prefill(request))
    (completion,) = engine.run()
    return hand_over(engine, request, completion)


def decode(engine: Engine, request: GenerationRequest, reported: Handover | None) -> Completion:
    assert reported is not None
    engine.add_request(as_decode(engine, request, read_handover(reported.to_json())))
    (completion,) = engine.run()
    return completion


def expected(name: str, request: GenerationRequest) -> tuple[int, ...]:
    return tuple(references(model_of(DEEP_MODELS[name]))[f"{request.request_id}#0"].tokens)


@pytest.mark.parametrize("name", DEEP_MODELS)
def test_the_tokens_are_those_of_one_engine(name: str, backend: Backend, tmp_path: Path) -> None:
    first, second = make(tmp_path, name, backend), make(tmp_path, name, backend)
    for request in single():
        completion = decode(second, request, prefill(first, request))
        assert completion.tokens == expected(name, request)
    first_counts, counts = settled(first), settled(second)
    assert first_counts.num_stored > 0
    assert counts.num_hits >= 16 * len(single())
    computed = second.metrics.num_computed_tokens
    assert computed < first.metrics.num_computed_tokens


def test_any_part_of_the_pages_gives_the_same_tokens(tmp_path: Path) -> None:
    draw = random.Random(4)
    first, second = make(tmp_path), make(tmp_path)
    for request in single():
        reported = prefill(first, request)
        for page in sorted(tmp_path.rglob("*.kv")):
            if draw.random() < 0.4:
                page.unlink()
            elif draw.random() < 0.3:
                page.write_bytes(page.read_bytes()[:-1])
        assert decode(second, request, reported).tokens == expected("full", request)
    settled(first)
    assert settled(second).num_hits > 0


def test_without_any_page_all_is_computed(tmp_path: Path) -> None:
    first, second = make(tmp_path), make(tmp_path)
    request = single()[0]
    reported = prefill(first, request)
    settled(first)
    shutil.rmtree(tmp_path)
    assert decode(second, request, reported).tokens == expected("full", request)
    settled(second)


def test_a_hand_over_of_another_model_says_nothing(tmp_path: Path) -> None:
    engine = make(tmp_path)
    request = single()[0]
    foreign = attrs.evolve(
        RIGHT, request_id=request.request_id, num_tokens=len(request.prompt), first_token=0
    )
    assert as_decode(engine, request, foreign) is request
    assert decode(engine, request, foreign).tokens == expected("full", request)
    settled(engine)


def test_an_answer_that_is_over_needs_no_second_engine(tmp_path: Path) -> None:
    engine = make(tmp_path)
    request = single()[0]
    first = expected("full", request)[0]
    ends = attrs.evolve(
        request, sampling=attrs.evolve(request.sampling, end_ids=frozenset({first}))
    )
    assert prefill(engine, ends) is None
    short = attrs.evolve(
        request, request_id="short", sampling=attrs.evolve(request.sampling, max_tokens=1)
    )
    assert prefill(engine, short) is None
    settled(engine)


def test_an_engine_without_far_tier_has_nothing_to_hand_over() -> None:
    with pytest.raises(BadHandover, match="in no far tier"):
        prefill(make(None), single()[0])


def test_a_hand_over_of_another_request_is_refused(tmp_path: Path) -> None:
    engine = make(tmp_path)
    with pytest.raises(BadHandover, match="it is of request 'r' of 9 tokens; request 'r0' has"):
        as_decode(engine, single()[0], RIGHT)
    settled(engine)


def test_a_hand_over_is_one_line_of_json() -> None:
    text = RIGHT.to_json()
    assert "\n" not in text
    assert read_handover(text) == read_handover(text.encode()) == RIGHT


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"version": 2}, "version 2, expected 1"),
        ({"version": True}, "version True, expected 1"),
        ({"num_tokens": -1}, "num_tokens is -1"),
        ({"num_tokens": "9"}, "num_tokens is '9'"),
        ({"first_token": 2**31}, f"first_token is {2**31}"),
        ({"request_id": 7}, "request_id is 7"),
        ({"identity": "ab"}, "identity is 'ab', expected 64 digits"),
        ({"identity": "xy" * 32}, "expected 64 digits"),
        ({"identity": None}, "identity is None, expected text"),
    ],
)
def test_wrong_values_are_named(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadHandover, match=reason):
        read_handover(attrs.evolve(RIGHT, **change).to_json())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not JSON"),
        ("[" * 4000, "not JSON"),
        ("[]", "expected an object with request_id"),
        ('{"version": 1}', "expected an object with request_id"),
        ("x" * (BYTES_MAX + 1), f"at most {BYTES_MAX}"),
        (b"\xff\xfe", "not JSON"),
    ],
)
def test_other_text_is_refused(text: str | bytes, reason: str) -> None:
    with pytest.raises(BadHandover, match=reason):
        read_handover(text)


def test_random_text_is_refused() -> None:
    draw, right = random.Random(1), RIGHT.to_json().encode()
    for _ in range(5000):
        text = bytearray(right)
        text[draw.randrange(len(text))] = draw.randrange(256)
        try:
            read_handover(bytes(text))
        except BadHandover:
            continue


def test_tokens_that_are_given_leave_something_to_sample() -> None:
    sampling = Sampling(max_tokens=2)
    with pytest.raises(InvalidSampling, match="max_tokens is 2, expected more than the 2 tokens"):
        GenerationRequest(request_id="r", prompt=(1,), sampling=sampling, answered=(1, 2))
    with pytest.raises(InvalidSampling, match="num_samples is 2, expected 1"):
        GenerationRequest(request_id="r", prompt=(1,), num_samples=2, answered=(1,))
