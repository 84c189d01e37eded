# SPDX-License-Identifier: Apache-2.0
"""Formats sizes for people: only the texts are rounded."""

from __future__ import annotations

from collections.abc import Iterable

GIB = 2**30


def format_gib(num_bytes: int) -> str:
    """Format bytes as GiB with two decimals."""
    return f"{num_bytes / GIB:.2f} GiB"


def format_memory(num_bytes: int) -> str:
    """Format bytes in the largest of GiB, MiB and KiB that they reach, with two decimals; else as
    bytes.
    """
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if num_bytes >= 2**power:
            return f"{num_bytes / 2**power:.2f} {unit}"
    return f"{num_bytes} byte" if num_bytes == 1 else f"{num_bytes} bytes"


def longest_hint(longest: int) -> str:
    """Return the part of a refusal about the longest request that fits; empty if there is none."""
    return f"; the longest request that fits has {longest} tokens" if longest else ""


def listed(names: Iterable[str]) -> str:
    """List names with commas, or say that there are none."""
    return ", ".join(names) or "none"
