# SPDX-License-Identifier: Apache-2.0
"""`kvcore shrink RECORD`: failing records made small, and what is no failing record."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcore import Config, KVCacheManager, Request, _twin
from kvcore.check.mutants import MUTANTS, Patcher
from kvcore.check.simulate.runs import simulate
from kvcore.check.simulate.setting import Fixed
from kvcore.record.reader import segment_files
from kvcore.record.recorder import Recorder
from kvcore.replay.records import attempt as attempts
from kvcore.replay.records.attempt import Attempt, attempt, read_items
from kvcore.replay.records.guarded import Killed, in_child
from kvcore.replay.records.rerun import rerun
from kvcore.replay.records.shrink import shrink
from kvcore.replay.records.shrink_command import main
from kvcore.trace import trace_file
from kvcore.trace.calls import Call
from tests.conftest import Backend
from tests.record.records import CONFIG, record, story

SMALL = Config(13, 2, num_host_blocks=8, max_in_flight=1, hash_seed=b"shrink")
SOUND = Fixed(config=SMALL, num_requests=5, further=())


@pytest.fixture
def _in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make attempts as if no process could be forked: a fork of the tests is slow."""
    monkeypatch.delattr(os, "fork")


def simulated(folder: Path, num_steps: int) -> None:
    """Record a simulated run without a bug."""
    made: list[KVCacheManager] = []

    def make(config: Config) -> KVCacheManager:
        made.append(KVCacheManager(config, "python"))
        made[0].start_recording(Recorder(folder))
        return made[0]

    assert simulate(7, num_steps, backend=[("python", make)], fixed=SOUND).failure is None
    made[0].stop_recording()


def recorded_again(folder: Path, sound: Path) -> None:
    """Record the calls of another record, as they are with the bug that is in now."""
    config, items = read_items(sound, "python")
    run = Attempt(config, ["python"])
    run.managers[0].start_recording(Recorder(folder))
    for item in items:
        run.make(item)
    run.managers[0].stop_recording()


def test_items_are_the_calls_of_the_record(tmp_path: Path, backend: Backend) -> None:
    simulated(tmp_path / "sound", 60)
    config, items = read_items(tmp_path / "sound", backend)
    run, broken = attempt(config, items, [backend])
    assert broken is None
    run.managers[0].start_recording(Recorder(tmp_path / "end"))
    again = rerun(tmp_path / "sound", [backend])
    assert again.difference is None
    assert len(items) >= again.num_calls > 300


