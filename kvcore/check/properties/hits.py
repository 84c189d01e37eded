# SPDX-License-Identifier: Apache-2.0
"""The hit that a call is made with. Twin: rust/src/check/properties/hits.rs."""

from __future__ import annotations

from kvcore.trace.calls import Call
from kvcore.types.values import Hit


def hit_of(call: Call) -> Hit | None:
    """Return the hit that a call is made with."""
    if call.name not in ("allocate_slots", "load"):
        return None
    found = call.args[2] if len(call.args) > 2 else call.options.get("hit")
    return found if isinstance(found, Hit) else None
