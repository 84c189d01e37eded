# SPDX-License-Identifier: Apache-2.0
"""An engine over a far tier whose answers the test gives: fetch first, load later."""

import random
from collections.abc import Callable

import attrs
import pytest
from kvcore_runtime.engine.engine import Engine
from kvcore_runtime.engine.sequence import GenerationRequest
from kvcore_runtime.far.manual import ManualTier

from kvcore.errors import InOpenBatch
from kvcore.far.errors import EpochHasWeights
from kvcore.far.fetches import FetchState
from kvcore.far.options import FarOptions
from kvcore.far.tier import FarStatus
from tests.conftest import Backend
from tests.helpers.amount import every_second
from tests.runtime.far.adversary import HandClock, far, make_engine, reported, run, spoil
from tests.runtime.model import questions
from tests.runtime.model.questions import (
    DEEP_MODELS,
    assert_drained,
    assert_same_answers,
    model_of,
    references,
)


@pytest.fixture
def backend(backend_of_engine: Backend) -> Backend:
    """Return the twin; `make explore` has Python, too."""
    return backend_of_engine


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def tier() -> ManualTier:
    return ManualTier()


def requested() -> list[GenerationRequest]:
    """Return three prompts of 73, 81 and 125 tokens, of which one asks for three samples."""
    return questions.requests()[:3]


def one() -> GenerationRequest:
    """Return the first: 81 tokens, five blocks of 16 and one more token."""
    return requested()[0]


def answers(
    engine: Engine,
    tier: ManualTier,
    requests: list[GenerationRequest],
    act: Callable[[], None] | None = None,
) -> Engine:
    """Add requests, run, and compare the answers with those of the model alone."""
    for request in requests:
        engine.add_request(request)
    done = []
    while not engine.is_idle:
        (act or tier.answer_all)()
        done += engine.step()
        far(engine).check()
    tier.answer_all()
    assert far(engine).flush(1.0)
    far(engine).check()
    assert_drained(engine)
    completions = {f"{each.request_id}#{each.sample}": each for each in done}
    name = next(key for key, each in DEEP_MODELS.items() if model_of(each) is engine.model)
    assert_same_answers(completions, references(model_of(DEEP_MODELS[name])), requests)
    return engine


@pytest.mark.parametrize("max_in_flight", [0, 2])
@pytest.mark.parametrize("name", DEEP_MODELS)
def test_another_engine_computes_only_what_the_tier_has_not(
    backend: Backend, tier: ManualTier, clock: HandClock, name: str, max_in_flight: int
) -> None:
    first = answers(
        make_engine(name, backend, tier, clock, max_in_flight=max_in_flight), tier, requested()
    )
    assert 0 < len(tier.entries) == far(first).counts.num_stored
    second = answers(
        make_engine(name, backend, tier, clock, max_in_flight=max_in_flight), tier, requested()
    )
    num_decoded = sum(each.num_samples * (each.sampling.max_tokens - 1) for each in requested())
    if max_in_flight == 0:
        assert second.metrics.num_computed_tokens - num_decoded == sum(
            (len(each.prompt) - 1) % 16 + 1 for each in requested()
        )
    assert far(second).counts.num_hits == sum(
        (len(each.prompt) - 1) // 16 * 16 for each in requested()
    )
    assert far(second).counts.num_failed == 0


def test_pages_behind_a_damaged_one_are_computed_and_it_is_stored_anew(
    backend: Backend, tier: ManualTier, clock: HandClock
) -> None:
    answers(make_engine("full", backend, tier, clock), tier, [one()])
    whole = dict(tier.entries)
    engine = make_engine("full", backend, tier, clock)
    engine.add_request(one())
    engine.step()
    tier.answer_all()
    engine.step()
    (load,) = tier.pending
    names = list(load.names)
    assert len(names) == (len(one().prompt) - 1) // 16
    tier.entries[names[1]] = bytes(spoil(random.Random(1), bytearray(whole[names[1]])))
    tier.answer(load)
    assert names[1] not in tier.entries
    run(engine, tier)
    tier.answer_all()
    far(engine).flush(1.0)
    assert far(engine).counts.num_loaded == 1
    assert far(engine).counts.num_hits == 16
    assert engine.metrics.num_computed_tokens == len(one().prompt) - 16 + (
        one().sampling.max_tokens - 1
    )
    assert tier.entries == whole


def test_a_tier_that_does_not_answer_costs_the_deadline_and_no_more(
    backend: Backend, tier: ManualTier, clock: HandClock
) -> None:
    engine = make_engine("full", backend, tier, clock)
    started = clock.now
    answers(engine, tier, [one()], act=lambda: None)
    assert 1.0 <= clock.now - started < 1.01
    assert far(engine).counts.pages["find", "timeout"] > 0
    assert far(engine).counts.num_hits == 0


