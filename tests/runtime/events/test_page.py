# SPDX-License-Identifier: Apache-2.0
"""The programs of docs/events.md run, one after another."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import Backend

PAGE = Path(__file__).parents[3] / "docs" / "events.md"


def test_the_programs_of_the_page_run(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("zmq", reason="pyzmq is not installed")
    monkeypatch.setattr("kvcore.manager.default_backend", lambda: backend)
    programs = re.findall(
        r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    assert len(programs) == 2
    exec(compile("\n".join(programs), PAGE.name, "exec"), {"__name__": "__page__"})
