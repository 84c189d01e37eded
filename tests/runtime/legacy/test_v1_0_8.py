# SPDX-License-Identifier: Apache-2.0
"""vLLM 0.8.5's V1 manager over real tensors: what a request sees is what its prefix says.

Each prefix of tokens has a number of its own, which the slots of its last token hold. After each
call the batch is applied to a cache in guard mode, which poisons blocks without an owner; then
scheduled tokens are written through the request's blocks, and everything that the next query sees,
hits included, is read back and compared with a plain dictionary.
"""

from __future__ import annotations

import random
from typing import Any

from kvcore_runtime.cache.apply import Runtime
from kvcore_runtime.cache.cache import Cache
from kvcore_runtime.cache.layout import CacheLayout
from kvcore_runtime.cache.tables import BlockTables

from tests.conformance.legacy_utils.requests import SIZE, EngineRequest
from tests.conformance.legacy_utils.stories import make
from tests.conftest import Backend
from tests.runtime.backends import python_once

NUM_STEPS = 250


class Engine:
    """A manager, a cache that follows its batches, and the number of each prefix."""

    def __init__(
        self, backend: Backend, num_blocks: int, *, window: int | None = None, **options: Any
    ) -> None:
        self.manager = make(backend, num_blocks, window=window, **options)
        layout = CacheLayout(num_layers=2, num_kv_heads=1, head_dim=2, block_size=SIZE)
        self.cache = Cache(layout, num_blocks, 0, guard=True)
        self.runtime = Runtime(self.cache, BlockTables(1, 1, 1, SIZE))
        self.window = window
        self.numbers: dict[tuple[int, ...], float] = {}
        self.num_hits = 0
        self.num_refused = 0

    def schedule(self, request: EngineRequest, count: int, num_drafts: int = 0) -> bool:
        """Look up if nothing is held, allocate, apply, write and read. Returns False if refused."""
        hits = None
        if request.request_id not in self.manager.req_to_blocks:
            hits, request.num_computed_tokens = self.manager.get_computed_blocks(request)
            count = max(1, min(count, request.num_tokens - request.num_computed_tokens))
            self.num_hits += len(hits)
            start, request.num_computed_tokens = request.num_computed_tokens, 0
        else:
            start = request.num_computed_tokens
        request.spec_token_ids = [7] * num_drafts
        got = self.manager.allocate_slots(request, count + num_drafts, hits)
        request.spec_token_ids = []
        self.apply()
        if got is None:
            self.num_refused += 1
            return False
        self.write(request, start, start + count, num_drafts)
        request.num_computed_tokens = start + count
        self.check(request, start)
        return True

    def apply(self) -> None:
        """Carry out what the manager said since the last call."""
        self.runtime.apply(self.manager.take_batch())

    def write(self, request: EngineRequest, start: int, end: int, num_drafts: int) -> None:
        """Write the numbers of these prefixes, and drafts after them, like a forward pass."""
        for position in range(start, end):
            self.put(request, position, self.number(request, position))
        for position in range(end, end + num_drafts):
            self.put(request, position, -1.0)

    def put(self, request: EngineRequest, position: int, number: float) -> None:
        """Write a token's slots in both layers."""
        block = self.manager.req_to_blocks[request.request_id][position // SIZE]
        assert block is not self.manager.block_pool.null_block
        for layer in range(2):
            for part in self.cache.layer(layer):
                part[block.block_id, position % SIZE] = number

    def number(self, request: EngineRequest, position: int) -> float:
        """Return the content of the token at a position."""
        prefix = tuple(request.all_token_ids[: position + 1])
        return self.numbers.setdefault(prefix, 1.0 + len(self.numbers))

    def check(self, request: EngineRequest, query: int) -> None:
        """Check that the queries from one on saw what their prefixes say."""
        first = 0 if self.window is None else max(0, query - self.window + 1)
        blocks = self.manager.req_to_blocks[request.request_id]
        for position in range(first, request.num_computed_tokens):
            block = blocks[position // SIZE].block_id
            read = self.cache.blocks.data[block][:, :, position % SIZE].unique().tolist()
            assert read == [self.number(request, position)], (request.request_id, position, block)

    def leave(self, request: EngineRequest) -> None:
        """Give back the blocks."""
        self.manager.free(request)
        request.num_computed_tokens = 0
        self.apply()


WORLDS: list[dict[str, Any]] = [
    {},
    {"window": 5},
    {"window": 1},
    {"window": 6, "use_eagle": True},
    {"use_eagle": True},
    {"enable_caching": False},
]


@python_once("options", WORLDS)
def test_every_request_reads_what_its_prefix_says(
    backend: Backend, options: dict[str, Any]
) -> None:
    dice = random.Random(7)
    engine = Engine(backend, 8 if "window" in options else 14, **options)
    running: list[EngineRequest] = []
    for number in range(NUM_STEPS):
        if len(running) < 4 and dice.random() < 0.4:
            tail = [dice.randrange(2) for _ in range(dice.choice([1, 4, 8, 13]))]
            running.append(EngineRequest(str(number), [3, 3, 3, 3, *tail]))
        if not running:
            continue
        request = dice.choice(running)
        if request.num_computed_tokens == request.num_tokens:
            request.all_token_ids.append(dice.randrange(2))
        left = request.num_tokens - request.num_computed_tokens
        count = dice.choice([left, max(1, left // 2)])
        drafts = dice.choice([0, 0, 2]) if count == left else 0
        if not engine.schedule(request, count, drafts) or dice.random() < 0.1:
            victim = dice.choice(running)
            engine.leave(victim)
            if dice.random() < 0.5:
                engine.manager.free_block_hashes(victim)
                running.remove(victim)
        engine.manager.check()
    assert engine.num_refused > 0
    assert (engine.num_hits > 0) == options.get("enable_caching", True)


def test_a_block_that_was_given_back_holds_nothing(backend: Backend) -> None:
    engine = Engine(backend, 6, enable_caching=False)
    request = EngineRequest("0", list(range(6)))
    engine.schedule(request, 6)
    block = engine.manager.req_to_blocks["0"][1].block_id
    engine.leave(request)
    assert engine.cache.blocks.data[block].isnan().all()


def test_a_freed_hit_keeps_its_content_until_it_is_taken_anew(backend: Backend) -> None:
    engine = Engine(backend, 4)
    request = EngineRequest("0", list(range(9)))
    engine.schedule(request, 9)
    blocks = [block.block_id for block in engine.manager.req_to_blocks["0"]]
    engine.leave(request)
    poisoned = [bool(engine.cache.blocks.data[block].isnan().all()) for block in blocks]
    assert poisoned == [False, False, True]
    other = EngineRequest("1", [9] * 8)
    engine.schedule(other, 8)  # takes the tail first, so only the second block's content goes
    late = EngineRequest("2", list(range(9)))
    hits, _ = engine.manager.get_computed_blocks(late)
    assert [block.block_id for block in hits] == blocks[:1]
