# SPDX-License-Identifier: Apache-2.0
"""Managers of other engines in small worlds, each in the environment of its engine.

The counts of states and the verdicts are those that docs/found_managers.md tells.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benches.nano_vllm import checkout
from benches.peers import install
from kvcore.check.managers.nano_vllm import CHECKOUT

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "found_managers.md"
SLOT = "--blocks 2 --block-size 1 --tokens 2"
WINDOW = "--blocks 3 --block-size 1 --tokens 4 --groups window:2 --letters 1"
PLANNED = "--blocks 3 --letters 1 --moves-per-batch 2"


def explored(python: object, manager: str, words: str, **environment: str) -> dict[str, Any]:
    """Return the report of a command on the page."""
    named = f"kvcore.check.managers.{manager}:Manager"
    assert f"--manager {named} {words}" in PAGE.read_text(encoding="utf-8")
    run = subprocess.run(
        [str(python), "-m", "kvcore", "check", "--manager", named, *words.split(), "--json"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout, run.stderr
    report: dict[str, Any] = json.loads(run.stdout)
    assert run.returncode == int(report["violation"] is not None)
    if report["verdict"] == "complete":
        assert (report["states"], report["edges"]) == counts_of(f"--manager {named} {words}")
    return report


def counts_of(command: str) -> tuple[int, int]:
    """Return the states and edges that the page gives for a command, all in one row."""
    [row] = [
        line for line in PAGE.read_text(encoding="utf-8").splitlines() if f"`{command}`" in line
    ]
    states, edges = re.findall(r"\| ([\d,]+) (?=\|)", row)
    return int(states.replace(",", "")), int(edges.replace(",", ""))


def environment_of(family: str) -> Path:
    """Return the interpreter of an engine's environment."""
    if not install.is_installed(family):
        command = f"python -m benches.peers.install {family}"
        pytest.skip(f"{family} is not in {install.home()}: {command}")
    return install.python_of(family)


@pytest.mark.vllm
def test_vllms_manager_holds_where_a_step_has_one_move() -> None:
    report = explored(environment_of("vllm033"), "vllm", SLOT)
    assert report["verdict"] == "complete"
    assert report["calls"]["append: refused"] > 0


@pytest.mark.vllm
def test_vllms_manager_hits_what_a_preempted_request_never_wrote() -> None:
    words = "--blocks 4 --block-size 1 --letters 1 --moves-per-batch 2"
    found = explored(environment_of("vllm033"), "vllm", words)["violation"]
    assert found["property"] == "KV-READ"
    assert "holds ?" in found["detail"]
    named = [call.partition("(")[0].split()[0] for call in found["calls"]]
    assert named.index("free") == named.index("append") + 1


@pytest.mark.transformers
@pytest.mark.parametrize("words", [SLOT, WINDOW])
def test_transformers_allocators_hold(words: str) -> None:
    report = explored(environment_of("transformers"), "transformers", words)
    assert report["verdict"] == "complete"
    assert report["calls"]["fork: done"] > 0


def test_nano_vllms_manager_holds_where_its_scheduler_preempts_in_a_step() -> None:
    reason = checkout.missing()
    if reason is not None:
        pytest.skip(reason)
    where = {CHECKOUT: str(checkout.folder())}
    report = explored(sys.executable, "nano_vllm", PLANNED, **where)
    assert report["verdict"] == "complete"
