# SPDX-License-Identifier: Apache-2.0
"""Random lives of V0's managers and allocators on both backends at once, from a seed.

Both backends get the same calls. Their answers, errors and batches are compared, and after each
call the blocks behind them; a call that raises leaves the blocks as they were. Tables of one
manager are read after each call, those of the other never: objects and columns must agree. A call
that a `can_` method allowed must succeed at once. The owners are counted every now and then.
"""

from __future__ import annotations

import random
from typing import Any

from kvcore.legacy.blocks.blocks import BackendName
from kvcore.legacy.v0.block import NullBlock
from kvcore.legacy.v0.block_manager import BlockSpaceManager
from kvcore.legacy.v0.prefix_caching_block import Block, Device, PrefixCachingBlockAllocator
from kvcore.legacy.v0.sequences import AllocStatus, Sequence, SequenceGroup, SequenceStatus
from tests.legacy.twins import Refusal, Twins

RUNNING, SWAPPED = SequenceStatus.RUNNING, SequenceStatus.SWAPPED
SIZE = 2
CHECK_EVERY = 20
MAX_GROUPS = 5


class ManagerWalk:
    """A life of two managers."""

    def __init__(self, seed: int, *, caching: bool, window: int | None) -> None:
        self.random = random.Random(seed)
        sizes = (SIZE, self.random.randint(4, 14), self.random.randint(0, 10))
        backends: list[BackendName] = ["python", "rust"]
        pair = [
            BlockSpaceManager(*sizes, 0.1, window, caching, backend=backend) for backend in backends
        ]
        self.window = window
        self.caching = caching
        self.objects: dict[int, list[Block]] = {}
        self.twins = Twins(pair, [each.block_allocator.backing for each in pair])
        self.groups: list[SequenceGroup] = []
        self.next_id = 0
        self.clock = 0.0
        self.refused = 0

    def run(self, num_calls: int) -> None:
        """Make this many calls, then end all sequences."""
        actions = [self.admit, self.append, self.append, self.append, self.fork, self.free]
        actions += [self.swap, self.mark, self.ask, self.misuse, self.twins.batch, self.reset]
        for number in range(num_calls):
            try:
                self.random.choice(actions)()
            except Refusal:
                self.refused += 1
            self.look()
            if number % CHECK_EVERY == 0:
                self.check()
        for group in self.groups:
            for seq in group.seqs:
                self.twins.call("free", seq)
        self.groups = []
        self.check()

    def check(self) -> None:
        """Check that the blocks' owners are the tables and the null block.

        The first manager's tables are read from the start, the second one's never; both hold the
        same.
        """
        for manager in self.twins.pair:
            allocator = manager.block_allocator
            null = allocator.allocate_or_get_null_block() if allocator.has_null_block else None
            held: dict[Device, list[int]] = {Device.GPU: [], Device.CPU: []}
            if null is not None:
                held[Device.GPU].append(null.block_id)
            for table in manager.block_tables.values():
                for block_id in table.physical_block_ids[table.num_null_blocks :]:
                    device = allocator._device(block_id)
                    held[device].append(allocator.get_physical_block_id(device, block_id))
            allocator.backing.check(held[Device.GPU], held[Device.CPU])
        self.look()

    def look(self) -> None:
        """Check that the table objects of the first manager stay the same, and agree with those of
        the second.
        """
        looked, others = (manager.block_tables for manager in self.twins.pair)
        for seq_id, table in looked.items():
            blocks = table.blocks
            assert table.blocks is blocks
            assert [block.block_id for block in blocks] == table.physical_block_ids
            known = self.objects.setdefault(seq_id, [])
            for block, before in zip(blocks, known, strict=False):
                assert block is before or isinstance(block, NullBlock)
            self.objects[seq_id] = blocks[:]
            for block, other in zip(blocks, others[seq_id].blocks, strict=True):
                assert isinstance(block, NullBlock) == isinstance(other, NullBlock)
                assert block.block_id == other.block_id
                assert block.token_ids == other.token_ids
                assert block.content_hash == other.content_hash
                assert not self.caching or block.computed == other.computed
        self.objects = {seq_id: self.objects[seq_id] for seq_id in looked}

    def admit(self) -> None:
        """Admit a new group of one or two sequences."""
        if len(self.groups) >= MAX_GROUPS:
            return
        tokens = [self.random.randrange(2) for _ in range(self.random.randint(1, 9))]
        extra = self.random.choice([None, None, 5])
        seqs = [self.new_seq(tokens, extra) for _ in range(self.random.choice([1, 1, 2]))]
        group = SequenceGroup(f"r{seqs[0].seq_id}", seqs)
        status = self.twins.call("can_allocate", group)[0]
        self.promised(status is AllocStatus.OK and self.window is None, "allocate", group)
        for seq in seqs:
            seq.status = RUNNING
        self.groups.append(group)

    def append(self) -> None:
        """Append tokens to all running sequences of a group, whether they fit or not."""
        group, ahead = self.pick(), self.random.choice([0, 0, 1, 4])
        seqs = list(group.get_seqs(RUNNING))
        for seq in seqs:
            seq.data.num_computed_tokens = self.slots_of(seq)
            for _ in range(self.random.choice([1, 1, 3])):
                seq.append_token_id(self.random.randrange(2))
        fits = self.twins.call("can_append_slots", group, ahead)[0]
        for seq in seqs:
            self.promised(fits, "append_slots", seq, ahead)
            seq.data.num_computed_tokens = self.slots_of(seq)

    def fork(self) -> None:
        """Fork a running sequence."""
        group = self.pick()
        seq = self.random.choice(group.get_seqs())
        child = seq.fork(self.fresh_id())
        self.twins.call("fork", seq, child)
        group.seqs.append(child)

    def free(self) -> None:
        """End a sequence."""
        group = self.pick()
        seq = self.random.choice(group.seqs)
        self.twins.call("free", seq)
        group.seqs.remove(seq)
        if not group.seqs:
            self.groups.remove(group)

    def swap(self) -> None:
        """Swap a group to the other device, whether it fits or not."""
        group = self.pick()
        if group.get_seqs(SWAPPED):
            status = self.twins.call("can_swap_in", group, 0)[0]
            self.promised(status is AllocStatus.OK, "swap_in", group)
            turned = RUNNING
        else:
            self.promised(self.twins.call("can_swap_out", group)[0], "swap_out", group)
            turned = SWAPPED
        for seq in group.seqs:
            seq.status = turned

    def mark(self) -> None:
        """End a step: mark what was promoted as computed, and what ran as accessed."""
        self.clock += self.random.choice([0.0, 1.0])
        group = self.pick()
        self.twins.call("mark_blocks_as_computed", group, 1)
        for seq in group.seqs:
            self.twins.call("access_all_blocks_in_seq", seq, self.clock)

    def ask(self) -> None:
        """Make the calls that change nothing."""
        group = self.pick()
        seq = self.random.choice(group.seqs)
        self.twins.call("get_num_cached_tokens", seq)
        self.twins.call("get_common_computed_block_ids", group.seqs)
        self.twins.call("get_block_table", seq)
        self.twins.call("get_num_free_gpu_blocks")
        self.twins.call("get_num_free_cpu_blocks")
        self.twins.call("get_prefix_cache_hit_rate", Device.GPU)

    def misuse(self) -> None:
        """Make calls that are wrong."""
        group = self.pick()
        seq = self.random.choice(group.seqs)
        wrong: list[tuple[Any, ...]] = [
            ("fork", seq, seq),
            ("append_slots", Sequence(-1, [1]), 0),
            ("access_all_blocks_in_seq", seq, float("inf")),
            ("allocate", SequenceGroup("none", [])),
        ]
        self.twins.call(*self.random.choice(wrong))

    def reset(self) -> None:
        """Forget all content, if nothing is used."""
        self.twins.call("reset_prefix_cache", self.random.choice([None, Device.CPU]))

    def promised(self, comes_true: bool, name: str, *args: Any) -> Any:
        """Make a call that may be refused unless it was promised."""
        if comes_true:
            self.twins.must = name
        try:
            return self.twins.call(name, *args)
        finally:
            self.twins.must = None

    def slots_of(self, seq: Sequence) -> int:
        """Return the tokens of a sequence that have slots."""
        slots: int = self.twins.pair[0].block_tables[seq.seq_id].num_full_slots
        return slots

    def pick(self) -> SequenceGroup:
        if not self.groups:
            raise Refusal
        return self.random.choice(self.groups)

    def fresh_id(self) -> int:
        self.next_id += 1
        return self.next_id

    def new_seq(self, tokens: list[int], extra: int | None) -> Sequence:
        return Sequence(self.fresh_id(), tokens, extra_hash=extra)


