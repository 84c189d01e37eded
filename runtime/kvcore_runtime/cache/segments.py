# SPDX-License-Identifier: Apache-2.0
"""Runs a batch's copying commands: segment by segment, or in program order, which must equal it.

Inside a segment no block is written twice, read after it was written, or written after it
was read; so program order, any order inside segments and all reads before all writes give the same
contents. A runtime uses `run_segments`; `run_program_order` serves to find a batch that breaks this
law. `check_segments` runs first, so nothing here stops halfway.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

import attrs
import torch

from kvcore.types.commands import CopyOnWrite, Load, Store, SwapIn, SwapOut, Zero
from kvcore_runtime.cache.cache import Cache, Tier
from kvcore_runtime.cache.copies import check_blocks, copy_pages, zero_blocks
from kvcore_runtime.cache.errors import BadSegments, CopyHazard

COPYING = (Zero.kind, CopyOnWrite.kind, SwapOut.kind, SwapIn.kind)
_SWAPS = (SwapOut.kind, SwapIn.kind)


@attrs.frozen
class Copying:
    """A command that reads or writes blocks: what it reads (a) and what it writes (b).

    Zero, as in the columns, writes a. Stores and loads (transfers.py) are checked as Copyings too:
    a Store only reads, a Load only writes.
    """

    kind: int
    segment: int
    a: int
    b: int


Run = Callable[[Cache, Sequence[Copying]], None]


def run_segments(cache: Cache, commands: Sequence[Copying]) -> None:
    """Run segment by segment, grouped by kind inside; on a GPU swaps use the side stream."""
    for _, segment in itertools.groupby(commands, key=lambda each: each.segment):
        by_kind: dict[int, list[Copying]] = {}
        for command in segment:
            by_kind.setdefault(command.kind, []).append(command)
        swaps = [each for each in by_kind.items() if each[0] in _SWAPS]
        others = [each for each in by_kind.items() if each[0] not in _SWAPS]
        if cache.device.type == "cuda" and swaps:
            _run_beside(cache, swaps, others)
            continue
        for kind, alike in (*swaps, *others):
            _run_kind(cache, kind, alike)


def run_program_order(cache: Cache, commands: Sequence[Copying]) -> None:
    """Run one command after the other, which defines the meaning of a batch."""
    for command in commands:
        _run_kind(cache, command.kind, [command])


def check_segments(cache: Cache, number: int, commands: Iterable[Copying]) -> None:
    """Check that segments never fall, blocks exist, and no segment holds a hazard.

    number: of the batch, for the message. Raises BadSegments, BlockOutOfRange or CopyHazard.
    """
    current = 0
    read: set[tuple[str, int]] = set()
    written: set[tuple[str, int]] = set()
    for command in commands:
        if command.segment < current:
            raise BadSegments(number=number, segment=command.segment, previous=current)
        if command.segment > current:
            current = command.segment
            read.clear()
            written.clear()
        source, target = _tiers(cache, command.kind)
        if command.kind not in (Zero.kind, Load.kind):
            check_blocks(source, [command.a])
            _refuse_if((source.name, command.a) in written, source, command.a, "read after written")
            read.add((source.name, command.a))
        if command.kind != Store.kind:
            place = command.a if command.kind == Zero.kind else command.b
            check_blocks(target, [place])
            _refuse_if((target.name, place) in written, target, place, "written twice")
            _refuse_if((target.name, place) in read, target, place, "written after read")
            written.add((target.name, place))


def _refuse_if(broken: bool, tier: Tier, block: int, how: str) -> None:
    if broken:
        raise CopyHazard(block=block, tier=tier.name, how=how)


def _tiers(cache: Cache, kind: int) -> tuple[Tier, Tier]:
    """Return the tiers that a command reads and writes."""
    source = cache.host_blocks if kind == SwapIn.kind else cache.blocks
    target = cache.host_blocks if kind == SwapOut.kind else cache.blocks
    return source, target


def _run_kind(cache: Cache, kind: int, commands: Sequence[Copying]) -> None:
    if kind == Zero.kind:
        zero_blocks(cache, [each.a for each in commands])
        return
    source, target = _tiers(cache, kind)
    copy_pages(source, target, [each.a for each in commands], [each.b for each in commands])


def _run_beside(
    cache: Cache,
    swaps: Sequence[tuple[int, Sequence[Copying]]],
    others: Sequence[tuple[int, Sequence[Copying]]],
) -> None:
    """Run swaps on the cache's side stream while the rest runs on the current one; join both.

    The side stream waits for the earlier work of the current one (the forward pass that wrote the
    blocks); the current one waits for the swaps before any later segment or forward pass.
    """
    current = torch.cuda.current_stream(cache.device)
    side = cache.side_stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        for kind, alike in swaps:
            _run_kind(cache, kind, alike)
    for kind, alike in others:
        _run_kind(cache, kind, alike)
    current.wait_stream(side)
