# SPDX-License-Identifier: Apache-2.0
"""The class of all misuse, whose kinds are in errors.py, and that of broken invariants.

Invariants: `fields` has the values themselves, for programs: an id, a number, the argument that was
refused. The message shows them as Python literals where they come from the caller, or as its class
puts them for people (`shown`).
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar


class KvcoreError(ValueError):
    """A call that was wrong; nothing has changed."""

    message: ClassVar[str] = "misuse"
    __str__ = ValueError.__str__  # a kind that is a KeyError, too, would show its message quoted

    def __init__(self, **fields: object) -> None:
        self.fields = fields
        text = self.message.format(**self.shown())
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
