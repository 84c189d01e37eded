# SPDX-License-Identifier: Apache-2.0
"""Short words for stories about a manager: make it, serve a prompt, look at its blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvcore import Command, Config, Group, KVCacheBlocks, KVCacheManager, Request
from tests.conftest import Backend

SEED = b"unit"


def make(
    backend: Backend, num_blocks: int = 10, block_size: int = 2, **options: Any
) -> KVCacheManager:
    """Return an empty manager; by default with 9 usable blocks of two tokens and null block 0."""
    options.setdefault("hash_seed", SEED)
    options.setdefault("groups", (Group(block_size),))
    return KVCacheManager(Config(num_blocks, **options), backend)


def add(manager: KVCacheManager, request_id: str, tokens: Sequence[int]) -> int:
    """Add a request. Returns its row."""
    return manager.add_request(Request(request_id, list(tokens)))


def admit(manager: KVCacheManager, request_id: str, **options: Any) -> list[int]:
    """Schedule all tokens of a waiting request, after its hit. Returns its blocks."""
    hit = manager.get_computed_blocks(request_id)
    left = manager.num_tokens(request_id) - hit.num_tokens
    grown = manager.allocate_slots(request_id, left, hit, **options)
    assert isinstance(grown, KVCacheBlocks)
    return blocks(manager, request_id)


def serve(manager: KVCacheManager, request_id: str, tokens: Sequence[int]) -> list[int]:
    """Add a request and schedule all its tokens; returns its blocks."""
    add(manager, request_id, tokens)
    return admit(manager, request_id)


def drop(manager: KVCacheManager, request_id: str) -> None:
    """Give back a request's blocks and forget it."""
    manager.free(request_id)
    manager.remove_request(request_id)


def blocks(manager: KVCacheManager, request_id: str) -> list[int]:
    """Return the request's block table in the first group."""
    return manager.get_block_ids(request_id)[0]


def queue(manager: KVCacheManager) -> list[int]:
    """Return the free device blocks, the next one to be taken first."""
    return list(manager.state().device.queue)


def keyed(manager: KVCacheManager) -> list[int]:
    """Return the device blocks that can be hit, in ascending order."""
    return [block for block, key in enumerate(manager.state().device.keys) if key is not None]


def owners(manager: KVCacheManager, block: int) -> int:
    """Count how many requests and pins hold a device block."""
    return manager.state().device.ref_counts[block]


def step(manager: KVCacheManager) -> list[Command]:
    """Close the open batch, as an engine does before its forward pass; returns its commands.

    Asserts every invariant before and after.
    """
    manager.check()
    commands = list(manager.take_batch())
    manager.check()
    return commands


@contextmanager
def unchanged(manager: KVCacheManager) -> Iterator[None]:
    """Assert that the block leaves the state as it was, to the byte."""
    before = manager.encode()
    yield
    assert manager.encode() == before
