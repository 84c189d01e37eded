# SPDX-License-Identifier: Apache-2.0
"""A wrong adapter gets an error with the contradicting observation; nothing changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvcore.errors import BackendMissing
from kvcore.sanitizer import AdapterError, CacheGroup, Chunk, Sanitizer, SlotChunk
from kvcore.sanitizer.media import Item, MediaTokens

Wrong = Callable[[Any], object]  # some arguments are of wrong types

WRONG: dict[str, Wrong] = {
    "begin('r0')": lambda it: it.begin("r0", [1]),
    "begin('r9')": lambda it: it.begin("r1", [1], parent="r9"),
    "extend('r9')": lambda it: it.extend("r9", 0, [1]),
    "group 1 of 1": lambda it: it.extend("r0", 1, [1]),
    "block 8 of 8 (device)": lambda it: it.extend("r0", 0, [1, 8]),
    "block -1 of 8 (device)": lambda it: it.extend("r0", 0, [-1]),
    "place 3 of a table of 1 blocks": lambda it: it.extend("r0", 0, [1], 3),
    "place 2 of a table of 1 blocks": lambda it: it.cut("r0", 0, 2),
    "drop('r9')": lambda it: it.drop("r9"),
    "end('r9')": lambda it: it.end("r9"),
    "renew('r9')": lambda it: it.renew("r9"),
    "issue(1): no request 'r9' lives": lambda it: it.issue(1, [Chunk("r9", 0, 1)]),
    "issue(0): step 0 came before it": lambda it: it.issue(0, []),
    "issue(4294967296): steps are numbered up to": lambda it: it.issue(2**32, []),
    "start -1 and 1 tokens": lambda it: it.issue(1, [Chunk("r0", -1, 1)]),
    "2 drafts in 1 tokens": lambda it: it.issue(1, [Chunk("r0", 0, 1, [1, 2])]),
    "complete(0)": lambda it: it.complete(0),
    "complete(5)": lambda it: it.complete(5),
    "cancel(0)": lambda it: it.cancel(0),
    "step(1): no request 'r9' lives": lambda it: it.step(1, ["r9"], [0], [1]),
    "columns of different lengths": lambda it: it.step(1, ["r0"], [0, 1], [1]),
    "step(1): a negative start or count": lambda it: it.step(1, ["r0"], [-1], [1]),
    "step(1): block 9 of 8": lambda it: it.step(1, ["r0"], [0], [1], tables={0: [[9]]}),
    "step(1): 2 drafts in 1 tokens of r0": lambda it: it.step(1, ["r0"], [2], [1], {0: [1, 2]}),
    "step(1): no chunk -1 of 1": lambda it: it.step(1, ["r0"], [2], [1], {-1: [1]}),
    "step(1): no chunk 1 of 1": lambda it: it.step(1, ["r0"], [2], [1], {1: [1]}),
    "step(1): no chunk 0.0 of 1": lambda it: it.step(1, ["r0"], [2], [1], {0.0: [1]}),
    "step(1): no chunk 2 of 1": lambda it: it.step(1, ["r0"], [2], [1], tables={2: [[1]]}),
    "step(1): no chunk -2 of 1": lambda it: it.step(1, ["r0"], [2], [1], tables={-2: [[1]]}),
    "step(1): no chunk 'r0' of 1": lambda it: it.step(1, ["r0"], [2], [1], tables={"r0": [[1]]}),
    "step(1): r0 has start 4294967295 and 1": lambda it: it.step(1, ["r0"], [2**32 - 1], [1]),
    "issue(1): r0 has start 1 and 4294967295": lambda it: it.issue(1, [Chunk("r0", 1, 2**32 - 1)]),
    "load('r0'): r0 has start 4294967295 and 1": lambda it: it.load("r0", 2**32 - 1, 1),
    "copy: block 8 of 8": lambda it: it.copy([(1, 8)]),
    "fail: block -1": lambda it: it.fail([-1]),
    "zero: group -1 of 1": lambda it: it.zero([1], -1),
    "1 writes and 0 reads": lambda it: it.issue(1, [SlotChunk("r0", 0, 0, 2, [1], [])]),
    "issue(1): block 10 of 8": lambda it: it.issue(1, [SlotChunk("r0", 0, 0, 1, [20], [20])]),
    "load('r0'): r0 has start 0 and -1 tokens": lambda it: it.load("r0", 0, -1),
}


BACKENDS = ("python", "rust")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("text", WRONG)
def test_wrong_observation_is_the_adapters(text: str, backend: str) -> None:
    sanitizer = Sanitizer([CacheGroup(block_size=2)], 8, backend=backend)
    sanitizer.begin("r0", [1, 2, 3, 4])
    sanitizer.extend("r0", 0, [3])
    assert sanitizer.step(0, ["r0"], [0], [2]) == []
    with pytest.raises(AdapterError) as error:
        WRONG[text](sanitizer)
    assert text in str(error.value)
    assert str(error.value).startswith("the adapter is wrong, not the engine: ")
    sanitizer.extend("r0", 0, [4])
    assert sanitizer.step(1, ["r0"], [2], [2]) == []
    assert sanitizer.findings == sanitizer.suspicions == []


class Tokens(list[int]):
    """An engine's list of tokens; once it is gone it cannot be read."""

    is_gone = False

    def __len__(self) -> int:
        if self.is_gone:
            raise IndexError("its engine let it go")
        return super().__len__()


