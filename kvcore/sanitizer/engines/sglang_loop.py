# SPDX-License-Identifier: Apache-2.0
"""The loop around SGLang's caches: SGLang's scheduler cannot be imported without a GPU.

It matches and locks, allocates, inserts after each chunk and at the end, evicts, and retracts the
newest request. So a finding is a bug of the cache that it drives.
"""

import array
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from typing import Any

from kvcore.sanitizer.chunks import Chunk
from kvcore.sanitizer.hunter.adapter import EngineAdapter
from kvcore.sanitizer.hunter.driven import Driven
from kvcore.sanitizer.hunter.kit import BatchReporter

MODULE = "sglang.srt.mem_cache.rust_tree_core.mem_cache"


def tree_core() -> Any:
    """Import the extension module, without the package around it."""
    if MODULE not in sys.modules:
        files = importlib.metadata.distribution("sglang").files or []
        path = next(str(f.locate()) for f in files if "/rust_tree_core/mem_cache." in f.as_posix())
        loader = importlib.machinery.ExtensionFileLoader(MODULE, path)
        spec = importlib.util.spec_from_file_location(MODULE, path, loader=loader)
        assert spec is not None
        sys.modules[MODULE] = importlib.util.module_from_spec(spec)
        loader.exec_module(sys.modules[MODULE])
    return sys.modules[MODULE]


class Request:
    """A request: its tokens, its slots, its computed count, and the node that it locks."""

    def __init__(self, arrival: Any) -> None:
        self.name, self.tokens = arrival.name, array.array("q", arrival.prompt)
        self.ends, self.tenant = len(arrival.prompt) + arrival.new, arrival.tenant
        self.slots: list[int] = []
        self.computed = self.protected = 0
        self.lock: Any = None


class Loop(Driven):
    """The loop, with letters instead of the model's answers.

    match: takes what a request hits, and returns whether it is admitted. grow: allocates slots up
    to a length. insert: publishes what was computed. give_up: ends what a request holds; keep: so
    that it can be hit.
    """

    match: Any
    grow: Any
    insert: Any
    give_up: Any

    def __init__(self, world: Any) -> None:
        self.world, self.size, self.target = world, world.block_size, self
        self.num_blocks = world.num_blocks + 1
        self.peer_of: dict[int, int] = {}  # of pages whose window was not evicted
        self.waiting: list[Any] = []
        self.running: list[Any] = []
        self.follow: Any = lambda _: None
        self.gives: Any = lambda _: None
        self.leaves: Any = lambda _: None

    def request(self, arrival: Any) -> Any:
        """Make a request."""
        return Request(arrival)

    def named(self, tenant: int) -> dict[str, Any]:
        """Return the extra key that separates a tenant's prefixes."""
        return {self.world.axes["namespace"]: f"tenant {tenant}" if tenant else None}

    def arrive(self, arrival: Any) -> None:
        self.waiting.append(self.request(arrival))

    def step(self) -> None:
        budget = self.world.token_budget
        batch: list[tuple[Any, int, int]] = []
        for request in [*self.running, *self.waiting]:
            if not budget or len(batch) == self.world.max_rows:
                break
            if request in self.waiting and not request.slots and not self.match(request):
                break
            count = min(budget, len(request.tokens) - request.computed)
            if (request in self.running or request in self.waiting) and self.grow(
                request, request.computed + count, batch
            ):
                batch.append((request, request.computed, count))
                budget -= count
        self.issue(batch)
        for request, start, count in batch:
            if request in self.waiting:
                self.waiting.remove(request)
                self.running.append(request)
            request.computed = start + count
            if request.computed == len(request.tokens):
                request.tokens.append(self.world.token(request.computed))
            if len(request.tokens) == request.ends:
                self.leave(request)
            elif request.computed < request.ends:
                self.insert(request)

    def issue(self, batch: Any) -> None:
        """Let a batch run; each of it is a request, a first position and a number of tokens."""
        self.follow(batch)

    def make_room(self, request: Any, batch: Any) -> bool:
        """Retract the newest request outside the batch, or the one that needs room if there is
        none; return whether another was.
        """
        busy = [each for each, _, _ in batch]
        others = [r for r in self.running if r not in busy and r is not request]
        self.retract(others[-1] if others else request)
        return bool(others)

    def retract(self, request: Any) -> None:
        """Let a request wait again, and recompute it."""
        self.release(request, keep=False)
        if request in self.running:
            self.running.remove(request)
            self.waiting.insert(0, request)

    def leave(self, request: Any) -> None:
        self.release(request, keep=True)
        (self.running if request in self.running else self.waiting).remove(request)

    def release(self, request: Any, keep: bool) -> None:
        self.give_up(request, keep)
        request.slots, request.computed, request.protected = [], 0, 0
        self.leaves(request)

    def abort(self, name: str) -> None:
        self.leave(next(each for each in (*self.running, *self.waiting) if each.name == name))

    @property
    def live(self) -> list[str]:
        return [each.name for each in (*self.running, *self.waiting)]


class LoopAdapter(EngineAdapter):
    """An adapter whose engine is a loop."""

    @staticmethod
    def attach(target: Any, sanitizer: Any) -> None:
        """Follow the loop: the slots of each request when a batch runs."""
        it = BatchReporter(sanitizer)

        def given(request: Any) -> None:
            it.begin(request.name, request.tokens, (None, request.tenant or None))
            pages = [slot // target.size for slot in request.slots[:: target.size]]
            tables = [pages, [target.peer_of.get(page, -1) + 1 for page in pages]]
            it.show(request.name, *tables[: len(sanitizer.groups)])

        def followed(batch: Any) -> None:
            for request, _, _ in batch:
                given(request)
            if batch:
                it.ran([Chunk(request.name, *rest) for request, *rest in batch])

        target.follow, target.gives = followed, given
        target.leaves = lambda request: it.drop(request.name)
