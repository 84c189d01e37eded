# SPDX-License-Identifier: Apache-2.0
"""What every slot really holds, followed through the commands: the independent judge of the core.

Rules: nothing here is called by a transition. A slot's content is the identity of a prefix (a
number for "this, up to and with this token", `prefixes.py`) and a group, or undefined. Contents
change only as a runtime would change them: by the commands of a batch, and by the forward pass
after it, which loads external tokens, writes the scheduled ones and rubbish into lookahead slots.
Every query of that pass must find what its group lets it see. A load that fails leaves spoilt
slots, and so does whatever is computed from them. The null block is neither written nor read. A
block that loses its content (handed out, freed or evicted without owner) becomes undefined at once,
which is stricter than memory is. Twin: none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from kvcore.oracle.prefixes import Prefixes
from kvcore.state.state import NO_HOST_BLOCK, RequestState, State
from kvcore.types.commands import (
    Allocate,
    Command,
    CutTable,
    Evict,
    EvictAll,
    Free,
    Load,
    SetTable,
    Store,
    Tier,
    Touch,
)
from kvcore.types.config import Config
from kvcore.types.errors import InvariantViolation
from kvcore.types.groups import Group, skipped_tokens
from kvcore.types.keys import HASH_SIZE

Content = tuple[int, int] | None
Place = tuple[Tier, int]
Slots = tuple[Content, ...]
Contents = dict[Place, Slots]
Expected = tuple[str, Place, int, Content]
Tables = dict[tuple[int, int], tuple[int, ...]]

RUBBISH: Content = (-1, 0)
ZEROS: Content = (-2, 0)
SPOILT: Content = (-3, 0)


class Encoder(Struct, frozen=True, gc=False):
    """What a request's cross-attention tables hold: so many tokens of one encoder's run.

    number: of the run, below -9, so that it is no prefix.
    """

    number: int
    num_tokens: int


class Write(Struct, frozen=True, gc=False, kw_only=True):
    """Positions [start, end) of a request that a step writes; rubbish up to num_slots.

    loaded: up to there they come from elsewhere; the queries stand behind. encoder: what fills the
    cross-attention tables in this step. failed: the first position that a load did not bring.
    """

    request_id: str
    start: int
    loaded: int
    end: int
    num_slots: int
    encoder: Encoder | None = None
    failed: int | None = None


class Counted(Struct, frozen=True, gc=False):
    """What a state counts on: the contents of its computed and cached slots, undefined where it
    counts on nothing, its tables (row, group) and its owners.
    """

    contents: Contents
    tables: Tables
    owned: frozenset[int]
    cached: frozenset[int]


class Ghost:
    """The contents of all blocks, and what follows from the commands alone: tables and owners.

    loading: where the unfinished load of a request begins; what it brings is not there yet. counts:
    whether a property of this name is judged. loads: what each executed load brings, and where.
    """

    def __init__(
        self,
        config: Config,
        counts: Callable[[str], bool] = lambda _: True,
        prefixes: Prefixes | None = None,
    ) -> None:
        self._config = config
        self._counts = counts
        self._null = int(config.null_block)
        self._size = max(group.block_size for group in config.groups)
        self.prefixes = prefixes or Prefixes(config)
        self.loading: Mapping[str, int] = {}
        self.loads: dict[int, tuple[bytes, int]] = {}
        self._nothing: Slots = (None,) * self._size
        self.contents: Contents = {}
        self.tables: Tables = {}
        self.owned: set[int] = set()
        self.cached: set[int] = set()
        self._empty: set[int] = set()

    def counted(self, state: State, encoders: Mapping[str, Encoder]) -> Counted:
        """What a state counts on. Raises InvariantViolation for two contents in one slot."""
        filled: dict[Place, list[Content]] = {}
        for name, place, slot, content in self.expected(state, encoders):
            slots = filled.get(place)
            if slots is None:
                slots = filled[place] = [None] * self._size
            if slots[slot] not in (None, content) and self._counts(name):
                raise InvariantViolation(name, f"{place} slot {slot} is to hold two contents")
            slots[slot] = content
        contents = {place: tuple(slots) for place, slots in filled.items()}
        return Counted(contents, _tables(state), *_owners(state))

    def assume(self, counted: Counted) -> None:
        """Hold exactly what a state counts on, and its tables and owners."""
        self.contents = dict(counted.contents)
        self.tables = dict(counted.tables)
        self.owned, self.cached = set(counted.owned), set(counted.cached)
        self._empty = set()
        self.loads = {}

    def expected(self, state: State, encoders: Mapping[str, Encoder]) -> Iterator[Expected]:
        """What a state counts on: (property, place, slot, content) of all computed and cached
        slots, scheduled drafts included.
        """
        for request in state.requests.values():
            nodes = self.prefixes.nodes(request)
            for tier, tables in tiers(request):
                for index, table in enumerate(tables):
                    if not table:
                        continue
                    group = self._config.groups[index]
                    held = nodes[: self.loading.get(request.request_id, request.num_computed)]
                    if group.is_cross:
                        held = _encoded(encoders.get(request.request_id))
                    seen = skipped_tokens(group, request.num_accepted)
                    for position, node in enumerate(held):
                        block = entry(table, position // group.block_size)
                        if position >= seen or not self._is_null(tier, block):
                            slot = position % group.block_size
                            yield "KV-READ", (tier, block), slot, (node, index)
        for key, blocks in state.device.index.items():
            index = int.from_bytes(key[HASH_SIZE:], "big")
            for block in blocks:
                for slot, node in enumerate(self.prefixes.block(key)):
                    yield "CACHE-KV", ("device", block), slot, (node, index)

    def execute(self, commands: Iterable[Command]) -> None:
        """Run the commands of a batch in order."""
        for command in commands:
            self._mirror(command)
            copy(self.contents, command, self._size)
            target = command.writes()
            if target is not None:
                self._empty.discard(target[1] if target[0] == "device" else -1)

    def complete(self, operation: int, done: bool) -> None:
        """Bring what an unfinished load fills, or spoil it; a store changes no content."""
        if operation not in self.loads:
            return
        key, block = self.loads.pop(operation)
        group = int.from_bytes(key[HASH_SIZE:], "big")
        nodes = self.prefixes.block(key)
        place: Place = ("device", block)
        brought = tuple((node, group) if done else SPOILT for node in nodes)
        self.contents[place] = brought + self._slots(place)[len(brought) :]

    def forward(
        self,
        requests: Mapping[str, RequestState],
        writes: Sequence[Write],
        encoders: Mapping[str, Encoder],
    ) -> None:
        """Load and write what a batch schedules (requests: as taken), read as its queries do."""
        for write in writes:
            self._check_zeroed(requests[write.request_id])
        self._empty = set()
        for write in writes:
            self._write(requests[write.request_id], write)
        known = self.contents.values() if self._config.max_in_flight else ()
        if any(write.failed is not None for write in writes) or any(SPOILT in x for x in known):
            self._spread(requests, writes)
        for write in writes:
            self._read(requests[write.request_id], write, encoders)

    def check(
        self, state: State, encoders: Mapping[str, Encoder], counted: Counted | None = None
    ) -> None:
        """Raise InvariantViolation unless a state finds what it counts on (counted, where that is
        known), its batch executed.
        """
        if counted is None:
            counted = self.counted(state, encoders)
        if not _holds(self.contents, counted.contents):
            for name, place, slot, content in self.expected(state, encoders):
                self._find(name, place, slot, content)
        mirrored = {place: table for place, table in self.tables.items() if table}
        if mirrored != counted.tables and self._counts("TABLE-MIRROR"):
            detail = f"{mirrored} after the deltas, not {counted.tables}"
            raise InvariantViolation("TABLE-MIRROR", detail)
        owners = (set(counted.owned), set(counted.cached))
        if (self.owned, self.cached) != owners and self._counts("OWNER-MIRROR"):
            detail = f"{self.owned} owned, {self.cached} cached by the commands: {owners}"
            raise InvariantViolation("OWNER-MIRROR", detail)

    def _find(
        self, name: str, place: Place, slot: int, content: Content, also: Content = None
    ) -> None:
        held = self._slots(place)[slot]
        if held == SPOILT and also != SPOILT and self._counts("LOAD-FAILED"):
            name = "LOAD-FAILED"
        if (held is None or held not in (content, also)) and self._counts(name):
            detail = f"{place[0]} block {place[1]} slot {slot} holds {held}, not {content}"
            raise InvariantViolation(name, detail)

    def _check_zeroed(self, request: RequestState) -> None:
        for index, group, table in self._layers(request):
            for block in table if group.zero_new_blocks else ():
                if block in self._empty and self._counts("ZEROED"):
                    detail = f"block {block} of group {index} is read and was neither zeroed"
                    raise InvariantViolation("ZEROED", f"{detail} nor filled")

    def _write(self, request: RequestState, write: Write) -> None:
        nodes = self.prefixes.nodes(request)
        for index, group, table in self._layers(request):
            if group.is_cross:
                for position, number in enumerate(_encoded(write.encoder)):
                    self._put(group, table, position, (number, index))
                continue
            for position in range(write.start, write.num_slots):
                content = (nodes[position], index) if position < write.end else RUBBISH
                if write.failed is not None and write.failed <= position < write.loaded:
                    content = SPOILT
                self._put(group, table, position, content)

    def _put(self, group: Group, table: Sequence[int], position: int, content: Content) -> None:
        block = entry(table, position // group.block_size)
        if not self._is_null("device", block):
            place: Place = ("device", block)
            slots, slot = self._slots(place), position % group.block_size
            self.contents[place] = (*slots[:slot], content, *slots[slot + 1 :])

    def _spread(self, requests: Mapping[str, RequestState], writes: Sequence[Write]) -> None:
        """Spoil what is computed from spoilt slots, in the order of the calls."""
        for write in writes:
            request = requests[write.request_id]
            for query in range(write.loaded, write.end):
                seen = (
                    self._slots(("device", table[at // group.block_size]))[at % group.block_size]
                    for _, group, table in self._layers(request)
                    for at in range(
                        query if group.is_cross else skipped_tokens(group, query), query
                    )
                )
                if SPOILT in seen:
                    for _, group, table in self._layers(request):
                        if not group.is_cross:
                            self._put(group, table, query, SPOILT)

    def _read(self, request: RequestState, write: Write, encoders: Mapping[str, Encoder]) -> None:
        """What the queries of a step see, each group of its own, must be there."""
        if write.loaded == write.end:
            return
        nodes = self.prefixes.nodes(request)
        for index, group, table in self._layers(request):
            first, held = skipped_tokens(group, write.loaded), nodes[: write.end]
            if group.is_cross:
                first, held = 0, _encoded(encoders.get(write.request_id))
            for position in range(first, len(held)):
                place: Place = ("device", entry(table, position // group.block_size))
                slot = position % group.block_size
                self._find("KV-READ", place, slot, (held[position], index), SPOILT)

    def _layers(self, request: RequestState) -> Iterator[tuple[int, Group, tuple[int, ...]]]:
        for index, group in enumerate(self._config.groups):
            yield index, group, self.tables.get((request.row, index), ())

    def _is_null(self, tier: Tier, block: int) -> bool:
        return block < self._null if tier == "device" else block == NO_HOST_BLOCK

    def _slots(self, place: Place) -> Slots:
        return self.contents.get(place, self._nothing)

    def _mirror(self, command: Command) -> None:
        match command:
            case Allocate(block):
                self._empty.add(block)
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
            case Store(_, block, key):
                group = int.from_bytes(key[HASH_SIZE:], "big")
                for slot, node in enumerate(self.prefixes.block(key)):
                    self._find("CACHE-KV", ("device", block), slot, (node, group))
            case Load(operation, key, block):
                self.loads[operation] = (key, block)
            case SetTable(row, group, position, block):
                table = self.tables.get((row, group), ())
                self.tables[row, group] = (*table[:position], block, *table[position + 1 :])
            case CutTable(row, group, length):
                self.tables[row, group] = self.tables.get((row, group), ())[:length]

    def _forget(self, block: int) -> None:
        self.contents.pop(("device", block), None)


def tiers(request: RequestState) -> tuple[tuple[Tier, Sequence[Sequence[int]]], ...]:
    """A request's tables with their tiers."""
    return (("device", request.tables), ("host", request.host_tables))


