# SPDX-License-Identifier: Apache-2.0
"""The messages for frequent misuse, and numbers whose `__index__` raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvcore import Config, Group, Hit, KVCacheBlocks, KVCacheManager, Request
from kvcore.errors import InvalidCount, InvalidToken, KvcoreError, UnknownBlock, WrongHit
from tests.conftest import Backend
from tests.helpers.stories import make, serve, unchanged

Misuse = Callable[[KVCacheManager], object]


def story(backend: Backend) -> KVCacheManager:
    """Cache ten tokens of "r"; "s" has the same tokens, "q" has others."""
    manager = make(backend, 12, num_host_blocks=9)
    serve(manager, "r", range(10))
    manager.add_request(Request("s", range(10)))
    manager.add_request(Request("q", range(50, 60)))
    return manager


TEXTS: list[tuple[Misuse, str]] = [
    (
        lambda m: m.truncate("r", 99),
        "request 'r' has 10 tokens and cannot be cut to 99: keep 1 to 10",
    ),
    (
        lambda _: Config(9, 2**31),
        "config block_size=2147483648: must be from 1 to 2147483647",
    ),
    (
        lambda m: m.allocate_slots("q", 2, m.get_computed_blocks("s")),
        "does not hold its key: the hit is of other tokens, or out of date; look up again",
    ),
    (lambda m: m.free(5), "request 5 is not known"),  # type: ignore[arg-type] # the misuse
    (
        lambda m: m.add_request(Request(5, [1])),  # type: ignore[arg-type] # the misuse
        "a request id must be a non-empty str, not 5",
    ),
    (
        lambda m: m.add_tokens("r", None),
        "tokens must be a list or a buffer of integers, not None",
    ),
    (lambda m: m.add_request(Request("r", [1])), "request 'r' is there already"),
    (lambda m: m.swap_out(["r", "r"]), "request 'r' is named twice in one call"),
    (
        lambda _: Config(9, groups="full"),  # type: ignore[arg-type] # the misuse
        "config groups='full': must be a tuple of Group",
    ),
    (
        lambda _: Config(9, groups=Group(4)),  # type: ignore[arg-type] # the misuse
        "must be a tuple of Group",
    ),
]


@pytest.mark.parametrize(("misuse", "text"), TEXTS, ids=[text for _, text in TEXTS])
def test_the_message_says_what_is_wrong(misuse: Misuse, text: str, backend: Backend) -> None:
    manager = story(backend)
    with pytest.raises(KvcoreError) as caught:
        misuse(manager)
    assert str(caught.value).endswith(text)


LONG: list[Misuse] = [
    lambda m: m.restore(bytearray(10**6)),
    lambda m: m.restore([0] * 10**5),  # type: ignore[arg-type] # the misuse
    lambda m: m.free("q" * 10**6),
    lambda m: m.append(["q" * 10**6], [1]),
    lambda m: m.add_tokens("r", ["t" * 10**6]),
    lambda m: m.evict_blocks(["b" * 10**6]),  # type: ignore[list-item] # the misuse
    lambda _: Config(10**4000, 2),
    lambda m: m.add_tokens("r", [10**5000]),  # too many digits for Python to show
]


@pytest.mark.parametrize("misuse", LONG)
def test_a_message_stays_short_whatever_it_is_about(misuse: Misuse, backend: Backend) -> None:
    manager = story(backend)
    with unchanged(manager), pytest.raises(KvcoreError) as caught:
        misuse(manager)
    assert len(str(caught.value)) < 400


class Faulty:
    """A number whose `__index__` raises."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def __index__(self) -> int:
        raise self.error

    def __repr__(self) -> str:
        return "a faulty number"


READERS: list[tuple[Callable[[KVCacheManager, Any], object], type[KvcoreError], str]] = [
    (lambda m, n: m.allocate_slots("q", n), InvalidCount, "value"),
    (lambda m, n: m.cache_blocks("r", n), InvalidCount, "value"),
    (lambda m, n: m.add_tokens("r", [1, n]), InvalidToken, "value"),
    (lambda m, n: m.append(["r"], [n]), InvalidToken, "value"),
    (lambda m, n: m.pin([n]), UnknownBlock, "block"),
    (lambda m, n: m.has_key(n), UnknownBlock, "block"),
]


@pytest.mark.parametrize("error", [RuntimeError, OverflowError, ValueError, TypeError])
def test_a_number_that_cannot_be_had_is_no_number(error: type[Exception], backend: Backend) -> None:
    for read, kind, field in READERS:
        manager, number = story(backend), Faulty(error)
        with unchanged(manager), pytest.raises(kind) as caught:
            read(manager, number)
        assert caught.value.fields[field] is number


def test_what_ends_a_program_is_not_caught(backend: Backend) -> None:
    for read, _, _ in READERS:
        manager = story(backend)
        with unchanged(manager), pytest.raises(KeyboardInterrupt):
            read(manager, Faulty(KeyboardInterrupt))


class Clearing:
    """A number that clears the list in which it is."""

    def __init__(self, owner: list[Any]) -> None:
        self.owner = owner

    def __index__(self) -> int:
        self.owner.clear()
        return 1


def test_a_list_that_a_number_in_it_clears_is_read_as_it_was(backend: Backend) -> None:
    manager, blocks = story(backend), list[Any]()
    blocks += [Clearing(blocks), 2, 3]
    found: Any = (blocks,)
    with unchanged(manager), pytest.raises(WrongHit) as caught:
        manager.allocate_slots("s", 1, Hit(KVCacheBlocks(found), 1))
    assert caught.value.fields["num_blocks"] == 3
