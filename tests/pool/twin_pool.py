# SPDX-License-Identifier: Apache-2.0
"""The twin's pool layer: the device tier of its `Tiers`, by the names of Python's transitions."""

from __future__ import annotations

from typing import Any

from kvcore import Command, _twin

Dump = tuple[list[int], list[bytes | None], list[int], list[int]]


class TwinPool:
    """A pool of the twin, its blocks in the queue in the order of their ids."""

    def __init__(self, num_blocks: int, *, null_block: bool = False, eviction: str = "lru") -> None:
        twin = _twin._rust  # type: ignore[attr-defined] # no way for users
        options = {"null_block": null_block, "eviction": eviction, "order": "ascending"}
        self._tiers = twin.Tiers(num_blocks, 0, **options)

    def call(self, name: str, *args: Any) -> Any:
        """Make a transition or query of the pool layer by its name."""
        return getattr(self._tiers, name)(*args, "device")

    def dump(self) -> Dump:
        """Return the owners and key of each block, the free queue from its front, and all pins."""
        owners, keys, queue, *_ = self._tiers.dump()[0]
        return owners, keys, queue, self._tiers.pins()

    def commands(self) -> list[Command]:
        """Return the commands since the last call."""
        return list(self._tiers.take_batch())
