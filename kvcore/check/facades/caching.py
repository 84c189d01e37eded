# SPDX-License-Identifier: Apache-2.0
"""An engine around `kvcore.legacy.v0.block_manager`, with and without its prefix cache.

It behaves like the engines of that time: the cached prefix is looked up before a prompt is
allocated and is not computed again, computed blocks are marked after each step, and each step
reports when it used which sequence. Each call is one step. Equal tokens have equal content, so that
hits are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import attrs

from kvcore.check.facades.engine import FacadeEngine, FacadeWorld
from kvcore.legacy.blocks.tiers import Tiers
from kvcore.legacy.v0.block import NullBlock
from kvcore.legacy.v0.block_manager import SelfAttnBlockSpaceManager
from kvcore.legacy.v0.errors import NoFreeBlocksError
from kvcore.legacy.v0.interfaces import Block, Device
from kvcore.legacy.v0.sequences import AllocStatus, Sequence, SequenceGroup, SequenceStatus
from kvcore.oracle.contents import TierBlock
from kvcore.trace.calls import Call
from kvcore.types.commands import Command, CopyOnWrite, SwapIn, SwapOut
from kvcore.types.errors import InvariantViolation

RUNNING, SWAPPED = SequenceStatus.RUNNING, SequenceStatus.SWAPPED


@attrs.frozen(kw_only=True)
class CachingWorld(FacadeWorld):
    """A small world of the V0 manager.

    num_letters: tokens that may follow one prefix. num_appended: most tokens of a step.
    num_lookahead: most slots after them. looks: whether a caller holds the tables' block objects.
    """

    num_letters: int = 2
    num_appended: int = 1
    num_lookahead: int = 0
    caching: bool = True
    looks: bool = False


class CachingEngine(FacadeEngine):
    """Sequences in a world, over one backend; each is a group of its own, with its forks."""

    shortages = (NoFreeBlocksError,)
    renames_blocks = False

    def __init__(self, world: CachingWorld, backend: Any = "python") -> None:
        super().__init__(world)
        self.world = world
        self.manager = SelfAttnBlockSpaceManager(
            world.block_size,
            world.num_blocks,
            world.num_host_blocks,
            world.watermark,
            world.window,
            world.caching,
            backend=backend,
        )
        self.seqs: dict[int, Sequence] = {}
        self.now = 0.0

    def moves(self) -> Iterator[Call]:
        world = self.world
        fresh = next(n for n in range(len(self.seqs) + 1) if n not in self.seqs)
        room = world.num_sequences - len(self.seqs)
        for prompt in self._prompts((), world.num_prompt) if room else ():
            yield Call("admit", (fresh, prompt))
            for count in range(2, min(room, world.best_of) + 1):
                yield Call("admit", (fresh, prompt), {"best_of": count})
        for number, seq in sorted(self.seqs.items()):
            tokens = tuple(seq.get_token_ids())
            if seq.status is RUNNING:
                most = min(world.num_appended, world.num_tokens - len(tokens))
                for appended in self._prompts(tokens, len(tokens) + most):
                    yield Call("append_tokens", (number, *appended[len(tokens) :]))
                    for slots in range(1, world.num_lookahead + 1):
                        returned = {"lookahead": slots}
                        yield Call("append_tokens", (number, *appended[len(tokens) :]), returned)
                if room and "fork" in world.calls:
                    yield Call("fork_sequence", (number, fresh))
                if world.num_host_blocks:
                    yield Call("move_out", (number,))
                    for other, each in sorted(self.seqs.items()):
                        if each.status is SWAPPED:
                            yield Call("move_out", (number,), {"swap_in": other})
            else:
                yield Call("move_in", (number,))
            yield Call("free_sequence", (number,))
        if world.caching and "reset" in world.calls:
            yield Call("reset")

    def perform(self, call: Call) -> bool:
        self.now += 1.0
        done = super().perform(call)
        if self.world.looks:
            for number in self.seqs:
                self.manager.block_tables[number].blocks  # noqa: B018 # objects are made by a look
        return done

    def do_admit(self, number: int, prompt: tuple[int, ...], *, best_of: int = 1) -> bool:
        manager, size = self.manager, self.world.block_size
        ids = [n for n in range(self.world.num_sequences) if n not in self.seqs][:best_of]
        seqs = [Sequence(each, list(prompt)) for each in ids]
        group = SequenceGroup(str(number), seqs)
        free, most = manager.get_num_free_gpu_blocks(), -(-len(prompt) // size)
        if manager.max_block_sliding_window is not None:
            most = min(most, manager.max_block_sliding_window)
        what = f"{most} blocks of a prompt"
        self.check_admission(what, manager.can_allocate(group), most, free)
        cached = [manager.get_num_cached_tokens(seq) for seq in seqs]
        needed = self._needed("device", tuple(prompt))
        done, _ = self.try_call(
            f"a prompt of {len(prompt)} tokens", lambda: manager.allocate(group), needed, free
        )
        for seq, num_cached in zip(seqs, cached, strict=True):
            if not done:
                manager.remove_seq_from_computed_blocks_tracker(seq)
                continue
            seq.status = RUNNING
            self.seqs[seq.seq_id] = seq
            self._schedule(seq, num_cached)
        return done

    def do_append_tokens(self, number: int, *tokens: int, lookahead: int = 0) -> bool:
        manager, old = self.manager, self.seqs[number]
        group = SequenceGroup(str(number), [seq := old.fork(number)])
        for token in tokens:
            seq.append_token_id(token)
        free = manager.get_num_free_gpu_blocks()
        needed = self._needed_to_append(old, seq, lookahead)
        if needed is not None and manager.can_append_slots(group, lookahead) and needed > free:
            detail = f"can_append_slots of {len(tokens)} and {lookahead} with {free} blocks free"
            raise InvariantViolation("ADMIT-EXACT", detail)
        call = partial(manager.append_slots, seq, lookahead)
        done, pairs = self.try_call(f"sequence {number}", call, needed, free)
        if not done:
            return False
        self.returned.append((CopyOnWrite, pairs, False))
        self.seqs[number] = seq
        self._schedule(seq, len(old.get_token_ids()))
        return True

    def do_fork_sequence(self, number: int, child: int) -> bool:
        seq = self.seqs[number]
        self.seqs[child] = seq.fork(child)
        self.manager.fork(seq, self.seqs[child])
        return True

    def do_free_sequence(self, number: int) -> bool:
        self.manager.free(self.seqs.pop(number))
        return True

    def do_move_out(self, number: int, swap_in: int | None = None) -> bool:
        if not self._swap(number, "host"):
            return False
        if swap_in is not None:
            group = SequenceGroup(str(swap_in), [self.seqs[swap_in]])
            if self.manager.can_swap_in(group, 0) is AllocStatus.OK:
                self._swap(swap_in, "device")
        return True

    def do_move_in(self, number: int) -> bool:
        return self._swap(number, "device")

    def do_reset(self) -> bool:
        used = [seq for seq in self.seqs.values() if seq.status is RUNNING]
        done = self.manager.reset_prefix_cache(Device.GPU)
        is_used = bool(used) or self.manager.block_allocator.has_null_block
        if done == is_used:
            raise InvariantViolation("RESET", f"with {len(used)} users, a reset answers {done}")
        return done

    def blocks(self) -> Tiers:
        return self.manager.block_allocator.backing.state()

    def take_commands(self) -> tuple[Command, ...]:
        return tuple(self.manager.take_batch())

    def check_owners(self) -> None:
        held: dict[str, list[int]] = {"device": [], "host": []}
        for *_, table in self.sequences():
            for tier, block in table:
                held[tier].append(block)
        null = self._null()
        held["device"] = [block for block in held["device"] if block != null]
        if null is not None:
            held["device"].append(null)
        self.manager.block_allocator.backing.check(held["device"], held["host"])

    def sequences(self) -> list[tuple[str, tuple[int, ...], str, list[TierBlock]]]:
        return [
            (str(number), tuple(seq.get_token_ids()), seq.status.name, self._table(number))
            for number, seq in sorted(self.seqs.items())
        ]

    def times(self) -> list[float]:
        of_blocks = [tracker.last_accessed for tracker in self._trackers()]
        return of_blocks + [time for _, time in self._used() if time is not None]

    def key(self, _: dict[TierBlock, int], order: dict[float, int]) -> object:
        trackers = [(t.active, order[t.last_accessed], t.computed) for t in self._trackers()]
        used = [(number, None if time is None else order[time]) for number, time in self._used()]
        return trackers, used, self._null()

    def _schedule(self, seq: Sequence, first: int) -> None:
        """Write a sequence from a position on, read what its next query sees, and notify the
        manager.
        """
        end = seq.data.num_computed_tokens = len(seq.get_token_ids())
        self.note_forward(seq.seq_id, first, end)
        self.manager.mark_blocks_as_computed(SequenceGroup("", [seq]), 0)
        self.manager.access_all_blocks_in_seq(seq, self.now)

    def _swap(self, number: int, to: Any) -> bool:
        manager, seq = self.manager, self.seqs[number]
        group = SequenceGroup(str(number), [seq])
        tokens, free = tuple(seq.get_token_ids()), manager.get_num_free_cpu_blocks()
        kind: type[Command]
        if to == "host":
            can, kind, call = manager.can_swap_out(group), SwapOut, manager.swap_out
        else:
            free = manager.get_num_free_gpu_blocks()
            can = manager.can_swap_in(group, 0) is AllocStatus.OK
            kind, call = SwapIn, manager.swap_in
        needed = self._needed(to, tokens) if self.world.window is None else None
        if can and needed is not None and needed > free:
            detail = f"sequence {number} is said to fit: {needed} blocks, {free} free"
            raise InvariantViolation("ADMIT-EXACT", detail)
        done, pairs = self.try_call(f"sequence {number}", lambda: call(group), needed, free)
        if not done:
            return False
        self.returned.append((kind, pairs, True))
        seq.status = SWAPPED if to == "host" else RUNNING
        if to == "device":
            self._schedule(seq, len(tokens))
        return True

    def _needed(self, tier: Any, tokens: tuple[int, ...]) -> int:
        """Count the free blocks of a tier that these tokens need, given the contents of memory."""
        size, pool = self.world.block_size, self.blocks().pool(tier)
        owned = {
            () if slots[-1] is None else slots[-1][0]
            for (where, block), slots in self.memory.contents.items()
            if where == tier and pool.ref_counts[block] and pool.keys[block] is not None
        }
        full = {tokens[:end] for end in range(size, len(tokens) + 1, size)}
        return len(full - owned if self.world.caching else full) + bool(len(tokens) % size)

    def _needed_to_append(self, old: Sequence, new: Sequence, lookahead: int) -> int | None:
        """Count new blocks and copies of shared written ones; None: the window makes space."""
        if self.world.window is not None:
            return None
        blocks = self.manager.block_tables[old.seq_id].physical_block_ids
        first, end = (len(seq.get_token_ids()) for seq in (old, new))
        size, owners = self.world.block_size, self.manager.block_allocator.backing.blocks.ref_count
        written = blocks[first // size : -(-end // size)]
        added = max(0, -(-(end + lookahead) // size) - len(blocks))
        return added + sum(owners(block, "device") > 1 for block in written)

    def _table(self, number: int) -> list[TierBlock]:
        num_blocks = self.world.num_blocks
        return [
            ("device", at) if at < num_blocks else ("host", at - num_blocks)
            for at in self.manager.block_tables[number].physical_block_ids
        ]

    def _null(self) -> int | None:
        allocator = self.manager.block_allocator
        return _id(allocator.allocate_or_get_null_block()) if allocator.has_null_block else None

    def _trackers(self) -> list[Any]:
        if not self.world.caching:
            return []
        allocators = [self.manager.block_allocator.allocator(each) for each in Device]
        return [
            each._block_tracker[at] for each in allocators for at in sorted(each._block_tracker)
        ]

    def _used(self) -> list[tuple[int, float | None]]:
        """Return when each sequence was used, which its blocks get when it is freed."""
        if not self.world.caching:
            return []
        return sorted(self.manager._last_access_blocks_tracker._seq_last_access.items())

    def _prompts(self, prefix: tuple[int, ...], most: int) -> Iterator[tuple[int, ...]]:
        """Yield all continuations of a prefix up to a length."""
        if len(prefix) < most:
            for token in self._letters(prefix):
                yield (*prefix, token)
                yield from self._prompts((*prefix, token), most)

    def _letters(self, prefix: tuple[int, ...]) -> list[int]:
        """Return the known tokens after a prefix, and a fresh one."""
        seen = [slot[0] for slots in self.memory.contents.values() for slot in slots if slot]
        seen += [tuple(seq.get_token_ids()) for seq in self.seqs.values()]
        at = len(prefix)
        known = sorted({each[at] for each in seen if len(each) > at and each[:at] == prefix})
        return known + [n for n in range(self.world.num_letters) if n not in known][:1]


def _id(block: Block) -> int:
    assert block.block_id is not None or isinstance(block, NullBlock)
    return int(block.block_id if block.block_id is not None else 0)
