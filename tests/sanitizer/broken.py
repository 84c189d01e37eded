# SPDX-License-Identifier: Apache-2.0
"""The template's engine with one bug each, and the template's adapter with one fault each.

Each bug shows only in some runs, as those of engines do.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import Any, ClassVar

from kvcore.sanitizer import Chunk, UnsupportedEngine
from kvcore.sanitizer.hunter.template import Adapter, Engine
from kvcore.sanitizer.hunter.template_engine import Request, Scheduler


def adapter_of(scheduler: type[Scheduler]) -> type[Adapter]:
    """The template's adapter over another scheduler."""

    class Driven(Engine):
        kind = scheduler

    return type(scheduler.__name__, (Adapter,), {"Engine": Driven, "NAME": scheduler.__name__})


class HitsFreeBlocks(Scheduler):
    """A hit leaves a free block among the free ones."""

    def hit(self, request: Request) -> None:
        before = list(self.free)
        super().hit(request)
        self.free = before


class HitsTheLastToken(Scheduler):
    """A prompt that is wholly cached has nothing left to compute."""

    def hit(self, request: Request) -> None:
        request.tokens.append(0)
        super().hit(request)
        request.tokens.pop()


class PublishesTooEarly(Scheduler):
    """All blocks of a prompt can be hit as soon as its first chunk is scheduled."""

    def grow(self, request: Request, length: int, batch: list[Request]) -> bool:
        del length
        grown = super().grow(request, len(request.tokens), batch)
        for end in range(self.block_size, len(request.tokens) + 1, self.block_size):
            if grown:
                block = request.blocks[end // self.block_size - 1]
                self.cached.setdefault(tuple(request.tokens[:end]), block)
        return grown


class LosesBlocks(Scheduler):
    """An abort of a request that has run gives back all blocks but one."""

    def leave(self, request: Request) -> None:
        if request.blocks and len(request.tokens) < request.ends:
            request.blocks.pop()
        super().leave(request)


class LosesBlocksWhenIdle(Scheduler):
    """A step without requests takes a block."""

    def schedule(self) -> list[Request]:
        batch = super().schedule()
        del self.free[: not batch]
        return batch


class WaitsForEver(Scheduler):
    """After an abort no new request is scheduled."""

    blocked = False

    def leave(self, request: Request) -> None:
        self.blocked = self.blocked or len(request.tokens) < request.ends
        super().leave(request)

    def schedule(self) -> list[Request]:
        if not self.blocked:
            return super().schedule()
        waiting, self.waiting = self.waiting, []
        batch = super().schedule()
        self.waiting = waiting + self.waiting
        return batch


class TakesTokensBack(Scheduler):
    """A request's second new token is one too many: both are taken back and made again, forever."""

    def update(self, batch: list[Request], answers: list[int]) -> None:
        super().update(batch, answers)
        for request in batch:
            if len(request.tokens) == 3:
                del request.tokens[1:]
                request.computed = 0


class Crashes(Scheduler):
    """The third request in a batch is one too many."""

    def update(self, batch: list[Request], answers: list[int]) -> None:
        if len(batch) == 3:
            raise KeyError(batch[2].name)
        super().update(batch, answers)


class Spins(Scheduler):
    """The same, but it does not return."""

    def update(self, batch: list[Request], answers: list[int]) -> None:
        while len(batch) == 3:
            pass
        super().update(batch, answers)


class Sleeps(Scheduler):
    """The same, without use of the processor."""

    def update(self, batch: list[Request], answers: list[int]) -> None:
        if len(batch) == 3:
            time.sleep(10_000)
        super().update(batch, answers)


class Stops(Scheduler):
    """The same, since others have the processor for a while."""

    def update(self, batch: list[Request], answers: list[int]) -> None:
        if len(batch) == 3:
            subprocess.Popen(["sh", "-c", f"sleep 4; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        super().update(batch, answers)


class Dies(Scheduler):
    """The same, and the process is gone."""

    def update(self, batch: list[Request], answers: list[int]) -> None:
        if len(batch) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        super().update(batch, answers)


class Floods(Scheduler):
    """The same, and it never stops to print."""

    def update(self, batch: list[Request], answers: list[int]) -> None:
        while len(batch) == 3:
            print("x" * 100_000)
        super().update(batch, answers)


Crashing = adapter_of(Crashes)
Dying = adapter_of(Dies)
Sleeping = adapter_of(Sleeps)
Stopping = adapter_of(Stops)
Flooding = adapter_of(Floods)


class TellsNoDecode(Adapter):
    """An adapter that tells prefills alone."""

    @staticmethod
    def attach(target: Any, sanitizer: Any) -> None:
        Adapter.attach(target, _Changed(sanitizer, lambda row: row if row.num_tokens > 1 else None))


class TellsWrongStart(Adapter):
    """An adapter that is one off."""

    @staticmethod
    def attach(target: Any, sanitizer: Any) -> None:
        changed = _Changed(sanitizer, lambda row: Chunk(row.name, row.start + 1, row.num_tokens))
        Adapter.attach(target, changed)


class _Changed:
    """A sanitizer that is told other rows."""

    def __init__(self, sanitizer: Any, change: Any) -> None:
        self.sanitizer, self.change = sanitizer, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sanitizer, name)

    def issue(self, step: int, rows: list[Chunk]) -> None:
        self.sanitizer.issue(step, [row for row in map(self.change, rows) if row is not None])


class BeginsTwice(Adapter):
    """An adapter that contradicts itself."""

    @staticmethod
    def attach(target: Any, sanitizer: Any) -> None:
        Adapter.attach(target, sanitizer)
        schedule = target.schedule

        def scheduled() -> Any:
            batch = schedule()
            for each in batch[:1]:
                sanitizer.begin(each.name, each.tokens)
            return batch

        target.schedule = scheduled


class CountsWrong(Adapter):
    """An adapter whose engine counts a block too many as free once it had a request."""

    class Engine(Engine):
        def free(self) -> int:
            return super().free() + bool(self.requests)


class Samples(Adapter):
    """An adapter whose fake model says something else than the hunter's."""

    class Engine(Engine):
        def __init__(self, world: Any) -> None:
            super().__init__(world)
            sizes = {"block_size": world.block_size, "num_blocks": world.num_blocks}
            self.world = type("", (), {"token": lambda _: 1, **sizes})


class IsMoody(Adapter):
    """An adapter whose runs depend on more than the world: every second engine rests at first."""

    num_made = 0

    class Engine(Engine):
        def __init__(self, world: Any) -> None:
            super().__init__(world)
            IsMoody.num_made += 1
            self.rests = IsMoody.num_made % 2

        def step(self) -> None:
            if self.rests:
                self.rests = 0
            else:
                super().step()


class HasNoSize(Adapter):
    """An adapter without block sizes."""

    AXES: ClassVar[dict[str, tuple[Any, ...]]] = {"policy": ("fcfs",)}


class KnowsTooMuch(Adapter):
    """An adapter with a move that there is none of."""

    MOVES = frozenset({"abort", "teleport"})


class LoadsLong(Adapter):
    """An adapter whose engine takes long to load what it needs, once in a process."""

    class Engine(Engine):
        loaded = False

        def __init__(self, world: Any) -> None:
            ready = time.monotonic() + 7
            while not self.loaded and time.monotonic() < ready:
                sum(range(1_000_000))
                time.sleep(0.2)  # most of it is waiting: half a CPU second in all
            type(self).loaded = True
            super().__init__(world)


class Misspells(Adapter):
    """An adapter that asks its own table for a request that is not in it."""

    class Engine(Engine):
        def step(self) -> None:
            self.requests["nobody"].blocks.clear()


class TellsRemoved(Adapter):
    """An adapter whose engine says that a block is removed which it still hits; and loses some."""

    class Engine(adapter_of(LosesBlocks).Engine):  # type: ignore[misc] # made by a call
        def events(self) -> list[tuple[str, int, Any]]:
            return [("stored", 1, (0, (1,))), ("removed", 1, None)]

        def hits(self, tenant: int, tokens: tuple[int, ...]) -> int:
            del tenant
            return len(tokens)


class Forgets(Adapter):
    """An adapter without a method."""

    class Engine(Engine):
        finish_batches = property()


class Newer(Adapter):
    """An adapter that finds another version than the one it was tested with."""

    @staticmethod
    def version() -> str:
        raise UnsupportedEngine(engine="newer", found="2.0", tested="1.0")


class Refuses(Adapter):
    """An adapter whose engine refuses half of its options."""

    AXES: ClassVar[dict[str, tuple[Any, ...]]] = {
        "block_size": (4, 2),
        "mode": ("plain", "odd", "odd", "odd"),
    }

    class Engine(Engine):
        def __init__(self, world: Any) -> None:
            if world.axes["mode"] == "odd":
                raise ValueError("no such mode")
            super().__init__(world)

    @staticmethod
    def refusal(error: BaseException) -> bool:
        return str(error) == "no such mode"
