# SPDX-License-Identifier: Apache-2.0
"""Misuse of the V0 block manager, each error also of the kind that the original raises.

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
    """A call that this kind of block or allocator has not."""

    message = "{reason}"


class UnknownName(KvcoreError, KeyError):
    """An id of a block or a sequence that nobody has."""

    message = "{name} {value!r} is not known: {known}"


class UnknownDevice(WrongValue, KeyError, AssertionError):
    """No device of an allocator."""


class NoneWaits(WrongCall, IndexError):
    """A group without waiting sequence is to be admitted."""


class NoFreeBlocksError(KvcoreError):
    """Fewer blocks are free than a call needs."""

    message = "{who}: {needed} blocks are needed, {free} of {total} are free"


def require(holds: bool, reason: str, **fields: Any) -> None:
    """Raise WrongCall, with these fields in its text, unless something holds."""
    if not holds:
        raise WrongCall(reason=reason.format(**fields), **fields)


def for_sequence(error: NoFreeBlocksError, sequence: object) -> NoFreeBlocksError:
    """The same shortage with the name of the sequence."""
    who = f"sequence {sequence}"
    return NoFreeBlocksError(**{**error.fields, "who": who, "sequence": sequence})
