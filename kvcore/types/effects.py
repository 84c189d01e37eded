# SPDX-License-Identifier: Apache-2.0
"""The effects of one transition: commands for the runtime, events for mirrors of the index.

Twin: rust/src/types/effects.rs.
"""

from __future__ import annotations

import attrs

from kvcore.types.commands import Command
from kvcore.types.events import Event, removed


@attrs.define(kw_only=True)
class Effects:
    """Commands and events, in the order in which they were made; events only if they are
    enabled.
    """

    events_enabled: bool = False
    commands: list[Command] = attrs.field(factory=list)
    events: list[Event] = attrs.field(factory=list)

    def announce(self, event: Event) -> None:
        """Add an event, if events are enabled."""
        if self.events_enabled:
            self.events.append(event)

    def announce_removed(self, key: bytes) -> None:
        """Add the event for the removal of the last block of a key, if events are enabled."""
        if self.events_enabled:
            self.events.append(removed(key))
