# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a message of events."""

from __future__ import annotations

from kvcore.types.errors import KvcoreError


class DamagedEvents(KvcoreError):
    """Bytes that are no batch of events, or a field that cannot be used."""

    message = "not a batch of events: {reason}"
