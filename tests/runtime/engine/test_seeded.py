# SPDX-License-Identifier: Apache-2.0
"""Defects that once lived among the runtime's tests, seeded one at a time: a test fails on each.

A defect is a replacement in the source of one module. What the modules of the test have imported
from there is taken from the spoilt source. With the source as it is, the same test passes.
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from kvcore_runtime.attention import recurrence
from kvcore_runtime.cache import apply, copies, guard, segments
from kvcore_runtime.engine import connector, forward

from kvcore import scheduler
from tests.conftest import Backend
from tests.runtime.cache import plans, test_copies, test_plans
from tests.runtime.engine import test_hand_over, test_hybrid_engine

Seeded = tuple[ModuleType, str, str, Callable[..., None]]

SEEDED: dict[str, Seeded] = {
    "parts that do not divide a page": (
        copies,
        " and rest == 0 else 1",
        " else 1",
        test_copies.test_a_page_that_parts_do_not_divide_is_copied_whole,
    ),
    "an aborted load leaves its parcel": (
        connector,
        "            self._channel.drop(sequence.request.request_id)\n",
        "            pass\n",
        test_hand_over.test_who_is_forgotten_receives_nothing_later,
    ),
    "a plan waits for no block of its own": (
        scheduler,
        "(self._runs_ahead and self.has_moved)",
        "False",
        test_plans.test_blocks_of_the_plan_itself_are_waited_for,
    ),
    "a state is not copied into the block that is written": (
        copies,
        "    if not sources:\n",
        "    if sources:\n",
        test_hybrid_engine.test_a_hit_needs_no_guard,
    ),
    "a state does not begin as zeros": (
        copies,
        "    fill_pages(cache.blocks, blocks, 0.0)\n",
        "",
        test_hybrid_engine.test_a_hit_needs_no_guard,
    ),
    "a state is written where the first token of the step would lie": (
        recurrence,
        "entries[len(self.positions) :]",
        "entries[: plan.num_blocks]",
        test_hybrid_engine.test_a_hit_needs_no_guard,
    ),
    "a state is not written back": (
        recurrence,
        "            part.index_copy_(0, self._blocks, each)\n",
        "            pass\n",
        test_hybrid_engine.test_a_hit_needs_no_guard,
    ),
    "the guard does not look at states": (
        guard,
        "any(each[block].isnan().any() for each in parts)",
        "False",
        test_hybrid_engine.test_a_state_that_nothing_filled_is_found_by_the_guard,
    ),
    "what is poisoned is not NaN as a state": (
        guard,
        "self._cache.blocks.pieces[:, ids(blocks, self._cache.device)] = -1",
        'self._cache.blocks.data[blocks] = float("nan")',
        test_hybrid_engine.test_a_state_that_nothing_filled_is_found_by_the_guard,
    ),
}
IMPORTERS = (
    apply,
    forward,
    plans,
    segments,
    test_copies,
    test_hand_over,
    test_plans,
)
ARGUMENTS: dict[str, Any] = {
    "block_size": 5243,
}


def seed(module: ModuleType, source: str, patched: pytest.MonkeyPatch) -> None:
    """Let the importers of a module have what this source of it defines.

    The engine's scheduler is derived from the one of the replay, which gets its spoilt methods.
    """
    spoilt = ModuleType(module.__name__)
    exec(compile(source, "spoilt", "exec"), vars(spoilt))
    if module is scheduler:
        for name, method in vars(vars(spoilt)["Scheduler"]).items():
            if inspect.isfunction(method):
                patched.setattr(scheduler.Scheduler, name, method)
    for importer in IMPORTERS:
        for name, value in list(vars(importer).items()):
            if name in vars(spoilt) and value is vars(module).get(name):
                patched.setattr(importer, name, vars(spoilt)[name])


def call(test: Callable[..., None], path: Path) -> None:
    """Call a test with what its fixtures would give; the runtime is the same on both backends."""
    path.mkdir()
    backend: Backend = "python"
    given = ARGUMENTS | {"backend": backend, "tmp_path": path}
    wanted = inspect.signature(test).parameters
    test(**{name: given[name] for name in wanted})


@pytest.mark.parametrize("name", SEEDED)
def test_a_seeded_defect_is_found(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, old, new, test = SEEDED[name]
    source = inspect.getsource(module)
    assert source.count(old) == 1, "the line has changed: seed the defect anew"
    seed(module, source, monkeypatch)
    call(test, tmp_path / "sound")
    monkeypatch.undo()
    seed(module, source.replace(old, new), monkeypatch)
    with pytest.raises((Exception, pytest.fail.Exception)):
        call(test, tmp_path / "spoilt")
