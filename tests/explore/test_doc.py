# SPDX-License-Identifier: Apache-2.0
"""docs/invariants.md says what the code and the seeded bugs say."""

from __future__ import annotations

import re
from pathlib import Path

from kvcore.check.mutants import MUTANTS
from kvcore.check.properties import PROPERTIES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "invariants.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| ([A-Z][A-Z0-9-]+) \| (.+) \| (.+) \|$", re.MULTILINE)
ROWS = {name: (sentence, bugs) for name, sentence, bugs in ROW.findall(PAGE)}


def test_page_has_every_property_with_its_sentence() -> None:
    assert {name: row[0] for name, row in ROWS.items()} == {
        name: each.sentence for name, each in PROPERTIES.items()
    }


def test_page_names_the_seeded_bugs_that_each_property_finds() -> None:
    for name, (_, bugs) in ROWS.items():
        assert set(re.findall(r"`(\w+)`", bugs)) == {m.name for m in MUTANTS if name in m.broken}


def test_page_names_files_that_exist() -> None:
    for path in re.findall(r"`((?:kvcore|tests|rust)/[\w/.]*)`", PAGE):
        assert (ROOT / path).exists(), path
