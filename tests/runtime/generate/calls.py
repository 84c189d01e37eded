# SPDX-License-Identifier: Apache-2.0
"""Small calls of `kvcore generate`."""

import json
from pathlib import Path
from typing import Any

import pytest
from kvcore_runtime.generate import command

TWO_PROMPTS = (
    '{"id": "sea", "system": "Be brief.", "turns": ["Why is the sea salt?", "And how deep?"]}\n'
    '{"id": "song", "turns": ["Sing!"], "n": 2, "temperature": 1.0, "seed": 4}\n'
)


def call(prompts: Path, *options: str) -> list[str]:
    """Return a small call: python core, tiny model, few tokens; later options win."""
    small = ["--model", "tiny", "--max-tokens", "6", "--threads", "1", "--backend", "python"]
    return ["--prompts", str(prompts), *small, *options]


def run_json(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, Any]:
    code = command.main([*argv, "--json"])
    return code, json.loads(capsys.readouterr().out)
