# SPDX-License-Identifier: Apache-2.0
"""What a simulated device is asked to do, and how another one is found.

Rules: a device applies batches in order and plays the forward pass behind each: it writes the
number of each scheduled token's prefix into the token's slot, and must find, for every query, the
numbers of all that the query sees. What it does not find raises InvariantViolation (KV-READ). The
core brings one device (`memory.py`); other distributions bring theirs as entry points of the group
`kvcore.devices`, a function that makes one for a `Plan`. Twin: none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Protocol

import attrs

from kvcore.types.commands import Batch
from kvcore.types.config import Config

GROUP = "kvcore.devices"
SPOILT, RUBBISH, ZERO, EMPTY = -1, -2, -3, -4
"""What a slot holds that holds no token: from a failed load, scratch, zeros, nothing."""


@attrs.frozen(kw_only=True)
class Pass:
    """What one forward pass does for one request: positions [start, end) are written.

    row: of the block tables. loaded: up to there the slots are filled from elsewhere, the queries
    stand behind. num_slots: up to there rubbish is written. nodes: the numbers of the prefixes, of
    at least `end` positions. failed: the first position that was not loaded, None where all were.
    encoder: what cross-attention tables hold, filled by the pass that starts at 0.
    """

    request_id: str
    row: int
    start: int
    loaded: int
    end: int
    num_slots: int
    nodes: Sequence[int]
    failed: int | None = None
    encoder: Sequence[int] = ()


@attrs.frozen
class Plan:
    """How large a device must be.

    num_rows: of the block tables. num_tokens: of the longest request. contents: the numbers that
    the block of a key holds, whoever filled it.
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


class MakeDevice(Protocol):
    """Makes a device."""

    def __call__(self, plan: Plan) -> Device: ...


def find_device(name: str) -> MakeDevice | None:
    """The device that some installed distribution brings under a name."""
    for point in metadata.entry_points(group=GROUP):
        if point.name == name:
            make: MakeDevice = point.load()
            return make
    return None