def entry(table: Sequence[int], position: int) -> int:
    """A table's block at a position. Raises InvariantViolation (KV-READ) where there is none."""
    if position >= len(table):
        raise InvariantViolation("KV-READ", f"a table of {len(table)} blocks has no {position}")
    return table[position]


def _encoded(encoder: Encoder | None) -> tuple[int, ...]:
    return () if encoder is None else (encoder.number,) * encoder.num_tokens


def _tables(state: State) -> Tables:
    return {
        (request.row, group): tuple(table)
        for request in state.requests.values()
        for group, table in enumerate(request.tables)
        if table
    }


def _owners(state: State) -> tuple[frozenset[int], frozenset[int]]:
    pool = state.device
    counts = list(enumerate(pool.ref_counts))
    owned = frozenset(block for block, count in counts if count)
    return owned, frozenset(b for b, count in counts if not count and pool.keys[b] is not None)


def _holds(contents: Contents, wanted: Contents) -> bool:
    """Whether each slot that is counted on holds what it is to hold."""
    for place, slots in wanted.items():
        held = contents.get(place)
        if held == slots:
            continue
        if held is None:
            return False
        for content, there in zip(slots, held, strict=True):
            if content is not None and content != there:
                return False
    return True


def copy(contents: Contents, command: Command, block_size: int) -> None:
    """Do what a copying command does to contents; other commands do nothing."""
    source, target = command.reads(), command.writes()
    if isinstance(command, Load):
        contents.pop(("device", command.block), None)
    elif target is not None:
        contents[target] = read(contents, source, block_size)


def read(contents: Contents, source: Place | None, block_size: int) -> Slots:
    """What a copying command writes that reads this place; zeros for one that reads none."""
    if source is None:
        return (ZEROS,) * block_size
    return contents.get(source, (None,) * block_size)
