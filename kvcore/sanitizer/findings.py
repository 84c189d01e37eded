# SPDX-License-Identifier: Apache-2.0
"""Findings, as values with the text that a person needs to trace them in the engine."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

CERTAIN = {
    "wrong-kv": "reads another prefix",
    "unwritten-read": "reads a slot that was never written",
    "cross-tenant": "reads what another namespace wrote",
    "stale-weights": "reads what older weights wrote",
    "null-read": "reads the null block inside its window",
    "null-write": "writes to the null block",
    "no-slot": "has no block for a position",
    "empty-step": "is in a step without tokens",
}
"""The findings that the observations alone prove."""


@attrs.frozen(kw_only=True)
class Finding:
    """One finding. str() returns the whole text.

    name: one of CERTAIN, of the hunter's, or a suspicion: `alias`, `use-after-free`, `double-free`.
    position: the token that was read or written. start: the first query of the chunk. held, wanted:
    actual and expected content of the slot. writer, written: which request wrote it, in which step;
    None if unwritten or forgotten.

    block_events, request_events: the last events, oldest first. differs: for cross-tenant, the
    parts of the namespaces that differ.
    """

    name: str
    certain: bool
    step: int | None = None
    request: str | None = None
    group_id: int | None = None
    start: int | None = None
    position: int | None = None
    block: int | None = None
    slot: int | None = None
    held: str | None = None
    wanted: str | None = None
    writer: str | None = None
    written: int | None = None
    freed: str | None = None
    differs: Sequence[str] = ()
    block_events: Sequence[str] = ()
    request_events: Sequence[str] = ()
    engine: str = ""
    detail: str = ""

    @property
    def line(self) -> str:
        """Return the finding in one line."""
        parts = [f"{self.name}:"]
        if self.request is not None:
            where = f" (group {self.group_id}, queries from {self.start})"
            parts.append(f"{self.request}{'' if self.group_id is None else where}")
        parts.append(self._what())
        return " ".join(parts) + "".join(f"; {text}" for text in self._tail())

    def _what(self) -> str:
        if self.position is None:
            return self.detail
        verb = "writes" if self.name in ("null-write", "alias") else "reads"
        where = "behind its table"
        if self.block is not None:
            where = f"in block {self.block} slot {self.slot}"
        return f"{verb} token {self.position} {where}"

    def _tail(self) -> list[str]:
        tail = []
        if self.held is not None:
            tail.append(f"holds {self.held}, wanted {self.wanted}")
        if self.writer is not None:
            when = "" if self.written is None else f" in step {self.written}"
            tail.append(f"last written by {self.writer}{when}")
        if self.differs:
            tail.append(f"the namespaces differ in {', '.join(self.differs)}")
        if self.freed is not None:
            tail.append(self.freed)
        return tail

    def __str__(self) -> str:
        lines = [self.line]
        if self.block_events:
            lines += [f"block {self.block}:", *(f"  {each}" for each in self.block_events)]
        if self.request_events:
            lines += [f"request {self.request}:", *(f"  {each}" for each in self.request_events)]
        if self.engine:
            lines.append(f"engine: {self.engine}")
        if self.detail and self.position is not None:
            lines.append(self.detail)
        return "\n".join(lines)
