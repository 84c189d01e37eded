# SPDX-License-Identifier: Apache-2.0
"""Rows of bad input for the blocks of a facade: a call, and the error that it must raise."""

from __future__ import annotations

from typing import Any

from kvcore.legacy.blocks.blocks import Backing
from kvcore.types.errors import (
    AlreadyPublished,
    DoubleFree,
    InvalidConfig,
    InvalidCount,
    InvalidKey,
    KvcoreError,
    NoOwner,
    UnknownBlock,
    UnusedBlock,
    WrongArgument,
    WrongKey,
)
from kvcore.types.keys import KEY_SIZE
from tests.conftest import Backend

KEY, OTHER = b"k" * KEY_SIZE, b"o" * KEY_SIZE
Row = tuple[KvcoreError, str, tuple[Any, ...]]
HOST = {"tier": "host"}
TIER = "'device' or 'host'"
ONE_EACH = "1 keys, one per block"


def world(backend: Backend) -> Backing:
    """Make two tiers of four blocks: 0 has two owners and a key, 1 only a key, 2 one owner."""
    backing = Backing(4, 4, eviction="priority", backend=backend)
    for tier in ("device", "host"):
        backing.take(3, tier)
        backing.touch([0], tier)
        backing.publish(0, KEY, tier)
        backing.publish(1, OTHER, tier)
        backing.release([1], tier)
    return backing


def _in_both(kind: type[KvcoreError], fields: dict[str, Any], name: str, *args: Any) -> list[Row]:
    """Return the same misuse of either tier; the error on the host names the host."""
    return [(kind(**fields), name, args), (kind(**fields, **HOST), name, (*args, "host"))]


def _unknown(block: object) -> list[Row]:
    """Return a row of each tier for each call that takes blocks; the good block stays untouched."""
    fields = {"block": block, "first": 0, "last": 3}
    rows = []
    for name in ("touch", "release"):
        rows += _in_both(UnknownBlock, fields, name, [2, block])
    rows += _in_both(UnknownBlock, fields, "admit", [2, block], 1, None)
    rows += _in_both(UnknownBlock, fields, "admit", [block], 1, [KEY])
    rows += _in_both(UnknownBlock, fields, "publish_all", [2, block], [KEY, KEY])
    rows += _in_both(UnknownBlock, fields, "publish", block, KEY)
    for name in ("unpublish", "ref_count", "key_of"):
        rows += _in_both(UnknownBlock, fields, name, block)
    rows += _in_both(UnknownBlock, fields, "ref_counts", [2, block])
    rows.append((UnknownBlock(**fields), "set_priority", ([2, block], 1.0)))
    rows.append((UnknownBlock(**fields, **HOST), "set_priority", ([2, block], 1.0, 2, "host")))
    rows += [(UnknownBlock(**fields), name, (block,)) for name in ("copy", "own")]
    rows.append((UnknownBlock(**fields), "move_out", ([2, block],)))
    rows.append((UnknownBlock(**fields), "append", ([2, block], 2)))
    rows.append((UnknownBlock(**fields, **HOST), "move_in", ([2, block],)))
    for name, args in (("copy_out", (block, 2)), ("copy_in", (2, block))):
        rows.append((UnknownBlock(**fields), name, args))
        rows.append((UnknownBlock(**fields, **HOST), name, args[::-1]))
    return rows


OWNERS: list[Row] = [
    *_in_both(DoubleFree, {"block": 2, "ref_count": 1, "requested": 2}, "release", [0, 2, 2]),
    *_in_both(DoubleFree, {"block": 1, "ref_count": 0, "requested": 1}, "release", [0, 1]),
    *_in_both(UnusedBlock, {"block": 3}, "touch", [0, 3]),
    *_in_both(UnusedBlock, {"block": 3}, "publish", 3, KEY),
    *_in_both(AlreadyPublished, {"block": 0}, "publish", 0, OTHER),
    *_in_both(AlreadyPublished, {"block": 1}, "publish", 1, KEY),
    *_in_both(UnusedBlock, {"block": 3}, "admit", [0, 3], 1, None),
    *_in_both(WrongKey, {"block": 1, "position": 1}, "admit", [0, 1], 1, [KEY, KEY]),
    *_in_both(WrongKey, {"block": 3, "position": 0}, "admit", [3], 9, [KEY]),
    *_in_both(UnusedBlock, {"block": 3}, "publish_all", [2, 3], [KEY, OTHER]),
    *_in_both(AlreadyPublished, {"block": 0}, "publish_all", [2, 0], [KEY, OTHER]),
    *_in_both(AlreadyPublished, {"block": 2}, "publish_all", [2, 2], [KEY, OTHER]),
    *((NoOwner(block=block), name, (block,)) for block in (1, 3) for name in ("copy", "own")),
    *((NoOwner(block=block), "append", ([2, block], 1)) for block in (1, 3)),
    (DoubleFree(block=2, ref_count=1, requested=2), "move_out", ([0, 2, 2],)),
    (DoubleFree(block=1, ref_count=0, requested=1), "move_out", ([1],)),
    (DoubleFree(block=2, ref_count=1, requested=2, **HOST), "move_in", ([2, 0, 2],)),
    (NoOwner(block=1), "copy_out", (1, 2)),
    (NoOwner(block=3, **HOST), "copy_out", (2, 3)),
    (NoOwner(block=1, **HOST), "copy_in", (1, 2)),
    (NoOwner(block=3), "copy_in", (2, 3)),
]

