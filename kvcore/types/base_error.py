# SPDX-License-Identifier: Apache-2.0
"""The base class of all misuse (errors.py has the kinds), and the class of broken invariants.

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


class EpochWentBack(KvcoreError):
    """The number of the weights can only rise."""

    message = "epoch {epoch!r} cannot follow epoch {current}: it must be from {least} to {most}"


class InvalidRetention(KvcoreError):
    """A level, a range or a duration of a retention wish is invalid."""

    message = "retention {value!r}: {reason}"


class TimeWentBack(KvcoreError):
    """The time of a manager never falls."""

    message = "time {now_ms!r} ms cannot follow {current}: it must be from {current} to {most}"


class AlreadyPublished(KvcoreError):
    """A block has at most one key."""

    message = "block {block!r} already has a key"


class NoOwner(KvcoreError):
    """A block must have an owner to be copied or taken over."""

    message = "block {block!r} has no owner"


class StaleRequest(KvcoreError):
    """A request that began with older weights cannot load content, which is of the new ones."""

    message = "request {request!r} is of epoch {epoch}, the weights are of epoch {current}"


class EmptyPinName(KvcoreError):
    """The name of a pin is a non-empty str that has a UTF-8 form."""

    message = "the name of a pin must be a non-empty str, not {value!r}"


class UnknownPin(KvcoreError):
    """No pin of a prefix has this name."""

    message = "there is no pin {pin!r}"


class NotPinned(KvcoreError):
    """A block is unpinned more often than it was pinned."""

    message = "block {block!r} has {num_pins} pins, but the call removes {requested}"


class RepeatedPin(KvcoreError):
    """A pin of this name exists already."""

    message = "pin {pin!r} is there already: unpin it first"


class NothingToPin(KvcoreError):
    """None of the request's first tokens could be found later."""

    message = "of the first {requested} tokens of request {request!r} none can be pinned: {reason}"


class TooManyPinned(KvcoreError):
    """Pins of prefixes would hold more blocks than the config allows."""

    message = "with pin {pin!r} {num_blocks} blocks are pinned, max_pinned_blocks={most}"


class TooManyDrafts(KvcoreError):
    """A state cannot be cut back, so the one after a draft has its own place. Two tokens to come
    in one step are a draft and the token after it.
    """

    message = (
        "request {request!r} schedules {num_drafts} drafts or tokens to come: a step of state "
        "groups takes {most}"
    )


class NoStateGroup(KvcoreError):
    """Only recurrent states are kept by a call."""

    message = "request {request!r} marks a checkpoint, but there is no state group"


class UnalignedCheckpoint(KvcoreError):
    """A state is kept only where a hit can end, and for known tokens."""

    message = (
        "request {request!r} with {num_tokens} tokens marks the state after {requested}: it must "
        "be after a multiple of {multiple} known ones"
    )


class PolicyFailed(KvcoreError):
    """An eviction policy raised, or returned an invalid block or place."""

    message = "policy {policy}: {hook} {reason}"