def test_slots_of_a_late_ticket_stay_in_quarantine_until_it_ends(
    backend: Backend, tier: ManualTier, clock: HandClock
) -> None:
    answers(make_engine("full", backend, tier, clock), tier, [one()])
    engine = make_engine("full", backend, tier, clock)
    engine.add_request(one())
    engine.step()
    tier.answer_all()
    engine.step()
    (load,) = tier.pending
    slots = far(engine).staging.used
    assert len(slots) == len(load.names)
    clock.sleep(1.0)
    while not engine.is_idle:
        engine.step()
        far(engine).check()
    assert slots <= far(engine).staging.used
    assert load.is_cancelled
    tier.answer_all()
    far(engine).flush(1.0)
    assert not far(engine).staging.used
    assert_drained(engine)


@pytest.mark.parametrize("num_steps", every_second(range(6)))
@pytest.mark.parametrize("answered", [False, True])
def test_an_abort_frees_all_once_the_tier_has_answered(
    backend: Backend, tier: ManualTier, clock: HandClock, num_steps: int, answered: bool
) -> None:
    answers(make_engine("windowed", backend, tier, clock), tier, requested())
    engine = make_engine("windowed", backend, tier, clock)
    for request in requested():
        engine.add_request(request)
    for _ in range(num_steps):
        engine.step()
        if answered:
            tier.answer_all()
    for request in requested():
        engine.abort(request.request_id)
        engine.manager.check()
        far(engine).check()
    assert engine.scheduler.unfinished() == []
    run(engine, tier)
    tier.answer_all()
    far(engine).flush(1.0)
    assert not far(engine).staging.used
    assert_drained(engine)
    answers(engine, tier, requested())


def test_three_failures_take_the_tier_down_and_a_probe_brings_it_back(
    backend: Backend, tier: ManualTier, clock: HandClock
) -> None:
    engine = make_engine("full", backend, tier, clock)

    def fail() -> None:
        for each in list(tier.pending):
            tier.answer(each, [reported(FarStatus.FAILED)] * len(each.names))

    for _ in range(3):
        answers(engine, tier, [one()], act=fail)
        engine.manager.reset_prefix_cache()
    assert not far(engine).is_up
    before = clock.now
    answers(engine, tier, [one()], act=fail)
    assert tier.pending == []
    assert clock.now == before, "no request waits for it"
    for wait_s, last in ((1.0, False), (2.0, False), (4.0, True)):
        clock.sleep(wait_s - 0.01)
        far(engine).flush(1.0)
        assert tier.pending == []
        clock.sleep(0.02)
        far(engine).flush(1.0)
        (probe,) = tier.pending
        assert len(probe.names) == 1
        tier.answer(probe, [] if last else [reported(FarStatus.FAILED)])
        far(engine).flush(1.0)
    assert far(engine).is_up
    answers(engine, tier, [one()])


def test_a_tier_that_takes_nothing_drops_what_was_to_be_stored(
    backend: Backend, tier: ManualTier, clock: HandClock
) -> None:
    tier.takes = False
    engine = answers(make_engine("full", backend, tier, clock), tier, requested())
    assert far(engine).counts.dropped["busy"] > 0
    assert not tier.entries


def test_what_was_not_kept_is_stored_again(
    backend: Backend, tier: ManualTier, clock: HandClock
) -> None:
    """The tier refuses it once, and takes no ticket once; the third time it is stored."""
    engine = make_engine("full", backend, tier, clock)

    def refuse() -> None:
        for each in list(tier.pending):
            is_store = each.operation == "store"
            tier.answer(each, [reported(FarStatus.FULL)] * len(each.names) if is_store else [])

    answers(engine, tier, [one()], act=refuse)
    tier.takes = False
    answers(engine, tier, [one()])
    assert not tier.entries
    tier.takes = True
    answers(engine, tier, [one()])
    assert len(tier.entries) >= len(one().prompt) // 16


def test_a_page_that_the_tier_lost_is_stored_again(
    backend: Backend, tier: ManualTier, clock: HandClock
) -> None:
    """The engine believed that the tier had it; a find tells that it is gone."""
    engine = answers(make_engine("full", backend, tier, clock), tier, [one()])
    stored = set(tier.entries)
    tier.entries.clear()
    assert engine.manager.reset_prefix_cache()
    answers(engine, tier, [one()])
    assert set(tier.entries) == stored


def test_what_a_step_is_still_to_copy_is_not_stored_yet(
    backend: Backend, tier: ManualTier, clock: HandClock
) -> None:
    engine = make_engine("full", backend, tier, clock)
    sampling = attrs.evolve(one().sampling, max_tokens=1)
    engine.add_request(attrs.evolve(one(), sampling=sampling))
    done = engine.step()
    tier.answer_all()  # it has no pages
    while not done:
        done = engine.step()
        tier.answer_all()
    assert not far(engine).flush(0.0)
    assert engine.run() == []
    tier.answer_all()
    assert far(engine).flush(0.0)
    assert far(engine).counts.num_stored == 5


