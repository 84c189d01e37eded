# SPDX-License-Identifier: Apache-2.0
"""Seeded bugs of the sanitizer itself, each with the rule that it breaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest

from kvcore.sanitizer import digests, sanitizer, slot_checker
from kvcore.sanitizer.chunks import CacheGroup
from kvcore.sanitizer.lines import Line
from kvcore.sanitizer.sanitizer import Sanitizer
from kvcore.sanitizer.slot_checker import SlotChecker
from kvcore.sanitizer.tables import Tables
from tests.sanitizer import rules
from tests.sanitizer.rules import Make

Patch = pytest.MonkeyPatch


@attrs.frozen
class Mutant:
    """A seeded bug. seed: puts it in."""

    name: str
    rule: Callable[[Make], None]
    seed: Callable[[Patch], None]


def replaced(owner: Any, name: str, value: Any) -> Callable[[Patch], None]:
    """Return a seed that replaces an attribute."""
    return lambda patch: patch.setattr(owner, name, value)


def behind(owner: Any, name: str, change: Callable[..., None]) -> Callable[[Patch], None]:
    """Return a seed that changes something after each call of a method."""

    def seed(patch: Patch) -> None:
        original = getattr(owner, name)

        def both(self: Any, *args: Any) -> Any:
            value = original(self, *args)
            change(self, *args)
            return value

        patch.setattr(owner, name, both)

    return seed


def ignored(*_: Any) -> None:
    """Do nothing."""


def step_in_order(*phases: str) -> Callable[..., list[Any]]:
    """Return a slot checker's step that does its phases in another order."""

    def step(self: Any, number: int, serials: Any, starts: Any, counts: Any, *_: Any) -> list[Any]:
        self._found = []
        lines = []
        for serial, start, count in zip(serials, starts, counts, strict=True):
            lines.append(Line(self._requests[serial], start, start + count, (), None))
            self._set_out(lines[-1])
        for phase in phases:
            for line in lines:
                if phase == "write":
                    self._write(line, number)
                else:
                    self._read(line, number, rings=phase == "rings")
        for line in lines:
            self._record_verified(line)
        return list(self._found)

    return step


def begin_now(original: Any) -> Callable[..., None]:
    """Return a `begin` without a parent argument."""

    def begin(self: Any, serial: int, tokens: Any, base: int, _: Any, checked: bool) -> None:
        original(self, serial, tokens, base, None, checked)

    return begin


def keep_drafts(_: Any, line: Line) -> None:
    """Count drafts as verified."""
    line.request.verified = line.end


def forget_old_weights(self: Any, line: Line) -> None:
    """Write with the weights of now."""
    line.oldest_epoch = self._epoch


def run_at_once(_: Any, change: Callable[..., object], *args: Any) -> None:
    """Carry out a change before what was issued earlier."""
    change(*args)


def complete_at_once(self: Any, step: int) -> list[Any]:
    """Check a step when it completes, whatever was issued before it."""
    issued = self._waiting.pop(step)
    self._queue.remove(issued)
    before = len(self.findings)
    self._run(issued)
    return list(self.findings[before:])


def window_off(by: int) -> Callable[[CacheGroup, int], int]:
    """Return a window that is too long or too short."""

    def first(group: CacheGroup, start: int) -> int:
        return 0 if group.window is None else max(0, start - group.window + 1 + by)

    return first


PLAIN_MIX = digests.mix

MUTANTS = [
    Mutant(
        "no re-read after a disturbed block",
        rules.a_disturbed_block_is_read_again,
        replaced(Tables, "_disturb", ignored),
    ),
    Mutant(
        "claim not taken back on drop",
        rules.a_dropped_table_is_nobodys,
        replaced(Tables, "_unclaim", ignored),
    ),
    Mutant(
        "reads before writes for a full group",
        rules.a_steps_writes_come_before_its_reads,
        replaced(SlotChecker, "step", step_in_order("rings", "full", "write")),
    ),
    Mutant(
        "writes before reads for a ring",
        rules.a_ring_is_read_before_it_is_written,
        replaced(SlotChecker, "step", step_in_order("write", "rings", "full")),
    ),
    Mutant(
        "verified not cut by a rejected draft",
        rules.a_rejected_draft_is_written_anew,
        behind(SlotChecker, "_record_verified", keep_drafts),
    ),
    Mutant(
        "fork of the current epoch",
        rules.a_fork_is_of_its_parents_weights,
        replaced(Tables, "begin", begin_now(Tables.begin)),
    ),
    Mutant(
        "old weights not carried through the chain",
        rules.old_weights_taint_what_is_computed_from_them,
        behind(SlotChecker, "_set_out", forget_old_weights),
    ),
    Mutant(
        "copy before the writes of the step issued earlier",
        rules.a_copy_follows_the_writes_that_were_issued_before,
        replaced(Sanitizer, "_do", run_at_once),
    ),
    Mutant(
        "checked in the order of completion",
        rules.steps_take_effect_in_the_order_of_issue,
        replaced(Sanitizer, "complete", complete_at_once),
    ),
    Mutant(
        "unknown token equal to unknown token",
        rules.an_unknown_token_is_like_no_other,
        replaced(slot_checker, "_writer", lambda *_: None),
    ),
    Mutant(
        "window too long by one",
        rules.a_query_sees_its_window_and_no_more,
        replaced(CacheGroup, "first", window_off(-1)),
    ),
    Mutant(
        "window too short by one",
        rules.a_query_sees_its_window_and_no_more,
        replaced(CacheGroup, "first", window_off(1)),
    ),
    Mutant(
        "digest without position",
        rules.equal_tokens_elsewhere_are_another_prefix,
        replaced(slot_checker, "mix", lambda token, _: PLAIN_MIX(token, 0)),
    ),
    Mutant(
        "namespace left out",
        rules.another_namespace_is_another_tenant,
        replaced(sanitizer, "namespace_digest", lambda _: 0),
    ),
    Mutant(
        "a cancelled write kept",
        rules.a_cancelled_step_wrote_nothing,
        replaced(Sanitizer, "cancel", Sanitizer.complete),
    ),
]
