# SPDX-License-Identifier: Apache-2.0
"""A device: what each slot holds after the batches and forward passes that it was given.

Source: docs/engines.md, "The four duties" and kvcore/types/commands.py. A batch is executed in one
of two ways: command by command, and what is handed out or given up is made undefined; or segment by
segment, and the copies of a segment in any order. Then the forward pass writes all its slots and
reads what attention sees of each request in each group.
"""

from __future__ import annotations

from itertools import groupby
from random import Random

import attrs

from kvcore import (
    Allocate,
    Batch,
    Command,
    Config,
    CopyOnWrite,
    CutTable,
    Free,
    Load,
    SetTable,
    SwapIn,
    SwapOut,
    Zero,
)
from tests.oracle.contents import RUBBISH, UNDEFINED, ZERO, Contents, Slot, digest, spoilt_by, truth
from tests.oracle.finding import demand
from tests.oracle.router import first_seen

Place = tuple[str, int]
COPIES = (Zero, CopyOnWrite, SwapOut, SwapIn, Load)


@attrs.define(kw_only=True)
class Span:
    """Tokens [first, end) of a request that a batch fills.

    chain: the prefixes up to end. loaded: they come from elsewhere, else they are computed. fails:
    the load that does not bring them, with the first token that is missing. encoder: identity and
    count of encoder tokens; new_encoder: this pass writes them. lookahead: slots behind that a
    drafter may fill.
    """

    name: str
    row: int
    first: int
    end: int
    chain: list[int]
    loaded: bool = False
    fails: tuple[int, int] | None = None
    encoder: tuple[int, int] = (0, 0)
    new_encoder: bool = False
    lookahead: int = 0


@attrs.define(kw_only=True)
class Step:
    """A taken batch with its forward pass; tables: those of all rows after it; reported: the failed
    loads that were reported before it was taken; zeroed: blocks that the engine zeroes."""

    batch: Batch
    spans: list[Span]
    tables: dict[int, tuple[list[int], ...]]
    reported: frozenset[int]
    zeroed: list[int]


