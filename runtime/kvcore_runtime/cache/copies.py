# SPDX-License-Identifier: Apache-2.0
"""Copies and fills of whole blocks, inside a tier and between tiers.

The copies of one call run in any order, so no block may be written twice, or written and read
(CMD-COPYSET). On the CPU runs of consecutive (source, target) ids become one slice copy, other ids
become one copy per page, through numpy views of the same memory, whose calls cost less than torch's
(benches/copies.py has the ratios to one contiguous copy). Long runs go through torch, which may use
its threads. On a GPU a call is one kernel launch; swaps of larger pages are left to the copy
engines, one transfer per run (docs/gpu.md has the figures). Nothing here synchronises.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvcore_runtime.cache.cache import Cache, Tier
from kvcore_runtime.cache.errors import (
    BlockOutOfRange,
    CopyHazard,
    LayoutMismatch,
    lengths_differ,
)

# From this size on torch's threads are worth the longer call.
THREADS_BYTES_MIN = 1024 * 1024
# Larger pages are copied in parts of this size, which is faster than in one piece.
PART_BYTES = 512 * 1024
# Up to this size one kernel over pinned memory beats one transfer per page, each of which costs the
# caller 8 us (docs/gpu.md).
KERNEL_SWAP_BYTES_MAX = 512 * 1024
# This many programs of that kernel fill the bus and leave the GPU's other processors free.
SWAP_PROGRAMS = 32


def copy_blocks(cache: Cache, sources: Sequence[int], targets: Sequence[int]) -> None:
    """Copy device blocks to device blocks, pairwise.

    Raises UnequalLists, BlockOutOfRange or CopyHazard before touching the cache.
    """
    copy_pages(cache.blocks, cache.blocks, sources, targets)


def swap_out(cache: Cache, blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
    """Copy device blocks to host blocks, pairwise; raises as `copy_blocks`."""
    copy_pages(cache.blocks, cache.host_blocks, blocks, host_blocks)


def swap_in(cache: Cache, host_blocks: Sequence[int], blocks: Sequence[int]) -> None:
    """Copy host blocks to device blocks, pairwise; raises as `copy_blocks`."""
    copy_pages(cache.host_blocks, cache.blocks, host_blocks, blocks)


def zero_blocks(cache: Cache, blocks: Sequence[int]) -> None:
    """Fill device blocks with zeros. Raises BlockOutOfRange before touching the cache."""
    fill_pages(cache.blocks, blocks, 0.0)


def copy_pages(source: Tier, target: Tier, sources: Sequence[int], targets: Sequence[int]) -> None:
    """Copy whole blocks of one tier to blocks of the same or another tier, pairwise."""
    check_copies(source, target, sources, targets)
    if not sources:
        return
    pages_from, pages_to = source.pieces, target.pieces
    across = pages_from.device != pages_to.device
    small = source.piece_size_bytes <= KERNEL_SWAP_BYTES_MAX
    if (pages_to.is_cuda and not across) or (across and small):
        from kvcore_runtime.cache import kernels  # Triton is imported only if there is a GPU.

        gpu = pages_to.device if pages_to.is_cuda else pages_from.device
        with torch.cuda.device(gpu):
            pairs = ids([sources, targets], gpu)
            kernels.copy_pages(pages_from, pages_to, pairs, SWAP_PROGRAMS if across else None)
    elif across:
        _copy_by_transfers(pages_from, pages_to, sources, targets)
    else:
        _copy_on_cpu(pages_from, pages_to, sources, targets)


def fill_pages(tier: Tier, blocks: Sequence[int], value: float) -> None:
    """Fill whole blocks of a tier with one value. Raises BlockOutOfRange before touching it."""
    check_blocks(tier, blocks)
    if not blocks:
        return
    if tier.data.is_cuda:
        if value == 0.0:
            # Triton is imported only if there is a GPU.
            from kvcore_runtime.cache import kernels

            with torch.cuda.device(tier.data.device):
                kernels.zero_pages(tier.pieces, ids(blocks, tier.data.device))
        else:
            tier.data.index_fill_(0, ids(blocks, tier.data.device), value)
        return
    if value == 0.0:
        _zero_on_cpu(tier.pieces, blocks)
        return
    for start, _, count in merge_runs(blocks, blocks):
        tier.data[start : start + count].fill_(value)


def merge_runs(sources: Sequence[int], targets: Sequence[int]) -> list[tuple[int, int, int]]:
    """Merge pairs into runs (source, target, count) of consecutive ids on both sides, by ascending
    source.

    Reading in ascending order is slightly faster than writing so.
    """
    runs: list[tuple[int, int, int]] = []
    first_source = first_target = count = 0
    for source, target in sorted(zip(sources, targets, strict=True)):
        if count and source == first_source + count and target == first_target + count:
            count += 1
            continue
        if count:
            runs.append((first_source, first_target, count))
        first_source, first_target, count = source, target, 1
    if count:
        runs.append((first_source, first_target, count))
    return runs


def check_blocks(tier: Tier, blocks: Sequence[int]) -> None:
    """Raise BlockOutOfRange for the first id that the tier does not have."""
    if blocks and (min(blocks) < 0 or max(blocks) >= tier.num_blocks):
        wrong = next(each for each in blocks if not 0 <= each < tier.num_blocks)
        raise BlockOutOfRange(block=wrong, num_blocks=tier.num_blocks, tier=tier.name)


def check_copies(
    source: Tier, target: Tier, sources: Sequence[int], targets: Sequence[int]
) -> None:
    """Raise if these copies cannot run together in any order; does not touch the tiers."""
    if len(sources) != len(targets):
        raise lengths_differ("sources", len(sources), "targets", len(targets))
    check_blocks(source, sources)
    check_blocks(target, targets)
    if (source.pieces.shape[::2], source.pieces.dtype) != (
        target.pieces.shape[::2],
        target.pieces.dtype,
    ):
        raise LayoutMismatch(
            source_bytes=source.data[0].nbytes,
            source_pieces=source.pieces.shape[0],
            target_bytes=target.data[0].nbytes,
            target_pieces=target.pieces.shape[0],
        )
    written = set(targets)
    if len(written) != len(targets):
        twice = next(each for each in targets if targets.count(each) > 1)
        raise CopyHazard(block=twice, tier=target.name, how="written twice")
    if source is target and not written.isdisjoint(sources):
        both = min(written.intersection(sources))
        raise CopyHazard(block=both, tier=target.name, how="both read and written")


def ids(blocks: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return block ids as int64 on a device, sent through pinned memory if it is a GPU."""
    host = torch.from_numpy(np.array(blocks, dtype=np.int64))  # faster than torch.tensor
    if device.type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host


