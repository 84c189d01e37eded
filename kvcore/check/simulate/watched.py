# SPDX-License-Identifier: Apache-2.0
"""Properties of single calls, checked at each call of a run whose pool is small.

They follow the free queue, the levels and the pins by the commands of a call, as an exploration
does. Only the manager in Python has its states at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcore.check.properties.claims import pins
from kvcore.check.properties.epochs import epoch_first
from kvcore.check.properties.retention import wishes
from kvcore.check.properties.transitions import lru
from kvcore.manager import KVCacheManager
from kvcore.state.state import State
from kvcore.trace.calls import Call, Misuse
from kvcore.types.config import Config
from kvcore.types.errors import InvariantViolation
from kvcore.types.values import Outcome

MOST_WATCHED = 100
"""Blocks of the largest pool."""
PROPERTIES = {"LRU": lru, "WISHES": wishes, "PINS": pins, "EPOCH-FIRST": epoch_first}


class Watch:
    """The state of a run's manager before a call, if its calls are watched."""

    def __init__(self, config: Config, managers: Sequence[tuple[str, KVCacheManager]]) -> None:
        spoken = [manager for _, manager in managers if manager.backend == "python"]
        self._manager = spoken[0] if spoken and config.num_blocks <= MOST_WATCHED else None

    def state(self) -> State | None:
        """Return the state now; None if calls are not watched."""
        return None if self._manager is None else self._manager.state()

    def check(self, before: State | None, call: Call, value: Any) -> None:
        """Raise InvariantViolation for an outcome that a call must not have."""
        after = self.state()
        if before is None or after is None or before is after or isinstance(value, Misuse):
            return
        same = after.batch.number == before.batch.number
        commands = tuple(after.batch.commands)[len(before.batch.commands) if same else 0 :]
        outcome = Outcome(after, commands, value)
        for name, breaks in PROPERTIES.items():
            for detail in breaks(before, call, outcome):
                raise InvariantViolation(name, detail)