class AllocatorWalk:
    """A life of two allocators; sequences are chains of block objects, one list per backend."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        num_blocks = self.random.randint(1, 8)
        ids = self.random.sample(range(20), num_blocks)
        backends: list[BackendName] = ["python", "rust"]
        pair = [
            PrefixCachingBlockAllocator(num_blocks, SIZE, ids, backend=backend)
            for backend in backends
        ]
        self.twins = Twins(pair, [each.blocks.backing for each in pair])
        self.chains: list[list[list[Block]]] = []
        self.clock = 0.0
        self.refused = 0

    def run(self, num_calls: int) -> None:
        """Make this many calls, then end all chains."""
        actions = [self.begin, self.grow, self.grow, self.fill, self.fill, self.fork, self.drop]
        actions += [self.mark, self.ask, self.twins.batch, self.reset, self.out_and_in]
        for number in range(num_calls):
            try:
                self.random.choice(actions)()
            except Refusal:
                self.refused += 1
            self.check_shared()
            if number % CHECK_EVERY == 0:
                self.check()
        while self.chains:
            self.drop()
        self.check()

    def check(self) -> None:
        """Check that the blocks' owners are the objects of the chains."""
        for at, allocator in enumerate(self.twins.pair):
            held = [block.block_id for chain in self.chains for block in chain[at]]
            place = allocator.get_physical_block_id
            allocator.blocks.backing.check([place(each) for each in held])

    def check_shared(self) -> None:
        """Check that objects of one block have the same tokens, and its key is their hash."""
        allocator = self.twins.pair[0]
        tokens: dict[int | None, list[int]] = {}
        for chain in self.chains:
            for block in chain[0]:
                assert tokens.setdefault(block.block_id, block.token_ids) == block.token_ids
                assert allocator.blocks.content_hash(block.block_id) == block.content_hash
        free = set(allocator.all_block_ids) - set(tokens)
        assert len(free) == allocator.get_num_free_blocks()

    def begin(self) -> None:
        """Begin a chain of full blocks."""
        blocks = [[self.random.randrange(2)] * SIZE for _ in range(self.random.randint(1, 3))]
        extra = self.random.choice([None, None, 3])
        self.chains.append(self.twins.call("allocate_immutable_blocks", None, blocks, extra))

    def grow(self) -> None:
        """Append an open block to a full one, or begin a chain with one."""
        if not self.chains or self.random.random() < 0.3:
            answers = self.twins.call("allocate_mutable_block", None)
            self.chains.append([[answer] for answer in answers])
            return
        chain = self.random.choice(self.chains)
        if not chain[0][-1].is_full:
            return
        lasts = iter([each[-1] for each in chain])
        answers = self.twins.each(lambda facade: facade.allocate_mutable_block(next(lasts)))
        for mine, answer in zip(chain, answers, strict=True):
            mine.append(answer)

    def fill(self) -> None:
        """Append tokens to the last block of a chain, whether they fit or not."""
        chain = self.pick()
        tokens = [self.random.randrange(2) for _ in range(self.random.randint(0, SIZE))]
        lasts = iter([each[-1] for each in chain])
        self.twins.each(lambda _: next(lasts).append_token_ids(tokens))

    def fork(self) -> None:
        """Fork a chain."""
        lasts = iter([each[-1] for each in self.pick()])
        self.chains.append(self.twins.each(lambda facade: facade.fork(next(lasts))))

    def drop(self) -> None:
        """End a chain, from either side."""
        chain = self.pick()
        self.chains.remove(chain)
        step = self.random.choice([1, -1])
        lists = iter([each[::step] for each in chain])
        self.twins.each(lambda facade: [facade.free(block) for block in next(lists)])

    def out_and_in(self) -> None:
        """Swap a chain out, and in again if it fits; else end it."""
        chain = self.pick()
        self.chains.remove(chain)
        lists = iter(chain)
        self.twins.each(lambda facade: facade.swap_out(next(lists)))
        again = iter(chain)
        self.twins.each(lambda facade: facade.swap_in(next(again)))
        self.chains.append(chain)

    def mark(self) -> None:
        """Mark blocks as computed and accessed, whether they are there or not."""
        self.twins.call("mark_blocks_as_computed", [])
        self.clock += self.random.choice([0.0, 1.0])
        self.twins.call("mark_blocks_as_accessed", [self.random.randrange(20)], self.clock)

    def ask(self) -> None:
        """Make the calls that change nothing."""
        chain = self.pick()
        hashes = [block.content_hash for block in chain[0] if block.content_hash is not None]
        self.twins.call("find_cached_blocks_prefix", hashes)
        self.twins.call("get_num_full_blocks_touched", chain[0])
        self.twins.call("get_prefix_cache_hit_rate")
        self.twins.call("clear_copy_on_writes")
        self.twins.call("block_is_computed", self.random.randrange(20))

    def reset(self) -> None:
        """Forget all content, if nothing is used."""
        self.twins.call("reset_prefix_cache")

    def pick(self) -> list[list[Block]]:
        if not self.chains:
            raise Refusal
        return self.random.choice(self.chains)
