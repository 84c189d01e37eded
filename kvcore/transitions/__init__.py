# SPDX-License-Identifier: Apache-2.0
"""All calls of an engine on the core, in one table.

The methods of the Python backend, those that a manager takes over from the twin, calls as data, the
form of calls in a record and text traces are made from this table. Why: a new argument of a
transition is written in the transition, its twin, the twin's binding and the manager's method, and
nowhere else. Code that makes calls, such as the checker's moves, passes it only where it is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvcore.state.state import State
from kvcore.transitions import (
    allocate,
    append,
    batches,
    cancel,
    drain,
    epochs,
    fork,
    free,
    pins,
    publish,
    queries,
    requests,
    retention,
    rewind,
    swap,
    transfers,
    truncate,
    unschedule,
    window,
)
from kvcore.transitions.queries import find_request
from kvcore.types.values import Outcome

TRANSITIONS: dict[str, Callable[..., Outcome[State, Any]]] = {
    each.__name__: each
    for each in (
        *(requests.add_request, requests.add_tokens, requests.remove_request),
        *(requests.add_block_hashes, requests.add_drafts, requests.accept),
        *(allocate.allocate_slots, append.append, fork.fork, free.free, truncate.truncate),
        *(publish.cache_blocks, publish.evict_blocks, publish.reset_prefix_cache),
        *(swap.swap_out, swap.swap_in, pins.pin, pins.unpin),
        *(window.remove_skipped_blocks, rewind.rewind, unschedule.unschedule),
        *(transfers.store, transfers.load, transfers.complete_operation),
        *(batches.take_batch, batches.complete, cancel.cancel),
        *(drain.take_events, drain.take_stats, drain.take_new_block_ids, epochs.advance_epoch),
        *(retention.tick, retention.extend_retention, pins.pin_prefix, pins.unpin_prefix),
    )
}
"""Each takes a state and returns the next one, with commands and a value. A new one goes last: its
place is its number in records.
"""

QUERIES: dict[str, Callable[..., Any]] = {
    each.__name__: each
    for each in (
        *(queries.get_computed_blocks, allocate.can_allocate, queries.get_blocks),
        *(queries.get_block_key, queries.get_block_keys, queries.get_cached_block),
        *(queries.get_num_common_prefix_blocks, queries.has_key, queries.num_owners),
        *(epochs.stale_requests, queries.checkpoint_stop),
    )
} | {
    "num_tokens": lambda state, request_id: find_request(state, request_id).tokens.length,
    "num_output_placeholders": lambda state, request_id: (
        find_request(state, request_id).num_output_placeholders
    ),
    "num_draft_tokens": lambda state, request_id: len(find_request(state, request_id).drafts),
    "num_computed_tokens": lambda state, request_id: find_request(state, request_id).num_computed,
    "get_row": lambda state, request_id: find_request(state, request_id).row,
    "status": lambda state, request_id: find_request(state, request_id).status,
}
"""Each takes a state, returns a value and changes nothing."""


def arguments(name: str) -> tuple[str, ...]:
    """Return the names of a call's arguments besides the state, in order."""
    code = (TRANSITIONS | QUERIES)[name].__code__
    names: tuple[str, ...] = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
    return names
