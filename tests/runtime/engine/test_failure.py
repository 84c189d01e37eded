# SPDX-License-Identifier: Apache-2.0
"""A step that broke off: no block that it did not write is hit or stored later."""

from __future__ import annotations

import pytest
from kvcore_runtime.engine.engine import Engine
from kvcore_runtime.far.manual import ManualTier

from tests.conftest import Backend
from tests.runtime.far.adversary import HandClock, make_engine
from tests.runtime.model.questions import requests

REQUEST = requests()[0]


def fail(*_: object) -> None:
    raise MemoryError


@pytest.fixture
def tier() -> ManualTier:
    return ManualTier()


@pytest.fixture
def engine(backend_of_engine: Backend, tier: ManualTier) -> Engine:
    """Return an engine whose first forward pass raised: its blocks have keys, but no content."""
    engine = make_engine("full", backend_of_engine, tier, HandClock())
    engine.forward.on_pass = fail
    engine.add_request(REQUEST)
    engine.step()
    tier.answer_all()  # it has no pages
    with pytest.raises(MemoryError):
        engine.run()
    engine.forward.on_pass = None
    return engine


def test_an_engine_whose_step_broke_off_answers_no_later_request(engine: Engine) -> None:
    engine.abort(REQUEST.request_id)
    engine.add_request(REQUEST)
    for _ in range(3):
        with pytest.raises(MemoryError):
            engine.step()


def test_blocks_that_no_pass_wrote_are_not_stored_for_other_engines(
    engine: Engine, tier: ManualTier
) -> None:
    for _ in range(3):
        with pytest.raises(MemoryError):
            engine.step()
    engine.exchange.flush(1.0)
    assert (tier.pending, tier.entries) == ([], {})
