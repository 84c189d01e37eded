# SPDX-License-Identifier: Apache-2.0
"""Defects of the far tier, seeded one at a time: a test fails on each.

A defect is a replacement in the source of one module; its classes and functions get what the spoilt
source defines.
"""

import inspect
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType

import pytest
from kvcore_runtime.far.manual import ManualTier

from kvcore.far import fetches, link, page, stores
from tests.conftest import Backend
from tests.runtime.far import test_far_engine, test_page
from tests.runtime.far.adversary import HandClock

Test = Callable[..., None]
Seeded = tuple[ModuleType, str, str, Test]

SEEDED: dict[str, Seeded] = {
    "no checksum": (
        page,
        " or _digest(view) != digest",
        "",
        test_page.test_each_flipped_bit_is_seen,
    ),
    "name not checked": (
        page,
        "return FarStatus.OK if key.hex() == named_key else FarStatus.DAMAGED",
        "return FarStatus.OK",
        test_page.test_a_page_is_that_of_its_name_and_of_no_other,
    ),
    "name without weights": (
        page,
        'hashlib.sha256("\\n".join((_PREFIX, *lines)).encode()).digest()',
        "hashlib.sha256(_PREFIX.encode()).digest()",
        test_far_engine.test_other_weights_find_nothing_and_an_epoch_needs_its_weights,
    ),
    "a timeout frees the slots": (
        link,
        "        self.give_up(ticket)\n",
        "        self.give_up(ticket) or [*map(self._staging.give_back, ticket.slots)]\n",
        test_far_engine.test_slots_of_a_late_ticket_stay_in_quarantine_until_it_ends,
    ),
    "a hole counts": (
        fetches,
        "if not has(own[position]):",
        "if position == first and not has(own[position]):",
        test_far_engine.test_pages_behind_a_damaged_one_are_computed_and_it_is_stored_anew,
    ),
    "staged pages of older weights count": (
        fetches,
        "lambda key: place.name(key) in fetch.pages)",
        "lambda key: key.hex() in {name.split('/')[-1] for name in fetch.pages})",
        test_far_engine.test_pages_that_were_staged_for_older_weights_are_not_counted,
    ),
    "an abort keeps its pages": (
        fetches,
        (
            "            self._loads[operation].fetch = None\n"
            "        self._leave(fetch, FetchState.OVER)\n"
        ),
        "            self._loads[operation].fetch = None\n",
        test_far_engine.test_an_abort_frees_all_once_the_tier_has_answered,
    ),
    "a load that ended keeps its slot": (
        fetches,
        "        self._give_back(load.slot)\n        fetch = load.fetch\n",
        "        fetch = load.fetch\n",
        test_far_engine.test_few_tokens_are_computed_rather_than_fetched,
    ),
    "a store that failed is believed": (
        stores,
        "            if status is not FarStatus.OK:\n",
        "            if False:\n",
        test_far_engine.test_what_was_not_kept_is_stored_again,
    ),
    "a dropped store is believed": (
        stores,
        "        self._known.discard(store.name)\n",
        "",
        test_far_engine.test_what_was_not_kept_is_stored_again,
    ),
}


def seed(module: ModuleType, source: str, patched: pytest.MonkeyPatch) -> None:
    """Give a module's classes, and the users of its functions, the definitions of this source."""
    spoilt = ModuleType(module.__name__)
    exec(compile(source, "spoilt", "exec"), vars(spoilt))
    for name, value in list(vars(module).items()):
        if getattr(value, "__module__", None) != module.__name__ or name not in vars(spoilt):
            continue
        if isinstance(value, FunctionType):
            for importer in [each for each in sys.modules.values() if "far" in each.__name__]:
                if vars(importer).get(name) is value:
                    patched.setattr(importer, name, vars(spoilt)[name])
        elif isinstance(value, type):
            for method, of in vars(vars(spoilt)[name]).items():
                if isinstance(of, FunctionType) and method in vars(value):
                    code = of.__code__
                    patched.setattr(vars(value)[method], "__code__", code)


def call(test: Test, backend: Backend) -> None:
    """Call a test with what its fixtures would give."""
    wanted = inspect.signature(test).parameters
    given = {
        "backend": backend,
        "tier": ManualTier(),
        "clock": HandClock(),
        "num_steps": 3,
        "answered": True,
    }
    test(**{name: given[name] for name in wanted})


@pytest.mark.parametrize("name", SEEDED)
def test_a_seeded_defect_is_found(
    name: str, backend_of_engine: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, old, new, test = SEEDED[name]
    source = inspect.getsource(module)
    assert source.count(old) == 1, "the line has changed: seed the defect anew"
    seed(module, source.replace(old, new), monkeypatch)
    with pytest.raises((Exception, pytest.fail.Exception)):
        call(test, backend_of_engine)
    monkeypatch.undo()
    call(test, backend_of_engine)
