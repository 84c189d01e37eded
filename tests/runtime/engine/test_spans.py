# SPDX-License-Identifier: Apache-2.0
"""A tracer hears of every step, whatever it does itself."""

from __future__ import annotations

import pytest
from kvcore_runtime.engine.engine import Engine, EngineOptions
from kvcore_runtime.engine.spans import Attributes, OnSpan
from kvcore_runtime.model.model import tiny_model

from kvcore import Config
from tests.conftest import Backend
from tests.runtime.model.questions import requests

Span = tuple[str, int, int, Attributes]


def make_engine(backend: Backend, on_span: OnSpan | None) -> Engine:
    options = EngineOptions(backend=backend, token_budget=64, on_span=on_span)
    engine = Engine(tiny_model(invariant=True), Config(40), options)
    for request in requests():
        engine.add_request(request)
    return engine


def test_each_step_is_a_span_with_its_numbers(backend_of_engine: Backend) -> None:
    spans: list[Span] = []
    engine = make_engine(backend_of_engine, lambda *span: spans.append(span))
    num_steps = 0
    while not engine.is_idle:
        engine.step()
        num_steps += 1
    engine.step()  # idle: no step, no span
    assert len(spans) == num_steps
    assert {name for name, *_ in spans} == {"kvcore.step"}
    assert all(0 < start <= end for _, start, end, _ in spans)
    numbers = [attributes for *_, attributes in spans]
    assert {frozenset(each) for each in numbers} == {frozenset({"num_tokens", "num_commands"})}
    metrics = engine.metrics
    assert sum(int(each["num_tokens"]) for each in numbers) == metrics.num_computed_tokens
    assert sum(int(each["num_commands"]) for each in numbers) == metrics.commands.total()


def test_a_failing_step_is_a_span_with_the_name_of_its_error(
    backend_of_engine: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans: list[Span] = []
    engine = make_engine(backend_of_engine, lambda *span: spans.append(span))

    def fail(_: object) -> None:
        raise OSError("the text may name a token")

    monkeypatch.setattr(engine.forward, "compute", fail)
    with pytest.raises(OSError, match="may name"):
        engine.step()
    ((_, _, _, attributes),) = spans
    assert attributes["error"] == "OSError"


def test_a_tracer_that_raises_stops_nothing_and_is_logged_without_its_text(
    backend_of_engine: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    def raises(*_: object) -> None:
        raise ValueError("secret")

    traced, alone = make_engine(backend_of_engine, raises), make_engine(backend_of_engine, None)
    assert [each.tokens for each in traced.run()] == [each.tokens for each in alone.run()]
    assert {(each.name, each.getMessage()) for each in caplog.records} == {
        ("kvcore_runtime", "on_span raised ValueError")
    }
