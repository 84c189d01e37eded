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
from kvcore.sanitizer.findings import Finding
from kvcore.sanitizer.hunter.kit import BatchReporter
from kvcore.sanitizer.sanitizer import Sanitizer
from kvcore.types.commands import Allocate, Command, CutTable, Load, SetTable, Zero
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
    """Reports a manager's batches and their forward passes to a sanitizer.

    sanitizer: default: one of its own, with these options.
    """

    def __init__(self, config: Config, sanitizer: Any = None, **options: Any) -> None:
        num_blocks = config.num_usable_blocks + config.null_block
        self.sanitizer = sanitizer or Sanitizer(
            groups_of(config), num_blocks, engine="kvcore", **options
        )
        self._reporter = BatchReporter(self.sanitizer)
        self._tables: Tables = {}
        self._names: dict[int, str] = {}
        self._loads: dict[int, int] = {}
        self._arrived: dict[TierBlock, tuple[int, ...]] = {}
        self.num_steps = 0

    def apply(self, batch: Iterable[Command]) -> None:
        """Report the commands of the next batch."""
        changed = {row for command in batch if (row := self._follow(command)) is not None}
        for row in changed & self._names.keys():
            self._show(row)

    def forward(self, passes: Sequence[Pass]) -> None:
        """Check the forward pass of the batch that was applied last. Raises InvariantViolation
        (KV-READ).
        """
        for finding in self.follow(passes):
            raise InvariantViolation("KV-READ", str(finding))

    def follow(self, passes: Sequence[Pass]) -> list[Finding]:
        """Return the findings of the forward pass of the batch that was applied last.

        The identities of a request's prefixes stand for its tokens. A failed load is treated as if
        it had succeeded, since the engine gives up everything that reads it.
        """
        chunks = []
        for each in passes:
            name = self._named(each)
            self._reporter.tokens[name][:] = each.nodes
            self._fill(each, name)
            if each.loaded > each.start:
                self.sanitizer.load(name, each.start, each.loaded - each.start)
            drafts = [-1] * (each.num_slots - each.end)
            if each.end > each.loaded:
                chunks.append(Chunk(name, each.loaded, each.num_slots - each.loaded, drafts))
        self.num_steps += 1
        return self._reporter.ran(chunks) if chunks else []

    def arrive(self, operation: int, nodes: Sequence[int] | None) -> None:
        """Note a completed load, if it succeeded; its first reader decides the prefix."""
        block = self._loads.pop(operation, None)
        if block is not None and nodes is not None:
            self._arrived["device", block] = tuple(nodes)

    def end(self, name: str) -> None:
        """Report that a request has left, if a pass had it; else the next one of its row does."""
        self._names = {row: held for row, held in self._names.items() if held != name}
        self._reporter.end(name)

    def _named(self, each: Pass) -> str:
        """Return the request of a row; a new one begins with the row's tables."""
        name, row = each.request_id, each.row
        if self._names.get(row) != name:
            self.end(name)
            self.end(self._names.get(row, name))
            self._names[row] = name
            self._reporter.begin(name, list(each.nodes))
            self._show(row)
        return name

    def _show(self, row: int) -> None:
        """Report the tables of a row."""
        groups = range(len(self.sanitizer.groups))
        tables = [self._tables.get((row, group_id), ()) for group_id in groups]
        self._reporter.show(self._names[row], *tables)

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

    def _follow(self, command: Command) -> int | None:
        """Report a command; return the row whose table it changes. A loaded content that has not
        been read yet moves along with a copy.
        """
        source, target = command.reads(), command.writes()
        if target is not None:
            self._arrived.pop(target, None)
        if source is not None and target is not None:
            pair = source[1], target[1]
            self.sanitizer.copy([pair], source=source[0], target=target[0])
            if source in self._arrived:
                self._arrived[target] = self._arrived[source]
        match command:
            case SetTable(row) | CutTable(row):
                set_entry(self._tables, command)
                return row
            case Zero(block):
                self.sanitizer.zero([block])
            case Load(operation, _, block):
                self._loads[operation] = block
                self.sanitizer.fail([block])
            case Allocate(block):
                self._arrived.pop(("device", block), None)
        return None
