# SPDX-License-Identifier: Apache-2.0
"""Slots under context parallelism, where the ranks of a group share the tokens of each block.

One manager has blocks of block_size tokens, which are spread over the ranks in runs of `interleave`
tokens: the first run lies on rank 0, the next one on rank 1, and so on. Each rank has a page for
every block id, with 1 / num_ranks of the tokens, and applies every batch unchanged: a copy of a
block copies each rank's part of it. Only where a token is written and read depends on the rank.

Source: the slot mapping of vLLM's decode context parallelism.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcore_runtime.cache.cache import check_size
from kvcore_runtime.cache.errors import TableOutOfRange, UnevenShares

ELSEWHERE = -1
"""The slot of a token that lies on another rank: kernels skip it."""


def local_slots(
    slots: Tensor, block_size: int, *, rank: int, num_ranks: int, interleave: int = 1
) -> Tensor:
    """Return the slots that tokens have on one rank, ELSEWHERE for those of other ranks.

    slots: integers of any shape, as `BlockTables.slot_mapping` returns them for blocks of
    block_size tokens. A rank's pages hold block_size / num_ranks tokens. The result has the shape,
    dtype and device of slots, which are not changed. Raises InvalidSize, TableOutOfRange,
    UnevenShares.
    """
    check_size("num_ranks", num_ranks)
    check_size("interleave", interleave)
    if not 0 <= rank < num_ranks:
        raise TableOutOfRange(name="rank", value=rank, last=num_ranks - 1)
    if block_size % (num_ranks * interleave):
        raise UnevenShares(block_size=block_size, interleave=interleave, num_ranks=num_ranks)
    blocks, places = slots // block_size, slots % block_size
    runs = places // interleave
    kept = blocks * (block_size // num_ranks)
    kept += runs // num_ranks * interleave + places % interleave
    return torch.where(runs % num_ranks == rank, kept, ELSEWHERE)
