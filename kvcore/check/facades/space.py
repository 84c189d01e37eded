# SPDX-License-Identifier: Apache-2.0
"""An engine around `kvcore.legacy.v0_3.block_space_manager`.

It behaves like the engines of that time: a group is admitted if `can_allocate` allows it, a sampled
token is appended and then gets its slot, groups are swapped as a whole. Tokens are named by the
sequence that samples them, so that forks differ; the content of prompts does not matter, since
nothing is hashed. A sequence with a window reads only the window.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import attrs

from kvcore.check.facades.engine import FacadeEngine, FacadeWorld
from kvcore.legacy.blocks.tiers import Tiers
from kvcore.legacy.v0_3.block_space_manager import (
    BlockSpaceManager,
    Device,
    Prefix,
    Sequence,
    SequenceGroup,
    SequenceStatus,
)
from kvcore.legacy.v0_3.errors import OutOfMemory
from kvcore.oracle.contents import TierBlock
from kvcore.trace.calls import Call
from kvcore.types.commands import Command, CopyOnWrite, SwapIn, SwapOut
from kvcore.types.errors import InvariantViolation

RUNNING, SWAPPED = SequenceStatus.RUNNING, SequenceStatus.SWAPPED
PREFIX_TOKEN = -1


@attrs.frozen(kw_only=True)
class SpaceWorld(FacadeWorld):
    """A small world of the first manager.

    copy_reused: whether a ring's block that others hold is copied before it is written again;
    otherwise siblings in a window read each other's tokens (S003-19). with_prefix: whether groups
    may share a prefix of one block.
    """

    num_blocks: int = 4
    copy_reused: bool = False
    with_prefix: bool = False


class SpaceEngine(FacadeEngine):
    """Groups of sequences in a world, over one backend."""

    shortages = (OutOfMemory,)

    def __init__(self, world: SpaceWorld, backend: Any = "python") -> None:
        super().__init__(world)
        self.world = world
        self.manager = BlockSpaceManager(
            world.block_size,
            world.num_blocks,
            world.num_host_blocks,
            world.watermark,
            world.window,
            copy_reused=world.copy_reused,
            backend=backend,
        )
        self.groups: list[SequenceGroup] = []
        self.prefix: Prefix | None = None

    def moves(self) -> Iterator[Call]:
        world, seqs = self.world, [seq for group in self.groups for seq in group.get_seqs()]
        room = world.num_sequences - len(seqs)
        fresh = next(n for n in range(len(seqs) + 1) if n not in [seq.seq_id for seq in seqs])
        for count in range(1, min(room, world.best_of) + 1):
            for length in range(1, world.num_prompt + 1):
                yield Call("admit", (fresh, length, count))
                if world.with_prefix and length > world.block_size:
                    yield Call("admit", (fresh, length, count), {"prefix": True})
        for at, group in enumerate(self.groups):
            for seq in group.get_seqs(status=RUNNING):
                if seq.get_len() < world.num_tokens:
                    yield Call("append_token", (seq.seq_id,))
                if room > 0 and "fork" in world.calls:
                    yield Call("fork_sequence", (seq.seq_id, fresh))
            for seq in group.get_seqs():
                yield Call("free_sequence", (seq.seq_id,))
            if world.num_host_blocks:
                yield from self._swaps(at, group)
        if self.groups and "reset" in world.calls:
            yield Call("reset")
        if self.prefix is not None and not self.groups:
            yield Call("free_prefix")

    def _swaps(self, at: int, group: SequenceGroup) -> Iterator[Call]:
        running, swapped = group.num_seqs(status=RUNNING), group.num_seqs(status=SWAPPED)
        if running and not swapped:
            yield Call("move_out", (at,))
            for other, each in enumerate(self.groups):
                if each.num_seqs(status=SWAPPED):
                    yield Call("move_out", (at,), {"swap_in": other})
        elif swapped and not running:
            yield Call("move_in", (at,))

    def do_admit(self, number: int, length: int, count: int, *, prefix: bool = False) -> bool:
        manager, size = self.manager, self.world.block_size
        taken = {seq.seq_id for group in self.groups for seq in group.get_seqs()}
        ids = [n for n in range(self.world.num_sequences) if n not in taken][:count]
        tokens = [PREFIX_TOKEN] * size * prefix + [10 + number] * (length - size * prefix)
        seqs = [Sequence(each, "", tokens, size) for each in ids]
        shared = None
        if prefix:
            shared = self.prefix or Prefix(tokens[:size], size)
        group = SequenceGroup(str(number), seqs, prefix=shared)
        needed = -(-length // size)
        if shared is not None and shared.allocated:
            needed -= 1
        if self.world.window is not None:
            held = int(shared is not None and not shared.allocated)
            own = -(-length // size) - int(shared is not None)
            needed = min(own, self.world.window // size) + held
        status, free = manager.can_allocate(group), manager.get_num_free_gpu_blocks()
        self.check_admission(f"group of {needed} blocks", status, needed, free)
        caller = f"a prompt of {length} tokens"
        if not self.try_call(caller, lambda: manager.allocate(group), needed, free)[0]:
            return False
        for seq in seqs:
            seq.status = RUNNING
            self._schedule(seq, 0)
        if shared is not None:
            self.prefix, shared.computed = shared, True
        self.groups.append(group)
        return True

    def do_append_token(self, number: int) -> bool:
        group, seq = self._find(number)
        table = self.manager.block_tables[number]
        free, window = self.manager.get_num_free_gpu_blocks(), self.world.window
        is_longer = seq.get_len() % self.world.block_size == 0
        needed = 1
        ring_size = None if window is None else window // self.world.block_size
        if is_longer and ring_size is not None and len(table) - table.num_prefix >= ring_size:
            ring = table.num_prefix + (len(table) - table.num_prefix) % ring_size
            needed = int(table[ring].ref_count > 1)
        elif not is_longer:
            needed = int(table[-1].ref_count > 1)
        if self.manager.can_append_slot(group) and needed > free:
            raise InvariantViolation("ADMIT-EXACT", f"can_append_slot with {free} blocks free")
        longer = seq.fork(number)
        longer.append_token_id(10 + number)
        caller = f"sequence {number}"
        call = partial(self.manager.append_slot, longer)
        done, pair = self.try_call(caller, call, needed, free)
        if not done:
            return False
        group.seqs_dict[number] = longer
        self.returned.append((CopyOnWrite, [] if pair is None else [pair], False))
        self._schedule(longer, longer.get_len() - 1)
        return True

    def do_fork_sequence(self, number: int, child: int) -> bool:
        group, seq = self._find(number)
        other = seq.fork(child)
        self.manager.fork(seq, other)
        group.add(other)
        return True

    def do_free_sequence(self, number: int) -> bool:
        group, seq = self._find(number)
        seq.status = SequenceStatus.FINISHED_STOPPED
        self.manager.free(seq)
        group.remove(number)
        self.groups = [each for each in self.groups if each.num_seqs()]
        return True

    def do_move_out(self, at: int, swap_in: int | None = None) -> bool:
        group = self.groups[at]
        distinct = {place for seq in group.get_seqs() for place in self._own(seq)}
        free = self.manager.get_num_free_cpu_blocks()
        if self.manager.can_swap_out(group) != (len(distinct) <= free):
            detail = f"can_swap_out of {len(distinct)} blocks, {free} free on the CPU"
            raise InvariantViolation("ADMIT-EXACT", detail)
        call = partial(self.manager.swap_out, group)
        done, mapping = self.try_call(f"group {at}", call, len(distinct), free)
        if not done:
            return False
        for seq in group.get_seqs(status=RUNNING):
            seq.status = SWAPPED
        self.returned.append((SwapOut, list(mapping.items()), False))
        if swap_in is not None and self.manager.can_swap_in(self.groups[swap_in]):
            self.do_move_in(swap_in)
        return True

    def do_move_in(self, at: int) -> bool:
        group = self.groups[at]
        seqs = group.get_seqs(status=SWAPPED)
        distinct = {place for seq in seqs for place in self._own(seq)}
        free = self.manager.get_num_free_gpu_blocks()
        left = int(self.world.watermark * self.world.num_blocks)
        can = free - len(distinct) - len(seqs) >= left
        if self.manager.can_swap_in(group) != can:
            detail = f"can_swap_in of {len(distinct)} blocks and {len(seqs)} sequences, {free} free"
            raise InvariantViolation("ADMIT-EXACT", detail)
        call = partial(self.manager.swap_in, group)
        done, mapping = self.try_call(f"group {at}", call, len(distinct), free)
        if not done:
            return False
        for seq in seqs:
            seq.status = RUNNING
            self._schedule(seq, seq.get_len())
        self.returned.append((SwapIn, list(mapping.items()), False))
        return True

    def do_reset(self) -> bool:
        self.manager.reset()
        self.groups = []
        return True

    def do_free_prefix(self) -> bool:
        assert self.prefix is not None
        self.manager.free_prefix(self.prefix)
        self.prefix = None
        return True

    def blocks(self) -> Tiers:
        return self.manager.state()

    def take_commands(self) -> tuple[Command, ...]:
        return tuple(self.manager.take_batch())

    def check_owners(self) -> None:
        self.manager.check()

    def sequences(self) -> list[tuple[str, tuple[int, ...], str, list[TierBlock]]]:
        return [
            (str(seq.seq_id), tuple(seq.get_token_ids()), seq.status.name, self._table(seq))
            for group in self.groups
            for seq in group.get_seqs()
        ]

    def key(self, names: dict[TierBlock, int], _: dict[float, int]) -> object:
        groups = [
            (group.prefix is not None, [seq.seq_id for seq in group.get_seqs()])
            for group in self.groups
        ]
        shared = () if self.prefix is None else self.prefix.get_block_numbers()
        return groups, [names.get(("device", block), block) for block in shared]

    def _find(self, number: int) -> tuple[SequenceGroup, Sequence]:
        for group in self.groups:
            if number in group.seqs_dict:
                return group, group.find(number)
        raise AssertionError(f"no sequence {number}")

    def _table(self, seq: Sequence) -> list[TierBlock]:
        return [
            ("device" if block.device is Device.GPU else "host", block.block_number)
            for block in self.manager.block_tables[seq.seq_id]
        ]

    def _own(self, seq: Sequence) -> list[TierBlock]:
        """Return the places of a sequence outside a shared prefix: those that a swap moves."""
        shared = () if self.prefix is None else self.prefix.get_block_numbers()
        on_device = [("device", number) for number in shared]
        return [place for place in self._table(seq) if place not in on_device]

    def _schedule(self, seq: Sequence, first: int) -> None:
        """Write a sequence from a position on, then read what its next query sees."""
        self.note_forward(seq.seq_id, first, seq.get_len())
