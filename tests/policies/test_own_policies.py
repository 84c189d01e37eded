# SPDX-License-Identifier: Apache-2.0
"""A user's own policy decides on the Python backend; a wrong one is named, and no state changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvcore import Config, EvictionPolicy, KVCacheManager, Request
from kvcore.codec.decode import decode
from kvcore.errors import DamagedState, InvalidConfig, PolicyFailed
from kvcore.types.policy import Front, Memory, Place, Seen
from tests.helpers.stories import queue


class YoungestFirst(EvictionPolicy):
    """The block that became free last leaves first; the memory counts releases."""

    def start(self, num_blocks: int) -> Memory:
        return (num_blocks,)

    def on_release(self, memory: Memory, block: Seen) -> tuple[Memory, Place]:
        del block
        return (memory[0] + 1,), (1, 2**40 - memory[0])


def serve(manager: KVCacheManager, name: str, tokens: Sequence[int]) -> None:
    """Compute a request and let its blocks be free."""
    manager.add_request(Request(name, tokens))
    hit = manager.get_computed_blocks(name)
    manager.allocate_slots(name, len(tokens) - hit.num_tokens, hit)
    manager.take_batch()
    manager.free(name)
    manager.remove_request(name)


def full(policy: EvictionPolicy) -> KVCacheManager:
    """Return a manager of four blocks, all of which have a key and are free."""
    manager = KVCacheManager(Config(5, 1, eviction=policy), "python")
    serve(manager, "a", [1, 2])
    serve(manager, "b", [3, 4])
    return manager


def test_a_policy_of_ones_own_says_which_block_leaves_first() -> None:
    manager = full(YoungestFirst())
    assert queue(manager) == [3, 4, 1, 2]
    serve(manager, "c", [5])
    assert queue(manager) == [3, 4, 1, 2]
    assert manager.num_free_blocks == 4


def test_the_compiled_twin_takes_no_policy_of_ones_own() -> None:
    for backend in ("rust", None):
        with pytest.raises(InvalidConfig, match="only on the backend 'python'"):
            KVCacheManager(Config(5, 1, eviction=YoungestFirst()), backend)


def test_bytes_of_a_state_hold_no_policy_of_ones_own() -> None:
    data = full(YoungestFirst()).encode()
    with pytest.raises(DamagedState):
        decode(data)


def raises(*_: Any) -> Any:
    """Return a hook that fails."""
    raise ZeroDivisionError("no rate yet")


WRONG: list[tuple[str, Any, str]] = [
    ("on_release", raises, "on_release raised ZeroDivisionError: no rate yet"),
    (
        "on_release",
        lambda memory, _: (memory, None),
        "on_release returns None, which is not a place",
    ),
    ("on_release", lambda memory, _: (memory, (0, 1)), "returns (0, 1), which is not a place"),
    ("on_release", lambda memory, _: (memory, (1, -1)), "returns (1, -1), which is not a place"),
    ("on_release", lambda memory, _: (memory, (1, 2**56)), "which is not a place"),
    (
        "on_release",
        lambda memory, _: (memory, (1, True)),
        "returns (1, True), which is not a place",
    ),
    ("on_release", lambda *_: 7, "on_release answers 7"),
    ("on_release", lambda *_: ("rate", (1, 1)), "on_release answers ('rate', (1, 1))"),
    ("take", raises, "take raised ZeroDivisionError: no rate yet"),
    ("take", lambda memory, _: (memory, 3, None), "take names section 3, which is empty"),
    ("take", lambda memory, _: (memory, None, None), "take names section None"),
    ("take", lambda *_: None, "take answers None"),
    ("on_use", raises, "on_use raised ZeroDivisionError: no rate yet"),
    ("on_use", lambda *_: None, "on_use answers None"),
    ("on_use", lambda *_: (-1,), "on_use answers (-1,)"),
    ("start", raises, "start raised ZeroDivisionError: no rate yet"),
]


@pytest.mark.parametrize(("hook", "answer", "message"), WRONG)
def test_a_wrong_policy_is_named_and_changes_nothing(hook: str, answer: Any, message: str) -> None:
    class Wrong(EvictionPolicy):
        remembers = True

    policy = Wrong()
    if hook == "start":
        Wrong.start = answer  # type: ignore[method-assign]
        with pytest.raises(PolicyFailed) as caught:
            full(policy)
        assert message in str(caught.value)
        return
    manager = full(policy)
    manager.add_request(Request("late", [9]))
    if hook == "on_release":
        manager.allocate_slots("late", 1)
        manager.take_batch()
    before = manager.encode()
    setattr(Wrong, hook, lambda _, *seen: answer(*seen))
    name, arguments = ("free", ()) if hook == "on_release" else ("allocate_slots", (1,))
    with pytest.raises(PolicyFailed) as caught:
        getattr(manager, name)("late", *arguments)
    assert message in str(caught.value)
    assert str(caught.value).startswith("policy Wrong: ")
    assert manager.encode() == before


def test_a_policy_that_never_lets_a_block_leave_costs_hits_alone() -> None:
    class Reluctant(EvictionPolicy):
        def take(self, memory: Memory, fronts: Sequence[Front]) -> tuple[Memory, int, Place | None]:
            return memory, fronts[0].section, (1, fronts[0].block.block)

    manager = full(Reluctant())
    serve(manager, "c", [5, 6, 7])
    assert manager.num_free_blocks == 4