def test_three_slots_are_enough(backend: Backend, tier: ManualTier, clock: HandClock) -> None:
    options = FarOptions(staging_pages=3, min_fetch_tokens=16, weights="tiny")
    answers(make_engine("windowed", backend, tier, clock), tier, [one()])
    engine = answers(make_engine("windowed", backend, tier, clock, options), tier, [one()])
    assert far(engine).counts.dropped["no slot to load"] > 0
    assert far(engine).counts.num_loaded == 2


def test_few_tokens_are_computed_rather_than_fetched(
    backend: Backend, tier: ManualTier, clock: HandClock
) -> None:
    answers(make_engine("full", backend, tier, clock), tier, [one()])
    least = (len(one().prompt) - 1) // 16 * 16
    for tokens, found in ((least, True), (least + 1, False)):
        options = FarOptions(min_fetch_tokens=tokens, weights="tiny")
        engine = answers(make_engine("full", backend, tier, clock, options), tier, [one()])
        assert (far(engine).counts.num_loaded > 0) == found


def test_other_weights_find_nothing_and_an_epoch_needs_its_weights(
    backend: Backend, tier: ManualTier, clock: HandClock
) -> None:
    engine = answers(make_engine("full", backend, tier, clock), tier, [one()])
    before = dict(tier.entries)
    engine.manager.advance_epoch()
    assert far(engine).identity is None
    answers(engine, tier, [one()])
    assert tier.entries == before, "it is unknown which weights these are"
    far(engine).set_weights("others")
    answers(engine, tier, [one()])
    assert far(engine).counts.num_hits == 0
    assert len(tier.entries) == 2 * len(before)


def test_weights_that_come_back_find_their_pages(
    backend: Backend, tier: ManualTier, clock: HandClock
) -> None:
    engine = answers(make_engine("full", backend, tier, clock), tier, [one()])
    name = far(engine).identity
    for weights in ("others", "tiny"):
        engine.manager.advance_epoch()
        far(engine).set_weights(weights)
    assert far(engine).identity == name
    answers(engine, tier, [one()])
    assert far(engine).counts.num_hits == (len(one().prompt) - 1) // 16 * 16


def test_a_running_engine_comes_to_an_epoch_once_it_stores_nothing(
    backend: Backend, tier: ManualTier, clock: HandClock
) -> None:
    engine = make_engine("full", backend, tier, clock)

    def advance() -> None:
        tier.answer_all()
        if far(engine).identity is None and engine.manager.epoch == 0:
            assert engine.manager.advance_epoch() == 1
        elif far(engine)._stores.is_copying:
            with pytest.raises(InOpenBatch):
                engine.manager.advance_epoch()
            far(engine).set_weights(None)

    answers(engine, tier, [one()], act=advance)
    assert engine.manager.epoch == 1


def test_an_epoch_has_one_name_of_its_weights(
    backend: Backend, tier: ManualTier, clock: HandClock
) -> None:
    """Blocks of the cache would be stored as what other weights computed."""
    engine = make_engine("full", backend, tier, clock)
    name = far(engine).identity
    refused = "epoch 0 has weights 'tiny': call advance_epoch before 'others' are set"
    with pytest.raises(EpochHasWeights, match=refused):
        far(engine).set_weights("others")
    assert far(engine).identity == name
    far(engine).set_weights(None)
    assert far(engine).identity is None
    with pytest.raises(EpochHasWeights, match=refused):
        far(engine).set_weights("others")
    assert far(engine).identity is None
    far(engine).set_weights("tiny")
    assert far(engine).identity == name
    assert engine.manager.advance_epoch() == 1
    far(engine).set_weights("others")
    with pytest.raises(EpochHasWeights, match="epoch 1 has weights 'others'"):
        far(engine).set_weights("tiny")


def test_pages_that_were_staged_for_older_weights_are_not_counted(
    backend: Backend, tier: ManualTier, clock: HandClock
) -> None:
    answers(make_engine("full", backend, tier, clock), tier, [one()])
    engine = make_engine("full", backend, tier, clock)
    engine.add_request(one())
    engine.step()
    tier.answer_all()
    engine.step()
    tier.answer_all()
    far(engine).flush(1.0)
    (fetch,) = far(engine)._fetches._fetches.values()
    assert fetch.state is FetchState.READY
    assert fetch.pages
    engine.manager.advance_epoch()
    far(engine).set_weights("others")
    run(engine, tier)
    assert far(engine).counts.num_hits == 0
    assert far(engine).counts.num_loaded == 0


def test_second_use_stores_what_a_second_request_hits(
    backend: Backend, tier: ManualTier, clock: HandClock
) -> None:
    options = FarOptions(min_fetch_tokens=16, weights="tiny", store_policy="second_use")
    engine = answers(make_engine("full", backend, tier, clock, options), tier, [one()])
    assert not tier.entries
    answers(engine, tier, [attrs.evolve(one())])
    assert len(tier.entries) == (len(one().prompt) - 1) // 16
