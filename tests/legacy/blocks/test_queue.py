# SPDX-License-Identifier: Apache-2.0
"""The free queue by itself: a story, misuse, and both backends against a list."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.legacy.blocks.queue import BackingQueue
from kvcore.types.errors import AlreadyQueued, InvalidCount, KvcoreError, NotQueued, UnknownBlock
from tests.conftest import Backend, need_twin
from tests.helpers.misuse import check_error

NUM_BLOCKS = 4
ids = st.integers(-1, NUM_BLOCKS)
names = st.sampled_from(["remove", "append", "prepend", "__contains__", "neighbours"])
calls = st.one_of(
    st.tuples(names, ids),
    st.sampled_from([("popleft",), ("front",), ("back",), ("blocks",), ("__len__",)]),
)


def test_a_block_leaves_from_the_middle_and_joins_at_either_side(backend: Backend) -> None:
    queue = BackingQueue(4, backend=backend)
    queue.remove(2)
    assert queue.popleft() == 0
    queue.append(0)
    queue.prepend(2)
    assert (list(queue), len(queue), queue.front()) == ([2, 1, 3, 0], 4, 2)
    assert 3 in queue
    assert list(BackingQueue(4, [3, 1], backend=backend)) == [3, 1]


def test_an_empty_queue_has_no_front(backend: Backend) -> None:
    queue = BackingQueue(1, [], backend=backend)
    assert (queue.front(), queue.popleft(), queue.blocks(), len(queue)) == (None, None, (), 0)


@pytest.mark.parametrize(
    ("error", "name", "block"),
    [
        (NotQueued(block=2), "remove", 2),
        (AlreadyQueued(block=1), "append", 1),
        (AlreadyQueued(block=0), "prepend", 0),
        *(
            (UnknownBlock(block=block, first=0, last=2), name, block)
            for name in ("remove", "append", "prepend", "__contains__", "neighbours")
            for block in (-1, 3, 10**30, "1", None)
        ),
    ],
    ids=str,
)
def test_misuse_is_a_typed_error_and_changes_nothing(
    error: KvcoreError, name: str, block: Any, backend: Backend
) -> None:
    queue = BackingQueue(3, [0, 1], backend=backend)
    with pytest.raises(KvcoreError) as caught:
        getattr(queue, name)(block)
    check_error(caught.value, error)
    assert queue.blocks() == (0, 1)


def test_a_queue_that_cannot_be_is_refused(backend: Backend) -> None:
    with pytest.raises(InvalidCount):
        BackingQueue(-1, backend=backend)
    with pytest.raises(AlreadyQueued):
        BackingQueue(3, [1, 1], backend=backend)
    with pytest.raises(UnknownBlock):
        BackingQueue(3, [3], backend=backend)


@given(story=st.lists(calls, max_size=60))
def test_both_queues_are_a_list(story: list[tuple[Any, ...]]) -> None:
    need_twin()
    pure, twin = BackingQueue(NUM_BLOCKS), BackingQueue(NUM_BLOCKS, backend="rust")
    listed = list(range(NUM_BLOCKS))
    for name, *args in story:
        said = answer(getattr(pure, name), *args)
        assert answer(getattr(twin, name), *args) == said
        if name == "popleft":
            assert said == (listed.pop(0) if listed else None)
        if name in ("remove", "append", "prepend") and said is None:
            (block,) = args
            assert (block in listed) == (name == "remove")
            if name == "remove":
                listed.remove(block)
            else:
                listed.insert(len(listed) if name == "append" else 0, block)
        assert list(pure) == list(twin) == listed
        assert pure.back() == (listed[-1] if listed else None)
        for block in range(NUM_BLOCKS):
            around = [None, *listed, None]
            place = around.index(block) if block in listed else 0
            expected = (around[place - 1], around[place + 1]) if place else (None, None)
            assert pure.neighbours(block) == expected


def answer(call: Any, *args: Any) -> Any:
    """The value of a call, or its error as class, fields and message."""
    try:
        return call(*args)
    except KvcoreError as error:
        return type(error), error.fields, str(error)
