# SPDX-License-Identifier: Apache-2.0
"""`kvcore replay`: what it reports, what it refuses, and what an interrupt leaves."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Thread
from typing import Any, NoReturn

import attrs
import pytest

from kvcore import Config
from kvcore.oracle import device
from kvcore.replay import command, sweep
from kvcore.replay.loop import replay
from kvcore.replay.request_trace import TraceReader
from kvcore.replay.results import Options, Sample
from kvcore.replay.synthetic import generate, to_lines
from kvcore.types.errors import InvariantViolation

NUM_REQUESTS = 25


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small trace of conversations."""
    path = tmp_path_factory.mktemp("traces") / "turns.jsonl"
    path.write_bytes(b"".join(to_lines(generate("turns", NUM_REQUESTS, 3))))
    return path


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Return the exit code, the output, and the text on standard error."""
    code = command.main([str(each) for each in words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def data_of(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    """Return the report of a successful run; a slow machine prints progress as well."""
    code, out, err = run(capsys, *words, "--json")
    others = [line for line in err.splitlines() if not line.startswith("[")]
    assert (code, others) == (command.FINE, [])
    data: dict[str, Any] = json.loads(out)
    return data


def without_costs(data: dict[str, Any]) -> dict[str, Any]:
    """Return what depends neither on the machine nor on the place of the trace."""
    return {key: value for key, value in data.items() if key not in {"cost_us", "trace"}}


class Stdin:
    """Standard input with these bytes."""

    def __init__(self, data: bytes) -> None:
        self.buffer = io.BytesIO(data)


def interrupt_after(monkeypatch: pytest.MonkeyPatch, num_steps: Sequence[int]) -> None:
    """Make each run end by an interrupt after this many steps; 0 lets one run to its end."""
    left: Iterator[int] = iter(num_steps)

    class Interrupting:
        def __init__(self, *_: object) -> None:
            self.left = next(left)

        def __call__(self, sample: Sample) -> None:
            if self.left and sample.step + 1 == self.left:
                raise KeyboardInterrupt

        def end(self) -> None:
            """Do nothing: no progress was shown."""

    monkeypatch.setattr(command, "Progress", Interrupting)


def test_a_trace_is_replayed_and_reported(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    code, out, err = run(capsys, trace, "--blocks", 400)
    assert (code, err) == (command.FINE, "")
    assert out.startswith(f"{trace}: {NUM_REQUESTS} requests in ")
    assert "400 blocks of 16 tokens" in out
    data = data_of(capsys, trace, "--blocks", 400)
    result = replay(TraceReader(trace), Options(num_blocks=400))
    assert data["tokens"]["hit"] == result.hit_tokens
    assert data["requests"]["finished"] == NUM_REQUESTS
    assert data["options"]["num_blocks"] == 400


def test_options_reach_the_loop(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    words = "--blocks 500 --block-size 8 --policy uncached_first --max-running 3 --requests 9 "
    words += "--token-budget 700 --preempt swap --host-blocks 60 --step-us 1000,20,3 --no-bounds "
    data = data_of(capsys, trace, *words.split(), "--backend", "python")
    expected = Options(
        num_blocks=500,
        block_size=8,
        policy="uncached_first",
        max_running=3,
        token_budget=700,
        preempt="swap",
        num_host_blocks=60,
        num_requests=9,
        bounds=False,
        base_seconds=1000 / 1e6,
        seconds_per_prefill_token=20 / 1e6,
        seconds_per_decode=3 / 1e6,
    )
    assert data["options"] == json.loads(json.dumps(attrs.asdict(expected)))
    assert set(data["options"]) == set(Options.__annotations__)
    assert (data["backend"], data["requests"]["read"]) == ("python", 9)
    assert data["hit_rate"]["ideal"] is None


def test_standard_input_is_a_trace_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, trace: Path
) -> None:
    words = ("--blocks", 400, "--sweep", "200,800")
    from_file = data_of(capsys, trace, *words)
    monkeypatch.setattr("sys.stdin", Stdin(trace.read_bytes()))
    from_stdin = data_of(capsys, "-", *words)
    assert from_stdin["trace"] == "standard input"
    assert without_costs(from_stdin) == without_costs(from_file)


@pytest.mark.parametrize("words", [("--blocks", 400), ("--blocks", 400, "--sweep", "200,800")])
def test_a_pipe_is_read_once_and_from_its_start(
    capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path, words: tuple[object, ...]
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = Thread(target=pipe.write_bytes, args=(trace.read_bytes(),), daemon=True)
    writer.start()
    from_pipe = data_of(capsys, pipe, *words)
    writer.join()
    assert without_costs(from_pipe) == without_costs(data_of(capsys, trace, *words))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--host-blocks", "5"), "--host-blocks needs --preempt swap"),
        (("--apply", "abacus"), "--apply abacus names no installed device"),
        (("--html", "-"), "--html - is not a file, and standard output is for the report"),
        (("--html", "{trace}"), "'{trace}' cannot be written: it would replace what is read"),
        (("--html", "{folder}"), "cannot be written: a folder"),
        (("--html", "{folder}/none/page.html"), "cannot be written: no such file or directory"),
        (("--html", "{trace}/page.html"), "cannot be written: not a directory"),
        (("--sweep", "1"), "num_blocks=1"),
        (("--explain", "--policies", "lru,lru2"), "--explain explains one policy: omit --policies"),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_sentence(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    trace: Path,
    words: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.setattr(command, "run_sizes", forbidden)
    places = {"trace": trace, "folder": trace.parent}
    before = sorted(trace.parent.iterdir())
    given = [each.format(**places) for each in words]
    code, out, err = run(capsys, trace, "--blocks", 400, *given)
    assert (code, out) == (command.USAGE_ERROR, "")
    assert err.startswith("kvcore replay: ")
    assert said.format(**places) in err
    assert len(err.splitlines()) == 1
    assert sorted(trace.parent.iterdir()) == before


def forbidden(*_: object, **__: object) -> NoReturn:
    """Fail, in place of work that must not begin."""
    raise AssertionError("the run began")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "--blocks"),
        (("--blocks", "0"), "must be an integer from 1 to 2147483647, not '0'"),
        (("--blocks", "many"), "not 'many'"),
        (("--blocks", "9", "--sweep", "5,,6"), "not ''"),
        (("--blocks", "9", "--step-us", "5,6"), "must be three times"),
        (("--blocks", "9", "--step-us", "5,6,-1"), "must be a number of microseconds, not '-1'"),
        (("--blocks", "9", "--policy", "random"), "uncached_first"),
        (("--blocks", "9", "--policies", "lru,random"), "not 'random'"),
        (("--blocks", "9", "--preempt", "swap", "--host-blocks", "0"), "from 1"),
    ],
)
def test_a_value_that_is_none_is_refused(
    capsys: pytest.CaptureFixture[str], trace: Path, words: tuple[str, ...], said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main([str(trace), *words])
    assert ended.value.code == command.USAGE_ERROR
    assert said in capsys.readouterr().err


def test_what_is_not_installed_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, trace: Path
) -> None:
    def nothing(_: str) -> None:
        return None

    monkeypatch.setattr("importlib.util.find_spec", nothing)
    monkeypatch.setattr(device, "find_device", nothing)
    monkeypatch.setattr("kvcore._twin.available", lambda: False)
    for words, said in {
        ("--html", "page.html"): "which is not installed: install kvcore[plots]",
        ("--apply", "torch"): "--apply torch needs kvcore-runtime, which is not installed",
        ("--backend", "rust"): "the compiled twin is missing: use --backend python",
    }.items():
        code, _, err = run(capsys, trace, "--blocks", 400, *words)
        assert code == command.USAGE_ERROR
        assert said in err
    data = data_of(capsys, trace, "--blocks", 400, "--requests", 3)
    assert data["backend"] == "python"


class Broken:
    """A device that finds something wrong at its third batch."""

    def __init__(self, plan: device.DeviceSize) -> None:
        self.config: Config = plan.config
        self.num_batches = 0

    def apply(self, batch: object) -> None:
        """Count a batch."""
        del batch
        self.num_batches += 1

    def forward(self, passes: object) -> None:
        """Find what is wrong."""
        del passes
        if self.num_batches == 3:
            raise InvariantViolation("KV-READ", "block 5 holds something else")

    def arrive(self, operation: int, nodes: object) -> None:
        """Do nothing: nothing is loaded."""
        raise AssertionError((operation, nodes))


def test_wrong_content_ends_the_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, trace: Path
) -> None:
    monkeypatch.setattr(device, "find_device", lambda _: Broken)
    code, out, err = run(capsys, trace, "--blocks", 400, "--apply", "own")
    assert (code, out) == (command.VIOLATED, "")
    assert err == "kvcore replay: KV-READ: block 5 holds something else\n"


def test_bad_lines_end_the_run_or_are_counted(
    capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path
) -> None:
    lines = trace.read_text().splitlines(keepends=True)
    bad = tmp_path / "bad.jsonl"
    bad.write_text("".join([*lines[:5], "{oh\n" * 12, *lines[5:]]))
    code, out, err = run(capsys, bad, "--blocks", 400)
    assert (code, out) == (command.USAGE_ERROR, "")
    assert f"{bad}, line 6" in err
    code, out, err = run(capsys, bad, "--blocks", 400, "--skip-bad", "--json")
    assert code == command.FINE
    assert json.loads(out)["requests"]["skipped_lines"] == 12
    assert err.count("skipped: ") == 11
    assert err.endswith("kvcore replay: skipped: 2 more\n")


@pytest.mark.parametrize("words", [(), ("--skip-bad", "--sweep", "100")])
def test_an_empty_trace_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: tuple[str, ...]
) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    for path in (empty, tmp_path / "none.jsonl", tmp_path):
        code, out, err = run(capsys, path, "--blocks", 400, *words)
        assert (code, out) == (command.USAGE_ERROR, "")
        assert str(path) in err


def test_requests_larger_than_the_pool_are_named_and_the_rest_goes_on(
    capsys: pytest.CaptureFixture[str], trace: Path
) -> None:
    data = data_of(capsys, trace, "--blocks", 150)
    refused = data["requests"]["refused"]
    assert refused >= 1
    assert data["requests"]["finished"] == NUM_REQUESTS - refused
    assert all(each["needed_blocks"] > 149 for each in data["requests"]["refused_named"])
    _, out, _ = run(capsys, trace, "--blocks", 150)
    assert f"{refused} refused" in out
    assert f"request {data['requests']['refused_named'][0]['request']} (line " in out


def test_a_sweep_is_runs_of_their_own(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    data = data_of(capsys, trace, "--blocks", 400, "--sweep", "1600,200,400,200")
    assert [row["num_blocks"] for row in data["sweep"]] == [200, 400, 1600]
    assert data["options"]["num_blocks"] == 400
    for row in data["sweep"]:
        alone = data_of(capsys, trace, "--blocks", row["num_blocks"])
        assert row["tokens"] == alone["tokens"]
        assert row["evictions"] == alone["evictions"]
        assert alone["sweep"] == []


def test_an_interrupted_run_reports_what_was_done(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    trace: Path,
    tmp_path: Path,
) -> None:
    pytest.importorskip("matplotlib")
    page = tmp_path / "page.html"
    interrupt_after(monkeypatch, [40, 40])
    code, out, _ = run(capsys, trace, "--blocks", 400, "--html", page)
    assert code == command.STOPPED
    assert out.startswith(f"interrupted: {trace}: ")
    assert "in 40 steps" in out
    assert "Interrupted" in page.read_text()
    code, out, _ = run(capsys, trace, "--blocks", 400, "--sweep", "200,800", "--json")
    assert code == command.STOPPED
    data = json.loads(out)
    assert (data["interrupted"], data["sweep"], data["sweep_left_out"]) == (True, [], [200, 800])


def test_an_interrupted_sweep_keeps_the_sizes_that_are_done(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, trace: Path
) -> None:
    interrupt_after(monkeypatch, [0, 0, 40])
    words = ("--blocks", 400, "--sweep", "200,800,1600", "--json")
    code, out, _ = run(capsys, trace, *words)
    data = json.loads(out)
    assert (code, data["interrupted"]) == (command.STOPPED, True)
    assert [row["num_blocks"] for row in data["sweep"]] == [200, 400]
    assert data["sweep_left_out"] == [800, 1600]
    assert data["requests"]["finished"] == NUM_REQUESTS


def test_an_interrupt_before_the_first_step_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, trace: Path
) -> None:
    def interrupted(*_: object, **__: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep, "replay", interrupted)
    code, out, err = run(capsys, trace, "--blocks", 400)
    assert (code, out) == (command.STOPPED, "")
    assert "interrupted before anything could be reported" in err


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_a_page_that_is_not_finished_is_not_there(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    trace: Path,
    tmp_path: Path,
    error: BaseException,
) -> None:
    pytest.importorskip("matplotlib")

    def broken(_: object) -> Iterator[str]:
        yield "<!DOCTYPE html>"
        raise error

    monkeypatch.setattr("kvcore.replay.page.to_html", broken)
    page = tmp_path / "page.html"
    page.write_text("of yesterday")
    code, out, err = run(capsys, trace, "--blocks", 400, "--html", page)
    interrupted = isinstance(error, KeyboardInterrupt)
    assert code == (command.STOPPED if interrupted else command.USAGE_ERROR)
    assert out.startswith(f"{trace}: ")  # the report does not wait for the page
    assert f"{page} was not" in err or "no space left on device" in err
    assert page.read_text() == "of yesterday"
    assert list(tmp_path.iterdir()) == [page]


def test_a_page_takes_the_place_of_an_older_one(
    capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    page, link = tmp_path / "page.html", tmp_path / "newest.html"
    page.write_text("of yesterday")
    link.symlink_to(page)
    code, _, _ = run(capsys, trace, "--blocks", 400, "--sweep", "200", "--html", link)
    assert code == command.FINE
    assert page.read_text().endswith("</html>\n")
    assert link.is_symlink()
    assert sorted(tmp_path.iterdir()) == [link, page]
