# SPDX-License-Identifier: Apache-2.0
"""The thread that prepares a record's pages ends with its recorder, and survives what stops it."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvcore import Config, KVCacheManager, Request
from kvcore.record.errors import AlreadyRecording
from kvcore.record.reader import read_calls, segment_files
from kvcore.record.recorder import Recorder
from kvcore.record.segment import read_segment
from kvcore.replay.records.rerun import rerun
from tests.conftest import Backend, need_twin

CONFIG = Config(64, 64, hash_seed=b"x")
PAGES = 1 << 20
"""Tokens of a prompt that goes past all pages which are prepared at first."""


def count_threads() -> int:
    """Return how many threads this process has."""
    return len(list(Path("/proc/self/task").iterdir()))


def has_threads(expected: int) -> bool:
    """Return whether that many are left, once the system has removed those that ended."""
    end = time.monotonic() + 5
    while count_threads() != expected and time.monotonic() < end:
        time.sleep(0.001)
    return count_threads() == expected


def count_calls(folder: Path) -> int:
    """Return how many calls a record has, none of them damaged or lost."""
    segments = [read_segment(path) for path in segment_files(folder)]
    assert not any(segment.dropped_bytes for segment in segments)
    return sum(len(list(read_calls(segment))) for segment in segments)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the advice and /proc")
@pytest.mark.parametrize("is_dropped", [False, True])
@pytest.mark.parametrize("segment_bytes", [1, 1 << 20, 64 << 20])
def test_no_thread_outlives_its_recorder(
    tmp_path: Path, is_dropped: bool, segment_bytes: int
) -> None:
    need_twin()
    before = count_threads()
    manager: KVCacheManager | None = KVCacheManager(CONFIG, "rust")
    assert manager is not None
    manager.start_recording(Recorder(tmp_path, segment_bytes=segment_bytes))
    assert has_threads(before + 1)
    for number in range(3):
        manager.add_request(Request(str(number), range(PAGES)))
        manager.take_batch()
    assert has_threads(before + 1)
    if is_dropped:
        manager = None
        gc.collect()
    else:
        manager.stop_recording()
    assert has_threads(before)
    assert count_calls(tmp_path) == 6


KILLED = """
import sys
from kvcore import Config, KVCacheManager, Request
from kvcore.record.recorder import Recorder

manager = KVCacheManager(Config(64, 64, hash_seed=b"x"), {backend!r})
manager.start_recording(Recorder({folder!r}, segment_bytes=1 << 18, keep_segments=1 << 20))
print(flush=True)
number = 0
while True:
    manager.add_request(Request(str(number), range(1 + number % 7000)))
    manager.remove_request(str(number))
    number += 1
    if number % 3 == 0:
        manager.take_batch()
"""


@pytest.mark.parametrize("seed", range(4))
def test_a_kill_at_any_moment_leaves_whole_calls(
    tmp_path: Path, backend: Backend, seed: int
) -> None:
    program = KILLED.format(folder=str(tmp_path), backend=backend)
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(random.Random(seed).uniform(0, 0.5))
        child.kill()
    assert child.returncode == -signal.SIGKILL
    num_calls = count_calls(tmp_path)
    done = rerun(tmp_path, [backend])
    assert done.difference is None
    assert num_calls - done.num_calls in (0, 1)  # the last one may have no outcome


FORKED = """
import os, sys
from pathlib import Path
from kvcore import Config, KVCacheManager, Request
from kvcore.record.recorder import Recorder

def sizes():
    return {{file.name: file.stat().st_size for file in Path({folder!r}).glob("*.kvcrec")}}

manager = KVCacheManager(Config(64, 64, hash_seed=b"x"), {backend!r})
recorder = Recorder({folder!r}, segment_bytes=1 << 18)
manager.start_recording(recorder)
manager.add_request(Request("a", range(300_000)))
child = os.fork()
if not child:
    assert "from which this one was forked" in str(recorder.error), recorder.error
    before = sizes()
    if {dropped}:
        del manager
        assert sizes() == before
        sys.exit()
    manager.add_request(Request("child", range(300_000)))
    manager.take_batch()
    recorder.rotate()
    manager.stop_recording()
    manager.start_recording(Recorder({folder!r} + "/child"))
    manager.take_batch()
    manager.stop_recording()
    assert sizes() == before
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
manager.add_request(Request("b", range(300_000)))
manager.take_batch()
assert recorder.error is None
{end}
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.parametrize("end", ["manager.stop_recording()", "", "del manager"])
@pytest.mark.parametrize("dropped", [False, True])
def test_a_fork_leaves_the_record_to_its_parent(
    tmp_path: Path, backend: Backend, end: str, dropped: bool
) -> None:
    """dropped: whether the child drops the manager, instead of making calls."""
    program = FORKED.format(folder=str(tmp_path), backend=backend, end=end, dropped=dropped)
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    assert count_calls(tmp_path) == 3
    if not dropped:
        assert count_calls(tmp_path / "child") == 1
    assert rerun(tmp_path, [backend]).difference is None


def test_a_recorder_that_was_left_names_the_record(tmp_path: Path, backend: Backend) -> None:
    manager, recorder = KVCacheManager(CONFIG, backend), Recorder(tmp_path)
    recorder.leave()
    assert recorder.error is None
    manager.start_recording(recorder)
    recorder.leave()
    assert isinstance(recorder.error, AlreadyRecording)
    manager.take_batch()
    manager.stop_recording()
    assert count_calls(tmp_path) == 0
