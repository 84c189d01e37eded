# SPDX-License-Identifier: Apache-2.0
"""Bad input to the blocks behind a facade: a typed error that names the tier; nothing changes."""

from __future__ import annotations

from typing import Any

import pytest

from kvcore.legacy.blocks.blocks import Backing
from kvcore.types.errors import InvalidConfig, KvcoreError, NoHostTier
from kvcore.types.values import Reason, Refused
from tests.conftest import Backend
from tests.helpers.misuse import check_error
from tests.legacy.blocks.bad_tiers import KEY, REFUSALS, ROWS, UNRANKED, Row, world

ON_HOST: list[tuple[str, tuple[Any, ...]]] = [
    *(("take", (1, "host")), ("touch", ([0], "host")), ("release", ([9], "host"))),
    *(("publish", (0, b"no", "host")), ("unpublish", (9, "host")), ("clear_index", ("host",))),
    *(("rank", ([0], "no", -1, "host")), ("copy_out", (9, 9)), ("copy_in", (9, 9))),
    *(("lookup", (KEY, "host")), ("num_free", ("host",)), ("ref_count", (0, "host"))),
    ("ref_counts", ([], "host")),
    *(("move_out", ([],)), ("move_in", ([],)), ("move_in", ([9],))),
    *(("key_of", (0, "host")), ("free_blocks", ("host",))),
]


@pytest.mark.seed("X-14")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{type(row[0]).__name__} {row[1]}{row[2]}")
def test_a_wrong_call_raises_a_typed_error_and_changes_nothing(row: Row, backend: Backend) -> None:
    error, name, args = row
    backing = world(backend)
    before = backing.state()
    with pytest.raises(KvcoreError) as caught:
        getattr(backing, name)(*args)
    check_error(caught.value, error)
    assert backing.state() == before


@pytest.mark.parametrize(("needed", "free", "name", "args"), REFUSALS)
def test_more_than_any_tier_has_is_never_there(
    needed: int, free: int, name: str, args: tuple[Any, ...], backend: Backend
) -> None:
    backing = world(backend)
    before = backing.state()
    assert getattr(backing, name)(*args) == Refused(Reason.NEVER, needed, free)
    assert backing.state() == before


@pytest.mark.parametrize(("name", "args"), ON_HOST)
def test_without_a_host_tier_there_is_nothing_to_ask_it(
    name: str, args: tuple[Any, ...], backend: Backend
) -> None:
    backing = Backing(2, eviction="ranked", backend=backend)
    before = backing.state()
    with pytest.raises(NoHostTier):
        getattr(backing, name)(*args)
    assert backing.state() == before


def test_only_ranked_blocks_have_ranks(backend: Backend) -> None:
    backing = Backing(2, 1, backend=backend)
    before = backing.state()
    for tier in ("device", "host"):
        with pytest.raises(InvalidConfig) as caught:
            backing.rank([9], 1.0, None, tier)
        check_error(caught.value, UNRANKED)
    assert backing.state() == before
