# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.bytes.run`: its words, and that it finds a decoder which breaks its property."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable

import pytest

from tests.bytes import run
from tests.bytes.damage import Damager, Sample
from tests.bytes.doors import Door

LETTERS = Damager([Sample((b"a", b"b", b"c", b"d", b"e"))])


def add_door(monkeypatch: pytest.MonkeyPatch, read: Callable[[bytes], bool]) -> None:
    """Add one more door, `letters`, for this process alone."""
    monkeypatch.setitem(run.ALL, "letters", Door(name="letters", make=lambda: LETTERS, read=read))
    monkeypatch.setattr(run, "damager", lambda _: LETTERS)


def test_inputs_of_a_seed_are_the_same_again(monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[bytes] = []

    def read(data: bytes) -> bool:
        met.append(data)
        return False

    add_door(monkeypatch, read)
    tried = run.try_piece("letters", 32, 7)
    first = list(met)
    met.clear()
    run.try_piece("letters", 32, 7)
    assert met == first
    assert (tried.inputs, tried.refused, tried.broken) == (32, 0, "")
    assert len(set(first)) > 10
    met.clear()
    run.try_piece("letters", 30, 8)
    assert met != first


def test_a_broken_property_is_told_with_small_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(data: bytes) -> bool:
        assert data.count(b"a") < 2, "two of them"
        return True

    add_door(monkeypatch, read)
    tried = run.try_piece("letters", 300, 1)
    assert "two of them" in tried.broken
    shown = ast.literal_eval(tried.broken.rpartition("letters: ")[2])
    assert shown.count(b"a") == 2
    assert tried.inputs == tried.refused > 0


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--help",), 0, "usage: python -m tests.bytes.run [-h] [--inputs INPUTS] [DOOR ...]"),
        (("nosuch",), 2, "no door nosuch; the doors are states, events, batches, traces"),
        (("--inputs", "0"), 2, "argument --inputs: invalid count value: '0'"),
    ],
)
def test_the_command_says_what_it_takes(
    words: tuple[str, ...],
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["run", *words])
    with pytest.raises(SystemExit, match=str(code)):
        run.main()
    out, err = capsys.readouterr()
    assert said in (err if code else out)
