# SPDX-License-Identifier: Apache-2.0
"""Wrong options and files of kvcore sanitize: one line before the first run, and exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcore.sanitizer.hunter.command import main

TEMPLATE = "kvcore.sanitizer.hunter.template:Adapter"


@pytest.mark.parametrize("text", ["block_size", "=4", ""])
def test_an_axis_without_a_value_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([TEMPLATE, "--axis", text]) == 2
    assert "--axis takes NAME=VALUE" in capsys.readouterr().err


def test_what_is_wrong_with_the_files_is_said_before_the_hunt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcore.sanitizer.hunter.command.events", pytest.fail)
    file, folder, none = tmp_path / "file", tmp_path / "folder", tmp_path / "none" / "file"
    file.write_text('{"seed": 1}\n{"seed": ')
    folder.mkdir()
    for options, said in {
        ("--write", file): f"{file}: File exists",
        ("--record", folder): f"{folder}: Is a directory",
        ("--record", none): f"{none}: No such file or directory",
        ("--record", file): f"{file}, line 2: not a hunt of kvcore sanitize",
        ("--replay", none): f"{none}: No such file or directory",
        ("--replay", file): f"{file} is no finding of kvcore sanitize (JSONDecodeError: ",
    }.items():
        assert main([TEMPLATE, *map(str, options)]) == 2
        assert capsys.readouterr().err.startswith(f"kvcore sanitize: {said}")
    file.write_text('{"world": {"axes": {}}}')
    assert main([TEMPLATE, "--replay", str(file)]) == 2
    assert f"{file} is no finding of kvcore sanitize (KeyError: " in capsys.readouterr().err


def test_an_option_that_the_engine_does_not_have_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([TEMPLATE, "--axis", "block_sise=4", "--runs", "1"]) == 2
    said = capsys.readouterr().err
    assert "--axis block_sise: the template's engine has no such option, but block_size" in said
