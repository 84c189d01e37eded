# SPDX-License-Identifier: Apache-2.0
"""`kvcore check`: worlds from options, verdicts, what is refused, what a violation leaves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvcore.check.cli import command
from kvcore.check.mutants import MUTANTS
from kvcore.check.mutants.seeding import Patcher
from kvcore.check.profiles.registry import PROFILES
from kvcore.check.properties.registry import PROPERTIES
from kvcore.check.search.report import Report
from kvcore.cli.pipes import READER_GONE
from tests.conftest import Backend, need_twin

SMALL = ("--blocks", "2", "--requests", "2", "--tokens", "2", "--workers", "1")


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Return the exit code, the output, and the text on standard error."""
    code = command.main(words)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_small_world_is_explored_to_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *SMALL, "--json")
    found = json.loads(out)
    assert (code, found["verdict"]) == (command.FINE, "complete")
    assert found["keys"] == "fingerprints of 128 bits"
    assert sum(found["depths"]) == found["states"]
    code, full, _ = run(capsys, *SMALL, "--json", "--full-keys")
    assert json.loads(full)["keys"] == "full keys"
    assert json.loads(full)["states"] == found["states"]
    code, out, _ = run(capsys, *SMALL)
    assert "complete: no property is broken" in out


def test_more_states_are_left_where_less_is_renamed(capsys: pytest.CaptureFixture[str]) -> None:
    counts = []
    for words in ((), ("--no-symmetry", "tokens"), ("--no-symmetry",)):
        _, out, _ = run(capsys, *SMALL, "--tokens", "1", "--json", *words)
        counts.append(json.loads(out)["states"])
    assert counts == sorted(set(counts))


@pytest.mark.parametrize(
    ("words", "verdict"),
    [
        (("--depth", "2"), "bounded by depth"),
        (("--limit", "5"), "bounded by states"),
        (("--time", "0.0001"), "bounded by time"),
    ],
)
def test_a_bound_is_named_in_the_verdict(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], verdict: str
) -> None:
    code, out, _ = run(capsys, *SMALL, *words, "--json")
    found = json.loads(out)
    assert (code, found["verdict"]) == (command.FINE, verdict)
    assert found["waiting"] > 0


@pytest.mark.parametrize("backend", ["python", "rust"])
def test_a_limit_of_states_is_kept_exactly(
    capsys: pytest.CaptureFixture[str], backend: str
) -> None:
    if backend == "rust":
        need_twin()
    _, out, _ = run(capsys, *SMALL, "--json", "--backend", backend)
    whole = json.loads(out)["states"]
    for limit in (1, 7, whole - 1):
        _, out, _ = run(capsys, *SMALL, "--json", "--backend", backend, "--limit", str(limit))
        found = json.loads(out)
        assert (found["verdict"], found["states"]) == ("bounded by states", limit)
        assert sum(found["depths"]) == limit
        assert found["waiting"] > 0
    _, out, _ = run(capsys, *SMALL, "--json", "--backend", backend, "--limit", str(whole + 1))
    assert json.loads(out)["verdict"] == "complete"


@pytest.mark.parametrize("backend", ["python", "rust"])
def test_a_pool_need_not_hold_a_state_twice_to_admit_behind_a_hit(
    capsys: pytest.CaptureFixture[str], backend: str
) -> None:
    """Five tokens behind a hit of four need both states: of a pool of four blocks too many."""
    if backend == "rust":
        need_twin()
    sizes = ("--blocks", "4", "--requests", "1", "--tokens", "5", "--letters", "1")
    words = ("--block-size", "2", "--groups", "full,state", "--moves", "calls", "--limit", "100")
    left = ("--without", "fork,reset_prefix_cache", "--properties", "L-ADMIT")
    code, out, _ = run(capsys, *sizes, *words, *left, "--backend", backend)
    assert (code, out.partition(":")[0]) == (command.FINE, "bounded by states")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("states-external", "--blocks 4 --requests 1 --groups full,state --external 2"),
        ("states-marks", "--blocks 3 --requests 2 --groups full,state@4 --marks --events"),
    ],
)
def test_a_world_of_states_can_be_described(
    capsys: pytest.CaptureFixture[str], name: str, words: str
) -> None:
    left = "fork,remove_request,reset_prefix_cache" + ",append" * (name == "states-marks")
    shared = ("--tokens", "4", "--letters", "1", "--moves", "calls", "--without", left)
    code, out, _ = run(capsys, *words.split(), *shared, "--json")
    found, wanted = json.loads(out), PROFILES[name]
    assert (code, found["states"], found["edges"]) == (
        command.FINE,
        wanted.num_states,
        wanted.num_edges,
    )


