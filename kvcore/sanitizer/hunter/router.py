# SPDX-License-Identifier: Apache-2.0
"""Checks an engine's events as a router would, which knows the cache only by them.

A router sends a request where its prefix is. So after an engine reports that a hash was removed, no
tenant may hit it there: neither the one whose block it was, nor another.
"""

from __future__ import annotations

from typing import Any

Prefix = tuple[int, tuple[int, ...]]
"""A tenant, and the tokens up to the end of a block."""


class Router:
    """Tracks the prefix of each hash."""

    def __init__(self) -> None:
        self.stored: dict[int, set[Prefix]] = {}

    def wrong(self, engine: Any) -> str:
        """Return an error in the newest events, or an empty text."""
        removed: list[int] = []
        for kind, hashed, prefix in engine.events():
            if kind == "stored":
                self.stored.setdefault(hashed, set()).add(prefix)
                removed = [each for each in removed if each != hashed]
            else:
                removed.append(hashed)
        for hashed in removed:
            for tenant, tokens in sorted(self.stored.get(hashed, ())):
                length = engine.hits(tenant, tokens)
                if length >= len(tokens):
                    others = sorted({each for each, _ in self.stored[hashed]} - {tenant})
                    return (
                        f"wrong-event: hash {hashed:#x} was removed, and its {len(tokens)} tokens "
                        f"are still hit by tenant {tenant}; tenants {others} have the same hash"
                    )
        return ""
