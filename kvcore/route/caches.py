# SPDX-License-Identifier: Apache-2.0
"""The cache of a replica: a real manager, or the smallest model of one that routing needs.

The model keeps blocks in the order of their last use, the end of a prompt before its beginning. It
has no owners: blocks of running requests can be evicted, and outputs take no space. A manager
counts both, and never hits the last block of a prompt, because one token is left to compute.
"""

from __future__ import annotations

from typing import Protocol

from kvcore.codec.event_msgpack import EventMap, event_maps
from kvcore.manager import KVCacheManager
from kvcore.replay.expand import prompt_tokens
from kvcore.replay.results import BackendName
from kvcore.route.jobs import Job
from kvcore.types.config import Config
from kvcore.types.events import DEVICE_MEDIUM
from kvcore.types.keys import HASH_SIZE, external_hash
from kvcore.types.values import Reason, Refused, Request


class NeverFits(Exception):
    """A request is larger than the whole pool; the fleet counts it."""


class Cache(Protocol):
    """A cache, with the calls of one request in their order."""

    def start(self, job: Job) -> int | None:
        """Take the blocks of the hit and the others that the request needs; return the hit. None:
        not now.
        """

    def computed(self, job: Job) -> None:
        """Make the computed prompt findable."""

    def end(self, job: Job) -> None:
        """End a request after its last output."""

    def take_events(self) -> list[EventMap]:
        """Return and drop the events so far."""

    def names(self) -> set[int]:
        """Return the findable blocks."""


class LruCache:
    """The LRU model. num_blocks: capacity. block_size: tokens, for the events."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._num_blocks, self._block_size = num_blocks, block_size
        self._blocks: dict[int, None] = {}
        self._events: list[EventMap] = []

    def start(self, job: Job) -> int:
        """Return the leading blocks found. They count as used once the prompt is computed."""
        hit = 0
        for name in job.names:
            if name not in self._blocks:
                break
            hit += 1
        return hit

    def computed(self, job: Job) -> None:
        """Store the prompt, and evict the least recently used blocks."""
        kept = job.names[: self._num_blocks]
        new = [name for name in kept if name not in self._blocks]
        for name in reversed(kept):
            self._blocks.pop(name, None)
            self._blocks[name] = None
        if new:
            before = kept[: kept.index(new[0])]
            self._events.append(_stored(new, before[-1] if before else None, self._block_size))
        while len(self._blocks) > self._num_blocks:
            oldest = next(iter(self._blocks))
            del self._blocks[oldest]
            self._events.append(
                {
                    "type": "BlockRemoved",
                    "block_hashes": [oldest],
                    "medium": DEVICE_MEDIUM,
                    "group_idx": 0,
                }
            )

    def end(self, job: Job) -> None:
        """Do nothing: no block has an owner."""

    def take_events(self) -> list[EventMap]:
        """Return and drop the events so far; they have no tokens, because traces have none."""
        taken, self._events = self._events, []
        return taken

    def names(self) -> set[int]:
        """Return the findable blocks."""
        return set(self._blocks)


class ManagedCache:
    """A real manager that uses the trace's names as block hashes of 32 bytes."""

    def __init__(self, num_blocks: int, block_size: int, backend: BackendName | None) -> None:
        config = Config(num_blocks, block_size, null_block=False, enable_events=True)
        self._manager = KVCacheManager(config, backend)
        self._block_size = block_size

    def start(self, job: Job) -> int | None:
        """Take the hit, and slots for the prompt and all outputs. Raises NeverFits."""
        name, request, manager = str(job.number), job.request, self._manager
        full = job.names[: request.prompt_len // self._block_size]
        tokens = prompt_tokens(request.hash_ids, request.prompt_len, self._block_size)
        hashes = [each.to_bytes(HASH_SIZE, "big") for each in full]
        manager.add_request(Request(name, tokens, block_hashes=hashes))
        hit = manager.get_computed_blocks(name)
        got = manager.allocate_slots(
            name,
            request.prompt_len - hit.num_tokens,
            hit,
            num_lookahead_tokens=request.output_len,
            delay_cache_blocks=True,
        )
        if isinstance(got, Refused):
            manager.remove_request(name)
            if got.reason is Reason.NEVER:
                raise NeverFits
            return None
        manager.take_batch()
        return hit.num_tokens // self._block_size

    def computed(self, job: Job) -> None:
        """Publish the full blocks of the prompt."""
        self._manager.cache_blocks(str(job.number), job.request.prompt_len)

    def end(self, job: Job) -> None:
        """Free the blocks; published ones stay cached."""
        self._manager.free(str(job.number))
        self._manager.remove_request(str(job.number))

    def take_events(self) -> list[EventMap]:
        """Return and drop the events so far."""
        return event_maps(self._manager.take_events())

    def names(self) -> set[int]:
        """Return the findable blocks."""
        blocks = range(self._manager.config.num_blocks)
        keys = filter(None, map(self._manager.get_block_key, blocks))
        return {external_hash(each[:HASH_SIZE]) for each in keys}


def _stored(names: list[int], parent: int | None, block_size: int) -> EventMap:
    return {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": parent,
        "token_ids": [],
        "block_size": block_size,
        "lora_id": None,
        "medium": DEVICE_MEDIUM,
        "lora_name": None,
        "group_idx": 0,
    }
