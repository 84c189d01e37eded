# SPDX-License-Identifier: Apache-2.0
"""`kvcore generate`: answers as they finish, what is left of an interrupted run, a short table."""

from pathlib import Path

import pytest
from kvcore_runtime.engine.engine import Engine
from kvcore_runtime.engine.sequence import Completion
from kvcore_runtime.generate import command
from kvcore_runtime.generate.report import TABLE, format_count

from tests.runtime.generate.calls import call, run_json


def test_features_that_were_off_have_no_line_in_the_table(
    prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    off = {"hits inside", "drafts", "blocks in files", "in flight", "waits", "published"}
    for options, without in (
        ([], off),
        (["--host-blocks", "0"], off | {"blocks swapped"}),
        (["--publish", "completed"], off - {"published"}),
        (["--hash-block-size", "4"], off - {"hits inside"}),
    ):
        assert command.main(call(prompts, "--no-verify", *options)) == 0
        names = {line.split("  ")[0] for line in capsys.readouterr().out.splitlines()}
        assert names & set(TABLE) == set(TABLE) - without


def test_an_answer_is_shown_as_soon_as_it_is_there_and_once(
    prompts: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    step = Engine.step

    def watched(engine: Engine) -> list[Completion]:
        shown.append(capsys.readouterr().out)
        return step(engine)

    monkeypatch.setattr(Engine, "step", watched)
    assert command.main(call(prompts)) == 0
    before = "".join(shown)
    assert before.startswith("-- sea/1: ")
    assert "-- sea/2: " not in before, "the last answer comes with the last step"
    whole = before + capsys.readouterr().out
    for name in ("-- sea/1: ", "-- sea/2: ", "-- song, sample 1: ", "-- song, sample 2: "):
        assert whole.count(name) == 1


@pytest.mark.parametrize("in_flight", ["0", "1"])
@pytest.mark.parametrize("least", [0, 1])
def test_interrupted_it_reports_what_was_done(
    prompts: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    least: int,
    in_flight: str,
) -> None:
    step, done = Engine.step, list[Completion]()

    def interrupted(engine: Engine) -> list[Completion]:
        if len(done) >= least:
            raise KeyboardInterrupt
        completions = step(engine)
        done.extend(completions)
        return completions

    monkeypatch.setattr(Engine, "step", interrupted)
    argv = call(prompts, "--max-in-flight", in_flight)
    assert command.main(argv) == 130
    out, err = capsys.readouterr()
    num_answers = out.count("-- ")
    assert num_answers == len(done) < 4
    said = format_count(num_answers, "answers")
    assert err == f"kvcore generate: interrupted: {said}, not verified\n"
    assert "prompt tokens  " in out
    done.clear()
    code, result = run_json(argv, capsys)
    assert (code, result["interrupted"], result["verified"]) == (130, True, None)
    assert len(result["answers"]) == num_answers


def test_interrupted_while_it_verifies_it_says_that_nothing_is_verified(
    prompts: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "verify_answers", stop)
    assert command.main(call(prompts)) == 130
    out, err = capsys.readouterr()
    assert "-- sea/2: " in out
    assert "verified:" not in out
    assert err == "kvcore generate: interrupted: 4 answers, not verified\n"
    monkeypatch.setattr(command, "load_model", stop)
    assert command.main(call(prompts)) == 130
    assert capsys.readouterr().err == "kvcore: interrupted\n"