VALUES: list[Row] = [
    (InvalidCount(name="count", value=-1, least=0), "take", (-1,)),
    (InvalidCount(name="count", value=-1, least=0), "take", (-1, "host")),
    (InvalidCount(name="count", value=-(2**40), least=0), "take", (-(2**40),)),
    (InvalidCount(name="count", value=-(2**70), least=0), "take", (-(2**70), "host")),
    (InvalidCount(name="count", value=-(2**70), least=0), "admit", ([9], -(2**70), [])),
    (InvalidCount(name="count", value="2", least=0), "take", ("2",)),
    (InvalidCount(name="num_blocks", value=-1, least=0), "append", ([9], -1)),
    (InvalidCount(name="num_blocks", value="2", least=0), "append", ([2], "2")),
    (InvalidCount(name="count", value=-1, least=0), "admit", ([0], -1)),
    (InvalidCount(name="count", value="2", least=0), "admit", ([0], "2", None, "host")),
    (InvalidKey(size=2, expected=KEY_SIZE), "publish", (2, b"no")),
    (InvalidKey(size=2, expected=KEY_SIZE), "publish_all", ([2], [b"no"])),
    (InvalidKey(size=2, expected=KEY_SIZE), "lookup_prefix", ([OTHER, b"no"], "host")),
    (InvalidKey(size=2, expected=KEY_SIZE), "admit", ([0], 1, [b"no"])),
    *(
        (WrongArgument(name="keys", expected=ONE_EACH, value=len(keys)), name, args)
        for keys in ([], [KEY, b"no"])
        for name, args in (
            *(("publish_all", ([2], keys)), ("publish_all", ([9], keys, "host"))),
            ("admit", ([9], 1, keys)),
        )
    ),
    (InvalidKey(size=0, expected=KEY_SIZE), "lookup", (b"", "host")),
    *(
        (
            WrongArgument(name="time", expected="a finite number", value=time),
            "set_priority",
            args,
        )
        for time in (float("nan"), float("inf"), "1", 10**400)
        for args in (([2], time), ([9], time, -1, "host"))
    ),
    *(
        (
            WrongArgument(name="length", expected="an integer from 0 to 2147483647", value=length),
            "set_priority",
            ([2], 1.0, length),
        )
        for length in (-1, 2**31, 10**30, 1.0, "1")
    ),
    *(
        (WrongArgument(name="tier", expected=TIER, value=tier), name, (*args, tier))
        for tier in ("gpu", None, 0)
        for name, args in (
            *(("take", (1,)), ("touch", ([0],)), ("release", ([0],)), ("publish", (2, KEY))),
            *(
                ("unpublish", (0,)),
                ("set_priority", ([0], 1.0, 1)),
                ("clear_index", ()),
                ("num_free", ()),
            ),
            *(("ref_count", (0,)), ("key_of", (0,)), ("free_blocks", ()), ("lookup", (KEY,))),
            *(("admit", ([0], 1, None)), ("publish_all", ([2], [KEY]))),
            ("lookup_prefix", ([KEY],)),
        )
    ),
]

BLOCKS = [row for block in (-1, 4, 2**31, 2**32, 10**30, "1", None) for row in _unknown(block)]

NO_PRIORITIES = InvalidConfig(
    field="eviction", value="lru", reason="blocks have priorities only under 'priority'"
)

ROWS = [*OWNERS, *VALUES, *BLOCKS]

FAR = (2**32 - 1, 2**32, 2**40, 2**63, 2**70)

REFUSALS: list[tuple[int, int, str, tuple[Any, ...]]] = [
    row
    for count in FAR
    for tier in ("device", "host")
    for row in (
        (count, 2, "take", (count, tier)),
        (count, 2, "admit", ([], count, None, tier)),
        (count, 2, "admit", ([0, 2], count, None, tier)),
        (count + 1, 2, "admit", ([1, 0, 1], count, [OTHER, KEY, OTHER], tier)),
    )
]
"""The blocks that are needed, those that are free, and a call for more than any tier has."""
