# SPDX-License-Identifier: Apache-2.0
"""What the commands print for `--help`: no phrase twice in a row, no code instead of its value;
and one line for a wrong call.
"""

from __future__ import annotations

import re
from importlib import metadata

import pytest

from kvcore.cli import main as cli

COMMANDS = sorted(point.name for point in metadata.entry_points(group=cli.GROUP))
SAID_TWICE = re.compile(r"\b([a-z]+(?: [a-z]+){0,3}) \1\b")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_says_each_thing_once(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")  # one line an option
    with pytest.raises(SystemExit):
        cli.main([name, "--help"])
    text = capsys.readouterr().out
    assert not SAID_TWICE.findall(text)
    assert not re.findall(r"\{[^}]*[(.\]'\"][^}]*\}", text), "code instead of its value"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_wrong_call_gets_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main([name, "--no-such-option"])
    reported = capsys.readouterr()
    assert re.fullmatch(rf"kvcore {name}: .+; --help shows all options\n", reported.err)
    assert not reported.out


@pytest.mark.parametrize("name", ["explain", "replay", "route", "size", "view"])
def test_a_file_that_is_not_there_is_said_before_a_missing_option(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main([name, "no-such-file"])
    said = f"kvcore {name}: no-such-file cannot be read: No such file or directory\n"
    assert capsys.readouterr().err == said
