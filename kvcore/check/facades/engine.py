# SPDX-License-Identifier: Apache-2.0
"""An engine around a facade: makes legal calls, and checks each by what a user sees of it.

An engine knows its sequences and reads the facade's tables; memory changes only by batches. The
need of a call is counted here independently, so that a refusal is checked in both directions
(ADMIT-EXACT), and a refused call must leave the blocks unchanged (ATOMIC-FAIL). A subclass makes
the calls of one facade.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import attrs
from msgspec.structs import astuple
from pyrsistent import pvector

from kvcore.check.stories.scenes import Row, Scene
from kvcore.legacy.blocks.tiers import Tiers
from kvcore.oracle.contents import Content, SlotStore, TierBlock, run_of
from kvcore.oracle.hazards import BATCH_CHECKS
from kvcore.trace.calls import Call
from kvcore.trace.text import write_tokens
from kvcore.types.commands import Allocate, Command, segments
from kvcore.types.errors import InvariantViolation

HEADS: Row = ("sequence", "tokens", "status", "blocks")
BLOCK_HEADS: Row = ("block", "owners", "key", "queue", "slots hold")


@attrs.frozen(kw_only=True)
class FacadeWorld:
    """A small world of a facade.

    num_sequences, num_tokens: most sequences at a time, most tokens of each. num_prompt: most
    tokens of a new one. best_of: most sequences that a group begins with. window: tokens that a
    query sees.
    """

    num_blocks: int = 3
    num_host_blocks: int = 0
    block_size: int = 2
    num_sequences: int = 2
    num_tokens: int = 4
    num_prompt: int = 3
    best_of: int = 1
    window: int | None = None
    watermark: float = 0.0
    calls: frozenset[str] = frozenset({"fork", "reset"})


class FacadeEngine(ABC):
    """A facade, its sequences and the memory, in which a slot holds the tokens up to its own.

    emitted: the commands of the last call. forward: what it scheduled: a sequence, the first
    written and the first read position. returned: copies that it returned, by kind, and whether it
    also returns unneeded copies.
    """

    def __init__(self, world: FacadeWorld) -> None:
        self.limits = world
        self.memory = SlotStore((world.block_size,))
        self.emitted: tuple[Command, ...] = ()
        self.forward: list[tuple[str, int, int]] = []
        self.returned: list[tuple[type[Command], list[tuple[int, int]], bool]] = []

    shortages: tuple[type[Exception], ...] = ()
    """The error that the facade raises if it runs out of blocks."""
    renames_blocks = True
    """Whether the facade behaves the same with other block ids."""

    def times(self) -> list[float]:
        """Return the times that the facade compares, besides those of priorities."""
        return []

    @abstractmethod
    def moves(self) -> Iterator[Call]:
        """Yield the calls that an engine may make now, in a fixed order."""

    def perform(self, call: Call) -> bool:
        """Make a call; return whether it succeeded. Raises InvariantViolation."""
        move: Any = getattr(self, f"do_{call.name}")
        return bool(move(*call.args, **call.options))

    @abstractmethod
    def blocks(self) -> Tiers:
        """Return the state behind the facade."""

    @abstractmethod
    def take_commands(self) -> tuple[Command, ...]:
        """Return the commands since the last call of this method."""

    @abstractmethod
    def key(self, names: dict[TierBlock, int], order: dict[float, int], /) -> object:
        """Return the rest of the state that decides the facade's future behaviour.

        names: new names of blocks, if blocks are renamed. order: the rank of each time; the times
        themselves do not matter.
        """

    @abstractmethod
    def check_owners(self) -> None:
        """Raise InvariantViolation unless the blocks' owners are the facade's holders."""

    @abstractmethod
    def sequences(self) -> list[tuple[str, tuple[int, ...], str, list[TierBlock]]]:
        """Return name, tokens, status and table of each sequence."""

    def repeat(self, call: Call) -> None:
        """Make a call again that was checked before."""
        self.forward, self.returned = [], []
        self.perform(call)
        self.emitted = self.take_commands()
        self.returned = []
        self._run_batch()
        self._forget()

    def make(self, call: Call) -> bool:
        """Make and check a call; return whether it succeeded. Raises InvariantViolation."""
        before = settled(self.blocks())
        self.forward, self.returned = [], []
        try:
            done = self.perform(call)
        except InvariantViolation:
            raise
        except Exception as error:
            raise InvariantViolation("NOCRASH", f"{call} raises {error!r}") from error
        self.emitted = self.take_commands()
        if not done:
            if self.emitted or settled(self.blocks()) != before:
                raise InvariantViolation("ATOMIC-FAIL", f"{call}, refused, changes the blocks")
            return False
        self._check_batch(before)
        self._run_batch()
        self.check_owners()
        self._forget()
        return True

    def _forget(self) -> None:
        pools = self.blocks()
        held = self.memory.contents
        self.memory.contents = {place: held[place] for place in held if _is_read(pools, place)}

    def _run_batch(self) -> None:
        """Run a batch like a worker: the copies, then the forward pass of the scheduled tokens."""
        for command in self.emitted:
            if isinstance(command, Allocate):
                self.memory.forget(command.block)
            self.memory.copy(command)
        for kind, returned, may_return_more in self.returned:
            self._check_copies(kind, returned, may_return_more=may_return_more)
        tables = {name: (tokens, table) for name, tokens, _, table in self.sequences()}
        for name, first, _ in self.forward:
            tokens, table = tables[name]
            self.memory.put(table, 0, first, run_of(_prefixes(tokens)[first:], 0))
        for name, _, seen in self.forward:
            tokens, table = tables[name]
            for wrong in self.memory.wrong(table, 0, _prefixes(tokens), seen, len(tokens)):
                tier, block = wrong.place
                detail = f"{name} reads {tier} block {block} slot {wrong.slot}: it holds "
                detail += f"{_said(wrong.held)}, not {_said(wrong.wanted)}"
                raise InvariantViolation("KV-READ", detail)

    def try_call(
        self, caller: str, function: Callable[[], Any], needed: int | None, room: int
    ) -> tuple[bool, Any]:
        """Make a call that needs some blocks while others are free.

        needed: blocks that it needs; None if unknown. room: free blocks. Returns whether it
        succeeded, and its value. Raises InvariantViolation (ADMIT-EXACT).
        """
        try:
            value = function()
        except self.shortages as error:
            if needed is not None and needed <= room:
                detail = f"{caller} needs {needed} of {room} free blocks and is refused: {error}"
                raise InvariantViolation("ADMIT-EXACT", detail) from error
            return False, None
        if needed is not None and needed > room:
            detail = f"{caller} needs {needed} blocks, {room} are free, and it is not refused"
            raise InvariantViolation("ADMIT-EXACT", detail)
        return True, value

    def check_admission(self, what: str, status: Enum, needed: int, free: int) -> None:
        """Raise InvariantViolation (ADMIT-EXACT, ADMIT-NEVER) unless a status is right for a group
        that needs this many blocks.
        """
        left = int(self.limits.watermark * self.limits.num_blocks)
        expected = "OK" if free - needed >= left else "LATER"
        if self.limits.num_blocks - needed < left:
            expected = "NEVER"
        if status.name != expected:
            name = "ADMIT-NEVER" if "NEVER" in (status.name, expected) else "ADMIT-EXACT"
            raise InvariantViolation(name, f"{what}, {free} free: {status.name}, not {expected}")

    def note_forward(self, name: object, first: int, end: int) -> None:
        """Write a sequence from a position on, and read what its next query sees."""
        window = self.limits.window
        self.forward.append((str(name), first, 0 if window is None else max(0, end - window)))

    def _check_copies(
        self, kind: type[Command], returned: list[tuple[int, int]], *, may_return_more: bool
    ) -> None:
        """Raise InvariantViolation (CMD-COMPLETE) unless the batch has the copies that the call
        returned.
        """
        copies = [astuple(each) for each in self.emitted if isinstance(each, kind)]
        if copies != returned and not (may_return_more and set(copies) <= set(returned)):
            detail = f"the copies {returned} are returned, the batch has {copies}"
            raise InvariantViolation("CMD-COMPLETE", detail)

    def _check_batch(self, before: Tiers) -> None:
        commands = self.emitted
        numbers = segments(commands)
        for name, holds in BATCH_CHECKS.items():
            for detail in holds(before, commands, numbers):
                raise InvariantViolation(name, detail)

    @property
    def scene(self) -> Scene:
        """Return the scene that a story shows."""
        requests = []
        for name, tokens, status, table in self.sequences():
            ids = " ".join(_name(place) for place in table) or "-"
            requests.append((name, write_tokens(list(tokens)), status, ids))
        return Scene(tuple(requests), tuple(self._rows()), HEADS, BLOCK_HEADS)

    def _rows(self) -> Iterator[Row]:
        tiers = self.blocks()
        for tier, pool in (("device", tiers.device), ("host", tiers.host)):
            if pool is None:
                continue
            places = {block: f"free {at}" for at, block in enumerate(pool.queue, 1)}
            for block, count in enumerate(pool.ref_counts):
                place: TierBlock = ("device" if tier == "device" else "host", block)
                key = pool.keys[block]
                returned = "-" if key is None else key.hex()[:8]
                where = places.get(block, "-")
                slots = self.memory.get(place)
                row = " | ".join(map(_said, slots)) if any(slots) else "-"
                yield (_name(place), str(count), returned, where, row)


def settled(tiers: Tiers) -> Tiers:
    """Return the state without the open batch."""
    return attrs.evolve(tiers, number=0, commands=pvector())


def _is_read(tiers: Tiers, place: TierBlock) -> bool:
    pool = tiers.pool(place[0])
    return pool.ref_counts[place[1]] > 0 or pool.keys[place[1]] is not None


def _prefixes(tokens: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the content of each token's slot: the tokens up to it."""
    return [tokens[:end] for end in range(1, 1 + len(tokens))]


def _said(content: Content) -> str:
    """Describe a content: its token after those before it."""
    return "?" if content is None else "-".join(map(str, content[0]))


def _name(place: TierBlock) -> str:
    return f"{'h' if place[0] == 'host' else ''}{place[1]}"
