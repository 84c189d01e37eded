# SPDX-License-Identifier: Apache-2.0
"""A far tier that lies, fails, forgets and is late, by a seed, and an engine over it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from kvcore_runtime.cache.layer_groups import make_groups
from kvcore_runtime.engine.engine import Engine, EngineOptions
from kvcore_runtime.far.exchange import FarExchange
from kvcore_runtime.far.manual import Fault, ManualTier

from kvcore import Config
from kvcore.far.options import FarOptions
from kvcore.far.pending import PendingTransfer
from kvcore.far.tier import Done, FarStatus, View
from tests.conftest import Backend
from tests.runtime.model.questions import DEEP_MODELS, model_of

BLOCK_SIZE = 16


class HandClock:
    """A clock that advances on demand."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Adversary(ManualTier):
    """Spoils one answer in ten, and one call in thirty, by a seed."""

    def __init__(self, seed: int, share: float = 0.1) -> None:
        super().__init__()
        self._draw = random.Random(seed)
        self.share = share
        self.num_faults = 0

    def act(self) -> None:
        """Answer some of what is pending, in any order; lose entries, all of them now and then."""
        waiting = list(self.pending)
        self._draw.shuffle(waiting)
        for each in waiting:
            if self._draw.random() < 0.5:
                self.answer(each, [self._fault(each) for _ in each.names])
        if self.entries and self._hits(0.5):
            del self.entries[self._draw.choice(sorted(self.entries))]
        if self._hits(0.02):
            self.entries.clear()
        if self.entries and self._hits(0.5):
            name = self._draw.choice(sorted(self.entries))
            self.entries[name] = bytes(spoil(self._draw, bytearray(self.entries[name])))

    def poll(self) -> list[Done]:
        if self._hits(0.1):
            raise ConnectionError("told to fail")
        done = super().poll()
        if done and self._hits(0.1):
            return [Done(each.ticket, each.statuses[1:]) for each in done]
        return done

    def _submit(self, operation: str, names: Sequence[str], views: Sequence[View]) -> int | None:
        if self._hits(0.3):
            raise ConnectionError("told to fail")
        return None if self._hits(0.3) else super()._submit(operation, names, views)

    def cancel(self, ticket: int) -> None:
        if self._hits(0.3):
            raise ConnectionError("told to fail")
        super().cancel(ticket)

    def _hits(self, times: float) -> bool:
        return self._draw.random() < self.share * times

    def _fault(self, pending: PendingTransfer) -> Fault | None:
        if not self._hits(1):
            return None
        self.num_faults += 1
        if pending.operation == "find":
            return lambda _: self._draw.choice([FarStatus.OK, FarStatus.MISSING, FarStatus.FAILED])
        if pending.operation == "store":
            return self._draw.choice(
                [reported(FarStatus.FAILED), reported(FarStatus.FULL), self._torn]
            )
        kinds = [reported(FarStatus.FAILED), reported(FarStatus.MISSING), self._torn, self._other]
        return self._draw.choice(kinds)

    def _torn(self, page: bytearray) -> None:
        spoil(self._draw, page)

    def _other(self, page: bytearray) -> None:
        page[:] = self.entries[self._draw.choice(sorted(self.entries))]


def reported(status: FarStatus) -> Fault:
    return lambda _: status


def spoil(draw: random.Random, page: bytearray) -> bytearray:
    """Cut a page, or flip a bit of it."""
    if draw.random() < 0.5:
        del page[draw.randrange(len(page)) :]
    elif page:
        page[draw.randrange(len(page))] ^= 1 << draw.randrange(8)
    return page


def make_engine(
    name: str,
    backend: Backend,
    tier: ManualTier,
    clock: HandClock,
    options: FarOptions | None = None,
    **config: object,
) -> Engine:
    """Return an engine over a tier. name: of the model; config: options of the pool."""
    groups = make_groups(DEEP_MODELS[name], BLOCK_SIZE)
    given = {"num_blocks": 300, "hash_seed": b"seed", "max_num_batched_tokens": 64} | config
    far = options or FarOptions(min_fetch_tokens=BLOCK_SIZE, weights="tiny")
    return Engine(
        model_of(DEEP_MODELS[name]),
        Config(groups=groups, **given),  # type: ignore[arg-type] # as of the test
        EngineOptions(backend=backend, token_budget=64, guard=True, keep_logits=True),
        exchange=lambda engine: FarExchange(engine, tier, far, clock=clock),
    )


def far(engine: Engine) -> FarExchange:
    assert isinstance(engine.exchange, FarExchange)
    return engine.exchange


def run(engine: Engine, tier: ManualTier, act: Callable[[], None] | None = None) -> None:
    """Step until nothing is on its way; the tier answers all, or acts, before each step."""
    while not engine.is_idle:
        (act or tier.answer_all)()
        engine.step()
