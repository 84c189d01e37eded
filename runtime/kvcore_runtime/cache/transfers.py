# SPDX-License-Identifier: Apache-2.0
"""Executes a batch's stores and loads of single blocks, to and from a tier that may fail.

A page is its block's bytes in the order of the logical shape, whatever the layout, so tiers do not
depend on layouts. A load fills its block completely or not at all. A failed operation has an error
and does not affect others; the manager learns of it through `complete_operation`, and dependent
tokens are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import attrs
import torch
from torch import Tensor

from kvcore.types.commands import COLUMNS, KEY_FIELDS, Batch, Load, Store
from kvcore.types.keys import KEY_SIZE
from kvcore_runtime.cache.cache import Tier
from kvcore_runtime.cache.errors import TierError

TRANSFERS = (Store.kind, Load.kind)


class ExternalTier(Protocol):
    """Pages by key; a page is [num_bytes] uint8, contiguous, on the CPU."""

    def store(self, key: bytes, page: Tensor) -> None:
        """Store a page under its key, completely or not at all. Raises TierError."""
        ...

    def load(self, key: bytes, num_bytes: int) -> Tensor:
        """Return the page of this many bytes stored under a key. Raises TierError."""
        ...


@attrs.frozen
class Transfer:
    """One Store or Load of the columns."""

    kind: int
    segment: int
    operation: int
    block: int
    key: bytes


@attrs.frozen
class Finished:
    """An ended operation. error: why it failed, None if it succeeded."""

    operation: int
    error: TierError | None = None

    @property
    def done(self) -> bool:
        """Whether it succeeded."""
        return self.error is None


def read_transfers(batch: Batch, columns: Tensor) -> list[Transfer]:
    """Return the stores and loads of a batch, in program order. columns: from `batch_columns`."""
    kinds = columns[COLUMNS.index("kind")]
    chosen = columns[:, (kinds == Store.kind) | (kinds == Load.kind)]
    found = []
    for kind, segment, *values in chosen.t().tolist():
        start = values[KEY_FIELDS[kind]] * KEY_SIZE
        block = values[1] if kind == Store.kind else values[2]
        found.append(
            Transfer(kind, segment, values[0], block, batch.keys[start : start + KEY_SIZE])
        )
    return found


def run_transfers(
    blocks: Tier, external: ExternalTier, transfers: Sequence[Transfer]
) -> list[Finished]:
    """Execute the stores and loads of one segment of device blocks, one after another."""
    finished = []
    for transfer in transfers:
        try:
            if transfer.kind == Store.kind:
                external.store(transfer.key, read_page(blocks, transfer.block))
            else:
                num_bytes = blocks.data[transfer.block].nbytes
                write_page(blocks, transfer.block, external.load(transfer.key, num_bytes))
        except TierError as error:
            finished.append(Finished(transfer.operation, error))
        else:
            finished.append(Finished(transfer.operation))
    return finished


def read_page(blocks: Tier, block: int) -> Tensor:
    """Return a block's bytes on the CPU, [num_bytes] uint8; waits for the device."""
    return blocks.pieces[:, block].contiguous().view(-1).view(torch.uint8).cpu()


def write_page(blocks: Tier, block: int, page: Tensor) -> None:
    """Put bytes into a block. page: as from `read_page`."""
    target = blocks.pieces[:, block]
    # A page in a file can begin at any byte, but words must be aligned.
    words = page.clone().view(target.dtype).view(target.shape)
    target.copy_(words)
