# SPDX-License-Identifier: Apache-2.0
"""A child of a fork inherits its parent's wishes, also for blocks that only the child computed."""

from __future__ import annotations

from kvcore import (
    Config,
    KVCacheManager,
    KvCacheRetentionConfig,
    Request,
    TokenRangeRetentionConfig,
)
from tests.conftest import Backend

KEPT_PROMPT_SHORT_ANSWER = KvCacheRetentionConfig(
    [TokenRangeRetentionConfig(0, None, priority=80)], decode_retention_priority=0
)


def serve(manager: KVCacheManager, request: Request) -> int:
    """Compute a prompt in one batch. Returns the tokens found."""
    manager.add_request(request)
    hit = manager.get_computed_blocks(request.request_id)
    num_tokens = manager.num_tokens(request.request_id) - hit.num_tokens
    assert manager.allocate_slots(request.request_id, num_tokens, hit)
    manager.take_batch()
    return hit.num_tokens


def test_a_childs_answer_leaves_before_older_content_as_its_parent_wished(
    backend: Backend,
) -> None:
    manager = KVCacheManager(Config(6, 2, eviction="retention", hash_seed=b"seed"), backend=backend)
    serve(manager, Request("older", [5, 6]))
    manager.free("older")
    serve(manager, Request("parent", [1, 2], retention=KEPT_PROMPT_SHORT_ANSWER))
    manager.fork("parent", "child")
    for token in (3, 4, 7):
        manager.append(["child"], [token])
        manager.take_batch()
    manager.free("child")  # the block of 3 and 4 is cached at level 0, that of 7 is empty
    serve(manager, Request("newer", [8, 8, 8, 8, 8, 8]))  # the two empty blocks, and one cached
    manager.free("newer")
    assert serve(manager, Request("again", [5, 6, 9])) == 2
