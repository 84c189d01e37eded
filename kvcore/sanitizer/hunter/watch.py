# SPDX-License-Identifier: Apache-2.0
"""The coverage of a hunter's run, counted from the observations alone, for any engine.

A `Watch` wraps the sanitizer: it passes each observation on and notes the goals that it reaches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

GOALS = (
    *("hit", "partial-chunk", "preempted-in-flight", "preempted-in-its-step", "resumed-by-a-hit"),
    *(
        "chunk-preempted-in-its-step",
        "evicted-keyed-block",
        "abort-in-flight",
        "copy",
        "offload",
        "restore",
        "fork",
    ),
    *("full-pool", "shared-block"),
)
"""Goals that a hunt should reach; an engine may be unable to reach some of them."""

RARE = frozenset({"chunk-preempted-in-its-step", "restore", "fork"})
"""Worlds that reach one of these are varied first."""


class Watch:
    """A sanitizer that also counts. reached: the goals of this run. num_steps: steps checked.
    token_lists: the tokens of each request, as reported.
    """

    def __init__(self, sanitizer: Any) -> None:
        self.sanitizer = sanitizer
        self.reached: set[str] = set()
        self.num_steps = 0
        self.broken: BaseException | None = None
        self.tables: dict[Any, list[tuple[int, int]]] = {}
        self.lengths: dict[Any, int] = {}
        self.token_lists: dict[Any, Sequence[int]] = {}
        self.ends: dict[Any, int] = {}  # of the last chunks
        self.fresh: set[Any] = set()  # begun or dropped, and not scheduled since
        self.dropped: set[Any] = set()
        self.cut_off: set[Any] = set()  # dropped in flight; preempted if it gets blocks again
        self.steps: dict[Any, set[Any]] = {}
        self.full_blocks: set[tuple[int, int]] = set()
        self.block_size = max(group.block_size for group in sanitizer.groups)

    def __getattr__(self, name: str) -> Any:
        """Pass uncounted calls on to the sanitizer."""
        value = getattr(self.sanitizer, name)
        return self._guarded(value) if callable(value) else value

    def begin(self, name: Any, tokens: Sequence[int], *args: Any, **named: Any) -> None:
        self.tables[name] = []
        self.lengths[name], self.token_lists[name] = len(tokens), tokens
        if named.get("parent") is not None:
            self.reached.add("fork")
        else:
            self.fresh.add(name)
        self._guarded(self.sanitizer.begin)(name, tokens, *args, **named)

    def extend(
        self, name: Any, group_id: int, blocks: Iterable[int], position: int | None = None
    ) -> None:
        blocks = list(blocks)
        self._guarded(self.sanitizer.extend)(name, group_id, blocks, position)
        held = {each for table in self.tables.values() for each in table}
        named = [(group_id, block) for block in blocks]
        if held.intersection(named):
            self.reached.add("shared-block")
        if named and name in self.cut_off:
            self.reached.add("preempted-in-flight")
        table = self.tables[name]
        mine = [place for place, (group, _) in enumerate(table) if group == group_id]
        replaced = [] if position is None else mine[position : position + len(named)]
        for place, each in zip(replaced, named, strict=False):
            table[place] = each
        table += named[len(replaced) :]

    def drop(self, name: Any) -> None:
        if any(name in names for names in self.steps.values()):
            self.cut_off.add(name)
        self.tables[name] = []
        self.fresh.add(name)
        self.dropped.add(name)
        self._guarded(self.sanitizer.drop)(name)

    def end(self, name: Any) -> None:
        self.tables.pop(name, None)
        self.cut_off.discard(name)
        self._guarded(self.sanitizer.end)(name)

    def __contains__(self, name: Any) -> bool:
        return name in self.tables

    def issue(self, step: Any, chunks: Sequence[Any]) -> None:
        self.num_steps += 1
        self.steps[step] = {chunk.name for chunk in chunks}
        for chunk in chunks:
            self._see(chunk.name, chunk.start, chunk.num_tokens)
        self._guarded(self.sanitizer.issue)(step, chunks)

    def complete(self, step: Any) -> Any:
        self.steps.pop(step, None)
        return self._guarded(self.sanitizer.complete)(step)

    def copy(self, pairs: Sequence[Any], *args: Any, **named: Any) -> None:
        if not pairs:
            return
        target, source = named.get("target", "device"), named.get("source", "device")
        self.reached.add(
            "copy" if source == target else "restore" if target == "device" else "offload"
        )
        self._guarded(self.sanitizer.copy)(pairs, *args, **named)

    def aborts(self, flying: bool) -> None:
        """Note that the hunter aborts a request. flying: while a batch is in flight."""
        if flying or self.steps:
            self.reached.add("abort-in-flight")

    def progress(self) -> object:
        """Return a value that changes if a request computes a token, or gets or loses a block."""
        return {name: list(table) for name, table in self.tables.items()}, dict(self.ends)

    def _see(self, name: Any, start: int, count: int) -> None:
        end = self.ends[name] = start + count
        if name in self.fresh:
            self.fresh.discard(name)
            if start:
                self.reached.add("resumed-by-a-hit" if name in self.dropped else "hit")
        if count > 1 and end < self.lengths.get(name, 0):
            self.reached.add("partial-chunk")
        table = self.tables.get(name, [])
        first = start // self.block_size
        for key in table[first : 1 + (end - 1) // self.block_size]:
            if start <= first * self.block_size and key in self.full_blocks:
                self.reached.add("evicted-keyed-block")
                self.full_blocks.discard(key)
        self.full_blocks.update(table[first : end // self.block_size])

    def _guarded(self, call: Any) -> Any:
        """Wrap a call, so that an error counts as one of the adapter, even if the engine catches
        it.
        """

        def guarded(*args: Any, **named: Any) -> Any:
            try:
                return call(*args, **named)
            except Exception as error:
                self.broken = self.broken or error
                raise

        return guarded
