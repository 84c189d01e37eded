# SPDX-License-Identifier: Apache-2.0
"""Transitions of tiers for a whole table: append, write, and move to the other tier.

Invariants: those of `tiers.py`. A block that has other owners, or a key, is never written. Source:
S003-17, 19 to 21, 26, 28. Twin: rust/src/legacy/blocks/by_table.rs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import attrs

from kvcore.legacy.blocks.tiers import Tiers, copy, release, take, touch
from kvcore.types.arguments import read_count, read_int, read_ints
from kvcore.types.commands import SwapIn, SwapOut, Tier
from kvcore.types.values import Outcome, Refused


def append(
    tiers: Tiers, blocks: Sequence[int], num_blocks: int
) -> Outcome[Tiers, int | Refused | None]:
    """Make room for an owner of device blocks to write after their content.

    num_blocks: length of the table after the write. Value: None if the last block can be written as
    it is; otherwise a new block, to append if the table is shorter than num_blocks, or a copy that
    replaces the last block, as in `own`. Raises InvalidCount, UnknownBlock, NoOwner.
    """
    if len(blocks) < read_count("num_blocks", num_blocks):
        taken = take(tiers, 1)
        fresh = taken.value if isinstance(taken.value, Refused) else taken.value[0]
        return Outcome(taken.state, taken.commands, fresh)
    if not blocks:
        return Outcome(tiers, (), None)
    owned = own(tiers, blocks[-1])
    value = None if owned.value == read_int(blocks[-1]) else owned.value
    return Outcome(owned.state, owned.commands, value)


def own(tiers: Tiers, block: int) -> Outcome[Tiers, int | Refused]:
    """Let one of a device block's owners write; value: the block to write to.

    If the block has one owner and no key, it is written in place; otherwise the owner moves to a
    copy.

    Raises UnknownBlock, NoOwner.
    """
    pool, known = tiers.device, tiers.known(block, "device")
    if pool.ref_counts[known] == 1 and pool.keys[known] is None:
        return Outcome(tiers, (), known)
    return copy(tiers, known)


def move_out(tiers: Tiers, blocks: Sequence[int]) -> Outcome[Tiers, dict[int, int] | Refused]:
    """Move one owner of each device block to the host; refused as a whole.

    A block that is named twice moves once, with one more owner. Value: block -> its copy.
    Raises NoHostTier, UnknownBlock, DoubleFree.
    """
    return _move(tiers, blocks, "device", "host")


def move_in(tiers: Tiers, host_blocks: Sequence[int]) -> Outcome[Tiers, dict[int, int] | Refused]:
    """Move one owner of each host block to the device; refused as a whole.

    Value: block -> its copy. Raises NoHostTier, UnknownBlock, DoubleFree.
    """
    return _move(tiers, host_blocks, "host", "device")


def _move(
    tiers: Tiers, blocks: Sequence[int], source: Tier, target: Tier
) -> Outcome[Tiers, dict[int, int] | Refused]:
    """Move owners from the blocks of one tier to new copies in the other tier."""
    ids = read_ints(blocks)
    left = release(tiers, ids, source)
    times = Counter(ids)
    taken = take(tiers, len(times), target)
    if isinstance(taken.value, Refused):
        return Outcome(tiers, (), taken.value)
    moved = dict(zip(times, taken.value, strict=True))
    more = [moved[block] for block, count in times.items() for _ in range(1, count)]
    arrived = touch(taken.state, more, target)
    copied = SwapOut if source == "device" else SwapIn
    copies = [copied(*pair) for pair in moved.items()]
    on_device, on_host = (left, arrived) if source == "device" else (arrived, left)
    commands = (*taken.commands, *copies, *left.commands)
    changed = attrs.evolve(
        tiers,
        device=on_device.state.device,
        host=on_host.state.host,
        commands=tiers.commands.extend(commands),
    )
    return Outcome(changed, commands, moved)
