# SPDX-License-Identifier: Apache-2.0
"""Truncate: cut a request's tokens and chain (rejected drafts, rewritten history).

Invariants: a cut request leaves the open batch. Blocks past the cut are released and keep their
keys; the block that contains the cut keeps its key until it is written again (`allocate.py`).
Source: row 7 of kvcore/check/mutants/catalogue.py. Twin: rust/src/transitions/truncate.rs.
"""

from __future__ import annotations

from msgspec.structs import replace

from kvcore.state.state import State
from kvcore.state.transaction import Transaction, transition
from kvcore.state.waiting import settle_waiting
from kvcore.transitions.free import check_leaving, cut_tables, leave_open_batch
from kvcore.types.arguments import read_int
from kvcore.types.errors import BeyondRequest
from kvcore.types.values import Outcome


def truncate(state: State, request_id: str, num_tokens: int) -> Outcome[State, None]:
    """Keep the first num_tokens (at least one) of a request's tokens.

    Raises UnknownRequest, SwappedOut, LoadUnfinished, BeyondRequest, HitInOpenBatch.
    """

    def change(tx: Transaction) -> None:
        request = tx.idle(request_id)
        keep = read_int(num_tokens)
        if not isinstance(keep, int) or not 1 <= keep <= request.tokens.length:
            raise BeyondRequest(
                request=request_id, num_tokens=request.tokens.length, requested=keep
            )
        check_leaving(tx, [request])
        leave_open_batch(tx, request)
        cut_tables(tx, tx.request(request_id), keep)
        request = tx.request(request_id)
        num_hashed = keep // tx.config.hash_block_size
        cut = replace(
            request,
            tokens=request.tokens[:keep],
            block_hashes=request.block_hashes[:num_hashed],
            extra_keys=request.extra_keys.cut(keep, tx.config.hash_block_size),
        )
        tx.put(cut.awaiting_none(tx.batch.number))
        settle_waiting(tx, request_id)

    return transition(state, change)
