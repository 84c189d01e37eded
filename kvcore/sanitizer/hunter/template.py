# SPDX-License-Identifier: Apache-2.0
"""A template: a small paged engine, and the adapter that lets the sanitizer hunt in it.

    kvcore sanitize kvcore.sanitizer.hunter.template:Adapter --seconds 10

`Scheduler` stands for your engine: it knows nothing of kvcore. `Engine` drives it in the order of
its own loop with a fake model, and `Adapter.attach` reports what it does to its block tables.
"""

from typing import Any, ClassVar

from kvcore.sanitizer import Chunk
from kvcore.sanitizer.hunter.adapter import EngineAdapter
from kvcore.sanitizer.hunter.driven import Driven
from kvcore.sanitizer.hunter.kit import BatchReporter, around


class Request:
    """A request: its tokens, its computed count, and its blocks."""

    def __init__(self, name: str, prompt: list[int], new: int) -> None:
        self.name, self.tokens, self.ends = name, list(prompt), len(prompt) + new
        self.computed = self.scheduled = 0
        self.blocks: list[int] = []


class Scheduler:
    """Blocks, a prefix cache by content, chunks of prefill, and preemption by recomputation."""

    def __init__(self, num_blocks: int, block_size: int, budget: int, rows: int) -> None:
        self.block_size, self.budget, self.rows = block_size, budget, rows
        self.free = list(range(num_blocks))
        self.owners = [0] * num_blocks
        self.cached: dict[tuple[int, ...], int] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []

    def schedule(self) -> list[Request]:
        """Return the requests of the next batch, each with its number of scheduled tokens."""
        batch: list[Request] = []
        budget = self.budget
        for request in [*self.running, *self.waiting]:
            if not budget or len(batch) == self.rows:
                break
            if request in self.running or request in self.waiting:  # it may have been preempted
                if not request.blocks:
                    self.hit(request)
                count = min(budget, len(request.tokens) - request.computed)
                if self.grow(request, request.computed + count, batch):
                    request.scheduled, budget = count, budget - count
                    batch.append(request)
        self.waiting = [each for each in self.waiting if each not in batch]
        self.running += [each for each in batch if each not in self.running]
        return batch

    def update(self, batch: list[Request], answers: list[int]) -> None:
        """Process a batch that ran: its full blocks become hits, and requests with all their tokens
        leave.
        """
        for request, answer in zip(batch, answers, strict=True):
            request.computed += request.scheduled
            for end in range(self.block_size, request.computed + 1, self.block_size):
                block = request.blocks[end // self.block_size - 1]
                self.cached.setdefault(tuple(request.tokens[:end]), block)
            if request.computed == len(request.tokens):
                request.tokens.append(answer)
                if len(request.tokens) == request.ends:
                    self.leave(request)

    def hit(self, request: Request) -> None:
        """Take the blocks of the longest cached prefix, but not of the last token."""
        for end in range(self.block_size, len(request.tokens), self.block_size):
            block = self.cached.get(tuple(request.tokens[:end]))
            if block is None:
                return
            if not self.owners[block]:
                self.free.remove(block)
            self.owners[block] += 1
            request.blocks.append(block)
            request.computed = end

    def grow(self, request: Request, length: int, batch: list[Request]) -> bool:
        """Allocate blocks for this many tokens, from the newest unscheduled request if none is
        free.
        """
        while len(request.blocks) * self.block_size < length:
            if not self.free:
                others = [each for each in self.running if each not in batch and each != request]
                self.release(request if not others else others[-1])
                if not others:
                    return False
                continue
            block = self.free.pop(0)
            self.cached = {key: held for key, held in self.cached.items() if held != block}
            self.owners[block] = 1
            request.blocks.append(block)
        return True

    def release(self, request: Request) -> None:
        """Preempt a request: free its blocks, the last first."""
        for block in reversed(request.blocks):
            self.owners[block] -= 1
            if not self.owners[block]:
                self.free.append(block)
        request.blocks, request.computed = [], 0
        if request in self.running:
            self.running.remove(request)
            self.waiting.insert(0, request)

    def leave(self, request: Request) -> None:
        """Remove a finished or aborted request."""
        self.release(request)
        self.waiting.remove(request)


class Engine(Driven):
    """The scheduler in its loop, with letters instead of the model's answers."""

    def __init__(self, world: Any) -> None:
        self.world, self.num_blocks = world, world.num_blocks
        self.target = self.make()
        self.requests: dict[str, Request] = {}

    def make(self) -> Scheduler:
        """Make the driven engine."""
        world = self.world
        return Scheduler(world.num_blocks, world.block_size, world.token_budget, world.max_rows)

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
