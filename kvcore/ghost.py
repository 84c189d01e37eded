# SPDX-License-Identifier: Apache-2.0
"""What every slot really holds, followed through the commands: the independent judge of the core.

Rules: nothing here is called by a transition. A slot's content is the identity of a prefix (a
number for "these tokens, up to and with this one") and a group, or undefined. Contents change only
as a runtime would change them: by the commands of a batch, and by the forward pass after it, which
writes the scheduled positions and rubbish into lookahead slots. A block that loses its content
(handed out, freed or evicted without owner) becomes undefined at once, which is stricter than
memory is. Twin: none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import attrs

from kvcore.commands import (
    Allocate,
    Command,
    CutTable,
    Evict,
    EvictAll,
    Free,
    SetTable,
    Tier,
    Touch,
)
from kvcore.config import Config
from kvcore.errors import InvariantViolation
from kvcore.hashing import HASH_SIZE
from kvcore.state import RequestState, State

Content = tuple[int, int] | None
Place = tuple[Tier, int]
Contents = dict[Place, list[Content]]

RUBBISH: Content = (-1, 0)
ZEROS: Content = (-2, 0)


class Prefixes:
    """Numbers for prefixes: equal numbers mean equal tokens, whatever the hashes say."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._children: dict[tuple[int, int], int] = {}
        self._nodes: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._blocks: dict[bytes, tuple[int, ...]] = {}

    def nodes(self, tokens: Iterable[int]) -> tuple[int, ...]:
        """The number of the prefix that ends with each token."""
        whole = tuple(tokens)
        known = self._nodes.get(whole)
        if known is None:
            node, found = 0, []
            for token in whole:
                node = self._children.setdefault((node, token), len(self._children) + 1)
                found.append(node)
            known = self._nodes[whole] = tuple(found)
        return known

    def learn(self, state: State) -> None:
        """Take in what the requests' hashes stand for. Raises InvariantViolation (HASH-INJ)."""
        for request in state.requests.values():
            nodes = self.nodes(request.tokens)
            for position, block_hash in enumerate(request.block_hashes):
                start = position * self._block_size
                block = nodes[start : start + self._block_size]
                if self._blocks.setdefault(block_hash, block) != block:
                    raise InvariantViolation("HASH-INJ", f"{block_hash.hex()} has two prefixes")

    def block(self, key: bytes) -> tuple[int, ...]:
        """The prefixes that a block under a key holds."""
        return self._blocks[key[:HASH_SIZE]]


@attrs.frozen
class Write:
    """Positions [start, end) of a request that the forward pass writes; rubbish up to num_slots."""

    request_id: str
    start: int
    end: int
    num_slots: int