class Device:
    """Slots by place, block tables by row, and pages of the external store by key."""

    def __init__(self, config: Config, contents: Contents) -> None:
        self.config = config
        self.contents = contents
        self.pages: dict[bytes, list[Slot]] = {}
        self._slots: dict[Place, list[Slot]] = {}
        self._tables: dict[int, list[list[int]]] = {}
        self._size = max(group.block_size for group in config.groups)

    def execute(self, step: Step, rng: Random) -> None:
        """Apply a batch, compare the tables, run its forward pass."""
        self.apply(step.batch, rng, len(step.batch))
        empty: tuple[list[int], ...] = tuple([] for _ in self.config.groups)
        for row in {*self._tables, *step.tables}:
            mine = tuple(self._tables.get(row, empty))
            theirs = step.tables.get(row, empty)
            demand(mine == theirs, f"row {row}: commands give {mine}, get_block_ids {theirs}")
        for block in step.zeroed:
            self._slots["device", block] = [ZERO] * self._size
        for span in step.spans:
            self._write(span)
        for span in step.spans:
            if not span.loaded:
                self._read(span, step.reported)

    def apply(self, batch: Batch, rng: Random, num_commands: int) -> None:
        """Execute only the first commands of a batch."""
        commands = list(batch)[:num_commands]
        if rng.random() < 0.5:
            for command in commands:
                self._undefine(command)
                self._copy(command)
                self._change_table(command)
            return
        numbers = batch.column("segment").tolist()
        for _, pairs in groupby(zip(numbers, commands, strict=False), key=lambda pair: pair[0]):
            segment = [command for _, command in pairs]
            for command in segment:
                self._change_table(command)
            copies = [command for command in segment if isinstance(command, COPIES)]
            rng.shuffle(copies)
            for command in copies:
                self._copy(command)

    def fill(self, span: Span, tables: tuple[list[int], ...]) -> None:
        """Write a span into the blocks of these tables; null blocks take nothing that is loaded."""
        for at, group in enumerate(self.config.groups):
            for position in range(span.first, span.end) if group.kind != "cross_attention" else ():
                index = position // group.block_size
                demand(index < len(tables[at]), f"{span.name} has no slot for token {position}")
                block = tables[at][index]
                if self._is_null(block):
                    demand(span.loaded, f"{span.name} computes token {position} in the null block")
                    continue
                slot: Slot = digest(span.chain[position], at)
                if span.fails is not None and position >= span.fails[1]:
                    slot = (truth(slot), frozenset({span.fails[0]}))
                self._at(("device", block))[position % group.block_size] = slot

    def store(self, key: bytes, block: int) -> None:
        """Copy a block, which holds what its key says, into the external store."""
        self.pages[key] = list(self._at(("device", block)))
        last = self.config.groups[int.from_bytes(key[32:], "big")].block_size - 1
        want = self.contents.of_key(key)
        right = want is None or self.pages[key][last] == want
        demand(right, f"block {block} is stored under a key of another content")

    def load(self, key: bytes, block: int, done: bool) -> None:
        """Fill a block from the external store, or with garbage."""
        page = self.pages[key] if done else [RUBBISH] * self._size
        self._slots["device", block] = list(page)

    def _at(self, place: Place) -> list[Slot]:
        return self._slots.setdefault(place, [UNDEFINED] * self._size)

    def _is_null(self, block: int) -> bool:
        return self.config.null_block and block == 0

    def _undefine(self, command: Command) -> None:
        if isinstance(command, Allocate) or (isinstance(command, Free) and not command.cached):
            self._slots["device", command.block] = [UNDEFINED] * self._size

    def _copy(self, command: Command) -> None:
        match command:
            case Zero(block=block):
                self._slots["device", block] = [ZERO] * self._size
            case CopyOnWrite(source=source, target=target):
                self._slots["device", target] = list(self._at(("device", source)))
            case SwapOut(block=block, host_block=host):
                self._slots["host", host] = list(self._at(("device", block)))
            case SwapIn(host_block=host, block=block):
                self._slots["device", block] = list(self._at(("host", host)))
            case Load(block=block):
                self._slots["device", block] = [RUBBISH] * self._size

    def _change_table(self, command: Command) -> None:
        if isinstance(command, SetTable | CutTable):
            empty: list[list[int]] = [[] for _ in self.config.groups]
            table = self._tables.setdefault(command.row, empty)[command.group_id]
            if isinstance(command, CutTable):
                del table[command.length :]
            elif command.position < len(table):
                table[command.position] = command.block
            else:
                demand(command.position == len(table), f"{command} leaves a gap in {table}")
                table.append(command.block)

    def _write(self, span: Span) -> None:
        tables = tuple(self._tables[span.row])
        self.fill(span, tables)
        for at, group in enumerate(self.config.groups):
            size = group.block_size
            if group.kind == "cross_attention":
                identity, count = span.encoder
                for position in range(count if span.new_encoder else 0):
                    slot = digest(self.contents.prefix(0, ("encoder", identity, position)), at)
                    block = tables[at][position // size]
                    self._at(("device", block))[position % size] = slot
                continue
            for position in range(span.end, span.end + span.lookahead):
                if position // size < len(tables[at]):
                    block = tables[at][position // size]
                    self._at(("device", block))[position % size] = RUBBISH

    def _read(self, span: Span, reported: frozenset[int]) -> None:
        """Read what attention sees; what is computed from spoilt slots is spoilt, too."""
        tables = tuple(self._tables[span.row])
        spoilt: frozenset[int] = frozenset()
        for at, group in enumerate(self.config.groups):
            if group.kind != "cross_attention":
                for position in range(first_seen(group, span.first), span.end):
                    want = digest(span.chain[position], at)
                    spoilt |= self._check(span, tables, at, position, want)
            if group.zero_new_blocks:
                for block in tables[at]:
                    held = self._at(("device", block))[: group.block_size]
                    stale = UNDEFINED in held and not self._is_null(block)
                    demand(not stale, f"{span.name}: block {block} is read and was not zeroed")
        self._read_encoder(span, tables)
        demand(not spoilt & reported, f"{span.name} reads what failed loads {spoilt} spoilt")
        if spoilt:
            for at, group in enumerate(self.config.groups):
                for position in range(span.first, span.end):
                    if group.kind != "cross_attention":
                        block = tables[at][position // group.block_size]
                        slots = self._at(("device", block))
                        old = slots[position % group.block_size]
                        slots[position % group.block_size] = (truth(old), spoilt | spoilt_by(old))

    def _check(
        self, span: Span, tables: tuple[list[int], ...], at: int, position: int, want: int
    ) -> frozenset[int]:
        """Compare one slot; returns the failed loads that it rests on."""
        size = self.config.groups[at].block_size
        demand(position // size < len(tables[at]), f"{span.name} has no slot {position} to read")
        block = tables[at][position // size]
        demand(not self._is_null(block), f"{span.name} reads token {position} in the null block")
        slot = self._at(("device", block))[position % size]
        wrong = f"{span.name}, group {at}, token {position}, block {block}: another content"
        demand(truth(slot) == want, f"{wrong} ({slot} instead of {want})")
        return spoilt_by(slot)

    def _read_encoder(self, span: Span, tables: tuple[list[int], ...]) -> None:
        """Read the encoder's tokens, all of them, of whichever batch."""
        identity, count = span.encoder
        for at, group in enumerate(self.config.groups):
            for position in range(count) if group.kind == "cross_attention" else ():
                want = digest(self.contents.prefix(0, ("encoder", identity, position)), at)
                self._check(span, tables, at, position, want)