def test_a_world_whose_hits_end_inside_blocks_can_be_described(
    capsys: pytest.CaptureFixture[str],
) -> None:
    left = "fork,append,remove_request,reset_prefix_cache"
    sizes = "--blocks 2 --requests 2 --tokens 4 --block-size 3 --hash-block-size 1"
    code, out, _ = run(capsys, *sizes.split(), "--without", left, "--json")
    found, wanted = json.loads(out), PROFILES["tails-threes"]
    assert (code, found["states"], found["edges"]) == (
        command.FINE,
        wanted.num_states,
        wanted.num_edges,
    )
    code, _, err = run(capsys, *sizes.replace("size 1", "size 2").split())
    assert (code, "greatest common divisor is 3" in err) == (command.USAGE_ERROR, True)


def test_a_report_says_what_it_is_of(capsys: pytest.CaptureFixture[str]) -> None:
    few = ("--properties", "KV-READ,NOCRASH", "--no-symmetry", "tokens", "--tokens", "1")
    _, out, _ = run(capsys, *SMALL, *few, "--json")
    found = json.loads(out)
    world = found["world"]
    assert (world["num_requests"], world["config"]["num_blocks"], world["moves"]) == (
        2,
        2,
        "engine",
    )
    assert "allocate_slots" in world["calls"]
    assert found["symmetry"] == {"requests": True, "blocks": True, "tokens": False}
    assert [each["name"] for each in found["properties"]] == ["KV-READ", "NOCRASH"]
    assert found["properties"][1]["sentence"].startswith("a call fails only with")
    assert (found["properties"][1]["scope"], found["properties"][1]["severity"]) == (
        "transition",
        "crash",
    )
    assert "LEAK" in found["left_out"]
    _, out, _ = run(capsys, *SMALL, *few)
    assert "complete: no property that was checked is broken" in out
    assert "checked alone: KV-READ, NOCRASH" in out
    assert "states that differ by the names of tokens are counted apart" in out
    _, out, _ = run(capsys, *SMALL)
    assert "checked" not in out
    assert "symmetry" not in out


def test_a_violation_in_the_data_has_its_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    mutant = next(each for each in MUTANTS if each.name == "m_no_cow")
    with Patcher() as patcher:
        mutant.patch(patcher)
        words = ("--blocks", "2", "--requests", "2", "--tokens", "3", "--properties", "KV-READ")
        code, out, _ = run(capsys, *words, "--json")
    found = json.loads(out)["violation"]
    assert (code, found["property"], found["severity"]) == (command.VIOLATED, "KV-READ", "wrong KV")
    assert found["sentence"].startswith("what a query sees is read")


