# SPDX-License-Identifier: Apache-2.0
"""Short words for stories about the first block manager: make it, admit a group, look at it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvcore.legacy.blocks.tiers import Tiers
from kvcore.legacy.v0_3.block_space_manager import (
    BlockSpaceManager,
    Prefix,
    Sequence,
    SequenceGroup,
    SequenceStatus,
)
from kvcore.types.commands import Command
from tests.conftest import Backend

SIZE = 2
"""Tokens per block."""


def make(
    backend: Backend, num_gpu_blocks: int = 8, num_cpu_blocks: int = 4, **options: Any
) -> BlockSpaceManager:
    """Return an empty manager of blocks of two tokens, by default without a watermark."""
    options.setdefault("watermark", 0.0)
    return BlockSpaceManager(SIZE, num_gpu_blocks, num_cpu_blocks, backend=backend, **options)


def group(*seq_ids: int, num_tokens: int = 4, prefix: Prefix | None = None) -> SequenceGroup:
    """Make waiting sequences of one prompt, with tokens from 0 up; named by the first id."""
    seqs = [Sequence(seq_id, "", range(num_tokens), SIZE) for seq_id in seq_ids]
    return SequenceGroup(f"g{seq_ids[0]}", seqs, prefix=prefix)


def set_status(seq_group: SequenceGroup, status: SequenceStatus) -> None:
    """Give all sequences of a group a status, as an engine does."""
    for seq in seq_group.get_seqs():
        seq.status = status


def admit(
    manager: BlockSpaceManager, *seq_ids: int, num_tokens: int = 4, prefix: Prefix | None = None
) -> SequenceGroup:
    """Admit a group; it gets its blocks and runs."""
    admitted = group(*seq_ids, num_tokens=num_tokens, prefix=prefix)
    manager.allocate(admitted)
    set_status(admitted, SequenceStatus.RUNNING)
    manager.check()
    return admitted


def append(
    manager: BlockSpaceManager, seq: Sequence, count: int = 1
) -> list[tuple[int, int] | None]:
    """Add tokens to a sequence, with a slot for each; returns what `append_slot` gave."""
    pairs = []
    for _ in range(count):
        seq.append_token_id(100)
        pairs.append(manager.append_slot(seq))
        manager.check()
    return pairs


def fork(manager: BlockSpaceManager, seq_group: SequenceGroup, parent: int, child: int) -> Sequence:
    """Fork a sequence in its group."""
    seq = seq_group.find(parent).fork(child)
    seq_group.add(seq)
    manager.fork(seq_group.find(parent), seq)
    manager.check()
    return seq


def swap_out(manager: BlockSpaceManager, seq_group: SequenceGroup) -> dict[int, int]:
    """Swap out a group that runs."""
    mapping = manager.swap_out(seq_group)
    set_status(seq_group, SequenceStatus.SWAPPED)
    manager.check()
    return mapping


def swap_in(manager: BlockSpaceManager, seq_group: SequenceGroup) -> dict[int, int]:
    """Swap in a group that is swapped out."""
    mapping = manager.swap_in(seq_group)
    set_status(seq_group, SequenceStatus.RUNNING)
    manager.check()
    return mapping


def table(manager: BlockSpaceManager, seq_group: SequenceGroup, seq_id: int) -> list[int]:
    """Return the numbers of a sequence's blocks."""
    return manager.get_block_table(seq_group.find(seq_id))


def owners(manager: BlockSpaceManager, *numbers: int) -> list[int]:
    """Count the owners of each of these GPU blocks."""
    return [manager.gpu_allocator.block(number).ref_count for number in numbers]


def stack(manager: BlockSpaceManager) -> list[int]:
    """Return the free GPU blocks, the next one to be taken last."""
    return [block.block_number for block in manager.gpu_allocator.free_blocks]


def cpu_stack(manager: BlockSpaceManager) -> list[int]:
    """Return the free CPU blocks, the next one to be taken last."""
    return [block.block_number for block in manager.cpu_allocator.free_blocks]


def commands(manager: BlockSpaceManager) -> list[Command]:
    """Return what a runtime would have to do since the last call."""
    return list(manager.take_batch())


def columns(tiers: Tiers) -> tuple[object, ...]:
    """Return the values of blocks and an open batch, in a fixed order."""
    pools = [pool for pool in (tiers.device, tiers.host) if pool is not None]
    return (
        *([*each.ref_counts, *each.keys, *each.queue] for each in pools),
        *(sorted(each.index.items()) for each in pools),
        *(tiers.number, list(tiers.commands)),
    )


def snapshot(manager: BlockSpaceManager) -> bytes:
    """Return everything that a manager knows, as bytes: blocks, open batch, tables and prefixes."""
    tables = manager._tables
    parts = (
        columns(manager.state()),
        {seq_id: repr(each) for seq_id, each in tables.tables.items()},
        tables.others,
        list(tables.prefixes),
    )
    return repr(parts).encode()


@contextmanager
def unchanged(manager: BlockSpaceManager) -> Iterator[None]:
    """Assert that the block leaves the manager as it was, to the byte."""
    before = snapshot(manager)
    yield
    assert snapshot(manager) == before
    manager.check()
