# SPDX-License-Identifier: Apache-2.0
"""The twin's bindings: Python's own values, errors and batches, from any thread."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest

from kvcore import Config, Hit, KVCacheBlocks, KVCacheManager, Request, _twin
from kvcore.backend import HANDED_ON, PythonBackend
from kvcore.transitions import QUERIES, TRANSITIONS
from kvcore.types.commands import COLUMNS, Batch
from kvcore.types.errors import KvcoreError
from kvcore.types.events import BlockRemoved, BlockStored
from kvcore.types.slot_request import DEFAULTS
from kvcore.types.values import Appended, PrefixCacheStats, Refused, Status, Verdict
from tests.conftest import need_twin

FAR = 10**30
"""Numbers beyond machine integers."""
WRONG_NAMES: tuple[Any, ...] = ("", "a", None, 3.5)
"""No new request has one of these ids."""


@pytest.fixture(autouse=True, scope="module")
def twin() -> None:
    """Skip the tests without the twin, or fail in CI."""
    need_twin()


@attrs.frozen
class Call:
    """A call of a manager."""

    name: str
    args: tuple[Any, ...]
    options: dict[str, Any]

    def __str__(self) -> str:
        options = [f"{name}={value!r}" for name, value in self.options.items()]
        return f"{self.name}({', '.join([*map(repr, self.args), *options])})"

    def on(self, manager: KVCacheManager) -> Any:
        """Return the value, or the error's class, fields and message; an error changes nothing."""
        before = manager.encode()
        try:
            return getattr(manager, self.name)(*self.args, **self.options)
        except KvcoreError as error:
            assert manager.encode() == before
            return type(error), error.fields, str(error)


def call(name: str, *args: Any, **options: Any) -> Call:
    """Return the call as a program would write it."""
    return Call(name, args, options)


def hit(*blocks: Any, num_tokens: Any) -> Hit:
    """Return a hit of one group, which may be wrong."""
    return Hit(KVCacheBlocks((blocks,)), num_tokens)