@pytest.mark.usefixtures("_in_one_process")
@pytest.mark.parametrize(
    ("bug", "names", "calls_max"),
    [
        ("m_free_forgets_a_block", {"REF"}, 4),
        ("m_evict_keeps_index", {"IDX-SOUND"}, 20),
    ],
)
def test_a_broken_invariant_is_shrunk_to_a_trace(
    bug: str, names: set[str], calls_max: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    simulated(tmp_path / "sound", 60)
    mutant = next(each for each in MUTANTS if each.name == bug)
    with Patcher() as patcher:
        mutant.patch(patcher)
        recorded_again(tmp_path / "record", tmp_path / "sound")
        words = [str(tmp_path / "record"), "--backend", "python", "--out", str(tmp_path / "small")]
        assert main(words) == 0
        reported = capsys.readouterr()
        _, items = read_items(tmp_path / "small", "python")
        _, broken = attempt(SMALL, items, ["python"])
    assert broken is not None
    assert broken.name in names
    assert broken.name in reported.out
    assert len(items) <= calls_max
    trace = trace_file.parse_trace(reported.out, source="shrunk")
    with Patcher() as patcher:
        mutant.patch(patcher)
        with pytest.raises(Exception, match=broken.name):
            trace_file.outcomes(trace, "python")


@pytest.mark.usefixtures("_in_one_process")
@pytest.mark.skipif(not _twin.available(), reason="two languages differ: it needs the twin")
def test_a_difference_between_the_languages_is_shrunk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    simulated(tmp_path / "sound", 60)
    mutant = next(each for each in MUTANTS if each.name == "m_no_cow")
    with Patcher() as patcher:
        mutant.patch(patcher)
        words = [str(tmp_path / "sound"), "--keep", "difference", "--out", str(tmp_path / "small")]
        assert main(words) == 0
        assert rerun(tmp_path / "small", ["rust", "python"]).difference is not None
    assert len(read_items(tmp_path / "small", "rust")[1]) <= 20
    assert rerun(tmp_path / "small", ["rust", "python"]).difference is None
    trace = trace_file.parse_trace(capsys.readouterr().out, source="shrunk")
    assert (trace.config.num_host_blocks, trace.config.max_in_flight) == (0, 0)
    trace_file.outcomes(trace, "python")


def test_a_failure_that_cannot_be_is_refused_with_those_that_can(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path), "--keep", "CASHED-COUNT"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "'CASHED-COUNT' is no failure, but difference, exception" in said
    assert "CACHED-COUNT" in said


@pytest.mark.usefixtures("_in_one_process")
def test_a_refusal_is_shrunk_to_its_request(
    tmp_path: Path, backend: Backend, capsys: pytest.CaptureFixture[str]
) -> None:
    large = Call("add_request", (Request("large", list(range(20))),))
    calls = [*again("x"), large, *again("y"), Call("allocate_slots", ("large", 20)), *story()]
    record(tmp_path / "record", CONFIG, calls, backend)
    assert main([str(tmp_path / "record"), "--backend", backend, "--keep", "refused:never"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line[:1].isalpha()]
    assert [line.split()[0] for line in lines] == ["config", "add_request", "allocate_slots"]


@pytest.mark.parametrize(
    ("what", "backend"),
    [
        ("hang", "rust"),
        ("crash", "python"),
        pytest.param("hang", "python", marks=pytest.mark.slow),
        pytest.param("crash", "rust", marks=pytest.mark.slow),
    ],
    indirect=["backend"],
)
def test_a_call_that_never_comes_back_is_shrunk_to_its_request(
    what: str,
    tmp_path: Path,
    backend: Backend,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record(tmp_path / "record", CONFIG, [*again("x"), *again("y"), *story()], backend)
    make, parent = attempts._value, os.getpid()

    def never(method: Callable[..., Any], given: tuple[Any, ...], options: Any) -> Any:
        if method.__name__ == "allocate_slots" and given[0] not in "xy":
            assert os.getpid() != parent  # else nothing would end this process
            if what == "hang":
                assert signal.getitimer(signal.ITIMER_PROF)[0] > 0
                signal.setitimer(signal.ITIMER_PROF, 0.001)  # as if the call's time had passed
            while what == "hang":
                pass
            os.kill(os.getpid(), signal.SIGKILL)
        return make(method, given, options)

    monkeypatch.setattr(attempts, "_value", never)
    done = shrink(tmp_path / "record", [backend])
    assert done is not None
    assert done.broken.name == what
    assert [call.name for call in done.calls] == ["allocate_slots"]


@pytest.mark.usefixtures("_in_one_process")
@pytest.mark.parametrize(
    "backend", ["rust", pytest.param("python", marks=pytest.mark.slow)], indirect=True
)
def test_a_command_says_what_is_kept(
    tmp_path: Path, backend: Backend, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path / "record", CONFIG, [*again("x"), *again("kept"), *again("y")], backend)
    words = [str(tmp_path / "record"), "--backend", backend, "--keep-if"]
    assert main([*words, "grep -rq kept"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line[:1].isalpha()]
    assert [line.split()[0] for line in lines] == ["config", "add_request"]
    assert main([*words, "grep -rq missing"]) == 1


def test_without_time_nothing_is_left_out(tmp_path: Path, backend: Backend) -> None:
    large = [Call("add_request", (Request("large", list(range(20))),))]
    large += [Call("allocate_slots", ("large", 20))]
    record(tmp_path / "record", CONFIG, [*again("x"), *large, *again("y")], backend)
    done = shrink(tmp_path / "record", [backend], "refused:never", seconds=0)
    assert done is not None
    assert (len(done.calls), done.first_at, done.num_calls) == (5, 4, 8)


def test_the_small_record_has_the_calls_of_the_trace(tmp_path: Path, backend: Backend) -> None:
    large = [Call("add_request", (Request("large", list(range(20))),))]
    large += [Call("allocate_slots", ("large", 20))]
    record(tmp_path / "record", CONFIG, [*again("x"), *large], backend)
    words = [str(tmp_path / "record"), "--backend", backend, "--keep", "refused:never"]
    assert main([*words, "--out", str(tmp_path / "small")]) == 0
    _, items = read_items(tmp_path / "small", backend)
    assert [item.name for item in items] == ["add_request", "allocate_slots"]


def test_a_folder_with_a_record_is_refused_before_the_search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path / "record", CONFIG, story(), "python")
    assert main([str(tmp_path / "record"), "--out", str(tmp_path / "record")]) == 2
    refused = capsys.readouterr().err
    assert refused.startswith(f"kvcore shrink: folder {tmp_path / 'record'} has a record already")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="attempts are made in this process")
def test_an_interrupted_attempt_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    def work(_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    assert in_child(work) == Killed(signal.SIGINT, 0)
    assert capfd.readouterr() == ("", "")


def test_what_does_not_fail_is_said(
    tmp_path: Path, backend: Backend, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path / "record", CONFIG, story(), backend)
    assert main([str(tmp_path / "record"), "--backend", backend]) == 1
    assert capsys.readouterr().out == (
        "nothing fails: no difference, exception, hang, crash or invariant\n"
    )


def test_a_record_that_begins_in_the_middle_is_not_shrunk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(
        tmp_path / "record", CONFIG, [*story(), *again("x"), *again("y")], "python", segment_bytes=1
    )
    last = segment_files(tmp_path / "record")[-1]
    assert main([str(last), "--backend", "python"]) == 2
    assert "begins with requests, batches or cached blocks" in capsys.readouterr().err


def again(name: str) -> list[Call]:
    """Add a request that stays."""
    add = Call("add_request", (Request(name, [1, 2, 3]),))
    return [add, Call("allocate_slots", (name, 3)), Call("take_batch")]
