# SPDX-License-Identifier: Apache-2.0
"""Shell completion: subcommands, and the options of each."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("kvcore si", {"simulate", "size"}),
        ("kvcore r", {"replay", "route"}),  # none of the files here
        ("kvcore view --b", {"--backend"}),
        (
            "kvcore replay --policy ",
            {"lru", "uncached_first", "queue_aware", "lru2", "s3fifo", "learned", "retention"},
        ),
    ],
)
def test_a_shell_completes(line: str, expected: set[str]) -> None:
    words = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE": "1", "IFS": " "}
    program = "import os; os.dup2(1, 8); from kvcore.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **words}, capture_output=True, text=True
    )
    assert set(done.stdout.replace("\v", " ").split()) == expected
