# SPDX-License-Identifier: Apache-2.0
"""A random walk of the first block manager: what an engine does, and what it should not do.

The walk draws only from its own numbers, so two backends walk alike as long as they answer alike.
After each call the owners of every block are compared with its holders; a call that raises has
changed nothing; a call that a `can_` method allows must succeed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from kvcore.legacy.v0_3.block_space_manager import (
    AllocStatus,
    BlockSpaceManager,
    Prefix,
    Sequence,
    SequenceGroup,
    SequenceStatus,
)
from kvcore.types.errors import KvcoreError
from tests.conformance.legacy_v03.stories import SIZE, set_status, snapshot
from tests.conftest import Backend

RUNNING, SWAPPED, WAITING = SequenceStatus.RUNNING, SequenceStatus.SWAPPED, SequenceStatus.WAITING
FINISHED = SequenceStatus.FINISHED_STOPPED
GROUPS_MAX = 4
SEQS_MAX = 5


class Walk:
    """A manager, its groups, and a record of each call."""

    def __init__(self, backend: Backend, seed: int) -> None:
        self.rng = random.Random(seed)
        window = self.rng.choice([None, None, SIZE, 2 * SIZE, 3 * SIZE])
        self.manager = BlockSpaceManager(
            *(SIZE, self.rng.randint(4, 14), self.rng.randint(0, 8)),
            watermark=self.rng.choice([0.0, 0.1, 0.3]),
            sliding_window=window,
            copy_reused=self.rng.random() < 0.5,
            backend=backend,
        )
        self.groups: list[SequenceGroup] = []
        self.prefixes: list[Prefix] = []
        self.num_seqs = 0
        self.record: list[Any] = []

    def run(self, num_steps: int) -> list[Any]:
        """Run this many steps, then end everything. Returns the record."""
        steps = (
            *(self.arrive, self.append, self.append, self.append, self.fork),
            *(self.swap_out, self.swap_in, self.finish, self.leave, self.misuse),
        )
        for _ in range(num_steps):
            self.rng.choice(steps)()
            if self.rng.random() < 0.3:
                self.record.append([repr(each) for each in self.manager.take_batch()])
            if self.rng.random() < 0.005:
                self.call(self.manager.reset)
                self.groups.clear()
        for group in list(self.groups):
            self.drop(group)
        for prefix in self.prefixes:
            self.call(self.manager.free_prefix, prefix)
        return self.record

    def call(self, method: Callable[..., Any], *args: Any, sure: bool = False) -> Any:
        """Make a call and record it. Returns its value, or the error. sure: it must not raise."""
        before = snapshot(self.manager)
        try:
            value = method(*args)
        except KvcoreError as error:
            value = error
        if isinstance(value, KvcoreError):
            assert not sure, value
            assert snapshot(self.manager) == before
        self.manager.check()
        said = (type(value).__name__, str(value)) if isinstance(value, KvcoreError) else repr(value)
        self.record.append((method.__name__, said, snapshot(self.manager)))
        return value

    def some(self, *statuses: SequenceStatus) -> SequenceGroup | None:
        """Return a group of which a sequence has one of these statuses."""
        fit = [g for g in self.groups if any(s.status in statuses for s in g.get_seqs())]
        return self.rng.choice(fit) if fit else None

    def arrive(self) -> None:
        """Add a group and admit it; now and then without asking first."""
        if len(self.groups) >= GROUPS_MAX:
            return
        tokens = list(range(self.rng.randint(0, 12)))
        prefix = self._prefix(len(tokens)) if self.rng.random() < 0.4 else None
        seqs = [self._sequence(tokens) for _ in range(self.rng.randint(1, 3))]
        if len(seqs) > 1 and self.rng.random() < 0.2:
            seqs[-1].status = FINISHED
        group = SequenceGroup(f"g{self.num_seqs}", seqs, prefix=prefix)
        status = self.call(self.manager.can_allocate, group)
        if status is AllocStatus.OK or self.rng.random() < 0.2:
            value = self.call(self.manager.allocate, group, sure=status is AllocStatus.OK)
            if not isinstance(value, KvcoreError):
                for seq in group.get_seqs(WAITING):
                    seq.status = RUNNING
                self.groups.append(group)
        if prefix is not None and prefix.allocated:
            prefix.computed = self.rng.random() < 0.9
            if prefix not in self.prefixes:
                self.prefixes.append(prefix)

    def append(self) -> None:
        """Decode a token of a group, which is freed if there is no room."""
        group = self.some(RUNNING)
        if group is None:
            return
        allowed = self.call(self.manager.can_append_slot, group)
        if not allowed and self.rng.random() < 0.5:
            self.drop(group)
            return
        for seq in group.get_seqs(RUNNING):
            seq.append_token_id(7)
            if isinstance(self.call(self.manager.append_slot, seq, sure=allowed), KvcoreError):
                self.drop(group)
                return

    def fork(self) -> None:
        """Fork a sequence."""
        group = self.some(RUNNING, SWAPPED)
        if group is None or group.num_seqs() >= SEQS_MAX:
            return
        parent = self.rng.choice([s for s in group.get_seqs() if not s.is_finished()])
        self.num_seqs += 1
        child = parent.fork(self.num_seqs)
        self.call(self.manager.fork, parent, child, sure=True)
        group.add(child)

    def swap_out(self) -> None:
        """Swap a group out."""
        group = self.some(RUNNING)
        if group is not None:
            allowed = self.call(self.manager.can_swap_out, group)
            value = self.call(self.manager.swap_out, group, sure=allowed)
            self._turn(group, RUNNING, SWAPPED, value)

    def swap_in(self) -> None:
        """Swap a group in."""
        group = self.some(SWAPPED)
        if group is not None:
            ready = group.prefix is None or group.prefix.computed
            allowed = self.call(self.manager.can_swap_in, group)
            value = self.call(self.manager.swap_in, group, sure=allowed and ready)
            self._turn(group, SWAPPED, RUNNING, value)

    def finish(self) -> None:
        """End a sequence."""
        group = self.some(RUNNING, SWAPPED)
        if group is not None:
            seq = self.rng.choice(group.get_seqs())
            seq.status = FINISHED
            self.call(self.manager.free, seq, sure=True)

    def leave(self) -> None:
        """End a group."""
        if self.groups and self.rng.random() < 0.3:
            self.drop(self.rng.choice(self.groups))

    def drop(self, group: SequenceGroup) -> None:
        """Free all of a group."""
        for seq in group.get_seqs():
            self.call(self.manager.free, seq, sure=True)
        self.groups.remove(group)

    def misuse(self) -> None:
        """Make a call that no engine should make."""
        group = self.some(RUNNING, SWAPPED, FINISHED)
        stranger = Sequence(-1, "", [1], SIZE)
        self.call(self.manager.append_slot, stranger)
        self.call(self.manager.free, stranger, sure=True)
        if group is None:
            return
        self.call(self.manager.allocate, group)
        before = [seq.status for seq in group.get_seqs()]
        for status, method in (
            (WAITING, self.manager.allocate),
            (WAITING, self.manager.can_allocate),
            (SWAPPED, self.manager.swap_in if before[0] is RUNNING else self.manager.can_swap_in),
            (RUNNING, self.manager.swap_out if before[0] is SWAPPED else self.manager.can_swap_out),
        ):
            set_status(group, status)
            if method != self.manager.allocate or group.get_seqs()[0].seq_id in (
                self.manager.block_tables
            ):
                self.call(method, group)
        for seq, status in zip(group.get_seqs(), before, strict=True):
            seq.status = status
        free = self.manager.gpu_allocator.free_blocks
        if free:
            self.call(self.manager.gpu_allocator.free, free[-1])

    def _sequence(self, tokens: list[int]) -> Sequence:
        self.num_seqs += 1
        return Sequence(self.num_seqs, "", tokens, SIZE)

    def _prefix(self, most: int) -> Prefix:
        if self.prefixes and self.rng.random() < 0.6:
            return self.rng.choice(self.prefixes)
        return Prefix(range(self.rng.randint(0, most // SIZE) * SIZE), SIZE)

    def _turn(
        self, group: SequenceGroup, before: SequenceStatus, after: SequenceStatus, value: Any
    ) -> None:
        if not isinstance(value, KvcoreError):
            for seq in group.get_seqs(before):
                seq.status = after
