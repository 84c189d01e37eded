# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler does the same steps over kvcore as over its own manager.

What `make engines-vllm` runs, shorter; and what it says of steps that differ.
"""

from __future__ import annotations

import os
import subprocess
from typing import Any

import pytest

from benches.peers import install
from benches.vllm.__main__ import FAMILY, PATHS, ROOT
from benches.vllm.report import Step, judge, summary


@pytest.mark.vllm
def test_every_step_over_kvcore_is_the_one_over_vllms_manager() -> None:
    if not install.is_installed(FAMILY):
        pytest.skip(f"vLLM 0.33.0 is not in {install.home()}: make engines-vllm installs it")
    options = ["--modes", "async,async-drafts", "--seeds", "4", "--steps", "60"]
    done = subprocess.run(
        [str(install.python_of(FAMILY)), "-m", "benches.vllm.compare", *options],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, PATHS))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("4 of 4 runs of 60 steps are the same: ") == 2, done.stdout


def decided(**changed: Any) -> dict[str, Any]:
    """What a side decided, with these changes."""
    return {
        "tokens": {"r": 5, "s": 1},
        "drafts": {},
        "starts": {"r": 8, "s": 20},
        "begun": ["r"],
        "preempted": ["q"],
        "blocks": {"r": [[1, 2, 3]], "s": None},
    } | changed


@pytest.mark.parametrize("num_withdrawn", [0, 1])
def test_the_first_step_that_differs_is_shown_and_ends_the_run(num_withdrawn: int) -> None:
    other = decided(blocks={"r": [[1, 2, 4]], "s": None})
    verdict = judge(
        [
            Step(1, decided(), decided(), 0),
            Step(2, decided(), other, num_withdrawn),
            Step(3, decided(), decided(), num_withdrawn),
        ]
    )
    assert verdict.differs.splitlines() == [
        "step 2 differs",
        "  blocks",
        "    vLLM:   {'r': [[1, 2, 3]], 's': None}",
        "    kvcore: {'r': [[1, 2, 4]], 's': None}",
    ]
    assert verdict.by_decision == (num_withdrawn > 0)
    line = summary("async", [verdict, judge([])], 3)
    decision = ", 1 up to a key that kvcore withdrew" if num_withdrawn else ""
    assert line.startswith(f"async: 1 of 2 runs of 3 steps are the same{decision}: 6 tokens")
    assert line.endswith("8 tokens hit, 1 preemptions")
