# SPDX-License-Identifier: Apache-2.0
"""The orders of a segment's commands that must give what the order of the batch gives."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import torch
from kvcore_runtime.cache.cache import Cache
from kvcore_runtime.cache.segments import Copying, _tiers, run_program_order

from kvcore.types.commands import Zero


def run_shuffled(cache: Cache, commands: Sequence[Copying], seed: int) -> None:
    """Run the commands one after the other, those of a segment in a random order."""
    shuffle = random.Random(seed).shuffle
    for _, segment in itertools.groupby(commands, key=lambda each: each.segment):
        some = list(segment)
        shuffle(some)
        run_program_order(cache, some)


def run_parallel(cache: Cache, commands: Sequence[Copying]) -> None:
    """Run all reads of a segment before all its writes, as if they ran at the same moment."""
    for _, segment in itertools.groupby(commands, key=lambda each: each.segment):
        writes = []
        for command in segment:
            source, target = _tiers(cache, command.kind)
            content = torch.zeros_like(target.pieces[:, 0])
            if command.kind != Zero.kind:
                content = source.pieces[:, command.a].to(target.pieces.device, copy=True)
            place = command.a if command.kind == Zero.kind else command.b
            writes.append((target.pieces[:, place], content))
        for page, content in writes:
            page.copy_(content)
