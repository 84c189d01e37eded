# SPDX-License-Identifier: Apache-2.0
"""Errors of making a far tier, of its tickets, and of new weights."""

from __future__ import annotations

from kvcore.types.errors import KvcoreError


class InvalidTier(KvcoreError):
    """An option of a far tier, or of its exchange, outside its range."""

    message = "{name} is {value!r}, expected {expected}"


class UnknownTicket(KvcoreError):
    """A ticket that was never given, or has ended."""

    message = "ticket {ticket} is not on its way"


class EpochHasWeights(KvcoreError):
    """Other weights were named within an epoch, whose blocks were computed with its own."""

    message = "epoch {epoch} has weights {weights!r}: call advance_epoch before {others!r} are set"
