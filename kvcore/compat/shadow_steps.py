# SPDX-License-Identifier: Apache-2.0
"""Decides which steps the shadows of engines' managers compare and time."""

from __future__ import annotations

import os

EVERY = "KVCORE_SHADOW_EVERY"


def stopped() -> int:
    """Return 0, in place of the clock, in steps that are not timed."""
    return 0


def read_every(not_served: type[Exception]) -> int:
    """Read how many steps there are per compared step; raises the adapter's error."""
    value = os.environ.get(EVERY, "1")
    if not value.isdecimal() or int(value) < 1:
        raise not_served(f"{EVERY}={value!r} is not a number of steps, 1 or more")
    return int(value)
