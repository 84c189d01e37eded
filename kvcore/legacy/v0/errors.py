# SPDX-License-Identifier: Apache-2.0
"""Errors for misuse of the V0 block manager; each also has the type that the original raises.

Messages name block, sequence and counts; the call has changed nothing. Source: S002-07, 12, 15,
21, 25, 32, 38, 43, 52, 56, 62, 64, 71, 73, X-14.
"""

from __future__ import annotations

from typing import Any

from kvcore.types.errors import KvcoreError


class WrongCall(KvcoreError, AssertionError):
    """A condition that the original asserts does not hold."""

    message = "{reason}"


class WrongValue(KvcoreError):
    """A value that the original refuses with a ValueError."""

    message = "{reason}"


class NotSupported(KvcoreError, NotImplementedError):
    """This kind of block or allocator does not support a call."""

    message = "{reason}"


class UnknownName(KvcoreError, KeyError):
    """No block or sequence has the given id."""

    message = "{name} {value!r} is not known: {known}"


class UnknownDevice(WrongValue, KeyError, AssertionError):
    """An allocator does not have the given device."""


class NoneWaits(WrongCall, IndexError):
    """A group without a waiting sequence cannot be admitted."""


class NoFreeBlocksError(KvcoreError):
    """Fewer blocks are free than a call needs."""

    message = "{who}: {needed} blocks are needed, {free} of {total} are free"


def require(holds: bool, reason: str, **fields: Any) -> None:
    """Raise WrongCall with a formatted reason unless a condition holds."""
    if not holds:
        raise WrongCall(reason=reason.format(**fields), **fields)


def for_sequence(error: NoFreeBlocksError, sequence: object) -> NoFreeBlocksError:
    """Return the error with the sequence as the one that needs the blocks."""
    who = f"sequence {sequence}"
    return NoFreeBlocksError(**{**error.fields, "who": who, "sequence": sequence})
