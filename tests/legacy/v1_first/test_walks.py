# SPDX-License-Identifier: Apache-2.0
"""Random walks of the first manager with prefix caching: no block is lost, both backends alike."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from kvcore.legacy.v1_first.kv_cache_manager import KVCacheBlock, KVCacheManager, Request
from kvcore.types.errors import KvcoreError
from tests.conformance.legacy_v03.stories import columns
from tests.conftest import Backend, need_twin

NUM_WALKS = 20
NUM_STEPS = 200


class Walk:
    """A manager, its requests, and a record of each call."""

    def __init__(self, backend: Backend, seed: int) -> None:
        self.rng = random.Random(seed)
        self.manager = KVCacheManager(
            *(2, self.rng.randint(4, 14)),
            enable_caching=self.rng.random() < 0.85,
            num_preallocate_tokens=self.rng.choice([0, 0, 2, 5]),
            max_model_len=self.rng.choice([None, 12]),
            hash_seed=b"walk",
            backend=backend,
        )
        self.requests: list[Request] = []
        self.names = 0
        self.stale: list[KVCacheBlock] = []
        self.record: list[Any] = []

    def run(self, num_steps: int) -> list[Any]:
        """Run this many steps, then end everything. Returns the record."""
        steps = (self.arrive, self.arrive, self.decode, self.decode, self.decode, self.leave)
        for _ in range(num_steps):
            self.rng.choice((*steps, self.misuse))()
            if self.rng.random() < 0.3:
                self.record.append([repr(each) for each in self.manager.take_batch()])
        for request in list(self.requests):
            self.drop(request)
        return self.record

    def snapshot(self) -> bytes:
        """Return everything that the manager knows, as bytes."""
        tables = {name: numbers(blocks) for name, blocks in self.manager.req_to_blocks.items()}
        return repr((columns(self.manager.state()), tables)).encode()

    def call(self, method: Callable[..., Any], *args: Any) -> Any:
        """Make a call and record it; one that raises or gives None must have changed nothing."""
        before = self.snapshot()
        try:
            value = method(*args)
        except KvcoreError as error:
            value = error
        failed = value is None and method != self.manager.free
        if failed or isinstance(value, KvcoreError):
            assert self.snapshot() == before
        self.manager.check()
        said = numbers(value) if isinstance(value, list) else repr(value)
        self.record.append((method.__name__, said, self.snapshot()))
        return value

    def arrive(self) -> None:
        """Add a request, look it up, and allocate slots for a chunk of its prompt."""
        if len(self.requests) >= 4:
            return
        tokens = [self.rng.randint(0, 1) for _ in range(self.rng.randint(1, 9))]
        self.names += 1
        request = Request(str(self.names), tokens)
        hits = self.call(self.manager.get_computed_blocks, request)
        if len(hits) * 2 == len(tokens):
            hits.pop()
        self.stale = self.stale or hits
        left = len(tokens) - len(hits) * 2
        chunk = self.rng.randint(1, left)
        if self.call(self.manager.allocate_slots, request, chunk, hits) is not None:
            request.num_computed_tokens = len(hits) * 2 + chunk
            self.requests.append(request)

    def decode(self) -> None:
        """Compute the next tokens of a request, which is freed if there is no room."""
        if not self.requests:
            return
        request = self.rng.choice(self.requests)
        left = len(request.all_token_ids) - request.num_computed_tokens
        if left == 0:
            request.append_output_token_ids(self.rng.randint(0, 1))
            left = 1
        chunk = self.rng.randint(1, left)
        if self.call(self.manager.append_slots, request, chunk) is None:
            self.drop(request)
        else:
            request.num_computed_tokens += chunk

    def leave(self) -> None:
        """End a request."""
        if self.requests and self.rng.random() < 0.5:
            self.drop(self.rng.choice(self.requests))

    def drop(self, request: Request) -> None:
        """Free a request."""
        self.call(self.manager.free, request)
        self.requests.remove(request)

    def misuse(self) -> None:
        """Make calls that no engine should make."""
        new = Request("new", [0, 1, 1, 0, 1])
        self.call(self.manager.append_slots, new, 1)
        self.call(self.manager.free, new)
        self.call(self.manager.allocate_slots, new, 0, [])
        if self.requests:
            known = self.rng.choice(self.requests)
            self.call(self.manager.allocate_slots, known, 1, [])
            self.call(self.manager.append_slots, known, 100)
        if self.stale and self.rng.random() < 0.3:
            if self.call(self.manager.allocate_slots, new, 1, self.stale) is not None:
                self.call(self.manager.free, new)
            self.stale = []


def numbers(blocks: list[KVCacheBlock]) -> list[int]:
    """Return the numbers of blocks."""
    return [block.block_id for block in blocks]


@cache
def walked(seed: int) -> Walk:
    """Return a walk in Python, for several tests."""
    walk = Walk("python", seed)
    walk.run(NUM_STEPS)
    return walk


@pytest.mark.parametrize("seed", range(NUM_WALKS))
def test_walks_lose_no_block(seed: int) -> None:
    walk = walked(seed)
    assert walk.manager.free_block_queue.num_free_blocks == walk.manager.num_gpu_blocks


@pytest.mark.parametrize("seed", range(NUM_WALKS))
def test_both_backends_walk_alike(seed: int) -> None:
    need_twin()
    ours, theirs = walked(seed).record, Walk("rust", seed).run(NUM_STEPS)
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert mine == other, f"seed {seed}, call {number}"


def test_the_walks_come_by_everything() -> None:
    seen: Counter[str] = Counter()
    for seed in range(NUM_WALKS):
        for entry in walked(seed).record:
            if isinstance(entry, tuple):
                name, said, _ = entry
                kind = "blocks" if isinstance(said, list) and said else str(said).split("(")[0]
                seen[f"{name} {kind}"] += 1
    for key in (
        *("get_computed_blocks blocks", "allocate_slots blocks", "allocate_slots None"),
        *("append_slots blocks", "append_slots []", "append_slots None", "free None"),
        *("append_slots TooFewTokens", "append_slots UnallocatedRequest"),
        *("allocate_slots AlreadyAllocated", "allocate_slots StaleHits"),
    ):
        assert seen[key] >= 5, (key, seen)
