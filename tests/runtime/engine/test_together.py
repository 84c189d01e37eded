# SPDX-License-Identifier: Apache-2.0
"""Everything at once, by chance: windows, drafts, files that fail, aborts, cancels, pressure.

Whatever the draw, answers are those from contiguous caches, and nothing is left held.
"""

import random
from collections import Counter
from collections.abc import Callable

import attrs
import pytest
from kvcore_runtime.attention.visibility import FULL, Visibility
from kvcore_runtime.cache.layer_groups import make_groups
from kvcore_runtime.engine.connector import Channel, Parcel, Receiver, Sender
from kvcore_runtime.engine.drafts import PromptLookup
from kvcore_runtime.engine.engine import Engine, EngineOptions
from kvcore_runtime.engine.exchange import Exchange
from kvcore_runtime.engine.sequence import Completion, Sequence
from kvcore_runtime.far.exchange import FarExchange
from kvcore_runtime.model.model import Llama

from kvcore import Config
from kvcore.far.options import FarCounts, FarOptions
from tests.conftest import Backend
from tests.runtime.engine.spoiled import Spoiled
from tests.runtime.far.adversary import Adversary, HandClock
from tests.runtime.model.questions import (
    SLIDING,
    assert_drained,
    assert_same_answers,
    model_of,
    references,
    requests,
)

CHUNKED = Visibility(kind="chunked_local", window=24)
MODELS = ((FULL, SLIDING, FULL, SLIDING), (CHUNKED, FULL), (SLIDING, FULL, CHUNKED))
SEEDS = (38, 39, 44, 49, 54, 61)
"""In these draws all events happen that the test requires; any other draw must be right too."""


@pytest.fixture
def backend(backend_of_engine: Backend) -> Backend:
    """Return the twin; `make explore` has Python, too."""
    return backend_of_engine


class Unsure(Channel):
    """Parcels arrive late, in part, or as they were sent."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self._draw = draw

    def receive(self, request_id: str) -> Parcel | None:
        if self._draw.random() < 0.5:
            return None
        parcel = super().receive(request_id)
        assert parcel is not None
        lost = self._draw.choice([0, 0, 9, 40])
        return attrs.evolve(parcel, num_tokens=max(0, parcel.num_tokens - lost))


class Late(FarExchange):
    """Operations end at random moments."""

    draw = random.Random(0)

    def poll(self) -> list[Sequence]:
        return super().poll() if self.draw.random() < 0.6 else []


def model(kind: int) -> Llama:
    return model_of(MODELS[kind])


def make_engine(
    draw: random.Random,
    kind: int,
    backend: Backend,
    block_size: int,
    exchange: Callable[[Engine], Exchange],
) -> Engine:
    groups = make_groups(MODELS[kind], block_size)
    token_budget = draw.choice([40, 64, 128])
    least = sum(-(-152 // block_size) for _ in groups)
    watermark_blocks = draw.choice([0, 0, 2])
    config = Config(
        least + watermark_blocks + draw.randint(1, least // 3),
        groups=groups,
        num_host_blocks=draw.choice([0, least // 2, 2 * least]),
        max_num_batched_tokens=token_budget,
        duplicates=draw.choice(["keep", "merge"]),
        eviction=draw.choice(["lru", "uncached_first"]),
        num_preallocate_tokens=draw.choice([0, 0, 6]),
        watermark_blocks=watermark_blocks,
        use_eagle=draw.choice([False, False, True]),
        hash_seed=b"together",
        max_in_flight=draw.choice([0, 1, 2]),
        publish=draw.choice(["scheduled", "completed"]),
    )
    lookup = PromptLookup(num_matched=1, num_drafts=draw.choice([1, 4]))
    spoiled = Spoiled(drafter=lookup, seed=draw.randrange(99), share=0.2, num_tokens=260)
    options = EngineOptions(
        backend=backend,
        token_budget=token_budget,
        max_sequences=draw.choice([4, 64]),
        preemption=draw.choice(["swap", "recompute"]),
        drafter=draw.choice([None, spoiled]),
        guard=True,
        keep_logits=True,
    )
    return Engine(model(kind), config, options, exchange=exchange)


def make_exchange(
    draw: random.Random, kind: int, backend: Backend, block_size: int, tier: Adversary
) -> Callable[[Engine], Exchange]:
    """Make no exchange, one with an engine that computed the prompts, or a faulty far tier."""
    which = draw.choice(["nobody", "engine", "far tier"])
    if which == "nobody":
        return lambda _: Exchange()
    if which == "far tier":
        Late.draw = random.Random(draw.random())
        far = FarOptions(staging_pages=30, min_fetch_tokens=1, weights="m")
        return lambda engine: Late(engine, tier, far, clock=HandClock())
    channel = Unsure(draw)
    groups = make_groups(MODELS[kind], block_size)
    options = EngineOptions(backend=backend, token_budget=64)
    prefill = Engine(
        model(kind), Config(800, groups=groups), options, exchange=lambda e: Sender(e, channel)
    )
    for each in requests():
        first = attrs.evolve(each.sampling, max_tokens=1)
        prefill.add_request(attrs.evolve(each, num_samples=1, sampling=first))
    prefill.run()
    return lambda engine: Receiver(engine, channel)


def play(seed: int, backend: Backend) -> Counter[str]:
    """Draw an engine and a life for it. Returns how often each event happened."""
    draw = random.Random(seed)
    kind = seed % len(MODELS)
    size = draw.choice([4, 8, 16])
    tier = Adversary(seed)
    exchange = make_exchange(draw, kind, backend, size, tier)
    engine = make_engine(draw, kind, backend, size, exchange)
    dropped = draw.sample([each.request_id for each in requests()], 2)
    completions: dict[str, Completion] = {}
    late = requests()
    num_loading = 0
    while late or not engine.is_idle:
        if late and draw.random() < 0.8:
            engine.add_request(late.pop(0))
        if draw.random() < 0.1:
            engine.abort(draw.choice(dropped))
        if draw.random() < 0.05:
            engine.cancel()
        tier.act()
        for each in engine.step():
            completions[f"{each.request_id}#{each.sample}"] = each
        num_loading += len(engine.scheduler.loading)
        engine.manager.check()
    kept = [each for each in requests() if each.request_id not in dropped]
    answered = {key: each for key, each in completions.items() if each.request_id not in dropped}
    assert_same_answers(answered, references(model(kind)), kept)
    assert_drained(engine)
    counts = engine.exchange.counts if isinstance(engine.exchange, Late) else FarCounts()
    return Counter(
        {
            "accepted drafts": engine.metrics.num_accepted_drafts,
            "rejected drafts": engine.metrics.num_drafts - engine.metrics.num_accepted_drafts,
            "evictions": engine.metrics.num_evictions,
            "copies": engine.metrics.num_copies,
            "swaps": engine.scheduler.preemptions.by_swap,
            "recomputes": engine.scheduler.preemptions.by_recompute,
            "hits": engine.manager.take_stats().hits,
            "steps of loading": num_loading,
            "overlapped steps": engine.metrics.num_overlapped,
            "cancelled batches": engine.metrics.num_cancelled,
            "stored": counts.num_stored,
            "failed pages": counts.num_failed,
            "aborted": sum(f"{name}#0" not in completions for name in dropped),
        }
    )


def test_whatever_happens_answers_are_right_and_nothing_is_left(backend: Backend) -> None:
    happened: Counter[str] = Counter()
    for seed in SEEDS:
        try:
            happened.update(play(seed, backend))
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    assert min(happened.values()) > 0, happened