def test_a_step_whose_check_raises_is_not_checked_again() -> None:
    sanitizer = Sanitizer([CacheGroup(block_size=2)], 8, backend="python")
    tokens = Tokens([1, 2, 3])
    sanitizer.begin("r0", tokens)
    sanitizer.extend("r0", 0, [3, 4])
    sanitizer.begin("r1", [5, 6])
    sanitizer.extend("r1", 0, [5])
    sanitizer.issue(0, [Chunk("r0", 0, 2)])
    sanitizer.issue(1, [Chunk("r1", 0, 2)])
    tokens.is_gone = True
    with pytest.raises(IndexError, match="let it go"):
        sanitizer.complete(0)
    assert sanitizer.complete(1) == []
    with pytest.raises(AdapterError, match=r"complete\(0\)"):
        sanitizer.complete(0)


PAGES = [CacheGroup(block_size=2)]
UNMADE: dict[str, Callable[[str], object]] = {
    "CacheGroup: block_size is 0: it is 1 or more": lambda _: CacheGroup(block_size=0),
    "window is 0: it is 1 or more": lambda _: CacheGroup(block_size=2, window=0),
    "num_null is -1: it is 0 or more": lambda _: CacheGroup(block_size=2, num_null=-1),
    "pool is -1: it is 0 or more": lambda _: CacheGroup(block_size=2, pool=-1),
    "Sanitizer: 0 groups of 8 blocks": lambda backend: Sanitizer([], 8, backend=backend),
    "1 groups of 0 blocks": lambda backend: Sanitizer(PAGES, 0, backend=backend),
    "8 blocks, every 0": lambda backend: Sanitizer(PAGES, 8, every=0, backend=backend),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("text", UNMADE)
def test_what_no_cache_is_like_is_refused(text: str, backend: str) -> None:
    with pytest.raises(AdapterError) as error:
        UNMADE[text](backend)
    assert text in str(error.value)


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_change_no_more_often_than_a_slot_can_say(backend: str) -> None:
    sanitizer = Sanitizer([CacheGroup(block_size=2)], 8, backend=backend)
    for _ in range(2**16 - 2):
        sanitizer.epoch()
    sanitizer.begin("r0", [1, 2])
    sanitizer.extend("r0", 0, [3])
    assert sanitizer.step(0, ["r0"], [0], [2]) == []
    sanitizer.epoch()
    with pytest.raises(AdapterError, match=r"epoch\(\): weights can change 65535 times"):
        sanitizer.epoch()
    sanitizer.begin("r1", [1, 2, 3])
    sanitizer.extend("r1", 0, [3, 4])
    assert [each.name for each in sanitizer.step(1, ["r1"], [2], [1])] == ["stale-weights"]


def test_an_unknown_backend_is_named() -> None:
    with pytest.raises(BackendMissing, match="'go' is not available"):
        Sanitizer([CacheGroup(block_size=2)], 8, backend="go")


def test_released_blocks_that_are_named_are_suspect_once() -> None:
    sanitizer = Sanitizer([CacheGroup(block_size=2)], 8, engine="an engine 1.0")
    sanitizer.begin("r0", [1, 2, 3, 4])
    sanitizer.release(3)
    sanitizer.release(3)
    sanitizer.extend("r0", 0, [3])
    sanitizer.extend("r0", 0, [3])
    sanitizer.allocate(4)
    sanitizer.extend("r0", 0, [4])
    assert [each.name for each in sanitizer.suspicions] == ["double-free", "use-after-free"]
    assert str(sanitizer.suspicions[1]) == (
        "use-after-free: r0 block 3 of pool 0\nengine: an engine 1.0"
    )
    assert sanitizer.findings == []


def test_tokens_are_shown_if_asked_for() -> None:
    for shown in (False, True):
        sanitizer = Sanitizer([CacheGroup(block_size=2)], 8, show_tokens=shown)
        sanitizer.begin("r0", [71, 72, 73])
        sanitizer.extend("r0", 0, [3, 4])
        sanitizer.begin("r1", [81, 82])
        sanitizer.extend("r1", 0, [3])
        sanitizer.step(0, ["r1"], [0], [2])
        [found] = sanitizer.step(1, ["r0"], [2], [1])
        assert ("(71)" in str(found), "(81)" in str(found)) == (shown, shown)


def test_one_request_in_many_is_checked() -> None:
    sanitizer = Sanitizer([CacheGroup(block_size=1)], 200, every=4)
    for number in range(100):
        sanitizer.begin(f"r{number}", [1, 2])
        sanitizer.extend(f"r{number}", 0, [2 * number % 200, 2 * number % 200 + 1])
    found = sanitizer.step(0, [f"r{number}" for number in range(100)], [1] * 100, [1] * 100)
    assert 10 < len(found) < 45


def test_a_media_item_is_part_of_the_prefixes_behind_it_alone() -> None:
    sanitizer = Sanitizer([CacheGroup(block_size=2)], 8)
    tokens = [1, 2, 0, 0, 3]
    for name, image in (("r0", b"cat"), ("r1", b"dog")):
        sanitizer.begin(name, MediaTokens(tokens, [Item(2, 2, image)]))
    sanitizer.extend("r0", 0, [3, 4, 5])
    sanitizer.step(0, ["r0"], [0], [5])
    sanitizer.extend("r1", 0, [3, 6, 7])
    assert sanitizer.step(1, ["r1"], [2], [2]) == []
    sanitizer.extend("r1", 0, [4], 1)
    assert [each.name for each in sanitizer.step(2, ["r1"], [4], [1])] == ["wrong-kv"]
