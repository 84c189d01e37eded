# SPDX-License-Identifier: Apache-2.0
"""A model with recurrent states beside attention: from blocks it answers, bit for bit, as from one
state per request that never moved, whatever was hit, cut, copied, swapped, forked or preempted.
"""

from __future__ import annotations

import random
from collections import Counter

import attrs
import pytest
import torch
from kvcore_runtime.attention.visibility import FULL, STATE, Visibility
from kvcore_runtime.cache import segments
from kvcore_runtime.cache.errors import GroupsDoNotHoldModel, InvalidLayout, StaleRead
from kvcore_runtime.cache.layer_groups import make_groups
from kvcore_runtime.engine.drafts import PromptLookup
from kvcore_runtime.engine.engine import Engine, EngineOptions
from kvcore_runtime.engine.errors import NotWithStates
from kvcore_runtime.engine.exchange import Exchange
from kvcore_runtime.engine.sequence import Completion, GenerationRequest
from kvcore_runtime.model.contiguous import generate_reference
from kvcore_runtime.model.model import Llama, tiny_config, tiny_model
from kvcore_runtime.model.sampling import Sampling

from kvcore import Config, Group
from kvcore.types.commands import Batch, CopyOnWrite, Evict, Free, SwapIn, SwapOut, Zero
from tests.conftest import Backend
from tests.runtime.engine.spoiled import Spoiled, foreseen
from tests.runtime.model.questions import (
    SLIDING,
    SYSTEM,
    assert_drained,
    assert_same_answers,
    model_of,
    references,
    requests,
)

MODELS = {
    "three kinds": (STATE, SLIDING, FULL, STATE, SLIDING, FULL),
    "mostly states": (STATE, STATE, STATE, FULL),
}
NUM_DRAFTS, NUM_IDS = 3, 260
IN_ORDER = 4
"""Lives without batches in flight, before those with one."""
TWO_AND_ONE = (FULL, STATE, FULL)
"""A page holds two layers of attention, or the state of one and padding."""


@pytest.fixture
def backend(backend_of_engine: Backend) -> Backend:
    """Return the twin; `make explore` has Python, too."""
    return backend_of_engine


class Life:
    """An engine, and requests that come, come again and are aborted at random."""

    def __init__(self, seed: int, backend: Backend) -> None:
        self.pick = random.Random(seed)
        self.layers = list(MODELS.values())[seed % len(MODELS)]
        self.model = model_of(self.layers)
        swaps = self.pick.random() < 0.5
        budget = self.pick.choice([24, 40, 100])
        interval = self.pick.choice([8, 16, 32])
        drafts = seed % 3 == 0
        places = NUM_DRAFTS if drafts else 0
        groups = [
            attrs.evolve(each, block_size=interval, draft_states=places) if each.is_state else each
            for each in make_groups(self.layers, 16)
        ]
        config = Config(
            self.pick.randint(28, 36),
            num_host_blocks=30 if swaps else 0,
            groups=tuple(groups),
            max_num_batched_tokens=budget,
            hash_seed=b"hybrid",
        )
        right = foreseen(self.model)
        spoiled = Spoiled(drafter=right, seed=seed, share=0.2, num_tokens=NUM_IDS)
        options = EngineOptions(
            backend=backend,
            token_budget=budget,
            preemption="swap" if swaps else "recompute",
            guard=self.pick.random() < 0.7,
            keep_logits=True,
            drafter=spoiled if drafts else None,
        )
        if seed % 2:
            config = attrs.evolve(config, hash_block_size=4)
        if seed >= IN_ORDER:
            config = attrs.evolve(config, max_in_flight=1)
        if seed % 4 == 1:
            config = attrs.evolve(config, publish="completed")
        self.engine = Engine(self.model, config, options)
        self.seen: Counter[str] = Counter()

    def step(self) -> list[Completion]:
        """Make a step of the engine."""
        return self.engine.step()

    def live(self) -> None:
        """Answer some requests, two of them twice and perhaps one not at all, and compare."""
        engine, waiting = self.engine, self.pick.sample(requests(), 4)
        waiting += [
            attrs.evolve(each, request_id=f"{each.request_id}#again") for each in waiting[:2]
        ]
        self.pick.shuffle(waiting)
        aborted, completions = waiting[0].request_id, {}
        while waiting or not engine.is_idle:
            if waiting and (engine.is_idle or self.pick.random() < 0.3):
                engine.add_request(waiting.pop(0))
            if self.pick.random() < 0.03:
                engine.abort(aborted)
            for each in self.step():
                completions[f"{each.request_id.split('#')[0]}#{each.sample}"] = each
                self.seen["forks"] += each.sample > 0
        expected = references(self.model)
        assert completions
        assert_same_answers(completions, {name: expected[name] for name in completions})
        assert_drained(engine)
        for kind in (Zero, CopyOnWrite, Evict, SwapOut, SwapIn, Free):
            self.seen[kind.__name__] += engine.metrics.commands[kind.kind]
        self.seen["hits"] += engine.manager.take_stats().hits
        self.seen["overlapped"] += engine.metrics.num_overlapped
        self.seen["accepted"] += engine.metrics.num_accepted_drafts
        self.seen["rejected"] += engine.metrics.num_drafts - engine.metrics.num_accepted_drafts
        self.seen["hits inside"] += engine.scheduler.num_hits_inside
        self.seen["recomputed"] += engine.scheduler.preemptions.by_recompute


