# SPDX-License-Identifier: Apache-2.0
"""The progress messages of `kvcore check`: a world grows too fast, or is known to end."""

from __future__ import annotations

import pytest

from kvcore.check.cli import command
from kvcore.check.profiles.registry import PROFILES
from kvcore.check.search.report import Report
from tests.check.test_command import run


def test_a_world_that_explodes_says_so() -> None:
    depths = [1, 100, 1000, 10_000, 100_000]
    report = Report(num_states=111_101, depths=depths)
    assert command.growth_of(report) == pytest.approx(10.0)
    assert "10.0 times the states" in command.warning(report, 10.0)
    early = Report(num_states=4_500, depths=[1, 80], num_waiting=4_400)
    assert command.growth_of(early) == pytest.approx(55.0)
    assert command.states_ahead(early, 55.0) > command.TOO_MANY


def test_a_named_world_is_known_to_end_and_says_why_it_does_not_show_all(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "TOO_MANY", 1)
    monkeypatch.setattr(command, "MANY_STATES", 1)
    monkeypatch.setattr(command, "EXPLODES", 0.1)
    name = "encoder"
    code, out, err = run(capsys, "--profile", name, "--backend", "python")
    assert code == command.FINE
    assert "bound the search" not in err
    ((missing, reason),) = PROFILES[name].not_shown.items()
    assert f"{missing} ({reason})" in " ".join(out.split())
