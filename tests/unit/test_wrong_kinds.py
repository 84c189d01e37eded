# SPDX-License-Identifier: Apache-2.0
"""Arguments of another kind than a call takes: named, with nothing changed, in both backends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvcore import Config, Hit, KVCacheManager, Request
from kvcore.errors import WrongArgument

Misuse = Callable[[Any], object]
NOTHING: Any = None

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
    (lambda m: m.restore(None), "data", "None"),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_a_wrong_kind_is_named_and_changes_nothing(number: int, backend: Any) -> None:
    misuse, name, value = WRONG[number]
    manager = KVCacheManager(Config(8, 2, num_host_blocks=2), backend)
    manager.add_request(Request("r", [1, 2, 3]))
    before = manager.encode()
    with pytest.raises(WrongArgument) as caught:
        misuse(manager)
    assert (caught.value.fields["name"], caught.value.fields["value"]) == (name, value)
    assert f"{name} must be a " in str(caught.value)
    assert manager.encode() == before


def test_a_manager_is_made_of_a_config(backend: Any) -> None:
    with pytest.raises(WrongArgument, match="config must be a Config, not 8"):
        KVCacheManager(8, backend)  # type: ignore[arg-type] # the mistake under test


def test_a_manager_shows_its_backend_and_room(backend: Any) -> None:
    manager = KVCacheManager(Config(8, 2), backend)
    manager.add_request(Request("r", [1, 2, 3]))
    manager.allocate_slots("r", 3)
    assert repr(manager) == f"<KVCacheManager {backend}: 5 of 7 blocks free>"
