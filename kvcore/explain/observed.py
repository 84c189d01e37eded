# SPDX-License-Identifier: Apache-2.0
"""A manager that reports its calls to an observer."""

from __future__ import annotations

from typing import Any, TypeVar, cast

from kvcore.explain.observer import AdmissionObserver

M = TypeVar("M")


class _Observed:
    """A manager that reports its calls."""

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
    """Return the same manager, which then reports its calls to an observer. Pass lists or buffers
    as arguments, since both read them.
    """
    return cast(M, _Observed(manager, observer))
