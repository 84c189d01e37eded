# SPDX-License-Identifier: Apache-2.0
"""The rules hold in both backends and both ways of reading, and each seeded bug breaks its rule."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from kvcore.sanitizer import Sanitizer
from tests.sanitizer.mutants import MUTANTS, Mutant
from tests.sanitizer.rules import RULES, Make

SIDES = {
    f"{backend}-{'full' if full else 'incremental'}": partial(Sanitizer, full=full, backend=backend)
    for backend in ("python", "rust")
    for full in (False, True)
}


@pytest.mark.parametrize("make", SIDES.values(), ids=SIDES)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule(rule: Callable[[Make], None], make: Make) -> None:
    rule(make)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_seeded_bug_breaks_its_rule(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.seed(monkeypatch)
    with pytest.raises(AssertionError):
        mutant.rule(SIDES["python-incremental"])
