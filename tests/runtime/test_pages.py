# SPDX-License-Identifier: Apache-2.0
"""The programs of pages that need the runtime run, those of one page one after another."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import Backend

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("page", "num_programs", "package"),
    [
        ("events.md", 3, "zmq"),
        ("cluster/ranks.md", 1, "torch"),
        ("cluster/apart.md", 1, "torch"),
        ("cluster/far-tiers.md", 1, "torch"),
    ],
)
def test_the_programs_of_a_page_run(
    page: str,
    num_programs: int,
    package: str,
    backend: Backend,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed")
    monkeypatch.setattr("kvcore.manager.default_backend", lambda: backend)
    programs = re.findall(
        r"^```python\n(.*?)^```",
        (DOCS / page).read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )
    assert len(programs) == num_programs
    exec(compile("\n".join(programs), page, "exec"), {"__name__": "__page__"})
