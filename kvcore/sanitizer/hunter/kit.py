# SPDX-License-Identifier: Apache-2.0
"""What adapters attach with: hooks around an engine's methods, and the reports of tables and
batches.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from kvcore.sanitizer.chunks import Chunk, SlotChunk
from kvcore.sanitizer.findings import Finding


def around(owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a hook: it stands in place of a method, and gets that method as first argument."""

    def put(hook: Callable[..., Any]) -> Callable[..., Any]:
        setattr(owner, name, partial(hook, getattr(owner, name)))
        return hook

    return put


class BatchReporter:
    """Reports to a sanitizer: tables as they are, batches in their order, and the end of a request
    not before that of its batches.

    tables: those reported of each request, one per group. tokens: the list of each.
    """

    def __init__(self, sanitizer: Any) -> None:
        self.sanitizer = sanitizer
        self.tables: dict[str, list[list[int]]] = {}
        self.tokens: dict[str, Any] = {}
        self._issued: deque[tuple[int, list[str]]] = deque()
        self._flying: Counter[str] = Counter()
        self._left: set[str] = set()
        self._numbers = itertools.count(1)

    def begin(self, name: str, tokens: Sequence[int], namespace: Collection[Any] = ()) -> None:
        """Report a request, unless it is known. tokens: the list that will grow, by `learn` if not
        by itself.
        """
        if name not in self.tables:
            self.tables[name], self.tokens[name] = [[] for _ in self.sanitizer.groups], tokens
            self.sanitizer.begin(name, tokens, namespace)

    def learn(self, name: str, tokens: Sequence[int]) -> None:
        """Add those of a request's tokens that are new."""
        known = self.tokens[name]
        known += tokens[len(known) :]

    def show(self, name: str, *tables: Sequence[int]) -> None:
        """Report what is new in the tables of a request, or all of them if blocks have changed."""
        known = self.tables[name]
        if any(list(new[: len(old)]) != old for old, new in zip(known, tables, strict=True)):
            self.drop(name)
            known = self.tables[name]
        for group_id, (old, new) in enumerate(zip(known, tables, strict=True)):
            if len(new) > len(old):
                self.sanitizer.extend(name, group_id, new[len(old) :])
        self.tables[name] = list(map(list, tables))

    def drop(self, name: str) -> None:
        """Report that a request has given up its tables, if it had any."""
        if any(self.tables.get(name, ())):
            self.tables[name] = [[] for _ in self.sanitizer.groups]
            self.sanitizer.drop(name)

    def end(self, name: str) -> None:
        """Report that a request has left, if it is known."""
        if name not in self.tables:
            return
        if self._flying[name]:
            self.drop(name)
            self._left.add(name)
        else:
            del self.tables[name], self.tokens[name]
            self.sanitizer.end(name)

    def issue(self, chunks: Sequence[Chunk | SlotChunk]) -> None:
        """Report the next batch."""
        names = [chunk.name for chunk in chunks]
        self._issued.append((next(self._numbers), names))
        self._flying.update(names)
        self.sanitizer.issue(self._issued[-1][0], chunks)

    def complete(self) -> list[Finding]:
        """Report that the oldest batch has run, so its tokens are known; return the findings."""
        step, names = self._issued.popleft()
        found: list[Finding] = self.sanitizer.complete(step)
        self._flying.subtract(names)
        for name in names:
            if name in self._left and not self._flying[name]:
                self._left.discard(name)
                self.end(name)
        return found

    def ran(self, chunks: Sequence[Chunk]) -> list[Finding]:
        """Report a batch that has run; return the findings."""
        self.issue(chunks)
        return self.complete()
