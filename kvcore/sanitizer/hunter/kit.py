# SPDX-License-Identifier: Apache-2.0
"""What the adapters of several engines have in common: default answers, hooks around an engine's
methods, and the reports of tables and batches.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import itertools
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, ClassVar

from kvcore.sanitizer.attached import check_version
from kvcore.sanitizer.chunks import CacheGroup, Chunk, SlotChunk
from kvcore.sanitizer.hunter.adapter import KNOWN, commit_of


class EngineAdapter:
    """The answers of an adapter whose engine has one group of full attention and refuses nothing.

    NAME: that of its distribution or checkout, a space, and the tested version or commit.
    MODULES: imported at the start, so that a broken installation is reported there.
    """

    NAME: ClassVar[str]
    AXES: ClassVar[dict[str, tuple[Any, ...]]]
    MOVES: ClassVar[frozenset[str]] = frozenset()
    MODULES: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def version(cls) -> str:
        """Return the installed version. Raises UnsupportedEngine if it was not tested."""
        name, _, tested = cls.NAME.rpartition(" ")
        if name in KNOWN and KNOWN[name].checkout:
            return commit_of(name, tested)
        for module in cls.MODULES:
            importlib.import_module(module)
        check_version(name, importlib.metadata.version(name), (tested,))
        return tested

    @staticmethod
    def refusal(error: BaseException) -> bool:
        """Return False: no error is a refusal."""
        del error
        return False

    @staticmethod
    def groups(engine: Any) -> list[CacheGroup]:
        """Return the only group."""
        return [CacheGroup(block_size=engine.world.block_size)]


def around(owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a hook: it stands in place of a method, and gets that method as first argument."""

    def put(hook: Callable[..., Any]) -> Callable[..., Any]:
        setattr(owner, name, partial(hook, getattr(owner, name)))
        return hook

    return put


class BatchReporter:
    """Reports to a sanitizer: tables as they are, batches in their order, and the end of a request
    not before that of its batches.

    tables: those reported of each request, one per group.
    """

    def __init__(self, sanitizer: Any) -> None:
        self.sanitizer = sanitizer
        self.tables: dict[str, list[list[int]]] = {}
        self._issued: deque[tuple[int, list[str]]] = deque()
        self._flying: Counter[str] = Counter()
        self._left: set[str] = set()
        self._numbers = itertools.count(1)

    def begin(self, name: str, tokens: Sequence[int], namespace: Collection[Any] = ()) -> None:
        """Report a request, unless it is known. tokens: the list that will grow."""
        if name not in self.tables:
            self.tables[name] = [[] for _ in self.sanitizer.groups]
            self.sanitizer.begin(name, tokens, namespace)

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
            del self.tables[name]
            self.sanitizer.end(name)

    def issue(self, chunks: Sequence[Chunk | SlotChunk]) -> None:
        """Report the next batch."""
        names = [chunk.name for chunk in chunks]
        self._issued.append((next(self._numbers), names))
        self._flying.update(names)
        self.sanitizer.issue(self._issued[-1][0], chunks)

    def complete(self) -> None:
        """Report that the oldest batch has run; its tokens are known."""
        step, names = self._issued.popleft()
        self.sanitizer.complete(step)
        self._flying.subtract(names)
        for name in names:
            if name in self._left and not self._flying[name]:
                self._left.discard(name)
                self.end(name)

    def ran(self, chunks: Sequence[Chunk]) -> None:
        """Report a batch that has run."""
        self.issue(chunks)
        self.complete()
