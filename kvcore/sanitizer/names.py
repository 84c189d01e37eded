# SPDX-License-Identifier: Apache-2.0
"""The requests by name: live ones with their last events, and the names of ended ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import attrs

from kvcore.sanitizer.contents import NUM_EVENTS

NUM_ENDED = 65_536
"""How many ended requests keep their names."""
PARTS = ("LoRA adapter", "salt", "media", "embeddings")


@attrs.define
class Named:
    """A request as an adapter sees it. serial: its unique number. events: for each, the step, a
    text, and the values for the text.
    """

    serial: int
    name: str
    namespace: tuple[object, ...]
    tokens: Sequence[int]
    num_blocks: list[int]
    events: deque[tuple[Any, ...]] = attrs.field(factory=lambda: deque(maxlen=NUM_EVENTS))

    def said(self) -> list[str]:
        """Return the last events, the oldest first."""
        return [f"step {step}: {text.format(*fields)}" for step, text, *fields in self.events]


class Names:
    """Requests by name and by serial."""

    def __init__(self) -> None:
        self.live: dict[str, Named] = {}
        self.serials: dict[str, int] = {}
        self._by_serial: dict[int, Named] = {}
        self._ended: deque[int] = deque()
        self._num_begun = 0

    def begin(
        self, name: str, namespace: tuple[object, ...], tokens: Sequence[int], num_groups: int
    ) -> Named:
        """Name the next request."""
        serial, self._num_begun = self._num_begun, self._num_begun + 1
        named = Named(serial, name, namespace, tokens, [0] * num_groups)
        self.live[name] = self._by_serial[serial] = named
        self.serials[name] = serial
        return named

    def end(self, name: str) -> None:
        """End a request; its name is kept for some time."""
        named = self.live.pop(name)
        del self.serials[name]
        named.tokens = ()
        self._ended.append(named.serial)
        if len(self._ended) > NUM_ENDED:
            del self._by_serial[self._ended.popleft()]

    def of(self, serial: int | None) -> Named | None:
        """Return the request of a serial, None if it is forgotten."""
        return None if serial is None else self._by_serial.get(serial)


def differing(first: tuple[object, ...], second: tuple[object, ...]) -> list[str]:
    """Return the parts in which two namespaces differ."""
    length = max(len(first), len(second))
    pairs = zip(*((*each, *[None] * (length - len(each))) for each in (first, second)), strict=True)
    return [
        PARTS[at] if at < len(PARTS) else f"part {at}"
        for at, (mine, other) in enumerate(pairs)
        if (mine or None) != (other or None)
    ]
