# SPDX-License-Identifier: Apache-2.0
"""A template: the adapter that lets the sanitizer hunt in the small engine of `template_engine.py`.

    kvcore sanitize kvcore.sanitizer.hunter.template:Adapter --seconds 10

`Engine` drives your scheduler in the order of its own loop with a fake model, and `Adapter.attach`
reports what it does to its block tables.
"""

from typing import Any, ClassVar

from kvcore.sanitizer import Chunk
from kvcore.sanitizer.hunter.adapter import EngineAdapter
from kvcore.sanitizer.hunter.driven import Driven
from kvcore.sanitizer.hunter.kit import BatchReporter, around
from kvcore.sanitizer.hunter.template_engine import Request, Scheduler


class Engine(Driven):
    """The scheduler in its loop, with letters instead of the model's answers."""

    kind = Scheduler

    def __init__(self, world: Any) -> None:
        self.world, self.num_blocks = world, world.num_blocks
        sizes = world.num_blocks, world.block_size, world.token_budget, world.max_rows
        self.target = self.kind(*sizes)
        self.requests: dict[str, Request] = {}

    def arrive(self, arrival: Any) -> None:
        request = Request(arrival.name, arrival.prompt, arrival.new)
        self.requests[arrival.name] = request
        self.target.waiting.append(request)

    def step(self) -> None:
        batch = self.target.schedule()
        if batch:
            answers = [self.world.token(each.computed + each.scheduled) for each in batch]
            self.target.update(batch, answers)

    def abort(self, name: str) -> None:
        self.target.leave(self.requests.pop(name))

    @property
    def live(self) -> list[str]:
        return [each.name for each in (*self.target.running, *self.target.waiting)]

    def free(self) -> int:
        return len(self.target.free)


class Adapter(EngineAdapter):
    """The adapter for the hunter."""

    NAME = "the template's engine"
    AXES: ClassVar[dict[str, tuple[Any, ...]]] = {"block_size": (4, 2)}
    MOVES = frozenset({"abort"})
    Engine = Engine

    @staticmethod
    def version() -> str:
        return "1"

    @staticmethod
    def attach(target: Any, sanitizer: Any) -> None:
        """Follow a Scheduler: what it schedules, and the blocks that it frees."""
        it = BatchReporter(sanitizer)

        @around(target, "schedule")
        def scheduled(inner: Any) -> list[Request]:
            batch: list[Request] = inner()
            for each in batch:
                it.begin(each.name, each.tokens)
                it.show(each.name, each.blocks)
            if batch:
                it.ran([Chunk(each.name, each.computed, each.scheduled) for each in batch])
            return batch

        @around(target, "release")
        def released(inner: Any, request: Request) -> None:
            inner(request)
            it.drop(request.name)

        @around(target, "leave")
        def left(inner: Any, request: Request) -> None:
            inner(request)
            it.end(request.name)