def _copy_by_transfers(
    pages_from: Tensor, pages_to: Tensor, sources: Sequence[int], targets: Sequence[int]
) -> None:
    runs = merge_runs(sources, targets)
    # Piece by piece, since only a contiguous run goes to the copy engine without staging.
    for piece_from, piece_to in zip(pages_from, pages_to, strict=True):
        for source, target, count in runs:
            run_to = piece_to[target : target + count]
            run_to.copy_(piece_from[source : source + count], non_blocking=True)


def _copy_on_cpu(
    pages_from: Tensor, pages_to: Tensor, sources: Sequence[int], targets: Sequence[int]
) -> None:
    runs = merge_runs(sources, targets)
    piece_size_bytes = pages_from[0, 0].nbytes
    num_parts, rest = divmod(piece_size_bytes, PART_BYTES)
    parts = num_parts if num_parts > 1 and rest == 0 else 1
    for piece_from, piece_to in zip(pages_from, pages_to, strict=True):
        array_from, array_to = piece_from.numpy(), piece_to.numpy()
        for source, target, count in runs:
            if count == 1 and parts > 1:
                rows_from = array_from[source].reshape(parts, -1)
                rows_to = array_to[target].reshape(parts, -1)
                for part in range(parts):
                    rows_to[part] = rows_from[part]
            elif count == 1:
                array_to[target] = array_from[source]
            elif count * piece_size_bytes < THREADS_BYTES_MIN:
                array_to[target : target + count] = array_from[source : source + count]
            else:
                piece_to[target : target + count].copy_(piece_from[source : source + count])


def _zero_on_cpu(pages: Tensor, blocks: Sequence[int]) -> None:
    runs = merge_runs(blocks, blocks)
    for piece in pages:
        array = piece.numpy()
        for start, _, count in runs:
            array[start : start + count] = 0
