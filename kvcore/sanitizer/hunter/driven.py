# SPDX-License-Identifier: Apache-2.0
"""What the engines of several adapters have in common.

This file works without kvcore, so that a written test can include what it uses of it.
"""

from typing import Any


class Driven:
    """An engine that has no batch in flight between two steps, holds nothing that must be closed,
    and reserves no block.
    """

    world: Any

    @property
    def in_flight(self) -> bool:
        """Return whether a batch is in flight."""
        return False

    def finish_batches(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def total(self) -> int:
        """Return the number of blocks of the world."""
        return int(self.world.num_blocks)


class Silent:
    """A stand-in for an object that is only called for effects, on a GPU or a thread."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None
