# SPDX-License-Identifier: Apache-2.0
"""Checks that a batch is free of hazards, by what its commands read and write.

No transition calls anything here. A check gets the state in which the batch was empty, its commands
in order and the segment of each; it yields what is wrong. Comparing sets is one check (CMD-HAZARD,
CMD-COPYSET), executing in other orders is another (CMD-ORDER): each place begins with a content of
its own, so two orders agree only if every copy copies the same content. Source: rows 8, 57, 58, 62,
63 of kvcore/check/mutants/catalogue.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import permutations
from typing import Protocol

from kvcore.oracle.contents import TierBlock
from kvcore.types.commands import COPIES, Allocate, Command, Evict, EvictAll, Load

Copies = list[Command]


class Tailed(Protocol):
    """The tail keys of the blocks that have any."""

    @property
    def by_block(self) -> Mapping[int, tuple[bytes, ...]]: ...


class Keyed(Protocol):
    """Blocks, and the keys of those that have one."""

    @property
    def keys(self) -> Sequence[bytes | None]: ...
    @property
    def tails(self) -> Tailed | None: ...


class Pools(Protocol):
    """Anything that has device blocks, such as a state."""

    @property
    def device(self) -> Keyed: ...


BatchCheck = Callable[[Pools, Sequence[Command], Sequence[int]], Iterator[str]]
ORDERS_MAX = 4
"""Up to this many copies of a segment are tried in every order; with more, each pair is swapped."""


def hazards(_: Pools, commands: Sequence[Command], numbers: Sequence[int]) -> Iterator[str]:
    """CMD-HAZARD: no block is written twice, or both read and written, in one segment."""
    if list(numbers) != sorted(numbers) or len(numbers) != len(commands):
        yield f"{len(commands)} commands have segments {list(numbers)}"
    for number, copies in segments_of(commands, numbers):
        read = {each.reads() for each in copies}
        written = [place for each in copies if (place := each.writes()) is not None]
        for place in set(written):
            if written.count(place) > 1:
                yield f"segment {number} writes {_said(place)} {written.count(place)} times"
            if place in read:
                yield f"segment {number} reads and writes {_said(place)}"


def copy_set(_: Pools, commands: Sequence[Command], numbers: Sequence[int]) -> Iterator[str]:
    """CMD-COPYSET: in a segment each target has one source, and is not itself a source."""
    for number, copies in segments_of(commands, numbers):
        sources: dict[TierBlock, TierBlock] = {}
        for command in copies:
            source, target = command.reads(), command.writes()
            if source is None or target is None:
                continue
            if sources.setdefault(target, source) != source:
                yield f"segment {number} copies {_said(sources[target])} and {_said(source)} there"
        for target in set(sources) & set(sources.values()):
            yield f"segment {number} copies from and to {_said(target)}"


def evict_first(before: Pools, commands: Sequence[Command], _: Sequence[int]) -> Iterator[str]:
    """CMD-EVICT-FIRST: a key is withdrawn before its block is allocated or overwritten."""
    keys = {block: {key} for block, key in enumerate(before.device.keys) if key is not None}
    for block, tails in () if before.device.tails is None else before.device.tails.by_block.items():
        keys[block] = keys.get(block, set()).union(tails)
    for command in commands:
        match command:
            case Evict(block, key):
                if block in keys:
                    keys[block].discard(key)
            case EvictAll():
                keys.clear()
            case Allocate(block) if keys.get(block):
                yield f"block {block} is allocated before its key is withdrawn"
            case _:
                target = command.writes()
                if target is not None and target[0] == "device" and keys.get(target[1]):
                    yield f"block {target[1]} is written by {type(command).__name__} and has a key"


def copy_source(_: Pools, commands: Sequence[Command], __: Sequence[int]) -> Iterator[str]:
    """CMD-COW-SRC: the source of a copy still has its content when the copy runs."""
    if COPIES.isdisjoint(map(type, commands)):
        return
    empty: set[TierBlock] = set()
    for command in commands:
        source, target = command.reads(), command.writes()
        if source in empty and source is not None:
            yield f"{type(command).__name__} reads {_said(source)}, allocated again before it"
        if isinstance(command, Allocate):
            empty.add(("device", command.block))
        elif target is not None:
            empty.discard(target)


def orders(_: Pools, commands: Sequence[Command], numbers: Sequence[int]) -> Iterator[str]:
    """CMD-ORDER: the contents are the same in program order, in any order inside segments, and if
    all reads of a segment come before all its writes.
    """
    contents: dict[TierBlock, TierBlock] = {}
    for number, copies in segments_of(commands, numbers):
        if len(copies) > 1:
            wanted = _run(contents, copies)
            for order in _orders(copies):
                if _run(contents, order) != wanted:
                    yield f"segment {number} depends on the order of its {len(copies)} copies"
                    return
            if _run(contents, copies, at_once=True) != wanted:
                yield f"segment {number} depends on which reads come before its writes"
        contents = _run(contents, copies)


def segments_of(
    commands: Sequence[Command], numbers: Sequence[int]
) -> Iterator[tuple[int, Copies]]:
    """Yield each segment with its commands that read or write a place, in order."""
    if COPIES.isdisjoint(map(type, commands)):
        return
    found: dict[int, Copies] = {}
    for command, number in zip(commands, numbers, strict=False):
        if command.reads() is not None or command.writes() is not None:
            found.setdefault(number, []).append(command)
    yield from sorted(found.items())


def _orders(copies: Copies) -> Iterator[Copies]:
    if len(copies) <= ORDERS_MAX:
        yield from (list(order) for order in permutations(copies))
        return
    yield copies[::-1]
    for first in range(len(copies)):
        for second in range(first):
            order = list(copies)
            order[first], order[second] = order[second], order[first]
            yield order


def _run(
    contents: dict[TierBlock, TierBlock], copies: Copies, *, at_once: bool = False
) -> dict[TierBlock, TierBlock]:
    """Return the contents after copies. at_once: all of them read the contents before the first
    copy.

    Each place first holds itself as content; a command that reads no place writes a content of its
    own.
    """
    after = dict(contents)
    for command in copies:
        read, target = command.reads(), command.writes()
        if target is None:
            continue
        if read is None:
            after[target] = ("device", -3 - command.operation if isinstance(command, Load) else -2)
        else:
            after[target] = (contents if at_once else after).get(read, read)
    return after


def _said(place: TierBlock) -> str:
    return f"{place[0]} block {place[1]}"


BATCH_CHECKS: dict[str, BatchCheck] = {
    "CMD-HAZARD": hazards,
    "CMD-COPYSET": copy_set,
    "CMD-EVICT-FIRST": evict_first,
    "CMD-COW-SRC": copy_source,
    "CMD-ORDER": orders,
}
