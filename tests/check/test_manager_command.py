# SPDX-License-Identifier: Apache-2.0
"""`kvcore check --manager`: a manager of anyone's from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvcore import Config, Group
from kvcore.check import check
from kvcore.check.cli import command
from kvcore.check.extend.manager_model import ManagerModel
from kvcore.check.extend.manager_moves import batched, moves
from kvcore.types.errors import InvariantViolation
from tests.check.small_managers import (
    NOT_CALLABLE,
    Early,
    Lacks,
    Late,
    Locked,
    LockedLater,
    Nameless,
    OddRings,
    Other,
    Pickled,
    Raises,
    Ring,
    Small,
    WrittenBeforeRead,
)
from tests.check.test_own_files import run_test

WHERE = "tests.check.small_managers"
SLOT = ("--blocks", "2", "--block-size", "1", "--tokens", "2")
PLANNED = ("--blocks", "4", "--block-size", "1", "--letters", "1", "--moves-per-batch", "2")


def run(capsys: pytest.CaptureFixture[str], manager: str, *words: str) -> tuple[int, str, str]:
    """Return the exit code, the output, and the text on standard error."""
    code = command.main(["--manager", manager, *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def named(kind: type) -> str:
    """Return a small manager as the command names it."""
    return f"{WHERE}:{kind.__name__}"


def found(capsys: pytest.CaptureFixture[str], kind: type, *words: str) -> dict[str, Any]:
    """Return the finding on a small manager, as plain data; the exit code agrees."""
    code, out, _ = run(capsys, named(kind), *words, "--json")
    report: dict[str, Any] = json.loads(out)
    assert code == (0 if report["violation"] is None else 1)
    return report


def test_a_right_manager_is_explored_to_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    report = found(capsys, Small, *SLOT)
    assert report["verdict"] == "complete"
    assert report["calls"]["append: refused"] > 0
    code, out, _ = run(capsys, named(Small), *SLOT)
    assert code == 0
    assert out.startswith("complete: no property is broken in any state")


def test_a_manager_that_names_its_states_has_fewer(capsys: pytest.CaptureFixture[str]) -> None:
    assert found(capsys, Small, *SLOT)["states"] < found(capsys, Pickled, *SLOT)["states"]


def test_what_is_found_before_it_is_computed_needs_two_moves_in_a_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    one = found(capsys, Early, *PLANNED[:-2])
    two = found(capsys, Early, *PLANNED)
    assert one["verdict"] == "complete"
    assert two["violation"]["property"] == "KV-READ"
    assert "holds ?" in two["violation"]["detail"]
    assert found(capsys, Late, *PLANNED)["verdict"] == "complete"


def test_a_violation_is_written_as_a_test(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "test_early.py"
    code, out, _ = run(capsys, named(Early), *PLANNED, "--write-test", str(file))
    assert code == 1
    assert "KV-READ (wrong KV) does not hold" in out
    assert "partial(Early, CONFIG)" in file.read_text()
    with pytest.raises(InvariantViolation, match="KV-READ"):
        run_test(file.read_text())


def test_a_ring_is_read_before_it_is_written() -> None:
    window = Group(1, kind="sliding_window", window=2)
    config = Config(4, groups=(window,))

    def report(kind: Any) -> Any:
        return check(ManagerModel(lambda: kind(config), config, num_tokens=4, num_letters=1))

    assert report(Ring).verdict == "complete"
    broken = report(WrittenBeforeRead).violation
    assert broken.name == "KV-READ"


def test_other_names_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    names = ("--names", "allocate_slots=reserve,num_free_blocks=room")
    assert found(capsys, Other, *SLOT, *names) == {
        **found(capsys, Small, *SLOT),
        "seconds": pytest.approx(0, abs=100),
        "memory_bytes": pytest.approx(0, abs=1e9),
        "grown_bytes": pytest.approx(0, abs=1e9),
    }
    code, _, err = run(capsys, named(Other), *SLOT, "--names", "allocate_slots=reserve")
    assert (code, "num_free_blocks raises" in err) == (2, True)
    code, _, err = run(capsys, named(Other), *SLOT, "--names", "free=let_go")
    assert (code, "a Other has no method allocate_slots, let_go" in err) == (2, True)


@pytest.mark.parametrize(
    ("manager", "said"),
    [
        ("nowhere:Manager", "importing nowhere raises ModuleNotFoundError"),
        ("kvcore", "use MODULE:FACTORY"),
        (f"{WHERE}:Absent", f"{WHERE} has no Absent"),
        (
            f"{WHERE}:NOT_CALLABLE",
            f"NOT_CALLABLE is a {type(NOT_CALLABLE).__name__}, not a factory",
        ),
        (named(Raises), "making one raises OSError('no device')"),
        (named(Lacks), "a Lacks has no method free"),
        (named(Locked), "a new manager cannot be copied: give it __deepcopy__"),
        (named(Nameless), "a new manager cannot be named: see state_name"),
        (named(OddRings), "rings is (1,), and the groups are those below 1"),
        ("kvcore.check.managers.nano_vllm:Manager", "set KVCORE_NANO_VLLM to a checkout"),
    ],
)
def test_what_cannot_be_checked_is_named(
    manager: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVCORE_NANO_VLLM", raising=False)
    code, out, err = run(capsys, manager)
    assert (code, out) == (2, "")
    assert err.startswith(f"kvcore check: --manager {manager}: ")
    assert said in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--profile", "3x2x4"), "--manager does not take --profile"),
        (("--drafts", "1"), "--manager does not take --drafts"),
        (("--backend", "rust"), "omit --backend"),
        (("--mutants",), "omit --mutants"),
        (("--tokens", "2", "--prompt", "3"), "a prompt of 3 tokens is longer"),
        (("--names", "free"), "--names 'free': use OURS=THEIRS"),
        (("--blocks", "0"), "--blocks must be at least 1"),
    ],
)
def test_options_that_say_nothing_here_are_refused(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, named(Small), *words)
    assert (code, said in err) == (2, True), err


def test_names_without_a_manager_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--names", "free=let_go"]) == 2
    assert "--names are those of a --manager" in capsys.readouterr().err


def test_a_manager_that_cannot_be_copied_any_more_is_a_finding(
    capsys: pytest.CaptureFixture[str],
) -> None:
    broken = found(capsys, LockedLater, *SLOT)["violation"]
    assert broken["property"] == "MANAGER"
    assert "copying a LockedLater raises TypeError" in broken["detail"]


def test_a_step_is_planned_as_engines_plan_it() -> None:
    config = Config(4, groups=(Group(1),), null_block=False)
    model = ManagerModel(lambda: Late(config), config, num_requests=3, num_tokens=3, num_letters=1)
    node = model.start()
    for name in ("admit", "admit"):
        node = next(edge.node for edge in model.edges(node) if edge.name == name)
    calls = frozenset({"fork", "reset_prefix_cache"})

    def behind(*planned: str) -> list[str]:
        return [name for name, _ in batched(moves(model, node.view, calls), node.view, planned)]

    assert set(behind()) == {"admit", "decode", "preempt", "finish", "fork", "reset"}
    assert set(behind("finish")) == {"decode", "preempt", "finish", "admit"}
    assert set(behind("preempt")) == {"decode", "preempt"}
    assert set(behind("decode")) == {"decode", "preempt", "admit"}
    assert set(behind("admit")) == {"admit"}
    assert behind("fork") == behind("reset") == []