class Index:
    """An integer that is no int, as those of numpy and torch are."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value

    def __repr__(self) -> str:
        return f"Index({self.value})"


def story(backend: Any) -> KVCacheManager:
    """Let a run in blocks 1 and 2, b wait (it would hit block 1), c wait, d be swapped out."""
    config = Config(
        12, 2, num_host_blocks=4, enable_events=True, max_model_len=8, hash_seed=b"seed"
    )
    manager = KVCacheManager(config, backend)
    for request_id, tokens in {"a": [1, 2, 3], "b": [1, 2, 4], "c": [5], "d": [6, 7]}.items():
        manager.add_request(Request(request_id, tokens))
    manager.allocate_slots("a", 3)
    manager.allocate_slots("d", 2)
    manager.take_batch()
    manager.swap_out(["d"])
    return manager


WRONG_CALLS = [
    *(call("free", name) for name in ("x", "", None, 7, b"a", "it's", '"\n\x01\xad\u200b')),
    *(call("status", name) for name in ("", None, ("a",))),
    *(call("fork", "a", name) for name in ("", "b", None, 7)),
    *(call("fork", *names) for names in (("x", ""), (7, None), ("", None), ("d", "e"))),
    *(call("add_request", Request(name, [1])) for name in WRONG_NAMES),
    *(call("allocate_slots", "c", count) for count in (-1, 0, 2, 9, FAR, -FAR, 2**63)),
    *(call("can_allocate", "c", count) for count in (-1, 0, 2, 9, FAR, -FAR, -(2**63))),
    call("allocate_slots", "c", 1, num_lookahead_tokens=-FAR),
    call("allocate_slots", "c", FAR, num_external_computed_tokens=-1),
    call("allocate_slots", "c", FAR, num_external_computed_tokens=FAR),
    *(call("allocate_slots", name, -FAR) for name in ("x", "d")),
    *(call("allocate_slots", name, 1, hit(1, num_tokens=2)) for name in ("a", "c")),
    *(call("allocate_slots", "c", 1, hit(num_tokens=count)) for count in (2, FAR, -FAR)),
    *(call("allocate_slots", "b", 1, hit(id_, num_tokens=2)) for id_ in (2, 0, -1, FAR, "1", None)),
    *(call("allocate_slots", "b", 1, hit(1, num_tokens=count)) for count in (1, FAR, -FAR)),
    call("allocate_slots", "b", FAR, hit(FAR + 1, num_tokens=2)),
    call("allocate_slots", "b", 1, hit(1, 1, num_tokens=4)),
    *(call("pin", [1, block]) for block in (0, 12, -1, FAR, -FAR, "1", None, 9)),
    *(call("unpin", [block]) for block in (0, 1, -1, FAR)),
    call("unpin", [1, -FAR, FAR]),
    *(call("pin_prefix", name, "a", 2) for name in ("", None, 7, "\ud800")),
    *(call("pin_prefix", *names, 2) for names in ((7, None), ("p", ""), ("p", 7), ("p", "d"))),
    *(call("pin_prefix", "p", "a", count) for count in (0, -1, 1, -FAR, "1", None)),
    *(call("unpin_prefix", name) for name in ("", None, 7, "p")),
    *(call("evict_blocks", [1, block]) for block in (0, 12, FAR, "1")),
    *(call("truncate", "a", count) for count in (0, -1, 4, FAR, -FAR)),
    *(call("cache_blocks", "a", count) for count in (-1, 4, FAR, -FAR)),
    *(call("unschedule", "a", count) for count in (0, -1, 4, FAR, -FAR, "1", 1.0)),
    *(call("swap_out", names) for names in (["a", "a"], ["a", "", 7], ["a", 7, ""], ["c"])),
    *(call("swap_in", names) for names in (["d", "a"], [None])),
    *(call("append", names, [1, 2]) for names in (["a", 7], ["a", ""], ["a", "d"], ["a"])),
    call("append", ["a"] * 6, [1] * 6),
    *(call("append", ["a"], [1], batch=batch) for batch in (-1, FAR, "1")),
    *(call("append", names) for names in (["a", "a"], ["b"], ["x"])),
    *(call("add_tokens", "a", [1], num_rejected=count) for count in (-1, None, -FAR, "1")),
    *(call("add_tokens", "a", [1], batch=count) for count in (-1, FAR, -FAR, "1")),
    call("remove_request", "a"),
    call("restore", b"kvcore"),
    *(
        call("allocate_slots", "c", count)
        for count in ("1", None, 1.0, list[int](), Index(-1), Index(FAR))
    ),
    *(call("can_allocate", "c", 1, num_lookahead_tokens=count) for count in ("1", 1.0)),
    *(call("cache_blocks", "a", count) for count in ("1", 1.0)),
    *(call("truncate", "a", count) for count in ("1", 1.0)),
    *(
        call(name, [1, wrong])
        for wrong in (list[int](), Index(0), Index(FAR))
        for name in ("pin", "unpin", "evict_blocks")
    ),
    *(call("add_request", Request(name, [1])) for name in ("\ud800", "a\udfff")),
    *(call("fork", *names) for names in (("\ud800", "e"), ("a", "\ud800"))),
]


def test_both_backends_name_the_same_thing_and_numbers(subtests: pytest.Subtests) -> None:
    python, rust = story("python"), story("rust")
    for wrong in WRONG_CALLS:
        with subtests.test(str(wrong)):
            from_python, from_rust = wrong.on(python), wrong.on(rust)
            assert from_python == from_rust
            assert isinstance(from_rust, tuple), "a wrong call ends in an error"


RIGHT_CALLS = [
    call("add_request", Request("e", [1])),
    call("add_tokens", "a", [1]),
    call("remove_request", "c"),
    call("get_computed_blocks", "b"),
    call("get_computed_blocks", "c"),
    call("allocate_slots", "c", 1),
    call("allocate_slots", "c", True),
    call("allocate_slots", "b", 1, hit(1, num_tokens=2)),
    call("allocate_slots", "c", 1, num_lookahead_tokens=FAR),
    call("can_allocate", "c", 1, full_sequence_must_fit=1),
    call("append", ["a", "c"], [8, 9]),
    call("append", [], []),
    call("cache_blocks", "a", 3),
    call("free", "a"),
    call("fork", "a", "e"),
    call("truncate", "a", 2),
    call("swap_out", ["a"]),
    call("swap_in", ("d",)),
    call("pin", (1, 2, 1)),
    call("unpin", ()),
    call("evict_blocks", {1}),
    call("reset_prefix_cache"),
    call("advance_epoch"),
    call("advance_epoch", Index(3)),
    call("stale_requests"),
    call("allocate_slots", "c", Index(1), num_lookahead_tokens=Index(3)),
    call("allocate_slots", "b", 1, hit(Index(1), num_tokens=Index(2))),
    call("cache_blocks", "a", Index(3)),
    call("truncate", "a", Index(2)),
    call("pin", [Index(1)]),
    call("evict_blocks", [Index(1)]),
    *(call(name) for name in ("take_batch", "take_events", "take_stats", "encode", "state")),
    *(call(name, "a") for name in ("get_blocks", "get_block_ids", "get_num_common_prefix_blocks")),
    *(call(name, "a") for name in ("num_tokens", "num_computed_tokens", "get_row")),
    *(call("status", name) for name in ("a", "b", "d")),
]


def test_both_backends_give_the_same_objects_and_states(subtests: pytest.Subtests) -> None:
    for right in RIGHT_CALLS:
        python, rust = story("python"), story("rust")
        with subtests.test(str(right)):
            given, same = right.on(python), right.on(rust)
            assert given == same
            assert type(given) is type(same)
            assert python.encode() == rust.encode()
            assert python.epoch == rust.epoch
            assert python.num_free_blocks == rust.num_free_blocks
            assert python.num_cached_blocks == rust.num_cached_blocks
            assert python.num_free_host_blocks == rust.num_free_host_blocks


def test_refusals_and_verdicts_are_pythons_own() -> None:
    rust, python = story("rust"), story("python")
    for manager in (rust, python):
        for name in "efg":
            manager.add_request(Request(name, [1] * 8))
            manager.allocate_slots(name, 8)
        manager.take_batch()
    assert rust.can_allocate("g", 3) is Verdict.LATER
    assert rust.status("d") is Status.SWAPPED
    for requested in (call("allocate_slots", "g", 3), call("swap_out", ["e"])):
        refused = requested.on(rust)
        assert isinstance(refused, Refused)
        assert not refused
        assert refused == requested.on(python)
    assert rust.append(["a"], [1]) == python.append(["a"], [1]) == Appended(1)


def test_statistics_and_events_are_pythons_own() -> None:
    rust, python = story("rust"), story("python")
    for manager in (rust, python):
        manager.allocate_slots("b", 1, manager.get_computed_blocks("b"))
        manager.evict_blocks([1])
    assert rust.take_stats() == python.take_stats() == PrefixCacheStats(1, 3, 2)
    events = rust.take_events()
    assert events == python.take_events()
    assert {type(event) for event in events} == {BlockStored, BlockRemoved}
    assert rust.take_events() == []
    assert rust.take_stats() == PrefixCacheStats()


def test_the_twin_makes_no_int_of_a_block_that_nobody_reads() -> None:
    python, rust = (story(backend).get_blocks("a") for backend in ("python", "rust"))
    assert [type(ids) for ids in rust.groups] == [bytes]
    assert rust == python
    assert hash(rust) == hash(python)
    assert rust.blocks == python.blocks
    assert repr(rust) == repr(python)
    assert rust.new_empty() == python.new_empty() != rust


def test_calls_that_grow_nothing_share_one_empty_value() -> None:
    manager = story("rust")
    manager.add_tokens("a", [4, 5, 6])
    first, second = manager.allocate_slots("a", 1), manager.allocate_slots("a", 1)
    assert first == KVCacheBlocks(((),))
    assert second != first
    assert manager.allocate_slots("a", 1) is first


def test_batches_are_equal_column_by_column() -> None:
    python, rust = story("python"), story("rust")
    for manager in (python, rust):
        manager.swap_in(["d"])
        manager.fork("a", "e")
        manager.append(["a", "e"], [8, 8])
        manager.evict_blocks([1])
    mine, theirs = python.take_batch(), rust.take_batch()
    assert isinstance(theirs, Batch)
    assert isinstance(theirs.buffer, bytearray)
    assert isinstance(theirs.keys, bytes)
    for name in COLUMNS:
        assert theirs.column(name).tolist() == mine.column(name).tolist()
    assert (theirs.number, theirs.keys, list(theirs)) == (mine.number, mine.keys, list(mine))
    assert len({type(command) for command in theirs}) >= 6


NO_TOKENS = (-1, True, 2**32, 2**64 - 1, 2**64, FAR, -FAR, 1.0, "1", None, Index(-1), Index(FAR))


@pytest.mark.parametrize("wrong", NO_TOKENS, ids=str)
@pytest.mark.parametrize("kind", [list, tuple])
def test_what_is_no_token_is_named_with_its_place(wrong: Any, kind: type) -> None:
    requested = call("add_tokens", "a", kind([0, 2**32 - 1, Index(7), wrong, -2]))
    from_python, from_rust = requested.on(story("python")), requested.on(story("rust"))
    assert from_python == from_rust
    assert from_rust[1] == {"value": wrong, "position": 3, "least": 0}


def test_lists_of_ints_of_any_kind_are_read_as_such() -> None:
    class Number(int):
        """An int that is not exactly one."""

    given = [0, 1, 2**30 - 1, 2**30, 2**32 - 1, Number(7), Index(8)]
    for tokens in (given[:5], tuple(given[:5]), given, tuple(given), [2**31], []):
        python, rust = story("python"), story("rust")
        requested = call("add_drafts", "a", tokens)
        assert requested.on(python) == requested.on(rust)
        assert python.encode() == rust.encode()


@pytest.mark.parametrize("name", HANDED_ON)
def test_methods_that_are_the_twins_own_take_the_same_arguments(name: str) -> None:
    written = inspect.signature(getattr(KVCacheManager, name)).parameters.values()
    own = inspect.signature(getattr(story("rust"), name)).parameters.values()
    reported = [(each.name, each.kind, each.default) for each in written if each.name != "self"]
    assert [(each.name, each.kind, each.default) for each in own] == reported
    assert name not in vars(story("python"))


@pytest.mark.parametrize("name", [*TRANSITIONS, *QUERIES])
def test_a_call_takes_the_same_arguments_in_the_table_the_twin_and_the_manager(name: str) -> None:
    """Options are named, so the manager has them in the order that engines know (S000-01)."""
    table = names((TRANSITIONS | QUERIES)[name])
    twin, manager = type(_twin.make_backend(Config(8, 2))), getattr(KVCacheManager, name)
    assert names(getattr(twin, name)) == table
    kinds = [each.kind for each in inspect.signature(manager).parameters.values()][1:]
    num_in_order = sum(kind is not inspect.Parameter.KEYWORD_ONLY for kind in kinds)
    assert names(manager)[:num_in_order] == table[:num_in_order]
    assert sorted(names(manager)) == sorted(table)


def names(call: Callable[..., object]) -> list[str]:
    """Return the names of a call's arguments besides the state or the manager."""
    given = list(inspect.signature(call).parameters)[1:]
    return [*given[:-1], *DEFAULTS] if given[-1:] == ["options"] else given


