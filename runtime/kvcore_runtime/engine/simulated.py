# SPDX-License-Identifier: Apache-2.0
"""The torch runtime as a device of `kvcore simulate --torch`: its tensors check every read.

The small real cache of stamped_cache.py, in guard mode, gets the batches and forward passes of a
simulated engine. Contents are compared with the simulator's: a stored block must hold the content
of its key, and a query must find what its request wrote. A load fills its block when the simulator
reports its arrival; until then the block holds NaN. An error is raised as the property that it
breaks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from kvcore.oracle.content_oracle import Pass
from kvcore.oracle.device import DeviceSize
from kvcore.types.commands import Batch, Load
from kvcore.types.errors import InvariantViolation
from kvcore.types.keys import HASH_SIZE
from kvcore_runtime.cache.apply import batch_columns
from kvcore_runtime.cache.errors import (
    BadSegments,
    BeyondTable,
    CopyHazard,
    StaleRead,
    TableGap,
    TierFailed,
    UnownedWrite,
    WrongContent,
)
from kvcore_runtime.cache.stamped_cache import SPOILT, MemoryTier, StampedCache
from kvcore_runtime.cache.transfers import read_transfers

SLOTS_MAX = 1 << 20
"""Positions that a simulated step writes at most."""
BROKEN = {
    StaleRead: "KV-READ",
    WrongContent: "KV-READ",
    BeyondTable: "KV-READ",
    UnownedWrite: "KV-READ",
    CopyHazard: "CMD-HAZARD",
    BadSegments: "CMD-HAZARD",
    TableGap: "TABLE-MIRROR",
}
"""The property that an error shows to be broken."""


class TorchDevice:
    """A `kvcore.oracle.device.Device` over tensors on the CPU."""

    def __init__(self, plan: DeviceSize) -> None:
        self._loads: dict[int, tuple[int, bytes]] = {}
        self._sizes = [group.block_size for group in plan.config.groups]
        self.stamped = StampedCache(
            plan.config,
            max_rows=plan.num_rows,
            max_len=plan.num_tokens,
            max_tokens=min(plan.num_rows * plan.num_tokens, SLOTS_MAX),
            tier=_CheckingTier(self, plan.contents),
        )

    def apply(self, batch: Batch) -> None:
        """See `Device`."""
        self.stamped.skip(batch.number)
        with _as_properties():
            self.stamped.apply(batch)
        for each in read_transfers(batch, batch_columns(batch)):
            if each.kind == Load.kind:
                self._loads[each.operation] = (each.block, each.key)

    def forward(self, passes: Sequence[Pass]) -> None:
        """See `Device`."""
        with _as_properties():
            self.stamped.forward(passes)

    def arrive(self, operation: int, nodes: Sequence[int] | None) -> None:
        """See `Device`."""
        if operation not in self._loads:
            return
        block, key = self._loads.pop(operation)
        group_id = group_of(key)
        spoilt = [SPOILT] * self._sizes[group_id]
        self.stamped.fill(block, group_id, spoilt if nodes is None else nodes)


class _CheckingTier(MemoryTier):
    """A tier that checks stores, and serves no loads."""

    def __init__(self, device: TorchDevice, contents: Callable[[bytes], Sequence[int]]) -> None:
        super().__init__()
        self._device = device
        self._contents = contents

    def store(self, key: bytes, page: Tensor) -> None:
        """Raise InvariantViolation unless a page holds the content of its key."""
        expected = self._device.stamped.page(group_of(key), self._contents(key))
        if not torch.equal(page, expected):
            raise InvariantViolation("CACHE-KV", f"what is stored is not content {key.hex()}")

    def load(self, key: bytes, num_bytes: int) -> Tensor:
        """Load nothing now: `arrive` delivers the content later."""
        del num_bytes
        raise TierFailed(key=key.hex(), place="the simulated store", reason="it comes later")


def make_device(plan: DeviceSize) -> TorchDevice:
    """Make the device of a run."""
    return TorchDevice(plan)


def group_of(key: bytes) -> int:
    """Return the group of a block's key."""
    return int.from_bytes(key[HASH_SIZE:], "big")


@contextlib.contextmanager
def _as_properties() -> Iterator[None]:
    """Turn errors that break a known property into InvariantViolation."""
    try:
        yield
    except tuple(BROKEN) as error:
        raise InvariantViolation(BROKEN[type(error)], f"in the tensors: {error}") from error
