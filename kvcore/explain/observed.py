# SPDX-License-Identifier: Apache-2.0
"""A manager that tells an observer of its calls."""

from __future__ import annotations

from typing import Any, TypeVar, cast

from kvcore.explain.observer import AdmissionObserver

M = TypeVar("M")


class _Observed:
    """A manager whose calls are noted."""

    def __init__(self, manager: Any, observer: AdmissionObserver) -> None:
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


def observed(manager: M, observer: AdmissionObserver) -> M:
    """The same manager, whose calls an observer is told of. Give it lists or buffers."""
    return cast(M, _Observed(manager, observer))
