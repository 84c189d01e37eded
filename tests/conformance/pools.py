# SPDX-License-Identifier: Apache-2.0
"""The pool layer of either language, driven alike: Python's pure functions, the twin's pool."""

from __future__ import annotations

from typing import Any, Protocol

from kvcore import Command
from kvcore.pool import transitions
from kvcore.types.keys import KEY_SIZE
from tests.conftest import Backend
from tests.pool.test_transitions import Pure
from tests.pool.twin_pool import TwinPool

KEYS = [bytes([number]) * KEY_SIZE for number in range(4)]


class Pool(Protocol):
    """A pool that keeps its newest state."""

    def call(self, name: str, *args: Any) -> Any:
        """Make a transition or query of the pool layer by its name."""

    def dump(self) -> tuple[list[int], list[bytes | None], list[int], list[int]]:
        """Return the owners and key of each block, the free queue from its head, and all pins."""

    def commands(self) -> list[Command]:
        """Return the commands since the last call."""


class _PurePool(Pure):
    """Python's pool."""

    def commands(self) -> list[Command]:
        emitted, self.emitted = self.emitted, []
        return emitted


def make_pool(backend: Backend, num_blocks: int, **options: Any) -> Pool:
    """Return a fresh pool, its blocks in the queue in the order of their ids."""
    if backend == "python":
        return _PurePool(transitions.make_pool(num_blocks, **options))
    return TwinPool(num_blocks, **options)


def owners(pool: Pool) -> list[int]:
    """Count the owners of each block."""
    return pool.dump()[0]


def keys(pool: Pool) -> list[bytes | None]:
    """Return the key of each block."""
    return pool.dump()[1]


def queue(pool: Pool) -> list[int]:
    """Return the free blocks from the head of the queue to its tail."""
    return pool.dump()[2]


def cached(backend: Backend, num_blocks: int, order: list[int]) -> Pool:
    """Return a pool whose blocks were all used once and freed in this order, each with its own
    key.

    Block n has the key KEYS[n].
    """
    pool = make_pool(backend, num_blocks)
    pool.call("take", num_blocks)
    for block in range(num_blocks):
        pool.call("publish", block, KEYS[block])
    pool.call("release", order)
    pool.commands()
    return pool
