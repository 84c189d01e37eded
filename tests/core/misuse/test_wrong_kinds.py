# SPDX-License-Identifier: Apache-2.0
"""Arguments of another kind than a call takes: named, with nothing changed, in both backends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvcore import (
    AllBlocksCleared,
    Config,
    Group,
    Hit,
    KVCacheBlocks,
    KVCacheManager,
    LoRA,
    Request,
    make_state,
)
from kvcore.codec.event_msgpack import encode_events
from kvcore.types.errors import (
    InvalidConfig,
    InvalidCount,
    InvalidExtraKey,
    InvalidToken,
    WrongArgument,
)

Misuse = Callable[..., object]
NOTHING: Any = None
FIVE: Any = 5
BYTES: Any = b"h"
NO_ITEMS: Any = np.array(1)
NO_TRUTH: Any = np.array([1, 2])
ONE_TRUTH: Any = np.array([1])
NO_SCALAR: Any = np.array([True])
NUMPY: Any = ((np.int64, 8), (np.uint8, 2), (np.int16, 1))


class Faulty:
    """An object that raises an error of its own for every use."""

    def __bool__(self) -> bool:
        raise RuntimeError

    def __index__(self) -> int:
        raise RuntimeError

    def __repr__(self) -> str:
        return "Faulty()"


FAULTY: Any = Faulty()

WRONG: list[tuple[Misuse, str, str]] = [
    (lambda m: m.add_request("n"), "request", "'n'"),
    (lambda m: m.allocate_slots("r", 1, "hit"), "hit", "'hit'"),
    (lambda m: m.allocate_slots("r", 1, ([], 0)), "hit", "([], 0)"),
    (lambda m: m.can_allocate("r", 1, 7), "hit", "7"),
    (lambda m: m.allocate_slots("r", 1, Hit(NOTHING, 0)), "hit.blocks", "None"),
    (lambda m: m.swap_out("r"), "request_ids", "'r'"),
    (lambda m: m.swap_in(None), "request_ids", "None"),
    (lambda m: m.pin(1), "block_ids", "1"),
    (lambda m: m.unpin("1"), "block_ids", "'1'"),
    (lambda m: m.evict_blocks(b"1"), "block_ids", "b'1'"),
    (lambda m: m.append("r", [1]), "requests", "'r'"),
    (lambda m: m.append(None, [1]), "requests", "None"),
    (lambda m: m.append(FIVE, [1]), "requests", "5"),
    (lambda m: m.append({"r": 1}, [1]), "requests", "{'r': 1}"),
    (lambda m: m.append(["r"], FIVE), "tokens", "5"),
    (lambda m: m.append(["r"], "text"), "tokens", "'text'"),
    (lambda m: m.add_tokens("r", FIVE), "tokens", "5"),
    (lambda m: m.add_drafts("r", {1}), "tokens", "{1}"),
    (lambda m: m.add_request(Request("n", NOTHING)), "tokens", "None"),
    (lambda m: m.restore(None), "data", "None"),
    (lambda m: m.add_request(Request("n", [1], block_hashes=FIVE)), "block_hashes", "5"),
    (lambda m: m.add_request(Request("n", [1], block_hashes=NO_ITEMS)), "block_hashes", "array(1)"),
    (lambda m: m.add_request(Request("n", [1], block_hashes=BYTES)), "block_hashes", "b'h'"),
    (lambda m: m.add_block_hashes("r", NO_ITEMS), "hashes", "array(1)"),
    (lambda m: m.add_block_hashes("r", FIVE), "hashes", "5"),
    (lambda m: m.allocate_slots("r", 1, Hit(KVCacheBlocks(FIVE), 1)), "hit.blocks.blocks", "5"),
    (lambda m: m.load("r", 1, Hit(KVCacheBlocks((FIVE,)), 1)), "hit.blocks.blocks", "(5,)"),
    (
        lambda m: m.allocate_slots("r", 1, Hit(KVCacheBlocks((b"five!",)), 1)),
        "hit.blocks.blocks",
        "(b'five!',)",
    ),
    (lambda m: m.swap_in(NO_ITEMS), "request_ids", "array(1)"),
    (lambda m: m.rewind(NO_ITEMS, 0), "request_ids", "array(1)"),
    (lambda m: m.store(NO_ITEMS), "block_ids", "array(1)"),
]
FLAGS: list[tuple[Misuse, str]] = [
    (lambda m, flag: m.complete_operation(0, flag), "done"),
    (lambda m, flag: m.allocate_slots("?", -1, delay_cache_blocks=flag), "delay_cache_blocks"),
    (
        lambda m, flag: m.allocate_slots("?", -1, full_sequence_must_fit=flag),
        "full_sequence_must_fit",
    ),
    (lambda m, flag: m.can_allocate("?", -1, delay_cache_blocks=flag), "delay_cache_blocks"),
    (
        lambda m, flag: m.can_allocate("?", -1, full_sequence_must_fit=flag),
        "full_sequence_must_fit",
    ),
    (lambda m, flag: m.load("?", -1, full_sequence_must_fit=flag), "full_sequence_must_fit"),
    (
        lambda m, flag: m.add_request(Request("n", [], skip_reading_prefix_cache=flag)),
        "skip_reading_prefix_cache",
    ),
]


def test_a_wrong_kind_is_named_and_changes_nothing(backend: Any, subtests: pytest.Subtests) -> None:
    manager = KVCacheManager(Config(8, 2, num_host_blocks=2), backend)
    manager.add_request(Request("r", [1, 2, 3]))
    before = manager.encode()
    for number, (misuse, name, value) in enumerate(WRONG):
        with subtests.test(f"row {number}: {name}={value}"):
            with pytest.raises(WrongArgument) as caught:
                misuse(manager)
            shown = repr(caught.value.fields["value"])
            assert (caught.value.fields["name"], shown) == (name, value)
            assert f"{name} must be a " in str(caught.value)
            assert manager.encode() == before


def test_the_errors_of_lists_say_what_they_must_hold(backend: Any) -> None:
    manager = KVCacheManager(Config(8, 2), backend)
    with pytest.raises(WrongArgument, match="hashes must be a list of hashes, not 5"):
        manager.add_block_hashes("r", FIVE)
    with pytest.raises(WrongArgument, match="tokens must be a list or a buffer of integers, not 5"):
        manager.append([], FIVE)
    with pytest.raises(WrongArgument, match="requests must be a list of ids or a buffer of rows, "):
        manager.append(FIVE, FIVE)


@pytest.mark.parametrize(
    "flag", [NO_TRUTH, FAULTY, "yes", 1, 0, None, ONE_TRUTH, NO_SCALAR], ids=repr
)
def test_a_flag_that_is_no_bool_is_named_first(
    flag: Any, backend: Any, subtests: pytest.Subtests
) -> None:
    manager = KVCacheManager(Config(8, 2), backend)
    before = manager.encode()
    for number, (misuse, name) in enumerate(FLAGS):
        with subtests.test(f"row {number}: {name}"):
            with pytest.raises(WrongArgument) as caught:
                misuse(manager, flag)
            assert caught.value.fields == {"name": name, "expected": "a bool", "value": flag}
            assert manager.encode() == before


@pytest.mark.parametrize("true", [np.True_, np.array(True)], ids=repr)
def test_a_flag_of_numpy_is_a_flag(true: Any, backend: Any) -> None:
    eight, two, one = (kind(number) for kind, number in NUMPY)
    config = Config(eight, two, num_host_blocks=one, enable_events=true)
    assert config == Config(8, 2, num_host_blocks=1, enable_events=True)
    assert (type(config.num_blocks), type(config.enable_events)) == (int, bool)
    windowed = Group(eight, kind="sliding_window", window=two, eagle=true)
    assert windowed == Group(8, kind="sliding_window", window=2, eagle=True)
    manager = KVCacheManager(config, backend)
    manager.add_request(Request("r", [1, 2, 3], skip_reading_prefix_cache=true))
    assert manager.allocate_slots("r", 2, delay_cache_blocks=true)
    manager.take_batch()
    assert not manager.has_key(manager.get_block_ids("r")[0][0])
    assert not manager.allocate_slots("r", 1, full_sequence_must_fit=true, reserved_blocks=9)
    manager.free("r")
    (operation,) = manager.load("r", 2, full_sequence_must_fit=true) or ()
    manager.take_batch()
    manager.complete_operation(operation, true)
    assert manager.num_computed_tokens("r") == 2


def test_a_number_that_raises_is_no_number(backend: Any) -> None:
    manager = KVCacheManager(Config(8, 2), backend)
    manager.add_request(Request("r", [1, 2, 3]))
    before = manager.encode()
    with pytest.raises(
        InvalidCount, match=r"num_new_tokens is Faulty\(\), must be an integer of at least 0"
    ):
        manager.allocate_slots("r", FAULTY)
    with pytest.raises(InvalidToken, match=r"token Faulty\(\) at position 0"):
        manager.add_tokens("r", [FAULTY])
    assert manager.encode() == before


@pytest.mark.parametrize("wrong", [FIVE, NO_TRUTH, FAULTY, "x", (FIVE,)])
@pytest.mark.parametrize("name", ["groups", "eviction", "duplicates", "hashing", "publish"])
def test_an_option_of_another_kind_is_named(name: str, wrong: Any) -> None:
    with pytest.raises(InvalidConfig) as caught:
        Config(8, 2, **{name: wrong})
    assert (caught.value.fields["field"], caught.value.fields["value"]) == (name, wrong)


def test_parts_of_another_kind_are_named() -> None:
    with pytest.raises(InvalidConfig, match=r"kind=array"):
        Group(2, kind=NO_TRUTH)
    with pytest.raises(InvalidExtraKey, match=r"the path of a LoRA adapter"):
        LoRA("a", NO_TRUTH)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *[("events", wrong) for wrong in (FIVE, "x", [FIVE], NO_ITEMS)],
        *[("timestamp", wrong) for wrong in (None, "x", NO_TRUTH)],
        *[("data_parallel_rank", wrong) for wrong in (-1, 2**64, "x", 0.5)],
        *[("groups", wrong) for wrong in (FIVE, "x", [FIVE], NO_ITEMS)],
        *[("form", wrong) for wrong in (FIVE, "x", NO_TRUTH)],
        *[("whole_hashes", wrong) for wrong in (NO_TRUTH, FAULTY, 1, "yes")],
    ],
)
def test_what_cannot_be_sent_is_named(name: str, wrong: Any) -> None:
    arguments: dict[str, Any] = {"events": [AllBlocksCleared()], "timestamp": 0.0, name: wrong}
    with pytest.raises(WrongArgument) as caught:
        encode_events(**arguments)
    assert caught.value.fields["name"] == name
    reported = caught.value.fields["value"]
    assert reported is wrong or reported == wrong


def test_a_state_is_made_of_a_config() -> None:
    with pytest.raises(WrongArgument, match="config must be a Config, not 5"):
        make_state(FIVE)


def test_a_manager_is_made_of_a_config(backend: Any) -> None:
    with pytest.raises(WrongArgument, match="config must be a Config, not 8"):
        KVCacheManager(8, backend)  # type: ignore[arg-type] # the mistake under test


def test_a_manager_shows_its_backend_and_room(backend: Any) -> None:
    manager = KVCacheManager(Config(8, 2), backend)
    manager.add_request(Request("r", [1, 2, 3]))
    manager.allocate_slots("r", 3)
    assert repr(manager) == f"<KVCacheManager {backend}: 5 of 7 blocks free>"
