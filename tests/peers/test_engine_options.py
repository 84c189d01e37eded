# SPDX-License-Identifier: Apache-2.0
"""The commands that `make bench-engines` and `make engines-vllm` run, by their options."""

from __future__ import annotations

import pytest

from benches.engines import __main__ as bench
from benches.engines.options import ENGINES, LOADS, SIZES
from benches.engines.options import read_options as read_bench
from benches.peers import install
from benches.vllm.options import MODES
from benches.vllm.options import read_options as read_runs


def test_a_bench_measures_every_engine_size_and_load_unless_told() -> None:
    options = read_bench([])
    assert (options.engines, options.sizes, options.loads) == (list(ENGINES), [*SIZES], [*LOADS])
    assert not options.by_call
    given = ["--engines", "vllm", "--running", "64,8", "--loads", "mix", "--modes", "async"]
    options = read_bench([*given, "--rounds", "2", "--steps", "5", "--by-call"])
    assert (options.engines, options.sizes) == (["vllm"], [64, 8])
    assert (options.loads, options.modes) == (["mix"], ["async"])
    assert (options.rounds, options.steps, options.by_call) == (2, 5, True)


@pytest.mark.parametrize(
    ("option", "value", "reported"),
    [
        ("--engines", "vllm,sglang", "no engines are called sglang"),
        ("--loads", "rush", "no loads are called rush"),
        ("--modes", "async,late", "no modes are called late"),
        ("--running", "64,many", "argument --running: 'many' is not a number of 1 or more"),
        ("--rounds", "0", "argument --rounds: '0' is not a number of 1 or more"),
    ],
)
def test_a_bench_refuses_what_it_does_not_know(
    option: str, value: str, reported: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        read_bench([option, value])
    assert ended.value.code == 2
    assert reported in capsys.readouterr().err


def test_an_engine_that_is_not_there_is_left_out_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(install, "is_installed", lambda _: False)
    assert bench.main(["--engines", "vllm"]) == 0
    assert capsys.readouterr().out.startswith("vllm: left out: vllm==0.33.0 is not in ")


def test_an_engine_whose_bench_fails_is_named_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    requested: list[list[str]] = []

    def run(self: bench.Bench, arguments: list[str]) -> int:
        requested.append([self.module, *arguments])
        return 3 if self.runs_there else 0

    monkeypatch.setattr(bench.Bench, "missing", lambda _: None)
    monkeypatch.setattr(bench.Bench, "run", run)
    assert bench.main(["--running", "64"]) == 1
    assert "vllm: ended with status 3" in capsys.readouterr().out
    assert requested == [
        ["benches.compat"],
        ["benches.engines.vllm_steps", "--running", "64"],
        ["benches.engines.vllm_shadow", "--running", "64"],
        ["benches.engines.vllm_sanitizer", "--running", "64"],
        ["benches.nano_vllm"],
        ["benches.transformers_steps"],
    ]


def test_runs_are_at_least_two_hundred_and_drafts_meet_failed_loads() -> None:
    options = read_runs([])
    assert options.modes == list(MODES)
    assert len(options.modes) * len(options.seeds) >= 200
    both = [mode.is_async for mode in MODES.values() if mode.has_drafts and mode.has_loads]
    assert sorted(both) == [False, True]
    for name in ("has_interruptions", "has_images", "watermark"):
        assert {mode.is_async for mode in MODES.values() if getattr(mode, name)} == {False, True}
    assert options.steps == 300
    options = read_runs(["--modes", "sync,sync-loads", "--first", "4", "--seeds", "3"])
    assert (options.modes, options.seeds) == (["sync", "sync-loads"], range(4, 7))


def test_runs_in_an_unknown_mode_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_runs(["--modes", "sync,late"])
    assert "no modes are called late" in capsys.readouterr().err
