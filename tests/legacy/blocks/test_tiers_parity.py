# SPDX-License-Identifier: Apache-2.0
"""Both backends of a facade's blocks agree call by call, and with a plain dictionary.

After each call the values, errors, commands and whole states are compared, the properties hold,
and owners and the order of free blocks are those that a model of lists and dictionaries has.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.legacy.blocks.blocks import Backing
from kvcore.legacy.blocks.tiers import Order, Tiers
from kvcore.pool.block_pool import PoolEviction
from kvcore.pool.priority_eviction import NO_PRIORITY
from kvcore.types.errors import KvcoreError
from kvcore.types.keys import KEY_SIZE
from kvcore.types.values import Refused
from tests.conftest import need_twin
from tests.helpers.amount import examples

NUM_BLOCKS, NUM_HOST_BLOCKS = 6, 3
KEYS = [bytes([value]) * KEY_SIZE for value in range(3)]


@pytest.fixture(autouse=True, scope="module")
def twin() -> None:
    """Skip the tests without the twin, or fail in CI."""
    need_twin()


ids = st.integers(-1, NUM_BLOCKS)
several = st.lists(st.integers(0, NUM_BLOCKS - 1), max_size=4)
keys = st.sampled_from(KEYS)
many_keys = st.lists(keys, max_size=4)
tiers = st.sampled_from(["device", "device", "host"])
times = st.none() | st.sampled_from([-2.0, -1.0, 0.0, -0.0, 1, 2.5, 1e300])
lengths = st.none() | st.integers(0, 3)
one_of_tier = st.sampled_from(["unpublish", "ref_count", "key_of"])
counts = st.integers(-1, NUM_BLOCKS + 1)
far = st.sampled_from([2**40, 2**70, -(2**70)])
low_ids = st.sampled_from([0, 1] * 8 + [2, NUM_BLOCKS - 1, NUM_BLOCKS, -1])


calls = st.one_of(
    st.tuples(st.just("take"), counts | counts | far, tiers),
    st.tuples(st.sampled_from(["touch", "release", "release"]), several, tiers),
    st.tuples(st.sampled_from(["touch", "release"]), ids.map(lambda block: [block]), tiers),
    st.tuples(st.just("admit"), several, counts | counts | far, st.none() | many_keys, tiers),
    st.tuples(st.just("publish"), ids, keys, tiers),
    st.tuples(st.just("publish_all"), several, many_keys, tiers),
    st.tuples(st.just("lookup_prefix"), many_keys, tiers),
    st.tuples(one_of_tier, ids, tiers),
    st.tuples(st.just("set_priority"), several, times, lengths, tiers),
    st.tuples(st.sampled_from(["clear_index", "num_free", "free_blocks"]), tiers),
    st.tuples(st.just("lookup"), keys, tiers),
    st.tuples(st.sampled_from(["copy", "own"]), ids),
    st.tuples(st.sampled_from(["move_out", "move_in"]), several | st.lists(low_ids, max_size=2)),
    st.tuples(st.just("append"), several, st.integers(-1, 5)),
    st.tuples(st.sampled_from(["copy_out", "copy_in"]), ids, ids),
    st.tuples(st.just("ref_counts"), several | st.lists(ids, max_size=3), tiers),
    st.just(("take_batch",)),
)
WARM: list[tuple[Any, ...]] = [
    ("take", 3, "device"),
    ("publish_all", [0, 2], [KEYS[0], KEYS[1]], "device"),
    ("set_priority", [0], None, 2, "device"),
    ("set_priority", [2], None, 4, "device"),
    ("take", 2, "host"),
    ("publish", 1, KEYS[0], "host"),
    ("set_priority", [1], None, 2, "host"),
    ("release", [2], "device"),
]
stories = st.tuples(
    st.sampled_from([[], WARM, WARM]),
    st.lists(calls, max_size=60) | st.lists(calls, min_size=15, max_size=60),
).map(lambda parts: parts[0] + parts[1])
"""From nothing, or from blocks of each kind: free with a key or without, owned likewise."""


def answer(call: Any, *args: Any) -> Any:
    """Return the value of a call, or its error as class, fields and message."""
    try:
        value = call(*args)
    except KvcoreError as error:
        return type(error), error.fields, str(error)
    if isinstance(value, dict):
        return list(value.items())
    return (value.number, list(value)) if type(value).__name__ == "Batch" else value


TAKING = ("take", "copy", "own", "append")


class Holders:
    """The holders of each block of each tier, as a facade would count them."""

    def __init__(self) -> None:
        self.held: dict[str, Counter[int]] = {"device": Counter(), "host": Counter()}

    def note(self, name: str, args: tuple[Any, ...], value: Any) -> None:
        """Note what a call that was not refused and did not raise has changed."""
        tier = args[-1] if args and args[-1] in ("device", "host") else "device"
        if name == "take":
            self.held[tier].update(value)
        elif name == "touch":
            self.held[tier].update(args[0])
        elif name == "admit":
            self.held[tier].update([*args[0], *value])
        elif name == "release":
            self.held[tier].subtract(args[0])
        elif name in ("copy", "own"):
            self.held[tier].update([value])
            self.held[tier].subtract([args[0]])
        elif name == "append" and value is not None:
            self.held[tier].update([value])
            if len(args[0]) >= args[1]:
                self.held[tier].subtract(args[0][-1:])
        elif name in ("move_out", "move_in"):
            left, arrived = ("device", "host") if name == "move_out" else ("host", "device")
            self.held[left].subtract(args[0])
            self.held[arrived].update(dict(value)[block] for block in args[0])


@settings(max_examples=examples(60))
@given(
    null_block=st.booleans(),
    num_host_blocks=st.sampled_from([0, NUM_HOST_BLOCKS, NUM_HOST_BLOCKS]),
    eviction=st.sampled_from(get_args(PoolEviction)),
    order=st.sampled_from(get_args(Order)),
    story=stories,
)
def test_both_backends_agree_call_by_call(
    null_block: bool,
    num_host_blocks: int,
    eviction: PoolEviction,
    order: Order,
    story: list[tuple[Any, ...]],
) -> None:
    options: dict[str, Any] = {"null_block": null_block, "eviction": eviction, "order": order}
    pure = Backing(NUM_BLOCKS, num_host_blocks, **options)
    twin = Backing(NUM_BLOCKS, num_host_blocks, **options, backend="rust")
    holders = Holders()
    for name, *args in story:
        before = pure.state()
        said = answer(getattr(pure, name), *args)
        assert answer(getattr(twin, name), *args) == said
        assert twin.state() == pure.state()
        raised = isinstance(said, tuple) and said and isinstance(said[0], type)
        if raised or isinstance(said, Refused):
            assert pure.state() == before
        else:
            holders.note(name, tuple(args), said)
        for backing in (pure, twin):
            backing.check(holders.held["device"].elements(), holders.held["host"].elements())


class Model:
    """A pool of policy "priority": a stack of blocks without key, and a sorted dictionary."""

    def __init__(self) -> None:
        self.uncached = list(range(NUM_BLOCKS))
        self.cached: set[int] = set()
        self.priorities: dict[int, tuple[float, int]] = {}

    def free(self) -> list[int]:
        """Return all free blocks, the next one first."""
        return self.uncached + sorted(self.cached, key=self.place)

    def place(self, block: int) -> tuple[float, int, int]:
        """Return the key to sort by."""
        time, length = self.priorities.get(block, (-1.0, 0))
        return (time, -length, block)

    def note(self, call: tuple[Any, ...], before: Tiers, after: Tiers) -> None:
        """Note what a call did, by owners and keys before and after."""
        name, *args = call
        old, new = before.device, after.device
        if name == "set_priority":
            for block in args[0]:
                time, length = self.priorities.get(block, (-1.0, 0))
                time = time if args[1] is None else args[1]
                self.priorities[block] = (time, length if args[2] is None else args[2])
        lost = [each for each in self.free() if each in self.cached and new.keys[each] is None]
        for block in range(NUM_BLOCKS):
            if old.ref_counts[block] == 0 and new.ref_counts[block] > 0:
                self.cached.discard(block)
                self.uncached = [each for each in self.uncached if each != block]
                if name in TAKING or (name == "admit" and block not in args[0]):
                    self.priorities.pop(block, None)
        for block in lost:
            if new.ref_counts[block] == 0:
                self.cached.discard(block)
                self.uncached.insert(0, block)
        order = sorted(dict.fromkeys(left(name, args)), key=lambda block: last_at(args[0], block))
        for block in order:
            if old.ref_counts[block] > 0 and new.ref_counts[block] == 0:
                if new.keys[block] is None:
                    self.uncached.insert(0, block)
                else:
                    self.cached.add(block)


def left(name: str, args: list[Any]) -> list[Any]:
    """Return the blocks whose owners a call may take away."""
    if name in ("copy", "own"):
        return args[:1]
    return args[0] if name == "release" else args[0][-1:] if name == "append" else []


def last_at(blocks: Any, block: int) -> int:
    """Return the last position of a block, at which it loses its last owner."""
    named = blocks if isinstance(blocks, list) else [blocks]
    return max(place for place, each in enumerate(named) if each == block)


@given(story=stories)
def test_blocks_leave_by_priority_in_the_order_of_a_sorted_dictionary(
    story: list[tuple[Any, ...]],
) -> None:
    backing, model = Backing(NUM_BLOCKS, eviction="priority", backend="rust"), Model()
    for name, *args in story:
        before = backing.state()
        if "host" in args:
            continue
        value = answer(getattr(backing, name), *args)
        if isinstance(value, Refused):
            continue
        after = backing.state()
        if after != before:
            model.note((name, *args), before, after)
        assert list(backing.free_blocks()) == model.free()
        priorities = [model.priorities.get(block, (-1.0, 0)) for block in range(NUM_BLOCKS)]
        known = backing.state().device.priorities
        assert [known.get(block, NO_PRIORITY) for block in range(NUM_BLOCKS)] == priorities
