# SPDX-License-Identifier: Apache-2.0
"""Stories of the V0 block manager, with prefix caching and without.

Run by benches/legacy.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benches.legacy import Each, Story, Work
from kvcore.legacy.blocks.blocks import BackendName
from kvcore.legacy.v0.block_manager import BlockSpaceManager
from kvcore.legacy.v0.prefix_caching_block import PrefixCachingBlockAllocator
from kvcore.legacy.v0.sequences import Sequence, SequenceGroup, SequenceStatus

SIZE = 16
PROMPT = 512
NUM_GROUPS = 64
NUM_BLOCKS = 8192


class Naive:
    """Groups that are admitted, decode, fork, swap and end."""

    caching = False

    def __init__(self, backend: BackendName) -> None:
        self.manager = BlockSpaceManager(
            *(SIZE, NUM_BLOCKS, NUM_BLOCKS), enable_caching=self.caching, backend=backend
        )
        self.backing = self.manager.block_allocator.backing
        shared = list(range(PROMPT // 2))
        self.groups = [
            SequenceGroup(str(number), [Sequence(number, shared + [number] * (PROMPT // 2))])
            for number in range(NUM_GROUPS)
        ]

    def phases(self) -> Iterator[tuple[str, Work]]:
        """Yield the phases of all groups."""
        manager, groups = self.manager, self.groups
        seqs = [group.seqs[0] for group in groups]
        yield "can_allocate", Each(manager.can_allocate, groups)
        yield "allocate, 32 blocks", Each(manager.allocate, groups)
        self._turn(SequenceStatus.RUNNING)
        ahead = [0] * len(groups)
        for name in ("append_slots, a new block", "append_slots, in place"):
            for seq in seqs:
                seq.append_token_id(1)
            yield f"can_{name}", Each(manager.can_append_slots, groups, ahead)
            yield name, Each(manager.append_slots, seqs, ahead)
        for seq in seqs:
            seq.data.num_computed_tokens = len(seq.get_token_ids())
            manager.get_num_cached_tokens(seq)
        manager.mark_blocks_as_computed(groups[0], 1)
        yield "get_num_cached_tokens", Each(manager.get_num_cached_tokens, seqs)
        children = [seq.fork(NUM_GROUPS + seq.seq_id) for seq in seqs]
        yield "fork, 33 blocks", Each(manager.fork, seqs, children)
        for group, child in zip(groups, children, strict=True):
            group.seqs.append(child)
            child.append_token_id(1)
        yield "append_slots, a copy", Each(manager.append_slots, children, ahead)
        yield "can_swap_out", Each(manager.can_swap_out, groups)
        yield "swap_out, 66 blocks", Each(manager.swap_out, groups)
        self._turn(SequenceStatus.SWAPPED)
        yield "can_swap_in", Each(manager.can_swap_in, groups, ahead)
        yield "swap_in, 66 blocks", Each(manager.swap_in, groups)
        yield "take_batch", manager.take_batch
        times = [float(seq.seq_id) for seq in seqs]
        yield "access_all_blocks_in_seq", Each(manager.access_all_blocks_in_seq, seqs, times)
        yield "free, 33 blocks", Each(manager.free, seqs + children)

    def _turn(self, status: SequenceStatus) -> None:
        for group in self.groups:
            for seq in group.seqs:
                seq.status = status


class Cached(Naive):
    """Groups that share half of their prompt."""

    caching = True


class Blocks:
    """Block objects of an allocator."""

    def __init__(self, backend: BackendName) -> None:
        self.allocator = PrefixCachingBlockAllocator(NUM_BLOCKS, SIZE, backend=backend)
        self.backing = self.allocator.blocks.backing

    def phases(self) -> Iterator[tuple[str, Work]]:
        """Yield phases that handle one block at a time."""
        allocator, count = self.allocator, 1024
        alone = [None] * count
        tokens = [[number] * SIZE for number in range(count)]
        new = Each(allocator.allocate_immutable_block, alone, tokens)
        yield "allocate_immutable_block, new", new
        hits = Each(allocator.allocate_immutable_block, alone, tokens)
        yield "allocate_immutable_block, a hit", hits
        yield "free", Each(allocator.free, new.answers + hits.answers)
        yield "allocate_mutable_block", Each(allocator.allocate_mutable_block, alone)


STORIES: tuple[Callable[[BackendName], Story], ...] = (Naive, Cached, Blocks)
