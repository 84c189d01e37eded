# SPDX-License-Identifier: Apache-2.0
"""A prompt computed by one engine and answered by another gives the tokens and logits of one."""

from collections.abc import Sequence
from functools import partial

import attrs
import pytest
from kvcore_runtime.cache.errors import ParcelMismatch
from kvcore_runtime.cache.layer_groups import make_groups
from kvcore_runtime.engine.connector import Channel, Parcel, Receiver, Sender
from kvcore_runtime.engine.engine import Engine, EngineOptions
from kvcore_runtime.engine.sequence import GenerationRequest
from kvcore_runtime.model.model import Llama

from kvcore import Config, Request
from tests.conftest import Backend
from tests.runtime.backends import both_backends
from tests.runtime.model.questions import (
    DEEP_MODELS as MODELS,
)
from tests.runtime.model.questions import (
    answer,
    assert_drained,
    assert_same_answers,
    model_of,
    references,
    requests,
)


@pytest.fixture
def backend(backend_of_engine: Backend) -> Backend:
    """Return the twin; `make explore` has Python, too."""
    return backend_of_engine


class Slow(Channel):
    """Each parcel arrives after it was asked for a few times."""

    def __init__(self, num_waits: int) -> None:
        super().__init__()
        self._num_waits = num_waits
        self._requested: dict[str, int] = {}

    def receive(self, request_id: str) -> Parcel | None:
        requested = self._requested[request_id] = self._requested.get(request_id, 0) + 1
        return super().receive(request_id) if requested > self._num_waits else None


