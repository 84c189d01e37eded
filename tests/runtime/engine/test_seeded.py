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
from kvcore_runtime.cache import copies, directory
from kvcore_runtime.engine import connector, directory_exchange

from kvcore import scheduler
from tests.conftest import Backend
from tests.runtime.cache import plans, test_copies, test_directory_private, test_plans
from tests.runtime.engine import desk, test_directory_exchange, test_hand_over

Seeded = tuple[ModuleType, str, str, Callable[..., None]]

SEEDED: dict[str, Seeded] = {
    "parts that do not divide a page": (
        copies,
        " and rest == 0 else 1",
        " else 1",
        test_copies.test_a_page_that_parts_do_not_divide_is_copied_whole,
    ),
    "stores given up by a cancel count as made": (
        directory_exchange,
        "        self._kept.clear()\n",
        "",
        test_directory_exchange.test_what_a_cancelled_batch_was_to_store_is_stored_at_the_end,
    ),
    "a cancel gives up stores of earlier batches": (
        directory_exchange,
        "            if batch < number:\n                continue\n",
        "",
        test_directory_exchange.test_a_cancel_leaves_the_stores_of_earlier_batches_alone,
    ),
    "what ran before a cancel is ended twice": (
        directory_exchange,
        "if operation not in heard:",
        "if True:",
        test_directory_exchange.test_a_load_that_ran_and_was_cancelled_is_ended_once_and_begun_anew,
    ),
    "a cancelled load counts as tried": (
        directory_exchange,
        "        self._tried.difference_update(each.sequence_id for each in lost)\n",
        "",
        test_directory_exchange.test_a_load_that_was_cancelled_before_it_ran_is_begun_anew,
    ),
    "a block that is being written has come": (
        directory_exchange,
        "own[position] in writing or ",
        "",
        test_directory_exchange.test_what_is_being_written_has_not_come,
    ),
    "a store looks at the name alone": (
        directory,
        "if self._has_whole(key, page.numel()):",
        "if key in self:",
        test_directory_private.test_what_is_not_this_block_whole_is_said_and_stored_anew,
    ),
    "a link is followed": (
        directory,
        "flags | os.O_NOFOLLOW | os.O_NONBLOCK",
        "flags | os.O_NONBLOCK",
        test_directory_private.test_what_a_link_leads_to_is_neither_read_nor_changed,
    ),
    "what another layout wrote is read whole": (
        directory,
        "if description_size != len(self._description) or page_size != num_bytes:",
        "if False:",
        test_directory_private.test_sizes_are_checked_before_anything_large_is_read,
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
}
IMPORTERS = (
    desk,
    plans,
    test_copies,
    test_directory_exchange,
    test_directory_private,
    test_hand_over,
    test_plans,
)
ARGUMENTS: dict[str, Any] = {
    "block_size": 5243,
    "spoil": test_directory_private.flip,
    "kind": "claims its size",
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
    if "desk" in wanted:
        given["desk"] = desk.Desk(backend, path)
    if "tier" in wanted:
        given["tier"] = test_directory_private.make_tier(path)
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
