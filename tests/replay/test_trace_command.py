# SPDX-License-Identifier: Apache-2.0
"""`kvcore trace`: generated traces, and what a trace contains."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcore.cli.pipes import READER_GONE
from kvcore.replay import trace_command
from kvcore.replay.command import FINE, STOPPED, USAGE_ERROR
from kvcore.replay.request_trace import TraceReader
from kvcore.replay.synthetic import KINDS

ROOT = Path(__file__).parents[2]
LINES = """\
{"timestamp": 0, "input_length": 1024, "output_length": 10, "hash_ids": [1, 2]}
{"timestamp": 500, "input_length": 1100, "output_length": 30, "hash_ids": [1, 2, 3]}
{"timestamp": 2000, "input_length": 600, "output_length": 20, "hash_ids": [4, 2]}
"""


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Return the exit code, the output, and the text on standard error."""
    code = trace_command.main([str(each) for each in words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("kind", KINDS)
def test_a_trace_is_decided_by_its_seed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str
) -> None:
    words = ("generate", "--kind", kind, "--requests", 12)
    code, out, err = run(capsys, *words, "--seed", 5)
    assert (code, err) == (FINE, "")
    assert out.count("\n") == 12
    file = tmp_path / "made.jsonl"
    code, said, _ = run(capsys, *words, "--seed", 5, "--out", file)
    assert (code, said) == (FINE, "")
    assert file.read_text() == out
    assert run(capsys, *words, "--seed", 6)[1] != out
    assert len(list(TraceReader(file))) == 12


def test_a_rate_brings_sessions_closer_together(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("generate", "--kind", "shared", "--requests", 50)
    last = []
    for rate in (1, 10):
        _, out, _ = run(capsys, *words, "--rate", rate)
        last.append(json.loads(out.splitlines()[-1])["timestamp"])
    assert last[0] == pytest.approx(10 * last[1], rel=0.01)


def test_a_trace_is_shown_in_figures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "small.jsonl"
    file.write_text(LINES)
    code, out, _ = run(capsys, "show", file, "--json", "--block-size", 512)
    data = json.loads(out)
    assert (code, data["requests"], data["seconds"]) == (FINE, 3, 2.0)
    assert data["prompts"]["total"] == 1024 + 1100 + 600
    assert data["prompts"]["most"] == 1100
    assert data["outputs"]["total"] == 60
    # The first two ids of the second request repeat; [4, 2] is another prefix than [1, 2].
    assert (data["num_ids"], data["repeated_ids"], data["unit"]) == (7, 2, 512)
    assert data["ideal_hit_tokens"] == 1024
    _, out, _ = run(capsys, "show", file)
    assert "3 requests in 2.0 s" in out
    assert "2 repeat a prefix that came before: 28.57 %" in out


def test_what_is_no_trace_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text("[]\n" + LINES)
    code, out, err = run(capsys, "show", bad)
    assert (code, out) == (USAGE_ERROR, "")
    assert f"{bad}, line 1" in err
    code, out, _ = run(capsys, "show", bad, "--skip-bad")
    assert code == FINE
    assert "1 bad line skipped" in out
    assert run(capsys, "show", tmp_path / "none")[0] == USAGE_ERROR


def test_a_place_that_cannot_be_written_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ("generate", "--kind", "shared", "--requests", 3, "--out")
    for place in (tmp_path, tmp_path / "none" / "made.jsonl"):
        code, _, err = run(capsys, *words, place)
        assert code == USAGE_ERROR
        assert f"{place}" in err
        assert "cannot be written" in err


def test_an_interrupted_file_is_not_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(_: object) -> Iterator[bytes]:
        yield b"{}\n"
        raise KeyboardInterrupt

    monkeypatch.setattr(trace_command, "to_lines", interrupted)
    words = ("generate", "--kind", "shared", "--requests", 3)
    code, _, err = run(capsys, *words, "--out", tmp_path / "made.jsonl")
    assert code == STOPPED
    assert "nothing was written" in err
    assert not list(tmp_path.iterdir())
    code, out, err = run(capsys, *words)
    assert (code, out) == (STOPPED, "{}\n")
    assert "the trace is cut off" in err


def test_an_interrupted_count_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Interrupted(TraceReader):
        def __iter__(self) -> Iterator[object]:  # type: ignore[override]  # requests, too
            yield next(super().__iter__())
            raise KeyboardInterrupt

    file = tmp_path / "small.jsonl"
    file.write_text(LINES)
    monkeypatch.setattr(trace_command, "TraceReader", Interrupted)
    code, out, _ = run(capsys, "show", file)
    assert code == STOPPED
    assert out.startswith(f"interrupted: {file}: 1 request in ")


def test_who_reads_may_stop_reading() -> None:
    words = ("kvcore", "trace", "generate", "--kind", "agents", "--requests", "2000")
    with subprocess.Popen(
        [sys.executable, "-m", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith(b'{"timestamp":0,')
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == READER_GONE


def test_without_words_it_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys)
    assert code == FINE
    assert "generate" in out
    assert "show" in out
