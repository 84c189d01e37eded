# SPDX-License-Identifier: Apache-2.0
"""The parts of an engine that the client of a far tier uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvcore.manager import KVCacheManager


class Clock(Protocol):
    """The functions of the module `time` that are used here."""

    def monotonic(self) -> float:
        """Return seconds since any fixed moment."""

    def sleep(self, seconds: float, /) -> None:
        """Wait this many seconds."""


class FarSequence(Protocol):
    """A request as its engine knows it. age: orders sequences. is_gone: whether it has ended."""

    is_gone: bool

    @property
    def sequence_id(self) -> str: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def age(self) -> tuple[int, int]: ...


class Ending(Protocol):
    """A store or load whose batch has run. done: whether it succeeded."""

    @property
    def operation(self) -> int: ...
    @property
    def done(self) -> bool: ...


class Running(Protocol):
    """Whoever knows which sequences run."""

    @property
    def running(self) -> Sequence[FarSequence]: ...


class FarEngine(Protocol):
    """An engine with a far tier. open_number: of the batch to be taken next."""

    @property
    def manager(self) -> KVCacheManager: ...
    @property
    def scheduler(self) -> Running: ...
    @property
    def open_number(self) -> int: ...
    @property
    def finished(self) -> Sequence[Ending]: ...
    def take_finished(self) -> Sequence[Ending]:
        """Return the ended stores and loads of executed batches."""


Tell = Callable[[str, float, dict[str, int | bool | str]], None]
"""Called with the name of a span, its seconds and its attributes, when it ends."""
Warn = Callable[[str], None]
"""Called with a line for the log."""
