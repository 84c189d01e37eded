# SPDX-License-Identifier: Apache-2.0
"""Stories of the first block manager and of the first manager with prefix caching.

Run by benches/legacy.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benches.legacy import Each, Story, Work
from kvcore import _twin
from kvcore.legacy.blocks.blocks import BackendName
from kvcore.legacy.v0_3.block_space_manager import (
    BlockSpaceManager,
    Sequence,
    SequenceGroup,
    SequenceStatus,
)
from kvcore.legacy.v1_first import kv_cache_manager
from kvcore.legacy.v1_first.kv_cache_manager import KVCacheManager, Request

SIZE = 16
PROMPT = 512
NUM_GROUPS = 64
NUM_BLOCKS = 8192


class Space:
    """Groups of two sequences that are admitted, decode, fork, swap and end."""

    def __init__(self, backend: BackendName) -> None:
        self.manager = BlockSpaceManager(SIZE, NUM_BLOCKS, NUM_BLOCKS, backend=backend)
        self.backing = self.manager._backing
        self.groups = []
        self.children = []
        for number in range(NUM_GROUPS):
            seqs = [Sequence(3 * number + each, "", range(PROMPT), SIZE) for each in (0, 1)]
            self.groups.append(SequenceGroup(str(number), seqs))
            self.children.append(Sequence(3 * number + 2, "", range(PROMPT), SIZE))

    def phases(self) -> Iterator[tuple[str, Work]]:
        """Yield the phases of all groups, without an engine's work between the calls."""
        manager, groups, children = self.manager, self.groups, self.children
        seqs = [seq for group in groups for seq in group.get_seqs()]
        yield "can_allocate", Each(manager.can_allocate, groups)
        yield "allocate, 32 blocks", Each(manager.allocate, groups)
        self._turn(SequenceStatus.RUNNING)
        yield "can_append_slot", Each(manager.can_append_slot, groups)
        for name, count in (
            ("append_slot, the first new block", 1),
            ("append_slot, a new block", SIZE),
            ("append_slot, in place", 1),
        ):
            for seq in (*seqs, *children):
                for _ in range(count):
                    seq.append_token_id(1)
            yield name, Each(manager.append_slot, seqs)
        yield "fork", Each(manager.fork, seqs[::2], children)
        for group, child in zip(groups, children, strict=True):
            group.add(child)
            child.status = SequenceStatus.RUNNING
            child.append_token_id(1)
        yield "append_slot, a copy", Each(manager.append_slot, children)
        yield "can_swap_out", Each(manager.can_swap_out, groups)
        yield "swap_out, 36 blocks", Each(manager.swap_out, groups)
        self._turn(SequenceStatus.SWAPPED)
        yield "can_swap_in", Each(manager.can_swap_in, groups)
        yield "swap_in, 36 blocks", Each(manager.swap_in, groups)
        yield "take_batch", manager.take_batch
        every = [seq for group in groups for seq in group.get_seqs()]
        yield "free", Each(manager.free, every)

    def _turn(self, status: SequenceStatus) -> None:
        for group in self.groups:
            for seq in group.get_seqs():
                seq.status = status


class Early:
    """Requests that share half of their prompt, decode and end."""

    def __init__(self, backend: BackendName) -> None:
        self.manager = KVCacheManager(SIZE, NUM_BLOCKS, backend=backend)
        self.backing = self.manager._backing
        self.core_functions = ((kv_cache_manager, "hash_blocks"), (_twin, "hash_blocks"))
        shared = list(range(PROMPT // 2))
        self.requests = [
            Request(str(number), shared + [number] * (PROMPT // 2)) for number in range(NUM_GROUPS)
        ]

    def phases(self) -> Iterator[tuple[str, Work]]:
        """Yield the phases of all requests."""
        manager, requests = self.manager, self.requests
        first, *others = requests
        strangers = [Request(f"stranger {n}", [1000 + n] * PROMPT) for n in range(15)]
        fresh = [*strangers, first]
        yield (
            "allocate_slots, 32 new",
            Each(manager.allocate_slots, fresh, [PROMPT] * len(fresh), [[]] * len(fresh)),
        )
        hits = [manager.get_computed_blocks(request) for request in others]
        yield "get_computed_blocks, 16 hits", Each(manager.get_computed_blocks, others)
        counts = [PROMPT // 2] * len(others)
        yield "allocate_slots, 16 of 32 new", Each(manager.allocate_slots, others, counts, hits)
        for name, count in (
            ("append_slots, room ahead", 1),
            ("append_slots, room ahead again", 1),
            ("append_slots, a block filled", SIZE - 2),
            ("append_slots, new blocks", 4 * SIZE),
        ):
            for request in requests:
                request.num_computed_tokens = len(request.all_token_ids)
                request.append_output_token_ids([1] * count)
            yield name, Each(manager.append_slots, requests, [count] * len(requests))
        yield "take_batch", manager.take_batch
        yield "free", Each(manager.free, requests)


STORIES: tuple[Callable[[BackendName], Story], ...] = (Space, Early)