def test_all_backends_count_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    need_twin()
    counts = []
    for backend in ("python", "rust", "both"):
        _, out, _ = run(capsys, *SMALL, "--json", "--backend", backend)
        found = json.loads(out)
        assert found["backend"] == backend
        counts.append((found["verdict"], found["states"], found["edges"], found["depths"]))
    assert counts[0] == counts[1] == counts[2]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--blocks", "2"), "give --requests, --tokens"),
        (("--profile", "none"), "there is no profile 'none'"),
        (("--profile", "host", "--blocks", "2"), "omit --blocks"),
        ((*SMALL, "--calls", "swap_in"), "use --host-blocks"),
        ((*SMALL, "--calls", "jump"), "there is no call 'jump'"),
        ((*SMALL, "--groups", "round"), "no group is 'round'"),
        ((*SMALL, "--groups", "state:2"), "no group is 'state:2'"),
        ((*SMALL, "--without", "jump"), "to leave out; there are add_request, allocate_slots"),
        ((*SMALL, "--calls", "load"), "nothing uses load: it brings whole blocks and leaves"),
        ((*SMALL, "--calls", "load", "--tokens", "3", "--without", "free"), "that it preempted"),
        ((*SMALL, "--loads-fail"), "no load can fail"),
        (
            (*SMALL, "--external", "1", "--moves", "calls", "--ahead", "1", "--loads-fail"),
            "--loads-fail with --ahead needs --max-in-flight",
        ),
        (
            (*SMALL, "--tokens", "3", "--calls", "load", "--max-in-flight", "1", "--loads-fail"),
            "omit --loads-fail",
        ),
        ((*SMALL, "--pins", "2"), "nothing is pinned"),
        ((*SMALL, "--drafts", "1", "--ahead", "1"), "use --drafts or --ahead"),
        ((*SMALL, "--outputs", "3"), "no output is to come: use --ahead"),
        ((*SMALL, "--forgets-overwritten"), "no batch is to come: use --max-in-flight"),
        ((*SMALL, "--prompt", "3"), "longer than a request may be"),
        ((*SMALL, "--drafts", "2"), "leave no space"),
        ((*SMALL, "--external", "1"), "use --moves calls"),
        ((*SMALL, "--mutants"), "--mutants has a world for each seeded bug"),
        ((*SMALL[2:], "--blocks", "0"), "--blocks must be at least 1"),
        ((*SMALL, "--write-test", "/no/such/folder/test.py"), "there is no such folder"),
        ((*SMALL, "--no-symmetry", "rows"), "only requests, blocks, tokens are renamed"),
        (
            (*SMALL, "--properties", "NONE"),
            "there is no property NONE; `kvcore check --properties list` names them all",
        ),
        ((*SMALL, "--properties", "REFINE"), "REFINE is not checked here: it compares both"),
        ((*SMALL, "--properties", "MANAGER"), "MANAGER is not checked here: a world has kvcore's"),
        ((*SMALL, "--properties", "SCHEDULER"), "SCHEDULER is not checked here: the moves are"),
        ((*SMALL, "--properties", "POLICY"), "POLICY checks a policy of your own"),
        (
            (*SMALL, "--max-in-flight", "1", "--properties", "OWNER-MIRROR"),
            "OWNER-MIRROR is not checked here: with batches in flight",
        ),
        ((*SMALL, "--watermark", "2"), "one request needs 1 block"),
    ],
)
def test_options_that_contradict_each_other_are_refused_in_one_sentence(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    code, out, err = run(capsys, *words)
    assert (code, out) == (command.USAGE_ERROR, "")
    assert said in err
    assert err.count("\n") == 1


def test_external_loads_in_flight_can_be_let_fail(
    capsys: pytest.CaptureFixture[str], backend: Backend
) -> None:
    words = ("--external", "1", "--loads-fail", "--moves", "calls", "--max-in-flight", "1")
    size = (*SMALL, "--block-size", "1", "--limit", "300", "--backend", backend)
    code, out, _ = run(capsys, *size, *words, "--json")
    found = json.loads(out)
    assert (code, found["verdict"]) == (command.FINE, "bounded by states")
    assert found["calls"]["rewind: done"]


def test_a_violation_is_told_and_written_to_files(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    mutant = next(each for each in MUTANTS if each.name == "m_no_cow")
    files = [tmp_path / "test_found.py", tmp_path / "found.trace"]
    with Patcher() as patcher:
        mutant.patch(patcher)
        words = ("--write-test", str(files[0]), "--write-trace", str(files[1]))
        code, out, _ = run(capsys, "--blocks", "2", "--requests", "2", "--tokens", "3", *words)
    assert code == command.VIOLATED
    assert out.startswith("violation of ")
    assert all(file.stat().st_size for file in files)


def test_interrupted_it_gives_its_partial_verdict(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(_: command.Progress, report: Report) -> None:
        if report.num_states > 10:
            raise KeyboardInterrupt

    monkeypatch.setattr(command.Progress, "__call__", stop)
    code, out, _ = run(capsys, *SMALL)
    assert code == command.STOPPED
    assert out.startswith("interrupted: nothing is broken so far")


def test_nothing_is_said_where_the_reader_has_gone() -> None:
    words = f"{sys.executable} -m kvcore.check.cli.command --list | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", words], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout.strip() in ("0", str(READER_GONE))


def test_a_report_names_only_properties_that_were_checked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words, backend, without in (
        ((), "python", {"REFINE", "POLICY", "SCHEDULER", "MANAGER"}),
        ((), "both", {"POLICY", "SCHEDULER", "MANAGER"}),
        (("--max-in-flight", "1"), "rust", {"REFINE", "OWNER-MIRROR"}),
    ):
        if backend != "python":
            need_twin()
        _, text, _ = run(capsys, *SMALL, *words, "--backend", backend, "--depth", "2", "--json")
        checked = {each["name"] for each in json.loads(text)["properties"]}
        assert not checked & without
        assert {"KV-READ", "NOCRASH", "DEADLOCK-FREE"} <= checked
        assert ("REFINE" in checked) == (backend == "both")


def test_a_value_that_cannot_be_read_is_told_in_one_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main([*SMALL, "--time", "0"])
    assert ended.value.code == command.USAGE_ERROR
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("kvcore check: argument --time: must be a number from 1e-09")


def test_the_properties_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = run(capsys, "--properties", "list")
    assert (code, len(text.splitlines())) == (command.FINE, len(PROPERTIES))
    code, text, _ = run(capsys, "--properties", "list", "--json")
    listed = json.loads(text)
    assert list(listed) == list(PROPERTIES)
    assert {each["scope"] for each in listed.values()} == {"state", "transition", "batch", "run"}


def test_a_call_that_is_never_enabled_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    without = ("--without", "free")
    _, out, _ = run(capsys, "--blocks", "2", "--requests", "1", "--tokens", "2", *without, "--json")
    assert json.loads(out)["enabled"]["fork"] == 0
    assert json.loads(out)["enabled"]["append"] > 0
    _, out, _ = run(capsys, "--blocks", "2", "--requests", "1", "--tokens", "2", *without)
    assert "fork 0" in out.partition("calls enabled: ")[2].partition("\ncalls: ")[0]
