# SPDX-License-Identifier: Apache-2.0
"""The class of all misuse, whose kinds are in errors.py, and that of broken invariants.

Invariants: `fields` has the values themselves, for programs: an id, a number, the argument that was
refused. The message shows them as Python literals where they come from the caller, or as its class
puts them for people (`shown`).
"""

from __future__ import annotations

from functools import partial
from string import Formatter
from typing import Any, ClassVar

MOST_SHOWN = 200
"""Characters of a field that a message shows: a caller may have passed anything."""


class _Message(Formatter):
    """`str.format` that cuts long fields, and names the class of what has no text."""

    def convert_field(self, value: Any, conversion: Any) -> Any:
        if isinstance(value, bytes | bytearray | str):
            value = value[: MOST_SHOWN + 1]
        try:
            return super().convert_field(value, conversion)
        except Exception:  # an int of too many digits, a class of the caller's own
            return f"<{type(value).__name__}>"

    def format_field(self, value: Any, format_spec: str) -> str:
        try:
            text: str = super().format_field(value, format_spec)
        except Exception:
            text = f"<{type(value).__name__}>"
        return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


class KvcoreError(ValueError):
    """A call that was wrong; nothing has changed."""

    message: ClassVar[str] = "misuse"

    def __init__(self, **fields: object) -> None:
        self.fields = fields
        text = _Message().vformat(self.message, (), self.shown())
        super().__init__(f"{fields['tier']} {text}" if "tier" in fields else text)

    def shown(self) -> dict[str, object]:
        """The fields as the message shows them."""
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
    """Pools that do not fit in memory."""

    message = "{num_blocks} blocks need {needed_bytes} bytes, {available_bytes} are available"


class ConcurrentCall(KvcoreError):
    """One manager runs one call at a time."""

    message = "another call of this manager is running: make one call at a time"
