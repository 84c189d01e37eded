# SPDX-License-Identifier: Apache-2.0
"""The demonstrations of several processes end as they should, and leave nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
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


def start(name: str, *options: str) -> subprocess.Popen[str]:
    """Start a demonstration in a process group of its own, that minds SIGHUP also under nohup."""
    return subprocess.Popen(
        command(name, *options),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )


def left_over(demo: subprocess.Popen[str]) -> list[str]:
    """Return the command lines of processes that a demonstration started and that still run.

    They are in its group, as Redis is, which overwrites its environment, or have its mark there.
    """
    word = f"KVCORE_DEMO={os.getpid()}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            group = int((process / "stat").read_text().rpartition(")")[2].split()[2])
            if group == demo.pid or word in (process / "environ").read_bytes().split(b"\0"):
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
    demo = start(name, *options)
    output, errors = demo.communicate(timeout=WAIT_S)
    assert demo.returncode == 0, errors
    for line in lines:
        assert line in output
    assert "NO:" not in output
    assert left_over(demo) == []


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="there is no /proc")
@pytest.mark.parametrize("signal_name", ["SIGINT", "SIGTERM", "SIGHUP"])
@pytest.mark.parametrize("name", ["ranks", "apart", "cluster"])
def test_a_signal_leaves_no_process(name: str, signal_name: str) -> None:
    demo = start(name, *(["--stay"] if name == "cluster" else []))
    while not any("--rank" in line or "--place" in line for line in left_over(demo)):
        assert demo.poll() is None  # the imports before it start short processes, too
    demo.send_signal(signal.Signals[signal_name])
    demo.communicate(timeout=60)
    assert demo.returncode == 130
    assert left_over(demo) == []


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="there is no redis-server")
def test_a_server_that_is_left_is_seen() -> None:
    pytest.importorskip("redis", reason="redis is not installed")
    demo = start("apart")
    while not any("redis-server" in line for line in left_over(demo)):
        assert demo.poll() is None
    demo.kill()
    demo.wait()
    assert any("redis-server" in line for line in left_over(demo))
    os.killpg(demo.pid, signal.SIGKILL)
    end = time.monotonic() + 60
    while left_over(demo):
        assert time.monotonic() < end
        time.sleep(0.1)
    demo.communicate(timeout=60)