def expected(state: State, prefixes: Prefixes) -> Iterator[tuple[str, Place, int, Content]]:
    """What a state counts on: (property, place, slot, content) of all computed and cached slots."""
    size = state.config.block_size
    for request in state.requests.values():
        nodes = prefixes.nodes(request.tokens)
        for tier, tables in tiers(request):
            for group, table in enumerate(tables):
                for position in range(request.num_computed if table else 0):
                    place = (tier, table[position // size])
                    yield "KV-READ", place, position % size, (nodes[position], group)
    for key, blocks in state.device.index.items():
        group = int.from_bytes(key[HASH_SIZE:], "big")
        for block in blocks:
            for slot, node in enumerate(prefixes.block(key)):
                yield "CACHE-KV", ("device", block), slot, (node, group)


def tiers(request: RequestState) -> tuple[tuple[Tier, Sequence[Sequence[int]]], ...]:
    """A request's tables with their tiers."""
    return (("device", request.tables), ("host", request.host_tables))


class Ghost:
    """The contents of all blocks, and what follows from the commands alone: tables and owners."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.prefixes = Prefixes(config.block_size)
        self.contents: Contents = {}
        self.tables: dict[tuple[int, int], list[int]] = {}
        self.owned: set[int] = set()
        self.cached: set[int] = set()

    def assume(self, state: State) -> None:
        """Hold exactly what a state counts on, and its tables and owners."""
        self.prefixes.learn(state)
        self.contents = {}
        for name, place, slot, content in expected(state, self.prefixes):
            slots = self._slots(place)
            if slots[slot] not in (None, content):
                raise InvariantViolation(name, f"{place} slot {slot} is to hold two contents")
            slots[slot] = content
        self.tables = _tables(state)
        self.owned, self.cached = _owners(state)

    def execute(self, commands: Iterable[Command]) -> None:
        """Run the commands of a batch in order."""
        for command in commands:
            self._mirror(command)
            copy(self.contents, command, self._config.block_size)

    def forward(self, state: State, writes: Iterable[Write]) -> None:
        """Write what a batch schedules: state is the one that the batch was taken from."""
        size = self._config.block_size
        for write in writes:
            request = state.requests[write.request_id]
            nodes = self.prefixes.nodes(request.tokens)
            for group in range(len(request.tables)):
                table = self.tables[request.row, group]
                for position in range(write.start, write.num_slots):
                    slots = self._slots(("device", table[position // size]))
                    content = (nodes[position], group) if position < write.end else RUBBISH
                    slots[position % size] = content

    def check(self, state: State) -> None:
        """Raise InvariantViolation unless a state finds what it counts on, its batch executed."""
        self.prefixes.learn(state)
        for name, place, slot, content in expected(state, self.prefixes):
            held = self._slots(place)[slot]
            if held != content:
                detail = f"{place[0]} block {place[1]} slot {slot} holds {held}, not {content}"
                raise InvariantViolation(name, detail)
        mirrored = {place: table for place, table in self.tables.items() if table}
        if mirrored != _tables(state):
            detail = f"{mirrored} after the deltas, not {_tables(state)}"
            raise InvariantViolation("TABLE-MIRROR", detail)
        if (self.owned, self.cached) != _owners(state):
            detail = f"{self.owned} owned, {self.cached} cached by the commands: {_owners(state)}"
            raise InvariantViolation("OWNER-MIRROR", detail)

    def _slots(self, place: Place) -> list[Content]:
        return self.contents.setdefault(place, [None] * self._config.block_size)

    def _mirror(self, command: Command) -> None:
        match command:
            case Allocate(block):
                self.owned.add(block)
                self.cached.discard(block)
                self._forget(block)
            case Touch(block):
                self.owned.add(block)
                self.cached.discard(block)
            case Free(block, cached):
                self.owned.discard(block)
                if cached:
                    self.cached.add(block)
                else:
                    self._forget(block)
            case Evict(block):
                self.cached.discard(block)
                if block not in self.owned:
                    self._forget(block)
            case EvictAll():
                for block in self.cached:
                    self._forget(block)
                self.cached.clear()
            case SetTable(row, group, position, block):
                table = self.tables.setdefault((row, group), [])
                table[position : position + 1] = [block]
            case CutTable(row, group, length):
                del self.tables.setdefault((row, group), [])[length:]

    def _forget(self, block: int) -> None:
        self.contents.pop(("device", block), None)


def _tables(state: State) -> dict[tuple[int, int], list[int]]:
    return {
        (request.row, group): list(table)
        for request in state.requests.values()
        for group, table in enumerate(request.tables)
        if table
    }


def _owners(state: State) -> tuple[set[int], set[int]]:
    pool = state.device
    counts = list(enumerate(pool.ref_counts))
    owned = {block for block, count in counts if count}
    return owned, {b for b, count in counts if not count and pool.keys[b] is not None}


def copy(contents: Contents, command: Command, block_size: int) -> None:
    """Do what a copying command does to contents; other commands do nothing."""
    source, target = command.reads(), command.writes()
    if target is not None:
        contents[target] = read(contents, source, block_size)


def read(contents: Contents, source: Place | None, block_size: int) -> list[Content]:
    """What a copying command writes that reads this place; zeros for one that reads none."""
    if source is None:
        return [ZEROS] * block_size
    return list(contents.get(source, [None] * block_size))
