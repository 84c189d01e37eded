# SPDX-License-Identifier: Apache-2.0
"""The first manager with prefix caching, where an engine asked nothing for some tokens."""

from __future__ import annotations

import pytest

from kvcore.legacy.early_v1 import KVCacheBlock, KVCacheManager, Request
from tests.conftest import Backend


def ids(blocks: list[KVCacheBlock]) -> list[int]:
    """The numbers of blocks."""
    return [block.block_id for block in blocks]


@pytest.mark.seed("S004-09")
def test_what_was_filled_without_a_call_is_cached_with_the_next_block(backend: Backend) -> None:
    manager = KVCacheManager(2, 10, num_preallocate_tokens=4, backend=backend)
    request = Request("a", [0])
    assert ids(manager.allocate_slots(request, 1, []) or []) == [0, 1, 2]
    request.append_output_token_ids([1, 2])
    request.num_computed_tokens = 2  # the engine asked nothing for token 1, which had room
    assert manager.append_slots(request, 1) == []
    assert manager.block_pool[0].block_hash is None, "nothing was filled"
    request.append_output_token_ids(3)
    request.num_computed_tokens = 3
    assert manager.append_slots(request, 1) == []
    assert ids(manager.get_computed_blocks(request)) == [0, 1]
    manager.check()
