# SPDX-License-Identifier: Apache-2.0
"""What a `DirectoryExchange` asks of an engine, without a model and without a cache.

Blocks of four tokens; a test says when a batch is taken, carried out and cancelled.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from kvcore_runtime.cache.directory import DirectoryTier
from kvcore_runtime.cache.errors import TierError
from kvcore_runtime.cache.transfers import Finished
from kvcore_runtime.engine.directory_exchange import DirectoryExchange
from kvcore_runtime.engine.engine import Engine
from kvcore_runtime.engine.sequence import GenerationRequest, Sequence

from kvcore import Batch, Config, Group, KVCacheManager, Refused, Request
from kvcore.types.commands import Load, Store
from tests.conftest import Backend

PAGE = torch.arange(24, dtype=torch.uint8)


class Desk:
    """A manager, an exchange over it, and the batches that were taken."""

    def __init__(self, backend: Backend, path: Path, **options: Any) -> None:
        config = Config(20, max_in_flight=2, **({"groups": (Group(4),)} | options))
        self.manager = KVCacheManager(config, backend)
        self.runtime = SimpleNamespace(external=None)
        self.open_number = 0
        self.finished: list[Finished] = []
        self.tier = DirectoryTier(path / "blocks", "m")
        self.exchange = DirectoryExchange(cast(Engine, self), self.tier)
        self.batches: dict[int, Batch] = {}
        self._waiting: list[Finished] = []

    def take_finished(self) -> list[Finished]:
        finished, self.finished = self.finished, []
        return finished

    def sequence(self, name: str, num_tokens: int) -> Sequence:
        """A sequence of tokens 0, 1, 2 and so on: two such share all that they can."""
        request = GenerationRequest(request_id=name, prompt=tuple(range(num_tokens)))
        row = self.manager.add_request(Request(name, request.prompt))
        return Sequence(request, arrival=0, row=row)

    def compute(self, sequence: Sequence) -> None:
        """All tokens of a sequence, in a batch that is completed."""
        name = sequence.sequence_id
        assert self.manager.allocate_slots(name, sequence.num_tokens)
        self.manager.complete(self.take())

    def begin(self, sequence: Sequence) -> int | Refused:
        hit = self.manager.get_computed_blocks(sequence.sequence_id)
        return self.exchange.begin(sequence, hit)

    def take(self) -> int:
        batch = self.manager.take_batch()
        self.batches[batch.number] = batch
        self.open_number = batch.number + 1
        return batch.number

    def run(self, number: int, *, told: int | None = None) -> None:
        """Carry out a batch's stores and loads. told: how many of them are heard of, None: all."""
        ended = []
        for each in self.batches[number]:
            error = None
            try:
                if isinstance(each, Store):
                    self.tier.store(each.key, PAGE)
                elif isinstance(each, Load):
                    self.tier.load(each.key, PAGE.numel())
            except TierError as raised:
                error = raised
            if isinstance(each, Store | Load):
                ended.append(Finished(each.operation, error))
        self.finished += ended[:told]
        self._waiting = ended[len(ended) if told is None else told :]

    def tell_rest(self) -> None:
        self.finished += self._waiting

    def cancel(self, number: int) -> list[Sequence]:
        """As the engine does."""
        self.open_number += 1
        self.manager.cancel(number)
        lost = self.exchange.cancelled(number)
        self.manager.check()
        return lost

    def end(self, *sequences: Sequence) -> None:
        """Free all of these; nothing is held then."""
        for each in sequences:
            self.exchange.forget(each)
            self.manager.free(each.sequence_id)
            self.manager.remove_request(each.sequence_id)
        while self.manager.in_flight:
            self.manager.complete(self.manager.in_flight[0])
        self.manager.check()
        assert self.manager.num_free_blocks == self.manager.config.num_usable_blocks

    def keys(self, sequence: Sequence) -> tuple[bytes, ...]:
        return self.manager.get_block_keys(sequence.sequence_id)[0]