class Lossy(Slow):
    """Only this many tokens of each parcel arrive, after a while."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(2)
        self._num_tokens = num_tokens

    def receive(self, request_id: str) -> Parcel | None:
        parcel = super().receive(request_id)
        return None if parcel is None else attrs.evolve(parcel, num_tokens=self._num_tokens)


class Torn(Channel):
    """A page in the middle of each parcel is missing."""

    def receive(self, request_id: str) -> Parcel | None:
        parcel = super().receive(request_id)
        assert parcel is not None
        pages = parcel.pages[-1]
        del pages[sorted(pages)[len(pages) // 2]]
        return parcel


def model(name: str) -> Llama:
    return model_of(MODELS[name])


def make_engine(
    name: str,
    backend: Backend,
    channel: Channel,
    role: type[Sender] | type[Receiver],
    num_blocks: int = 300,
    num_host_blocks: int = 0,
    block_size: int = 16,
) -> Engine:
    config = Config(
        num_blocks,
        num_host_blocks=num_host_blocks,
        groups=make_groups(MODELS[name], block_size),
        max_num_batched_tokens=64,
    )
    options = EngineOptions(backend=backend, token_budget=64, guard=True, keep_logits=True)
    return Engine(model(name), config, options, exchange=partial(role, channel=channel))


def only_prompts() -> list[GenerationRequest]:
    """Return the requests for the engine that computes prompts, with one token that is not used."""
    return [
        attrs.evolve(each, num_samples=1, sampling=attrs.evolve(each.sampling, max_tokens=1))
        for each in requests()
    ]


def computed_after_load(engine: Engine, requested: Sequence[GenerationRequest]) -> int:
    """Count the positions of prompts that the answering engine computed itself."""
    num_decoded = sum(each.num_samples * (each.sampling.max_tokens - 1) for each in requested)
    return engine.metrics.num_computed_tokens - num_decoded


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_waits", [0, 3])
def test_an_answer_behind_a_hand_over_is_that_of_one_engine(
    backend: Backend, name: str, num_waits: int
) -> None:
    channel = Slow(num_waits)
    prefill = make_engine(name, backend, channel, Sender)
    decode = make_engine(name, backend, channel, Receiver)
    answer(prefill, only_prompts())
    assert_drained(prefill)
    assert len(channel) == 7
    assert_same_answers(answer(decode, requests()), references(model(name)))
    assert computed_after_load(decode, requests()) == 7  # the last token of each prompt
    assert len(channel) == 0
    assert_drained(decode)


@both_backends
def test_both_engines_may_be_at_work_at_the_same_time(backend: Backend) -> None:
    channel = Slow(1)
    prefill = make_engine("windowed", backend, channel, Sender, 60)
    decode = make_engine("windowed", backend, channel, Receiver, 45, 20)
    requested = {each.request_id: each for each in requests()}
    for request in only_prompts():
        prefill.add_request(request)
    completions = {}
    while not (prefill.is_idle and decode.is_idle):
        for done in prefill.step():
            decode.add_request(requested[done.request_id])
        for each in decode.step():
            completions[f"{each.request_id}#{each.sample}"] = each
    assert_same_answers(completions, references(model("windowed")))
    assert_drained(decode)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_tokens", [0, 16, 37])
def test_what_did_not_come_is_computed(backend: Backend, name: str, num_tokens: int) -> None:
    channel = Lossy(num_tokens)
    prefill = make_engine(name, backend, channel, Sender)
    answer(prefill, only_prompts()[:3])
    decode = make_engine(name, backend, channel, Receiver)
    requested = requests()[:3]
    assert_same_answers(answer(decode, requested), references(model(name)), requested)
    assert computed_after_load(decode, requested) > 3
    assert_drained(decode)


def test_a_loss_does_not_reach_into_what_was_hit(backend: Backend) -> None:
    """The first answer leaves the common beginning in the cache, of which less comes later."""
    channel = Lossy(16)
    prefill = make_engine("full", backend, channel, Sender)
    decode = make_engine("full", backend, channel, Receiver)
    requested = requests()[:3]
    completions = answer(decode, requested[:1])
    answer(prefill, only_prompts()[1:3])
    decode.add_request(requested[1])
    decode.step()
    decode.add_request(requested[2])
    completions |= {f"{each.request_id}#{each.sample}": each for each in decode.run()}
    assert_same_answers(completions, references(model("full")), requested)
    assert_drained(decode)


@pytest.mark.parametrize("name", MODELS)
def test_a_hole_in_a_parcel_is_computed_with_all_behind_it(backend: Backend, name: str) -> None:
    channel = Torn()
    prefill = make_engine(name, backend, channel, Sender)
    answer(prefill, only_prompts()[:3])
    decode = make_engine(name, backend, channel, Receiver)
    requested = requests()[:3]
    assert_same_answers(answer(decode, requested), references(model(name)), requested)
    assert computed_after_load(decode, requested) > 3
    assert_drained(decode)


def test_loaded_blocks_are_findable_from_when_their_content_is_there(backend: Backend) -> None:
    channel = Slow(3)
    prefill = make_engine("full", backend, channel, Sender)
    decode = make_engine("full", backend, channel, Receiver)
    first = requests()[0]
    answer(prefill, only_prompts()[:1])
    decode.add_request(first)
    decode.manager.add_request(Request("probe", first.prompt))
    while not decode.scheduler.loading:
        decode.step()
    assert decode.manager.get_computed_blocks("probe").num_tokens == 0
    # The same prompt, which was never sent: it is computed here and not read from unwritten blocks.
    decode.add_request(attrs.evolve(first, request_id="again"))
    decode.step()
    decode.abort("again")
    decode.manager.evict_blocks(range(1, decode.manager.config.num_blocks))
    while decode.scheduler.loading:
        assert decode.manager.get_computed_blocks("probe").num_tokens == 0
        decode.step()
    assert decode.metrics.num_computed_tokens == 64, "only the one that was aborted"
    # 81 tokens, of which the last is left to compute: five whole blocks were loaded.
    assert decode.manager.get_computed_blocks("probe").num_tokens == 80
    (done,) = decode.run()
    assert done.tokens == references(model("full"))["r0#0"].tokens
    assert_drained(decode)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_steps", [1, 3, 5])
def test_an_abort_while_a_load_is_on_its_way_leaks_nothing(
    backend: Backend, name: str, num_steps: int
) -> None:
    channel, requested = Slow(2), requests()[:4]
    prefill = make_engine(name, backend, channel, Sender)
    answer(prefill, only_prompts()[:4])
    decode = make_engine(name, backend, channel, Receiver, 50)
    for request in requested:
        decode.add_request(request)
    for _ in range(num_steps):
        decode.step()
    was_loading = bool(decode.scheduler.loading)
    assert was_loading or num_steps > 2
    for request in requested:
        decode.abort(request.request_id)
        decode.manager.check()
    assert_drained(decode)
    # Nothing that comes late is written into blocks that others hold now.
    assert_same_answers(answer(decode, requested), references(model(name)), requested)
    assert_drained(decode)


def test_a_parcel_of_an_earlier_request_of_the_same_id_is_not_loaded(backend: Backend) -> None:
    first, second = requests()[0], requests()[2]
    channel = Channel()
    prefill = make_engine("full", backend, channel, Sender)
    decode = make_engine("full", backend, channel, Receiver)
    answer(prefill, only_prompts()[:1])
    second = attrs.evolve(second, request_id=first.request_id)
    (done,) = answer(decode, [second]).values()
    assert done.tokens == references(model("full"))["r2#0"].tokens


def test_blocks_of_another_shape_are_refused(backend: Backend) -> None:
    channel = Channel()
    prefill = make_engine("full", backend, channel, Sender, block_size=8)
    answer(prefill, only_prompts()[:1])
    decode = make_engine("full", backend, channel, Receiver)
    decode.add_request(requests()[0])
    with pytest.raises(ParcelMismatch, match=r"blocks of \[2, 2, 8, 2, 16\] torch.float32 were"):
        decode.step()
    assert decode.manager.num_free_blocks == decode.manager.config.num_usable_blocks
