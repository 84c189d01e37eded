# SPDX-License-Identifier: Apache-2.0
"""Errors of making a far tier, and of its tickets."""

from __future__ import annotations

from kvcore_runtime.errors import KvcoreRuntimeError


class InvalidTier(KvcoreRuntimeError):
    """An option of a far tier, or of its exchange, outside its range."""

    message = "{name} is {value!r}, expected {expected}"


class UnknownTicket(KvcoreRuntimeError):
    """A ticket that was never given, or has ended."""

    message = "ticket {ticket} is not on its way"
