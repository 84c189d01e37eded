# SPDX-License-Identifier: Apache-2.0
"""Turns the verdict of a slot checker into a finding, with names and the last events."""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.sanitizer.chunks import CacheGroup
from kvcore.sanitizer.contents import DELTA_MAX, GIVES, Event, Held
from kvcore.sanitizer.digests import NOTHING, UNKNOWN, ZEROS
from kvcore.sanitizer.findings import CERTAIN, Finding
from kvcore.sanitizer.lines import WrongAccess
from kvcore.sanitizer.names import Named, Names, differing
from kvcore.sanitizer.slot_checker import SlotChecker
from kvcore.sanitizer.tables import DEVICE
from kvcore.sanitizer.twin import TwinSlotChecker


class Describer:
    """Writes the texts of findings; changes nothing."""

    def __init__(
        self,
        checker: SlotChecker | TwinSlotChecker,
        names: Names,
        groups: Sequence[CacheGroup],
        show_tokens: bool,
        engine: str,
    ) -> None:
        self._checker, self._names, self._groups = checker, names, groups
        self._show_tokens, self._engine = show_tokens, engine

    def describe(self, wrong: WrongAccess) -> Finding:
        """Return the finding for a slot checker's verdict."""
        request = self._names.of(wrong.serial)
        event = wrong.event
        writer = self._names.of(event.serial) if event is not None else None
        name, differs = wrong.name, list[str]()
        if name == "wrong-kv" and writer is not None and request is not None:
            differs = differing(request.namespace, writer.namespace)
            name = "cross-tenant" if differs else name
        events = self._events(wrong)
        freed = [each for each in events if each.kind == "dropped"]
        return Finding(
            name=name,
            certain=name in CERTAIN,
            step=wrong.step,
            request=self._name_of(wrong.serial),
            group_id=wrong.group_id,
            start=wrong.start,
            position=wrong.position,
            block=wrong.block,
            slot=wrong.slot,
            held=None if wrong.held is None else self._content(wrong, wrong.held, writer),
            wanted=self._wanted(wrong, request) if wrong.held is not None else None,
            writer=None if event is None else self._writer(event),
            written=_step_of(wrong),
            freed=f"last given up by {self._name_of(freed[-1].serial)} in step {freed[-1].step}"
            if freed
            else None,
            differs=differs,
            block_events=[self._said(each) for each in events],
            request_events=request.said() if request is not None else (),
            engine=self._engine,
        )

    def empty_step(self, step: int, num_chunks: int) -> Finding:
        """Return the finding for a step whose chunks have no tokens."""
        detail = f"step {step} has {num_chunks} chunks and no tokens"
        return Finding(
            name="empty-step", certain=True, step=step, detail=detail, engine=self._engine
        )

    def _events(self, wrong: WrongAccess) -> Sequence[Event]:
        if wrong.block is None:
            return ()
        return self._checker.events((DEVICE, self._groups[wrong.group_id].pool, wrong.block))

    def _said(self, event: Event) -> str:
        match event.kind:
            case "given" | "written":
                said = f"{event.kind} {'to' if event.kind == 'given' else 'by'}"
                what = f"{said} {self._name_of(event.serial)} as its block {event.index}"
            case "dropped":
                what = f"given up by {self._name_of(event.serial)}"
            case "copied":
                what = f"copied from block {event.index}"
            case _:
                what = event.kind
        return f"step {event.step}: {what}"

    def _writer(self, event: Event) -> str | None:
        if event.kind in GIVES:
            return self._name_of(event.serial)
        return f"a copy of block {event.index}" if event.kind == "copied" else None

    def _name_of(self, serial: int | None) -> str:
        named = self._names.of(serial)
        return f"request number {serial}" if named is None else named.name

    def _content(self, wrong: WrongAccess, held: Held, writer: Named | None) -> str:
        if held.digest in (NOTHING, ZEROS):
            return "nothing" if held.digest == NOTHING else "zeros"
        if held.digest == UNKNOWN:
            return "a token that never became known"
        event = wrong.event
        if event is None or event.kind not in GIVES or wrong.slot is None:
            return f"digest {held.digest:012x}, epoch {held.oldest_epoch}"
        position = event.index * self._groups[wrong.group_id].block_size + wrong.slot
        return self._token(position, self._name_of(event.serial), writer, f"{held.oldest_epoch}")

    def _wanted(self, wrong: WrongAccess, request: Named | None) -> str:
        return self._token(wrong.position, self._name_of(wrong.serial), request, "its own")

    def _token(self, position: int, name: str, named: Named | None, epoch: str) -> str:
        text = f"token {position}"
        if self._show_tokens and named is not None and position < len(named.tokens):
            text += f" ({named.tokens[position]})"
        return f"{text} of {name}, epoch {epoch}"


def _step_of(wrong: WrongAccess) -> int | None:
    """Return the step in which the content was written, None if unknown."""
    if wrong.held is None or wrong.event is None or wrong.held.delta >= DELTA_MAX:
        return None
    return wrong.event.step + wrong.held.delta
