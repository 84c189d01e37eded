# SPDX-License-Identifier: Apache-2.0
"""Calls as data, so that one and the same call can be made on a state and on a manager.

Rules: a call that misuses the core gives a `Misuse`, which compares by the error's type and fields.
Twin: none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from kvcore.manager import KVCacheManager
from kvcore.state.state import State
from kvcore.transitions import (
    allocate,
    batches,
    cancel,
    drain,
    fork,
    free,
    pins,
    publish,
    requests,
    rewind,
    swap,
    transfers,
    truncate,
    window,
)
from kvcore.types.errors import KvcoreError
from kvcore.types.values import Outcome

TRANSITIONS: dict[str, Callable[..., Outcome[State, Any]]] = {
    each.__name__: each
    for each in (
        *(requests.add_request, requests.add_tokens, requests.remove_request),
        *(requests.add_block_hashes, requests.add_drafts, requests.accept),
        *(allocate.allocate_slots, allocate.append, fork.fork, free.free, truncate.truncate),
        *(publish.cache_blocks, publish.evict_blocks, publish.reset_prefix_cache),
        *(swap.swap_out, swap.swap_in, pins.pin, pins.unpin),
        *(window.remove_skipped_blocks, rewind.rewind),
        *(transfers.store, transfers.load, transfers.complete_operation),
        *(batches.take_batch, batches.complete, cancel.cancel),
        *(drain.take_events, drain.take_stats),
        *(drain.take_new_block_ids, drain.new_step_starts),
    )
}


class Misuse(Struct, frozen=True, gc=False):
    """The typed error that a call raised."""

    error: str
    fields: dict[str, object]


class Call(Struct, frozen=True, gc=False):
    """A transition by name, with its arguments."""

    name: str
    args: tuple[Any, ...] = ()
    options: dict[str, Any] = {}

    def __str__(self) -> str:
        words = [repr(value) for value in self.args]
        words += [f"{name}={value!r}" for name, value in self.options.items()]
        return f"{self.name}({', '.join(words)})"


def perform(state: State, call: Call) -> Outcome[State, Any]:
    """Make a call on a state; misuse gives the state itself, no commands and a `Misuse`."""
    try:
        return TRANSITIONS[call.name](state, *call.args, **call.options)
    except KvcoreError as error:
        return Outcome(state, (), Misuse(type(error).__name__, error.fields))


def perform_on(manager: KVCacheManager, call: Call) -> Any:
    """Make a call on a manager; its value, or a `Misuse`."""
    try:
        return getattr(manager, call.name)(*call.args, **call.options)
    except KvcoreError as error:
        return Misuse(type(error).__name__, error.fields)
