# SPDX-License-Identifier: Apache-2.0
"""The V0 block manager over real tensors: what a sequence wrote is what it reads.

A token's value is a number that is unique to all tokens up to it, as its keys and values would be.
After each step the batch is applied to a cache in guard mode, which poisons blocks without an
owner; then the new tokens are written through the tables, without the cached ones, and everything
that each sequence sees is read back and compared with a plain dictionary.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from kvcore_runtime.cache.apply import Runtime
from kvcore_runtime.cache.cache import Cache
from kvcore_runtime.cache.layout import CacheLayout
from kvcore_runtime.cache.tables import BlockTables

from kvcore.legacy.v0.block_manager import BlockSpaceManager
from kvcore.legacy.v0.interfaces import Device
from kvcore.legacy.v0.sequences import AllocStatus, Sequence, SequenceGroup, SequenceStatus
from tests.conftest import Backend
from tests.runtime.backends import python_once

SIZE = 2
RUNNING, SWAPPED = SequenceStatus.RUNNING, SequenceStatus.SWAPPED
NUM_LIVES = 3
NUM_STEPS = 120
CACHING = [False, True]


class Engine:
    """A manager, a cache that follows its batches, and what each sequence should read."""

    def __init__(
        self,
        backend: Backend,
        *,
        caching: bool,
        num_gpu: int = 12,
        num_cpu: int = 8,
        window: int | None = None,
    ) -> None:
        self.manager = BlockSpaceManager(
            *(SIZE, num_gpu, num_cpu, 0.0, window), enable_caching=caching, backend=backend
        )
        layout = CacheLayout(num_layers=2, num_kv_heads=1, head_dim=2, block_size=SIZE)
        self.cache = Cache(layout, num_gpu, num_cpu, guard=True)
        self.runtime = Runtime(self.cache, BlockTables(1, 1, 1, SIZE), null_block=False)
        self.window = window
        self.numbers: dict[tuple[int, ...], float] = {}
        self.values: dict[int, list[float]] = {}
        self.next_id = 0
        self.num_not_written = 0

    def value(self, tokens: list[int], position: int) -> float:
        """Return the number of a token after all before it."""
        return self.numbers.setdefault(tuple(tokens[: position + 1]), len(self.numbers) + 1.0)

    def compute(self, seqs: Iterable[Sequence], *, num_cached: int | None = None) -> None:
        """Make a step: apply the batch, then write what sequences have not computed yet."""
        self.runtime.apply(self.manager.take_batch())
        for seq in seqs:
            tokens, table = seq.get_token_ids(), self.manager.get_block_table(seq)
            known = self.values.setdefault(seq.seq_id, [])
            first = len(known) if num_cached is None else num_cached
            known[:] = [self.value(tokens, position) for position in range(len(tokens))]
            self.num_not_written += num_cached or 0
            for position in range(first, len(tokens)):
                for layer in range(2):
                    for part in self.cache.layer(layer):
                        part[table[position // SIZE], position % SIZE] = known[position]
            seq.data.num_computed_tokens = len(tokens)
        self.manager.mark_blocks_as_computed(SequenceGroup("all", []), 1)

    def check(self, seqs: Iterable[Sequence]) -> None:
        """Check that sequences see what was written, on either device."""
        allocator = self.manager.block_allocator
        num_gpu = allocator.get_num_total_blocks(Device.GPU)
        for seq in seqs:
            table, values = self.manager.get_block_table(seq), self.values[seq.seq_id]
            first = 0 if self.window is None else max(0, len(values) - self.window)
            for position in range(first, len(values)):
                block = table[position // SIZE]
                device = Device.GPU if block < num_gpu else Device.CPU
                tier = self.cache.blocks if device is Device.GPU else self.cache.host_blocks
                place = allocator.get_physical_block_id(device, block)
                read = tier.data[place][:, :, position % SIZE].unique().tolist()
                assert read == [values[position]], (seq.seq_id, position, block)

    def new_seq(self, tokens: Iterable[int]) -> Sequence:
        """Return a new sequence with the next number."""
        self.next_id += 1
        return Sequence(self.next_id, list(tokens))

    def admit(self, *seqs: Sequence) -> SequenceGroup:
        """Admit sequences of one prompt and compute it."""
        group = SequenceGroup(f"r{seqs[0].seq_id}", seqs)
        num_cached = self.manager.get_num_cached_tokens(seqs[0])
        self.manager.allocate(group)
        for seq in seqs:
            seq.status = RUNNING
        self.compute(seqs, num_cached=num_cached)
        return group

    def append(self, group: SequenceGroup, tokens: list[int], ahead: int = 0) -> None:
        """Append tokens to each running sequence of a group, in one step."""
        seqs = group.get_seqs(RUNNING)
        for seq, token in zip(seqs, tokens, strict=False):
            seq.append_token_id(token)
            self.manager.append_slots(seq, ahead)
        self.compute(seqs)

    def fork(self, group: SequenceGroup, parent: Sequence) -> Sequence:
        """Fork a sequence; the fork has read what its parent read."""
        self.next_id += 1
        child = parent.fork(self.next_id)
        self.manager.fork(parent, child)
        self.values[child.seq_id] = list(self.values[parent.seq_id])
        group.seqs.append(child)
        return child

    def swap(self, group: SequenceGroup, status: SequenceStatus) -> None:
        """Swap a group, so that it gets this status."""
        move = self.manager.swap_out if status is SWAPPED else self.manager.swap_in
        move(group)
        self.runtime.apply(self.manager.take_batch())
        for seq in group.seqs:
            seq.status = status


@pytest.mark.parametrize("caching", CACHING)
def test_forks_write_apart_and_keep_what_they_share(backend: Backend, caching: bool) -> None:
    engine = Engine(backend, caching=caching)
    parent = engine.new_seq([1, 2, 3])
    group = engine.admit(parent)
    child = engine.fork(group, parent)
    engine.append(group, [4, 5], ahead=3)
    engine.check([parent, child])
    tables = [engine.manager.get_block_table(seq) for seq in (parent, child)]
    assert tables[0][0] == tables[1][0]
    assert tables[0][1] != tables[1][1]
    assert engine.values[1][:3] == engine.values[2][:3]
    assert engine.values[1][3] != engine.values[2][3]


@pytest.mark.parametrize("caching", CACHING)
def test_a_swapped_fork_finds_its_content_on_both_sides(backend: Backend, caching: bool) -> None:
    engine = Engine(backend, caching=caching)
    parent = engine.new_seq([1, 2, 3])
    group = engine.admit(parent)
    child = engine.fork(group, parent)
    engine.append(group, [4, 5])
    engine.swap(group, SWAPPED)
    engine.check([parent, child])
    other = engine.admit(engine.new_seq(range(20, 32)))
    engine.swap(group, RUNNING)
    engine.check([parent, child, *other.seqs])
    engine.append(group, [6, 7])
    engine.check([parent, child, *other.seqs])


def test_cached_content_is_read_by_who_never_wrote_it(backend: Backend) -> None:
    engine = Engine(backend, caching=True)
    first = engine.admit(engine.new_seq([1, 2, 3, 4, 5])).seqs[0]
    engine.manager.free(first)
    second = engine.new_seq([1, 2, 3, 4, 9])
    engine.admit(second)
    assert engine.num_not_written == 4
    engine.check([second])


@pytest.mark.parametrize("window", [None, 3])
@python_once("caching", CACHING)
def test_whatever_happens_all_read_what_they_wrote(
    backend: Backend, caching: bool, window: int | None
) -> None:
    done: set[str] = set()
    num_not_written = 0
    for seed in range(NUM_LIVES):
        engine = Engine(backend, caching=caching, window=window)
        done |= live(engine, random.Random(seed))
        num_not_written += engine.num_not_written
    assert done == {"admit", "append", "fork", "swap out", "swap in", "free"}
    assert (num_not_written > 0) == caching


def live(engine: Engine, chance: random.Random) -> set[str]:
    """Play a random life, read back after each step; return what happened in it."""
    done: set[str] = set()
    groups: list[SequenceGroup] = []
    for _ in range(NUM_STEPS):
        action = chance.choice(["admit", "append", "append", "append", "fork", "swap", "free"])
        if action == "admit" and len(groups) < 4:
            seq = engine.new_seq([chance.randrange(2) for _ in range(chance.randint(1, 7))])
            status = engine.manager.can_allocate(SequenceGroup("new", [seq]))
            # A window's prompt takes more than it is admitted for.
            room = engine.manager.get_num_free_gpu_blocks() >= 4
            if status is AllocStatus.OK and room:
                groups.append(engine.admit(seq))
                done.add(action)
        elif groups and action != "admit":
            group = chance.choice(groups)
            done |= _act(engine, chance, action, group)
            if not group.seqs:
                groups.remove(group)
        engine.check(seq for group in groups for seq in group.seqs)
    return done


def _act(engine: Engine, chance: random.Random, action: str, group: SequenceGroup) -> set[str]:
    """Do one action on a group, if it is possible; return what was done."""
    seq, running = chance.choice(group.seqs), group.get_seqs(RUNNING)
    if action == "free":
        engine.manager.access_all_blocks_in_seq(seq, float(chance.randrange(100)))
        engine.manager.free(seq)
        group.seqs.remove(seq)
    elif action == "append" and running:
        for each in running:
            each.append_token_id(0)
        ahead = chance.choice([0, 3])
        fits = engine.manager.can_append_slots(group, ahead)
        for each in running:
            del each._token_ids[-1]
        if not fits:
            return set()
        engine.append(group, [chance.randrange(2) for _ in running], ahead)
    elif action == "fork" and running and len(group.seqs) < 3:
        engine.fork(group, running[0])
    elif action == "swap" and running and engine.manager.can_swap_out(group):
        engine.swap(group, SWAPPED)
        return {"swap out"}
    elif action == "swap" and not running:
        if engine.manager.can_swap_in(group, 0) is AllocStatus.OK:
            engine.swap(group, RUNNING)
            return {"swap in"}
        return set()
    else:
        return set()
    return {action}
