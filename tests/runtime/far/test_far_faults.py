# SPDX-License-Identifier: Apache-2.0
"""An engine over a far tier that misbehaves by a seed: tokens as without it, no slot lost."""

import random
from functools import cache

import attrs
import pytest
from kvcore_runtime.engine.engine import Engine
from kvcore_runtime.engine.sequence import GenerationRequest
from kvcore_runtime.far.manual import ManualTier

from kvcore.far.options import FarOptions
from tests.conftest import Backend
from tests.runtime.far.adversary import Adversary, HandClock, far, make_engine, run
from tests.runtime.model import questions
from tests.runtime.model.questions import DEEP_MODELS, assert_drained, references


@pytest.fixture
def backend(backend_of_engine: Backend) -> Backend:
    """Choose the twin, and in `make explore` Python too."""
    return backend_of_engine


SMALL_POOLS = {"full": 14, "windowed": 24}


SALTS = ("a", "b", "c")


def salted(salt: str) -> list[GenerationRequest]:
    return [
        attrs.evolve(each, request_id=f"{salt} {each.request_id}", cache_salt=salt)
        for each in questions.requests()
    ]


@cache
def stored(name: str, backend: Backend) -> dict[str, bytes]:
    """Return the pages of all prompts under all salts."""
    tier = ManualTier()
    engine = make_engine(name, backend, tier, HandClock())
    for request in (each for salt in SALTS for each in salted(salt)):
        sampling = attrs.evolve(request.sampling, max_tokens=1)
        engine.add_request(attrs.evolve(request, sampling=sampling, num_samples=1))
    run(engine, tier)
    tier.answer_all()
    return tier.entries


def endure(
    backend: Backend, name: str, seed: int, num_steps: int, **config: int
) -> tuple[int, int]:
    """Ask and abort at random above a tier that misbehaves; every answer is as without it.

    Returns the faults, and the blocks that were loaded all the same.
    """
    draw, clock, tier = random.Random(seed), HandClock(), Adversary(seed)
    tier.entries |= stored(name, backend)
    options = FarOptions(
        staging_pages=draw.choice([3, 9, 40]),
        min_fetch_tokens=16,
        weights="tiny",
        store_policy=draw.choice(["publication", "publication", "second_use"]),
    )
    pool = {"num_blocks": SMALL_POOLS[name], "num_host_blocks": draw.choice([0, 9])}
    engine = make_engine(name, backend, tier, clock, options, **(pool | config))
    expected = references(engine.model)
    requested: dict[str, GenerationRequest] = {}
    for step in range(num_steps):
        if len(requested) < 4 and draw.random() < 0.3:
            of = draw.choice(salted(draw.choice(SALTS)))
            request = attrs.evolve(of, request_id=f"{step} {of.request_id}")
            requested[request.request_id] = request
            engine.add_request(request)
        if requested and draw.random() < 0.03:
            name_ = draw.choice(sorted(requested))
            del requested[name_]
            engine.abort(name_)
        tier.act()
        clock.sleep(draw.choice([0.001] * 6 + [0.2, 1.1]))
        for done in engine.step():
            of_request = done.request_id.split()[2]
            assert done.tokens == expected[f"{of_request}#{done.sample}"].tokens, (seed, step)
            if done.sample == 0:
                requested.pop(done.request_id, None)
        far(engine).check()
        if step % 16 == 0:
            engine.manager.check()
    finish(engine, tier, clock)
    return tier.num_faults, far(engine).counts.num_loaded


def finish(engine: Engine, tier: Adversary, clock: HandClock) -> None:
    """Check NEVER-STUCK and LEASE: requests end without the tier, slots once it has answered."""
    while not engine.is_idle:
        clock.sleep(0.5)
        engine.step()
    assert_drained(engine)
    tier.share = 0.0
    tier.answer_all()
    far(engine).flush(1.0)
    far(engine).check()
    assert not far(engine).staging.used


WORLDS = {"in order": 0, "in flight": 2}
"""Batches in flight."""


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", DEEP_MODELS)
def test_no_fault_changes_a_token_or_loses_a_slot(backend: Backend, name: str, world: str) -> None:
    sums = [endure(backend, name, seed, 160, max_in_flight=WORLDS[world]) for seed in (2, 3)]
    num_faults, num_loaded = (sum(each) for each in zip(*sums, strict=True))
    assert num_faults > 5
    assert num_loaded > 5


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", DEEP_MODELS)
def test_no_fault_changes_a_token_in_many_steps(backend: Backend, name: str, world: str) -> None:
    for seed in range(25):
        endure(backend, name, 100 + seed, 1000, max_in_flight=WORLDS[world])
