# SPDX-License-Identifier: Apache-2.0
"""Seeded bugs of hashes of the engine's own, which come later than the blocks that they are of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from kvcore.check.mutants.seeding import Patcher, after, mutant, put
from kvcore.check.mutants.worlds import world
from kvcore.check.profiles.hashes import HANDED_IN, OWN
from kvcore.state.state import RequestState
from kvcore.state.transaction import Transaction
from kvcore.transitions import allocate, requests
from kvcore.transitions.publish import publish_blocks

CUT = world(
    *(2, 2, 3, HANDED_IN, "truncate"),
    without=("fork", "free", "remove_request", "reset_prefix_cache"),
    **OWN,
)


@mutant("hashes", "REQ-HASH", "HASH-INJ", rows=(7,), shows=CUT)
def m_truncate_keeps_own_hashes(patcher: Patcher) -> None:
    """A cut request keeps the hashes that its engine handed in for what was cut."""

    def keep(before: Any, cut: Any, name: str) -> Any:
        request = before.requests[name]
        hashes = (request if request.own_hashes else cut.requests[name]).block_hashes
        return put(cut, replace(cut.requests[name], block_hashes=hashes))

    after(patcher, "truncate", keep)


@mutant("hashes", "PUBLISHED", costs="a block whose hash comes late is never published")
def m_block_without_hash_counts_as_published(patcher: Patcher) -> None:
    """A full block counts as published though the engine has yet to hand in its hash."""

    @patcher.around(allocate, "publish_blocks")
    def publish_all(publish: Any, tx: Transaction, request: RequestState, num_tokens: int) -> None:
        publish(tx, request, num_tokens)
        done = tx.request(request.request_id)
        full = [num_tokens // group.block_size for group in tx.config.groups]
        tx.put(replace(done, num_cached=tuple(map(max, done.num_cached, full))))


@mutant("hashes-flight", "CACHE-KV")
def m_hash_publishes_what_is_in_flight(patcher: Patcher) -> None:
    """A hash publishes its block when it is handed in, though the block is yet to be written."""

    @patcher.around(requests, "extend_hashes")
    def publish_at_once(
        extend: Any, tx: Transaction, request: RequestState, hashes: Sequence[bytes]
    ) -> RequestState:
        longer: RequestState = extend(tx, request, hashes)
        if any(request.tables):
            tx.put(longer)
            publish_blocks(tx, longer, longer.num_accepted, final=True)
            longer = tx.request(request.request_id)
        return longer
