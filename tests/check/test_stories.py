# SPDX-License-Identifier: Apache-2.0
"""A violation is shown so that a reader sees it, and written as files that fail for it only.

Seeded bugs give the violations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from io import StringIO
from typing import Any

import pytest

from kvcore.check.cli.command import main
from kvcore.check.extend.as_pytest import pytest_text, trace_text
from kvcore.check.facades.mutants import MUTANTS as FACADE_MUTANTS
from kvcore.check.mutants import MUTANTS, Mutant, Patcher
from kvcore.check.search import search
from kvcore.check.stories.story import WIDTH, render
from kvcore.check.world.model import Violation
from kvcore.trace import trace_file
from kvcore.types.errors import InvariantViolation
from tests.conftest import Backend
from tools import draw_counterexample

BY_NAME = {each.name: each for each in MUTANTS}
TOLD = [
    ("m_no_cow", "KV-READ"),
    ("m_touch_after_alloc", "NO-ALIAS"),
    ("m_hits_cost_no_capacity", "NOCRASH"),
    ("m_swap_in_no_copy", "KV-READ"),
    ("m_alloc_ref0", "REF"),
    ("m_table_misses_a_block", "TABLEN"),
    ("m_freed_under_a_batch", "CMD-INFLIGHT"),
    ("m_cancel_keeps_keys", "KV-READ"),
    ("m_cancel_keeps_counts", "COMPUTED-RULE"),
    ("m_quarantine_never_ends", "DRAIN"),
    ("m_extra_ignored", "KEY-SEP"),
    ("m_hashes_collide", "HASH-INJ"),
]


@contextmanager
def broken(name: str) -> Iterator[Mutant]:
    """Yield the core with a seeded bug."""
    with Patcher() as patcher:
        BY_NAME[name].patch(patcher)
        yield BY_NAME[name]


def violation_of(mutant: Mutant, broken_property: str) -> Violation:
    return found_with(mutant.name, broken_property)


@cache
def found_with(name: str, broken_property: str) -> Violation:
    """Return the checker's finding with the bug in place; it is searched once for all tests."""
    found = search.check(BY_NAME[name].world, properties=[broken_property]).violation
    assert found is not None
    return found


def run_test(text: str, backend: Backend) -> None:
    """Run the test that a file holds."""
    module: dict[str, Any] = {}
    exec(compile(text, "test_written.py", "exec"), module)
    next(run for name, run in module.items() if name.startswith("test_"))(backend)


@pytest.mark.parametrize(("mutant_name", "name"), TOLD)
def test_a_violation_is_told_and_written(mutant_name: str, name: str, backend: Backend) -> None:
    with broken(mutant_name) as mutant:
        violation = violation_of(mutant, name)
        story = render(violation, mutant.world, colour=False)
        test = pytest_text(violation, mutant.world)
        reported = trace_text(violation, mutant.world)
        with pytest.raises(InvariantViolation) as caught:
            run_test(test, "python")
        assert caught.value.name == name
    assert story.startswith(f"{name} (")
    assert max(map(len, story.splitlines())) <= WIDTH
    calls = [call for call in violation.calls if call.name != "execute"]
    assert f"does not hold after {len(calls)} call" in story
    run_test(test, backend)
    right = trace_file.rewrite(reported, source="told.trace", backend=backend)
    trace_file.replay(trace_file.parse_trace(right, source="told.trace"), backend)


def test_a_story_marks_what_a_call_changes() -> None:
    with broken("m_no_cow") as mutant:
        violation = violation_of(mutant, "KV-READ")
        plain = render(violation, mutant.world, colour=False)
        coloured = render(violation, mutant.world, colour=True)
    assert "\n   * 0      r0[0] > r0[0] r1[0]" in plain
    assert "\x1b[" not in plain
    assert "\x1b[33mr0[0] > r0[0] r1[0]" in coloured


WORLD = ("--blocks", "2", "--requests", "1", "--tokens", "2", "--backend", "python")
MANAGER = ("--blocks", "2", "--block-size", "1", "--tokens", "2")


@pytest.mark.parametrize(
    "words",
    [
        WORLD,
        ("--manager", "tests.check.small_managers:Ring", *MANAGER),
        ("--facade", "v0.3", "--profile", "window", "--limit", "3000"),
    ],
    ids=["world", "manager", "facade"],
)
def test_a_command_colours_a_terminal_unless_no_color_is_set(
    words: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def printed(no_color: str | None) -> str:
        terminal = StringIO()
        monkeypatch.setattr(terminal, "isatty", lambda: True)
        monkeypatch.setattr("sys.stdout", terminal)
        with monkeypatch.context() as context:
            context.delenv("NO_COLOR", raising=False)
            if no_color is not None:
                context.setenv("NO_COLOR", no_color)
            assert main(words) == 1
        return terminal.getvalue()

    ring = next(each for each in FACADE_MUTANTS if each.name == "m_ring_given_back_twice")
    with broken("m_alloc_ref0"), Patcher() as patcher:
        ring.patch(patcher)
        coloured, plain, unset = printed(None), printed("1"), printed("")
    assert "\x1b[1m" in coloured
    assert "does not hold after" in plain
    assert "\x1b" not in plain
    assert "\x1b[1m" in unset


def test_a_trace_holds_what_the_calls_gave() -> None:
    with broken("m_swap_in_no_copy") as mutant:
        reported = trace_text(violation_of(mutant, "KV-READ"), mutant.world)
        trace_file.replay(trace_file.parse_trace(reported, source="told.trace"), "python")
    assert reported.startswith("# KV-READ: what a query sees is read from slots")


def test_the_picture_of_a_counterexample_shows_what_the_checker_finds() -> None:
    _, story = draw_counterexample.play()
    picture = draw_counterexample.PICTURE.read_text(encoding="utf-8")
    stale = "stale picture: run python -m tools.draw_counterexample"
    assert picture == draw_counterexample.to_svg(story), stale
