# SPDX-License-Identifier: Apache-2.0
"""The contents of all blocks as a runtime makes them, at a cost of what changes: the judge of runs.

Rules: nothing here is called by a transition. A slot holds the number of a prefix (`prefixes.py`);
a block also knows the group that wrote it. Contents change by the commands of a batch and by the
forward pass behind it. A block that is handed out, or loses owner and key, is empty at once, which
is stricter than memory is. Reads compare whole runs of slots. As `kvcore/oracle/contents.py`, for
pools of any size. Twin: none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import attrs

from kvcore.check.simulate.device import EMPTY, RUBBISH, SPOILT, ZERO, Pass
from kvcore.check.simulate.prefixes import Prefixes
from kvcore.types.commands import (
    KEY_FIELDS,
    Allocate,
    Batch,
    CopyOnWrite,
    CutTable,
    Evict,
    EvictAll,
    Free,
    Load,
    SetTable,
    Store,
    SwapIn,
    SwapOut,
    Touch,
    Zero,
)
from kvcore.types.config import Config
from kvcore.types.errors import InvariantViolation
from kvcore.types.groups import Group, skipped_tokens
from kvcore.types.keys import HASH_SIZE, KEY_SIZE

T = TypeVar("T")
Tables = dict[tuple[int, int], list[int]]
Seen = tuple[int, int]
"""The first position, and the one behind the last."""


@attrs.define
class Page:
    """What a block holds, and the group that wrote it."""

    slots: list[int]
    group: int = -1

    def copy(self) -> Page:
        return Page(list(self.slots), self.group)


class Memory:
    """Pages of both tiers, block tables, and the owners that the commands tell of."""

    def __init__(self, config: Config, prefixes: Prefixes) -> None:
        self._config = config
        self._prefixes = prefixes
        self._size = max(group.block_size for group in config.groups)
        self._null = int(config.null_block)
        self._pages = [self._empty() for _ in range(config.num_blocks)]
        self._host = [self._empty() for _ in range(config.num_host_blocks)]
        self._unfilled: set[int] = set()
        self._forgiving = False
        self._loads: dict[int, tuple[int, bytes]] = {}
        self.tables: Tables = {}
        self.owned: set[int] = set()
        self.cached: set[int] = set()

    def copy(self) -> Memory:
        """A memory of its own with the same contents."""
        other = Memory(self._config, self._prefixes)
        other._pages = [page.copy() for page in self._pages]
        other._host = [page.copy() for page in self._host]
        other._loads = dict(self._loads)
        other._unfilled = set(self._unfilled)
        other.tables = {place: list(table) for place, table in self.tables.items()}
        other.owned, other.cached = set(self.owned), set(self.cached)
        return other

    def apply(self, batch: Batch) -> None:
        """Carry out the commands of a batch in order."""
        columns = (batch.column(name).tolist() for name in ("kind", "a", "b", "c", "d"))
        for kind, a, b, c, d in zip(*columns, strict=True):
            if kind == SetTable.kind:
                table = self.tables.setdefault((a, b), [])
                table[c : c + 1] = [d]
                self._hold(d)
            elif kind == CutTable.kind:
                del self.tables.setdefault((a, b), [])[c:]
            elif kind in (Allocate.kind, Touch.kind, Free.kind, Evict.kind, EvictAll.kind):
                self._own(kind, a, b)
            else:
                self._move(kind, a, b, c, batch.keys)

    def _hold(self, block: int) -> None:
        """A block in a table has an owner, also where the batch that said so was cancelled."""
        if block >= self._null:
            self.owned.add(block)
            self.cached.discard(block)

    def _own(self, kind: int, block: int, cached: int) -> None:
        if kind == Allocate.kind:
            self.owned.add(block)
            self.cached.discard(block)
            self._unfilled.add(block)
            self._pages[block] = self._empty()
        elif kind == Touch.kind:
            self.owned.add(block)
            self.cached.discard(block)
        elif kind == Free.kind:
            self.owned.discard(block)
            if cached:
                self.cached.add(block)
            else:
                self._pages[block] = self._empty()
        elif kind == Evict.kind:
            self.cached.discard(block)
            if block not in self.owned:
                self._pages[block] = self._empty()
        else:
            for each in self.cached:
                self._pages[each] = self._empty()
            self.cached.clear()

    def _move(self, kind: int, a: int, b: int, c: int, keys: bytes) -> None:
        if kind == Zero.kind:
            self._pages[a] = Page([ZERO] * self._size)
            self._unfilled.discard(a)
        elif kind == CopyOnWrite.kind:
            self._pages[b] = self._pages[a].copy()
            self._unfilled.discard(b)
        elif kind == SwapOut.kind:
            self._host[b] = self._pages[a].copy()
        elif kind == SwapIn.kind:
            self._pages[b] = self._host[a].copy()
            self._unfilled.discard(b)
        else:
            place = KEY_SIZE * (a, b, c)[KEY_FIELDS[kind]]
            key = keys[place : place + KEY_SIZE]
            if kind == Store.kind:
                self.check_key(b, key)
            elif kind == Load.kind:
                self._pages[c] = self._empty()
                self._unfilled.discard(c)
                self._loads[a] = (c, key)

    def arrive(self, operation: int, nodes: Sequence[int] | None) -> None:
        """Fill the block of a load that was applied, or spoil it."""
        if operation not in self._loads:
            return
        block, key = self._loads.pop(operation)
        group = int.from_bytes(key[HASH_SIZE:], "big")
        size = self._config.groups[group].block_size
        held = [SPOILT] * size if nodes is None else list(nodes)
        self._pages[block] = Page(held + [EMPTY] * (self._size - size), group)

    def loads(self) -> dict[int, bytes]:
        """The key of each load that was applied and did not arrive."""
        return {operation: key for operation, (_, key) in self._loads.items()}

    def forward(self, passes: Sequence[Pass]) -> None:
        """Write what a batch schedules, then read as its queries do. Raises InvariantViolation
        (KV-READ, ZEROED).
        """
        for each in passes:
            self._check_zeroed(each)
        self._unfilled.clear()
        for each in passes:
            self._write(each)
        self._forgiving = any(each.failed is not None for each in passes)
        if self._forgiving:
            self._spread(passes)
        for each in passes:
            if each.loaded < each.end:
                seen = (each.loaded, each.end)
                self.check_request(each.request_id, each.row, each.nodes, seen, each.encoder)
        self._forgiving = False

    def check_request(
        self, name: str, row: int, nodes: Sequence[int], seen: Seen, encoder: Sequence[int]
    ) -> None:
        """Raise InvariantViolation (KV-READ) unless all that the queries from one on see, up to a
        position, is there.
        """
        tables = [self.tables.get((row, index), []) for index in self._indices()]
        self._check_tables(name, tables, nodes, seen, encoder, self._pages)

    def check_host(
        self,
        name: str,
        tables: Sequence[Sequence[int]],
        nodes: Sequence[int],
        seen: Seen,
        encoder: Sequence[int],
    ) -> None:
        """The same of a request that is swapped out, whose tables name host blocks."""
        self._check_tables(name, tables, nodes, seen, encoder, self._host)

    def _check_tables(
        self,
        name: str,
        tables: Sequence[Sequence[int]],
        nodes: Sequence[int],
        seen: Seen,
        encoder: Sequence[int],
        pages: list[Page],
    ) -> None:
        query, end = seen
        for index, group in enumerate(self._config.groups):
            if group.is_cross:
                place = (0, len(encoder) if end else 0)
                self.check_table(name, index, tables[index], encoder, place, pages)
            else:
                place = (skipped_tokens(group, query), end)
                self.check_table(name, index, tables[index], nodes, place, pages)

    def check_table(
        self,
        name: str,
        index: int,
        table: Sequence[int],
        nodes: Sequence[int],
        seen: Seen,
        pages: list[Page],
    ) -> None:
        """Raise InvariantViolation (KV-READ) unless a table's blocks hold these positions."""
        size, (first, end) = self._config.groups[index].block_size, seen
        for position in range(first // size, -(-end // size)):
            low, high = max(first, position * size), min(end, (position + 1) * size)
            if position >= len(table):
                detail = f"request {name!r} reads {end} tokens of {len(table)} blocks"
                raise InvariantViolation("KV-READ", detail)
            page = pages[table[position]]
            start = position * size
            held = page.slots[low - start : high - start]
            wanted = list(nodes[low:high])
            forgiven = self._forgiving and _only_spoilt(held, wanted)
            if (held != wanted and not forgiven) or page.group != index:
                pairs = enumerate(zip(held, wanted, strict=True))
                slot = next((at for at, pair in pairs if pair[0] != pair[1]), 0)
                detail = f"request {name!r}: block {table[position]} of group {index} holds "
                detail += f"{_say(held[slot])} of group {page.group} at token {low + slot}, not "
                raise InvariantViolation("KV-READ", f"{detail}{_say(wanted[slot])}")

    def check_key(self, block: int, key: bytes) -> None:
        """Raise InvariantViolation (CACHE-KV) unless a block holds what its key stands for."""
        group = int.from_bytes(key[HASH_SIZE:], "big")
        wanted, page = self._prefixes.block(key), self._pages[block]
        if page.slots[: len(wanted)] != wanted or page.group != group:
            detail = f"block {block} holds {[_say(each) for each in page.slots]}"
            raise InvariantViolation("CACHE-KV", f"{detail} of group {page.group}, not its key's")

    def _check_zeroed(self, each: Pass) -> None:
        for index, group in enumerate(self._config.groups):
            if not group.zero_new_blocks:
                continue
            table = self.tables.get((each.row, index), [])
            for block in table[each.start // group.block_size :]:
                if block in self._unfilled:
                    detail = f"block {block} of group {index} was neither zeroed nor filled"
                    raise InvariantViolation("ZEROED", detail)

    def _write(self, each: Pass) -> None:
        bad = each.loaded if each.failed is None else each.failed
        rest = each.num_slots - each.end
        content = [*each.nodes[each.start : bad], *[SPOILT] * (each.loaded - bad)]
        content += [*each.nodes[each.loaded : each.end], *[RUBBISH] * rest]
        for index, group in enumerate(self._config.groups):
            table = self.tables.get((each.row, index), [])
            if not group.is_cross:
                self._fill(table, index, group, each.start, content)
            elif not each.start:
                self._fill(table, index, group, 0, list(each.encoder))

    def _fill(
        self, table: list[int], index: int, group: Group, start: int, content: list[int]
    ) -> None:
        size, end = group.block_size, start + len(content)
        for position in range(start // size, -(-end // size)):
            if position >= len(table):
                raise InvariantViolation("KV-READ", f"a table of {len(table)} has no {position}")
            if table[position] < self._null:
                continue
            page = self._pages[table[position]]
            low, high = max(start, position * size), min(end, (position + 1) * size)
            if page.group != index:
                page.slots[:] = [ZERO if each == ZERO else EMPTY for each in page.slots]
                page.group = index
            at = position * size
            page.slots[low - at : high - at] = content[low - start : high - start]

    def _spread(self, passes: Sequence[Pass]) -> None:
        """Spoil what is computed from spoilt slots, in the order of the calls."""
        for each in passes:
            for query in range(each.loaded, each.end):
                if any(self._sees_spoilt(each.row, index, query) for index in self._indices()):
                    for index, group in enumerate(self._config.groups):
                        if not group.is_cross:
                            table = self.tables[each.row, index]
                            self._fill(table, index, group, query, [SPOILT])

    def _indices(self) -> range:
        return range(len(self._config.groups))

    def _sees_spoilt(self, row: int, index: int, query: int) -> bool:
        group, table = self._config.groups[index], self.tables.get((row, index), [])
        size = group.block_size
        return not group.is_cross and any(
            self._pages[table[at // size]].slots[at % size] == SPOILT
            for at in range(skipped_tokens(group, query), query)
        )

    def _empty(self) -> Page:
        return Page([EMPTY] * self._size)


def _only_spoilt(held: list[int], wanted: list[int]) -> bool:
    """Whether what differs came from a failed load, which its engine knows of."""
    return len(held) == len(wanted) and all(
        one in (other, SPOILT) for one, other in zip(held, wanted, strict=True)
    )


def _say(content: int) -> str:
    names = {SPOILT: "what a load spoilt", RUBBISH: "rubbish", ZERO: "zero", EMPTY: "nothing"}
    return names.get(content, f"prefix {content}")
