# SPDX-License-Identifier: Apache-2.0
"""A manager that reports its calls to an observer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

M = TypeVar("M")


class Observer(Protocol):
    """What receives the calls of a manager."""

    def notes(self, name: str) -> bool:
        """Return whether the observer needs the calls of this name."""

    def before(self, name: str) -> Callable[..., None] | None:
        """Return what must receive the arguments of calls of this name before they are made."""

    def note(self, name: str, outcome: Any, *args: Any, **options: Any) -> None:
        """Add a call that was made."""


class _Observed:
    """A manager that reports its calls."""

    def __init__(self, manager: Any, observer: Observer) -> None:
        self._manager, self._observer = manager, observer
        self.config = manager.config  # found directly

    def __getattr__(self, name: str) -> Any:
        there = getattr(self._manager, name)
        if not callable(there):
            return there
        made = self._noted(name, there) if self._observer.notes(name) else there
        setattr(self, name, made)  # found directly from now on
        return made

    def _noted(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method that also reports its calls."""
        note, before = self._observer.note, self._observer.before(name)

        def call(*args: Any, **options: Any) -> Any:
            if before is not None:
                before(*args, **options)
            outcome = method(*args, **options)
            note(name, outcome, *args, **options)
            return outcome

        return call


def observed(manager: M, observer: Observer) -> M:
    """Return the same manager, which then reports its calls to an observer. Pass lists or buffers
    as arguments, since both read them.
    """
    return cast(M, _Observed(manager, observer))
