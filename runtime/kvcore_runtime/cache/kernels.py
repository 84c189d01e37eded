# SPDX-License-Identifier: Apache-2.0
"""Triton kernels that copy or zero whole pages, and write table entries, in one launch.

Pages are the `pieces` view of a tier, [num_pieces, num_blocks, words]; ids are int64 on the
GPU. Source or target of a copy may lie in pinned host memory, which a GPU reads and writes in
place. Runs on the current stream, does not synchronise. With TRITON_INTERPRET=1 the same code runs
on CPU tensors.
"""

from __future__ import annotations

import triton  # type: ignore[import-untyped]  # ships no types
import triton.language as tl  # type: ignore[import-untyped]  # ships no types
from torch import Tensor

# Words that a program copies at a time: 8 KiB of int64, 64 bytes per thread of 4 warps.
CHUNK_WORDS = 1024
# Table entries that a program writes: one per thread of 4 warps.
CHUNK_ENTRIES = 128


def copy_pages(
    source: Tensor, target: Tensor, pairs: Tensor, max_programs: int | None = None
) -> None:
    """Copy page pairs[0, i] of source to page pairs[1, i] of target, for every i at once.

    source, target: [num_pieces, num_blocks, words], contiguous, one dtype. pairs: [2, n] int64.
    max_programs: programs that share the work; default: one per chunk. The caller has
    checked ids and hazards (copies.check_copies).
    """
    num_pieces, _, words = source.shape
    num_pairs = pairs.shape[1]
    if num_pairs == 0:
        return
    num_chunks = triton.cdiv(words, CHUNK_WORDS)
    jobs = num_chunks * num_pairs * num_pieces
    _copy_pages[(min(jobs, max_programs or jobs),)](
        *(source, target, pairs, num_pairs, source.shape[1], target.shape[1], words),
        *(num_chunks, jobs),
        chunk=CHUNK_WORDS,
    )


def zero_pages(target: Tensor, targets: Tensor) -> None:
    """Fill page targets[i] of target with zeros, for every i at once; shapes as in `copy_pages`."""
    num_pieces, num_blocks, words = target.shape
    if targets.numel() == 0:
        return
    grid = (targets.numel(), num_pieces, triton.cdiv(words, CHUNK_WORDS))
    _zero_pages[grid](target, targets, num_blocks, words, chunk=CHUNK_WORDS)


def write_entries(target: Tensor, entries: Tensor) -> None:
    """Write entries[1, i] at the flat place entries[0, i] of target, for every i at once.

    target: contiguous, any integer dtype. entries: [2, n] int64, all places distinct. The caller
    has checked the places (BlockTables.plan).
    """
    count = entries.shape[1]
    if count:
        grid = (triton.cdiv(count, CHUNK_ENTRIES),)
        _write_entries[grid](target, entries, count, chunk=CHUNK_ENTRIES)


@triton.jit(do_not_specialize=["num_pairs", "jobs"])  # type: ignore[untyped-decorator] # no types
def _copy_pages(  # type: ignore[no-untyped-def]  # Triton values
    source,
    target,
    pairs,
    num_pairs,
    source_blocks,
    target_blocks,
    words,
    num_chunks,
    jobs,
    chunk: tl.constexpr,
):
    for job in range(tl.program_id(0), jobs, tl.num_programs(0)):
        words_here = job % num_chunks * chunk + tl.arange(0, chunk)
        pair = job // num_chunks % num_pairs
        piece = (job // num_chunks // num_pairs).to(tl.int64)
        inside = words_here < words
        page_from = piece * source_blocks + tl.load(pairs + pair)
        page_to = piece * target_blocks + tl.load(pairs + num_pairs + pair)
        content = tl.load(source + page_from * words + words_here, mask=inside)
        tl.store(target + page_to * words + words_here, content, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]  # ships no types
def _zero_pages(  # type: ignore[no-untyped-def]  # Triton values
    target, targets, target_blocks, words, chunk: tl.constexpr
):
    piece = tl.program_id(1).to(tl.int64)
    words_here = tl.program_id(2) * chunk + tl.arange(0, chunk)
    page = piece * target_blocks + tl.load(targets + tl.program_id(0))
    tl.store(target + page * words + words_here, 0, mask=words_here < words)


@triton.jit  # type: ignore[untyped-decorator]  # ships no types
def _write_entries(  # type: ignore[no-untyped-def]  # Triton values
    target, entries, count, chunk: tl.constexpr
):
    at = tl.program_id(0) * chunk + tl.arange(0, chunk)
    inside = at < count
    places = tl.load(entries + at, mask=inside)
    tl.store(target + places, tl.load(entries + count + at, mask=inside), mask=inside)
