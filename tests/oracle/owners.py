# SPDX-License-Identifier: Apache-2.0
"""The blocks with an owner, and the ownerless ones that can be hit, by the commands alone.

Why: a runtime in guard mode goes by these. A cancelled batch takes with it who owns a block, so
they are followed only if batches are never in flight.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvcore import Allocate, Command, Evict, EvictAll, Free, Touch
from tests.oracle.finding import demand


class Owners:
    """Owned blocks, and cached ones without an owner."""

    def __init__(self) -> None:
        self._owned: set[int] = set()
        self._cached: set[int] = set()

    def follow(self, commands: Iterable[Command]) -> None:
        """Follow the commands of a batch."""
        for command in commands:
            match command:
                case Allocate(block=block):
                    demand(block not in self._owned, f"{command}, which has an owner")
                    demand(block not in self._cached, f"{command}, which can be hit")
                    self._owned.add(block)
                case Touch(block=block):
                    demand(block not in self._owned, f"{command}, which has an owner")
                    self._owned.add(block)
                    self._cached.discard(block)
                case Free(block=block, cached=cached):
                    demand(block in self._owned, f"{command}, which has no owner")
                    self._owned.remove(block)
                    if cached:
                        self._cached.add(block)
                case Evict(block=block):
                    self._cached.discard(block)
                case EvictAll():
                    self._cached.clear()
