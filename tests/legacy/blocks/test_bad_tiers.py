# SPDX-License-Identifier: Apache-2.0
"""Bad input to the blocks of a facade: a typed error that names the tier; nothing changes."""

from __future__ import annotations

from typing import Any

import pytest

from kvcore.legacy.blocks.blocks import Backing
from kvcore.types.errors import InvalidConfig, KvcoreError, NoHostTier
from kvcore.types.values import Reason, Refused
from tests.conftest import Backend
from tests.helpers.misuse import check_error
from tests.legacy.blocks.bad_tiers import KEY, NO_PRIORITIES, REFUSALS, ROWS, world

ON_HOST: list[tuple[str, tuple[Any, ...]]] = [
    *(("take", (1, "host")), ("touch", ([0], "host")), ("release", ([9], "host"))),
    *(("publish", (0, b"no", "host")), ("unpublish", (9, "host")), ("clear_index", ("host",))),
    *(("set_priority", ([0], "no", -1, "host")), ("copy_out", (9, 9)), ("copy_in", (9, 9))),
    *(("lookup", (KEY, "host")), ("num_free", ("host",)), ("ref_count", (0, "host"))),
    ("ref_counts", ([], "host")),
    *(("move_out", ([],)), ("move_in", ([],)), ("move_in", ([9],))),
    *(("key_of", (0, "host")), ("free_blocks", ("host",))),
]


@pytest.mark.seed("X-14")
@pytest.mark.parametrize("name", sorted({name for _, name, _ in ROWS}))
def test_a_wrong_call_raises_a_typed_error_and_changes_nothing(
    name: str, backend: Backend, subtests: pytest.Subtests
) -> None:
    backing = world(backend)
    before = backing.state()
    for error, _, args in (row for row in ROWS if row[1] == name):
        with subtests.test(f"{type(error).__name__} {args}"):
            with pytest.raises(KvcoreError) as caught:
                getattr(backing, name)(*args)
            check_error(caught.value, error)
            assert backing.state() == before


def test_more_than_any_tier_has_is_never_there(backend: Backend, subtests: pytest.Subtests) -> None:
    backing = world(backend)
    before = backing.state()
    for needed, free, name, args in REFUSALS:
        with subtests.test(f"{name} {args}"):
            assert getattr(backing, name)(*args) == Refused(Reason.NEVER, needed, free)
            assert backing.state() == before


def test_calls_of_a_host_tier_that_is_not_there_are_refused(
    backend: Backend, subtests: pytest.Subtests
) -> None:
    backing = Backing(2, eviction="priority", backend=backend)
    before = backing.state()
    for name, args in ON_HOST:
        with subtests.test(f"{name} {args}"):
            with pytest.raises(NoHostTier):
                getattr(backing, name)(*args)
            assert backing.state() == before


def test_only_the_priority_policy_has_priorities(backend: Backend) -> None:
    backing = Backing(2, 1, backend=backend)
    before = backing.state()
    for tier in ("device", "host"):
        with pytest.raises(InvalidConfig) as caught:
            backing.set_priority([9], 1.0, None, tier)
        check_error(caught.value, NO_PRIORITIES)
    assert backing.state() == before
