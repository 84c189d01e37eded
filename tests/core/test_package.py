# SPDX-License-Identifier: Apache-2.0
"""An installed package as a user expects it: its version, `python -m`, its errors by name."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import kvcore
import kvcore.errors
from kvcore.types import errors

ROOT = Path(__file__).parents[2]


def test_the_version_is_one() -> None:
    citation = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert citation is not None
    assert kvcore.__version__ == importlib.metadata.version("kvcore") == citation[1]


def test_the_command_is_the_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvcore", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"kvcore {kvcore.__version__}\n"


def test_every_error_has_a_public_path() -> None:
    kinds = {
        name: kind
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.KvcoreError)
    }
    assert len(kinds) > 40
    assert all(getattr(kvcore.errors, name) is kind for name, kind in kinds.items())
