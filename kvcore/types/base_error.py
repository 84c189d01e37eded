# SPDX-License-Identifier: Apache-2.0
"""The base class of all misuse (errors.py has the kinds), and what no call can help: a broken
invariant, a missing twin, too little memory, a second thread.

Invariants: `fields` holds the values themselves, for programs: an id, a number, the refused
argument. The message shows values of the caller as Python literals, or in the form that the class
chooses for people (`shown`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

MOST_SHOWN = 200
"""Maximum length of a field in a message, since a caller may have passed anything."""


class _Short:
    """A field in a message: shortened if it is long; the name of its class if `repr` fails."""

    def __init__(self, value: Any) -> None:
        long = isinstance(value, bytes | bytearray | str)
        self._value, self._class = value[: MOST_SHOWN + 1] if long else value, type(value).__name__

    def __repr__(self) -> str:
        return self._shown(repr)

    def __format__(self, spec: str) -> str:
        return self._shown(lambda value: format(value, spec))

    def _shown(self, show: Callable[[Any], str]) -> str:
        try:
            text = show(self._value)
        except Exception:  # an int with too many digits, or a class of the caller's own
            return f"<{self._class}>"
        return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


class KvcoreError(ValueError):
    """A call was wrong, and has changed nothing."""

    message: ClassVar[str] = "misuse"
    __str__ = (
        ValueError.__str__
    )  # a subclass that is also a KeyError would show its message in quotes

    def __init__(self, **fields: object) -> None:
        self.fields = fields
        shown = {name: _Short(value) for name, value in self.shown().items()}
        text = self.message.format(**shown)
        super().__init__(f"{fields['tier']} {text}" if "tier" in fields else text)

    def shown(self) -> dict[str, object]:
        """Return the fields in the form that the message shows."""
        return self.fields

    def __reduce__(self) -> tuple[Any, ...]:
        return (partial(type(self), **self.fields), ())


class BackendMissing(KvcoreError):
    """The compiled twin is not installed, or the backend has no such name."""

    message = "backend {backend!r} is not available: {reason}"


class InvariantViolation(AssertionError):
    """A named property of every reachable state does not hold."""

    def __init__(self, name: str, detail: str) -> None:
        self.name, self.detail = name, detail
        super().__init__(f"{name}: {detail}")


class PoolTooLarge(KvcoreError):
    """The pools do not fit in memory."""

    message = "{num_blocks} blocks need {needed_bytes} bytes, {available_bytes} are available"


class ConcurrentCall(KvcoreError):
    """A manager runs one call at a time."""

    message = "another call of this manager is running: make one call at a time"
