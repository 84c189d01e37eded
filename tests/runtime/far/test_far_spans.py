# SPDX-License-Identifier: Apache-2.0
"""A tracer hears of every transfer of a far tier, and how long it took."""

from __future__ import annotations

from collections import Counter

import pytest
from kvcore_runtime.cache.layer_groups import make_groups
from kvcore_runtime.engine.engine import Engine, EngineOptions
from kvcore_runtime.engine.spans import Attributes
from kvcore_runtime.far.exchange import FarExchange
from kvcore_runtime.far.manual import ManualTier

from kvcore import Config
from kvcore.far.options import FarOptions
from kvcore.far.tier import FarStatus
from tests.conftest import Backend
from tests.runtime.far.adversary import BLOCK_SIZE, HandClock, far, reported, run
from tests.runtime.model.questions import DEEP_MODELS, model_of, requests

Span = tuple[str, int, int, Attributes]


@pytest.fixture
def spans() -> list[Span]:
    return []


def make_traced(backend: Backend, tier: ManualTier, clock: HandClock, spans: list[Span]) -> Engine:
    """Return an engine over a tier, with one request, that adds its spans to a list."""
    config = Config(300, groups=make_groups(DEEP_MODELS["full"], BLOCK_SIZE))
    options = EngineOptions(
        backend=backend, token_budget=64, on_span=lambda *span: spans.append(span)
    )
    far_options = FarOptions(min_fetch_tokens=BLOCK_SIZE, weights="tiny")
    engine = Engine(
        model_of(DEEP_MODELS["full"]),
        config,
        options,
        exchange=lambda engine: FarExchange(engine, tier, far_options, clock=clock),
    )
    engine.add_request(requests()[0])
    return engine


def serve(
    backend: Backend, tier: ManualTier, clock: HandClock, spans: list[Span], *, late: bool = False
) -> Counter[tuple[str, str]]:
    """Answer one request over a tier, and return the counts of its pages."""
    engine = make_traced(backend, tier, clock, spans)
    run(engine, tier, act=(lambda: None) if late else tier.answer_all)
    tier.answer_all()
    assert far(engine).flush(1.0)
    return far(engine).counts.pages


def test_each_transfer_is_a_span_with_its_pages(
    backend_of_engine: Backend, spans: list[Span]
) -> None:
    tier, clock = ManualTier(), HandClock()
    for _ in range(2):
        spans.clear()
        pages = serve(backend_of_engine, tier, clock, spans)
        for operation in ("find", "load", "store"):
            name = f"kvcore.far.{operation}"
            of_it = [attributes for each, _, _, attributes in spans if each == name]
            requested = sum(count for (each, _), count in pages.items() if each == operation)
            assert sum(int(each["num_pages"]) for each in of_it) == requested
            assert sum(int(each["num_ok"]) for each in of_it) == pages[operation, "ok"]
            assert not any(each["is_given_up"] for each in of_it)
    assert pages["load", "ok"] > 0


def test_a_transfer_that_fails_is_a_span_without_a_good_page(
    backend_of_engine: Backend, spans: list[Span]
) -> None:
    tier, clock = ManualTier(), HandClock()
    engine = make_traced(backend_of_engine, tier, clock, spans)

    def fail() -> None:
        for each in list(tier.pending):
            tier.answer(each, [reported(FarStatus.FAILED)] * len(each.names))

    run(engine, tier, act=fail)
    attributes = next(each for name, _, _, each in spans if name == "kvcore.far.find")
    assert attributes == {"num_pages": 5, "num_ok": 0, "is_given_up": False}


def test_a_transfer_that_is_given_up_lasts_until_its_deadline(
    backend_of_engine: Backend, spans: list[Span]
) -> None:
    tier, clock = ManualTier(), HandClock()
    serve(backend_of_engine, tier, clock, spans, late=True)
    start, end, attributes = next(span[1:] for span in spans if span[0] == "kvcore.far.find")
    assert (attributes["is_given_up"], attributes["num_ok"]) == (True, 0)
    timeout_ns = 1_000_000_000
    nap_ns = 1_000_000  # the exchange looks at the clock after a nap
    assert timeout_ns <= end - start <= timeout_ns + nap_ns
