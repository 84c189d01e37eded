# SPDX-License-Identifier: Apache-2.0
"""The protocol of a device that executes batches and simulates forward passes, and its look-up.

A device applies batches in order and simulates the forward pass after each: it writes the number of
each scheduled token's prefix into the token's slot, and must find, for every query, the numbers of
all positions that the query sees; else it raises InvariantViolation (KV-READ). The content oracle
(`content_oracle.py`) is a device. Other distributions add theirs as entry points of the group
`kvcore.devices`: functions that make a device for a `DeviceSize`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Protocol

import attrs

from kvcore.oracle.content_oracle import Pass
from kvcore.types.commands import Batch
from kvcore.types.config import Config

GROUP = "kvcore.devices"


@attrs.frozen
class DeviceSize:
    """The size that a device must have.

    num_rows: rows of the block tables. num_tokens: tokens of the longest request. contents: returns
    the numbers that the block of a key holds, whichever request filled it.
    """

    config: Config
    num_rows: int
    num_tokens: int
    contents: Callable[[bytes], Sequence[int]]


class Device(Protocol):
    """A worker with cache memory of its own."""

    def apply(self, batch: Batch) -> None:
        """Execute the commands of the next batch; skipped numbers belong to cancelled batches."""

    def forward(self, passes: Sequence[Pass]) -> None:
        """Simulate the forward pass of the batch applied last."""

    def arrive(self, operation: int, nodes: Sequence[int] | None) -> None:
        """Finish an executed load: these numbers fill its block. None: the load failed."""


MakeDevice = Callable[[DeviceSize], Device]


def find_device(name: str) -> MakeDevice | None:
    """Return the device that an installed distribution registers under a name."""
    for point in metadata.entry_points(group=GROUP):
        if point.name == name:
            make: MakeDevice = point.load()
            return make
    return None
