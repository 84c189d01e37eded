# SPDX-License-Identifier: Apache-2.0
"""`kvcore sanitize` of an engine that is not installed, or whose environment is broken."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvcore.sanitizer.hunter.command import main
from tests.helpers.open_files import open_files


def test_an_engine_that_is_not_there_ends_with_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVCORE_PEERS", str(tmp_path))
    monkeypatch.delenv("KVCORE_NANO_VLLM", raising=False)
    for engine, reported in {
        "nano-vllm": "Set KVCORE_NANO_VLLM to the folder of its source",
        "transformers": "Run: python -m benches.peers.install transformers",
        "nobody": "no adapter for 'nobody'; known are nano-vllm, mini-sglang",
        "nobody:Adapter": "No module named 'nobody'",
    }.items():
        assert main([engine, "--runs", "1"]) == 2
        assert reported in capsys.readouterr().err


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("#!/nowhere/python\n", "No such file or directory"),
        (
            f"#!/bin/sh\nexec {sys.executable} -I -c 'import nothing'\n",
            "ModuleNotFoundError: No module named 'nothing'",
        ),
        pytest.param(
            f'#!/bin/sh\nexec {sys.executable} "$@"\n',
            "OSError: libgone.so is missing",
            marks=pytest.mark.skipif(
                find_spec("torch") is None, reason="the adapter imports torch before its engine"
            ),
        ),
    ],
)
def test_an_environment_that_cannot_run_its_engine_is_named_with_the_reason(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    script: str,
    reason: str,
) -> None:
    monkeypatch.setenv("KVCORE_PEERS", str(tmp_path))
    python, package = tmp_path / "transformers/bin/python", tmp_path / "broken/transformers"
    python.parent.mkdir(parents=True)
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise OSError('libgone.so is missing')\n")
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    python.write_text(script)
    python.chmod(0o755)
    assert main(["transformers", "--runs", "1"]) == 2
    *_, said = capsys.readouterr().err.splitlines()
    assert said == (
        f"kvcore sanitize: transformers: {tmp_path / 'transformers'} cannot run it: {reason}. "
        "Remove that folder. Run: python -m benches.peers.install transformers"
    )


def test_an_engine_that_is_not_there_leaves_no_pipe_open(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVCORE_PEERS", str(tmp_path))
    before = open_files()
    for _ in range(3):
        assert main(["transformers"]) == 2
    assert open_files() <= before
