# SPDX-License-Identifier: Apache-2.0
"""Replay the list's operations on kvcore's Python API: one call per request, or batched."""

from __future__ import annotations

import array
from typing import Any, Literal

from benches.peers.replay import Maker
from benches.peers.work import Decode, Work
from kvcore import Config, KVCacheManager, Request
from kvcore.types.keys import Hashing

SEED = b"vllm-none-hash"


class Calls:
    """One call per request, with plain lists."""

    def __init__(
        self,
        work: Work,
        *,
        hashing: Hashing = "sha256_cbor",
        backend: Literal["rust", "python"] = "rust",
        eviction: Literal["lru", "uncached_first"] = "uncached_first",
    ) -> None:
        config = Config(
            work.num_blocks,
            work.block_size,
            hash_seed=SEED,
            hashing=hashing,
            eviction=eviction,
        )
        self.manager = KVCacheManager(config, backend=backend)
        self.ids = [f"request-{number}" for number in range(len(work.prompts))]
        self.computed = [0] * len(work.prompts)
        self.hits: list[int] = []

    def add(self, request: int, prompt: Any) -> None:
        self.manager.add_request(Request(self.ids[request], prompt))

    def prefill(self, request: int, end: int) -> None:
        name, computed = self.ids[request], self.computed[request]
        if computed:
            if end > computed:
                self.grown(self.manager.allocate_slots(name, end - computed))
                self.computed[request] = end
            return
        hit = self.manager.get_computed_blocks(name)
        num_hit = hit.num_tokens
        self.hits.append(num_hit)
        end = max(end, num_hit + 1)
        self.grown(self.manager.allocate_slots(name, end - num_hit, hit))
        self.computed[request] = end

    def grown(self, blocks: object) -> None:
        if not blocks:
            raise RuntimeError(f"the pool has no room: {blocks}")

    def decode(self, decode: Decode) -> None:
        # `computed` is not updated: a request is prefilled again only after a preemption.
        ids, append = self.ids, self.manager.append
        for request, token in zip(decode.requests, decode.tokens, strict=True):
            append([ids[request]], [token])

    def preempt(self, request: int) -> None:
        self.manager.free(self.ids[request])
        self.computed[request] = 0

    def finish(self, request: int) -> None:
        self.manager.free(self.ids[request])
        self.manager.remove_request(self.ids[request])

    def end_step(self) -> None:
        self.manager.take_batch()


class Batched(Calls):
    """Prompts as buffers, and one call for a whole step of decoding, by rows."""

    def __init__(self, work: Work, **options: Any) -> None:
        super().__init__(work, **options)
        self.rows = [0] * len(work.prompts)
        self.last: list[int] = []
        self.last_rows = array.array("I")

    def add(self, request: int, prompt: Any) -> None:
        self.rows[request] = self.manager.add_request(Request(self.ids[request], prompt))

    def decode(self, decode: Decode) -> None:
        requests = decode.requests
        if requests is not self.last:
            rows = self.rows
            self.last = requests
            self.last_rows = array.array("I", [rows[request] for request in requests])
        if self.manager.append(self.last_rows, decode.buffer).refused is not None:
            raise RuntimeError("the pool has no room")


def buffer(prompt: array.array[int]) -> array.array[int]:
    """Return a prompt unchanged."""
    return prompt


MAKERS = {
    "kvcore-calls": Maker(Calls),
    "kvcore-batched": Maker(Batched, buffer),
    "kvcore-batched-siphash": Maker(lambda work: Batched(work, hashing="siphash"), buffer),
    "kvcore-batched-xxh3": Maker(lambda work: Batched(work, hashing="xxh3"), buffer),
    "kvcore-python": Maker(lambda work: Calls(work, backend="python", hashing="sha256")),
    "kvcore-python-batched": Maker(
        lambda work: Batched(work, backend="python", hashing="sha256"), buffer
    ),
    "kvcore-calls-lru": Maker(lambda work: Calls(work, eviction="lru")),
}
