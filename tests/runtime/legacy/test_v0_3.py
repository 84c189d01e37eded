# SPDX-License-Identifier: Apache-2.0
"""The first block manager over real tensors: what a sequence wrote is what it reads.

Each token of a sequence is a number of its own. After each call the batch is applied to a cache in
guard mode, which poisons blocks without an owner; then new tokens are written through the
sequence's table, and everything that it sees is read back and compared with a plain dictionary.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from kvcore_runtime.cache.apply import Runtime
from kvcore_runtime.cache.cache import Cache
from kvcore_runtime.cache.layout import CacheLayout
from kvcore_runtime.cache.tables import BlockTables

from kvcore.legacy.v0_3.block_space_manager import (
    AllocStatus,
    BlockSpaceManager,
    Device,
    Prefix,
    Sequence,
    SequenceGroup,
    SequenceStatus,
)
from tests.conftest import Backend
from tests.runtime.backends import python_once

SIZE = 2
RUNNING, SWAPPED = SequenceStatus.RUNNING, SequenceStatus.SWAPPED
NUM_STEPS = 120


class Engine:
    """A manager, a cache that follows its batches, and what each sequence should read."""

    def __init__(
        self,
        backend: Backend,
        num_gpu: int = 12,
        num_cpu: int = 8,
        window: int | None = None,
        *,
        copy_reused: bool = False,
    ) -> None:
        self.manager = BlockSpaceManager(
            *(SIZE, num_gpu, num_cpu, 0.0, window), copy_reused=copy_reused, backend=backend
        )
        layout = CacheLayout(num_layers=2, num_kv_heads=1, head_dim=2, block_size=SIZE)
        self.cache = Cache(layout, num_gpu, num_cpu, guard=True)
        self.runtime = Runtime(self.cache, BlockTables(1, 1, 1, SIZE), null_block=False)
        self.window = window
        self.values: dict[int, list[float]] = {}
        self.fresh = 0.0

    def apply(self) -> None:
        """Carry out what the manager said since the last call."""
        self.runtime.apply(self.manager.take_batch())

    def new_values(self, count: int) -> list[float]:
        """Return numbers that no token has."""
        first = self.fresh + 1.0
        self.fresh += count
        return [first + offset for offset in range(count)]

    def write(self, seq: Sequence, start: int) -> None:
        """Write values from a position on, through the table, like a forward pass."""
        table = self.manager.get_block_table(seq)
        values = self.values[seq.seq_id]
        for position in range(start, len(values)):
            for layer in range(2):
                for part in self.cache.layer(layer):
                    part[table[position // SIZE], position % SIZE] = values[position]

    def check(self, seqs: Iterable[Sequence]) -> None:
        """Check that sequences see what they wrote, on either device."""
        self.manager.check()
        for seq in seqs:
            table, values = self.manager.block_tables[seq.seq_id], self.values[seq.seq_id]
            first = 0 if self.window is None else max(0, len(values) - self.window)
            before_ring = range(min(table.num_prefix * SIZE, first))
            for position in (*before_ring, *range(first, len(values))):
                block = table[position // SIZE]
                on_gpu = block.device is Device.GPU
                tier = self.cache.blocks if on_gpu else self.cache.host_blocks
                read = tier.data[block.block_number][:, :, position % SIZE].unique().tolist()
                assert read == [values[position]], (seq, position, block)

    def admit(
        self, group: SequenceGroup, num_tokens: int, prompt: list[float] | None = None
    ) -> list[Sequence]:
        """Admit a group and compute its prompt, less a prefix that is computed already."""
        prefix = group.prefix
        known = prefix is not None and prefix.computed
        self.manager.allocate(group)
        self.apply()
        prompt = prompt or self.new_values(num_tokens)
        start = prefix.get_length() if prefix is not None and known else 0
        for seq in group.get_seqs():
            self.values[seq.seq_id] = list(prompt)
            seq.status = RUNNING
            self.write(seq, start)
        if prefix is not None:
            prefix.computed = True
        return group.get_seqs()

    def append(self, seqs: list[Sequence]) -> list[tuple[int, int] | None]:
        """Make one decode step for some sequences, in one batch."""
        pairs = []
        for seq in seqs:
            seq.append_token_id(0)
            self.values[seq.seq_id] += self.new_values(1)
            pairs.append(self.manager.append_slot(seq))
        self.apply()
        for seq in seqs:
            self.write(seq, len(self.values[seq.seq_id]) - 1)
        return pairs

    def fork(self, group: SequenceGroup, parent: Sequence, seq_id: int) -> Sequence:
        """Fork a sequence; the fork has read what its parent read."""
        child = parent.fork(seq_id)
        self.manager.fork(parent, child)
        self.values[seq_id] = list(self.values[parent.seq_id])
        group.add(child)
        self.apply()
        return child

    def swap(self, group: SequenceGroup, status: SequenceStatus) -> dict[int, int]:
        """Swap a group, so that it gets this status."""
        move = self.manager.swap_out if status is SWAPPED else self.manager.swap_in
        mapping = move(group)
        self.apply()
        for seq in group.get_unfinished_seqs():
            seq.status = status
        return mapping


def make_group(
    first_id: int, num_seqs: int, num_tokens: int, prefix: Prefix | None = None
) -> SequenceGroup:
    """Make waiting sequences with a prompt of this many tokens."""
    seqs = [Sequence(first_id + each, "", [0] * num_tokens, SIZE) for each in range(num_seqs)]
    return SequenceGroup(str(first_id), seqs, prefix=prefix)


def test_forks_write_apart_and_keep_what_they_share(backend: Backend) -> None:
    engine = Engine(backend)
    group = make_group(1, 1, 3)
    (parent,) = engine.admit(group, 3)
    child = engine.fork(group, parent, 2)
    engine.check([parent, child])
    assert engine.append([child, parent]) == [(10, 9), None]
    engine.check([parent, child])
    assert engine.values[1][:3] == engine.values[2][:3]
    assert engine.values[1][3] != engine.values[2][3]


def test_swaps_bring_back_what_was_there(backend: Backend) -> None:
    engine = Engine(backend)
    group = make_group(1, 1, 5)
    (parent,) = engine.admit(group, 5)
    child = engine.fork(group, parent, 2)
    engine.append([child, parent])
    assert len(engine.swap(group, SWAPPED)) == 4
    engine.check([parent, child])
    # Others write over what was theirs on the device.
    other = make_group(5, 1, 24)
    engine.admit(other, 24)
    engine.check(other.get_seqs())
    engine.manager.free(other.find(5))
    engine.apply()
    engine.swap(group, RUNNING)
    engine.check([parent, child])
    engine.append([parent, child])
    engine.check([parent, child])


def test_a_window_keeps_its_last_tokens_through_forks_and_swaps(backend: Backend) -> None:
    engine = Engine(backend, window=4, copy_reused=True)
    group = make_group(1, 1, 7)
    (parent,) = engine.admit(group, 7)
    engine.check([parent])
    child = engine.fork(group, parent, 2)
    for _ in range(6):
        engine.append([child, parent])
        engine.check([parent, child])
    engine.swap(group, SWAPPED)
    engine.check([parent, child])
    engine.swap(group, RUNNING)
    for _ in range(3):
        engine.append([parent, child])
        engine.check([parent, child])


def test_rings_that_nobody_shares_keep_their_tokens_by_default(backend: Backend) -> None:
    engine = Engine(backend, 4, 4, window=4)
    first, second = make_group(1, 1, 7), make_group(2, 1, 3)
    engine.admit(first, 7)
    engine.admit(second, 3)
    for _ in range(3):
        engine.append([*first.get_seqs(), *second.get_seqs()])
        engine.check([*first.get_seqs(), *second.get_seqs()])
    assert engine.manager.get_num_free_gpu_blocks() == 0
    engine.swap(first, SWAPPED)
    third = make_group(3, 1, 8)
    engine.admit(third, 8)  # its ring has the blocks that the first one had
    engine.check([*first.get_seqs(), *second.get_seqs(), *third.get_seqs()])
    engine.manager.free(third.find(3))
    engine.apply()
    engine.swap(first, RUNNING)
    for _ in range(5):
        engine.append([*first.get_seqs(), *second.get_seqs()])
        engine.check([*first.get_seqs(), *second.get_seqs()])


def test_siblings_of_a_window_write_into_one_ring_by_default(backend: Backend) -> None:
    engine = Engine(backend, window=4)
    group = make_group(1, 1, 7)
    (parent,) = engine.admit(group, 7)
    child = engine.fork(group, parent, 2)
    engine.append([parent, child])  # the last slot of a block: copied as without a window
    engine.check([parent, child])
    engine.append([parent, child])  # the ring's next block, where the child's token replaces
    with pytest.raises(AssertionError):
        engine.check([parent])
    engine.check([child])


@pytest.mark.parametrize("window", [None, 4])
def test_a_prefix_is_read_by_all_who_share_it(backend: Backend, window: int | None) -> None:
    engine = Engine(backend, 18, window=window, copy_reused=window is not None)
    prefix = Prefix([0] * 4, SIZE)
    first = make_group(1, 1, 7, prefix)
    engine.admit(first, 7)
    shared = engine.values[1][:4]
    second = make_group(2, 2, 6, prefix)
    engine.admit(second, 6, shared + engine.new_values(2))
    seqs = [*first.get_seqs(), *second.get_seqs()]
    engine.check(seqs)
    for _ in range(5):
        engine.append(seqs)
        engine.check(seqs)
    engine.swap(first, SWAPPED)
    engine.check(second.get_seqs())
    engine.swap(first, RUNNING)
    engine.check(seqs)


@python_once("seed", range(6))
def test_a_random_engine_reads_what_it_wrote(backend: Backend, seed: int) -> None:
    rng = random.Random(seed)
    window = rng.choice([None, 4, 6])
    engine = Engine(backend, 12, 8, window, copy_reused=window is not None)
    groups: list[SequenceGroup] = []
    next_id, done = 0, 0
    for _ in range(NUM_STEPS):
        kind = rng.choice(("admit", "append", "append", "append", "fork", "swap", "swap", "free"))
        group = rng.choice(groups) if groups else None
        if kind == "admit":
            num_tokens = rng.randint(1, 9)
            new = make_group(next_id, rng.randint(1, 2), num_tokens)
            next_id += 2
            if engine.manager.can_allocate(new) is AllocStatus.OK:
                engine.admit(new, num_tokens)
                groups.append(new)
        elif group is None:
            continue
        elif kind == "append" and engine.manager.can_append_slot(group):
            running = group.get_seqs(RUNNING)
            done += sum(pair is not None for pair in engine.append(running))
        elif kind == "fork" and group.num_seqs() < 4:
            engine.fork(group, rng.choice(group.get_seqs()), 1000 + next_id)
            next_id += 2
        elif kind == "swap":
            swapped = group.num_seqs(SWAPPED) > 0
            allowed = engine.manager.can_swap_in if swapped else engine.manager.can_swap_out
            if allowed(group):
                engine.swap(group, RUNNING if swapped else SWAPPED)
        elif kind == "free" and rng.random() < 0.4:
            for seq in group.get_seqs():
                engine.manager.free(seq)
            engine.apply()
            groups.remove(group)
        engine.check(seq for each in groups for seq in each.get_seqs())
    assert done > 0
