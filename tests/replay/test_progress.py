# SPDX-License-Identifier: Apache-2.0
"""The progress line of a replay: when it is written, and what it says."""

from __future__ import annotations

import io
from pathlib import Path

import attrs
import pytest

from kvcore.replay.progress import Progress
from kvcore.replay.request_trace import TraceReader
from tests.replay.results import SAMPLES

SAMPLE = SAMPLES[-1]


class Terminal(io.StringIO):
    """A text file that is a terminal."""

    def isatty(self) -> bool:
        """Return that it is a terminal."""
        return True


class Clock:
    """A clock that shows the time it is set to."""

    now = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


@pytest.fixture
def reader(tmp_path: Path) -> TraceReader:
    """Return a reader of forty equal lines, after the twentieth."""
    line = '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}\n'
    path = tmp_path / "forty.jsonl"
    path.write_text(line * 40)
    reader = TraceReader(path)
    requests = iter(reader)
    for _ in range(20):
        next(requests)
    return reader


def test_a_log_gets_a_line_now_and_then(reader: TraceReader) -> None:
    out, clock = io.StringIO(), Clock()
    progress = Progress(out, reader, None, "pool 1/2: ", clock)
    for clock.now in (0.0, 5.0, 9.9, 10.0, 15.0, 20.5):
        progress(SAMPLE)
    progress.end()
    first, second = out.getvalue().splitlines()
    # 5 of the 40 requests that half of the file stands for; 250 of 1,000 tokens; 50 of 100 blocks.
    assert first.startswith("pool 1/2: [##")
    assert "12 %, 5 done, 2 running, 50 % used, 25.0 % hit, 10 s" in first
    assert second.endswith(" 20 s")


def test_a_terminal_keeps_one_line(reader: TraceReader) -> None:
    out, clock = Terminal(), Clock()
    progress = Progress(out, reader, None, clock=clock)
    for clock.now in (0.1, 0.3, 0.4, 0.6):
        progress(SAMPLE)
    progress.end()
    shown = out.getvalue()
    assert "\n" not in shown
    assert len(shown.split("\r")) == 5  # two lines, and one to take them away
    assert shown.endswith(f"\r{'':<99}\r")


@pytest.mark.parametrize(
    ("most", "done"), [(10, "50 %"), (400, "12 %"), (None, "12 %"), (2, "100 %")]
)
def test_a_run_of_some_requests_is_judged_by_these(
    reader: TraceReader, most: int | None, done: str
) -> None:
    assert f"] {done}, 5 done" in line_of(reader, most)


def test_of_standard_input_nobody_knows(reader: TraceReader) -> None:
    reader.size = None
    assert line_of(reader, None).startswith("5 done")
    assert "] 50 %, 5 done" in line_of(reader, 10)


def line_of(reader: TraceReader, most: int | None) -> str:
    """Return the progress line of a run."""
    out, clock = io.StringIO(), Clock()
    progress = Progress(out, reader, most, clock=clock)
    clock.now = 60.0
    progress(attrs.evolve(SAMPLE, finished=5))
    return out.getvalue()
