# SPDX-License-Identifier: Apache-2.0
"""A manager that reports its calls to an observer."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar, cast

M = TypeVar("M")


class Observer(Protocol):
    """What receives the calls of a manager."""

    def notes(self, name: str) -> bool:
        """Return whether the observer needs the calls of this name."""

    def note(self, name: str, outcome: Any, *args: Any, **options: Any) -> None:
        """Add a call that was made."""


class _Observed:
    """A manager that reports its calls."""

    def __init__(self, manager: Any, observer: Observer) -> None:
        self._manager, self._observer = manager, observer

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._manager, name)
        if not self._observer.notes(name):
            return method
        note = self._observer.note

        def call(*args: Any, **options: Any) -> Any:
            outcome = method(*args, **options)
            note(name, outcome, *args, **options)
            return outcome

        setattr(self, name, call)  # found directly from now on
        return call


def observed(manager: M, observer: Observer) -> M:
    """Return the same manager, which then reports its calls to an observer. Pass lists or buffers
    as arguments, since both read them.
    """
    return cast(M, _Observed(manager, observer))
