# SPDX-License-Identifier: Apache-2.0
"""The first manager with prefix caching over real tensors: a hit is what the prompt says.

A slot holds the token of its place, and a number that stands for all tokens before it, as keys and
values do. A hit is not computed again, so its content must be there; guard mode poisons blocks that
have no owner and cannot be found.
"""

from __future__ import annotations

import random
import zlib

from kvcore_runtime.cache.apply import Runtime
from kvcore_runtime.cache.cache import Cache
from kvcore_runtime.cache.layout import CacheLayout
from kvcore_runtime.cache.tables import BlockTables

from kvcore.legacy.v1_first.kv_cache_manager import KVCacheManager, Request
from tests.conftest import Backend
from tests.runtime.backends import python_once

SIZE = 2
NUM_BLOCKS = 10
NUM_STEPS = 200


def value_of(tokens: list[int], position: int) -> float:
    """Return the stored value of a token: a number of all tokens up to it."""
    return float(zlib.crc32(bytes(tokens[: position + 1])) % 2**20)


class Engine:
    """A manager, a cache that follows its batches, and the requests that hold blocks."""

    def __init__(self, backend: Backend, ahead: int = 0) -> None:
        self.manager = KVCacheManager(
            SIZE, NUM_BLOCKS, num_preallocate_tokens=ahead, hash_seed=b"t", backend=backend
        )
        layout = CacheLayout(num_layers=2, num_kv_heads=1, head_dim=2, block_size=SIZE)
        self.cache = Cache(layout, NUM_BLOCKS, guard=True)
        self.runtime = Runtime(self.cache, BlockTables(1, 1, 1, SIZE), null_block=False)
        self.requests: list[Request] = []
        self.num_hits = 0

    def admit(self, request: Request) -> bool:
        """Look up a prompt, take its blocks, compute the rest. Returns whether it fits."""
        num_tokens = len(request.all_token_ids)
        hits = self.manager.get_computed_blocks(request)
        if len(hits) * SIZE == num_tokens:
            hits.pop()
        start = len(hits) * SIZE
        if self.manager.allocate_slots(request, num_tokens - start, hits) is None:
            return False
        self.num_hits += len(hits)
        self.requests.append(request)
        self._compute(request, start)
        return True

    def decode(self, request: Request, token: int) -> bool:
        """Compute one more token. Returns whether it fits."""
        request.append_output_token_ids(token)
        if self.manager.append_slots(request, 1) is None:
            self.free(request)
            return False
        self._compute(request, request.num_computed_tokens)
        return True

    def free(self, request: Request) -> None:
        """Give a request's blocks back."""
        self.manager.free(request)
        self.requests.remove(request)
        self.runtime.apply(self.manager.take_batch())

    def _compute(self, request: Request, start: int) -> None:
        self.runtime.apply(self.manager.take_batch())
        blocks, tokens = self._blocks(request), list(request.all_token_ids)
        for position in range(start, len(tokens)):
            for layer in range(2):
                for part in self.cache.layer(layer):
                    part[blocks[position // SIZE], position % SIZE] = value_of(tokens, position)
        request.num_computed_tokens = len(tokens)

    def _blocks(self, request: Request) -> list[int]:
        return [block.block_id for block in self.manager.req_to_blocks[request.request_id]]

    def check(self) -> None:
        """Check that every request reads its own tokens, hits included."""
        self.manager.check()
        for request in self.requests:
            blocks, tokens = self._blocks(request), list(request.all_token_ids)
            for position in range(len(tokens)):
                slot = self.cache.blocks.data[blocks[position // SIZE]][:, :, position % SIZE]
                expected = [value_of(tokens, position)]
                assert slot.unique().tolist() == expected, (request.request_id, position)


def test_a_hit_needs_no_computation(backend: Backend) -> None:
    engine = Engine(backend, ahead=2)
    engine.admit(Request("a", [1, 2, 3, 4, 5]))
    engine.admit(Request("b", [1, 2, 3, 4, 6]))
    assert engine.num_hits == 2
    engine.check()
    for token in range(4):
        for request in engine.requests:
            engine.decode(request, token)
            engine.check()
    engine.free(engine.requests[0])
    engine.admit(Request("c", [1, 2, 3, 4, 5, 0, 1, 2]))
    assert engine.num_hits == 5
    engine.check()


@python_once("seed", range(5))
def test_a_random_engine_reads_what_was_computed(backend: Backend, seed: int) -> None:
    rng = random.Random(seed)
    engine = Engine(backend, ahead=rng.choice([0, 4]))
    for step in range(NUM_STEPS):
        kind = rng.choice(("admit", "decode", "decode", "free"))
        if kind == "admit" or not engine.requests:
            tokens = [rng.randint(0, 1) for _ in range(rng.randint(1, 8))]
            engine.admit(Request(str(step), tokens))
        elif kind == "decode":
            engine.decode(rng.choice(engine.requests), rng.randint(0, 1))
        else:
            engine.free(rng.choice(engine.requests))
        engine.check()
    assert engine.num_hits > 10
