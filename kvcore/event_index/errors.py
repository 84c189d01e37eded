# SPDX-License-Identifier: Apache-2.0
"""Errors of a message of cache events."""

from __future__ import annotations

from kvcore.types.errors import KvcoreError


class DamagedEvents(KvcoreError):
    """The bytes are not a batch of events, or a field of an event has a bad value."""

    message = "not a batch of events: {reason}"
