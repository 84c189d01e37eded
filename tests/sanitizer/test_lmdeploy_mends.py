# SPDX-License-Identifier: Apache-2.0
"""The causes of what was found in LMDeploy: each world is clean if its own cause is mended."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from kvcore.sanitizer.hunter.adapter import peer_python

ROOT = Path(__file__).parents[2]
FOUND = sorted((ROOT / "tests" / "sanitizer" / "found").glob("lmdeploy_*.json"))


@pytest.mark.slow
def test_each_world_is_clean_if_its_cause_is_mended() -> None:
    python = peer_python("lmdeploy")
    if not python.exists():
        pytest.skip(f"LMDeploy is not installed in {python.parents[1]}")
    ran = subprocess.run(
        [python, "-m", "tests.sanitizer.lmdeploy_mends", *FOUND],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    names = [json.loads(path.read_text())["name"] for path in FOUND]
    outcomes = [json.loads(line) for line in ran.stdout.splitlines()]
    assert outcomes == [[name, None, None] for name in names]
