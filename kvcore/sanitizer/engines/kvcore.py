# SPDX-License-Identifier: Apache-2.0
"""The adapter for kvcore's own manager under any engine: batch commands are the observations.

An observer is a device (`kvcore/oracle/device.py`): it gets each taken batch and the forward pass
after it. A request's tables are those of its row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any

from kvcore.oracle.content_oracle import Pass, Tables, set_entry
from kvcore.oracle.contents import TierBlock
from kvcore.sanitizer.chunks import CacheGroup, Chunk
from kvcore.sanitizer.errors import UnsupportedEngine
from kvcore.sanitizer.sanitizer import Sanitizer
from kvcore.types.commands import (
    Allocate,
    Command,
    CopyOnWrite,
    CutTable,
    Load,
    SetTable,
    SwapIn,
    SwapOut,
    Zero,
)
from kvcore.types.config import Config
from kvcore.types.errors import InvariantViolation


def groups_of(config: Config) -> list[CacheGroup]:
    """Return the facts about a configuration's groups. Raises UnsupportedEngine for
    cross-attention.
    """
    if any(group.is_cross for group in config.groups):
        tested = "groups whose tables hold a request's tokens"
        raise UnsupportedEngine(engine="kvcore", found="with cross-attention", tested=tested)
    return [
        CacheGroup(
            block_size=group.block_size,
            window=group.window,
            num_null=int(config.null_block),
            chunked=group.kind == "chunked_local",
        )
        for group in config.groups
    ]


class Observer:
    """Reports a manager's batches and their forward passes to a sanitizer."""

    def __init__(self, config: Config, **options: Any) -> None:
        num_blocks = config.num_usable_blocks + config.null_block
        self.sanitizer = Sanitizer(groups_of(config), num_blocks, engine="kvcore", **options)
        self._tables: Tables = {}
        self._names: dict[int, str] = {}
        self._tokens: dict[int, list[int]] = {}
        self._loads: dict[int, int] = {}
        self._arrived: dict[TierBlock, tuple[int, ...]] = {}
        self.num_steps = 0

    def apply(self, batch: Iterable[Command]) -> None:
        """Report the commands of the next batch."""
        for command in batch:
            self._follow(command)

    def forward(self, passes: Sequence[Pass]) -> None:
        """Check the forward pass of the batch that was applied last.

        The identities of a request's prefixes stand for its tokens. A failed load is treated as if
        it had succeeded, since the engine gives up everything that reads it. Raises
        InvariantViolation (KV-READ).
        """
        chunks = []
        for each in passes:
            name = self._named(each)
            self._tokens[each.row][:] = each.nodes
            self._fill(each, name)
            if each.loaded > each.start:
                self.sanitizer.load(name, each.start, each.loaded - each.start)
            drafts = [-1] * (each.num_slots - each.end)
            if each.end > each.loaded:
                chunks.append(Chunk(name, each.loaded, each.num_slots - each.loaded, drafts))
        step, self.num_steps = self.num_steps, self.num_steps + 1
        self.sanitizer.issue(step, chunks)
        for finding in self.sanitizer.complete(step):
            raise InvariantViolation("KV-READ", str(finding))

    def arrive(self, operation: int, nodes: Sequence[int] | None) -> None:
        """Note a completed load, if it succeeded; its first reader decides the prefix."""
        if operation in self._loads and nodes is not None:
            self._arrived["device", self._loads[operation]] = tuple(nodes)
        self._loads.pop(operation, None)

    def _named(self, each: Pass) -> str:
        """Return the request of a row; a new one begins with the row's tables."""
        name, row = each.request_id, each.row
        if self._names.get(row) != name:
            for other in [other for other, held in self._names.items() if held == name]:
                self.sanitizer.end(self._names.pop(other))
            if row in self._names:
                self.sanitizer.end(self._names[row])
            self._names[row], self._tokens[row] = name, []
            self.sanitizer.begin(name, self._tokens[row])
            for (at, group_id), table in self._tables.items():
                if at == row:
                    self.sanitizer.extend(name, group_id, table)
        return name

    def _fill(self, each: Pass, name: str) -> None:
        """Report the loads into blocks of a row whose prefix they hold."""
        for group_id, group in enumerate(self.sanitizer.groups if self._arrived else ()):
            for at, block in enumerate(self._tables.get((each.row, group_id), ())):
                first = at * group.block_size
                held = self._arrived.get(("device", block), ())
                pairs = zip(held, each.nodes[first:], strict=False)
                count = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
                if count:
                    del self._arrived["device", block]
                    self.sanitizer.load(name, first, count, group_id)

    def _follow(self, command: Command) -> None:
        sanitizer = self.sanitizer
        self._carry(command.reads(), command.writes())
        match command:
            case SetTable(row, group_id, position, block):
                set_entry(self._tables, command)
                if row in self._names:
                    sanitizer.extend(self._names[row], group_id, [block], position)
            case CutTable(row, group_id, length):
                before = len(self._tables.get((row, group_id), ()))
                set_entry(self._tables, command)
                if row in self._names and length < before:
                    sanitizer.cut(self._names[row], group_id, length)
            case CopyOnWrite(source, target):
                sanitizer.copy([(source, target)])
            case SwapOut(block, host_block):
                sanitizer.copy([(block, host_block)], target="host")
            case SwapIn(host_block, block):
                sanitizer.copy([(host_block, block)], source="host")
            case Zero(block):
                sanitizer.zero([block])
            case Load(operation, _, block):
                self._loads[operation] = block
                sanitizer.fail([block])
            case Allocate(block):
                self._arrived.pop(("device", block), None)

    def _carry(self, source: TierBlock | None, target: TierBlock | None) -> None:
        """Let a loaded content that has not been read yet move along with a copy."""
        if target is not None:
            held = None if source is None else self._arrived.get(source)
            self._arrived.pop(target, None)
            if held is not None:
                self._arrived[target] = held
