# SPDX-License-Identifier: Apache-2.0
"""A device that carries out batches and plays forward passes, and how one is found.

A device applies batches in order and plays the forward pass behind each: it writes the number of
each scheduled token's prefix into the token's slot, and must find, for every query, the numbers of
all that the query sees. What it does not find raises InvariantViolation (KV-READ). An oracle of
contents is one (`content_oracle.py`); other distributions bring theirs as entry points of the group
`kvcore.devices`, a function that makes one for a `DeviceSize`.
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
    """How large a device must be.

    num_rows: of the block tables. num_tokens: of the longest request. contents: the numbers that
    the block of a key holds, whichever request filled it.
    """

    config: Config
    num_rows: int
    num_tokens: int
    contents: Callable[[bytes], Sequence[int]]


class Device(Protocol):
    """A worker with cache memory of its own."""

    def apply(self, batch: Batch) -> None:
        """Carry out the commands of the next batch; numbers left out are of cancelled ones."""

    def forward(self, passes: Sequence[Pass]) -> None:
        """Play the forward pass of the batch that was applied last."""

    def arrive(self, operation: int, nodes: Sequence[int] | None) -> None:
        """Finish a load that was applied: these numbers fill its block; None: it failed."""


MakeDevice = Callable[[DeviceSize], Device]


def find_device(name: str) -> MakeDevice | None:
    """The device that some installed distribution brings under a name."""
    for point in metadata.entry_points(group=GROUP):
        if point.name == name:
            make: MakeDevice = point.load()
            return make
    return None