def test_random_lives_answer_as_states_that_never_moved(backend: Backend) -> None:
    seen: Counter[str] = Counter()
    for seed in range(IN_ORDER + 4):
        life = Life(seed, backend)
        life.live()
        seen += life.seen
    assert set(seen) == {
        *(
            "Zero",
            "CopyOnWrite",
            "Evict",
            "SwapOut",
            "SwapIn",
            "Free",
            "hits",
            "hits inside",
            "overlapped",
            "forks",
            "recomputed",
            "accepted",
            "rejected",
        )
    }


def ask(request_id: str, prompt: bytes, max_tokens: int = 6) -> GenerationRequest:
    sampling = Sampling(temperature=0.9, seed=1, max_tokens=max_tokens)
    return GenerationRequest(request_id=request_id, prompt=tuple(prompt), sampling=sampling)


def make_engine(backend: Backend, model: Llama, *, guard: bool) -> Engine:
    groups = (Group(8), Group(8, kind="state"))
    options = EngineOptions(backend=backend, token_budget=64, guard=guard, keep_logits=True)
    return Engine(model, Config(12, groups=groups, hash_seed=b"hybrid"), options)


def check_hits(backend: Backend, model: Llama, *, guard: bool) -> None:
    """Answer a prompt, others that begin alike, and one for which blocks are used again."""
    engine = make_engine(backend, model, guard=guard)
    prompts = [SYSTEM[:21], SYSTEM[:19], SYSTEM[:16] + b"Sing!", b"Where is the gold now?"]
    computed = []
    for number, prompt in enumerate(prompts):
        request = ask(str(number), prompt)
        before = engine.metrics.num_computed_tokens
        engine.add_request(request)
        (found,) = engine.run()
        computed.append(engine.metrics.num_computed_tokens - before)
        (expected,) = generate_reference(
            model, [request.prompt], [request.sampling], keep_logits=True
        )
        assert found.tokens == expected.tokens
        assert found.logits is not None
        assert expected.logits is not None
        assert torch.equal(found.logits, expected.logits)
    # Of six tokens of an answer the last is never computed. Two prompts hit the state after 16.
    assert computed == [21 + 5, 3 + 5, 5 + 5, 22 + 5]
    assert_drained(engine)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_hit_starts_from_the_state_at_a_boundary(backend: Backend, dtype: torch.dtype) -> None:
    config = tiny_config(visibilities=TWO_AND_ONE)
    check_hits(backend, tiny_model(dtype=dtype, invariant=True, config=config), guard=True)


def test_a_hit_needs_no_guard(backend: Backend) -> None:
    check_hits(backend, model_of(TWO_AND_ONE), guard=False)


def test_a_state_that_nothing_filled_is_found_by_the_guard(backend: Backend) -> None:
    """Pages of float16 are seen as float32 in a group of states, and are NaN in both."""
    config = tiny_config(visibilities=TWO_AND_ONE)
    engine = make_engine(backend, tiny_model(dtype=torch.float16, config=config), guard=True)
    engine.add_request(ask("r", SYSTEM[:21]))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(segments, "zero_blocks", lambda *_: None)
        with pytest.raises(StaleRead, match="its state holds NaN"):
            engine.run()


@pytest.mark.parametrize(
    ("layers", "groups"),
    [
        ((SLIDING, STATE), make_groups((SLIDING, STATE), 8)),
        ((FULL, STATE), (Group(32), Group(4, kind="state"))),
    ],
    ids=["window", "full"],
)
def test_a_long_answer_holds_two_states_at_most(
    backend: Backend, layers: tuple[Visibility, ...], groups: tuple[Group, ...]
) -> None:
    """Its table is longer than the pool, since a window and a state leave null blocks behind."""
    model = model_of(layers)
    held: list[int] = []

    def count(engine: Engine, _batch: Batch) -> None:
        row = engine.scheduler.running[0].row
        held.append(sum(block != 0 for block in engine.runtime.tables.row_blocks(row, 1)))

    config = Config(14, groups=groups, max_num_batched_tokens=32)
    options = EngineOptions(backend=backend, token_budget=32, guard=True)
    engine = Engine(model, config, options, observe=count)
    engine.add_request(ask("long", SYSTEM, 60))
    engine.run()
    assert set(held) == {1, 2}
    assert_drained(engine)


def test_groups_that_do_not_hold_the_states_are_refused(backend: Backend) -> None:
    state = Group(4, kind="state")
    for layers, groups, error, message in (
        ((FULL, STATE), (Group(16),), GroupsDoNotHoldModel, "no group keeps what state layers"),
        ((FULL,), (Group(16), state), GroupsDoNotHoldModel, "no layer lies in group 1"),
        ((STATE,), (state,), GroupsDoNotHoldModel, "no group is of attention"),
        # 2 heads of 16 x 16 numbers of 4 bytes; a page has 4 tokens, keys and values of 2 x 16.
        ((FULL, STATE), (Group(4), state), InvalidLayout, "2048 bytes .* 1 pieces of 1024 bytes"),
    ):
        with pytest.raises(error, match=message):
            Engine(model_of(layers), Config(9, groups=groups), EngineOptions(backend=backend))


def test_drafts_without_places_and_exchanges_are_refused(backend: Backend) -> None:
    model, config = model_of((FULL, STATE)), Config(9, groups=make_groups((FULL, STATE), 8))
    with pytest.raises(NotWithStates, match="drafter, unless its groups have draft_states"):
        Engine(model, config, EngineOptions(backend=backend, drafter=PromptLookup()))

    class Other(Exchange):
        """An exchange of its own."""

    with pytest.raises(NotWithStates, match="exchange"):
        Engine(model, config, EngineOptions(backend=backend), exchange=lambda _: Other())
