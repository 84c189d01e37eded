# SPDX-License-Identifier: Apache-2.0
"""docs/invariants.md and docs/checking.md say what the code and the seeded bugs say."""

from __future__ import annotations

import re
from pathlib import Path

from kvcore.check.mutants import MUTANTS
from kvcore.check.mutants.catalogue import SENTENCES, by_row
from kvcore.check.profiles.registry import PROFILES
from kvcore.check.properties.registry import PROPERTIES
from tools.twin_mutants import BUGS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "invariants.md").read_text(encoding="utf-8")
CHECKING = (ROOT / "docs" / "checking.md").read_text(encoding="utf-8")
FLOWING = " ".join(CHECKING.split())
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


def number(text: str) -> int:
    """Return a number as the pages write it."""
    return int(text.replace(",", ""))


def test_timed_worlds_have_the_counts_that_tests_pin() -> None:
    row = r"^\| (\w+); (\d) \| ([\d,]+) \| ([\d,]+) \|"
    rows = re.findall(row, CHECKING, re.MULTILINE)
    pinned = (ROOT / "tests" / "check" / "test_twin_search.py").read_text(encoding="utf-8")
    assert len(rows) == 6
    for name, prompt, states, edges in rows:
        counts = (number(states), number(edges))
        sizes = ", ".join([*name.split("x"), prompt])
        assert f"({sizes}), {counts}" in pinned
        if name in PROFILES and PROFILES[name].world.moves_per_batch == 1:
            assert counts == (PROFILES[name].num_states, PROFILES[name].num_edges)
            assert PROFILES[name].world.num_prompt == int(prompt)


def test_the_pages_have_the_score_of_the_seeded_bugs() -> None:
    expressed = sum(map(bool, by_row(MUTANTS).values()))
    unseen = sum(each.costs is not None for each in MUTANTS)
    unnamed = sum(each.unnamed is not None for each in MUTANTS)
    for said in (
        f"puts {len(MUTANTS)} bugs into the core",
        f"they stand for {expressed} of the {len(SENTENCES)} rows",
        f"hunts {len(BUGS)} more",
        f"Users would notice {len(MUTANTS) - unseen}; for the {unseen} others",
        f"{len(MUTANTS) - unnamed} have a named world; for the {unnamed} others",
    ):
        assert said in FLOWING, said
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"`--mutants` hunts {len(MUTANTS)} bugs" in readme
    assert f"**The proof is tested.** {len(MUTANTS)} bugs" in readme
