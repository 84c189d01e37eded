# SPDX-License-Identifier: Apache-2.0
"""The demonstrations of several processes end as they should, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # each starts three to five processes that import torch
ROOT = Path(__file__).parents[2]
WAIT_S = 300.0


def command(name: str, *options: str) -> list[str]:
    return [sys.executable, "-m", f"kvcore_runtime.demos.{name}", "--tiny", *options]


def environment() -> dict[str, str]:
    """Return an environment that finds this tree first and marks a demonstration's processes."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "runtime"), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path, "KVCORE_DEMO": f"{os.getpid()}"}


def left_over() -> list[str]:
    """Return the command lines of processes that a demonstration started and that still run."""
    word = f"KVCORE_DEMO={os.getpid()}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if word in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    ("name", "options", "lines"),
    [
        ("ranks", (), ("2 ranks: 12 answers", "12 of 12 answers have the same tokens")),
        ("apart", ("--directory",), ("all tokens are equal", "1 instead of 256")),
        ("apart", (), ("all tokens are equal", "1 instead of 256")),
        (
            "cluster",
            ("--own-index",),
            ("yes: B's tokens are A's", "kvcore:far_hits_total", "all that was started has ended"),
        ),
        ("cluster", (), ("yes: the index counted A's blocks", "all that was started has ended")),
    ],
)
def test_a_demonstration_ends_well(
    name: str, options: tuple[str, ...], lines: tuple[str, ...]
) -> None:
    for package in ("redis", "zmq", "prometheus_client"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    done = subprocess.run(
        command(name, *options),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for line in lines:
        assert line in done.stdout
    assert "NO:" not in done.stdout
    assert left_over() == []


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="there is no /proc")
@pytest.mark.parametrize("name", ["ranks", "apart", "cluster"])
def test_ctrl_c_leaves_no_process(name: str) -> None:
    process = subprocess.Popen(
        command(name, *(["--stay"] if name == "cluster" else [])),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not any("--rank" in line or "--place" in line for line in left_over()):
        assert process.poll() is None  # the imports before it start short processes, too
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert left_over() == []