def test_both_languages_have_the_same_methods() -> None:
    cores = PythonBackend(Config(8, 2)), _twin.make_backend(Config(8, 2))
    python, twin = ({name for name in dir(core) if name[0] != "_"} for core in cores)
    assert python - twin == {"state"}
    assert twin <= python


def test_what_a_subclass_overrides_stays_its_own() -> None:
    class Counting(KVCacheManager):
        """Counts the calls of `free`."""

        frees = 0

        def free(self, request_id: str) -> None:
            self.frees += 1
            super().free(request_id)

    manager = Counting(Config(8, 2), "rust")
    manager.add_request(Request("a", [1]))
    manager.free("a")
    assert manager.frees == 1
    assert manager.num_tokens(request_id="a") == 1


def test_arguments_may_ask_the_manager_while_they_are_read() -> None:
    manager = story("rust")

    def tokens() -> Iterator[int]:
        for _ in range(3):
            yield manager.num_tokens("a")

    manager.add_tokens("a", tokens())
    assert manager.num_tokens("a") == 6


def test_threads_take_turns() -> None:
    manager = KVCacheManager(Config(200, 2, hash_seed=b"seed"), "rust")
    wrong: list[BaseException] = []

    def drive(name: str) -> None:
        try:
            for turn in range(150):
                request_id = f"{name}{turn}"
                manager.add_request(Request(request_id, [turn, 1, 2]))
                blocks = manager.allocate_slots(request_id, 3)
                manager.add_tokens(request_id, [5])
                assert manager.get_blocks(request_id) == blocks
                manager.free(request_id)
                manager.remove_request(request_id)
        except BaseException as error:
            wrong.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=drive, args=(name,)) for name in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong
    assert manager.num_free_blocks == 199
    manager.check()
