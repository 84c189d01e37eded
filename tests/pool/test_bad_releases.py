# SPDX-License-Identifier: Apache-2.0
"""Bad input to the pool layer: double frees, missing pins, keys on unused blocks.

The pools of both languages are called in the same way: the pure functions of
`kvcore.pool.transitions`, and the twin's pool. The pool has four blocks; 0 has two owners and a
key, 1 one owner that is a pin and one that is not, 2 and 3 are unused.
"""

from __future__ import annotations

from typing import Any, Protocol

import attrs
import pytest

from kvcore import Outcome
from kvcore.pool import transitions
from kvcore.pool.block_pool import BlockPool
from kvcore.types.errors import (
    AlreadyPublished,
    DoubleFree,
    InvalidKey,
    KvcoreError,
    NotPinned,
    UnknownBlock,
    UnusedBlock,
)
from tests.conftest import Backend
from tests.helpers.misuse import check_error
from tests.pool.twin_pool import Dump, TwinPool

KEY, OTHER_KEY = b"\1" * 36, b"\2" * 36


class Pool(Protocol):
    """A pool of either language."""

    def call(self, name: str, *args: Any) -> Any:
        """Make a pool transition by its name."""

    def dump(self) -> Dump:
        """Return owners, keys, the free queue and pins."""


class PythonPool:
    """The newest value of a pool, and the pure functions on it."""

    def __init__(self) -> None:
        self.pool: BlockPool = transitions.make_pool(4)

    def call(self, name: str, *args: Any) -> Any:
        before = attrs.evolve(self.pool)
        try:
            outcome: Outcome[BlockPool, Any] = getattr(transitions, name)(self.pool, *args)
        except KvcoreError:
            assert self.pool == before
            raise
        self.pool = outcome.state
        return outcome.value

    def dump(self) -> Dump:
        pool = self.pool
        pins = [pool.pins.get(block, 0) for block in range(pool.num_blocks)]
        return list(pool.ref_counts), list(pool.keys), list(pool.queue), pins


@pytest.fixture
def pool(backend: Backend) -> Pool:
    """Return the pool that the header describes."""
    made: Pool = PythonPool() if backend == "python" else TwinPool(4)
    assert made.call("take", 2) == (0, 1)
    made.call("publish", 0, KEY)
    made.call("touch", [0])
    made.call("pin", [1])
    return made


def unknown(block: object) -> KvcoreError:
    """Return the error for a block that a pool of four does not have."""
    return UnknownBlock(block=block, first=0, last=3)


BAD: list[tuple[str, tuple[Any, ...], KvcoreError]] = [
    ("release", ([2],), DoubleFree(block=2, ref_count=0, requested=1)),
    ("release", ([0, 0, 0],), DoubleFree(block=0, ref_count=2, requested=3)),
    # The second owner of block 1 is a pin, which only unpin removes.
    ("release", ([0, 1, 1],), DoubleFree(block=1, ref_count=1, requested=2)),
    ("release", ([0, 4],), unknown(4)),
    ("release", ([0, -1],), unknown(-1)),
    ("touch", ([0, 2],), UnusedBlock(block=2)),
    ("touch", ([0, 4],), unknown(4)),
    ("pin", ([0, 3],), UnusedBlock(block=3)),
    ("pin", ([4],), unknown(4)),
    ("unpin", ([0],), NotPinned(block=0, num_pins=0, requested=1)),
    ("unpin", ([1, 1],), NotPinned(block=1, num_pins=1, requested=2)),
    ("unpin", ([1, 9],), unknown(9)),
    ("publish", (0, OTHER_KEY), AlreadyPublished(block=0)),
    ("publish", (0, KEY), AlreadyPublished(block=0)),
    ("publish", (2, OTHER_KEY), UnusedBlock(block=2)),
    ("publish", (4, OTHER_KEY), unknown(4)),
    ("publish", (1, b"short"), InvalidKey(size=5, expected=36)),
    ("publish", (1, KEY + b"\0"), InvalidKey(size=37, expected=36)),
    ("lookup", (b"",), InvalidKey(size=0, expected=36)),
    ("unpublish", (4,), unknown(4)),
    ("unpublish", (-1,), unknown(-1)),
]


@pytest.mark.parametrize(("name", "args", "expected"), BAD)
def test_a_wrong_pool_call_raises_and_changes_nothing(
    pool: Pool, name: str, args: tuple[Any, ...], expected: KvcoreError
) -> None:
    before = pool.dump()
    with pytest.raises(KvcoreError) as caught:
        pool.call(name, *args)
    check_error(caught.value, expected)
    assert pool.dump() == before


def test_a_block_that_was_freed_is_not_freed_again(pool: Pool) -> None:
    pool.call("release", [0, 0])
    with pytest.raises(DoubleFree) as caught:
        pool.call("release", [0])
    check_error(caught.value, DoubleFree(block=0, ref_count=0, requested=1))
    # Its last two owners are gone, so it is behind the blocks that were never used, with its key.
    assert pool.dump() == ([0, 2, 0, 0], [KEY, None, None, None], [2, 3, 0], [0, 1, 0, 0])


def test_null_block_of_a_pool_is_no_block_of_it() -> None:
    pool = transitions.make_pool(3, null_block=True)
    for name in ("touch", "release", "pin", "unpin"):
        with pytest.raises(UnknownBlock) as caught:
            getattr(transitions, name)(pool, [0])
        check_error(caught.value, UnknownBlock(block=0, first=1, last=2))
